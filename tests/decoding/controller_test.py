"""The controller: what it chooses, and what it may lose."""

import dataclasses

import controlled
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax import analysis


def _state(controller, acceptance, left=100, done=()):
  """A state of rows whose acceptance is known, and full purses."""
  rows = len(acceptance)
  lengths = jnp.full((rows,), 10, jnp.int32)
  seen = jnp.full((rows, 1, controller.lengths[-1]), 1e6)
  own = controller.init(lengths).replace(
      reached=seen, accepted=seen * jnp.array(acceptance)[:, None, None],
      needed=seen[..., 0], budget=jnp.full((rows,), 16.0))
  finished = jnp.zeros((rows,), bool)
  for row in done:
    finished = finished.at[row].set(True)
  return sj.types.DecodeState(
      tokens=None, lengths=lengths, limits=lengths + left, done=finished,
      keys=None, rounds=None, temperature=None, eos=None, target_cache=None,
      controller=own)


@pytest.mark.parametrize("acceptance", [
    (0.02,), (0.3,), (0.5,), (0.8,), (0.97,), (0.05, 0.9), (0.9, 0.2, 0.2)])
def test_the_length_with_the_most_tokens_a_second(acceptance):
  # Broken: the choice is not the best one, or not that of all rows together.
  controller = controlled.controller()
  choose = jax.jit(controller.choose)
  tokens = analysis.expected_tokens(
      np.array(acceptance)[:, None], np.array(controlled.LENGTHS)).sum(0)
  best = np.argmax(tokens / np.array(controlled.SECONDS))
  assert int(choose(_state(controller, acceptance))) == best
  # Rows that are done do not count, and a row's last token needs no draft.
  more = _state(controller, (*acceptance, 0.999, 0.999), done=(-1, -2))
  assert int(choose(more)) == best
  assert int(choose(_state(controller, acceptance, left=1))) == 0


def test_nothing_is_risked_that_is_not_there():
  # Broken: drafts are made from an empty budget, or a late drafter is free.
  controller = controlled.controller(reading=0.1)
  state = _state(controller, (0.9, 0.9))
  budget = lambda *values: state.replace(
      controller=state.controller.replace(budget=jnp.array(values)))
  for values, most in (((0.0, 0.0), 0), ((0.31, 0.31), 2), ((0.59, 0.59), 2),
                       ((0.0, 2.41), 4), ((2.39, 2.39), 4), ((2.41, 2.41), 8)):
    assert controlled.LENGTHS[int(controller.choose(budget(*values)))] == most
  late = budget(2.41, 2.41)
  late = late.replace(controller=late.controller.replace(
      known=jnp.array([2, 8])))  # of 10: 6 tokens to read, 0.6
  assert controlled.LENGTHS[int(controller.choose(late))] == 4


def test_a_draft_that_costs_little_more_may_be_tried():
  # Broken: where a pass of two tokens is dear, nothing but single tokens is
  # ever drafted, which gain little; or the longest draft is staked on.
  controller = controlled.controller(seconds=(1.0, 1.7, 1.8, 2.2))
  state = _state(controller, (0.9,))
  for budget, most in ((0.69, 0), (0.75, 2), (0.85, 4), (1.3, 4), (2.41, 8)):
    chosen = controller.choose(state.replace(
        controller=state.controller.replace(budget=jnp.array([budget]))))
    assert controlled.LENGTHS[int(chosen)] == most, budget


def test_a_batch_that_is_waited_for_goes_by_its_slowest_row():
  # Broken: rows that gain make the whole batch late, or their purses pay for
  # the row that loses; a row that is nearly done counts like any other.
  for waits, want in ((False, 8), (True, 0)):
    controller = controlled.controller(waits=waits)
    assert controlled.LENGTHS[int(controller.choose(
        _state(controller, (0.97, 0.97, 0.02))))] == want
  short = _state(controller, (0.97, 0.02))  # the slow row has 2 tokens left
  short = short.replace(limits=short.lengths + jnp.array([60, 2]))
  assert controlled.LENGTHS[int(controller.choose(short))] == 8
  poor = _state(controller, (0.9, 0.9))
  poor = poor.replace(controller=poor.controller.replace(
      budget=jnp.array([16.0, 0.31])))
  assert controlled.LENGTHS[int(controller.choose(poor))] == 2
  stats = sj.types.RoundStats(
      emitted=jnp.array([3, 1]), accepted=jnp.array([2, 0]), expected=None,
      survival=None, active=None, finite=None, draft_finite=None,
      law_finite=None)
  new = controller.learned(poor, stats, poor.lengths + stats.emitted, 1, 1)
  np.testing.assert_allclose(
      new.budget, [16.0, 0.31 + 1.02 - 1.3], atol=1e-5)


