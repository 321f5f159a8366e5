"""Base class of key-value caches."""

from collections.abc import Callable
import math
from typing import Any
from typing import TypeVar

import chex
import jax
from jax.sharding import PartitionSpec

_Cache = TypeVar("_Cache", bound="Cache")


class Cache:
  """Keys and values of the committed tokens, with a length per row.

  A cache is a pytree. The uncommitted tokens of one pass, or of several passes
  in a row, form a *block*. The cache stores the block after `lengths` or
  separately. `commit` and `rollback` end the block and return the structure
  that the cache had before the pass.

  A subclass has `lengths` and implements `commit` and `rollback`. A cache for
  `models.Transformer` also implements `append` and `attend`, and a constructor
  like `KVCache.empty`. The other methods have defaults. If a cache contains
  other caches, each default calls the same method of the inner caches.

  Attributes:
    lengths: `[B]` int32, number of committed tokens of each row.
    has_rows_first: True if the first axis of every leaf is the batch. If False,
      the subclass must implement `with_rows`, `take_rows` and `grow`.
    slack: number of tokens that `rollback` can remove without losing others; -1
      for recurrent states, from which no token can be removed.
    held: `[B]` int32, number of committed tokens that are not in the block of
      `reserve`; None if no block is reserved.
  """

  lengths: jax.Array
  held: jax.Array | None = None
  has_rows_first = True
  slack = math.inf

  @property
  def capacity(self) -> int:
    """C, number of slots of a row.

    C must be at least the longest length plus the N draft nodes.
    """
    raise NotImplementedError

  def append(self: _Cache, layer: int, k: jax.Array, v: jax.Array,
             after: int = 0) -> _Cache:
    """Adds new tokens of one layer to the block.

    Args:
      layer: index of the layer.
      k: `[B, S, H, D]` keys.
      v: `[B, S, H, D]` values.
      after: number of block tokens from earlier passes, which are retained.
    """
    raise NotImplementedError

  def attend(self, layer: int, query: jax.Array, ancestors: jax.Array
             ) -> jax.Array:
    """Returns attention `[B, S, G * H, D]` over committed tokens and the block.

    Models whose layers have windows, soft-caps or sinks also pass `window`,
    `softcap`, `depths` and `sink_logits`, see `KVCache.attend`.

    Args:
      layer: index of the layer.
      query: `[B, S, G * H, D]` queries of the last S tokens of the block.
      ancestors: `[B, S, T]` bool, tokens of the block that each query sees.
    """
    raise NotImplementedError

  def is_fused(self, x: jax.Array) -> bool:
    """Returns True if `attend_new` exists for queries with the dtype of `x`."""
    return False

  def attend_new(self: _Cache, layer: int, qkv: jax.Array,
                 bias: jax.Array | None, rotation: Any,
                 ancestors: jax.Array, **options: Any
                 ) -> tuple[jax.Array, _Cache]:
    """Computes rotation, `append` and `attend` of a layer in one GPU kernel.

    A pass with this kernel has no derivative.

    Args:
      layer: index of the layer.
      qkv: `[P, B, S, H, G + 2, D]` float32. The sum of the P parts has the
        queries, keys and values of the S new tokens, in this order on the fifth
        axis. A single new token may be duplicated.
      bias: `[H, G + 2, D]`, added to the sum, or None.
      rotation: a `models.rotary.Rotation`, or None.
      ancestors: ancestor mask, see `attend`.
      **options: `window` and `softcap`, see `KVCache.attend`.

    Returns:
      The attention `[B, S, G * H, D]` and the cache with the new tokens.
    """
    raise NotImplementedError

  def commit(self: _Cache, path: jax.Array, count: jax.Array) -> _Cache:
    """Commits the first `count [B]` nodes of `path [B, T]` of the block."""
    return self._each(lambda cache: cache.commit(path, count), _missing(
        self, "commit"))

  def rollback(self: _Cache, lengths: jax.Array) -> _Cache:
    """Sets the committed tokens of every row to `lengths [B]`.

    If a length increases, the first nodes of the block are committed in order.
    """
    return self._each(lambda cache: cache.rollback(lengths), _missing(
        self, "rollback"))

  def reserve(self: _Cache, size: int) -> _Cache:
    """Returns a cache that may keep its next `size` tokens in the block.

    Their writes are postponed until `settle`. `commit` and `rollback` update
    `lengths` as usual.
    """
    return self._each(lambda cache: cache.reserve(size))

  def settle(self: _Cache) -> _Cache:
    """Writes all postponed tokens and undoes the change of `reserve`."""
    return self._each(lambda cache: cache.settle())

  def until(self: _Cache, lengths: jax.Array) -> _Cache:
    """Sets the lengths `[B]` of the prompts that the next passes read.

    Tokens at later positions are padding. The setting applies until `rollback`
    removes tokens. `read_prompt` also removes the last token of the prompt, so
    a cache that cannot remove it may leave it out.
    """
    return self._each(lambda cache: cache.until(lengths))

  def after(self: _Cache, x: jax.Array) -> _Cache:
    """Makes later writes depend on a pass, so that they happen in place.

    Args:
      x: `[B, ...]`, last hidden states of the pass.
    """
    return self._each(lambda cache: cache.after(x))

  def undivided(self: _Cache) -> _Cache:
    """Returns a cache whose attention does not divide heads over a mesh."""
    return self._each(lambda cache: cache.undivided())

  def with_rows(self: _Cache, slots: jax.Array, fresh: _Cache) -> _Cache:
    """Replaces the rows with indices `slots [R]` by the R rows of `fresh`."""
    return self._each(
        lambda cache, new: cache.with_rows(slots, new),
        lambda all, new: all.at[slots].set(new), fresh)

  def take_rows(self: _Cache, rows: jax.Array) -> _Cache:
    """Returns a copy of the rows with indices `rows [R]`, in this order."""
    return self._each(lambda cache: cache.take_rows(rows), lambda x: x[rows])

  def grow(self: _Cache, form: Any,
           longer: Callable[[jax.Array, Any], jax.Array]) -> _Cache:
    """Adds slots to every row.

    Args:
      form: shapes and dtypes of an empty cache of the new capacity.
      longer: function `(array, form) -> array` that appends zeros.
    """
    return self._each(
        lambda cache, form: cache.grow(form, longer), longer, form)

  def specs(self, axis: str | None, rows: str | None) -> Any:
    """Returns a `PartitionSpec` for every leaf.

    Args:
      axis: mesh axis over which the model is split. None: it is not split.
      rows: mesh axis over which the rows are split. None: they are not split.

    Raises:
      ValueError: `axis` is not None, and the cache does not implement `specs`.
    """
    def of_leaf(x):
      del x
      if axis is not None:
        raise ValueError(
            f"the cache {type(self).__name__} has no `specs(axis, rows)`, and "
            f"mesh axis {axis!r} has several devices; implement it, or use an "
            "axis of one device")
      return PartitionSpec(rows)

    return self._each(lambda cache: cache.specs(axis, rows), of_leaf)

  def _each(self, of_cache: Callable[..., Any],
            of_leaf: Callable[..., Any] = lambda x: x, *rest: Any) -> Any:
    return map_caches(of_cache, of_leaf, self, *rest, root=self)


