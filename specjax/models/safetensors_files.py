"""Reader and writer of safetensors files, one tensor at a time."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
import dataclasses
import functools
import json
import math
import os
import pathlib
from typing import Protocol

import chex
import jax
import jax.numpy as jnp
import numpy as np
import safetensors

from specjax.utils.files import atomically
from specjax.utils.files import check_downloaded

_AGAIN = ("it is truncated or no safetensors file: download it again, or write "
          "it again")
# Advice at the end of errors about quantised weights.
NOT_QUANTIZED = "give weights that are not quantised, or a GGUF file"
_AT_ONCE = 1 << 16  # number of weights read at a time
DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16,
    "BF16": jnp.bfloat16, "I64": np.int64, "I32": np.int32,
    "I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_,
}

# The numbers of a 4-bit float: a sign, two bits of exponent, one of mantissa.
_FP4 = np.float32([0, .5, 1, 1.5, 2, 3, 4, 6])
_FP4 = np.concatenate([_FP4, -_FP4])


class Rows(Protocol):
  """Interface of arrays in a file. A slice along the first axis is read."""

  def __getitem__(self, rows: slice, /) -> np.ndarray:
    ...


@dataclasses.dataclass(frozen=True)
class StoredTensor:
  """A tensor in a file.

  Attributes:
    shape: sizes of the axes.
    dtype: dtype of the numbers returned by `load`.
    load: function `() -> Rows` that opens the tensor. The file is mapped into
      memory as long as the returned object exists.
  """

  shape: tuple[int, ...]
  dtype: np.dtype
  load: Callable[[], Rows]

  def read(self, dtype: np.dtype | None = None) -> np.ndarray:
    """Returns a copy of the tensor.

    Args:
      dtype: dtype of the copy. None means the dtype of the tensor.
    """
    out, rows = np.empty(self.shape, dtype or self.dtype), self.load()
    if out.ndim < 2:
      out[...] = rows[...]
      return out
    step = rows_at_once(math.prod(self.shape[1:]))
    for start in range(0, len(out), step):
      end = min(start + step, len(out))
      out[start:end] = rows[start:end]
    return out


def rows_at_once(size: int) -> int:
  """Returns the number of rows to read at a time, for rows of `size` numbers.

  Dequantising and transposing are twice as fast if the rows fit into a core's
  cache.
  """
  return max(1, _AT_ONCE // max(1, size))


def open_safetensors(path: pathlib.Path) -> dict[str, StoredTensor]:
  """Returns the tensors of a safetensors file, by name.

  Only the header is read. The file is mapped into memory, and a tensor is read
  when it is used.

  Raises:
    ValueError: the file is truncated, a Git LFS pointer, or not a safetensors
      file; a tensor has a dtype that specjax does not read.
  """
  check_downloaded(path)
  try:
    file = safetensors.safe_open(path, framework="numpy")
  except safetensors.SafetensorError as e:
    raise ValueError(f"{path} cannot be read ({e}); {_AGAIN}") from None
  tensors = {}
  for name in file.keys():
    part = file.get_slice(name)
    shape, dtype = tuple(part.get_shape()), part.get_dtype()
    if dtype not in DTYPES:
      raise ValueError(f"{path} has the tensor {name} as {dtype}; specjax "
                       f"reads {', '.join(DTYPES)}: {NOT_QUANTIZED}")
    dtype = np.dtype(DTYPES[dtype])
    tensors[name] = StoredTensor(
        shape, dtype, functools.partial(file.get_slice, name)
        if math.prod(shape) else functools.partial(np.zeros, shape, dtype))
  return tensors


@dataclasses.dataclass(frozen=True)
class _Mxfp4:
  """Matrices `[in, out]` in MXFP4. A slice of them is dequantised when read.

  Attributes:
    blocks: `[E, out, in / 32, 16]` uint8, two numbers per byte, of which the
      first has the lower bits.
    scales: `[E, out, in / 32]` uint8, exponents of 2 plus 127.
  """

  blocks: Rows
  scales: Rows

  def __getitem__(self, rows: slice) -> np.ndarray:
    codes = self.blocks[rows]
    numbers = _FP4[np.stack([codes & 15, codes >> 4], axis=-1)]
    exponents = self.scales[rows].astype(np.int32) - 127
    return np.ldexp(numbers, exponents[..., None, None]).reshape(
        *codes.shape[:2], -1).swapaxes(1, 2)


def dequantised(tensors: Mapping[str, StoredTensor]
                ) -> dict[str, StoredTensor]:
  """Returns the tensors with those in MXFP4 as float32 `[E, in, out]`.

  MXFP4 stores two tensors (OCP Microscaling Formats 1.0; GPT-OSS), whose names
  end in "_blocks" and "_scales".

  Raises:
    ValueError: the shapes of two such tensors do not match.
  """
  result = dict(tensors)
  for name, blocks in tensors.items():
    base = name.removesuffix("_blocks")
    scales = tensors.get(f"{base}_scales")
    if base == name or scales is None:
      continue
    if blocks.shape != (*scales.shape, 16) or len(scales.shape) != 3:
      raise ValueError(f"{name} is {blocks.shape} and its scales "
                       f"{scales.shape}; MXFP4 needs 16 bytes for each scale "
                       "of three axes: download the file again")
    count, outputs, groups = scales.shape
    del result[name], result[f"{base}_scales"]
    result[base] = StoredTensor(
        (count, 32 * groups, outputs), np.dtype(np.float32),
        lambda blocks=blocks, scales=scales: _Mxfp4(
            blocks.load(), scales.load()))
  return result


def float_dtype(dtype: jax.typing.DTypeLike) -> np.dtype:
  """Returns `dtype` as a NumPy dtype of weights.

  Raises:
    ValueError: the dtype is not a floating-point dtype.
  """
  try:
    dtype = np.dtype(dtype)
  except TypeError:
    raise ValueError(f"dtype is {dtype!r}; give float32, bfloat16 or float16"
                     ) from None
  if not jnp.issubdtype(dtype, jnp.floating):
    raise ValueError(f"dtype is {dtype.name}, an integer type; give float32, "
                     "bfloat16 or float16, and use models.quantization for "
                     "int8")
  return dtype


def check_float(source: str, name: str, tensor: StoredTensor) -> None:
  """Raises `ValueError` for integer weights.

  Integer weights are quantised, and specjax would ignore their scales.

  Args:
    source: name of the file in errors.
    name: name of the tensor.
    tensor: the weights.

  Raises:
    ValueError: the weights are integers.
  """
  if not jnp.issubdtype(tensor.dtype, jnp.floating):
    raise ValueError(f"{source} has the tensor {name} as {tensor.dtype.name}, "
                     f"an integer type; {NOT_QUANTIZED}")


def converted(x: np.ndarray, dtype: jax.typing.DTypeLike) -> np.ndarray:
  """Returns the weights `x` in `dtype`. None means no conversion.

  Raises:
    ValueError: a weight overflows.
  """
  if dtype is None:
    return x
  dtype = float_dtype(dtype)
  with np.errstate(over="ignore"):
    out = x.astype(dtype)
  if not np.isfinite(out).all():
    raise ValueError(f"some weights are infinite or NaN in dtype {dtype.name}; "
                     "write them in float32 or bfloat16")
  return out


def check_arrays(params: Mapping[str, chex.ArrayTree]) -> None:
  """Raises `ValueError` unless all parameters are arrays.

  For example, a `QuantizedMatrix` of `quantize` is not an array.

  Args:
    params: parameters by name.

  Raises:
    ValueError: a parameter is not an array.
  """
  for name, x in params.items():
    if not isinstance(x, (jax.Array, np.ndarray)):
      raise ValueError(f"the parameter {name} is a {type(x).__name__}, but "
                       "only arrays can be stored; give the parameters before "
                       "`quantize`")


def write_safetensors(path: str | os.PathLike[str],
                      kinds: Mapping[str, tuple[tuple[int, ...], np.dtype]],
                      arrays: Iterable[np.ndarray]) -> None:
  """Writes a safetensors file atomically.

  Args:
    path: path of the file.
    kinds: `(shape, dtype)` of each tensor, by name.
    arrays: tensors in the order of `kinds`. They are written one at a time.
  """
  codes = {np.dtype(value): key for key, value in DTYPES.items()}
  header, end = {"__metadata__": {"format": "pt"}}, 0
  for name, (shape, dtype) in kinds.items():
    start, end = end, end + math.prod(shape) * np.dtype(dtype).itemsize
    header[name] = {"dtype": codes[np.dtype(dtype)], "shape": shape,
                    "data_offsets": [start, end]}
  text = json.dumps(header).encode()
  text += b" " * (-len(text) % 8)
  with atomically(path) as f:
    f.write(len(text).to_bytes(8, "little") + text)
    for array in arrays:
      f.write(array.tobytes())
