"""EAGLE's trees whose shape follows the layer's confidence.

EAGLE-2 (Li et al. 2024, arXiv:2406.16858) drafts the likeliest candidates, with
certainty. Drawn ones may follow the confidence as well, see `drawn_trees`.
"""

import dataclasses

from specjax import sampling
from specjax.decoding import round_steps
from specjax.methods import _children
from specjax.methods import _common
from specjax.methods import _drawn_trees
from specjax.methods import _expansion
from specjax.methods.features.eagle_drafter import FeatureDrafter
from specjax.methods.features.network import FeatureHeads
from specjax.sampling import LogitsTransform
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelFn
from specjax.utils import fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicEagle(_expansion.ExpandedTree, FeatureDrafter):
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

  def bind(self, target: ModelFn, transform: LogitsTransform
           ) -> "DynamicEagle":
    """The same drafter; of the transform it takes the constraints alone.

    Raises:
      ValueError: the layer does not fit the target, or has too few tokens.
    """
    self.check_heads(target, self.top_k)
    return dataclasses.replace(self, transform=self.transform.under(transform))

  def grow(self, step, carry, logits, uniforms, state: DecodeState) -> Draft:
    """The batch of drafts; arguments as `expansion.expand` takes them."""
    del uniforms
    return _expansion.expand(
        step, carry, logits, round_steps.roots(state), transform=self.transform,
        depth=self.depth, top_k=self.top_k, num_nodes=self.num_nodes)[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampledEagle(FeatureDrafter):
  """Draws a tree that is expanded where the layer is confident.

  Not in the EAGLE papers, whose dynamic trees are deterministic. A score
  decides which nodes of a level get children, and never which nodes stay, see
  `drawn_trees`: so q is the law that tokens were drawn from, and rules for
  sampled trees are exact.

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
    fields.check_fields(self, "depth", "expanded", "children")
    _children.check_proposal(self.proposal)

  @property
  def chain(self) -> bool:
    return self.children == 1

  @property
  def iid(self) -> bool:
    return self.chain or self.proposal == "iid"

  @property
  def num_nodes(self) -> int:
    return _drawn_trees.num_nodes(self.depth, self.expanded, self.children)

  @property
  def num_uniforms(self) -> int:
    return sampling.UNIFORMS_A_DRAW * (self.num_nodes - 1)

  def bind(self, target: ModelFn, transform: LogitsTransform
           ) -> "SampledEagle":
    """The same drafter, with the target's transform unless it has its own.

    Raises:
      ValueError: the layer does not fit the target or the tree.
    """
    self.check_heads(target, 1 if self.iid else self.children)
    return _common.with_transform(self, transform)

  def grow(self, step, carry, logits, uniforms, state: DecodeState) -> Draft:
    """The batch of drafts; arguments as `drawn_trees.grow` takes them."""
    return _drawn_trees.grow(
        step, carry, logits, uniforms, round_steps.roots(state),
        _children.drawer(self.proposal, self.transform, state.temperature),
        confidence=self.confidence, depth=self.depth, expanded=self.expanded,
        children=self.children)[0]
