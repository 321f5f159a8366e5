"""Keys and values of a batch whose rows have different lengths.

A pass only reads the committed keys and values. The keys and values of its new
tokens are in a separate *block*. `commit` writes the accepted path of the block
after `lengths`, row by row, because rows accept different numbers of tokens. A
round therefore writes the large arrays once and in place, for any number of
passes.

A drafter with one pass per token calls `reserve` to allocate a block for all
passes. The committed tokens stay in this block until `settle` writes them.
"""

from typing import Any

import chex
from flax import struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from specjax import attention
from specjax import gpu
from specjax import interfaces
from specjax.gpu import attention as gpu_attention
from specjax.gpu import slots as gpu_slots
from specjax.interfaces import Cache
from specjax.trees import topology
from specjax.types import DecodeState


def grouped_attention(query: jax.Array, k: jax.Array, v: jax.Array,
                      visible: jax.Array, softcap: float = 0.0,
                      sink_logits: jax.Array | None = None) -> jax.Array:
  """Returns softmax attention over one block of keys and values.

  The arguments are those of `attention.block_attention` and `with_sinks`. The
  result is `[B, S, H * G, D]` and has the dtype of `v`.
  """
  return attention.with_sinks(attention.block_attention(
      query, k, v, visible, softcap=softcap), sink_logits).astype(v.dtype)


def attention_in_block(query: jax.Array, key: jax.Array, value: jax.Array,
                       ancestors: jax.Array, window: int = 0,
                       softcap: float = 0.0, depths: jax.Array | None = None,
                       sink_logits: jax.Array | None = None) -> jax.Array:
  """Returns attention `[B, S, G * H, D]` within a block of T tokens.

  Args:
    query: `[B, S, G * H, D]` queries of the last S tokens of the block.
    key: `[B, T, H, D]` keys.
    value: `[B, T, H, D]` values.
    ancestors: `[B, S, T]` bool, tokens of the block that each query sees.
    window: number of last tokens that a token sees, including itself. 0 means
      all tokens.
    softcap: soft-cap of the scores, see `attention.past_attention`.
    depths: depths at which the windows end, see `visible_slots`.
    sink_logits: logits of sinks, see `attention.with_sinks`, or None.
  """
  if window:
    none = jnp.zeros(query.shape[:1], jnp.int32)
    ancestors = visible_slots(none, ancestors, key.shape[1], window, depths)
  return grouped_attention(query, key.swapaxes(1, 2), value.swapaxes(1, 2),
                           ancestors, softcap, sink_logits)


@struct.dataclass
class BlockCache(Cache):
  """Keys and values of a block that is never committed, for training.

  A pass can read the tokens of earlier passes from this cache. The cache has no
  empty slots, so gradients need no copies of such slots.

  Attributes:
    lengths: `[B]` int32 zeros, because no token is committed.
    layers: `{layer: (keys, values)}`, each `[B, T, H, D]`.
  """

  lengths: jax.Array
  layers: dict[int, tuple[jax.Array, jax.Array]] = struct.field(
      default_factory=dict)

  def append(self, layer: int, k: jax.Array, v: jax.Array, after: int = 0
             ) -> "BlockCache":
    """Adds keys and values of new tokens of one layer, see `Cache.append`."""
    new = k, v
    if after:
      new = tuple(jnp.concatenate([old[:, :after], x], axis=1)
                  for old, x in zip(self.layers[layer], new))
    return self.replace(layers={**self.layers, layer: new})

  def attend(self, layer: int, query: jax.Array, ancestors: jax.Array,
             **options: Any) -> jax.Array:
    """Returns the result of `attention_in_block` for the layer."""
    return attention_in_block(
        query, *self.layers[layer], ancestors, **options)


