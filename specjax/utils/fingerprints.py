"""Fingerprints of data and settings: short hashes to test equality."""

import dataclasses
import hashlib
import os
from typing import Any

import jax
import numpy as np

_CHUNK = 2**20  # number of bytes of a file read at a time


class Digest:
  """Computation of a `fingerprint` from values that are added one by one.

  The values need not be in memory at the same time.

  >>> digest = Digest()
  >>> digest.add("[0][0]", "a")
  >>> digest.add("[0][1]", "b")
  >>> digest.value == fingerprint(["a", "b"])
  True
  """

  def __init__(self) -> None:
    self._hash = hashlib.sha256()

  @property
  def value(self) -> str:
    """Fingerprint of the added values: 16 hexadecimal digits."""
    return self._hash.hexdigest()[:16]

  def add(self, path: str, leaf: Any) -> None:
    """Adds a leaf of a tree.

    Args:
      path: path of the leaf in the format of `jax.tree_util.keystr`.
      leaf: array, string, dataclass or other value, see `fingerprint`.
    """
    for part in (path.encode(), *_parts(leaf)):
      self._add(part)

  def add_array(self, path: str, file: str | os.PathLike[str],
                dtype: np.dtype) -> None:
    """Adds a one-dimensional array stored in a file.

    Args:
      path: path of the leaf, see `add`.
      file: path of the file with the array's bytes.
      dtype: dtype of the array.
    """
    size = os.path.getsize(file)
    self._add(path.encode())
    self._add(f"{(size // dtype.itemsize,)} {dtype}".encode())
    self._hash.update(f"{size} ".encode())
    with open(file, "rb") as f:
      while chunk := f.read(_CHUNK):
        self._hash.update(chunk)

  def _add(self, part: bytes) -> None:
    # The hash includes lengths, so that ("ab", "c") differs from ("a", "bc").
    self._hash.update(f"{len(part)} ".encode())
    self._hash.update(part)


def fingerprint(*things: Any) -> str:
  """Returns a short hash of trees of arrays, strings and settings.

  Equal values have equal fingerprints in every process and on every machine.
  The hash includes the shape, dtype and bytes of an array, the characters of a
  string, the fields of a dataclass, and the repr of any other leaf.

  >>> fingerprint({"x": np.arange(3, dtype=np.int32)}, "a text", 0.5)
  'bb8b413ab37e6702'
  >>> fingerprint("a", "b") == fingerprint("ab")
  False

  Args:
    *things: trees (dicts, lists, tuples, flax dataclasses) of such leaves.

  Returns:
    16 hexadecimal digits.

  Raises:
    TypeError: the repr of a leaf contains its address in memory.
  """
  digest = Digest()
  leaves = jax.tree_util.tree_leaves_with_path(
      things, is_leaf=lambda x: x is None)
  for path, leaf in leaves:
    digest.add(jax.tree_util.keystr(path), leaf)
  return digest.value


def _parts(leaf: Any) -> tuple[bytes, ...]:
  """Returns the bytes that identify a leaf."""
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
