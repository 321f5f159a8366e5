"""Estimates with 95 % intervals: one method for the whole project."""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

FEWEST = 5  # smallest number of clusters for an interval
_LEVEL = 0.95  # coverage of an interval
_LOST = 1.3  # degrees of freedom lost to the estimate of the skewness
# Largest length of one side of an interval, in half widths of Student's.
_LONGEST = 2.5


class Estimate(NamedTuple):
  """An estimate and its 95 % interval.

  `f"{estimate:.2f}"` is "2.13 [2.01, 2.29] n=12". The format applies to the
  value and to both ends. With fewer than `FEWEST` clusters the text is "2.13
  (no interval) n=3".

  Attributes:
    value: the estimate.
    low: lower end of the interval, or NaN with fewer than `FEWEST` clusters.
    high: upper end, or NaN. The interval is longer on the side of a long tail.
    clusters: number of clusters, the independent observations.
  """

  value: float
  low: float
  high: float
  clusters: int

  def __format__(self, spec: str) -> str:
    bounds = ("(no interval)" if np.isnan(self.low)
              else f"[{self.low:{spec}}, {self.high:{spec}}]")
    return f"{self.value:{spec}} {bounds} n={self.clusters}"

  def columns(self, name: str) -> dict[str, float | None]:
    """Returns a dict with the keys `name`, `name_low` and `name_high`.

    The ends are None without an interval.
    """
    low, high = (None if np.isnan(x) else x for x in (self.low, self.high))
    return {name: self.value, f"{name}_low": low, f"{name}_high": high}

  @classmethod
  def of_columns(cls, row: Mapping[str, Any], name: str) -> "Estimate":
    """Returns the estimate of a row with the keys of `columns` and "clusters".
    """
    bounds = (row[f"{name}_{end}"] for end in ("low", "high"))
    return cls(row[name], *(float("nan") if x is None else x for x in bounds),
               row["clusters"])


def estimate(figure: Callable[..., np.ndarray], *observations: ArrayLike,
             clusters: Sequence[Hashable] | None = None,
             least: float = -np.inf, most: float = np.inf) -> Estimate:
  """Returns the estimate of a function of sums, with its 95 % interval.

  The interval is that of Hall (1992, "On the removal of skewness by
  transformation", equation 2.3). A cubic transformation removes the skewness of
  the t statistic. Let s be the share of a cluster in the total size of all
  clusters. n is the effective number of clusters, (sum of s^2)^2 / (sum of
  s^4). It equals the number of clusters if they have equal sizes. Otherwise it
  is smaller, because the largest clusters decide the variance.

  * Variance and skewness are those of the jackknife's influence values. Hence
    `figure` may be a quotient. Each influence value is multiplied by
    (1 - s) / (1 - 2 s + sum of s^2)^0.5, so that the variance is unbiased if
    large clusters scatter as much as small ones (Bell and McCaffrey 2002).
  * The skewness of a small sample is biased towards 0. It is multiplied by
    (n / (n - 2))^1.5, with n replaced by 5 if it is smaller.
  * Student's quantile has n - 1 degrees of freedom, minus 1.3 because the
    skewness is estimated. Below n = 5 it is minus 1.3 ((n - 1) / 4)^2.
  * One outlier in a small sample makes the cubic flat. Each side is therefore
    limited to 2.5 times the half width of Student's interval.

  The constants were chosen by simulation. The table contains the lowest and the
  highest coverage in percent over several figures and distributions (normal,
  lognormal, exponential), and below it the mean percentages of intervals with
  the true value below and above them. ::

    prompts                   5          8         12         20         50
    equal             94.3-96.5  94.0-97.2  94.0-97.1  94.2-96.4  94.5-96.0
      below, above     1.1, 3.5   1.3, 3.4   1.5, 3.3   1.8, 3.2   2.1, 2.9
    unequal prompts   93.8-97.1  93.7-97.0  93.6-97.1  93.9-96.5  94.0-95.6
      below, above     0.8, 3.5   1.1, 3.4   1.4, 3.4   1.8, 3.4   2.2, 3.3
    shared                    -          -  94.1-96.4  94.2-96.5  93.5-95.8
      below, above                           1.1, 3.2   1.4, 3.4   1.8, 3.6
    labels only               -          -  96.8-98.0  96.5-97.6  95.2-96.3
      below, above                           0.8, 1.8   1.1, 1.9   1.8, 2.6
    pareto            90.0-94.8  90.8-94.8  91.2-95.4  92.2-95.9  92.4-95.6
      below, above     1.4, 5.2   1.5, 4.8   1.7, 4.5   1.7, 3.9   2.1, 3.3
    rare copies            79.8       60.3       72.2       88.0       98.4
      below, above    0.0, 20.2  0.0, 39.7  0.0, 27.8  0.1, 11.9   1.0, 0.5

  The command `experiments/runs/interval_coverage.py` made the table, and
  explains its rows. A "labels only" interval is too wide, because the prompts
  of a cluster are independent there. The last two rows are limits of every
  interval:

  * pareto: heavy tails. A small sample often lacks the large values.
  * rare copies: one of ten prompts copies text, and has three times the block
    efficiency of the others. Of all samples of ten prompts, 35 % contain no
    such prompt, and their intervals are far too short.

  Args:
    figure: elementwise function from the sums of the observations, one array
      each, to an array of the same shape, such as
      `lambda totals, counts: totals / counts`.
    *observations: `[prompts]` arrays. The last one is the size of a prompt's
      observation, such as its number of rounds, or 1 for a mean over prompts.
    clusters: `[prompts]` labels. Prompts with equal labels, such as two
      excerpts of one document, are one observation. None means that every
      prompt is a cluster. Clusters whose observations are all 0 are ignored.
    least: smallest possible value of the figure, such as 1 for a block
      efficiency. The interval ends there.
    most: largest possible value of the figure, such as 1 for a probability.

  Raises:
    ValueError: the lengths differ, or all observations are 0.
  """
  columns = [np.asarray(x, np.float64) for x in observations]
  shapes = {x.shape for x in columns}
  if clusters is not None:
    shapes.add((len(clusters),))
  if len(shapes) > 1 or columns[0].ndim != 1:
    raise ValueError(
        "observations and clusters have shapes "
        f"{', '.join(map(str, sorted(shapes)))}; give one entry for each "
        "prompt, of the same prompts")
  sums = _sums(np.stack(columns, 1), clusters)
  number = len(sums)
  if not number:
    raise ValueError("all observations are 0; at least one round is needed")
  if number < FEWEST:
    nan = float("nan")
    return Estimate(float(figure(*sums.sum(axis=0))), nan, nan, number)
  value, *ends = sample_intervals(figure, sums)
  return Estimate(
      float(value), *(float(np.clip(x, least, most)) for x in ends), number)


