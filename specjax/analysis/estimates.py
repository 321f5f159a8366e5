"""Estimates from samples of unequal size."""

from collections.abc import Hashable
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from specjax.analysis.intervals import Estimate
from specjax.analysis.intervals import estimate


def ratio_estimate(totals: ArrayLike, counts: ArrayLike,
                   clusters: Sequence[Hashable] | None = None) -> Estimate:
  """sum(totals) / sum(counts), with its 95 % interval over clusters.

  Rounds of one prompt resemble each other, so a prompt, not a round, is one
  observation (Cochran 1977, Sampling Techniques, chapter 6). The interval is
  that of `estimate`.

  Args:
    totals: `[n]` sums over the rounds of each prompt.
    counts: `[n]` rounds of each prompt.
    clusters: `[n]` labels of prompts that resemble each other.

  Raises:
    ValueError: the lengths differ, or there is no round at all.
  """
  _check_rounds(counts)
  return estimate(lambda total, count: total / count, totals, counts,
                  clusters=clusters)


def relative_gain(totals: ArrayLike, counts: ArrayLike, base_totals: ArrayLike,
                  base_counts: ArrayLike,
                  clusters: Sequence[Hashable] | None = None) -> Estimate:
  """(1 + ratio) / (1 + base ratio) - 1, with its 95 % interval over clusters.

  With accepted tokens as totals and rounds as counts: the gain in block
  efficiency of one rule over another on the same prompts. Scatter that both
  rules share on a prompt cancels. The interval is that of `estimate`.

  Args:
    totals: `[n]` sums over the rounds of each prompt.
    counts: `[n]` rounds of each prompt.
    base_totals: `[n]` sums of the rule that is compared to, on the same
      prompts.
    base_counts: `[n]` rounds of that rule.
    clusters: `[n]` labels of prompts that resemble each other.

  Raises:
    ValueError: the lengths differ, or there is no round at all.
  """
  _check_rounds(counts)
  _check_rounds(base_counts)
  return estimate(
      lambda total, count, base, base_count: (
          (1 + total / count) / (1 + base / base_count) - 1),
      totals, counts, base_totals, base_counts, clusters=clusters)


def _check_rounds(counts: ArrayLike) -> None:
  total = np.sum(counts)
  if not total > 0:
    raise ValueError(f"counts sum to {total:g}; at least one round is needed")
