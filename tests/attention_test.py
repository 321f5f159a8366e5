"""Attention in two parts against plain attention over all keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import attention

_HEADS, _GROUP, _DIM = 2, 3, 8
_LENGTHS = np.array([0, 130, 299], np.int32)


def _plain(query, k, v, softcap):
  """One query in float64: `query [D]` over `k, v [T, D]`."""
  scores = k @ query / np.sqrt(_DIM)
  scores = softcap * np.tanh(scores / softcap) if softcap else scores
  weights = np.exp(scores)
  return weights @ v / weights.sum(), np.log(weights.sum())


@pytest.mark.parametrize("window,softcap", [(0, 0.0), (70, 3.0)])
def test_two_parts_are_one_attention(window, softcap):
  # Broken: a part counts slots that are not committed, forgets the window or
  # the soft-cap, or has another weight in the whole than it should; a row
  # without a past becomes NaN.
  rng = np.random.default_rng(0)
  batch, size, slots = 3, 4, 300
  draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  query = draw(batch, size, _HEADS * _GROUP, _DIM)
  past = [draw(batch, _HEADS, slots, _DIM) for _ in range(2)]
  block = [draw(batch, _HEADS, size, _DIM) for _ in range(2)]
  positions = _LENGTHS[:, None] + np.arange(size, dtype=np.int32)

  @jax.jit
  def both(query, past, block):
    causal = jnp.tril(jnp.ones((1, size, size), bool))
    return attention.merge(
        attention.past_attention(query, *past, _LENGTHS, positions=positions,
                                 window=window, softcap=softcap),
        attention.block_attention(query, *block, causal, softcap=softcap))

  out, log = both(query, past, block)
  for b, s, h in np.ndindex(batch, size, _HEADS * _GROUP):
    start = max(0, positions[b, s] + 1 - window) if window else 0
    k, v = (np.concatenate([old[b, h // _GROUP, start:_LENGTHS[b]],
                            new[b, h // _GROUP, :s + 1]]).astype(np.float64)
            for old, new in zip(past, block))
    want = _plain(query[b, s, h].astype(np.float64), k, v, softcap)
    np.testing.assert_allclose(out[b, s, h], want[0], atol=2e-5)
    np.testing.assert_allclose(log[b, s, h], want[1], atol=2e-5)
