"""A dense cache that attends over slots and block in one piece: a toy."""

from flax import struct
import jax.numpy as jnp

from specjax.caches.dense import grouped_attention
from specjax.caches.dense import KVCache


@struct.dataclass
class WholeCache(KVCache):
  """`KVCache` with one softmax over one concatenated array."""

  def attend(self, layer, query, ancestors):
    past = jnp.arange(self.capacity) < self.in_slots[:, None]
    past = jnp.repeat(past[:, None], query.shape[1], axis=1)
    k, v = (jnp.concatenate([old[layer], new[layer]], axis=2) for old, new in (
        (self.k, self.block_k), (self.v, self.block_v)))
    return grouped_attention(query, k, v, jnp.concatenate(
        [past, self.in_block(ancestors)], axis=2))
