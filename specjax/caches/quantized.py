"""A cache of keys and values in 8 or 4 bits.

QuantSpec (Tiwari et al. 2025, arXiv:2502.10424), for drafts on long contexts.
An 8-bit number 16 u + l consists of an upper nibble u and a lower nibble l. The
drafter reads only the upper nibble. A quantised cache of a drafter does not
change the output distribution. A quantised cache of the target does, because
the target's distribution changes.

There are two differences from QuantSpec. First, the keys of a token share one
scale per head, and so do its values. QuantSpec has one scale for each channel
of a group of 128 keys. Second, the last tokens are also rounded, whereas
QuantSpec stores them in full precision. With rounding, a row of q depends only
on the tokens before it, and not on the position where the round began.

Attention multiplies by the integers and applies the scales to the products.
"""

import dataclasses
import functools
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from specjax import attention
from specjax.attention import plain
from specjax.caches import dense
from specjax.caches.dense import KVCache
from specjax.interfaces import CacheFactory

_MOST = 7 * 16 + 7  # largest 16 u + l with u and l in [-8, 7]
_LEAST = 128  # slots of the smallest compiled attention, see `_over_slots`


@struct.dataclass
class Nibbles:
  """Numbers of 8 or 4 bits, with a scale per head and token.

  Each byte contains 4 bits of two channels: byte i has channel i in its lower
  half and channel i + D / 2 in its upper half.

  Attributes:
    upper: `[B, H, C, D / 2]` uint8, upper 4 bits of the numbers.
    lower: `[B, H, C, D / 2]` uint8, lower 4 bits. None for 4-bit numbers.
    scale: `[B, H, C, 1]`, factor of the integers, in the dtype of the
      computation.
  """

  upper: jax.Array
  lower: jax.Array | None
  scale: jax.Array

  @property
  def shape(self) -> tuple[int, ...]:
    return (*self.upper.shape[:3], 2 * self.upper.shape[3])

  @property
  def dtype(self) -> Any:
    return self.scale.dtype

  @classmethod
  def of(cls, x: jax.Array, bits: int) -> "Nibbles":
    """Returns `x [B, H, S, D]` rounded to `bits` bits per number."""
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=-1, keepdims=True)
    scale = (largest / (_MOST if bits == 8 else 7)).astype(x.dtype)
    step = scale.astype(jnp.float32)
    number = jnp.round(wide / jnp.where(step > 0, step, 1)).astype(jnp.int32)
    if bits == 4:
      return cls(_packed(jnp.clip(number, -7, 7)), None, scale)
    number = jnp.clip(number, -_MOST, _MOST)
    upper = (number + 8) >> 4
    return cls(_packed(upper), _packed(number - 16 * upper), scale)

  def widened(self) -> jax.Array:
    """Returns the numbers `[B, H, C, D]` multiplied by their scales."""
    return jnp.concatenate(self.halves(), axis=-1) * self.scale

  def halves(self) -> tuple[jax.Array, jax.Array]:
    """Returns the integers of both halves of the channels, without the scale.

    Both arrays are `[B, H, C, D / 2]` and have the dtype of the scale.
    """
    halves = _unpacked(self.upper)
    if self.lower is not None:
      halves = [16 * u + l for u, l in zip(halves, _unpacked(self.lower))]
    return tuple(x.astype(self.dtype) for x in halves)


def _packed(x: jax.Array) -> jax.Array:
  low, high = jnp.split(x & 15, 2, axis=-1)
  return (low | high << 4).astype(jnp.uint8)


def _unpacked(x: jax.Array) -> list[jax.Array]:
  """Returns both halves of the channels as int8 in [-8, 7]."""
  x = jax.lax.bitcast_convert_type(x, jnp.int8)
  return [(x << 4) >> 4, x >> 4]  # shifts to the right keep the sign


@struct.dataclass
class QuantizedCache(KVCache):
  """A `KVCache` whose `k` and `v` are `Nibbles`, one per layer.

  Attributes:
    bits: bits per number, 8 or 4.
  """

  bits: int = struct.field(pytree_node=False, default=4)

  @classmethod
  def empty(cls, *, layers: int, batch: int, heads: int, capacity: int,
            head_dim: int, dtype: jax.typing.DTypeLike, bits: int = 4
            ) -> "QuantizedCache":
    """Returns a cache of `capacity` empty slots per row.

    Raises:
      ValueError: the head dimension is odd.
    """
    if head_dim % 2:
      raise ValueError(f"head_dim is {head_dim}; two channels share a byte, so "
                       "it must be even")
    nothing = lambda: Nibbles.of(
        jnp.zeros((batch, heads, capacity, head_dim), dtype), bits)
    zeros = lambda: tuple(nothing() for _ in range(layers))
    return cls(k=zeros(), v=zeros(), lengths=jnp.zeros((batch,), jnp.int32),
               bits=bits)

  def append(self, layer: int, k: jax.Array, v: jax.Array, after: int = 0
             ) -> "QuantizedCache":
    """Runs `KVCache.append` on rounded keys and values."""
    k, v = (Nibbles.of(x.astype(self.k[0].dtype), self.bits).widened()
            for x in (k, v))
    return super().append(layer, k, v, after)

  def attend(self, layer: int, query: jax.Array, ancestors: jax.Array,
             window: int = 0, softcap: float = 0.0,
             depths: jax.Array | None = None,
             sink_logits: jax.Array | None = None) -> jax.Array:
    """Returns the attention of `KVCache.attend`.

    The cost depends on the longest row, not on the capacity.
    """
    past = _over_slots(query, self.k[layer], self.v[layer], self.in_slots,
                       self.window_ends(ancestors, depths), window=window,
                       softcap=softcap)
    block = attention.block_attention(
        query, self.block_k[layer], self.block_v[layer],
        self.in_block(ancestors, window, depths), softcap=softcap)
    return attention.with_sinks(attention.merge(past, block), sink_logits
                                ).astype(self.v[layer].dtype)

  def _put(self, slots: Nibbles, block: jax.Array) -> Nibbles:
    """Writes `block [B, H, S, D]` into the slots of a layer after `lengths`."""
    put = lambda slots, block: dense.put_rows(
        slots, block, self.lengths, axis=1)
    return jax.tree.map(put, slots, Nibbles.of(block, self.bits))


