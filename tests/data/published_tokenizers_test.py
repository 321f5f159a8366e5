"""Directories of tokenizers give the ids, texts and prompts of transformers."""

import itertools
import json
import pathlib
import sys

import pytest
import tokenizers as library
from tokenizers import decoders
from tokenizers import models
from tokenizers import normalizers
from tokenizers import pre_tokenizers
from tokenizers import processors
import transformers

import specjax as sj
from specjax.data import Tokenizer
from specjax.models import export_pretrained
from specjax.models import load_pretrained

sys.path.append(str(pathlib.Path(__file__).parents[2] / "experiments"))

from lib.prompts import reading  # noqa: E402
from lib.prompts import streaming  # noqa: E402

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_SPECIAL = ("<s>", "</s>", "<unk>", "<pad>", "<|im_end|>")
_TEXTS = ["hi", " two  spaces \n", "caf\u00e9 \u6f22 \U0001f600",
          "a<think>b", "in K\u00f6ln m\u1ed9t \u0111\u00eam", "x </s> y"]
_CHATML = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
           "<|im_end|>\n{% endfor %}")
_NAMES = ("{{ bos_token }}{{ messages[0].content }}{{ pad_token }}"
          "{% if unk_token %}{{ unk_token }}{% endif %}{{ sep_token }}"
          "{{ mask_token }}{{ cls_token }}{{ eos_token }}")


def _byte_level():
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  found = library.Tokenizer(models.BPE(
      vocab={text: i for i, text in enumerate([*_SPECIAL, *alphabet, "hi"])},
      merges=[("h", "i")]))
  found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  found.decoder = decoders.ByteLevel()
  return found


def _sentence_piece(prefix=True):
  tokens = [*_SPECIAL, *(f"<0x{i:02X}>" for i in range(256)), "\u2581",
            *_LETTERS, "hi", "\u2581hi"]
  found = library.Tokenizer(models.BPE(
      vocab={text: i for i, text in enumerate(tokens)},
      merges=[("h", "i"), ("\u2581", "hi")], unk_token="<unk>", fuse_unk=True,
      byte_fallback=True))
  steps = [normalizers.Prepend("\u2581")] * prefix
  found.normalizer = normalizers.Sequence(
      [*steps, normalizers.Replace(" ", "\u2581")])
  found.decoder = decoders.Sequence([
      decoders.Replace("\u2581", " "), decoders.ByteFallback(),
      decoders.Fuse(), *[decoders.Strip(" ", 1, 0)] * prefix])
  return found


def _unigram():
  pieces = [*_SPECIAL, "\u2581", *_LETTERS, "\u2581hi", "hi"]
  found = library.Tokenizer(models.Unigram(
      [(piece, -1.0 - i / 9) for i, piece in enumerate(pieces)], unk_id=2))
  found.pre_tokenizer = pre_tokenizers.Metaspace()
  found.decoder = decoders.Metaspace()
  return found


