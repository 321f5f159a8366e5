"""Sums a verifier's law over every draft of a pair of models."""

import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.exact.pairs import Pair
from specjax.types import Draft
from specjax.types import Verdict

_CHUNK = 8192  # laws evaluated in one call: one compiled shape per (V, gamma)
_STARTS = 1024  # rounds expanded at a time: bounds the memory
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


class _Starts(NamedTuple):
  """Where rounds start: n contexts of one length, each with a state.

  Attributes:
    contexts: `[n]` int64, rows of the models' tables.
    states: the verifier's states, leaves `[n, ...]`; None without one.
    weights: `[n]`, probabilities.
  """

  contexts: np.ndarray
  states: Any
  weights: np.ndarray


def remembers(verifier) -> bool:
  """Whether the verifier carries a state from round to round."""
  return hasattr(verifier, "commit")


def horizon_of(verifier, gamma: int, rounds: int) -> int:
  """Tokens whose joint law `enumerate_chains` returns."""
  return rounds + gamma + 1 if remembers(verifier) else rounds * (gamma + 1)


def depth_of(verifier, gamma: int, rounds: int) -> int:
  """How deep the tables of a pair must be for `enumerate_chains`."""
  horizon = horizon_of(verifier, gamma, rounds)
  return horizon + gamma if remembers(verifier) else horizon


def enumerate_chains(verifier, pair: Pair, gamma: int, rounds: int = 1,
                     dtype="float64", drafting="autoregressive") -> Outcome:
  """The exact law of what decoding with chain drafts emits.

  A rule without state runs for `rounds` rounds, after which the target
  continues alone, H = rounds (gamma + 1). One with state (`init` and `commit`)
  has no such end: it goes on for as many rounds as H = rounds + gamma + 1
  tokens take, so that `rounds` rounds are followed by gamma + 1 more tokens
  however few each of them emitted. Equal (tokens, state) are merged.

  Args:
    verifier: any object with `law(draft, target_probs, state=None)`.
    pair: tables of at least `depth_of(verifier, gamma, rounds)` contexts.
    gamma: draft length.
    rounds: see above.
    dtype: of the numbers handed to the law; sums are float64 always.
    drafting: "autoregressive": the draft follows `pair.q`; "product": every
      position follows its marginal under `pair.q` given the context in which
      the round starts, as independent heads draft.
  """
  if drafting not in DRAFTING:
    raise ValueError(f"drafting is {drafting!r}; it must be one of "
                     f"{', '.join(DRAFTING)}")
  depth = depth_of(verifier, gamma, rounds)
  if len(pair.p) < depth or len(pair.q) < depth:
    raise ValueError(f"the models are {len(pair.p)} deep; {rounds} rounds of "
                     f"gamma {gamma} need {depth}")
  horizon = horizon_of(verifier, gamma, rounds)
  run = _Run(verifier, pair, gamma, dtype, drafting)
  starts = {0: run.first()}
  expected = None
  if remembers(verifier):
    while min(starts) < horizon:
      length = min(starts)
      outcomes = run.round(length, starts.pop(length), horizon)
      expected = _accepted(outcomes, length) if expected is None else expected
      starts = _merged([starts, outcomes], pair.vocab_size)
  else:
    for _ in range(rounds):
      outcomes = [run.round(*start) for start in starts.items()]
      expected = _accepted(outcomes[0], 0) if expected is None else expected
      starts = _merged(outcomes, pair.vocab_size)

  law, target = np.zeros(1), np.ones(1)
  for k in range(horizon + 1):  # the target continues from wherever it stands
    if k in starts:
      law = law + _dense(starts[k], pair.vocab_size**k)
    if k < horizon:
      law = (law[:, None] * pair.p[k]).reshape(-1)
      target = (target[:, None] * pair.p[k]).reshape(-1)
  return Outcome(law, target, expected, frozenset(run.defects), run.laws)


