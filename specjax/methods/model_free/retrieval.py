"""REST: continuations of the last tokens, retrieved from a corpus.

REST, He et al. 2023 (arXiv:2311.08252). The last m tokens of the row are
searched in a datastore (`data.datastores`), for m from `max_match` down to
`min_match`, until there is a match. The most frequent continuations are
drafted, as a tree (as published) or as a chain.

A match or a draft never crosses from one document of the datastore into the
next. In the published code it can.
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
  """Drafts from counts of continuations in a datastore.

  `params["drafter"]` is a `data.datastores.Datastore` on the device. A round
  needs two binary searches for each match length and compares up to
  `max_matches` continuations with each other. Its cost grows with the logarithm
  of the corpus' size.

  With `nodes`, the draft is a tree of the most frequent prefixes, for
  `verifiers.TargetWalk`. Otherwise it is a chain. "deterministic" takes the
  most frequent next token; "sampled" samples from the counts at the row's
  temperature, for block verification. With `parents` it is a tree of samples,
  for traversal verification.

  The position where a chain ends depends only on the tokens before it, so
  drafts are `conditional` (`interfaces.CAPABILITIES`).

  Attributes:
    gamma: maximal length of a path, at least 1.
    proposal: "deterministic" or "sampled".
    parents: sampled tree, at most gamma deep, see `specjax.trees`.
    nodes: number of nodes N of a deterministic tree, the root included, at
      least 2; None: a chain, or the sampled tree `parents`.
    min_match: minimal length of a match, at least 1.
    max_match: maximal length of a match, at most the datastore's depth.
    max_matches: largest number K of counted matches. If there are more, K
      evenly spaced ones are counted.
    transform: transform of the log counts; None: the decoder's.
    vocab_size: V; `bind` sets it.
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
  def chain(self) -> bool:
    return self.nodes is None and super().chain

  iid = chain

  @property
  def num_nodes(self) -> int:
    return self.nodes or super().num_nodes

  def init(self, params: Params, prompt: Prompt, prefill_output: ModelOutput
           ) -> None:
    """Checks the datastore."""
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
    """Drafts a chain or tree per row, padding in rows without a match."""
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
    """Returns continuations `[B, K, S]` of the longest match, and a mask."""
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
    """Returns the most frequent prefixes of every row."""
    def one(root, following, alive):
      tokens, parents, real = _continuations.frequent_paths(
          following, alive, self.nodes)
      probs = jax.nn.one_hot(jnp.where(real, tokens, -1), self.vocab_size)
      return Draft.tree(root, parents, tokens, probs)

    return jax.vmap(one)(rounds.roots(state), following, alive)


def rest(nodes: int = 64, gamma: int = 10, max_match: int = 16) -> Strategy:
  """Drafts the frequent continuations of the last tokens in a corpus.

  REST, He et al. 2023 (arXiv:2311.08252). `params["drafter"]` is a datastore,
  see `experiments/build_datastore.py`. At most 64 matches are counted; the
  published code counts up to 5000.

  >>> rest().drafter.num_nodes, rest().verifier
  (64, TargetWalk())

  Args:
    nodes: number of nodes N, the root included.
    gamma: maximal length of a path.
    max_match: maximal length of a match, at most the datastore's depth.
  """
  return Strategy(
      Retrieval(nodes=nodes, gamma=gamma, max_match=max_match),
      verifiers.TargetWalk())
