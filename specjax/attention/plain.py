"""Attention in two parts, in plain XLA: over the past, and within a block.

A pass of S tokens reads the committed past of C slots and its own T tokens.
Every token sees the same past, so that the S tokens count as more query heads
and no mask knows the tree; who sees whom in the block is an S x T mask. Each
part returns its softmax-weighted sum and the logarithm of the sum of its
weights, from which `merge` makes the softmax over both (Milakov and Gimelshein
2018, arXiv:1805.02867; FlashDecoding).
"""

import functools

import jax
import jax.numpy as jnp

_SMALLEST_BUCKET = 128
_PROMPT = 32  # tokens; so many at once may be the first of a row
MASKED = -1e30  # finite: a row that is masked everywhere must not become NaN

Part = tuple[jax.Array, jax.Array]


def folded(query: jax.Array, heads: int) -> jax.Array:
  """The queries of each key-value head: `[B, S, H * G, D] -> [B, H, G * S, D]`.

  Args:
    query: of S tokens.
    heads: H, key-value heads.
  """
  batch, size, _, dim = query.shape
  query = query.reshape(batch, size, heads, -1, dim).transpose(0, 2, 3, 1, 4)
  return query.reshape(batch, heads, -1, dim)


def unfolded(x: jax.Array, size: int) -> jax.Array:
  """Back again: `[B, H, G * S, ...] -> [B, S, H * G, ...]`, S = `size`."""
  batch, heads, _, *rest = x.shape
  x = jnp.moveaxis(x.reshape(batch, heads, -1, size, *rest), 3, 1)
  return x.reshape(batch, size, -1, *rest)


def _scaled(query, heads):
  return folded(query * query.shape[3]**-0.5, heads)


