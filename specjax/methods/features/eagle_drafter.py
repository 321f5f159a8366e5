"""EAGLE: a layer on the target's features drafts chains and trees.

Li et al. 2024 (arXiv:2401.15077), EAGLE-2 (arXiv:2406.16858) and EAGLE-3
(arXiv:2503.01840); heads of multi-token prediction whose one module is used
again and again (FastMTP, arXiv:2509.18362) are the same.
"""

import dataclasses
from typing import Any

import jax

from specjax.decoding import constraining as constraints_lib
from specjax.decoding import round_steps
from specjax.methods import _children
from specjax.methods import _common
from specjax.methods import _features
from specjax.methods import _growth
from specjax.methods import _until
from specjax.methods import stop_rules
from specjax.methods._features import FeatureState
from specjax.methods.features.network import FeatureHeads
from specjax.sampling import LogitsTransform
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelFn
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.types import Verdict
from specjax.utils import fields


class FeatureDrafter(_features.LayerDrafter):
  """The base of drafters that go on from a layer's own output.

  Classes that derive from it are frozen dataclasses that have `heads` and
  `transform`, `depth`, and `grow`. The target is that of `heads.attach`;
  `params["drafter"]` are the layer's parameters, and it may use embedding and
  head of `params["target"]`. A round costs one pass of the layer over what was
  accepted, which commits it with the target's features, and one over each level
  of the draft but the last. After a prompt of one token there is no feature
  yet, and the first draft is padding.
  """

  conditional = True

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
    _features.check_children(self.heads, width)

  def init(self, params: Any, prompt: Prompt, prefill_output: ModelOutput
           ) -> Any:
    """The layer's cache after the prompt, and its output there."""
    return _features.read_prompt(self.heads, params, prompt, prefill_output)

  def propose(self, params: Any, uniforms: jax.Array, state: DecodeState
              ) -> tuple[Draft, Any]:
    """Drafts for every row.

    Args:
      params: `{"target", "drafter": parameters of the layer}`.
      uniforms: `[B, num_uniforms]`, uniform in [0, 1).
      state: the `DecodeState`.

    Returns:
      `(Draft, FeatureState)`, batched.
    """
    if self.num_nodes == 1:
      return round_steps.root_only(state, self.heads.vocab_size), state.drafter
    step, carry, logits = _features.growing(self.heads, params, state.drafter)
    step, carry, logits = constraints_lib.steered(
        self.transform.constraints, state.constraints, step, carry, logits)
    draft = self.grow(step, carry, logits, uniforms, state)
    return _features.known_only(draft, state.drafter.known), state.drafter

  def commit(self, params: Any, drafter: FeatureState, draft: Draft,
             verdict: Verdict, target_output: ModelOutput, count: jax.Array
             ) -> FeatureState:
    """The layer's state with the true features of what was accepted."""
    return _features.read_round(self.heads, params, drafter, draft, verdict,
                               target_output, count, self.depth)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleChain(_common.DrawnChain, FeatureDrafter):
  """Draws a chain, whose length a controller may choose before every round.

  Attributes:
    heads: the layer, of one module.
    gamma: drafted tokens of a round, at least 0.
    transform: of the layer's logits; None takes the decoder's. Any is sound,
      for q is reported as it was sampled from.
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

  def bind(self, target: ModelFn, transform: LogitsTransform) -> "EagleChain":
    """The same drafter, with the target's transform unless it has its own.

    Raises:
      ValueError: the layer does not fit the target.
    """
    self.check_heads(target, 1)
    return _common.with_transform(self, transform)

  def init(self, params: Any, prompt: Prompt, prefill_output: ModelOutput
           ) -> FeatureState:
    """The layer after the prompt, and what the stop rule remembers."""
    state = super().init(self._layer(params), prompt, prefill_output)
    if self.stop is None:
      return state
    return state.replace(rule=stop_rules.first(self.stop, len(prompt.lengths)))

  def _layer(self, params):
    """The parameters without those of a stop rule."""
    own, _ = _until.own_params(self.stop, params["drafter"])
    return {**params, "drafter": own}

  def propose(self, params: Any, uniforms: jax.Array, state: DecodeState
              ) -> tuple[Draft, Any]:
    """As of a `FeatureDrafter`; with a stop rule no token is drawn in vain."""
    if self.stop is None or self.gamma == 0:
      return super().propose(self._layer(params), uniforms, state)
    own = state.drafter
    draft, _, kept = _until.draw_until(
        self.stop, _until.own_params(self.stop, params["drafter"])[1],
        self.transform, uniforms, state, own.rule,
        *_features.chaining(self.heads, self._layer(params), own, self.gamma))
    return _features.known_only(draft, own.known), own.replace(rule=kept)

  def commit(self, params: Any, drafter: FeatureState, draft: Draft,
             verdict: Verdict, target_output: ModelOutput, count: jax.Array
             ) -> FeatureState:
    """The layer's state after a round, and what the stop rule learns of it."""
    state = super().commit(self._layer(params), drafter, draft, verdict,
                           target_output, count)
    if self.stop is None:
      return state
    return state.replace(rule=stop_rules.learned(
        self.stop, drafter.rule, draft, verdict, count))

  def grow(self, step, carry, logits, uniforms, state: DecodeState) -> Draft:
    """The batch of drafts; arguments as `growth.grow` takes them."""
    parents = tuple(range(-1, self.gamma))
    tokens, probs, _ = _growth.grow(
        step, carry, logits, uniforms, parents,
        _children.drawer("iid", self.transform, state.temperature))
    return jax.vmap(Draft.chain)(round_steps.roots(state), tokens, probs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle(FeatureDrafter, _growth.StaticTree):
  """Draws the same tree in every round.

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

  def grow(self, step, carry, logits, uniforms, state: DecodeState) -> Draft:
    """The batch of drafts; arguments as `growth.grow` takes them."""
    tokens, probs, _ = self.draw(step, carry, logits, uniforms, state)
    return _common.tree_drafts(state, self.parents, tokens, probs)
