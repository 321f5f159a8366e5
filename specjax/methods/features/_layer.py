"""Network of a feature layer, and its keys and values without a cache."""

import dataclasses
from typing import Any

from flax import linen as nn
from flax import struct
import jax
import jax.numpy as jnp

from specjax import attention
from specjax.caches.dense import visible_slots
from specjax.interfaces import Cache
from specjax.models import layers
from specjax.models.features import FeatureConfig
from specjax.trees import topology


@struct.dataclass
class Keys:
  """Keys and values of training passes, which run without a cache.

  Training unrolls the draft steps of all positions of a sequence in parallel.
  The first pass reads T positions from the target's features. Each later pass
  reads the positions again from the layer's own output. There, a position
  attends to the keys that were visible to it in the first pass. From every
  later pass it attends only to the key at its own position. The i-th later pass
  stands for the token i positions further. If the layer has a window, the
  window therefore ends i positions further, and the first keys leave it.

  Attributes:
    visible: mask `[B or 1, S, T]` bool, the keys of the first pass to which
      each position attends.
    first: keys and values of the first pass, each `[B, T, H, D]`, by layer.
    later: keys and values of I later passes, each `[B, S, I, H, D]`, by layer.
      A position attends only to its own I keys.
    own: True if the next `append` adds the keys of a later pass.
  """

  visible: jax.Array
  first: dict[int, tuple[jax.Array, jax.Array]] = struct.field(
      default_factory=dict)
  later: dict[int, tuple[jax.Array, jax.Array]] = struct.field(
      default_factory=dict)
  own: bool = struct.field(pytree_node=False, default=False)

  def append(self, layer: int, k: jax.Array, v: jax.Array, after: int = 0
             ) -> "Keys":
    """Appends `k`, `v [B, S, H, D]` of a pass, see `interfaces.Cache`."""
    del after
    old, new = self.first, (k, v)
    if self.own:
      old, new = self.later, (k[:, :, None], v[:, :, None])
    if layer in old:
      new = tuple(jnp.concatenate(pair, axis=1 + self.own)
                  for pair in zip(old[layer], new))
    grown = {**old, layer: new}
    return self.replace(later=grown) if self.own else self.replace(first=grown)

  def attend(self, layer: int, query: jax.Array, visible: jax.Array,
             window: int = 0, softcap: float = 0.0) -> jax.Array:
    """Returns the output of attention, with the shape of `query`.

    `query` is `[B, S, G * H, D]`: G query heads share each of the H key heads.
    """
    k, v = self.first[layer]
    own = self.later[layer][0].shape[2] if layer in self.later else 0
    if window:
      visible = visible_slots(
          jnp.zeros(visible.shape[:1], jnp.int32), visible, k.shape[1],
          window, topology.depths_of(visible) + own)
    part = attention.block_attention(
        query, k.swapaxes(1, 2), v.swapaxes(1, 2), visible, softcap=softcap)
    if own:  # without a window, the slice `-0:` contains all keys
      part = attention.merge(part, _own_part(
          query, *(x[:, :, -window:] for x in self.later[layer]), softcap))
    return part[0].astype(v.dtype)

  def at(self, rows: jax.Array) -> "Keys":
    """Returns the keys for later passes over n of the positions.

    Args:
      rows: indices `[B, n]` of these positions.
    """
    take = lambda x: jnp.take_along_axis(
        x, rows.reshape(*rows.shape, *(1,) * (x.ndim - 2)), axis=1)
    visible = jnp.broadcast_to(
        self.visible, (len(rows), *self.visible.shape[1:]))
    return self.replace(
        visible=take(visible), later=jax.tree.map(take, self.later))


