"""Keys and values in pages, which rows need not have in order nor alone.

Paged attention (Kwon et al. 2023, arXiv:2309.06180). A table names the pages of
each row; attention goes through it (`attention.past_attention`), and what is
committed is written to the page that it falls into. Page 0 is nobody's and is
never written: what a row writes where it has no page is dropped.

  PagedCache   as the cache of a `Transformer`: each row has pages of its own
  Pool         on the host, between chunks of rounds: fewer pages than rows
               could need, given to rows as they grow, and rows whose prompts
               begin alike share the pages of that beginning

    decoder.prefill  fillers, few slots  ->  pool.start  ->  decoder.grow
    decoder.prefill  a request           ->  pool.insert(state, slot, fresh)
    pool.extend      pages for the tokens of the next chunk
    decoder.decode   ...                     pool.release(state, slot)

A shared page is never written: a row writes after its length alone, and of its
prompt a drafter reads the last few tokens again at most (`reread`). So the page
where two prompts part is each row's own, and so are some tokens before.
"""

import dataclasses
import functools
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from specjax import checks
from specjax.kv_cache import KVCache
from specjax.types import DecodeState

_PAGE = 128  # slots
_SINK = 0  # the page of rows that have none
_REREAD = 16  # tokens: of the drafters here only long `Paths` feed more again


@struct.dataclass
class PagedCache(KVCache):
  """A `KVCache` whose slots are in pages.

  `k` and `v` are L arrays `[P, H, T, D]` of P pages of T slots.

  Attributes:
    table: `[B, C / T]` int32, the pages of each row in order; 0: none.
    pooled: whether a `Pool` gives out the pages; else every row has as many as
      it can need.
  """

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
        fill_value=_SINK)
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
    source = jnp.pad(ids.reshape(-1), (1, 0), constant_values=_SINK)
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
  ids = jnp.where(ids == _SINK, len(pages), ids)
  return pages.at[ids].set(new, mode="drop")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paged:
  """`PagedCache` with pages of another size, for `Transformer(cache=)`.

  Attributes:
    page: T, slots of a page.
  """

  page: int = _PAGE

  def __post_init__(self):
    if self.page < 1:
      raise ValueError(f"page is {self.page}; it must be at least 1 slot")

  def empty(self, **sizes: Any) -> PagedCache:
    """See `PagedCache.empty`."""
    return PagedCache.empty(page=self.page, **sizes)


_is_paged = lambda node: isinstance(node, PagedCache)


def is_pooled(state: DecodeState) -> bool:
  """Whether a `Pool` gives out the pages of a state."""
  return _is_paged(state.target_cache) and state.target_cache.pooled


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
  if not is_pooled(state) or isinstance(state.lengths, jax.core.Tracer):
    return
  table, lengths, limits, done = jax.device_get((
      state.target_cache.table, state.lengths, state.limits, state.done))
  room = (table > _SINK).sum(axis=1) * state.target_cache.page
  most = np.minimum(lengths + tokens, limits)
  for row in np.flatnonzero(~done & (most > room)):
    raise ValueError(
        f"row {row} has pages for {room[row]} tokens and may get {most[row]}; "
        f"call Pool.extend(state, {tokens}) before it is decoded")


