"""Pairs of a small target model and a small draft model, stored as tables.

A table contains the distribution of the next token after every context.
"""

import functools
import threading
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from specjax.utils import fields

# The index of a kind is part of its random seed, so new kinds come last.
KINDS = ("dense", "zeros", "one_hot_target", "one_hot_draft", "equal",
         "disjoint", "mixed", "ties", "nearly_one_hot", "heavy_tails",
         "uniform", "varied", "greedy")
_MIXED = KINDS[:6]
_VARIED = tuple(kind for kind in KINDS
                if kind not in ("mixed", "varied", "greedy"))
_AGREE = 0.7  # share of contexts after which both greedy models agree
_ROUNDING = 1e-5  # tolerated error of the sum of a float32 row


class Pair(NamedTuple):
  """A context-dependent pair of tabular models.

  Attributes:
    p: tables of the target model. p[d] is `[V**d, V]`, the distribution of the
      next of V tokens after each context of d tokens, in lexicographic order.
    q: tables of the draft model, in the same format.
  """

  p: list[np.ndarray]
  q: list[np.ndarray]

  @property
  def vocab_size(self) -> int:
    return self.p[0].shape[-1]

  @property
  def depth(self) -> int:
    """1 + number of tokens of the longest context."""
    return min(len(self.p), len(self.q))

  def tables(self) -> tuple[np.ndarray, np.ndarray]:
    """Returns p and q as `[contexts, V]`, numbered as in `exact.drafts`."""
    return np.concatenate(self.p), np.concatenate(self.q)


def iid_pair(p: ArrayLike, q: ArrayLike, depth: int) -> Pair:
  """Returns a pair of models that ignore their context.

  Args:
    p: `[V]` target distribution. p and q may be float32: this function
      normalises both in float64.
    q: `[V]` draft distribution.
    depth: 1 + number of tokens of the longest context.

  Raises:
    ValueError: p or q is not a distribution, the lengths of p and q differ, or
      depth is not a whole number of at least 1.

  Example:
    >>> pair = iid_pair([1/3, 2/3], [2/3, 1/3], depth=3)
    >>> round(full_information_optimum(pair, gamma=2), 6)
    1.333333
  """
  p, q = (np.asarray(x, np.float64) for x in (p, q))
  fields.check_at_least("depth", depth, 1)
  if p.ndim != 1 or p.shape != q.shape:
    raise ValueError(f"p has shape {p.shape} and q {q.shape}; give two vectors "
                     "[V] of the same length")
  check_rows("p", p)
  check_rows("q", q)
  p, q = p / p.sum(), q / q.sum()
  tables = lambda row: [np.tile(row, (len(row)**d, 1)) for d in range(depth)]
  return Pair(tables(p), tables(q))


def check_rows(name: str, rows: np.ndarray) -> None:
  """Raises `ValueError` unless each row of `[..., V]` is a distribution."""
  off = ~(np.abs(rows.sum(-1) - 1) <= _ROUNDING) | ~(rows >= 0).all(-1)
  if off.any():
    row = rows[tuple(np.argwhere(off)[0])]
    shown = ", ".join(f"{x:.6g}" for x in row[:6]) + ", ..." * (len(row) > 6)
    raise ValueError(f"{name} has the row ({shown}), which sums to "
                     f"{row.sum():.6g}; a distribution is finite, at least 0 "
                     "and sums to 1: normalise it")


def check_pair(pair: Pair) -> None:
  """Raises `ValueError` unless p[d] and q[d] are distributions `[V**d, V]`."""
  for name, tables in (("p", pair.p), ("q", pair.q)):
    for d, table in enumerate(tables[:pair.depth]):
      want = (pair.vocab_size**d, pair.vocab_size)
      if np.shape(table) != want:
        raise ValueError(f"{name}[{d}] of the pair has shape "
                         f"{np.shape(table)}; it must be {want}, [V**d, V]")
      check_rows(f"{name}[{d}] of the pair", np.asarray(table))


