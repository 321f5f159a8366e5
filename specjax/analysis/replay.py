"""Evaluation of verifiers on a record, without the recorded models.

The expected number of accepted tokens is an exact function of a rule, a draft
and the probabilities of both models. Rules are therefore compared on the same
drafts, without sampling. Every round starts where the recorded rule ended the
previous round. For the recorded rule, the results describe its own rollouts.
For another rule, they describe its rounds from the same contexts.
"""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import chex
import jax
import numpy as np

from specjax import interfaces
from specjax.analysis import estimates
from specjax.analysis.intervals import Estimate
from specjax.analysis.recording import Record
from specjax.interfaces import Verifier
from specjax.trees import topology
from specjax.types import Trace
from specjax.utils import fields

_ROUNDS_A_CALL = 16  # rounds per call; one size, so one compiled program


@dataclasses.dataclass(frozen=True, eq=False)
class Replayed:
  """Expected acceptance of a verifier on every prompt of a record.

  tau is the number of accepted tokens of a round. N is the number of nodes of a
  draft.

  Attributes:
    expected: one array `[R]` per prompt: E[tau | draft] of each of R rounds.
    survival: one array `[R, N]` per prompt: P(tau >= i | draft) for i = 0..N-1,
      as in `RoundStats`.
  """

  expected: tuple[np.ndarray, ...]
  survival: tuple[np.ndarray, ...]

  @property
  def block_efficiency(self) -> float:
    """Tokens per round: 1 + mean of `expected` over all rounds."""
    return self.estimate().value

  @property
  def mean_survival(self) -> np.ndarray:
    """`[N]` mean of P(tau >= i) over all rounds, for `best_gamma`."""
    return np.concatenate(self.survival).mean(axis=0, dtype=np.float64)

  def estimate(self, clusters: Sequence[Hashable] | None = None) -> Estimate:
    """Returns `block_efficiency` with its 95 % interval over clusters.

    Args:
      clusters: `[prompts]` labels of clusters, see `analysis.estimate`.
    """
    return estimates.block_efficiency(
        [x.sum(dtype=np.float64) for x in self.expected],
        [len(x) for x in self.expected], clusters,
        longest=self.survival[0].shape[1] - 1)


def evaluate(record: Record, verifier: Verifier) -> Replayed:
  """Returns the expected acceptance of a verifier on every recorded round.

  `record` has an example.

  Args:
    record: the result of `record` or `Record.open`.
    verifier: any rule. If its repr equals that of the recorded rule, its state
      continues from round to round, and the results equal the recorded ones.
      Another rule with state starts every round with its initial state, like
      the observers of a decoder.

  Raises:
    ValueError: the verifier requires a property that the recorded drafter does
      not declare.
  """
  interfaces.check_pair(verifier, f"the drafter of {record.path}",
                      record.manifest["drafter_is"])
  start = None
  if repr(verifier) == record.manifest["verifier"] and verifier.remembers:
    start = verifier.init(record.manifest["num_nodes"] - 1)
  return Replayed(*zip(*(_figures(verifier, start, rollout.trace)
                         for rollout in record)))


def evaluate_budget(record: Record, verifier: Verifier,
                    budget: Callable[[jax.Array, jax.Array], jax.Array],
                    rows: int) -> Replayed:
  """Returns the expected acceptance if `rows` prompts share a budget.

  Consecutive prompts of the record form batches. Round t of a batch has the
  recorded rounds t of its prompts. The budget cuts the drafts before the rule
  evaluates them. Rounds after the end of a batch's shortest prompt are omitted,
  and so are prompts that do not fill a batch.

  Args:
    record: recorded chains, from `record` or `Record.open`.
    verifier: rule without state.
    budget: function `(probs [rows, gamma, V], tokens [rows, gamma]) -> lengths
      [rows]` that returns the numbers of verified tokens, such as `best_first`
      of scores. `certify_budget` tests whether it keeps the output's
      distribution. This function does not.
    rows: number of rows of a batch, at most the number of prompts.

  Raises:
    ValueError: the rule has a state or requires a property that the recorded
      drafter does not declare, the recorded drafts are trees, or the record has
      fewer than `rows` prompts.
  """
  interfaces.check_pair(verifier, f"the drafter of {record.path}",
                      record.manifest["drafter_is"])
  if verifier.remembers:
    raise ValueError(f"verifier is {verifier!r}, which has a state; a budget "
                     "is evaluated with a rule without state, such as Block()")
  if "chain" not in record.manifest["drafter_is"]:
    raise ValueError(f"record is {record.path}, whose drafts are trees; a "
                     "budget cuts chains")
  fields.check_at_least("rows", rows, 1)
  if len(record) < rows:
    raise ValueError(f"rows is {rows}; the record has {len(record)} prompts: "
                     "use smaller batches")
  share = jax.jit(jax.vmap(budget, in_axes=1, out_axes=1))

  def figures() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    batch = []
    for rollout in record:
      batch.append(rollout.trace)
      if len(batch) == rows:
        for trace in _cut(batch, share):
          yield _figures(verifier, None, trace)
        batch = []

  return Replayed(*zip(*figures()))


