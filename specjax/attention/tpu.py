"""Attention over the committed slots as one kernel for TPUs.

Flash-decoding (Dao et al. 2023, crfm.stanford.edu/2023/10/12/flashdecoding):
the kernel reads the slots of a row in blocks and updates the maximum and sum of
the scores. All nodes of a draft see the same slots, so nodes and query heads
are the rows of one product with the keys.

The lengths are known before the kernel starts, so blocks after the length of a
row, or before its window, are never fetched. The cost depends on the lengths of
the rows and not on the allocated slots. With a table of pages, block j of row b
is page `table[b, j]`.

The compiler cannot split a kernel over a mesh. `split_over_mesh` splits it by
rows and key-value heads, which are independent.
"""

from collections.abc import Callable
import functools
import math
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from specjax.attention import plain

_DTYPES = (jnp.float32, jnp.bfloat16)
_BLOCK = 512  # maximum number of slots of a block
_QUERIES = 256  # maximum number of queries of a block, one per node and head
_LANES = 128  # size of the last axis of a tile
_SUBLANES = 16  # rows of a bfloat16 tile; a float32 tile has half
_BUDGET = 4 * 2**20  # bytes of on-chip memory for the blocks of keys and values


def past_attention(query: jax.Array, k: jax.Array, v: jax.Array,
                   lengths: jax.Array, positions: jax.Array | None = None,
                   table: jax.Array | None = None, *, window: int = 0,
                   softcap: float = 0.0, heads_axis: str | None = "model",
                   interpret: bool = False) -> tuple[jax.Array, jax.Array]:
  """Computes `attention.past_attention` with the kernel, in float32.

  The kernel supports float32 and bfloat16, if queries and keys have the same
  dtype. Other inputs use `plain.whole`.

  Args:
    query: `[B, S, H * G, D]` queries.
    k: `[B, H, C, D]` keys, or pages `[P, H, T, D]` if there is a table.
    v: values, of the same shape as `k`.
    lengths: `[B]` int32, number of committed slots of each row.
    positions: `[B, S]` int32, positions of the queries. Required if `window` is
      not 0.
    table: `[B, C / T]` int32, indices of the pages of each row in order. All
      entries must be valid indices, also after the last page in use.
    window: number of last positions that each query sees, including its own. 0
      means no limit.
    softcap: c in c tanh(scores / c). 0 disables the cap.
    heads_axis: mesh axis that divides the key-value heads. None: every device
      has all heads.
    interpret: True interprets the kernel without a TPU, which is slow.

  Returns:
    The normalised sum `[B, S, H * G, D]` and the log-sum-exp of the scores
    `[B, S, H * G]`.
  """
  if query.dtype != k.dtype or k.dtype not in _DTYPES:
    return plain.whole(query, k, v, lengths, positions, table, window=window,
                       softcap=softcap)
  batch, size, query_heads, _ = query.shape
  heads = k.shape[1]
  rows = size * query_heads // heads
  tile = _QUERIES if rows > _QUERIES else _SUBLANES
  more = -rows % tile
  folded = jnp.pad(plain.folded(query, heads),
                   ((0, 0), (0, 0), (0, more), (0, 0)))
  first = jnp.zeros((batch,), jnp.int32)
  extra = ()
  if window:
    first = jnp.maximum(positions.min(axis=1) - window + 1, 0)
    spread = jnp.tile(positions, (1, query_heads // heads))
    spread = jnp.pad(spread, ((0, 0), (0, more)))
    extra = (jnp.broadcast_to(
        spread[..., None], (*spread.shape, _LANES)).astype(jnp.int32),)
  if table is not None:
    extra = (*extra, table)
  operands = (folded, k, v, lengths.astype(jnp.int32), first, *extra)
  call = functools.partial(_call, window=window, softcap=softcap,
                           interpret=interpret, paged=table is not None)
  out, lse = split_over_mesh(
      call, operands, table is not None, heads_axis)(*operands)
  unfold = lambda x: plain.unfolded(x[:, :, :rows], size)
  return unfold(out), unfold(lse)


def split_over_mesh(call: Callable[..., plain.Part],
                    operands: tuple[jax.Array, ...], paged: bool = False,
                    heads_axis: str | None = "model"
                    ) -> Callable[..., plain.Part]:
  """Returns `call` split over the mesh of its operands, if they have one.

  Rows are split over the mesh axis "data", the name required by
  `decoding.placement`. Heads are split over `heads_axis`. An axis is used only
  if its size divides the number of rows or heads. The result does not depend on
  the placement of the cache, because a cache with another placement is moved.
  If every device of `heads_axis` stores all heads, it still processes only its
  share of them.

  Args:
    call: function of the operands that returns a part.
    operands: queries `[B, H, R, D]`, keys, values, and arrays `[B, ...]`.
    paged: True if keys and values are pages.
    heads_axis: mesh axis that divides the heads. None: every device processes
      all heads.
  """
  meshes = (jax.typeof(x).sharding.mesh for x in operands)
  mesh = next((mesh for mesh in meshes if mesh.size > 1), None)
  if mesh is None or mesh.manual_axes:  # in a `shard_map` arrays are local
    return call
  batch, heads = operands[0].shape[0], operands[1].shape[1]
  fits = lambda name, n: (
      name if n % mesh.shape.get(name, n + 1) == 0 else None)
  rows, axis = fits("data", batch), fits(heads_axis, heads)
  queries, cache = PartitionSpec(rows, axis), PartitionSpec(
      None if paged else rows, axis)
  others = (PartitionSpec(rows),) * (len(operands) - 3)
  return jax.shard_map(
      call, mesh=mesh, in_specs=(queries, cache, cache, *others),
      out_specs=(queries, queries), check_vma=False)


def stores_slots_last(dim: int) -> bool:
  """Returns True if XLA for TPUs stores `[B, H, C, dim]` with C as last axis.
  """
  return dim % _LANES > 0


def _call(query: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array,
          first: jax.Array, *extra: jax.Array, window: int, softcap: float,
          interpret: bool, paged: bool) -> plain.Part:
  """Computes the part of folded queries `[B, H, R, D]` with the kernel."""
  batch, heads, rows, dim = query.shape
  slots = k.shape[2]
  # Unless `dim` is a multiple of 128, XLA stores the slots as the last axis.
  # The kernel reads the cache in this order, which avoids a copy.
  narrow = stores_slots_last(dim)
  if narrow:
    k, v = k.swapaxes(2, 3), v.swapaxes(2, 3)
  # The caches stay in HBM. Without this constraint, XLA first copies an entire
  # small cache to on-chip memory.
  k, v = (pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in (k, v))
  positions, tables = extra[:bool(window)], extra[bool(window):]
  block = slots if paged else block_size(slots)
  blocks = tables[0].shape[1] if paged else pl.cdiv(slots, block)
  tile = min(rows, _QUERIES)
  some = _heads_at_once(heads, block, tile, dim, k.dtype.itemsize)
  scalars = (lengths, first, *tables)

  of_query = lambda *axes: pl.BlockSpec(
      (1, some, tile, *axes), lambda b, h, i, *_: (b, h, i, 0))
  in_cache = pl.BlockSpec(
      (1, some, *((dim, block) if narrow else (block, dim))),
      functools.partial(_slots_at, block=block, narrow=narrow))
  in_specs = [of_query(dim), in_cache, in_cache]
  in_specs += [pl.BlockSpec((1, tile, _LANES), lambda b, h, i, *_: (b, i, 0))
               for _ in positions]
  kernel = functools.partial(
      _kernel, scalars=len(scalars), block=block, blocks=blocks, window=window,
      softcap=softcap, scale=dim**-0.5, ragged=paged or bool(slots % block),
      narrow=narrow)
  out, lse = pl.pallas_call(
      kernel,
      grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=len(scalars),
          grid=(batch, heads // some, rows // tile, blocks),
          in_specs=in_specs, out_specs=[of_query(dim), of_query(_LANES)],
          scratch_shapes=[pltpu.VMEM((some, tile, width), jnp.float32)
                          for width in (_LANES, _LANES, dim)]),
      out_shape=[jax.ShapeDtypeStruct((batch, heads, rows, width), jnp.float32)
                 for width in (dim, _LANES)],
      compiler_params=pltpu.CompilerParams(dimension_semantics=(
          "parallel", "parallel", "parallel", "arbitrary")),
      interpret=interpret, name="past_attention",
  )(*scalars, query, k, v, *positions)
  return out, lse[..., 0]


def _slots_at(b: Any, h: Any, i: Any, j: Any, lengths: Any, first: Any,
              *tables: Any, block: int, narrow: bool) -> tuple[Any, ...]:
  """Returns the index of the cache block that step j of a row reads.

  Steps after the last block repeat its index. The kernel does not fetch a
  repeated block again.
  """
  del i
  size = np.int32(block)  # a Python number has 64 bits under jax_enable_x64
  last = jax.lax.div(jnp.maximum(lengths[b] - 1, 0), size)
  j = jnp.minimum(jax.lax.div(first[b], size) + j, last)
  if tables:
    return tables[0][b, j], h, 0, 0
  return (b, h, 0, j) if narrow else (b, h, j, 0)


def _kernel(*refs: Any, scalars: int, block: int, blocks: int, window: int,
            softcap: float, scale: float, ragged: bool, narrow: bool) -> None:
  """Processes one block of slots of one row, for a group of heads."""
  lengths, first = refs[:2]
  query, k, v, *positions = refs[scalars:-5]
  out, lse, top, total, acc = refs[-5:]
  b, j = pl.program_id(0), pl.program_id(3)
  start = (jax.lax.div(first[b], np.int32(block)) + j) * block

  @pl.when(j == 0)
  def _():
    top[...] = jnp.full(top.shape, plain.MASKED, jnp.float32)
    total[...] = jnp.zeros(total.shape, jnp.float32)
    acc[...] = jnp.zeros(acc.shape, jnp.float32)

  def one_head(head):
    scores = jax.lax.dot_general(
        query[0, head], k[0, head], (((1,), (0 if narrow else 1,)), ((), ())),
        preferred_element_type=jnp.float32) * scale
    if softcap:
      scores = softcap * jnp.tanh(scores / softcap)
    slot = start + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    seen = slot < lengths[b]
    if window:
      seen &= positions[0][0, :, :1] - slot < window
    scores = jnp.where(seen, scores, plain.MASKED)
    before = top[head, :, :1]
    now = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
    # Until a slot is visible, `now` and all scores are the mask value, and the
    # exponential below would be 1. So hidden slots are set to 0.
    weights = jnp.where(seen, jnp.exp(scores - now), 0)
    decay = jnp.exp(before - now)
    values = v[0, head]
    if ragged:  # slots after the row's end may contain NaN
      row = start + jax.lax.broadcasted_iota(
          jnp.int32, values.shape, int(narrow))
      values = jnp.where(row < lengths[b], values, 0)
    sums = total[head, :, :1] * decay + jnp.sum(weights, axis=1, keepdims=True)
    acc[head] = acc[head] * decay + jax.lax.dot_general(
        weights.astype(values.dtype), values,
        (((1,), (1 if narrow else 0,)), ((), ())),
        preferred_element_type=jnp.float32)
    top[head] = jnp.broadcast_to(now, top.shape[1:])
    total[head] = jnp.broadcast_to(sums, total.shape[1:])

  @pl.when(start < lengths[b])
  def _():
    for head in range(k.shape[1]):
      one_head(head)

  @pl.when(j == blocks - 1)
  def _():
    some = jnp.maximum(total[...], jnp.finfo(jnp.float32).tiny)
    out[0] = acc[...] / some[..., :1]
    lse[0] = jnp.where(total[...] > 0, top[...] + jnp.log(some), plain.MASKED)


def block_size(slots: int) -> int:
  """Returns the number of slots of a block.

  It divides the capacities that a decoder allocates. For other numbers of
  slots, the last block may be incomplete.
  """
  fitting = [n for n in (_BLOCK, _BLOCK // 2, _BLOCK // 4) if slots % n == 0]
  return min(slots, fitting[0] if fitting else _BLOCK)


def _heads_at_once(heads: int, block: int, tile: int, dim: int, itemsize: int
                   ) -> int:
  """Returns the number of heads that are fetched together.

  It is the largest divisor of `heads` whose blocks fit `_BUDGET`, at least 1.
  """
  lanes = math.ceil(dim / _LANES) * _LANES
  # Keys and values have two buffers, because the next block is fetched during
  # the computation.
  one = lanes * (4 * block * itemsize + tile * (2 * itemsize + 4 * 4))
  return max(n for n in range(1, heads + 1)
             if heads % n == 0 and (n == 1 or n * one <= _BUDGET))