def sample_intervals(figure: Callable[..., np.ndarray], sums: np.ndarray
                     ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns the values and both ends of the intervals of many samples.

  `estimate` computes its interval here. A simulation of the coverage passes
  many samples at once, because a call for each sample would be slow.

  Args:
    figure: function of the sums (see `estimate`).
    sums: `[..., clusters, k]`, sums of the k observations of each cluster.
      Clusters with only zeros are ignored, so samples may have different
      numbers of clusters.

  Returns:
    Values, lower ends and upper ends, `[...]` each.
  """
  total = sums.sum(axis=-2)
  value = figure(*np.moveaxis(total, -1, 0))
  size = np.abs(sums[..., -1])
  with np.errstate(all="ignore"):  # a cluster may have all of the counts
    others = figure(*np.moveaxis(total[..., None, :] - sums, -1, 0))
    share = size / size.sum(axis=-1, keepdims=True)
    square = (share**2).sum(axis=-1)
    influence = (value[..., None] - others) * (1 - share) / np.sqrt(
        1 - 2 * share + square[..., None])
    number = square**2 / (share**4).sum(axis=-1)
    variance = (influence**2).sum(axis=-1)
    known = np.maximum(number, FEWEST)
    bend = ((influence**3).sum(axis=-1) / variance**1.5
            * (known / (known - 2))**1.5)
    quantile = _quantile(number)
    most = _LONGEST * quantile

    def untransformed(t: np.ndarray) -> np.ndarray:
      root = np.cbrt(1 + bend * (t - bend / 6))
      return np.where(np.abs(bend) < 1e-6, t, 3 / bend * (root - 1))

    error = variance**0.5
    below = error * np.minimum(untransformed(quantile), most)
    above = error * np.minimum(-untransformed(-quantile), most)
  constant = variance == 0
  return (value, np.where(constant, value, value - below),
          np.where(constant, value, value + above))


def clusters_needed(pilot: Estimate, half_width: float) -> int:
  """Returns the number of clusters for an interval of about this half width.

  Choose the number from a pilot, and compute the final estimate from other
  clusters. The final interval then has the coverage of a sample of fixed size.
  In contrast, sampling until the interval is narrow enough would favour samples
  with a small variance by chance, so coverage would be too low.

  Clusters of equal size are assumed. If clusters differ in size, the interval
  of a small pilot is wider than that of as many equal clusters, so the result
  is too large. For clusters of 1 to 4 prompts in a simulation, the final half
  width was 0.78 of the desired one after a pilot of 12 clusters, and 1.00 of it
  after a pilot of 50.

  Args:
    pilot: estimate of the same figure from other clusters, with an interval.
    half_width: desired half length of the interval.

  Raises:
    ValueError: `half_width` is not above 0, or the pilot has no interval.
  """
  if not half_width > 0:
    raise ValueError(f"half_width is {half_width:g}; it must be above 0")
  if np.isnan(pilot.low):
    raise ValueError(f"the pilot has {pilot.clusters} clusters and no interval;"
                     f" give at least {FEWEST}")
  scatter = (pilot.high - pilot.low) / 2 / _unit_width(pilot.clusters)
  # This start is slightly too small, because it uses the normal quantile, which
  # is below Student's.
  number = max(FEWEST, int((1.95 * scatter / half_width)**2))
  while scatter * _unit_width(number) > half_width:
    number += 1
  return number


def _unit_width(number: int) -> float:
  """Returns half the length of the interval of `number` clusters.

  The clusters are assumed to have equal sizes and a symmetric distribution with
  standard deviation 1.
  """
  return float(_quantile(number)) / number**0.5


def _quantile(number: ArrayLike) -> np.ndarray:
  """Returns Student's quantile for effective numbers of clusters."""
  freedom = number - 1
  lost = _LOST * np.minimum(1, freedom / (FEWEST - 1))**2
  return special.stdtrit(freedom - lost, (1 + _LEVEL) / 2)


def _sums(columns: np.ndarray, clusters: Sequence[Hashable] | None
          ) -> np.ndarray:
  """Returns the sums `[clusters, k]` of `columns [prompts, k]` by cluster.

  Clusters with only zeros are left out.
  """
  if clusters is not None:
    places = {label: i for i, label in enumerate(dict.fromkeys(clusters))}
    sums = np.zeros((len(places), columns.shape[1]))
    np.add.at(sums, [places[label] for label in clusters], columns)
    columns = sums
  return columns[columns.any(axis=1)]
