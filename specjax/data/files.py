"""Files that are whole or not there, and whose they are."""

import contextlib
import hashlib
import json
import os
import pathlib
from typing import Any

import jax
import numpy as np


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


def claim(path, manifest: dict[str, Any], what: str) -> None:
  """Writes what a directory holds, or checks that it holds the same.

  Args:
    path: of the JSON file that says it; its directory is created if needed.
    manifest: values that JSON can hold.
    what: a word for the error, such as "record".

  Raises:
    ValueError: the file says something else, or is not JSON.
  """
  path = pathlib.Path(path)
  if not path.exists():
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomically(path) as f:
      f.write((json.dumps(manifest, indent=2) + "\n").encode())
    return
  try:
    found = json.loads(path.read_text("utf-8"))
  except ValueError as e:
    raise ValueError(f"{path} is not JSON ({e}); choose another path, or "
                     f"delete {path.parent}") from None
  others = [_difference(name, found.get(name), value)
            for name, value in manifest.items() if found.get(name) != value]
  if others:
    raise ValueError(f"{path.parent} holds another {what}: "
                     f"{'; '.join(others)}: choose another path, or delete it")


def _difference(name, *values) -> str:
  """What two manifests hold, from where it begins to differ."""
  texts = [str(value) for value in values]
  start = max(len(os.path.commonprefix(texts)) - 20, 0)
  there, here = ("..." * (start > 0) + text[start:start + 60]
                 for text in texts)
  return f"{name} is {there} there and {here} here"


def fingerprint(tree) -> str:
  """A short hash of the names, shapes and values of a tree of arrays."""
  digest = hashlib.sha256()
  for path, x in jax.tree_util.tree_leaves_with_path(tree):
    x = np.asarray(x)
    digest.update(f"{jax.tree_util.keystr(path)}{x.shape}{x.dtype}".encode())
    digest.update(x.tobytes())
  return digest.hexdigest()[:16]
