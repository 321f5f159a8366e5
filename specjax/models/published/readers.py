"""The tensors of a file or a directory by name, none of which is read yet."""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import functools
import json
import math
import pathlib

import jax.numpy as jnp
import numpy as np

from specjax.files import read_json

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_AGAIN = "it is truncated or no safetensors file: download it again"
_PICKLES = ("*.bin", "*.pt", "*.pth")
DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16,
    "BF16": jnp.bfloat16, "I64": np.int64, "I32": np.int32,
    "I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_,
}


@dataclasses.dataclass(frozen=True)
class StoredTensor:
  """A tensor that is in a file until it is read.

  Attributes:
    shape: its sizes.
    dtype: of its numbers, once read.
    load: see `read`.
  """

  shape: tuple[int, ...]
  dtype: np.dtype
  load: Callable[[np.dtype], np.ndarray]

  def read(self, dtype: np.dtype | None = None) -> np.ndarray:
    """The numbers.

    Args:
      dtype: if they have to be computed, they come in this one; what can be
        looked at in the file comes in its own dtype.
    """
    return self.load(np.dtype(dtype or self.dtype))


def open_safetensors(path: pathlib.Path) -> dict[str, StoredTensor]:
  """The tensors of a safetensors file.

  Only the header is read. A tensor is mapped into memory while it is in use,
  and its pages are given back with it.

  Raises:
    ValueError: the file is truncated, or no safetensors file.
  """
  size = path.stat().st_size
  with open(path, "rb") as f:
    length = int.from_bytes(f.read(8), "little")
    if not 2 <= length <= size - 8:
      raise ValueError(f"{path} has {size} bytes and should begin with a "
                       f"header of {length}; {_AGAIN}")
    header = f.read(length)
  entries = _header(path, header)
  tensors = {}
  for name, entry in entries.items():
    dtype, shape, (begin, end) = (
        entry[key] for key in ("dtype", "shape", "data_offsets"))
    if dtype not in DTYPES:
      raise ValueError(f"{path} holds {name} as {dtype}; specjax reads "
                       f"{', '.join(DTYPES)}: take weights that are not "
                       "quantised, or a GGUF file")
    dtype = np.dtype(DTYPES[dtype])
    if end > size - 8 - length:
      raise ValueError(f"{path} ends before its tensor {name}; {_AGAIN}")
    if end - begin != math.prod(shape) * dtype.itemsize:
      raise ValueError(f"{path} gives {end - begin} bytes to {name}, which is "
                       f"{dtype} {shape}; {_AGAIN}")
    tensors[name] = StoredTensor(
        tuple(shape), dtype, functools.partial(
            _load, path, 8 + length + begin, tuple(shape), dtype))
  return tensors


def _header(path, text):
  """The entries of a safetensors header, by name."""
  try:
    entries = json.loads(text)
    entries.pop("__metadata__", None)
    for entry in entries.values():
      entry["dtype"], entry["shape"], *entry["data_offsets"]  # are there
  except (ValueError, AttributeError, KeyError, TypeError):
    raise ValueError(f"the header of {path} cannot be read; {_AGAIN}") from None
  return entries


def _load(path, offset, shape, dtype, wanted):
  del wanted
  return mapped(path, offset, shape, dtype)


def mapped(path: pathlib.Path, offset: int, shape: tuple[int, ...],
           dtype: np.dtype) -> np.ndarray:
  """Numbers as they stand in a file; their pages go with the array."""
  size = math.prod(shape) * dtype.itemsize
  if not size:
    return np.zeros(shape, dtype)
  data = np.memmap(path, np.uint8, "r", offset=offset, shape=(size,))
  return np.asarray(data).view(dtype).reshape(shape)


def open_directory(directory: pathlib.Path) -> Mapping[str, StoredTensor]:
  """The tensors of a directory: of one safetensors file, or of its shards.

  Raises:
    ValueError: there are none, a shard is missing, or a file is truncated.
  """
  if (directory / WEIGHTS).is_file():
    return open_safetensors(directory / WEIGHTS)
  if not (directory / INDEX).is_file():
    raise ValueError(_no_weights(directory))
  index = directory / INDEX
  places = read_json(index, "download it again").get("weight_map")
  if not isinstance(places, dict):
    raise ValueError(f"{index} has no weight_map; download it again")
  shards = {}
  for file in sorted(set(places.values())):
    if not (directory / file).is_file():
      raise ValueError(f"{directory / file} is missing, a shard that {INDEX} "
                       "names; download it")
    shards[file] = open_safetensors(directory / file)
  for name, file in places.items():
    if name not in shards[file]:
      raise ValueError(f"{directory / file} has no tensor {name}, which "
                       f"{INDEX} says it has; download both again")
  return {name: shards[file][name] for name, file in places.items()}


def _no_weights(directory):
  for pattern in _PICKLES:
    for path in sorted(directory.glob(pattern)):
      return pickled(path)
  return (f"{directory} holds no {WEIGHTS} and no {INDEX}; give a directory of "
          "a published model, or a .gguf file")


def pickled(path: pathlib.Path) -> str:
  """The error for weights in a format that can run code when it is read."""
  return (f"{path} is a pickle, which can run code when it is read; write it "
          f"as safetensors: transformers.AutoModelForCausalLM.from_pretrained("
          f"{str(path.parent)!r}).save_pretrained(directory)")