# A separate jit, so that all layers of a model share one trace.
@functools.partial(jax.jit, static_argnames=("window", "softcap"))
def _over_slots(query: jax.Array, k: Nibbles, v: Nibbles, lengths: jax.Array,
                positions: jax.Array, *, window: int, softcap: float
                ) -> plain.Part:
  """Returns the part over the committed slots, see `specjax.attention`.

  One branch is compiled for 128 slots, one for each doubling up to the
  capacity. At run time the smallest branch that fits the longest row is used.
  """
  def over(slots):
    def part(query, k, v, lengths, positions):
      k, v = jax.tree.map(lambda x: x[:, :, :slots], (k, v))
      slot = jnp.arange(slots, dtype=jnp.int32)
      seen = (slot < lengths[:, None])[:, None]
      if window:
        seen &= positions[..., None] - slot < window
      return _part(query, k, v, seen, softcap)

    return part

  sizes, size = [], _LEAST
  while size < k.shape[2]:
    sizes.append(size)
    size *= 2
  sizes.append(k.shape[2])
  index = jnp.searchsorted(jnp.array(sizes), jnp.max(lengths))
  return jax.lax.switch(jnp.minimum(index, len(sizes) - 1),
                        [over(size) for size in sizes], query, k, v, lengths,
                        positions)


def _part(query: jax.Array, k: Nibbles, v: Nibbles, seen: jax.Array,
          softcap: float) -> plain.Part:
  """Returns the part over quantised slots, see `specjax.attention`.

  Args:
    query: `[B, S, G * H, D]` queries.
    k: keys.
    v: values.
    seen: `[B, 1 or S, C]` bool, slots that each query sees.
    softcap: soft-cap of the scores; 0 disables it.
  """
  heads, size = k.shape[1], query.shape[1]
  wide = jnp.promote_types(query.dtype, jnp.float32)
  product = functools.partial(jnp.einsum, preferred_element_type=wide)
  folded = plain.folded(query, heads)
  scores = sum(product("bhqd,bhtd->bhqt", part, half) for part, half in zip(
      jnp.split(folded, 2, axis=-1), k.halves()))
  scores *= (k.scale[..., 0].astype(wide) * query.shape[3]**-0.5)[:, :, None]
  if softcap:
    scores = softcap * jnp.tanh(scores / softcap)
  batch, _, rows, slots = scores.shape
  scores = scores.reshape(batch, heads, rows // size, size, slots)
  scores = jnp.where(seen[:, None, None], scores, plain.MASKED)
  top = jnp.max(scores, axis=-1, keepdims=True)
  weights = jnp.exp(scores - top)
  total = jnp.sum(weights, axis=-1, keepdims=True)
  scaled = (weights * v.scale[..., 0].astype(wide)[:, :, None, None]).reshape(
      batch, heads, rows, slots).astype(v.dtype)
  out = jnp.concatenate([product("bhqt,bhtd->bhqd", scaled, half)
                         for half in v.halves()], axis=-1)
  out = out / total.reshape(batch, heads, rows, 1)
  log = (top + jnp.log(total)).reshape(batch, heads, rows)
  return plain.unfolded(out, size), plain.unfolded(log, size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedKV(CacheFactory):
  """Factory of `QuantizedCache` for `Transformer(cache=)`.

    >>> import dataclasses
    >>> import specjax as sj
    >>> pair = sj.testing.tiny_pair(vocab_size=5)
    >>> model = dataclasses.replace(pair.target, cache=QuantizedKV(bits=4))
    >>> cache = model.init_cache(pair.params["target"], 1, 128)
    >>> cache.k[0].upper.nbytes  # 1 head of 8 channels
    512

  Attributes:
    bits: bits per number, 8 or 4. With 4 there are only upper nibbles.
  """

  bits: int = 4

  def __post_init__(self):
    if self.bits not in (8, 4):
      raise ValueError(f"bits is {self.bits!r}; it must be 8 or 4")

  def empty(self, **sizes: Any) -> QuantizedCache:
    """Returns an empty cache, see `QuantizedCache.empty`."""
    return QuantizedCache.empty(bits=self.bits, **sizes)
