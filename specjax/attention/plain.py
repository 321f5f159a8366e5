"""Attention in plain XLA, over committed slots and within a block.

A pass of S tokens reads C committed slots and a block of T tokens. All S tokens
see the same committed slots, so they are treated as additional query heads and
need no tree mask. Within the block, an S x T mask marks the visible tokens.
Each of the two parts returns its softmax-weighted sum and the logarithm of the
sum of its weights. `merge` computes the softmax over both parts (Milakov and
Gimelshein 2018, arXiv:1805.02867; FlashDecoding).
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp

_SMALLEST_BUCKET = 128  # slots
_PROMPT = 32  # tokens; a pass over the start of a prompt has at least as many
MASKED = -1e30  # finite, so that a fully masked row is not NaN

Part = tuple[jax.Array, jax.Array]


def folded(query: jax.Array, heads: int) -> jax.Array:
  """Groups queries by key-value head: `[B, S, H * G, D] -> [B, H, G * S, D]`.

  Args:
    query: `[B, S, H * G, D]`, queries of S tokens.
    heads: H, number of key-value heads.
  """
  batch, size, _, dim = query.shape
  query = query.reshape(batch, size, heads, -1, dim).transpose(0, 2, 3, 1, 4)
  return query.reshape(batch, heads, -1, dim)


def unfolded(x: jax.Array, size: int) -> jax.Array:
  """Inverts `folded`: `[B, H, G * S, ...] -> [B, S, H * G, ...]`, S = `size`.
  """
  batch, heads, _, *rest = x.shape
  x = jnp.moveaxis(x.reshape(batch, heads, -1, size, *rest), 3, 1)
  return x.reshape(batch, size, -1, *rest)


def _scaled(query: jax.Array, heads: int) -> jax.Array:
  return folded(query * query.shape[3]**-0.5, heads)


def _part(query: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array,
          size: int, softcap: float) -> Part:
  """Returns the part over keys `k` and values `v`, both `[B, H, T, D]`.

  Args:
    query: `[B, H, G * S, D]`, folded and scaled queries.
    k: keys.
    v: values.
    visible: `[B or 1, S or 1, T]` bool, keys that each query sees.
    size: S, number of tokens.
    softcap: c in c tanh(scores / c). 0 disables the cap.
  """
  batch, heads, rows, _ = query.shape
  wide = jnp.promote_types(query.dtype, jnp.float32)
  scores = jnp.einsum("bhqd,bhtd->bhqt", query, k, preferred_element_type=wide)
  scores = _capped(scores, softcap)
  slots = k.shape[2]  # may be 0
  scores = scores.reshape(batch, heads, rows // size, size, slots)
  scores = jnp.where(visible[:, None, None], scores, MASKED)
  # `top` cancels in both results, so no derivative depends on it.
  top = jnp.max(jax.lax.stop_gradient(scores), axis=-1, keepdims=True,
                initial=MASKED)
  weights = jnp.exp(scores - top)
  total = jnp.sum(weights, axis=-1, keepdims=True)
  out = jnp.einsum(
      "bhqt,bhtd->bhqd", weights.astype(v.dtype).reshape(
          batch, heads, rows, slots), v, preferred_element_type=wide)
  out = out / jnp.maximum(total, 1e-30).reshape(batch, heads, rows, 1)
  log = (top + jnp.log(total)).reshape(batch, heads, rows)
  return unfolded(out, size), unfolded(log, size)


def in_order(cache: jax.Array, table: jax.Array | None, lengths: jax.Array,
             slots: int | None = None) -> jax.Array:
  """Returns the first slots of every row in order, `[B, H, slots, D]`.

  Args:
    cache: `[B, H, C, D]`, or pages `[P, H, T, D]` if there is a table. The
      cache of a single row may also be `[H, C, D]`, without a table.
    table: `[B, C / T]` int32, indices of the pages of each row, or None.
    lengths: `[B]` int32, number of valid slots. With a table, later slots are
      set to 0, because their page may contain a NaN of an earlier row, and 0
      times NaN is NaN.
    slots: number of slots in the result. None means all.
  """
  if table is None:
    return cache[..., :slots, :]
  size = cache.shape[2]
  pages = cache[table if slots is None else table[:, :-(-slots // size)]]
  rows, count, heads, _, dim = pages.shape
  whole = pages.swapaxes(1, 2).reshape(
      rows, heads, count * size, dim)[:, :, :slots]
  counts = jnp.arange(whole.shape[2], dtype=jnp.int32) < lengths[:, None]
  return jnp.where(counts[:, None, :, None], whole, 0)


def _over(query: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array,
          positions: jax.Array | None, size: int, window: int, softcap: float
          ) -> Part:
  slot = jnp.arange(k.shape[2], dtype=jnp.int32)
  visible = (slot < lengths[:, None])[:, None]
  if window:
    visible &= positions[..., None] - slot < window
  return _part(query, k, v, visible, size, softcap)


def whole(query: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array,
          positions: jax.Array | None = None, table: jax.Array | None = None, *,
          window: int = 0, softcap: float = 0.0) -> Part:
  """Computes `attention.past_attention` over all slots, with a mask."""
  k, v = (in_order(x, table, lengths) for x in (k, v))
  return _over(_scaled(query, k.shape[1]), k, v, lengths, positions,
               query.shape[1], window, softcap)


def bucketed(query: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array,
             positions: jax.Array | None = None,
             table: jax.Array | None = None, *, window: int = 0,
             softcap: float = 0.0) -> Part:
  """Computes `attention.past_attention` at a cost that fits the longest row.

  The attention is compiled for a few lengths (`_buckets`). At run time, the
  shortest one that fits is selected. Empty slots add zeros, but XLA may round a
  sum of another length in another order. So in bfloat16 the last digits of a
  row's logits can change if a longer row joins the batch. In float32 the tests
  have found no difference.
  """
  size = query.shape[1]

  def over(bucket):
    return lambda query, k, v, table, lengths, positions: _over(
        query, *(in_order(x, table, lengths, bucket) for x in (k, v)), lengths,
        positions, size, window, softcap)

  return _switch(over, size, _scaled(query, k.shape[1]), k, v, table, lengths,
                 positions)


def joint(query: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array,
          block_k: jax.Array, block_v: jax.Array, visible: jax.Array,
          positions: jax.Array | None = None, table: jax.Array | None = None,
          *, window: int = 0, softcap: float = 0.0) -> jax.Array:
  """Computes `attention.attend` with one softmax, at the cost of `bucketed`.

  On a CPU, starting a small operation takes as long as the operation itself.
  Merging two parts would cost a tenth of a small model's pass. If only some
  slots are read, they are copied anyway. The block is then copied to the end of
  this copy, so that one part contains all keys.
  """
  size, rows = query.shape[1], _scaled(query, k.shape[1])
  batch, heads, count, _ = rows.shape
  capacity = k.shape[2]
  room = block_k.shape[2] if table is None and size < _PROMPT else 0
  # The blocks have the axis order of the model's layers, without axes of size
  # 1. With axes of size 1, XLA may select another axis order at each use. It
  # would then copy the slots of a single row twice.
  is_single = batch == 1 and table is None
  form = block_k.swapaxes(1, 2).shape[is_single:]
  blocks = [x.swapaxes(1, 2).squeeze() for x in (block_k, block_v)]
  if is_single:
    rows, k, v = rows[0], k[0], v[0]

  def over(bucket):
    return functools.partial(
        _attend_jointly, bucket=bucket, room=room, capacity=capacity, form=form,
        shape=(batch, heads, count), size=size, window=window, softcap=softcap)

  return _switch(over, size, rows, k, v, table, lengths, positions, *blocks,
                 visible, room=room)


def _attend_jointly(
    rows: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array | None,
    lengths: jax.Array, positions: jax.Array | None, block_k: jax.Array,
    block_v: jax.Array, visible: jax.Array, *, bucket: int, room: int,
    capacity: int, form: tuple[int, ...], shape: tuple[int, int, int],
    size: int, window: int, softcap: float) -> jax.Array:
  """Computes `joint` over the first `bucket` slots."""
  batch, heads, count = shape
  wide = jnp.promote_types(rows.dtype, jnp.float32)
  product = functools.partial(jnp.einsum, preferred_element_type=wide)
  # The block is joined to the slots only if the slots are copied anyway, which
  # is the case if only some of them are read. All slots are read in place.
  joined = 0 < room <= bucket < capacity
  # Without the barrier XLA moves the transposition out of the branch, and each
  # operand of the join is copied twice.
  block_k, block_v = (
      jax.lax.optimization_barrier(x).reshape(form).swapaxes(-3, -2)
      for x in (block_k, block_v))
  slots = bucket - room if joined else bucket
  k, v = (in_order(x, table, lengths, bucket) for x in (k, v))
  # One mask covers slots and block, because no length exceeds the slots.
  slot = jnp.arange(slots + visible.shape[2], dtype=jnp.int32)
  seen = (slot < lengths[:, None])[:, None]
  if window:
    seen &= positions[..., None] - slot < window
  seen |= jnp.pad(visible, ((0, 0), (0, 0), (slots, 0)))
  keys, values = (k, block_k), (v, block_v)
  if joined:  # write the block to the last slots, which no row uses
    keys, values = (
        [jax.lax.dynamic_update_slice_in_dim(*x, slots, axis=-2)]
        for x in (keys, values))
  scores = jnp.concatenate(
      [product("...qd,...td->...qt", rows, x) for x in keys], axis=-1)
  scores = scores.reshape(batch, heads, count // size, size, -1)
  scores = jnp.where(seen[:, None, None], _capped(scores, softcap), MASKED)
  weights = jax.nn.softmax(scores).astype(v.dtype)
  weights = weights.reshape(*rows.shape[:-1], -1)
  weights = jnp.split(weights, [] if joined else [slots], axis=-1)
  first, *more = [product("...qt,...td->...qd", *one)
                  for one in zip(weights, values)]
  out = sum(more, first).reshape(batch, heads, count, -1)
  # `unfolded` is called inside the switch. Outside the switch, its result would
  # be copied once more.
  return unfolded(out, size)


def _capped(scores: jax.Array, softcap: float) -> jax.Array:
  return softcap * jnp.tanh(scores / softcap) if softcap else scores


def _switch(over: Callable[[int], Callable[..., Any]], size: int,
            query: jax.Array, k: jax.Array, v: jax.Array,
            table: jax.Array | None, lengths: jax.Array, *more: jax.Array,
            room: int = 0) -> Any:
  """Calls `over(slots)` with the smallest bucket that fits the longest row.

  Args:
    over: function of a number of slots that returns the function to run.
    size: number of tokens of the pass.
    query: queries, the first operand of the function to run. The next operands
      are `k`, `v`, `table`, `lengths` and `more`.
    k: keys.
    v: values.
    table: pages of the rows, or None.
    lengths: `[B]` int32, number of committed slots of each row.
    *more: further operands.
    room: number of slots needed in addition to those of the longest row.
  """
  capacity = k.shape[-2] * (1 if table is None else table.shape[1])
  buckets = _buckets(capacity, size)
  longest = jnp.max(lengths) + room
  index = sum(((longest > b).astype(jnp.int32) for b in buckets[:-1]),
              jnp.zeros((), jnp.int32))
  return jax.lax.switch(index, [over(b) for b in buckets], query, k, v, table,
                        lengths, *more)


def _buckets(capacity: int, size: int) -> list[int]:
  """Returns the numbers of slots for which attention is compiled, in order.

  These are 128 and its doublings below the capacity, and the capacity. Passes
  of 32 or more tokens, which may begin a prompt, also have 0.
  """
  buckets, bucket = [0] * (size >= _PROMPT), _SMALLEST_BUCKET
  while bucket < capacity:
    buckets.append(bucket)
    bucket *= 2
  return [*buckets, capacity]


def block_attention(query: jax.Array, k: jax.Array, v: jax.Array,
                    visible: jax.Array, *, softcap: float = 0.0) -> Part:
  """Returns attention of S queries within a block of T tokens, as a part.

  Args:
    query: `[B, S, H * G, D]` queries.
    k: `[B, H, T, D]` keys.
    v: `[B, H, T, D]` values.
    visible: `[B or 1, S, T]` bool, tokens that each query sees.
    softcap: c in c tanh(scores / c). 0 disables the cap.
  """
  return _part(_scaled(query, k.shape[1]), k, v, visible, query.shape[1],
               softcap)


def merge(one: Part, other: Part) -> Part:
  """Returns the part over the keys of both parts."""
  top = jnp.maximum(one[1], other[1])
  weights = [jnp.exp(log - top) for _, log in (one, other)]
  total = weights[0] + weights[1]
  out = (one[0] * weights[0][..., None] + other[0] * weights[1][..., None]
         ) / total[..., None]
  return out, top + jnp.log(total)


def with_sinks(part: Part, logits: jax.Array | None) -> jax.Array:
  """Returns the output of a part with one more key per head, of value 0.

  Args:
    part: the part over all other keys.
    logits: `[H * G]` scores of this key, the attention sink of each query head
      (GPT-OSS). None means no such key.
  """
  out, log = part
  return out if logits is None else out * jax.nn.sigmoid(
      log - logits.astype(log.dtype))[..., None]
