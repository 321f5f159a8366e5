"""A Llama-shaped decoder in Flax Linen: the reference model.

RMSNorm, rotary positions, grouped-query attention, SwiGLU, optionally tied
embeddings. The cache is passed in and out; the module holds no state.
"""

import dataclasses
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from specjax.kv_cache import grouped_attention
from specjax.kv_cache import KVCache
from specjax.types import Cache
from specjax.types import ModelOutput

FINAL = "final"  # the name of the hidden state that the LM head reads

# How a mesh splits the matrices of a layer: by their outputs or their inputs.
_SPLIT_OUTPUT = ("query", "key", "value", "gate", "up")
_SPLIT_INPUT = ("out", "down")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
  """The shape of a decoder. Sizes are in units of their own axis.

  Attributes:
    vocab_size: V.
    width: D, of the residual stream.
    layers: L.
    heads: query heads.
    kv_heads: key-value heads, a divisor of `heads`.
    head_dim: width of one head, even.
    mlp_width: inner width of the SwiGLU block.
    context_length: longest sequence the model was made for, in tokens.
    rope_theta: base of the rotary frequencies.
    norm_epsilon: added to the mean square in RMSNorm.
    tie_embeddings: the output head is the embedding table.
    features: the hidden states that are joined, in this order, into `hidden`.
      A number i is the residual stream before layer i, counted from 0: 0 is
      the embedding and `layers` what the last layer returns. "final" is that
      after the final norm, as the LM head reads it. Empty: "final" alone.
      (This is the index of vLLM and of Hugging Face's `hidden_states`; "the
      output of layer i" of other projects is i + 1 here.)
    lookahead: look-ahead tokens, whose ids are V..V + lookahead - 1; they are
      read and never predicted.
  """

  vocab_size: int
  width: int
  layers: int
  heads: int
  kv_heads: int
  head_dim: int
  mlp_width: int
  context_length: int
  rope_theta: float = 10_000.0
  norm_epsilon: float = 1e-5
  tie_embeddings: bool = True
  features: tuple[int | str, ...] = ()
  lookahead: int = 0

  def __post_init__(self):
    object.__setattr__(self, "features", tuple(self.features))
    for name in ("vocab_size", "width", "layers", "heads", "kv_heads",
                 "head_dim", "mlp_width", "context_length"):
      value = getattr(self, name)
      if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be a whole number of "
                         "at least 1: correct the model's configuration")
    for name in self.features:
      if name != FINAL and name not in range(self.layers + 1):
        raise ValueError(f"features holds {name!r}; it must be {FINAL!r} or a "
                         f"whole number from 0 to the {self.layers} layers")
    if len(set(self.features)) < len(self.features):
      raise ValueError(f"features is {self.features}; name each state once")
    if not isinstance(self.lookahead, int) or self.lookahead < 0:
      raise ValueError(f"lookahead is {self.lookahead!r}; it must be a whole "
                       "number of at least 0: 0 is a plain decoder")
    if self.heads % self.kv_heads:
      raise ValueError(f"heads is {self.heads} and kv_heads {self.kv_heads}; "
                       "heads must be a multiple of kv_heads")
    if self.head_dim % 2:
      raise ValueError(f"head_dim is {self.head_dim}; rotary positions need "
                       "an even number")


def _rotate(x, positions, theta):
  """Rotary position embedding of `x [B, S, H, D]` at `positions [B, S]`."""
  half, dtype = x.shape[-1] // 2, jnp.promote_types(x.dtype, jnp.float32)
  frequency = theta ** (-jnp.arange(half, dtype=dtype) / half)
  angle = positions[..., None].astype(dtype) * frequency
  cos, sin = jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]
  first, second = jnp.split(x.astype(dtype), 2, axis=-1)
  rotated = jnp.concatenate(
      [first * cos - second * sin, second * cos + first * sin], axis=-1)
  return rotated.astype(x.dtype)


class _Attention(nn.Module):
  config: TransformerConfig
  layer: int

  @nn.compact
  def __call__(self, x, positions, ancestors, cache):
    c = self.config
    def project(name, heads):
      out = nn.Dense(heads * c.head_dim, use_bias=False, name=name,
                     kernel_init=nn.initializers.normal(0.02))(x)
      return out.reshape(*x.shape[:2], heads, c.head_dim)

    query = _rotate(project("query", c.heads), positions, c.rope_theta)
    key = _rotate(project("key", c.kv_heads), positions, c.rope_theta)
    value = project("value", c.kv_heads)
    if cache is None:
      out = grouped_attention(
          query, key.swapaxes(1, 2), value.swapaxes(1, 2), ancestors)
    else:
      cache = cache.append(self.layer, key, value,
                           after=ancestors.shape[-1] - x.shape[1])
      out = cache.attend(self.layer, query, ancestors)
    residual_init = nn.initializers.normal(0.02 * (2 * c.layers) ** -0.5)
    out = nn.Dense(c.width, use_bias=False, name="out",
                   kernel_init=residual_init)(out.reshape(*x.shape[:2], -1))
    return out, cache


