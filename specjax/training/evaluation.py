"""Held-out bits per byte."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

_BATCH = 8


def bits_per_byte(model, tokens, num_bytes: int, length: int):
  """A function that measures a model on held-out text.

  The text is cut into windows of `length` tokens that do not overlap; every
  token but the first is predicted once, from the tokens before it in its
  window.

  Args:
    model: a `Transformer`.
    tokens: `[T]` the held-out tokens.
    num_bytes: bytes of the text that they encode.
    length: S, tokens predicted in a window.

  Returns:
    `params -> {"bits_per_byte": value}`.
  """
  tokens = np.asarray(tokens, np.int32)
  count = len(tokens) - 1
  windows = -(-count // length)
  padded = np.zeros(windows * length + 1, np.int32)
  padded[:len(tokens)] = tokens
  starts = np.arange(windows) * length
  real = (starts[:, None] + np.arange(length)) < count

  @functools.partial(jax.jit, static_argnums=())
  def nats(params, window, mask):
    logits = model(params, window[:, :-1]).logits
    loss = optax.softmax_cross_entropy_with_integer_labels(
        logits, window[:, 1:])
    return jnp.sum(loss * mask)

  def evaluate(params):
    total = 0.0
    for first in range(0, windows, _BATCH):
      rows = starts[first:first + _BATCH]
      rows = np.pad(rows, (0, _BATCH - len(rows)))
      mask = np.zeros((_BATCH, length), np.float32)
      mask[:len(real[first:first + _BATCH])] = real[first:first + _BATCH]
      window = padded[rows[:, None] + np.arange(length + 1)]
      total += float(nats(params, window, mask))
    return {"bits_per_byte": total / math.log(2) / num_bytes}

  return evaluate
