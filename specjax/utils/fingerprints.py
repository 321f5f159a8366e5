"""Fingerprints of data and settings."""

import dataclasses
import hashlib
import os
from typing import Any

import jax
import numpy as np

_CHUNK = 2**20  # bytes of a file that are read together


class Digest:
  """A `fingerprint` of things that are added one by one.

  Used directly, it does not hold the things in memory together.

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
    """The fingerprint of all that was added: 16 hexadecimal digits."""
    return self._hash.hexdigest()[:16]

  def add(self, path: str, leaf: Any) -> None:
    """Adds a leaf of a tree.

    Args:
      path: the place of the leaf as `jax.tree_util.keystr` writes it.
      leaf: a leaf, see `fingerprint`.
    """
    for part in (path.encode(), *_parts(leaf)):
      self._add(part)

  def add_array(self, path: str, file: str | os.PathLike[str],
                dtype: np.dtype) -> None:
    """Adds a one-dimensional array whose bytes are the content of a file."""
    size = os.path.getsize(file)
    self._add(path.encode())
    self._add(f"{(size // dtype.itemsize,)} {dtype}".encode())
    self._hash.update(f"{size} ".encode())
    with open(file, "rb") as f:
      while chunk := f.read(_CHUNK):
        self._hash.update(chunk)

  def _add(self, part):
    # Each part with its length, so that no two lists of parts read alike.
    self._hash.update(f"{len(part)} ".encode())
    self._hash.update(part)


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
  digest = Digest()
  leaves = jax.tree_util.tree_leaves_with_path(
      things, is_leaf=lambda x: x is None)
  for path, leaf in leaves:
    digest.add(jax.tree_util.keystr(path), leaf)
  return digest.value


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
