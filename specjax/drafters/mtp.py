"""Modules of multi-token prediction draft a chain, each one token of it.

DeepSeek-V3 (arXiv:2412.19437, section 2.2): module k reads, at position t, what
module k - 1 returned there and the token t + k, and forecasts t + k + 1. The
layers of Gloeckle et al. 2024 (arXiv:2404.19737) read no token.
"""

import dataclasses
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from specjax.constraints import base as constraints_lib
from specjax.drafters import common
from specjax.drafters import features
from specjax.models.heads import FeatureHeads
from specjax.sampling import COINS_A_DRAW
from specjax.sampling import inverse_cdf
from specjax.sampling import LogitsTransform
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelFn
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.types import Verdict


@struct.dataclass
class ModulesState:
  """What the modules know of the committed text.

  After n tokens module k is sure of positions up to n - 1 - k: it reads k
  tokens ahead. So the last features are kept, and read anew with what is
  drafted; those before them are in the cache.

  Attributes:
    cache: a layer for each module.
    hidden: `[B, W, D]`, the features of the last positions, the first `held` of
      them; they begin where the cache ends, and end at position n - 2.
    held: `[B]` int32; 0: the text has one token, and no position is known.
  """

  cache: Any
  hidden: jax.Array
  held: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTP(common.DrawnChain):
  """Draws token k of a chain from module k.

  The target is that of `heads.attach`, and `params["drafter"]` are the modules'
  parameters. A round costs a pass of each module over the last 2 gamma
  positions at most. After a prompt of one token there is no feature yet, and
  the first draft is padding. Heads whose one module is used again and again
  draft by `Eagle`.

  Attributes:
    heads: with a module for every token.
    gamma: drafted tokens of a round, at most as many as modules; None: so many.
    transform: of the modules' logits; None takes the decoder's. Any is sound,
      for q is reported as it was sampled from.
  """

  heads: FeatureHeads
  gamma: int | None = None
  transform: LogitsTransform | None = None

  autoregressive = False  # the law of module k is not that of module 1

  def __post_init__(self):
    if self.heads.reuse:
      raise ValueError("the heads have one module, which is used again and "
                       "again; draft with them by drafters.Eagle")
    if self.gamma is None:
      object.__setattr__(self, "gamma", self.heads.modules)
    common.check_at_least("gamma", self.gamma, 1)
    if self.gamma > self.heads.modules:
      raise ValueError(
          f"gamma is {self.gamma} and there are {self.heads.modules} modules; "
          "each token needs one: draft fewer or train more modules")

  @property
  def context_length(self) -> int:
    return self.heads.context_length

  @property
  def _window(self) -> int:
    """W: those that no module is sure of, and what a round adds."""
    return 2 * self.gamma

  def bind(self, target: ModelFn, transform: LogitsTransform) -> "MTP":
    """The same drafter, with the target's transform unless it has its own.

    Raises:
      ValueError: the modules are for another target.
    """
    self.heads.check_target(target)
    return dataclasses.replace(
        self, transform=(self.transform or transform).under(transform))

  def init(self, params: Any, prompt: Prompt, prefill_output: ModelOutput
           ) -> Any:
    """The modules' caches after the prompt, and its last features."""
    own, heads = params["drafter"], self.heads
    batch, columns = prompt.tokens.shape
    chunks, causal = features.chunked(prompt, prefill_output)

    def read(cache, chunk):
      hidden, places = chunk
      entered = before = heads.enter(own, heads.taps_of(hidden))
      start = cache.lengths
      for module in range(self.gamma):
        tokens = prompt.tokens[
            :, jnp.minimum(places + module + 1, columns - 1)]
        before, _, cache = self._pass(
            params, module, entered, before, tokens, causal, cache)
      return cache.after(before).rollback(start + places.shape[0]), entered

    cache = heads.init_cache(
        own, batch, prompt.capacity + self._window, self.gamma)
    # That it is empty is not told to XLA, see `prefill.empty_cache`.
    cache, entered = jax.lax.scan(
        read, cache.rollback(jnp.minimum(prompt.lengths, 0)), chunks)
    entered = entered.swapaxes(0, 1).reshape(batch, columns, -1)
    held = jnp.minimum(prompt.lengths - 1, self.gamma)
    first = prompt.lengths - 1 - held
    at = jnp.minimum(
        first[:, None] + jnp.arange(self._window), columns - 1)
    return ModulesState(
        cache=cache.rollback(first), held=held,
        hidden=jnp.take_along_axis(entered, at[..., None], axis=1))

  def _pass(self, params, module, entered, before, tokens, causal, cache):
    """What a module feeds to the next, what its head reads, and the cache.

    Args:
      params: `{"target", "drafter"}`.
      module: counted from 0.
      entered: `[B, S, D]`, the target's features.
      before: `[B, S, D]`, what the module before returned.
      tokens: `[B, S]` int32, which this one reads.
      causal: `[B, S, S]` bool.
      cache: of all modules, with what was fed to those before.
    """
    out = self.heads.step(
        params["drafter"], params["target"],
        before if self.heads.chained else entered, tokens, visible=causal,
        cache=cache, module=module)
    return out.hidden, out.read, out.cache

  def propose(self, params: Any, coins: jax.Array, state: DecodeState
              ) -> tuple[Draft, Any]:
    """Drafts a chain for every row.

    Args:
      params: `{"target", "drafter": parameters of the modules}`.
      coins: `[B, num_coins]`, uniform in [0, 1).
      state: the `DecodeState`.

    Returns:
      `(Draft, ModulesState)`, batched.
    """
    heads, size, own = self.heads, self._window, state.drafter
    entered, held, cache = own.hidden, own.held, own.cache
    batch = held.shape[0]
    u = coins.reshape(batch, self.gamma, COINS_A_DRAW)
    causal = jnp.tile(jnp.tril(jnp.ones((size, size), bool)), (batch, 1, 1))
    # From the first position of the window on; the root is number `held`.
    order = jnp.arange(size + self.gamma, dtype=jnp.int32)
    text = jnp.take_along_axis(state.tokens, jnp.minimum(
        cache.lengths[:, None] + order, state.tokens.shape[1] - 1), axis=1)
    last = jnp.maximum(held - 1, 0)[:, None, None]
    constraints, memory = self.transform.constraints, state.constraints
    before, tokens, probs = entered, [], []
    for module in range(self.gamma):
      before, read, cache = self._pass(
          params, module, entered, before,
          text[:, module + 1:module + 1 + size], causal, cache)
      logits = heads.whole(heads.logits(
          params["drafter"], params["target"],
          jnp.take_along_axis(read, last, axis=1)))[:, 0]
      law = self.transform(
          constraints_lib.constrained(constraints, memory, logits,
                                      drafted=True), state.temperature)
      token = jax.vmap(inverse_cdf)(law, u[:, module])
      memory = constraints_lib.advanced(constraints, memory, token)
      text = jnp.where(order == held[:, None] + module + 1, token[:, None],
                       text)
      tokens.append(token)
      probs.append(law)
    sure = state.lengths - 1 - jnp.minimum(held, self.gamma - 1)
    draft = jax.vmap(Draft.chain)(
        common.roots(state), jnp.stack(tokens, 1), jnp.stack(probs, 1))
    return features.known_only(draft, held > 0), own.replace(
        cache=cache.after(before).rollback(sure))

  def commit(self, params: Any, drafter: ModulesState, draft: Draft,
             verdict: Verdict, target_output: ModelOutput, count: jax.Array
             ) -> ModulesState:
    """The features of what was accepted after those that are kept."""
    del draft
    own, heads, size = params["drafter"], self.heads, self._window
    new = heads.enter(own, features.on_path(
        heads.taps_of(target_output.hidden), verdict, self.num_nodes))
    kept = jnp.minimum(drafter.held, self.gamma - 1)[:, None]
    order = jnp.arange(size, dtype=jnp.int32)
    source = jnp.where(
        order < kept, drafter.held[:, None] - kept + order,
        size + jnp.minimum(order - kept, self.gamma))
    both = jnp.concatenate([drafter.hidden, new], axis=1)
    return drafter.replace(
        hidden=jnp.take_along_axis(both, source[..., None], axis=1),
        held=kept[:, 0] + count)

  def param_specs(self, axis: str, size: int) -> PartitionSpec:
    """Every device holds all modules, see `specjax.contract`."""
    del axis, size
    return PartitionSpec()
