"""Layers that read the target's features: EAGLE's, MTP modules, and others.

What they are made of is data, see `models.features`; the classes here differ in
its defaults. A draft reads the features of the committed text, and from there
on what the layer itself returned.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any
from typing import ClassVar

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
  """Heads of EAGLE-1 and 2: no norm before attention or before the LM head."""

  fusion_bias: bool = True

  kind: ClassVar[str] = "eagle1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Heads(FeatureHeads):
  """Heads of EAGLE-3: three taps, attention on [e; g], and an own LM head."""

  entry: bool = True
  fusion: str = "attention"
  fusion_norms: bool = True
  final_norm: str | None = "own"
  own_head: bool = True

  kind: ClassVar[str] = "eagle3"

  @classmethod
  def default_taps(cls, layers: int) -> tuple[int | str, ...]:
    """Returns 2, L // 2 and L - 3, or layers spread over a shallow target."""
    taps = (2, layers // 2, layers - 3)
    if not taps[0] < taps[1] < taps[2]:
      taps = (1, (layers + 1) // 2, layers)
    return tuple(dict.fromkeys(taps))


class FeatureDrafter(_drafter.LayerDrafter):
  """Base of drafters that continue from a layer's own output.

  Classes that derive from it are frozen dataclasses that have `heads` and
  `transform`, `depth`, and `grow`. The target is that of `heads.attach`;
  `params["drafter"]` are the layer's parameters, and it may use embedding and
  head of `params["target"]`. A round costs one pass of the layer over what was
  accepted, which commits it with the target's features, and one over each level
  of the draft but the last. After a prompt of one token there is no feature
  yet, and the first draft is padding.
  """

  conditional = True

  def check_heads(self, target: Model, width: int) -> None:
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
    _drafter.check_children(self.heads, width)

  def init(self, params: Any, prompt: Prompt, prefill_output: ModelOutput
           ) -> Any:
    """Returns the layer's cache and output after the prompt."""
    return _drafter.read_prompt(self.heads, params, prompt, prefill_output)

  def propose(self, params: Any, uniforms: jax.Array, state: DecodeState
              ) -> tuple[Draft, Any]:
    """Drafts a chain or tree per row."""
    if self.num_nodes == 1:
      return rounds.root_only(state, self.heads.vocab_size), state.drafter
    step, carry, logits = _drafter.growing(self.heads, params, state.drafter)
    step, carry, logits = constraints_lib.steered(
        self.transform.constraints, state.constraints, step, carry, logits)
    draft = self.grow(step, carry, logits, uniforms, state)
    return _drafter.known_only(draft, state.drafter.known), state.drafter

  def commit(self, params: Any, drafter: FeatureState, draft: Draft,
             verdict: Verdict, target_output: ModelOutput, count: jax.Array
             ) -> FeatureState:
    """Reads the target's features of the accepted tokens."""
    return _drafter.read_round(self.heads, params, drafter, draft, verdict,
                               target_output, count, self.depth)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleChain(_common.DrawnChain, FeatureDrafter):
  """Samples a chain, whose length a controller may choose.

  Attributes:
    heads: feature layer with one module.
    gamma: draft length, at least 0.
    transform: transform of the draft logits; None: the decoder's. Any is
      lossless because q is reported.
    stop: one of `methods.stop_rules`, which is shown what the layer returned
      as hidden states; None: all chains have gamma tokens. If the rule has
      parameters, `params["drafter"]` is `{"model": parameters of the layer,
      "stop": the rule's}`.
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

  def init(self, params: Any, prompt: Prompt, prefill_output: ModelOutput
           ) -> FeatureState:
    """Returns the layer's state and that of the stop rule."""
    state = super().init(self._layer(params), prompt, prefill_output)
    if self.stop is None:
      return state
    return state.replace(
        rule=stop_rules.init_state(self.stop, len(prompt.lengths)))

  def _layer(self, params):
    """Returns the parameters without those of a stop rule."""
    own, _ = stop_rules.split_params(self.stop, params["drafter"])
    return {**params, "drafter": own}

  def propose(self, params: Any, uniforms: jax.Array, state: DecodeState
              ) -> tuple[Draft, Any]:
    """Drafts a chain per row."""
    if self.stop is None or self.gamma == 0:
      return super().propose(self._layer(params), uniforms, state)
    own = state.drafter
    draft, _, kept = stop_rules.draw_until(
        self.stop, stop_rules.split_params(self.stop, params["drafter"])[1],
        self.transform, uniforms, state, own.rule,
        *_drafter.chaining(self.heads, self._layer(params), own, self.gamma))
    return _drafter.known_only(draft, own.known), own.replace(rule=kept)

  def commit(self, params: Any, drafter: FeatureState, draft: Draft,
             verdict: Verdict, target_output: ModelOutput, count: jax.Array
             ) -> FeatureState:
    """Updates the states of the layer and of the stop rule."""
    state = super().commit(self._layer(params), drafter, draft, verdict,
                           target_output, count)
    if self.stop is None:
      return state
    return state.replace(rule=stop_rules.update(
        self.stop, drafter.rule, draft, verdict, count))

  def grow(self, step, carry, logits, uniforms, state: DecodeState) -> Draft:
    """Returns the batch of drafts; arguments as in `_trees.grow`."""
    parents = tuple(range(-1, self.gamma))
    tokens, probs, _ = _trees.grow(
        step, carry, logits, uniforms, parents,
        _trees.drawer("iid", self.transform, state.temperature))
    return jax.vmap(Draft.chain)(rounds.roots(state), tokens, probs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle(FeatureDrafter, _trees.StaticTree):
  """Samples the same tree in every round.

  Attributes:
    heads: feature layer with one module.
    parents: the tree, see `specjax.trees`; `range(-1, gamma)` is a chain. It is
      put in breadth-first order.
    proposal: sampling method of children, see `DraftModelTree`.
    transform: transform of the draft logits; None: the decoder's. Any is
      lossless because q is reported.
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
    """Returns the batch of drafts; arguments as in `_trees.grow`."""
    tokens, probs, _ = self.draw(step, carry, logits, uniforms, state)
    return _common.tree_drafts(state, self.parents, tokens, probs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicEagle(_dynamic_trees.ExpandedTree, FeatureDrafter):
  """Drafts EAGLE-2's deterministic tree of the most likely candidates.

  As `DynamicTree` grows it, from a feature layer.

  Attributes:
    heads: feature layer with one module.
    depth: number of levels below the root, one pass each.
    top_k: number of expanded nodes per level, and of children of each.
    num_nodes: number of nodes N, the root included.
    transform: transform of logits to confidences. It is not the decoder's,
      because at temperature 0 there would be no second best token.
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
    """Returns the batch of drafts; arguments as in `_dynamic_trees.expand`."""
    del uniforms
    return _dynamic_trees.expand(
        step, carry, logits, rounds.roots(state), transform=self.transform,
        depth=self.depth, top_k=self.top_k, num_nodes=self.num_nodes)[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampledEagle(FeatureDrafter):
  """Samples a tree that is expanded at nodes of high confidence.

  Not in the EAGLE papers, whose dynamic trees are deterministic. A score
  decides which nodes of a level get children, and never which nodes stay, see
  `drawn_trees`: so q is the law that tokens were drawn from, and rules for
  sampled trees are exact.

  Attributes:
    heads: feature layer with one module.
    depth: number of levels below the root.
    expanded: nodes of a level that get children, those with the best scores.
    children: number of children of each, and of the root.
    proposal: sampling method of children, see `DraftModelTree`.
    transform: transform of the layer's logits; None: the decoder's.
    confidence: transform of logits to the probabilities whose product along the
      path is the score of a node.
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
    """Returns the batch of drafts; arguments as in `_dynamic_trees.grow`."""
    return _dynamic_trees.grow(
        step, carry, logits, uniforms, rounds.roots(state),
        _trees.drawer(self.proposal, self.transform, state.temperature),
        confidence=self.confidence, depth=self.depth, expanded=self.expanded,
        children=self.children)[0]


def eagle(heads: FeatureHeads, parents: Sequence[int] | None = None,
          proposal: str = "without_replacement",
          verifier: Verifier | None = None) -> Strategy:
  """Samples a chain or a tree from a layer on the target's features.

  EAGLE (Li et al. 2024, arXiv:2401.15077) and EAGLE-3 (arXiv:2503.01840); the
  target is that which `heads.attach` returns.

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
    parents: draft tree of N nodes; None: a sampled chain.
    proposal: sampling method of children, see `drafters.DraftModelTree`;
      EAGLE's own trees are "top_k".
    verifier: rule; None: block verification of a chain, traversal of a sampled
      tree, the target's walk through a deterministic tree.
  """
  if parents is None:
    drafter = EagleChain(heads=heads, gamma=heads.num_forecasts)
    return Strategy(drafter, verifier or BLOCK)
  return _tree(Eagle(
      heads=heads, parents=tuple(parents), proposal=proposal), verifier)


def eagle_dynamic(heads: FeatureHeads, depth: int = 6, top_k: int = 10,
                  num_nodes: int = 60) -> Strategy:
  """Drafts EAGLE-2's tree, whose shape follows the layer's confidence.

  EAGLE-2 (Li et al. 2024, arXiv:2406.16858), and EAGLE-3 as it is served.

  >>> from specjax import testing
  >>> from specjax import methods
  >>> own = methods.Eagle1Heads.for_target(testing.tiny_pair(5).target, 4)
  >>> eagle_dynamic(own, depth=3, top_k=2, num_nodes=7).verifier
  TargetWalk()

  Args:
    heads: feature layer with one module.
    depth: number of levels below the root.
    top_k: number of expanded nodes per level, and of children of each.
    num_nodes: number of nodes N, the root included.
  """
  return Strategy(DynamicEagle(
      heads=heads, depth=depth, top_k=top_k, num_nodes=num_nodes),
      verifiers.TargetWalk())


def eagle_sampled(heads: FeatureHeads, depth: int, expanded: int, children: int,
                  verifier: Verifier = TRAVERSAL) -> Strategy:
  """Samples a tree that is expanded at nodes of high confidence.

  Not in the EAGLE papers, whose trees are deterministic: nodes are expanded by
  their score and never dropped by it, so that rules for sampled trees are
  exact.

  >>> from specjax import testing
  >>> from specjax import methods
  >>> own = methods.Eagle1Heads.for_target(testing.tiny_pair(5).target, 4)
  >>> eagle_sampled(own, depth=3, expanded=2, children=2).drafter.num_nodes
  11

  Args:
    heads: feature layer with one module.
    depth: number of levels below the root.
    expanded: nodes of a level that get children.
    children: number of children of each, and of the root.
    verifier: a rule for drawn trees.
  """
  return Strategy(SampledEagle(
      heads=heads, depth=depth, expanded=expanded, children=children), verifier)


def _tree(drafter, verifier: Verifier | None) -> Strategy:
  """Returns a static tree and its default rule."""
  return Strategy(drafter, verifier or (
      verifiers.TargetWalk() if drafter.proposal == "top_k" else
      BLOCK if drafter.chain else TRAVERSAL))
