"""Formulas for lengths and speed-ups against sums and published figures."""

import numpy as np
import pytest

from specjax import analysis

_RATES = [0.0, 0.25, 0.7, 0.999, 1.0]


@pytest.mark.parametrize("acceptance", _RATES)
@pytest.mark.parametrize("gamma", [0, 1, 2, 7, 40])
def test_expected_lengths_are_their_sums(acceptance, gamma):
  # Broken: the closed form is off at its ends, or loses digits near 1.
  powers = [acceptance**i for i in range(gamma + 1)]
  assert analysis.expected_tokens(acceptance, gamma) == pytest.approx(
      sum(powers), rel=1e-13)
  assert analysis.expected_accepted(acceptance, gamma) == pytest.approx(
      sum(powers[1:]), rel=1e-13)
  # As a mean over where the round stops, the last place being different.
  stops = [(1 - acceptance) * acceptance**t * (t + 1) for t in range(gamma)]
  assert analysis.expected_tokens(acceptance, gamma) == pytest.approx(
      sum(stops) + acceptance**gamma * (gamma + 1), rel=1e-11)


def test_the_right_figures_of_widely_copied_examples():
  # Broken: the wrong figures that the docstrings warn of are back.
  tokens, accepted = analysis.expected_tokens, analysis.expected_accepted
  assert tokens(0.8, 4) == pytest.approx(3.3616)
  assert analysis.speedup(0.8, 4, 0.1) == pytest.approx(2.401, abs=5e-4)
  assert accepted(0.7, 8) == pytest.approx(2.1988, abs=5e-5)  # not 1.96
  assert tokens(0.7, 8) == pytest.approx(3.1988, abs=5e-5)
  assert tokens(0.6, 2) == pytest.approx(1.96)
  assert tokens(0.8, 10) == pytest.approx(4.5705, abs=5e-5)  # not 3.6256
  assert sum(0.2 * 0.8**t * (t + 1) for t in range(11)) == pytest.approx(
      3.6256, abs=5e-5)
  assert accepted(0.8, 5) == pytest.approx(2.689, abs=5e-4)  # not 4
  assert accepted(0.9265, 5) == pytest.approx(4, abs=5e-4)
  assert analysis.speedup(0.8, 5, 0.1) == pytest.approx(2.46, abs=5e-3)


def test_speed_and_operations():
  # Broken: speculation is promised at another price than the paper's.
  acceptance = np.array([0.6, 0.7, 0.8, 0.8, 0.9, 0.9])
  gamma = np.array([2, 3, 2, 5, 2, 10])
  np.testing.assert_allclose(
      analysis.speedup(acceptance, gamma, 0),
      [1.96, 2.53, 2.44, 3.69, 2.71, 6.86], atol=5e-3)
  np.testing.assert_allclose(
      analysis.operations_factor(acceptance, gamma, 0),
      [1.53, 1.58, 1.23, 1.63, 1.11, 1.60], atol=5e-3)
  a, g, c = 0.8, 5, 0.05
  np.testing.assert_allclose(analysis.operations_factor(a, g, c),
                             (1 - a) * (g * c + g + 1) / (1 - a**(g + 1)))


@pytest.mark.parametrize("acceptance,gammas,gains", [
    (0.7, [9, 8, 6, 4, 3], [2.97, 2.76, 2.35, 1.98, 1.58]),
    (0.8, [14, 11, 8, 6, 4], [4.23, 3.82, 3.09, 2.47, 1.87]),
    (0.9, [24, 19, 13, 10, 7], [7.49, 6.37, 4.67, 3.43, 2.37])])
def test_optimal_gamma(acceptance, gammas, gains):
  # Broken: the recommended draft length is not the fastest.
  costs = np.array([0.01, 0.02, 0.05, 0.1, 0.2])
  np.testing.assert_array_equal(
      analysis.optimal_gamma(acceptance, costs), gammas)
  np.testing.assert_allclose(
      analysis.speedup(acceptance, np.array(gammas), costs), gains, atol=5e-3)


