"""Several rounds: a theorem that fails, and two theorems that hold."""

import functools

import numpy as np
import pytest

from specjax import analysis
from specjax import exact
from specjax.interfaces import Verifier
from specjax.verifiers import Block
from specjax.verifiers import GreedyBlock
from specjax.verifiers import Token

_compiled = functools.cache(exact.Compiled)
_KINDS = ("dense", "zeros", "one_hot_target", "one_hot_draft", "mixed")


def _tokens(rule, pair, gamma, rounds):
  return exact.expected_tokens(_compiled(rule), pair, gamma, rounds)


def _ties(vocab, depth, seed):
  """A pair whose probabilities are multiples of 1/4: many equal ratios."""
  rng = np.random.default_rng(seed)
  table = lambda n: rng.multinomial(
      4, np.full(vocab, 1 / vocab), size=vocab**n) / 4
  tables = lambda: [table(n) for n in range(depth)]
  return exact.Pair(tables(), tables())


@pytest.mark.parametrize("gamma,block,patient", [
    (3, (4, 49 / 8), (3, 25 / 4)), (4, (5, 22 / 3), (4, 23 / 3)),
    (5, (6, 137 / 16), (5, 73 / 8))])
def test_patient_has_more_tokens_after_two_rounds(gamma, block, patient):
  # Broken: the counterexample to the paper's Theorem 2 after two rounds.
  pair = analysis.patient_pair(gamma, 2 * (gamma + 1))
  for rule, known in ((Block(), block), (analysis.Patient(), patient)):
    np.testing.assert_allclose(
        _tokens(rule, pair, gamma, 2), known, rtol=0, atol=1e-12)
  if gamma < 5:  # no valid rule has more than `Patient`
    np.testing.assert_allclose(
        analysis.most_tokens(pair, gamma, 2), [block[0], patient[1]], atol=1e-9)


def test_two_drafted_tokens_take_three_rounds_to_refute():
  # Broken: the counterexample at gamma 2, or the theorem that two rounds are
  # not enough there.
  pair = analysis.patient_pair(2, 9)
  block, patient = (_tokens(rule, pair, 2, 3)
                    for rule in (Block(), analysis.Patient()))
  np.testing.assert_allclose(block, [3, 40 / 9, 19 / 3], atol=1e-12)
  np.testing.assert_allclose(patient, [2, 13 / 3, 20 / 3], atol=1e-12)
  np.testing.assert_allclose(
      analysis.most_tokens(pair, 2, 3), [3, 40 / 9, 20 / 3], atol=1e-9)


@pytest.mark.parametrize("gamma,rounds", [(1, 3), (2, 2)])
def test_short_drafts_leave_block_verification_optimal(gamma, rounds):
  # Broken: the theorem for gamma 1 (all rounds) and gamma 2 (two rounds).
  for kind in _KINDS:
    pair = exact.random_pair(kind, 2, rounds * (gamma + 1), 0)
    np.testing.assert_allclose(
        analysis.most_tokens(pair, gamma, rounds),
        _tokens(Block(), pair, gamma, rounds), atol=1e-9)


def test_longer_drafts_can_have_fewer_tokens():
  # Broken: the pair that shows it.
  pair = analysis.patient_pair(5, 14, certain=6)
  assert abs(_tokens(Block(), pair, 5, 2)[1] - 10.125) <= 1e-12
  assert abs(_tokens(Block(), pair, 6, 2)[1] - 9.5625) <= 1e-12


@pytest.mark.parametrize("length,block,patient", [
    (4, 1, 2), (5, 2, 9 / 4), (6, 39 / 16, 5 / 2), (7, 43 / 16, 11 / 4),
    (8, 59 / 16, 15 / 4)])
def test_block_needs_fewer_rounds_on_the_same_pair(length, block, patient):
  # Broken: the number of rounds, which is no function of the tokens of a fixed
  # number of rounds.
  pair = analysis.patient_pair(3, length + 3)
  for rule, known in ((Block(), block), (analysis.Patient(), patient)):
    assert abs(analysis.expected_rounds(_compiled(rule), pair, 3, length)
               - known) <= 1e-12
  assert abs(analysis.fewest_rounds(pair, 3, length) - block) <= 1e-9


def test_block_is_not_optimal_in_every_quantile():
  # Broken: the distribution behind the mean.
  pair = analysis.patient_pair(3, 10)
  block, patient = (
      analysis.rounds_distribution(_compiled(rule), pair, 3, 7)
      for rule in (Block(), analysis.Patient()))
  assert abs(block.probs[:3].sum() - 9 / 16) <= 1e-12
  assert abs(patient.probs[:3].sum() - 3 / 4) <= 1e-12
  assert block.quantile(0.75) == 3 and patient.quantile(0.75) == 2
  assert block.quantile(1) == 4 and patient.quantile(1) == 5
  squares = block.probs @ np.arange(8)**2
  assert abs(block.variance - (squares - (43 / 16)**2)) <= 1e-12
  with pytest.raises(ValueError, match="level is 0"):
    block.quantile(0)


