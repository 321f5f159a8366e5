"""Scores of LiLiCorr between candidates of neighbouring slots.

LiLiCorr (arXiv:2608.20530). The *lattice* of a block contains the n most likely
tokens of each slot, its candidates. A small transformer attends to all of them
in both directions. From its output, each candidate gets a vector `out` and a
vector `in` of length 1. The logit of candidate y after candidate x is

  scale <out(x), in(y)>

The vector `out` of the anchor is computed from the fused features H of the
token before it, because the target has not read the anchor.
"""

from typing import Any

import jax
import jax.numpy as jnp

from specjax.methods.networks import Params
from specjax.methods.networks import project
from specjax.models import layers as layers_lib

_FEATURES = 5  # numbers that describe a candidate among those of its slot
_FEATURES_EPSILON = 1e-5  # of PyTorch's LayerNorm, whose value no file contains
UNIT_EPSILON = 1e-6  # smallest length by which a vector is divided


def init(key: jax.Array, heads: Any) -> dict[str, Any]:
  """Returns initial float32 parameters of the network.

  Args:
    key: PRNG key.
    heads: configuration `ParallelHeads`.
  """
  keys = iter(jax.random.split(key, 9 + 4 * heads.lattice_layers))
  width, size = heads.markov_width, heads.num_forecasts
  zeros = lambda *shape: jnp.zeros(shape, jnp.float32)

  def linear(inputs, outputs):
    kernel = jax.random.normal(next(keys), (inputs, outputs), jnp.float32)
    return {"kernel": inputs**-0.5 * kernel, "bias": zeros(outputs)}

  norm = lambda: layers_lib.Norm(heads).init(key, zeros(1, width))["params"]
  params = {
      "hidden": linear(heads.width, width),
      "features_norm": {"scale": jnp.ones((_FEATURES,), jnp.float32),
                        "bias": zeros(_FEATURES)},
      "features_up": linear(_FEATURES, width),
      "features_down": linear(width, width),
      "slot": zeros(size, width), "rank": zeros(heads.candidates, width),
      "distance": zeros(heads.lattice_heads, 2 * size + 1),
      "same": zeros(heads.lattice_heads),
      "context": linear(heads.width, width),
      "output_norm": norm(), "anchor_norm": norm(),
      "factors": linear(3 * width, width),
      "out": linear(width, heads.markov_rank),
      "in": linear(width, heads.markov_rank),
      "anchor_out": linear(width, heads.markov_rank)}
  if heads.width != width:
    params["token"] = linear(heads.width, width)
  for i in range(heads.lattice_layers):
    params[f"layer_{i}"] = {
        "norm": norm(), "qkv": linear(width, 3 * width),
        "out": linear(width, width), "mlp_norm": norm(),
        "up": linear(width, heads.lattice_mlp_width),
        "down": linear(heads.lattice_mlp_width, width)}
  return params