@struct.dataclass
class KVCache(Cache):
  """A preallocated cache with a length per row.

  Between rounds, `block_k` and `block_v` are empty.

  Attributes:
    k: L arrays `[B, H, C, D]`, keys of each layer (H: key-value heads).
    v: L arrays `[B, H, C, D]`, values of each layer.
    lengths: `[B]` int32, number of committed tokens of each row.
    block_k: L arrays `[B, H, T, D]`, keys of the uncommitted tokens, or ().
    block_v: L arrays `[B, H, T, D]`, values of the same tokens, or ().
    held: `[B]` int32, number of committed tokens in `k` and `v` while a block
      is reserved. The other committed tokens are at the start of the block.
      None if no block is reserved.
    heads_axis: mesh axis over which attention on a TPU divides the heads, see
      `attention.past_attention`. None: every device has all heads.
  """

  k: tuple[jax.Array, ...]
  v: tuple[jax.Array, ...]
  lengths: jax.Array
  block_k: tuple[jax.Array | None, ...] = ()
  block_v: tuple[jax.Array | None, ...] = ()
  held: jax.Array | None = None
  heads_axis: str | None = struct.field(pytree_node=False, default="model")

  table = None  # only a `PagedCache` has a table of pages

  @classmethod
  def empty(cls, *, layers: int, batch: int, heads: int, capacity: int,
            head_dim: int, dtype: jax.typing.DTypeLike) -> "KVCache":
    """Returns a cache of `capacity` empty slots per row."""
    shape = (batch, heads, capacity, head_dim)
    zeros = lambda: tuple(jnp.zeros(shape, dtype) for _ in range(layers))
    return cls(k=zeros(), v=zeros(), lengths=jnp.zeros((batch,), jnp.int32))

  @property
  def capacity(self) -> int:
    """C, number of slots of a row; at least the row's length plus N."""
    return self.k[0].shape[2]

  def append(self, layer: int, k: jax.Array, v: jax.Array, after: int = 0
             ) -> "KVCache":
    """Adds new tokens of one layer to the block.

    Args:
      layer: index of the layer.
      k: `[B, S, H, D]` keys of the S new tokens.
      v: `[B, S, H, D]` values.
      after: number of block tokens from earlier passes, which are retained.
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
             window: int = 0, softcap: float = 0.0,
             depths: jax.Array | None = None,
             sink_logits: jax.Array | None = None) -> jax.Array:
    """Returns attention over committed tokens and ancestors in the block.

    Args:
      layer: index of the layer. Its new tokens must already be in the block.
      query: `[B, S, G * H, D]` queries of the last S tokens of the block, with
        G query heads for each key-value head.
      ancestors: `[B, S, T]` bool, tokens of the block that each query sees.
      window: number of last tokens that a token sees, including itself. 0
        means all tokens.
      softcap: soft-cap of the scores, see `attention.past_attention`.
      depths: depths at which the windows end, see `visible_slots`.
      sink_logits: logits of sinks, see `attention.with_sinks`, or None.

    Returns:
      `[B, S, G * H, D]`.
    """
    out = attention.attend(
        query, self.k[layer], self.v[layer], self.in_slots,
        self.block_k[layer], self.block_v[layer],
        self.in_block(ancestors, window, depths), window=window,
        softcap=softcap, table=self.table, heads_axis=self.heads_axis,
        sink_logits=sink_logits,
        positions=self.window_ends(ancestors, depths) if window else None)
    return out.astype(self.v[layer].dtype)

  def window_ends(self, ancestors: jax.Array, depths: jax.Array | None = None
                  ) -> jax.Array:
    """Returns the positions `[B, S]` at which the windows of queries end.

    Args:
      ancestors: `[B, S, T]` bool, see `attend`.
      depths: see `attend`.
    """
    if depths is None:
      depths = topology.depths_of(ancestors)
    return self.lengths[:, None] + depths

  def attend_new(self, layer: int, qkv: jax.Array, bias: jax.Array | None,
                 rotation: Any, ancestors: jax.Array, window: int = 0,
                 softcap: float = 0.0) -> tuple[jax.Array, "KVCache"]:
    _, size, count = ancestors.shape
    reserved = self.held is not None
    old = positions = None
    if reserved or count > size:
      old = self.block_k[layer], self.block_v[layer]
    if window:
      positions = self.window_ends(ancestors)
      ancestors = visible_slots(
          jnp.zeros_like(self.lengths), ancestors, count, window)
    out, *new = gpu_attention.extend(
        qkv, bias, rotation, ancestors, self.in_slots, self.k[layer],
        self.v[layer], old, self.lengths if reserved else None, positions,
        window=window, softcap=softcap)
    if count > size and not reserved:
      new = [jnp.concatenate([x[:, :, :count - size], y], axis=2)
             for x, y in zip(old, new)]
    put = lambda blocks, x: (
        *blocks[:layer], x, *blocks[layer + 1:])
    none = (None,) * len(self.k)
    return out, self.replace(block_k=put(self.block_k or none, new[0]),
                             block_v=put(self.block_v or none, new[1]))

  def is_fused(self, x: jax.Array) -> bool:
    # Subclasses store the slots in another form.
    return (type(self) is KVCache and gpu.in_use(self.k[0], x)
            and len({k.shape for k in self.k}) == 1
            and gpu_attention.supports(self.k[0].shape[3]))

  @property
  def in_slots(self) -> jax.Array:
    """`[B]` int32, number of committed tokens in `k` and `v`."""
    return self.lengths if self.held is None else self.held

  def in_block(self, ancestors: jax.Array, window: int = 0,
               depths: jax.Array | None = None) -> jax.Array:
    """Returns `[B, S, slots]` bool, slots of the block that each query sees.

    Args:
      ancestors: `[B, S, T]` bool, see `attend`.
      window: number of visible tokens, see `attend`.
      depths: see `attend`.
    """
    reserved = self.held is not None
    slots = self.block_k[0].shape[2] if reserved else ancestors.shape[2]
    if not reserved and not window:
      return ancestors
    return visible_slots(
        self.lengths - self.in_slots, ancestors, slots, window, depths)

  def after(self, x: jax.Array) -> "KVCache":
    """Makes later writes depend on a pass, so that they happen in place.

    XLA copies a buffer unless it can prove that all reads happen before the
    write. So a zero that the compiler cannot fold is computed from the output
    of the pass and added to `lengths`. Each row has its own zero, because a
    mesh may split the rows.

    Args:
      x: `[B, ...]`, output of the last layer for every row.
    """
    if self.is_fused(x):  # the kernels already have this dependency
      return self
    never = x.reshape(len(x), -1)[:, 0] * 0 == 1
    return self.replace(
        lengths=self.lengths + never,
        held=None if self.held is None else self.held + never)

  def commit(self, path: jax.Array, count: jax.Array) -> "KVCache":
    """Commits the accepted path of the block.

    Args:
      path: `[B, T]` int32, the accepted nodes of the block in order of depth.
      count: `[B]` int32, number of nodes to commit.
    """
    if self.held is None:
      return self._written(self.lengths + count, path)
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

    If a length increases, the first nodes of the block are committed in order.
    The other nodes are dropped.
    """
    lengths = jnp.asarray(lengths, jnp.int32)
    if self.held is not None:
      return self.replace(lengths=lengths,
                          held=jnp.minimum(self.held, lengths))
    return self._written(lengths)

  def reserve(self, size: int) -> "KVCache":
    """Returns a cache that keeps its next `size` tokens in the block.

    `commit` and `rollback` update `lengths` as usual. `settle` writes the
    tokens. The previous block is dropped.
    """
    rows = len(self.lengths)
    # The fused kernels do not read a token before it is written.
    make = jax.lax.empty if self.is_fused(self.k[0]) else jnp.zeros
    block = lambda: tuple(
        make((rows, x.shape[1], size, x.shape[3]), x.dtype) for x in self.k)
    return self.replace(block_k=block(), block_v=block(), held=self.lengths)

  def settle(self) -> "KVCache":
    """Writes the reserved block after the tokens in `k` and `v`."""
    if self.held is None:
      return self
    return self.replace(lengths=self.held, held=None)._written(self.lengths)

  def _written(self, lengths: jax.Array, path: jax.Array | None = None
               ) -> "KVCache":
    """Returns a cache with `lengths [B]` and the block in its slots.

    Args:
      lengths: `[B]` int32, new number of committed tokens.
      path: `[B, T]` int32, nodes of the block in the order of their slots.
        None: all nodes in order.
    """
    if not self.block_k:
      return self.replace(lengths=lengths)
    slots, blocks = (*self.k, *self.v), (*self.block_k, *self.block_v)
    if self.is_fused(self.k[0]):
      slots = gpu_slots.write(
          slots, blocks, self.lengths, lengths, path)
    else:
      slots = [self._put(old, along(path, new))
               for old, new in zip(slots, blocks)]
    layers = len(self.k)
    return self.replace(k=tuple(slots[:layers]), v=tuple(slots[layers:]),
                        lengths=lengths, block_k=(), block_v=(), held=None)

  def _put(self, slots: Any, block: jax.Array) -> Any:
    """Writes `block [B, H, S, D]` into the slots of a layer after `lengths`."""
    return put_in_layout(slots, block, self.lengths)

  def undivided(self) -> "KVCache":
    """Returns a cache with all heads on every device."""
    return self.replace(heads_axis=None)

  def specs(self, axis: str | None, rows: str | None = None) -> "KVCache":
    """Returns a `KVCache` of `PartitionSpec`, see `Cache.specs`.

    Args:
      axis: mesh axis over which the key-value heads are split. None: they are
        not split.
      rows: mesh axis over which the rows are split. None: they are not split.
    """
    def split(x):
      return PartitionSpec(rows, *(axis, None, None)[:x.ndim - 1])

    return jax.tree.map(split, self)


