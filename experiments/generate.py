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
import numpy as np
from tokenizers import decoders

import specjax as sj
from specjax.models import heads as heads_lib

_PROMPT = flags.DEFINE_string(
    "prompt", None, "the text to continue; default: standard input, or a few "
    "lines of code where that is a terminal or empty")
_TARGET = flags.DEFINE_string(
    "target", "bundled", "bundled, or a directory of train_lm.py")
_DRAFTER = flags.DEFINE_string(
    "drafter", "small", "small, tiny, medusa, pass, none, or a directory of "
    "train_lm.py or train_drafter.py")
_VERIFIER = flags.DEFINE_enum(
    "verifier", None, sorted(common.ALL_VERIFIERS), "the verification rule; "
    "default: block, and target_walk for Medusa's tree")
_GAMMA = flags.DEFINE_integer(
    "gamma", 6, "drafted tokens of a chain, as far as there are heads or "
    "look-ahead tokens for it", 1)
_NODES = flags.DEFINE_integer("nodes", 16, "of Medusa's tree, with its root", 2)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.8, "0 is greedy")
_TOP_K = flags.DEFINE_integer("top_k", 0, "likeliest tokens kept; 0: all")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "nucleus mass, in (0, 1]")
_MIN_P = flags.DEFINE_float("min_p", 0.0, "least share of the likeliest")
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 256, "tokens", 1)
_SEED = flags.DEFINE_integer("seed", 0, "of the sampling")
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


def _medusa(heads, training):
  """Heads as the rule wants them: a sampled chain or tree, or a top-k tree."""
  rule = common.ALL_VERIFIERS[_VERIFIER.value or "target_walk"]
  if "chain" in rule.requires:
    return rule, sj.drafters.Medusa(
        heads=heads, proposal="iid",
        parents=range(-1, min(_GAMMA.value, heads.heads)))
  accuracy = np.diff(training["accuracy"][1:], axis=1, prepend=0)
  proposal = ("top_k" if not rule.requires else
              "iid" if "iid" in rule.requires else "without_replacement")
  return rule, sj.drafters.Medusa(
      heads=heads, proposal=proposal,
      parents=sj.trees.medusa_tree(accuracy, _NODES.value))


def _speculation():
  """`(target model, verifier, drafter, params, tokenizer)` of the flags."""
  name = _DRAFTER.value
  itself = common.drafts_for_itself(name)
  target, members, tokenizer = common.load_models(
      _TARGET.value, [] if itself or name == "none" else [name])
  rule = common.ALL_VERIFIERS[_VERIFIER.value or "block"]
  model, params = target.model, {"target": target.params}
  if not itself:
    drafter = sj.drafters.Empty()
    for member in members.values():
      params["drafter"] = member.params
      drafter = sj.drafters.LanguageModel(
          model=member.model, gamma=_GAMMA.value)
    return model, rule, drafter, params, tokenizer
  target, tokenizer, heads, own, training = common.load_self_drafter(
      name, target, tokenizer)
  model, params = target.model, {"target": target.params, "drafter": own}
  if isinstance(heads, heads_lib.LookaheadEmbeddings):
    model, both = heads_lib.with_lookahead(model, target.params, own)
    drafter = sj.drafters.Lookahead(
        embeddings=heads, count=min(_GAMMA.value, heads.count))
    params = {"target": both, "drafter": ()}
  elif isinstance(heads, heads_lib.BlockwiseHeads):
    drafter = sj.drafters.Blockwise(
        heads=heads, gamma=min(_GAMMA.value, heads.heads))
  else:
    rule, drafter = _medusa(heads, training)
  return model, rule, drafter, params, tokenizer


def main():
  model, rule, drafter, params, tokenizer = _speculation()
  decoder = sj.Decoder(
      target=model, drafter=drafter, verifier=rule,
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
  printer.prompt(ids)
  state, rounds, accepted = prefill(), 0, 0
  start, length = time.perf_counter(), len(ids)
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
  total = length - len(ids)
  seconds = time.perf_counter() - start
  print(f"\n\n{total} tokens in {rounds} rounds: {total / rounds:.2f} a round, "
        f"{100 * accepted / total:.0f} % of them drafted, "
        f"{total / seconds:.0f} tokens/s")


if __name__ == "__main__":
  common.run(main)
