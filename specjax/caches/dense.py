"""Keys and values of a batch whose rows grow at different speeds.

A pass only reads what is committed. The keys and values of its tokens are a
*block* beside it; `commit` writes those on the accepted path after `lengths`,
row by row, for rows accept different numbers of tokens. So the large arrays
are written once a round, in place, however many passes it has.

Who feeds token after token reserves a block for all of them: what is committed
then stays in the block until it is settled.

Beside this file `paged_cache` and `attention` alone index `k` and `v`.
"""

from typing import Any

import chex
from flax import struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from specjax import attention
from specjax import interfaces
from specjax.interfaces import Cache
from specjax.trees import topology
from specjax.types import DecodeState


def grouped_attention(query: jax.Array, k: jax.Array, v: jax.Array,
                      visible: jax.Array, softcap: float = 0.0) -> jax.Array:
  """Softmax attention over one part alone, for caches that have no other.

  Arguments are those of `attention.block_attention`.

  Returns:
    `[B, S, H * G, D]`, in the dtype of `v`.
  """
  out, _ = attention.block_attention(query, k, v, visible, softcap=softcap)
  return out.astype(v.dtype)


def attention_in_block(query: jax.Array, key: jax.Array, value: jax.Array,
                       ancestors: jax.Array, window: int = 0,
                       softcap: float = 0.0) -> jax.Array:
  """Attention of a block of T tokens that has no past.

  Args:
    query: `[B, S, G * H, D]`, of the last S tokens of the block.
    key: `[B, T, H, D]`.
    value: `[B, T, H, D]`.
    ancestors: `[B, S, T]` bool.
    window: how many tokens back each one sees, itself included; 0: all.
    softcap: see `attention.block_attention`.

  Returns:
    `[B, S, G * H, D]`.
  """
  if window:
    none = jnp.zeros(query.shape[:1], jnp.int32)
    ancestors = visible_slots(none, ancestors, key.shape[1], window)
  return grouped_attention(query, key.swapaxes(1, 2), value.swapaxes(1, 2),
                           ancestors, softcap)


@struct.dataclass
class BlockCache(Cache):
  """Keys and values of a block that is never committed, for training.

  It takes the place of a cache where a pass reads the tokens of passes before
  it. There are no empty slots to attend to, and gradients need no copy of them.

  Attributes:
    lengths: `[B]` int32 zeros; no token is committed.
    layers: `{layer: (keys, values)}`, each `[B, T, H, D]`.
  """

  lengths: jax.Array
  layers: dict[int, tuple[jax.Array, jax.Array]] = struct.field(
      default_factory=dict)

  def append(self, layer: int, k: jax.Array, v: jax.Array, after: int = 0
             ) -> "BlockCache":
    """Adds `[B, S, H, D]` of the new tokens of a layer, as in `KVCache`."""
    new = k, v
    if after:
      new = tuple(jnp.concatenate([old[:, :after], x], axis=1)
                  for old, x in zip(self.layers[layer], new))
    return self.replace(layers={**self.layers, layer: new})

  def attend(self, layer: int, query: jax.Array, ancestors: jax.Array,
             **options: Any) -> jax.Array:
    """Returns `attention_in_block` of the layer."""
    return attention_in_block(
        query, *self.layers[layer], ancestors, **options)


