"""Keys and values in pages, which rows need not have in order nor alone.

Paged attention (Kwon et al. 2023, arXiv:2309.06180). A table names the pages of
each row; attention goes through it (`attention.past_attention`), and what is
committed is written to the page that it falls into. Page 0 is nobody's and is
never written: what a row writes where it has no page is dropped.

Where a `PagedCache` is the cache of a `Transformer`, each row has pages of its
own. A `Pool` (`page_pool`) gives rows what they need, and lets them share some.
"""

import dataclasses
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from specjax.caches.dense import KVCache
from specjax.interfaces import CacheFactory
from specjax.types import DecodeState
from specjax.utils import fields

_PAGE = 128  # slots
NO_PAGE = 0  # where rows that have no page write: nobody reads it


@struct.dataclass
class PagedCache(KVCache):
  """A `KVCache` whose slots are in pages.

  `k` and `v` are L arrays `[P, H, T, D]` of P pages of T slots.

  Attributes:
    table: `[B, C / T]` int32, the pages of each row in order; 0: none.
    pooled: whether a `Pool` gives out the pages; else every row has as many as
      it can need.
  """

  has_rows_first = False

  table: jax.Array | None = None
  pooled: bool = struct.field(pytree_node=False, default=False)

  @classmethod
  def empty(cls, *, layers: int, batch: int, heads: int, capacity: int,
            head_dim: int, dtype: Any, page: int = _PAGE) -> "PagedCache":
    """A cache of at least `capacity` slots a row, none of them in use."""
    columns = -(-capacity // page)
    shape = (1 + batch * columns, heads, page, head_dim)
    zeros = lambda: tuple(jnp.zeros(shape, dtype) for _ in range(layers))
    table = 1 + jnp.arange(batch * columns, dtype=jnp.int32)
    return cls(k=zeros(), v=zeros(), lengths=jnp.zeros((batch,), jnp.int32),
               table=table.reshape(batch, columns))

  @property
  def page(self) -> int:
    """T, the slots of a page."""
    return self.k[0].shape[2]

  @property
  def capacity(self) -> int:
    """C, the slots of a row."""
    return self.table.shape[1] * self.page

  def _put(self, pages, block):
    """Pages with `block [B, H, S, D]` after `lengths`; whole pages are set."""
    size, rows = block.shape[2], len(self.lengths)
    first, start = self.lengths // self.page, self.lengths % self.page
    count = 1 + -(-(size - 1) // self.page)  # pages that S slots may touch
    ids = jnp.take_along_axis(
        self.table, first[:, None] + jnp.arange(count), axis=1, mode="fill",
        fill_value=NO_PAGE)
    order = jnp.arange(count * self.page) - start[:, None]
    new = jnp.take_along_axis(
        block, jnp.clip(order, 0, size - 1)[:, None, :, None], axis=2)
    inside = (order >= 0) & (order < size)
    new, inside = (
        x.reshape(rows, -1, count, self.page, x.shape[3]).swapaxes(1, 2)
        for x in (new, inside[:, None, :, None]))
    return _set(pages, ids, jnp.where(inside, new, pages[ids]))

  def with_rows(self, slots: jax.Array, fresh: "PagedCache",
                into: jax.Array | None = None) -> "PagedCache":
    """The cache with the rows of another, copied to pages of its own.

    Args:
      slots: `[R]`, the rows to replace.
      fresh: R rows, of the same capacity and size of pages.
      into: `[R, C / T]`, pages to copy to; default: those of the slots.
    """
    into = self.table[slots] if into is None else into
    put = lambda all, new: tuple(
        _set(old, into, x[fresh.table]) for old, x in zip(all, new))
    return self.replace(
        k=put(self.k, fresh.k), v=put(self.v, fresh.v),
        lengths=self.lengths.at[slots].set(fresh.lengths))

  def take_rows(self, rows: jax.Array) -> "PagedCache":
    """Rows `[R]` of the cache, in this order, each with pages of its own."""
    ids = self.table[rows]
    # Page 0 is nobody's here, too.
    source = jnp.pad(ids.reshape(-1), (1, 0), constant_values=NO_PAGE)
    take = lambda arrays: tuple(x[source] for x in arrays)
    return self.replace(
        k=take(self.k), v=take(self.v), lengths=self.lengths[rows],
        table=1 + jnp.arange(ids.size, dtype=ids.dtype).reshape(ids.shape))

  def grow(self, form: "PagedCache", longer: Any) -> "PagedCache":
    """The cache with more pages for every row, see `capacity.grow`.

    Args:
      form: shapes of an empty cache with the new capacity.
      longer: `(array, form) -> array` with zeros after its end.
    """
    rows, have = self.table.shape
    table = longer(self.table, form.table)
    if self.pooled:
      return self.replace(table=table)
    more = table.shape[1] - have
    new = len(self.k[0]) + jnp.arange(rows * more, dtype=table.dtype)
    pad = lambda arrays, forms: tuple(map(longer, arrays, forms))
    return self.replace(
        k=pad(self.k, form.k), v=pad(self.v, form.v),
        table=table.at[:, have:].set(new.reshape(rows, more)))

  def specs(self, axis: str, rows: str | None = None) -> "PagedCache":
    """How a mesh splits the cache: heads over `axis`.

    Pages belong to any row, so that every device of the axis `rows` has all.
    """
    of_rows = lambda x: PartitionSpec(rows, *(axis, None, None)[:x.ndim - 1])
    pages = lambda arrays: tuple(PartitionSpec(None, axis) for _ in arrays)
    return self.replace(
        k=pages(self.k), v=pages(self.v), lengths=PartitionSpec(rows),
        table=PartitionSpec(rows), block_k=tuple(map(of_rows, self.block_k)),
        block_v=tuple(map(of_rows, self.block_v)),
        held=None if self.held is None else PartitionSpec(rows))


def _set(pages, ids, new):
  """`pages [P, ...]` with `new [..., ...]` at `ids [...]`, but for page 0.

  Rows share it: numbers of one that has failed would reach the others.
  """
  ids = jnp.where(ids == NO_PAGE, len(pages), ids)
  return pages.at[ids].set(new, mode="drop")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paged(CacheFactory):
  """`PagedCache` with pages of another size, for `Transformer(cache=)`.

  Attributes:
    page: T, slots of a page.
  """

  page: int = _PAGE

  def __post_init__(self):
    fields.check_fields(self, "page")

  def empty(self, **sizes: Any) -> PagedCache:
    """See `PagedCache.empty`."""
    return PagedCache.empty(page=self.page, **sizes)


def is_paged(node: Any) -> bool:
  """Whether it is a cache of pages, for walks over the parts of a state."""
  return isinstance(node, PagedCache)


def check_pages(state: DecodeState, tokens: int) -> None:
  """Checks that the rows of a pooled state have pages for their next tokens.

  What a row writes after its last page is lost, and its text goes wrong. Of a
  state that is not pooled, or is part of a program, nothing is asked.

  Args:
    state: of the loop.
    tokens: that a row may get, at most.

  Raises:
    ValueError: a row has too few.
  """
  if not state.target_cache.pooled or isinstance(
      state.lengths, jax.core.Tracer):
    return
  table, lengths, limits, done = jax.device_get((
      state.target_cache.table, state.lengths, state.limits, state.done))
  room = (table > NO_PAGE).sum(axis=1) * state.target_cache.page
  most = np.minimum(lengths + tokens, limits)
  for row in np.flatnonzero(~done & (most > room)):
    raise ValueError(
        f"row {row} has pages for {room[row]} tokens and may get {most[row]}; "
        f"call Pool.extend(state, {tokens}) before it is decoded")
