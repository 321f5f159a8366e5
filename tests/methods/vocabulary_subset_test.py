"""Drafters whose head has some of the tokens: FR-Spec."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax import testing
from specjax.models import frequent_tokens
from specjax.models import VocabularySubset


@pytest.mark.parametrize("tied", [False, True])
def test_a_small_head_has_the_large_ones_numbers(tied):
  # Broken: a column is that of another token, so that drafts are noise, or a
  # token without a column has a chance, so that q is wrong.
  pair = testing.tiny_pair(7, tie_embeddings=tied)
  model, ids = VocabularySubset(pair.target), [5, 0, 3]
  params = model.parameters(pair.params["target"], ids)
  tokens = jnp.array([[1, 6, 2, 4], [0, 3, 5, 5]])
  out, want = (jax.jit(m)(p, tokens) for m, p in (
      (model, params), (pair.target, pair.params["target"])))
  np.testing.assert_allclose(
      out.logits[..., ids], want.logits[..., ids], rtol=1e-5, atol=1e-5)
  for temperature in (0, 1e-6, 1.0, 50.0):
    law = sj.LogitsTransform(temperature=temperature)(out.logits)
    assert (law[..., [1, 2, 4, 6]] == 0).all() and jnp.isfinite(law).all()
  np.testing.assert_array_equal(out.hidden, want.hidden)
  at = jnp.array([[2], [0]])
  np.testing.assert_allclose(
      model.logits_at(params, out, at)[:, 0],
      out.logits[jnp.arange(2), at[:, 0]], rtol=1e-5, atol=1e-5)
  specs = model.param_specs("model", 1)
  assert jax.tree.structure(params).num_leaves == len(jax.tree.leaves(
      specs, is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec)))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_ban_of_all_its_tokens_leaves_a_law(temperature):
  # Broken: rows whose constraint allows no frequent token stop with an error.
  pair = testing.tiny_pair(5)
  model = VocabularySubset(pair.target)
  params = model.parameters(pair.params["target"], [1, 3])
  law = sj.LogitsTransform(temperature=temperature, banned=(1, 2, 3))(
      model(params, jnp.array([[0]])).logits[0, 0])
  want = [1, 0, 0, 0, 0] if temperature == 0 else [0.5, 0, 0, 0, 0.5]
  np.testing.assert_allclose(law, want, atol=1e-6)


def test_frequent_tokens():
  # Broken: rare tokens are kept in place of frequent ones, or an end of text
  # that must be there is left out.
  counts = [4, 0, 9, 4, 1]
  assert frequent_tokens(counts, 2).tolist() == [0, 2]
  assert frequent_tokens(counts, 3).tolist() == [0, 2, 3]
  assert frequent_tokens(counts, 2, always=(1,)).tolist() == [1, 2]
  shares = np.array(counts) / 18  # as good as counts
  assert frequent_tokens(shares, 3).tolist() == [0, 2, 3]
