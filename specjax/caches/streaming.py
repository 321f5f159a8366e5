"""A cache of the first tokens of a row and of its last ones.

StreamingLLM, Xiao et al. 2023 (arXiv:2309.17453): a model that attends to a few
first tokens, the *sinks*, and to the last W, stays fluent on texts of any
length, at the cost of a short one. As the cache of a drafter it changes what is
drafted and never what is written: the target verifies with a cache of its own.
MagicDec (Sadhukhan et al. 2024, arXiv:2408.11049) drafts so with the target's
own weights, TriForce (arXiv:2404.11912) with a tiny model's.

A token at position t sees the sinks and the tokens from t - W + 1 on: what it
sees depends on the text alone, not on where a pass began, so that drafts are as
autoregressive as with a whole cache. (Too little slack for this is refused.)
Positions are those of the text. (StreamingLLM counts them within the cache, so
that they stay below the longest that the model was trained for; here texts end
at the context length anyway.)
"""

import dataclasses
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax import attention
from specjax.caches.dense import KVCache
from specjax.interfaces import CacheFactory
from specjax.trees import topology
from specjax.utils import fields

_NEVER = np.iinfo(np.int32).max
_SLACK = 64  # tokens: more than drafters here take back


@struct.dataclass
class StreamingCache(KVCache):
  """A `KVCache` of fixed size: sinks, then a ring of the last tokens.

  `k` and `v` are L arrays `[B, H, sinks + ring, D]`. The token at position t is
  in slot t if that is a sink, and else in slot t - sinks of the ring, modulo
  its size. The ring has a few slots more than the window, so that tokens can
  be taken back: those that they pushed out are still there.

  Attributes:
    first: `[B]` int32, the first position that the ring holds.
    end: `[B]` int32: what comes after it is padding of a prompt.
    sinks: first tokens that stay.
    window: W, last tokens that a token sees, itself included.
  """

  first: jax.Array | None = None
  end: jax.Array | None = None
  sinks: int = struct.field(pytree_node=False, default=4)
  window: int = struct.field(pytree_node=False, default=252)

  @classmethod
  def empty(cls, *, layers: int, batch: int, heads: int, capacity: int,
            head_dim: int, dtype: Any, sinks: int = 4, window: int = 252,
            slack: int = _SLACK) -> "StreamingCache":
    """A cache for texts of any length; see `Streaming` for the sizes."""
    del capacity
    shape = (batch, heads, sinks + window + slack, head_dim)
    zeros = lambda: tuple(jnp.zeros(shape, dtype) for _ in range(layers))
    # An array for each: the loop donates them one by one.
    none = lambda: jnp.zeros((batch,), jnp.int32)
    return cls(k=zeros(), v=zeros(), lengths=none(), first=none(),
               end=none() + _NEVER, sinks=sinks, window=window)

  @property
  def capacity(self) -> int:
    """Slots of a row as the loop counts them: no text has too many tokens."""
    return _NEVER

  def until(self, end: jax.Array) -> "StreamingCache":
    """The same cache, told which tokens of the next passes are padding.

    They would push the text out of the ring. It holds until tokens are taken
    back, as they are when a prompt was read.

    Args:
      end: `[B]` int32, where the text of each row ends.
    """
    return self.replace(end=end)

  def attend(self, layer: int, query: jax.Array, ancestors: jax.Array,
             window: int = 0, softcap: float = 0.0) -> jax.Array:
    """As `KVCache.attend`, over what is left of the past."""
    depths = topology.depths_of(ancestors)
    at = (self.lengths[:, None] + depths)[..., None]
    slots = self.k[layer].shape[2]
    held = self._held(slots, self.in_slots)
    past = held[:, None]
    seen = (past >= 0) & self._near(past, at, window)
    size = self.block_k[layer].shape[2]
    block = (self.in_slots[:, None] + jnp.arange(size))[:, None]
    inside = self.in_block(ancestors, window)
    if size > self.window:  # else all of a block is near
      near = self.in_block(ancestors, min(self.window, window or self.window))
      inside &= near | self._near(block, at, window) & (block < self.sinks)
    out, _ = attention.merge(
        attention.block_attention(query, self.k[layer], self.v[layer], seen,
                                  softcap=softcap),
        attention.block_attention(query, self.block_k[layer],
                                  self.block_v[layer], inside, softcap=softcap))
    return out.astype(self.v[layer].dtype)

  def _near(self, past, at, window):
    """Whether tokens at positions `at` see those at `past`, both broadcast."""
    near = (past < self.sinks) | (at - past < self.window)
    return near & (at - past < window) if window else near

  def _held(self, slots, lengths):
    """`[B, slots]` int32, the position of what a slot holds; -1: nothing."""
    slot = jnp.arange(slots, dtype=jnp.int32)
    last = lengths[:, None] - 1
    ring = slots - self.sinks
    at = last - (last - slot) % ring  # the last one that belongs there
    there = at >= jnp.maximum(self.first[:, None], self.sinks)
    at = jnp.where(slot < self.sinks, slot, at)
    there = jnp.where(slot < self.sinks, slot <= last, there)
    return jnp.where(there, at, -1)

  def rollback(self, lengths: jax.Array) -> "StreamingCache":
    """As `KVCache.rollback`.

    What the ring has lost does not come back: a token that is taken back leaves
    a gap at the far end of the window once it is more than the slack.
    """
    lengths = jnp.asarray(lengths, jnp.int32)
    # A prompt is read in passes that add tokens; its padding is taken back.
    end = jnp.where(lengths <= self.lengths, _NEVER, self.end)
    new = super().rollback(lengths)
    if new.held is None:
      return new.replace(first=jnp.minimum(new.first, lengths), end=end)
    return new.replace(first=jnp.minimum(new.first, new.held), end=end)

  def _written(self, take, lengths):
    """The block, or what is taken of it, in the slots of its positions."""
    if not self.block_k:
      return self.replace(lengths=lengths)
    slots = self.k[0].shape[2]
    filled = jnp.minimum(lengths, self.end)
    # Slots of the text as it will be; the positions before it stay.
    held = self._held(slots, jnp.maximum(filled, self.lengths))
    new = (held >= self.lengths[:, None]) & (held < filled[:, None])
    order = held - self.lengths[:, None]

    def put(old, block):
      block = take(block)
      at = jnp.clip(order, 0, block.shape[2] - 1)[:, None, :, None]
      return jnp.where(new[:, None, :, None],
                       jnp.take_along_axis(block, at, axis=2), old)

    first = jnp.maximum(self.first, filled - (slots - self.sinks))
    return self.replace(
        k=tuple(map(put, self.k, self.block_k)),
        v=tuple(map(put, self.v, self.block_v)), lengths=lengths, first=first,
        block_k=(), block_v=(), held=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Streaming(CacheFactory):
  """`StreamingCache` of other sizes, for `Transformer(cache=)`.

    >>> import dataclasses
    >>> import specjax as sj
    >>> pair = sj.testing.tiny_pair(vocab_size=5)
    >>> model = dataclasses.replace(
    ...     pair.target, cache=Streaming(sinks=2, window=6))
    >>> model.init_cache(pair.params["target"], 1, 1 << 20).k[0].shape[2]
    72

  Attributes:
    sinks: first tokens that stay; 0: a plain window.
    window: W, last tokens that a token sees, itself included.
    slack: tokens that can be taken back and leave no gap: of a drafter, two
      more than it drafts in a round; with a controller, 17 more.
  """

  sinks: int = 4
  window: int = 252
  slack: int = _SLACK

  def __post_init__(self):
    fields.check_fields(self, "window")
    fields.check_fields(self, "sinks", "slack", least=0)

  def empty(self, **sizes: Any) -> StreamingCache:
    """See `StreamingCache.empty`."""
    return StreamingCache.empty(
        sinks=self.sinks, window=self.window, slack=self.slack, **sizes)