def along(path: jax.Array | None, block: jax.Array) -> jax.Array:
  """Returns the nodes `path [B, T]` of a block `[B, H, T, D]`, or all nodes."""
  return block if path is None else jnp.take_along_axis(
      block, path[:, None, :, None], axis=2)


def put_rows(rows: jax.Array, new: jax.Array, at: jax.Array, axis: int = 0
             ) -> jax.Array:
  """Writes a block into every row, each at its own position.

  >>> import jax.numpy as jnp
  >>> put_rows(jnp.zeros((2, 3)), jnp.ones((2, 1)), jnp.array([0, 2])).tolist()
  [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]

  Args:
    rows: `[B, ...]` rows with C slots along `axis`.
    new: `[B, ...]` blocks of the same dtype, with S <= C slots.
    at: `[B]` int32, slot of each row at which its block starts. If a block
      would extend beyond the end of the row, XLA moves it back to the end.
    axis: axis of the slots in a row.
  """
  chex.assert_equal_shape_prefix([rows, new, at], 1)
  return jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice_in_dim(
      row, new, at, axis))(rows, new, at)


# A separate jit, so that all layers of a model share one trace.
@jax.jit
def put_in_layout(slots: jax.Array, block: jax.Array, at: jax.Array
                  ) -> jax.Array:
  """Writes a block of keys or values into every row with `put_rows`.

  Unless D is a multiple of 128, a TPU stores the slots as the last axis, and
  the attention kernel reads this layout. For a write along another axis, XLA
  selects another layout and converts the cache in every round. So the write
  swaps the last two axes first. The swap moves no data.

  Args:
    slots: `[B, H, C, D]` keys or values, for H heads of D channels.
    block: `[B, H, S, D]` of the same dtype, with S <= C tokens.
    at: `[B]` int32, slot of each row at which its block starts, see `put_rows`.
  """
  put = lambda slots, block, at: put_rows(slots, block, at, axis=1)
  if not attention.tpu.stores_slots_last(slots.shape[-1]):
    return put(slots, block, at)

  def swapped(slots, block, at):
    return put_rows(slots.swapaxes(2, 3), block.swapaxes(2, 3), at,
                    axis=2).swapaxes(2, 3)

  return jax.lax.platform_dependent(
      slots, block, at, tpu=swapped, default=put)


