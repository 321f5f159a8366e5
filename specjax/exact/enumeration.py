"""Sums a verifier's law over every draft of a pair of models."""

from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import jax
import numpy as np

from specjax import contract
from specjax.exact import drafts
from specjax.exact.compiled import Compiled
from specjax.exact.pairs import Pair
from specjax.types import Verdict
from specjax.types import Verifier

CHUNK = 1024  # laws evaluated in one call: one compiled shape per (V, gamma)
_STARTS = 1024  # rounds expanded at a time: bounds the memory
_DENSE = 1 << 22  # contexts of one length that are counted without sorting
DRAFTING = ("autoregressive", "product")


class Outcome(NamedTuple):
  """What the enumeration finds for one pair of models.

  Attributes:
    law: `[V**H]`, the exact law of the first H tokens.
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


class Starts(NamedTuple):
  """Where rounds start: n contexts of one length, each with a state.

  Attributes:
    contexts: `[n]` int64, rows of the models' tables.
    states: the rule's states, leaves `[n, ...]`; None without one.
    weights: `[n]`, probabilities.
  """

  contexts: np.ndarray
  states: Any
  weights: np.ndarray


def horizon_of(rule: contract.Rule, gamma: int, rounds: int) -> int:
  """Tokens whose joint law `enumerate_chains` returns."""
  return rounds + gamma + 1 if rule.remembers else rounds * (gamma + 1)


def depth_of(rule: contract.Rule, gamma: int, rounds: int) -> int:
  """How deep the tables of a pair must be for `enumerate_chains`."""
  horizon = horizon_of(rule, gamma, rounds)
  return horizon + gamma if rule.remembers else horizon


def first_contexts(vocab_size: int, depth: int) -> np.ndarray:
  """The number of the first context of every length up to `depth`."""
  return np.cumsum([0, *(vocab_size**k for k in range(depth))])


def enumerate_chains(verifier: Verifier | Compiled, pair: Pair, gamma: int,
                     rounds: int = 1, dtype: str = "float64",
                     drafting: str = "autoregressive", nodes: int = 0,
                     ended: Callable[[drafts.Drafts], drafts.Drafts] | None
                     = None) -> Outcome:
  """The exact law of what decoding with chain drafts emits.

  A rule without state runs for `rounds` rounds, after which the target
  continues alone, H = rounds (gamma + 1). One with state (`init` and `commit`)
  has no such end: it goes on for as many rounds as H = rounds + gamma + 1
  tokens take, so that `rounds` rounds are followed by gamma + 1 more tokens
  however few each of them emitted. Equal (tokens, state) are merged.

  Args:
    verifier: any object with `law(draft, target_probs)`, or a `Compiled`.
    pair: tables of at least `depth_of(verifier, gamma, rounds)` contexts.
    gamma: draft length.
    rounds: see above.
    dtype: of the numbers handed to the law; sums are float64 always.
    drafting: "autoregressive": the draft follows `pair.q`; "product": every
      position follows its marginal under `pair.q` given the context in which
      the round starts, as independent heads draft.
    nodes: size to which drafts are padded, see `enumerate_trees`; default:
      none is.
    ended: what ends the chains, `stopping.kept_by` a rule; default: nothing.

  Raises:
    ValueError: `drafting` is neither, or the tables are not deep enough.
  """
  if drafting not in DRAFTING:
    raise ValueError(f"drafting is {drafting!r}; it must be one of "
                     f"{', '.join(DRAFTING)}")
  product = drafting == "product"
  nodes = max(nodes, gamma + 1)
  ended = ended or (lambda drafts: drafts)
  scheme = lambda q, contexts: ended(drafts.chains(
      q, contexts, gamma, product)).padded(nodes)
  return enumerate_drafts(verifier, pair, scheme, nodes, gamma, rounds, dtype)


def enumerate_drafts(verifier: Verifier | Compiled, pair: Pair,
                     scheme: Callable[[np.ndarray, np.ndarray], drafts.Drafts],
                     nodes: int, longest: int, rounds: int, dtype: str,
                     chunk: int = CHUNK) -> Outcome:
  """`enumerate_chains` for drafts of any shape.

  Args:
    verifier: any object with `law(draft, target_probs)`, or a `Compiled`.
    pair: tables of at least `depth_of(verifier, longest, rounds)` contexts.
    scheme: `(q, contexts) -> drafts.Drafts` from given contexts.
    nodes: N of the drafts.
    longest: the most tokens of a path.
    rounds: see `enumerate_chains`, where `longest` is gamma.
    dtype: of the numbers handed to the law.
    chunk: laws evaluated in one call.
  """
  compiled = Compiled.of(verifier)
  depth = depth_of(compiled.rule, longest, rounds)
  if pair.depth < depth:
    raise ValueError(f"the models are {pair.depth} deep; {rounds} rounds of "
                     f"gamma {longest} need {depth}")
  horizon = horizon_of(compiled.rule, longest, rounds)
  run = Run(compiled, pair, scheme, nodes, dtype, chunk)
  starts, expected = run.rounds(rounds, horizon)

  law, target = np.zeros(1), np.ones(1)
  for k in range(horizon + 1):  # the target continues from wherever it stands
    if k in starts:
      law = law + _dense(starts[k], pair.vocab_size**k)
    if k < horizon:
      law = (law[:, None] * pair.p[k]).reshape(-1)
      target = (target[:, None] * pair.p[k]).reshape(-1)
  return Outcome(law, target, expected, frozenset(run.defects), run.laws)


def expected_tokens(verifier: Verifier | Compiled, pair: Pair, gamma: int,
                    rounds: int) -> np.ndarray:
  """`[rounds]`, the expected number of tokens emitted after 1, 2, ... rounds.

  Args:
    verifier: any object with `law(draft, target_probs)`, or a `Compiled`.
    pair: tables of at least rounds * (gamma + 1) contexts deep.
    gamma: draft length.
    rounds: rounds of draft-and-verify.
  """
  scheme = lambda q, contexts: drafts.chains(q, contexts, gamma)
  run = Run(Compiled.of(verifier), pair, scheme, gamma + 1, "float64", CHUNK)
  starts, totals = {0: run.first()}, []
  for _ in range(rounds):
    starts = _merged([run.round(*start) for start in starts.items()],
                     pair.vocab_size)
    totals.append(sum(length * start.weights.sum()
                      for length, start in starts.items()))
  return np.array(totals)


def _accepted(outcomes, length):
  return float(sum((new - length - 1) * found.weights.sum()
                   for new, found in outcomes.items()))


def _dense(starts: Starts, size: int) -> np.ndarray:
  return np.bincount(starts.contexts, starts.weights, minlength=size)


def _counted(contexts, weights, size):
  """Each of `contexts`, numbers below `size`, once, with all of its weight."""
  if size > _DENSE:
    contexts, which = np.unique(contexts, return_inverse=True)
    return contexts, np.bincount(which.reshape(-1), weights)
  dense = np.bincount(contexts, weights, minlength=size)
  contexts = np.flatnonzero(dense)
  return contexts, dense[contexts]


def _merged(outcomes: list[dict[int, Starts]], vocab: int
            ) -> dict[int, Starts]:
  """The starts of all `outcomes`, equal (context, state) as one."""
  lengths = sorted({length for found in outcomes for length in found})
  merged = {}
  for length in lengths:
    parts = [found[length] for found in outcomes if length in found]
    contexts = np.concatenate([part.contexts for part in parts])
    weights = np.concatenate([part.weights for part in parts])
    leaves = [jax.tree.leaves(part.states) for part in parts]
    structure = jax.tree.structure(parts[0].states)
    leaves = [np.concatenate(column) for column in zip(*leaves)]
    if not leaves:
      contexts, weights = _counted(contexts, weights, vocab**length)
      merged[length] = Starts(contexts, parts[0].states, weights)
      continue
    columns = [contexts, *leaves]
    rows = np.concatenate([
        np.ascontiguousarray(x).reshape(len(contexts), -1).view(np.uint8)
        for x in columns], axis=1)
    _, first, which = np.unique(
        rows.view(np.dtype((np.void, rows.shape[1]))).reshape(-1),
        return_index=True, return_inverse=True)
    merged[length] = Starts(
        contexts[first],
        jax.tree.unflatten(structure, [x[first] for x in leaves]),
        np.bincount(which.reshape(-1), weights))
  return merged


class Run:
  """Rounds of one rule on one pair, and what was wrong on the way.

  Attributes:
    defects: ways in which some law was not a probability law.
    laws: number of laws evaluated.
  """

  def __init__(self, compiled: Compiled, pair, scheme, nodes: int, dtype: str,
               chunk: int):
    self._compiled, self._scheme, self._nodes = compiled, scheme, nodes
    self._vocab, self._dtype, self._chunk = pair.vocab_size, dtype, chunk
    self._p, self._q = pair.tables()
    # Of every length, the number of its first context; see `Drafts`.
    self._offsets = first_contexts(pair.vocab_size, pair.depth)
    self.defects, self.laws = set(), 0

  def rounds(self, count: int, horizon: int
             ) -> tuple[dict[int, Starts], float]:
    """Where decoding stands after some rounds, by length, and E[tau].

    Args:
      count: rounds of a rule without state.
      horizon: tokens at which one with state ends.
    """
    starts, expected = {0: self.first()}, None
    if self._compiled.rule.remembers:
      while min(starts) < horizon:
        length = min(starts)
        outcomes = self.round(length, starts.pop(length), horizon)
        expected = _accepted(outcomes, length) if expected is None else expected
        starts = _merged([starts, outcomes], self._vocab)
      return starts, expected
    for _ in range(count):
      outcomes = [self.round(*start) for start in starts.items()]
      expected = _accepted(outcomes[0], 0) if expected is None else expected
      starts = _merged(outcomes, self._vocab)
    return starts, expected

  def first(self) -> Starts:
    """The empty context and the rule's first state."""
    state = self._compiled.initial_state(self._nodes - 1, self._dtype)
    return Starts(np.zeros(1, np.int64),
                  jax.tree.map(lambda x: x[None], state), np.ones(1))

  def round(self, length: int, starts: Starts, horizon: int | None = None
            ) -> dict[int, Starts]:
    """Where decoding stands after one round, by length.

    Tokens after `horizon` are cut off and the state there is dropped.
    """
    pieces = [jax.tree.map(lambda x, i=i: x[i:i + _STARTS], starts)
              for i in range(0, len(starts.weights), _STARTS)]
    return _merged([self._round(length, piece, horizon) for piece in pieces],
                   self._vocab)

  def _round(self, length, starts, horizon):
    found = self._scheme(self._q, self._offsets[length] + starts.contexts)
    weights = found.weights * starts.weights[found.starts]
    found, weights = found.rows(weights > 0), weights[weights > 0]
    states = jax.tree.map(lambda x: x[found.starts], starts.states)
    arguments = (found.tokens, found.parents, found.probs,
                 self._p[found.contexts], states)
    stop, next_token = self._laws(arguments)
    mass = weights[:, None, None] * (stop[..., None] * next_token)

    row, node, extra = np.nonzero(mass)
    mass = mass[row, node, extra]
    after = drafts.longer(found.contexts[row, node], extra, self._vocab)
    lengths = np.searchsorted(self._offsets, after, side="right") - 1
    outcomes = []
    for new_length in np.unique(lengths).tolist():
      these = np.flatnonzero(lengths == new_length)
      contexts = after[these] - self._offsets[new_length]
      new_states = starts.states
      if horizon is not None and new_length >= horizon:
        contexts = contexts // self._vocab**(new_length - horizon)
        new_length, new_states = horizon, None
      elif new_states is not None:
        new_states = self._committed(
            jax.tree.map(lambda x, row=row[these]: x[row], arguments),
            new_length - length - 1, node[these], extra[these])
      outcomes.append({new_length: Starts(contexts, new_states, mass[these])})
    return _merged(outcomes, self._vocab)

  def _laws(self, arguments):
    """`stop` and `next_token` in float64, 0 where they do not count."""
    stop, next_token, gap = self._compiled.laws(
        arguments, self._chunk, self._dtype)
    self.laws += len(stop)
    if not (np.isfinite(stop).all()
            and np.isfinite(next_token[stop > 0]).all()):
      self.defects.add("a law is not finite")
    if (stop < 0).any() or (next_token[stop > 0] < 0).any():
      self.defects.add("a law is negative")
    if (np.abs(stop.sum(-1) - 1) > 1e-6).any():
      self.defects.add("stop does not sum to 1")
    if (np.abs(next_token.sum(-1) - 1)[stop > 0] > 1e-6).any():
      self.defects.add("a row of next_token does not sum to 1")
    if gap is not None and not (gap <= 1e-6).all():
      self.defects.add("by_row is not the law")
    next_token = np.where(stop[..., None] > 0, next_token, 0)
    return (np.nan_to_num(stop).astype(np.float64),
            np.nan_to_num(next_token).astype(np.float64))

  def _committed(self, arguments, tau, node, extra):
    path = np.zeros((len(node), self._nodes), np.int32)
    for depth in range(tau, 0, -1):
      path[:, depth] = node
      node = arguments[1][np.arange(len(node)), node]
    verdict = Verdict(
        path=path, num_accepted=np.full(len(node), tau, np.int32),
        next_token=extra.astype(np.int32))
    return self._compiled.commits(arguments, verdict, self._chunk, self._dtype)