def test_speculation_pays_iff_acceptance_exceeds_cost():
  # Broken: drafts are recommended where each of them loses time.
  rates = np.linspace(0, 0.99, 34)
  best = analysis.optimal_gamma(rates[:, None], rates)
  np.testing.assert_array_equal(best > 0, rates[:, None] > rates)
  assert analysis.optimal_gamma(1.0, 1.0) == 0
  assert analysis.optimal_gamma(1.0, 0.5, largest=9) == 9


def test_acceptance_that_varies():
  # Broken: the mean rate is plugged in, which understates a varying one.
  nodes, weights = np.polynomial.legendre.leggauss(16)
  rates, density = (nodes + 1) / 2, nodes + 1  # Beta(2, 1) has density 2a
  over = analysis.expected_tokens_over(rates, 5, weights * density)
  assert over == pytest.approx(2 * sum(1 / n for n in range(2, 8)))
  assert over == pytest.approx(3.19, abs=5e-3)
  assert analysis.expected_tokens(2 / 3, 5) == pytest.approx(2.74, abs=5e-3)
  assert analysis.expected_tokens_over([0.2, 0.6], 1) == pytest.approx(1.4)
  by_position = analysis.expected_tokens_by_position
  assert by_position([0.5, 0.4, 1.0]) == pytest.approx(1 + 0.5 + 0.2 + 0.2)
  np.testing.assert_allclose(by_position([[0.8] * 5, [0.0] * 5]),
                             [analysis.expected_tokens(0.8, 5), 1])
  assert by_position([]) == 1


def test_measured_costs():
  # Broken: a draft length is chosen by times that no round takes.
  gain = analysis.predicted_speedup(
      2.5, step=0.010, verify=0.012, draft=0.001, gamma=4, overhead=0.004)
  assert gain == pytest.approx(2.5 * 10 / (12 + 4 + 4))
  # With a pass that costs the same at any length it is Leviathan's formula.
  a, c = 0.8, 0.1
  survival = a ** np.arange(13)
  gamma, gain = analysis.best_gamma(
      survival, step=2.0, verify=[2.0] * 13, draft=2 * c)
  assert gamma == analysis.optimal_gamma(a, c, largest=12) == 6
  assert gain == pytest.approx(analysis.speedup(a, 6, c))
  # Only lengths with a time are tried, and none may be worth its time.
  times = {2: 2.0, 3: 2.5}
  assert analysis.best_gamma(
      survival, step=2.0, verify=times, draft=2 * c)[0] == 2
  assert analysis.best_gamma(
      survival, step=2.0, verify=times, draft=2 * c, overhead=9) == (0, 1.0)


def test_ratio_estimate():
  # Broken: a prompt with many rounds counts like one with few.
  assert analysis.ratio_estimate([1, 3], [2, 2]).value == 1
  assert analysis.ratio_estimate([2, 12], [1, 6]).value == 2
  assert analysis.ratio_estimate([2, 3], [1, 4]).value == 1
  exact = analysis.ratio_estimate([2, 12, 4, 6, 10], [1, 6, 2, 3, 5])
  assert exact[:3] == pytest.approx((2, 2, 2))


def test_relative_gain_agrees_with_the_bootstrap():
  # Broken: the intervals of every improvement that the studies report.
  rng = np.random.default_rng(0)
  rounds, base_rounds = rng.integers(20, 40, size=(2, 200))
  skill = rng.gamma(4, 0.3, 200)  # what both rules share of a prompt
  totals = rounds * (1.1 * skill + 0.1 * rng.normal(size=200))
  base_totals = base_rounds * (skill + 0.1 * rng.normal(size=200))
  gain, low, high, _ = analysis.relative_gain(
      totals, rounds, base_totals, base_rounds)
  tokens = lambda t, n: 1 + t.sum(-1) / n.sum(-1)
  again = rng.integers(200, size=(4000, 200))
  resampled = (tokens(totals[again], rounds[again])
               / tokens(base_totals[again], base_rounds[again]) - 1)
  assert gain == pytest.approx(
      tokens(totals, rounds) / tokens(base_totals, base_rounds) - 1)
  np.testing.assert_allclose(
      (low, high), np.quantile(resampled, (0.025, 0.975)),
      atol=0.1 * (high - low))
  # As if the two had nothing in common, it would be far larger.
  alone = analysis.ratio_estimate(totals, rounds)
  assert high - low < 0.7 * (alone.high - alone.low) / tokens(totals, rounds)
