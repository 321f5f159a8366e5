"""A Llama-shaped decoder in Flax Linen: the reference model.

RMSNorm, rotary positions, grouped-query attention, SwiGLU, optionally tied
embeddings. The cache is passed in and out; the module holds no state.
"""

import dataclasses

from flax import linen as nn
import jax
import jax.numpy as jnp

from specjax.kv_cache import grouped_attention
from specjax.kv_cache import KVCache
from specjax.types import ModelOutput


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
    features: layers (0-based) whose outputs are concatenated into `hidden`;
      empty: the last layer after the final norm, as the head sees it.
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
  features: tuple[int, ...] = ()
  lookahead: int = 0

  def __post_init__(self):
    object.__setattr__(self, "features", tuple(self.features))
    for name in ("vocab_size", "width", "layers", "heads", "kv_heads",
                 "head_dim", "mlp_width", "context_length"):
      value = getattr(self, name)
      if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be a whole number of "
                         "at least 1: correct the model's configuration")
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
  half = x.shape[-1] // 2
  frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
  angle = positions[..., None].astype(jnp.float32) * frequency
  cos, sin = jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
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
      causal = jnp.tril(jnp.ones((1, x.shape[1], x.shape[1]), bool))
      out = grouped_attention(
          query, key.swapaxes(1, 2), value.swapaxes(1, 2), causal)
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


class TransformerModule(nn.Module):
  """The Linen module; `Transformer` is the callable that the loop takes."""

  config: TransformerConfig

  @nn.compact
  def __call__(self, tokens, depths=None, ancestors=None, cache=None):
    c = self.config
    table = self.param("embedding", nn.initializers.normal(0.02),
                       (c.vocab_size, c.width), jnp.float32)
    if cache is None:
      positions = jnp.broadcast_to(
          jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    else:
      positions = cache.lengths[:, None] + depths
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
    features = {}
    for i in range(c.layers):
      out, cache = _Attention(c, i, name=f"attention_{i}")(
          norm(f"attention_norm_{i}")(x), positions, ancestors, cache)
      x = x + out
      x = x + _SwiGLU(c, name=f"mlp_{i}")(norm(f"mlp_norm_{i}")(x))
      features[i] = x
    x = norm("final_norm")(x)

    if c.tie_embeddings:
      head = table.T
    else:
      head = self.param("head", nn.initializers.normal(0.02),
                        (c.width, c.vocab_size), jnp.float32)
    logits = jnp.einsum("bsd,dv->bsv", x, head,
                        preferred_element_type=jnp.float32)
    hidden = (jnp.concatenate([features[i] for i in c.features], axis=-1)
              if c.features else x)
    return ModelOutput(logits=logits, hidden=hidden, cache=cache)


@dataclasses.dataclass(frozen=True)
class Transformer:
  """A decoder as a `ModelFn`: hashable by value, weights are an argument."""

  config: TransformerConfig

  @property
  def vocab_size(self) -> int:
    return self.config.vocab_size

  @property
  def context_length(self) -> int:
    return self.config.context_length

  def init(self, key):
    """Random float32 parameters."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    return TransformerModule(self.config).init(key, tokens)["params"]

  def init_cache(self, params, batch: int, capacity: int) -> KVCache:
    """An empty cache in the parameters' dtype."""
    c = self.config
    return KVCache.empty(
        layers=c.layers, batch=batch, heads=c.kv_heads, capacity=capacity,
        head_dim=c.head_dim, dtype=params["embedding"].dtype)

  def __call__(self, params, tokens, depths=None, ancestors=None, cache=None):
    """One pass, as in `ModelFn`; without a cache it is causal."""
    return TransformerModule(self.config).apply(
        {"params": params}, tokens, depths, ancestors, cache)


def default_dtype():
  """float32 on CPU, whose bfloat16 matrix products are slow; else bfloat16."""
  return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
