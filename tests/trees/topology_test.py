"""Depths and ancestors of drafts, against a walk from every node."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.trees import topology


def _random_parents(size, seed, deep):
  rng = np.random.default_rng([size, seed])
  low = lambda i: max(0, i - 2) if deep else 0
  return np.array([-1] + [rng.integers(low(i), i) for i in range(1, size)],
                  np.int32)


def _walk(parents):
  reach = np.zeros((len(parents),) * 2, bool)
  for i in range(len(parents)):
    node = i
    while node >= 0:
      reach[i, node] = True
      node = parents[node]
  return reach


# 1 and 2 need no or one squaring; 33 is one more than a power of two.
@pytest.mark.parametrize("size", [1, 2, 3, 9, 33])
@pytest.mark.parametrize("deep", [False, True])
def test_ancestors_and_depths(size, deep):
  # Broken: a node attends to another branch, or sits at a wrong position.
  parents = np.stack([_random_parents(size, seed, deep) for seed in range(5)])
  ancestors = jax.jit(jax.vmap(topology.ancestors))(parents)
  depths = jax.jit(jax.vmap(topology.depths))(parents)
  assert ancestors.dtype == jnp.bool_ and depths.dtype == jnp.int32
  for row, reach, depth in zip(parents, ancestors, depths):
    np.testing.assert_array_equal(reach, _walk(row))
    np.testing.assert_array_equal(depth, _walk(row).sum(-1) - 1)


@pytest.mark.parametrize("gamma", [0, 1, 64])
def test_chain(gamma):
  # Broken: a chain's last tokens do not see its first ones.
  parents = topology.chain(gamma)
  assert parents.dtype == jnp.int32
  np.testing.assert_array_equal(parents, np.arange(gamma + 1) - 1)
  np.testing.assert_array_equal(topology.ancestors(parents),
                                np.tril(np.ones((gamma + 1, gamma + 1), bool)))
  np.testing.assert_array_equal(topology.depths(parents), np.arange(gamma + 1))


def test_causal():
  # Broken: a pass over new tokens hides one from itself, or shows a later one.
  depths, ancestors = topology.causal(3, 4)
  assert depths.dtype == jnp.int32 and ancestors.dtype == jnp.bool_
  assert depths.shape == (3, 4) and ancestors.shape == (3, 4, 4)
  parents = topology.chain(3)
  for row, reach in zip(depths, ancestors):
    np.testing.assert_array_equal(row, topology.depths(parents))
    np.testing.assert_array_equal(reach, topology.ancestors(parents))


def _packed(paths):
  """The prefix tree by insertion: a node is known by its path's prefix."""
  parents, owner = [-1], {(): 0}
  for depth in range(paths.shape[1]):
    level = {}
    for path in paths:
      parents.append(owner[tuple(path[:depth])])
      level.setdefault(tuple(path[:depth + 1]), len(parents) - 1)
    owner.update(level)
  return parents


@pytest.mark.parametrize("count,length", [(1, 1), (1, 4), (5, 1), (4, 3)])
def test_prefix_tree(count, length):
  # Broken: paths share nodes that they do not agree on, or a copy of a token
  # that was drawn before owns a subtree.
  paths = np.random.default_rng(count).integers(
      2, size=(20, count, length)).astype(np.int32)
  parents = jax.jit(jax.vmap(topology.prefix_tree))(paths)
  assert parents.dtype == jnp.int32
  for row, found in zip(paths, parents):
    assert found.tolist() == _packed(row)
