"""Sampled output against the exact joint law of three tokens.

Enumeration proves the rules; this test sees what it does not: caches,
positions, keys, the sampler, and which q the drafter reports. All seeds are
fixed; a right program fails for one seed in a million.
"""

import dataclasses
import functools

from flax import struct
import jax
import jax.numpy as jnp
import pytest

import specjax as sj
from specjax import testing

_FALSE_ALARM = 1e-6
_VOCAB = 5
_HORIZON = 3
_ROWS = 8192
_TELLING = 2048  # in which every defect below shows, at 1e-35 or less
_PROMPT = [1, 3, 0, 2]
_BLOCK = sj.verifiers.Block()
_PLAIN = sj.LogitsTransform()
_NUCLEUS = sj.LogitsTransform(temperature=0.7, top_p=0.9)


@functools.cache
def _pair():
  return testing.tiny_pair(_VOCAB, seed=4)


def _sampled_p_value(seed=0, transform=_PLAIN, target=None, drafter=None,
                     verifier=_BLOCK, gamma=2, rows=_ROWS):
  pair = _pair()
  drafter = drafter or sj.drafters.NetworkDrafter
  decoder = sj.Decoder(
      target=target or pair.target, verifier=verifier, transform=transform,
      drafter=drafter(network=sj.drafters.LanguageModel(model=pair.drafter),
                      shape=sj.drafters.Chain(gamma)))
  state = decoder.prefill(pair.params, [_PROMPT] * rows, jax.random.key(seed),
                          limits=len(_PROMPT) + _HORIZON)
  state, stats = decoder.decode_until(pair.params, state)
  sj.decoding.raise_if_not_finite(stats)
  tokens = state.tokens[:, len(_PROMPT):len(_PROMPT) + _HORIZON]
  law = testing.joint_law(pair.target, pair.params["target"], _PROMPT,
                          _HORIZON, transform)
  return testing.chi_square(tokens, law, _VOCAB)


@pytest.mark.slow
def test_output_follows_the_joint_law():
  # Broken: anything between the rule and the text. contribution_test.py asks
  # the same of every drafter and rule; the defects below need this one.
  assert _sampled_p_value(gamma=4, transform=_NUCLEUS) > _FALSE_ALARM


@dataclasses.dataclass(frozen=True)
class _WithCache(sj.interfaces.Model):
  """A model whose cache is of another class."""

  model: sj.models.Transformer
  cache_class: type

  @property
  def vocab_size(self):
    return self.model.vocab_size

  @property
  def context_length(self):
    return self.model.context_length

  def init_cache(self, params, batch, capacity):
    cache = self.model.init_cache(params, batch, capacity)
    return self.cache_class(**{
        f.name: getattr(cache, f.name) for f in dataclasses.fields(cache)})

  def __call__(self, *args):
    return self.model(*args)


@struct.dataclass
class _CommitsOneLess(sj.caches.KVCache):
  """The last accepted token's keys and values are lost."""

  def rollback(self, lengths):  # which commits a chain
    return super().rollback(lengths - (lengths > self.lengths))


@struct.dataclass
class _CommitsOneMore(sj.caches.KVCache):
  """A rejected token's keys and values stay."""

  def rollback(self, lengths):
    return super().rollback(lengths + (lengths > self.lengths))


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("cache", [_CommitsOneLess, _CommitsOneMore])
def test_a_wrong_target_cache_is_caught(cache):
  # Broken: the test above cannot see the target's cache.
  assert _sampled_p_value(
      target=_WithCache(_pair().target, cache), rows=_TELLING) < _FALSE_ALARM


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ReportsSharperLaw(sj.drafters.NetworkDrafter):
  """Reports the q of temperature 0.5 for tokens drawn at temperature 1."""

  def propose(self, params, keys, state):
    draft, cache = super().propose(params, keys, state)
    probs = draft.probs**2
    total = probs.sum(-1, keepdims=True)
    return draft.replace(probs=probs / jnp.where(total > 0, total, 1)), cache


def test_a_wrong_q_is_caught():
  # Broken: the test above cannot see what the drafter reports.
  assert _sampled_p_value(
      drafter=_ReportsSharperLaw, rows=_TELLING) < _FALSE_ALARM


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Forgetful(sj.drafters.NetworkDrafter):
  """Its cache loses a token in every round, and its law is its own.

  What it proposes is bad, but it reports the q that it drew from.
  """

  transform: sj.LogitsTransform = sj.LogitsTransform(temperature=2.0)

  def propose(self, params, keys, state):
    before = state.tokens[:, :1]
    tokens = jnp.concatenate([before, state.tokens[:, :-1]], axis=1)
    draft, cache = super().propose(params, keys, state.replace(tokens=tokens))
    root = jnp.take_along_axis(state.tokens, state.lengths[:, None] - 1, 1)
    return draft.replace(tokens=draft.tokens.at[:, :1].set(root)), cache


@pytest.mark.slow
def test_a_bad_drafter_is_harmless():
  # Broken: losslessness depends on the drafter being good.
  assert _sampled_p_value(drafter=_Forgetful) > _FALSE_ALARM


@dataclasses.dataclass(frozen=True)
class _Forgets(sj.verifiers.GreedyBlock):
  """Every round starts with an unmodified target."""

  def commit(self, state, draft, target_probs, verdict):
    return jax.tree.map(jnp.zeros_like, state)


@pytest.mark.slow
def test_a_lost_state_is_caught():
  # Broken: the test above cannot see the verifier's state.
  assert _sampled_p_value(
      verifier=_Forgets(), gamma=3, rows=_TELLING) < _FALSE_ALARM
