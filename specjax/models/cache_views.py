"""Parts of a whole cache, for drafts by the model that the cache is of.

A model drafts for itself when it reads less of the past than when it verifies.
What it reads here are slots of the target's own cache, copied together at the
start of a round: nothing is read twice, no second cache is kept, and the
target's passes see the whole one, so that its law is as ever.

  Retrieved   chunks of the prompt that its last token attends to, and the last
              tokens: TriForce's middle cache
  Recent      the first tokens and the last: StreamingLLM's cache
"""

import dataclasses
from typing import Any
from typing import Protocol

from flax import struct
import jax
import jax.numpy as jnp

from specjax import attention
from specjax.caches.dense import KVCache
from specjax.models.transformer import Transformer
from specjax.models.transformer import TransformerModule
from specjax.utils import fields


class CacheView(Protocol):
  """Which part of a cache is read: what the classes of this file have."""

  def choose(self, model: Transformer, params: Any, root: jax.Array,
             cache: KVCache) -> Any:
    """What is remembered of the prompt; every leaf has the rows B first."""
    ...

  def open(self, chosen: Any, cache: KVCache) -> Any:
    """A cache with `reserve` and `settle` of a part of what another holds."""
    ...


@struct.dataclass
class View(KVCache):
  """Some slots of a cache, to which a reserved block of drafts is added.

  `k` and `v` are L arrays `[B, H, F, D]`, copies of F slots. `lengths` counts
  the whole text, so that positions are those of the text. What is drafted stays
  in the block, and goes with it.

  Attributes:
    used: `[B]` int32, slots in use, from the first.
  """

  used: jax.Array | None = None

  def attend(self, layer: int, query: jax.Array, ancestors: jax.Array,
             window: int = 0, softcap: float = 0.0) -> jax.Array:
    """As `KVCache.attend`, over the slots in use.

    Raises:
      ValueError: the layer has a window; the slots' positions are not known.
    """
    if window:
      raise ValueError(f"layer {layer} has a window of {window} tokens, and "
                       "slots of a view are in no order; draft with another "
                       "cache")
    out = attention.attend(
        query, self.k[layer], self.v[layer], self.used, self.block_k[layer],
        self.block_v[layer], self.in_block(ancestors), softcap=softcap,
        heads_axis=self.heads_axis)
    return out.astype(self.v[layer].dtype)

  def settle(self) -> "View":
    """The view as it was, without the block."""
    return self.replace(lengths=self.held, held=None, block_k=(), block_v=())