def _own_part(query, k, v, softcap):
  """Returns attention of each position over its own `k`, `v [B, S, I, H, D]`.

  Returns:
    Output `[B, S, G * H, D]`, and the logarithm of the softmax denominator,
    `[B, S, G * H]`.
  """
  wide = jnp.promote_types(query.dtype, jnp.float32)
  shape, heads = query.shape, k.shape[3]
  query = (query * shape[3]**-0.5).reshape(*shape[:2], heads, -1, shape[3])
  scores = jnp.einsum("bshgd,bsihd->bshgi", query, k,
                      preferred_element_type=wide)
  if softcap:
    scores = softcap * jnp.tanh(scores / softcap)
  log = jax.nn.logsumexp(scores, axis=-1)
  weights = jnp.exp(scores - log[..., None]).astype(v.dtype)
  out = jnp.einsum("bshgi,bsihd->bshgd", weights, v,
                   preferred_element_type=wide)
  return out.reshape(shape), log.reshape(shape[:3])


@dataclasses.dataclass(frozen=True)
class LayerOf(Cache):
  """View of some layers of a cache, for a module whose first layer is layer 0.

  Attributes:
    cache: cache of all modules.
    layer: index of the module's first layer in the cache.
  """

  cache: Any
  layer: int

  def append(self, layer: int, k: jax.Array, v: jax.Array, after: int = 0
             ) -> "LayerOf":
    """Appends keys and values of a pass, see `interfaces.Cache`."""
    return LayerOf(self.cache.append(self.layer + layer, k, v, after=after),
                   self.layer)

  def attend(self, layer: int, query: jax.Array, visible: jax.Array,
             **options: Any) -> jax.Array:
    """Returns the output of attention, see `interfaces.Cache`."""
    return self.cache.attend(self.layer + layer, query, visible, **options)

  def is_fused(self, x: jax.Array) -> bool:
    return self.cache.is_fused(x)

  def attend_new(self, layer: int, *args: Any, **options: Any
                 ) -> tuple[jax.Array, "LayerOf"]:
    out, cache = self.cache.attend_new(self.layer + layer, *args, **options)
    return out, LayerOf(cache, self.layer)


class Entry(nn.Module):
  """Projects taps to the layer's input features.

  The taps `[B, S, F]` are the concatenated hidden states of the target that the
  layer reads. The features are `[B, S, D]`.
  """

  config: FeatureConfig

  @nn.compact
  def __call__(self, taps):
    c = self.config
    if c.entry_norm == "each":
      parts = jnp.split(taps, len(c.taps), axis=-1)
      taps = jnp.concatenate(
          [layers.Norm(c, name=f"entry_norm_{i}")(part)
           for i, part in enumerate(parts)], axis=-1)
    elif c.entry_norm == "all":
      taps = layers.Norm(c, name="entry_norm")(taps)
    return layers.Linear((c.width,), c.entry_bias, name="entry")(taps)


class FeatureModule(nn.Module):
  """Maps features `[B, S, D]` and token embeddings to new features.

  It returns the residual stream, the input of the LM head and the cache.
  """

  config: FeatureConfig

  @nn.compact
  def __call__(self, hidden, embedded, positions, visible, cache):
    c = self.config
    x, read = hidden, None
    if c.fusion != "none":
      if c.fusion_norms:
        embedded = layers.Norm(c, name="embedding_norm")(embedded)
        hidden = layers.Norm(c, name="hidden_norm")(hidden)
      both = jnp.concatenate([embedded, hidden], axis=-1)
      if c.fusion == "attention":
        x, read = hidden if c.norm_before_residual else x, both
      else:
        x = layers.Linear((c.width,), c.fusion_bias, name="fusion")(both)
    if read is None and not c.attention_norm:
      read = x
    tables = layers.RotaryTables.of(c, positions, x.dtype)
    x, cache = layers.decoder_layer(c, 0, x, tables, visible, cache, read)
    for i in range(1, c.layers):
      x, cache = layers.decoder_layer(c, i, x, tables, visible, cache)
    out = layers.Norm(c, name="final_norm")(x) if c.final_norm == "own" else x
    return x, out, cache
