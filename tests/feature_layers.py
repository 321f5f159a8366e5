"""Layers on a tiny target's features, for the tests of them."""

import functools

import jax
import numpy as np

from specjax import testing

VOCAB, FORECASTS = 5, 3
# Of EAGLE-3 with all that 3.1 and others add to it.
EAGLE_3 = dict(taps=(0, 1, "final"), width=24, own_embedding=True,
               ids=(0, 1, 3, 4), qk_norm="head")
# What runs once pays for no compiler that optimises.
jit = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": "0"})


@functools.cache
def pair():
  return testing.tiny_pair(VOCAB, seed=2)


def heads_of(kind, count=FORECASTS, **options):
  return kind.for_target(pair().target, count, **options)


@functools.cache
def disturbed(heads):
  """Parameters of untrained heads, moved so that each has its own laws."""
  rng = np.random.default_rng(0)
  params = heads.init(jax.random.key(0), pair().params["target"])
  return jax.tree.map(
      lambda x: x + 0.3 * rng.normal(size=x.shape).astype(np.float32), params)
