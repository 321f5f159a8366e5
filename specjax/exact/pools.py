"""Models with a pool of rows, of which a hash of the text picks one.

So every context of a large vocabulary has its own pair of distributions, and
only the rows along a draft are needed.
"""

from typing import NamedTuple

import numpy as np

_FEW_ROWS, _DENSE_ROWS = 41, 12


class Pool(NamedTuple):
  """Rows of p and q, of which a text's hash picks one.

  Attributes:
    p: `[K, V]` float32, the target.
    q: `[K, V]` float32, the drafter.
    two: `[K, 2]`, the tokens that the drafter knows, or None if it knows all.
    shares: `[K, 2]`, their probabilities.
  """

  p: np.ndarray
  q: np.ndarray
  two: np.ndarray | None = None
  shares: np.ndarray | None = None

  def rows(self, hashes):
    """The row numbers of texts."""
    return ((hashes >> np.uint64(32)) % np.uint64(len(self.p))).astype(np.int64)


class Drafts(NamedTuple):
  """n drafts of N nodes: weights `[n]`, and arrays `[n, N]`."""

  weights: np.ndarray
  tokens: np.ndarray
  rows: np.ndarray
  hashes: np.ndarray


def few_pool(vocab_size: int, nodes: int, seed: int) -> Pool:
  """Returns models whose drafter knows one or two tokens after a context.

  They prefer token ids at which programs break: the first and the last ones,
  and those around powers of 2.
  """
  rng = np.random.default_rng([vocab_size, nodes, seed])
  ids = [0, 1, 2, vocab_size - 2, vocab_size - 1, vocab_size // 128 * 128,
         *(x for k in (7, 8, 15, 16, 17) for x in (2**k - 1, 2**k)), 99_999]
  ids = sorted({x for x in ids if 0 <= x < vocab_size})
  p, q = np.zeros((2, _FEW_ROWS, vocab_size), np.float32)
  pairs, shares = np.zeros((_FEW_ROWS, 2), int), np.zeros((_FEW_ROWS, 2))
  branching = min(0.8, 3 / max(nodes - 1, 1))
  for row in range(_FEW_ROWS):
    two = rng.choice(ids, 2, replace=False)
    if rng.random() < 0.5:
      two[1] = (two[0] + rng.integers(1, vocab_size)) % vocab_size
    share = rng.dirichlet([1, 1]) if rng.random() < branching else np.eye(2)[0]
    pairs[row], shares[row], q[row, two] = two, share, share
    # Close to q as a rule, so that the ends of long drafts are reached too.
    other = 10**rng.uniform(-3, -0.2)
    dense = np.exp(3 * rng.standard_normal(vocab_size, np.float32))
    dense *= other / dense.sum()
    dense[two] += (1 - other) * (
        share * rng.dirichlet([8, 8]) + [1e-3, 1e-3])
    if rng.random() < 0.1:  # q's token is impossible
      dense[two[0]] = 0
    p[row] = dense / dense.sum(dtype=np.float64)
  return Pool(p, q, pairs, shares)


def dense_pool(vocab_size: int, seed: int) -> Pool:
  """Returns models that know all tokens and resemble each other."""
  rng = np.random.default_rng([vocab_size, seed])
  logits = 3 * rng.standard_normal((_DENSE_ROWS, vocab_size))
  other = logits + 1.2 * rng.standard_normal(logits.shape)
  softmax = lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True)
  return Pool(*(softmax(x).astype(np.float32) for x in (logits, other)))


def roots_of(vocab_size, count, rng):
  """Root tokens: the first, the last, and others at random."""
  return np.concatenate([[0, vocab_size - 1], rng.integers(
      vocab_size, size=max(count - 2, 0))])[-count:]


def drawn(laws, rng):
  """`[n]` tokens, one drawn from each of `laws [n, V]`, normalised."""
  sums = np.cumsum(laws, axis=-1, dtype=np.float64)
  u = rng.random(len(laws)) * sums[:, -1]
  return np.array([min(np.searchsorted(row, x, side="right"),
                       np.flatnonzero(law)[-1])
                   for row, x, law in zip(sums, u, laws)])


def extended(hashes, tokens):
  """Hashes of texts with one more token."""
  mixed = (hashes ^ (np.asarray(tokens).astype(np.uint64)
                     + np.uint64(0x51ED270B))) * np.uint64(0x9E3779B97F4A7C15)
  return mixed ^ (mixed >> np.uint64(29))


def grow(pool, parents, roots, salt, most=None, rng=None) -> Drafts | None:
  """All drafts below `roots`, or with `rng` one drawn below each.

  None if there are more than `most`. Another `salt` is another model.
  """
  count = len(roots)
  hashes = extended(np.full(count, salt, np.uint64), roots)[:, None]
  weights, tokens = np.full(count, 1 / count), np.asarray(roots)[:, None]
  for parent in parents[1:]:
    rows = pool.rows(hashes[:, parent])
    if rng is None:
      draft, option = np.nonzero(pool.shares[rows])
      new = pool.two[rows][draft, option]
      weights = (weights[:, None] * pool.shares[rows])[draft, option]
      if len(draft) > most:
        return None
    else:
      draft, new = np.arange(count), drawn(pool.q[rows], rng)
    hashes, tokens = hashes[draft], tokens[draft]
    tokens = np.concatenate([tokens, new[:, None]], axis=1)
    hashes = np.concatenate(
        [hashes, extended(hashes[:, parent], new)[:, None]], axis=1)
  return Drafts(weights, tokens.astype(np.int32), pool.rows(hashes), hashes)
