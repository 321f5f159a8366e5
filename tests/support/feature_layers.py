"""Layers on a tiny target's features, for the tests of them."""

import functools

import jax
import untrained

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
  """Parameters of untrained heads, each with laws of its own."""
  return untrained.disturbed(heads, pair().params["target"], 0.3)
