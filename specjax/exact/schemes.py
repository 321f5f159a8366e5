"""Schemes for drawing the tokens of a tree.

A scheme is a function `(drafts, q, parents) -> Drafts` that returns every
possible draft with its probability. `drafts` contains only roots.
`q [contexts, V]` is the draft distribution after each context, numbered as in
`exact.drafts`. `parents [N]` is the shape of the tree. For each entry of
`parents` after the first, the scheme grows one node. Siblings are verified in
the same order. A user can write other schemes. A closure can contain further
draft models.
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


def iid(drafts: Drafts, q: np.ndarray, parents: tuple[int, ...]
        ) -> Drafts:
  """Draws children independently from q."""
  for parent in parents[1:]:
    drafts = drafts.grow(parent, q[drafts.at(parent)])
  return drafts


def paths(drafts: Drafts, q: np.ndarray, parents: tuple[int, ...]
          ) -> Drafts:
  """Draws independent paths and merges their prefixes (SpecInfer).

  If siblings have equal tokens, the first of them gets the children of all of
  them. The others remain as leaves.
  """
  for parent in parents[1:]:
    parent = drafts.first(parent)
    drafts = drafts.grow(parent, q[drafts.at(parent)])
  return drafts


def without_replacement(drafts: Drafts, q: np.ndarray, parents: tuple[int, ...]
                        ) -> Drafts:
  """Draws children from q without the tokens of their earlier siblings.

  If no unused token has q > 0, children are uniform over the unused tokens
  (Sequoia). If all tokens are used, children are padding.
  """
  for parent in parents[1:]:
    free = ~drafts.seen(parent)
    drafts = drafts.grow(parent, _normalised(q[drafts.at(parent)] * free, free))
  return drafts


def top_k(drafts: Drafts, q: np.ndarray, parents: tuple[int, ...]
          ) -> Drafts:
  """Uses the most likely tokens of q as children, without sampling."""
  for parent in parents[1:]:
    drafts = drafts.grow(parent, _next_best(drafts, q, parent))
  return drafts


def hybrid(drafts: Drafts, q: np.ndarray, parents: tuple[int, ...]
           ) -> Drafts:
  """Draws one child and uses the most likely tokens as its siblings.

  The last K - 1 of K children are the K - 1 most likely tokens of q, the set S.
  The first child is drawn from q outside S, normalised (Hu et al. 2025,
  arXiv:2502.18779).
  """
  for node, parent in enumerate(parents[1:], 1):
    if parent in parents[1:node]:
      drafts = drafts.grow(parent, _next_best(drafts, q, parent))
      continue
    law = q[drafts.at(parent)]
    rank = np.argsort(np.argsort(-law, axis=-1, kind="stable"), axis=-1)
    random = rank >= parents.count(parent) - 1
    drafts = drafts.grow(parent, _normalised(law * random, random))
  return drafts


def several(drafts: Drafts, q: np.ndarray, parents: tuple[int, ...]
            ) -> Drafts:
  """Draws each child of a node from another draft model.

  Child k is drawn from q with its entries shifted cyclically by k tokens.
  """
  for node, parent in enumerate(parents[1:], 1):
    rank = parents[1:node].count(parent)
    drafts = drafts.grow(parent, np.roll(q[drafts.at(parent)], rank, axis=-1))
  return drafts


def larger_of_two(drafts: Drafts, q: np.ndarray, parents: tuple[int, ...]
                  ) -> Drafts:
  """Draws two tokens from q and submits the more likely one, with row q.

  The submitted token is not distributed as q. Only rules that ignore q are
  therefore lossless.
  """
  for parent in parents[1:]:
    law = q[drafts.at(parent)]
    rank = np.argsort(np.argsort(-law, axis=-1, kind="stable"), axis=-1)
    worse = rank[:, :, None] < rank[:, None]
    kept = law * (law + 2 * (worse * law[:, None]).sum(-1))
    drafts = drafts.grow(parent, kept, law)
  return drafts


def confident(drafts: Drafts, q: np.ndarray, parents: tuple[int, ...]
              ) -> Drafts:
  """Draws children from q and drops children with q below 1 / V.

  Only rules that ignore q are lossless, as with `larger_of_two`.
  """
  for parent in parents[1:]:
    law = q[drafts.at(parent)]
    drafts = drafts.grow(parent, law)
    probs, token = drafts.probs, drafts.tokens[:, -1, None]
    drawn = np.take_along_axis(probs[:, -1], token, axis=-1)
    probs[:, -1] *= drawn * probs.shape[-1] >= 1
  return drafts


def scores(drafts: Drafts, q: np.ndarray) -> np.ndarray:
  """Returns the product `[n, N]` of q on the path to every node."""
  products, rows = np.ones(drafts.tokens.shape), np.arange(len(drafts.weights))
  for node in range(1, products.shape[1]):
    parent = drafts.parents[:, node]
    law = q[drafts.contexts[rows, parent]]
    products[:, node] = (
        products[rows, parent] * law[rows, drafts.tokens[:, node]])
  return products


def expanded_by_score(drafts: Drafts, q: np.ndarray, parents: tuple[int, ...],
                      replaced: bool = False) -> Drafts:
  """Draws nodes level by level and expands the most likely paths.

  The score of a node is the product of q on its path. In each level, the scores
  decide which nodes get children. The j-th node with children in `parents` is
  replaced by the node with the j-th largest score. Nodes without children
  remain in the tree.

  Args:
    drafts: the roots.
    q: `[contexts, V]` draft distributions.
    parents: parents of the tree in breadth-first order.
    replaced: if True, draw the children of a node independently. If False, draw
      them without replacement.

  Raises:
    ValueError: `parents` is not in breadth-first order.
  """
  depths = [0]
  for parent in parents[1:]:
    depths.append(depths[parent] + 1)
  if depths != sorted(depths):
    raise ValueError(f"parents is {tuple(parents)}, with depths "
                     f"{tuple(depths)}; a level is expanded as a whole: give "
                     "breadth-first order")
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
      law = _normalised(law * free, free)
    drafts = drafts.grow(above, law)
  return drafts


def expanded_iid(drafts: Drafts, q: np.ndarray, parents: tuple[int, ...]
                 ) -> Drafts:
  """Returns the drafts of `expanded_by_score` with independent children."""
  return expanded_by_score(drafts, q, parents, replaced=True)


IID = (iid, paths)
CONDITIONAL = (*IID, without_replacement, top_k, hybrid, several)
ALL = (*CONDITIONAL, larger_of_two, confident)
_NAMED = (*ALL, expanded_by_score, expanded_iid)


def sound_for(verifier: Verifier) -> tuple[Scheme, ...]:
  """Returns the schemes with which the verifier declares to be lossless."""
  requires = verifier.requires
  if "iid" in requires:
    return IID
  if "deterministic" in requires:
    return (top_k,)
  if "full" in requires and "conditional" not in requires:
    return (*CONDITIONAL, larger_of_two)
  return CONDITIONAL if "conditional" in requires else ALL


def named(scheme: str | Scheme) -> Scheme:
  """Returns the scheme of this module with this name.

  A function is returned unchanged.
  """
  if callable(scheme):
    return scheme
  known = {function.__name__: function for function in _NAMED}
  if scheme not in known:
    raise ValueError(f"scheme is {scheme!r}; it must be a function (drafts, q, "
                     f"parents) -> Drafts, or one of {', '.join(known)}")
  return known[scheme]


def name_of(scheme: Scheme) -> str:
  """Returns the name of a scheme."""
  return getattr(scheme, "__name__", repr(scheme))


def _normalised(rows: np.ndarray, otherwise: np.ndarray) -> np.ndarray:
  """Returns normalised rows.

  A row of zeros becomes uniform over the tokens of its mask in `otherwise`.
  """
  rows = np.where(rows.any(-1, keepdims=True), rows, otherwise)
  total = rows.sum(-1, keepdims=True)
  return rows / np.where(total > 0, total, 1)


def _next_best(drafts: Drafts, q: np.ndarray, parent: int) -> np.ndarray:
  """Returns one-hot rows of the most likely token not used by a sibling."""
  free = ~drafts.seen(parent)
  best = np.argmax(np.where(free, q[drafts.at(parent)], -1), axis=-1)
  return np.eye(q.shape[-1])[best] * free.any(-1, keepdims=True)


def all_trees(nodes: int) -> Iterator[tuple[int, ...]]:
  """Yields the (N - 1)! valid `parents` of trees of N nodes.

  Each shape appears once for every order of its nodes with parents before
  children.

  >>> list(all_trees(3))
  [(-1, 0, 0), (-1, 0, 1)]
  """
  for below in itertools.product(*(range(i) for i in range(1, nodes))):
    yield (-1, *below)


def height(parents: Sequence[int]) -> int:
  """Returns the depth of the deepest node, after a check of the parents."""
  return max(shapes.depths(parents))


def draw(scheme: str | Scheme, parents: Sequence[int], q: np.ndarray,
         contexts: np.ndarray) -> Drafts:
  """Returns all drafts of one shape with their probabilities.

  Args:
    scheme: function that draws the tokens, or its name.
    parents: shape of the tree.
    q: `[contexts, V]` draft distributions.
    contexts: `[n]` numbers of the contexts before the drafts.
  """
  roots = Drafts.roots(contexts, q.shape[-1])
  return named(scheme)(roots, q, tuple(parents))