class Pool:
  """The pages of the paged caches of a state, given out on the host.

  All caches of the state, the target's and the drafter's, have pages of the
  same numbers, so that one table serves them all.

  Attributes:
    rows: B.
    free: pages that nobody has.
  """

  def __init__(self, rows: int, pages: int, *, reread: int = _REREAD):
    """No page is given out yet.

    Args:
      rows: B, of the state.
      pages: how many there are.
      reread: the last tokens of a text that the drafter may feed, and so write,
        again; at least 16, which is what it catches up with in one pass.
        `Paths` of several models feed their `length` and one more.

    Raises:
      ValueError: there are none, or too few tokens may be read again.
    """
    if rows < 1 or pages < 1:
      raise ValueError(f"the pool has {pages} pages for {rows} rows; give at "
                       "least one of each")
    if reread < _REREAD:
      raise ValueError(f"reread is {reread}; it must be at least {_REREAD}")
    self.rows, self._reread = rows, reread
    self._users = np.zeros(pages + 1, np.int64)  # rows that a page belongs to
    self._users[_SINK] = 1
    self._pages: dict[int, list[int]] = {}
    self._prompts: dict[int, np.ndarray] = {}

  @property
  def free(self) -> int:
    """Pages that nobody has."""
    return int((self._users == 0).sum())

  def start(self, state: DecodeState) -> DecodeState:
    """The state with the pool's pages in place of those of its rows.

    Args:
      state: of fillers, which are done; it is donated.

    Raises:
      ValueError: it has no paged cache, or one that has other pages than the
        target's.
    """
    self._check(state)

    def pooled(node):
      if not _is_paged(node):
        return node
      pages = lambda arrays: tuple(
          jnp.zeros((len(self._users), *x.shape[1:]), x.dtype,
                    device=x.sharding) for x in arrays)
      new = node.replace(k=pages(node.k), v=pages(node.v),
                         table=jnp.zeros_like(node.table), pooled=True)
      for x in (*node.k, *node.v, node.table):
        x.delete()
      return new

    return jax.tree.map(pooled, state, is_leaf=_is_paged)

  def insert(self, state: DecodeState, slot: int, fresh: DecodeState
             ) -> DecodeState:
    """Puts one row in the place of another, as `Decoder.insert`.

    Where its prompt begins as that of another row does, it shares the pages.

    Args:
      state: it is donated.
      slot: the row; what it had is released.
      fresh: one row, of `prefill` with the same capacity.

    Raises:
      ValueError: the slot is none, the rows do not fit together, or too few
        pages are free.
    """
    table = self._check(state)
    self._check_slot(slot)
    if len(fresh.lengths) != 1:
      raise ValueError(f"the fresh state has {len(fresh.lengths)} rows; insert "
                       "them one by one")
    row = lambda state: jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), jax.tree.map(
            lambda x: x.replace(pooled=True) if _is_paged(x) else x, state,
            is_leaf=_is_paged))
    checks.check_same("a row of the fresh state", row(fresh), row(state))
    prompt = np.asarray(fresh.tokens)[0, :int(fresh.lengths[0])]
    page = fresh.target_cache.page
    shared = self._alike(prompt, slot, page)
    own = [x for x in self._pages.get(slot, []) if self._users[x] == 1]
    self._check_free(slot, -(-len(prompt) // page) - len(shared),
                     self.free + len(set(own) - set(shared)))
    self._let_go(slot)
    self._users[shared] += 1
    self._pages[slot], self._prompts[slot] = list(shared), prompt
    self._give(slot, -(-len(prompt) // page))
    row = np.zeros((1, table.shape[1]), np.int32)
    row[0, :len(self._pages[slot])] = self._pages[slot]
    into = np.where(np.arange(row.size) < len(shared), _SINK, row)
    return _insert(state, np.array([slot]), fresh, row, into)

  def extend(self, state: DecodeState, tokens: int) -> DecodeState:
    """The state in which no row lacks pages for its next tokens.

    Args:
      state: of the loop.
      tokens: that a row may get before the next call, at most.

    Raises:
      ValueError: too few pages are free.
    """
    self._check(state)
    lengths, limits, done = jax.device_get(
        (state.lengths, state.limits, state.done))
    for slot in self._pages:
      if not done[slot]:
        most = min(lengths[slot] + tokens, limits[slot])
        self._give(slot, -(-int(most) // state.target_cache.page))
    return self._told(state)

  def release(self, state: DecodeState, slot: int) -> DecodeState:
    """The state in which a row that is done has no pages.

    Raises:
      ValueError: the slot is none, or its row is not done.
    """
    self._check(state)
    self._check_slot(slot)
    if not jax.device_get(state.done)[slot]:
      raise ValueError(f"row {slot} is not done and would write its text "
                       "nowhere; decode it to its end, or put another there")
    self._let_go(slot)
    return self._told(state)

  def _check(self, state):
    """The target's table; all tables must have its form."""
    caches = [x for x in jax.tree.leaves(state, is_leaf=_is_paged)
              if _is_paged(x)]
    if not _is_paged(state.target_cache) or any(
        (x.table.shape, x.page) != (caches[0].table.shape, caches[0].page)
        for x in caches):
      raise ValueError(
          "the caches have pages of "
          f"{[(x.page, x.table.shape[1]) for x in caches]} (slots, pages a "
          "row); a pool needs a paged cache of the target, and others like it: "
          "give all models cache=Paged(page=...) of one size, and a drafter "
          "whose text is the target's")
    if len(state.lengths) != self.rows:
      raise ValueError(f"the state has {len(state.lengths)} rows and the pool "
                       f"is for {self.rows}; make another one")
    return caches[0].table

  def _check_slot(self, slot):
    if not 0 <= slot < self.rows:
      raise ValueError(f"slot is {slot} and the pool has rows from 0 to "
                       f"{self.rows - 1}; give one of these")

  def _alike(self, prompt, slot, page):
    """The pages of the longest beginning that another row's prompt shares."""
    best = []
    for other, text in self._prompts.items():
      size = min(len(prompt), len(text))
      same = prompt[:size] == text[:size]
      common = size if same.all() else int(np.argmin(same))
      count = max(0, common - self._reread) // page
      if other != slot and count > len(best):
        best = self._pages[other][:count]
    return best

  def _give(self, slot, count):
    """Pages to a row until it has `count`."""
    missing = count - len(self._pages[slot])
    self._check_free(slot, missing, self.free)
    if missing > 0:
      new = np.flatnonzero(self._users == 0)[:missing]
      self._users[new] += 1
      self._pages[slot] += new.tolist()

  def _check_free(self, slot, missing, free):
    if missing > free:
      raise ValueError(
          f"row {slot} needs {missing} more pages and {free} are free; release "
          "rows that are done, or make a pool of more pages")

  def _let_go(self, slot):
    self._users[self._pages.pop(slot, [])] -= 1
    self._prompts.pop(slot, None)

  def _told(self, state):
    """The state with the pool's table in all caches."""
    table = np.zeros(state.target_cache.table.shape, np.int32)
    for slot, pages in self._pages.items():
      table[slot, :len(pages)] = pages
    # An array for each cache: the loop donates them one by one.
    return jax.tree.map(
        lambda x: x.replace(table=jax.device_put(table, x.table.sharding))
        if _is_paged(x) else x, state, is_leaf=_is_paged)


@functools.partial(jax.jit, donate_argnames="state")
def _insert(state, slots, fresh, row, into):
  def put(all, new):
    if not _is_paged(all):
      return all.at[slots].set(new)
    return all.with_rows(slots, new, into).replace(
        table=all.table.at[slots].set(row))

  return jax.tree.map(put, state, fresh, is_leaf=_is_paged)
