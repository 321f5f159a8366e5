"""Layouts of parameters in the tensors of files.

A layout is a function from a parameter to NumPy views of it. For each tensor of
the file, the function returns a list of views. The tensor contains these views
one after another along its rows. Loading writes to the views, and export reads
them. The views also determine the shapes of the tensors.

Kernels of specjax are `[D, K, G + 2, H]` (query, key and value of K key-value
heads with G query heads each, of width H), `[D, 2, F]` (gate and up) or
`[in, out]`. Files store `[out, in]`.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
import dataclasses
import math
import re
from typing import ClassVar

import numpy as np

from specjax.models.configuration import TransformerConfig
from specjax.models.safetensors_files import Rows
from specjax.models.safetensors_files import rows_at_once
from specjax.models.safetensors_files import StoredTensor

Views = list[list[np.ndarray]]


def as_it_is(c: TransformerConfig, x: np.ndarray) -> Views:
  """Stores the parameter unchanged in one tensor."""
  del c
  return [[x]]


def turned(c: TransformerConfig, x: np.ndarray) -> Views:
  """Stores the transpose `[out, in]` in one tensor."""
  del c
  return [[x.T]]


def _query_key_value(c: TransformerConfig, x: np.ndarray
                     ) -> tuple[np.ndarray, ...]:
  """Returns query, key and value, each `[K, G or 1, H, D]`.

  The parts of a bias are `[K, G or 1, H]`. With gates, the query is
  `[K, G, 2, H, D]`, and the gate of a head follows its query. Value, or key and
  value, are missing if the kernel has none.
  """
  if x.ndim == 1:
    x = x.reshape(c.kv_heads, -1, c.head_dim)
  else:
    x = np.moveaxis(x, 0, -1)
  queries = c.heads // len(x) * (1 + c.attention_gate)
  query, more = x[:, :queries], range(queries, x.shape[1])
  if c.attention_gate:
    query = query.reshape(
        len(query), 2, -1, *query.shape[2:]).swapaxes(1, 2)
  return query, *(x[:, i:i + 1] for i in more)


def apart(c: TransformerConfig, x: np.ndarray) -> Views:
  """Stores query, key and value in three tensors."""
  return [[part] for part in _query_key_value(c, x)]


def stacked(c: TransformerConfig, x: np.ndarray) -> Views:
  """Stores all queries, keys and values in one tensor."""
  return [[*_query_key_value(c, x)]]


def by_head(c: TransformerConfig, x: np.ndarray) -> Views:
  """Stores the parts on the second axis in one tensor, one after another.

  They are query, key and value per head (GPT-NeoX), or the three inputs of a
  short convolution (LFM2).
  """
  if x.ndim == 1:
    return [[x]]
  return [[np.moveaxis(x, 0, -1)]]


def interleaved(c: TransformerConfig, x: np.ndarray) -> Views:
  """Stores query, key and value in three tensors (GGUF of Llama).

  The two dimensions of each rotated pair are adjacent.
  """
  def pairs(part: np.ndarray) -> np.ndarray:
    halves = part.reshape(*part.shape[:2], 2, c.head_dim // 2, *part.shape[3:])
    return halves.swapaxes(2, 3)

  query, key, value = _query_key_value(c, x)
  return [[pairs(query)], [pairs(key)], [value]]


def _delta_parts(c: TransformerConfig, x: np.ndarray) -> list[np.ndarray]:
  """Returns the inputs of Gated DeltaNet, each `[key heads, rows, D]`.

  They are query, key, value, gate, step size and decay.
  """
  r = c.recurrent
  ends = np.cumsum([*r.widths, r.widths[2], r.heads])
  return [part.reshape(r.key_heads, -1, part.shape[-1])
          for part in np.split(x.T, ends)]


def delta_apart(c: TransformerConfig, x: np.ndarray) -> Views:
  """Stores query, key and value in one tensor, and the others in three."""
  *inputs, gate, step, decay = _delta_parts(c, x)
  return [inputs, [gate], [step], [decay]]


def delta_by_head(c: TransformerConfig, x: np.ndarray) -> Views:
  """Stores query, key, value and gate per key head, then step size and decay.
  """
  *wide, step, decay = _delta_parts(c, x)
  by_head = lambda parts: [part[i] for i in range(c.recurrent.key_heads)
                           for part in parts]
  return [by_head(wide), by_head([step, decay])]


def _gate_and_up(c: TransformerConfig, x: np.ndarray
                 ) -> tuple[np.ndarray, np.ndarray]:
  x = x.reshape(2, c.mlp_width) if x.ndim == 1 else np.moveaxis(x, 0, -1)
  return x[0], x[1]


def gate_apart(c: TransformerConfig, x: np.ndarray) -> Views:
  """Stores gate and up in two tensors."""
  return [[part] for part in _gate_and_up(c, x)]


def gate_stacked(c: TransformerConfig, x: np.ndarray) -> Views:
  """Stores gate, then up, in one tensor."""
  return [[*_gate_and_up(c, x)]]


@dataclasses.dataclass(frozen=True)
class Stored:
  """Storage of a module's parameters in a file.

  Attributes:
    names: names of the tensors without their ending. `{i}` is the number of the
      layer.
    layout: layout of the parameter in the tensors.
    inputs_first: True if the file stores matrices as `[in, out]` (GPT-2).
    offset: difference of the stored number from the parameter.
    ending: end of the names, in which `{leaf}` is "weight" or "bias".
    wide: True if the parameter has at least float32, because rounding it would
      change choices (biases of a router) or many steps (rates of decay).
    axes: number of axes of the parameter with one tensor per index, see `Each`.
  """

  names: tuple[str, ...]
  layout: Callable[[TransformerConfig, np.ndarray], Views] = as_it_is
  inputs_first: bool = False
  offset: float = 0.0
  ending: str = ".{leaf}"
  wide: bool = False
  axes: ClassVar[int] = 0

  def dtype(self, dtype: np.dtype) -> np.dtype:
    """Returns the dtype of the parameter in a model of `dtype`."""
    return np.promote_types(dtype, np.float32) if self.wide else dtype

  def shapes(self, config: TransformerConfig, shape: tuple[int, ...]
             ) -> list[tuple[int, ...]]:
    """Returns the shapes of the tensors of a parameter of `shape`."""
    stand_in = np.broadcast_to(np.zeros((), np.bool_), shape)
    return [self._shape(views, len(shape) > 1)
            for views in self.layout(config, stand_in)]

  def _shape(self, views: list[np.ndarray], matrix: bool) -> tuple[int, ...]:
    if not matrix:
      return (sum(view.size for view in views),)
    columns = views[0].shape[-1]
    shape = (sum(view.size for view in views) // columns, columns)
    return shape[::-1] if self.inputs_first else shape

  def join(self, config: TransformerConfig, shape: tuple[int, ...],
           tensors: Iterable[StoredTensor], dtype: np.dtype) -> np.ndarray:
    """Returns the parameter of `shape` and `dtype` from its `tensors`.

    Large tensors are read some rows at a time.
    """
    if self.layout is as_it_is and not self.offset:
      [tensor] = tensors
      return tensor.read(dtype)
    out, matrix = np.empty(shape, dtype), len(shape) > 1
    for views, tensor in zip(self.layout(config, out), tensors):
      # Compute the difference in float32, so that it is rounded only once.
      if self.offset:
        rows = tensor.read(np.float32) - np.float32(self.offset)
      elif matrix and not self.inputs_first:
        rows = tensor.load()
      else:
        rows = tensor.read(dtype).T
      start = 0
      for view in views:
        start = _write(view, rows, start, matrix)
    return out

  def split(self, config: TransformerConfig, x: np.ndarray
            ) -> list[np.ndarray]:
    """Returns the tensors of the parameter `x`, the inverse of `join`."""
    tensors = []
    for views in self.layout(config, x):
      columns = (-1, views[0].shape[-1]) if x.ndim > 1 else (-1,)
      data = np.concatenate([view.reshape(columns) for view in views])
      if self.inputs_first and x.ndim > 1:
        data = data.T
      if self.offset:
        data = (data.astype(np.float32) + self.offset).astype(x.dtype)
      tensors.append(np.ascontiguousarray(data))
    return tensors


def _write(view: np.ndarray, rows: Rows, start: int, matrix: bool) -> int:
  """Fills a view from the rows of a tensor.

  Args:
    view: array `[..., columns]` if the tensor is a matrix, or an array of any
      shape.
    rows: rows of the tensor.
    start: first row to read.
    matrix: True if the tensor is a matrix.

  Returns:
    The index of the first row that was not read.
  """
  size = math.prod(view.shape[1:])
  step = rows_at_once(size)
  if matrix and view.ndim > 2 and step == 1:
    for part in view:
      start = _write(part, rows, start, matrix)
    return start
  rows_of_each = math.prod(view.shape[1:-1]) if matrix else size
  for i in range(0, len(view), step):
    part = view[i:i + step]
    stop = start + len(part) * rows_of_each
    part[...] = rows[start:stop].reshape(part.shape)
    start = stop
  return start


class Same(Stored):
  """One tensor with the shape and the order of the parameter."""

  def shapes(self, config, shape):
    return [shape]

  def join(self, config, shape, tensors: Iterable[StoredTensor], dtype):
    [tensor] = tensors
    return tensor.read(dtype)

  def split(self, config, x):
    return [x]


class Ids(Same):
  """One tensor of token ids, which become int32."""

  def join(self, config, shape, tensors: Iterable[StoredTensor], dtype):
    return super().join(config, shape, tensors, np.dtype(np.int32))


class Taps(Stored):
  """Kernel `[K, C]` of a depthwise convolution, stored as `[C, 1, K]`."""

  def shapes(self, config, shape):
    return [(shape[1], 1, shape[0])]

  def join(self, config, shape, tensors: Iterable[StoredTensor], dtype):
    [tensor] = tensors
    return np.ascontiguousarray(tensor.read(dtype)[:, 0].T)

  def split(self, config, x):
    return [np.ascontiguousarray(x.T[:, None])]


@dataclasses.dataclass(frozen=True)
class Each(Stored):
  """One matrix `[out, in]` for each index of a parameter's first axes.

  With several names, the parameter contains the outputs of their matrices side
  by side.

  Attributes:
    axes: number of these first axes. Their indices replace `{}` in the names.
  """

  axes: int = 1

  def _views(self, x: np.ndarray) -> list[np.ndarray]:
    return [part[index].T for part in np.split(x, len(self.names), axis=-1)
            for index in np.ndindex(x.shape[:self.axes])]

  def shapes(self, config, shape):
    stand_in = np.broadcast_to(np.zeros((), np.bool_), shape)
    return [view.shape for view in self._views(stand_in)]

  def join(self, config, shape, tensors: Iterable[StoredTensor], dtype):
    out = np.empty(shape, dtype)
    for view, tensor in zip(self._views(out), tensors):
      view[...] = tensor.read(dtype)
    return out

  def split(self, config, x):
    return [np.ascontiguousarray(view) for view in self._views(x)]


class Batched(Stored):
  """One tensor `[E, out, in]` of a parameter `[E, in, out]`."""

  def shapes(self, config, shape):
    return [(shape[0], *shape[:0:-1])]

  def join(self, config, shape, tensors: Iterable[StoredTensor], dtype):
    [tensor] = tensors
    return np.swapaxes(tensor.read(dtype), 1, 2)

  def split(self, config, x):
    return [np.ascontiguousarray(np.swapaxes(x, 1, 2))]


class Alternating(Same):
  """One tensor whose last axis alternates between gate and up projection."""

  def join(self, config, shape, tensors: Iterable[StoredTensor], dtype):
    x = super().join(config, shape, tensors, dtype)
    return np.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)

  def split(self, config, x):
    return [np.stack(np.split(x, 2, axis=-1), axis=-1).reshape(x.shape)]


class HalvesSwapped(Stored):
  """One matrix `[out, in]` whose inputs are two halves in the other order."""

  def shapes(self, config, shape):
    return [shape[::-1]]

  def join(self, config, shape, tensors: Iterable[StoredTensor], dtype):
    [tensor] = tensors
    return np.roll(tensor.read(dtype).T, shape[0] // 2, axis=0)

  def split(self, config, x):
    return [np.ascontiguousarray(np.roll(x, len(x) // 2, axis=0).T)]


Table = Mapping[str, Stored]
# Modules of drafters whose kernels are `[in, out]` and stored as `[out, in]`.
_TURNED = ("head", "out", "up", "down", "entry", "fc", "fusion", "gate",
           "joint", "w2", "skip", "inner", "block_{j}", "output", "router")


def table(names: Mapping[str, str | Stored]) -> Table:
  """Returns a table of `Stored`, by the path of the module.

  Kernels of the modules `_TURNED` are stored as `[out, in]`. Other parameters
  are stored unchanged.

  Args:
    names: name of the tensor, or a `Stored`, by the path of the module.
  """
  return {
      path: name if isinstance(name, Stored) else Stored(
          (name,), *([turned] if path.split(".")[-1] in _TURNED else []))
      for path, name in names.items()}


def locate(table: Table, path: str, shape: tuple[int, ...],
           sizes: Mapping[str, int]) -> tuple[Stored, list[str]]:
  """Returns the `Stored` of a parameter, and the names of its tensors.

  Args:
    table: `Stored` by the path of a module. `{i}` and `{j}` in a path are its
      first and second number.
    path: path of the parameter, such as "attention_3.qkv.kernel".
    shape: shape of the parameter.
    sizes: values of other words in braces in the names of tensors. The value of
      `first`, if there is one, is added to `{i}`.

  Raises:
    KeyError: the table has no such parameter.
  """
  module, _, leaf = path.rpartition(".")
  if leaf not in ("kernel", "bias", "scale"):
    module = path
  numbers = dict(zip("ij", map(int, re.findall(r"_(\d+)", module))))
  for letter in numbers:
    module = re.sub(r"_\d+", f"_{{{letter}}}", module, count=1)
  stored = table[module]
  ending = stored.ending.format(
      leaf="bias" if path.endswith("bias") else "weight")
  if "i" in numbers:
    numbers["i"] += sizes.get("first", 0)
  return stored, [
      name.format(*index, **sizes, **numbers) + ending
      for name in stored.names for index in np.ndindex(shape[:stored.axes])]
