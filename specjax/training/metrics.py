"""Metrics on disk: a CSV file and, where installed, TensorBoard events."""

import csv
import io
import pathlib

from specjax.files import atomically

_FILE = "metrics.csv"


class MetricsLog:
  """Appends to `metrics.csv` (step, name, value) and to TensorBoard.

  Args:
    directory: of the files; created if needed.
    start: steps that the run has taken. Rows of later ones are dropped, for
      they will be written again.
  """

  def __init__(self, directory: pathlib.Path, start: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / _FILE
    kept = []
    if path.exists():
      with open(path, newline="") as f:
        kept = [r for r in csv.reader(f) if r[0].isdigit() and
                int(r[0]) <= start]
    text = io.StringIO(newline="")
    csv.writer(text).writerows([["step", "name", "value"], *kept])
    with atomically(path) as f:
      f.write(text.getvalue().encode())
    self._file = open(path, "a", newline="")
    self._csv = csv.writer(self._file)
    try:
      import tensorboardX  # pylint: disable=g-import-not-at-top
      self._board = tensorboardX.SummaryWriter(
          str(directory), purge_step=start or None)
    except ImportError:
      self._board = None

  def write(self, step: int, row: dict[str, float]) -> None:
    """Appends the values by name of a step."""
    for name, value in row.items():
      self._csv.writerow([step, name, value])
      if self._board:
        self._board.add_scalar(name, value, step)
    self._file.flush()

  def close(self) -> None:
    """Closes the files; nothing can be written after it."""
    self._file.close()
    if self._board:
      self._board.close()


def read(directory: pathlib.Path, name: str) -> list[tuple[int, float]]:
  """`[(step, value)]` of a metric, in the order of the steps."""
  with open(pathlib.Path(directory) / _FILE, newline="") as f:
    return [(int(row["step"]), float(row["value"]))
            for row in csv.DictReader(f) if row["name"] == name]
