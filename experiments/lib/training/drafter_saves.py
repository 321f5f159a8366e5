"""Checkpoints of the heads at the last and at the best evaluation."""

from collections.abc import Callable
import dataclasses
import pathlib
from typing import Any

from lib.training import drafter_report
from specjax import methods
from specjax.data import Tokenizer
from specjax.methods import Method
from specjax.models import checkpoint
from specjax.models import Pretrained
from specjax.training import evaluation
from specjax.training import loop
from specjax.utils import processes
from specjax.utils.files import read_json
from specjax.utils.files import write_json

BEST = "best"  # subdirectory of the best heads
_TRAINING = "training.json"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Saves:
  """Writer of the heads of a run, and of the target if it is trained.

  Attributes:
    directory: directory of the run. Its subdirectory `best/` contains the heads
      of the best evaluation.
    method: training method.
    heads: trained heads, without parameters.
    target: target model of the heads.
    tokenizer: tokenizer of the target.
    dtype: name of the dtype on disk.
    taken: function that returns the entries of training.json after a number of
      training steps.
  """

  directory: pathlib.Path
  method: Method
  heads: methods.Heads
  target: Pretrained
  tokenizer: Tokenizer
  dtype: str
  taken: Callable[[int], dict[str, Any]]

  def write(self, trained: dict[str, Any], directory: pathlib.Path | None = None
            ) -> dict[str, Any]:
    """Writes trained parameters atomically.

    Args:
      trained: trained parameters by name: "drafter", and "target" if the target
        is trained.
      directory: output directory. None means the directory of the run.

    Returns:
      The parameters, rounded to the dtype on disk.
    """
    directory = directory or self.directory
    saved = loop.cast(trained, self.dtype)
    methods.save_heads(
        directory, self.heads, saved["drafter"], self.target.model)
    if "target" in saved:
      checkpoint.save_model(directory, self.target.model, saved["target"])
      self.tokenizer.save(directory / "tokenizer.json")
    return saved

  def evaluated(self, step: int, trained: dict[str, Any],
                measured: dict[str, float]) -> None:
    """Writes the heads after an evaluation (see `Trainer.evaluated`).

    If the evaluation is the best so far, also writes them to `best/`.

    Args:
      step: number of completed steps.
      trained: trained parameters by name.
      measured: metrics of the evaluation by name.
    """
    trained = processes.gathered(trained)
    # Only the first process reads the directory, so that all processes agree.
    best, taken = processes.by_the_first(
        lambda: (self._best(), self.taken(step)))
    training = {
        "method": self.method.name, **taken,
        "accuracy": evaluation.by_head(measured, "top"),
        drafter_report.CURVE: measured[drafter_report.CURVE]}
    directories = [self.directory]
    if best is None or training[drafter_report.CURVE] > best[1]:
      directories.append(self.directory / BEST)
    for directory in directories:
      self.write(trained, directory)
      # This file is written after the heads. If the run is killed in between,
      # the file keeps the old, lower metric, so later heads can replace these.
      write_json(directory / _TRAINING, training)

  def _best(self) -> tuple[int, float] | None:
    """Returns `(steps, metric)` of the heads in `best/`, or None."""
    path = self.directory / BEST / _TRAINING
    if not path.exists():
      return None
    training = read_json(path, f"delete {path.parent}")
    return training["steps"], training[drafter_report.CURVE]

  def print_best(self) -> None:
    """Prints the step and the directory of the best heads."""
    best = processes.by_the_first(self._best)
    if best is not None:
      print(f"best heads of all evaluations: after step {best[0]}, held-out "
            f"{drafter_report.CURVE} {best[1]:.3f}, in {self.directory / BEST}")
