"""What a training run says while it goes on: on the screen and on disk."""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import pathlib
import time
from typing import Any

import tqdm

from specjax import processes
from specjax.training.metrics import MetricsLog

_LOG_EVERY = 10  # steps


class Progress:
  """The bar, the throughput and the rows of `metrics.csv` of one run.

  Of several processes the first alone speaks and writes. A metric with a slash
  in its name goes to disk and not to the screen.
  """

  @classmethod
  @contextlib.contextmanager
  def over(cls, directory: pathlib.Path, start: int, steps: int,
           tokens_per_step: int) -> Iterator["Progress"]:
    """The progress of a run, whose files and bar are closed in the end.

    Args:
      directory: of the run.
      start: steps that were taken before.
      steps: length of the run.
      tokens_per_step: for the throughput.
    """
    with contextlib.ExitStack() as stack:
      logs = []
      processes.by_the_first(lambda: logs.append(stack.enter_context(
          contextlib.closing(MetricsLog(directory, start)))))
      bar = stack.enter_context(tqdm.tqdm(
          total=steps, initial=start, unit="step", dynamic_ncols=True,
          disable=not processes.is_first()))
      yield cls(bar, lambda *row: [log.write(*row) for log in logs], start,
                steps, tokens_per_step)

  def __init__(self, bar: tqdm.tqdm, log: Callable[[int, Any], Any],
               start: int, steps: int, tokens_per_step: int):
    self._bar, self._log, self._steps = bar, log, steps
    self._tokens_per_step = tokens_per_step
    self._row: dict[str, float] = {}
    self._since(start)

  def _since(self, done):
    """Begins to time the steps after these."""
    self._tick, self._ticked = time.monotonic(), done

  def stepped(self, done: int, loss: Any, metrics: Mapping[str, Any]) -> None:
    """Counts a step, and reads its loss and metrics now and then.

    Args:
      done: steps taken, this one included.
      loss: `[]`, of the step.
      metrics: scalars by name.
    """
    self._bar.update()
    if done % _LOG_EVERY and done != self._steps:
      return
    self._row = {"loss": float(loss),
                 **{name: float(value) for name, value in metrics.items()}}
    tokens = (done - self._ticked) * self._tokens_per_step
    self._row["tokens_per_second"] = tokens / (time.monotonic() - self._tick)
    self._since(done)
    self._bar.set_postfix(loss=f"{self._row['loss']:.4f}")

  def evaluated(self, done: int, found: Mapping[str, float]) -> None:
    """Takes what was measured after a step, and says it."""
    self._row.update(found)
    if processes.is_first():
      self._bar.write(f"step {done}: " + ", ".join(
          f"{k} {v:.4f}" for k, v in self._row.items() if "/" not in k))
    self._since(done)

  def write(self, done: int) -> None:
    """Writes what is known of a step, if anything is."""
    if self._row:
      self._log(done, self._row)
    self._row = {}
