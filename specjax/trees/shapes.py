"""Static shapes of draft trees, chosen on the host from measurements.

A function that builds a tree returns `parents`, a tuple that can be a static,
hashable field of a drafter: `parents[0] == -1` and `parents[i] < i`. The nodes
are in breadth-first order, so each level is contiguous. Siblings are sorted by
rank: the most likely one is first. N, the number of nodes, includes the root.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import heapq

import numpy as np
from numpy.typing import ArrayLike

from specjax.utils import fields

_ROUNDING = 1e-6  # tolerance of the sum of measured probabilities


def depths(parents: Sequence[int]) -> tuple[int, ...]:
  """Returns the depth of every node; the root has depth 0.

  Args:
    parents: N entries, `parents[0] == -1` and `parents[i] < i`. They need not
      be in breadth-first order.

  Raises:
    ValueError: `parents` is not a tree.

  Example:
    >>> import specjax as sj
    >>> sj.trees.depths((-1, 0, 0, 2))
    (0, 1, 1, 2)
  """
  if not len(parents) or parents[0] != -1:
    raise ValueError(f"parents is {tuple(parents)}; its first entry must be -1")
  depths = [0]
  for node, parent in enumerate(parents[1:], 1):
    if not 0 <= parent < node:
      raise ValueError(f"parents[{node}] is {parent}; it must be in "
                       f"[0, {node}): number every node after its parent")
    depths.append(depths[parent] + 1)
  return tuple(depths)


def breadth_first(parents: Sequence[int]) -> tuple[int, ...]:
  """Returns the same tree with its nodes sorted level by level.

  Args:
    parents: N entries in any order with `parents[i] < i`. Siblings keep their
      order.

  Raises:
    ValueError: `parents` is not a tree.

  Example:
    >>> import specjax as sj
    >>> sj.trees.breadth_first((-1, 0, 1, 0))
    (-1, 0, 0, 1)
  """
  parents = [int(parent) for parent in parents]
  depths(parents)
  children = [[] for _ in parents]
  for node, parent in enumerate(parents[1:], 1):
    children[parent].append(node)
  order, new_parents = [0], [-1]
  for place, node in enumerate(order):  # the loop appends to `order`
    order += children[node]
    new_parents += [place] * len(children[node])
  return tuple(new_parents)


def full_tree(branching: Sequence[int]) -> tuple[int, ...]:
  """Returns a tree in which each node at depth d has `branching[d]` children.

  Args:
    branching: number of children per node at each depth, starting at the root.
      (1,) * gamma is a chain.

  Example:
    >>> import specjax as sj
    >>> sj.trees.full_tree((2, 1))
    (-1, 0, 0, 1, 2)
  """
  parents, level = [-1], [0]
  for children in branching:
    fields.check_at_least("an entry of branching", children, 1)
    start = len(parents)
    parents += [node for node in level for _ in range(children)]
    level = range(start, len(parents))
  return tuple(parents)


def from_choices(choices: Sequence[Sequence[int]]) -> tuple[int, ...]:
  """Returns the tree of a list of paths, the format used by Medusa.

  Cai et al. 2024 (arXiv:2401.10774).

  Args:
    choices: one path of ranks for each node below the root. The path (1, 0) is
      the most likely child of the second most likely first token.

  Raises:
    ValueError: a path occurs twice, or a node's parent or its next more likely
      sibling is missing.

  Example:
    >>> import specjax as sj
    >>> sj.trees.from_choices([(0,), (1,), (0, 0)])
    (-1, 0, 0, 1)
  """
  paths = {(), *(tuple(int(rank) for rank in path) for path in choices)}
  if len(paths) != len(choices) + 1:
    raise ValueError("choices contains a path twice, or the root; give one "
                     "path for each node below the root")
  for path in paths - {()}:
    needed = [path[:-1]]
    needed += [(*path[:-1], path[-1] - 1)] if path[-1] else []
    for other in needed:
      if other not in paths:
        raise ValueError(f"choices contains {path} but not {other}; add that "
                         "path or drop this one")
  order = sorted(paths, key=lambda path: (len(path), path))
  place = {path: i for i, path in enumerate(order)}
  return (-1, *(place[path[:-1]] for path in order[1:]))


def expected_tokens(parents: Sequence[int], acceptance: ArrayLike) -> float:
  """Returns the expected number of tokens of a round, including the next token.

  It is the sum of the acceptance probabilities of all nodes, with 1 for the
  root (Chen et al. 2024, Sequoia, arXiv:2402.12374, section 3.1).

  Args:
    parents: the tree, N entries.
    acceptance: `[K]` or `[K, K]`, see `sequoia_tree`. If a node has more than K
      children, the first K use the last row of `[K, K]`, and the others are
      never accepted.

  Example:
    >>> import specjax as sj
    >>> sj.trees.expected_tokens((-1, 0, 0, 1), [0.5, 0.25])
    2.0
  """
  acceptance = _check_acceptance(acceptance)
  most = len(acceptance)
  counts = np.bincount(parents[1:], minlength=len(parents))
  reach, children = [1.0], [0] * len(parents)
  for parent in parents[1:]:
    rank = children[parent]
    children[parent] += 1
    probability = (acceptance[min(counts[parent], most) - 1, rank]
                   if rank < most else 0.0)
    reach.append(reach[parent] * probability)
  return float(np.sum(reach))


def medusa_tree(accuracies: np.ndarray, nodes: int) -> tuple[int, ...]:
  """Returns the tree of Medusa's greedy construction.

  Cai et al. 2024 (arXiv:2401.10774, section 2.3.3). The construction starts
  with the most likely first token. Each step adds the next sibling or the first
  child of a node, whichever has the highest probability. If the accuracies do
  not increase with the rank, no tree of N nodes has more expected tokens.

  Args:
    accuracies: `[heads, K]`, fraction of positions at which the k-th guess of a
      head is correct. For other drafters, row d is for guesses at depth d + 1.
    nodes: N, number of nodes including the root.

  Raises:
    ValueError: an entry of `accuracies` is not in [0, 1], or a tree with
      `nodes` nodes needs more heads or guesses.

  Example:
    >>> import specjax as sj
    >>> sj.trees.medusa_tree([[0.6, 0.2], [0.5, 0.1]], nodes=4)
    (-1, 0, 0, 1)
  """
  accuracies = np.asarray(accuracies, np.float64)
  if accuracies.ndim != 2 or not accuracies.size:
    raise ValueError(f"accuracies has shape {accuracies.shape}; it must be "
                     "[heads, K]")
  if not ((accuracies >= 0) & (accuracies <= 1)).all():
    raise ValueError(f"accuracies is {accuracies.tolist()}; its entries must "
                     "be in [0, 1]")
  heads, ranks = accuracies.shape
  _check_nodes(nodes, ranks, heads)
  neighbours = [(-accuracies[0, 0], (0,))]
  choices = []
  while len(choices) < nodes - 1:
    value, path = heapq.heappop(neighbours)
    choices.append(path)
    depth, rank = len(path), path[-1]
    if rank + 1 < ranks:
      before = np.prod([accuracies[d, k] for d, k in enumerate(path[:-1])])
      heapq.heappush(neighbours, (-before * accuracies[depth - 1, rank + 1],
                                  (*path[:-1], rank + 1)))
    if depth < heads:
      heapq.heappush(neighbours, (value * accuracies[depth, 0], (*path, 0)))
  return from_choices(choices)


def sequoia_tree(acceptance: ArrayLike, nodes: int, depth: int | None = None
                 ) -> tuple[int, ...]:
  """Returns the tree of N nodes with the most expected tokens.

  The method is the dynamic programme of Chen et al. 2024 (Sequoia,
  arXiv:2402.12374, section 3.1). Let a_b be the acceptance of child b, and
  T(n, d, b) the largest expected number of tokens among trees of n nodes and
  depth d whose root has b children. Then T(n, d, b) is the maximum over m of
  T(n - m, d, b - 1) + a_b max_b' T(m, d - 1, b').

  In some methods the acceptance of a child also depends on the number of
  children, for example if one child is drawn from the tokens that the others
  do not have. Then there is a separate recursion for every number of children.

  Args:
    acceptance: `[K]`, probability that the k-th child of an accepted node is
      the accepted child, in the order in which the verifier tries the children.
      The entries need not decrease. A node has at most K children. Or `[K, K]`:
      row c - 1 contains these probabilities for a node with c children, and
      its entries after the first c are not read.
    nodes: N, number of nodes including the root.
    depth: maximum depth of a node. None: no limit.

  Raises:
    ValueError: `acceptance` is not a list of probabilities, or no tree has this
      number of nodes within `depth` and K children per node.

  Example:
    >>> import specjax as sj
    >>> sj.trees.sequoia_tree([0.6, 0.2], nodes=4)
    (-1, 0, 1, 2)
    >>> sj.trees.sequoia_tree([0.6, 0.2], nodes=4, depth=2)
    (-1, 0, 0, 1)
  """
  acceptance = _check_acceptance(acceptance)
  depth = _clip_depth(nodes, depth)
  _check_nodes(nodes, len(acceptance), depth)
  return _rebuild(*_tables(acceptance, nodes, depth), nodes, depth)


def best_tree(acceptance: ArrayLike, pass_seconds: Mapping[int, float],
              draft_seconds: float, *, round_seconds: float = 0.0,
              depth: int | None = None) -> tuple[int, ...]:
  """Returns the tree with the most expected tokens per second.

  The candidates are the optimal trees of every depth with N nodes, for every N
  in `pass_seconds`. The result (-1,), a tree with only a root, means that
  decoding without drafts is the fastest.

  Args:
    acceptance: `[K]` or `[K, K]`, see `sequoia_tree`.
    pass_seconds: measured seconds of the target's pass over N nodes, with N as
      key. Entry 1 is the time per token without drafts. For a target with
      experts, the time also depends on the text: measure it on text, or predict
      it with `analysis.pass_bytes`.
    draft_seconds: seconds for drafting one level of the tree.
    round_seconds: seconds of the rest of a round, such as verification.
    depth: maximum depth of a node. None: no limit.

  Raises:
    ValueError: `acceptance` is not a list of probabilities, `pass_seconds` has
      no entry 1, or a time is not positive and finite (`draft_seconds` and
      `round_seconds` may be 0).

  Example: in the first call, 4 nodes cost little more than one. In the second,
  they cost four times as much.

    >>> import specjax as sj
    >>> sj.trees.best_tree([0.6, 0.2], {1: 1.0, 4: 1.1}, draft_seconds=0.1)
    (-1, 0, 0, 1)
    >>> sj.trees.best_tree([0.6, 0.2], {1: 1.0, 4: 4.0}, draft_seconds=0.1)
    (-1,)
  """
  acceptance = _check_acceptance(acceptance)
  if 1 not in pass_seconds:
    raise ValueError("pass_seconds lacks 1, the pass over the root alone; "
                     "measure it: it is the cost without speculation")
  for nodes, seconds in pass_seconds.items():
    if nodes < 1 or not 0 < seconds < np.inf:
      raise ValueError(f"pass_seconds has {seconds} seconds for {nodes} nodes; "
                       "both must be positive")
  for name, seconds in (("draft_seconds", draft_seconds),
                        ("round_seconds", round_seconds)):
    if not 0 <= seconds < np.inf:
      raise ValueError(f"{name} is {seconds}; it must be at least 0 and finite")
  largest = max(pass_seconds)
  values, splits = _tables(acceptance, largest, _clip_depth(largest, depth))
  best, speed = (1, 0), 1 / pass_seconds[1]
  for nodes in sorted(pass_seconds):
    for level in range(1, _clip_depth(nodes, depth) + 1):
      seconds = pass_seconds[nodes] + level * draft_seconds + round_seconds
      candidate = values[level, nodes].max() / seconds
      if candidate > speed:
        best, speed = (nodes, level), candidate
  return _rebuild(values, splits, *best)


def _check_acceptance(acceptance: ArrayLike) -> np.ndarray:
  """Returns `acceptance` as `[K, K]`, see `sequoia_tree`.

  Row c - 1 is for a node with c children. Its entries after the first c are 0.

  Raises:
    ValueError: the entries are not probabilities of exclusive events.
  """
  array = np.asarray(acceptance, np.float64)
  square = array.ndim == 2 and array.shape[0] == array.shape[1]
  if not array.size or not (square or array.ndim == 1):
    raise ValueError(f"acceptance has shape {array.shape}; it must be [K], one "
                     "entry for each child, or [K, K], a row for each number "
                     "of children")
  rows = np.tril(np.broadcast_to(array, (array.shape[-1],) * 2))
  if not ((rows >= 0).all() and (rows.sum(1) <= 1 + _ROUNDING).all()):
    raise ValueError(f"acceptance is {array.tolist()}; its entries are "
                     "probabilities of exclusive events: at least 0, with a "
                     "sum of at most 1")
  return rows


def _clip_depth(nodes: int, depth: int | None) -> int:
  """Returns the largest depth that a tree of N nodes can have."""
  fields.check_at_least("nodes", nodes, 1)
  return max(0, nodes - 1 if depth is None else min(depth, nodes - 1))


def _check_nodes(nodes: int, children: int, depth: int) -> None:
  """Raises `ValueError` unless a tree of this size exists."""
  room = 0
  for level in range(depth + 1):
    room += children**level
    if room >= nodes:
      break
  if not 1 <= nodes <= room:
    raise ValueError(f"nodes is {nodes}; a tree of depth {depth} with at most "
                     f"{children} children per node has 1 to {room} nodes: "
                     "change one of the three")


def _tables(acceptance: np.ndarray, nodes: int, depth: int
            ) -> tuple[np.ndarray, np.ndarray]:
  """Returns the tables of the dynamic programme of `sequoia_tree`.

  Returns:
    T, indexed `[d, n, b]`, with -inf if no such tree exists; and the optimal
    splits, indexed `[d, n, c, b]`. An entry of splits is the number of nodes in
    the subtree of the b-th of c children, if the root and its first b subtrees
    have n nodes together.
  """
  most = len(acceptance)
  values = np.full((depth + 1, nodes + 1, most + 1), -np.inf)
  splits = np.zeros((*values.shape, most + 1), np.int64)
  values[:, 1, 0] = 1
  n, m = np.indices((nodes + 1, nodes + 1))
  others = np.where(n > m, n - m, 0)  # no tree has 0 nodes: T is -inf
  for d in range(1, depth + 1):
    subtree = values[d - 1].max(-1)
    some = np.isfinite(subtree)
    for children in range(1, most + 1):
      # Expected tokens of the tree with the first b children; b is 0 here.
      first = values[d, :, 0]
      for b, probability in enumerate(acceptance[children - 1, :children], 1):
        gain = np.where(some, probability * np.where(some, subtree, 0), -np.inf)
        sums = first[others] + gain
        splits[d, :, children, b] = sums.argmax(-1)
        first = sums.max(-1)
      values[d, :, children] = first
  return values, splits


def _rebuild(values: np.ndarray, splits: np.ndarray, nodes: int, depth: int
             ) -> tuple[int, ...]:
  """Returns the optimal tree of the tables, see `_tables`.

  Args:
    values: table T.
    splits: table of optimal splits.
    nodes: N, number of nodes of the tree.
    depth: maximum depth of a node.
  """
  parents = [-1]

  def grow(root: int, nodes: int, depth: int) -> None:
    sizes, children = [], int(values[depth, nodes].argmax())
    for b in range(children, 0, -1):
      sizes.append(int(splits[depth, nodes, children, b]))
      nodes -= sizes[-1]
    for size in reversed(sizes):
      parents.append(root)
      grow(len(parents) - 1, size, depth - 1)

  grow(0, nodes, depth)
  return breadth_first(parents)
