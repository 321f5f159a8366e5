"""Held-out bits per byte."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

_BATCH = 8


def bits_per_byte(model, tokens, num_bytes: int, length: int, stride: int):
  """A function that measures a model on held-out text.

  Windows of `length` tokens begin every `stride` tokens; every token but the
  first is predicted once, in the first window that holds it, so from at least
  `length - stride` tokens before it where the text has that many.

  Args:
    model: a `Transformer`.
    tokens: `[T]` the held-out tokens.
    num_bytes: bytes of the text that they encode.
    length: S, tokens predicted in a window.
    stride: from 1 to `length`.

  Returns:
    `params -> {"bits_per_byte": value}`.
  """
  if not 1 <= stride <= length:
    raise ValueError(f"stride is {stride}; it must lie in [1, {length}], the "
                     "length of a window")
  tokens = np.asarray(tokens, np.int32)
  count = len(tokens) - 1
  windows = 1 + -(-max(0, count - length) // stride)
  windows += -windows % _BATCH
  starts = np.arange(windows) * stride
  places = starts[:, None] + np.arange(length + 1)
  new = places[:, :-1] >= starts[:, None] + length - stride
  new[0] = True
  mask = new & (places[:, :-1] < count)
  padded = np.zeros(places.max() + 1, np.int32)
  padded[:len(tokens)] = tokens

  @jax.jit
  def nats(params, window, mask):
    logits = model(params, window[:, :-1]).logits
    loss = optax.softmax_cross_entropy_with_integer_labels(
        logits, window[:, 1:])
    return jnp.sum(loss * mask)

  def evaluate(params):
    total = sum(
        float(nats(params, padded[places[i:i + _BATCH]], mask[i:i + _BATCH]))
        for i in range(0, windows, _BATCH))
    return {"bits_per_byte": total / math.log(2) / num_bytes}

  return evaluate
