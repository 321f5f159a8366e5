"""Decoder in Flax Linen for many published architectures.

Differences between the architectures of `models.architectures` are fields of
`TransformerConfig`. The default values are those of Llama.
The module has no state: the cache is an argument and a result of every pass.
"""

from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import chex
from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from specjax.caches.dense import BlockCache
from specjax.caches.dense import KVCache
from specjax.caches.recurrent import RecurrentCache
from specjax.interfaces import Cache
from specjax.interfaces import Model
from specjax.models import layers
from specjax.models.configuration import FINAL
from specjax.models.configuration import TransformerConfig
from specjax.models.layers import empty_states
from specjax.models.sublayers import Sublayers
from specjax.trees import topology
from specjax.types import ModelOutput
from specjax.utils.fields import check_divisible

# For each matrix, one entry per axis: True if a mesh splits the axis.
_SPLITS = {
    "embedding": (True, False), "head": (False, True),
    "qkv": (False, True, False, False),
    "qkv of few heads": (True, False, False, False), "out": (True, False),
    "gate_up": (False, False, True), "up": (False, True),
    "down": (True, False), "layer_embedding": (True, False),
    "expert_gate_up_bias": (True, False),
    "expert_gate_up": (True, False, False), "expert_down": (True, False, False),
}
# Small parameters, which every device stores completely.
_REPLICATED = ("scale", "bias", "positions", "lookahead", "adapter_in",
               "adapter_out", "router", "choice_bias", "shared_gate",
               "factor", "sinks", "router_bias", "expert_down_bias")


