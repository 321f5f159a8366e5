"""Medusa: heads on the target's last hidden state (arXiv:2401.10774)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.methods.heads import _objectives as heads_lib
from specjax.methods.heads.medusa_network import MedusaHeads
from specjax.methods.networks import check_fits
from specjax.methods.networks import lm_head
from specjax.models.transformer import Transformer
from specjax.training.next_token import cross_entropy
from specjax.training.next_token import kl_divergence
from specjax.training.objective import Batch
from specjax.training.objective import Loss
from specjax.training.objective import Params
from specjax.training.objective import Score
from specjax.training.objective import weighted_mean
from specjax.training.objective import weights_of

_RAMPS = {
    "sine": lambda progress: jnp.sin(jnp.pi / 2 * progress),
    "linear": lambda progress: progress,
    "constant": jnp.ones_like,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Medusa:
  """Medusa-1: L1 = -sum_k decay^k mean_t log p^(k)(x_{t+1+k}) (equation 1).

  Attributes:
    model: the target.
    heads: of the target.
    decay: 0.8 in the paper.
  """

  model: Transformer
  heads: MedusaHeads
  decay: float = 0.8

  needs = ("target", "drafter")

  def __post_init__(self):
    check_fits(self.heads, self.model)

  def __call__(self, trainable: Params, frozen: Params, batch: Batch,
               key: jax.Array) -> Loss:
    """The loss, and each head's own as `head_<k>/train_loss`."""
    del key
    params = {**frozen, **trainable}
    tokens = batch["tokens"]
    hidden = self.model(params["target"], tokens[:, :-1]).hidden
    return self.loss(params, hidden, tokens, weights_of(batch),
                     "target" in trainable)

  def loss(self, params: Params, hidden: jax.Array, tokens: jax.Array,
           weights: jax.Array, tuned: bool) -> Loss:
    """`(L1, metrics)` on `hidden [B, S, D]`; the LM head gets no gradient.

    Args:
      params: `{"target", "drafter"}`.
      hidden: the target's.
      tokens: `[B, S + 1]`.
      weights: `[B, S]`, of the tokens after the first.
      tuned: whether the gradient reaches `hidden`.
    """
    losses = heads_lib.head_losses(
        self.heads, params["drafter"], hidden, tokens, weights,
        lm_head(params["target"]), tuned)
    numbers = jnp.arange(1, len(losses) + 1)
    return jnp.sum(self.decay**numbers * losses), heads_lib.by_head(losses)

  def score(self, params: Params, tokens: jax.Array, key: jax.Array,
            score: Score) -> Any:
    """`score(k, logits, positions)` of every head, stacked along K."""
    del key
    hidden = self.model(params["target"], tokens[:, :-1]).hidden
    return heads_lib.score_heads(
        self.heads, params["drafter"], hidden, lm_head(params["target"]), score)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaJoint:
  """Medusa-2: L_LM + lambda_0 L1, the target trained with its heads.

  Section 2.2.2 of the paper. lambda_0 rises over the run as the published
  code has it: sin(pi/2 progress) or progress times its peak, or constant.

  Attributes:
    medusa: L1.
    weight: peak of lambda_0; 0.2 in the paper.
    ramp: "sine", "linear" or "constant".
    distill: L_LM is KL(p_teacher || p), with the target before training as
      `frozen["teacher"]`, and not the cross-entropy of the data: for data
      that the target sampled itself (section 2.3.2).
  """

  medusa: Medusa
  weight: float = 0.2
  ramp: str = "sine"
  distill: bool = False

  def __post_init__(self):
    if self.ramp not in _RAMPS:
      raise ValueError(f"ramp is {self.ramp!r}; it must be one of "
                       f"{', '.join(_RAMPS)}")

  @property
  def model(self) -> Transformer:
    """The target."""
    return self.medusa.model

  @property
  def needs(self) -> tuple[str, ...]:
    """Names of the parameters that are read."""
    return (*self.medusa.needs, *(("teacher",) if self.distill else ()))

  def heads_weight(self, progress: jax.Array) -> jax.Array:
    """lambda_0 `[]` where the share `progress []` of the run is over."""
    return self.weight * _RAMPS[self.ramp](jnp.asarray(progress, jnp.float32))

  def __call__(self, trainable: Params, frozen: Params, batch: Batch,
               key: jax.Array) -> Loss:
    """The loss, `lm_loss`, `heads_weight` and each head's loss."""
    del key
    params = {**frozen, **trainable}
    tokens, weights = batch["tokens"], weights_of(batch)
    output = self.model(params["target"], tokens[:, :-1])
    if self.distill:
      teacher = self.model(
          jax.lax.stop_gradient(params["teacher"]), tokens[:, :-1])
      nats = kl_divergence(teacher.logits, output.logits)
    else:
      nats = cross_entropy(output.logits, tokens[:, 1:])
    lm_loss = weighted_mean(nats, weights)
    loss, metrics = self.medusa.loss(
        params, output.hidden, tokens, weights, "target" in trainable)
    weight = self.heads_weight(batch["progress"])
    return lm_loss + weight * loss, {
        "lm_loss": lm_loss, "heads_weight": weight, **metrics}

  def score(self, params: Params, tokens: jax.Array, key: jax.Array,
            score: Score) -> Any:
    """`score(k, logits, positions)` of every head, stacked along K."""
    return self.medusa.score(params, tokens, key, score)
