"""Estimates from samples of unequal size."""

from collections.abc import Hashable
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from specjax.analysis.intervals import Estimate
from specjax.analysis.intervals import estimate


def ratio_estimate(totals: ArrayLike, counts: ArrayLike,
                   clusters: Sequence[Hashable] | None = None,
                   least: float = -np.inf, most: float = np.inf) -> Estimate:
  """Returns sum(totals) / sum(counts), with its 95 % interval over clusters.

  Rounds of one prompt are correlated. The observations are therefore prompts
  and not rounds (Cochran 1977, Sampling Techniques, chapter 6). `estimate`
  computes the interval.

  Args:
    totals: `[n]` sums over the rounds of each prompt.
    counts: `[n]` numbers of rounds of each prompt.
    clusters: `[n]` labels, equal for prompts of one cluster. None means that
      each prompt is a cluster.
    least: smallest possible ratio, such as 0 for a probability.
    most: largest possible ratio.

  Raises:
    ValueError: the lengths differ, or all counts are 0.
  """
  _check_rounds(counts)
  return estimate(lambda total, count: total / count, totals, counts,
                  clusters=clusters, least=least, most=most)


def block_efficiency(accepted: ArrayLike, rounds: ArrayLike,
                     clusters: Sequence[Hashable] | None = None, *,
                     longest: float = np.inf, target_calls: int = 1
                     ) -> Estimate:
  """Returns the number of tokens per target call, with its 95 % interval.

  A round has one token more than it accepts. The interval of `estimate`
  contains only values that are possible.

  >>> found = block_efficiency([4, 6, 2, 9, 3], [2, 4, 2, 3, 3], longest=4)
  >>> f"{found:.2f}"
  '2.71 [1.91, 5.00] n=5'

  Args:
    accepted: `[n]` accepted tokens of each prompt, or their expectations.
    rounds: `[n]` numbers of rounds of each prompt.
    clusters: `[n]` labels, equal for prompts of one cluster. None means that
      each prompt is a cluster.
    longest: largest number of accepted tokens in a round, such as the draft
      length.
    target_calls: target calls in a round, see `Drafter.target_calls`.

  Raises:
    ValueError: the lengths differ, or all rounds are 0.
  """
  _check_rounds(rounds)
  return estimate(lambda total, count: (1 + total / count) / target_calls,
                  accepted, rounds, clusters=clusters, least=1 / target_calls,
                  most=(1 + longest) / target_calls)


def relative_gain(totals: ArrayLike, counts: ArrayLike, base_totals: ArrayLike,
                  base_counts: ArrayLike,
                  clusters: Sequence[Hashable] | None = None, *,
                  longest: float = np.inf) -> Estimate:
  """Returns (1 + ratio) / (1 + base ratio) - 1, with its 95 % interval.

  A ratio is sum(totals) / sum(counts). If totals are accepted tokens and counts
  are rounds, the result is the relative gain in block efficiency of one rule
  over another on the same prompts. Variation common to both rules cancels.
  `estimate` computes the interval over clusters.

  Args:
    totals: `[n]` sums over the rounds of each prompt, not negative.
    counts: `[n]` numbers of rounds of each prompt.
    base_totals: `[n]` sums of the baseline rule on the same prompts.
    base_counts: `[n]` numbers of rounds of the baseline rule.
    clusters: `[n]` labels, equal for prompts of one cluster. None means that
      each prompt is a cluster.
    longest: largest possible ratio, such as the draft length. The interval
      contains only values that are possible: from 1 / (1 + longest) - 1 to
      longest.

  Raises:
    ValueError: the lengths differ, or all counts of a rule are 0.
  """
  _check_rounds(counts)
  _check_rounds(base_counts)
  return estimate(
      lambda total, count, base, base_count: (
          (1 + total / count) / (1 + base / base_count) - 1),
      totals, counts, base_totals, base_counts, clusters=clusters,
      least=1 / (1 + longest) - 1, most=longest)


def _check_rounds(counts: ArrayLike) -> None:
  total = np.sum(counts)
  if not total > 0:
    raise ValueError(f"counts sum to {total:g}; at least one round is needed")
