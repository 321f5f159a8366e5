"""Small context-dependent models as tables, to enumerate over."""

import functools
import threading
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

# The place of a kind seeds its random numbers: new kinds come last.
KINDS = ("dense", "zeros", "one_hot_target", "one_hot_draft", "equal",
         "disjoint", "mixed", "ties", "nearly_one_hot", "heavy_tails",
         "uniform", "varied")
_MIXED = KINDS[:6]
_VARIED = tuple(kind for kind in KINDS if kind not in ("mixed", "varied"))
_ROUNDING = 1e-5  # by which rows in float32 miss a sum of 1


class Pair(NamedTuple):
  """A context-dependent pair of tabular models.

  Attributes:
    p: the target: p[d] is `[V**d, V]`, its law after each of the V**d contexts
      of d tokens, contexts in lexicographic order.
    q: the drafter, likewise.
  """

  p: list[np.ndarray]
  q: list[np.ndarray]

  @property
  def vocab_size(self) -> int:
    return self.p[0].shape[-1]

  @property
  def depth(self) -> int:
    """The longest context plus one, in tokens."""
    return min(len(self.p), len(self.q))

  def tables(self) -> tuple[np.ndarray, np.ndarray]:
    """p and q, indexed by the numbers of contexts; see `exact.drafts`."""
    return np.concatenate(self.p), np.concatenate(self.q)


def iid_pair(p: ArrayLike, q: ArrayLike, depth: int) -> Pair:
  """Returns the pair that draws every token from p and q in any context.

  Args:
    p: `[V]`, the target. Both are normalised in float64, so float32 rows are
      accepted.
    q: `[V]`, the drafter.
    depth: longest context plus one, in tokens.

  Raises:
    ValueError: p or q is not a distribution, their lengths differ, or depth is
      not a whole number of at least 1.
  """
  p, q = (np.asarray(x, np.float64) for x in (p, q))
  check_depth(depth)
  if p.ndim != 1 or p.shape != q.shape:
    raise ValueError(f"p has shape {p.shape} and q {q.shape}; give two vectors "
                     "[V] of the same length")
  check_rows("p", p)
  check_rows("q", q)
  p, q = p / p.sum(), q / q.sum()
  tables = lambda row: [np.tile(row, (len(row)**d, 1)) for d in range(depth)]
  return Pair(tables(p), tables(q))


def check_rows(name: str, rows: np.ndarray) -> None:
  """Checks that every row of `rows [..., V]` is a distribution.

  Raises:
    ValueError: a row is negative, not finite, or does not sum to 1 within
      1e-5; the message has the first such row.
  """
  off = ~(np.abs(rows.sum(-1) - 1) <= _ROUNDING) | ~(rows >= 0).all(-1)
  if off.any():
    row = rows[tuple(np.argwhere(off)[0])]
    shown = ", ".join(f"{x:.6g}" for x in row[:6]) + ", ..." * (len(row) > 6)
    raise ValueError(f"{name} has the row ({shown}), which sums to "
                     f"{row.sum():.6g}; a distribution is finite, at least 0 "
                     "and sums to 1: normalise it")


def check_depth(depth: int, name: str = "depth", least: int = 1) -> None:
  """Checks that a length is a whole number of at least `least`."""
  if (not isinstance(depth, (int, np.integer)) or isinstance(depth, bool)
      or depth < least):
    raise ValueError(f"{name} is {depth!r}; it must be a whole number of at "
                     f"least {least}")


def check_pair(pair: Pair) -> None:
  """Checks the tables of a pair, which may come from a user.

  Raises:
    ValueError: a table has another shape than `[V**d, V]`, or a row of it is
      not a distribution.
  """
  for name, tables in (("p", pair.p), ("q", pair.q)):
    for d, table in enumerate(tables[:pair.depth]):
      want = (pair.vocab_size**d, pair.vocab_size)
      if np.shape(table) != want:
        raise ValueError(f"{name}[{d}] of the pair has shape "
                         f"{np.shape(table)}; it must be {want}, [V**d, V]")
      check_rows(f"{name}[{d}] of the pair", np.asarray(table))


def random_pair(kind: str, vocab_size: int, depth: int, seed: int) -> Pair:
  """Returns a random pair with another conditional after every context.

  A shallower pair is the beginning of a deeper one; both share their tables,
  which cannot be written to. The last few pairs are cached.

  Args:
    kind: one of `KINDS`:
      dense: Dirichlet rows.
      zeros: random zeros in both.
      one_hot_target, one_hot_draft: one of the two is deterministic.
      equal: p = q.
      disjoint: no common token.
      mixed: each context is of one of these kinds, drawn at random.
      ties: multiples of 1/4 (of a smaller power of 2 where V > 4), so that
        entries are equal and p / q is exactly 1/2, 1 or 2.
      nearly_one_hot: p, q or both have one entry of 1 - 10^-k, k = 2 to 7.
      heavy_tails: entries down to 1e-12.
      uniform: q is uniform, or sometimes p.
      varied: p and q of each context are of any of these kinds, drawn apart.
    vocab_size: V, at least 2.
    depth: longest context plus one, in tokens.
    seed: of the random numbers.

  Raises:
    ValueError: the kind is unknown, or a size is too small.
  """
  if kind not in KINDS:
    raise ValueError(f"kind is {kind!r}; it must be one of {', '.join(KINDS)}")
  check_depth(vocab_size, "vocab_size", 2)
  check_depth(depth)
  check_depth(seed, "seed", 0)
  return _tables(kind, vocab_size, seed).up_to(depth)


