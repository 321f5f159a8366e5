"""Wrong trees and wrong rules that the proof must reject.

Each is a mistake that somebody made. Most are in how a tree is drawn or
reported: the rule is right, and the output is biased all the same.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import exact
from specjax.exact import schemes
from specjax.types import Law
from specjax.verifiers import KSeq
from specjax.verifiers import Recursive
from specjax.verifiers import TargetWalk
from specjax.verifiers import Traversal
from specjax.verifiers import tree

_ONE = ((-1, 0), (-1, 0, 1))
_STARS = ((-1, 0, 0), (-1, 0, 0, 0))


def _certify(rule, trees, scheme, **kwargs):
  return exact.certify(rule, **{
      **dict(trees=trees, schemes=(scheme,), vocab_sizes=(3,), gammas=(1,),
             kinds=("dense",), seeds=range(12), rounds=1), **kwargs})


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


def test_dropped_copies_bias_traversal_more():
  # Broken: the proof does not see what a copy owes to the residual; or it
  # would have been enough to try two tokens.
  trees = ((-1, 0, 0, 1),)
  found = _certify(Traversal(), trees, _merged)
  assert 0.01 < found.total_variation < 0.2
  two = dict(vocab_sizes=(2,), seeds=range(6))
  assert _certify(Recursive(), trees, _merged, **two).lossless


def test_grandchildren_that_share_a_coin_bias_traversal_alone():
  # Broken: the proof does not see what a sibling's descendants tell. Here the
  # second child is drawn by the coin that drew the first one's child.
  def sharing(drafts, q, parents):
    first = drafts.grow(0, q[drafts.at(0)])
    drafts = first.grow(1, q[first.at(1)])
    law, low = q[drafts.at(0)], np.zeros(len(drafts.weights))
    # The coin is uniform on the interval of the first child's child.
    below, at = drafts.probs[:, 2], np.arange(len(low))
    token = drafts.tokens[:, 2]
    low = np.cumsum(below, axis=-1)[at, token] - below[at, token]
    width = below[at, token][:, None]
    upper = np.cumsum(law, axis=-1)
    overlap = (np.minimum(upper, low[:, None] + width)
               - np.maximum(upper - law, low[:, None]))
    given = np.maximum(overlap, 0) / width
    return drafts.grow(0, given, law)

  trees = ((-1, 0, 1, 0),)
  assert _certify(Recursive(), trees, sharing).lossless
  found = _certify(Traversal(), trees, sharing)
  assert 5e-3 < found.total_variation < 0.2


@dataclasses.dataclass(frozen=True)
class _LowRho(KSeq):
  """rho* times 0.95: the residual would have to be negative."""

  def _rho(self, p, q, count):
    return 0.95 * super()._rho(p, q, count)


@dataclasses.dataclass(frozen=True)
class _HighRho(KSeq):
  """rho* times 1.2: exact, but fewer drafts are accepted."""

  def _rho(self, p, q, count):
    return 1.2 * super()._rho(p, q, count)


def test_certify_rejects_a_rho_that_is_too_small():
  # Broken: the proof does not see that the target cannot make up for what
  # the children take.
  found = _certify(_LowRho(), _STARS, "iid")
  assert 0.005 < found.total_variation < 0.06
  found = _certify(_HighRho(), _STARS, "iid")
  assert found.lossless
  assert found.expected_tokens < _certify(KSeq(), _STARS, "iid").expected_tokens


@dataclasses.dataclass(frozen=True)
class _NoResidual(Recursive):
  """The extra token follows p after rejections too."""

  def law(self, draft, p, state=None):
    return super().law(draft, p).replace(next_token=p)


@dataclasses.dataclass(frozen=True)
class _SiblingsAtOnce(Recursive):
  """Every child is tried against p, as if it were the only one."""

  def law(self, draft, p, state=None):
    parents = jnp.maximum(draft.parents, 0)
    at = jnp.arange(len(parents))
    q = tree.drafted_probs(draft)
    ratio = p[parents, draft.tokens] / jnp.where(q > 0, q, 1)
    accept = jnp.where(q > 0, jnp.minimum(ratio, 1), 0)
    del at
    return Law(stop=tree.first_accepted(draft.parents, accept),
               next_token=super().law(draft, p).next_token)


@dataclasses.dataclass(frozen=True)
class _ForgottenMass(Traversal):
  """Accepts by traversal what it entered as a walk: every node has mass 1."""

  def law(self, draft, p, state=None):
    _, _, rest = tree.try_children(draft, p, inherit=False)
    return super().law(draft, p).replace(next_token=rest)


@dataclasses.dataclass(frozen=True)
class _CountsPadding(KSeq):
  """The number of children is that of all entries below a node."""

  def _rho(self, p, q, count):
    return super()._rho(p, q, jnp.where(count > 0, 3.0, 0.0))


@pytest.mark.parametrize("rule", [
    _NoResidual(), _SiblingsAtOnce(), _ForgottenMass()])
def test_certify_rejects_a_wrong_rule(rule):
  # Broken: the proof accepts rules that are known to be wrong.
  found = exact.certify(rule, vocab_sizes=(3,), gammas=(1,), rounds=1,
                        kinds=("dense",), trees=((-1, 0, 0, 1),),
                        seeds=range(3))
  assert not found.lossless and found.total_variation > 1e-3
