"""Pages: the same text, wherever a row's slots lie and whoever shares them."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import specjax as sj
from specjax import testing
from specjax.caches import paged
from specjax.caches import pool as page_pool
from specjax.serving import chunks

_PAGE = 8
_VOCAB = 5
_TREE = (-1, 0, 1, 0, 3)


@functools.cache
def _decoder(page, tree=False):
  """Drafts chains, or trees; page None: with the ordinary cache."""
  pair = testing.tiny_pair(_VOCAB, seed=2)
  cache = sj.caches.KVCache if page is None else paged.Paged(page=page)
  model = sj.models.Transformer(pair.target.config, cache=cache)
  drafter = (sj.drafters.DraftModelTree(model=model, parents=_TREE) if tree
             else sj.drafters.DraftModel(model=model, gamma=3))
  rule = sj.verifiers.Traversal() if tree else sj.verifiers.Block()
  return sj.Decoder(target=model, verifier=rule, drafter=drafter), pair.params


def _prompts(*sizes, same=0):
  """Prompts whose first `same` tokens are those of the first one."""
  rng = np.random.default_rng(0)
  rows = [rng.integers(_VOCAB, size=size) for size in sizes]
  return [np.concatenate([rows[0][:same], row[same:]]) for row in rows]


def _texts(state):
  return [row[:n].tolist()
          for row, n in zip(np.asarray(state.tokens), state.lengths)]


def _cache(lengths, page=_PAGE, capacity=40, table=None):
  """A paged cache of one layer and head with numbers that name their slot."""
  rows = len(lengths)
  cache = paged.PagedCache.empty(
      layers=1, batch=rows, heads=1, capacity=capacity, head_dim=1,
      dtype=jnp.float32, page=page)
  if table is not None:
    cache = cache.replace(table=jnp.asarray(table, jnp.int32))
  return _fed(cache, capacity).rollback(jnp.asarray(lengths))


def _fed(cache, size, plus=0):
  """The cache with a block of `size` tokens in it, numbered by their place."""
  place = (cache.lengths[:, None] + jnp.arange(size) + plus + 100 * (
      1 + jnp.arange(len(cache.lengths))[:, None]))
  new = place[..., None, None].astype(jnp.float32)
  cache = cache.append(0, new, new)
  return cache.rollback(cache.lengths + size) if not plus else cache


def _slots(cache, row):
  pages = np.asarray(cache.k[0])[np.asarray(cache.table)[row]]
  return pages[:, 0, :, 0].reshape(-1)[:int(cache.lengths[row])]


def test_a_block_falls_into_pages():
  # Broken: a block that crosses the end of a page is torn, the rows' tables
  # are mixed up, or a token of another branch is kept.
  lengths = np.array([6, 0, 23], np.int32)
  cache = _fed(_cache(lengths), 12, plus=1000)
  path = np.array([[0, 2, 5] + [0] * 9] * 3, np.int32)
  kept = jax.jit(lambda c, *args: c.commit(*args))(
      cache, path, np.array([3, 2, 0], np.int32))
  for row, (n, count) in enumerate(zip(lengths, (3, 2, 0))):
    first = 100 * (row + 1)
    want = [first + i for i in range(n)]
    want += [first + n + 1000 + i for i in (0, 2, 5)[:count]]
    assert _slots(kept, row).tolist() == want
  again = _fed(kept.rollback(lengths), 3)
  for row, n in enumerate(lengths):
    assert _slots(again, row).tolist() == [
        100 * (row + 1) + i for i in range(n + 3)]


def test_a_row_without_pages_writes_nowhere():
  # Broken: a row that is done, or longer than its pages, writes into those of
  # another row, or into the page that all rows read where they have none.
  table = [[1, 2, 0], [3, 4, 5], [0, 0, 0]]
  cache = _cache([24, 24, 24], capacity=24, table=table)
  assert _slots(cache, 1).tolist() == list(range(200, 224))
  assert _slots(cache.rollback(jnp.array([16, 24, 0])), 0).tolist() == list(
      range(100, 116))
  assert not np.asarray(cache.k[0])[0].any()
  fresh = _cache([24], capacity=24)
  again = cache.with_rows(np.array([2]), fresh)
  assert not np.asarray(again.k[0])[0].any()


def test_rows_move_with_their_pages():
  # Broken: a `Queue` that changes its size mixes up the pages of its rows, or
  # rows made of one row write into the same pages.
  cache = _cache([6, 0, 23], table=[
      [7, 2, 3, 4, 5], [6, 1, 8, 9, 10], [15, 14, 13, 12, 11]])
  moved = chunks.moved(cache, np.array([2, 0, 0, 2], np.int32))
  moved = _fed(moved.rollback(jnp.array([20, 6, 5, 23])), 2)
  for row, (old, count) in enumerate(((2, 20), (0, 6), (0, 5), (2, 23))):
    want = [100 * (old + 1) + i for i in range(count)]
    want += [100 * (row + 1) + count + i for i in range(2)]
    assert _slots(moved, row).tolist() == want


def test_pages_change_no_text():
  # Broken: anything of a round on pages, while they are added too.
  texts = []
  for page in (None, _PAGE):
    decoder, params = _decoder(page)
    state = decoder.prefill(
        params, _prompts(30, 1, 9), jax.random.key(2), limits=[150, 60, 90],
        temperature=[0, 1, 1], grows=page is not None)
    state, _ = decoder.decode_until(params, state)
    texts.append(_texts(state))
  assert state.target_cache.table.shape == (3, 256 // _PAGE)
  assert texts[0] == texts[1]


def _failed(cache):
  """The cache with NaNs in all pages."""
  nan = lambda arrays: tuple(jnp.full_like(x, jnp.nan) for x in arrays)
  return cache.replace(k=nan(cache.k), v=nan(cache.v))


def test_rows_of_a_pool_share_their_beginning():
  # Broken: rows that share pages write into them, a page is given to two rows
  # or never comes back, or a row that takes over pages reads what is left: a
  # NaN, from a row that has failed, would spread to the others.
  decoder, params = _decoder(_PAGE, tree=True)
  prompts, new = _prompts(70, 90, 66, 40, same=50), (20, 30, 40, 30)
  fresh = lambda i: decoder.prefill(
      params, [prompts[i]], jax.random.key(3), request_ids=[i],
      limits=len(prompts[i]) + new[i], temperature=i % 2, capacity=256)
  want = [_texts(decoder.decode_until(params, fresh(i))[0])[0]
          for i in range(4)]

  pool = page_pool.Pool(rows=2, pages=30)
  state = pool.start(decoder.prefill(
      params, [[0], [0]], jax.random.key(0), limits=1))
  state = jax.tree.map(lambda x: _failed(x) if paged.is_paged(x) else x,
                       state, is_leaf=paged.is_paged)
  state = decoder.grow(params, state, 256)
  waiting, playing, got = [0, 1, 2, 3], {}, {}
  free = []
  while len(got) < 4:
    for slot in set(range(2)) - set(playing):
      if waiting:
        playing[slot] = waiting.pop(0)
        state = pool.insert(state, slot, fresh(playing[slot]))
        free.append(pool.free)
    state = pool.extend(state, 4 * decoder.num_nodes)
    state, _ = decoder.decode(params, state, rounds=4)
    for slot in np.flatnonzero(np.asarray(state.done)):
      if slot in playing:
        got[playing.pop(slot)] = _texts(state)[slot]
        state = pool.release(state, slot)
  assert [got[i] for i in range(4)] == want
  assert pool.free == 30
  # 70 tokens are 9 pages; of 90, 12, the first 34 // 8 are shared.
  assert free[:2] == [21, 21 - (12 - 4)]


def test_a_pool_refuses_what_it_cannot_hold():
  # Broken: a row overwrites another one's pages, or its own text, in silence.
  decoder, params = _decoder(_PAGE)
  start = lambda **options: decoder.prefill(
      params, [[0], [0]], jax.random.key(0), limits=1, **options)
  fresh = lambda **options: decoder.prefill(
      params, [[1] * 30], jax.random.key(0), limits=90, **options)
  pool = page_pool.Pool(rows=2, pages=6)
  placed = NamedSharding(Mesh(np.array(jax.devices()[:1]), "x"), P())
  for cache in jax.tree.leaves(pool.start(jax.device_put(start(), placed)),
                               is_leaf=paged.is_paged):
    if paged.is_paged(cache):
      assert {x.sharding for x in jax.tree.leaves(cache)} == {placed}
  state = pool.start(start())
  with pytest.raises(ValueError, match="a row of the fresh state"):
    pool.insert(state, 0, fresh(capacity=256))
  state = pool.insert(state, 0, fresh())
  assert pool.free == 2
  with pytest.raises(ValueError, match="use Pool.insert"):
    decoder.insert(state, 0, fresh())
  with pytest.raises(ValueError, match="call Pool.extend"):
    decoder.decode_until(params, state)
  with pytest.raises(ValueError, match=(
      r"row 0 has pages for 32 tokens and may get 34; call Pool.extend\(sta")):
    decoder.decode(params, state, rounds=1)
  with pytest.raises(ValueError, match="slot is -1 and the pool"):
    pool.release(state, -1)
  with pytest.raises(ValueError, match="row 0 needs 3 more pages and 2 are fr"):
    pool.extend(state, 20)
  with pytest.raises(ValueError, match="row 1 needs 4 more pages and 2 are fr"):
    pool.insert(state, 1, decoder.prefill(
        params, [[2] * 30], jax.random.key(0), limits=90))
  with pytest.raises(ValueError, match="row 0 is not done"):
    pool.release(state, 0)
  state = pool.insert(state, 0, decoder.prefill(
      params, [[2] * 41], jax.random.key(0), limits=90))  # in its own place
  assert pool.free == 0
  with pytest.raises(ValueError, match="slot is 2 .* from 0 to 1"):
    pool.insert(state, 2, fresh())
  with pytest.raises(ValueError, match="has 2 rows and the pool is for 3"):
    page_pool.Pool(rows=3, pages=6).start(state)
  with pytest.raises(ValueError, match="needs a paged cache of the target"):
    plain, _ = _decoder(None)
    pool.start(plain.prefill(params, [[0], [0]], jax.random.key(0), limits=1))
  whole = "it must be a whole number of at least"
  with pytest.raises(ValueError, match=f"pages is 0; {whole} 1"):
    page_pool.Pool(rows=2, pages=0)
  with pytest.raises(ValueError, match="page is 0"):
    paged.Paged(page=0)
  with pytest.raises(ValueError, match=f"reread is 2; {whole} 16"):
    page_pool.Pool(rows=2, pages=6, reread=2)


def test_what_a_drafter_reads_again_is_not_shared():
  # Broken: a drafter that feeds many tokens again writes into shared pages.
  prompt, shared = np.arange(40), []
  for more in ({}, {"reread": 17}):
    pool = page_pool.Pool(rows=2, pages=6, **more)
    pool._prompts[0], pool._pages[0] = prompt, [1, 2, 3, 4, 5]
    shared.append(pool._alike(prompt, 1, _PAGE))
  assert shared == [[1, 2, 3], [1, 2]]
