"""Numbers that a training prints, and the learning rates it chooses."""

import csv
import itertools
import pathlib
import sys

import numpy as np
import pytest
from scripts import ROOT

from specjax import methods
from specjax.data import batches
from specjax.training import evaluation
from specjax.training import optimizers
from specjax.training import runs

sys.path.append(str(ROOT / "experiments"))

from lib.training import drafter_report  # noqa: E402

_RECORDED = pathlib.Path(__file__).parents[1] / "golden/acceptance.csv"
_ROUNDS = {"greedy": 379, "sampled": 379, "decoded": 16}
_REPETITIONS = 1000


def _recorded(measure):
  """Returns `{name: accepted tokens per recorded row}` of three sets of heads.

  See golden/make_acceptance.py. The sets are ordered from good to bad.
  """
  with open(_RECORDED, newline="") as f:
    header, *lines = csv.reader(f)
  columns = np.array(lines, float).T
  return {name: columns[i] for i, name in enumerate(header)
          if name.startswith(measure)}


def _printed(accepted, measure):
  found = evaluation._with_interval(
      "value", accepted, np.full(len(accepted), _ROUNDS[measure]))
  return evaluation.interval(found, "value")


def _draws(number, rows):
  return np.random.default_rng(0).integers(0, rows, (
      _REPETITIONS, number, drafter_report.DECODED_ROWS))


@pytest.mark.parametrize("measure", [*_ROUNDS])
def test_the_printed_number_orders_two_runs(measure):
  # Broken: so few held-out rows, prompts or rounds that a worse run looks
  # better by chance.
  recorded = _recorded(measure)
  rows = len(next(iter(recorded.values())))
  same, other = _draws(2, rows).swapaxes(0, 1)
  tried = 0
  for better, worse in itertools.combinations(recorded.values(), 2):
    # Runs of the same data are measured on the same rows.
    assert np.mean(better[same].sum(1) > worse[same].sum(1)) >= 0.95
    # And on other rows: if the runs differ by more than the interval.
    ends = [_printed(better[draw], measure) for draw in same[:50]]
    width = np.mean([found.high - found.low for found in ends])
    gap = (better.mean() - worse.mean()) / _ROUNDS[measure]
    if gap > width / 2:
      tried += 1
      assert np.mean(better[same].sum(1) > worse[other].sum(1)) >= 0.95
  assert tried


@pytest.mark.parametrize("measure", [*_ROUNDS])
def test_the_printed_interval_holds_the_mean(measure):
  # Broken: the interval counts positions of a row as independent.
  recorded = next(iter(_recorded(measure).values()))
  truth = 1 + recorded.mean() / _ROUNDS[measure]
  found = [_printed(recorded[draw[0]], measure)
           for draw in _draws(1, len(recorded))[:400]]
  assert np.mean([x.low <= truth <= x.high for x in found]) >= 0.9


def test_prompts_end_before_the_first_answer():
  # Broken: the target continues the text of a user, padding is a part of a
  # prompt, or a prompt of documents is another one than before.
  tokens = np.arange(40).reshape(4, 10)
  prompts = lambda counted: [
      (row.tolist(), label) for row, label in zip(*drafter_report._prompts(
          batches.HeldOutRows(tokens, np.arange(4) // 2, counted)))]
  counted = np.zeros((4, 10), bool)
  counted[0, 3:5] = counted[0, 8] = counted[1, 1:] = True
  counted[2, 0] = counted[2, 7] = counted[3, 9] = True
  assert prompts(counted) == [
      ([0, 1, 2], 0), ([10], 0), ([*range(30, 39)], 1)]
  assert prompts(np.ones((4, 10), bool)) == [
      ([i, i + 1], i // 20) for i in (0, 10, 20, 30)]
  sizes = np.array([[10], [8], [4], [2]])  # conversations, all of them counted
  assert [len(row) for row, _ in prompts(np.arange(10) < sizes)] == [2, 2, 1, 1]


def test_learning_rates():
  # Broken: a large target is trained with the rate for the bundled one, or a
  # default has no source.
  for method in methods.METHODS:
    rate = method.learning_rate
    sizes = (1e6, 4_196_608, 135e6, 1e9, rate.size, 1e12)
    found = [rate.of(size) for size in sizes]
    assert found[:2] == [rate.bundled] * 2
    assert found == sorted(found, reverse=True)
    if rate.published is not None:
      assert found[-2:] == [rate.published] * 2
      assert rate.source and rate.source in str(rate)
  assert methods.by_name("medusa").learning_rate.of(135e6) == 0.0026
  assert methods.by_name("eagle3").learning_rate.of(135e6) == 0.0005


def test_schedules_of_runs():
  # Broken: a share of the steps is another number of steps than was asked
  # for, a longer run warms up again where it has been, or cosine misses 0.
  steps = np.arange(400)
  values = lambda schedule: np.array([float(schedule(s)) for s in steps[::13]])
  np.testing.assert_array_equal(
      values(runs.trapezoid((400,), 0.006, 0.1, 0.7)),
      values(optimizers.trapezoid(0.006, 400, 40, 280)))
  cosine = runs.cosine((400,), 2.0, 0.1)
  found = [float(cosine(s)) for s in (0, 19, 39, 40, 220, 400)]
  np.testing.assert_allclose(found, [0.05, 1, 2, 2, 1, 0], atol=1e-6)
  longer = runs.cosine((100, 400), 2.0, 0.1)
  assert float(longer(99)) == float(runs.cosine((100,), 2.0, 0.1)(99))
  assert float(longer(100)) == float(cosine(100))
