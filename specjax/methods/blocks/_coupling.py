"""Transitions, which condition each token of a block on the previous token.

A block-parallel network computes a hidden state h and logits u for all slots of
a block in one pass. From u alone, the tokens of the slots would be independent.
A *transition* computes the logits of a slot's token from h, u, the token x
before the slot, and its own state s after the previous slot. The tokens are
sampled from left to right. So the draft distribution q of a token is
conditional on the drafted tokens before it, and it is known exactly.

  plain     u + W1[x] W2                                    (DSpark)
  gated     u + (sigmoid([h; W1[x]] G + b) * W1[x]) W2
  rnn       u + tanh(o) W2, with g, c, o = split([s; W1[x]; h] J + b) and
            s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c)
  gru       u + silu([h; s'] J) W2, with s' = GRU(s, e(x))  (Domino)
  selector  u + (W1[x] * h P) W2                            (DFlash 2)
  lilicorr  see `_lattice`                                  (LiLiCorr)

x is the anchor, the last committed token, for the first slot. e is the target's
embedding, s is initially 0, and * is elementwise. W2 is initially 0, so that an
untrained transition returns u. The last two kinds are *lattices*: only the n
tokens with the largest u can be drafted in a slot.

DSpark (arXiv:2607.05147), Domino (arXiv:2605.29707), DFlash 2 (z-lab),
LiLiCorr (arXiv:2608.20530).
"""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from specjax.methods.blocks import _lattice
from specjax.methods.networks import Params
from specjax.methods.networks import project
from specjax.models.vocabulary_subset import placed

LATTICES = ("selector", "lilicorr")
KINDS = ("none", "plain", "gated", "rnn", "gru", *LATTICES)
EMBEDS = ("plain", "gated", "rnn", "selector")  # kinds with a table W1
_RECURRENT = ("rnn", "gru")


def init(key: jax.Array, heads: Any) -> dict[str, Any]:
  """Returns initial float32 parameters of a transition.

  Args:
    key: PRNG key.
    heads: `ParallelHeads` whose field `markov` is not "none".
  """
  kind, width, rank = heads.markov, heads.width, heads.markov_rank
  if kind == "lilicorr":
    return _lattice.init(key, heads)
  embedding, mixing = jax.random.split(key)
  normal = lambda key, *shape: shape[0] ** -0.5 * jax.random.normal(
      key, shape, jnp.float32)
  linear = lambda inputs, outputs: {
      "kernel": normal(mixing, inputs, outputs),
      "bias": jnp.zeros((outputs,), jnp.float32)}
  w2 = jnp.zeros((rank, heads.draft_size), jnp.float32)
  if kind == "gru":
    state = heads.markov_width
    entry, carry = jax.random.split(embedding)
    return {"entry": {"kernel": normal(entry, width, 3 * state)},
            "carry": {"kernel": normal(carry, state, 3 * state)},
            "joint": {"kernel": normal(mixing, width + state, rank)}, "w2": w2}
  params = {"w1": normal(embedding, rank, heads.vocab_size).T, "w2": w2}
  if kind == "gated":
    params["gate"] = linear(width + rank, rank)
  elif kind == "rnn":
    params["joint"] = linear(2 * rank + width, 3 * rank)
  elif kind == "selector":
    params["hidden"] = {"kernel": normal(mixing, width, rank)}
    params["w2"] = w2.T  # `step` reads n rows of it
  return params


def slots(heads: Any, params: Params, target_params: Params, hidden: jax.Array,
          logits: jax.Array, anchors: jax.Array, last: Any) -> dict[str, Any]:
  """Returns arrays `[..., K, ...]` that `step` reads, one entry per slot.

  Args:
    heads: configuration of the network.
    params: parameters of the transition, None for the kind "none".
    target_params: parameters of the target.
    hidden: hidden states `[..., K, D]` of the slots that predict tokens.
    logits: logits `[..., K, Vd]` of these slots.
    anchors: token before each block, `[...]` int32.
    last: fused features `[..., D]` of the token before the anchor, 0 if there
      is none. Only LiLiCorr reads them.
  """
  kind, read = heads.markov, {"hidden": hidden, "logits": logits}
  if kind == "gru":
    corrected = jnp.arange(logits.shape[-2]) >= heads.free_slots
    read["corrected"] = jnp.broadcast_to(corrected, logits.shape[:-1])
  if kind in LATTICES:
    read["logits"], read["candidates"] = jax.lax.top_k(logits, heads.candidates)
  if kind == "selector":
    read["context"] = project(hidden, params["hidden"]["kernel"])
  if kind == "lilicorr":
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    read["before"], read["logits"] = _lattice.transitions(
        heads, params, target_params, hidden, read["candidates"],
        read["logits"] - total, anchors, last)
  return read


def first_state(heads: Any, params: Params, shape: tuple[int, ...]) -> Any:
  """Returns the initial state `[*shape, ...]`, or () if there is no state."""
  if heads.markov not in _RECURRENT:
    return ()
  size = (params["w1"].shape[1] if heads.markov == "rnn"
          else heads.markov_width)
  return jnp.zeros((*shape, size), params["w2"].dtype)


