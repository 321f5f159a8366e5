"""Markov heads of DSpark, which condition each token on the previous token.

arXiv:2607.05147. A block-parallel network computes the logits of all slots of a
block in one pass. From these logits alone, the tokens of the slots would be
independent. A *Markov head* adds a bias of low rank r to the logits of slot k.
The bias is computed from the embedding W1[x_(k-1)] of the previous token, so
the draft distribution q_k is conditional on this token. The tokens are sampled
from left to right. Each token costs one product of r numbers with W2.

  plain   bias = W1[x] W2
  gated   bias = (sigmoid([h; W1[x]] G + b) * W1[x]) W2
  rnn     g, c, o = split([s; W1[x]; h] J + b), s' = sigmoid(g) s + (1 -
          sigmoid(g)) tanh(c), bias = tanh(o) W2, initially s = 0

x is the token before the slot, and h is the hidden state of the slot. s is the
state of the recurrent head after the previous slot. * is elementwise. For the
first slot, x is the block's anchor, the last committed token. W2 is initially
0, so all biases of an untrained head are 0.
"""

from typing import Any

import chex
import jax
import jax.numpy as jnp

from specjax.methods.networks import Params
from specjax.methods.networks import project

KINDS = ("none", "plain", "gated", "rnn")


def init(key: jax.Array, kind: str, vocab_size: int, width: int, rank: int,
         draft_size: int | None = None) -> dict[str, Any]:
  """Returns initial float32 parameters of a Markov head.

  With these parameters the bias is 0.

  Args:
    key: PRNG key.
    kind: type of the head, one of `KINDS` except "none".
    vocab_size: vocabulary size V.
    width: width D of the slots' hidden states.
    rank: rank r of the bias.
    draft_size: size of the draft vocabulary. None means V.
  """
  embedding, mixing = jax.random.split(key)
  normal = lambda key, *shape: shape[0] ** -0.5 * jax.random.normal(
      key, shape, jnp.float32)
  linear = lambda inputs, outputs: {
      "kernel": normal(mixing, inputs, outputs),
      "bias": jnp.zeros((outputs,), jnp.float32)}
  params = {"w1": normal(embedding, rank, vocab_size).T,
            "w2": jnp.zeros((rank, draft_size or vocab_size), jnp.float32)}
  if kind == "gated":
    params["gate"] = linear(width + rank, rank)
  elif kind == "rnn":
    params["joint"] = linear(2 * rank + width, 3 * rank)
  return params


def first_state(kind: str, params: Params, shape: tuple[int, ...]) -> Any:
  """Returns the initial state of a Markov head.

  The state is `[*shape, r]` for the kind "rnn", and () for other kinds.
  """
  if kind != "rnn":
    return ()
  return jnp.zeros((*shape, params["w1"].shape[1]), params["w1"].dtype)


def step(kind: str, params: Params, state: Any, hidden: jax.Array,
         before: jax.Array) -> tuple[jax.Array, Any]:
  """Returns the bias of a slot, given the token before it.

  Args:
    kind: type of the head, one of `KINDS` except "none".
    params: parameters, see `init`.
    state: state of the head after the previous slot, `[..., r]` or ().
    hidden: hidden state `[..., D]` of the slot.
    before: token before the slot, `[...]` int32.

  Returns:
    Bias `[..., V]` in float32 or a wider dtype, and the state of the head after
    this slot.
  """
  chex.assert_equal_shape_prefix([hidden, before], before.ndim)
  x = params["w1"][before]
  if kind == "gated":
    x = jax.nn.sigmoid(_linear(params["gate"], hidden, x)) * x
  elif kind == "rnn":
    gate, new, x = jnp.split(_linear(params["joint"], state, x, hidden), 3, -1)
    gate = jax.nn.sigmoid(gate)
    state = gate * state + (1 - gate) * jnp.tanh(new)
    x = jnp.tanh(x)
  return project(x, params["w2"]), state


def along(kind: str, params: Params, hidden: jax.Array, before: jax.Array
          ) -> jax.Array:
  """Returns the biases of the K slots of blocks with known tokens.

  Args:
    kind: type of the head, one of `KINDS` except "none".
    params: parameters, see `init`.
    hidden: hidden states `[..., K, D]`.
    before: token before each slot, `[..., K]` int32.

  Returns:
    Biases `[..., K, V]`.
  """
  chex.assert_equal_shape_prefix([hidden, before], before.ndim)
  if kind != "rnn":
    return step(kind, params, (), hidden, before)[0]

  def one(state, slot):
    bias, state = step(kind, params, state, *slot)
    return state, bias

  slots = jnp.moveaxis(hidden, -2, 0), jnp.moveaxis(before, -1, 0)
  start = first_state(kind, params, before.shape[:-1])
  return jnp.moveaxis(jax.lax.scan(one, start, slots)[1], 0, -2)


def _linear(params, *parts):
  """Applies a linear layer to the concatenation of `parts`."""
  kernel = params["kernel"]
  x = jnp.concatenate([part.astype(kernel.dtype) for part in parts], axis=-1)
  return (project(x, kernel) + params["bias"]).astype(kernel.dtype)
