"""One decoder in Flax Linen for many published architectures.

What differs between Llama, Mistral, Qwen, Gemma, GPT-2, GPT-NeoX, Phi-3 and
OLMo-2 is data of its `TransformerConfig`; the defaults are Llama's. The cache
is passed in and out; the module holds no state.
"""

import dataclasses
import math
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from specjax.kv_cache import attention_in_block
from specjax.kv_cache import KVCache
from specjax.models import rotary
from specjax.models.configuration import FINAL
from specjax.models.configuration import TransformerConfig
from specjax.types import Cache
from specjax.types import ModelOutput

# How a mesh splits a matrix: which of its axes.
_SPLITS = {
    "embedding": (True, False), "head": (False, True),
    "qkv": (False, True, False, False),
    "qkv of few heads": (True, False, False, False), "out": (True, False),
    "gate_up": (False, False, True), "up": (False, True),
    "down": (True, False),
}
_REPLICATED = ("scale", "bias", "positions", "lookahead")  # a few rows

_ACTIVATIONS = {
    "silu": nn.silu,
    "gelu": lambda x: nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: nn.gelu(x, approximate=True),
}


def _product(x, kernel):
  """`[B, S, D]`, `[D, ...]` -> `[B, S, ...]`, summed in float32 at least.

  On a CPU a lone row of bfloat16 is fed twice: XLA's product of one row with a
  matrix takes four times as long there as that of two.
  """
  lone = (x.shape[:2] == (1, 1) and x.dtype == jnp.bfloat16
          and jax.default_backend() == "cpu")
  out = jax.lax.dot_general(
      jnp.concatenate([x, x], axis=1) if lone else x, kernel,
      (((2,), (0,)), ((), ())),
      preferred_element_type=jnp.promote_types(x.dtype, jnp.float32))
  return out[:, :1] if lone else out


class _Linear(nn.Module):
  """A product with a kernel `[D, *outputs]`; the bias is flat.

  Attributes:
    outputs: sizes of the output axes.
    bias: whether there is one.
    scale: standard deviation of the initial kernel.
  """

  outputs: tuple[int, ...]
  bias: bool = False
  scale: float = 0.02

  @nn.compact
  def __call__(self, x):
    kernel = self.param("kernel", nn.initializers.normal(self.scale),
                        (x.shape[-1], *self.outputs), jnp.float32)
    out = _product(x, kernel)
    if self.bias:
      bias = self.param("bias", nn.initializers.zeros,
                        (math.prod(self.outputs),), jnp.float32)
      out = out + bias.reshape(self.outputs)
    return out.astype(x.dtype)


