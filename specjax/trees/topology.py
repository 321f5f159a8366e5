"""Shapes of drafts: parents of nodes, and what follows from them.

Parents are data and N is static, so trees that are fixed and trees that are
chosen at run time share one code path.
"""

import math

import jax
import jax.numpy as jnp


def chain(gamma: int) -> jax.Array:
  """Parents `[gamma + 1]` of a chain of gamma tokens below the root."""
  if gamma < 0:
    raise ValueError(f"gamma is {gamma}; a draft has at least 0 tokens")
  return jnp.arange(-1, gamma, dtype=jnp.int32)


def ancestors(parents: jax.Array) -> jax.Array:
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


def depths(parents: jax.Array) -> jax.Array:
  """`[N]` int32, the depth of every node; the root's is 0."""
  return depths_of(ancestors(parents))


def depths_of(ancestors: jax.Array) -> jax.Array:
  """`[..., S]` int32, the depths that `ancestors [..., S, T]` say.

  Of all T nodes, or of the S last of them.
  """
  return jnp.sum(ancestors, axis=-1, dtype=jnp.int32) - 1


def causal(batch: int, size: int) -> tuple[jax.Array, jax.Array]:
  """What a pass over the next tokens of texts is told of them.

  Each token sees itself and those before it, as in a chain from the first of
  them on, in every row.

  Args:
    batch: B, rows.
    size: S, tokens of a row.

  Returns:
    `(depths [B, S] int32, ancestors [B, S, S] bool)`.
  """
  depths = jnp.arange(size, dtype=jnp.int32)
  ancestors = jnp.tril(jnp.ones((size, size), bool))
  return (jnp.broadcast_to(depths, (batch, size)),
          jnp.broadcast_to(ancestors, (batch, size, size)))


def prefix_tree(paths: jax.Array) -> jax.Array:
  """Parents `[1 + L * K]` of K paths packed into one tree (SpecInfer).

  Miao et al. 2023 (arXiv:2305.09781). Every token of every path is a node:
  token d of path k is node 1 + d * K + k. Paths visit the same node as long
  as they agree, and a node that m of them visit has m children in the order
  of the paths. The first child with a token owns what all paths that share
  it drew next; later copies are leaves. Dropping those would be a bias: they
  are rejected for sure, but the residual is the smaller for each of them.

  Args:
    paths: `[K, L]` int32 tokens.
  """
  count, length = paths.shape
  same = jnp.cumprod(paths[:, None] == paths[None], axis=-1)
  owner = jnp.argmax(same, axis=1).T.astype(jnp.int32)  # [L, K], the first
  start = 1 + count * jnp.arange(length, dtype=jnp.int32)[:, None]
  below = (start + owner)[:-1].reshape(-1)
  return jnp.concatenate([
      jnp.full((1,), -1, jnp.int32), jnp.zeros((count,), jnp.int32), below])
