"""Metrics on disk: a CSV file and, where installed, TensorBoard events."""

import contextlib
import csv
import io
import pathlib
import sys

from specjax.files import atomically
from specjax.files import naming

_FILE = "metrics.csv"
_HEADER = ["step", "name", "value"]


class MetricsLog:
  """Appends to `metrics.csv` (step, name, value) and to TensorBoard.

  Args:
    directory: of the files; created if needed.
    start: steps that the run has taken. Rows of later ones are dropped, for
      they will be written again.

  Raises:
    ValueError: the directory's `metrics.csv` is not a run's.
  """

  def __init__(self, directory: pathlib.Path, start: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / _FILE
    kept = []
    if path.exists():
      kept = [row for row in _rows(path) if row[0] <= start]
    text = io.StringIO(newline="")
    csv.writer(text).writerows([_HEADER, *kept])
    with atomically(path) as f:
      f.write(text.getvalue().encode())
    self._file = open(path, "a", newline="")
    self._csv = csv.writer(self._file)
    try:
      import tensorboardX  # pylint: disable=g-import-not-at-top
      self._board = tensorboardX.SummaryWriter(
          str(directory), purge_step=start or None)
    except ImportError:
      print(f"{path} has the metrics, and TensorBoard files need the package "
            "tensorboardX: pip install 'specjax[experiments]'", file=sys.stderr)
      self._board = None

  def write(self, step: int, row: dict[str, float]) -> None:
    """Appends the values by name of a step."""
    with naming(self._file.name):
      for name, value in row.items():
        self._csv.writerow([step, name, value])
        if self._board:
          self._board.add_scalar(name, value, step)
      self._file.flush()

  def close(self) -> None:
    """Closes the files; nothing can be written after it."""
    if self._board:
      with contextlib.suppress(OSError):  # the same is in metrics.csv
        self._board.close()
    with naming(self._file.name):
      self._file.close()


def read(directory: pathlib.Path, name: str) -> list[tuple[int, float]]:
  """`[(step, value)]` of a metric, in the order of the steps."""
  return [(step, float(value))
          for step, row_name, value in _rows(pathlib.Path(directory) / _FILE)
          if row_name == name]


def spent(directory: pathlib.Path, tokens_per_step: int) -> tuple[int, float]:
  """What a run took: the tokens that it read, and its minutes.

  Args:
    directory: of the run.
    tokens_per_step: of all its steps.
  """
  tokens, minutes, before = 0, 0.0, 0
  for step, pace in read(directory, "tokens_per_second"):
    part = (step - before) * tokens_per_step
    tokens, minutes, before = tokens + part, minutes + part / pace / 60, step
  return tokens, minutes


def _rows(path) -> list[tuple[int, str, str]]:
  """The rows, all of them complete but perhaps the last."""
  try:
    with open(path, newline="", encoding="utf-8") as f:
      header, *rows = csv.reader(f)
      if rows and len(rows[-1]) < 3:  # killed while it was written
        rows.pop()
      if header == _HEADER:
        return [(int(step), name, value) for step, name, value in rows]
  except (ValueError, csv.Error):
    pass
  raise ValueError(f"{path} has not the columns {', '.join(_HEADER)} of a run; "
                   "move it, or choose another directory")
