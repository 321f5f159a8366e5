"""Text in, text streamed out, by speculative decoding.

Tokens that the drafter proposed and the target accepted are green, the
target's own (corrections and bonus tokens) red; a line of statistics follows.

  python experiments/generate.py --prompt='def fibonacci(n):'
  cat part.py | python experiments/generate.py --drafter=tiny --gamma=3
  python experiments/generate.py --drafter=medusa        # the target's heads
  python experiments/generate.py --drafter=pass          # look-ahead tokens
  python experiments/generate.py --drafter=none          # autoregressive

The output has exactly the target's law, whatever the drafter and the verifier,
unless that is one of the lossy rules.
"""

import sys
import time

from absl import flags
import jax
from lib import common
from lib import flags as shared
import numpy as np
from tokenizers import decoders

import specjax as sj
from specjax import strategies
from specjax.training import methods

_PROMPT = flags.DEFINE_string(
    "prompt", None, "the text to continue; default: standard input, or a few "
    "lines of code where that is a terminal or empty")
_TARGET = shared.target()
_DRAFTER = shared.drafter("small, tiny, medusa, pass, none, or a directory of "
                          "train_lm.py or train_drafter.py")
_VERIFIER = flags.DEFINE_enum(
    "verifier", None, sorted(common.ALL_VERIFIERS), "the verification rule; "
    "default: block, and target_walk for Medusa's tree")
_GAMMA = shared.gamma(6, "drafted tokens of a chain, as far as there are heads "
                      "or look-ahead tokens for it")
_NODES = shared.nodes(16)
_TEMPERATURE = shared.temperature(0.8)
_TOP_K = flags.DEFINE_integer("top_k", 0, "likeliest tokens kept; 0: all")
_TOP_P = shared.top_p()
_MIN_P = flags.DEFINE_float("min_p", 0.0, "least share of the likeliest")
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 256, "tokens", 1)
_SEED = shared.seed("of the sampling")
_COLOR = flags.DEFINE_enum(
    "color", "auto", ["auto", "always", "never"], "colour the tokens")

_DEFAULT_PROMPT = (
    '"""Reads files."""\n\nimport os\nimport sys\n\n\nclass Reader:')
_ROUNDS_A_CALL = 2  # rounds between two looks from the host
_GREEN, _RED, _PLAIN = "\033[32m", "\033[31m", "\033[0m"


class _Printer:
  """Prints tokens as they come, in colours, never half a character."""

  def __init__(self, tokenizer, colored):
    self._stream = decoders.DecodeStream(skip_special_tokens=True)
    self._backend = tokenizer.backend
    self._colored = colored

  def prompt(self, ids):
    for token in ids:
      sys.stdout.write(self._stream.step(self._backend, int(token)) or "")

  def round(self, ids, accepted):
    """The tokens of a round, the first `accepted` of them drafted."""
    for place, token in enumerate(ids):
      text = self._stream.step(self._backend, int(token))
      if text and self._colored:
        text = (_GREEN if place < accepted else _RED) + text + _PLAIN
      sys.stdout.write(text or "")
    sys.stdout.flush()


def _read_prompt():
  if _PROMPT.value is not None:
    return _PROMPT.value
  piped = "" if sys.stdin.isatty() else sys.stdin.read()
  # The newline at a file's end would be half of the token that begins the
  # next line, after which the model expects the end of the text.
  return piped.removesuffix("\n") or _DEFAULT_PROMPT


def _speculation():
  """`(target model, params, strategy, tokenizer)` of the flags."""
  name = _DRAFTER.value
  itself = common.drafts_for_itself(name)
  target, members, tokenizer = common.load_models(
      _TARGET.value, [] if itself or name == "none" else [name],
      ", ".join((*sj.zoo.DRAFTERS, *sj.zoo.HEADS, "none")))
  rule = _VERIFIER.value and common.ALL_VERIFIERS[_VERIFIER.value]
  if itself:
    target, tokenizer, heads, own, training = common.load_self_drafter(
        name, target, tokenizer)
    accuracy = np.diff(training["accuracy"][1:], axis=1, prepend=0)
    strategy = methods.of(heads).strategy(
        heads, rule, _GAMMA.value,
        lambda: sj.trees.medusa_tree(accuracy, _NODES.value))
    return (*heads.attach(target.model, target.params, own), strategy,
            tokenizer)
  params, strategy = {"target": target.params}, strategies.autoregressive()
  for member in members.values():
    params["drafter"] = member.params
    strategy = strategies.block_verification(member.model, _GAMMA.value)
  if rule:
    strategy = strategy._replace(verifier=rule)
  return target.model, params, strategy, tokenizer


def main():
  model, params, strategy, tokenizer = _speculation()
  decoder = sj.Decoder(
      target=model, **strategy._asdict(),
      transform=sj.LogitsTransform(
          temperature=_TEMPERATURE.value, top_k=_TOP_K.value,
          top_p=_TOP_P.value, min_p=_MIN_P.value),
      eos=tokenizer.eos)
  text = _read_prompt()
  if not text:
    raise ValueError("the prompt is empty; give a text with --prompt or on "
                     "standard input")
  ids = tokenizer.encode(text)
  prefill = lambda: decoder.prefill(
      params, [ids], jax.random.key(_SEED.value),
      limits=len(ids) + _MAX_NEW_TOKENS.value)
  decoder.decode(params, prefill(), rounds=_ROUNDS_A_CALL)  # compile

  colored = _COLOR.value == "always" or (
      _COLOR.value == "auto" and sys.stdout.isatty())
  printer = _Printer(tokenizer, colored)
  state, rounds, accepted = prefill(), 0, 0
  start, length = time.perf_counter(), len(ids)

  def statistics():
    total, seconds = length - len(ids), time.perf_counter() - start
    return (f"{total} tokens in {rounds} rounds: {total / max(rounds, 1):.2f} "
            f"a round, {100 * accepted / max(total, 1):.0f} % of them drafted, "
            f"{total / seconds:.0f} tokens/s")

  try:
    printer.prompt(ids)
    while not bool(state.done[0]):
      state, stats = decoder.decode(params, state, rounds=_ROUNDS_A_CALL)
      sj.raise_if_not_finite(stats)
      tokens = np.asarray(state.tokens[0])
      for emitted, drafted in zip(np.asarray(stats.emitted[:, 0]),
                                  np.asarray(stats.accepted[:, 0])):
        printer.round(tokens[length:length + emitted], drafted)
        length += emitted
        accepted += drafted
      rounds += int(stats.active[:, 0].sum())
  except (KeyboardInterrupt, BrokenPipeError):  # Ctrl-C, or `| head`
    print(f"\n{statistics()}", file=sys.stderr)
    raise
  print(f"\n\n{statistics()}")


if __name__ == "__main__":
  common.run(main)
