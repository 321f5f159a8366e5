"""A small language model drafts a chain, token by token.

Leviathan et al. 2022 (arXiv:2211.17192); Chen et al. 2023 (arXiv:2302.01318).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax import contract
from specjax import topology
from specjax.drafters import common
from specjax.prefill import read_prompt
from specjax.sampling import COINS_A_DRAW
from specjax.sampling import inverse_cdf
from specjax.sampling import LogitsTransform
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelFn
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.types import Verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModel:
  """Samples gamma tokens from a model with a cache of its own.

  The cache is rolled back to the committed tokens at the start of a round.
  Its first step feeds the last *two* of them: after a fully accepted block
  the last drafted token was never fed, and after any other outcome feeding it
  again changes nothing, so catching up needs no branch.

  Attributes:
    model: a `ModelFn` over the target's vocabulary.
    gamma: drafted tokens of a round, at least 0.
    transform: of the model's logits; None takes the decoder's. Any is sound,
      for q is reported as it was sampled from.
  """

  model: ModelFn
  gamma: int
  transform: LogitsTransform | None = None

  chain = True
  iid = True
  conditional = True
  autoregressive = True
  proposal = "iid"

  def __post_init__(self):
    if self.gamma < 0 or self.gamma != int(self.gamma):
      raise ValueError(f"gamma is {self.gamma}; it must be a whole number of "
                       "at least 0: 0 drafts nothing")

  @property
  def num_nodes(self) -> int:
    return self.gamma + 1

  @property
  def num_coins(self) -> int:
    return COINS_A_DRAW * self.gamma

  @property
  def context_length(self) -> int:
    return self.model.context_length

  def bind(self, target: ModelFn, transform: LogitsTransform
           ) -> "LanguageModel":
    """The same drafter, for this target and its transform.

    Raises:
      ValueError: the vocabularies differ.
    """
    common.check_vocabulary(self.model, target)
    return dataclasses.replace(self, transform=self.transform or transform)

  def init(self, params: Any, prompt: Prompt, prefill_output: ModelOutput
           ) -> Any:
    """The cache after the prompt."""
    del prefill_output
    return read_prompt(self.model, params["drafter"], prompt).cache

  def propose(self, params: Any, coins: jax.Array, state: DecodeState
              ) -> tuple[Draft, Any]:
    """Drafts a chain for every row.

    Args:
      params: `{"drafter": parameters of the model}`.
      coins: `[B, num_coins]`, uniform in [0, 1).
      state: the `DecodeState`.

    Returns:
      `(Draft, cache)`, batched.
    """
    if self.gamma == 0:
      return common.root_only(state, self.model.vocab_size), state.drafter
    params = params["drafter"]
    batch = state.lengths.shape[0]

    logits, cache = common.feed_last(
        self.model, params, state, state.drafter, size=2)
    depth = jnp.zeros((batch, 1), jnp.int32)
    self_only = jnp.ones((batch, 1, 1), bool)
    u = coins.reshape(batch, self.gamma, COINS_A_DRAW).swapaxes(0, 1)

    def draw(tokens, probs, logits, node, u):
      put = functools.partial(
          jax.lax.dynamic_update_index_in_dim, index=node, axis=1)
      law = self.transform(logits, state.temperature)
      token = jax.vmap(inverse_cdf)(law, u)
      return token, put(tokens, token), put(probs, law)

    def extend(carry, step):
      cache, logits, *drawn = carry
      token, *drawn = draw(*drawn, logits, *step)
      out = self.model(params, token[:, None], depth, self_only, cache)
      cache = out.cache.rollback(cache.lengths + 1)
      return (cache, out.logits[:, 0], *drawn), None

    tokens = jnp.pad(common.roots(state)[:, None], ((0, 0), (0, self.gamma)))
    probs = jnp.zeros((batch, self.num_nodes, self.model.vocab_size))
    (cache, logits, *drawn), _ = jax.lax.scan(
        extend, (cache, logits, tokens, probs),
        (jnp.arange(1, self.gamma), u[:-1]))
    _, tokens, probs = draw(*drawn, logits, self.gamma, u[-1])
    parents = jnp.tile(topology.chain(self.gamma), (batch, 1))
    return Draft(tokens=tokens, parents=parents, probs=probs), cache

  def commit(self, params: Any, drafter: Any, draft: Draft, verdict: Verdict,
             target_output: ModelOutput, count: jax.Array) -> Any:
    """Nothing: the next `propose` rolls the cache back by itself."""
    del params, draft, verdict, target_output, count
    return drafter

  def param_specs(self, axis: str, size: int) -> Any:
    """The model's, see `specjax.contract`."""
    return contract.param_specs(self.model, axis, size)
