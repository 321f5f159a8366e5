"""Tests of confidences that are made to say how often."""

import numpy as np
import pytest

from specjax.training import calibration

_R, _K = 4000, 3


def _chains(factors, seed=0):
  """Logits that are too sure by a factor at each place, and what happened."""
  rng = np.random.default_rng(seed)
  true = rng.normal(0.5, 1.5, (_R, _K))
  accepted = 1 / (1 + np.exp(-true))
  return true * np.asarray(factors), accepted


def test_a_planted_temperature_is_found_at_every_place():
  # Broken: a place is fitted without those before it, or by its own error.
  factors = (2.0, 0.5, 3.0)
  logits, accepted = _chains(factors)
  found = calibration.temperatures(logits, accepted)
  np.testing.assert_allclose(found, factors, rtol=0.1)
  happened = np.cumprod(accepted, axis=-1)
  error = lambda by, k: calibration.calibration_error(
      calibration.reached(logits, by)[:, k], happened[:, k])
  assert all(error(found, k) < 0.02 < 0.03 < error(1.0, k) for k in range(_K))


def test_outcomes_fit_as_their_probabilities_do():
  # Broken: only probabilities of acceptance can be given, and no outcomes.
  logits, accepted = _chains((2.0, 2.0, 2.0))
  drawn = np.random.default_rng(1).random(accepted.shape) < accepted
  np.testing.assert_allclose(
      calibration.temperatures(logits, drawn), 2.0, rtol=0.25)


def test_the_error_is_a_mean_over_bins():
  # Broken: bins weigh alike, or misses in two directions cancel between bins.
  predicted = [0.1, 0.1, 0.1, 0.9]
  happened = [0, 0, 1, 0]
  assert calibration.calibration_error(predicted, happened, bins=2) == (
      pytest.approx(0.75 * abs(0.1 - 1 / 3) + 0.25 * 0.9))
  assert calibration.calibration_error([1.0], [1], bins=3) == 0
