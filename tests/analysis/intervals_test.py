"""Intervals: what they cover, what a cluster is, and how many are needed."""

import csv
import itertools
import sys
import textwrap

import numpy as np
import pytest
from scipy import special
from scripts import imported
from scripts import ROOT

from specjax import analysis
from specjax.analysis import intervals

_TRIALS = 40_000  # a coverage of 0.95 has a standard error of 0.0011
_ERROR = 0.4  # half the length that a stopped sample is to have, in scatters


def _draws(scatter, rng, *shape):
  """Values of mean 0 and variance 1."""
  if scatter == "normal":
    return rng.normal(size=shape)
  return rng.exponential(size=shape) - 1


def _ends(values, known=True):
  """Both ends for the means of samples `[trials, n]`, of known values only."""
  counts = np.broadcast_to(known, values.shape).astype(float)
  return intervals.sample_intervals(
      np.divide, np.stack([values * counts, counts], -1))


def _coverage(values, known=True):
  _, low, high = _ends(values, known)
  return np.mean((low <= 0) & (0 <= high))


def _stopped(scatter, rng, most):
  """Samples of as many values as a pilot says, at most so many.

  Returns the values, and which of them are of the sample.
  """
  pilots = zip(*_ends(_draws(scatter, rng, _TRIALS // 4, 12)))
  numbers = [analysis.clusters_needed(analysis.Estimate(*x, 12), _ERROR)
             for x in pilots]
  return (_draws(scatter, rng, len(numbers), most),
          np.arange(most) < np.array(numbers)[:, None])


@pytest.mark.parametrize("scatter", ["normal", "exponential"])
@pytest.mark.parametrize("number", [5, 8, 12, 48])
def test_intervals_cover(scatter, number):
  # Broken: "95 %" is 88 % of skewed figures of few prompts, or of studies that
  # stop when their interval is narrow.
  rng = np.random.default_rng([2, number, scatter == "normal"])
  fixed = _coverage(_draws(scatter, rng, _TRIALS, number))
  stopped = _coverage(*_stopped(scatter, rng, number))
  assert 0.94 <= fixed <= 0.96
  assert 0.94 <= stopped <= 0.96


def test_one_sample_has_the_interval_of_the_simulations():
  # Broken: the simulations measure another interval than users have.
  rng = np.random.default_rng(3)
  labels = [*"aabcdddde"]
  columns = [rng.exponential(size=9), rng.integers(1, 9, 9)]
  found = analysis.estimate(np.divide, *columns, clusters=labels)
  sums = np.zeros((1, 6, 2))  # the last one is no cluster
  for label, *x in zip(labels, *columns):
    sums[0, "abcde".index(label)] += x
  np.testing.assert_allclose(
      found[:3], np.ravel(intervals.sample_intervals(np.divide, sums)),
      rtol=1e-12)


@pytest.fixture(scope="module")
def simulation():
  sys.path.append(str(ROOT / "experiments/runs"))
  with imported("interval_coverage.py") as module:
    yield module


@pytest.mark.slow
@pytest.mark.parametrize(
    "clusters", ["equal", "unequal prompts", "shared", "labels only"])
def test_intervals_of_unequal_clusters_cover(simulation, clusters):
  # Broken: "95 %" is 91 % if clusters differ in size, with the figure above
  # most intervals that miss it.
  rows = [row for values in simulation.VALUES[:3] for row in simulation.rows(
      clusters, values, simulation.PROMPTS, 4000, seed=1)]
  for count in {row["prompts"] for row in rows}:
    same = [row for row in rows if row["prompts"] == count]
    mean = lambda name, same=same: np.mean([row[name] for row in same])
    assert 0.94 <= mean("coverage") <= (
        0.975 if clusters == "labels only" else 0.965)
    assert mean("true_below") < 0.03 and mean("true_above") < 0.042
    for row in same:
      assert 0.925 <= row["coverage"] <= 0.985, row


def test_the_documented_coverage_is_the_measured_one(simulation):
  # Broken: the docstring promises what the command did not measure.
  path = ROOT / "experiments/results/interval_coverage.csv"
  with open(path, newline="", encoding="utf-8") as file:
    table = simulation.table(list(csv.DictReader(file)))
  assert textwrap.indent(table, "    ") in analysis.estimate.__doc__


def test_the_interval_by_hand():
  # Broken: another skewness, another quantile or another number of degrees of
  # freedom. Values of no skewness have Student's interval.
  values = np.array([-2.0, -1, 0, 1, 2])
  found = analysis.estimate(np.divide, 3 + values, np.ones(5))
  quantile = 3.392148  # Student's, with 2.7 degrees of freedom
  half = quantile * values.std(ddof=1) / 5**0.5
  np.testing.assert_allclose(found, (3, 3 - half, 3 + half, 5), rtol=1e-6)
  # The cubic of Hall (1992), solved by search and not by its inverse.
  values = np.array([0.0, 1, 1, 2, 3])
  center, error = values.mean(), values.std(ddof=1) / 5**0.5
  deviation = values - center
  bend = (deviation**3).mean() / values.std()**3 * (5 / 3)**1.5 / 5**0.5
  cubic = lambda t: t + bend * t**2 / 3 + bend**2 * t**3 / 27 + bend / 6
  low, high = analysis.estimate(np.divide, values, np.ones(5))[1:3]
  assert cubic((center - low) / error) == pytest.approx(quantile, rel=1e-6)
  assert cubic((center - high) / error) == pytest.approx(-quantile, rel=1e-6)
  assert high - center > center - low  # the long tail is above
  # One outlier, of scatter 1: 2.5 of Student's quantile of 9.7 degrees.
  outlier = analysis.estimate(np.divide, [0.0] * 11 + [12], np.ones(12))
  assert outlier.high == pytest.approx(1 + 2.5 * 2.237515)
  same = analysis.estimate(np.divide, np.full(6, 2.0), np.ones(6))
  assert same == (2, 2, 2, 6)


def test_the_interval_of_unequal_clusters_by_hand():
  # Broken: another effective number of clusters, or a biased variance.
  counts = np.array([1.0, 1, 2, 2, 3, 3, 6, 6])
  scatter = np.array([-1.0, 1] * 4) * np.sqrt([1, 1, 2, 2, 3, 3, 4, 4])
  low, high = analysis.estimate(
      np.divide, counts * (5 + scatter), counts)[1:3]
  share = counts / 24
  square = 100 / 24**2  # of the shares
  number = 100**2 / 2788  # 3.59, of 8 clusters
  freedom = number - 1 - 1.3 * ((number - 1) / 4)**2
  variance = (share**2 * scatter**2 / (1 - 2 * share + square)).sum()
  half = special.stdtrit(freedom, 0.975) * variance**0.5
  np.testing.assert_allclose([low, high], [5 - half, 5 + half], rtol=1e-9)
  # Unbiased: the expectation of the variance, by enumeration of the signs.
  signs = np.array([*itertools.product([-1, 1], repeat=8)])
  residual = signs - (signs @ share)[:, None]
  found = (share**2 * residual**2 / (1 - 2 * share + square)).sum(1).mean()
  np.testing.assert_allclose(found, square)


def test_a_cluster_that_has_nearly_everything():
  # Broken: a warning, an error, or a narrow interval of one observation.
  counts = np.array([1e6, 1, 1, 1, 1])
  found = analysis.estimate(np.divide, counts * [2, 1, 2, 3, 4], counts)
  assert found.high - found.low > 1 or np.isnan(found.high)
  alone = analysis.estimate(np.divide, [5.0, 1, 1, 1, 1], [2.0, 0, 0, 0, 0])
  assert alone.value == 4.5 and np.isnan([alone.low, alone.high]).all()


def test_bounds_of_the_figure():
  # Broken: a block efficiency below 1, or a probability above 1.
  values = np.array([1.0, 1, 1, 1, 1.5])
  free = analysis.ratio_estimate(values, np.ones(5))
  assert free.low < 1 and free.high > 1.3
  held = analysis.ratio_estimate(values, np.ones(5), least=1, most=1.3)
  assert held == (free.value, 1, 1.3, 5)
  few = analysis.ratio_estimate(values[:4], np.ones(4), least=1)
  assert np.isnan(few.low)
  # Accepted tokens are not negative, so that no gain is below -1, or with two
  # tokens at most below 1/3 - 1 and above 3 - 1.
  accepted = [0, 0, 0, 0, 90], np.ones(5), [0, 99, 99, 99, 99], np.ones(5)
  assert analysis.relative_gain(*accepted).low >= -1
  few, many = np.array([0, 0, 0, 0.0, 0.5]), np.array([0, 2, 2, 2.0, 2])
  for one, other, end in ((few, many, "low"), (many, few, "high")):
    case = one, np.ones(5), other, np.ones(5)
    least, most = 1 / 3 - 1, 2
    free, held = analysis.relative_gain(*case), analysis.relative_gain(
        *case, longest=2)
    assert getattr(free, end) != getattr(held, end) == (
        least if end == "low" else most)
  # A round of drafts of 2 tokens has 1 to 3 tokens, also over two target calls.
  for calls in 1, 2:
    low = analysis.block_efficiency(few, np.ones(5), target_calls=calls)
    assert low.value == pytest.approx(1.1 / calls) and low.low == 1 / calls
    high = analysis.block_efficiency(
        many, np.ones(5), longest=2, target_calls=calls)
    assert high.value == pytest.approx(2.6 / calls) and high.high == 3 / calls


def test_clusters():
  # Broken: prompts of one document, or one prompt twice, count as two.
  totals, counts = np.array([3.0, 5, 4, 8, 6, 7]), np.array([2, 3, 2, 4, 3, 3])
  apart = analysis.ratio_estimate(totals, counts)
  twice = analysis.ratio_estimate(
      [*totals, *totals], [*counts, *counts], clusters=[*"abcdef", *"abcdef"])
  np.testing.assert_allclose(twice, apart)
  four = analysis.ratio_estimate(totals, counts, clusters=[*"abcdda"])
  assert four.clusters == 4 and four.value == apart.value
  # A variant that decoded nothing of a prompt says nothing about its scatter.
  more = analysis.ratio_estimate([*totals, 0], [*counts, 0])
  np.testing.assert_allclose(more, apart)


def test_few_clusters_have_no_interval():
  # Broken: two prompts give an interval, and a violation of a theorem.
  few = analysis.ratio_estimate([1.0, 2, 3, 4], np.ones(4))
  assert f"{few:.1f}" == "2.5 (no interval) n=4"
  assert few.columns("x") == {"x": 2.5, "x_low": None, "x_high": None}
  back = analysis.Estimate.of_columns({**few.columns("x"), "clusters": 4}, "x")
  assert f"{back}" == f"{few}" and np.isnan(back.high)
  enough = analysis.ratio_estimate([1.0, 2, 3, 4, 5], np.ones(5))
  assert f"{enough:+.1f}" == (
      f"+3.0 [{enough.low:+.1f}, {enough.high:+.1f}] n=5")


def test_how_many_clusters_are_needed():
  # Broken: a study decodes too few prompts for what it promises, or for ever.
  pilot = analysis.ratio_estimate(
      np.random.default_rng(0).normal(size=200), np.ones(200))
  for half_width in (0.5, 0.2, 0.01):
    number = analysis.clusters_needed(pilot, half_width)
    values = np.resize([-1.0, 1.0], number // 2 * 2)
    found = analysis.ratio_estimate(values, np.ones(len(values)))
    assert (found.high - found.low) / 2 == pytest.approx(half_width, rel=0.15)
  assert analysis.clusters_needed(pilot, 99) == 5
  # Clusters of unequal size: too many after a small pilot, never too few.
  rng = np.random.default_rng(1)
  for size, least in ((12, 0.7), (50, 0.9)):
    ratios = []
    for _ in range(50):
      pilot, number = None, size
      for _ in range(2):
        counts = rng.integers(1, 5, number)
        found = analysis.estimate(
            np.divide, counts * rng.normal(3, 0.5, number), counts)
        if pilot is None:
          pilot, number = found, analysis.clusters_needed(found, 0.1)
      ratios.append((found.high - found.low) / 2 / 0.1)
    assert least < np.median(ratios) < 1.05
