"""Shapes of drafts: parents of nodes, and what follows from them.

Parents are data and N is static, so trees that are fixed and trees that are
chosen at run time share one code path.
"""

import math

import jax
import jax.numpy as jnp


def chain(gamma: int):
  """Parents `[gamma + 1]` of a chain of gamma tokens below the root."""
  if gamma < 0:
    raise ValueError(f"gamma is {gamma}; a draft has at least 0 tokens")
  return jnp.arange(-1, gamma, dtype=jnp.int32)


def ancestors(parents):
  """`[N, N]` bool: row i marks the path root..i, i included.

  Args:
    parents: `[N]` int32, `parents[0] == -1` and `parents[i] < i`.
  """
  size = parents.shape[0]
  reach = jax.nn.one_hot(parents, size) + jnp.eye(size)
  # Squaring doubles the reach, and no loop runs on the device.
  for _ in range(math.ceil(math.log2(size))):
    reach = jnp.minimum(reach @ reach, 1.0)
  return reach > 0.5


def depths(parents):
  """`[N]` int32, the depth of every node; the root's is 0."""
  return jnp.sum(ancestors(parents), axis=-1, dtype=jnp.int32) - 1
