"""Heads that nobody trained, for tests that need laws of their own."""

import jax
import jax.numpy as jnp
import numpy as np


def disturbed(heads, target_params, by):
  """Parameters of `heads`, moved so that no law is like another."""
  rng = np.random.default_rng(0)
  params = jax.jit(heads.init)(jax.random.key(0), target_params)
  # In NumPy, because an eager addition compiles one program per shape.
  return jax.tree.map(
      lambda x: x if jnp.issubdtype(x.dtype, jnp.integer) else jnp.asarray(
          np.asarray(x) + by * rng.normal(size=x.shape).astype(np.float32)),
      params)


def attached(heads, pair):
  """`(heads, target with features, params)` of disturbed heads."""
  params = disturbed(heads, pair.params["target"], 0.4)
  return heads, *heads.attach(pair.target, pair.params["target"], params)
