"""Draft models that build trees shaped by their own probabilities.

EAGLE-2 (Li et al. 2024, arXiv:2406.16858, section 4), for any language model.
"""

import dataclasses
from typing import Any

import chex
from flax import struct
import jax
import jax.numpy as jnp

from specjax import verifiers
from specjax.decoding import constraining as constraints_lib
from specjax.decoding import rounds
from specjax.decoding.prefill import read_prompt
from specjax.interfaces import Cache
from specjax.interfaces import Model
from specjax.methods import _common
from specjax.methods import _dynamic_trees
from specjax.methods.networks import Params
from specjax.methods.strategy import Strategy
from specjax.sampling import LogitsTransform
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.types import Verdict


@struct.dataclass
class DynamicTreeState:
  """State of a `DynamicTree` between propose and commit.

  Attributes:
    cache: cache of the draft model.
    slots: `[B, N]` int32, position of each tree node among the nodes that the
      draft model read; arbitrary for the other nodes.
  """

  cache: Cache
  slots: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicTree(_common.OneModel, _dynamic_trees.ExpandedTree):
  """Expands the likeliest nodes of every level, and drafts the best nodes.

  The value of a node is the product of the model's probabilities on its path.
  On every level, the `top_k` nodes with the largest values get `top_k` children
  each. The draft consists of the root and the N - 1 generated nodes with the
  largest values. It is a tree, because a child's value is at most its parent's,
  and among equal values the parent is preferred. The tree is a deterministic
  function of the context, so the draft distributions are one-hot.

  Attributes:
    model: draft model over the target's vocabulary.
    depth: number of levels below the root; each level costs one pass of the
      model.
    top_k: number of nodes per level that get children, and number of children
      of each.
    num_nodes: number N of nodes of the draft, including the root.
    transform: transform from logits to the probabilities that determine the
      values. It is separate from the decoder's transform, because at
      temperature 0 all probabilities but one would be 0.
  """

  model: Model
  depth: int = 6
  top_k: int = 10
  num_nodes: int = 60
  transform: LogitsTransform = LogitsTransform()

  @property
  def autoregressive(self) -> bool:
    # Nodes are selected by comparing the values of all generated nodes. So the
    # presence of a node also depends on other paths, unless there is only one.
    return self.chain

  @property
  def _fed(self) -> int:
    return _dynamic_trees.fed_nodes(self.depth, self.top_k)

  def bind(self, target: Model, transform: LogitsTransform
           ) -> "DynamicTree":
    """Returns the drafter specialised to a target."""
    _common.check_vocabulary(self.model, target)
    _dynamic_trees.check_top_k(self.top_k, target.vocab_size)
    return dataclasses.replace(self, transform=self.transform.under(transform))

  def init(self, params: Params, prompt: Prompt, prefill_output: ModelOutput
           ) -> Any:
    """Returns the cache after the prompt, with room for all expanded nodes."""
    del prefill_output
    missing = max(0, self._fed - self.num_nodes)
    prompt = prompt.replace(capacity=prompt.capacity + missing)
    cache = read_prompt(self.model, params["drafter"], prompt).cache
    batch = prompt.lengths.shape[0]
    return DynamicTreeState(
        cache=cache, slots=jnp.zeros((batch, self.num_nodes), jnp.int32))

  def propose(self, params: Params, uniforms: jax.Array, state: DecodeState
              ) -> tuple[Draft, Any]:
    """Drafts a tree per row."""
    del uniforms
    params = params["drafter"]
    logits, cache = _common.feed_last(
        self.model, params, state, state.drafter.cache, size=2, more=self._fed)
    step, carry, logits = constraints_lib.steered(
        self.transform.constraints, state.constraints,
        _common.model_step(self.model, params), cache, logits)
    draft, slots, (cache, _) = _dynamic_trees.expand(
        step, carry, logits, rounds.roots(state), transform=self.transform,
        depth=self.depth, top_k=self.top_k, num_nodes=self.num_nodes)
    return draft, DynamicTreeState(cache=cache, slots=slots)

  def commit(self, params: Params, drafter: chex.ArrayTree, draft: Draft,
             verdict: Verdict, target_output: ModelOutput, count: jax.Array
             ) -> Any:
    """Returns the state; its cache keeps only the accepted path."""
    del params, draft, target_output
    cache = _common.keep_path(drafter.cache, drafter.slots, verdict.path,
                              self._fed, count)
    return drafter.replace(cache=cache)


def eagle2_tree(model: Model, depth: int = 6, top_k: int = 10,
                num_nodes: int = 60) -> Strategy:
  """Drafts the likeliest nodes of a tree expanded by the draft model.

  The dynamic draft trees of EAGLE-2 (Li et al. 2024, arXiv:2406.16858, section
  4), for any language model. The draft is deterministic, and
  `verifiers.TargetWalk` verifies it.

  >>> from specjax import testing
  >>> eagle2_tree(testing.MarkovModel(7), 3, 2, 6).drafter.num_nodes
  6

  Args:
    model: draft model over the target's vocabulary.
    depth: number of levels below the root; each level costs one pass of the
      model.
    top_k: number of nodes per level that get children, and number of children
      of each.
    num_nodes: number N of nodes of the draft, including the root.
  """
  return Strategy(
      DynamicTree(model=model, depth=depth, top_k=top_k, num_nodes=num_nodes),
      verifiers.TargetWalk())