class TransformerModule(nn.Module):
  """Linen module that implements `Transformer`."""

  config: TransformerConfig
  sublayers: Sublayers | None = None  # None means all sublayers

  @nn.compact
  def __call__(self, tokens, depths=None, ancestors=None, cache=None, x=None,
               keep=None):
    c, part = self.config, self.sublayers
    rows, size = (tokens if x is None else x).shape[:2]
    if depths is None:
      depths, _ = topology.causal(rows, size)
    if ancestors is None:
      _, ancestors = topology.causal(rows, size)
    positions = depths if cache is None else cache.lengths[:, None] + depths
    table = layers.parameter(
        self, "embedding", nn.initializers.normal(0.02),
        (c.vocab_size, c.width))

    adapted = None  # rows given as hidden states are those of plain tokens
    if c.lookahead_rank and tokens is not None:
      adapted = layers.Adapted(tokens >= c.vocab_size, c.lookahead_rank)
    x = self._embedded(table, tokens, positions) if x is None else x
    inputs = self._layer_inputs(x, tokens) if c.layer_inputs else None
    shared = cache is None and c.shared_layers
    if shared:  # the last layers read the keys of others from a cache
      cache = BlockCache(jnp.zeros((rows,), jnp.int32))
    tables = layers.RotaryTables.of(c, positions, x.dtype)
    fused = self._is_fused(x, cache, keep)
    # A product of a single row is slow on a GPU, so the row is duplicated.
    single = fused and rows * size == 1
    if fused:
      x = layers.Pending(jnp.concatenate([x, x], axis=1) if single else x)
    states = {0: x}
    for i in range(c.layers) if part is None else part.layers:
      x, cache = layers.decoder_layer(
          c, i, x, tables, ancestors, cache, sublayers=part,
          keep=None if keep is None else keep[i], adapted=adapted,
          inputs=None if inputs is None else inputs[:, :, i])
      states[i + 1] = x
    norm = layers.Norm(c, name="final_norm")
    if fused:
      last, x = norm(x._replace(rows=1 if single else None))
      states = {name: y.total()[:, :size] for name, y in states.items()}
    else:
      last, x = x, norm(x)
    states |= {c.layers: last, FINAL: x}
    if shared:
      cache = None
    if cache is not None:
      cache = cache.after(x)

    head = (table.T if c.tie_embeddings else
            layers.parameter(self, "head", nn.initializers.normal(0.02),
                             (c.width, c.vocab_size)))
    hidden = last if part else jnp.concatenate(
        [states[name] for name in c.features or (FINAL,)], axis=-1)
    return ModelOutput(
        logits=layers.logits(x, head, c), hidden=hidden, cache=cache)

  def _is_fused(self, x: jax.Array, cache: Cache | None,
                keep: jax.Array | None) -> bool:
    """Returns True if the layers have GPU kernels, see `Cache.is_fused`."""
    c, part = self.config, self.sublayers
    return (cache is not None and cache.is_fused(x) and keep is None
            and (part is None or part.attention == part.mlp) and c.pre_norm
            and not c.post_norm and not c.parallel_residual
            and c.residual_scale == 1
            and not c.lookahead_rank)

  def _layer_inputs(self, x: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the embeddings `[B, S, L, P]` of the tokens for every layer.

    They are the mean of a table and a projection of the stream `x [B, S, D]`,
    times the square root of 2.
    """
    c = self.config
    shape = c.layers, c.layer_inputs
    table = layers.parameter(
        self, "layer_embedding", nn.initializers.normal(0.02),
        (c.vocab_size, math.prod(shape)))
    own = table[jnp.minimum(tokens, c.vocab_size - 1)].reshape(
        *tokens.shape, *shape)
    more = layers.Norm(c, name="layer_projection_norm")(
        layers.Linear(shape, name="layer_projection")(x)
        * jnp.asarray(c.width**-0.5, x.dtype))
    scale = jnp.asarray(c.layer_inputs**0.5, x.dtype)
    return (more + own * scale) * jnp.asarray(2**-0.5, x.dtype)

  def _embedded(self, table: jax.Array, tokens: jax.Array, positions: jax.Array
                ) -> jax.Array:
    """Returns the residual stream `[B, S, D]` before the first layer."""
    c = self.config
    if c.lookahead:
      # Look-ahead tokens have a separate table. To add their rows to the large
      # table would copy that table.
      extra = layers.parameter(
          self, "lookahead", nn.initializers.normal(0.02),
          (c.lookahead, c.width))
      beyond = tokens - c.vocab_size
      x = jnp.where(beyond[..., None] >= 0, extra[jnp.maximum(beyond, 0)],
                    table[jnp.minimum(tokens, c.vocab_size - 1)])
    else:
      x = table[tokens]
    if c.embedding_scale != 1:
      x = x * jnp.asarray(c.embedding_scale, x.dtype)
    if c.learned_positions:
      x = x + layers.parameter(
          self, "positions", nn.initializers.normal(0.02),
          (c.context_length, c.width))[positions]
    return x


@dataclasses.dataclass(frozen=True)
class Transformer(Model):
  """Decoder as a `Model`.

  The object is hashable by value and does not store the parameters.

  Attributes:
    config: configuration of the decoder.
    cache: class of the cache, with a constructor like `KVCache.empty` and the
      methods of `specjax.interfaces.Cache`.
  """

  config: TransformerConfig
  cache: type[Cache] = KVCache

  def __post_init__(self):
    if self.config.recurrent and self.cache is not KVCache:
      raise ValueError(
          f"cache is {self.cache}, and the model has recurrent layers, whose "
          "state needs a RecurrentCache with a KVCache; leave out `cache`")
    if not self.config.has_uniform_keys and self.cache is not KVCache:
      raise ValueError(
          f"cache is {self.cache}, and the keys and values of the model's "
          "layers are shared or differ in shape, which needs a KVCache; leave "
          "out `cache`")

  @property
  def vocab_size(self) -> int:
    return self.config.vocab_size

  @property
  def context_length(self) -> int:
    return self.config.context_length

  @property
  def slack(self) -> float:
    return (RecurrentCache if self.config.recurrent else self.cache).slack

  def init(self, key: jax.Array) -> dict[str, Any]:
    """Returns random float32 parameters."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    return TransformerModule(self.config).init(key, tokens)["params"]

  def init_cache(self, params: chex.ArrayTree, batch: int, capacity: int,
                 layers: int | None = None) -> Cache:
    """Returns an empty cache in the dtype of the parameters.

    Args:
      params: parameters of the model.
      batch: number of rows.
      capacity: number of slots per row.
      layers: number of layers in the cache. None means all layers.
    """
    c, dtype = self.config, params["embedding"].dtype
    if not c.has_uniform_keys:
      parts = [KVCache.empty(
          layers=1, batch=batch, heads=heads, capacity=capacity,
          head_dim=head_dim, dtype=dtype) for heads, head_dim in map(
              c.key_shape, range(c.layers - c.shared_layers))]
      return parts[0].replace(k=tuple(x.k[0] for x in parts),
                              v=tuple(x.v[0] for x in parts))
    if layers is None:
      layers = sum(c.layer_kind(i) == "attention" for i in range(c.layers))
    heads, head_dim = c.key_shape(0)
    cache = self.cache.empty(
        layers=layers, batch=batch, heads=heads, capacity=capacity,
        head_dim=head_dim, dtype=dtype)
    if not c.recurrent:
      return cache
    return RecurrentCache.empty(cache, empty_states(c, batch, dtype))

  def __call__(self, params: chex.ArrayTree, tokens: jax.Array,
               depths: jax.Array | None = None,
               ancestors: jax.Array | None = None, cache: Cache | None = None
               ) -> ModelOutput:
    """Runs one pass, see `Model`.

    If `depths` and `ancestors` are None, the tokens are a chain. If `cache` is
    None, there are no earlier tokens.
    """
    return TransformerModule(self.config).apply(
        {"params": params}, tokens, depths, ancestors, cache)

  def run(self, params: chex.ArrayTree, sublayers: Sublayers,
          tokens: jax.Array | None = None, depths: jax.Array | None = None,
          ancestors: jax.Array | None = None, cache: Cache | None = None, *,
          hidden: jax.Array | None = None, keep: jax.Array | None = None
          ) -> ModelOutput:
    """Runs some sublayers and skips all others.

    Several partial passes can replace a complete pass: `hidden` and `cache` of
    the output are arguments of the next partial pass. Before the cache commits
    a block, every layer must have computed its keys and values of the block.

    Args:
      params: parameters of the full model.
      sublayers: sublayers to run, such as `Sublayers.between(a, b)` for
        attention and MLP of layers a to b - 1.
      tokens: `[B, S]` int32 token ids, or None with `hidden`.
      depths: depths of the tokens, see `Model`.
      ancestors: ancestor mask, see `Model`.
      cache: cache, see `Model`.
      hidden: `[B, S, D]` residual stream before any norm, instead of `tokens`.
      keep: `[L, 2]` or `[L, 2, B]` factors on the outputs of attention and MLP,
        or None. A factor of 0 removes a sublayer, but saves no time.

    Returns:
      Output of the pass. `hidden [B, S, D]` is the residual stream after the
      last sublayer. `logits` are computed from it by the final norm and the LM
      head.
    """
    return TransformerModule(self.config, sublayers).apply(
        {"params": params}, tokens, depths, ancestors, cache, hidden, keep)

  def logits_at(self, params: chex.ArrayTree, output: ModelOutput, at: jax.Array
                ) -> jax.Array:
    """Returns the logits `[B, K, V]` at positions `at [B, K]` of a pass.

    `output` is the output of the pass. If the program does not read
    `output.logits`, the logits of other positions are not computed.
    """
    if FINAL not in (self.config.features or (FINAL,)):
      return jnp.take_along_axis(output.logits, at[..., None], axis=1)
    hidden = jnp.take_along_axis(self.feature(output.hidden), at[..., None],
                                 axis=1)
    tied = self.config.tie_embeddings
    head = params["embedding"].T if tied else params["head"]
    return layers.logits(hidden, head, self.config)

  def routes(self, params: chex.ArrayTree, tokens: jax.Array) -> jax.Array:
    """Returns the experts that the tokens `[B, S]` of a text choose.

    Returns:
      `[L, B, S, k]` int32 ids of the experts, for the L layers with experts.

    Raises:
      ValueError: the model has no experts.
    """
    if self.config.experts is None:
      raise ValueError("the model has no experts (TransformerConfig.experts is "
                       "None); routes requires a mixture of experts")
    _, seen = TransformerModule(self.config).apply(
        {"params": params}, tokens, mutable=["intermediates"])
    return jnp.stack([seen["intermediates"][f"mlp_{i}"]["chosen"][0]
                      for i in range(self.config.layers)
                      if self.config.experts_of(i)])

  def feature(self, hidden: jax.Array, name: int | str = FINAL) -> jax.Array:
    """Returns one of the hidden states in `config.features`.

    Args:
      hidden: `[..., F]`, `hidden` of a `ModelOutput`.
      name: entry of `config.features`.

    Returns:
      Hidden state `[..., D]`.

    Raises:
      ValueError: the model does not return this state.
    """
    names = self.config.features or (FINAL,)
    if name not in names:
      raise ValueError(f"the model returns the hidden states {names}, but not "
                       f"{name!r}; add it to TransformerConfig.features")
    start = names.index(name) * self.config.width
    return hidden[..., start:start + self.config.width]

  def param_specs(self, axis: str, size: int = 1) -> dict[str, Any]:
    """Returns the sharding of the parameters on a mesh axis (arXiv:1909.08053).

    Query, key and value are split along the key-value heads. Gate and up are
    split along the inner width of the MLP. Out and down are split along their
    input, and embedding and head along the vocabulary. A layer then requires
    two all-reduces of the residual stream. Norms, biases, positions,
    look-ahead embeddings, routers, adapters, recurrent layers and projections
    of layer inputs are replicated. Experts are distributed over the devices.

    With fewer key-value heads than devices, every device has all keys and
    values. The product for query, key and value is then split along its input.
    This adds one all-reduce.

    Args:
      axis: name of the mesh axis.
      size: number of devices on the axis.

    Returns:
      A tree of `PartitionSpec` with the structure of the parameters.

    Raises:
      ValueError: heads, vocab_size, the width of an MLP or the number of
        experts is not a multiple of `size`, or kv_heads is neither a multiple
        nor a divisor of `size`. With fewer key-value heads than devices, width
        must also be a multiple.
      KeyError: a parameter is unknown.
    """
    c = self.config
    few, e = c.kv_heads < size and size % c.kv_heads == 0, c.experts
    mlp = ["mlp_width"] if e is None or e.dense_layers else []
    for name in ("heads", "width" if few else "kv_heads", *mlp, "vocab_size",
                 *["global_kv_heads"] * bool(c.global_kv_heads)):
      check_divisible(name, getattr(c, name), size, axis)
    if e is not None:
      check_divisible("experts.count", e.count, size, axis)
      check_divisible("experts.shared_width", e.shared_width, size, axis)

    shapes = jax.eval_shape(self.init, jax.random.key(0))
    return jax.tree_util.tree_map_with_path(
        lambda path, _: _spec([entry.key for entry in path], axis, few), shapes)


def _spec(names: Sequence[str], axis: str, few: bool) -> PartitionSpec:
  """Returns the sharding of one parameter, see `Transformer.param_specs`.

  Args:
    names: path of the parameter.
    axis: name of the mesh axis.
    few: True if there are fewer key-value heads than devices.
  """
  if names[-1] in _REPLICATED or names[0].startswith(
      ("conv_", "delta_", "end_", "layer_projection")):
    return PartitionSpec()
  name = names[-2] if names[-1] == "kernel" else names[-1]
  if name not in _SPLITS:
    raise KeyError(f"parameter {'/'.join(names)} has no sharding; add it to "
                   "Transformer.param_specs")
  splits = _SPLITS["qkv of few heads" if few and name == "qkv" else name]
  return PartitionSpec(*(axis if split else None for split in splits))


def default_dtype() -> Any:
  """Returns float32 on a CPU and bfloat16 on other devices.

  Products in bfloat16 are slow on a CPU.
  """
  return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
