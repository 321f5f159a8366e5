"""Distillation from probabilities that were stored with the text."""

import dataclasses

import chex
import jax
import jax.numpy as jnp

from specjax.interfaces import Model
from specjax.training.objective import Batch
from specjax.training.objective import Loss
from specjax.training.objective import Params
from specjax.training.objective import weighted_mean


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredLaws:
  """Forward KL divergence from stored probabilities of a teacher.

  DistillSpec (Zhou et al. 2023, arXiv:2310.08461): the student's distribution q
  approximates the teacher's distribution p on text of the teacher. The K
  largest probabilities of p are stored. The sampled token of the text
  represents the others:

    -sum_(v in top) p(v) log q(v) - [drawn token not in top] log q(drawn)

  Its mean over samples is the cross-entropy, which is KL(p || q) plus a
  constant. Tokens that the student does not have are left out.

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
    """Returns the mean loss in nats per position; the student is "drafter".

    Args:
      trainable: trees of parameters that get a gradient, by name.
      frozen: trees of other parameters, by name.
      batch: arrays by name. `tokens [B, S]` int32 are read by the student.
        After token s, the teacher's distribution has `probs [B, S, K]` on the
        student's `ids [B, S, K]`, -1 for tokens that the student does not have.
        `drawn [B, S]` is the sampled token if it is not among the K, else -1.
        `weights [B, S]` is 1, or 0 for positions without a distribution.
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
    mean = lambda x: weighted_mean(x, batch["weights"])
    return mean(nats), {"acceptance": mean(accepted)}
