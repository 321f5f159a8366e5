"""Language modelling: prediction of the next token of a text."""

import dataclasses

import chex
import jax
import optax

from specjax.interfaces import Model
from specjax.training.objective import Batch
from specjax.training.objective import check_batch
from specjax.training.objective import Loss
from specjax.training.objective import Params
from specjax.training.objective import weights_of


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
  """Returns the cross-entropy -log softmax(logits)[label] in nats.

  >>> import jax.numpy as jnp
  >>> float(cross_entropy(jnp.zeros((1, 1)), jnp.array([0]))[0])
  0.0

  Args:
    logits: `[..., V]` logits.
    labels: `[...]` token ids.

  Returns:
    `[...]` cross-entropy of each label.
  """
  chex.assert_equal_shape_prefix([logits, labels], labels.ndim)
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NextToken:
  """Loss -log p(x_{t+1} | x_1..x_t) of a model on text, averaged over tokens.

  >>> import jax.numpy as jnp
  >>> from specjax import testing
  >>> objective = NextToken(model=testing.MarkovModel(4))
  >>> loss, metrics = objective(
  ...     {"target": jnp.zeros((4, 4))}, {},
  ...     {"tokens": jnp.array([[0, 1, 2]])}, jax.random.key(0))
  >>> round(float(loss), 4)  # log 4
  1.3863

  Attributes:
    model: the model, called without a cache.
  """

  model: Model

  needs = ("target",)

  def __call__(self, trainable: Params, frozen: Params, batch: Batch,
               key: jax.Array) -> Loss:
    """Returns the loss for `tokens [B, S + 1]`, and an empty dict of metrics.

    The name of the model's parameters is "target".
    """
    del key
    check_batch(batch)
    params = {**frozen, **trainable}
    tokens = batch["tokens"]
    logits = self.model(params["target"], tokens[:, :-1]).logits
    nats = cross_entropy(logits, tokens[:, 1:])
    return weights_of(batch).mean(nats), {}
