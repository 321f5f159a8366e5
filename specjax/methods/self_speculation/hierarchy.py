"""TriForce: the target drafts with part of its cache and a second drafter.

TriForce (Sun et al. 2024, arXiv:2404.11912) is for long contexts, in which
reading the cache takes more time per pass than reading the weights. In this
picture each model verifies the drafts of the model to its right:

  target, full cache  <-  its weights, part of the cache  <-  tiny drafter

With an `Empty` inner drafter it is MagicDec (Sadhukhan et al. 2024,
arXiv:2408.11049): the target drafts alone from a sparse cache.
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
  """`Cascade` whose middle model is the target with part of its cache.

  The middle model verifies the inner drafter's tokens and drafts for the
  target. Both stages are lossless, as in any cascade. After a rejection the
  middle stage samples from the *residual* distribution. TriForce's released
  code samples from the middle model's complete distribution instead, which is
  biased; `tests/methods/hierarchy_test.py` measures the bias.

  `params["drafter"]` is `{"target": ..., "drafter": ...}`: the parameters of
  the middle model (the target's, or a copy such as from `models.quantize`), and
  the parameters of the inner drafter.

  Attributes:
    model: target model; `bind` sets it.
    view: selection of the cache that drafts read, see `models.cache_views`.
    drafter: inner drafter, such as a tiny model with a `Streaming` cache, or
      `Empty`.
    gamma: draft length.
  """

  view: CacheView
  model: Model | None = None

  reads_cache = True

  @property
  def autoregressive(self) -> bool:
    return False  # the view depends on the position where the round began

  def bind(self, target: Model, transform: LogitsTransform) -> "Hierarchy":
    """Returns the drafter specialised to a target."""
    interfaces.bind(self.drafter, target, transform)  # checks the vocabulary
    name = type(target).__name__
    if not isinstance(target, Transformer) or target.cache is not KVCache:
      raise ValueError(f"the target is a {name} without a KVCache; a view "
                       "needs a models.Transformer with cache=KVCache")
    if any(target.config.windows):
      raise ValueError(f"windows of the target is {target.config.windows}; a "
                       "view selects from the complete cache: give a target "
                       "without windows")
    drafter = dataclasses.replace(self, model=target)
    return super(Hierarchy, drafter).bind(target, transform)

  def _read(self, own: Mapping[str, chex.ArrayTree], prompt: Prompt,
            prefill_output: ModelOutput) -> ModelOutput:
    """Returns the prefill's output with a view of the prompt as its cache."""
    root = jnp.take_along_axis(
        prompt.tokens, prompt.lengths[:, None] - 1, axis=1)[:, 0]
    return prefill_output.replace(cache=self.view.choose(
        self.model, own["target"], root, prefill_output.cache))

  def _cache(self, own: Mapping[str, chex.ArrayTree], state: DecodeState
             ) -> Any:
    """Returns the view of all committed tokens except the last."""
    del own
    return self.view.open(state.drafter.target_cache, state.target_cache)

  def propose(self, params: chex.ArrayTree, uniforms: jax.Array,
              state: DecodeState) -> tuple[Draft, DecodeState]:
    """Drafts a chain for each row."""
    draft, inner = super().propose(params, uniforms, state)
    return draft, inner.replace(target_cache=state.drafter.target_cache)


def triforce(view: CacheView, drafter: Drafter, gamma: int,
             inner: Verifier = BLOCK, verifier: Verifier = BLOCK
             ) -> Strategy:
  """Drafts with the target on part of its cache, and with an inner drafter.

  TriForce (Sun et al. 2024, arXiv:2404.11912) for long contexts. With
  `drafters.Empty()` it is MagicDec (Sadhukhan et al. 2024, arXiv:2408.11049).

  >>> from specjax import drafters, testing
  >>> from specjax.models import cache_views
  >>> tiny = drafters.DraftModel(model=testing.MarkovModel(7), gamma=1)
  >>> view = cache_views.Retrieved(budget=4096, chunk=8)
  >>> triforce(view, tiny, gamma=6).drafter.num_nodes
  7

  Args:
    view: selection of the cache that drafts read, see `models.cache_views`.
    drafter: inner drafter, such as a tiny model with a `Streaming` cache.
    gamma: draft length.
    inner: lossless rule by which the target on part of its cache verifies the
      inner drafter's tokens.
    verifier: rule by which the target verifies the draft, for chains.
  """
  return Strategy(Hierarchy(
      view=view, drafter=drafter, gamma=gamma, verifier=inner), verifier)
