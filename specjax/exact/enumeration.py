"""Sums of a verifier's law over all drafts of a pair of models."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import jax
import numpy as np

from specjax.exact import drafts
from specjax.exact import pairs
from specjax.exact import schemes
from specjax.exact.compiled import Compiled
from specjax.exact.compiled import Defects
from specjax.exact.compiled import Example
from specjax.exact.compiled import example_of
from specjax.exact.compiled import tails
from specjax.exact.drafts import dense
from specjax.exact.drafts import first_contexts
from specjax.exact.drafts import merged
from specjax.exact.drafts import Starts
from specjax.exact.pairs import Pair
from specjax.interfaces import Verifier
from specjax.types import Verdict
from specjax.utils import fields

# Laws per call of the compiled rule. Compiling a second size for many drafts
# takes longer than its calls save.
CHUNK = 128
_STARTS = 1024  # starts of rounds that are expanded together; limits memory
DRAFTING = ("autoregressive", "product")
TOLERANCE = {"float64": 1e-9, "float32": 1e-5}  # tolerated total variation
_SUMS = 1e-6  # tolerated error of the sum of a distribution
_ENTRIES = 1 << 26  # largest number of entries of an array in an enumeration


class Outcome(NamedTuple):
  """Result of an enumeration for one pair of models.

  Attributes:
    law: `[V**H]` exact distribution of the first H emitted tokens, for a
      vocabulary of V tokens. `enumerate_chains` defines H.
    target: `[V**H]` distribution of the first H tokens under the target model.
    expected_accepted: expected number of accepted tokens in the first round.
    defects: reasons why a law is not a probability distribution.
    laws: number of evaluated laws.
  """

  law: np.ndarray
  target: np.ndarray
  expected_accepted: float
  defects: frozenset[str]
  laws: int

  @property
  def total_variation(self) -> float:
    return 0.5 * float(np.abs(self.law - self.target).sum())


def horizon_of(rule: Verifier, gamma: int, rounds: int) -> int:
  """Returns the number H of compared tokens in `enumerate_chains`."""
  return rounds + gamma + 1 if rule.remembers else rounds * (gamma + 1)


def depth_of(rule: Verifier, gamma: int, rounds: int) -> int:
  """Returns the smallest depth of a `Pair` for `enumerate_chains`."""
  horizon = horizon_of(rule, gamma, rounds)
  return horizon + gamma if rule.remembers else horizon


def enumerate_chains(verifier: Verifier | Compiled, pair: Pair, gamma: int,
                     rounds: int = 1, dtype: str = "float64",
                     drafting: str = "autoregressive", nodes: int = 0,
                     ended: Callable[[drafts.Drafts], drafts.Drafts] | None
                     = None) -> Outcome:
  """Returns the exact output distribution of decoding with chain drafts.

  The compared distribution is that of the first H tokens. The root of the first
  draft is uniform over the vocabulary.

  * Rule without state: H = rounds (gamma + 1). Each sequence begins with
    `rounds` rounds. The target alone generates its further tokens.
  * Rule with state: H = rounds + gamma + 1. Decoding continues until all
    sequences have H tokens. A sequence with one token per round then has at
    least gamma + 1 tokens after its first `rounds` rounds. Sequences with equal
    tokens and state are merged.

  Args:
    verifier: the rule, or a `Compiled` rule.
    pair: models of depth at least `depth_of(verifier, gamma, rounds)`.
    gamma: draft length.
    rounds: number of rounds; determines H.
    dtype: dtype of the law's inputs. Sums over drafts are in float64.
    drafting: "autoregressive" draws each token from `pair.q` after the previous
      tokens. "product" draws the token of each position from its marginal
      distribution under `pair.q`, as independent heads do.
    nodes: number of nodes after padding, at least gamma + 1. 0 means no
      padding.
    ended: function that shortens chains, from `exact.ended_by`, or None.

  Raises:
    ValueError: `drafting` is unknown, the tables are not deep enough or a row
      is not a distribution, a number is too small, or there are too many
      drafts.
  """
  if drafting not in DRAFTING:
    raise ValueError(f"drafting is {drafting!r}; it must be one of "
                     f"{', '.join(DRAFTING)}")
  fields.check_at_least("gamma", gamma, 0)
  fields.check_at_least("rounds", rounds, 1)
  pairs.check_pair(pair)
  check_size(pair.vocab_size, gamma, gamma + 1)
  nodes = max(nodes, gamma + 1)
  scheme = chain_scheme(gamma, drafting, nodes, ended)
  return enumerate_drafts(verifier, pair, scheme, nodes, gamma, rounds, dtype)


def enumerate_trees(verifier: Verifier | Compiled, pair: Pair,
                    parents: Sequence[int], scheme: str | schemes.Scheme,
                    rounds: int = 1, dtype: str = "float64",
                    nodes: int | None = None) -> Outcome:
  """Returns the exact output distribution of decoding with token trees.

  Args:
    verifier: the rule, or a `Compiled` rule.
    pair: models of depth at least rounds * (height + 1).
    parents: N parents with `parents[0] == -1` and `parents[i] < i`.
    scheme: function of `exact.schemes` that draws the tokens, or its name:
      "iid", "paths", "without_replacement", "top_k", "hybrid",
      "several", "larger_of_two", "confident".
    rounds: number of rounds, see `enumerate_chains`, where gamma is the height.
    dtype: dtype of the law's inputs. Sums over drafts are in float64.
    nodes: number of nodes after padding. Trees with equal `nodes` share a
      compiled law. None means no padding.

  Raises:
    ValueError: `nodes` is smaller than N, the tables are not deep enough or a
      row is not a distribution, or there are too many drafts.
  """
  longest, nodes = schemes.height(parents), nodes or len(parents)
  if nodes < len(parents):
    raise ValueError(f"nodes is {nodes}; the tree alone has {len(parents)}")
  pairs.check_pair(pair)
  fields.check_at_least("rounds", rounds, 1)
  check_size(pair.vocab_size, len(parents) - 1, nodes)
  scheme = schemes.named(scheme)
  drafting = lambda q, contexts: schemes.draw(
      scheme, parents, q, contexts).padded(nodes)
  return enumerate_drafts(
      verifier, pair, drafting, nodes, longest, rounds, dtype)


def chain_scheme(gamma: int, drafting: str, nodes: int, ended
                 ) -> Callable[[np.ndarray, np.ndarray], drafts.Drafts]:
  """Returns a function `(q, contexts) -> drafts.Drafts` that draws chains.

  `enumerate_chains` describes the arguments. Chains are padded to `nodes`
  nodes.
  """
  ended = ended or (lambda drafts: drafts)
  return lambda q, contexts: ended(drafts.chains(
      q, contexts, gamma, drafting == "product")).padded(nodes)


def enumerate_drafts(verifier: Verifier | Compiled, pair: Pair,
                     scheme: Callable[[np.ndarray, np.ndarray], drafts.Drafts],
                     nodes: int, longest: int, rounds: int, dtype: str
                     ) -> Outcome:
  """Returns the exact output distribution for drafts of any shape.

  Args:
    verifier: the rule, or a `Compiled` rule.
    pair: models of depth at least `depth_of(verifier, longest, rounds)`.
    scheme: function `(q, contexts) -> drafts.Drafts` that draws the drafts.
    nodes: number of nodes N of the drafts.
    longest: number of tokens on the longest path, without the root.
    rounds: number of rounds, see `enumerate_chains`, where gamma is `longest`.
    dtype: dtype of the law's inputs.
  """
  plan = Plan(Compiled.of(verifier), pair, scheme, nodes, longest, rounds,
              dtype)
  run, starts, expected = plan.run()
  horizon = plan.horizon

  law, target = np.zeros(1), np.ones(1)
  for k in range(horizon + 1):  # the target continues from every context
    if k in starts:
      law = law + dense(starts[k], pair.vocab_size**k)
    if k < horizon:
      law = (law[:, None] * pair.p[k]).reshape(-1)
      target = (target[:, None] * pair.p[k]).reshape(-1)
  return Outcome(law, target, expected, run.defects, run.laws)


class Plan(NamedTuple):
  """Arguments of `enumerate_drafts`, stored to repeat an enumeration."""

  compiled: Compiled
  pair: Any
  scheme: Callable[[np.ndarray, np.ndarray], drafts.Drafts]
  nodes: int
  longest: int
  rounds: int
  dtype: str

  @property
  def horizon(self) -> int:
    return horizon_of(self.compiled.rule, self.longest, self.rounds)

  def run(self, watch: int | None = None
          ) -> tuple["Run", dict[int, Starts], float]:
    """Returns the `Run`, the starts after its last round, and E[tau].

    The starts are a mapping from the length of the contexts. E[tau] is the
    expected number of accepted tokens in the first round.

    Args:
      watch: number of a context, or None. `Run.watched` becomes the draft with
        the largest probability of stopping at this context.

    Raises:
      ValueError: the tables are not deep enough.
    """
    depth = depth_of(self.compiled.rule, self.longest, self.rounds)
    if self.pair.depth < depth:
      raise ValueError(f"the models are {self.pair.depth} deep; {self.rounds} "
                       f"rounds of gamma {self.longest} need {depth}")
    run = Run(self.compiled, self.pair, self.scheme, self.nodes, self.dtype,
              watch)
    return run, *run.rounds(self.rounds, self.horizon)


def check_size(vocab_size: int, drafted: int, nodes: int) -> None:
  """Raises `ValueError` unless all V**(drafted + 1) drafts fit into memory.

  Args:
    vocab_size: vocabulary size V.
    drafted: number of drawn tokens per draft.
    nodes: number of nodes N of a draft, padding included.
  """
  if vocab_size**(drafted + 2) * nodes > _ENTRIES:
    raise ValueError(
        f"vocab_size {vocab_size} with {drafted} drafted tokens has "
        f"{vocab_size}**{drafted + 1} = {float(vocab_size)**(drafted + 1):.1e} "
        "drafts, which do not fit into memory; use a smaller vocabulary or "
        f"shorter drafts, or audit this size: certify(rule, at=[({drafted}, "
        f"{vocab_size})])")


def expected_tokens(verifier: Verifier | Compiled, pair: Pair, gamma: int,
                    rounds: int) -> np.ndarray:
  """Returns the expected numbers `[rounds]` of tokens after 1, 2, ... rounds.

  Args:
    verifier: the rule, or a `Compiled` rule.
    pair: models of depth at least rounds * (gamma + 1).
    gamma: draft length.
    rounds: number of rounds.

  Raises:
    ValueError: see `enumerate_chains`.
  """
  fields.check_at_least("gamma", gamma, 0)
  fields.check_at_least("rounds", rounds, 0)
  pairs.check_pair(pair)
  check_size(pair.vocab_size, gamma, gamma + 1)
  scheme = lambda q, contexts: drafts.chains(q, contexts, gamma)
  run = Run(Compiled.of(verifier), pair, scheme, gamma + 1, "float64")
  starts, totals = {0: run.first()}, []
  for _ in range(rounds):
    starts = merged([run.round(*start) for start in starts.items()],
                     pair.vocab_size)
    totals.append(sum(length * start.weights.sum()
                      for length, start in starts.items()))
  return np.array(totals)


def _accepted(outcomes, length):
  return float(sum((new - length - 1) * found.weights.sum()
                   for new, found in outcomes.items()))


class Run:
  """Evaluates rounds of a rule on a pair of models and collects defects.

  Attributes:
    laws: number of evaluated laws.
    watched: a draft through the watched context (`watch` in `Plan.run`), or
      None.
  """

  def __init__(self, compiled: Compiled, pair, scheme, nodes: int, dtype: str,
               watch: int | None = None):
    self._compiled, self._scheme, self._nodes = compiled, scheme, nodes
    self._vocab, self._dtype = pair.vocab_size, dtype
    self._p, self._q = pair.tables()
    # Number of the first context of every length; see `Drafts`.
    self._offsets = first_contexts(pair.vocab_size, pair.depth)
    self.laws, self.watched, self._watch, self._most = 0, None, watch, 0.0
    self._defects = Defects(dtype, _SUMS, TOLERANCE[dtype])

  @property
  def defects(self) -> frozenset[str]:
    """Reasons why a law is not a distribution, or why figures are wrong."""
    return frozenset(self._defects.names)

  @property
  def example(self) -> Example | None:
    """Draft of the first defect, or None."""
    return self._defects.example

  def rounds(self, count: int, horizon: int
             ) -> tuple[dict[int, Starts], float]:
    """Returns the starts after the last round, and E[tau].

    The starts are a mapping from the length of the contexts. E[tau] is the
    expected number of accepted tokens in the first round.

    Args:
      count: number of rounds for a rule without state.
      horizon: number of tokens at which decoding ends for a rule with state.
    """
    starts, expected = {0: self.first()}, None
    if self._compiled.rule.remembers:
      while starts and min(starts) < horizon:
        length = min(starts)
        outcomes = self.round(length, starts.pop(length), horizon)
        expected = _accepted(outcomes, length) if expected is None else expected
        starts = merged([starts, outcomes], self._vocab)
      return starts, expected
    for _ in range(count):
      outcomes = [self.round(*start) for start in starts.items()]
      expected = _accepted(outcomes[0], 0) if expected is None else expected
      starts = merged(outcomes, self._vocab)
    return starts, expected or 0.0

  def first(self) -> Starts:
    """Returns the empty context with the initial state, once for each root."""
    roots = self._vocab
    state = self._compiled.initial_state(self._nodes - 1, self._dtype)
    return Starts(np.zeros(roots, np.int64),
                  jax.tree.map(lambda x: np.repeat(x[None], roots, axis=0),
                               state), np.full(roots, 1 / roots))

  def round(self, length: int, starts: Starts, horizon: int | None = None
            ) -> dict[int, Starts]:
    """Returns the starts of the next rounds, by the length of their contexts.

    Args:
      length: number of tokens of the contexts in `starts`.
      starts: contexts and states at which this round starts.
      horizon: largest length. Tokens after it and states are dropped. None
        means no limit.
    """
    firsts = range(0, len(starts.weights), _STARTS)
    pieces = [jax.tree.map(lambda x, i=i: x[i:i + _STARTS], starts)
              for i in firsts]
    return merged([self._round(length, piece, horizon, first)
                    for piece, first in zip(pieces, firsts)], self._vocab)

  def _round(self, length, starts, horizon, first):
    found = self._scheme(self._q, self._offsets[length] + starts.contexts)
    weights = found.weights * starts.weights[found.starts]
    if not length:  # the empty context has no last token
      found.tokens[:, 0] = (first + found.starts) % self._vocab
    found, weights = found.rows(weights > 0), weights[weights > 0]
    states = jax.tree.map(lambda x: x[found.starts], starts.states)
    arguments = (found.tokens, found.parents, found.probs,
                 self._p[found.contexts], states)
    stop, next_token = self._laws(arguments, found, weights)
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
    return merged(outcomes, self._vocab)

  def _laws(self, arguments, found, weights):
    """Evaluates and checks the laws of drafts.

    Returns:
      `(stop, next_token)` of `Law` in float64. Rows of `next_token` are 0 for
      nodes with `stop` 0.
    """
    raw_stop, raw_next, figures = self._compiled.laws(
        arguments, CHUNK, self._dtype)
    show = lambda row: example_of(
        arguments, raw_stop, raw_next, row)
    self.laws += len(raw_stop)
    stop, next_token = self._defects.check(raw_stop, raw_next, weights, show)
    stop = stop.astype(np.float64)
    next_token = next_token * (stop > 0)[..., None]
    if figures is not None:
      real = found.probs.any(-1)
      real[:, 0] = True
      in_line = found.parents == np.arange(-1, self._nodes - 1)
      is_chain = not (real & ~in_line).any()
      self._defects.check_figures(
          figures, tails(stop * real, found.parents),
          found.contexts if is_chain else found.contexts[:, :1], weights, show)
    if self._watch is not None:
      # Without a stop at the context, any draft through it shows the error.
      here = (found.contexts == self._watch) * weights[:, None] * (stop + 1e-9)
      if here.max(initial=0) > self._most:
        self._most = here.max()
        row, node = np.unravel_index(np.argmax(here), here.shape)
        self.watched = show(row)._replace(node=node)
    return stop, next_token

  def _committed(self, arguments, tau, node, extra):
    path = np.zeros((len(node), self._nodes), np.int32)
    for depth in range(tau, 0, -1):
      path[:, depth] = node
      node = arguments[1][np.arange(len(node)), node]
    verdict = Verdict(
        path=path, num_accepted=np.full(len(node), tau, np.int32),
        next_token=extra.astype(np.int32))
    return self._compiled.commits(arguments, verdict, CHUNK, self._dtype)
