"""How the tokens of a tree are drawn.

A scheme is a function `(drafts, q, parents) -> Drafts`: it gets the roots,
the drafter's laws q `[contexts, V]`, and the shape of the tree, and grows one
node for every entry of `parents` after the first, in order. Siblings are
tried in that order. Any function of this form will do, with further drafters
in its closure.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import itertools

import numpy as np

from specjax.exact.drafts import Drafts
from specjax.interfaces import Verifier
from specjax.trees import shapes

Scheme = Callable[[Drafts, np.ndarray, tuple[int, ...]], Drafts]


def iid(drafts: Drafts, q, parents) -> Drafts:
  """Children are independent draws from q."""
  for parent in parents[1:]:
    drafts = drafts.grow(parent, q[drafts.at(parent)])
  return drafts


def paths(drafts: Drafts, q, parents) -> Drafts:
  """Paths of independent draws, packed into a prefix tree (SpecInfer).

  Nodes with the same text share one, the first: what the others would have
  had below them goes there, and they stay as leaves.
  """
  for parent in parents[1:]:
    parent = drafts.first(parent)
    drafts = drafts.grow(parent, q[drafts.at(parent)])
  return drafts


def without_replacement(drafts: Drafts, q, parents) -> Drafts:
  """Children are drawn from what q leaves after their earlier siblings.

  After the last token of q's support they are uniform over the others
  (Sequoia), and after the last of all they are padding.
  """
  for parent in parents[1:]:
    free = ~drafts.seen(parent)
    drafts = drafts.grow(parent, _law(q[drafts.at(parent)] * free, free))
  return drafts


def top_k(drafts: Drafts, q, parents) -> Drafts:
  """Children are q's likeliest tokens, with certainty."""
  for parent in parents[1:]:
    drafts = drafts.grow(parent, _next_best(drafts, q, parent))
  return drafts


def hybrid(drafts: Drafts, q, parents) -> Drafts:
  """One random token, tried first, then the likeliest ones (Hu et al. 2025).

  Of K children the last K - 1 are the tokens S that q likes best, with
  certainty, and the first is drawn from norm(q outside S) (arXiv:2502.18779).
  """
  for node, parent in enumerate(parents[1:], 1):
    if parent in parents[1:node]:
      drafts = drafts.grow(parent, _next_best(drafts, q, parent))
      continue
    law = q[drafts.at(parent)]
    rank = np.argsort(np.argsort(-law, axis=-1, kind="stable"), axis=-1)
    random = rank >= parents.count(parent) - 1
    drafts = drafts.grow(parent, _law(law * random, random))
  return drafts


def several(drafts: Drafts, q, parents) -> Drafts:
  """Each of the children of a node is drawn by another drafter.

  Child k follows q with its tokens renamed cyclically, k steps.
  """
  for node, parent in enumerate(parents[1:], 1):
    rank = parents[1:node].count(parent)
    drafts = drafts.grow(parent, np.roll(q[drafts.at(parent)], rank, axis=-1))
  return drafts


def larger_of_two(drafts: Drafts, q, parents) -> Drafts:
  """Of two draws from q the one with the larger q is kept; q is reported.

  The value of a draw decides whether it stays: exact only for rules that make
  no use of q.
  """
  for parent in parents[1:]:
    law = q[drafts.at(parent)]
    rank = np.argsort(np.argsort(-law, axis=-1, kind="stable"), axis=-1)
    worse = rank[:, :, None] < rank[:, None]
    kept = law * (law + 2 * (worse * law[:, None]).sum(-1))
    drafts = drafts.grow(parent, kept, law)
  return drafts


def confident(drafts: Drafts, q, parents) -> Drafts:
  """Draws from q that had a probability below 1 / V are dropped.

  Exact only for rules that make no use of q, see `larger_of_two`.
  """
  for parent in parents[1:]:
    law = q[drafts.at(parent)]
    drafts = drafts.grow(parent, law)
    probs, token = drafts.probs, drafts.tokens[:, -1, None]
    drawn = np.take_along_axis(probs[:, -1], token, axis=-1)
    probs[:, -1] *= drawn * probs.shape[-1] >= 1
  return drafts