def _placed(block: jax.Array, new: jax.Array, starts: jax.Array) -> jax.Array:
  """Writes `new [B, H, S, D]` into `block [B, H, T, D]` from slot starts[b].

  The implementation selects from old and new values at every slot instead of
  looping over rows. A block is small, so this is cheap.
  """
  order = (jnp.arange(block.shape[2]) - starts[:, None])[:, None, :, None]
  size = new.shape[2]
  if size > 1:
    new = jnp.take_along_axis(new, jnp.clip(order, 0, size - 1), axis=2)
  return jnp.where((order >= 0) & (order < size), new, block)


def visible_slots(lengths: jax.Array, ancestors: jax.Array, slots: int,
                  window: int = 0, depths: jax.Array | None = None
                  ) -> jax.Array:
  """Returns `[B, S, slots]` bool, slots of a row that each query sees.

  Args:
    lengths: `[B]` int32, number of committed tokens of each row. The slots of
      the T block tokens follow.
    ancestors: `[B, S, T]` bool, tokens of the block that each query sees.
    slots: number of slots in the result.
    window: number of last tokens that a token sees, including itself. 0 means
      all tokens.
    depths: `[B, S]` int32, depth at which the window of each query ends. None
      means the query's depth in the block.
  """
  size = ancestors.shape[-1]
  offset = jnp.arange(slots, dtype=jnp.int32) - lengths[:, None]
  node = jnp.clip(offset, 0, size - 1)[:, None, :]
  offset = offset[:, None, :]
  on_path = jnp.take_along_axis(ancestors, node, axis=2)
  seen = (offset < 0) | ((offset < size) & on_path)
  if window:
    # Parents come before their children. So the number of path nodes up to a
    # node of the path, in block order, is the depth of this node plus one.
    along_path = jnp.cumsum(ancestors, axis=-1, dtype=jnp.int32) - 1
    depth = jnp.where(offset < 0, offset,
                      jnp.take_along_axis(along_path, node, axis=2))
    ends = along_path[..., -1] if depths is None else depths
    seen &= ends[..., None] - depth < window
  return seen


def undivided(tree: chex.ArrayTree) -> Any:
  """Returns a copy of a tree whose caches have all heads on every device.

  Without this change, attention on a TPU divides the heads over the devices and
  then gathers its result.

  Args:
    tree: state of a replicated drafter, or the shapes of this state.
  """
  return interfaces.map_caches(
      lambda cache: cache.undivided(), lambda x: x, tree)


def divided_as(state: DecodeState, fresh: DecodeState) -> DecodeState:
  """Returns `fresh` with `undivided` applied to its drafter if `state` has it.

  `fresh` may have too few rows to split over a mesh. It is then prefilled
  without a `Placement`, so nothing has called `undivided` yet.

  Args:
    state: state of the decoding loop.
    fresh: state of the rows to insert into `state`.
  """
  own = undivided(state.drafter)
  if jax.tree.structure(own) != jax.tree.structure(state.drafter):
    return fresh
  return fresh.replace(drafter=undivided(fresh.drafter))
