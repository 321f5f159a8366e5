"""A part of the target drafts, which is searched while it decodes.

`contribution_test.py` has the law of what is written.
"""


from contributed import VOCAB
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax import testing
from specjax.drafters import Swift
from specjax.models import Sublayers

_LAYERS = 4
_TARGET = testing.tiny_pair(VOCAB, seed=2, scale=12.0, layers=_LAYERS)


def _without_effect(params, layer):
  """The target's parameters, with an MLP that adds nothing to the stream."""
  return {"target": {**params, f"mlp_{layer}": jax.tree.map(
      jnp.zeros_like, params[f"mlp_{layer}"])}}


@pytest.mark.slow
def test_a_row_finds_what_is_of_no_use():
  # Broken: worse sets are kept, a set is scored at other places than those of
  # its tokens or its laws, a row takes another one's set, or the draft reads
  # another text than the target.
  params = _without_effect(_TARGET.params["target"], 2)
  decoder = sj.Decoder(
      target=_TARGET.target, verifier=sj.verifiers.Token(), debug=True,
      drafter=Swift(gamma=2, count=1, window=6, tries=12))
  state = decoder.prefill(
      params, [[1, 3], [4], [2] * 5], jax.random.key(0), limits=120,
      temperature=[1.0, 0.3, 0.6])
  first = jax.device_get(state.drafter)
  for row in range(3):  # spread over those of layers 1 and 2
    assert first.sublayers(row) == Sublayers.without(_LAYERS, attention=[1])
  state, stats = decoder.decode(params, state, 60)
  sj.decoding.raise_if_not_finite(stats)
  found = jax.device_get(state.drafter)
  for row in range(3):
    assert found.sublayers(row) == Sublayers.without(_LAYERS, mlp=[2])
  np.testing.assert_allclose(found.score, 2, atol=1e-3)
  # Without that MLP the draft's law is the target's own.
  expected = np.asarray(stats.expected).sum(-1)
  assert np.asarray(stats.active)[20:30].all()
  np.testing.assert_allclose(expected[20:30], 2, atol=1e-3)
  assert expected[:3].min() < 1.9
  np.testing.assert_array_equal(found.tried, 12)


@pytest.mark.slow
def test_a_draft_is_scored_by_the_law_of_the_target():
  # Broken: where drafts have a transform of their own, sets are compared with a
  # target that has it, too.
  params = _without_effect(_TARGET.params["target"], 2)
  decoder = sj.Decoder(
      target=_TARGET.target, verifier=sj.verifiers.Token(), drafter=Swift(
          gamma=2, count=1, window=5,
          transform=sj.LogitsTransform(temperature=0)))
  logits = lambda text: np.asarray(jax.jit(_TARGET.target)(
      params["target"], jnp.array([text])).logits[0, -1])
  text = [1, 3]
  for _ in range(5):
    text.append(int(logits(text).argmax()))
  state = decoder.prefill(params, [text], jax.random.key(0), limits=20)
  drafter = state.drafter.replace(keep=jnp.ones((1, _LAYERS, 2)).at[
      0, 2, 1].set(0))
  found = jax.jit(decoder.stage.drafter._searched)(
      params, state, drafter, jnp.ones((1,), bool))
  # A greedy draft of greedy text: each token is passed, the last one with what
  # the target gives it.
  most = np.array([np.exp(x - x.max()).sum() ** -1 for x in (
      logits(text[:i]) for i in range(2, 7))])
  np.testing.assert_array_equal(found.keep, drafter.keep)
  np.testing.assert_allclose(
      found.score, most[:-1].mean() + most[1:].mean(), rtol=1e-4)
