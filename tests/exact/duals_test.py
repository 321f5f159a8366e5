"""Certificates in fractions, and the best draft lengths."""

import fractions
import functools
import itertools

import numpy as np
import pytest

from specjax import analysis
from specjax import exact
from specjax.methods import stop_rules
from specjax.verifiers import Block
from specjax.verifiers import KSeq
from specjax.verifiers import Traversal

Fraction = fractions.Fraction
_compiled = functools.cache(exact.Compiled)
_KINDS = ("dense", "zeros", "one_hot_target", "one_hot_draft", "mixed")
_TREE = (-1, 0, 0, 1, 1, 2)


def _rows(table):
  rows = [[Fraction(float(x)) for x in row] for row in table]
  return [[x / sum(row) for x in row] for row in rows]


def _block_accepts(pair, gamma):
  """E[tau] of block verification in fractions: sum of p / max_j R_j."""
  vocab, total = pair.vocab_size, Fraction(0)
  p, q = ([_rows(table) for table in tables[:gamma]] for tables in pair)
  for text in itertools.product(range(vocab), repeat=gamma):
    context, reach, ratio, largest = 0, Fraction(1), Fraction(1), Fraction(1)
    for depth, token in enumerate(text):
      p_x, q_x = (side[depth][context][token] for side in (p, q))
      if not p_x or not q_x:
        break
      context, reach = context * vocab + token, reach * p_x
      ratio *= p_x / q_x
      largest = max(largest, ratio)
      # Every longer text with this prefix adds the same: count it once.
      if not any(text[depth + 1:]):
        total += reach / largest
  return total


@pytest.mark.parametrize("kind", _KINDS)
def test_chains_have_a_certificate_without_a_gap(kind):
  # Broken: max_j R_j, in the potential or in the evaluation of the bound. The
  # equality is one of rational numbers.
  for vocab, gamma in ((2, 4), (3, 2)):
    pair = exact.random_pair(kind, vocab, gamma + 1, 4)
    bound = analysis.dual_bound(pair, range(-1, gamma), "iid",
                             analysis.chain_potential(pair, gamma))
    assert bound == _block_accepts(pair, gamma)
    assert abs(float(bound) - analysis.verifier_optimum(pair, gamma)) <= 1e-9


@pytest.mark.parametrize("scheme", [
    "iid", "paths", "without_replacement", "top_k", "hybrid", "several"])
def test_trees_have_certificates(scheme):
  # Broken: the bound is below the optimum, so it is none; or so far above that
  # it says nothing.
  for kind in ("dense", "zeros", "mixed"):
    pair = exact.random_pair(kind, 3, 3, 0)
    bound = analysis.dual_bound(pair, _TREE, scheme,
                             analysis.tree_potential(pair, _TREE, scheme))
    assert isinstance(bound, Fraction)
    optimum = analysis.tree_optimum(pair, _TREE, scheme)
    assert -1e-9 <= float(bound) - optimum <= 1e-6


def test_trees_of_next_to_no_probability():
  # Broken: the solver refuses ratios of 1e20, or its prices mean nothing.
  rng = np.random.default_rng(0)
  for _ in range(4):
    pair = exact.Pair(*([rng.dirichlet(np.full(3, 0.05), size=3**n)
                         for n in range(3)] for _ in "pq"))
    bound = analysis.dual_bound(pair, _TREE, "iid",
                             analysis.tree_potential(pair, _TREE, "iid"))
    optimum = analysis.tree_optimum(pair, _TREE, "iid")
    assert -1e-7 <= float(bound) - optimum <= 1e-5


def test_any_potential_is_a_bound():
  # Broken: the bound relies on the solver after all.
  rng = np.random.default_rng(0)
  pair = exact.random_pair("dense", 3, 3, 0)
  best = analysis.tree_potential(pair, _TREE, "iid")
  optimum = analysis.tree_optimum(pair, _TREE, "iid")
  for size in (0, 1e-3, 1):
    potential = [x + Fraction(float(e)) for x, e in zip(
        best, size * rng.normal(size=len(best)))]
    assert float(analysis.dual_bound(pair, _TREE, "iid", potential)) >= (
        optimum - 1e-9)
  for rule in (Traversal(), KSeq()):
    accepted = exact.enumerate_trees(
        _compiled(rule), pair, _TREE, "iid").expected_accepted
    bound = float(analysis.dual_bound(pair, _TREE, "iid", best))
    assert accepted <= bound + 1e-12


_stops = functools.cache(lambda threshold: exact.ended_by(
    stop_rules.Confidence(threshold=threshold)))


@pytest.mark.parametrize("eos", [None, 2])
def test_best_draft_lengths(eos):
  # Broken: the price of a token. The cost is that of the production code with
  # the drafts cut as it says; no stop rule and no fixed length costs less.
  pair, gamma, length = exact.random_pair("mixed", 3, 9, 5), 4, 5
  for token_cost in (0.0, 0.05, 0.2, 2.0):
    cost = functools.partial(
        analysis.remaining_rounds, _compiled(Block()), pair, length=length,
        eos=eos, token_cost=token_cost)
    best = analysis.best_draft_lengths(pair, gamma, length, token_cost, eos=eos)
    np.testing.assert_allclose(
        best.cost, cost(gamma=gamma, ended=best.ended), atol=1e-12)
    others = [cost(gamma=fixed) for fixed in range(gamma + 1)]
    others += [cost(gamma=gamma, ended=_stops(t)) for t in (0.3, 0.6)]
    for other in others:
      assert (best.cost <= other + 1e-12).all()
    if token_cost == 0:  # a token costs nothing: the longest drafts
      np.testing.assert_allclose(best.cost, others[gamma], atol=1e-12)
    if token_cost == 2:  # more than it can save
      np.testing.assert_allclose(best.cost, others[0], atol=1e-12)
