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


def relative_gain(totals: ArrayLike, counts: ArrayLike, base_totals: ArrayLike,
                  base_counts: ArrayLike,
                  clusters: Sequence[Hashable] | None = None) -> Estimate:
  """Returns (1 + ratio) / (1 + base ratio) - 1, with its 95 % interval.

  A ratio is sum(totals) / sum(counts). If totals are accepted tokens and counts
  are rounds, the result is the relative gain in block efficiency of one rule
  over another on the same prompts. Variation common to both rules cancels.
  `estimate` computes the interval over clusters.

  Args:
    totals: `[n]` sums over the rounds of each prompt. Not negative, so the
      interval ends at -1.
    counts: `[n]` numbers of rounds of each prompt.
    base_totals: `[n]` sums of the baseline rule on the same prompts.
    base_counts: `[n]` numbers of rounds of the baseline rule.
    clusters: `[n]` labels, equal for prompts of one cluster. None means that
      each prompt is a cluster.

  Raises:
    ValueError: the lengths differ, or all counts of a rule are 0.
  """
  _check_rounds(counts)
  _check_rounds(base_counts)
  return estimate(
      lambda total, count, base, base_count: (
          (1 + total / count) / (1 + base / base_count) - 1),
      totals, counts, base_totals, base_counts, clusters=clusters,
      least=-1)


def _check_rounds(counts: ArrayLike) -> None:
  total = np.sum(counts)
  if not total > 0:
    raise ValueError(f"counts sum to {total:g}; at least one round is needed")
