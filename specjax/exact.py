"""The exact output law of a verifier, by enumeration of the code that ships.

A verifier returns the law of its outcome, so nothing has to be sampled: the
law is evaluated on every draft of a small context-dependent model pair and
summed, sum_x q(x) * stop * next_token, which is the joint law of everything
that decoding emits. A rule is lossless iff that equals the target's.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.types import Draft

_CHUNK = 8192  # laws evaluated in one call: one compiled shape per (V, gamma)
_TOLERANCE = {"float64": 1e-9, "float32": 1e-5}
_KINDS = ("dense", "zeros", "one_hot_target", "one_hot_draft", "equal",
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


def iid_pair(p, q, depth: int) -> Pair:
  """The pair that draws every token from `p [V]`, `q [V]` in any context."""
  p, q = np.asarray(p, np.float64), np.asarray(q, np.float64)
  tables = lambda row: [np.tile(row, (len(row)**d, 1)) for d in range(depth)]
  return Pair(tables(p), tables(q))


def random_pair(kind: str, vocab_size: int, depth: int, seed: int) -> Pair:
  """A random pair with another conditional after every context.

  Args:
    kind: "dense"; "zeros" (random zeros in both); "one_hot_target";
      "one_hot_draft"; "equal"; "disjoint" (no common token); "mixed" (each
      context is of one of these kinds, drawn at random).
    vocab_size: V, at least 2.
    depth: longest context plus one, in tokens.
    seed: of the random numbers.
  """
  rng = np.random.default_rng([_KINDS.index(kind), vocab_size, seed])
  tables = [_random_rows(kind, rng, vocab_size**d, vocab_size)
            for d in range(depth)]
  return Pair([p for p, _ in tables], [q for _, q in tables])


def _random_rows(kind, rng, rows, vocab_size):
  if kind == "mixed":
    made = [_random_rows(k, rng, rows, vocab_size) for k in _KINDS[:-1]]
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


class Outcome(NamedTuple):
  """What the enumeration finds for one pair of models.

  Attributes:
    law: `[V**H]`, the exact law of the first H = rounds * (gamma + 1) tokens.
    target: `[V**H]`, the target's.
    expected_accepted: E[tau] of the first round.
    defects: ways in which some law was not a probability law.
    laws: number of laws evaluated.
  """

  law: np.ndarray
  target: np.ndarray
  expected_accepted: float
  defects: frozenset[str]
  laws: int

  @property
  def total_variation(self) -> float:
    return 0.5 * float(np.abs(self.law - self.target).sum())


def enumerate_chains(verifier, pair: Pair, gamma: int, rounds: int = 1,
                     dtype="float64") -> Outcome:
  """The exact law of what decoding with chain drafts emits.

  Args:
    verifier: any object with `law(draft, target_probs)`.
    pair: tables of at least rounds * (gamma + 1) contexts deep.
    gamma: draft length.
    rounds: rounds of draft-and-verify before the target continues alone.
    dtype: of the numbers handed to the law; sums are float64 always.
  """
  vocab, horizon = pair.vocab_size, rounds * (gamma + 1)
  if len(pair.p) < horizon or len(pair.q) < horizon:
    raise ValueError(f"the models are {len(pair.p)} deep; {rounds} rounds of "
                     f"gamma {gamma} need {horizon}")
  # mass[k]: probability that a round starts, or decoding ends, after each of
  # the V**k contexts of k tokens.
  mass = {0: np.ones(1)}
  expected, count, defects = 0.0, 0, set()
  for round_index in range(rounds):
    emitted = {}
    for length, weights in mass.items():
      if not weights.any():
        continue
      outcome, found, evaluated = _one_round(
          verifier, pair, gamma, length, weights, dtype)
      defects |= found
      count += evaluated
      for tau, rows in enumerate(outcome):
        if round_index == 0:
          expected += tau * rows.sum()
        total = emitted.setdefault(length + tau + 1,
                                   np.zeros(vocab**(length + tau + 1)))
        total += rows
    mass = emitted
  law, target = np.zeros(1), np.ones(1)
  for k in range(horizon + 1):  # the target continues from wherever it stands
    law = law + mass.get(k, 0)
    if k < horizon:
      law = (law[:, None] * pair.p[k]).reshape(-1)
      target = (target[:, None] * pair.p[k]).reshape(-1)
  return Outcome(law, target, expected, frozenset(defects), count)


def _one_round(verifier, pair, gamma, length, weights, dtype):
  """Mass of every (context, accepted prefix, extra token), per tau."""
  vocab = pair.vocab_size
  live = np.flatnonzero(weights)
  drafts = np.arange(vocab**gamma)
  prefix = [drafts // vocab**(gamma - i) for i in range(gamma + 1)]
  row = lambda table, i: table[length + i][live[:, None] * vocab**i + prefix[i]]
  p = np.stack([row(pair.p, i) for i in range(gamma + 1)], axis=2)
  tokens = np.stack([prefix[i + 1] % vocab for i in range(gamma)],
                    axis=-1).reshape(len(drafts), gamma)
  q = np.zeros((len(live), len(drafts), gamma, vocab))
  drawn = np.ones((len(live), len(drafts)))
  for i in range(gamma):
    q[:, :, i] = row(pair.q, i)
    drawn *= np.take_along_axis(q[:, :, i], tokens[None, :, i:i + 1], 2)[..., 0]

  possible = drawn.reshape(-1) > 0
  flat = lambda x: x.reshape(-1, *x.shape[2:])
  stop, next_token, defects = _evaluate(
      verifier, np.tile(tokens, (len(live), 1))[possible],
      flat(q)[possible].astype(dtype), flat(p)[possible].astype(dtype))
  shape = (len(live), len(drafts))
  full_stop = np.zeros((drawn.size, gamma + 1))
  full_next = np.zeros((drawn.size, gamma + 1, vocab))
  full_stop[possible], full_next[possible] = stop, next_token
  joint = (weights[live, None] * drawn)[..., None, None] * (
      full_stop[..., None] * full_next).reshape(*shape, gamma + 1, vocab)

  outcome = []
  for tau in range(gamma + 1):
    rows = joint[:, :, tau].reshape(
        len(live), vocab**tau, vocab**(gamma - tau), vocab).sum(2)
    full = np.zeros((vocab**length, vocab**(tau + 1)))
    full[live] = rows.reshape(len(live), -1)
    outcome.append(full.reshape(-1))
  return outcome, defects, int(possible.sum())


@functools.lru_cache(maxsize=64)
def _law_function(verifier):
  def law(tokens, q, p):
    return verifier.law(Draft.chain(0, tokens, q), p)

  return jax.jit(jax.vmap(law))


def _evaluate(verifier, tokens, q, p):
  """The verifier's laws on many chains, and what is wrong with them."""
  try:
    law_function = _law_function(verifier)
  except TypeError:  # not hashable: a class that is not a frozen dataclass
    law_function = _law_function.__wrapped__(verifier)
  stops, next_tokens = [], []
  with jax.enable_x64(True):
    for start in range(0, len(p), _CHUNK):
      chunk = [x[start:start + _CHUNK] for x in (tokens, q, p)]
      size = len(chunk[0])
      chunk = [np.concatenate([x, np.repeat(x[:1], _CHUNK - size, 0)])
               for x in chunk]
      law = law_function(jnp.asarray(chunk[0], jnp.int32), *chunk[1:])
      stops.append(np.asarray(law.stop, np.float64)[:size])
      next_tokens.append(np.asarray(law.next_token, np.float64)[:size])
  stop, next_token = np.concatenate(stops), np.concatenate(next_tokens)
  defects = set()
  if not (np.isfinite(stop).all() and np.isfinite(next_token[stop > 0]).all()):
    defects.add("a law is not finite")
  if (stop < 0).any() or (next_token[stop > 0] < 0).any():
    defects.add("a law is negative")
  if (np.abs(stop.sum(-1) - 1) > 1e-6).any():
    defects.add("stop does not sum to 1")
  if (np.abs(next_token.sum(-1) - 1)[stop > 0] > 1e-6).any():
    defects.add("a row of next_token does not sum to 1")
  next_token = np.where(stop[..., None] > 0, next_token, 0)
  return np.nan_to_num(stop), np.nan_to_num(next_token), defects


