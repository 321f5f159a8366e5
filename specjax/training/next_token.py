"""Language modelling, from data or from another model's laws."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from specjax.interfaces import Model
from specjax.training.objective import Batch
from specjax.training.objective import Loss
from specjax.training.objective import Params
from specjax.training.objective import weighted_mean
from specjax.training.objective import weights_of


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
  """-log softmax(logits)[label]: `[..., V]`, `[...]` -> `[...]` nats."""
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def kl_divergence(p_logits: jax.Array, logits: jax.Array) -> jax.Array:
  """KL(p || softmax(logits)): `[..., V]`, `[..., V]` -> `[...]` nats."""
  log_p = jax.nn.log_softmax(p_logits)
  return jnp.sum(jnp.exp(log_p) * (log_p - jax.nn.log_softmax(logits)), axis=-1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NextToken:
  """-mean_t log p(x_{t+1} | x_1..x_t): the target is trained on the data.

  Attributes:
    model: the `Model`, called without a cache.
  """

  model: Model

  needs = ("target",)

  def __call__(self, trainable: Params, frozen: Params, batch: Batch,
               key: jax.Array) -> Loss:
    """The loss of `{"target"}` on `tokens [B, S + 1]`; no metrics."""
    del key
    params = {**frozen, **trainable}
    tokens = batch["tokens"]
    logits = self.model(params["target"], tokens[:, :-1]).logits
    nats = cross_entropy(logits, tokens[:, 1:])
    return weighted_mean(nats, weights_of(batch)), {}
