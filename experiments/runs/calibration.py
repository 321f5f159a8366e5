"""How well a confidence head is calibrated, and how well it can be.

  python experiments/runs/calibration.py [directory of heads] [rows]

The heads are `parallel` of the box unless others are given. Blocks are read
along held-out modules of Python's standard library. DSpark's temperatures
(`training.calibration`) are fitted on half of the rows; the error of the
predicted chance that a chain is accepted as far as token k is of the other
half, with and without them.
"""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[1]))

import jax  # noqa: E402
from lib import models  # noqa: E402
import numpy as np  # noqa: E402

import specjax as sj  # noqa: E402
from specjax import methods  # noqa: E402
from specjax import objectives  # noqa: E402
from specjax.data import batches  # noqa: E402
from specjax.data import corpora  # noqa: E402
from specjax.training import calibration  # noqa: E402
from specjax.training import divergences  # noqa: E402

ROW_TOKENS, BATCH, ANCHORS = 384, 4, 48


def main(heads=None, rows="64"):
  target, _, tokenizer = models.load_models("bundled", [])
  heads, params = methods.load_heads(
      heads or sj.zoo.heads_path("parallel"), target.model)
  objective = objectives.ParallelObjective(
      model=target.model, heads=heads, anchors=ANCHORS)
  params = {"target": target.params, "drafter": params}

  @jax.jit
  def read(tokens, key):
    found = objective.blocks(params, tokens, objective.draw(key, *tokens.shape))
    sure = heads.confidences(params["drafter"], found.hidden, found.before)
    return sure, 1 - divergences.total_variation(found.target, found.logits)

  _, held_out = corpora.split(corpora.stdlib_documents())
  text = batches.spread_rows(tokenizer.encode_stream(
      [x.text for x in held_out]), int(rows), ROW_TOKENS)
  parts = [read(text[i:i + BATCH], jax.random.key(i))
           for i in range(0, len(text), BATCH)]
  logits, accepted = (
      np.concatenate([np.asarray(x).reshape(-1, x.shape[-1]) for x in side])
      for side in zip(*parts))
  half = len(logits) // 2
  fitted = calibration.temperatures(logits[:half], accepted[:half])
  happened = np.cumprod(accepted[half:], axis=-1)
  errors = [[calibration.calibration_error(predicted, true)
             for predicted, true in zip(
                 calibration.reached(logits[half:], by).T, happened.T)]
            for by in (1.0, fitted)]
  print(f"{half:,} blocks to fit on, {len(logits) - half:,} to measure by\n\n"
        "| token | accepted as far | temperature | error | error without |\n"
        "|---|---|---|---|---|")
  for k, (one, before, after) in enumerate(zip(fitted, *errors)):
    print(f"| {k + 1} | {happened[:, k].mean():.3f} | {one:.2f} | "
          f"{after:.4f} | {before:.4f} |")


if __name__ == "__main__":
  main(*sys.argv[1:])
