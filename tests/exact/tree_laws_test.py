"""Proofs that the rules on trees are exact, and what the loop relies on."""

import functools
import itertools

import jax
import numpy as np
import pytest

from specjax import exact
from specjax import testing
from specjax.interfaces import Verifier
from specjax.types import Draft
from specjax.verifiers import Block
from specjax.verifiers import KSeq
from specjax.verifiers import Recursive
from specjax.verifiers import TargetWalk
from specjax.verifiers import Token
from specjax.verifiers import Traversal

_RULES = [Recursive(), Traversal(), TargetWalk(), KSeq()]
_each_rule = pytest.mark.parametrize(
    "rule", _RULES, ids=lambda rule: type(rule).__name__)


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("thorough", [
    False, pytest.param(True, marks=pytest.mark.slow)])
@_each_rule
def test_rule_is_lossless(rule, thorough):
  # Broken: the emitted text no longer follows the target's law, for some
  # tree, order of its nodes, and way to draw it; or padding changes a law; or
  # the report omits trials.
  found = testing.assert_lossless(
      rule, vocab_sizes=(3,), gammas=(1,), kinds=("dense", "zeros", "mixed"),
      thorough=thorough)
  assert found.total_variation <= 1e-12
  # All 33 trees of 2 to 5 nodes and 12 larger ones; two rounds on 9 of them.
  assert found.trees == 45 * len(exact.schemes.sound_for(rule)) * 3
  for words in (f"{found.trees:,} with trees", *(thorough * (
      "on these models", "end in padding", "product chains", "float32",
      "V = 11", "trees of 10 nodes", "trees of up to 7 nodes"))):
    assert words in str(found), words


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("dtype,vocab_size", [("float64", 4), ("float32", 3)])
@_each_rule
def test_rule_is_lossless_elsewhere(rule, dtype, vocab_size):
  # Broken: what shows only where more tokens than children are left, or a
  # guard that float64 does not need.
  compiled = exact.Compiled(rule)
  for parents, scheme, kind in itertools.product(
      ((-1, 0, 0, 0), (-1, 0, 1, 0, 1), (-1, 0, 0, 2, 1), (-1, 0, 0, 0, 0)),
      exact.schemes.sound_for(rule), ("dense", "equal", "mixed")):
    found = exact.enumerate_trees(
        compiled, exact.random_pair(kind, vocab_size, 3, 0), parents, scheme,
        dtype=dtype, nodes=5)
    assert found.total_variation <= {"float64": 1e-12, "float32": 1e-6}[dtype]
    assert not found.defects


def test_certify_takes_trees_from_what_a_rule_says():
  # Broken: a rule for trees is approved on chains alone, or one for chains is
  # rejected for trees that it never meets.
  class Silent(Verifier):
    """Says nothing of what it requires: a chain."""

    def law(self, draft, p):
      return Recursive().law(draft, p)

  few = dict(vocab_sizes=(3,), gammas=(1,), kinds=("dense",), rounds=1,
             thorough=False)
  for rule, takes in ((Token(), False), (Recursive(), True), (Silent(), False)):
    found = exact.certify(rule, **few)
    assert bool(found.trees) == takes and found.lossless
  assert exact.certify(Recursive(), trees=(), **few).trees == 0
  assert not exact.certify(Recursive(), drafting="product", **few).trees
  # A chain rule says itself that it is not one for trees: it is not.
  found = exact.certify(Token(), trees=((-1, 0, 0),), schemes=("iid",), **few)
  assert not found.lossless
  assert "parents=(-1, 0, 0), scheme=iid" in str(found)


def test_schemes_may_be_functions():
  # Broken: a researcher's own way to draft cannot be tried.
  pair = exact.random_pair("dense", 3, 3, 0)
  tree = (-1, 0, 0, 1)
  one, other = (
      exact.enumerate_trees(Recursive(), pair, tree, scheme, nodes=5)
      for scheme in ("hybrid", exact.schemes.hybrid))
  np.testing.assert_array_equal(one.law, other.law)


