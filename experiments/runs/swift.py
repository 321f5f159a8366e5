"""Measures the gain of SWIFT's search for skipped layers during decoding.

  python experiments/runs/swift.py [sequences] [rounds]

The arguments are the numbers of prompts and of rounds per prompt. The bundled
target continues held-out code at temperature 1. It drafts with itself and skips
one or two sublayers (attentions and MLPs) of its middle layers. The search
starts at an initial set of skipped sublayers and tries 64 other sets.

Columns: expected tokens per round, given the drafts, in the first and in the
last quarter of the rounds, with the search and without. The last column is the
gain of the search in the last quarter. Intervals are 95 % over sequences. The
final sets are printed on stderr.
"""

import collections
from collections.abc import Sequence
import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[1]))

import jax  # noqa: E402
from lib import models  # noqa: E402
import numpy as np  # noqa: E402

import specjax as sj  # noqa: E402
from specjax import analysis  # noqa: E402
from specjax.data import corpora  # noqa: E402
from specjax.models import Pretrained  # noqa: E402
from specjax.training import distillation  # noqa: E402

GAMMA, WINDOW, PROMPT_TOKENS = 4, 32, 64


def decoded(target: Pretrained, prompts: Sequence[Sequence[int]], count: int,
            tries: int, rounds: int):
  """Decodes prompts and measures the acceptance.

  Args:
    target: target model.
    prompts: token ids of the prompts.
    count: number of skipped sublayers.
    tries: number of sets that the search tries. 0 disables the search.
    rounds: number of rounds.

  Returns:
    Expected accepted tokens `[2, prompts]` and rounds `[2, prompts]` in the
    first and the last quarter, and a counter of the final sets.
  """
  decoder = sj.Decoder(
      target=target.model, verifier=sj.verifiers.Block(),
      drafter=sj.drafters.Swift(
          gamma=GAMMA, count=count, tries=tries, window=WINDOW),
      transform=sj.LogitsTransform(temperature=1.0))
  params = {"target": target.params}
  state = decoder.prefill(params, list(prompts), jax.random.key(0),
                          limits=decoder.context_length)
  state, stats = decoder.decode(params, state, rounds)
  sj.decoding.raise_if_not_finite(stats)
  cut = lambda x: np.stack([x[:rounds // 4].sum(0), x[-(rounds // 4):].sum(0)])
  found = jax.device_get(state.drafter)
  return (cut(np.asarray(stats.expected, np.float64)[..., 0]),
          cut(np.asarray(stats.active)),
          collections.Counter(
              str(found.sublayers(row)) for row in range(len(prompts))))


def main(sequences: str = "16", rounds: str = "96"):
  target, tokenizer = models.load_target("bundled")
  _, held_out = corpora.split(corpora.stdlib_documents())
  prompts = distillation.cut_prompts(
      tokenizer.encode_stream([x.text for x in held_out]), int(sequences),
      PROMPT_TOKENS)
  print("| left out | tries | first quarter | last quarter | gain |")
  print("|---|---|---|---|---|")
  for count in (1, 2):
    variants = [decoded(target, prompts, count, tries, int(rounds))
            for tries in (0, 64)]
    for name, (accepted, active, sets) in zip(("none", "64"), variants):
      ends = (analysis.block_efficiency(*x) for x in zip(accepted, active))
      gain = analysis.relative_gain(
          accepted[1], active[1], variants[0][0][1], variants[0][1][1])
      print(f"| {count} | {name} | " + " | ".join(
          f"{x:.2f}" for x in ends) + f" | {gain:+.1%} |", flush=True)
      for one, number in sets.most_common(3):
        print(f"  {number} sequences: {one}", file=sys.stderr)


if __name__ == "__main__":
  main(*sys.argv[1:])
