"""A small language model drafts a static tree, one pass a level.

SpecInfer (Miao et al. 2023, arXiv:2305.09781), Sequoia (Chen et al. 2024,
arXiv:2402.12374), RSD (Jeon et al. 2024, arXiv:2402.14160) and the drafts of
Hu et al. 2025 (arXiv:2502.18779) are choices of `parents` and `proposal`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax import interfaces
from specjax.decoding import constraining as constraints_lib
from specjax.decoding import round_steps
from specjax.decoding.prefill import read_prompt
from specjax.methods import _common
from specjax.methods import _growth
from specjax.sampling import LogitsTransform
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelFn
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.types import Verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeLanguageModel(_growth.StaticTree):
  """Draws the children of every node from a model with a cache of its own.

  A round costs one pass over the last two committed tokens and one over each
  level that has children. Leaves are never fed; what was fed of the accepted
  path is kept, so that two tokens catch up.

  Attributes:
    model: a `ModelFn` over the target's vocabulary.
    parents: the tree, see `specjax.trees`; it is put in breadth-first order.
    proposal: how the K children of a node are drawn. "iid": independently, so
      that they may be equal, and at temperature 0 all are;
      "without_replacement": in turn, each from what is left; "top_k": the
      likeliest tokens with certainty; "hybrid": one draw outside the K - 1
      likeliest, which is the first child, and then those. At temperature 0
      the last three have the same children, the K likeliest; only hybrid has
      the least likely one first, which matters where subtrees are unequal.
    transform: of the model's logits; None takes the decoder's. Any is sound,
      for q is reported as it was sampled from.
  """

  model: ModelFn
  parents: tuple[int, ...]
  proposal: str = "without_replacement"
  transform: LogitsTransform | None = None

  @property
  def autoregressive(self) -> bool:
    # Otherwise a row depends on the earlier siblings as well.
    return self.iid

  @property
  def context_length(self) -> int:
    return self.model.context_length

  def bind(self, target: ModelFn, transform: LogitsTransform
           ) -> "TreeLanguageModel":
    """The same drafter, for this target and its transform.

    Raises:
      ValueError: the vocabularies differ, or a node has more children than
        there are tokens.
    """
    _common.check_vocabulary(self.model, target)
    return super().bind(target, transform)

  def init(self, params: Any, prompt: Prompt, prefill_output: ModelOutput
           ) -> Any:
    """The cache after the prompt."""
    del prefill_output
    return read_prompt(self.model, params["drafter"], prompt).cache

  def propose(self, params: Any, uniforms: jax.Array, state: DecodeState
              ) -> tuple[Draft, Any]:
    """Drafts the tree for every row.

    Args:
      params: `{"drafter": parameters of the model}`.
      uniforms: `[B, num_uniforms]`, uniform in [0, 1).
      state: the `DecodeState`.

    Returns:
      `(Draft, cache)`, batched.
    """
    if self.num_nodes == 1:
      return round_steps.root_only(state, self.model.vocab_size), state.drafter

    params = params["drafter"]
    logits, cache = _common.feed_last(
        self.model, params, state, state.drafter, size=2,
        more=_growth.fed_slots(self.parents)[1])
    step, carry, logits = constraints_lib.steered(
        self.transform.constraints, state.constraints,
        _common.model_step(self.model, params), cache, logits)
    tokens, probs, (cache, _) = self.draw(step, carry, logits, uniforms, state)
    return _common.tree_drafts(state, self.parents, tokens, probs), cache

  def commit(self, params: Any, drafter: Any, draft: Draft, verdict: Verdict,
             target_output: ModelOutput, count: jax.Array) -> Any:
    """The cache with the accepted path moved together."""
    del params, draft, target_output
    slots, size = _growth.fed_slots(self.parents)
    slots = jnp.tile(slots, (count.shape[0], 1))
    return _common.keep_path(drafter, slots, verdict.path, size, count)

  def param_specs(self, axis: str, size: int) -> Any:
    """The model's, see `specjax.interfaces`."""
    return interfaces.param_specs(self.model, axis, size)
