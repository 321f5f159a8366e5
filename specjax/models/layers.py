"""The parts of a decoder layer in Flax Linen, by a `TransformerConfig`.

`Transformer` stacks them, and a layer that drafts from another model's features
(`models.features`) is made of the same.
"""

import math
from typing import Any
from typing import NamedTuple
from typing import Self

from flax import linen as nn
import jax
import jax.numpy as jnp

from specjax.caches.dense import attention_in_block
from specjax.models import rotary
from specjax.models.configuration import TransformerConfig
from specjax.models.quantization import QuantizedMatrix
from specjax.models.sublayers import Sublayers

_ACTIVATIONS = {
    "silu": nn.silu,
    "gelu": lambda x: nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: nn.gelu(x, approximate=True),
}


def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """`[B, S, D]`, `[D, ...]` -> `[B, S, ...]`, summed in float32 at least.

  On a CPU a lone row of bfloat16 is fed twice: XLA's product of one row with a
  matrix takes four times as long there as that of two.
  """
  if isinstance(kernel, QuantizedMatrix):
    return kernel.product(x)
  lone = (x.shape[:2] == (1, 1) and x.dtype == jnp.bfloat16
          and jax.default_backend() == "cpu")
  out = jax.lax.dot_general(
      jnp.concatenate([x, x], axis=1) if lone else x, kernel,
      (((2,), (0,)), ((), ())),
      preferred_element_type=jnp.promote_types(x.dtype, jnp.float32))
  return out[:, :1] if lone else out


def parameter(module: nn.Module, name: str, initial: Any,
              shape: tuple[int, ...]) -> Any:
  """A parameter of a module in a compact method, made in float32.

  As `module.param`, which would trace the initialiser in every pass again, to
  learn the shape: an eighth of the time that it takes to trace a round.

  Args:
    module: that has it.
    name: in the module.
    initial: its initialiser.
    shape: as the configuration has it.

  Returns:
    An array, or what stands for one (`QuantizedMatrix`).

  Raises:
    ValueError: the parameter that is there has another shape.
  """
  if not module.has_variable("params", name):
    return module.param(name, initial, shape, jnp.float32)
  value = module.get_variable("params", name)
  if value.shape != shape:
    raise ValueError(
        f"parameter {'/'.join((*module.path, name))} has shape {value.shape} "
        f"and the model needs {shape}; give the parameters of this model")
  return value


class Linear(nn.Module):
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
    kernel = parameter(self, "kernel", nn.initializers.normal(self.scale),
                       (x.shape[-1], *self.outputs))
    out = product(x, kernel)
    if self.bias:
      bias = parameter(self, "bias", nn.initializers.zeros,
                       (math.prod(self.outputs),))
      out = out + bias.reshape(self.outputs)
    return out.astype(x.dtype)


class Norm(nn.Module):
  """RMSNorm or LayerNorm, computed in float32 at least."""

  config: TransformerConfig
  rms: bool = False  # whatever the configuration says

  @nn.compact
  def __call__(self, x):
    c, size = self.config, x.shape[-1:]
    dtype, wide = x.dtype, x.astype(jnp.promote_types(x.dtype, jnp.float32))
    plain = nn.initializers.zeros if c.norm_plus_one else nn.initializers.ones
    scale = parameter(self, "scale", plain, size).astype(wide.dtype)
    scale = scale + c.norm_plus_one
    if self.rms or c.norm == "rms":
      mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
      return (wide * jax.lax.rsqrt(mean + c.norm_epsilon) * scale).astype(dtype)
    bias = parameter(self, "bias", nn.initializers.zeros, size)
    wide = wide - wide.mean(-1, keepdims=True)
    mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    out = wide * jax.lax.rsqrt(mean + c.norm_epsilon) * scale
    return (out + bias.astype(wide.dtype)).astype(dtype)


class RotaryTables(NamedTuple):
  """The cosines and sines by which a pass rotates queries and keys.

  Attributes:
    full: `[2, B, S, half]`, of layers that see the whole text, see
      `rotary.cosines_and_sines`; None where positions are not rotary.
    local: of layers with a window, which may have a base of their own.
  """

  full: jax.Array | None
  local: jax.Array | None

  @classmethod
  def of(cls, config: TransformerConfig, positions: jax.Array, dtype: Any
         ) -> Self:
    """Those of tokens at `positions [B, S]`, in `dtype` or float32."""
    c, wide = config, jnp.promote_types(dtype, jnp.float32)
    if not c.rotated:
      return cls(None, None)

    def table(theta, scaling):
      return rotary.cosines_and_sines(
          positions, rotary.frequencies(c.rotated, theta, scaling),
          scaling.attention_factor if scaling else 1.0, wide)

    full = table(c.rope_theta, c.rope_scaling)
    return cls(full, full if c.local_rope_theta is None else
               table(c.local_rope_theta, None))


