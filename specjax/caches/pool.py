"""Pool of pages that are allocated on demand and shared for equal prefixes.

A pool may have fewer pages than the capacity of all rows together. It allocates
pages on the host, between chunks of rounds. The order of calls:

  decoder.prefill  placeholders  ->  pool.start  ->  decoder.grow
  decoder.prefill  a request     ->  pool.insert(state, slot, fresh)
  pool.extend      pages for the tokens of the next chunk
  decoder.decode   the next chunk
  pool.release     a row that is done

A placeholder is a prompt whose row is done from the start. It occupies a slot
until a request is inserted.

Rows must not write a shared page. A row writes after its length, and a drafter
may write the last `reread` tokens of the prompt again. So two rows share only
complete pages that end at least `reread` tokens before their prompts differ.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax.caches import dense
from specjax.caches.paged import is_paged
from specjax.caches.paged import NO_PAGE
from specjax.interfaces import checks
from specjax.types import DecodeState
from specjax.utils import fields

_REREAD = 16  # tokens; among specjax's drafters, only long `Paths` need more


class Pool:
  """Allocator of the pages of all paged caches in a state.

  It runs on the host. A row has the same page numbers in the target's cache and
  in the drafter's caches, so all caches have equal tables.

  Attributes:
    rows: B, number of rows of the state.
    free: number of free pages.
  """

  def __init__(self, rows: int, pages: int, *, reread: int = _REREAD):
    """Creates a pool whose pages are all free.

    Args:
      rows: B, number of rows of the state.
      pages: number of pages.
      reread: number of last tokens of a sequence that the drafter may read, and
        so write to its cache, a second time. At least 16, the tokens of a
        catch-up pass. `Paths` of several models read `length` + 1 tokens again.

    Raises:
      ValueError: an argument is too small.
    """
    for name, value, least in (
        ("rows", rows, 1), ("pages", pages, 1), ("reread", reread, _REREAD)):
      fields.check_at_least(name, value, least)
    self.rows, self._reread = rows, reread
    self._users = np.zeros(pages + 1, np.int64)  # rows with this page
    self._users[NO_PAGE] = 1
    self._pages: dict[int, list[int]] = {}
    self._prompts: dict[int, np.ndarray] = {}

  @property
  def free(self) -> int:
    """Number of free pages."""
    return int((self._users == 0).sum())

  def start(self, state: DecodeState) -> DecodeState:
    """Returns the state with the pages of the pool and an empty table.

    Args:
      state: state of placeholders. All rows are done. It is donated.

    Raises:
      ValueError: the target's cache is not paged, or two caches differ in page
        size or in pages per row.
    """
    self._check(state)

    def pooled(node):
      if not is_paged(node):
        return node
      pages = lambda arrays: tuple(
          jnp.zeros((len(self._users), *x.shape[1:]), x.dtype,
                    device=x.sharding) for x in arrays)
      new = node.replace(k=pages(node.k), v=pages(node.v),
                         table=jnp.zeros_like(node.table), pooled=True)
      for x in (*node.k, *node.v, node.table):
        x.delete()
      return new

    return jax.tree.map(pooled, state, is_leaf=is_paged)

  def insert(self, state: DecodeState, slot: int, fresh: DecodeState
             ) -> DecodeState:
    """Replaces one row, like `Decoder.insert`.

    If the new prompt and the prompt of another row have a common prefix, the
    two rows share pages.

    Args:
      state: state of the decoding loop. It is donated.
      slot: index of the row to replace. The pages of the old row are released.
      fresh: state of one row from `prefill` with the same capacity.

    Raises:
      ValueError: the slot does not exist, the states differ in form, or too few
        pages are free.
    """
    table = self._check(state)
    self._check_slot(slot)
    if len(fresh.lengths) != 1:
      raise ValueError(f"the fresh state has {len(fresh.lengths)} rows; insert "
                       "them one by one")
    row = lambda state: jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), jax.tree.map(
            lambda x: x.replace(pooled=True) if is_paged(x) else x, state,
            is_leaf=is_paged))
    fresh = dense.divided_as(state, fresh)
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
    into = np.where(np.arange(row.size) < len(shared), NO_PAGE, row)
    return _insert(state, np.array([slot]), fresh, row, into)

  def extend(self, state: DecodeState, tokens: int) -> DecodeState:
    """Returns the state with pages for the next tokens of every active row.

    Args:
      state: state of the decoding loop.
      tokens: maximum number of tokens that a row may add before the next call.

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
    """Releases the pages of a row that is done and returns the state.

    Raises:
      ValueError: the slot does not exist, or its row is not done.
    """
    self._check(state)
    self._check_slot(slot)
    if not jax.device_get(state.done)[slot]:
      raise ValueError(f"row {slot} is not done and would lose its pages; "
                       "decode it to its end, or insert another request")
    self._let_go(slot)
    return self._told(state)

  def _check(self, state: DecodeState) -> jax.Array:
    """Returns the target's table.

    Raises:
      ValueError: the target's cache is not paged, caches differ in page size or
        pages per row, or the state has another number of rows than the pool.
    """
    caches = [x for x in jax.tree.leaves(state, is_leaf=is_paged)
              if is_paged(x)]
    if not is_paged(state.target_cache) or any(
        (x.table.shape, x.page) != (caches[0].table.shape, caches[0].page)
        for x in caches):
      raise ValueError(
          "(slots per page, pages per row) of the caches are "
          f"{[(x.page, x.table.shape[1]) for x in caches]}; a pool needs a "
          "paged cache of the target, and a drafter with equal pages: give all "
          "models cache=Paged(page=...) with the same page, and use a drafter "
          "with the tokens of the target")
    if len(state.lengths) != self.rows:
      raise ValueError(f"the state has {len(state.lengths)} rows and the pool "
                       f"is for {self.rows}; make another one")
    return caches[0].table

  def _check_slot(self, slot: int) -> None:
    if not 0 <= slot < self.rows:
      raise ValueError(f"slot is {slot} and the pool has rows from 0 to "
                       f"{self.rows - 1}; give one of these")

  def _alike(self, prompt: np.ndarray, slot: int, page: int) -> list[int]:
    """Returns the pages that a new prompt can share with another row.

    Args:
      prompt: tokens of the new prompt.
      slot: row of the new prompt, excluded from the search.
      page: number of slots of a page.
    """
    best = []
    for other, text in self._prompts.items():
      size = min(len(prompt), len(text))
      same = prompt[:size] == text[:size]
      common = size if same.all() else int(np.argmin(same))
      count = max(0, common - self._reread) // page
      if other != slot and count > len(best):
        best = self._pages[other][:count]
    return best

  def _give(self, slot: int, count: int) -> None:
    """Allocates pages to a row until it has `count`."""
    missing = count - len(self._pages[slot])
    self._check_free(slot, missing, self.free)
    if missing > 0:
      new = np.flatnonzero(self._users == 0)[:missing]
      self._users[new] += 1
      self._pages[slot] += new.tolist()

  def _check_free(self, slot: int, missing: int, free: int) -> None:
    if missing > free:
      raise ValueError(
          f"row {slot} needs {missing} more pages and {free} are free; release "
          "rows that are done, or make a pool of more pages")

  def _let_go(self, slot: int) -> None:
    self._users[self._pages.pop(slot, [])] -= 1
    self._prompts.pop(slot, None)

  def _told(self, state: DecodeState) -> DecodeState:
    """Returns the state with the pool's current table in all caches."""
    table = np.zeros(state.target_cache.table.shape, np.int32)
    for slot, pages in self._pages.items():
      table[slot, :len(pages)] = pages
    # Separate arrays per cache, because the loop donates each.
    return jax.tree.map(
        lambda x: x.replace(table=jax.device_put(table, x.table.sharding))
        if is_paged(x) else x, state, is_leaf=is_paged)


@functools.partial(jax.jit, donate_argnames="state")
def _insert(state: DecodeState, slots: np.ndarray, fresh: DecodeState,
            row: np.ndarray, into: np.ndarray) -> DecodeState:
  def put(all, new):
    if not is_paged(all):
      return all.at[slots].set(new)
    return all.with_rows(slots, new, into).replace(
        table=all.table.at[slots].set(row))

  return jax.tree.map(put, state, fresh, is_leaf=is_paged)
