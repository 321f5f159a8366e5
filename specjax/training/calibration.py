"""Calibrated confidences of draft tokens by sequential temperature scaling.

A confidence head predicts the probability that a draft token is accepted, given
that all earlier draft tokens are accepted. The stop rule `Scheduler` multiplies
the predictions along a chain, so their errors accumulate. DSpark
(arXiv:2607.05147) divides the head's logit at every position by a temperature.
After training, the temperatures are fitted from left to right: temperature k
calibrates the product over the first k positions, and the earlier temperatures
remain fixed.
"""

import numpy as np
from numpy.typing import ArrayLike

_GRID = tuple(np.geomspace(0.2, 5.0, 121).tolist())


def reached(logits: ArrayLike, temperatures: ArrayLike = 1.0) -> np.ndarray:
  """Returns the predicted probability that each prefix is accepted.

  >>> reached([[0.0, 0.0]]).tolist()
  [[0.5, 0.25]]

  Args:
    logits: `[R, K]` logits of a confidence head along R chains of K tokens.
    temperatures: `[K]` temperatures T_i, or one temperature for all positions.

  Returns:
    `[R, K]` float64 products prod_{i <= k} sigmoid(logits_i / T_i).
  """
  scaled = np.asarray(logits, np.float64) / np.asarray(temperatures)
  return np.cumprod(np.exp(-np.logaddexp(0, -scaled)), axis=-1)


def calibration_error(predicted: ArrayLike, happened: ArrayLike,
                      bins: int = 15) -> float:
  """Returns the expected calibration error (arXiv:1706.04599, eq. 3).

  Predictions are grouped in bins of equal width. The error of a bin is the
  distance between its mean prediction and its mean outcome. The result is the
  mean of these errors, weighted by the sizes of the bins.

  >>> calibration_error([0.75, 0.75], [1, 0])
  0.25

  Args:
    predicted: `[R]` predicted probabilities.
    happened: `[R]` outcomes 0 or 1, or the probabilities of outcome 1.
    bins: number of bins.
  """
  predicted, happened = (np.asarray(x, np.float64).ravel()
                         for x in (predicted, happened))
  if predicted.shape != happened.shape or not predicted.size:
    raise ValueError(f"predicted has {predicted.size} values and happened "
                     f"{happened.size}; give one outcome for each prediction, "
                     "and at least one")
  if bins < 1:
    raise ValueError(f"bins is {bins}; it must be at least 1")
  place = np.minimum((predicted * bins).astype(int), bins - 1)
  return float(np.abs(np.bincount(
      place, predicted - happened, minlength=bins)).sum() / predicted.size)


def temperatures(logits: ArrayLike, accepted: ArrayLike,
                 grid: ArrayLike = _GRID, bins: int = 15) -> tuple[float, ...]:
  """Fits the temperature of every position of a confidence head.

  >>> temperatures([[0.0], [0.0]], [[1], [0]])
  (1.0,)

  Args:
    logits: `[R, K]` logits of a confidence head along R chains of K tokens.
    accepted: `[R, K]` acceptance of each token, given that the earlier tokens
      are accepted. Values are outcomes 0 or 1, or probabilities
      1 - TV(q_k, p_k), with the total variation distance TV of the draft and
      the target distribution.
    grid: candidate temperatures.
    bins: number of bins of the calibration error, which is minimised.

  Returns:
    K temperatures. Among temperatures with equal error, the one nearest to 1 is
    chosen.

  Raises:
    ValueError: shapes differ, or `grid` is empty or contains a value that is
      not positive and finite.
  """
  logits, accepted = (np.asarray(x, np.float64) for x in (logits, accepted))
  if logits.shape != accepted.shape or logits.ndim != 2:
    raise ValueError(f"logits is {logits.shape} and accepted "
                     f"{accepted.shape}; both must be [R, K]")
  grid = np.asarray(grid, np.float64).ravel()
  if not grid.size or not (grid > 0).all() or not np.isfinite(grid).all():
    raise ValueError(f"grid is {grid.tolist()}; give at least one temperature, "
                     "and only temperatures above 0")
  grid = grid[np.argsort(np.abs(np.log(grid)), kind="stable")]
  happened = np.cumprod(accepted, axis=-1)
  before, chosen = np.ones(len(logits)), []
  for k in range(logits.shape[1]):
    # [grid, R]: prefixes of k + 1 tokens with every temperature of the grid.
    tried = before * reached(logits[None, :, k:k + 1], grid[:, None, None]
                             )[..., 0]
    errors = [calibration_error(x, happened[:, k], bins) for x in tried]
    best = int(np.argmin(errors))
    before = tried[best]
    chosen.append(float(grid[best]))
  return tuple(chosen)
