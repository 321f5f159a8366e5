"""Settings, models and trees that the exact evaluation refuses."""

import functools

import numpy as np
import pytest
import refusals

from specjax import analysis
from specjax import exact
from specjax.verifiers import Block
from specjax.verifiers import Distance
from specjax.verifiers import GreedyBlock
from specjax.verifiers import Recursive
from specjax.verifiers import Token
from specjax.verifiers import TopK
from specjax.verifiers import Typical

_with = functools.partial
_PAIR, _SMALL = (exact.random_pair("dense", v, 8, 0) for v in (3, 2))
_GOOD = exact.iid_pair([0.5, 0.5], [0.25, 0.75], 3)
_BAD = exact.Pair([1.1 * table for table in _GOOD.p], _GOOD.q)
_NAN = exact.Pair(_GOOD.p, [np.nan * table for table in _GOOD.q])
_TREE = (-1, 0, 0, 1, 1, 2)
_FEW = dict(vocab_sizes=(3,), gammas=(1,), kinds=("dense",), rounds=1,
            thorough=False)


def _never(*_):
  raise AssertionError("a sampler is called with settings out of range")


_trees = _with(exact.enumerate_trees, Recursive(), _PAIR)
_audit = _with(exact.audit_sampler, _never)
_quantile = _with(analysis.best_quantile, _SMALL)
_ROUNDS = [_with(function, exact.Compiled(Block()), _PAIR) for function in (
    analysis.expected_rounds, analysis.remaining_rounds)]
_FEWEST = _with(analysis.fewest_rounds, _PAIR)

_VALUES = refusals.of_values(
    (TopK, "k", 0), (_with(TopK, k=1), "minimum", -1),
    (Distance, "epsilon", -1), (Typical, "epsilon", 9),
    (_with(exact.iid_pair, [1, 0], [1, 0]), "depth", -1),
    (_with(exact.random_pair, vocab_size=3, depth=2, seed=0), "kind", "best"),
    (_with(exact.random_pair, "dense", depth=2, seed=0), "vocab_size", 1),
    (_with(exact.random_pair, "dense", 3, seed=0), "depth", 0),
    (_with(exact.enumerate_chains, Token(), _GOOD), "gamma", -1),
    (_with(exact.enumerate_chains, Token(), _GOOD, 1), "rounds", 0),
    (_with(exact.expected_tokens, Token(), _GOOD, rounds=1), "gamma", -1),
    (_with(exact.full_information_optimum, _GOOD), "gamma", -1),
    (_with(exact.certify, Recursive(), trees=(_TREE,)), "drafting", "product"),
    (_with(analysis.certify_budget, lambda probs, tokens: tokens[:, 0] + 1),
     "verifier", GreedyBlock()),
    (_with(analysis.certify_budget, None, Token(), vocab_sizes=(9,)), "gammas",
     (4,)),
    (_with(_trees, scheme="iid"), "parents", (0, 0), ()),
    (_with(_trees, (-1, 0)), "scheme", "best"),
    (_with(_trees, _TREE, "iid"), "nodes", 3), (_audit, "coins", 0),
    (_audit, "kinds", ("best",)), (_audit, "large", 7),
    (_audit, "dtype", "int8"), (_audit, "false_alarm", 0),
    (_audit, "total_variation", 2.0),
    (_with(analysis.best_rule_over_rounds, _SMALL, rounds=2), "gamma", -1),
    (_with(analysis.best_rule_over_rounds, _SMALL, 2), "rounds", 0),
    (_with(analysis.most_tokens, _SMALL, 2), "rounds", 0),
    (_with(_quantile, 2, rounds=2), "length", 0),
    (_with(_quantile, 2, 4), "rounds", -1),
    (_with(_quantile, 2, 4, 2), "eos", 2),
    *((function, "gamma", -1) for function in (
        *(_with(rounds, length=3) for rounds in _ROUNDS),
        _with(_FEWEST, length=3))),
    *((_with(function, 3), "length", 0) for function in (*_ROUNDS, _FEWEST)),
    *((_with(function, 2, 3), "eos", 3) for function in (*_ROUNDS, _FEWEST)),
    (_with(analysis.patient_pair, depth=5), "gamma", 1))


@pytest.mark.parametrize("call, words", [
    *_VALUES,
    *((_with(function, 3, 9), "are 8 deep.*need 12") for function in _ROUNDS),
    (_with(analysis.remaining_rounds, GreedyBlock(), _PAIR, 3, 5),
     "has state.*rounds_distribution"),
    (lambda: analysis.best_rule_over_rounds(_SMALL, 3, 3), "need 12"),
    (lambda: _quantile(2, 9, 4), "need 9"),
    (lambda: analysis.best_quantile(
        exact.Pair(_SMALL.p, [2 * q for q in _SMALL.q]), 2, 4, 2),
     r"q\[0\] of the pair"),
    (lambda: analysis.dual_bound(_PAIR, _TREE, "larger_of_two", [0] * 27),
     "larger_of_two draws from other"),
    (lambda: analysis.dual_bound(_PAIR, _TREE, "iid", [0] * 9),
     "9 numbers; it must have.*27"),
    (lambda: exact.iid_pair([0.5, 0.6], [0.5, 0.5], 2), "p has the row"),
    (lambda: exact.iid_pair([0.5, 0.5], [-0.5, 1.5], 2), "q has the row"),
    (lambda: exact.iid_pair([0.5, 0.5], [np.nan, 1], 2), "q has the row"),
    (lambda: exact.iid_pair([1, 0], [1, 0, 0], 2), "same length"),
    (lambda: exact.enumerate_chains(Token(), _BAD, 1), r"p\[0\] of the pair"),
    (lambda: exact.enumerate_chains(Token(), _NAN, 1), r"q\[0\] of the pair"),
    (lambda: exact.enumerate_trees(Token(), _BAD, (-1, 0), "iid"),
     "of the pair"),
    (lambda: exact.full_information_optimum(_NAN, 1), "sums to 1"),
    (lambda: exact.certify(Token(), vocab_sizes=(30,), gammas=(8,)),
     r"30\*\*9.*at=\[\(8, 30\)\]"),
    *((_with(exact.certify, Token(), at=at, **_FEW), "at contains")
      for at in ([(0, 5)], [(3,)], [5], [(4000, 128_000)])),
    (lambda: _trees((-1, 0, 2), "iid"), r"parents\[2\] is 2"),
    (lambda: exact.enumerate_trees(
        Recursive(), exact.random_pair("dense", 3, 3, 0), (-1, 0, 1, 2), "iid"),
     "3 deep"),
    (lambda: _audit(coins=9), "18 uniforms"),
    (lambda: _audit(gammas=(20,)), "do not fit"),
    (lambda: _audit(gammas=(0,)), "gammas"),
    (lambda: exact.audit_sampler(lambda *_: [0], batched=True, coins=1),
     "with batched=True return")])
def test_bad_input_is_refused(call, words):
  # Broken: an index error, or a number or a certificate that means nothing.
  with pytest.raises(ValueError, match=words) as e:
    call()
  assert "\n" not in str(e.value)