class Attention(nn.Module):
  """Query, key and value are one product with a kernel `[D, K, G + 2, H]`.

  For each of K key-value heads it has the G query heads that read it, the key
  and the value, so that a mesh splits all three along K.
  """

  config: TransformerConfig
  layer: int
  slot: int | None = None  # the layer of the cache; None: the same number

  @nn.compact
  def __call__(self, x, tables, ancestors, cache):
    c, window = self.config, self.config.window(self.layer)
    slot = self.layer if self.slot is None else self.slot
    qkv = Linear((c.kv_heads, c.group + 2, c.head_dim), c.qkv_bias,
                 name="qkv")(x)
    query, key, value = jnp.split(qkv, [c.group, c.group + 1], axis=3)
    query = query.reshape(*x.shape[:2], c.heads, c.head_dim)
    key, value = key[:, :, :, 0], value[:, :, :, 0]
    if c.qk_norm:
      query, key = (
          self._normed(name, part)
          for name, part in (("query_norm", query), ("key_norm", key)))
    table = tables.local if window else tables.full
    if table is not None:
      query, key = (rotary.rotate(part, table) for part in (query, key))
    if c.query_scale is not None:
      # In float32 at least: bfloat16 would round the factor itself.
      wide = query.astype(jnp.promote_types(query.dtype, jnp.float32))
      query = (wide * (c.query_scale * c.head_dim**0.5)).astype(query.dtype)
    self.sow("intermediates", "query", query)  # for who asks, else nothing

    # Named only where the model has them: not every cache knows them.
    options = {name: value for name, value in
               (("window", window), ("softcap", c.attention_softcap)) if value}
    if cache is None:
      out = attention_in_block(query, key, value, ancestors, **options)
    else:
      cache = cache.append(slot, key, value,
                           after=ancestors.shape[-1] - x.shape[1])
      out = cache.attend(slot, query, ancestors, **options)
    out = Linear((c.width,), c.out_bias, 0.02 * (2 * c.layers) ** -0.5,
                 name="out")(out.reshape(*x.shape[:2], -1))
    return out, cache

  def _normed(self, name: str, x: jax.Array) -> jax.Array:
    norm = Norm(self.config, rms=True, name=name)
    if self.config.qk_norm == "head":
      return norm(x)
    return norm(x.reshape(*x.shape[:2], -1)).reshape(x.shape)


class MLP(nn.Module):
  """Gate and up are one product with a kernel `[D, 2, F]`."""

  config: TransformerConfig

  @nn.compact
  def __call__(self, x):
    c = self.config
    activation = _ACTIVATIONS[c.activation]
    if c.gated:
      both = Linear((2, c.mlp_width), c.mlp_bias, name="gate_up")(x)
      inner = activation(both[..., 0, :]) * both[..., 1, :]
    else:
      inner = activation(Linear((c.mlp_width,), c.mlp_bias, name="up")(x))
    return Linear((c.width,), c.mlp_bias, 0.02 * (2 * c.layers) ** -0.5,
                  name="down")(inner)


def decoder_layer(config: TransformerConfig, i: int, x: jax.Array,
                  tables: RotaryTables, ancestors: jax.Array, cache: Any,
                  read: jax.Array | None = None, *,
                  sublayers: Sublayers | None = None,
                  keep: jax.Array | None = None) -> tuple[jax.Array, Any]:
  """One layer of the residual stream, for use inside a compact module.

  Its parameters, whose names end in `i`, are those of the calling module.

  Args:
    config: of the decoder.
    i: which of its layers.
    x: `[B, S, D]`, the residual stream before it.
    tables: of the tokens' positions.
    ancestors: as `Cache.attend` takes them.
    cache: a `Cache` of the decoder's layers; None: the tokens have no past.
    read: `[B, S, ...]`, what attention reads in place of the stream, normed if
      it has to be.
    sublayers: which are run; None: both.
    keep: `[2]` or `[2, B]`, factors of what attention and MLP add; None: 1.

  Returns:
    The stream after the layer, and the cache with its keys and values.
  """
  c, out, new = config, 0, 0  # what a part that is not run adds
  both = sublayers or Sublayers.between(i, i + 1)

  def norm(wanted: bool, name: str, x: jax.Array) -> jax.Array:
    return Norm(c, name=name)(x) if wanted else x

  def kept(part: int, x: jax.Array) -> jax.Array:
    if keep is None:
      return x
    return x * keep[part].astype(x.dtype).reshape(-1, 1, 1)

  if i in both.attention:
    if read is None:
      read = norm(c.pre_norm, f"attention_norm_{i}", x)
    slot = sublayers and sublayers.slot(i)
    out, cache = Attention(c, i, slot, name=f"attention_{i}")(
        read, tables, ancestors, cache)
    out = kept(0, norm(c.post_norm, f"attention_post_norm_{i}", out))
  if i in both.mlp:
    inner = x if c.parallel_residual else x + out
    new = MLP(c, name=f"mlp_{i}")(norm(c.pre_norm, f"mlp_norm_{i}", inner))
    new = kept(1, norm(c.post_norm, f"mlp_post_norm_{i}", new))
  return x + out + new, cache


def logits(x: jax.Array, head: jax.Array, config: TransformerConfig
           ) -> jax.Array:
  """`[B, S, V]` of `x [B, S, D]` by a head `[D, V]`, float32 at least."""
  raw, cap = product(x, head), config.logit_softcap
  return cap * jnp.tanh(raw / cap) if cap else raw
