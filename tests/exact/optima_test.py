"""Ceilings: closed form, linear programs, and the rules that attain them."""

import functools

import numpy as np
import pytest

from specjax import analysis
from specjax import exact
from specjax.verifiers import Block
from specjax.verifiers import GreedyBlock
from specjax.verifiers import Token

_compiled = functools.cache(exact.Compiled)


def _accepted(rule, pair, gamma):
  return exact.expected_tokens(_compiled(rule), pair, gamma, rounds=1)[0] - 1


@pytest.mark.default_cases(4)
@pytest.mark.parametrize("vocab,gamma", [(2, 4), (3, 2), (3, 3), (4, 2)])
@pytest.mark.parametrize("kind", ["dense", "zeros", "mixed"])
def test_rules_attain_their_optima(kind, vocab, gamma):
  # Broken: a rule, or the ceiling that it is measured by.
  for seed in range(3):
    pair = exact.random_pair(kind, vocab, gamma + 1, seed)
    block = _accepted(Block(), pair, gamma)
    everything = exact.full_information_optimum(pair, gamma)
    assert abs(analysis.verifier_optimum(pair, gamma) - block) <= 1e-9
    assert abs(analysis.transport_optimum(pair, gamma) - everything) <= 1e-9
    assert abs(_accepted(GreedyBlock(), pair, gamma) - everything) <= 1e-12
    assert (_accepted(Token(), pair, gamma) - 1e-12 <= block
            <= everything + 1e-12)


def test_paper_example():
  # Broken: the programs are not those of arXiv:2403.10444.
  pair = exact.iid_pair((1 / 3, 2 / 3), (2 / 3, 1 / 3), 3)
  assert abs(analysis.verifier_optimum(pair, 2) - 11 / 9) <= 1e-12
  assert abs(analysis.transport_optimum(pair, 2) - 12 / 9) <= 1e-12


def test_value_of_one_prefix():
  # Broken: weights land on other prefixes. Of a prefix alone the most that a
  # valid verifier can accept is q(x^i) p_i(x^i) (Lemma 4): here of "aa" in the
  # paper's example, with q = 4/9 and p_2 = 1/4.
  pair = exact.iid_pair((1 / 3, 2 / 3), (2 / 3, 1 / 3), 3)
  weights = [np.zeros(2), np.array([1.0, 0, 0, 0])]
  assert abs(analysis.verifier_optimum(pair, 2, weights) - 1 / 9) <= 1e-12


def test_equal_and_disjoint_models():
  # Broken: 0/0 in the scaling of the programs.
  equal = exact.random_pair("equal", 3, 4, 0)
  disjoint = exact.random_pair("disjoint", 3, 4, 0)
  for optimum in (analysis.verifier_optimum, analysis.transport_optimum):
    assert abs(optimum(equal, 3) - 3) <= 1e-9
    assert abs(optimum(disjoint, 3)) <= 1e-9


def test_float32_laws():
  # Broken: rows that sum to 1 in float32 alone make the programs infeasible,
  # and the solver then answers nonsense.
  p = np.array([1 / 3, 2 / 3], np.float32)
  pair = exact.iid_pair(p, p[::-1], 3)
  assert abs(analysis.verifier_optimum(pair, 2) - 11 / 9) <= 1e-7
  rounded = exact.Pair([t + 1e-8 for t in pair.p], pair.q)
  for optimum in (analysis.verifier_optimum, analysis.transport_optimum,
                  exact.full_information_optimum):
    with pytest.raises(ValueError, match="normalise"):
      optimum(rounded, 2)


@pytest.mark.parametrize("alpha,seed", [(0.02, 0), (0.02, 1), (0.1, 0)])
def test_probabilities_far_below_the_solvers_tolerance(alpha, seed):
  # Broken: ratios p / q of 1e20 are refused by the solver, or taken for 0.
  vocab, gamma, length = 3, 3, 5
  rng = np.random.default_rng(seed)
  tables = lambda: [rng.dirichlet(np.full(vocab, alpha), size=vocab**n)
                    for n in range(length + gamma)]
  pair = exact.Pair(tables(), tables())
  block = analysis.remaining_rounds(_compiled(Block()), pair, gamma, length)
  assert abs(analysis.verifier_optimum(pair, gamma)
             - _accepted(Block(), pair, gamma)) <= 1e-8
  np.testing.assert_allclose(
      analysis.fewest_remaining_rounds(pair, gamma, length), block, atol=1e-7)
