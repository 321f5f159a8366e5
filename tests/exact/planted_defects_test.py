"""Wrong rules that the proof must reject; lossless_test holds the right ones.

Each defect is a mistake that somebody made.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import data
from specjax import exact
from specjax import testing
from specjax.exact import enumeration
from specjax.interfaces import Verifier
from specjax.methods.other_vocabularies import _translation
from specjax.types import Law
from specjax.verifiers import Block
from specjax.verifiers import GreedyBlock
from specjax.verifiers import residual
from specjax.verifiers import Token

_ONCE = dict(rounds=1, gammas=(1, 2, 3), thorough=False)


def _block_parts(draft, p):
  survive = Block().survival(draft, p)
  q = residual.next_draft_probs(draft, p)
  rest = jnp.maximum(survive[:, None] * p - q, 0)
  mass = rest.sum(-1)
  total = mass + (1 - survive)
  heads = jnp.where(total > 0, mass / jnp.where(total > 0, total, 1), 1)
  return survive, q, rest, heads.at[0].set(1)


def _last_heads(heads):
  tails = jnp.cumprod((1 - heads)[::-1])[::-1]
  return heads * jnp.append(tails[1:], 1)


@dataclasses.dataclass(frozen=True)
class _ResidualOfOne(Verifier):
  """The residual takes 1 in place of p_tau."""

  def law(self, draft, p):
    rest = jnp.maximum(p - residual.next_draft_probs(draft, p), 0)
    return Block().law(draft, p).replace(
        next_token=residual.normalise(rest, p))


@dataclasses.dataclass(frozen=True)
class _FirstTails(Verifier):
  """Stops at the first u >= h instead of the last u < h."""

  def law(self, draft, p):
    heads = _block_parts(draft, p)[-1]
    stop = jnp.cumprod(heads) * (1 - jnp.append(heads[1:], 0))
    return Block().law(draft, p).replace(stop=stop)


@dataclasses.dataclass(frozen=True)
class _SurvivalForHeads(Verifier):
  """Accepts a prefix with p_i in place of h_i."""

  def law(self, draft, p):
    stop = _last_heads(_block_parts(draft, p)[0])
    return Block().law(draft, p).replace(stop=stop)


@dataclasses.dataclass(frozen=True)
class _NoMinimum(Verifier):
  """p_i is the product of the ratios, not capped at 1."""

  def law(self, draft, p):
    ratios = residual.chain_ratios(draft, p)
    survive = jnp.concatenate([jnp.ones_like(ratios[:1]), jnp.cumprod(ratios)])
    rest = jnp.maximum(
        survive[:, None] * p - residual.next_draft_probs(draft, p), 0)
    mass = rest.sum(-1)
    total = mass + 1 - survive
    heads = jnp.where(total > 0, mass / jnp.where(total > 0, total, 1), 1)
    return Law(stop=_last_heads(jnp.clip(heads, 0, 1).at[0].set(1)),
               next_token=residual.normalise(rest, p))


@dataclasses.dataclass(frozen=True)
class _OneUniform(Verifier):
  """All positions share one uniform number."""

  def law(self, draft, p):
    heads = _block_parts(draft, p)[-1]
    behind = jnp.append(jax.lax.cummax(heads, reverse=True)[1:], 0)
    return Block().law(draft, p).replace(
        stop=jnp.maximum(heads - behind, 0))


@dataclasses.dataclass(frozen=True)
class _ScalarResidual(Verifier):
  """The residual subtracts q of the rejected token from every entry."""

  def law(self, draft, p):
    q = residual.next_draft_probs(draft, p)
    picked = jnp.take_along_axis(q[:-1], draft.tokens[1:, None], axis=1)
    rest = jnp.maximum(p - jnp.append(picked, 0)[:, None], 0)
    return Token().law(draft, p).replace(
        next_token=residual.normalise(rest, p))


@dataclasses.dataclass(frozen=True)
class _NoResidual(Verifier):
  """The extra token follows p after a rejection too."""

  def law(self, draft, p):
    return Token().law(draft, p).replace(next_token=p)


@dataclasses.dataclass(frozen=True)
class _SwappedRatio(Verifier):
  """Accepts with q/p in place of p/q."""

  def law(self, draft, p):
    ratios = residual.chain_ratios(draft, p)
    accept = jnp.where(
        ratios > 0, jnp.minimum(1, 1 / jnp.where(ratios > 0, ratios, 1)), 0)
    stop = jnp.append(1, jnp.cumprod(accept)) * jnp.append(1 - accept, 1)
    return Token().law(draft, p).replace(stop=stop)


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("rule", [
    _ResidualOfOne(), _FirstTails(), _SurvivalForHeads(), _NoMinimum(),
    _OneUniform(), _ScalarResidual(), _NoResidual(), _SwappedRatio()])
def test_certify_rejects_a_wrong_rule(rule):
  # Broken: the proof accepts rules that are known to be wrong.
  found = exact.certify(rule, **_ONCE)
  assert not found.lossless
  assert found.total_variation > 1e-3
  assert "NOT LOSSLESS" in str(found)
  # The witness alone refutes the rule.
  refuted = {f"{name}s": (found.witness[name],)
             for name in ("kind", "vocab_size", "seed", "gamma")}
  with pytest.raises(AssertionError, match="NOT LOSSLESS"):
    testing.assert_lossless(rule, rounds=found.witness["rounds"],
                            thorough=False, **refuted)


class _Edited(Verifier):
  """Token verification until `law` is replaced."""

  def law(self, draft, p):
    return Token().law(draft, p)


def test_certify_sees_a_rule_as_it_is_now():
  # Broken: a class that was edited in a notebook keeps its old certificate.
  few = dict(rounds=1, gammas=(1,), vocab_sizes=(3,), kinds=("dense",),
             thorough=False)
  rule = _Edited()
  assert exact.certify(rule, **few).lossless
  rule.law = _NoResidual().law
  assert not exact.certify(rule, **few).lossless


@dataclasses.dataclass(frozen=True)
class _SlightlyNegative(Verifier):
  """A stop probability of -1e-10: no total variation sees it."""

  def law(self, draft, p):
    law = Token().law(draft, p)
    off = 1e-10 * (jnp.arange(law.stop.shape[0]) == 0)
    stop = jnp.where(law.stop[0] == 0, law.stop - off, law.stop)
    return law.replace(stop=stop)


@dataclasses.dataclass(frozen=True)
class _UnguardedResidual(Verifier):
  """0/0 where p equals q."""

  def law(self, draft, p):
    law = Token().law(draft, p)
    rest = jnp.maximum(p - residual.next_draft_probs(draft, p), 0)
    # Rounding left a little mass on a stop that p == q never takes.
    stop = law.stop * (1 - 1e-9) + 1e-9 / law.stop.shape[0]
    return law.replace(stop=stop,
                       next_token=rest / rest.sum(-1, keepdims=True))


@dataclasses.dataclass(frozen=True)
class _LeakyStop(Verifier):
  """Probabilities of stopping that do not sum to 1."""

  def law(self, draft, p):
    law = Token().law(draft, p)
    return law.replace(stop=law.stop.at[-1].multiply(1 - 1e-5))


@pytest.mark.parametrize("rule,defect", [
    (_SlightlyNegative(), "a law is negative"),
    (_UnguardedResidual(), "a law is not finite"),
    (_LeakyStop(), "stop does not sum to 1")])
def test_certify_rejects_what_is_no_law(rule, defect):
  # Broken: a law that would give a sampler NaN or a bias passes, because its
  # enumerated total variation is small.
  found = exact.certify(rule, **_ONCE)
  assert not found.lossless
  assert defect in found.defects
  assert defect in str(found)


@dataclasses.dataclass(frozen=True)
class _NoModification(Verifier):
  """Greedy block verification that leaves the target as it is."""

  def law(self, draft, p):
    return GreedyBlock().law(draft, p)


@dataclasses.dataclass(frozen=True)
class _OnePositionTooMany(GreedyBlock):
  """Entries live for gamma - tau positions."""

  def init(self, gamma):
    return super().init(gamma + 1)

  def commit(self, state, draft, p, verdict):
    new = super().commit(state, draft, p, verdict)
    more = (new.remaining[-1:] > 0).astype(jnp.int32)
    return new.replace(remaining=new.remaining.at[-1:].add(more))


@dataclasses.dataclass(frozen=True)
class _OnlyTheNewest(GreedyBlock):
  """One entry at a time, measured against the unmodified target."""

  def commit(self, state, draft, p, verdict):
    forgotten = jax.tree.map(jnp.zeros_like, state)
    return super().commit(forgotten, draft, p, verdict)


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("rule,gammas,at_least", [
    (_NoModification(), (2, 3), 0.02),
    (_OnePositionTooMany(), (3,), 1e-3),
    (_OnlyTheNewest(), (3,), 1e-3)])
def test_certify_rejects_a_wrong_modification(rule, gammas, at_least):
  # Broken: the proof does not see what a rule carries from round to round.
  found = exact.certify(rule, vocab_sizes=(3,), gammas=gammas, thorough=False)
  assert not found.lossless
  assert at_least < found.total_variation < 0.2


@pytest.mark.parametrize("rule", [Token(), Block()])
def test_twins_that_are_not_summed_are_seen(rule):
  # Broken: a drafter that draws one of two tokens with the same text, and
  # reports the q of that one alone, passes for exact.
  texts = testing.ListTokenizer
  vocabulary = data.map_vocabularies(
      texts((b"a", b"b", b"a", b"x")), texts((b"b", b"a", b"c")))
  q = np.array([0.3, 0.3, 0.4, 0.0])  # a, b, a
  to_target, gamma = np.asarray(vocabulary.to_target), 2
  pair = exact.iid_pair([0.2, 0.5, 0.3], np.full(3, 1 / 3), gamma + 1)

  def found(vocabulary):
    reported = np.asarray(_translation.summed(jnp.array(q), vocabulary))
    law = np.zeros(4)  # of what is drawn in the drafter's tokens
    np.add.at(law, to_target, q)

    def scheme(_, contexts):
      drafts = exact.Drafts.roots(contexts, 3)
      for node in range(gamma):
        rows = len(drafts.weights), 1
        drafts = drafts.grow(
            node, np.tile(law[:3], rows), np.tile(reported, rows))
      return drafts

    return enumeration.enumerate_drafts(
        rule, pair, scheme, gamma + 1, gamma, 1, "float32").total_variation

  assert found(vocabulary) < 1e-6
  not_summed = found(vocabulary.replace(doubles=vocabulary.doubles[:0]))
  assert 0.05 < not_summed < 0.5