class _SwiGLU(nn.Module):
  config: TransformerConfig

  @nn.compact
  def __call__(self, x):
    c = self.config
    inner = lambda name: nn.Dense(
        c.mlp_width, use_bias=False, name=name,
        kernel_init=nn.initializers.normal(0.02))(x)
    residual_init = nn.initializers.normal(0.02 * (2 * c.layers) ** -0.5)
    return nn.Dense(c.width, use_bias=False, name="down",
                    kernel_init=residual_init)(
                        nn.silu(inner("gate")) * inner("up"))


def _logits(x, head):
  return jnp.einsum("bsd,dv->bsv", x, head, preferred_element_type=(
      jnp.promote_types(x.dtype, jnp.float32)))


class TransformerModule(nn.Module):
  """The Linen module; `Transformer` is the callable that the loop takes."""

  config: TransformerConfig

  @nn.compact
  def __call__(self, tokens, depths=None, ancestors=None, cache=None):
    c = self.config
    table = self.param("embedding", nn.initializers.normal(0.02),
                       (c.vocab_size, c.width), jnp.float32)
    size = tokens.shape[1]
    if depths is None:
      depths = jnp.broadcast_to(
          jnp.arange(size, dtype=jnp.int32), tokens.shape)
    if ancestors is None:
      ancestors = jnp.broadcast_to(
          jnp.tril(jnp.ones((size, size), bool)), (len(tokens), size, size))
    positions = depths if cache is None else cache.lengths[:, None] + depths
    norm = lambda name: nn.RMSNorm(epsilon=c.norm_epsilon, name=name)

    if c.lookahead:
      # A table of its own: nothing of the large one is copied.
      extra = self.param("lookahead", nn.initializers.normal(0.02),
                         (c.lookahead, c.width), jnp.float32)
      beyond = tokens - c.vocab_size
      x = jnp.where(beyond[..., None] >= 0, extra[jnp.maximum(beyond, 0)],
                    table[jnp.minimum(tokens, c.vocab_size - 1)])
    else:
      x = table[tokens]
    states = {0: x}
    for i in range(c.layers):
      out, cache = _Attention(c, i, name=f"attention_{i}")(
          norm(f"attention_norm_{i}")(x), positions, ancestors, cache)
      x = x + out
      x = x + _SwiGLU(c, name=f"mlp_{i}")(norm(f"mlp_norm_{i}")(x))
      states[i + 1] = x
    x = states[FINAL] = norm("final_norm")(x)

    head = (table.T if c.tie_embeddings else
            self.param("head", nn.initializers.normal(0.02),
                       (c.width, c.vocab_size), jnp.float32))
    logits = _logits(x, head)
    hidden = jnp.concatenate(
        [states[name] for name in c.features or (FINAL,)], axis=-1)
    return ModelOutput(logits=logits, hidden=hidden, cache=cache)


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
    return _logits(hidden, params["embedding"].T if tied else params["head"])

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

    query, key, value, gate and up are split on their output, out and down on
    their input, embedding and head on the vocabulary, so that a layer needs
    two all-reduces of the residual stream; norms and look-ahead embeddings,
    a few rows, are replicated.

    Args:
      axis: name of the mesh axis.
      size: its devices.

    Returns:
      A tree of `PartitionSpec` like the parameters.

    Raises:
      ValueError: heads, kv_heads, mlp_width or vocab_size is no multiple of
        `size`.
      KeyError: the model has a parameter that this method does not know;
        replicating it in silence could fill a device.
    """
    for name in ("heads", "kv_heads", "mlp_width", "vocab_size"):
      check_divisible(name, getattr(self.config, name), size, axis)

    def spec(path, _):
      names = [entry.key for entry in path]
      if names[-1] == "scale" or names == ["lookahead"]:
        return PartitionSpec()
      if names == ["embedding"]:
        return PartitionSpec(axis, None)
      if names == ["head"]:
        return PartitionSpec(None, axis)
      if names[-1] == "kernel" and names[-2] in _SPLIT_OUTPUT:
        return PartitionSpec(None, axis)
      if names[-1] == "kernel" and names[-2] in _SPLIT_INPUT:
        return PartitionSpec(axis, None)
      raise KeyError(f"no placement is known for parameter {'/'.join(names)}; "
                     "add it to Transformer.param_specs")

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
