"""Weight-only quantisation of a Transformer to 8 or 4 bits.

Each matrix is stored as integers times scales. There is one scale per output
channel, or one per group of inputs of each output channel. Rounding is to
nearest and symmetric (Jacob et al. 2018, arXiv:1712.05877). Groups are as in
GPTQ (Frantar et al. 2023, arXiv:2210.17323) and AWQ (Lin et al. 2023,
arXiv:2306.00978). Other parameters are not changed.

A quantised copy can replace the parameters in any call of a `Transformer`. As
`params["drafter"]`, a 4-bit copy of the target is a draft model (QuantSpec,
Tiwari et al. 2025, arXiv:2502.10424). As `params["target"]`, the copy is the
target, and the output follows the copy's distribution.

To widen a matrix is to convert it to floats. Each product widens its matrix. A
TPU's compiler widens on the chip, so a pass reads a half or a quarter of the
bytes of bfloat16 weights. XLA for CPUs would first write the complete widened
matrix to memory. On a CPU, a pass over few tokens therefore widens slices that
fit into a core's cache (`experiments/runs/quantized_products.py`).
"""

from collections.abc import Mapping
import functools
import math
from typing import Any

import chex
from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax.utils import fields

BITS = (8, 4)
# Passes over at most this many tokens spend more time on reading the matrix
# than on arithmetic.
_FEW = 32
_SLICE = 1 << 18  # bytes of a widened slice, which fits into a core's cache
# Smallest number of rows of a slice. With fewer rows, the fixed cost of each
# loop step is too large.
_LEAST = 8
_MATRICES = {"kernel": 0, "head": 0, "embedding": 1}  # name: axis of the inputs


@struct.dataclass
class QuantizedMatrix:
  """Matrix `values * scales`, with one scale for each group of inputs.

  A `QuantizedMatrix` can replace an array in the parameters of a `Transformer`.
  It has the members that the model uses: `shape`, `dtype`, `T`, rows by index,
  and `product`.

  Attributes:
    values: int8 or int4 numbers, `[D, *outputs]` for a kernel or `[V, D]` for
      an embedding.
    scales: scales in the dtype of the original matrix. The shape is that of
      `values`, with the number of groups on the input axis.
    axis: axis of the inputs D in `values`, 0 or 1.
    turned: True if the matrix is the transpose of `values * scales`, as for a
      tied head.
  """

  values: jax.Array
  scales: jax.Array
  axis: int = struct.field(pytree_node=False, default=0)
  turned: bool = struct.field(pytree_node=False, default=False)

  @property
  def shape(self) -> tuple[int, ...]:
    shape = self.values.shape
    return shape[::-1] if self.turned else shape

  @property
  def dtype(self) -> Any:
    return self.scales.dtype

  @property
  def T(self) -> "QuantizedMatrix":  # pylint: disable=invalid-name
    """Returns the transposed matrix without copying it."""
    return self.replace(turned=not self.turned)

  def __getitem__(self, index: Any) -> jax.Array:
    """Returns rows, or other parts, of the matrix as floats."""
    if self.turned or self.axis == 0 or isinstance(index, tuple):
      return self.widened()[index]
    # The groups of an embedding are along its last axis. It is therefore
    # sufficient to widen these rows.
    values, scales = self.values[index], self.scales[index]
    return _widened(values, scales, values.ndim - 1)

  def __jax_array__(self) -> jax.Array:
    return self.widened()

  def widened(self) -> jax.Array:
    """Returns the matrix as floats."""
    wide = _widened(self.values, self.scales, self.axis)
    return wide.T if self.turned else wide

  def product(self, x: jax.Array) -> jax.Array:
    """Returns the product `[B, S, *outputs]` of `x [B, S, D]` and the matrix.

    Sums are in float32 or wider.
    """
    if self.axis != int(self.turned):
      # Groups are along the outputs of this product, and each input has its own
      # scale. Scales cannot be applied after the sum over inputs.
      return x @ self.widened()
    values, scales = self.values, self.scales
    if not self.turned:  # [D, outputs]
      values, scales = (y.reshape(y.shape[0], -1) for y in (values, scales))
    rows = x.reshape(-1, x.shape[2])
    form = _by_groups
    if len(rows) > _FEW:
      form = _whole
    elif jax.default_backend() == "cpu":
      form = _over_outputs if self.turned else _over_inputs
      rows = rows.astype(jnp.promote_types(x.dtype, jnp.float32))
    elif len(rows) == 1:
      # A TPU's compiler does not use the matrix unit for a single row.
      rows = jnp.concatenate([rows, rows])
    out = form(rows, values, scales, self.axis)[:x.shape[0] * x.shape[1]]
    return out.reshape(*x.shape[:2], *self.shape[1:])


def _product(x: jax.Array, kernel: jax.Array, axis: int) -> jax.Array:
  """Returns the product `[n, outputs]` of `x [n, D]` and a kernel.

  The inputs are on `axis` of the kernel.
  """
  return jax.lax.dot_general(
      x, kernel.astype(x.dtype), (((1,), (axis,)), ((), ())),
      preferred_element_type=jnp.promote_types(x.dtype, jnp.float32))


