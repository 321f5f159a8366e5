"""Headers of GGUF files: metadata, and the locations of the tensors.

The package `gguf` can also read headers, but creates several arrays for every
string of the vocabulary. For a model of 0.5 billion parameters, this takes
longer than dequantising the model.
"""

import mmap
import pathlib
import struct
from typing import Any
from typing import NamedTuple

_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?",
            10: "Q", 11: "q", 12: "d"}  # format code of `struct` by GGUF type


class TensorHeader(NamedTuple):
  """Entry of a tensor in the header.

  Attributes:
    shape: sizes of the axes, the innermost axis last.
    kind: number of the storage type (`gguf.GGMLQuantizationType`).
    offset: position of the tensor's first byte in the file.
  """

  shape: tuple[int, ...]
  kind: int
  offset: int


def read(path: pathlib.Path) -> tuple[dict[str, Any], dict[str, TensorHeader]]:
  """Returns `(metadata, tensors)`: values by key, and headers by tensor name.

  Raises:
    ValueError: the file is truncated, or is not a little-endian GGUF file of
      version 2 or 3.
  """
  try:
    with (open(path, "rb") as file,
          mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data):
      return _read(_Reader(data))
  except (struct.error, ValueError, KeyError, RecursionError) as e:
    raise ValueError(f"{path} is truncated or is not a GGUF file; download it "
                     f"again ({e})") from None


class _Reader:
  """Reads successive values of a file. `position` is the next byte."""

  def __init__(self, data: mmap.mmap) -> None:
    self.position = 0
    self._data = data

  def numbers(self, code: str, count: int = 1) -> tuple[Any, ...]:
    """Returns the next `count` numbers. `code` is a format code of `struct`."""
    form = struct.Struct(f"<{count}{code}")
    values = form.unpack_from(self._data, self.position)
    self.position += form.size
    return values

  def string(self) -> str:
    [size] = self.numbers("Q")
    [content] = self.numbers("s", size)
    return content.decode("utf-8")

  def value(self, kind: int) -> Any:
    if kind == _STRING:
      return self.string()
    if kind != _ARRAY:
      return self.numbers(_NUMBERS[kind])[0]
    [inner], [count] = self.numbers("I"), self.numbers("Q")
    if inner in _NUMBERS:
      return list(self.numbers(_NUMBERS[inner], count))
    return [self.value(inner) for _ in range(count)]


def _read(reader: _Reader) -> tuple[dict[str, Any], dict[str, TensorHeader]]:
  magic, [version] = reader.numbers("s", 4), reader.numbers("I")
  if magic != (b"GGUF",) or version not in _VERSIONS:
    raise ValueError(f"it starts with {magic[0]!r} and version {version}")
  num_tensors, num_values = reader.numbers("Q", 2)
  metadata, tensors = {}, {}
  for _ in range(num_values):
    name, [kind] = reader.string(), reader.numbers("I")
    metadata[name] = reader.value(kind)
  for _ in range(num_tensors):
    name, [axes] = reader.string(), reader.numbers("I")
    shape = reader.numbers("Q", axes)[::-1]
    [kind], [offset] = reader.numbers("I"), reader.numbers("Q")
    tensors[name] = TensorHeader(shape, kind, offset)
  alignment = metadata.get("general.alignment", 32)
  start = -(-reader.position // alignment) * alignment
  return metadata, {
      name: tensor._replace(offset=start + tensor.offset)
      for name, tensor in tensors.items()}
