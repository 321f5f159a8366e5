"""Weight-only copies of a Transformer in 8 or 4 bits.

Each matrix is whole numbers times a scale, one for every output channel, or one
for every group of its inputs (round to nearest, symmetric: Jacob et al. 2018,
arXiv:1712.05877; groups as in GPTQ, Frantar et al. 2023, arXiv:2210.17323, and
AWQ, Lin et al. 2023, arXiv:2306.00978). What is not a matrix stays as it is.

A copy takes the place of the parameters in any call of a `Transformer`: as
`params["drafter"]` it makes a target its own small model (the 4-bit draft of
QuantSpec, Tiwari et al. 2025, arXiv:2502.10424), and as `params["target"]` it
is the model whose law the output follows.

A matrix is widened where it is read, inside of the product. A TPU's compiler
does that on the chip, so that a pass moves a half or a quarter of the bytes of
bfloat16 weights. XLA for CPUs writes the whole widened matrix to memory first;
there a pass over few tokens goes through it in slices that stay in the cache.
See `experiments/runs/quantized_products.py`.
"""

from collections.abc import Mapping
import functools
import math
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax.utils import fields

BITS = (8, 4)
_FEW = 32  # tokens of a pass, of which a product reads more than it computes
_SLICE = 1 << 18  # bytes of a widened slice: it stays in a core's cache
_LEAST = 8  # rows of a slice, or each is more start than work
_MATRICES = {"kernel": 0, "head": 0, "embedding": 1}  # name: axis of the inputs


