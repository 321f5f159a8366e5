"""Keys and values in pages that rows may share and have in any order.

Paged attention (Kwon et al. 2023, arXiv:2309.06180). A table lists the pages of
each row. Attention reads keys and values through the table
(`attention.past_attention`), and committed tokens are written to their page.
Page 0 belongs to no row and is never written: if a row has no page for a token,
the write is dropped.

In the cache of a `Transformer`, each row has its own pages.
"""

import dataclasses
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from specjax.caches.dense import KVCache
from specjax.interfaces import CacheFactory
from specjax.utils import fields

_PAGE = 128  # slots
NO_PAGE = 0  # stands for a missing page; may be read, is never written


@struct.dataclass
class PagedCache(KVCache):
  """A `KVCache` whose slots are in pages.

  `k` and `v` are L arrays `[P, H, T, D]` of P pages of T slots.

  Attributes:
    table: `[B, C / T]` int32, indices of the pages of each row in order. 0
      means no page.
  """

  has_rows_first = False

  table: jax.Array | None = None

  @classmethod
  def empty(cls, *, layers: int, batch: int, heads: int, capacity: int,
            head_dim: int, dtype: jax.typing.DTypeLike, page: int = _PAGE
            ) -> "PagedCache":
    """Returns a cache of at least `capacity` empty slots per row."""
    columns = -(-capacity // page)
    shape = (1 + batch * columns, heads, page, head_dim)
    zeros = lambda: tuple(jnp.zeros(shape, dtype) for _ in range(layers))
    table = 1 + jnp.arange(batch * columns, dtype=jnp.int32)
    return cls(k=zeros(), v=zeros(), lengths=jnp.zeros((batch,), jnp.int32),
               table=table.reshape(batch, columns))

  @property
  def page(self) -> int:
    """T, number of slots of a page."""
    return self.k[0].shape[2]

  @property
  def capacity(self) -> int:
    """C, number of slots of a row."""
    return self.table.shape[1] * self.page

  def _put(self, pages: jax.Array, block: jax.Array) -> jax.Array:
    """Writes `block [B, H, S, D]` after `lengths`. It replaces entire pages."""
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

  def with_rows(self, slots: jax.Array, fresh: "PagedCache") -> "PagedCache":
    """Replaces rows by the rows of another cache.

    Args:
      slots: `[R]`, indices of the rows to replace.
      fresh: cache of R rows with the same capacity and page size.
    """
    put = lambda all, new: tuple(
        _set(old, self.table[slots], x[fresh.table])
        for old, x in zip(all, new))
    return self.replace(
        k=put(self.k, fresh.k), v=put(self.v, fresh.v),
        lengths=self.lengths.at[slots].set(fresh.lengths))

  def take_rows(self, rows: jax.Array) -> "PagedCache":
    """Returns a copy of the rows with indices `rows [R]`, in this order.

    Each row of the copy has its own pages.
    """
    ids = self.table[rows]
    # The copy also needs a page 0 that belongs to no row.
    source = jnp.pad(ids.reshape(-1), (1, 0), constant_values=NO_PAGE)
    take = lambda arrays: tuple(x[source] for x in arrays)
    return self.replace(
        k=take(self.k), v=take(self.v), lengths=self.lengths[rows],
        table=1 + jnp.arange(ids.size, dtype=ids.dtype).reshape(ids.shape))

  def grow(self, form: "PagedCache", longer: Any) -> "PagedCache":
    """Adds pages to every row, see `growth.grow`.

    Args:
      form: shapes and dtypes of an empty cache of the new capacity.
      longer: function `(array, form) -> array` that appends zeros.
    """
    rows, have = self.table.shape
    table = longer(self.table, form.table)
    more = table.shape[1] - have
    new = len(self.k[0]) + jnp.arange(rows * more, dtype=table.dtype)
    pad = lambda arrays, forms: tuple(map(longer, arrays, forms))
    return self.replace(
        k=pad(self.k, form.k), v=pad(self.v, form.v),
        table=table.at[:, have:].set(new.reshape(rows, more)))

  def specs(self, axis: str, rows: str | None = None) -> "PagedCache":
    """Returns a cache of `PartitionSpec` that splits the heads over `axis`.

    A page may belong to any row, so every device of the mesh axis `rows` has
    all pages.
    """
    of_rows = lambda x: PartitionSpec(rows, *(axis, None, None)[:x.ndim - 1])
    pages = lambda arrays: tuple(PartitionSpec(None, axis) for _ in arrays)
    return self.replace(
        k=pages(self.k), v=pages(self.v), lengths=PartitionSpec(rows),
        table=PartitionSpec(rows), block_k=tuple(map(of_rows, self.block_k)),
        block_v=tuple(map(of_rows, self.block_v)),
        held=None if self.held is None else PartitionSpec(rows))


def _set(pages: jax.Array, ids: jax.Array, new: jax.Array) -> jax.Array:
  """Writes `new` into the pages with the given ids, except page 0.

  Every row may read page 0. If one row wrote a NaN to it, other rows would read
  this NaN.

  Args:
    pages: `[P, ...]` pages.
    ids: integers of any shape, indices of pages.
    new: new contents of these pages, of shape `ids.shape + pages.shape[1:]`.
  """
  ids = jnp.where(ids == NO_PAGE, len(pages), ids)
  return pages.at[ids].set(new, mode="drop")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paged(CacheFactory):
  """Factory of `PagedCache` for `Transformer(cache=)`.

    >>> import dataclasses
    >>> import specjax as sj
    >>> pair = sj.testing.tiny_pair(vocab_size=5)
    >>> model = dataclasses.replace(pair.target, cache=Paged(page=64))
    >>> cache = model.init_cache(pair.params["target"], 2, 128)
    >>> cache.table.tolist()  # page 0 belongs to no row
    [[1, 2], [3, 4]]

  Attributes:
    page: T, number of slots of a page.
  """

  page: int = _PAGE

  def __post_init__(self):
    fields.check_fields(self, "page")

  def empty(self, **sizes: Any) -> PagedCache:
    """Returns an empty cache, see `PagedCache.empty`."""
    return PagedCache.empty(page=self.page, **sizes)
