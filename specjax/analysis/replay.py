"""Evaluation of verifiers on a record, without the recorded models.

The expected number of accepted tokens is an exact function of a rule, a draft
and the probabilities of both models. Rules are therefore compared on the same
drafts, without sampling. Every round starts where the recorded rule ended the
previous round. For the recorded rule, the results describe its own rollouts.
For another rule, they describe its rounds from the same contexts.
"""

from collections.abc import Hashable
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
  expected, survival = [], []
  for rollout in record:
    rounds, state, parts = len(rollout.expected), start, []
    for first in range(0, rounds, _ROUNDS_A_CALL):
      # The last call is padded with copies of its last round.
      index = np.minimum(first + np.arange(_ROUNDS_A_CALL), rounds - 1)
      part = jax.tree.map(lambda x, index=index: x[index], rollout.trace)
      state, figures = _evaluate_rounds(verifier, state, part)
      parts.append(figures)
    both = [np.concatenate(x)[:rounds] for x in zip(*jax.device_get(parts))]
    expected.append(both[0])
    survival.append(both[1])
  return Replayed(tuple(expected), tuple(survival))


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
