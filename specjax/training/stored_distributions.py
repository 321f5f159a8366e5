"""Distillation from stored probabilities of a teacher."""

import dataclasses

import chex
import jax
import jax.numpy as jnp

from specjax.interfaces import Model
from specjax.training.objective import Batch
from specjax.training.objective import Loss
from specjax.training.objective import Params
from specjax.training.objective import weights_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredLaws:
  """Loss: forward KL divergence from stored probabilities of a teacher.

  The method is DistillSpec (Zhou et al. 2023, arXiv:2310.08461). The student's
  distribution q approximates the teacher's distribution p on text of the
  teacher. Only the K largest probabilities of p ("top") are stored. For all
  other tokens, the loss uses the sampled token of the text ("drawn"):

    -sum_(v in top) p(v) log q(v) - [drawn not in top] log q(drawn)

  The expectation of the loss is the cross-entropy, KL(p || q) plus a constant.
  Tokens that are not in the student's vocabulary are left out.

  >>> from specjax import testing
  >>> objective = StoredLaws(model=testing.MarkovModel(4))
  >>> loss, metrics = objective({"drafter": jnp.zeros((4, 4))}, {}, {
  ...     "tokens": jnp.array([[0]]), "ids": jnp.array([[[1]]]),
  ...     "probs": jnp.array([[[1.0]]]), "drawn": jnp.array([[-1]]),
  ...     "weights": jnp.ones((1, 1))}, jax.random.key(0))
  >>> round(float(loss), 4), float(metrics["acceptance"])  # log 4, 1 / 4
  (1.3863, 0.25)

  Attributes:
    model: the student, called without a cache.
  """

  model: Model

  needs = ("drafter",)

  def __call__(self, trainable: Params, frozen: Params, batch: Batch,
               key: jax.Array) -> Loss:
    """Returns the mean loss in nats per position, and metrics.

    The name of the student's parameters is "drafter".

    Args:
      trainable: trees of parameters to differentiate, by name.
      frozen: trees of other parameters, by name.
      batch: arrays by name. The student reads `tokens [B, S]` int32.
        `probs [B, S, K]` are the teacher's stored probabilities after each
        token, and `ids [B, S, K]` the tokens with these probabilities. An id is
        -1 if the token is not in the student's vocabulary. `drawn [B, S]` is
        the sampled token if it is not among the K tokens, and -1 if it is.
        `weights [B, S]` are 1, or 0 for positions without a distribution.
      key: PRNG key, not used.

    Returns:
      `(loss, {"acceptance": sum_(v in top) min(p(v), q(v))})`. The metric is a
      lower bound of the acceptance rate at temperature 1.
    """
    del key
    chex.assert_rank([batch["tokens"], batch["ids"]], [2, 3])
    chex.assert_equal_shape([batch["ids"], batch["probs"]])
    chex.assert_equal_shape([batch["tokens"], batch["drawn"], batch["weights"]])
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
    mean = weights_of(batch).mean
    return mean(nats), {"acceptance": mean(accepted)}
