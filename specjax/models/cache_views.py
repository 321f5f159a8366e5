"""Views of the target's cache, with which the target drafts for itself.

Passes over a short past are faster. So a model can draft for itself if its
drafting passes read only part of its cache. A view copies some slots of the
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
  """Interface of views: selection of the slots that a drafting pass reads."""

  def choose(self, model: Transformer, params: chex.ArrayTree, root: jax.Array,
             cache: KVCache) -> Any:
    """Returns a selection made after the prompts, arrays `[B, ...]`.

    Args:
      model: model of the cache.
      params: parameters of the model.
      root: `[B]` int32, the last token of each prompt.
      cache: cache of the tokens before it.
    """
    ...

  def open(self, chosen: Any, cache: KVCache) -> Any:
    """Returns the `View` of a selection and the current cache, for a round."""
    ...


@struct.dataclass
class View(KVCache):
  """Copies of some slots of a cache, plus a reserved block of drafts.

  `k` and `v` are L arrays `[B, H, F, D]`, copies of F slots. `lengths` counts
  all committed tokens, also tokens without a copy. So positions are positions
  in the complete sequence. `settle` drops the block and its drafts.

  Attributes:
    used: number of filled slots of each row, `[B]` int32. The filled slots are
      the first ones.
  """

  used: jax.Array | None = None

  def attend(self, layer: int, query: jax.Array, ancestors: jax.Array,
             window: int = 0, softcap: float = 0.0) -> jax.Array:
    """Attends over the filled slots and the block, see `KVCache.attend`.

    Raises:
      ValueError: the layer has a window, which needs the slots' positions.
    """
    if window:
      raise ValueError(f"layer {layer} has a window of {window} tokens, but "
                       "slots of a view are not ordered by position: draft "
                       "with another cache")
    out = attention.attend(
        query, self.k[layer], self.v[layer], self.used, self.block_k[layer],
        self.block_v[layer], self.in_block(ancestors), softcap=softcap,
        heads_axis=self.heads_axis)
    return out.astype(self.v[layer].dtype)

  def settle(self) -> "View":
    """Returns the view without the block."""
    return self.replace(lengths=self.held, held=None, block_k=(), block_v=())


@struct.dataclass
class Chosen:
  """Chunks of the sequence that were selected for a view.

  Attributes:
    chunks: `[B, L, H, K]` int32, numbers of the chunks of each layer and head,
      best first.
    count: `[B]` int32, number of valid entries among the K.
    end: `[B]` int32, number of tokens that were in the cache at the selection.
  """

  chunks: jax.Array
  count: jax.Array
  end: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retrieved:
  """View of the prompt's chunks with the highest attention, and recent tokens.

  Sun et al. 2024 (TriForce, arXiv:2404.11912, section 4.1). The prompt is cut
  into chunks. Each layer and head selects the chunks whose mean key has the
  largest product with the query of the last prompt token, averaged over query
  heads with the same keys. The first chunk contains the attention sinks and is
  always selected. The selection is made once per prompt. (TriForce overwrites
  the end of the budget with new tokens. Here new tokens have the separate share
  `recent`.)

  Attributes:
    budget: number of tokens in the selected chunks.
    chunk: number of tokens per chunk.
    recent: maximum number of tokens after the prompt; the last ones are used.
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
    """Returns the chunks with the highest attention of the last token.

    Args:
      model: model of the cache.
      params: parameters of the model.
      root: `[B]` int32, the last token.
      cache: cache of the tokens before it.

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
    """Returns the view of the current tokens of a cache."""
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

  The view is cut at the start of a round and grows by the drafted tokens.

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
    """Returns `()`: the view depends only on the lengths."""
    del model, params, root, cache
    return ()

  def open(self, chosen: tuple[()], cache: KVCache) -> View:
    """Returns the view of the current tokens of a cache."""
    del chosen
    slot = jnp.arange(self.sinks + self.window, dtype=jnp.int32)
    skipped = jnp.maximum(cache.lengths - len(slot), 0)[:, None]
    source = jnp.where(slot < self.sinks, slot, slot + skipped)
    source = jnp.minimum(source, cache.capacity - 1)[:, None, None]
    return _view(cache, source, jnp.minimum(cache.lengths, len(slot)))


def _view(cache: KVCache, source: jax.Array, used: jax.Array) -> View:
  """Returns the slots `source [B, L or 1, H or 1, F]` of a cache."""
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
  """Returns the queries `[B, H * G, D]` of a token in each layer."""
  ones = jnp.ones((len(root), 1, 1), bool)
  _, seen = TransformerModule(model.config).apply(
      {"params": params}, root[:, None], jnp.zeros_like(root)[:, None], ones,
      cache, mutable=["intermediates"])
  return [seen["intermediates"][f"attention_{i}"]["query"][0][:, 0]
          for i in range(model.config.layers)]
