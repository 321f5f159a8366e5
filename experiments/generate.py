"""Generates text by speculative decoding: continues one prompt.

A drafter proposes several tokens, and the target model verifies them in one
pass. The script prints the text as it is generated. On a terminal, accepted
draft tokens are green. The target's own tokens (corrections and bonus tokens)
are red. The last line reports the numbers of tokens and rounds, the tokens per
round, and the tokens per second.

This example uses the bundled models, whose target continues Python code:

  python experiments/generate.py --prompt='def fibonacci(n):'

Add --compare to measure the speed with and without the drafter. Some values of
--drafter:

  --drafter=tiny             smaller draft model (default: small)
  --drafter=medusa           Medusa heads of the bundled target
  --drafter=eagle3           EAGLE-3 layer of the bundled target
  --drafter=parallel         block-parallel network of the bundled target
  --drafter=pass             look-ahead tokens of the bundled target (PaSS)
  --drafter=ngram            copies from the text so far (prompt lookup)
  --drafter=ngram+small      cascade: ngram drafts for small, and small drafts
                             for the target
  '--drafter=ngram|small'    small drafts if ngram finds no match
  --drafter=none             no drafter: autoregressive decoding

Without --prompt, the prompt is read from standard input:

  cat part.py | python experiments/generate.py --drafter=tiny --gamma=3

Published chat models answer a question (chat.py has a conversation with them):

  python experiments/generate.py --target=smollm2 --chat --prompt='Why me?'

The output follows exactly the target's distribution, for every drafter and
every verifier except typical and top_2, which are lossy. The sampling flags,
--regex, --json_schema and the penalties change this distribution. They apply to
target and drafter in the same way:

  python experiments/generate.py --target=smollm2 --chat \\
    --prompt='Yes or no?' --regex='(Yes|No)[.]'
"""

from lib import common  # before jax, which takes long to import

# isort: split
import sys

from absl import flags
from lib import flags as shared
from lib.configurations import speculation
from lib.prompts import conversation
from lib.prompts import streaming

from specjax import strategies

_PROMPT = flags.DEFINE_string(
    "prompt", None, "Text to continue. Default: standard input, or a few lines "
    "of Python if standard input is a terminal or empty")
_SPECIAL = flags.DEFINE_bool(
    "special", False, "Parse special tokens such as <|endoftext|> in the "
    "prompt. Default: treat them as ordinary text")
_CHAT = shared.chat("Format the prompt as a user message in the target's chat "
                    "template, and print only the answer (chat.py continues "
                    "the conversation)")
_COMPARE = flags.DEFINE_bool(
    "compare", False, "After the output, decode the prompt several times, "
    "alternately with and without the drafter, and print the tokens per second "
    "of both")
_SPECULATION = speculation.Speculation()
shared.requires(_SPECULATION.system, _CHAT)
# Standard input is that of one process.
shared.requires(_SPECULATION.mesh.coordinator, _PROMPT)

_DEFAULT_PROMPT = (
    '"""Reads files."""\n\nimport os\nimport sys\n\n\nclass Reader:')


def _read_prompt():
  if _PROMPT.value is not None:
    return _PROMPT.value
  piped = "" if sys.stdin.isatty() else sys.stdin.read()
  # A text file ends with a newline. In training text, the tokenizer merges a
  # newline with the start of the next line. So a token for a newline alone
  # makes the model predict the end of the text, and the final newline is
  # removed. A byte-order mark is also removed.
  return piped.removeprefix("\ufeff").removesuffix("\n") or _DEFAULT_PROMPT


def _check_flags():
  """Rejects incompatible flags before any model is loaded."""
  if _CHAT.value:  # its template adds the special tokens
    shared.reject_unread(["special"], "--chat")
  rule = _SPECULATION.rule
  if _COMPARE.value and _SPECULATION.temperature.value == 0 and (
      rule and not rule.lossless):
    raise ValueError("--compare at --temperature=0 requires a lossless "
                     f"verifier, and --verifier={_SPECULATION.verifier.value} "
                     "is lossy; choose another verifier, or a temperature "
                     "above 0")


def _ids(session: speculation.Session):
  """Returns the token ids of the prompt.

  A prompt with more than `session.room` tokens is truncated if --keep_last is
  set, and an error otherwise.
  """
  text = _read_prompt()
  if not text:
    raise ValueError("--prompt is empty; set --prompt, or pipe the prompt to "
                     "standard input")
  tokenizer, keep_last = session.tokenizer, _SPECULATION.keep_last.value
  if not _CHAT.value:
    return conversation.cut(
        tokenizer, tokenizer.encode(text, special=_SPECIAL.value),
        session.room, keep_last, session.context)
  system = _SPECULATION.system.value
  ids, _ = conversation.fitting(
      tokenizer, [{"role": "system", "content": system}] * (system is not None)
      + [{"role": "user", "content": text}], session.room, keep_last,
      session.context)
  return ids


def _continue(writer: streaming.Writer, ids: list[int],
              printer: streaming.Printer):
  """Continues a prompt, then prints statistics (also after Ctrl-C)."""
  answer = streaming.Answer(
      target_calls=writer.decoder.drafter.target_calls)
  state = writer.start(ids, _SPECULATION.max_new_tokens.value)
  try:
    if not _CHAT.value:
      printer.prompt(ids)
    writer.write(state, printer, answer)
  except (KeyboardInterrupt, BrokenPipeError):  # Ctrl-C, or `| head`
    print(f"\n{answer}", file=sys.stderr)
    if answer.tokens:
      _SPECULATION.keep(printer.text)
    raise
  _SPECULATION.keep(printer.text)
  print(f"\n\n{answer}")


def main():
  _check_flags()
  session = _SPECULATION.load(chat="--chat" if _CHAT.value else None)
  ids = _ids(session)
  _continue(session.writer, ids, _SPECULATION.printer(session.tokenizer))
  if _COMPARE.value:
    alone = strategies.autoregressive().decoder(
        session.target.model, transform=session.decoder.transform,
        eos=session.decoder.eos)
    print(streaming.compare(
        (session.writer, streaming.Writer(
            alone, {"target": session.target.params}, _SPECULATION.seed.value,
            session.placement)),
        ids, _SPECULATION.max_new_tokens.value, session.tokenizer))


if __name__ == "__main__":
  common.run(main)