@struct.dataclass
class QuantizedMatrix:
  """Matrix `values * scales`, with scales repeated along the groups of inputs.

  It replaces the array where a `Transformer` reads one: `shape`, `dtype`, `T`,
  rows by index, and `product`.

  Attributes:
    values: int8 or int4 `[D, *outputs]` of a kernel, `[V, D]` of an embedding.
    scales: scales in the dtype of the matrix, one per group on the input axis.
    axis: axis of the inputs D, 0 or 1.
    turned: whether the matrix is transposed, as for a tied head.
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
    values, scales = self.values[index], self.scales[index]  # of an embedding
    return _widened(values, scales, values.ndim - 1)

  def __jax_array__(self) -> jax.Array:
    return self.widened()

  def widened(self) -> jax.Array:
    """Returns the matrix as floats."""
    wide = _widened(self.values, self.scales, self.axis)
    return wide.T if self.turned else wide

  def product(self, x: jax.Array) -> jax.Array:
    """Returns `[B, S, *outputs]` of `[B, S, D]`, summed in float32 or wider."""
    if self.axis != int(self.turned):
      return x @ self.widened()  # the inputs of an output share no scale
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
    elif len(rows) == 1:  # a TPU's compiler takes no matrix unit for a lone one
      rows = jnp.concatenate([rows, rows])
    out = form(rows, values, scales, self.axis)[:x.shape[0] * x.shape[1]]
    return out.reshape(*x.shape[:2], *self.shape[1:])


def _product(x: jax.Array, kernel: jax.Array, axis: int) -> jax.Array:
  """`[n, D]` times a matrix whose inputs are its `axis`, `[n, outputs]`."""
  return jax.lax.dot_general(
      x, kernel.astype(x.dtype), (((1,), (axis,)), ((), ())),
      preferred_element_type=jnp.promote_types(x.dtype, jnp.float32))


def _whole(x: jax.Array, values: jax.Array, scales: jax.Array, axis: int
           ) -> jax.Array:
  """The product of many tokens, in which the matrix is made once."""
  return _product(x, _widened(values, scales, axis), axis)


def _by_groups(x: jax.Array, values: jax.Array, scales: jax.Array, axis: int
               ) -> jax.Array:
  """Products with whole numbers, one for every group, times their scales."""
  groups = scales.shape[axis]
  if groups == 1:
    return _product(x, values, axis) * scales.reshape(-1)
  x = x.reshape(len(x), groups, -1)
  shape = list(values.shape)
  shape[axis:axis + 1] = groups, shape[axis] // groups
  # Batched over the groups: [groups, n, outputs].
  parts = jax.lax.dot_general(
      x, values.reshape(shape).astype(x.dtype),
      (((2,), (axis + 1,)), ((1,), (axis,))),
      preferred_element_type=jnp.promote_types(x.dtype, jnp.float32))
  return jnp.sum(parts * (scales.T if axis else scales)[:, None], axis=0)


def _widened(values: jax.Array, scales: jax.Array, axis: int) -> jax.Array:
  """Numbers times their scales, of which `axis` has one for each group."""
  groups, shape = scales.shape[axis], values.shape
  if groups == 1:
    return values.astype(scales.dtype) * scales
  split = (*shape[:axis], groups, shape[axis] // groups, *shape[axis + 1:])
  wide = values.astype(scales.dtype).reshape(split)
  return (wide * jnp.expand_dims(scales, axis + 1)).reshape(shape)


def _over_inputs(x: jax.Array, values: jax.Array, scales: jax.Array, axis: int
                 ) -> jax.Array:
  """A product on a CPU with `[D, outputs]`, some inputs at a time."""
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
  """Multiplies `x` by a quantised `[V, D]` matrix in blocks of outputs.

  CPUs use this form.
  """
  outputs, groups = scales.shape
  size = max(_LEAST, _SLICE // (4 * values.shape[1]))
  if size >= outputs:
    return _by_groups(x, values, scales, axis)
  numbers = _bytes(values, even=2 * groups)
  split = values.shape[1] // numbers.shape[1]
  inputs = [x[:, i::split] for i in range(split)]

  def put(i, out):
    start = jnp.minimum(i * size, outputs - size)  # the last two may overlap
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
  """`[.., n]` as int8, two numbers of 4 bits in one where `even` divides n.

  XLA for CPUs takes numbers of 4 bits out of their bytes one by one.
  """
  if values.dtype == jnp.int8 or values.shape[1] % even:
    return values.astype(jnp.int8)
  pairs = values.reshape(len(values), -1, 2)
  return jax.lax.bitcast_convert_type(pairs, jnp.int8)


def _numbers(values: jax.Array, split: int) -> list[jax.Array]:
  """Returns the numbers of `_bytes`, or those at even and at odd places."""
  if split == 1:
    return [values]
  return [(values << 4) >> 4, values >> 4]  # shifts keep the sign


def _divisor(number: int, most: int) -> int:
  """The largest divisor of a number that is at most another, or 1."""
  return next(n for n in range(max(1, min(number, most)), 0, -1)
              if number % n == 0)


def quantize(params: Mapping[str, Any], bits: int = 8, group: int | None = None
             ) -> dict[str, Any]:
  """Returns a quantised copy of a Transformer's parameters.

  Kernels, embedding and head are quantised. Norms, biases, learned positions
  and look-ahead embeddings are shared with the model. The scales of a tied
  embedding are along its width, as the head requires.

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
    bits: 8 or 4.
    group: number of inputs that share a scale, a divisor of the inputs of every
      matrix. None: one scale per output channel.

  Raises:
    ValueError: `bits` or `group` is out of range, there is no matrix, or the
      parameters are already quantised.
  """
  if bits not in BITS:
    raise ValueError(f"bits is {bits!r}; it must be one of {BITS}")
  if group is not None:
    fields.check_at_least(
        "group", group, 1, ", or None for one scale a channel")
  found = 0

  def one(path, x):
    nonlocal found
    name = getattr(path[-1], "key", None)
    if isinstance(x, QuantizedMatrix):
      raise ValueError(f"{jax.tree_util.keystr(path)} is quantised already; "
                       "quantise the model's own parameters")
    if name not in _MATRICES or jnp.ndim(x) < 2:
      return x
    found += 1
    axis = _MATRICES[name]
    if group is not None and x.shape[axis] % group:
      raise ValueError(
          f"group is {group} and {jax.tree_util.keystr(path)} has "
          f"{x.shape[axis]} inputs; give a divisor of them, such as "
          f"{math.gcd(group, x.shape[axis])}, or None")
    return _quantized(x, bits=bits, group=group, axis=axis)

  copy = jax.tree_util.tree_map_with_path(one, params, is_leaf=_is_quantized)
  if not found:
    raise ValueError("the parameters have no kernel, head or embedding; only "
                     "those of a models.Transformer can be quantised")
  return copy


_is_quantized = lambda node: isinstance(node, QuantizedMatrix)


@functools.partial(jax.jit, static_argnames=("bits", "group", "axis"))
def _quantized(x: jax.Array, *, bits: int, group: int | None, axis: int
               ) -> QuantizedMatrix:
  """Rounded to the nearest multiple of the scale, the largest to the last."""
  most = 2**(bits - 1) - 1
  size = x.shape[axis]
  groups = size // (group or size)
  split = (*x.shape[:axis], groups, size // groups, *x.shape[axis + 1:])
  wide = x.astype(jnp.float32).reshape(split)
  scales = jnp.max(jnp.abs(wide), axis=axis + 1, keepdims=True) / most
  # As they will be read: a scale in bfloat16 is rounded first.
  scales = scales.astype(x.dtype)
  steps = scales.astype(jnp.float32)
  values = jnp.where(steps > 0, wide / jnp.where(steps > 0, steps, 1), 0)
  values = jnp.clip(jnp.round(values), -most, most).reshape(x.shape)
  return QuantizedMatrix(
      values.astype(jnp.int8 if bits == 8 else jnp.int4),
      scales.squeeze(axis + 1), axis)


def num_bytes(params: Any) -> int:
  """Returns the bytes of a tree of arrays; a 4-bit number counts half a byte.
  """
  return sum(
      -(-x.size // 2) if x.dtype == jnp.int4 else x.size * x.dtype.itemsize
      for x in jax.tree.leaves(params))


def relative_error(params: Any, copy: Any) -> float:
  """Returns |copy - params| / |params| over all matrices (Frobenius norm)."""
  pairs = [(x, y) for x, y in zip(
      jax.tree.leaves(params), jax.tree.leaves(copy, is_leaf=_is_quantized))
           if _is_quantized(y)]
  off, size = (sum(float(jnp.sum(jnp.square(z))) for z in arrays)
               for arrays in zip(*((x - y.widened(), x) for x, y in pairs)))
  return float(np.sqrt(off / size))
