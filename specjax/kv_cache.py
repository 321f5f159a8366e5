"""Keys and values of a batch whose rows grow at different speeds.

Rows accept different numbers of tokens, so every row has a write position of
its own. The tokens of a pass are written to scratch slots after `lengths`;
`commit` keeps those on the accepted path and moves them together. Rolling
back is arithmetic on `lengths`: nothing is copied and nothing is erased.

This is the only file that indexes `k` and `v`.
"""

from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

_SMALLEST_BUCKET = 128
_MASKED = -1e30  # finite: a row that is masked everywhere must not become NaN


def _write_rows(buffer, block, starts):
  """Writes `block [B, H, S, D]` into `buffer [B, H, C, D]` from starts[b]."""

  def write(row, new, start):
    return jax.lax.dynamic_update_slice_in_dim(row, new, start, axis=1)

  return jax.vmap(write)(buffer, block.astype(buffer.dtype), starts)


def _read_rows(buffer, starts, size):
  """Reads `size` slots from starts[b] on: [B, H, C, D] -> [B, H, size, D]."""
  return jax.vmap(
      lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, size, axis=1)
  )(buffer, starts)


def grouped_attention(query: jax.Array, k: jax.Array, v: jax.Array,
                      visible: jax.Array, softcap: float = 0.0) -> jax.Array:
  """Softmax attention with G query heads for each key-value head.

  Args:
    query: `[B, S, H * G, D]`.
    k: `[B, H, T, D]`.
    v: `[B, H, T, D]`.
    visible: `[B or 1, S, T]` bool.
    softcap: c of c tanh(scores / c); 0: none.

  Returns:
    `[B, S, H * G, D]`.
  """
  batch, size, _, dim = query.shape
  heads, slots = k.shape[1:3]
  query = query.reshape(batch, size, heads, -1, dim).transpose(0, 2, 3, 1, 4)
  query = (query * dim**-0.5).reshape(batch, heads, -1, dim)
  scores = jnp.einsum("bhqd,bhtd->bhqt", query, k, preferred_element_type=(
      jnp.promote_types(query.dtype, jnp.float32)))
  if softcap:
    scores = softcap * jnp.tanh(scores / softcap)
  scores = scores.reshape(batch, heads, -1, size, slots)
  scores = jnp.where(visible[:, None, None], scores, _MASKED)
  weights = jax.nn.softmax(scores).astype(v.dtype)
  out = jnp.einsum("bhqt,bhtd->bhqd",
                   weights.reshape(batch, heads, -1, slots), v)
  out = out.reshape(batch, heads, -1, size, dim).transpose(0, 3, 1, 2, 4)
  return out.reshape(batch, size, -1, dim)


def attention_in_block(query: jax.Array, key: jax.Array, value: jax.Array,
                       ancestors: jax.Array, window: int = 0,
                       softcap: float = 0.0) -> jax.Array:
  """Attention of a block of T tokens that has no past.

  Args:
    query: `[B, T, G * H, D]`.
    key: `[B, T, H, D]`.
    value: `[B, T, H, D]`.
    ancestors: `[B, T, T]` bool.
    window: how many tokens back each one sees, itself included; 0: all.
    softcap: see `grouped_attention`.

  Returns:
    `[B, T, G * H, D]`.
  """
  none = jnp.zeros(query.shape[:1], jnp.int32)
  visible = visible_slots(none, ancestors, query.shape[1], window)
  return grouped_attention(query, key.swapaxes(1, 2), value.swapaxes(1, 2),
                           visible, softcap)


