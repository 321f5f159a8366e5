"""Small context-dependent models as tables, to enumerate over."""

import functools
import threading
from typing import NamedTuple

import numpy as np

KINDS = ("dense", "zeros", "one_hot_target", "one_hot_draft", "equal",
         "disjoint", "mixed")


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


def iid_pair(p, q, depth: int) -> Pair:
  """The pair that draws every token from `p [V]`, `q [V]` in any context.

  They are normalised in float64, so that float32 laws will do.
  """
  p, q = (x / x.sum() for x in (np.asarray(p, np.float64),
                                np.asarray(q, np.float64)))
  tables = lambda row: [np.tile(row, (len(row)**d, 1)) for d in range(depth)]
  return Pair(tables(p), tables(q))


def random_pair(kind: str, vocab_size: int, depth: int, seed: int) -> Pair:
  """A random pair with another conditional after every context.

  A shallower pair is the beginning of a deeper one; both share their tables,
  which cannot be written to. The last few pairs are kept.

  Args:
    kind: "dense"; "zeros" (random zeros in both); "one_hot_target";
      "one_hot_draft"; "equal"; "disjoint" (no common token); "mixed" (each
      context is of one of these kinds, drawn at random).
    vocab_size: V, at least 2.
    depth: longest context plus one, in tokens.
    seed: of the random numbers.
  """
  return _tables(kind, vocab_size, seed).up_to(depth)


@functools.lru_cache(maxsize=16)  # all kinds, at two sizes
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
    made = [_random_rows(k, rng, rows, vocab_size) for k in KINDS[:-1]]
    choice = (rng.integers(len(made), size=rows), np.arange(rows))
    return tuple(np.stack(side)[choice] for side in zip(*made))
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