@struct.dataclass
class KVCache(Cache):
  """A preallocated cache with a length per row.

  Between rounds there is no block, and the last three attributes are empty.

  Attributes:
    k: L arrays `[B, H, C, D]`, the keys of each layer (H: key-value heads).
    v: L arrays `[B, H, C, D]`, the values.
    lengths: `[B]` int32, committed tokens of each row.
    block_k: L arrays `[B, H, T, D]`, keys of the tokens that came since, or ().
    block_v: the same of the values.
    held: `[B]` int32 where a block is reserved, else None: `k` and `v` hold
      that many of the committed tokens, and the block begins with the others.
    heads_axis: which mesh axis divides the heads where attention runs on a TPU,
      see `attention.past_attention`; None where every device has them all.
  """

  k: tuple[jax.Array, ...]
  v: tuple[jax.Array, ...]
  lengths: jax.Array
  block_k: tuple[jax.Array | None, ...] = ()
  block_v: tuple[jax.Array | None, ...] = ()
  held: jax.Array | None = None
  heads_axis: str | None = struct.field(pytree_node=False, default="model")

  table = None  # of pages, which this cache has not; see `paged_cache`

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
    """Puts new tokens of one layer into the block, after what is committed.

    Args:
      layer: index of the layer.
      k: `[B, S, H, D]` keys of the S new tokens.
      v: `[B, S, H, D]` values.
      after: tokens of the block that earlier passes fed; they stay.
    """
    def put(blocks, new):
      new = new.swapaxes(1, 2).astype(self.k[0].dtype)
      blocks = list(blocks or (None,) * len(self.k))
      if self.held is not None:
        new = _placed(blocks[layer], new, self.lengths - self.held + after)
      elif after:
        new = jnp.concatenate([blocks[layer][:, :, :after], new], axis=2)
      blocks[layer] = new
      return tuple(blocks)

    return self.replace(block_k=put(self.block_k, k),
                        block_v=put(self.block_v, v))

  def attend(self, layer: int, query: jax.Array, ancestors: jax.Array,
             window: int = 0, softcap: float = 0.0) -> jax.Array:
    """Attention of a block over the committed past and its own ancestors.

    Args:
      layer: index of the layer, to which the block was appended already.
      query: `[B, S, G * H, D]`, G query heads for each key-value head.
      ancestors: `[B, S, T]` bool, over all T tokens of the block; the
        queries are those of the last S.
      window: how many tokens back each one sees, itself included; 0: all.
      softcap: see `attention.block_attention`.

    Returns:
      `[B, S, G * H, D]`.
    """
    depths = topology.depths_of(ancestors)
    out = attention.attend(
        query, self.k[layer], self.v[layer], self.in_slots,
        self.block_k[layer], self.block_v[layer],
        self.in_block(ancestors, window), window=window, softcap=softcap,
        positions=self.lengths[:, None] + depths if window else None,
        table=self.table, heads_axis=self.heads_axis)
    return out.astype(self.v[layer].dtype)

  @property
  def in_slots(self) -> jax.Array:
    """`[B]` int32, how many committed tokens `k` and `v` hold."""
    return self.lengths if self.held is None else self.held

  def in_block(self, ancestors: jax.Array, window: int = 0) -> jax.Array:
    """Which slots of `block_k` and `block_v` each new token attends to.

    Args:
      ancestors: `[B, S, T]` bool, see `attend`.
      window: see there.

    Returns:
      `[B, S, slots]` bool.
    """
    reserved = self.held is not None
    slots = self.block_k[0].shape[2] if reserved else ancestors.shape[2]
    if not reserved and not window:
      return ancestors
    return visible_slots(self.lengths - self.in_slots, ancestors, slots, window)

  def after(self, x: jax.Array) -> "KVCache":
    """The same cache, whose writes come after `x`.

    An array that is read and written in no order that XLA knows is copied
    first. So where a pass ends the slots that are written next are made to
    depend on its result, by a number that is 0 and that no compiler knows to
    be. Each row has its own: a mesh may have split them.

    Args:
      x: `[B, ...]`, of every row what its last layer computed.
    """
    never = x.reshape(len(x), -1)[:, 0] * 0 == 1
    return self.replace(
        lengths=self.lengths + never,
        held=None if self.held is None else self.held + never)

  def commit(self, path: jax.Array, count: jax.Array) -> "KVCache":
    """Keeps the accepted path of the block.

    Args:
      path: `[B, T]` int32, nodes of the block of T tokens, in the order of
        their depth.
      count: `[B]` int32, how many of them are kept.
    """
    if self.held is None:
      take = lambda block: jnp.take_along_axis(
          block, path[:, None, :, None], axis=2)
      return self._written(take, self.lengths + count)
    start = self.lengths - self.held
    slot = jnp.arange(self.block_k[0].shape[2], dtype=jnp.int32)
    order = slot - start[:, None]
    node = jnp.take_along_axis(path, jnp.clip(order, 0, path.shape[1] - 1), 1)
    moved = (order >= 0) & (order < path.shape[1])
    source = jnp.where(moved, start[:, None] + node, slot)[:, None, :, None]
    take = lambda blocks: tuple(
        jnp.take_along_axis(block, source, axis=2) for block in blocks)
    return self.replace(block_k=take(self.block_k), block_v=take(self.block_v),
                        lengths=self.lengths + count)

  def rollback(self, lengths: jax.Array) -> "KVCache":
    """Sets the committed tokens of every row to `lengths [B]`.

    Where these are more than before, the first nodes of the block, in order,
    are kept. The rest of it is dropped.
    """
    lengths = jnp.asarray(lengths, jnp.int32)
    if self.held is not None:
      return self.replace(lengths=lengths,
                          held=jnp.minimum(self.held, lengths))
    return self._written(lambda block: block, lengths)

  def reserve(self, size: int) -> "KVCache":
    """The same cache, whose next `size` tokens stay in the block.

    The tokens count as committed by `commit` and `rollback` as ever; `settle`
    writes them. What was in a block before is dropped.
    """
    rows, (_, heads, _, dim) = len(self.lengths), self.k[0].shape
    zeros = lambda: tuple(
        jnp.zeros((rows, heads, size, dim), x.dtype) for x in self.k)
    return self.replace(block_k=zeros(), block_v=zeros(), held=self.lengths)

  def settle(self) -> "KVCache":
    """Writes the reserved block after what `k` and `v` hold."""
    if self.held is None:
      return self
    return self.replace(lengths=self.held, held=None)._written(
        lambda block: block, self.lengths)

  def _written(self, take, lengths):
    """The block, or what is taken of it, in the slots after `lengths`."""
    if not self.block_k:
      return self.replace(lengths=lengths)
    write = lambda arrays, blocks: tuple(
        self._put(old, take(new)) for old, new in zip(arrays, blocks))
    return self.replace(
        k=write(self.k, self.block_k), v=write(self.v, self.block_v),
        lengths=lengths, block_k=(), block_v=(), held=None)

  def _put(self, slots, block):
    """The slots of a layer with `block [B, H, S, D]` after `lengths`."""
    return put_rows(slots, block, self.lengths, axis=1)

  def undivided(self) -> "KVCache":
    """The same cache, of which every device has all heads."""
    return self.replace(heads_axis=None)

  def specs(self, axis: str | None, rows: str | None = None) -> "KVCache":
    """How a mesh splits the cache: heads over `axis`, B over `rows`.

    Args:
      axis: the mesh axis of the key-value heads.
      rows: the mesh axis of the rows; None keeps all rows on each device.

    Returns:
      A `KVCache` of `PartitionSpec`.
    """
    def split(x):
      return PartitionSpec(rows, *(axis, None, None)[:x.ndim - 1])

    return jax.tree.map(split, self)