def scores(drafts, q):
  """`[n, N]`, the product of q on the path to every node."""
  found, rows = np.ones(drafts.tokens.shape), np.arange(len(drafts.weights))
  for node in range(1, found.shape[1]):
    parent = drafts.parents[:, node]
    law = q[drafts.contexts[rows, parent]]
    found[:, node] = found[rows, parent] * law[rows, drafts.tokens[:, node]]
  return found


def expanded_by_score(drafts: Drafts, q, parents, replaced: bool = False
                      ) -> Drafts:
  """Drawn nodes of which the likeliest paths are expanded.

  All nodes stay, and a score decides which of a level get children: the j-th
  node of a level that has some in `parents` stands for the one with the j-th
  largest product of q on its path. `certify` tries it where it is named, as
  `schemes=("expanded_by_score",)`.

  Args:
    drafts: the roots.
    q: the drafter's laws.
    parents: the tree, level by level.
    replaced: whether the children of a node are independent draws; else they
      are drawn without replacement.

  Raises:
    ValueError: the nodes of a level do not stand together.
  """
  depths = [0]
  for parent in parents[1:]:
    depths.append(depths[parent] + 1)
  if depths != sorted(depths):
    raise ValueError(f"parents is {tuple(parents)}, of depths {tuple(depths)}; "
                     "a level is expanded as a whole: give breadth-first order")
  for parent in parents[1:]:
    start = depths.index(depths[parent])
    rank = len({p for p in parents[1:] if start <= p < parent})
    size = depths.count(depths[parent])
    order = np.argsort(-scores(drafts, q)[:, start:start + size], axis=-1,
                       kind="stable")
    above = start + order[:, rank]
    law = q[drafts.at(above)]
    if not replaced:
      free = ~drafts.seen(above)
      law = _law(law * free, free)
    drafts = drafts.grow(above, law)
  return drafts


def expanded_iid(drafts: Drafts, q, parents) -> Drafts:
  """`expanded_by_score` with children that are independent draws."""
  return expanded_by_score(drafts, q, parents, replaced=True)


IID = (iid, paths)
CONDITIONAL = (*IID, without_replacement, top_k, hybrid, several)
ALL = (*CONDITIONAL, larger_of_two, confident)
_NAMED = (*ALL, expanded_by_score, expanded_iid)


def sound_for(verifier: Verifier) -> tuple[Scheme, ...]:
  """The schemes of this module that a verifier says it is exact for."""
  requires = verifier.requires
  if "iid" in requires:
    return IID
  return CONDITIONAL if "conditional" in requires else ALL


def named(scheme) -> Scheme:
  """The scheme itself, or the function of this module of that name."""
  if callable(scheme):
    return scheme
  known = {function.__name__: function for function in _NAMED}
  if scheme not in known:
    raise ValueError(f"scheme is {scheme!r}; it must be a function (drafts, q, "
                     f"parents) -> Drafts, or one of {', '.join(known)}")
  return known[scheme]


def name_of(scheme: Scheme) -> str:
  """A word for a scheme, for readers."""
  return getattr(scheme, "__name__", repr(scheme))


def _law(rows, otherwise):
  """Rows as laws; where one is empty, uniform over `otherwise`, if any."""
  rows = np.where(rows.any(-1, keepdims=True), rows, otherwise)
  total = rows.sum(-1, keepdims=True)
  return rows / np.where(total > 0, total, 1)


def _next_best(drafts, q, parent):
  """One-hot at q's likeliest token that no sibling carries; ties by id."""
  free = ~drafts.seen(parent)
  best = np.argmax(np.where(free, q[drafts.at(parent)], -1), axis=-1)
  return np.eye(q.shape[-1])[best] * free.any(-1, keepdims=True)


def all_trees(nodes: int) -> Iterator[tuple[int, ...]]:
  """All `parents` of trees of N nodes: every shape in every order of nodes.

  There are (N - 1)! of them, those that are no depth-first order included.
  """
  for below in itertools.product(*(range(i) for i in range(1, nodes))):
    yield (-1, *below)


def height(parents: Sequence[int]) -> int:
  """The depth of the deepest node; the parents are checked, see `trees`."""
  return max(shapes.depths(parents))


def draw(scheme: str | Scheme, parents: Sequence[int], q: np.ndarray,
         contexts: np.ndarray) -> Drafts:
  """All drafts of one shape from `contexts [n]`; q is `[contexts, V]`."""
  roots = Drafts.roots(contexts, q.shape[-1])
  return named(scheme)(roots, q, tuple(parents))
