"""EAGLE: a layer on the target's features drafts chains and trees.

Li et al. 2024 (arXiv:2401.15077), EAGLE-2 (arXiv:2406.16858) and EAGLE-3
(arXiv:2503.01840); heads of multi-token prediction whose one module is used
again and again (FastMTP, arXiv:2509.18362) are the same.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from specjax import sampling
from specjax.constraints import base as constraints_lib
from specjax.drafters import children
from specjax.drafters import common
from specjax.drafters import drawn_trees
from specjax.drafters import expansion
from specjax.drafters import features
from specjax.drafters import growth
from specjax.drafters.features import FeatureState
from specjax.models.heads import FeatureHeads
from specjax.sampling import LogitsTransform
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelFn
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.types import Verdict


class FeatureDrafter:
  """The base of drafters that go on from a layer's own output.

  Classes that derive from it are frozen dataclasses that have `heads` and
  `transform`, `depth`, and `grow`. The target is that of `heads.attach`;
  `params["drafter"]` are the layer's parameters, and it may use embedding and
  head of `params["target"]`. A round costs one pass of the layer over what was
  accepted, which commits it with the target's features, and one over each level
  of the draft but the last. After a prompt of one token there is no feature
  yet, and the first draft is padding.
  """

  heads: FeatureHeads
  conditional = True
  # The features below the root are the layer's own, so that q depends on where
  # the draft began.
  autoregressive = False

  @property
  def context_length(self) -> int:
    return self.heads.context_length

  def check_heads(self, target: ModelFn, width: int) -> None:
    """Checks a layer against its target and the width of a draft.

    Args:
      target: to draft for.
      width: the most children of a node that must differ.

    Raises:
      ValueError: it has several modules, is for another target, or has too few
        tokens.
    """
    if self.heads.modules > 1:
      raise ValueError(
          f"the heads have {self.heads.modules} modules, one for each token of "
          "a chain; draft with them by drafters.MTP")
    self.heads.check_target(target)
    if width > self.heads.draft_size:
      raise ValueError(
          f"a node has {width} children and the drafter knows "
          f"{self.heads.draft_size} tokens; siblings must differ: use a "
          "narrower tree")

  def init(self, params: Any, prompt: Prompt, prefill_output: ModelOutput
           ) -> Any:
    """The layer's cache after the prompt, and its output there."""
    return features.read_prompt(self.heads, params, prompt, prefill_output)

  def propose(self, params: Any, coins: jax.Array, state: DecodeState
              ) -> tuple[Draft, Any]:
    """Drafts for every row.

    Args:
      params: `{"target", "drafter": parameters of the layer}`.
      coins: `[B, num_coins]`, uniform in [0, 1).
      state: the `DecodeState`.

    Returns:
      `(Draft, FeatureState)`, batched.
    """
    if self.num_nodes == 1:
      return common.root_only(state, self.heads.vocab_size), state.drafter
    step, carry, logits = features.growing(self.heads, params, state.drafter)
    step, carry, logits = constraints_lib.steered(
        self.transform.constraints, state.constraints, step, carry, logits)
    draft = self.grow(step, carry, logits, coins, state)
    return features.known_only(draft, state.drafter.known), state.drafter

  def commit(self, params: Any, drafter: FeatureState, draft: Draft,
             verdict: Verdict, target_output: ModelOutput, count: jax.Array
             ) -> FeatureState:
    """The layer's state with the true features of what was accepted."""
    return features.read_round(self.heads, params, drafter, draft, verdict,
                               target_output, count, self.depth)

  def catch_up(self, params: Any, state: DecodeState, since: jax.Array) -> Any:
    """Nothing: what a round commits is read at once, drafted or not."""
    del params, since
    return state.drafter

  def param_specs(self, axis: str, size: int) -> PartitionSpec:
    """Every device holds the whole layer, see `specjax.contract`."""
    del axis, size
    return PartitionSpec()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle(FeatureDrafter, growth.StaticTree):
  """Draws the same chain or tree in every round.

  Attributes:
    heads: the layer, of one module.
    parents: the tree, see `specjax.trees`; `range(-1, gamma)` is a chain. It is
      put in breadth-first order.
    proposal: how the children of a node are drawn, see `TreeLanguageModel`.
    transform: of the layer's logits; None takes the decoder's. Any is sound,
      for q is reported as it was sampled from.
  """

  heads: FeatureHeads
  parents: tuple[int, ...]
  proposal: str = "without_replacement"
  transform: LogitsTransform | None = None

  def bind(self, target: ModelFn, transform: LogitsTransform) -> "Eagle":
    """The same drafter, with the target's transform unless it has its own.

    Raises:
      ValueError: the layer does not fit the target or the tree.
    """
    self.check_heads(target, 1 if self.iid else self._most_children)
    return super().bind(target, transform)

  def grow(self, step, carry, logits, coins, state: DecodeState) -> Draft:
    """The batch of drafts; arguments as `growth.grow` takes them."""
    tokens, probs, _ = growth.grow(
        step, carry, logits, coins, self.parents,
        children.drawer(self.proposal, self.transform, state.temperature))
    parents = jnp.array(self.parents, jnp.int32)
    return jax.vmap(lambda root, *rows: Draft.tree(root, parents, *rows))(
        common.roots(state), tokens, probs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicEagle(FeatureDrafter):
  """EAGLE-2's tree: the likeliest candidates, with certainty.

  As `DynamicTree` grows it, from a feature layer.

  Attributes:
    heads: the layer, of one module.
    depth: levels below the root, one pass each.
    top_k: nodes expanded of a level, and children of each.
    num_nodes: N, the root included.
    transform: from the layer's logits to its confidences; it need not be the
      decoder's, and at temperature 0 there would be no second best.
  """

  heads: FeatureHeads
  depth: int = 6
  top_k: int = 10
  num_nodes: int = 60
  transform: LogitsTransform = LogitsTransform()

  certain = True
  num_coins = 0
  proposal = "deterministic"

  def __post_init__(self):
    for name in ("depth", "top_k"):
      common.check_at_least(name, getattr(self, name), 1)
    most = 1 + self.top_k + (self.depth - 1) * self.top_k**2
    if not 2 <= self.num_nodes <= most:
      raise ValueError(f"num_nodes is {self.num_nodes}; depth {self.depth} and "
                       f"top_k {self.top_k} allow 2 to {most}: change one of "
                       "the three")

  @property
  def chain(self) -> bool:
    return self.top_k == 1

  @property
  def iid(self) -> bool:
    return self.chain

  def bind(self, target: ModelFn, transform: LogitsTransform
           ) -> "DynamicEagle":
    """The same drafter; of the transform it takes the constraints alone.

    Raises:
      ValueError: the layer does not fit the target, or has too few tokens.
    """
    self.check_heads(target, self.top_k)
    return dataclasses.replace(self, transform=self.transform.under(transform))

  def grow(self, step, carry, logits, coins, state: DecodeState) -> Draft:
    """The batch of drafts; arguments as `expansion.expand` takes them."""
    del coins
    return expansion.expand(
        step, carry, logits, common.roots(state), transform=self.transform,
        depth=self.depth, top_k=self.top_k, num_nodes=self.num_nodes)[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampledEagle(FeatureDrafter):
  """Draws a tree that is expanded where the layer is confident.

  No one else's: trees of EAGLE-2 are certain. A score decides which nodes of a
  level get children, and never which nodes stay, see `drawn_trees`: so q is the
  law that tokens were drawn from, and rules for sampled trees are exact.

  Attributes:
    heads: the layer, of one module.
    depth: levels below the root.
    expanded: nodes of a level that get children, those with the best scores.
    children: of each, and of the root.
    proposal: how the children of a node are drawn, see `TreeLanguageModel`.
    transform: of the layer's logits; None takes the decoder's.
    confidence: from the layer's logits to the probabilities whose product on
      its path is the score of a node.
  """

  heads: FeatureHeads
  depth: int
  expanded: int
  children: int
  proposal: str = "without_replacement"
  transform: LogitsTransform | None = None
  confidence: LogitsTransform = LogitsTransform()

  def __post_init__(self):
    for name in ("depth", "expanded", "children"):
      common.check_at_least(name, getattr(self, name), 1)
    if self.proposal not in children.DRAWS:
      raise ValueError(f"proposal is {self.proposal!r}; it must be one of "
                       f"{', '.join(children.DRAWS)}")

  @property
  def chain(self) -> bool:
    return self.children == 1

  @property
  def iid(self) -> bool:
    return self.chain or self.proposal == "iid"

  @property
  def num_nodes(self) -> int:
    return drawn_trees.num_nodes(self.depth, self.expanded, self.children)

  @property
  def num_coins(self) -> int:
    return sampling.COINS_A_DRAW * (self.num_nodes - 1)

  def bind(self, target: ModelFn, transform: LogitsTransform
           ) -> "SampledEagle":
    """The same drafter, with the target's transform unless it has its own.

    Raises:
      ValueError: the layer does not fit the target or the tree.
    """
    self.check_heads(target, 1 if self.iid else self.children)
    return dataclasses.replace(
        self, transform=(self.transform or transform).under(transform))

  def grow(self, step, carry, logits, coins, state: DecodeState) -> Draft:
    """The batch of drafts; arguments as `drawn_trees.grow` takes them."""
    return drawn_trees.grow(
        step, carry, logits, coins, common.roots(state),
        children.drawer(self.proposal, self.transform, state.temperature),
        confidence=self.confidence, depth=self.depth, expanded=self.expanded,
        children=self.children)[0]