def step(heads: Any, params: Params, target_params: Params, state: Any,
         slot: dict[str, Any], before: jax.Array) -> tuple[jax.Array, Any]:
  """Returns the logits of a slot's token, given the token before it.

  Args:
    heads: configuration of the network.
    params: parameters of the transition.
    target_params: parameters of the target.
    state: state `[..., r]` after the previous slot, or ().
    slot: entries `[..., ...]` of `slots`.
    before: token before the slot, `[...]` int32.

  Returns:
    Logits `[..., Vd]` in float32 or a wider dtype, and the state after this
    slot.
  """
  kind, hidden, logits = heads.markov, slot["hidden"], slot["logits"]
  chex.assert_equal_shape_prefix([hidden, before], before.ndim)
  if kind == "none":
    return logits, state
  if kind == "lilicorr":
    # The candidates of a slot differ, so at most one row is selected. After any
    # other token all candidates are equally likely.
    rows = slot["before"] == before[..., None]
    scores = jnp.sum(jnp.where(rows[..., None], logits, 0), axis=-2)
    return placed(scores, slot["candidates"], heads.draft_size), state
  if kind == "gru":
    x, state = _gru(heads, params, target_params, state, hidden, before)
    return jnp.where(slot["corrected"][..., None],
                     logits + project(x, params["w2"]), logits), state
  x = params["w1"][before]
  if kind == "selector":
    scores = logits + jnp.einsum(
        "...r,...nr->...n", x * slot["context"],
        params["w2"][slot["candidates"]], preferred_element_type=logits.dtype)
    return placed(scores, slot["candidates"], heads.draft_size), state
  if kind == "gated":
    x = jax.nn.sigmoid(_linear(params["gate"], hidden, x)) * x
  elif kind == "rnn":
    gate, new, x = jnp.split(_linear(params["joint"], state, x, hidden), 3, -1)
    gate = jax.nn.sigmoid(gate)
    state = gate * state + (1 - gate) * jnp.tanh(new)
    x = jnp.tanh(x)
  return logits + project(x, params["w2"]), state


def along(heads: Any, params: Params, target_params: Params,
          read: dict[str, Any], before: jax.Array) -> jax.Array:
  """Returns the logits `[..., K, Vd]` of blocks with known tokens.

  Args:
    heads: configuration of the network.
    params: parameters of the transition.
    target_params: parameters of the target.
    read: result of `slots`.
    before: token before each slot, `[..., K]` int32.
  """
  if heads.markov not in _RECURRENT:
    return step(heads, params, target_params, (), read, before)[0]

  def one(state, slot):
    logits, state = step(heads, params, target_params, state, *slot)
    return state, logits

  axis = before.ndim - 1
  slot = jax.tree.map(lambda x: jnp.moveaxis(x, axis, 0), (read, before))
  start = first_state(heads, params, before.shape[:-1])
  return jnp.moveaxis(jax.lax.scan(one, start, slot)[1], 0, -2)


def with_labels(heads: Any, read: dict[str, Any], logits: jax.Array,
                labels: jax.Array) -> dict[str, Any]:
  """Returns the slots with each label among the candidates of the selector.

  A label that is no candidate replaces the least likely candidate. Only the
  cross-entropy uses these slots, because decoding does not know the labels.

  Args:
    heads: configuration of the network, with `markov` "selector".
    read: result of `slots`.
    logits: logits `[..., K, Vd]` from which `read` was computed.
    labels: true tokens `[..., K]` int32. One that cannot be drafted is replaced
      by another token, because it has no cross-entropy.
  """
  if heads.ids:
    index = np.searchsorted(heads.ids, np.arange(heads.vocab_size))
    labels = jnp.asarray(np.minimum(index, len(heads.ids) - 1))[labels]
  missing = jnp.all(read["candidates"] != labels[..., None], axis=-1)
  is_last = jnp.arange(heads.candidates) == heads.candidates - 1
  replaced = missing[..., None] & is_last
  return {**read,
          "candidates": jnp.where(
              replaced, labels[..., None], read["candidates"]),
          "logits": jnp.where(
              replaced, jnp.take_along_axis(logits, labels[..., None], axis=-1),
              read["logits"])}


def _gru(heads, params, target_params, state, hidden, before):
  """Returns the input of W2 and the next state of a recurrent unit (GRU)."""
  dtype = params["w2"].dtype
  x = heads.embedded(target_params, before).astype(dtype)
  new, old = (jnp.split(project(part, params[name]["kernel"]), 3, axis=-1)
              for part, name in ((x, "entry"), (state, "carry")))
  reset, keep = (jax.nn.sigmoid(a + b) for a, b in zip(new[:2], old[:2]))
  state = (keep * state + (1 - keep) * jnp.tanh(new[2] + reset * old[2])
           ).astype(dtype)
  return jax.nn.silu(_linear(params["joint"], hidden, state)), state


def _linear(params, *parts):
  """Applies a linear layer to the concatenation of `parts`."""
  kernel = params["kernel"]
  x = jnp.concatenate([part.astype(kernel.dtype) for part in parts], axis=-1)
  return (project(x, kernel) + params.get("bias", 0)).astype(kernel.dtype)
