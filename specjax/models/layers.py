"""Parts of a decoder layer in Flax Linen, configured by `TransformerConfig`.

`Transformer` and feature layers (`models.features`) use these parts.
"""

import dataclasses
import functools
import math
from typing import Any
from typing import NamedTuple
from typing import Self

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from specjax import gpu
from specjax.caches import recurrent
from specjax.caches.dense import attention_in_block
from specjax.caches.dense import BlockCache
from specjax.gpu import layers as gpu_layers
from specjax.interfaces import Cache
from specjax.models import experts
from specjax.models import rotary
from specjax.models.configuration import TransformerConfig
from specjax.models.quantization import QuantizedMatrix
from specjax.models.sublayers import Sublayers

_LARGE = 2**24  # numbers; XLA also has a good GPU kernel for one row from here
_ACTIVATIONS = {
    "silu": nn.silu,
    "gelu": lambda x: nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: nn.gelu(x, approximate=True),
}


def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """Returns the product `[B, S, ...]` of `x [B, S, D]` and `kernel [D, ...]`.

  Sums are in float32 or wider. A single row is duplicated for a small kernel on
  a GPU, and in bfloat16 on a CPU, because XLA takes several times as long for
  one row as for two rows.
  """
  if isinstance(kernel, QuantizedMatrix):
    return kernel.product(x)
  lone = x.shape[:2] == (1, 1) and (
      gpu.in_use(x) and kernel.size < _LARGE
      or x.dtype == jnp.bfloat16 and jax.default_backend() == "cpu")
  out = jax.lax.dot_general(
      jnp.concatenate([x, x], axis=1) if lone else x, kernel,
      (((2,), (0,)), ((), ())),
      preferred_element_type=jnp.promote_types(x.dtype, jnp.float32))
  return out[:, :1] if lone else out


def parameter(module: nn.Module, name: str, initial: Any,
              shape: tuple[int, ...]) -> Any:
  """Returns a parameter of a module, created in float32 if it does not exist.

  Call this function in a compact method, instead of `module.param`.
  `module.param` traces the initialiser in every pass to check the shape. This
  takes an eighth of the tracing time of a round.

  Args:
    module: calling module.
    name: name of the parameter.
    initial: initialiser.
    shape: shape required by the configuration.

  Returns:
    An array, or an object in its place (`QuantizedMatrix`).

  Raises:
    ValueError: the existing parameter has another shape.
  """
  if not module.has_variable("params", name):
    return module.param(name, initial, shape, jnp.float32)
  value = module.get_variable("params", name)
  if value.shape != shape:
    raise ValueError(
        f"parameter {'/'.join((*module.path, name))} has shape {value.shape}, "
        f"but the model needs {shape}; give the parameters of this model")
  return value


