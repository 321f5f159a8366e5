"""Exact laws of a round on models with too many sequences to enumerate.

After every context, the draft model q has at most two tokens of positive
probability. Even long chains and large trees therefore have few drafts. The
target p is positive at almost all tokens.

V is the vocabulary size. A round can stop at only a few of the V**H contexts of
H tokens. After a stop, all further tokens have the target's distribution. The
total variation between the output of decoding and the target therefore depends
only on the probabilities of the stops.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
from typing import Any
from typing import NamedTuple

import numpy as np

from specjax.exact import enumeration
from specjax.exact.compiled import Compiled
from specjax.exact.drafts import Starts
from specjax.exact.pairs import Pair
from specjax.interfaces import Verifier

_ROWS = 211  # rows of a model, selected by a hash of the context


class SparseOutcome(NamedTuple):
  """Result of `enumerate_sparse`; `enumeration.Outcome` defines the fields."""

  total_variation: float
  defects: frozenset[str]
  laws: int


@dataclasses.dataclass(frozen=True, eq=False)
class _Hashed:
  """Array `[contexts, V]` with few different rows.

  A hash of the context's number selects the row of a context.
  """

  rows: np.ndarray

  @property
  def shape(self) -> tuple[int, ...]:
    return self.rows.shape

  def __getitem__(self, contexts: np.ndarray) -> np.ndarray:
    mixed = np.asarray(contexts).astype(np.uint64) * np.uint64(
        0x9E3779B97F4A7C15)
    return self.rows[(mixed >> np.uint64(32)) % np.uint64(len(self.rows))]


class SparsePair(NamedTuple):
  """Pair of models with at most two tokens of q after every context.

  Attributes:
    p: `[contexts, V]` target distributions.
    q: `[contexts, V]` draft distributions.
    depth: 1 + number of tokens of the longest context.
  """

  p: _Hashed
  q: _Hashed
  depth: int

  @property
  def vocab_size(self) -> int:
    return self.p.shape[-1]

  def tables(self) -> tuple[_Hashed, _Hashed]:
    """Returns p and q, see `Pair.tables`."""
    return self.p, self.q


def sparse_pair(vocab_size: int, depth: int, seed: int, narrow: bool = False,
                single: float | None = None) -> SparsePair:
  """Returns a random `SparsePair`.

  Args:
    vocab_size: vocabulary size V, at least 3.
    depth: 1 + number of tokens of the longest context. V**(depth + 1) must be
      below 2**62.
    seed: random seed.
    narrow: if True, p also has at most two tokens of positive probability, and
      only one after most contexts. Few sequences are then possible even after
      many rounds.
    single: share of contexts after which q has one token; 1 includes the first
      context. None means 0.6 if `narrow` is True and 0.2 if it is False.
  """
  if vocab_size**(depth + 1) >= 2**62:
    raise ValueError(f"vocab_size is {vocab_size} and depth {depth}; contexts "
                     "are numbered in 62 bits: make one of them smaller")
  rng = np.random.default_rng([vocab_size, depth, seed])
  if single is None:
    single = 0.6 if narrow else 0.2
  eye = np.eye(vocab_size)
  p, q = [], []
  for i in range(_ROWS):
    # Row 0 belongs to the empty context, the start of all drafts. If the target
    # rejected all their first tokens, the other rows would not be used.
    is_first = not i
    pair = eye[rng.choice(vocab_size, 2, replace=False)]
    is_single = rng.random() < single and (not is_first or single == 1)
    q.append(pair[0] if is_single else _mixture(pair, rng))
    if not narrow:
      p.append(_wide_row(pair, is_first, rng))
    elif is_first or rng.random() < 0.3:
      p.append(_mixture(pair, rng))
    else:
      p.append(pair[rng.integers(2)])
    if not is_first and rng.random() < 0.1:  # equal models
      p[-1] = q[-1]
  return SparsePair(_Hashed(np.array(p)), _Hashed(np.array(q)), depth)


def _mixture(pair: np.ndarray, rng: np.random.Generator) -> np.ndarray:
  return rng.dirichlet([0.8, 0.8]) @ pair


def _wide_row(pair: np.ndarray, is_first: bool, rng: np.random.Generator
              ) -> np.ndarray:
  """Returns a row of p that is positive at almost all tokens."""
  weight = rng.random()
  row = weight * _mixture(pair, rng) + (1 - weight) * rng.dirichlet(
      np.full(pair.shape[1], 0.5))
  if rng.random() < 0.2 and not is_first:  # p is 0 at a likely draft token
    row = row * (1 - pair[0])
  if rng.random() < 0.3:  # tokens with equal p, as from quantised logits
    row = 2.0**np.ceil(np.log2(np.where(row > 0, row, 1))) * (row > 0)
  return row / row.sum()


def enumerate_sparse(verifier: Verifier | Compiled, pair: SparsePair,
                     scheme: Callable[[np.ndarray, np.ndarray], Any],
                     nodes: int, longest: int, rounds: int, dtype: str
                     ) -> SparseOutcome:
  """Enumerates a `SparsePair`, with the arguments of `enumerate_drafts`."""
  plan = enumeration.Plan(Compiled.of(verifier), pair, scheme, nodes, longest,
                          rounds, dtype)
  run, starts, _ = plan.run()
  return SparseOutcome(deviation(starts, pair).total_variation,
                       run.defects, run.laws)


class Deviation(NamedTuple):
  """Difference between an enumerated distribution and the target's.

  Attributes:
    total_variation: total variation between the distributions of sequences.
    context: context after which the next token's distribution has the largest
      error, weighted by the probability of the context; None without an error.
    obtained: `[V]` distribution of the next token that decoding emits after
      `context`, or None.
  """

  total_variation: float
  context: int | None
  obtained: np.ndarray | None


def deviation(starts: dict[int, Starts], pair: Pair | SparsePair) -> Deviation:
  """Returns the total variation from the target, and the worst context.

  The last round of decoding with the rule ends at some context. The target
  generates all further tokens.

  * W(c) is the probability that the last round ends at context c.
  * U(c) is the probability that the last round ends at c or at an extension of
    c.
  * B(c) is the probability that the last round ends before c and the target's
    tokens then lead to c. B(cy) = (B(c) + W(c)) p(y | c) for a token y.

  A sequence begins with c with probability U(c) + B(c).

  Args:
    starts: contexts after the last round with weights W, by length of the
      contexts.
    pair: the models.
  """
  if not starts:  # no law was finite
    return Deviation(0.5, None, None)
  vocab_size, p = pair.vocab_size, pair.tables()[0]
  longest = max(starts)
  offsets = enumeration.first_contexts(vocab_size, longest + 1)
  # From the longest contexts to the shortest, list every context with U > 0.
  # `standing` is its W, and `under` is its U.
  after, below, levels = np.zeros(0, np.int64), np.zeros(0), []
  for length in range(longest, -1, -1):
    start = starts.get(length)
    at = start.contexts + offsets[length] if start else after[:0]
    parents = (after - 1) // vocab_size
    contexts = np.union1d(parents, at)
    standing = np.zeros(len(contexts))
    if start:  # starts with equal contexts may have different states
      np.add.at(standing, np.searchsorted(contexts, at), start.weights)
    under = standing.copy()
    np.add.at(under, np.searchsorted(contexts, parents), below)
    levels.append((contexts, standing, under))
    after, below = contexts, under
  # From the shortest contexts to the longest, add the error of the sequences
  # that begin with a listed context but with none of its listed extensions.
  from_above, target, distance = np.zeros(1), np.ones(1), 0.0
  farthest, where, obtained = 1e-15, None, None
  while levels:
    contexts, standing, under = levels.pop()
    reached, stays = under + from_above, from_above + standing
    difference = reached - target
    if levels:
      after, _, below = levels[-1]
      above = np.searchsorted(contexts, (after - 1) // vocab_size)
      token = (after - 1) % vocab_size
      wanted = p[contexts][above, token]
      from_above = stays[above] * wanted
      law = below + from_above
      # Error of the distribution of the next token, in two parts: the tokens
      # that the next level contains, and all other tokens.
      gap = np.abs(stays - reached) * np.maximum(
          1 - np.bincount(above, wanted, minlength=len(contexts)), 0)
      np.add.at(gap, above, np.abs(law - reached[above] * wanted))
      if gap.max() > farthest:
        here = np.argmax(gap)
        farthest, where = gap[here], int(contexts[here])
        obtained = stays[here] * p[contexts[here:here + 1]][0]
        np.add.at(obtained, token[above == here], below[above == here])
        obtained = obtained / reached[here]
      target = target[above] * wanted
      np.subtract.at(difference, above, law - target)
    distance += np.abs(difference).sum()
  return Deviation(0.5 * float(distance), where, obtained)


_FEW_ROWS, _DENSE_ROWS = 41, 12  # rows of the first part of each pool
_OTHER_ROWS = 8  # rows of each other part
_TOP_K = 50  # tokens with p > 0 in a row after top-k; fewer if V < 100


class Pool(NamedTuple):
  """Rows of p and q, selected by the hash of a context.

  Attributes:
    p: `[K, V]` float32 target distributions.
    q: `[K, V]` float32 draft distributions.
    parts: ranges of rows. All contexts of a draft use rows of one part.
    shares: share of the drafts for each part.
    two: `[K, 2]` tokens with q > 0, or None if q is positive at all tokens.
    weights: `[K, 2]` probabilities of the tokens in `two`.
  """

  p: np.ndarray
  q: np.ndarray
  parts: tuple[range, ...]
  shares: tuple[float, ...]
  two: np.ndarray | None = None
  weights: np.ndarray | None = None

  def rows(self, hashes: np.ndarray, part: int = 0) -> np.ndarray:
    """Returns the index of the selected row for each hash of a context."""
    rows = self.parts[part]
    return rows.start + ((hashes >> np.uint64(32)) % np.uint64(len(rows))
                         ).astype(np.int64)


class Drafts(NamedTuple):
  """Batch of n drafts of N nodes.

  Attributes:
    weights: `[n]` probability of each draft.
    tokens: `[n, N]` token ids.
    rows: `[n, N]` index in the pool of the distributions after each node.
    hashes: `[n, N]` hash of each node's context.
    lengths: `[n]` number of nodes before the padding.
  """

  weights: np.ndarray
  tokens: np.ndarray
  rows: np.ndarray
  hashes: np.ndarray
  lengths: np.ndarray

  def cut(self, lengths: np.ndarray) -> "Drafts":
    """Replaces the nodes of each draft after the first `lengths` by padding."""
    stays = np.arange(self.tokens.shape[1]) < lengths[:, None]
    return self._replace(tokens=np.where(stays, self.tokens, 0),
                         lengths=lengths)

  @classmethod
  def joined(cls, drafts: "Sequence[Drafts]") -> "Drafts":
    """Returns the drafts of all batches in one batch."""
    return cls(*map(np.concatenate, zip(*drafts)))


def few_pool(vocab_size: int, nodes: int, seed: int,
             deterministic: bool = False) -> Pool:
  """Returns models with one or two tokens of q after every context.

  The first of the two tokens is an id at which programs often fail: one of the
  first ids, of the last ids, or near a power of 2. The second is such an id in
  half of the rows. In the first part, p is positive at almost all tokens, or
  has ties, or is 0 outside of its 50 most likely tokens. In the second part, p
  and q are deterministic, and equal in most rows. In the third part, p is q.

  Args:
    vocab_size: vocabulary size V.
    nodes: number of nodes N of a draft.
    seed: random seed.
    deterministic: if True, q has one token after every context.
  """
  rng = np.random.default_rng([vocab_size, nodes, seed])
  ids = [0, 1, 2, vocab_size - 2, vocab_size - 1, vocab_size // 128 * 128,
         *(x for k in (7, 8, 15, 16, 17) for x in (2**k - 1, 2**k)), 99_999]
  ids = sorted({x for x in ids if 0 <= x < vocab_size})
  parts = _parts(_FEW_ROWS, _OTHER_ROWS, _OTHER_ROWS)
  rows = parts[-1].stop
  p, q = np.zeros((2, rows, vocab_size), np.float32)
  pairs, weights = np.zeros((rows, 2), int), np.zeros((rows, 2))
  branching = 0 if deterministic else min(0.8, 3 / max(nodes - 1, 1))
  for row in range(rows):
    two = rng.choice(ids, 2, replace=False)
    if rng.random() < 0.5:
      two[1] = (two[0] + rng.integers(1, vocab_size)) % vocab_size
    # The other parts have fewer drafts. Rows of the second one never branch.
    part = next(i for i, rows_ in enumerate(parts) if row in rows_)
    branches = rng.random() < branching * (1, 0, 1 / 3 * (nodes < 12))[part]
    share = rng.dirichlet([1, 1]) if branches else np.eye(2)[0]
    pairs[row], weights[row], q[row, two] = two, share, share
    if part == 1:
      p[row, two[int(rng.random() < 0.2)]] = 1
    elif part == 2:
      p[row] = q[row]
    else:
      p[row] = _few_row(two, share, vocab_size, rng)
  return Pool(p, q, parts, (0.6, 0.2, 0.2), pairs, weights)


def _few_row(two: np.ndarray, share: np.ndarray, vocab_size: int,
             rng: np.random.Generator) -> np.ndarray:
  """Returns a row of p. It is mostly close to q, so that long drafts pass."""
  other = 10**rng.uniform(-3, -0.2)
  row = np.exp(3 * rng.standard_normal(vocab_size, np.float32))
  kind = rng.random()
  if kind < 0.25:
    row[row < _threshold(row)] = 0
  elif kind < 0.5:  # ties, as from quantised logits
    row = np.float32(2)**np.round(np.log2(row))
  row *= other / row.sum()
  row[two] += (1 - other) * (share * rng.dirichlet([8, 8]) + [1e-3, 1e-3])
  if 0.4 < kind < 0.5:
    row[rng.integers(vocab_size, size=2)] = row.max()
  if rng.random() < 0.1:  # p is 0 at a draft token
    row[two[0]] = 0
  return row / row.sum(dtype=np.float64)


def dense_pool(vocab_size: int, seed: int, deterministic: bool = False) -> Pool:
  """Returns similar target and draft models.

  In the first part, p and q are positive at all tokens. The second part has
  rows after top-k, with ties, with probabilities below 1e-30, and with p = q.

  Args:
    vocab_size: vocabulary size V.
    seed: random seed.
    deterministic: if True, q is one-hot at its most likely token.
  """
  rng = np.random.default_rng([vocab_size, seed])
  parts = _parts(_DENSE_ROWS, _OTHER_ROWS)
  logits = 3 * rng.standard_normal((parts[-1].stop, vocab_size))
  other = logits + 1.2 * rng.standard_normal(logits.shape)
  ties, tails, top, same = np.split(np.array(parts[1]), 4)
  for x in (logits, other):
    x[ties] = np.round(x[ties])  # many tokens have the largest logit
    x[tails] *= 4
    for row in top:
      x[row, x[row] < _threshold(x[row])] = -np.inf
  other[same] = logits[same]
  softmax = lambda x: np.exp(x - x.max(-1, keepdims=True))
  p, q = (x / x.sum(-1, keepdims=True) for x in map(softmax, (logits, other)))
  if deterministic:
    q = q == q.max(-1, keepdims=True)
    q &= np.cumsum(q, axis=-1) == 1  # the first of equal tokens
  return Pool(p.astype(np.float32), q.astype(np.float32), parts, (0.75, 0.25))


def _threshold(row: np.ndarray) -> float:
  """Returns the smallest of the largest `_TOP_K` entries."""
  count = min(_TOP_K, len(row) // 2)
  return np.partition(row, -count)[-count]


def _parts(*sizes: int) -> tuple[range, ...]:
  ends = np.cumsum([0, *sizes]).tolist()
  return tuple(range(a, b) for a, b in zip(ends, ends[1:]))


def roots_of(vocab_size: int, count: int, rng: np.random.Generator
             ) -> np.ndarray:
  """Returns `count` root tokens: the first id, the last id, and random ids."""
  return np.concatenate([[0, vocab_size - 1], rng.integers(
      vocab_size, size=max(count - 2, 0))])[-count:]


def cumulative(laws: np.ndarray) -> np.ndarray:
  """Returns the cumulative sums of rows `[K, V]`, for `drawn`."""
  return np.cumsum(laws, axis=-1, dtype=np.float64)


def drawn(sums: np.ndarray, rows: np.ndarray, rng: np.random.Generator
          ) -> np.ndarray:
  """Returns one token drawn from each of the selected rows.

  Args:
    sums: `[K, V]` result of `cumulative`. Rows of the distributions need not
      sum to 1.
    rows: `[n]` indices of the selected rows.
    rng: random generator.
  """
  u = rng.random(len(rows)) * sums[rows, -1]
  return np.array([
      min(np.searchsorted(sums[row], x, side="right"),
          np.searchsorted(sums[row], sums[row, -1]))
      for row, x in zip(rows, u)])


def extended(hashes: np.ndarray, tokens: np.ndarray) -> np.ndarray:
  """Returns the hashes of contexts with one more token."""
  mixed = (hashes ^ (np.asarray(tokens).astype(np.uint64)
                     + np.uint64(0x51ED270B))) * np.uint64(0x9E3779B97F4A7C15)
  return mixed ^ (mixed >> np.uint64(29))


def grow(pool: Pool, parents: Sequence[int], roots: np.ndarray, salt: int,
         most: int | None = None, rng: np.random.Generator | None = None,
         part: int = 0) -> Drafts | None:
  """Returns all drafts below `roots`, or with `rng` one random draft per root.

  Args:
    pool: distributions p and q of the models.
    parents: `[N]` parents of the nodes of a draft.
    roots: `[n]` root tokens.
    salt: seed of the hash. Each seed selects another pair of models.
    most: largest number of drafts, required without `rng`. If there are more,
      the result is None.
    rng: random generator that draws the tokens. None means all drafts.
    part: part of the pool that contains all rows.
  """
  count = len(roots)
  hashes = extended(np.full(count, salt, np.uint64), roots)[:, None]
  weights, tokens = np.full(count, 1 / count), np.asarray(roots)[:, None]
  own = pool.parts[part]
  sums = None if rng is None else cumulative(pool.q[own.start:own.stop])
  for parent in parents[1:]:
    rows = pool.rows(hashes[:, parent], part)
    if rng is None:
      draft, option = np.nonzero(pool.weights[rows])
      new = pool.two[rows][draft, option]
      weights = (weights[:, None] * pool.weights[rows])[draft, option]
      if len(draft) > most:
        return None
    else:
      draft, new = np.arange(count), drawn(sums, rows - own.start, rng)
    hashes, tokens = hashes[draft], tokens[draft]
    tokens = np.concatenate([tokens, new[:, None]], axis=1)
    hashes = np.concatenate(
        [hashes, extended(hashes[:, parent], new)[:, None]], axis=1)
  return Drafts(weights, tokens.astype(np.int32), pool.rows(hashes, part),
                hashes, np.full(len(weights), len(parents)))
