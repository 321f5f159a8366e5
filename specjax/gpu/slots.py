"""Write of the blocks of all layers to a cache as one kernel."""

from collections.abc import Sequence

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
import jax.numpy as jnp


def write(slots: Sequence[jax.Array], blocks: Sequence[jax.Array],
          at: jax.Array, until: jax.Array, path: jax.Array | None = None
          ) -> tuple[jax.Array, ...]:
  """Writes tokens of a block into the slots of every row, in place.

  Args:
    slots: arrays `[B, H, C, D]`, such as the keys and values of all layers.
    blocks: arrays `[B, H, T, D]`, one for each of `slots`.
    at: `[B]` int32, slot of each row for its first token.
    until: `[B]` int32, slot of each row after its last token.
    path: `[B, P]` int32, tokens of the block in the order of the slots. None:
      all tokens in their order.

  Returns:
    The arrays `slots` with the new tokens.
  """
  batch, heads, _, dim = slots[0].shape
  size = blocks[0].shape[2] if path is None else path.shape[1]
  rows, width = pl.next_power_of_2(size), pl.next_power_of_2(dim)
  number = len(slots)
  scalars = [at, until, *([] if path is None else [path])]

  def kernel(*refs):
    sources = refs[number:2 * number]
    at, until, *path = refs[2 * number:2 * number + len(scalars)]
    b, h = pl.program_id(1), pl.program_id(2)
    token = jax.lax.broadcasted_iota(jnp.int32, (rows,), 0)
    there = token < jnp.minimum(until[b] - at[b], size)
    source = (triton.load(path[0].at[b, token], mask=there, other=0)
              if path else token)
    channel = jax.lax.broadcasted_iota(jnp.int32, (width,), 0)[None]
    mask = there[:, None] & (channel < dim)

    for i, (block, out) in enumerate(zip(sources, refs[-number:])):
      @pl.when(pl.program_id(0) == i)
      def _(block=block, out=out):
        index = (b, h, (at[b] + token)[:, None], channel)
        new = triton.load(block.at[b, h, source[:, None], channel], mask=mask,
                          other=0)
        triton.store(out.at[index], new, mask=mask)

  return tuple(pl.pallas_call(
      kernel, grid=(number, batch, heads), name="write_slots",
      out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in slots],
      input_output_aliases={i: i for i in range(number)},
      compiler_params=triton.CompilerParams(num_warps=4),
  )(*slots, *blocks, *scalars))
