"""REST: drafts continuations of the last tokens that are found in a corpus.

See He et al. 2023 (arXiv:2311.08252). A datastore is a corpus with a suffix
array (`data.datastores`). The drafter searches it for the last m tokens of the
sequence, for m from `max_match` down to `min_match`, until there is a match.
The draft consists of the most frequent continuations of the matches. It is a
tree, as in the paper, or a chain.

Matches and drafts end at the end of a document of the corpus. In the published
code they can continue into the next document.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specjax import verifiers
from specjax.data.datastores import Datastore
from specjax.data.datastores import DEEPEST
from specjax.decoding import rounds
from specjax.methods.model_free import _continuations
from specjax.methods.model_free import _matches as matches_lib
from specjax.methods.networks import Params
from specjax.methods.strategy import Strategy
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.utils import fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retrieval(_continuations.CountDrafter):
  """REST: drafts from counts of continuations in a datastore.

  `params["drafter"]` is a `data.datastores.Datastore` on the device. A draft
  needs two binary searches for each match length, and compares up to
  `max_matches` continuations with each other. Its time grows with the logarithm
  of the corpus size.

  There are four forms of drafts:

  * a tree of the most frequent continuations (`nodes`), for
    `verifiers.TargetWalk`;
  * a chain of the most frequent tokens (`proposal="deterministic"`);
  * a chain sampled from the counts at the row's temperature
    (`proposal="sampled"`), for block verification;
  * a tree sampled from the counts (`parents`), for traversal verification.

  The position where a chain ends depends only on the tokens before it, so
  drafts have the capability "conditional" (`interfaces.CAPABILITIES`).

  Attributes:
    gamma: maximum draft length (depth of a tree), at least 1.
    proposal: "deterministic" or "sampled".
    parents: parent index of each node of a sampled tree with at most gamma
      levels, see `specjax.trees`; None drafts a chain, or a tree with `nodes`.
    nodes: number of nodes of a deterministic tree, including the root, at least
      2. None drafts one of the other forms.
    min_match: minimum length of a match, at least 1.
    max_match: maximum length of a match, at most the datastore's depth.
    max_matches: maximum number K of counted matches. If there are more matches,
      K evenly spaced ones in the datastore's sorted order are counted.
    transform: transform from log counts to draft probabilities; None uses the
      target's transform.
    vocab_size: vocabulary size of the target. If it is None, `bind` sets it.
  """

  nodes: int | None = None
  min_match: int = 2
  max_match: int = 16

  def __post_init__(self):
    super().__post_init__()
    fields.check_at_least("min_match", self.min_match, 1)
    if (not fields.is_whole(self.max_match)
        or not self.min_match <= self.max_match <= DEEPEST):
      raise ValueError(f"max_match is {self.max_match}; it must be a whole "
                       f"number from min_match, {self.min_match}, to {DEEPEST}")
    if self.nodes is None:
      return
    fields.check_at_least("nodes", self.nodes, 2)
    if self.proposal != "deterministic":
      raise ValueError(f"nodes is {self.nodes} and proposal "
                       f"{self.proposal!r}, but nodes is for deterministic "
                       "trees: leave nodes out, and give parents for a sampled "
                       "tree")

  @property
  def _is_chain(self) -> bool:
    return self.nodes is None and super()._is_chain

  @property
  def num_nodes(self) -> int:
    return self.nodes or super().num_nodes

  def init(self, params: Params, prompt: Prompt, prefill_output: ModelOutput
           ) -> None:
    """Raises `ValueError` if `params["drafter"]` is not a suitable datastore.
    """
    del prompt, prefill_output
    store = params.get("drafter")
    self._check(store)
    if self.max_match > store.depth:
      raise ValueError(
          f"max_match is {self.max_match}, but the datastore is sorted by "
          f"{store.depth} tokens; reduce max_match, or build the datastore "
          f"with depth {self.max_match}")

  def propose(self, params: Params, uniforms: jax.Array, state: DecodeState
              ) -> tuple[Draft, None]:
    """Returns a draft per row; it is padding if there is no match."""
    following, alive = self._matches(params["drafter"], state)
    batch = alive.shape[0]
    if self.nodes is not None:
      return self._tree(state, following, alive), None
    steps = jnp.full((batch,), self.gamma, jnp.int32)
    ended = jnp.zeros((batch,))
    if self.proposal == "sampled":
      return self._drawn(state, uniforms, following, alive, ended, steps, 0.0
                         ), None
    walk = lambda following, *sets: _continuations.walk(
        following, *(x[None] for x in sets), 0.0)
    tokens, probs = jax.vmap(walk)(following, alive, ended, steps)
    return self._deterministic(state, tokens[:, 0], probs[:, 0] > 0), None

  def _matches(self, store: Datastore, state: DecodeState
               ) -> tuple[jax.Array, jax.Array]:
    """Finds the longest match of each row in the datastore.

    Returns:
      The S tokens after each of K matches, `[B, K, S]` int32, and a mask
      `[B, K]` bool, False for entries that are not a match.
    """
    sizes = np.arange(self.min_match, self.max_match + 1, dtype=np.int32)
    first, found = matches_lib.find(
        store, state.tokens, state.lengths, sizes)
    longest = len(sizes) - 1 - jnp.argmax(found[:, ::-1] > 0, axis=1)
    take = lambda x: jnp.take_along_axis(x, longest[:, None], axis=1)[:, 0]
    return matches_lib.spread(
        store, take(first), take(found), jnp.asarray(sizes)[longest],
        self.max_matches, self.gamma)

  def _tree(self, state: DecodeState, following: jax.Array, alive: jax.Array
            ) -> Draft:
    """Returns a deterministic tree of frequent continuations for each row.

    Args:
      state: decoding state of B rows.
      following: the S tokens after each of K matches, `[B, K, S]` int32.
      alive: `[B, K]` bool, False for entries that are not a match.
    """
    def one(root, following, alive):
      tokens, parents, real = _continuations.frequent_paths(
          following, alive, self.nodes)
      probs = jax.nn.one_hot(jnp.where(real, tokens, -1), self.vocab_size)
      return Draft.tree(root, parents, tokens, probs)

    return jax.vmap(one)(rounds.roots(state), following, alive)


def rest(nodes: int = 64, gamma: int = 10, max_match: int = 16) -> Strategy:
  """Returns the strategy REST, retrieval from a corpus (He et al. 2023).

  The draft is a tree of the most frequent continuations of the last tokens
  (arXiv:2311.08252). `params["drafter"]` is a datastore, see
  `experiments/build_datastore.py`. At most 64 matches are counted; the
  published code counts up to 5000.

  >>> rest().drafter.num_nodes, rest().verifier
  (64, TargetWalk())

  Args:
    nodes: number of nodes of the draft tree, including the root.
    gamma: maximum depth of the tree.
    max_match: maximum length of a match, at most the datastore's depth.
  """
  return Strategy(
      Retrieval(nodes=nodes, gamma=gamma, max_match=max_match),
      verifiers.TargetWalk())
