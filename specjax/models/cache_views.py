"""Views of the target's cache, for self-speculation.

Attention over fewer tokens is faster. A target can therefore draft for itself
with passes that read only part of its cache. A view copies some slots of the
target's cache at the start of a round. No second cache is needed. The output
distribution does not change, because verification reads the complete cache.

  Retrieved   chunks of the prompt with the highest attention, and the last
              tokens (TriForce's middle cache)
  Recent      the first and the last tokens (StreamingLLM's cache)
"""

import dataclasses
from typing import Any
from typing import Protocol

import chex
from flax import struct
import jax
import jax.numpy as jnp

from specjax import attention
from specjax.caches.dense import KVCache
from specjax.models.transformer import Transformer
from specjax.models.transformer import TransformerModule
from specjax.utils import fields


class CacheView(Protocol):
  """Interface of objects that select the slots read by drafting passes."""

  def choose(self, model: Transformer, params: chex.ArrayTree, root: jax.Array,
             cache: KVCache) -> Any:
    """Returns a selection of slots, made once after the prompts.

    The selection is a tree of arrays `[B, ...]`.

    Args:
      model: model of the cache.
      params: parameters of the model.
      root: `[B]` int32 last token of each prompt.
      cache: cache of the tokens before `root`.
    """
    ...

  def open(self, chosen: Any, cache: KVCache) -> Any:
    """Returns the `View` for one round.

    Args:
      chosen: the result of `choose`.
      cache: the model's cache at the start of the round.
    """
    ...


@struct.dataclass
class View(KVCache):
  """Copies of some slots of a cache, and a reserved block for draft tokens.

  `k` and `v` are L arrays `[B, H, F, D]`, copies of F slots. `lengths` is the
  number of all committed tokens, including those without a copy. Positions are
  therefore positions in the complete sequence. `settle` drops the block.

  Attributes:
    used: `[B]` int32 number of filled slots of each row. The filled slots are
      the first ones.
  """

  used: jax.Array | None = None

  def attend(self, layer: int, query: jax.Array, ancestors: jax.Array,
             window: int = 0, softcap: float = 0.0,
             sink_logits: jax.Array | None = None) -> jax.Array:
    """Attends over the filled slots and the block, see `KVCache.attend`.

    Raises:
      ValueError: the layer has a window. A window requires the positions of the
        slots, and a view does not store them.
    """
    if window:
      raise ValueError(f"layer {layer} has a window of {window} tokens, but "
                       "slots of a view are not ordered by position: draft "
                       "with another cache")
    out = attention.attend(
        query, self.k[layer], self.v[layer], self.used, self.block_k[layer],
        self.block_v[layer], self.in_block(ancestors), softcap=softcap,
        heads_axis=self.heads_axis, sink_logits=sink_logits)
    return out.astype(self.v[layer].dtype)

  def settle(self) -> "View":
    """Returns the view without the block."""
    return self.replace(lengths=self.held, held=None, block_k=(), block_v=())