@pytest.mark.parametrize("scheme", exact.schemes.CONDITIONAL)
def test_schemes_draw_what_they_report(scheme):
  # Broken: the enumeration proves rules for drafts that are none.
  pair = exact.random_pair("mixed", 3, 4, 1)
  parents, q = (-1, 0, 0, 1, 0, 0), np.concatenate(pair.q)
  drafts = scheme(exact.Drafts.roots(np.array([0, 2]), 3), q, parents)
  for start in range(2):
    assert abs(drafts.weights[drafts.starts == start].sum() - 1) <= 1e-12
  drawn = np.take_along_axis(drafts.probs, drafts.tokens[..., None], -1)
  real = drafts.probs.any(-1)
  np.testing.assert_allclose(
      np.where(real, drawn[..., 0], 1).prod(-1), drafts.weights)
  np.testing.assert_allclose(drafts.probs[real].sum(-1), 1)
  if scheme is exact.schemes.without_replacement:
    assert not real[:, 5].any()  # a fourth child of three tokens
    assert real[:, 4].all()


# What the loop relies on besides losslessness.


_SHAPE = 256, 10  # drafts and nodes of all calls: few laws are compiled


def _evaluate(rule, tokens, parents, q, p):
  """The laws of many drafts, padded and cut so that calls share code."""
  count, nodes = tokens.shape
  wide = lambda x, fill: np.concatenate(
      [x, np.full((len(x), _SHAPE[1] - nodes, *x.shape[2:]), fill, x.dtype)],
      axis=1)
  arrays = (wide(tokens, 0), wide(parents, 0), wide(q, 0),
            wide(p, 1 / p.shape[-1]))
  with jax.enable_x64(True):
    parts = [_compiled(rule)(*(
        np.resize(x[i:i + _SHAPE[0]], (_SHAPE[0], *x.shape[1:]))
        for x in arrays)) for i in range(0, count, _SHAPE[0])]
    return jax.tree.map(
        lambda *x: np.concatenate(x)[:count, :nodes], *parts)


@functools.cache
def _compiled(rule):
  return jax.jit(jax.vmap(
      lambda tokens, parents, q, p: rule.law(Draft(tokens, parents, q), p)))


def _outcomes(law):
  return law.stop[..., None] * law.next_token


def _random_drafts(parents, count, vocab, seed):
  """Random laws and iid tokens: tokens, parents, q and p of `count` drafts."""
  rng = np.random.default_rng(seed)
  parents = np.asarray(parents)
  nodes = len(parents)
  p = rng.dirichlet(np.full(vocab, 0.5), (count, nodes))
  q = rng.dirichlet(np.ones(vocab), (count, nodes))[:, parents]
  q[:, 0] = 0
  tokens = np.array([[rng.choice(vocab, p=row) if row.any() else 0
                      for row in rows] for rows in q], np.int32)
  return tokens, np.tile(parents.astype(np.int32), (count, 1)), q, p


@pytest.mark.parametrize("rule,of_chains", [
    (Recursive(), Token()), (Traversal(), Block()), (KSeq(), Token())])
def test_chains_are_a_special_case(rule, of_chains):
  # Broken: a rule on trees is not what it is said to generalise.
  arrays = _random_drafts(range(-1, 5), 200, 4, seed=0)
  np.testing.assert_allclose(
      _outcomes(_evaluate(rule, *arrays)),
      _outcomes(_evaluate(of_chains, *arrays)), atol=1e-12)


def _greedy(tokens, parents, best, merge):
  """The node that greedy decoding reaches: at siblings alike, the first."""
  at = [0]
  while True:
    below = [i for i, parent in enumerate(parents)
             if i and parent in at and tokens[i] == best[at[0]]]
    if not below:
      return at[0]
    at = below if merge else below[:1]


