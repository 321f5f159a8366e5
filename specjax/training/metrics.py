"""Metrics on disk: a CSV file and, where installed, TensorBoard events."""

import csv
import pathlib


class MetricsLog:
  """Appends to `metrics.csv` (step, name, value) and to TensorBoard.

  Args:
    directory: of the files; created if needed.
    start: steps that the run has behind it. Rows behind them are dropped, for
      they will be written again.
  """

  def __init__(self, directory: pathlib.Path, start: int):
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "metrics.csv"
    kept = []
    if path.exists():
      with open(path, newline="") as f:
        kept = [r for r in csv.reader(f) if r[0].isdigit() and
                int(r[0]) <= start]
    self._file = open(path, "w", newline="")
    self._csv = csv.writer(self._file)
    self._csv.writerow(["step", "name", "value"])
    self._csv.writerows(kept)
    try:
      import tensorboardX  # pylint: disable=g-import-not-at-top
      self._board = tensorboardX.SummaryWriter(
          str(directory), purge_step=start or None)
    except ImportError:
      self._board = None

  def write(self, step: int, row: dict[str, float]) -> None:
    for name, value in row.items():
      self._csv.writerow([step, name, value])
      if self._board:
        self._board.add_scalar(name, value, step)
    self._file.flush()

  def close(self) -> None:
    self._file.close()
    if self._board:
      self._board.close()
