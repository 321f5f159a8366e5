"""EAGLE drafters and strategies: chains, static trees and dynamic trees.

A draft starts from the target's features of the committed tokens. Later draft
steps read the output of a feature layer instead
(`models.features.FeatureConfig`). `Eagle1Heads` and `Eagle3Heads` differ only
in the defaults of that configuration.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any
from typing import ClassVar

import chex
import jax

from specjax import sampling
from specjax import verifiers
from specjax.decoding import constraining as constraints_lib
from specjax.decoding import rounds
from specjax.interfaces import Model
from specjax.interfaces import Verifier
from specjax.methods import _common
from specjax.methods import _dynamic_trees
from specjax.methods import _trees
from specjax.methods import stop_rules
from specjax.methods.features import _drafter
from specjax.methods.features._drafter import FeatureState
from specjax.methods.features.network import FeatureHeads
from specjax.methods.strategy import BLOCK
from specjax.methods.strategy import Strategy
from specjax.methods.strategy import TRAVERSAL
from specjax.sampling import LogitsTransform
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.types import Verdict
from specjax.utils import fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle1Heads(FeatureHeads):
  """Heads of EAGLE-1 and 2: no norm before attention or the LM head."""

  fusion_bias: bool = True

  kind: ClassVar[str] = "eagle1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Heads(FeatureHeads):
  """Heads of EAGLE-3, with attention on [e; g] and a separate LM head.

  e is the token embedding, and g is a projection of three hidden states of the
  target.
  """

  entry: bool = True
  fusion: str = "attention"
  fusion_norms: bool = True
  final_norm: str | None = "own"
  own_head: bool = True

  kind: ClassVar[str] = "eagle3"

  @classmethod
  def default_taps(cls, layers: int) -> tuple[int | str, ...]:
    """Returns the layers whose hidden states are read by default.

    For L = `layers`, they are 2, L // 2 and L - 3. If L is too small for three
    increasing numbers, they are 1, (L + 1) // 2 and L.
    """
    taps = (2, layers // 2, layers - 3)
    if not taps[0] < taps[1] < taps[2]:
      taps = (1, (layers + 1) // 2, layers)
    return tuple(dict.fromkeys(taps))


class FeatureDrafter(_drafter.LayerDrafter):
  """Base class of drafters with one reused feature layer.

  Subclasses are frozen dataclasses with the fields `heads` and `transform`, the
  number of levels `depth` and a method `grow`. Decode with the target that
  `heads.attach` returns. `params["drafter"]` contains the parameters of the
  layer. The layer may also use the embedding and head of `params["target"]`.

  In a round the layer runs one pass over each level of the draft except the
  last. After verification it runs one pass over the accepted tokens with the
  target's features. After a prompt of one token there are no features, so the
  first draft is padding.
  """

  conditional = True

  def check_heads(self, target: Model, width: int) -> None:
    """Checks that the layer fits its target and the width of a draft.

    Args:
      target: target model.
      width: largest number of distinct children of a node.

    Raises:
      ValueError: the layer has several modules, was made for another target, or
        can draft fewer than `width` tokens.
    """
    if self.heads.modules > 1:
      raise ValueError(
          f"the heads have {self.heads.modules} modules; this drafter uses one "
          "module: use drafters.MTP or drafters.MTPTree")
    self.heads.check_target(target)
    _drafter.check_children(self.heads, width)

  def init(self, params: chex.ArrayTree, prompt: Prompt,
           prefill_output: ModelOutput) -> Any:
    """Returns the layer's state after the prompt, a `FeatureState`."""
    return _drafter.read_prompt(self.heads, params, prompt, prefill_output)

  def propose(self, params: chex.ArrayTree, uniforms: jax.Array,
              state: DecodeState) -> tuple[Draft, Any]:
    """Drafts a chain or tree for each row."""
    if self.num_nodes == 1:
      return rounds.root_only(state, self.heads.vocab_size), state.drafter
    step, carry, logits = _drafter.growing(self.heads, params, state.drafter)
    step, carry, logits = constraints_lib.steered(
        self.transform.constraints, state.constraints, step, carry, logits)
    draft = self.grow(step, carry, logits, uniforms, state)
    return _drafter.known_only(draft, state.drafter.known), state.drafter

  def commit(self, params: chex.ArrayTree, drafter: FeatureState, draft: Draft,
             verdict: Verdict, target_output: ModelOutput, count: jax.Array
             ) -> FeatureState:
    """Runs the layer on the accepted tokens; returns the new state."""
    return _drafter.read_round(self.heads, params, drafter, draft, verdict,
                               target_output, count, self.depth)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleChain(_common.DrawnChain, FeatureDrafter):
  """Samples a chain from a feature layer.

  A controller can choose the draft length.

  Attributes:
    heads: feature layer with one module.
    gamma: draft length; 0 drafts nothing.
    transform: transform of the draft logits; None uses the decoder's transform.
      Any transform is lossless, because the verifier receives the transformed
      distributions.
    stop: rule of `methods.stop_rules`, which reads the layer's outputs as
      hidden states. None drafts gamma tokens in all chains. If the rule has
      parameters, `params["drafter"]` is `{"model": parameters of the layer,
      "stop": parameters of the rule}`.
  """

  heads: FeatureHeads
  gamma: int
  transform: LogitsTransform | None = None
  stop: stop_rules.StopRule | None = None

  def __post_init__(self):
    fields.check_at_least("gamma", self.gamma, 0)

  @property
  def depth(self) -> int:
    return self.gamma

  def bind(self, target: Model, transform: LogitsTransform) -> "EagleChain":
    """Returns the drafter specialised to a target."""
    self.check_heads(target, 1)
    return _common.with_transform(self, transform)

  def init(self, params: chex.ArrayTree, prompt: Prompt,
           prefill_output: ModelOutput) -> FeatureState:
    """Returns the state of the layer, with the state of the stop rule."""
    state = super().init(self._layer(params), prompt, prefill_output)
    if self.stop is None:
      return state
    return state.replace(
        rule=stop_rules.init_state(self.stop, len(prompt.lengths)))

  def _layer(self, params):
    """Returns the parameters without the parameters of a stop rule."""
    own, _ = stop_rules.split_params(self.stop, params["drafter"])
    return {**params, "drafter": own}

  def propose(self, params: chex.ArrayTree, uniforms: jax.Array,
              state: DecodeState) -> tuple[Draft, Any]:
    """Drafts a chain for each row."""
    if self.stop is None or self.gamma == 0:
      return super().propose(self._layer(params), uniforms, state)
    own = state.drafter
    draft, _, kept = stop_rules.draw_until(
        self.stop, stop_rules.split_params(self.stop, params["drafter"])[1],
        self.transform, uniforms, state, own.rule,
        *_drafter.chaining(self.heads, self._layer(params), own, self.gamma))
    return _drafter.known_only(draft, own.known), own.replace(rule=kept)

  def commit(self, params: chex.ArrayTree, drafter: FeatureState, draft: Draft,
             verdict: Verdict, target_output: ModelOutput, count: jax.Array
             ) -> FeatureState:
    """Returns the new states of the layer and of the stop rule."""
    state = super().commit(self._layer(params), drafter, draft, verdict,
                           target_output, count)
    if self.stop is None:
      return state
    return state.replace(rule=stop_rules.update(
        self.stop, drafter.rule, draft, verdict, count))

  def grow(self, step, carry, logits, uniforms, state: DecodeState) -> Draft:
    """Returns the drafts, with the arguments of `_trees.grow`."""
    parents = tuple(range(-1, self.gamma))
    tokens, probs, _ = _trees.grow(
        step, carry, logits, uniforms, parents,
        _trees.drawer("iid", self.transform, state.temperature))
    return jax.vmap(Draft.chain)(rounds.roots(state), tokens, probs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle(FeatureDrafter, _trees.StaticTree):
  """Samples a tree of the same shape in every round.

  Attributes:
    heads: feature layer with one module.
    parents: draft tree, see `specjax.trees`, stored breadth-first;
      `range(-1, gamma)` is a chain.
    proposal: sampling method of children, see `drafters.DraftModelTree`.
    transform: transform of the draft logits; None uses the decoder's transform.
      Any transform is lossless, because the verifier receives the transformed
      distributions.
  """

  heads: FeatureHeads
  parents: tuple[int, ...]
  proposal: str = "without_replacement"
  transform: LogitsTransform | None = None

  def bind(self, target: Model, transform: LogitsTransform) -> "Eagle":
    """Returns the drafter specialised to a target."""
    self.check_heads(target, 1 if self.iid else self._most_children)
    return super().bind(target, transform)

  def grow(self, step, carry, logits, uniforms, state: DecodeState) -> Draft:
    """Returns the drafts, with the arguments of `_trees.grow`."""
    tokens, probs, _ = self.draw(step, carry, logits, uniforms, state)
    return _common.tree_drafts(state, self.parents, tokens, probs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicEagle(_dynamic_trees.ExpandedTree, FeatureDrafter):
  """Drafts EAGLE-2's deterministic tree of the most likely nodes.

  A node's score is the product of the layer's probabilities on its path. On
  every level, the `top_k` nodes with the largest scores get their `top_k` most
  likely next tokens as children. The draft consists of the root and the N - 1
  generated nodes with the largest scores.

  Attributes:
    heads: feature layer with one module.
    depth: number of levels below the root.
    top_k: number of nodes per level that get children, and number of children
      of each.
    num_nodes: number N of nodes of the draft, including the root.
    transform: transform from logits to the probabilities that determine the
      scores. It is separate from the decoder's transform, because at
      temperature 0 all probabilities but one would be 0.
  """

  heads: FeatureHeads
  depth: int = 6
  top_k: int = 10
  num_nodes: int = 60
  transform: LogitsTransform = LogitsTransform()

  def bind(self, target: Model, transform: LogitsTransform
           ) -> "DynamicEagle":
    """Returns the drafter specialised to a target."""
    self.check_heads(target, self.top_k)
    return dataclasses.replace(self, transform=self.transform.under(transform))

  def grow(self, step, carry, logits, uniforms, state: DecodeState) -> Draft:
    """Returns the drafts, with the arguments of `_dynamic_trees.expand`."""
    del uniforms
    return _dynamic_trees.expand(
        step, carry, logits, rounds.roots(state), transform=self.transform,
        depth=self.depth, top_k=self.top_k, num_nodes=self.num_nodes)[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampledEagle(FeatureDrafter):
  """Samples a tree whose likeliest nodes get children.

  This variant is not in the EAGLE papers, whose dynamic trees are
  deterministic. A score selects the nodes of a level that get children, but
  sampled nodes are never removed. So the draft distribution q that is stored
  for a token is the distribution from which it was sampled. Rules for sampled
  trees are therefore exact.

  Attributes:
    heads: feature layer with one module.
    depth: number of levels below the root.
    expanded: number of nodes per level, those with the largest scores, that get
      children.
    children: number of children of each of these nodes, and of the root.
    proposal: sampling method of children, see `drafters.DraftModelTree`.
    transform: transform from the layer's logits to q; None uses the decoder's
      transform.
    confidence: transform from logits to the probabilities that determine the
      scores. A node's score is the product of these on its path.
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
    _trees.check_proposal(self.proposal)

  @property
  def chain(self) -> bool:
    return self.children == 1

  @property
  def iid(self) -> bool:
    return self.chain or self.proposal == "iid"

  @property
  def num_nodes(self) -> int:
    return _dynamic_trees.num_nodes(self.depth, self.expanded, self.children)

  @property
  def num_uniforms(self) -> int:
    return sampling.UNIFORMS_A_DRAW * (self.num_nodes - 1)

  def bind(self, target: Model, transform: LogitsTransform
           ) -> "SampledEagle":
    """Returns the drafter specialised to a target."""
    self.check_heads(target, 1 if self.iid else self.children)
    return _common.with_transform(self, transform)

  def grow(self, step, carry, logits, uniforms, state: DecodeState) -> Draft:
    """Returns the drafts, with the arguments of `_dynamic_trees.grow`."""
    return _dynamic_trees.grow(
        step, carry, logits, uniforms, rounds.roots(state),
        _trees.drawer(self.proposal, self.transform, state.temperature),
        confidence=self.confidence, depth=self.depth, expanded=self.expanded,
        children=self.children)[0]


def eagle(heads: FeatureHeads, parents: Sequence[int] | None = None,
          proposal: str = "without_replacement",
          verifier: Verifier | None = None) -> Strategy:
  """Samples a chain or a tree from a layer on the target's features.

  EAGLE (Li et al. 2024, arXiv:2401.15077) and EAGLE-3 (arXiv:2503.01840).
  Decode with the target that `heads.attach` returns.

  >>> import jax
  >>> import specjax as sj
  >>> from specjax import methods
  >>> pair = sj.testing.tiny_pair(5)
  >>> own = methods.Eagle3Heads.for_target(pair.target, 4, taps=(0, 1))
  >>> given = pair.params["target"]
  >>> target, params = own.attach(
  ...     pair.target, given, own.init(jax.random.key(0), given))
  >>> decoder = eagle(own).decoder(target)
  >>> text = decoder.generate(
  ...     params, [[3, 1]], jax.random.key(1), max_new_tokens=6)
  >>> len(text.tokens[0]), decoder.verifier
  (8, Block())

  Args:
    heads: feature layer with one module.
    parents: draft tree of N nodes; None samples a chain.
    proposal: sampling method of children, see `drafters.DraftModelTree`. The
      EAGLE papers use "top_k".
    verifier: verification rule. None means `Block` for a sampled chain,
      `Traversal` for a sampled tree and `TargetWalk` for a deterministic tree.
  """
  if parents is None:
    drafter = EagleChain(heads=heads, gamma=heads.num_forecasts)
    return Strategy(drafter, verifier or BLOCK)
  return _tree(Eagle(
      heads=heads, parents=tuple(parents), proposal=proposal), verifier)


def eagle_dynamic(heads: FeatureHeads, depth: int = 6, top_k: int = 10,
                  num_nodes: int = 60) -> Strategy:
  """Drafts EAGLE-2's tree, whose shape depends on the layer's probabilities.

  EAGLE-2 (Li et al. 2024, arXiv:2406.16858). EAGLE-3 layers use the same tree.

  >>> from specjax import testing
  >>> from specjax import methods
  >>> own = methods.Eagle1Heads.for_target(testing.tiny_pair(5).target, 4)
  >>> eagle_dynamic(own, depth=3, top_k=2, num_nodes=7).verifier
  TargetWalk()

  Args:
    heads: feature layer with one module.
    depth: number of levels below the root.
    top_k: number of nodes per level that get children, and number of children
      of each.
    num_nodes: number N of nodes of the draft, including the root.
  """
  return Strategy(DynamicEagle(
      heads=heads, depth=depth, top_k=top_k, num_nodes=num_nodes),
      verifiers.TargetWalk())


def eagle_sampled(heads: FeatureHeads, depth: int, expanded: int, children: int,
                  verifier: Verifier = TRAVERSAL) -> Strategy:
  """Samples a tree whose likeliest nodes get children.

  This variant is not in the EAGLE papers, whose trees are deterministic. The
  product of the layer's probabilities on a node's path decides whether the node
  gets children. Sampled nodes are never removed, so rules for sampled trees are
  exact.

  >>> from specjax import testing
  >>> from specjax import methods
  >>> own = methods.Eagle1Heads.for_target(testing.tiny_pair(5).target, 4)
  >>> eagle_sampled(own, depth=3, expanded=2, children=2).drafter.num_nodes
  11

  Args:
    heads: feature layer with one module.
    depth: number of levels below the root.
    expanded: number of nodes per level that get children.
    children: number of children of each of these nodes, and of the root.
    verifier: verification rule for sampled trees.
  """
  return Strategy(SampledEagle(
      heads=heads, depth=depth, expanded=expanded, children=children), verifier)


def _tree(drafter, verifier: Verifier | None) -> Strategy:
  """Returns a strategy with `verifier`, or with the tree's default rule."""
  return Strategy(drafter, verifier or (
      verifiers.TargetWalk() if drafter.proposal == "top_k" else
      BLOCK if drafter.chain else TRAVERSAL))
