"""Trees: their shapes, and the exact law of what decoding with them emits."""

from collections.abc import Iterator
from collections.abc import Sequence
import itertools

import numpy as np

from specjax.exact import enumeration
from specjax.exact import pairs
from specjax.exact import schemes
from specjax.exact.compiled import Compiled
from specjax.exact.drafts import Drafts
from specjax.exact.pairs import Pair
from specjax.interfaces import Verifier
from specjax.trees import shapes

CHUNK = 256  # laws evaluated in one call: most trees have few drafts


def all_trees(nodes: int) -> Iterator[tuple[int, ...]]:
  """All `parents` of trees of N nodes: every shape in every order of nodes.

  There are (N - 1)! of them, those that are no depth-first order included.
  """
  for below in itertools.product(*(range(i) for i in range(1, nodes))):
    yield (-1, *below)


def height(parents: Sequence[int]) -> int:
  """The depth of the deepest node; the parents are checked, see `trees`."""
  return max(shapes.depths(parents))


def draw(scheme: str | schemes.Scheme, parents: Sequence[int], q: np.ndarray,
         contexts: np.ndarray) -> Drafts:
  """All drafts of one shape from `contexts [n]`; q is `[contexts, V]`."""
  roots = Drafts.roots(contexts, q.shape[-1])
  return schemes.named(scheme)(roots, q, tuple(parents))


def enumerate_trees(verifier: Verifier | Compiled, pair: Pair,
                    parents: Sequence[int], scheme: str | schemes.Scheme,
                    rounds: int = 1, dtype: str = "float64",
                    nodes: int | None = None) -> enumeration.Outcome:
  """The exact law of what decoding with drafts of one shape emits.

  Args:
    verifier: any object with `law(draft, target_probs)`, or a `Compiled`.
    pair: tables of at least rounds * (height + 1) contexts deep.
    parents: N numbers, `parents[0] == -1` and `parents[i] < i`, in any order.
    scheme: how the tokens are drawn: a function as in `exact.schemes`, or the
      name of one: "iid", "paths", "without_replacement", "top_k", "hybrid",
      "several", "larger_of_two", "confident".
    rounds: rounds of draft-and-verify, after which the target continues; see
      `enumerate_chains`, where gamma is the tree's height.
    dtype: of the numbers handed to the law; sums are float64 always.
    nodes: size to which drafts are padded, so that trees of several sizes
      share a compiled law; default: none is.

  Raises:
    ValueError: `nodes` is less than the tree has, the tables are not deep
      enough or a row of them is not a distribution, or there are too many
      drafts.
  """
  longest, nodes = height(parents), nodes or len(parents)
  if nodes < len(parents):
    raise ValueError(f"nodes is {nodes}; the tree alone has {len(parents)}")
  pairs.check_pair(pair)
  pairs.check_depth(rounds, "rounds")
  enumeration.check_size(pair.vocab_size, len(parents) - 1, nodes)
  scheme = schemes.named(scheme)
  drafting = lambda q, contexts: draw(
      scheme, parents, q, contexts).padded(nodes)
  return enumeration.enumerate_drafts(
      verifier, pair, drafting, nodes, longest, rounds, dtype, CHUNK)