def _word_piece():
  words = [*_SPECIAL, "[UNK]", "[CLS]", "[SEP]", *_LETTERS,
           *(f"##{x}" for x in _LETTERS), "hi", ".", "'"]
  found = library.Tokenizer(models.WordPiece(
      {word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
  found.normalizer = normalizers.BertNormalizer()
  found.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
  found.decoder = decoders.WordPiece()
  found.post_processor = processors.TemplateProcessing(
      single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 6), ("[SEP]", 7)])
  return found


_KINDS = {"bytes": _byte_level, "pieces": _sentence_piece,
          "no prefix": lambda: _sentence_piece(False), "unigram": _unigram,
          "words": _word_piece}
_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
_FLAGS = dict(lstrip=False, rstrip=False, normalized=False, single_word=False)


def _think(**flags):
  """Adds `<think>` with flags, in the key added_tokens_decoder."""
  return lambda size: {"added_tokens_decoder": {
      str(size): {"content": "<think>", "special": False, **_FLAGS, **flags}}}


# By name: the kind of tokenizer; tokenizer_config.json, or a function of the
# vocabulary size that returns it; other files.
_CASES = {
    **{f"{kind}, nothing": (kind, {}, {}) for kind in _KINDS},
    **{f"{kind}, {cls}": (kind, {"tokenizer_class": cls, **_TOKENS}, {})
       for kind, cls in itertools.product(
           ("bytes", "pieces"), ("PreTrainedTokenizerFast", "LlamaTokenizer",
                                 "GPT2Tokenizer", "Qwen2Tokenizer"))
       if (kind, cls) not in (("pieces", "GPT2Tokenizer"),
                              ("pieces", "Qwen2Tokenizer"))},
    **{f"prefix space {value}, {cls}": (
        kind, {"tokenizer_class": cls, "add_prefix_space": value, **_TOKENS},
        {}) for kind, cls, value in (
            ("bytes", "GPT2Tokenizer", True), ("bytes", "GPT2Tokenizer", False),
            ("pieces", "LlamaTokenizer", True),
            ("pieces", "LlamaTokenizer", False))},
    **{f"{kind}, <think> {name}": (kind, make, {}) for kind in (
        "bytes", "pieces", "unigram") for name, make in (
            ("plain", _think()), ("special", _think(special=True)),
            ("strips", _think(lstrip=True, rstrip=True)))},
    "added_tokens.json": ("bytes", {}, {"added_tokens.json": {"<think>": 262}}),
    "K\u00f6ln": ("bytes", lambda size: {"added_tokens_decoder": {
        str(size): {"content": "K\u00f6ln", "special": False, **_FLAGS},
        str(size + 1): {"content": "\u0111\u00eam", "special": False, **_FLAGS}
    }}, {}),
    "names": ("bytes", {**_TOKENS, "pad_token": "<pad>", "unk_token": "<unk>",
                        "sep_token": "<s>", "chat_template": _NAMES}, {}),
    "names in the map": ("bytes", {"chat_template": _NAMES}, {
        "special_tokens_map.json": {
            **_TOKENS, "mask_token": "<pad>", "cls_token": "<s>",
            "pad_token": {"content": "<pad>", **_FLAGS}}}),
    "named by the publisher": ("bytes", {
        **_TOKENS, "extra_special_tokens": {"turn_token": "<pad>"},
        "chat_template": "{{ turn_token }}{{ messages[0].content }}"}, {}),
    "extra tokens": ("bytes", {
        **_TOKENS, "extra_special_tokens": ["<|im_start|>"],
        "chat_template": _CHATML}, {}),
    "additional tokens": ("bytes", {
        **_TOKENS, "additional_special_tokens": ["<|im_start|>"],
        "chat_template": _CHATML}, {}),
    **{f"end {i}": ("bytes", {"bos_token": "<s>", **config}, {
        "special_tokens_map.json": {"eos_token": value}})
       for i, (config, value) in enumerate((
           ({"eos_token": "</s>"}, "<|im_end|>"),
           ({"eos_token": None}, "<|im_end|>"), ({"eos_token": "</s>"}, None),
           ({}, "<|im_end|>")))},
    "jinja file": ("bytes", {**_TOKENS, "chat_template": "old"}, {
        "chat_template.jinja": _CHATML}),
    "named templates": ("bytes", {**_TOKENS, "chat_template": [
        {"name": "tools", "template": "t"},
        {"name": "default", "template": _NAMES}]}, {}),
    "reasoning": ("bytes", {**_TOKENS, "chat_template": (
        "{{ messages[1].reasoning_content }}{{ messages[1].content }}")}, {}),
    "adds bos": ("bytes", {**_TOKENS, "add_bos_token": True}, {}),
    "class of the model": ("bytes", None, {
        "config.json": {"model_type": "gpt2"}}),
}


def _directory(path, kind, config, files):
  path.mkdir()
  backend = _KINDS[kind]()
  backend.add_special_tokens(list(_SPECIAL))
  if kind == "words":
    backend.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
  backend.save(str(path / "tokenizer.json"))
  if callable(config):
    config = _TOKENS | config(backend.get_vocab_size())
  if config is not None:
    files = {"tokenizer_config.json": config, **files}
  for name, value in files.items():
    (path / name).write_text(
        value if isinstance(value, str) else json.dumps(value))
  return path


def _theirs(path):
  return transformers.AutoTokenizer.from_pretrained(path)


def _printed(tokenizer, ids, step):
  """Prints tokens in rounds of `step` tokens, and returns the text."""
  printer = streaming.Printer(tokenizer, False)
  for i in range(0, len(ids), step):
    printer.round(ids[i:i + step], 0)
  printer.end()
  return printer.text


@pytest.mark.parametrize("name", _CASES)
def test_ids_and_texts_are_those_of_transformers(name, tmp_path, capsys):
  # Broken: a model reads other tokens than in training, or its answer is
  # printed as another text than it wrote.
  path = _directory(tmp_path / "model", *_CASES[name])
  tokenizer, theirs = Tokenizer.load(path), _theirs(path)
  theirs.backend_tokenizer.encode_special_tokens = True
  assert tokenizer.eos == theirs.eos_token_id
  assert tokenizer.vocab_size == len(theirs)
  assert tokenizer.backend.get_vocab() == theirs.get_vocab()
  for text in _TEXTS:
    expected = theirs.encode(text, add_special_tokens=False)
    ids = tokenizer.encode(text, bos=False)
    if tokenizer.control_tokens.keys().isdisjoint(expected):
      assert ids == expected
    written = tokenizer.decode(ids)
    assert "\ufffd" in written or name == "K\u00f6ln" or (
        written == theirs.decode(ids, skip_special_tokens=True))
    if tokenizer.control_tokens.keys().isdisjoint(ids):
      assert tokenizer.adds_bos == (
          theirs.encode(text)[:1] == [tokenizer.bos] != ids[:1])
    capsys.readouterr()
    for step in (1, 3):
      assert _printed(tokenizer, ids, step) == written
      assert capsys.readouterr().out == written
  if theirs.chat_template is not None:
    theirs.backend_tokenizer.encode_special_tokens = False
    messages = [{"role": "user", "content": "hi"},
                {"role": "assistant", "content": "ih", "reasoning": "why"}]
    assert tokenizer.chat(messages) == theirs.apply_chat_template(
        messages, add_generation_prompt=True)["input_ids"]


@pytest.mark.parametrize("name", [
    "names", "extra tokens", "bytes, <think> special", "pieces, LlamaTokenizer",
    "words, nothing"])
def test_an_export_is_read_back(name, tmp_path):
  # Broken: a model that was loaded, exported and loaded by transformers reads
  # other tokens, or its template lacks names.
  path = _directory(tmp_path / "model", *_CASES[name])
  tokenizer = Tokenizer.load(path)
  pair = sj.testing.tiny_pair(vocab_size=tokenizer.vocab_size)
  export_pretrained(tmp_path / "out", pair.target, pair.params["target"],
                    tokenizer=tokenizer)
  before, after = _theirs(path), _theirs(tmp_path / "out")
  assert after.special_tokens_map == before.special_tokens_map
  assert after.get_vocab() == before.get_vocab()
  assert after.model_max_length == pair.target.context_length
  messages = [{"role": "user", "content": "hi"}]
  for text in _TEXTS:
    ids = before.encode(text)
    assert after.encode(text) == ids
    assert after.decode(ids) == before.decode(ids)
  if before.chat_template:
    assert after.apply_chat_template(messages) == before.apply_chat_template(
        messages)
  again = load_pretrained(tmp_path / "out").tokenizer
  assert again.same_tokens(tokenizer) and again.names == tokenizer.names


def test_settings_that_are_not_applied_are_named(tmp_path, capsys):
  # Broken: the files ask for something, and nobody says that it is not done.
  for i, (kind, config, words) in enumerate((
      ("unigram", {"clean_up_tokenization_spaces": True}, ["clean_up"]),
      # transformers does not clean up the text of BPE either.
      ("bytes", {"clean_up_tokenization_spaces": True}, []),
      ("bytes", {"split_special_tokens": True}, ["split_special_tokens"]),
      ("words", {}, ["'[SEP]' after every text", "add_eos_token"]),
      ("bytes", {"padding_side": "left", "model_max_length": 9}, []))):
    Tokenizer.load(_directory(tmp_path / str(i), kind, _TOKENS | config, {}))
    said = capsys.readouterr().err
    assert bool(words) == bool(said) and all(word in said for word in words)


@pytest.mark.parametrize("part, value", [
    ("pre_tokenizer", {"type": "FancySplit"}), ("normalizer", {"type": "Nope"}),
    ("decoder", {"type": "Nope"}), ("version", "2.0"),
    ("model", {"type": "SuperBPE", "vocab": {}, "merges": []})])
def test_parts_of_newer_versions_are_named(part, value, tmp_path):
  # Broken: "data did not match any variant of untagged enum".
  path = _directory(tmp_path / "model", "bytes", {}, {})
  spec = json.loads((path / "tokenizer.json").read_text()) | {part: value}
  (path / "tokenizer.json").write_text(json.dumps(spec))
  kind = value["type"] if isinstance(value, dict) else value
  with pytest.raises(ValueError, match=f"{part} '{kind}'.*pip install -U"):
    Tokenizer.load(path)


def test_a_prompt_that_is_cut_has_all_letters(tmp_path):
  # Broken: added words with accents lose their letters when a prompt is cut.
  tokenizer = Tokenizer.load(_directory(tmp_path / "model",
                                        *_CASES["K\u00f6ln"]))
  for text in ("in K\u00f6ln", "m\u1ed9t \u0111\u00eam"):
    ids = tokenizer.encode(text, bos=False)
    assert tokenizer.decode(ids) == text
    # Regular expressions read these bytes.
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert reading.user(tokenizer, "-" * 40 + text, 20)["content"].endswith(
        text)


def test_template_code_has_no_marks():
  # Broken: an ordinary piece of a GGUF file that is a name in the code of the
  # template becomes special and is dropped from texts.
  tokens = ["<unk>", "<s>", "</s>", "\u2581", *_LETTERS, "(", ")", "(x", "(x)",
            "[end]"]
  score = [-99.0] * len(tokens)
  score[-3:] = [-1.0, -2.0, -99.0]
  metadata = {
      "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens,
      "tokenizer.ggml.scores": score,
      "tokenizer.ggml.token_type": [2, 3, 3] + [1] * (len(tokens) - 3),
      "tokenizer.ggml.padding_token_id": 0}
  make = lambda template: Tokenizer.from_gguf(
      metadata | {"tokenizer.chat_template": template})
  code = "{% macro say(x) %}{{ x }}{% endmacro %}{{ say(messages[0].content) }}"
  plain = make(code)
  assert plain.decode(plain.encode("a(x)")) == "a(x)"
  assert tokens.index("[end]") not in plain.special_tokens
  for template in (code + "[end]", code + "{{ '[end]' + pad_token }}"):
    found = make(template)
    assert list(found.special_tokens.values())[-1] == "[end]"
    assert found.chat([{"role": "user", "content": "a"}]).count(
        tokens.index("[end]")) == 1
  assert found.names == {"bos_token": "<s>", "eos_token": "</s>",
                         "pad_token": "<unk>"}
  with pytest.raises(ValueError, match="padding is token 99"):
    Tokenizer.from_gguf(metadata | {"tokenizer.ggml.padding_token_id": 99})
