"""Residual sum and norm of a decoder layer as one kernel."""

from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
import jax.numpy as jnp

# A product is divided along its inner axis until it has about `_PROGRAMS`
# programs. Each computes `_COLUMNS` columns of as many rows.
_PROGRAMS = 256
_COLUMNS = 64
_LEAST_INNER = 128  # smallest inner axis of a part
# XLA divides a product with a long inner axis once more, and adds a kernel.
_MOST_INNER, _MOST_PROGRAMS = 2048, 1024


def parts(rows: int, inner: int, columns: int) -> int:
  """Returns the number of parts into which a product is divided.

  A product of a few rows reads its weights once. If it has few columns, there
  are fewer programs than processors, and the memory is idle. The inner axis is
  then divided, and the next kernel sums the parts. XLA would do the same, with
  a kernel of its own for the sum.

  Args:
    rows: number of rows.
    inner: size of the inner axis of the product.
    columns: number of columns of the result.
  """
  count = 1
  tiles = pl.cdiv(rows, _COLUMNS) * pl.cdiv(columns, _COLUMNS)
  while inner % (2 * count) == 0 and inner // (2 * count) >= _LEAST_INNER and (
      count * tiles < _PROGRAMS
      or inner // count > _MOST_INNER and count * tiles < _MOST_PROGRAMS):
    count *= 2
  return count


def add_and_normalise(x: jax.Array, addends: jax.Array | None,
                      addend: jax.Array | None, scale: jax.Array,
                      bias: jax.Array | None = None, *, rows: int,
                      epsilon: float, offset: float, centred: bool
                      ) -> tuple[jax.Array, jax.Array]:
  """Returns the sum `x + addends + addend`, and its norm.

  Args:
    x: `[M, D]` residual stream.
    addends: `[P, M, D]` float32 addends of every row, or None.
    addend: `[D]` further addend of all rows, or None.
    scale: `[D]` scale of the norm.
    bias: `[D]` bias of the norm, or None.
    rows: number of first rows in the result, R.
    epsilon: term in the square root.
    offset: number added to the scale.
    centred: True subtracts the mean (LayerNorm); False is RMSNorm.

  Returns:
    The sum and its norm, both `[R, D]` in the dtype of `x`.
  """
  dim = x.shape[1]
  width = pl.next_power_of_2(dim)
  options = addends, addend, bias
  operands = [x, scale, *(y for y in options if y is not None)]

  def kernel(x, scale, *refs: Any):
    refs = list(refs)
    more, one, shift = (
        None if y is None else refs.pop(0) for y in options)
    row = pl.program_id(0)
    channel = jax.lax.broadcasted_iota(jnp.int32, (width,), 0)
    inside = channel < dim
    load = lambda ref, *index: triton.load(
        ref.at[(*index, channel)], mask=inside, other=0).astype(jnp.float32)
    value = load(x, row)
    if more is not None:
      for part in range(more.shape[0]):
        value += load(more, part, row)
      if one is not None:
        value += load(one, 0)
      value = value.astype(x.dtype)
      triton.store(refs[0].at[row, channel], value, mask=inside)
      value = value.astype(jnp.float32)
    if centred:
      value = jnp.where(inside, value - jnp.sum(value) / dim, 0)
    spread = jnp.sum(value * value) / dim
    value *= jax.lax.rsqrt(spread + epsilon) * (load(scale, 0) + offset)
    if shift is not None:
      value += load(shift, 0)
    triton.store(refs[-1].at[row, channel], value.astype(x.dtype), mask=inside)

  shape = jax.ShapeDtypeStruct((rows, dim), x.dtype)
  found = pl.pallas_call(
      kernel, grid=(rows,), out_shape=[shape] * (1 + (addends is not None)),
      name="norm", compiler_params=triton.CompilerParams(
          num_warps=min(16, max(4, width // 512))))(
              *(y[None] if y.ndim == 1 else y for y in operands))
  return (found[0] if addends is not None else x), found[-1]
