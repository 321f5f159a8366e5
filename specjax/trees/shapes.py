"""Which tree to draft: static shapes, chosen on the host from measurements.

Every function returns `parents` as a tuple, breadth-first, so that it is a
static, hashable field of a drafter: `parents[0] == -1`, `parents[i] < i`, a
level is contiguous and siblings stand in the order of their rank. N counts
the root everywhere.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import heapq

import numpy as np
from numpy.typing import ArrayLike

from specjax.utils import fields

_ROUNDING = 1e-6  # by which measured probabilities may sum to more than 1


def depths(parents: Sequence[int]) -> tuple[int, ...]:
  """The depth of every node; the root's is 0 and the tree's is the largest.

  Args:
    parents: N entries, `parents[0] == -1` and `parents[i] < i`, in any order
      of nodes.

  Raises:
    ValueError: these are not the parents of a tree.
  """
  if not len(parents) or parents[0] != -1:
    raise ValueError(f"parents is {tuple(parents)}; it must start with -1, "
                     "the root's")
  found = [0]
  for node, parent in enumerate(parents[1:], 1):
    if not 0 <= parent < node:
      raise ValueError(f"the parent of node {node} is {parent}; it must be in "
                       f"[0, {node}): number every node after its parent")
    found.append(found[parent] + 1)
  return tuple(found)


def breadth_first(parents: Sequence[int]) -> tuple[int, ...]:
  """The same tree, its nodes level by level.

  Args:
    parents: N entries in any order that has `parents[i] < i`; the order of
      siblings is kept.

  Raises:
    ValueError: these are not the parents of a tree.
  """
  parents = [int(parent) for parent in parents]
  depths(parents)
  children = [[] for _ in parents]
  for node, parent in enumerate(parents[1:], 1):
    children[parent].append(node)
  order, found = [0], [-1]
  for place, node in enumerate(order):  # grows while it is walked
    order += children[node]
    found += [place] * len(children[node])
  return tuple(found)


def full_tree(branching: Sequence[int]) -> tuple[int, ...]:
  """A tree whose nodes at depth d all have `branching[d]` children.

  (3, 2) is a root, 3 tokens below it and 2 below each of those; (1,) * gamma
  is a chain.
  """
  parents, level = [-1], [0]
  for children in branching:
    fields.check_at_least("an entry of branching", children, 1,
                          ": children of each node of a level")
    start = len(parents)
    parents += [node for node in level for _ in range(children)]
    level = range(start, len(parents))
  return tuple(parents)


def from_choices(choices: Sequence[Sequence[int]]) -> tuple[int, ...]:
  """The tree of Medusa's lists (Cai et al. 2024, arXiv:2401.10774).

  Args:
    choices: paths of ranks, one for each node below the root: (1, 0) is the
      likeliest child of the second likeliest first token.

  Raises:
    ValueError: a node's parent or its next likelier sibling is missing.
  """
  paths = {(), *(tuple(int(rank) for rank in path) for path in choices)}
  if len(paths) != len(choices) + 1:
    raise ValueError("choices name a node twice, or the root; leave only one "
                     "path for each node below the root")
  for path in paths - {()}:
    needed = [path[:-1]]
    needed += [(*path[:-1], path[-1] - 1)] if path[-1] else []
    for other in needed:
      if other not in paths:
        raise ValueError(f"choices hold {path} but not {other}; add that path "
                         "or drop this one")
  order = sorted(paths, key=lambda path: (len(path), path))
  place = {path: i for i, path in enumerate(order)}
  return (-1, *(place[path[:-1]] for path in order[1:]))


def expected_tokens(parents: Sequence[int], acceptance: ArrayLike) -> float:
  """Tokens of a round, the extra one included, that a tree promises.

  The sum over the nodes of the probability that a node is accepted; the root
  counts 1 (Chen et al. 2024, Sequoia, arXiv:2402.12374, section 3.1).

  Args:
    parents: of the tree.
    acceptance: `[K]` or `[K, K]`, see `sequoia_tree`; of children beyond K it
      is 0, and with more than K of them the first K have the last row.
  """
  acceptance = _checked_acceptance(acceptance)
  most = len(acceptance)
  counts = np.bincount(parents[1:], minlength=len(parents))
  reach, children = [1.0], [0] * len(parents)
  for parent in parents[1:]:
    rank = children[parent]
    children[parent] += 1
    chance = (acceptance[min(counts[parent], most) - 1, rank] if rank < most
              else 0.0)
    reach.append(reach[parent] * chance)
  return float(np.sum(reach))


def medusa_tree(accuracies: np.ndarray, nodes: int) -> tuple[int, ...]:
  """The N nodes with the largest chances, by Medusa's greedy construction.

  Cai et al. 2024 (arXiv:2401.10774, section 2.3.3): starting from the likeliest
  first token, always add the best next sibling or first child. With
  accuracies that do not increase with the rank no tree of N nodes promises
  more.

  Args:
    accuracies: `[heads, K]`, how often the k-th guess of a head, or of a
      drafter at that depth, is the right token.
    nodes: N.

  Raises:
    ValueError: `accuracies` holds no such shares, or there is no such tree.
  """
  accuracies = np.asarray(accuracies, np.float64)
  if accuracies.ndim != 2 or not accuracies.size:
    raise ValueError(f"accuracies has shape {accuracies.shape}; it must be "
                     "[heads, K]")
  if not ((accuracies >= 0) & (accuracies <= 1)).all():
    raise ValueError(f"accuracies is {accuracies.tolist()}; they are shares of "
                     "right guesses, in [0, 1]")
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
  """The tree of N nodes that promises most tokens, by dynamic programming.

  Chen et al. 2024 (Sequoia, arXiv:2402.12374, section 3.1):
  T(n, d, b), the best of n nodes and depth d with b children of the root, is
  max_m T(n - m, d, b - 1) + a_b max_b' T(m, d - 1, b').

  In some methods how often a child is accepted also depends on how many there
  are, as where one child is drawn outside of the others. Then every number of
  children has a recursion of its own.

  Args:
    acceptance: `[K]`, the probability that the k-th child of an accepted node
      is the one that is accepted too, in the order in which the verifier
      tries them; it need not fall with k, and it bounds the children to K. Or
      `[K, K]`: row c - 1 holds those probabilities for a node with c children,
      and what stands beyond its first c entries is not read.
    nodes: N.
    depth: the most tokens of a path below the root; None: no limit.

  Raises:
    ValueError: `acceptance` is no such list, or there is no such tree.
  """
  acceptance = _checked_acceptance(acceptance)
  depth = _levels(nodes, depth)
  _check_nodes(nodes, len(acceptance), depth)
  return _rebuilt(*_tables(acceptance, nodes, depth), nodes, depth)


def best_tree(acceptance: ArrayLike, pass_seconds: Mapping[int, float],
              draft_seconds: float, *, round_seconds: float = 0.0,
              depth: int | None = None) -> tuple[int, ...]:
  """The tree that promises most tokens a second on this machine.

  Every N in `pass_seconds` and every depth is a candidate, chains among them.
  (-1,), the root alone, says that it is best not to speculate.

  Args:
    acceptance: `[K]` or `[K, K]`, see `sequoia_tree`.
    pass_seconds: N -> seconds of the target's pass over N nodes, measured;
      entry 1 is the price of a token without speculation.
    draft_seconds: of one level of the draft; depth d costs d of them.
    round_seconds: what a round costs besides, the verification for one.
    depth: the most tokens of a path below the root; None: no limit.

  Raises:
    ValueError: `acceptance` is no such list, `pass_seconds` lacks 1, or
      something takes no time, a negative one or for ever.
  """
  acceptance = _checked_acceptance(acceptance)
  if 1 not in pass_seconds:
    raise ValueError("pass_seconds lacks 1, the pass over the root alone; "
                     "measure it: it is the price of not speculating")
  for nodes, seconds in pass_seconds.items():
    if nodes < 1 or not 0 < seconds < np.inf:
      raise ValueError(f"pass_seconds has {seconds} seconds for {nodes} nodes; "
                       "both must be positive")
  for name, seconds in (("draft_seconds", draft_seconds),
                        ("round_seconds", round_seconds)):
    if not 0 <= seconds < np.inf:
      raise ValueError(f"{name} is {seconds}; a time is not negative")
  largest = max(pass_seconds)
  values, splits = _tables(acceptance, largest, _levels(largest, depth))
  best, speed = (1, 0), 1 / pass_seconds[1]
  for nodes in sorted(pass_seconds):
    for level in range(1, _levels(nodes, depth) + 1):
      seconds = pass_seconds[nodes] + level * draft_seconds + round_seconds
      candidate = values[level, nodes].max() / seconds
      if candidate > speed:
        best, speed = (nodes, level), candidate
  return _rebuilt(values, splits, *best)


def _checked_acceptance(acceptance):
  """`[K, K]`, by number of children and rank, 0 beyond that number."""
  given = np.asarray(acceptance, np.float64)
  square = given.ndim == 2 and given.shape[0] == given.shape[1]
  if not given.size or not (square or given.ndim == 1):
    raise ValueError(f"acceptance has shape {given.shape}; it must be [K], one "
                     "entry for each child, or [K, K], a row for each number "
                     "of children")
  rows = np.tril(np.broadcast_to(given, (given.shape[-1],) * 2))
  if not ((rows >= 0).all() and (rows.sum(1) <= 1 + _ROUNDING).all()):
    raise ValueError(f"acceptance is {given.tolist()}; it holds the chances of "
                     "exclusive events: none below 0, a sum of at most 1")
  return rows


def _levels(nodes, depth):
  """The depth that a tree of so many nodes can use."""
  fields.check_at_least("nodes", nodes, 1)
  return max(0, nodes - 1 if depth is None else min(depth, nodes - 1))


def _check_nodes(nodes, children, depth):
  room = 0
  for level in range(depth + 1):
    room += children**level
    if room >= nodes:
      break
  if not 1 <= nodes <= room:
    raise ValueError(f"nodes is {nodes}; a tree of depth {depth} with at most "
                     f"{children} children a node has 1 to {room}: change one "
                     "of the three")


def _tables(acceptance, nodes, depth):
  """T `[depth + 1, nodes + 1, K + 1]`, and the m that attains every entry.

  T is -inf where there is no such tree. Of a tree with c children of its root
  the first b of them, and what is below them, have some of its nodes; of n
  nodes the b-th child has the m of `splits [depth + 1, nodes + 1, c, b]` in
  its subtree.
  """
  most = len(acceptance)
  values = np.full((depth + 1, nodes + 1, most + 1), -np.inf)
  splits = np.zeros((*values.shape, most + 1), np.int64)
  values[:, 1, 0] = 1
  n, m = np.indices((nodes + 1, nodes + 1))
  rest = np.where(n > m, n - m, 0)  # 0: no tree has 0 nodes
  for d in range(1, depth + 1):
    subtree = values[d - 1].max(-1)
    some = np.isfinite(subtree)
    for children in range(1, most + 1):
      first = values[d, :, 0]  # with the first b children: none yet
      for b, chance in enumerate(acceptance[children - 1, :children], 1):
        gain = np.where(some, chance * np.where(some, subtree, 0), -np.inf)
        sums = first[rest] + gain
        splits[d, :, children, b] = sums.argmax(-1)
        first = sums.max(-1)
      values[d, :, children] = first
  return values, splits


def _rebuilt(values, splits, nodes, depth):
  """Parents of the tree that `values[depth, nodes]` is about."""
  parents = [-1]

  def grow(root, nodes, depth):
    sizes, children = [], int(values[depth, nodes].argmax())
    for b in range(children, 0, -1):
      sizes.append(int(splits[depth, nodes, children, b]))
      nodes -= sizes[-1]
    for size in reversed(sizes):
      parents.append(root)
      grow(len(parents) - 1, size, depth - 1)

  grow(0, nodes, depth)
  return breadth_first(parents)