def random_pair(kind: str, vocab_size: int, depth: int, seed: int) -> Pair:
  """Returns a random pair of models that depend on their context.

  Pairs that differ only in depth have the same tables for the contexts of both.
  The tables are read-only. The last few pairs are cached.

  Args:
    kind: one of `KINDS`:
      dense: rows are drawn from a Dirichlet distribution.
      zeros: random entries of p and q are 0.
      one_hot_target, one_hot_draft: p or q is deterministic.
      equal: p = q.
      disjoint: no token has p > 0 and q > 0.
      mixed: one of the kinds above is drawn for each context.
      ties: entries are multiples of 1/4 (of a smaller power of 2 if V > 4).
        Many entries are equal, and p / q is often exactly 1/2, 1 or 2.
      nearly_one_hot: one entry of p, of q or of both is 1 - 10^-k, with k from
        2 to 7.
      heavy_tails: entries are as small as 1e-12, in half of the rows 1e-36.
      uniform: q is uniform; in a quarter of the contexts p instead.
      varied: a kind of p and a kind of q are drawn for each context.
      greedy: p and q are deterministic, as at temperature 0. They are equal
        after 70 % of the contexts.
    vocab_size: vocabulary size V, at least 2.
    depth: 1 + number of tokens of the longest context.
    seed: random seed.

  Raises:
    ValueError: `kind` is unknown, or a size is too small.

  Example:
    >>> pair = random_pair("dense", vocab_size=3, depth=2, seed=0)
    >>> [table.shape for table in pair.p]
    [(1, 3), (3, 3)]
  """
  if kind not in KINDS:
    raise ValueError(f"kind is {kind!r}; it must be one of {', '.join(KINDS)}")
  fields.check_at_least("vocab_size", vocab_size, 2)
  fields.check_at_least("depth", depth, 1)
  fields.check_at_least("seed", seed, 0)
  return _tables(kind, vocab_size, seed).up_to(depth)


class _Tables:
  """Tables of a random pair. Levels (context lengths) are drawn on demand."""

  def __init__(self, kind: str, vocab_size: int, seed: int):
    self._rng = np.random.default_rng([KINDS.index(kind), vocab_size, seed])
    self._kind, self._vocab_size = kind, vocab_size
    self._levels, self._lock = [], threading.Lock()

  def up_to(self, depth: int) -> Pair:
    """Returns the pair with contexts of 0 to depth - 1 tokens."""
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


_tables = functools.lru_cache(maxsize=32)(_Tables)  # all kinds at two sizes V


def _random_rows(kind: str, rng: np.random.Generator, rows: int,
                 vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns rows of p and q, each `[rows, V]`."""
  if kind in ("mixed", "varied"):
    return _drawn_kinds(kind, rng, rows, vocab_size)
  if kind in _SIDES:
    p, q = (_SIDES[kind](rng, rows, vocab_size) for _ in "pq")
    return _one_replaced(p, q, rng) if kind == "uniform" else (p, q)
  p, q = (_dense(rng, rows, vocab_size) for _ in "pq")
  if kind in ("zeros", "disjoint"):
    return _with_zeros(p, q, rng, kind == "disjoint")
  if kind == "equal":
    return p, p
  one_hot = np.eye(vocab_size)
  if kind == "greedy":
    p = one_hot[rng.integers(vocab_size, size=rows)]
    q = one_hot[rng.integers(vocab_size, size=rows)]
    q = np.where(rng.random((rows, 1)) < _AGREE, p, q)
  if kind == "one_hot_target":
    p = one_hot[rng.integers(vocab_size, size=rows)]
  if kind == "one_hot_draft":
    q = one_hot[rng.integers(vocab_size, size=rows)]
  return p, q


def _drawn_kinds(kind: str, rng: np.random.Generator, rows: int,
                 vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns rows of p and q of random kinds.

  For `kind` "mixed", p and q of a row have the same kind. For "varied", the
  kinds of p and q are drawn independently.
  """
  kinds = _MIXED if kind == "mixed" else _VARIED
  sides = zip(*(_random_rows(k, rng, rows, vocab_size) for k in kinds))
  p, q = (np.stack(side) for side in sides)
  of_p = rng.integers(len(kinds), size=rows)
  of_q = of_p if kind == "mixed" else rng.integers(len(kinds), size=rows)
  return p[of_p, np.arange(rows)], q[of_q, np.arange(rows)]


def _one_replaced(p: np.ndarray, q: np.ndarray, rng: np.random.Generator
                  ) -> tuple[np.ndarray, np.ndarray]:
  """Returns p and q with p or q of each row replaced by a dense row.

  p is replaced in three quarters of the rows, and q in the others.
  """
  other = _dense(rng, *p.shape)
  in_p = rng.random((len(p), 1)) < 0.75
  return np.where(in_p, other, p), np.where(in_p, q, other)


def _with_zeros(p: np.ndarray, q: np.ndarray, rng: np.random.Generator,
                disjoint: bool) -> tuple[np.ndarray, np.ndarray]:
  """Returns p and q with random entries set to 0.

  Each row retains at least one positive entry. With `disjoint`, q is positive
  only at tokens with p = 0.
  """
  order = lambda: np.argsort(rng.random(p.shape), axis=-1)
  size = lambda: rng.integers(1, p.shape[-1], size=(len(p), 1))
  rank, cut = order(), size()
  in_q = rank >= cut if disjoint else order() < size()
  p, q = (np.where(keep, x + 1e-3, 0) for keep, x in (
      (rank < cut, p), (in_q, q)))
  return p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)


