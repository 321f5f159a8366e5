"""DDTree's trees against all trees there are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.methods import _product_trees

_DEPTH, _V = 3, 3
_best = jax.jit(_product_trees.best_tree, static_argnums=1)


def _paths(parents, tokens):
  """The path of tokens of every node below the root."""
  found = [()]
  for parent, token in zip(parents[1:], tokens):
    found.append((*found[parent], int(token)))
  return found[1:]


def _all_trees(num_nodes):
  """Every connected tree of paths, as a set of its nodes below the root."""
  trees = {frozenset()}
  for _ in range(num_nodes - 1):
    trees = {tree | {(*above, token)} for tree in trees
             for above in (*tree, ()) if len(above) < _DEPTH
             for token in range(_V) if (*above, token) not in tree}
  return trees


def _laws(seed, ties=False):
  draw = np.random.default_rng(seed).dirichlet
  laws = np.stack([draw([0.7] * _V) for _ in range(_DEPTH)])
  return np.full_like(laws, 1 / _V) if ties else laws


@pytest.mark.parametrize("seed", range(4))
def test_no_tree_of_the_product_law_promises_more(seed):
  # Broken: the tree is not the best one, or not connected, or a node twice.
  laws = _laws(seed, ties=seed == 3)
  for num_nodes in (2, 5, 6):
    tokens, parents, values = _best(jnp.log(laws), num_nodes)
    parents = np.asarray(parents)
    assert parents[0] == -1 and (parents[1:] < np.arange(1, num_nodes)).all()
    paths = _paths(parents, tokens)
    assert len(set(paths)) == num_nodes - 1
    reach = lambda path: np.prod([laws[d, x] for d, x in enumerate(path)])
    np.testing.assert_allclose(
        np.exp(values), [reach(path) for path in paths], rtol=1e-5)
    promised = max(sum(map(reach, tree)) for tree in _all_trees(num_nodes))
    np.testing.assert_allclose(sum(map(reach, paths)), promised, rtol=1e-5)


def test_the_whole_tree_and_laws_with_zeros():
  # Broken: few tokens, or probabilities of 0, leave places without a node.
  laws = _laws(0)
  laws[1] = [0, 1, 0]
  whole = 1 + 3 + 9 + 27
  tokens, parents, values = _best(jnp.log(laws), whole)
  assert len(set(_paths(np.asarray(parents), tokens))) == whole - 1
  assert not np.isnan(values).any()
  tokens, parents, _ = _best(jnp.log(laws), 13)
  assert all(path[1:2] in ((), (1,)) for path in _paths(
      np.asarray(parents), tokens))


def test_probabilities_that_are_rounded_above_1():
  # Broken: a node is drafted without the one above it, below the root.
  laws = np.full((_DEPTH, _V), -9, np.float32)
  laws[range(_DEPTH), range(_DEPTH)] = 1e-6
  tokens, parents, _ = _best(jnp.array(laws), 3)
  assert _paths(np.asarray(parents), tokens) == [(0,), (0, 1)]
