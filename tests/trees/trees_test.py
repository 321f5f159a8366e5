"""Choosing a tree, against all ordered trees."""

import functools

import numpy as np
import pytest

from specjax.trees import shapes


@functools.cache
def _forests(size):
  """All ordered forests of `size` nodes; a tree is a tuple of children."""
  if size == 0:
    return ((),)
  return tuple(
      (first, *rest) for n in range(1, size + 1)
      for first in _forests(n - 1) for rest in _forests(size - n))


def _trees(nodes):
  return _forests(nodes - 1)


def _depth(tree):
  return max((1 + _depth(child) for child in tree), default=0)


def _widest(tree):
  return max([len(tree), *map(_widest, tree)])


def _promise(tree, acceptance):
  mine = acceptance  # or, in rows, that of a node with so many children
  if tree and isinstance(acceptance[0], tuple):
    mine = acceptance[len(tree) - 1]
  return 1 + sum(a * _promise(child, acceptance)
                 for a, child in zip(mine, tree))


def _medusa_promise(tree, accuracies):
  """Nodes below the root, each with the product of its path."""
  if not len(accuracies):
    return 0
  return sum(a * (1 + _medusa_promise(child, accuracies[1:]))
             for a, child in zip(accuracies[0], tree))


def _depth_of(parents):
  depths = [0]
  for parent in parents[1:]:
    depths.append(depths[parent] + 1)
  assert depths == sorted(depths)  # breadth-first
  return max(depths)


_ACCEPTANCE = [(0.6, 0.2, 0.1, 0.05), (0.3, 0.0, 0.5), (0.1, 0.6, 0.2, 0.1),
               (0.9,), (0.25, 0.25, 0.25, 0.25),
               ((0.5, 9, 9), (0.2, 0.5, 9), (0.1, 0.2, 0.6)),
               ((0.7, 9, 9), (0.1, 0.3, 9), (0.2, 0.2, 0.5))]


@pytest.mark.parametrize("acceptance", _ACCEPTANCE)
def test_sequoia_tree_is_the_best_of_all_trees(acceptance):
  # Broken: the dynamic program; acceptance need not fall with the rank.
  for nodes in range(1, 9):
    for depth in (*range(nodes), None):
      allowed = [tree for tree in _trees(nodes)
                 if _widest(tree) <= len(acceptance)
                 and (depth is None or _depth(tree) <= depth)]
      if not allowed:
        with pytest.raises(ValueError, match=f"nodes is {nodes}"):
          shapes.sequoia_tree(acceptance, nodes, depth)
        continue
      found = shapes.sequoia_tree(acceptance, nodes, depth)
      assert len(found) == nodes
      assert depth is None or _depth_of(found) <= depth
      best = max(_promise(tree, acceptance) for tree in allowed)
      assert abs(shapes.expected_tokens(found, acceptance) - best) < 1e-12


@pytest.mark.parametrize("seed", range(4))
def test_medusa_tree_is_the_best_of_all_trees(seed):
  # Broken: a better sibling or child is passed over.
  rng = np.random.default_rng(seed)
  accuracies = -np.sort(-rng.random((3, 3)) / 2, axis=1)
  for nodes in range(1, 9):
    found = shapes.medusa_tree(accuracies, nodes)
    assert len(found) == nodes
    best = max(_medusa_promise(tree, accuracies) for tree in _trees(nodes)
               if _depth(tree) <= 3 and _widest(tree) <= 3)
    value, rank, seen = [1.0], [0], [0] * nodes
    for node, parent in enumerate(found[1:], 1):
      depth = _depth_of(found[:node + 1])
      rank.append(seen[parent])
      seen[parent] += 1
      value.append(value[parent] * accuracies[depth - 1, rank[-1]])
    assert abs(sum(value[1:]) - best) < 1e-12


@pytest.mark.parametrize("acceptance", _ACCEPTANCE)
@pytest.mark.parametrize("level,extra", [(0.0, 0.0), (0.1, 0.2), (0.5, 0.0)])
def test_best_tree_is_the_fastest_of_all_trees(acceptance, level, extra):
  # Broken: the tree that is predicted to be fastest is not.
  cost = {1: 1.0, 2: 1.1, 4: 1.3, 6: 1.4, 8: 2.5}

  def speed(tokens, nodes, depth):
    drafting = 0 if nodes == 1 else depth * level + extra
    return tokens / (cost[nodes] + drafting)

  for limit in (2, None):
    best = max(
        speed(_promise(tree, acceptance), nodes, _depth(tree))
        for nodes in cost for tree in _trees(nodes)
        if _widest(tree) <= len(acceptance)
        and (limit is None or _depth(tree) <= limit))
    found = shapes.best_tree(acceptance, cost, level, round_seconds=extra,
                            depth=limit)
    got = speed(shapes.expected_tokens(found, acceptance), len(found),
                _depth_of(found))
    assert abs(got - best) < 1e-12