def _whole(x: jax.Array, values: jax.Array, scales: jax.Array, axis: int
           ) -> jax.Array:
  """Returns the product for many tokens, after widening the matrix once."""
  return _product(x, _widened(values, scales, axis), axis)


def _by_groups(x: jax.Array, values: jax.Array, scales: jax.Array, axis: int
               ) -> jax.Array:
  """Returns the sum over groups of (inputs times integers) times scales."""
  groups = scales.shape[axis]
  if groups == 1:
    return _product(x, values, axis) * scales.reshape(-1)
  x = x.reshape(len(x), groups, -1)
  shape = list(values.shape)
  shape[axis:axis + 1] = groups, shape[axis] // groups
  # The product is batched over groups: `parts` is [groups, n, outputs].
  parts = jax.lax.dot_general(
      x, values.reshape(shape).astype(x.dtype),
      (((2,), (axis + 1,)), ((1,), (axis,))),
      preferred_element_type=jnp.promote_types(x.dtype, jnp.float32))
  return jnp.sum(parts * (scales.T if axis else scales)[:, None], axis=0)


def _widened(values: jax.Array, scales: jax.Array, axis: int) -> jax.Array:
  """Returns integers times scales. The groups are on `axis` of the scales."""
  groups, shape = scales.shape[axis], values.shape
  if groups == 1:
    return values.astype(scales.dtype) * scales
  split = (*shape[:axis], groups, shape[axis] // groups, *shape[axis + 1:])
  wide = values.astype(scales.dtype).reshape(split)
  return (wide * jnp.expand_dims(scales, axis + 1)).reshape(shape)


def _over_inputs(x: jax.Array, values: jax.Array, scales: jax.Array, axis: int
                 ) -> jax.Array:
  """Returns the product of `x` and a `[D, outputs]` matrix, for CPUs.

  The loop is over blocks of inputs, the rows of the matrix.
  """
  groups, (width, outputs) = len(scales), values.shape
  size = _divisor(width // groups, _SLICE // (4 * outputs))
  if size < min(_LEAST, width // groups):
    return _by_groups(x, values, scales, axis)
  count, numbers = width // size, _bytes(values)
  if count == 1:
    return _by_groups(x, values, scales, axis)
  split = outputs // numbers.shape[1]
  steps = jnp.repeat(scales, count // groups, axis=0).astype(x.dtype)

  def add(totals, part):
    inputs, numbers, steps = part
    parts = [inputs @ y.astype(x.dtype) for y in _numbers(numbers, split)]
    steps = steps.reshape(-1, split).T
    return [a + b * c for a, b, c in zip(totals, parts, steps)], None

  zeros = jnp.zeros((len(x), numbers.shape[1]), x.dtype)
  totals, _ = jax.lax.scan(
      add, [zeros] * split, (x.reshape(-1, count, size).swapaxes(0, 1),
                             numbers.reshape(count, size, -1), steps))
  return jnp.stack(totals, axis=-1).reshape(len(x), -1)


def _over_outputs(x: jax.Array, values: jax.Array, scales: jax.Array, axis: int
                  ) -> jax.Array:
  """Returns the product of `x` and a transposed `[V, D]` matrix, for CPUs.

  The loop is over blocks of outputs, the rows of the matrix.
  """
  outputs, groups = scales.shape
  size = max(_LEAST, _SLICE // (4 * values.shape[1]))
  if size >= outputs:
    return _by_groups(x, values, scales, axis)
  numbers = _bytes(values, even=2 * groups)
  split = values.shape[1] // numbers.shape[1]
  inputs = [x[:, i::split] for i in range(split)]

  def put(i, out):
    # The last block ends with the last output. It may overlap the previous
    # block.
    start = jnp.minimum(i * size, outputs - size)
    rows, steps = (jax.lax.dynamic_slice_in_dim(y, start, size)
                   for y in (numbers, scales.astype(x.dtype)))
    new = 0
    for x_part, y in zip(inputs, _numbers(rows, split)):
      y = y.astype(x.dtype) if groups == 1 else _widened(y, steps, axis)
      new += jax.lax.dot_general(y, x_part, (((1,), (1,)), ((), ())))
    new = new * steps if groups == 1 else new
    return jax.lax.dynamic_update_slice_in_dim(out, new, start, 0)

  return jax.lax.fori_loop(0, -(-outputs // size), put,
                           jnp.zeros((outputs, len(x)), x.dtype)).T


def _bytes(values: jax.Array, even: int = 2) -> jax.Array:
  """Returns `values [.., n]` as int8.

  If the values are int4 and `even` divides n, each byte contains two values.
  `_numbers` unpacks them by shifts of bytes, because XLA for CPUs unpacks int4
  values one by one, which is slow.
  """
  if values.dtype == jnp.int8 or values.shape[1] % even:
    return values.astype(jnp.int8)
  pairs = values.reshape(len(values), -1, 2)
  return jax.lax.bitcast_convert_type(pairs, jnp.int8)


def _numbers(values: jax.Array, split: int) -> list[jax.Array]:
  """Returns the values in a result of `_bytes`.

  `split` is the number of values per byte. If it is 2, the result is two
  arrays: the values at even and at odd indices.
  """
  if split == 1:
    return [values]
  return [(values << 4) >> 4, values >> 4]  # right shifts preserve the sign


def _divisor(number: int, most: int) -> int:
  """Returns the largest divisor of `number` up to `most`, at least 1."""
  return next(n for n in range(max(1, min(number, most)), 0, -1)
              if number % n == 0)


def quantize(params: Mapping[str, chex.ArrayTree], bits: int = 8,
             group: int | None = None) -> dict[str, Any]:
  """Returns a quantised copy of a Transformer's parameters.

  Kernels, embedding and head are quantised. Norms, biases, learned positions
  and look-ahead embeddings are not copied. The groups of an embedding are along
  its width, because the width is the input axis of a tied head.

    >>> params = {"kernel": jnp.array([[0.1, -3.5], [0.7, 0.6]])}
    >>> copy = quantize(params, bits=4)["kernel"]
    >>> print(copy.values.astype(int))
    [[ 1 -7]
     [ 7  1]]
    >>> print(copy.widened())
    [[ 0.1 -3.5]
     [ 0.7  0.5]]

  Args:
    params: parameters of a `models.Transformer`.
    bits: number of bits per weight, 8 or 4.
    group: number of inputs that share a scale. It must divide the number of
      inputs of every matrix. None means one scale per output channel.

  Raises:
    ValueError: `bits` or `group` is out of range, the parameters contain no
      matrix or experts, or they are already quantised.
  """
  if bits not in BITS:
    raise ValueError(f"bits is {bits!r}; it must be one of {BITS}")
  if group is not None:
    fields.check_at_least(
        "group", group, 1, ", or None for one scale per channel")
  found = 0

  def one(path, x):
    nonlocal found
    name = getattr(path[-1], "key", None)
    if isinstance(x, QuantizedMatrix):
      raise ValueError(f"{jax.tree_util.keystr(path)} is already quantised; "
                       "give the original parameters of the model")
    if str(name).startswith("expert_"):
      raise ValueError(f"{jax.tree_util.keystr(path)} contains experts, which "
                       "quantize does not support; use a dense model")
    if name not in _MATRICES or jnp.ndim(x) < 2:
      return x
    found += 1
    axis = _MATRICES[name]
    if group is not None and x.shape[axis] % group:
      raise ValueError(
          f"group is {group}, but {jax.tree_util.keystr(path)} has "
          f"{x.shape[axis]} inputs; give a divisor of this number, such as "
          f"{math.gcd(group, x.shape[axis])}, or None")
    return _quantized(x, bits=bits, group=group, axis=axis)

  copy = jax.tree_util.tree_map_with_path(one, params, is_leaf=_is_quantized)
  if not found:
    raise ValueError("the parameters have no kernel, head or embedding; give "
                     "parameters of a models.Transformer")
  return copy


_is_quantized = lambda node: isinstance(node, QuantizedMatrix)


@functools.partial(jax.jit, static_argnames=("bits", "group", "axis"))
def _quantized(x: jax.Array, *, bits: int, group: int | None, axis: int
               ) -> QuantizedMatrix:
  """Returns a matrix as a `QuantizedMatrix`, see `quantize`.

  The scale of a group maps its largest absolute value to the largest integer.
  """
  most = 2**(bits - 1) - 1
  size = x.shape[axis]
  groups = size // (group or size)
  split = (*x.shape[:axis], groups, size // groups, *x.shape[axis + 1:])
  wide = x.astype(jnp.float32).reshape(split)
  scales = jnp.max(jnp.abs(wide), axis=axis + 1, keepdims=True) / most
  # Products use scales in the matrix's dtype. The integers are therefore
  # computed from scales rounded to this dtype.
  scales = scales.astype(x.dtype)
  steps = scales.astype(jnp.float32)
  values = jnp.where(steps > 0, wide / jnp.where(steps > 0, steps, 1), 0)
  values = jnp.clip(jnp.round(values), -most, most).reshape(x.shape)
  return QuantizedMatrix(
      values.astype(jnp.int8 if bits == 8 else jnp.int4),
      scales.squeeze(axis + 1), axis)


def num_bytes(params: chex.ArrayTree) -> int:
  """Returns the number of bytes of a tree. Two int4 numbers have one byte."""
  return sum(
      -(-x.size // 2) if x.dtype == jnp.int4 else x.size * x.dtype.itemsize
      for x in jax.tree.leaves(params))


def relative_error(params: chex.ArrayTree, copy: Any) -> float:
  """Returns |copy - params| / |params| over all matrices (Frobenius norm)."""
  pairs = [(x, y) for x, y in zip(
      jax.tree.leaves(params), jax.tree.leaves(copy, is_leaf=_is_quantized))
           if _is_quantized(y)]
  off, size = (sum(float(jnp.sum(jnp.square(z))) for z in arrays)
               for arrays in zip(*((x - y.widened(), x) for x, y in pairs)))
  return float(np.sqrt(off / size))