@struct.dataclass
class Chosen:
  """Chunks of the sequence selected for a view.

  Attributes:
    chunks: `[B, L, H, K]` int32 indices of the chunks of each layer and head,
      best first.
    count: `[B]` int32 number of valid entries among the K.
    end: `[B]` int32 number of tokens in complete chunks of the cache at the
      selection.
  """

  chunks: jax.Array
  count: jax.Array
  end: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retrieved:
  """View of the prompt's chunks with the highest attention, and recent tokens.

  Sun et al. 2024 (TriForce, arXiv:2404.11912, section 4.1). The prompt is
  divided into chunks. Each layer and head selects the chunks with the largest
  product of the mean key and the query of the last prompt token. The query is a
  mean over query heads with the same keys. The first chunk is always selected,
  because it contains the attention sinks. The selection is made once per
  prompt. New tokens have a separate budget `recent`, whereas TriForce
  overwrites the end of its budget with new tokens.

  Attributes:
    budget: number of tokens in the selected chunks.
    chunk: number of tokens per chunk.
    recent: maximum number of tokens after the chunks. If there are more, the
      last ones are used.
  """

  budget: int = 1024
  chunk: int = 8
  recent: int = 256

  def __post_init__(self):
    fields.check_fields(self, "budget", "chunk", "recent")
    if self.budget % self.chunk:
      raise ValueError(f"budget is {self.budget}; it must be a multiple of "
                       f"chunk, {self.chunk}")

  def choose(self, model: Transformer, params: chex.ArrayTree, root: jax.Array,
             cache: KVCache) -> Chosen:
    """Returns the chunks to which the last token attends most.

    Args:
      model: model of the cache.
      params: parameters of the model.
      root: `[B]` int32 last token of each prompt.
      cache: cache of the tokens before `root`.

    Raises:
      ValueError: the cache has fewer slots than a chunk.
    """
    count, slots = cache.lengths // self.chunk, cache.capacity // self.chunk
    if not slots:
      raise ValueError(f"chunk is {self.chunk}; the cache has only "
                       f"{cache.capacity} slots: give smaller chunks or a "
                       "larger capacity")
    queries = _queries(model, params, root, cache)
    most = min(self.budget // self.chunk, slots)
    order = jnp.arange(slots, dtype=jnp.int32)

    def best(query: jax.Array, k: jax.Array) -> jax.Array:
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
    """Returns the view of the chosen chunks and the recent tokens."""
    in_chunks = (chosen.count * self.chunk)[:, None, None, None]
    start = jnp.maximum(chosen.end, cache.lengths - self.recent)
    size = chosen.chunks.shape[3] * self.chunk
    slot = jnp.arange(size + self.recent, dtype=jnp.int32)
    within = jnp.take(chosen.chunks, jnp.minimum(slot, size - 1) // self.chunk,
                      axis=3) * self.chunk + slot % self.chunk
    since = start[:, None, None, None] + slot - in_chunks
    source = jnp.clip(jnp.where(slot < in_chunks, within, since), 0,
                      cache.capacity - 1)
    return _view(cache, source, in_chunks[:, 0, 0, 0] + cache.lengths - start)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recent:
  """View of the first and the last tokens, see `caches.streaming`.

  The first and last tokens are selected at the start of a round. During the
  round, the view grows by the draft tokens.

  Attributes:
    sinks: number of first tokens.
    window: number of last tokens.
  """

  sinks: int = 4
  window: int = 1020

  def __post_init__(self):
    fields.check_fields(self, "sinks", "window")

  def choose(self, model: Transformer, params: chex.ArrayTree, root: jax.Array,
             cache: KVCache) -> tuple[()]:
    """Returns `()`, because the view depends only on the cache's lengths."""
    del model, params, root, cache
    return ()

  def open(self, chosen: tuple[()], cache: KVCache) -> View:
    """Returns the view of the first and the last tokens of a cache."""
    del chosen
    slot = jnp.arange(self.sinks + self.window, dtype=jnp.int32)
    skipped = jnp.maximum(cache.lengths - len(slot), 0)[:, None]
    source = jnp.where(slot < self.sinks, slot, slot + skipped)
    source = jnp.minimum(source, cache.capacity - 1)[:, None, None]
    return _view(cache, source, jnp.minimum(cache.lengths, len(slot)))


def _view(cache: KVCache, source: jax.Array, used: jax.Array) -> View:
  """Returns the view with copies of the slots `source` of a cache.

  Args:
    cache: cache without a reserved block.
    source: `[B, L or 1, H or 1, F]` indices of slots.
    used: `[B]` number of filled slots, see `View`.
  """
  if cache.held is not None:
    raise ValueError("the cache has a reserved block, whose tokens have no "
                     "slots; call settle before opening a view")
  take = lambda arrays: tuple(
      jnp.take_along_axis(x, source[:, i % source.shape[1], :, :, None], axis=2)
      for i, x in enumerate(arrays))
  return View(k=take(cache.k), v=take(cache.v), lengths=cache.lengths,
              used=used, heads_axis=cache.heads_axis)


def _queries(model: Transformer, params: chex.ArrayTree, root: jax.Array,
             cache: KVCache) -> list[jax.Array]:
  """Returns the queries `[B, H * G, D]` of the token `root` in each layer.

  G is the number of query heads per key head.
  """
  ones = jnp.ones((len(root), 1, 1), bool)
  _, seen = TransformerModule(model.config).apply(
      {"params": params}, root[:, None], jnp.zeros_like(root)[:, None], ones,
      cache, mutable=["intermediates"])
  return [seen["intermediates"][f"attention_{i}"]["query"][0][:, 0]
          for i in range(model.config.layers)]
