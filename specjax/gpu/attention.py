"""Attention of one layer as one kernel for NVIDIA GPUs, written in Pallas.

On a GPU, a small kernel costs its launch and not its arithmetic. So one kernel
rotates queries and keys, stores the new keys and values in the block, and reads
the committed slots, the earlier tokens of the block and the new tokens. All
queries of a key-value head share each read of a key.

At a small batch there are fewer heads than processors. The slots of a row are
then divided into splits of equal length, which several programs read, and a
second kernel combines them (flash-decoding: Dao et al. 2023,
crfm.stanford.edu/2023/10/12/flashdecoding). The loops end at the length of each
row, so the cost does not depend on the allocated slots.
"""

import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
import jax.numpy as jnp

_LEAST = 16  # smallest axis of a product on the tensor cores
_SLOTS = 64  # slots that a program reads at once
_ROWS = 64  # maximum number of queries of a program
_PROGRAMS = 256  # wanted number of programs, about two per processor
_MOST_SPLITS = 16
_WIDEST = 256  # channels of a head
_MASKED = -1e30  # finite, so that a fully masked row is not NaN
_NEVER = 2**30  # position of rows that are padding


def supports(dim: int) -> bool:
  """Returns True if `extend` supports heads of `dim` channels."""
  return dim <= _WIDEST


