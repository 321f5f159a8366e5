"""How good heads are, beside what they were before they were trained."""

import functools
import pathlib

from lib import common
import specjax as sj
from specjax.files import read_json
from specjax.files import write_json
from specjax.training import evaluation
from specjax.training import metrics

CURVE = "greedy_block_efficiency"  # what the learning curve is of
_DECODED_ROWS, _DECODED_ROUNDS = 16, 32  # to measure block efficiency


def evaluation_of(method, target, heads, params, held_out):
  """What is measured while the heads train: by head, and by decoding.

  Rows are continued greedily after their first quarter, with the likeliest
  chain of the heads; that of PaSS is folded.

  Args:
    method: of the run.
    target: `models.Pretrained`.
    heads: of the target.
    params: of the heads.
    held_out: `[R, S]`.

  Returns:
    `{"target", "drafter"} -> {name: number}`.
  """
  accuracy = evaluation.head_accuracy(
      method.measure(target.model, heads), held_out)
  prompts = held_out[:_DECODED_ROWS, :max(1, held_out.shape[1] // 4)]
  room = target.model.context_length - prompts.shape[1]
  attach = functools.partial(heads.attach, target.model)
  model, _ = attach(target.params, params)
  decoded = evaluation.block_efficiency(
      sj.Decoder(target=model, **method.chain(heads)._asdict(),
                 transform=sj.LogitsTransform(temperature=0)),
      prompts, rounds=min(_DECODED_ROUNDS,
                          max(1, room // (heads.num_forecasts + 1))))
  return lambda params: {
      **accuracy(params),
      **decoded(attach(params["target"], params["drafter"])[1])}


def spent(output_dir, tokens_per_step, before, heads_from, steps):
  """Tokens, minutes and learning curve of a run and of the runs before it.

  Args:
    output_dir: of the run.
    tokens_per_step: of the run.
    before: what the curve is of, measured before the first step.
    heads_from: directory of the heads that the run began with, or None.
    steps: the number of steps of the run that count.
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


def write(output_dir, method, taken, added, before, measured):
  """Prints and writes how good the heads are.

  Args:
    output_dir: of the run.
    method: that was trained.
    taken: what it was trained on, for training.json.
    added: number of parameters.
    before: measured before the first step.
    measured: and after the last.
  """
  _print(measured)
  training = {"method": method.name, **taken,
              "accuracy": evaluation.by_head(measured, "top")}
  write_json(output_dir / "training.json", training)
  names = ("block_efficiency", CURVE, "data_block_efficiency")
  common.finish(output_dir, "train_drafter", {
      **training, "added_parameters": added,
      "loss": evaluation.by_head(measured, "loss"),
      "data_accuracy": evaluation.by_head(measured, "data_top"),
      **{name: measured[name] for name in names},
      "untrained": {name: before[name] for name in names}})


def _print(measured):
  print("head  loss   right among the top 1..5       the same, of the data")
  for k, (loss, target, data) in enumerate(zip(
      *(evaluation.by_head(measured, name)
        for name in ("loss", "top", "data_top")))):
    print(f"{k:4d} {loss:6.3f}  " + " ".join(f"{x:.3f}" for x in target)
          + "  " + " ".join(f"{x:.3f}" for x in data))