@_each_rule
def test_one_hot_target_is_greedy_decoding(rule):
  # Broken: temperature 0 is no greedy walk through the tree.
  parents = (-1, 0, 1, 0, 0, 4, 2, 4)
  tokens, rows, q, _ = _random_drafts(parents, 500, 4, seed=1)
  merge = isinstance(rule, TargetWalk)
  # The target's best token is a function of the text, so that copies agree.
  text = np.zeros((500, 8), int)
  for i, parent in enumerate(parents[1:], 1):
    text[:, i] = text[:, parent] * 4 + tokens[:, i] + 1
  best = np.random.default_rng(0).integers(4, size=4**4)[text]
  law = _evaluate(rule, tokens, rows, q, np.eye(4)[best])
  stops = np.array([_greedy(*row, merge=merge)
                    for row in zip(tokens, rows, best)])
  depth = np.array([0, 1, 2, 1, 1, 2, 3, 2])
  assert set(depth[stops]) == {0, 1, 2, 3}
  np.testing.assert_allclose(law.stop, np.eye(8)[stops], atol=1e-15)
  each = np.arange(500)
  np.testing.assert_allclose(law.next_token[each, stops],
                             np.eye(4)[best[each, stops]], atol=1e-15)


@pytest.mark.parametrize("token", [0, 9])
@_each_rule
def test_zero_rows_are_padding(rule, token):
  # Broken: ragged trees and look-ahead positions (ids >= V) change the law,
  # wherever they stand; or something below padding is accepted.
  parents = np.array([-1, 0, 1, 0, 0, 4])
  tokens, rows, q, p = _random_drafts(parents, 50, 4, seed=2)
  law = _outcomes(_evaluate(rule, tokens, rows, q, p))
  # The nodes of the tree stand at `places`; the others are padding.
  places = np.array([0, 2, 4, 5, 8, 9])
  wide = np.array([-1, 0, 0, 2, 2, 0, 1, 5, 0, 8], np.int32)
  np.testing.assert_array_equal(wide[places[1:]], places[parents[1:]])
  padded_tokens = np.full((50, 10), token, np.int32)
  padded_tokens[:, places] = tokens
  padded_q, padded_p = np.zeros((50, 10, 4)), np.full((50, 10, 4), 0.25)
  padded_q[:, places], padded_p[:, places] = q, p
  # Node 6 hangs below padding; it is drawn from a law, but cannot be reached.
  padded_q[:, 6], padded_tokens[:, 6] = [0, 1, 0, 0], 1
  padded = _outcomes(_evaluate(
      rule, padded_tokens, np.tile(wide, (50, 1)), padded_q, padded_p))
  np.testing.assert_allclose(padded[:, places], law, atol=1e-14)
  assert (np.delete(padded, places, axis=1) == 0).all()


_EYE = np.eye(4)
_ROWS = {
    "zero": np.zeros(4), "one_hot": _EYE[0], "other": _EYE[1],
    "uniform": np.full(4, 0.25), "half": np.array([0.5, 0.5, 0, 0]),
    "tiny": np.array([1 - 3e-30, 1e-30, 1e-30, 1e-30])}


@pytest.mark.default_cases(3)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@_each_rule
def test_degenerate_laws_stay_laws(rule, dtype):
  # Broken: 0/0 gives NaN for zero, one-hot, equal or disjoint p and q.
  cases = list(itertools.product(
      itertools.product((0, 3), repeat=3), itertools.product(_ROWS, repeat=3),
      itertools.product(list(_ROWS)[1:], repeat=2)))
  tokens = np.array([(0, *tokens) for tokens, _, _ in cases], np.int32)
  parents = np.tile(np.array([-1, 0, 0, 1], np.int32), (len(cases), 1))
  q = np.array([[_ROWS[name] for name in ("zero", *names)]
                for _, names, _ in cases], dtype)
  p = np.array([[_ROWS[name] for name in (*names, "half", "half")]
                for _, _, names in cases], dtype)
  law = _evaluate(rule, tokens, parents, q, p)
  assert law.stop.dtype == law.next_token.dtype == dtype
  assert np.isfinite(law.stop).all() and (law.stop >= 0).all()
  assert np.isfinite(law.next_token).all() and (law.next_token >= 0).all()
  np.testing.assert_allclose(law.stop.sum(-1), 1, atol=1e-6)
  np.testing.assert_allclose(law.next_token.sum(-1), 1, atol=1e-6)