def full_information_optimum(pair: Pair, gamma: int) -> float:
  """The most draft tokens that any coupling accepts in one round.

  sum_{i=1..gamma} sum_{x^i} min(p(x^i), q(x^i)): Lemma 8 of arXiv:2403.10444.
  """
  total, p, q = 0.0, np.ones(1), np.ones(1)
  for d in range(gamma):
    p, q = ((joint[:, None] * table[d]).reshape(-1)
            for joint, table in ((p, pair.p), (q, pair.q)))
    total += float(np.minimum(p, q).sum())
  return total


@dataclasses.dataclass(frozen=True)
class Certificate:
  """What `certify` found.

  Attributes:
    lossless: every law was a probability law and no total variation exceeded
      the tolerance.
    total_variation: the worst over all models.
    witness: the model that shows it: `random_pair`'s arguments, gamma, rounds.
    expected_tokens: tokens of one round, averaged over the models tried.
    bound: the average of what no verifier can exceed on those models, with
      full information about both of them (1 + Lemma 8).
    defects: ways in which a law was not a probability law.
    models: pairs of models enumerated.
    laws: laws evaluated.
    dtype: of the numbers handed to the law.
  """

  lossless: bool
  total_variation: float
  witness: dict[str, Any]
  expected_tokens: float
  bound: float
  defects: tuple[str, ...]
  models: int
  laws: int
  dtype: str

  def __str__(self):
    where = ", ".join(f"{k}={v}" for k, v in self.witness.items())
    lines = [
        "lossless" if self.lossless else "NOT LOSSLESS",
        f"  worst total variation  {self.total_variation:.2e}  ({where})",
        f"  tokens per round       {self.expected_tokens:.4f}",
        f"  full-information bound {self.bound:.4f}",
        f"  enumerated             {self.models} models, {self.laws:,} laws, "
        f"{self.dtype}",
    ]
    return "\n".join(lines + [f"  defect: {d}" for d in self.defects])


