"""Confidences that mean what they say: sequential temperature scaling.

A confidence head predicts that a drafted token is accepted if those before it
were, and a scheduler multiplies the predictions along a chain, so that their
errors multiply as well. DSpark (arXiv:2607.05147) divides the head's logit at
every place by a temperature, fitted after training from left to right: the one
of place k makes the products over the first k places right, those before it
stay.
"""

import numpy as np
from numpy.typing import ArrayLike

_GRID = tuple(np.geomspace(0.2, 5.0, 121).tolist())


def reached(logits: ArrayLike, temperatures: ArrayLike = 1.0) -> np.ndarray:
  """The predicted chance that a chain is accepted as far as each place.

  Args:
    logits: `[R, K]`, of a confidence head.
    temperatures: `[K]`, or one for all.

  Returns:
    `[R, K]` float64, prod_{i <= k} sigmoid(logits_i / T_i).
  """
  scaled = np.asarray(logits, np.float64) / np.asarray(temperatures)
  return np.cumprod(np.exp(-np.logaddexp(0, -scaled)), axis=-1)


def calibration_error(predicted: ArrayLike, happened: ArrayLike,
                      bins: int = 15) -> float:
  """The expected calibration error (Guo et al. 2017, arXiv:1706.04599, eq. 3).

  Predictions fall into bins of equal width; it is the mean distance of a bin's
  mean prediction from what happened in it, weighed by its size.

  Args:
    predicted: `[R]`, probabilities.
    happened: `[R]`, 0 or 1, or the probabilities that it did.
    bins: how many.
  """
  predicted, happened = (np.asarray(x, np.float64).ravel()
                         for x in (predicted, happened))
  if predicted.shape != happened.shape or not predicted.size:
    raise ValueError(f"there are {predicted.size} predictions and "
                     f"{happened.size} outcomes; give one outcome each, and at "
                     "least one")
  if bins < 1:
    raise ValueError(f"bins is {bins}; it must be at least 1")
  place = np.minimum((predicted * bins).astype(int), bins - 1)
  return float(np.abs(np.bincount(
      place, predicted - happened, minlength=bins)).sum() / predicted.size)


def temperatures(logits: ArrayLike, accepted: ArrayLike,
                 grid: ArrayLike = _GRID, bins: int = 15) -> tuple[float, ...]:
  """The temperature of every place, for a stop rule's `temperatures`.

  Args:
    logits: `[R, K]`, of a confidence head along R chains of K tokens.
    accepted: `[R, K]`, 0 or 1, or the probability 1 - TV(q_k, p_k): whether
      each token is accepted if those before it were.
    grid: temperatures to choose from.
    bins: of the error that is made least.

  Returns:
    K numbers. Of equal errors the temperature nearest to 1 is taken.

  Raises:
    ValueError: shapes differ, or a temperature of the grid is not above 0.
  """
  logits, accepted = (np.asarray(x, np.float64) for x in (logits, accepted))
  if logits.shape != accepted.shape or logits.ndim != 2:
    raise ValueError(f"logits is {logits.shape} and accepted "
                     f"{accepted.shape}; both must be [R, K]")
  grid = np.asarray(grid, np.float64).ravel()
  if not grid.size or not (grid > 0).all() or not np.isfinite(grid).all():
    raise ValueError(f"grid is {grid.tolist()}; its temperatures must be above "
                     "0, and there must be one")
  grid = grid[np.argsort(np.abs(np.log(grid)), kind="stable")]
  happened = np.cumprod(accepted, axis=-1)
  before, found = np.ones(len(logits)), []
  for k in range(logits.shape[1]):
    # [grid, R], as far as place k with every temperature of the grid.
    tried = before * reached(logits[None, :, k:k + 1], grid[:, None, None]
                             )[..., 0]
    errors = [calibration_error(one, happened[:, k], bins) for one in tried]
    best = int(np.argmin(errors))
    before = tried[best]
    found.append(float(grid[best]))
  return tuple(found)