def test_patient_is_lossless():
  # Broken: the counterexample, if its rule is not valid.
  assert exact.certify(analysis.Patient(), vocab_sizes=(3,), gammas=(1, 2, 3),
                       rounds=1, kinds=("one_hot_draft", "mixed"),
                       thorough=False).lossless


@pytest.mark.parametrize("eos", [None, 1])
def test_block_needs_the_fewest_rounds(eos):
  # Broken: Theorem R, or one of the two sides that it is checked by.
  pairs = [exact.random_pair(kind, vocab, 8, 1)
           for kind in _KINDS for vocab in (2, 3)]
  token = []
  for pair in (*pairs, _ties(3, 8, 0), _ties(2, 8, 1)):
    for gamma, length in ((2, 5), (3, 4)):
      settings = dict(pair=pair, gamma=gamma, length=length, eos=eos)
      rule = _compiled(Block())
      block = analysis.remaining_rounds(rule, **settings)
      fewest = analysis.fewest_remaining_rounds(**settings)
      np.testing.assert_allclose(fewest, block, rtol=0, atol=1e-7)
      # The other way to the same number, through the distribution.
      assert abs(analysis.expected_rounds(rule, **settings) - block[0]) <= 1e-12
      value = analysis.token_value(rule, **settings)
      p, q = (np.concatenate(x[:length]) for x in pair)
      least = np.where(p > 0, 0, q)
      if eos is not None:
        least[:, eos] = q[:, eos]
      least = np.where(block == 0, 0, least.sum(-1))  # 0: after the eos
      assert (value - least).min() >= -1e-12
      token.append((analysis.remaining_rounds(_compiled(Token()), **settings)
                    - block).max())
  assert min(token) >= -1e-12 and max(token) > 0.01


class _AcceptsEverything(Verifier):
  """Accepts every draft, whatever the target's probabilities are."""

  lossless = False

  def law(self, draft, target_probs):
    law = Block().law(draft, target_probs)
    last = np.arange(law.stop.shape[0]) == law.stop.shape[0] - 1
    return law.replace(stop=last.astype(law.stop.dtype))


def test_a_rule_that_is_not_valid_can_need_fewer():
  # Broken: the bound is not a bound of valid rules, but of all rules.
  pair = exact.random_pair("dense", 3, 8, 0)
  found = analysis.expected_rounds(_AcceptsEverything(), pair, 3, 5)
  assert found < analysis.fewest_rounds(pair, 3, 5) - 0.1


@pytest.mark.parametrize("kind", _KINDS)
def test_block_is_never_behind_token_verification(kind):
  # Broken: Theorem T. On every text, after every number of rounds, fewer than
  # k tokens are at least as probable with token verification.
  pair = exact.random_pair(kind, 3, 9, 2)
  block, token = (
      np.cumsum(analysis.progress_given_text(
          _compiled(rule), pair, 3, 6, rounds=4), axis=-1)
      for rule in (Block(), Token()))
  assert block.shape == (4, 3**6, 7)
  assert (token - block).min() >= -1e-12
  assert abs(block[..., -1] - 1).max() <= 1e-12


def test_progress_on_texts_averages_to_the_tokens_of_rounds():
  # Broken: a round from the wrong position, or the wrong conditional.
  pair = exact.random_pair("zeros", 3, 9, 1)
  progress = analysis.progress_given_text(_compiled(Token()), pair, 2, 6, 2)
  texts = exact.enumerate_chains(_compiled(Token()), pair, 2, 2).target
  mean = np.einsum("t,rtk,k->r", texts, progress, np.arange(7))
  np.testing.assert_allclose(
      mean, _tokens(Token(), pair, 2, 2), rtol=0, atol=1e-12)


def test_greedy_block_can_be_behind_token_verification():
  # Broken: what the docstring of `GreedyBlock` warns of.
  pair = exact.random_pair("zeros", 3, 9, 0)
  token, greedy = (_tokens(rule, pair, 2, 3)[2]
                   for rule in (Token(), GreedyBlock()))
  assert abs(token - 4.155) < 1e-3 and abs(greedy - 4.118) < 1e-3


def test_rules_with_state():
  # Broken: states are lost between the rounds. With one drafted token greedy
  # block verification modifies nothing and is block verification.
  pair = exact.random_pair("mixed", 3, 8, 0)
  block, greedy = (analysis.expected_rounds(_compiled(rule), pair, 1, 5)
                   for rule in (Block(), GreedyBlock()))
  assert abs(block - greedy) <= 1e-12
  assert (analysis.expected_rounds(_compiled(GreedyBlock()), pair, 3, 5)
          >= analysis.fewest_rounds(pair, 3, 5) - 1e-9)
