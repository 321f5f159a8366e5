"""The exact law of a round on models that are too large for all of their texts.

After every context q puts its mass on two tokens, so that the drafts of a long
chain, or of a tree, are few; p is positive everywhere, or nearly. The texts
that a rule can emit are then few beside the V**H that exist. Of all other
texts it is enough to know how much mass leaves each of these few: from there on
the target continues, in the rule's law and in its own.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from specjax.exact import enumeration
from specjax.exact.compiled import Compiled

_ROWS = 211  # laws that the contexts of one model share, by a hash
CHUNK = 128


class SparseOutcome(NamedTuple):
  """What `enumerate_sparse` finds; see `enumeration.Outcome`."""

  total_variation: float
  defects: frozenset[str]
  laws: int


@dataclasses.dataclass(frozen=True, eq=False)
class _Hashed:
  """`[contexts, V]`, of which a few rows stand for all."""

  rows: np.ndarray

  @property
  def shape(self):
    return self.rows.shape

  def __getitem__(self, contexts):
    mixed = np.asarray(contexts).astype(np.uint64) * np.uint64(
        0x9E3779B97F4A7C15)
    return self.rows[(mixed >> np.uint64(32)) % np.uint64(len(self.rows))]


class SparsePair(NamedTuple):
  """A pair whose drafter knows two tokens at most after every context.

  Attributes:
    p: the target, `[contexts, V]`.
    q: the drafter, likewise.
    depth: as of a `Pair`.
  """

  p: _Hashed
  q: _Hashed
  depth: int

  @property
  def vocab_size(self) -> int:
    return self.p.shape[-1]

  def tables(self) -> tuple[_Hashed, _Hashed]:
    """See `Pair.tables`."""
    return self.p, self.q


def sparse_pair(vocab_size: int, depth: int, seed: int, narrow: bool = False,
                single: float | None = None) -> SparsePair:
  """A random `SparsePair`.

  Args:
    vocab_size: V, at least 3.
    depth: longest context plus one, in tokens; `V**depth` fits into 62 bits.
    seed: of the random numbers.
    narrow: p too knows two tokens at most, and most contexts know one: few
      texts are left, through many rounds.
    single: the share of contexts after which q knows one token.
  """
  if vocab_size**(depth + 1) >= 2**62:
    raise ValueError(f"vocab_size is {vocab_size} and depth {depth}; contexts "
                     "are numbered in 62 bits: make one of them smaller")
  rng = np.random.default_rng([vocab_size, depth, seed])
  if single is None:
    single = 0.6 if narrow else 0.2
  eye = np.eye(vocab_size)
  p, q = [], []
  for _ in range(_ROWS):
    pair = eye[rng.choice(vocab_size, 2, replace=False)]
    two = lambda pair=pair: rng.dirichlet([0.8, 0.8]) @ pair
    # The first row is that of the empty context. If the target rejected all of
    # its drafts, no other row would matter.
    first, choice = not p, rng.random()
    q.append(pair[0] if choice < single and not first else two())
    if narrow:
      p.append(two() if first or rng.random() < 0.3 else pair[rng.integers(2)])
      continue
    weight = rng.random()
    row = weight * two() + (1 - weight) * rng.dirichlet(
        np.full(vocab_size, 0.5))
    if rng.random() < 0.2 and not first:  # what q likes is impossible
      row = row * (1 - pair[0])
    if rng.random() < 0.3:  # ties of several tokens, as logits of few bits have
      row = 2.0**np.ceil(np.log2(np.where(row > 0, row, 1))) * (row > 0)
    p.append(row / row.sum())
  return SparsePair(_Hashed(np.array(p)), _Hashed(np.array(q)), depth)


def enumerate_sparse(verifier, pair: SparsePair, scheme, nodes: int,
                     longest: int, rounds: int, dtype: str) -> SparseOutcome:
  """`enumerate_drafts` for a `SparsePair`; the arguments are the same."""
  plan = enumeration.Plan(Compiled.of(verifier), pair, scheme, nodes, longest,
                          rounds, dtype, CHUNK)
  run, starts, _ = plan.run()
  return SparseOutcome(deviation(starts, pair).total_variation,
                       frozenset(run.defects), run.laws)


class Deviation(NamedTuple):
  """How the law of an enumeration differs from the target's.

  Attributes:
    total_variation: of the two joint laws.
    context: the context after which the next token's law is farthest off,
      weighted by the context's probability; None without one.
    obtained: `[V]`, the law of the token after it.
  """

  total_variation: float
  context: int | None
  obtained: np.ndarray | None


def deviation(starts, pair) -> Deviation:
  """Half the sum of |law - target| over the texts, told apart where it counts.

  With W(c) the mass that stands at context c, from where the target goes on,
  and U(c) that of c and all that begin with it, a text that begins with c has
  probability U(c) + B(c), where B(cy) = (B(c) + W(c)) p(y | c).
  """
  if not starts:  # no law was finite
    return Deviation(0.5, None, None)
  vocab_size, p = pair.vocab_size, pair.tables()[0]
  longest = max(starts)
  offsets = enumeration.first_contexts(vocab_size, longest + 1)
  # Upwards: every context at which, or below which, mass stands, with W and U.
  after, below, levels = np.zeros(0, np.int64), np.zeros(0), []
  for length in range(longest, -1, -1):
    start = starts.get(length)
    at = start.contexts + offsets[length] if start else after[:0]
    parents = (after - 1) // vocab_size
    contexts = np.union1d(parents, at)
    standing = np.zeros(len(contexts))
    if start:  # a rule's states tell equal contexts apart
      np.add.at(standing, np.searchsorted(contexts, at), start.weights)
    under = standing.copy()
    np.add.at(under, np.searchsorted(contexts, parents), below)
    levels.append((contexts, standing, under))
    after, below = contexts, under
  # Downwards: texts that begin with a context, less those told apart below it.
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
      # Of the next token: at those with mass of their own, and at all others.
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
