"""Ancestors and depths of draft trees, computed on the device.

Only the number of nodes N is static. The parents are an array, so fixed trees
and trees chosen at run time share one code path.
"""

import math

import chex
import jax
import jax.numpy as jnp


def chain(gamma: int) -> jax.Array:
  """Returns the parents `[gamma + 1]` int32 of a chain of gamma tokens.

  Example:
    >>> from specjax.trees import topology
    >>> topology.chain(2).tolist()
    [-1, 0, 1]
  """
  if gamma < 0:
    raise ValueError(f"gamma is {gamma}; it must be at least 0")
  return jnp.arange(-1, gamma, dtype=jnp.int32)


def ancestors(parents: jax.Array) -> jax.Array:
  """Returns `[N, N]` bool: row i marks the path root..i, including i.

  Args:
    parents: `[N]` int32, the index of each node's parent: `parents[0] == -1`
      and `parents[i] < i`.

  Example:
    >>> import jax.numpy as jnp
    >>> from specjax.trees import topology
    >>> print(topology.ancestors(jnp.array([-1, 0, 0])).astype(int))
    [[1 0 0]
     [1 1 0]
     [1 0 1]]
  """
  chex.assert_rank(parents, 1)
  chex.assert_type(parents, int)
  size = parents.shape[0]
  reach = jax.nn.one_hot(parents, size) + jnp.eye(size)
  # `reach` connects a node to its nearest ancestors. Each squaring doubles the
  # number of levels, so no loop over the depth is necessary on the device.
  for _ in range(math.ceil(math.log2(size))):
    reach = jnp.minimum(reach @ reach, 1.0)
  return reach > 0.5


def depths(parents: jax.Array) -> jax.Array:
  """Returns `[N]` int32, the depth of every node; the root has depth 0.

  Args:
    parents: `[N]` int32, as for `ancestors`.

  Example:
    >>> import jax.numpy as jnp
    >>> from specjax.trees import topology
    >>> topology.depths(jnp.array([-1, 0, 0, 2])).tolist()
    [0, 1, 1, 2]
  """
  chex.assert_rank(parents, 1)
  return depths_of(ancestors(parents))


def depths_of(ancestors: jax.Array) -> jax.Array:
  """Returns `[..., S]` int32, the depths of nodes with these ancestors.

  Args:
    ancestors: `[..., S, T]` bool, the ancestor masks of the last S of T nodes.

  Example:
    >>> import jax.numpy as jnp
    >>> from specjax.trees import topology
    >>> topology.depths_of(jnp.tril(jnp.ones((3, 3), bool))).tolist()
    [0, 1, 2]
  """
  chex.assert_type(ancestors, bool)
  return jnp.sum(ancestors, axis=-1, dtype=jnp.int32) - 1


def causal(batch: int, size: int) -> tuple[jax.Array, jax.Array]:
  """Returns depths and ancestors of a causal pass over S tokens per row.

  Each token sees itself and the tokens before it. So the S tokens of a row form
  a chain.

  Args:
    batch: B, number of rows.
    size: S, number of tokens in a row.

  Returns:
    `(depths [B, S] int32, ancestors [B, S, S] bool)`.

  Example:
    >>> from specjax.trees import topology
    >>> depths, ancestors = topology.causal(2, 3)
    >>> depths.tolist(), ancestors.shape
    ([[0, 1, 2], [0, 1, 2]], (2, 3, 3))
  """
  depths = jnp.arange(size, dtype=jnp.int32)
  ancestors = jnp.tril(jnp.ones((size, size), bool))
  return (jnp.broadcast_to(depths, (batch, size)),
          jnp.broadcast_to(ancestors, (batch, size, size)))


def prefix_tree(paths: jax.Array) -> jax.Array:
  """Returns the parents `[1 + L * K]` of K paths packed into one tree.

  Miao et al. 2023 (SpecInfer, arXiv:2305.09781). Token d of path k is node
  1 + d * K + k. If paths begin with the same tokens, the first such path owns
  the shared nodes: the next tokens of all these paths are children of its node,
  in the order of the paths. The nodes of the other paths are copies without
  children. Dropping the copies would bias the output: they are always
  rejected, but each of them makes the residual smaller.

  Args:
    paths: `[K, L]` int32, K paths of L tokens.

  Example: both paths start with token 7, so both second tokens are children of
  node 1. Node 2 is a copy.

    >>> import jax.numpy as jnp
    >>> from specjax.trees import topology
    >>> topology.prefix_tree(jnp.array([[7, 1], [7, 2]])).tolist()
    [-1, 0, 0, 1, 1]
  """
  chex.assert_rank(paths, 2)
  chex.assert_type(paths, int)
  count, length = paths.shape
  same = jnp.cumprod(paths[:, None] == paths[None], axis=-1)
  # [L, K], the first path with the same tokens up to this one.
  owner = jnp.argmax(same, axis=1).T.astype(jnp.int32)
  start = 1 + count * jnp.arange(length, dtype=jnp.int32)[:, None]
  below = (start + owner)[:-1].reshape(-1)
  return jnp.concatenate([
      jnp.full((1,), -1, jnp.int32), jnp.zeros((count,), jnp.int32), below])