class _Norm(nn.Module):
  """RMSNorm or LayerNorm, computed in float32 at least."""

  config: TransformerConfig
  rms: bool = False  # whatever the configuration says

  @nn.compact
  def __call__(self, x):
    c, size = self.config, x.shape[-1:]
    dtype, wide = x.dtype, x.astype(jnp.promote_types(x.dtype, jnp.float32))
    plain = nn.initializers.zeros if c.norm_plus_one else nn.initializers.ones
    scale = self.param("scale", plain, size, jnp.float32).astype(wide.dtype)
    scale = scale + c.norm_plus_one
    if self.rms or c.norm == "rms":
      mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
      return (wide * jax.lax.rsqrt(mean + c.norm_epsilon) * scale).astype(dtype)
    bias = self.param("bias", nn.initializers.zeros, size, jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    out = wide * jax.lax.rsqrt(mean + c.norm_epsilon) * scale
    return (out + bias.astype(wide.dtype)).astype(dtype)


class _Attention(nn.Module):
  """Query, key and value are one product with a kernel `[D, K, G + 2, H]`.

  For each of K key-value heads it has the G query heads that read it, the key
  and the value, so that a mesh splits all three along K.
  """

  config: TransformerConfig
  layer: int

  @nn.compact
  def __call__(self, x, positions, ancestors, cache):
    c, window = self.config, self.config.window(self.layer)
    qkv = _Linear((c.kv_heads, c.group + 2, c.head_dim), c.qkv_bias,
                  name="qkv")(x)
    query, key, value = jnp.split(qkv, [c.group, c.group + 1], axis=3)
    query = query.reshape(*x.shape[:2], c.heads, c.head_dim)
    key, value = key[:, :, :, 0], value[:, :, :, 0]
    if c.qk_norm:
      query, key = (
          self._normed(name, part)
          for name, part in (("query_norm", query), ("key_norm", key)))
    if c.rotated:
      query, key = (self._rotated(part, positions) for part in (query, key))
    if c.query_scale is not None:
      # In float32 at least: bfloat16 would round the factor itself.
      wide = query.astype(jnp.promote_types(query.dtype, jnp.float32))
      query = (wide * (c.query_scale * c.head_dim**0.5)).astype(query.dtype)

    # Named only where the model has them: not every cache knows them.
    options = {name: value for name, value in
               (("window", window), ("softcap", c.attention_softcap)) if value}
    if cache is None:
      out = attention_in_block(query, key, value, ancestors, **options)
    else:
      cache = cache.append(self.layer, key, value,
                           after=ancestors.shape[-1] - x.shape[1])
      out = cache.attend(self.layer, query, ancestors, **options)
    out = _Linear((c.width,), c.out_bias, 0.02 * (2 * c.layers) ** -0.5,
                  name="out")(out.reshape(*x.shape[:2], -1))
    return out, cache

  def _normed(self, name, x):
    norm = _Norm(self.config, rms=True, name=name)
    if self.config.qk_norm == "head":
      return norm(x)
    return norm(x.reshape(*x.shape[:2], -1)).reshape(x.shape)

  def _rotated(self, x, positions):
    c = self.config
    theta, scaling = c.rope_theta, c.rope_scaling
    if c.window(self.layer) and c.local_rope_theta is not None:
      theta, scaling = c.local_rope_theta, None
    return rotary.rotate(
        x, positions, rotary.frequencies(c.rotated, theta, scaling),
        scaling.attention_factor if scaling else 1.0)


class _MLP(nn.Module):
  """Gate and up are one product with a kernel `[D, 2, F]`."""

  config: TransformerConfig

  @nn.compact
  def __call__(self, x):
    c = self.config
    activation = _ACTIVATIONS[c.activation]
    if c.gated:
      both = _Linear((2, c.mlp_width), c.mlp_bias, name="gate_up")(x)
      inner = activation(both[..., 0, :]) * both[..., 1, :]
    else:
      inner = activation(_Linear((c.mlp_width,), c.mlp_bias, name="up")(x))
    return _Linear((c.width,), c.mlp_bias, 0.02 * (2 * c.layers) ** -0.5,
                   name="down")(inner)


def _logits(x, head, config):
  logits, cap = _product(x, head), config.logit_softcap
  return cap * jnp.tanh(logits / cap) if cap else logits


class TransformerModule(nn.Module):
  """The Linen module; `Transformer` is the callable that the loop takes."""

  config: TransformerConfig

  @nn.compact
  def __call__(self, tokens, depths=None, ancestors=None, cache=None):
    c = self.config
    size = tokens.shape[1]
    if depths is None:
      depths = jnp.broadcast_to(
          jnp.arange(size, dtype=jnp.int32), tokens.shape)
    if ancestors is None:
      ancestors = jnp.broadcast_to(
          jnp.tril(jnp.ones((size, size), bool)), (len(tokens), size, size))
    positions = depths if cache is None else cache.lengths[:, None] + depths
    table = self.param("embedding", nn.initializers.normal(0.02),
                       (c.vocab_size, c.width), jnp.float32)

    def norm(wanted, name, x):
      return _Norm(c, name=name)(x) if wanted else x

    x = self._embedded(table, tokens, positions)
    states = {0: x}
    for i in range(c.layers):
      out, cache = _Attention(c, i, name=f"attention_{i}")(
          norm(c.pre_norm, f"attention_norm_{i}", x), positions, ancestors,
          cache)
      out = norm(c.post_norm, f"attention_post_norm_{i}", out)
      read = x if c.parallel_residual else x + out
      new = _MLP(c, name=f"mlp_{i}")(norm(c.pre_norm, f"mlp_norm_{i}", read))
      new = norm(c.post_norm, f"mlp_post_norm_{i}", new)
      x = x + out + new
      states[i + 1] = x
    x = states[FINAL] = norm(True, "final_norm", x)
    if hasattr(cache, "after"):
      cache = cache.after(x)

    head = (table.T if c.tie_embeddings else
            self.param("head", nn.initializers.normal(0.02),
                       (c.width, c.vocab_size), jnp.float32))
    hidden = jnp.concatenate(
        [states[name] for name in c.features or (FINAL,)], axis=-1)
    return ModelOutput(logits=_logits(x, head, c), hidden=hidden, cache=cache)

  def _embedded(self, table, tokens, positions):
    """`[B, S, D]`, the residual stream before the first layer."""
    c = self.config
    if c.lookahead:
      # A table of its own: nothing of the large one is copied.
      extra = self.param("lookahead", nn.initializers.normal(0.02),
                         (c.lookahead, c.width), jnp.float32)
      beyond = tokens - c.vocab_size
      x = jnp.where(beyond[..., None] >= 0, extra[jnp.maximum(beyond, 0)],
                    table[jnp.minimum(tokens, c.vocab_size - 1)])
    else:
      x = table[tokens]
    if c.embedding_scale != 1:
      x = x * jnp.asarray(c.embedding_scale, x.dtype)
    if c.learned_positions:
      x = x + self.param("positions", nn.initializers.normal(0.02),
                         (c.context_length, c.width), jnp.float32)[positions]
    return x


@dataclasses.dataclass(frozen=True)
class Transformer:
  """A decoder as a `ModelFn`: hashable by value, weights are an argument.

  Attributes:
    config: the shape of the decoder.
    cache: the class of its cache, with a constructor like `KVCache.empty` and
      the methods of `specjax.types.Cache`.
  """

  config: TransformerConfig
  cache: type[Cache] = KVCache

  @property
  def vocab_size(self) -> int:
    return self.config.vocab_size

  @property
  def context_length(self) -> int:
    return self.config.context_length

  def init(self, key: jax.Array) -> dict[str, Any]:
    """Random float32 parameters."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    return TransformerModule(self.config).init(key, tokens)["params"]

  def init_cache(self, params: Any, batch: int, capacity: int) -> Cache:
    """An empty cache in the parameters' dtype."""
    c = self.config
    return self.cache.empty(
        layers=c.layers, batch=batch, heads=c.kv_heads, capacity=capacity,
        head_dim=c.head_dim, dtype=params["embedding"].dtype)

  def __call__(self, params: Any, tokens: jax.Array,
               depths: jax.Array | None = None,
               ancestors: jax.Array | None = None,
               cache: Cache | None = None) -> ModelOutput:
    """One pass, as in `ModelFn`.

    Without `depths` and `ancestors` the tokens are a chain; without a cache
    they have no past.
    """
    return TransformerModule(self.config).apply(
        {"params": params}, tokens, depths, ancestors, cache)

  def logits_at(self, params: Any, output: ModelOutput, at: jax.Array
                ) -> jax.Array:
    """`[B, K, V]`, the rows `at [B, K]` of the logits of a pass.

    Where no other row is used, no other row is computed.
    """
    if FINAL not in (self.config.features or (FINAL,)):
      return jnp.take_along_axis(output.logits, at[..., None], axis=1)
    hidden = jnp.take_along_axis(self.feature(output.hidden), at[..., None],
                                 axis=1)
    tied = self.config.tie_embeddings
    head = params["embedding"].T if tied else params["head"]
    return _logits(hidden, head, self.config)

  def feature(self, hidden: jax.Array, name: int | str = FINAL) -> jax.Array:
    """One of the hidden states that `config.features` joins.

    Args:
      hidden: `[..., F]`, of a `ModelOutput`.
      name: an entry of `config.features`.

    Returns:
      `[..., D]`.

    Raises:
      ValueError: the model does not return it.
    """
    names = self.config.features or (FINAL,)
    if name not in names:
      raise ValueError(f"the model returns the hidden states {names} and not "
                       f"{name!r}; name it in TransformerConfig.features")
    start = names.index(name) * self.config.width
    return hidden[..., start:start + self.config.width]

  def param_specs(self, axis: str, size: int = 1) -> dict[str, Any]:
    """How the parameters are split over a mesh axis (arXiv:1909.08053).

    Query, key and value are split along the key-value heads, gate and up along
    the inner width of the MLP, out and down on their input, embedding and head
    on the vocabulary, so that a layer needs two all-reduces of the residual
    stream. Norms, biases, positions and look-ahead embeddings are replicated.

    Where there are fewer key-value heads than devices, each device has the
    keys and values of all: the product that makes them is then split on its
    input, for one more all-reduce of query, key and value.

    Args:
      axis: name of the mesh axis.
      size: its devices.

    Returns:
      A tree of `PartitionSpec` like the parameters.

    Raises:
      ValueError: heads, kv_heads, mlp_width or vocab_size is no multiple of
        `size`; of kv_heads, a divisor of it will do.
      KeyError: the model has a parameter that this method does not know;
        replicating it in silence could fill a device.
    """
    few = self.config.kv_heads < size and size % self.config.kv_heads == 0
    for name in ("heads", "width" if few else "kv_heads", "mlp_width",
                 "vocab_size"):
      check_divisible(name, getattr(self.config, name), size, axis)

    def spec(path, _):
      names = [entry.key for entry in path]
      if names[-1] in _REPLICATED:
        return PartitionSpec()
      name = names[-2] if names[-1] == "kernel" else names[-1]
      if name not in _SPLITS:
        raise KeyError(f"no placement is known for parameter "
                       f"{'/'.join(names)}; add it to Transformer.param_specs")
      splits = _SPLITS["qkv of few heads" if few and name == "qkv" else name]
      return PartitionSpec(*(axis if split else None for split in splits))

    shapes = jax.eval_shape(self.init, jax.random.key(0))
    return jax.tree_util.tree_map_with_path(spec, shapes)


def check_divisible(name: str, value: int, size: int, axis: str) -> None:
  """Checks that a mesh axis can split something into equal parts.

  Raises:
    ValueError: `value` is no multiple of `size`.
  """
  if value % size:
    raise ValueError(
        f"{name} is {value} and mesh axis {axis!r} has {size} devices; the "
        f"axis splits {name}, so its size must divide {value}: use a smaller "
        f"axis {axis!r} and give the other devices to the data axis")


def default_dtype() -> Any:
  """float32 on CPU, whose bfloat16 matrix products are slow; else bfloat16."""
  return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