@functools.lru_cache(maxsize=32)  # all kinds, at two sizes
def _tables(kind, vocab_size, seed):
  return _Tables(kind, vocab_size, seed)


class _Tables:
  """Tables of a random pair, drawn level by level when they are asked for."""

  def __init__(self, kind, vocab_size, seed):
    self._rng = np.random.default_rng([KINDS.index(kind), vocab_size, seed])
    self._kind, self._vocab_size = kind, vocab_size
    self._levels, self._lock = [], threading.Lock()

  def up_to(self, depth: int) -> Pair:
    """The pair of this depth."""
    with self._lock:
      while len(self._levels) < depth:
        level = _random_rows(
            self._kind, self._rng, self._vocab_size**len(self._levels),
            self._vocab_size)
        for table in level:
          table.setflags(write=False)
        self._levels.append(level)
      levels = self._levels[:depth]
    return Pair([p for p, _ in levels], [q for _, q in levels])


def _random_rows(kind, rng, rows, vocab_size):
  if kind == "mixed":
    made = [_random_rows(k, rng, rows, vocab_size) for k in _MIXED]
    choice = (rng.integers(len(made), size=rows), np.arange(rows))
    return tuple(np.stack(side)[choice] for side in zip(*made))
  if kind == "varied":
    made = [_random_rows(k, rng, rows, vocab_size) for k in _VARIED]
    return tuple(
        np.stack(side)[rng.integers(len(made), size=rows), np.arange(rows)]
        for side in zip(*made))
  if kind in _SIDES:
    p, q = (_SIDES[kind](rng, rows, vocab_size) for _ in "pq")
    if kind == "uniform":  # of the two sides one has the rows of `_SIDES`
      other = rng.dirichlet(np.full(vocab_size, 0.7), size=rows)
      draft = rng.random((rows, 1)) < 0.75
      return np.where(draft, other, p), np.where(draft, q, other)
    return p, q
  p, q = (rng.dirichlet(np.full(vocab_size, 0.7), size=rows) for _ in "pq")
  eye = np.eye(vocab_size)
  if kind == "one_hot_target":
    p = eye[rng.integers(vocab_size, size=rows)]
  elif kind == "one_hot_draft":
    q = eye[rng.integers(vocab_size, size=rows)]
  elif kind == "equal":
    q = p
  elif kind in ("zeros", "disjoint"):
    # A random order of the tokens; each side keeps some, at least one.
    order = lambda: np.argsort(rng.random((rows, vocab_size)), axis=-1)
    some = lambda: rng.integers(1, vocab_size, size=(rows, 1))
    rank, cut = order(), some()
    others = rank >= cut if kind == "disjoint" else order() < some()
    p, q = (np.where(keep, x + 1e-3, 0) for keep, x in (
        (rank < cut, p), (others, q)))
    p, q = (x / x.sum(-1, keepdims=True) for x in (p, q))
  return p, q


def _ties(rng, rows, vocab_size):
  """Multiples of 1/4, or of a smaller power of 2 for more than 4 tokens."""
  parts = 4
  while vocab_size > parts:
    parts *= 2
  return rng.multinomial(
      parts, np.full(vocab_size, 1 / vocab_size), size=rows) / parts


def _nearly_one_hot(rng, rows, vocab_size):
  """One entry of 1 - 10^-k; a fourth of the rows are dense."""
  rest = rng.dirichlet(np.full(vocab_size, 0.7), size=rows)
  small = 10.0**-rng.integers(2, 8, size=(rows, 1))
  small = np.where(rng.random((rows, 1)) < 0.25, 1, small)
  # Of few tokens, so that p and q often agree in a large vocabulary as well.
  top = np.eye(vocab_size)[rng.integers(min(vocab_size, 3), size=rows)]
  return (1 - small) * top + small * rest


def _heavy_tails(rng, rows, vocab_size):
  """Entries whose logarithms are uniform."""
  weights = 10**rng.uniform(-12, 0, size=(rows, vocab_size))
  return weights / weights.sum(-1, keepdims=True)


def _uniform(rng, rows, vocab_size):
  del rng
  return np.full((rows, vocab_size), 1 / vocab_size)


_SIDES = {"ties": _ties, "nearly_one_hot": _nearly_one_hot,
          "heavy_tails": _heavy_tails, "uniform": _uniform}


def full_information_optimum(pair: Pair, gamma: int) -> float:
  """Returns the most draft tokens that any coupling accepts in one round.

  sum_{i=1..gamma} sum_{x^i} min(p(x^i), q(x^i)): Lemma 8. Greedy block
  verification attains it in its first round (Theorem 3).
  """
  p, q = (joint(tables, gamma) for tables in (pair.p, pair.q))
  return float(sum(np.minimum(a, b).sum() for a, b in zip(p[1:], q[1:])))


def joint(tables, length):
  """Joint laws `[V**i]` of the first i tokens, for i = 0..length."""
  check_depth(length, "gamma", 0)
  laws = [np.ones(1)]
  for d in range(length):
    check_rows(f"table {d} of the pair", tables[d])
    error = np.abs(tables[d].sum(-1) - 1).max()
    if error > 1e-12:  # the programs would have no solution
      raise ValueError(f"a row of the models sums to 1 within {error:.0e}; "
                       "1e-12 is needed: normalise the rows in float64")
    laws.append((laws[-1][:, None] * tables[d]).reshape(-1))
  return laws