def extend(qkv: jax.Array, bias: jax.Array | None, rotation: Any,
           ancestors: jax.Array, lengths: jax.Array, k: jax.Array, v: jax.Array,
           block: tuple[jax.Array, jax.Array] | None = None,
           total: jax.Array | None = None,
           positions: jax.Array | None = None, *,
           window: int = 0, softcap: float = 0.0
           ) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Adds S new tokens to the block, and returns their attention.

  The new tokens see committed slots, and tokens of the block by a mask.

  Args:
    qkv: `[P, B, S, H, G + 2, D]` float32, P parts whose sum is G queries, key
      and value for each of H key-value heads. A single new token may be
      duplicated along the third axis, and the result is then duplicated too.
    bias: `[H, G + 2, D]`, added to the sum, or None.
    rotation: rotation of queries and keys, a `models.rotary.Rotation`. None:
      they are not rotated.
    ancestors: `[B, S, T]` bool, tokens of the block that each query sees, of
      which the last S are new.
    lengths: `[B]` int32, number of committed tokens in `k` and `v`.
    k: `[B, H, C, D]`, keys in slots.
    v: `[B, H, C, D]`, values in slots.
    block: keys and values `[B, H, N, D]` of the earlier tokens of the block, or
      None.
    total: `[B]` int32, number of committed tokens in the slots and at the start
      of the block. All queries see these. The block is then updated in place,
      and must have slots for them and T more tokens. None: there are none in
      the block, and the result has only the S new tokens.
    positions: `[B, S]` int32, positions of the queries. Required if `window` is
      not 0.
    window: number of last positions that each query sees, including its own. 0
      means no limit.
    softcap: c in c tanh(scores / c). 0 disables the cap.

  Returns:
    `(out [B, S, H * G, D], block_k, block_v)`. The blocks are `[B, H, N, D]`
    with `total`, or `[B, H, S, D]`.
  """
  _, batch, copies, heads, group, dim = qkv.shape
  size, group = ancestors.shape[1], group - 2
  copies //= size
  rows = size * group
  tile = min(_ROWS, max(_LEAST, pl.next_power_of_2(rows)))
  tiles = pl.cdiv(rows, tile)
  splits = _splits(batch * heads * tiles, k.shape[2])
  before = ancestors.shape[2] - size
  static = dict(
      group=group, size=size, dim=dim, tile=tile, splits=splits,
      before=before, window=window, softcap=softcap, copies=copies,
      has_bias=bias is not None,
      half=0 if rotation is None else len(rotation.frequency),
      scale=1.0 if rotation is None else rotation.scale,
      has_block=block is not None, has_total=total is not None)
  operands = [qkv, k, v, lengths]
  if rotation is not None:
    operands += [rotation.positions,
                 jnp.asarray(rotation.frequency, jnp.float32)]
  operands += [x for x in (bias, total, positions) if x is not None]
  masked = size > 1 or before > 0  # a token sees itself
  if masked:
    operands.append(ancestors.astype(jnp.int32))
  aliases = {}
  if block is not None:
    if total is not None:
      count = len(operands)
      aliases = {count: 1, count + 1: 2}
    operands += block
  slots = block[0].shape[2] if total is not None else size
  new = jax.ShapeDtypeStruct((batch, heads, slots, dim), k.dtype)
  if splits == 1:
    shapes = [jax.ShapeDtypeStruct(
        (batch, copies * size, heads * group, dim), k.dtype), new, new]
  else:
    wide = lambda *axes: jax.ShapeDtypeStruct(
        (batch, heads, splits, tiles * tile, *axes), jnp.float32)
    shapes = [wide(dim), new, new, wide(), wide()]
  narrow = dim <= 128
  found = pl.pallas_call(
      functools.partial(
          _kernel, **static, has_positions=positions is not None,
          masked=masked),
      grid=(heads * tiles, splits, batch), out_shape=shapes,
      input_output_aliases=aliases, name="attention",
      compiler_params=triton.CompilerParams(
          num_warps=4 if narrow else 8, num_stages=2))(*operands)
  out, block_k, block_v, *logs = found
  if logs:
    out = _combined(out, *logs, size=size, copies=copies, group=group,
                    dtype=k.dtype)
  return out, block_k, block_v


def _splits(programs: int, slots: int) -> int:
  """Returns the number of programs that share the slots of a row."""
  wanted = pl.cdiv(_PROGRAMS, programs)
  most = min(_MOST_SPLITS, pl.cdiv(slots, 2 * _SLOTS))
  return max(1, min(pl.next_power_of_2(wanted), most))


def _padded(size: int) -> int:
  return max(_LEAST, pl.next_power_of_2(size))


def _range(size: int) -> jax.Array:
  return jax.lax.broadcasted_iota(jnp.int32, (size,), 0)


def _kernel(*refs: Any, group: int, size: int, dim: int, tile: int, splits: int,
            before: int, window: int, copies: int, has_bias: bool,
            softcap: float, half: int, scale: float, has_block: bool,
            has_total: bool, has_positions: bool, masked: bool) -> None:
  """Processes one split of the slots of one row, for one head and tile."""
  inputs = iter(refs)
  take = lambda wanted: next(inputs) if wanted else None
  qkv, k, v, lengths = (next(inputs) for _ in range(4))
  places, frequency, bias, total, positions = map(
      take, (half, half, has_bias, has_total, has_positions))
  ancestors, old_k, old_v = map(take, (masked, has_block, has_block))
  out, new_k, new_v, *logs = inputs
  tiles = pl.cdiv(size * group, tile)
  pair, split, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
  h, i = pair // tiles, pair % tiles
  length = lengths[b]
  # Number of committed tokens at the start of the block.
  first = total[b] - length if has_total else 0

  parts = [(0, dim)]  # offset and size of the channels of a product
  if half:
    parts = [(0, half), (half, half), (2 * half, dim - 2 * half)]
    parts = parts[:2 + (dim > 2 * half)]

  def loaded(ref, index, part, there):
    """Loads rows `[n]` of some channels, padded with zeros."""
    channel = _range(_padded(part[1]))
    mask = there[:, None] & (channel < part[1])[None]
    index = [x if jnp.ndim(x) == 0 else x[:, None] for x in index]
    return triton.load(ref.at[(*index, part[0] + channel[None])], mask=mask,
                       other=0)

  def stored(ref, index, part, x, there):
    channel = _range(x.shape[1])
    index = [y if jnp.ndim(y) == 0 else y[:, None] for y in index]
    triton.store(ref.at[(*index, part[0] + channel[None])], x.astype(ref.dtype),
                 mask=there[:, None] & (channel < part[1])[None])

  def on_path(column):
    """Returns a mask of the block tokens `column [n]` that each query sees."""
    mask = jnp.broadcast_to(real[:, None], (tile, _LEAST))
    mask = mask & (column < before + size)[None]
    return triton.load(ancestors.at[b, node[:, None], column[None]], mask=mask,
                       other=0) != 0

  def new(token, which, part, mask):
    """Loads queries, keys or values of tokens, the sum of their parts."""
    total = functools.reduce(jnp.add, (
        loaded(qkv, (i, b, token, h, which), part, mask)
        for i in range(qkv.shape[0])))
    if has_bias:
      total += loaded(bias, (h, which + 0 * token), part, mask).astype(
          jnp.float32)
    return total.astype(k.dtype)

  def rotated(token, which, mask):
    """Loads queries or keys of tokens, rotated, one array for each part."""
    found = [new(token, which, part, mask) for part in parts]
    if half:
      place = triton.load(places.at[b, token], mask=mask, other=0)
      channel = _range(_padded(half))
      angle = place.astype(jnp.float32)[:, None] * triton.load(
          frequency.at[channel], mask=channel < half, other=0)[None]
      cos, sin = jnp.cos(angle) * scale, jnp.sin(angle) * scale
      one, other = (x.astype(jnp.float32) for x in found[:2])
      found[:2] = [(one * cos - other * sin).astype(k.dtype),
                   (other * cos + one * sin).astype(k.dtype)]
    return found

  row = i * tile + _range(tile)
  real, node, which = row < size * group, row // group, row % group
  queries = rotated(node, which, real)
  at = triton.load(positions.at[b, node], mask=real, other=_NEVER
                   ) if has_positions else None
  precision = (jax.lax.Precision.HIGHEST if k.dtype == jnp.float32
               else jax.lax.Precision.DEFAULT)

  def product(x, y, axis):
    return jax.lax.dot_general(
        x, y, (((1,), (axis,)), ((), ())), precision=precision,
        preferred_element_type=jnp.float32)

  def add(carry, keys, values, seen):
    """Adds keys to the running softmax."""
    top, total, acc = carry
    scores = functools.reduce(jnp.add, (
        product(x, y, 1) for x, y in zip(queries, keys))) * dim**-0.5
    if softcap:
      scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(seen, scores, _MASKED)
    now = jnp.maximum(top, jnp.max(scores, axis=1))
    weights = jnp.where(seen, jnp.exp(scores - now[:, None]), 0)
    decay = jnp.exp(top - now)
    return (now, total * decay + jnp.sum(weights, axis=1),
            acc * decay[:, None] + product(
                weights.astype(values.dtype), values, 0))

  def from_slots(j, carry):
    slot = j * _SLOTS + _range(_SLOTS)
    inside = slot < length
    keys = [loaded(k, (b, h, slot), part, inside) for part in parts]
    seen = inside[None]
    if window:
      seen = seen & (at[:, None] - slot[None] < window)
    return add(carry, keys, loaded(v, (b, h, slot), (0, dim), inside), seen)

  def from_block(j, carry):
    slot = j * _LEAST + _range(_LEAST)
    there = slot < first + before
    keys = [loaded(old_k, (b, h, slot), part, there) for part in parts]
    seen = jnp.broadcast_to(there[None], (tile, _LEAST))
    if before:
      column = jnp.clip(slot - first, 0, before - 1)
      seen = seen & ((slot < first)[None] | on_path(column))
    if window:
      seen = seen & (distance(slot) < window)
    return add(carry, keys, loaded(old_v, (b, h, slot), (0, dim), there),
               seen)

  def distance(slot):
    """Returns the distance of each query from earlier tokens of the block.

    Committed tokens at the start of the block have consecutive positions. For
    draft tokens the mask already excludes tokens outside the window.
    """
    return jnp.where((slot < first)[None],
                     at[:, None] - (length + slot)[None], 0)

  def from_new(j, carry):
    token = j * _LEAST + _range(_LEAST)
    there = token < size
    keys = rotated(token, group, there)
    values = new(token, group + 1, (0, dim), there)

    @pl.when(i == 0)
    def _():
      target = token + (first + before if has_total else 0)
      put = lambda ref, part, x: stored(
          ref, (b, h, target), part, x, there)
      for part, x in zip(parts, keys):
        put(new_k, part, x)
      put(new_v, (0, dim), values)

    seen = jnp.broadcast_to(there[None], (tile, _LEAST))
    if masked:
      seen = seen & on_path(before + token)
    return add(carry, keys, values, seen)

  low = 0
  if window:
    low = jnp.maximum(jnp.min(at) - window + 1, 0) // _SLOTS
  blocks = jnp.maximum(pl.cdiv(length, _SLOTS) - low, 0)
  share = pl.cdiv(blocks, splits)
  carry = (jnp.full((tile,), _MASKED, jnp.float32),
           jnp.zeros((tile,), jnp.float32),
           jnp.zeros((tile, _padded(dim)), jnp.float32))
  carry = jax.lax.fori_loop(
      low + split * share, low + jnp.minimum((split + 1) * share, blocks),
      from_slots, carry)
  # The last split is the shortest, so it also reads the block.
  is_last = (split == splits - 1).astype(jnp.int32)
  turns = lambda count: is_last * pl.cdiv(count, _LEAST)
  if has_block:
    carry = jax.lax.fori_loop(0, turns(first + before), from_block, carry)
  top, total, acc = jax.lax.fori_loop(0, turns(size), from_new, carry)

  if splits == 1:
    acc = acc / jnp.maximum(total, 1e-30)[:, None]
    for copy in range(copies):
      stored(out, (b, node + copy, h * group + which), (0, dim), acc, real)
    return
  stored(out, (b, h, split, row), (0, dim), acc, row >= 0)
  for ref, x in zip(logs, (top, total)):
    triton.store(ref.at[b, h, split, row], x)


def _combined(acc: jax.Array, top: jax.Array, total: jax.Array, *, size: int,
              copies: int, group: int, dtype: Any) -> jax.Array:
  """Returns the attention `[B, S, H * G, D]` over all splits.

  Args:
    acc: `[B, H, splits, R, D]` weighted sums of values.
    top: `[B, H, splits, R]` maxima of the scores.
    total: `[B, H, splits, R]` sums of the weights.
    size: S, number of tokens.
    copies: number of copies of the result of a single token.
    group: G, number of query heads per key-value head.
    dtype: dtype of the result.
  """
  batch, heads, splits, _, dim = acc.shape

  def kernel(acc, top, total, out):
    b, h, i = (pl.program_id(axis) for axis in range(3))
    row, channel = i * _LEAST + _range(_LEAST), _range(_padded(dim))[None]
    inside = jnp.broadcast_to(channel < dim, (_LEAST, channel.shape[1]))
    tops = [triton.load(top.at[b, h, j, row]) for j in range(splits)]
    highest = functools.reduce(jnp.maximum, tops)
    sums, values = jnp.zeros_like(highest), jnp.zeros(inside.shape, jnp.float32)
    for j, one in enumerate(tops):
      weight = jnp.exp(one - highest)
      sums += weight * triton.load(total.at[b, h, j, row])
      values += weight[:, None] * triton.load(
          acc.at[b, h, j, row[:, None], channel], mask=inside, other=0)
    values = (values / jnp.maximum(sums, 1e-30)[:, None]).astype(out.dtype)
    for copy in range(copies):
      triton.store(
          out.at[b, row[:, None] // group + copy,
                 h * group + row[:, None] % group, channel],
          values, mask=inside & (row < size * group)[:, None])

  return pl.pallas_call(
      kernel, grid=(batch, heads, pl.cdiv(size * group, _LEAST)),
      out_shape=jax.ShapeDtypeStruct(
          (batch, copies * size, heads * group, dim), dtype),
      name="combine", compiler_params=triton.CompilerParams(num_warps=4),
  )(acc, top, total)