def expected_tokens(verifier, pair: Pair, gamma: int, rounds: int
                    ) -> np.ndarray:
  """`[rounds]`, the expected number of tokens emitted after 1, 2, ... rounds.

  Args:
    verifier: any object with `law(draft, target_probs, state=None)`.
    pair: tables of at least rounds * (gamma + 1) contexts deep.
    gamma: draft length.
    rounds: rounds of draft-and-verify.
  """
  run = _Run(verifier, pair, gamma, "float64", "autoregressive")
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


def _dense(starts: _Starts, size: int) -> np.ndarray:
  return np.bincount(starts.contexts, starts.weights, minlength=size)


def _merged(outcomes: list[dict[int, _Starts]], vocab: int
            ) -> dict[int, _Starts]:
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
      dense = np.bincount(contexts, weights, minlength=vocab**length)
      contexts = np.flatnonzero(dense)
      merged[length] = _Starts(contexts, parts[0].states, dense[contexts])
      continue
    columns = [contexts, *leaves]
    rows = np.concatenate([
        np.ascontiguousarray(x).reshape(len(contexts), -1).view(np.uint8)
        for x in columns], axis=1)
    _, first, which = np.unique(
        rows.view(np.dtype((np.void, rows.shape[1]))).reshape(-1),
        return_index=True, return_inverse=True)
    merged[length] = _Starts(
        contexts[first],
        jax.tree.unflatten(structure, [x[first] for x in leaves]),
        np.bincount(which.reshape(-1), weights))
  return merged


