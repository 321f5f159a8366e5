"""Metrics of a run: a CSV file, TensorBoard events and Weights & Biases.

TensorBoard events require the package tensorboardX.
"""

from collections.abc import Mapping
import contextlib
import csv
import io
import pathlib
import sys
from typing import Any
import uuid

from specjax.utils.files import atomically
from specjax.utils.files import naming

_FILE = "metrics.csv"
_HEADER = ["step", "name", "value"]


class MetricsLog:
  """Log of a run in `metrics.csv` (step, name, value) and TensorBoard events.

  The constructor prints the paths of the files on stderr.

  >>> import tempfile
  >>> with tempfile.TemporaryDirectory() as directory:
  ...   log = MetricsLog(pathlib.Path(directory), start=0)
  ...   log.write(10, {"loss": 2.5})
  ...   log.close()
  ...   read(pathlib.Path(directory), "loss")
  [(10, 2.5)]

  Args:
    directory: directory of the files, created if it does not exist.
    start: number of steps already taken. Rows of later steps are deleted,
      because the run will write them again.
    wandb: Weights & Biases project to which the values are also sent, or None.

  Raises:
    ValueError: the directory's `metrics.csv` has other columns, or Weights &
      Biases cannot start.
  """

  def __init__(self, directory: pathlib.Path, start: int,
               wandb: str | None = None) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / _FILE
    rows = []
    if path.exists():
      rows = [row for row in _rows(path) if row[0] <= start]
    self._wandb = wandb and _wandb_run(directory, wandb)
    text = io.StringIO(newline="")
    csv.writer(text).writerows([_HEADER, *rows])
    with atomically(path) as f:
      f.write(text.getvalue().encode())
    self._file = open(path, "a", newline="")
    self._csv = csv.writer(self._file)
    try:
      import tensorboardX  # pylint: disable=g-import-not-at-top
      self._board = tensorboardX.SummaryWriter(
          str(directory), purge_step=start or None)
      print(f"the metrics are in {path} and in TensorBoard files: tensorboard "
            f"--logdir={directory}", file=sys.stderr)
    except ImportError:
      print(f"{path} has the metrics; TensorBoard files are not written, "
            "because they need the package tensorboardX: pip install "
            "'specjax[experiments]'", file=sys.stderr)
      self._board = None

  def write(self, step: int, row: Mapping[str, float]) -> None:
    """Appends the values of a step.

    Args:
      step: number of steps taken so far.
      row: values by name.
    """
    with naming(self._file.name):
      for name, value in row.items():
        self._csv.writerow([step, name, value])
        if self._board:
          self._board.add_scalar(name, value, step)
      self._file.flush()
    if self._wandb:
      self._wandb.log(row, step=step)

  def close(self) -> None:
    """Closes the files."""
    if self._wandb:
      self._wandb.finish()
    if self._board:
      with contextlib.suppress(OSError):  # metrics.csv has the same values
        self._board.close()
    with naming(self._file.name):
      self._file.close()


def _wandb_run(directory: pathlib.Path, project: str) -> Any:
  """Returns the directory's run in Weights & Biases, started or resumed."""
  import wandb  # pylint: disable=g-import-not-at-top
  path = directory / "wandb_id"
  if not path.exists():
    with atomically(path) as f:
      f.write(uuid.uuid4().hex.encode())
  try:
    return wandb.init(project=project, dir=str(directory), name=directory.name,
                      id=path.read_text("utf-8"), resume="allow")
  except Exception as e:  # wandb raises many kinds, as for a missing key
    raise ValueError(
        f"Weights & Biases cannot start for the project {project!r} "
        f"({' '.join(str(e).split())[:200]}); log in with `wandb login`, or "
        "set WANDB_MODE=offline") from e


def read(directory: pathlib.Path, name: str, steps: int | None = None
         ) -> list[tuple[int, float]]:
  """Returns `[(step, value)]` of a metric, in the order of the steps.

  Args:
    directory: the run's directory.
    name: name of the metric.
    steps: last step to read. None means all steps.
  """
  return [(step, float(value))
          for step, row_name, value in _rows(pathlib.Path(directory) / _FILE)
          if row_name == name and (steps is None or step <= steps)]


def spent(directory: pathlib.Path, tokens_per_step: int, steps: int
          ) -> tuple[int, float]:
  """Returns `(tokens, minutes)` of the first steps of a run.

  Args:
    directory: the run's directory.
    tokens_per_step: number of tokens in each step.
    steps: number of steps.
  """
  minutes, before = 0.0, 0
  for step, pace in read(directory, "tokens_per_second", steps):
    minutes += (step - before) * tokens_per_step / pace / 60
    before = step
  return steps * tokens_per_step, minutes


def _rows(path: pathlib.Path) -> list[tuple[int, str, str]]:
  """Returns the complete rows of a file. An incomplete last row is left out."""
  try:
    with open(path, newline="", encoding="utf-8") as f:
      header, *rows = csv.reader(f)
      # The last row is incomplete if the run was killed while writing it.
      if rows and len(rows[-1]) < 3:
        rows.pop()
      if header == _HEADER:
        return [(int(step), name, value) for step, name, value in rows]
  except (ValueError, csv.Error):
    pass
  raise ValueError(f"{path} does not have the columns {', '.join(_HEADER)}; "
                   "move it, or choose another directory")