def transitions(heads: Any, params: Params, target_params: Params,
                hidden: jax.Array, candidates: jax.Array, log_probs: jax.Array,
                anchors: jax.Array, last: jax.Array
                ) -> tuple[jax.Array, jax.Array]:
  """Returns the logits between neighbouring candidates.

  Args:
    heads: configuration of the network.
    params: parameters of this network.
    target_params: parameters of the target.
    hidden: hidden states `[..., K, D]` of the slots that predict tokens.
    candidates: candidates `[..., K, n]` int32 of each slot, the most likely
      first, as indices of the draft vocabulary.
    log_probs: log-probabilities `[..., K, n]` of the candidates.
    anchors: token before each block, `[...]` int32.
    last: fused features `[..., D]` of the token before the anchor, 0 if there
      is none.

  Returns:
    `(before, logits)`: `before [..., K, n]` are the tokens that may precede
    each slot, -1 for no token, and `logits [..., K, n, n]` are the logits of
    the slot's candidates after each of them.
  """
  size, count = candidates.shape[-2:]
  tokens = candidates
  if heads.ids:
    tokens = jnp.asarray(heads.ids, candidates.dtype)[candidates]
  embedded = heads.embedded(target_params, tokens)
  if "token" in params:
    embedded = _linear(params["token"], embedded)
  x = (embedded + _linear(params["hidden"], hidden)[..., None, :]
       + _features(params, log_probs)
       + params["slot"][:size, None] + params["rank"])
  x = x.reshape(*x.shape[:-3], size * count, -1)
  bias = _bias(params, size, count)
  for i in range(heads.lattice_layers):
    own = params[f"layer_{i}"]
    x = x + _attend(heads, own, _norm(heads, own["norm"], x), bias)
    inner = _norm(heads, own["mlp_norm"], x)
    x = x + _linear(own["down"], jax.nn.silu(_linear(own["up"], inner)))
  x = _norm(heads, params["output_norm"], x)
  x = x.reshape(*x.shape[:-2], size, count, -1)
  has_last = jnp.any(last != 0, axis=-1, keepdims=True)
  anchor = _norm(heads, params["anchor_norm"], jnp.where(
      has_last, _linear(params["context"], last), 0))
  around = jnp.broadcast_to(anchor[..., None, None, :], x.shape)
  factors = jax.nn.silu(_linear(
      params["factors"], jnp.concatenate([x, around, x * around], axis=-1)))
  leaves = _unit(_linear(params["out"], factors))
  enters = _unit(_linear(params["in"], factors))
  start = jnp.einsum("...r,...jr->...j", _unit(
      _linear(params["anchor_out"], anchor)), enters[..., 0, :, :])
  # The anchor is the only token before the first slot, in row 0.
  start = start[..., None, None, :] * (jnp.arange(count) == 0)[:, None]
  between = jnp.einsum(
      "...kir,...kjr->...kij", leaves[..., :-1, :, :], enters[..., 1:, :, :])
  before = jnp.concatenate([
      jnp.where(jnp.arange(count) == 0, anchors[..., None], -1)[..., None, :],
      tokens[..., :-1, :]], axis=-2)
  return before, heads.logit_scale * jnp.concatenate(
      [start, between], axis=-3).astype(log_probs.dtype)


def _features(params, log_probs):
  """Returns the encoded rank and probability of each candidate."""
  rank = jnp.arange(log_probs.shape[-1], dtype=log_probs.dtype)
  x = jnp.stack(jnp.broadcast_arrays(
      log_probs, jnp.exp(log_probs), log_probs - log_probs[..., :1],
      rank / max(1, len(rank) - 1), (rank == 0).astype(rank.dtype)), axis=-1)
  x = x - x.mean(-1, keepdims=True)
  x = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True)
                        + _FEATURES_EPSILON)
  norm = params["features_norm"]
  x = _linear(params["features_up"], x * norm["scale"] + norm["bias"])
  return _linear(params["features_down"], jax.nn.silu(x))


def _bias(params, size, count):
  """Returns the bias `[heads, K n, K n]` of attention between candidates."""
  slot = jnp.repeat(jnp.arange(size), count)
  distance = slot[:, None] - slot
  middle = params["distance"].shape[1] // 2
  return (params["distance"][:, distance + middle]
          + params["same"][:, None, None] * (distance == 0))


def _attend(heads, params, x, bias):
  count = heads.lattice_heads
  split = _linear(params["qkv"], x)
  query, key, value = jnp.moveaxis(split.reshape(
      *x.shape[:-1], 3, count, -1), -3, 0)
  scores = jnp.einsum(
      "...qhd,...khd->...hqk", query, key,
      preferred_element_type=jnp.promote_types(x.dtype, jnp.float32))
  weights = jax.nn.softmax(scores * query.shape[-1] ** -0.5 + bias)
  out = jnp.einsum("...hqk,...khd->...qhd", weights.astype(x.dtype), value)
  return _linear(params["out"], out.reshape(x.shape))


def _linear(params, x):
  kernel = params["kernel"]
  return (project(x.astype(kernel.dtype), kernel) + params["bias"]
          ).astype(kernel.dtype)


def _norm(heads, params, x):
  return layers_lib.Norm(heads).apply({"params": params}, x)


def _unit(x):
  squares = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
  return x * jax.lax.rsqrt(jnp.maximum(squares, UNIT_EPSILON**2))