def test_best_tree_can_be_a_chain_or_nothing():
  # Broken: a tree is drafted where plain decoding or a chain is faster.
  cost = {n: 1 + 0.01 * n for n in range(1, 33)}
  assert shapes.best_tree((0.5, 0.2), cost, 10.0) == (-1,)
  chain = shapes.best_tree((0.9, 0.0), cost, 0.01)
  assert chain == tuple(range(-1, len(chain) - 1)) and len(chain) > 8
  wide = shapes.best_tree((0.3, 0.2, 0.1), cost, 0.2)
  assert 0 in np.diff(wide[1:])


def test_a_large_tree_takes_no_time():
  # Broken: the size that the literature uses is out of reach.
  parents = shapes.sequoia_tree((0.6, 0.2, 0.1, 0.04, 0.02), 256, 24)
  assert len(parents) == 256 and _depth_of(parents) <= 24


def test_given_trees():
  # Broken: a shape from a paper is not the one that is drafted.
  assert shapes.full_tree((2, 3)) == (-1, 0, 0, 1, 1, 1, 2, 2, 2)
  assert shapes.full_tree((1, 1, 1)) == (-1, 0, 1, 2)
  assert shapes.full_tree(()) == (-1,) == shapes.from_choices([])
  assert shapes.from_choices([[0], [0, 0], [1], [0, 1], [2], [0, 0, 0], [1, 0]]
                            ) == (-1, 0, 0, 0, 1, 1, 2, 4)
  assert shapes.breadth_first([-1, 0, 1, 1, 0, 4, 2]) == (-1, 0, 0, 1, 1, 2, 3)


@pytest.mark.parametrize("call,names", [
    (lambda: shapes.full_tree((2, 0)), "branching is 0"),
    (lambda: shapes.full_tree((2.5,)), "branching is 2.5"),
    (lambda: shapes.breadth_first(()), r"parents is \(\)"),
    (lambda: shapes.breadth_first((0, 0)), r"parents is \(0, 0\)"),
    (lambda: shapes.breadth_first((-1, 0, 2)), r"parents\[2\] is 2"),
    (lambda: shapes.from_choices([(0, 0)]), r"choices.*\(0, 0\).*\(0,\)"),
    (lambda: shapes.from_choices([(0,), (2,)]), r"choices.*\(2,\).*\(1,\)"),
    (lambda: shapes.from_choices([(0,), [0]]), "choices.*twice"),
    (lambda: shapes.medusa_tree([0.5], 2), r"accuracies has shape \(1,\)"),
    (lambda: shapes.medusa_tree([[0.5, 0.1]], 4), "nodes is 4.*1 to 3"),
    (lambda: shapes.medusa_tree([[0.5, np.nan]], 2), r"accuracies is .*nan"),
    (lambda: shapes.medusa_tree([[3.0, 2.0]], 2), r"accuracies is .*3\.0"),
    (lambda: shapes.sequoia_tree((0.5,), 0), "nodes is 0"),
    (lambda: shapes.sequoia_tree((0.5,), 2.0), "nodes is 2.0"),
    (lambda: shapes.sequoia_tree((0.7, 0.7), 4), r"acceptance is .*0\.7"),
    (lambda: shapes.sequoia_tree((), 4), r"acceptance has shape \(0,\)"),
    (lambda: shapes.sequoia_tree((0.5, -0.1), 4), r"acceptance is .*-0\.1"),
    (lambda: shapes.best_tree((0.5,), {2: 1.0}, 0.1), "pass_seconds lacks 1"),
    (lambda: shapes.best_tree((0.5,), {1: 0.0}, 0.1), "pass_seconds has 0.0"),
    (lambda: shapes.best_tree((0.5,), {1: 1.0}, np.nan),
     "draft_seconds is nan"),
    (lambda: shapes.best_tree((0.5,), {1: 1.0}, 0.1, round_seconds=-1.0),
     "round_seconds is -1")])
def test_bad_settings(call, names):
  # Broken: a typing error becomes a tree.
  with pytest.raises(ValueError, match=names):
    call()