def _part(query, k, v, visible, size, softcap):
  """One part, of `query [B, H, G * S, D]`; visible `[B or 1, S or 1, T]`."""
  batch, heads, rows, _ = query.shape
  wide = jnp.promote_types(query.dtype, jnp.float32)
  scores = jnp.einsum("bhqd,bhtd->bhqt", query, k, preferred_element_type=wide)
  if softcap:
    scores = softcap * jnp.tanh(scores / softcap)
  slots = k.shape[2]  # may be none
  scores = scores.reshape(batch, heads, rows // size, size, slots)
  scores = jnp.where(visible[:, None, None], scores, MASKED)
  # No derivative depends on it: it cancels in both results.
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
  """The first slots of every row, default all: `[B, H, slots, D]`.

  Args:
    cache: `[B, H, C, D]`, or pages `[P, H, T, D]` where a table is given; of a
      lone row `[H, C, D]`.
    table: `[B, C / T]` int32, the pages of each row, or None.
    lengths: `[B]` int32, slots that count. In pages those after them are set to
      0: a row that had the page before may have left a NaN there, and a weight
      of 0 does not take it away.
    slots: how many.
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


def _over(query, k, v, lengths, positions, size, window, softcap):
  slot = jnp.arange(k.shape[2], dtype=jnp.int32)
  visible = (slot < lengths[:, None])[:, None]
  if window:
    visible &= positions[..., None] - slot < window
  return _part(query, k, v, visible, size, softcap)


def whole(query: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array,
          positions: jax.Array | None = None, table: jax.Array | None = None, *,
          window: int = 0, softcap: float = 0.0) -> Part:
  """`attention.past_attention` over all slots."""
  k, v = (in_order(x, table, lengths) for x in (k, v))
  return _over(_scaled(query, k.shape[1]), k, v, lengths, positions,
               query.shape[1], window, softcap)


def bucketed(query: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array,
             positions: jax.Array | None = None,
             table: jax.Array | None = None, *, window: int = 0,
             softcap: float = 0.0) -> Part:
  """`attention.past_attention` at a cost that follows the longest row in use.

  The work is compiled for a few power-of-two lengths, and the shortest that
  fits is chosen at run time. Empty slots add zeros, but a sum of another length
  may be rounded in another order: in bfloat16 a row's logits can differ in the
  last digits when a longer row joins its batch. In float32 the tests have seen
  no such difference.
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
  """`attention.attend` with one softmax, at a cost as `bucketed`.

  A CPU spends as long on starting a small operation as on its work: merging two
  parts would cost a tenth of a small model's pass. Where some slots are read
  they are copied in any case, and the block with them: one part then.
  """
  size, rows = query.shape[1], _scaled(query, k.shape[1])
  batch, heads, count, _ = rows.shape
  wide = jnp.promote_types(query.dtype, jnp.float32)
  product = functools.partial(jnp.einsum, preferred_element_type=wide)
  capacity = k.shape[2]
  room = block_k.shape[2] if table is None and size < _PROMPT else 0
  # As layers make them, and with no axis of size 1, for which XLA might choose
  # an order of its own in each place where it is used. For one it copies the
  # slots of a lone row twice.
  lone = batch == 1 and table is None
  form = block_k.swapaxes(1, 2).shape[lone:]
  blocks = [x.swapaxes(1, 2).squeeze() for x in (block_k, block_v)]
  if lone:
    rows, k, v = rows[0], k[0], v[0]

  def over(bucket):
    def attention(rows, k, v, table, lengths, positions, block_k, block_v,
                  visible):
      # All slots are read where they lie: to join a block would copy them.
      joined = 0 < room <= bucket < capacity
      # Without the barrier XLA takes the transposition out of the branch, and
      # what was part of the join is then two copies of each.
      block_k, block_v = (
          jax.lax.optimization_barrier(x).reshape(form).swapaxes(-3, -2)
          for x in (block_k, block_v))
      slots = bucket - room if joined else bucket
      k, v = (in_order(x, table, lengths, bucket) for x in (k, v))
      # One mask over both: no row has a length beyond the slots.
      slot = jnp.arange(slots + visible.shape[2], dtype=jnp.int32)
      seen = (slot < lengths[:, None])[:, None]
      if window:
        seen &= positions[..., None] - slot < window
      seen |= jnp.pad(visible, ((0, 0), (0, 0), (slots, 0)))
      keys, values = (k, block_k), (v, block_v)
      if joined:  # into the last slots of the copy, which no row has in use
        keys, values = (
            [jax.lax.dynamic_update_slice_in_dim(*x, slots, axis=-2)]
            for x in (keys, values))
      scores = jnp.concatenate(
          [product("...qd,...td->...qt", rows, x) for x in keys], axis=-1)
      scores = scores.reshape(batch, heads, count // size, size, -1)
      if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
      scores = jnp.where(seen[:, None, None], scores, MASKED)
      weights = jax.nn.softmax(scores).astype(v.dtype)
      weights = weights.reshape(*rows.shape[:-1], -1)
      weights = jnp.split(weights, [] if joined else [slots], axis=-1)
      first, *more = [product("...qt,...td->...qd", *one)
                      for one in zip(weights, values)]
      out = sum(more, first).reshape(batch, heads, count, -1)
      # Here and not after the switch, whose result would be copied once more.
      return unfolded(out, size)

    return attention

  return _switch(over, size, rows, k, v, table, lengths, positions, *blocks,
                 visible, room=room)


def _switch(over, size, query, k, v, table, lengths, *more, room=0):
  """`over(slots)(...)` of the fewest slots that hold the longest row and room.
  """
  capacity = k.shape[-2] * (1 if table is None else table.shape[1])
  buckets = _buckets(capacity, size)
  longest = jnp.max(lengths) + room
  index = sum(((longest > b).astype(jnp.int32) for b in buckets[:-1]),
              jnp.zeros((), jnp.int32))
  return jax.lax.switch(index, [over(b) for b in buckets], query, k, v, table,
                        lengths, *more)


def _buckets(capacity, size):
  """The lengths that attention is compiled for, shortest first."""
  buckets, bucket = [0] * (size >= _PROMPT), _SMALLEST_BUCKET
  while bucket < capacity:
    buckets.append(bucket)
    bucket *= 2
  return [*buckets, capacity]


def block_attention(query: jax.Array, k: jax.Array, v: jax.Array,
                    visible: jax.Array, *, softcap: float = 0.0) -> Part:
  """Attention within a block of T tokens, of which S are queries.

  Args:
    query: `[B, S, H * G, D]`.
    k: `[B, H, T, D]`.
    v: `[B, H, T, D]`.
    visible: `[B or 1, S, T]` bool.
    softcap: c of c tanh(scores / c); 0: none.

  Returns:
    As `attention.past_attention`.
  """
  return _part(_scaled(query, k.shape[1]), k, v, visible, query.shape[1],
               softcap)


def merge(one: Part, other: Part) -> Part:
  """The part that is over the keys of both."""
  top = jnp.maximum(one[1], other[1])
  weights = [jnp.exp(log - top) for _, log in (one, other)]
  total = weights[0] + weights[1]
  out = (one[0] * weights[0][..., None] + other[0] * weights[1][..., None]
         ) / total[..., None]
  return out, top + jnp.log(total)
