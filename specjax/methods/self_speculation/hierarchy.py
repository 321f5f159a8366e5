"""TriForce: the target drafts for itself with a part of its cache.

TriForce (Sun et al. 2024, arXiv:2404.11912) is for long contexts, in which
reading the cache takes more time per pass than reading the weights. It has
three models:

  1. The target with its complete cache verifies the drafts of model 2.
  2. The middle model is the target with a part of the cache. It verifies the
     drafts of model 3.
  3. The inner drafter is small, for example a tiny language model.

If the inner drafter is `Empty`, the method is MagicDec (Sadhukhan et al. 2024,
arXiv:2408.11049): the middle model drafts alone.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp

from specjax import interfaces
from specjax.caches.dense import KVCache
from specjax.interfaces import Drafter
from specjax.interfaces import Model
from specjax.interfaces import Verifier
from specjax.methods.combined.cascade import Cascade
from specjax.methods.strategy import BLOCK
from specjax.methods.strategy import Strategy
from specjax.models.cache_views import CacheView
from specjax.models.transformer import Transformer
from specjax.sampling import LogitsTransform
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelOutput
from specjax.types import Prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hierarchy(Cascade):
  """TriForce: a cascade whose middle model is the target with a partial cache.

  The middle model verifies the tokens of an inner drafter, and its accepted
  tokens are the draft for the target. Both verifications are lossless. If the
  middle model rejects a token, it samples from the residual distribution. The
  released code of TriForce samples from the middle model's complete
  distribution instead, which biases the output;
  `tests/methods/hierarchy_test.py` measures the bias.

  `params["drafter"]` is `{"target": ..., "drafter": ...}`: the parameters of
  the middle model, which are the target's or a quantised copy
  (`models.quantize`), and the parameters of the inner drafter.

  Attributes:
    model: target model; `bind` sets it.
    view: selection of the part of the target's cache that the middle model
      reads, see `models.cache_views`.
    drafter: inner drafter, such as a tiny model with a `Streaming` cache, or
      `Empty`.
    gamma: draft length.
  """

  view: CacheView
  model: Model | None = None

  @property
  def provides(self) -> tuple[str, ...]:
    # The middle model reads a part of the cache that is selected where a draft
    # begins. So its draft distribution does not depend on the sequence alone.
    return "reads_cache", *({*super().provides} - {"autoregressive"})

  def bind(self, target: Model, transform: LogitsTransform) -> "Hierarchy":
    """Returns the drafter with the target as its middle model.

    Raises:
      ValueError: the target is not a `Transformer` with a `KVCache`, has
        attention windows, or does not fit the inner drafter.
    """
    # The result is not used. Binding the inner drafter checks that its
    # vocabulary is the target's.
    interfaces.bind(self.drafter, target, transform)
    name = type(target).__name__
    if not isinstance(target, Transformer) or target.cache is not KVCache:
      raise ValueError(f"the target is a {name} without a KVCache; a view "
                       "needs a models.Transformer with cache=KVCache")
    if target.config.recurrent:
      raise ValueError("the target has recurrent layers, and a view selects "
                       "keys and values: give a target whose layers all have "
                       "attention")
    if not target.config.has_uniform_keys:
      raise ValueError("the target has layers that share keys and values, or "
                       "whose keys differ in shape, and a view selects from "
                       "equal layers: give another target")
    if any(target.config.windows):
      raise ValueError(f"windows of the target is {target.config.windows}; a "
                       "view selects from the complete cache: give a target "
                       "without windows")
    drafter = dataclasses.replace(self, model=target)
    return super(Hierarchy, drafter).bind(target, transform)

  def _read(self, own: Mapping[str, chex.ArrayTree], prompt: Prompt,
            prefill_output: ModelOutput) -> ModelOutput:
    """Returns the target's output on the prompt, with a partial cache.

    This method selects the part of the prompt's cache for the middle model.
    """
    root = jnp.take_along_axis(
        prompt.tokens, prompt.lengths[:, None] - 1, axis=1)[:, 0]
    return prefill_output.replace(cache=self.view.choose(
        self.model, own["target"], root, prefill_output.cache))

  def _cache(self, own: Mapping[str, chex.ArrayTree], state: DecodeState
             ) -> Any:
    """Returns the middle model's cache for one round.

    This cache is a part of the target's cache, which contains all committed
    tokens except the last one.
    """
    del own
    return self.view.open(state.drafter.target_cache, state.target_cache)

  def propose(self, params: chex.ArrayTree, uniforms: jax.Array,
              state: DecodeState) -> tuple[Draft, DecodeState]:
    draft, inner = super().propose(params, uniforms, state)
    return draft, inner.replace(target_cache=state.drafter.target_cache)


def triforce(view: CacheView, drafter: Drafter, gamma: int,
             inner: Verifier = BLOCK, verifier: Verifier = BLOCK
             ) -> Strategy:
  """Returns the strategy TriForce (Sun et al. 2024), for long contexts.

  The target drafts for itself with a part of its cache, and an inner drafter
  makes this drafting faster (arXiv:2404.11912). If the inner drafter is
  `drafters.Empty()`, the strategy is MagicDec (Sadhukhan et al. 2024,
  arXiv:2408.11049).

  >>> from specjax import drafters, testing
  >>> from specjax.models import cache_views
  >>> tiny = drafters.draft_model(model=testing.MarkovModel(7), gamma=1)
  >>> view = cache_views.Retrieved(budget=4096, chunk=8)
  >>> triforce(view, tiny, gamma=6).drafter.num_nodes
  7

  Args:
    view: selection of the part of the cache that drafting reads, see
      `models.cache_views`.
    drafter: inner drafter, such as a tiny model with a `Streaming` cache.
    gamma: draft length.
    inner: lossless rule with which the target, with a part of its cache,
      verifies the inner drafter's tokens.
    verifier: rule for chains with which the target, with its complete cache,
      verifies the draft.
  """
  return Strategy(Hierarchy(
      view=view, drafter=drafter, gamma=gamma, verifier=inner), verifier)
