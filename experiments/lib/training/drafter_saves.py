"""Trained heads on disk: of the last and of the best evaluation."""

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

BEST = "best"  # directory in that of a run
_TRAINING = "training.json"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Saves:
  """Writer of the heads of a run, and of the target if it is trained.

  Attributes:
    directory: the run's directory; the best heads go to `best/` in it.
    method: the training method.
    heads: the trained heads, without parameters.
    target: the target model of the heads.
    tokenizer: the target's tokenizer.
    dtype: the name of the precision on disk.
    data: the value of --data.
    corpus: a fingerprint of the documents.
    tokens_per_step: number of tokens that a step reads.
    heads_from: directory of the initial heads, or None.
    untrained: evaluation before the first step.
  """

  directory: pathlib.Path
  method: Method
  heads: methods.Heads
  target: Pretrained
  tokenizer: Tokenizer
  dtype: str
  data: str
  corpus: str
  tokens_per_step: int
  heads_from: str | None
  untrained: dict[str, float]

  def taken(self, steps: int) -> dict[str, Any]:
    """Returns data, tokens, minutes and curve after some steps of the run."""
    return {"data": self.data, "corpus": self.corpus, "steps": steps,
            **drafter_report.spent(
                self.directory, self.tokens_per_step,
                self.untrained[drafter_report.CURVE], self.heads_from, steps)}

  def write(self, trained: dict[str, Any], directory: pathlib.Path | None = None
            ) -> dict[str, Any]:
    """Writes trained parameters atomically.

    Args:
      trained: `{"drafter"}`, and `"target"` if it is trained.
      directory: directory of the files; None is the run's.

    Returns:
      The parameters, rounded to the precision on disk.
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
    """Writes the heads of an evaluation, see `Trainer.evaluated`.

    Args:
      step: number of steps taken.
      trained: trained parameters by name.
      measured: values of the evaluation.
    """
    trained = processes.gathered(trained)
    # The processes must not read different states of the directory.
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
      # Last, so that a killed run does not take the heads for better ones.
      write_json(directory / _TRAINING, training)

  def _best(self) -> tuple[int, float] | None:
    """Returns `(steps, value)` of the heads in `best/`, or None."""
    path = self.directory / BEST / _TRAINING
    if not path.exists():
      return None
    training = read_json(path, f"delete {path.parent}")
    return training["steps"], training[drafter_report.CURVE]

  def print_best(self) -> None:
    """Prints the step of the best heads and where they are."""
    best = processes.by_the_first(self._best)
    if best is not None:
      print(f"best heads of all evaluations: after step {best[0]}, held-out "
            f"{drafter_report.CURVE} {best[1]:.3f}, in {self.directory / BEST}")