def certify(verifier, *, vocab_sizes=(3, 4), gammas=(1, 2, 3, 4), rounds=2,
            seeds=(0,), kinds=_KINDS, dtype="float64") -> Certificate:
  """Proves a verifier on chains lossless, or shows the model where it is not.

  Two vocabularies are the least worth trying: with V = 2 most real bugs do
  not show, nor do they where the models ignore their context.

  Args:
    verifier: any object with `law(draft, target_probs)`.
    vocab_sizes: V, each at least 2.
    gammas: draft lengths, each at least 1.
    rounds: rounds of the loop before the target continues alone. One is a
      proof for a rule without state, by induction.
    seeds: one set of random models for each.
    kinds: see `random_pair`.
    dtype: "float64" or "float32".

  Returns:
    A `Certificate`; print it.
  """
  if dtype not in _TOLERANCE:
    raise ValueError(f"dtype is {dtype!r}; it must be 'float64' or 'float32'")
  if not gammas or min(gammas) < 1:
    raise ValueError(f"gammas is {gammas}; every draft length must be at "
                     "least 1")
  worst, witness, defects = -1.0, {}, set()
  expected, bounds, laws = [], [], 0
  for vocab_size, gamma, kind, seed in itertools.product(
      vocab_sizes, gammas, kinds, seeds):
    pair = random_pair(kind, vocab_size, rounds * (gamma + 1), seed)
    found = enumerate_chains(verifier, pair, gamma, rounds, dtype)
    laws += found.laws
    defects |= found.defects
    expected.append(1 + found.expected_accepted)
    bounds.append(1 + full_information_optimum(pair, gamma))
    if found.total_variation > worst:
      worst = found.total_variation
      witness = dict(kind=kind, vocab_size=vocab_size, seed=seed, gamma=gamma,
                     rounds=rounds)
  return Certificate(
      lossless=worst <= _TOLERANCE[dtype] and not defects,
      total_variation=worst, witness=witness,
      expected_tokens=math.fsum(expected) / len(expected),
      bound=math.fsum(bounds) / len(bounds), defects=tuple(sorted(defects)),
      models=len(expected), laws=laws, dtype=dtype)