class Parts(NamedTuple):
  """Unsummed result of a product, which a kernel of `specjax.gpu` reads.

  Attributes:
    parts: `[P, B, S, ...]` float32 products over parts of the inner axis.
    bias: `[...]` bias, or None.
  """

  parts: jax.Array
  bias: jax.Array | None

  def total(self, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Returns the product with its bias, `[B, S, ...]`."""
    out = self.parts.sum(0)
    return (out if self.bias is None else out + self.bias).astype(dtype)


def _parts(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """Returns float32 parts `[P, B, S, ...]`, whose sum is `product(x, kernel)`.
  """
  batch, size, inner = x.shape
  if isinstance(kernel, QuantizedMatrix):
    return product(x, kernel)[None].astype(jnp.float32)
  count = gpu_layers.parts(batch * size, inner, math.prod(kernel.shape[1:]))
  return jnp.einsum(
      "bspd,pdn->pbsn", x.reshape(batch, size, count, -1),
      kernel.reshape(count, inner // count, -1),
      preferred_element_type=jnp.float32,
  ).reshape(count, batch, size, *kernel.shape[1:])


class Adapted(NamedTuple):
  """Rows of a pass to which every `Linear` adds the product with its adapter.

  The adapter of a kernel `[D, *outputs]` consists of `adapter_in [D, rank]` and
  `adapter_out [rank, *outputs]`. All other rows get exactly the product with
  the kernel.

  Attributes:
    rows: `[B, S]` bool, True for rows that pass through the adapters.
    rank: rank of new adapters. Existing ones may have another rank.
  """

  rows: jax.Array
  rank: int


class Linear(nn.Module):
  """Product with a kernel `[D, *outputs]`, plus an optional bias.

  The bias is stored with one axis. `Adapted` describes the adapter.

  Attributes:
    outputs: sizes of the output axes.
    bias: if True, add a bias.
    scale: standard deviation of the initial kernel.
    in_parts: if True, return `Parts`.
  """

  outputs: tuple[int, ...]
  bias: bool = False
  scale: float = 0.02
  in_parts: bool = False

  @nn.compact
  def __call__(self, x, adapted=None):
    kernel = parameter(self, "kernel", nn.initializers.normal(self.scale),
                       (x.shape[-1], *self.outputs))
    bias = parameter(
        self, "bias", nn.initializers.zeros, (math.prod(self.outputs),)
    ).reshape(self.outputs) if self.bias else None
    if self.in_parts:
      return Parts(_parts(x, kernel), bias)
    out = product(x, kernel)
    if adapted is not None:
      out = self._adapt(out, x, *adapted)
    return (out if bias is None else out + bias).astype(x.dtype)

  def _adapt(self, out: jax.Array, x: jax.Array, rows: jax.Array, rank: int
             ) -> jax.Array:
    """Adds the product of `x` and the adapter to `out`, only in `rows`."""
    width = x.shape[-1]
    if self.has_variable("params", "adapter_in"):
      rank = self.get_variable("params", "adapter_in").shape[-1]
    inner = parameter(self, "adapter_in", nn.initializers.normal(width**-0.5),
                      (width, rank))
    outer = parameter(self, "adapter_out", nn.initializers.zeros,
                      (rank, *self.outputs))

    def adapt() -> jax.Array:
      more = product(product(x, inner).astype(x.dtype), outer)
      return jnp.where(jnp.expand_dims(rows, range(2, out.ndim)),
                       out + more, out)

    return jax.lax.cond(jnp.any(rows), adapt, lambda: out)


class Pending(NamedTuple):
  """Residual stream of a pass with GPU kernels.

  The next norm adds the last addend, in the same kernel.

  Attributes:
    x: `[B, S, D]` residual stream without the addend.
    addend: output of the last sublayer, or None.
    rows: number of rows of `[B, S]` that the next norm returns. None: all.
  """

  x: jax.Array
  addend: Parts | None = None
  rows: int | None = None

  def total(self) -> jax.Array:
    """Returns the residual stream `[B, S, D]`."""
    return self.x if self.addend is None else (
        self.x + self.addend.total(self.x.dtype))


class Norm(nn.Module):
  """RMSNorm or LayerNorm, computed in float32 or wider."""

  config: TransformerConfig
  rms: bool = False  # if True, RMSNorm for every value of `config.norm`

  @nn.compact
  def __call__(self, x):
    """Returns the norm of `x [..., D]`, or of a `Pending` stream.

    For a `Pending` stream, the result is the sum and its norm.
    """
    if isinstance(x, Pending):
      return self._fused(*x)
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

  def _fused(self, x: jax.Array, addend: Parts | None, rows: int | None
             ) -> tuple[jax.Array, jax.Array]:
    """Computes the sum and its norm in one GPU kernel."""
    c, size = self.config, x.shape[-1:]
    centred = not (self.rms or c.norm == "rms")
    weights = [self.get_variable("params", name)
               for name in ("scale", "bias")[:1 + centred]]
    parts, bias = addend or (None, None)
    form = x.shape if rows is None else (1, rows, *size)
    total, out = gpu_layers.add_and_normalise(
        x.reshape(-1, *size),
        None if parts is None else parts.reshape(len(parts), -1, *size), bias,
        *weights, rows=math.prod(form[:-1]), epsilon=c.norm_epsilon,
        offset=float(c.norm_plus_one), centred=centred)
    return total.reshape(form), out.reshape(form)


class RotaryTables(NamedTuple):
  """Rotations of the queries and keys of a pass.

  Attributes:
    full: rotation in layers without a window. None means that positions are not
      rotary.
    local: rotation in layers with a window, possibly with another base.
    query_factor: `[B, S]` factor on the queries (`RopeScaling.query_growth`),
      or None.
  """

  full: rotary.Rotation | None
  local: rotary.Rotation | None
  query_factor: jax.Array | None = None

  @classmethod
  def of(cls, config: TransformerConfig, positions: jax.Array,
         dtype: jax.typing.DTypeLike) -> Self:
    """Returns the tables of `positions [B, S]`, in `dtype` or wider (float32).
    """
    c, wide = config, jnp.promote_types(dtype, jnp.float32)
    if not c.rotated:
      return cls(None, None)

    def table(theta: float, scaling: rotary.RopeScaling | None, dims: int
              ) -> rotary.Rotation:
      frequency = rotary.frequencies(dims, theta, scaling)
      scale = scaling.attention_factor if scaling else 1.0
      return rotary.Rotation(positions, frequency, scale, rotary.
                             cosines_and_sines(
                                 positions, frequency, scale, wide))

    dims = int((c.global_head_dim or c.head_dim) * c.rope_fraction)
    full, scaling, factor = table(c.rope_theta, c.rope_scaling, dims), (
        c.rope_scaling), None
    # The factor is 1 at all positions before `original_length`.
    if scaling and scaling.query_growth and (
        c.context_length > scaling.original_length):
      factor = 1 + scaling.query_growth * jnp.log1p(
          (positions // scaling.original_length).astype(wide))
    return cls(full, full if c.local_rope_theta is None else
               table(c.local_rope_theta, None, c.rotated), factor)


class Attention(nn.Module):
  """Attention with queries, keys and values computed by one product.

  The kernel is `[D, K, G + 2, H]`. For each of K key-value heads, it contains G
  query heads, the key and the value, all of width H. A mesh can split all of
  them along K. With gates, those of the G query heads follow the queries, so
  the kernel is `[D, K, 2 * G + 2, H]`. The kernel has no value if values are
  keys, and only queries if the layer reads the keys of another layer.
  """

  config: TransformerConfig
  layer: int
  slot: int | None = None  # index in the cache; None means `cache_slot`
  in_parts: bool = False  # see `Linear`

  @nn.compact
  def __call__(self, x, tables, ancestors, cache, adapted=None):
    c, window = self.config, self.config.window(self.layer)
    slot = self.slot
    if slot is None:
      slot = c.cache_slot(c.key_layer(self.layer))
    kv_heads, head_dim = c.key_shape(self.layer)
    queries = c.heads // kv_heads * (1 + c.attention_gate)
    keys = c.has_keys(self.layer) * (1 + (window > 0 or c.global_values))
    # Training uses other objects with `append` and `attend`.
    fused = (isinstance(cache, Cache) and cache.is_fused(x) and not c.qk_norm
             and c.query_scale is None and adapted is None
             and not c.attention_gate and not c.sinks
             and tables.query_factor is None and keys == 2 and not c.value_norm
             and not self.is_mutable_collection("intermediates"))
    qkv = Linear((kv_heads, queries + keys, head_dim), c.qkv_bias,
                 in_parts=fused, name="qkv")(x, adapted)
    rotation = tables.local if window else tables.full
    if self.layer in c.unrotated:
      rotation = None
    # Some caches do not support these arguments. Pass only those that the model
    # uses.
    options = {name: value for name, value in
               (("window", window), ("softcap", c.attention_softcap)) if value}
    if c.sinks:
      options["sink_logits"] = parameter(
          self, "sinks", nn.initializers.zeros, (c.heads,))
    if fused:
      out, cache = cache.attend_new(slot, *qkv, rotation, ancestors, **options)
    else:
      qkv = qkv[:, :ancestors.shape[1]]
      query = qkv[:, :, :, :queries]
      if c.attention_gate:
        query, gate = jnp.split(query, 2, axis=3)
      query = self._scaled(self._prepared(
          "query_norm", query.reshape(*qkv.shape[:2], c.heads, head_dim),
          rotation), tables.query_factor)
      # `sow` stores the queries only if the caller makes "intermediates"
      # mutable (`cache_views`).
      self.sow("intermediates", "query", query)
      if keys:
        key, value = qkv[:, :, :, queries], qkv[:, :, :, -1]
        key = self._prepared("key_norm", key, rotation)
        if c.value_norm:
          value = _normed(value, c.norm_epsilon)
      if cache is None:
        out = attention_in_block(query, key, value, ancestors, **options)
      else:
        if keys:
          cache = cache.append(slot, key, value,
                               after=ancestors.shape[-1] - ancestors.shape[1])
        out = cache.attend(slot, query, ancestors, **options)
      if c.attention_gate:
        out = out * jax.nn.sigmoid(gate).reshape(out.shape)
      if out.shape[1] < x.shape[1]:  # the only row, duplicated on a GPU
        out = jnp.concatenate([out, out], axis=1)
    out = Linear((c.width,), c.out_bias, 0.02 * (2 * c.layers) ** -0.5,
                 in_parts=self.in_parts, name="out")(
                     out.reshape(*x.shape[:2], -1), adapted)
    return out, cache

  def _prepared(self, norm: str, x: jax.Array,
                rotation: rotary.Rotation | None) -> jax.Array:
    """Returns normalised and rotated queries or keys."""
    if self.config.qk_norm:
      each = self.config.qk_norm == "head"
      x = Norm(self.config, rms=True, name=norm)(
          x if each else x.reshape(*x.shape[:2], -1)).reshape(x.shape)
    return x if rotation is None else rotary.rotate(x, rotation.table)

  def _scaled(self, query: jax.Array, factor: jax.Array | None) -> jax.Array:
    scale = self.config.query_scale
    # The products are in float32 or wider, because bfloat16 would round the
    # factor.
    wide = query.astype(jnp.promote_types(query.dtype, jnp.float32))
    if scale is not None:
      query = (wide * (scale * query.shape[-1]**0.5)).astype(query.dtype)
    if factor is not None:
      query = (wide * factor[..., None, None]).astype(query.dtype)
    return query


def _normed(x: jax.Array, epsilon: float) -> jax.Array:
  """Returns the RMSNorm of the last axis, without a scale."""
  wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
  return (wide * jax.lax.rsqrt(mean + epsilon)).astype(x.dtype)


def empty_states(config: TransformerConfig, batch: int,
                 dtype: jax.typing.DTypeLike
                 ) -> tuple[recurrent.LayerState, ...]:
  """Returns the state before the first token, for every recurrent layer.

  Args:
    config: configuration of the decoder.
    batch: B, number of rows.
    dtype: dtype of the residual stream.
  """
  return tuple(_empty_state(config, i, batch, dtype)
               for i, kind in enumerate(config.recurrent.kinds)
               if kind != "attention")


def _empty_state(config: TransformerConfig, layer: int, batch: int,
                 dtype: jax.typing.DTypeLike) -> recurrent.LayerState:
  r, conv = config.recurrent, config.layer_kind(layer) == "conv"
  channels = config.width if conv else sum(r.widths)
  tail = jnp.zeros((batch, r.taps - 1, channels), dtype)
  return recurrent.LayerState(tail, None if conv else jnp.zeros(
      (batch, r.heads, r.key_dim, r.value_dim),
      jnp.promote_types(dtype, jnp.float32)))


class ShortConvolution(nn.Module):
  """Gated short convolution (LFM2).

  out(gate * convolution(inner * x)), where one product computes inner, gate
  and x, in this order on the third axis of its kernel `[D, 3, D]`.
  """

  config: TransformerConfig
  layer: int

  @nn.compact
  def __call__(self, x, ancestors, cache, adapted=None):
    c = self.config
    inner, gate, x = jnp.moveaxis(
        Linear((3, c.width), name="inputs")(x, adapted), 2, 0)
    state = _state(c, self.layer, cache, ancestors, x)
    x = inner * x
    out = _convolved(self, recurrent.windows(state.tail, x, ancestors))
    if cache is not None:
      cache = cache.contribute(
          c.cache_slot(self.layer), recurrent.Contributions(x))
    return Linear((c.width,), name="out")(gate * out, adapted), cache


class DeltaNet(nn.Module):
  """Gated DeltaNet, see `caches.recurrent`.

  One product computes the inputs of the convolution (query, key and value of
  all heads), the output gate, and a step size and a decay for every head, in
  this order.
  """

  config: TransformerConfig
  layer: int

  @nn.compact
  def __call__(self, x, ancestors, cache, adapted=None):
    c, r = self.config, self.config.recurrent
    rows, size = x.shape[:2]
    keys, _, values = r.widths
    ends = np.cumsum([2 * keys + values, values, r.heads])
    inputs, gate, step, decay = jnp.split(
        Linear((ends[-1] + r.heads,), name="inputs")(x, adapted), ends, axis=2)
    state = _state(c, self.layer, cache, ancestors, x)
    mixed = nn.silu(_convolved(
        self, recurrent.windows(state.tail, inputs, ancestors)))
    wide = state.matrix.dtype
    heads = lambda y, count: jnp.repeat(
        y.astype(wide).reshape(rows, size, count, -1).swapaxes(1, 2),
        r.heads // count, axis=1)
    query, key, value = (heads(y, count) for y, count in zip(
        jnp.split(mixed, [keys, 2 * keys], axis=2),
        (r.key_heads, r.key_heads, r.heads)))
    rate, bias = (parameter(self, name, nn.initializers.zeros, (r.heads,))
                  for name in ("rate", "rate_bias"))
    decay = -jnp.exp(rate.astype(wide)) * nn.softplus(
        decay.astype(wide) + bias.astype(wide))
    out, new = recurrent.delta_rule(
        state.matrix, _unit(query) * r.key_dim**-0.5, _unit(key), value,
        decay.swapaxes(1, 2), nn.sigmoid(step.astype(wide)).swapaxes(1, 2),
        ancestors)
    if cache is not None:
      cache = cache.contribute(
          c.cache_slot(self.layer), recurrent.Contributions(inputs, *new))
    out = Norm(dataclasses.replace(c, norm_plus_one=False), rms=True,
               name="norm")(out.swapaxes(1, 2).astype(x.dtype))
    out = out.reshape(gate.shape) * nn.silu(gate.astype(wide))
    return Linear((c.width,), name="out")(out.astype(x.dtype), adapted), cache


def _state(config: TransformerConfig, layer: int, cache: Any,
           ancestors: jax.Array, x: jax.Array) -> recurrent.LayerState:
  """Returns the state of a layer before a pass over `x [B, S, D]`."""
  if ancestors.shape[1] != ancestors.shape[2]:
    raise ValueError(
        f"a pass over {ancestors.shape[1]} of {ancestors.shape[2]} nodes was "
        "requested from a model with recurrent layers, which evaluate a draft "
        "in one pass; use this model as the target")
  if cache is None:
    return _empty_state(config, layer, len(x), x.dtype)
  return cache.states[config.cache_slot(layer)]


def _convolved(module: nn.Module, windows: jax.Array) -> jax.Array:
  """Returns the convolution `[B, S, C]` of windows `[B, S, K, C]`."""
  shape = windows.shape[2:]
  taps = parameter(
      module, "taps", nn.initializers.normal(shape[0]**-0.5), shape)
  wide = jnp.promote_types(windows.dtype, jnp.float32)
  return jnp.sum(windows.astype(wide) * taps.astype(wide), axis=2).astype(
      windows.dtype)


def _unit(x: jax.Array) -> jax.Array:
  """Returns vectors of length 1 along the last axis."""
  return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


class MLP(nn.Module):
  """MLP with inner width F.

  If gated, the gate and up projections are one product with a kernel
  `[D, 2, F]`.
  """

  config: TransformerConfig
  in_parts: bool = False  # see `Linear`
  width: int | None = None  # inner width; None means that of the configuration

  @nn.compact
  def __call__(self, x, adapted=None):
    c = self.config
    activation, width = _ACTIVATIONS[c.activation], self.width or c.mlp_width
    if c.gated:
      both = Linear((2, width), c.mlp_bias, name="gate_up")(x, adapted)
      inner = activation(both[..., 0, :]) * both[..., 1, :]
    else:
      inner = activation(
          Linear((width,), c.mlp_bias, name="up")(x, adapted))
    return Linear((c.width,), c.mlp_bias, 0.02 * (2 * c.layers) ** -0.5,
                  in_parts=self.in_parts, name="down")(inner, adapted)


def _clipped(limit: float, gate: jax.Array, up: jax.Array) -> jax.Array:
  """Returns the inner values of an expert of GPT-OSS, see `ExpertConfig`."""
  gate = jnp.minimum(gate, limit)
  return gate * jax.nn.sigmoid(1.702 * gate) * (
      jnp.clip(up, -limit, limit) + 1)


class Experts(nn.Module):
  """Mixture of experts, see `ExpertConfig`.

  The kernels `gate_up [E, D, 2 F]` and `down [E, F, D]` contain all experts. A
  mesh can split them along E.
  """

  config: TransformerConfig
  layer: int
  in_parts: bool = False  # see `Linear`
  differentiable: bool = False  # True in training

  @nn.compact
  def __call__(self, x, adapted=None):
    del adapted  # `TransformerConfig` excludes adapters
    c, e, width = self.config, self.config.experts_of(self.layer), x.shape[-1]
    kernel = parameter(self, "router", nn.initializers.normal(0.02),
                       (width, e.count))
    zeros = nn.initializers.zeros
    raw, bias = product(x, kernel), None
    if e.biases:
      raw = raw + parameter(self, "router_bias", zeros, (e.count,))
      bias = parameter(self, "expert_gate_up_bias", zeros,
                       (e.count, 2 * e.width))
    scores = jax.nn.sigmoid(raw) if e.scores == "sigmoid" else nn.softmax(raw)
    if e.choice_bias:
      extra = parameter(self, "choice_bias", zeros, (e.count,))
      chosen = jax.lax.top_k(scores + extra.astype(scores.dtype), e.chosen)[1]
      weights = jnp.take_along_axis(scores, chosen, axis=-1)
    else:
      weights, chosen = jax.lax.top_k(scores, e.chosen)
    if e.normalise:
      weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    self.sow("intermediates", "chosen", chosen)  # see `Transformer.routes`
    flat = lambda y: y.reshape(-1, y.shape[-1])
    out = experts.mixed(
        flat(x), flat(chosen), flat(weights * e.scale),
        parameter(self, "expert_gate_up", nn.initializers.normal(0.02),
                  (e.count, width, 2 * e.width)),
        parameter(self, "expert_down", nn.initializers.normal(
            0.02 * (2 * c.layers) ** -0.5), (e.count, e.width, width)), bias,
        gated=functools.partial(_clipped, e.limit) if e.limit else (
            lambda gate, up: _ACTIVATIONS[c.activation](gate) * up),
        differentiable=self.differentiable).reshape(x.shape)
    if e.biases:
      more = parameter(self, "expert_down_bias", zeros, (e.count, width))
      out = out + jnp.sum(
          more[chosen] * (weights * e.scale)[..., None], axis=-2)
    if e.shared_width:
      shared = MLP(c, width=e.shared_width, name="shared")(x)
      if e.shared_gate:
        gate = parameter(self, "shared_gate", nn.initializers.normal(0.02),
                         (width, 1))
        shared = shared * jax.nn.sigmoid(product(x, gate))
      out = out + shared
    return Parts(out[None], None) if self.in_parts else out.astype(x.dtype)


class LayerEnd(nn.Module):
  """Last operations of a layer of Gemma 4 on the residual stream.

  They add the embedding of the token for this layer, through a gate, and
  multiply the stream by a number.
  """

  config: TransformerConfig

  @nn.compact
  def __call__(self, x, inputs):
    c = self.config
    if inputs is not None:
      gate = Linear((c.layer_inputs,), name="gate")(x)
      more = Linear((c.width,), name="out")(
          _ACTIVATIONS[c.activation](gate) * inputs)
      x = x + Norm(c, name="norm")(more)
    if c.layer_scales:
      x = x * parameter(self, "factor", nn.initializers.ones, (1,)).astype(
          x.dtype)
    return x


def decoder_layer(config: TransformerConfig, i: int, x: jax.Array | Pending,
                  tables: RotaryTables, ancestors: jax.Array,
                  cache: Cache | None, read: jax.Array | None = None, *,
                  sublayers: Sublayers | None = None,
                  keep: jax.Array | None = None,
                  adapted: Adapted | None = None,
                  inputs: jax.Array | None = None) -> tuple[Any, Any]:
  """Applies one decoder layer.

  Call this function in a compact method. The parameters belong to the calling
  module. Their names end in `i`.

  Args:
    config: configuration of the decoder.
    i: index of the layer.
    x: `[B, S, D]` residual stream before the layer. A `Pending` stream selects
      GPU kernels, and the result is then also `Pending`.
    tables: rotary tables of the positions.
    ancestors: ancestor mask, see `Cache.attend`.
    cache: `Cache` of the decoder. None means that there are no earlier tokens.
    read: `[B, S, ...]` normalised input of attention. None means `x` after the
      layer's norm.
    sublayers: sublayers to run. None means attention and MLP.
    keep: `[2]` or `[2, B]` factors on the outputs of attention and MLP. None
      means 1.
    adapted: rows that pass through the adapters. None means no rows.
    inputs: `[B, S, P]` embeddings for this layer, see `LayerEnd`, or None.

  Returns:
    `(x, cache)`: the residual stream after the layer, and the cache with the
    layer's keys and values.
  """
  c, out, new = config, 0, 0  # a skipped sublayer adds 0 to the stream
  both = sublayers or Sublayers.between(i, i + 1)

  def mlp(in_parts: bool = False) -> nn.Module:
    if c.experts_of(i):
      trained = cache is None or isinstance(cache, BlockCache)
      return Experts(c, i, in_parts, trained, name=f"mlp_{i}")
    wide = c.wide_shared and not c.has_keys(i)
    return MLP(c, in_parts, width=2 * c.mlp_width if wide else None,
               name=f"mlp_{i}")

  if isinstance(x, Pending):
    slot = sublayers and sublayers.slot(i)
    x, read = Norm(c, name=f"attention_norm_{i}")(x)
    out, cache = Attention(c, i, slot, True, name=f"attention_{i}")(
        read, tables, ancestors, cache)
    x, inner = Norm(c, name=f"mlp_norm_{i}")(Pending(x, out))
    return Pending(x, mlp(in_parts=True)(inner)), cache

  def norm(enabled: bool, name: str, x: jax.Array) -> jax.Array:
    return Norm(c, name=name)(x) if enabled else x

  def scaled(part: int, x: jax.Array) -> jax.Array:
    if c.residual_scale != 1:
      x = x * jnp.asarray(c.residual_scale, x.dtype)
    if keep is None:
      return x
    return x * keep[part].astype(x.dtype).reshape(-1, 1, 1)

  if i in both.attention:
    if read is None:
      read = norm(c.pre_norm, f"attention_norm_{i}", x)
    if c.layer_kind(i) == "attention":
      slot = sublayers and sublayers.slot(i)
      out, cache = Attention(c, i, slot, name=f"attention_{i}")(
          read, tables, ancestors, cache, adapted)
    else:
      layer = {"conv": ShortConvolution, "delta": DeltaNet}[c.layer_kind(i)]
      out, cache = layer(c, i, name=f"{c.layer_kind(i)}_{i}")(
          read, ancestors, cache, adapted)
    out = scaled(0, norm(c.post_norm, f"attention_post_norm_{i}", out))
  if i in both.mlp:
    inner = x if c.parallel_residual else x + out
    new = mlp()(
        norm(c.pre_norm, f"mlp_norm_{i}", inner), adapted)
    new = scaled(1, norm(c.post_norm, f"mlp_post_norm_{i}", new))
  x = x + out + new
  if c.layer_scales or inputs is not None:
    x = LayerEnd(c, name=f"end_{i}")(x, inputs)
  return x, cache


def logits(x: jax.Array, head: jax.Array, config: TransformerConfig
           ) -> jax.Array:
  """Returns the logits `[B, S, V]` of `x [B, S, D]` and a `head [D, V]`."""
  raw, cap = product(x, head), config.logit_softcap
  if config.logit_divisor != 1:
    raw = raw / config.logit_divisor
  return cap * jnp.tanh(raw / cap) if cap else raw
