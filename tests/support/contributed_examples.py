"""Examples of components; docs/extending.md shows most of them."""

import dataclasses

from contributed import Contributed
from contributed import VOCAB
from flax import struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

import specjax as sj
from specjax import testing
from specjax.caches import dense
from specjax.drafters import draft_model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repeat(sj.interfaces.Drafter):
  """Drafts the token before the root again, with certainty."""

  vocab_size: int
  num_nodes = 2
  provides = ("chain", "iid", "conditional", "autoregressive")

  def propose(self, params, keys, state):
    at = jnp.maximum(state.lengths[:, None] - jnp.array([2, 1]), 0)
    last = jnp.take_along_axis(state.tokens, at, axis=1)
    probs = jax.nn.one_hot(last[:, :1], self.vocab_size)
    return jax.vmap(sj.Draft.chain)(last[:, 1], last[:, :1], probs), None

  def commit(self, params, drafter, draft, verdict, target_output, count, own):
    return drafter


@dataclasses.dataclass(frozen=True)
class FirstToken(sj.Verifier):
  """Token verification of the first drafted token; the others are dropped."""

  def law(self, draft, target_probs):
    x, p, q = draft.tokens[1], target_probs[0], draft.probs[1]
    drawn = q.at[x].get(mode="fill", fill_value=0)  # 0: padding
    accept = jnp.where(
        drawn > 0, jnp.minimum(1, p[x] / jnp.where(drawn > 0, drawn, 1)), 0)
    rest = jnp.maximum(p - q, 0)
    some = rest.sum() > 0
    rest = jnp.where(some, rest / jnp.where(some, rest.sum(), 1), p)
    stop = jnp.zeros(len(target_probs)).at[:2].set(jnp.stack(
        [1 - accept, accept])).astype(p.dtype)
    return sj.Law(stop=stop, next_token=target_probs.at[0].set(rest))


@struct.dataclass
class SlotCache(sj.interfaces.Cache):
  """A cache whose arrays have the slots before the heads: `[B, C, H, D]`."""

  k: tuple[jax.Array, ...]
  v: tuple[jax.Array, ...]
  lengths: jax.Array

  @classmethod
  def empty(cls, *, layers, batch, heads, capacity, head_dim, dtype):
    zeros = (jnp.zeros((batch, capacity, heads, head_dim), dtype),) * layers
    return cls(k=zeros, v=zeros, lengths=jnp.zeros((batch,), jnp.int32))

  @property
  def capacity(self):
    return self.k[0].shape[1]

  def append(self, layer, k, v, after=0):
    return self._put(layer, k, v, self.lengths + after)

  def _put(self, layer, k, v, starts):
    at = starts[:, None] + jnp.arange(k.shape[1])
    put = lambda all, new: tuple(
        old.at[jnp.arange(len(at))[:, None], at].set(new) if i == layer else old
        for i, old in enumerate(all))
    return self.replace(k=put(self.k, k), v=put(self.v, v))

  def attend(self, layer, query, ancestors):
    slot = jnp.arange(self.capacity) - self.lengths[:, None]
    block = jnp.pad(ancestors, ((0, 0), (0, 0), (0, self.capacity)))
    index = jnp.broadcast_to(jnp.maximum(slot, 0)[:, None], (
        *ancestors.shape[:2], self.capacity))
    visible = (slot < 0)[:, None] | jnp.take_along_axis(block, index, axis=2)
    return dense.grouped_attention(
        query, self.k[layer].swapaxes(1, 2), self.v[layer].swapaxes(1, 2),
        visible & (slot < ancestors.shape[2])[:, None])

  def commit(self, path, count):
    take = lambda x: jnp.take_along_axis(
        x, (self.lengths[:, None] + path)[..., None, None], axis=1)
    new = self
    for i, (k, v) in enumerate(zip(self.k, self.v)):
      new = new._put(i, take(k), take(v), self.lengths)
    return new.rollback(self.lengths + count)

  def rollback(self, lengths):
    return self.replace(lengths=jnp.asarray(lengths, jnp.int32))

  def specs(self, axis, rows=None):
    split = lambda all: (PartitionSpec(rows, None, axis, None),) * len(all)
    return SlotCache(split(self.k), split(self.v), PartitionSpec(rows))


@dataclasses.dataclass(frozen=True)
class Bigram(sj.interfaces.Model):
  """A model whose logits are the row of a table: the last token's."""

  vocab_size: int = VOCAB
  context_length: int = 512

  def init_cache(self, params, batch, capacity):
    return testing.LengthCache(lengths=jnp.zeros((batch,), jnp.int32))

  def __call__(self, params, tokens, depths=None, ancestors=None, cache=None):
    logits = params[tokens]
    return sj.types.ModelOutput(logits=logits, hidden=logits, cache=cache)


def bigram():
  tables = 2 * jax.random.normal(jax.random.key(5), (2, VOCAB, VOCAB))
  return Contributed(
      draft_model(model=Bigram(), gamma=2), sj.verifiers.Block(), Bigram(),
      {"target": tables[0], "drafter": (tables[0] + tables[1]) / 2})
