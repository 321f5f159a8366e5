"""Whole files, directories that belong to one run, and fingerprints of both.

A file that is written `atomically` is either complete or absent. A directory
that a run has made its own by `claim` is refused to a run of other data or
settings, and `fingerprint` is how such a run is told from this one.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
from typing import Any
from typing import BinaryIO

import jax
import numpy as np

# Raised whenever `fingerprint` changes, so that what was recorded under an
# older one is refused by name and not compared.
_FORMAT = 2


@contextlib.contextmanager
def atomically(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
  """Opens a file for writing bytes; it appears under its name when complete.

  Args:
    path: of the file; one that exists is replaced.

  Yields:
    The file, under another name.
  """
  path = pathlib.Path(path)
  temporary = path.with_name(path.name + ".partial")
  with open(temporary, "wb") as f:
    yield f
    f.flush()
    os.fsync(f.fileno())
  os.replace(temporary, path)


def claim(path: str | os.PathLike[str], manifest: dict[str, Any], what: str
          ) -> None:
  """Writes what a directory holds, or checks that it holds the same.

  Args:
    path: of the JSON file that says it; its directory is created if needed.
    manifest: values that JSON can hold.
    what: a word for the error, such as "record".

  Raises:
    ValueError: the file says something else, is of another version, or is not
      JSON.
  """
  path = pathlib.Path(path)
  if not path.exists():
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomically(path) as f:
      text = json.dumps({"format": _FORMAT, **manifest}, indent=2)
      f.write((text + "\n").encode())
    return
  found = read_manifest(path, what)
  others = [_difference(name, found.get(name), value)
            for name, value in manifest.items() if found.get(name) != value]
  if others:
    raise ValueError(f"{path.parent} holds another {what}: "
                     f"{'; '.join(others)}: choose another path, or delete it")


def read_manifest(path: str | os.PathLike[str], what: str) -> dict[str, Any]:
  """What `claim` wrote.

  Args:
    path: of the JSON file.
    what: a word for the error, such as "record".

  Raises:
    ValueError: the file is not JSON, or of another version of specjax.
  """
  path = pathlib.Path(path)
  try:
    found = json.loads(path.read_text("utf-8"))
  except ValueError as e:
    raise ValueError(f"{path} is not JSON ({e}); choose another path, or "
                     f"delete {path.parent}") from None
  if not isinstance(found, dict) or not found:
    raise ValueError(f"{path} describes no {what}; choose another path, or "
                     f"delete {path.parent}")
  if found.get("format") != _FORMAT:
    raise ValueError(
        f"{path.parent} holds a {what} of another version of specjax, whose "
        "fingerprints differ; choose another path, or delete it and start "
        "again")
  return found


def _difference(name, *values) -> str:
  """What two manifests hold, from where it begins to differ."""
  texts = [str(value) for value in values]
  start = max(len(os.path.commonprefix(texts)) - 20, 0)
  there, here = ("..." * (start > 0) + text[start:start + 60]
                 for text in texts)
  return f"{name} is {there} there and {here} here"


def fingerprint(*things: Any) -> str:
  """A short hash of arrays, texts and settings, in trees of any form.

  Equal things have equal fingerprints, in every process and on every machine:
  an array counts with its shape, dtype and bytes, a text with its characters, a
  dataclass with its fields, and any other leaf, such as a number, with its
  repr.

  >>> fingerprint({"x": np.arange(3, dtype=np.int32)}, "a text", 0.5)
  'bb8b413ab37e6702'
  >>> fingerprint("a", "b") == fingerprint("ab")
  False

  Args:
    *things: trees (dicts, lists, tuples, flax dataclasses) of such leaves.

  Returns:
    16 hexadecimal digits.

  Raises:
    TypeError: the repr of a leaf is its place in memory, which differs from
      run to run.
  """
  digest = hashlib.sha256()
  leaves = jax.tree_util.tree_leaves_with_path(
      things, is_leaf=lambda x: x is None)
  for path, leaf in leaves:
    # Each part with its length, so that no two lists of parts read alike.
    for part in (jax.tree_util.keystr(path).encode(), *_parts(leaf)):
      digest.update(f"{len(part)} ".encode() + part)
  return digest.hexdigest()[:16]


def _parts(leaf) -> tuple[bytes, ...]:
  """The bytes that tell a leaf from others."""
  if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(
      leaf.dtype, jax.dtypes.prng_key):
    return str(leaf.dtype).encode(), *_parts(jax.random.key_data(leaf))
  if isinstance(leaf, jax.Array | np.ndarray | np.generic):
    array = np.asarray(leaf)
    return f"{array.shape} {array.dtype}".encode(), array.tobytes()
  if isinstance(leaf, str):
    return b"text", leaf.encode("utf-8", "surrogatepass")
  name = type(leaf).__qualname__.encode()
  if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
    fields = {f.name: getattr(leaf, f.name) for f in dataclasses.fields(leaf)}
    return name, fingerprint(fields).encode()
  text = repr(leaf)
  if " at 0x" in text:
    raise TypeError(f"{text} has no repr that says what it is; give values, or "
                    "frozen dataclasses of values")
  return name, text.encode()