def _dense(rng: np.random.Generator, rows: int, vocab_size: int) -> np.ndarray:
  return rng.dirichlet(np.full(vocab_size, 0.7), size=rows)


def _ties(rng: np.random.Generator, rows: int, vocab_size: int) -> np.ndarray:
  """Returns rows of multiples of 1/4, or of a smaller power of 2 if V > 4."""
  parts = 4
  while vocab_size > parts:
    parts *= 2
  return rng.multinomial(
      parts, np.full(vocab_size, 1 / vocab_size), size=rows) / parts


def _nearly_one_hot(rng: np.random.Generator, rows: int, vocab_size: int
                    ) -> np.ndarray:
  """Returns rows with one entry of 1 - 10^-k, and dense rows.

  A quarter of the rows are dense.
  """
  rest = _dense(rng, rows, vocab_size)
  small = 10.0**-rng.integers(2, 8, size=(rows, 1))
  small = np.where(rng.random((rows, 1)) < 0.25, 1, small)
  # The large entry is at one of three tokens. Even in a large vocabulary, p and
  # q then often have it at the same token.
  top = np.eye(vocab_size)[rng.integers(min(vocab_size, 3), size=rows)]
  return (1 - small) * top + small * rest


def _heavy_tails(rng: np.random.Generator, rows: int, vocab_size: int
                 ) -> np.ndarray:
  """Returns rows with uniform logarithms before normalisation."""
  smallest = np.where(rng.random((rows, 1)) < 0.5, -12, -36)
  weights = 10**(smallest * rng.random((rows, vocab_size)))
  return weights / weights.sum(-1, keepdims=True)


def _uniform(rng: np.random.Generator, rows: int, vocab_size: int
             ) -> np.ndarray:
  del rng
  return np.full((rows, vocab_size), 1 / vocab_size)


_SIDES = {"ties": _ties, "nearly_one_hot": _nearly_one_hot,
          "heavy_tails": _heavy_tails, "uniform": _uniform}


def full_information_optimum(pair: Pair, gamma: int) -> float:
  """Returns the largest expected acceptance length of any lossless rule.

  The bound holds for rules that know both models completely. The value is
  sum_{i=1..gamma} sum_{x^i} min(p(x^i), q(x^i)). p(x^i) and q(x^i) are the
  probabilities of the first i tokens under the target and the draft model
  (Lemma 8 of Sun et al. 2024, arXiv:2403.10444). Greedy block verification
  attains this value in its first round (Theorem 3).

  Args:
    pair: models of depth at least gamma.
    gamma: draft length.
  """
  p, q = (joint(tables, gamma) for tables in (pair.p, pair.q))
  return float(sum(np.minimum(a, b).sum() for a, b in zip(p[1:], q[1:])))


def joint(tables: list[np.ndarray], length: int) -> list[np.ndarray]:
  """Returns the joint distributions `[V**i]` of i tokens, i = 0..length.

  `tables` is one of the two lists of tables of a `Pair`.
  """
  fields.check_at_least("gamma", length, 0)
  laws = [np.ones(1)]
  for d in range(length):
    check_rows(f"table {d} of the pair", tables[d])
    error = np.abs(tables[d].sum(-1) - 1).max()
    if error > 1e-12:  # larger errors make linear programs infeasible
      raise ValueError(f"a row of the models sums to 1 within {error:.0e}; "
                       "1e-12 is needed: normalise the rows in float64")
    laws.append((laws[-1][:, None] * tables[d]).reshape(-1))
  return laws
