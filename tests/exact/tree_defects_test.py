"""Wrong trees and wrong rules that the proof must reject.

Each is a mistake that somebody made. Most are in how a tree is drawn or
reported: the rule is right, and the output is biased all the same.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import exact
from specjax.exact import schemes
from specjax.verifiers import KSeq
from specjax.verifiers import Recursive
from specjax.verifiers import residual
from specjax.verifiers import TargetWalk
from specjax.verifiers import Traversal
from specjax.verifiers import tree

_ONE = ((-1, 0),)
_STARS = ((-1, 0, 0), (-1, 0, 0, 0))


_compiled = functools.cache(exact.Compiled)


def _certify(rule, trees, scheme, **kwargs):
  return exact.certify(_compiled(rule), **{
      **dict(trees=trees, schemes=(scheme,), vocab_sizes=(3,), gammas=(1,),
             kinds=("dense",), seeds=range(40), rounds=1, thorough=False),
      **kwargs})


def _merged(drafts, q, parents):
  """Independent draws, identical ones tried once."""
  drafts = schemes.iid(drafts, q, parents)
  for node in range(1, len(parents)):
    drafts.probs[drafts.first(node) != node, node] = 0
  return drafts


def _not_renormalised(drafts, q, parents):
  """Without replacement, with q as it was before the first draw."""
  return _reporting_q(schemes.without_replacement(drafts, q, parents), q,
                      parents)


def _likeliest_as_random(drafts, q, parents):
  """The likeliest tokens, verified with min(1, p/q) and (p - q)+."""
  return _reporting_q(schemes.top_k(drafts, q, parents), q, parents)


def _likeliest_without_replacement(drafts, q, parents):
  """The likeliest tokens, verified as if drawn without replacement."""
  return _reporting_rest(schemes.top_k(drafts, q, parents), q, parents)


def _sorted_draws(drafts, q, parents):
  """Independent draws, tried in the order of q."""
  return _sorted(schemes.iid(drafts, q, parents), q)


def _sorted_without_replacement(drafts, q, parents):
  """Draws without replacement, sorted by q, with the laws of that order."""
  drafts = _sorted(schemes.without_replacement(drafts, q, parents), q)
  return _reporting_rest(drafts, q, parents)


def _reporting_q(drafts, q, parents):
  for node, parent in enumerate(parents[1:], 1):
    drafts.probs[:, node] = q[drafts.at(parent)]
  return drafts


def _reporting_rest(drafts, q, parents):
  """What q leaves after the tokens of earlier siblings, of one node."""
  rest = q[drafts.at(0)]
  for node in range(1, len(parents)):
    total = rest.sum(-1, keepdims=True)
    drafts.probs[:, node] = rest / np.where(total > 0, total, 1)
    np.put_along_axis(rest, drafts.tokens[:, node, None], 0, axis=-1)
  return drafts


def _sorted(drafts, q):
  """The children of a lone root by falling q."""
  value = np.take_along_axis(q[drafts.at(0)], drafts.tokens[:, 1:], axis=-1)
  order = 1 + np.argsort(-value, axis=-1, kind="stable")
  draft = np.arange(len(order))[:, None]
  changed = {}
  for name in ("tokens", "probs", "contexts"):
    changed[name] = getattr(drafts, name).copy()
    changed[name][:, 1:] = getattr(drafts, name)[draft, order]
  return dataclasses.replace(drafts, **changed)


# Of each mistake, the total variation that others have measured.
@pytest.mark.default_cases(4)
@pytest.mark.parametrize("scheme,trees,known", [
    (_merged, _STARS, 0.15),
    (_not_renormalised, _STARS, 0.41),
    (_likeliest_as_random, _STARS, 0.68),
    (_likeliest_without_replacement, _STARS, 0.68),
    (_sorted_draws, _STARS, 0.24),
    (_sorted_without_replacement, _STARS, 0.32),
    (schemes.larger_of_two, _ONE, 0.096),
    (schemes.confident, _ONE, 0.17)])
def test_certify_rejects_a_wrong_tree(scheme, trees, known):
  # Broken: the proof accepts drafts that are not what they are said to be.
  found = _certify(Recursive(), trees, scheme)
  assert not found.lossless and not found.defects
  assert known / 5 < found.total_variation < 3 * known
  assert found.witness["scheme"] == scheme.__name__
  # No bias of the tree reaches the text if the rule makes no use of q.
  assert _certify(TargetWalk(), trees, scheme, seeds=(0, 1)).lossless


def test_order_that_no_value_decides_is_harmless():
  # Broken: the proof rejects more than what is wrong.
  def reversed_draws(drafts, q, parents):
    drafts = schemes.iid(drafts, q, parents)
    order = np.array([0, *range(len(parents) - 1, 0, -1)])
    return dataclasses.replace(drafts, **{
        name: getattr(drafts, name)[:, order]
        for name in ("tokens", "probs", "contexts")})

  assert _certify(Recursive(), _STARS, reversed_draws).lossless


def test_dropped_copies_bias_traversal_even_with_two_tokens():
  # Broken: the proof does not see what a copy owes to the residual. The walk
  # has no bias from it with V = 2: a proof with two tokens would pass it.
  trees = ((-1, 0, 0, 1, 1),)
  for rule, vocab_size, biased in (
      (Recursive(), 3, True), (Traversal(), 3, True), (Traversal(), 2, True),
      (Recursive(), 2, False)):
    found = _certify(rule, trees, _merged, vocab_sizes=(vocab_size,),
                     seeds=range(12))
    assert found.lossless != biased
    assert not biased or 8e-3 < found.total_variation < 0.1


def test_grandchildren_that_share_a_uniform_bias_traversal_alone():
  # Broken: the proof does not see what a sibling's descendants tell. Here the
  # second child is drawn by the uniform that drew the first one's child.
  def sharing(drafts, q, parents):
    drafts = drafts.grow(0, q[drafts.at(0)])
    drafts = drafts.grow(1, q[drafts.at(1)])
    # The uniform of token x is uniform over the interval of x in the cumulative
    # law, so that x leaves the shares in which others' intervals cut its own.
    token = drafts.tokens[:, 2, None]
    take = lambda rows: np.take_along_axis(rows, token, axis=-1)
    below, law = drafts.probs[:, 2], q[drafts.at(0)]
    end, width = take(np.cumsum(below, axis=-1)), take(below)
    ends = np.cumsum(law, axis=-1)
    shared = np.minimum(ends, end) - np.maximum(ends - law, end - width)
    return drafts.grow(0, np.maximum(shared, 0) / width, law)

  trees = ((-1, 0, 1, 0),)
  assert _certify(Recursive(), trees, sharing).lossless
  found = _certify(Traversal(), trees, sharing)
  assert 5e-3 < found.total_variation < 0.2


@dataclasses.dataclass(frozen=True)
class _ScaledRho(KSeq):
  """rho* times a factor wherever a node has several children."""

  factor: float = 1.0

  def _rho(self, p, q, count):
    rho = super()._rho(p, q, count)
    return jnp.where(count > 1, self.factor * rho, rho)


@pytest.mark.slow
def test_certify_rejects_a_rho_that_is_too_small():
  # Broken: the proof does not see that the target cannot make up for what
  # the children take; or rho* is not the least.
  found = _certify(_ScaledRho(factor=0.95), _STARS, "iid")
  assert not found.lossless and 0.005 < found.total_variation < 0.05
  assert _certify(_ScaledRho(factor=1.2), _STARS, "iid").lossless
  for seed in range(5):
    pair = exact.random_pair("dense", 3, 2, seed)
    least, more = (exact.enumerate_trees(_compiled(rule), pair, _STARS[1],
                                         "iid")
                   for rule in (KSeq(), _ScaledRho(factor=1.2)))
    assert more.expected_accepted < least.expected_accepted


@dataclasses.dataclass(frozen=True)
class _NoResidual(Recursive):
  """The extra token follows p after rejections too."""

  def law(self, draft, p):
    return super().law(draft, p).replace(next_token=p)


@dataclasses.dataclass(frozen=True)
class _SiblingsAtOnce(Recursive):
  """Every child is tried against p, as if it were the only one."""

  def law(self, draft, p):
    wanted = p[jnp.maximum(draft.parents, 0), draft.tokens]
    accept = residual.divide(wanted, tree.drafted_probs(draft))
    stop = tree.first_accepted(draft.parents, jnp.minimum(accept, 1))
    return super().law(draft, p).replace(stop=stop)


@dataclasses.dataclass(frozen=True)
class _ForgottenMass(Traversal):
  """The extra token follows a residual that ignores the mass of a node."""

  def law(self, draft, p):
    _, _, row = tree.try_children(draft, p, inherit=False)
    return super().law(draft, p).replace(
        next_token=jax.vmap(row)(jnp.arange(len(p))))


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("rule", [
    _NoResidual(), _SiblingsAtOnce(), _ForgottenMass()])
def test_certify_rejects_a_wrong_rule(rule):
  # Broken: the proof accepts rules that are known to be wrong.
  found = exact.certify(rule, vocab_sizes=(3,), gammas=(1,), rounds=1,
                        kinds=("dense",), trees=((-1, 0, 0, 1),),
                        seeds=range(3))
  assert not found.lossless and found.total_variation > 1e-3
