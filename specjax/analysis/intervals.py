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
_LOST = 2.3  # degrees of freedom lost to estimates of variance and skewness
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
             clusters: Sequence[Hashable] | None = None) -> Estimate:
  """Returns the estimate of a function of sums, with its 95 % interval.

  The interval is that of Hall (1992, "On the removal of skewness by
  transformation", equation 2.3). A cubic transformation removes the skewness of
  the t statistic. n is the number of clusters.

  * Variance and skewness are those of the jackknife's influence values. Hence
    clusters may differ in size, and `figure` may be a quotient.
  * The skewness of a small sample is biased towards 0. It is multiplied by
    (n / (n - 2))^1.5.
  * Student's quantile has n - 2.3 degrees of freedom, because both variance and
    skewness are estimated.
  * One outlier in a small sample makes the cubic flat. Each side is therefore
    limited to 2.5 times the half width of Student's interval.

  The constants were chosen by simulation. With n = 5, 8, 12 and 48, coverage is
  94.2 to 95.8 % for normal and for exponential distributions. Student's t
  covers 88 % with five exponential values.

  Args:
    figure: function from the sums of the observations, one array each, to an
      array of the same shape, such as `lambda totals, counts: totals / counts`.
    *observations: `[prompts]` arrays.
    clusters: `[prompts]` labels. Prompts with equal labels, such as two
      excerpts of one document, are one observation. None means that every
      prompt is a cluster. Clusters whose observations are all 0 are ignored.

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
  total = sums.sum(axis=0)
  value = float(figure(*total))
  if number < FEWEST:
    return Estimate(value, float("nan"), float("nan"), number)
  with np.errstate(divide="ignore", invalid="ignore"):
    others = figure(*(total - sums).T)
    influence = (number - 1) * (value - others)
  return Estimate(value, *_interval(value, influence), number)


def clusters_needed(pilot: Estimate, half_width: float) -> int:
  """Returns the number of clusters for an interval of about this half width.

  Choose the number from a pilot, and compute the final estimate from other
  clusters. The final interval then has the coverage of a sample of fixed size.
  In contrast, sampling until the interval is narrow enough would favour samples
  with a small variance by chance, so coverage would be too low.

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

  The clusters are assumed to have a symmetric distribution with standard
  deviation 1.
  """
  return _quantile(number) / number**0.5


def _quantile(number: int) -> float:
  return float(special.stdtrit(number - _LOST, (1 + _LEVEL) / 2))


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


def _interval(value: float, influence: np.ndarray) -> tuple[float, float]:
  """Returns the interval's ends from the clusters' influence values `[n]`."""
  number = len(influence)
  deviation = influence - influence.mean()
  square = (deviation**2).mean()
  if square == 0:
    return value, value
  skewness = (deviation**3).mean() / (square * (number - 2) / number)**1.5
  bend = skewness / number**0.5
  quantile = _quantile(number)

  def untransformed(t: float) -> float:
    if abs(bend) < 1e-6:
      return t
    return 3 / bend * (np.cbrt(1 + bend * (t - bend / 6)) - 1)

  error = (square / (number - 1))**0.5
  most = _LONGEST * quantile
  return (float(value - error * min(untransformed(quantile), most)),
          float(value + error * min(-untransformed(-quantile), most)))
