"""Log of a training run, on the screen and on disk."""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
import pathlib
import sys
import time
from typing import Any

import jax
import numpy as np
import optax
import tqdm

from specjax.training.metrics import MetricsLog
from specjax.utils import processes

_LOG_EVERY = 10  # steps between rows of the log
_FIRST = {"loss", "mean_loss", "epoch"}  # omitted from the end of a line


@dataclasses.dataclass(frozen=True, kw_only=True)
class Log:
  """Settings of a run's log.

  Attributes:
    loss: description of the loss, such as "weighted sum over 4 heads".
    learning_rate: learning-rate schedule to log, or None.
    steps_per_epoch: number of steps in an epoch. None means that epochs are not
      logged.
    wandb: Weights & Biases project to which the metrics are also sent, or None.
  """

  loss: str = ""
  learning_rate: optax.Schedule | None = None
  steps_per_epoch: float | None = None
  wandb: str | None = None


class Progress:
  """Progress bar, throughput and rows of `metrics.csv` of one run.

  Only the first process prints and writes. Metrics with a slash in their names
  are not printed, except the top-1 accuracies of heads.
  """

  @classmethod
  @contextlib.contextmanager
  def over(cls, directory: pathlib.Path, start: int, steps: int,
           tokens_per_step: int, log: Log | None = None,
           losses: Sequence[float] | None = None) -> Iterator["Progress"]:
    """Opens the log of a run, and closes its files and bar at the end.

    Args:
      directory: directory of the run.
      start: number of steps already taken.
      steps: length of the run in steps.
      tokens_per_step: number of tokens per step, for the throughput.
      log: settings of the log. None means the default settings.
      losses: `pending_losses` of the checkpoint from which the run continues,
        or None.
    """
    log = log or Log()
    epochs = steps / (log.steps_per_epoch or steps)
    if epochs > 1 and processes.is_first():
      print(f"{steps} steps read the training data {epochs:.1f} times; an "
            f"epoch is {log.steps_per_epoch:,.1f} steps", file=sys.stderr)
    with contextlib.ExitStack() as stack:
      logs = []
      processes.by_the_first(lambda: logs.append(stack.enter_context(
          contextlib.closing(MetricsLog(directory, start, log.wandb)))))
      bar = stack.enter_context(tqdm.tqdm(
          total=steps, initial=start, unit="step", dynamic_ncols=True,
          disable=not processes.is_first()))
      yield cls(bar, lambda *row: [log.write(*row) for log in logs], start,
                steps, tokens_per_step, log, losses)

  def __init__(self, bar: tqdm.tqdm, write: Callable[[int, Any], Any],
               start: int, steps: int, tokens_per_step: int, log: Log,
               losses: Sequence[float] | None):
    self._bar, self._write, self._steps = bar, write, steps
    self._tokens_per_step, self._settings = tokens_per_step, log
    self._rate = log.learning_rate and jax.jit(log.learning_rate)
    self._losses: list[Any] = list(losses or ())
    self._averaged = 0  # number of losses in the last printed mean
    self._row: dict[str, float] = {}
    self._since(start)

  def _since(self, done: int) -> None:
    """Starts the clock for the steps after `done`."""
    self._tick, self._ticked = time.monotonic(), done

  @property
  def pending_losses(self) -> list[float]:
    """Losses since the last row of the log.

    Checkpoints contain these losses, so that a resumed run logs the same means.
    """
    return [float(x) for x in self._losses]

  def stepped(self, done: int, loss: Any, metrics: Mapping[str, Any],
              evaluates: bool = False) -> None:
    """Records a step. Every `_LOG_EVERY` steps, collects values for the log.

    Args:
      done: number of steps taken, including this one.
      loss: `[]` loss of the step.
      metrics: scalar metrics by name.
      evaluates: True if an evaluation follows. Values are then always
        collected.
    """
    self._bar.update()
    self._losses.append(loss)
    if done % _LOG_EVERY and done != self._steps and not evaluates:
      return
    losses = self.pending_losses
    self._row = {"loss": losses[-1], "mean_loss": float(np.mean(losses)),
                 **{name: float(value) for name, value in metrics.items()}}
    self._losses, self._averaged = [], len(losses)
    if self._rate:
      self._row["learning_rate"] = float(self._rate(done - 1))
    if self._settings.steps_per_epoch:
      self._row["epoch"] = done / self._settings.steps_per_epoch
    tokens = (done - self._ticked) * self._tokens_per_step
    self._row["tokens_per_second"] = tokens / (time.monotonic() - self._tick)
    self._since(done)
    self._bar.set_postfix(loss=f"{self._row['mean_loss']:.4f}")

  def evaluated(self, done: int, values: Mapping[str, float]) -> None:
    """Adds the values of an evaluation to the row, and prints a line.

    Args:
      done: number of steps taken.
      values: results of the evaluation, by name.
    """
    self._row.update(values)
    if processes.is_first():
      self._bar.write(self._line(done))
    self._since(done)

  def _line(self, done: int) -> str:
    """Returns the printed line of a step and its evaluation."""
    row, settings = self._row, self._settings
    epoch = f" (epoch {row['epoch']:.2f})" if "epoch" in row else ""
    kind = f", {settings.loss}" if settings.loss else ""
    line = (f"step {done}{epoch}: loss {row['mean_loss']:.4f} "
            f"(mean of {self._averaged} steps{kind})")
    for name, value in row.items():
      if "/" not in name and name not in _FIRST:
        line += f", {name} {value:.5g}"
    heads = []
    while (name := f"head_{len(heads) + 1}/top_1") in row:
      heads.append(f"{row[name]:.3f}")
    if heads:
      line += f"\n  top-1 accuracy of heads 1 to {len(heads)}: " + " ".join(
          heads)
    return line

  def write(self, done: int) -> None:
    """Writes the collected values of a step to the log, if there are any."""
    if self._row:
      self._write(done, self._row)
    self._row = {}