class CacheFactory:
  """Base class of cache configurations, for `Transformer(cache=)`.

  Attributes:
    slack: see `Cache.slack`.
  """

  slack = math.inf

  def empty(self, **sizes: Any) -> Cache:
    """Returns an empty cache. The arguments are those of `KVCache.empty`."""
    raise NotImplementedError


def map_caches(of_cache: Callable[..., Any], of_leaf: Callable[..., Any],
               tree: chex.ArrayTree, *rest: Any, root: Any = None) -> Any:
  """Applies one function to the caches of a tree and one to its other leaves.

  Args:
    of_cache: function of a `Cache` and the subtrees of `rest` at its place.
    of_leaf: function of a leaf outside of caches and the leaves of `rest` at
      its place.
    tree: pytree.
    *rest: trees of the same structure.
    root: a cache in `tree` to which `of_cache` is not applied. The caches and
      leaves inside it are mapped. None: there is no such cache.
  """
  return jax.tree.map(
      lambda x, *others: (of_cache if isinstance(x, Cache) else of_leaf)(
          x, *others),
      tree, *rest, is_leaf=lambda x: isinstance(x, Cache) and x is not root)


def _missing(cache: Cache, method: str) -> Callable[..., Any]:
  def of_leaf(x):
    raise NotImplementedError(f"{type(cache).__name__} has no `{method}`")

  return of_leaf
