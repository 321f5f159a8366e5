"""Losses: pure functions of (parameters, batch)."""

import jax.numpy as jnp
import optax


def next_token_loss(model):
  """Mean cross-entropy of the next token, in nats.

  Args:
    model: a `Transformer`.

  Returns:
    `loss(params, batch) -> []` for `batch [B, S + 1]` int32.
  """
  def loss(params, batch):
    logits = model(params, batch[:, :-1]).logits
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(
        logits, batch[:, 1:]))

  return loss
