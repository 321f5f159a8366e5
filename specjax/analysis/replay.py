"""Any verifier judged on a record, without its models.

Given a draft and both models' laws, a rule's expected number of accepted
tokens is known exactly, so no uniform is drawn and rules are compared on the
same drafts. The rounds start where the recorded rule left off: for it the
figures are those of its own rollouts, for another they say what it would accept
there.
"""

from collections.abc import Hashable
from collections.abc import Sequence
import dataclasses
import functools

import jax
import numpy as np

from specjax import interfaces
from specjax.analysis.intervals import Estimate
from specjax.analysis.intervals import estimate
from specjax.analysis.recording import Record
from specjax.interfaces import Verifier
from specjax.trees import topology
from specjax.types import Trace

_ROUNDS_A_CALL = 16  # one shape for all prompts


@dataclasses.dataclass(frozen=True, eq=False)
class Replayed:
  """What a verifier accepts of a record, a pair of arrays for every prompt.

  Attributes:
    expected: `[R]` arrays, E[tau | draft] of every round.
    survival: `[R, N]` arrays, P(tau >= i) as in `RoundStats`.
  """

  expected: tuple[np.ndarray, ...]
  survival: tuple[np.ndarray, ...]

  @property
  def block_efficiency(self) -> float:
    """Tokens of a round: 1 + all expected acceptances over all rounds."""
    return self.estimate().value

  @property
  def mean_survival(self) -> np.ndarray:
    """`[N]`, P(tau >= i) over all rounds, as `best_gamma` takes it."""
    return np.concatenate(self.survival).mean(axis=0, dtype=np.float64)

  def estimate(self, clusters: Sequence[Hashable] | None = None) -> Estimate:
    """Returns `block_efficiency` with its 95 % interval over clusters.

    Args:
      clusters: `[prompts]` labels, see `analysis.estimate`.
    """
    return estimate(lambda accepted, rounds: 1 + accepted / rounds,
                    [x.sum(dtype=np.float64) for x in self.expected],
                    [len(x) for x in self.expected], clusters=clusters)


def evaluate(record: Record, verifier: Verifier) -> Replayed:
  """Judges a verifier on every recorded round.

  Args:
    record: from `record` or `Record.open`.
    verifier: any rule. If it is the one that was recorded, by its repr, its
      state is carried from round to round, and the figures are those of the
      recording. Any other rule that remembers begins every round with a fresh
      state, as a decoder's observers do.

  Raises:
    ValueError: the verifier needs what the recorded drafter does not declare.
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
      # The last call is filled up with its last round, which nobody reads.
      index = np.minimum(first + np.arange(_ROUNDS_A_CALL), rounds - 1)
      part = jax.tree.map(lambda x, index=index: x[index], rollout.trace)
      state, found = _judged(verifier, state, part)
      parts.append(found)
    both = [np.concatenate(x)[:rounds] for x in zip(*jax.device_get(parts))]
    expected.append(both[0])
    survival.append(both[1])
  return Replayed(tuple(expected), tuple(survival))


def online(record: Record) -> Replayed:
  """What the recorded verifier reported while it ran."""
  rollouts = [(r.expected, r.survival) for r in record]
  return Replayed(*zip(*rollouts))


@functools.partial(jax.jit, static_argnames="rule")
def _judged(rule, state, trace: Trace):
  """The state after a few rounds and `([R], [R, N])`, the figures of each."""
  def one_round(state, trace):
    draft, probs = trace.draft, trace.target_probs
    law = rule.evaluate(draft, probs, state)
    found = rule.figures(draft, probs, state, law,
                         topology.depths(draft.parents))
    if state is not None:
      state = rule.next_state(state, draft, probs, trace.verdict)
    return state, found

  return jax.lax.scan(one_round, state, trace)
