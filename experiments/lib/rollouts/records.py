"""Stores the runs of a study in JSONL files, for one or several processes.

A run is a dict with the measurements of one rollout. A unit is a tuple that
identifies the prompt and the settings. It has one run for each name, such as
the name of a configuration.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
import contextlib
import json
import os
import pathlib
import pickle
from typing import Any

import jax
from jax.experimental import multihost_utils
import numpy as np

from specjax.utils import files
from specjax.utils import processes


class Record:
  """Runs of a study. Every run is appended to a file when it is complete.

  Process 0 appends to `path`, for example runs.jsonl. Process 1 appends to
  runs.1.jsonl in the same directory, and so on. The processes need no common
  file system. All processes create the record and call `merge`.

  Attributes:
    runs: `{unit: {name: run}}`. Before `merge`, the runs that any process had
      stored when the record was created, and new runs of this process. After
      `merge`, the runs of all processes.
  """

  def __init__(self, path: pathlib.Path):
    """Reads the stored runs.

    If a killed process has left an incomplete last line, removes this line.
    """
    self._path, self._added = path, {}
    self._own = path if processes.is_first() else path.with_suffix(
        f".{jax.process_index()}{path.suffix}")
    path.parent.mkdir(parents=True, exist_ok=True)
    stored = _read([self._own, *self._shares()])
    _remove_incomplete_line(self._own)
    self.runs = {}
    for runs in _from_all(stored):
      _update(self.runs, runs)

  def _shares(self) -> list[pathlib.Path]:
    """Returns the files of other processes. Empty except in process 0."""
    return sorted(self._path.parent.glob(
        f"{self._path.stem}.*{self._path.suffix}")
        if processes.is_first() else ())

  def missing(self, units: list[tuple], names: Iterable[str]) -> list[tuple]:
    """Returns the units without a run of every name in `names`.

    In batched decoding, the runs of a unit are stored one by one. So a unit may
    have runs of some names only.
    """
    return [unit for unit in units if unit not in self.runs
            or not set(names) <= self.runs[unit].keys()]

  @contextlib.contextmanager
  def open(self) -> Iterator[Callable[[tuple, dict[str, Any]], None]]:
    """Opens the file of this process.

    Yields:
      A function that appends the runs of a unit: `(unit, {name: run})`.
    """
    with files.naming(self._own), open(self._own, "ab") as f:
      def add(unit, runs):
        f.write(_line(unit, runs))
        f.flush()
        for stored in (self._added, self.runs):
          _update(stored, {unit: runs})

      yield add

  def merge(self) -> None:
    """Writes the runs of all processes to `path`, and deletes their files."""
    for runs in _from_all(self._added):
      _update(self.runs, runs)
    processes.by_the_first(self._write)
    if self._own != self._path:
      self._own.unlink(missing_ok=True)

  def _write(self):
    shares = self._shares()
    if jax.process_count() > 1 or shares:
      with files.atomically(self._path) as f:
        f.writelines(map(_line, self.runs, self.runs.values()))
    for share in shares:
      share.unlink(missing_ok=True)


def _from_all(value: Any) -> list[Any]:
  """Returns the values of all processes. All processes must call it."""
  if jax.process_count() == 1:
    return [value]
  gather = multihost_utils.process_allgather
  data = np.frombuffer(pickle.dumps(value), np.uint8)
  sizes = gather(np.asarray(len(data), np.int32))
  rows = gather(np.pad(data, (0, max(sizes) - len(data))))
  return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes)]


def _update(stored: dict[tuple, dict], runs: dict[tuple, dict]) -> None:
  for unit, found in runs.items():
    stored.setdefault(unit, {}).update(found)


def _remove_incomplete_line(path: pathlib.Path) -> None:
  if path.exists():
    *_, cut = path.read_bytes().split(b"\n")
    if cut:  # the next record begins a line
      os.truncate(path, path.stat().st_size - len(cut))


def _read(paths: list[pathlib.Path]) -> dict[tuple, dict[str, Any]]:
  """Returns the runs in files. Ignores incomplete last lines."""
  runs = {}
  for path in filter(pathlib.Path.exists, paths):
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
      try:
        record = json.loads(line)
        _update(runs, {tuple(record["unit"]): record["runs"]})
      except (ValueError, TypeError, KeyError):
        raise ValueError(f"{path} line {number} is not a run of a study; "
                         "delete the line, or choose another path") from None
  return runs


def _line(unit: tuple, runs: dict[str, dict[str, Any]]) -> bytes:
  return (json.dumps({"unit": unit, "runs": runs}) + "\n").encode()
