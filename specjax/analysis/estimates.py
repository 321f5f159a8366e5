"""Estimates from samples of unequal size."""

import numpy as np
from numpy.typing import ArrayLike


def ratio_estimate(totals: ArrayLike, counts: ArrayLike
                   ) -> tuple[float, float]:
  """sum(totals) / sum(counts) and its standard error over the clusters.

  Rounds of one prompt resemble each other, so a prompt, not a round, is one
  observation. The error is that of the linearised ratio: with r the estimate,
  sqrt(n / (n - 1) sum_i (totals_i - r counts_i)^2) / sum(counts) (Cochran 1977,
  Sampling Techniques, chapter 6).

  Args:
    totals: `[n]`, what each prompt's rounds add up to.
    counts: `[n]`, rounds of each prompt.

  Returns:
    `(ratio, standard error)` as floats; the error of one prompt is NaN.

  Raises:
    ValueError: the lengths differ, or there is no round at all.
  """
  totals = np.asarray(totals, np.float64)
  counts = np.asarray(counts, np.float64)
  if totals.ndim != 1 or totals.shape != counts.shape:
    raise ValueError(f"totals are of shape {totals.shape} and counts of "
                     f"{counts.shape}; both need one entry a prompt")
  if not counts.sum() > 0:
    raise ValueError(f"counts sum to {counts.sum():g}; at least one round is "
                     "needed")
  ratio = totals.sum() / counts.sum()
  number = len(totals)
  if number < 2:
    return float(ratio), float("nan")
  scatter = ((totals - ratio * counts)**2).sum() * number / (number - 1)
  return float(ratio), float(np.sqrt(scatter) / counts.sum())


def relative_gain(totals: ArrayLike, counts: ArrayLike, base_totals: ArrayLike,
                  base_counts: ArrayLike) -> tuple[float, float]:
  """(1 + ratio) / (1 + base ratio) - 1 and its standard error over prompts.

  With accepted tokens as totals and rounds as counts: the gain in block
  efficiency of one rule over another on the same prompts. The error is that of
  the linearised quotient, so it counts what the two have in common once only.

  Args:
    totals: `[n]`, what each prompt's rounds add up to.
    counts: `[n]`, rounds of each prompt.
    base_totals: `[n]`, of the rule that is compared to, on the same prompts.
    base_counts: `[n]`.

  Returns:
    `(gain, standard error)` as floats; the error of one prompt is NaN.

  Raises:
    ValueError: the lengths differ, or there is no round at all.
  """
  tokens, deviation = _deviation(totals, counts)
  base, base_deviation = _deviation(base_totals, base_counts)
  number = len(deviation)
  if number != len(base_deviation):
    raise ValueError(f"there are {number} prompts and {len(base_deviation)} to "
                     "compare them to; give the same prompts")
  error = float("nan")
  if number > 1:
    scatter = ((deviation - base_deviation)**2).sum() * number / (number - 1)
    error = float(tokens / base * np.sqrt(scatter))
  return tokens / base - 1, error


def _deviation(totals, counts):
  """1 + ratio, and each prompt's share in its relative error, `[n]`."""
  ratio, _ = ratio_estimate(totals, counts)
  counts = np.asarray(counts, np.float64)
  deviation = np.asarray(totals, np.float64) - ratio * counts
  return 1 + ratio, deviation / (counts.sum() * (1 + ratio))