class _Run:
  """Rounds of one verifier on one pair, and what was wrong on the way."""

  def __init__(self, verifier, pair, gamma, dtype, drafting):
    self._verifier, self._pair, self._gamma = verifier, pair, gamma
    self._dtype, self._drafting = dtype, drafting
    self.defects, self.laws = set(), 0

  def first(self) -> _Starts:
    """The empty context and the verifier's first state."""
    state = None
    if hasattr(self._verifier, "init"):
      state = jax.tree.map(lambda x: self._as_number(x)[None],
                           self._verifier.init(self._gamma))
    return _Starts(np.zeros(1, np.int64), state, np.ones(1))

  def _as_number(self, x):
    x = np.asarray(x)
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    return x.astype(self._dtype) if is_float else x

  def round(self, length: int, starts: _Starts, horizon: int | None = None
            ) -> dict[int, _Starts]:
    """Where decoding stands after one round, by length.

    Tokens behind `horizon` are cut off and the state there is dropped.
    """
    pieces = [jax.tree.map(lambda x, i=i: x[i:i + _STARTS], starts)
              for i in range(0, len(starts.weights), _STARTS)]
    return _merged([self._round(length, piece, horizon) for piece in pieces],
                   self._pair.vocab_size)

  def _round(self, length, starts, horizon):
    vocab, gamma = self._pair.vocab_size, self._gamma
    tokens, drawn, q, p = self._drafts(length, starts.contexts)
    start, draft = np.nonzero(drawn * starts.weights[:, None])
    states = jax.tree.map(lambda x: x[start], starts.states)
    arguments = (tokens[draft], q[start, draft], p[start, draft], states)
    stop, next_token = self._laws(arguments)
    mass = (starts.weights[start] * drawn[start, draft])[:, None, None] * (
        stop[..., None] * next_token)

    found = []
    for tau in range(gamma + 1):
      row, extra = np.nonzero(mass[:, tau])
      if not len(row):
        continue
      new_length = length + tau + 1
      accepted = draft[row] // vocab**(gamma - tau)
      contexts = ((starts.contexts[start[row]] * vocab**tau + accepted)
                  * vocab + extra)
      new_states = starts.states
      if horizon is not None and new_length >= horizon:
        contexts = contexts // vocab**(new_length - horizon)
        new_length, new_states = horizon, None
      elif new_states is not None:
        new_states = self._committed(
            jax.tree.map(lambda x, row=row: x[row], arguments), tau, extra)
      found.append({new_length: _Starts(contexts, new_states,
                                        mass[row, tau, extra])})
    return _merged(found, vocab)

  def _drafts(self, length, contexts):
    """Every draft behind every context, as it may be drawn.

    Returns:
      tokens `[V**gamma, gamma]`, their probability `[n, V**gamma]`, the rows
      of q `[n, V**gamma, gamma, V]` and of p `[n, V**gamma, gamma + 1, V]`.
    """
    vocab, gamma = self._pair.vocab_size, self._gamma
    drafts = np.arange(vocab**gamma)
    prefix = [drafts // vocab**(gamma - i) for i in range(gamma + 1)]
    row = lambda tables, i: tables[length + i][
        contexts[:, None] * vocab**i + prefix[i]]
    tokens = np.stack([prefix[i + 1] % vocab for i in range(gamma)],
                      axis=-1).reshape(len(drafts), gamma)
    p = np.stack([row(self._pair.p, i) for i in range(gamma + 1)], axis=2)
    q = [row(self._pair.q, i) for i in range(gamma)]
    if self._drafting == "product":
      q = self._marginals(q, tokens)
    drawn = np.ones((len(contexts), len(drafts)))
    for i in range(gamma):
      drawn = drawn * q[i][:, drafts, tokens[:, i]]
    return tokens, drawn, np.stack(q, axis=2), p

  def _marginals(self, q, tokens):
    """The law of each position given the start of the round alone."""
    # Every prefix of i tokens appears once for each of its continuations.
    vocab, gamma = self._pair.vocab_size, self._gamma
    drafts = np.arange(len(tokens))
    reach, marginals = np.ones(q[0].shape[:2]), []
    for i in range(gamma):
      marginal = (reach[..., None] * q[i]).sum(1) / vocab**(gamma - i)
      marginals.append(np.repeat(marginal[:, None], len(tokens), 1))
      reach = reach * q[i][:, drafts, tokens[:, i]]
    return marginals

  def _laws(self, arguments):
    """`stop` and `next_token` in float64, 0 where they do not count."""
    stop, next_token = self._in_chunks(_law_function, arguments)
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
    next_token = np.where(stop[..., None] > 0, next_token, 0)
    return (np.nan_to_num(stop).astype(np.float64),
            np.nan_to_num(next_token).astype(np.float64))

  def _committed(self, arguments, tau, extra):
    nodes = np.arange(self._gamma + 1)
    rows = len(extra)
    verdict = Verdict(
        path=np.tile(np.where(nodes <= tau, nodes, 0).astype(np.int32),
                     (rows, 1)),
        num_accepted=np.full(rows, tau, np.int32),
        next_token=extra.astype(np.int32))
    return self._in_chunks(_commit_function, (*arguments, verdict))

  def _in_chunks(self, make, arguments):
    """A compiled, vmapped function of many rows, `_CHUNK` rows at a time."""
    try:
      function = make(self._verifier)
    except TypeError:  # not hashable: a class that is not a frozen dataclass
      function = make.__wrapped__(self._verifier)
    tokens, q, p, *rest = arguments
    arguments = (tokens.astype(np.int32), q.astype(self._dtype),
                 p.astype(self._dtype), *rest)
    rows, results = len(tokens), []
    with jax.enable_x64(True):
      for start in range(0, rows, _CHUNK):
        size = min(_CHUNK, rows - start)
        pad = lambda x, start=start, size=size: np.concatenate(
            [x[start:start + size], np.repeat(x[:1], _CHUNK - size, 0)])
        result = function(*jax.tree.map(pad, arguments))
        results.append(jax.tree.map(
            lambda x, size=size: np.asarray(x)[:size], result))
    return jax.tree.map(lambda *x: np.concatenate(x), *results)


@functools.lru_cache(maxsize=64)
def _law_function(verifier):
  def law(tokens, q, p, state):
    draft = Draft.chain(0, tokens, q)
    found = (verifier.law(draft, p) if state is None
             else verifier.law(draft, p, state))
    return found.stop, found.next_token

  return jax.jit(jax.vmap(law))


@functools.lru_cache(maxsize=64)
def _commit_function(verifier):
  def commit(tokens, q, p, state, verdict):
    return verifier.commit(state, Draft.chain(0, tokens, q), p, verdict)

  return jax.jit(jax.vmap(commit))
