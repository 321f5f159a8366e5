"""Distillation from laws that were stored with the text."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.interfaces import Model
from specjax.training.objective import Batch
from specjax.training.objective import Loss
from specjax.training.objective import Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredLaws:
  """Forward KL to a teacher whose K likeliest tokens are known.

  DistillSpec (Zhou et al. 2023, arXiv:2310.08461): the student learns the laws
  p of the teacher on text that the teacher wrote. Of p the K largest
  probabilities are stored, and the token that was drawn stands for the others:

    -sum_(v in top) p(v) log q(v) - [drawn token not in top] log q(drawn)

  whose mean over draws is the whole cross-entropy, KL(p || q) and a constant.
  Tokens that the student does not have are left out.

  Attributes:
    model: the student, called without a cache.
  """

  model: Model

  needs = ("drafter",)

  def __call__(self, trainable: Params, frozen: Params, batch: Batch,
               key: jax.Array) -> Loss:
    """The loss of `{"drafter"}`, in nats a position, a mean.

    Args:
      trainable: see `Objective`.
      frozen: see `Objective`.
      batch: `tokens [B, S]` int32 that the student reads; after token s the
        teacher's law has `probs [B, S, K]` on the student's `ids [B, S, K]`,
        -1 where the student has no such token, and `drawn [B, S]` is the token
        that was drawn where it is none of the K, else -1. `weights [B, S]`, 0
        where nothing is to be learned.
      key: not used.

    Returns:
      `(loss, {"acceptance": sum_(v in top) min(p(v), q(v))})`, the latter a
      lower bound of the acceptance rate at temperature 1.
    """
    del key
    params = {**frozen, **trainable}
    log_q = jax.nn.log_softmax(
        self.model(params["drafter"], batch["tokens"]).logits)
    probs = jnp.where(batch["ids"] >= 0, batch["probs"], 0)
    log_top = jnp.take_along_axis(log_q, jnp.maximum(batch["ids"], 0), axis=-1)
    drawn = batch["drawn"]
    log_drawn = jnp.take_along_axis(
        log_q, jnp.maximum(drawn, 0)[..., None], axis=-1)[..., 0]
    nats = -jnp.sum(probs * log_top, axis=-1) - jnp.where(
        drawn >= 0, log_drawn, 0)
    accepted = jnp.sum(jnp.minimum(probs, jnp.exp(log_top)), axis=-1)
    weights = batch["weights"]
    total = jnp.maximum(jnp.sum(weights), 1)
    mean = lambda x: jnp.sum(weights * x) / total
    return mean(nats), {"acceptance": mean(accepted)}