def test_the_first_draft_after_a_rest_costs_more():
  # Broken: what changing over takes is not taken out of the budget, or out of
  # those of drafts in a row.
  controller = controlled.controller(switching=0.5, credit=0.0)
  state = _state(controller, (0.9,))
  with_purse = lambda known, value: state.replace(
      controller=state.controller.replace(
          known=jnp.array([known]), budget=jnp.array([value])))
  for known, value, want in ((8, 0.31, 2), (7, 0.31, 0), (9, 0.31, 0),
                             (7, 0.81, 2)):
    chosen = int(controller.choose(with_purse(known, value)))
    assert controlled.LENGTHS[chosen] == want
  assert float(controller.init(state.lengths).budget[0]) == pytest.approx(0.8)


def test_a_rest_does_not_prolong_itself():
  # Broken: the longer a drafter rested and the more it has to read the less
  # it is asked again; changing over is believed to be cheap for short drafts.
  controller = controlled.controller(reading=0.05, switching=1.0)
  state = _state(controller, (0.6,))
  own = state.controller
  of = lambda **known: int(controller.choose(
      state.replace(controller=own.replace(**known))))
  assert of(known=state.lengths - 2) == 1
  assert of(known=state.lengths - 3) == 0  # 1.96 tokens in 2.3
  controller = dataclasses.replace(controller, switching=0.0)
  assert of(known=state.lengths - 62) == 1  # 3 tokens, and the budget has 16
  controller = dataclasses.replace(controller, switching=2.0)
  assert of(needed=jnp.zeros_like(own.needed)) == 0


def test_rests_are_told_beforehand():
  # Broken: drafting is tried before it can be afforded, or rounds later; a row
  # that joins others which wait is not asked; purses fill twice.
  controller = controlled.controller(reading=0.01, switching=0.1)
  rests = jax.jit(controller.rests)
  state = _state(controller, (0.9, 0.9))
  state = state.replace(controller=state.controller.replace(
      budget=jnp.full((2,), 0.315), known=state.lengths - 2))
  own, count = rests(state, 0)
  assert int(count) == 9  # (0.4 - 0.315) / (0.02 - 0.01), rounded up
  np.testing.assert_allclose(own.budget, 0.315 + 9 * 0.02, rtol=1e-5)
  later = lambda n: state.replace(lengths=state.lengths + n, controller=own)
  assert int(controller.choose(later(8))) == 0
  assert int(controller.choose(later(9))) > 0
  same, count = rests(later(4), 0)
  assert int(count) == 5
  np.testing.assert_array_equal(same.budget, own.budget)
  assert int(rests(later(9), 1)[1]) == 0
  joined = later(4).replace(controller=own.replace(
      until=own.until.at[1].set(0), budget=jnp.array([0.0, 0.0])))
  new, count = rests(joined, 0)
  assert int(count) == 32
  np.testing.assert_allclose(new.budget, [27 * 0.02, 32 * 0.02], rtol=1e-5)


def test_a_rest_that_ends_early_earns_no_more():
  # Broken: rows that wait are paid for rests which a row that joins them ends:
  # of a queue each arrival then adds to what may be lost.
  controller = controlled.controller(prior=0.9)
  state = _state(controller, (0.9, 0.9))
  resting = state.controller.replace(
      budget=jnp.array([0.1, 0.35]) + 0.02 * jnp.array([20, 0]),
      until=state.lengths + jnp.array([20, 0]), known=state.lengths - 2)
  state = state.replace(controller=resting)
  assert int(controller.choose(state)) == 0  # 0.225 of 0.3
  state = state.replace(controller=resting.replace(
      budget=resting.budget + 0.1))
  assert controlled.LENGTHS[int(controller.choose(state))] == 2
  stats = sj.types.RoundStats(
      emitted=jnp.array([1, 1]), accepted=jnp.array([0, 0]), expected=None,
      survival=None, active=None, finite=None, draft_finite=None,
      law_finite=None)
  new = controller.learned(state, stats, state.lengths + 1, 1, 1)
  np.testing.assert_allclose(
      new.budget, np.array([0.2, 0.45]) + 1.02 - 1.3, atol=1e-5)


