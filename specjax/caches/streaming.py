"""A cache of the first and the last tokens of a row.

StreamingLLM (Xiao et al. 2023, arXiv:2309.17453): a model attends to the first
few tokens, the *sinks*, and to the last W tokens. It remains fluent on
sequences of any length, and the cost per token does not grow with the length.
Such a cache of a drafter does not change the output distribution, because the
target has its own cache. MagicDec (Sadhukhan et al. 2024, arXiv:2408.11049)
drafts with the target's weights and such a cache. TriForce (arXiv:2404.11912)
drafts with a tiny model and such a cache.

A token at position t sees the sinks and the tokens from t - W + 1 to t. These
depend on the sequence alone, not on the position where a pass began. So drafts
remain autoregressive. (A drafter raises an error if the `slack` of the cache is
too small for this.) Positions are counted in the sequence, whereas StreamingLLM
counts them in the cache.
"""

import dataclasses
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax import attention
from specjax.caches import dense
from specjax.caches.dense import KVCache
from specjax.interfaces import CacheFactory
from specjax.utils import fields

_NEVER = np.iinfo(np.int32).max
_SLACK = 64  # tokens; specjax's drafters remove fewer tokens from a cache


@struct.dataclass
class StreamingCache(KVCache):
  """A `KVCache` of fixed size: sinks, then a ring buffer of the last tokens.

  `k` and `v` are L arrays `[B, H, sinks + ring, D]`. The token at position t is
  in slot t if it is a sink, else in slot (t - sinks) mod ring of the ring. The
  ring has `slack` more slots than the window. So after `slack` tokens are
  removed from the end, the window is still complete.

  Attributes:
    first: `[B]` int32, smallest position whose token is in the ring.
    end: `[B]` int32, length of the prompt while it is read. Tokens at later
      positions are padding.
    sinks: number of first tokens that are retained.
    window: W, number of last tokens that a token sees, including itself.
  """

  first: jax.Array | None = None
  end: jax.Array | None = None
  sinks: int = struct.field(pytree_node=False, default=4)
  window: int = struct.field(pytree_node=False, default=252)

  @classmethod
  def empty(cls, *, layers: int, batch: int, heads: int, capacity: int,
            head_dim: int, dtype: jax.typing.DTypeLike, sinks: int = 4,
            window: int = 252, slack: int = _SLACK) -> "StreamingCache":
    """Returns an empty cache for sequences of any length, see `Streaming`."""
    del capacity
    shape = (batch, heads, sinks + window + slack, head_dim)
    zeros = lambda: tuple(jnp.zeros(shape, dtype) for _ in range(layers))
    # Separate arrays, because the loop donates each.
    none = lambda: jnp.zeros((batch,), jnp.int32)
    return cls(k=zeros(), v=zeros(), lengths=none(), first=none(),
               end=none() + _NEVER, sinks=sinks, window=window)

  @property
  def capacity(self) -> int:
    """Unbounded: the ring accepts sequences of any length."""
    return _NEVER

  def until(self, end: jax.Array) -> "StreamingCache":
    """Sets the lengths of the prompts that the next passes read.

    Tokens at later positions are padding and are not written to the ring. The
    setting applies until `rollback` removes the padding after the prompt.

    Args:
      end: `[B]` int32, length of each prompt.
    """
    return self.replace(end=end)

  def attend(self, layer: int, query: jax.Array, ancestors: jax.Array,
             window: int = 0, softcap: float = 0.0,
             depths: jax.Array | None = None,
             sink_logits: jax.Array | None = None) -> jax.Array:
    """Returns the attention of `KVCache.attend` over the retained tokens."""
    at = self.window_ends(ancestors, depths)[..., None]
    slots = self.k[layer].shape[2]
    held = self._held(slots, self.in_slots)
    past = held[:, None]
    seen = (past >= 0) & self._near(past, at, window)
    size = self.block_k[layer].shape[2]
    block = (self.in_slots[:, None] + jnp.arange(size))[:, None]
    inside = self.in_block(ancestors, window, depths)
    if size > self.window:  # else all tokens of the block are in the window
      near = self.in_block(
          ancestors, min(self.window, window or self.window), depths)
      inside &= near | self._near(block, at, window) & (block < self.sinks)
    part = attention.merge(
        attention.block_attention(query, self.k[layer], self.v[layer], seen,
                                  softcap=softcap),
        attention.block_attention(query, self.block_k[layer],
                                  self.block_v[layer], inside, softcap=softcap))
    out = attention.with_sinks(part, sink_logits)
    return out.astype(self.v[layer].dtype)

  def _near(self, past: jax.Array, at: jax.Array, window: int) -> jax.Array:
    """Returns True if a token at position `at` sees the one at `past`.

    Args:
      past: positions of the keys.
      at: positions of the queries.
      window: additional window of the layer; 0 disables it.
    """
    near = (past < self.sinks) | (at - past < self.window)
    return near & (at - past < window) if window else near

  def _held(self, slots: int, lengths: jax.Array) -> jax.Array:
    """Returns `[B, slots]` int32, position of each slot's token, or -1.

    -1 marks an empty slot.

    Args:
      slots: number of slots of a row.
      lengths: `[B]` int32, number of tokens written so far.
    """
    slot = jnp.arange(slots, dtype=jnp.int32)
    last = lengths[:, None] - 1
    ring = slots - self.sinks
    at = last - (last - slot) % ring  # last position written to each slot
    there = at >= jnp.maximum(self.first[:, None], self.sinks)
    at = jnp.where(slot < self.sinks, slot, at)
    there = jnp.where(slot < self.sinks, slot <= last, there)
    return jnp.where(there, at, -1)

  def rollback(self, lengths: jax.Array) -> "StreamingCache":
    """Sets the committed tokens of every row to `lengths [B]`.

    The ring cannot restore overwritten tokens. So removing more tokens than the
    slack leaves a gap at the start of the window.
    """
    lengths = jnp.asarray(lengths, jnp.int32)
    # Passes over a prompt increase the lengths. The first call that does not
    # increase them removes the padding. Tokens after it are not padding.
    end = jnp.where(lengths <= self.lengths, _NEVER, self.end)
    new = super().rollback(lengths)
    if new.held is None:
      return new.replace(first=jnp.minimum(new.first, lengths), end=end)
    return new.replace(first=jnp.minimum(new.first, new.held), end=end)

  def _written(self, lengths: jax.Array, path: jax.Array | None = None
               ) -> "StreamingCache":
    if not self.block_k:
      return self.replace(lengths=lengths)
    slots = self.k[0].shape[2]
    filled = jnp.minimum(lengths, self.end)
    # Positions in the slots after the write. Slots with a position below
    # `lengths` do not change.
    held = self._held(slots, jnp.maximum(filled, self.lengths))
    new = (held >= self.lengths[:, None]) & (held < filled[:, None])
    order = held - self.lengths[:, None]

    def put(old, block):
      block = dense.along(path, block)
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
  """Factory of `StreamingCache` for `Transformer(cache=)`.

    >>> import dataclasses
    >>> import specjax as sj
    >>> pair = sj.testing.tiny_pair(vocab_size=5)
    >>> model = dataclasses.replace(
    ...     pair.target, cache=Streaming(sinks=2, window=6))
    >>> model.init_cache(pair.params["target"], 1, 1 << 20).k[0].shape[2]
    72

  Attributes:
    sinks: number of first tokens that are retained. 0 is a plain window.
    window: W, number of last tokens that a token sees, including itself.
    slack: number of tokens that can be removed without a gap in the window. A
      draft model needs gamma + 2 for drafts of gamma tokens, or gamma + 17
      with a controller.
  """

  sinks: int = 4
  window: int = 252
  slack: int = _SLACK

  def __post_init__(self):
    fields.check_fields(self, "window")
    fields.check_fields(self, "sinks", "slack", least=0)

  def empty(self, **sizes: Any) -> StreamingCache:
    """Returns an empty cache, see `StreamingCache.empty`."""
    return StreamingCache.empty(
        sinks=self.sinks, window=self.window, slack=self.slack, **sizes)
