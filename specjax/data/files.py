"""Files that are whole or not there."""

import contextlib
import os
import pathlib


@contextlib.contextmanager
def atomically(path):
  """Opens a file for writing bytes; it appears under its name when complete.

  Args:
    path: of the file; one that exists is replaced.
  """
  path = pathlib.Path(path)
  temporary = path.with_name(path.name + ".partial")
  with open(temporary, "wb") as f:
    yield f
    f.flush()
    os.fsync(f.fileno())
  os.replace(temporary, path)