def test_a_dear_draft_is_tried_once():
  # Broken: a draft that may lose more than `credit` is hardly ever tried.
  controller = controlled.controller(seconds=(1.0, 2.2, 4.0, 8.0), prior=0.9)
  state = _state(controller, (0.9,))
  state = state.replace(controller=controller.init(state.lengths))
  assert controlled.LENGTHS[int(controller.choose(state))] == 2


def _two_kinds(kinds, accepted, **options):
  """A state of rows whose next rounds are of these kinds."""
  controller = controlled.controller(first=(1.0, 1.1, 1.2, 1.3), **options)
  lengths = jnp.full((len(kinds),), 10, jnp.int32)
  seen = jnp.full((len(kinds), 2, 8), 1e6)
  return controller, sj.types.DecodeState(
      tokens=None, lengths=lengths, limits=lengths + 100,
      done=jnp.zeros((len(kinds),), bool), keys=None, rounds=None,
      temperature=None, eos=None, target_cache=None,
      controller=controller.init(lengths).replace(
          reached=seen, accepted=seen * jnp.array(accepted)[:, None],
          needed=seen[..., 0], kind=jnp.array(kinds),
          budget=jnp.full((len(kinds),), 16.0), known=lengths - 2))


def test_rounds_of_two_kinds_are_told_apart():
  # Broken: what one drafter of a fallback is worth, or costs, is held against
  # the other; a round in which one row asks the dear one is taken for cheap.
  controller, state = _two_kinds([0], [0.95, 0.1])
  of = lambda *kinds: state.replace(controller=state.controller.replace(
      kind=jnp.array(kinds)))
  assert controlled.LENGTHS[int(controller.choose(of(0)))] == 8
  assert int(controller.choose(of(1))) == 0
  own, count = controller.rests(of(1), 0)
  assert int(count) == 1  # the next round may have a match
  assert float(own.budget[0]) == 16
  poor = of(1).replace(controller=own.replace(budget=jnp.array([0.045])))
  assert int(controller.rests(poor.replace(
      lengths=poor.lengths + 1), 0)[1]) == 3  # 0.055 by 0.02 each
  # One seldom accepted token pays at the price of the first drafter alone.
  controller, state = _two_kinds([0, 0], [0.15, 0.15])
  assert controlled.LENGTHS[int(controller.choose(state))] == 2
  mixed = state.replace(controller=state.controller.replace(
      kind=jnp.array([0, 1])))
  assert int(controller.choose(mixed)) == 0
  assert int(controller.choose(mixed.replace(
      done=jnp.array([False, True])))) == 1
  stats = sj.types.RoundStats(
      emitted=jnp.array([3, 1]), accepted=jnp.array([2, 0]), expected=None,
      survival=None, active=None, finite=None, draft_finite=None,
      law_finite=None)
  mixed = mixed.replace(controller=mixed.controller.replace(
      budget=jnp.full((2,), 5.0), needed=jnp.zeros((2, 2))))
  before, new = mixed.controller, controller.learned(
      mixed, stats, mixed.lengths + stats.emitted, 1, 1)
  np.testing.assert_allclose(new.budget, 5 + 1.02 * 2 - 1.3, atol=1e-5)
  np.testing.assert_array_equal(new.needed, [[1, 0], [0, 1]])
  for name in ("reached", "accepted"):
    was, now = (np.asarray(getattr(one, name)) for one in (before, new))
    np.testing.assert_array_equal(now[[0, 1], [1, 0]], was[[0, 1], [1, 0]])
    np.testing.assert_allclose(
        now[[0, 1], [0, 1]], 0.9 * was[[0, 1], [0, 1]], atol=2)


def test_deep_places_are_believed_to_be_like_those_before():
  # Broken: a length that was never tried is never tried.
  controller = controlled.controller(prior=0.5)
  own = _state(controller, (0.0,)).controller
  own = own.replace(
      reached=jnp.zeros((1, 1, 8)).at[..., :2].set(jnp.array([20.0, 10.0])),
      accepted=jnp.zeros((1, 1, 8)).at[..., :2].set(jnp.array([9.5, 9.0])))
  first = (9.5 + 2 * 0.5) / 22
  second = (9 + 2 * first) / 12
  want = first * second ** np.arange(8)
  np.testing.assert_allclose(controller.survival(own)[0], want, rtol=1e-5)
