"""Measures and reports the quality of heads on held-out text."""

from collections.abc import Mapping
import functools
import math
import pathlib
from typing import Any

import numpy as np

from lib import common
from lib.figures import curves
import specjax as sj
from specjax.analysis import Estimate
from specjax.data.batches import HeldOutRows
from specjax.methods import Heads
from specjax.methods import Method
from specjax.models import Pretrained
from specjax.training import evaluation
from specjax.training import metrics
from specjax.training.objective import DrafterObjective
from specjax.utils.files import read_json
from specjax.utils.files import write_json

Measured = Mapping[str, Any]
CURVE = "greedy_block_efficiency"  # metric of the learning curve
DECODED_ROWS, DECODED_ROUNDS = 64, 16  # largest numbers in greedy decoding


def evaluation_of(method: Method, target: Pretrained, heads: Heads,
                  params: Mapping[str, Any], objective: DrafterObjective,
                  held_out: HeldOutRows) -> evaluation.Measure:
  """Returns the evaluation function of a training run.

  The function measures the accuracy of each head, the block efficiency of
  greedy decoding, and the held-out loss. Drafts are the heads' most likely
  chain. PaSS uses its folded variant, with one target call per round.

  Args:
    method: training method.
    target: target model with its parameters.
    heads: heads of the target.
    params: parameters of the heads. Only their structure is used.
    objective: training objective.
    held_out: held-out rows.

  Returns:
    A function that maps parameters `{"target", "drafter", ...}` to a dict
    `{name: number}`. The dict also contains "by_row" of
    `evaluation.head_accuracy`, with the label of each row's documents as
    "clusters".
  """
  accuracy = evaluation.head_accuracy(
      method.measure(target.model, heads), held_out.tokens,
      clusters=held_out.clusters, counted=held_out.counted)
  prompts, clusters = _prompts(held_out)
  room = target.model.context_length - min(map(len, prompts))
  attach = functools.partial(heads.attach, target.model)
  model, _ = attach(target.params, params)
  decoded = evaluation.block_efficiency(
      method.chain(heads).decoder(
          model, transform=sj.LogitsTransform(temperature=0)),
      prompts, rounds=min(DECODED_ROUNDS,
                          max(1, room // (heads.num_forecasts + 1))),
      clusters=clusters)
  loss = evaluation.held_out_loss(
      objective, held_out.tokens, counted=held_out.counted)

  def evaluate(params: Mapping[str, Any]) -> dict[str, Any]:
    measured = accuracy(params, by_row=True)
    measured["by_row"]["clusters"] = held_out.clusters
    return {**measured, **loss(params),
            **decoded(attach(params["target"], params["drafter"])[1])}

  return evaluate


def _prompts(held_out: HeldOutRows
             ) -> tuple[tuple[np.ndarray, ...], tuple[int, ...]]:
  """Returns prompts for greedy decoding, and their clusters.

  If only answers are counted, a prompt ends before the first answer of its row,
  and rows that begin with an answer are left out. Otherwise a prompt is the
  first quarter of the row without padding.
  """
  counted = held_out.counted[:DECODED_ROWS]
  lengths = np.argmax(counted, axis=1)
  if not lengths.any():
    lengths = np.maximum(1, counted.sum(axis=1) // 4)
  return zip(*[(row[:length], cluster) for row, length, cluster in zip(
      held_out.tokens, lengths, held_out.clusters.tolist()) if length])


def scalars(measured: Measured) -> dict[str, float]:
  """Returns the scalars of an evaluation, without the values per row."""
  return {name: x for name, x in measured.items() if name != "by_row"}


def draw_curves(output_dir: pathlib.Path, heads: Heads, loss: str,
                before: Measured) -> None:
  """Writes the learning curves of a run (see `curves.draw`)."""
  curves.draw(output_dir, [CURVE, "block_efficiency", *(
      f"head_{k}/top_1" for k in range(1, heads.num_forecasts + 1))],
              loss, before)


def spent(output_dir: pathlib.Path, tokens_per_step: int, before: float,
          heads_from: str | None, steps: int) -> dict[str, Any]:
  """Returns the training tokens, the minutes and the learning curve of heads.

  They include the earlier training runs of the initial heads.

  Args:
    output_dir: directory of this run.
    tokens_per_step: number of tokens per training step.
    before: value of the metric `CURVE` before the first step.
    heads_from: directory of the initial heads, or None for new heads.
    steps: number of steps of this run to include.
  """
  tokens, minutes = metrics.spent(output_dir, tokens_per_step, steps)
  taken = {"tokens": 0, "minutes": 0, "curve": []}
  if heads_from is not None:
    path = pathlib.Path(heads_from) / "training.json"
    if path.exists():
      taken |= read_json(path, "train those heads again")
  return {
      "tokens": taken["tokens"] + tokens,
      "minutes": taken["minutes"] + minutes,
      "curve": taken["curve"] + [
          (taken["tokens"] + step * tokens_per_step, value)
          for step, value in [
              (0, before), *metrics.read(output_dir, CURVE, steps)]]}


def write(output_dir: pathlib.Path, method: Method, taken: dict[str, Any],
          added: int, before: Measured, measured: Measured) -> None:
  """Prints and writes the quality of the heads.

  Args:
    output_dir: directory of the run.
    method: training method.
    taken: entries of training.json: data, tokens, minutes and learning curve.
    added: number of parameters of the heads.
    before: evaluation before the first step.
    measured: evaluation after the last step.
  """
  _print(method, taken, added, before, measured)
  training = {"method": method.name, **taken,
              "accuracy": evaluation.by_head(measured, "top")}
  write_json(output_dir / "training.json", training)
  results = lambda values: {
      name: value for name, value in values.items()
      if name.partition("/")[0].endswith("block_efficiency")}
  common.finish(output_dir, "train_drafter", {
      **training, "added_parameters": added,
      "loss": evaluation.by_head(measured, "loss"),
      "data_accuracy": evaluation.by_head(measured, "data_top"),
      **results(measured), "untrained": results(before),
      "by_row": {name: values.tolist() for name, values in
                 measured["by_row"].items()}})


def shown(estimate: Estimate) -> str:
  """Formats an estimate with its interval, such as "1.609 [1.555, 1.676]"."""
  if math.isnan(estimate.low):
    return f"{estimate.value:.3f} (no interval)"
  return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def _print(method: Method, taken: dict[str, Any], added: int, before: Measured,
           measured: Measured) -> None:
  print(f"{method.name}: {taken['tokens']:,} training tokens in "
        f"{taken['minutes']:.1f} minutes; {added:,} parameters added\n")
  print(f"{'':46s}{'before':>8s}  after training\n"
        f"{'Acceptance length (accepted draft tokens per':46s}{'training':>8s}"
        "  [95 % interval]\ntarget call) along held-out text")
  table = [("  greedy decoding", CURVE, 1),
           ("  sampling, temperature 1", "sampled_block_efficiency", 1),
           ("Block efficiency (tokens per target call),\n  greedy decoding of "
            "held-out prompts", "block_efficiency", 0)]
  for text, name, less in table:
    *lines, text = text.split("\n")
    print(*(f"{line}\n" for line in lines), f"{text:46s}"
          f"{before[name] - less:8.3f}  "
          f"{shown(evaluation.interval(measured, name, less))}", sep="")
  top = [*range(1, 1 + len(evaluation.by_head(measured, "top")[0]))]
  width = 6 * len(top) - 1
  print(f"\nAccuracy of head k: share of positions of held-out text where the "
        "correct token\nis one of the head's j most likely tokens. Head 0 is "
        "the target's LM head.\n"
        f"{'':14s}{'correct: argmax of the target':{width + 5}s}"
        "correct: the next token of the text\n"
        f"head    loss  " + "   ".join(
            " ".join(f"{f'top {j}':>5s}" for j in top) for _ in range(2)))
  for k, (loss, target, data) in enumerate(zip(
      *(evaluation.by_head(measured, name)
        for name in ("loss", "top", "data_top")))):
    print(f"{k:4d}  {loss:6.3f}  " + "   ".join(
        " ".join(f"{x:.3f}" for x in side) for side in (target, data)))