@struct.dataclass
class Chosen:
  """Which chunks of the text a view has.

  Attributes:
    chunks: `[B, L, H, K]` int32, of each layer and head; the best ones first.
    count: `[B]` int32, how many of the K count.
    end: `[B]` int32, tokens of the text that they were chosen from.
  """

  chunks: jax.Array
  count: jax.Array
  end: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retrieved:
  """The chunks that a query attends to, and the tokens since.

  Sun et al. 2024 (TriForce, arXiv:2404.11912, section 4.1): the text is cut
  into chunks, of which each layer and head keeps those whose mean key has the
  largest product with its query of the prompt's last token, the mean over the
  heads that share keys. The first chunk, which holds the attention sinks, is
  always kept. They are chosen once, for what is read changes slowly; what comes
  later is seen while it is among the last `recent` tokens. (TriForce lets new
  tokens overwrite the last of the budget, which is the same with a share of the
  budget set apart.)

  Attributes:
    budget: tokens of the chunks that are kept.
    chunk: tokens of a chunk.
    recent: last tokens after the chunks that are seen, at most.
  """

  budget: int = 1024
  chunk: int = 8
  recent: int = 256

  def __post_init__(self):
    fields.check_fields(self, "budget", "chunk", "recent")
    if self.budget % self.chunk:
      raise ValueError(f"budget is {self.budget} and chunk {self.chunk}; whole "
                       "chunks are kept: make the budget a multiple of them")

  def choose(self, model: Transformer, params: Any, root: jax.Array,
             cache: KVCache) -> Chosen:
    """The chunks that the last token of a text attends to.

    Args:
      model: whose cache it is.
      params: its parameters.
      root: `[B]` int32, the last token.
      cache: of the tokens before it.

    Raises:
      ValueError: it has fewer slots than a chunk.
    """
    count, slots = cache.lengths // self.chunk, cache.capacity // self.chunk
    if not slots:
      raise ValueError(f"chunk is {self.chunk} and the cache has "
                       f"{cache.capacity} slots; give smaller chunks, or a "
                       "larger capacity")
    queries = _queries(model, params, root, cache)
    most = min(self.budget // self.chunk, slots)
    order = jnp.arange(slots, dtype=jnp.int32)

    def best(query, k):
      batch, heads, _, dim = k.shape
      query = query.reshape(batch, heads, -1, dim).mean(2)
      chunks = k[:, :, :slots * self.chunk].reshape(
          batch, heads, slots, self.chunk, dim).mean(3)
      scores = jnp.einsum("bhd,bhcd->bhc", query, chunks)
      scores = jnp.where(order == 0, jnp.inf, scores)
      scores = jnp.where(order < count[:, None, None], scores, -jnp.inf)
      return jax.lax.top_k(scores, most)[1].astype(jnp.int32)

    return Chosen(
        chunks=jnp.stack(list(map(best, queries, cache.k)), axis=1),
        count=jnp.minimum(count, most), end=count * self.chunk)

  def open(self, chosen: Chosen, cache: KVCache) -> View:
    """The view of the tokens that a cache holds now."""
    kept = (chosen.count * self.chunk)[:, None, None, None]
    start = jnp.maximum(chosen.end, cache.lengths - self.recent)
    size = chosen.chunks.shape[3] * self.chunk
    slot = jnp.arange(size + self.recent, dtype=jnp.int32)
    within = jnp.take(chosen.chunks, jnp.minimum(slot, size - 1) // self.chunk,
                      axis=3) * self.chunk + slot % self.chunk
    since = start[:, None, None, None] + slot - kept
    source = jnp.clip(jnp.where(slot < kept, within, since), 0,
                      cache.capacity - 1)
    return _view(cache, source, kept[:, 0, 0, 0] + cache.lengths - start)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recent:
  """The first tokens of a text and the last ones, see `streaming_cache`.

  The window is cut at the start of a round and grows by what is drafted.

  Attributes:
    sinks: first tokens.
    window: last tokens.
  """

  sinks: int = 4
  window: int = 1020

  def __post_init__(self):
    fields.check_fields(self, "sinks", "window")

  def choose(self, model: Transformer, params: Any, root: jax.Array,
             cache: KVCache) -> tuple[()]:
    """Nothing: there is nothing to choose."""
    del model, params, root, cache
    return ()

  def open(self, chosen: tuple[()], cache: KVCache) -> View:
    """The view of the tokens that a cache holds now."""
    del chosen
    slot = jnp.arange(self.sinks + self.window, dtype=jnp.int32)
    skipped = jnp.maximum(cache.lengths - len(slot), 0)[:, None]
    source = jnp.where(slot < self.sinks, slot, slot + skipped)
    source = jnp.minimum(source, cache.capacity - 1)[:, None, None]
    return _view(cache, source, jnp.minimum(cache.lengths, len(slot)))


def _view(cache: KVCache, source: jax.Array, used: jax.Array) -> View:
  """The slots `source [B, L or 1, H or 1, F]` of a cache."""
  if cache.held is not None:
    raise ValueError("the cache has a reserved block, whose tokens are in no "
                     "slot; settle it before a part of it is viewed")
  take = lambda arrays: tuple(
      jnp.take_along_axis(x, source[:, i % source.shape[1], :, :, None], axis=2)
      for i, x in enumerate(arrays))
  return View(k=take(cache.k), v=take(cache.v), lengths=cache.lengths,
              used=used, heads_axis=cache.heads_axis)


def _queries(model: Transformer, params: Any, root: jax.Array, cache: KVCache
             ) -> list[jax.Array]:
  """The queries `[B, H * G, D]` of a token, of each layer."""
  ones = jnp.ones((len(root), 1, 1), bool)
  _, seen = TransformerModule(model.config).apply(
      {"params": params}, root[:, None], jnp.zeros_like(root)[:, None], ones,
      cache, mutable=["intermediates"])
  return [seen["intermediates"][f"attention_{i}"]["query"][0][:, 0]
          for i in range(model.config.layers)]