def put_rows(rows: jax.Array, new: jax.Array, at: jax.Array, axis: int = 0
             ) -> jax.Array:
  """Writes a block into every row, each at its own position.

  >>> import jax.numpy as jnp
  >>> put_rows(jnp.zeros((2, 3)), jnp.ones((2, 1)), jnp.array([0, 2])).tolist()
  [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]

  Args:
    rows: `[B, ...]` rows with C slots along `axis`.
    new: `[B, ...]` blocks of the same dtype, with S <= C slots.
    at: `[B]` int32 positions of the first slots. XLA shifts a block back if it
      would exceed the row.
    axis: axis of the slots in a row.
  """
  chex.assert_equal_shape_prefix([rows, new, at], 1)
  return jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice_in_dim(
      row, new, at, axis))(rows, new, at)


def _placed(block, new, starts):
  """`block [B, H, T, D]` with `new [B, H, S, D]` from slot starts[b] on.

  By selection: a block is small, and a loop over its rows is not.
  """
  order = (jnp.arange(block.shape[2]) - starts[:, None])[:, None, :, None]
  size = new.shape[2]
  if size > 1:
    new = jnp.take_along_axis(new, jnp.clip(order, 0, size - 1), axis=2)
  return jnp.where((order >= 0) & (order < size), new, block)


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


def undivided(tree: Any) -> Any:
  """The same tree, whose caches say that every device has all of their heads.

  On a TPU attention would else divide them, and gather what it returns.

  Args:
    tree: the state of a drafter that is replicated, or of its shapes.
  """
  return interfaces.map_caches(
      lambda cache: cache.undivided(), lambda x: x, tree)


def divided_as(state: DecodeState, fresh: DecodeState) -> DecodeState:
  """`fresh`, to be put into `state`: its drafter `undivided` where that one is.

  Few rows are read without a `Placement` where no mesh divides them.
  """
  own = undivided(state.drafter)
  if jax.tree.structure(own) != jax.tree.structure(state.drafter):
    return fresh
  return fresh.replace(drafter=undivided(fresh.drafter))
