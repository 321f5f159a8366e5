"""Kangaroo: a layer after an early exit learns the target's law."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.methods.self_speculation.kangaroo_network import AdaptedExit
from specjax.methods.self_speculation.kangaroo_network import KangarooAdapter
from specjax.models.sublayers import Sublayers
from specjax.models.transformer import Transformer
from specjax.training.objective import Batch
from specjax.training.objective import Loss
from specjax.training.objective import Params
from specjax.training.objective import Score
from specjax.training.objective import weighted_mean
from specjax.training.objective import weights_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kangaroo:
  """-mean_t sum_v p_t(v) log q_t(v), p the target's law and q the adapter's.

  Liu et al. 2024 (arXiv:2404.18911, section 3.2). The target runs once: the
  adapter reads the stream on its way.

  Attributes:
    model: the target.
    adapter: of it.
  """

  model: Transformer
  adapter: KangarooAdapter

  needs = ("target", "drafter")

  def __post_init__(self):
    # Refused before anything is trained.
    type(self.adapter).for_target(
        self.model, self.adapter.forecasts, exit=self.adapter.exit)

  def __call__(self, trainable: Params, frozen: Params, batch: Batch,
               key: jax.Array) -> Loss:
    """The loss of `{"drafter"}`, and `acceptance`, sum_v min(p, q)."""
    del key
    params = {**frozen, **trainable}
    p_logits, q_logits = self._logits(params, batch["tokens"][:, :-1])
    p = jax.nn.softmax(jax.lax.stop_gradient(p_logits))
    log_q = jax.nn.log_softmax(q_logits)
    accepted = jnp.sum(jnp.minimum(p, jnp.exp(log_q)), axis=-1)
    weights = weights_of(batch)
    return -weighted_mean(jnp.sum(p * log_q, axis=-1), weights), {
        "acceptance": weighted_mean(jax.lax.stop_gradient(accepted), weights)}

  def _logits(self, params, tokens):
    """`[B, S, V]` of the target, and of the adapter."""
    target, at = jax.lax.stop_gradient(params["target"]), self.adapter.exit
    exit = self.model.run(target, Sublayers.between(0, at), tokens)
    rest = self.model.run(
        target, Sublayers.between(at, self.model.config.layers),
        hidden=exit.hidden)
    adapted = AdaptedExit(target=self.model, adapter=self.adapter)
    return rest.logits, adapted.after(
        {**params, "target": target}, exit).logits

  def score(self, params: Params, tokens: jax.Array, key: jax.Array,
            score: Score) -> Any:
    """`score(k, logits, positions)` for k = 1..K, stacked.

    Forecast k is the law after the row's own k - 1 tokens in between, as if
    they had been drafted and accepted.
    """
    del key
    logits = self._logits(params, tokens[:, :-1])[1]
    count, size = self.adapter.forecasts, logits.shape[1]
    if size <= count:
      raise ValueError(f"a row predicts {size} tokens and there are {count} "
                       "forecasts; give longer rows or fewer forecasts")
    positions = jnp.broadcast_to(
        jnp.arange(size - count), (logits.shape[0], size - count))
    found = [score(k, logits[:, k:size - count + k], positions)
             for k in range(1, count + 1)]
    return jax.tree.map(lambda *x: jnp.stack(x), *found)