@_each_rule
def test_large_vocabulary_in_float32(rule):
  # Broken: sums over a real vocabulary lose so many digits that rows are no
  # laws any more.
  rng = np.random.default_rng(0)
  parents, vocab = np.array([-1, 0, 0, 0, 1, 1, 2, 4]), 32_000
  softmax = lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True)
  logits = 2 * rng.standard_normal((8, vocab))
  p = softmax(logits)
  q = softmax(logits + 0.5 * rng.standard_normal((8, vocab)))[parents]
  tokens = np.array([rng.choice(vocab, p=row) for row in q], np.int32)
  q[0] = 0
  law = jax.jit(rule.law)(
      Draft(tokens, parents.astype(np.int32), q.astype(np.float32)),
      p.astype(np.float32))
  assert (law.stop >= 0).all() and (law.next_token >= 0).all()
  assert abs(np.asarray(law.stop, np.float64).sum() - 1) <= 1e-6
  np.testing.assert_allclose(
      np.asarray(law.next_token, np.float64).sum(-1), 1, atol=1e-6)


@_each_rule
def test_one_node_is_the_target(rule):
  # Broken: decoding with an empty draft.
  p = np.array([[0.25, 0.75]], np.float32)
  law = jax.jit(rule.law)(
      Draft(np.zeros(1, np.int32), np.full(1, -1, np.int32), 0 * p), p)
  np.testing.assert_array_equal(_outcomes(law), p)


def test_target_walk_follows_a_text_below_any_copy():
  # Broken: of siblings alike only one is followed, and TargetWalk accepts less
  # than the longest text that the tree holds.
  parents = np.array([[-1, 0, 0, 2]], np.int32)
  tokens = np.array([[0, 1, 1, 2]], np.int32)
  q = np.full((1, 4, 4), 0.25)
  p = np.tile(np.array([0.2, 0.3, 0.5, 0]), (1, 4, 1))
  law = _evaluate(TargetWalk(), tokens, parents, q, p)
  np.testing.assert_allclose(
      law.stop, [[0.7, 0.3 * 0.5, 0, 0.3 * 0.5]], atol=1e-15)
  # Behind the first copy the text goes on with token 2, below the second.
  np.testing.assert_allclose(
      law.next_token[0, :2], [[2 / 7, 0, 5 / 7, 0], [0.4, 0.6, 0, 0]],
      atol=1e-15)


@pytest.mark.parametrize("vocab,count,seed", [
    (3, 2, 0), (4, 3, 1), (50, 2, 2), (50, 7, 3), (5, 1, 4)])
def test_k_seq_finds_the_least_rho(vocab, count, seed):
  # Broken: the search stops early, and KSeq accepts less than it could; or at
  # the wrong end of its bracket, and it is not exact.
  rng = np.random.default_rng(seed)
  p, q = rng.dirichlet(np.full(vocab, 0.5), 2)

  def holds(rho):
    beta = np.minimum(q, p / rho).sum()
    return 1 - (1 - beta)**count <= rho * beta

  low, high = 1.0, float(count)
  for _ in range(60):
    middle = (low + high) / 2
    low, high = (low, middle) if holds(middle) else (middle, high)
  with jax.enable_x64(True):
    rho = float(KSeq()._rho(*map(jax.numpy.asarray, (p, q)), float(count)))
  assert abs(rho - high) <= 1e-11
  assert holds(rho * (1 + 1e-13)) and (count == 1 or not holds(rho * 0.999))