@struct.dataclass
class KVCache:
  """A preallocated cache with a length per row.

  Attributes:
    k: L arrays `[B, H, C, D]`, the keys of each layer (H: key-value heads).
    v: L arrays `[B, H, C, D]`, the values.
    lengths: `[B]` int32, committed tokens of each row. Slots after it are
      scratch.
  """

  k: tuple[jax.Array, ...]
  v: tuple[jax.Array, ...]
  lengths: jax.Array

  @classmethod
  def empty(cls, *, layers: int, batch: int, heads: int, capacity: int,
            head_dim: int, dtype: Any) -> "KVCache":
    """A cache of `capacity` slots a row, none of them in use."""
    shape = (batch, heads, capacity, head_dim)
    zeros = lambda: tuple(jnp.zeros(shape, dtype) for _ in range(layers))
    return cls(k=zeros(), v=zeros(), lengths=jnp.zeros((batch,), jnp.int32))

  @property
  def capacity(self) -> int:
    """C, the slots of a row; the longest row plus N must not exceed it."""
    return self.k[0].shape[2]

  def append(self, layer: int, k: jax.Array, v: jax.Array, after: int = 0
             ) -> "KVCache":
    """Writes new tokens of one layer to the scratch slots after `lengths`.

    Args:
      layer: index of the layer.
      k: `[B, S, H, D]` keys of the S new tokens.
      v: `[B, S, H, D]` values.
      after: tokens of the block that earlier passes wrote; they stay.
    """
    starts = self.lengths + after
    put = lambda all_layers, new: tuple(
        _write_rows(old, new.swapaxes(1, 2), starts)
        if i == layer else old for i, old in enumerate(all_layers))
    return self.replace(k=put(self.k, k), v=put(self.v, v))

  def attend(self, layer: int, query: jax.Array, ancestors: jax.Array,
             window: int = 0, softcap: float = 0.0) -> jax.Array:
    """Attention of a block over the committed past and its own ancestors.

    The cost follows the longest row in use and not the allocation: the work
    is compiled for a few power-of-two lengths and the shortest that fits is
    chosen at run time. Empty slots add zeros, but a sum of another length may
    be rounded in another order: in bfloat16 a row's logits can differ in the
    last digits when a longer row joins its batch. In float32 the tests have
    seen no such difference.

    Args:
      layer: index of the layer, to which the block was appended already.
      query: `[B, S, G * H, D]`, G query heads for each key-value head.
      ancestors: `[B, S, T]` bool, over all T tokens of the block; the
        queries are those of the last S.
      window: how many tokens back each one sees, itself included; 0: all.
      softcap: see `grouped_attention`.

    Returns:
      `[B, S, G * H, D]`.
    """
    def over(bucket):
      def attention(k, v, query, lengths, ancestors):
        visible = visible_slots(lengths, ancestors, bucket, window)
        return grouped_attention(query, k[:, :, :bucket], v[:, :, :bucket],
                                 visible, softcap)

      return attention

    buckets = _buckets(self.capacity)
    used = jnp.max(self.lengths) + ancestors.shape[-1]
    index = sum((used > b).astype(jnp.int32) for b in buckets[:-1])
    return jax.lax.switch(
        jnp.asarray(index, jnp.int32), [over(b) for b in buckets],
        self.k[layer], self.v[layer], query, self.lengths, ancestors)

  def commit(self, path: jax.Array, count: jax.Array) -> "KVCache":
    """Keeps the accepted path of the block that was appended last.

    Args:
      path: `[B, T]` int32, nodes of the block of T tokens, in the order of
        their depth.
      count: `[B]` int32, how many of them are kept.
    """
    def compact(buffer):
      block = _read_rows(buffer, self.lengths, path.shape[1])
      block = jnp.take_along_axis(block, path[:, None, :, None], axis=2)
      return _write_rows(buffer, block, self.lengths)

    if path.shape[1] > 1:  # a single node cannot be out of place
      moved = self.replace(k=tuple(map(compact, self.k)),
                           v=tuple(map(compact, self.v)))
    else:
      moved = self
    return moved.replace(lengths=self.lengths + count)

  def rollback(self, lengths: jax.Array) -> "KVCache":
    """Sets the committed tokens of every row to `lengths [B]`."""
    return self.replace(lengths=jnp.asarray(lengths, jnp.int32))

  def specs(self, axis: str, rows: str | None = None) -> "KVCache":
    """How a mesh splits the cache: heads over `axis`, B over `rows`.

    Args:
      axis: the mesh axis of the key-value heads.
      rows: the mesh axis of the rows; None keeps all rows on each device.

    Returns:
      A `KVCache` of `PartitionSpec`.
    """
    split = lambda arrays: tuple(
        PartitionSpec(rows, axis, None, None) for _ in arrays)
    return KVCache(k=split(self.k), v=split(self.v),
                   lengths=PartitionSpec(rows))


def _buckets(capacity: int) -> list[int]:
  """The lengths that attention is compiled for, shortest first."""
  buckets = []
  bucket = _SMALLEST_BUCKET
  while bucket < capacity:
    buckets.append(bucket)
    bucket *= 2
  return [*buckets, capacity]


def visible_slots(lengths: jax.Array, ancestors: jax.Array, slots: int,
                  window: int = 0) -> jax.Array:
  """Which of the first slots of a row each new token attends to.

  Args:
    lengths: `[B]` int32, committed tokens of each row.
    ancestors: `[B, S, T]` bool, over all T tokens of the block, whose slots
      come after `lengths`.
    slots: how many.
    window: how many tokens back each one sees, itself included; 0: all.

  Returns:
    `[B, S, slots]` bool.
  """
  size = ancestors.shape[-1]
  offset = jnp.arange(slots, dtype=jnp.int32) - lengths[:, None]
  node = jnp.clip(offset, 0, size - 1)[:, None, :]
  offset = offset[:, None, :]
  on_path = jnp.take_along_axis(ancestors, node, axis=2)
  seen = (offset < 0) | ((offset < size) & on_path)
  if window:
    # Parents stand before their children, so the ancestors up to a node of the
    # path, in the order of the block, are as many as its depth and one.
    depths = jnp.cumsum(ancestors, axis=-1, dtype=jnp.int32) - 1
    depth = jnp.where(offset < 0, offset,
                      jnp.take_along_axis(depths, node, axis=2))
    seen &= depths[..., -1:] - depth < window
  return seen