def _cut(batch: Sequence[Trace], share: Callable[..., jax.Array]
         ) -> list[Trace]:
  """Returns the traces of a batch, up to its shortest one, with cut drafts.

  `share(probs [rows, R, gamma, V], tokens [rows, R, gamma])` returns the
  numbers `[rows, R]` of verified tokens.
  """
  rounds = min(len(trace.draft.tokens) for trace in batch)
  # One number of rounds per call, so that the budget compiles once.
  index = np.minimum(np.arange(-(-rounds // _ROUNDS_A_CALL) * _ROUNDS_A_CALL),
                     rounds - 1)
  probs, tokens = (np.stack([x[index, 1:] for x in rows]) for rows in (
      [trace.draft.probs for trace in batch],
      [trace.draft.tokens for trace in batch]))
  lengths = np.concatenate([
      share(probs[:, i:i + _ROUNDS_A_CALL], tokens[:, i:i + _ROUNDS_A_CALL])
      for i in range(0, len(index), _ROUNDS_A_CALL)], axis=1)
  cut = []
  for trace, verified in zip(batch, lengths[:, :rounds, None]):
    trace = jax.tree.map(lambda x: x[:rounds], trace)
    draft = trace.draft
    kept = np.arange(draft.tokens.shape[1]) <= verified
    cut.append(trace.replace(draft=draft.replace(
        probs=draft.probs * kept[..., None])))
  return cut


def _figures(verifier: Verifier, state: chex.ArrayTree, trace: Trace
             ) -> tuple[np.ndarray, np.ndarray]:
  """Returns `expected [R]` and `survival [R, N]` of R rounds."""
  rounds, parts = len(trace.draft.tokens), []
  for first in range(0, rounds, _ROUNDS_A_CALL):
    # The last call is padded with copies of its last round.
    index = np.minimum(first + np.arange(_ROUNDS_A_CALL), rounds - 1)
    part = jax.tree.map(lambda x, index=index: x[index], trace)
    state, figures = _evaluate_rounds(verifier, state, part)
    parts.append(figures)
  return tuple(np.concatenate(x)[:rounds]
               for x in zip(*jax.device_get(parts)))


def online(record: Record) -> Replayed:
  """Returns the expected acceptance stored in the record while decoding."""
  rollouts = [(r.expected, r.survival) for r in record]
  return Replayed(*zip(*rollouts))


@functools.partial(jax.jit, static_argnames="rule")
def _evaluate_rounds(rule: Verifier, state: chex.ArrayTree, trace: Trace
                     ) -> tuple[Any, tuple[jax.Array, jax.Array]]:
  """Returns the rule's state after R rounds, and their statistics.

  The statistics are `expected [R]` and `survival [R, N]`, see `Replayed`.
  """
  def evaluate_round(state, trace):
    draft, probs = trace.draft, trace.target_probs
    law = rule.evaluate(draft, probs, state)
    figures = rule.figures(draft, probs, state, law,
                           topology.depths(draft.parents))
    if state is not None:
      state = rule.next_state(state, draft, probs, trace.verdict)
    return state, figures

  return jax.lax.scan(evaluate_round, state, trace)
