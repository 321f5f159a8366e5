"""States of recurrent layers, with rollback to any node of a draft.

A recurrent layer has a state instead of keys and values. A token changes the
state in place, so rejected tokens cannot be removed from it. This cache
therefore keeps the state of the committed tokens alone. A pass over a draft
reads the state once and stores the *contributions* of the draft's nodes. They
determine the state after every node, and a child starts from the state of its
parent. `commit` adds the contributions of the accepted path. No state is copied
per node: a node takes `Dk + Dv + 1` numbers per head instead of `Dk * Dv`.

Two states exist. A short convolution reads its last inputs, and the
contribution of a node is its input. Gated DeltaNet (Yang et al. 2024,
arXiv:2412.06464) has a matrix S per head, with the gated delta rule

  S <- a S + k w^T,   w = b (v - a S^T k),   out = S^T q

for query q, key k, value v, decay a and step size b of a token. The
contribution of a node is (k, w, log a). The w of all nodes solve one triangular
system, as in the chunked form of DeltaNet (Yang et al. 2024, arXiv:2406.06484).
Here the mask of the system contains the ancestors in a tree (compare STree, Wu
et al. 2025, arXiv:2505.14969). Prompts are read with the same formulas.
"""

import functools
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from specjax.caches.dense import KVCache
from specjax.interfaces import Cache

_NEVER = np.iinfo(np.int32).max
_FEW = 32  # nodes of a draft


@struct.dataclass
class LayerState:
  """State of a recurrent layer.

  Attributes:
    tail: `[B, K - 1, C]`, last inputs of the convolution over K tokens.
    matrix: `[B, H, Dk, Dv]` float32 or wider, state S of each head; None for a
      layer that is only a convolution.
  """

  tail: jax.Array
  matrix: jax.Array | None = None


@struct.dataclass
class Contributions:
  """Contributions of the T nodes of a draft to the state of a layer.

  Attributes:
    inputs: `[B, T, C]`, inputs of the convolution.
    keys: `[B, H, T, Dk]`, keys k; None for a layer that is only a convolution.
    writes: `[B, H, T, Dv]`, vectors w that the nodes write.
    decays: `[B, H, T]`, logarithm of the product of the decays on the path from
      the first node of the draft, up to and including the node.
  """

  inputs: jax.Array
  keys: jax.Array | None = None
  writes: jax.Array | None = None
  decays: jax.Array | None = None


def windows(tail: jax.Array, inputs: jax.Array, ancestors: jax.Array
            ) -> jax.Array:
  """Returns the inputs `[B, T, K, C]` that a convolution reads at each node.

  They are those of the last K tokens on the path of a node, in order, the last
  of them its own.

  Args:
    tail: `[B, K - 1, C]`, inputs before the draft.
    inputs: `[B, T, C]`, inputs of the nodes.
    ancestors: `[B, T, T]` bool, nodes on the path to each node, with itself.
  """
  before, size = tail.shape[1], inputs.shape[1]
  # Nodes are numbered such that parents come first, so the number of ancestors
  # up to a node is the place of this node on the path.
  place = jnp.cumsum(ancestors, axis=2, dtype=jnp.int32) - 1
  back = place[..., -1:, None] - (before - jnp.arange(before + 1))[:, None]
  there = (place[:, :, None] == back) & ancestors[:, :, None]
  node = jnp.sum(there * jnp.arange(size, dtype=jnp.int32), axis=3)
  back = back[..., 0]
  source = jnp.where(back < 0, before + back, before + node)
  both = jnp.concatenate([tail, inputs.astype(tail.dtype)], axis=1)
  return jnp.take_along_axis(
      both, source.reshape(len(source), -1, 1), axis=1).reshape(
          *source.shape, -1)


def delta_rule(matrix: jax.Array, query: jax.Array, key: jax.Array,
               value: jax.Array, decay: jax.Array, step: jax.Array,
               ancestors: jax.Array
               ) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
  """Evaluates Gated DeltaNet at all nodes of a draft.

  Args:
    matrix: `[B, H, Dk, Dv]`, state before the draft.
    query: `[B, H, T, Dk]` queries, in the dtype of `matrix`.
    key: `[B, H, T, Dk]` keys.
    value: `[B, H, T, Dv]` values.
    decay: `[B, H, T]`, logarithms of the decays, at most 0.
    step: `[B, H, T]`, step sizes.
    ancestors: `[B, T, T]` bool, nodes on the path to each node, with itself.

  Returns:
    The outputs `[B, H, T, Dv]`, and `(keys, writes, decays)` of
    `Contributions`.
  """
  size = key.shape[2]
  decays = _einsum("bij,bhj->bhi", ancestors.astype(decay.dtype), decay)
  # Products of the decays after node j up to node i. Without the mask, the
  # exponential of two nodes on different paths could overflow.
  between = jnp.where(ancestors[:, None], jnp.exp(jnp.where(
      ancestors[:, None], decays[..., None] - decays[..., None, :], 0)), 0)
  # One product for queries and keys, so that the state is read once.
  both = jnp.concatenate([query, key], axis=2)
  past = _einsum("bhtd,bhde->bhte", both, matrix)
  pairs = _einsum("bhtd,bhsd->bhts", both, key)
  grown = jnp.exp(decays)[..., None]
  writes = step[..., None] * (value - grown * past[:, :, size:])
  if size > 1:
    # Node j changes what its descendant i reads with its key.
    system = step[..., None] * between * pairs[:, :, size:]
    writes = jax.lax.linalg.triangular_solve(
        system, writes, left_side=True, lower=True, unit_diagonal=True)
  out = grown * past[:, :, :size] + _einsum(
      "bhts,bhse->bhte", between * pairs[:, :, :size], writes)
  return out, (key, writes, decays)


def _einsum(formula: str, *arrays: jax.Array) -> jax.Array:
  # Rounding of a factor would enter the state and stay in it.
  return jnp.einsum(formula, *arrays, precision=jax.lax.Precision.HIGHEST)


@struct.dataclass
class RecurrentCache(Cache):
  """Keys and values of attention layers, and states of recurrent layers.

  `rollback` cannot remove committed tokens from a state, except for those that
  `until` keeps out of it. The target of a `Decoder` does not need this: it
  commits only accepted tokens.

  Attributes:
    attention: cache of the layers with attention.
    states: state of each recurrent layer.
    end: `[B]` int32, number of tokens of a prompt that enter the states. Later
      tokens are padding, or the root of the first draft.
    new: contributions of the uncommitted nodes to each state, or ().
  """

  attention: KVCache
  states: tuple[LayerState, ...]
  end: jax.Array
  new: tuple[Contributions, ...] = ()

  slack = -1

  @classmethod
  def empty(cls, attention: KVCache, states: tuple[LayerState, ...]
            ) -> "RecurrentCache":
    """Returns a cache of empty layers."""
    return cls(attention=attention, states=states,
               end=jnp.full_like(attention.lengths, _NEVER))

  @property
  def lengths(self) -> jax.Array:
    return self.attention.lengths

  @property
  def capacity(self) -> int:
    return self.attention.capacity

  def append(self, layer: int, k: jax.Array, v: jax.Array, after: int = 0
             ) -> "RecurrentCache":
    return self.replace(attention=self.attention.append(layer, k, v, after))

  def attend(self, layer: int, query: jax.Array, ancestors: jax.Array,
             **options: Any) -> jax.Array:
    return self.attention.attend(layer, query, ancestors, **options)

  def contribute(self, layer: int, new: Contributions) -> "RecurrentCache":
    """Stores the contributions of all nodes of a draft to the state of a layer.

    Args:
      layer: index of the state. The layers of a pass are stored in order.
      new: contributions of the nodes.
    """
    return self.replace(new=(*self.new[:layer], new))

  def commit(self, path: jax.Array, count: jax.Array) -> "RecurrentCache":
    return self._written(self.lengths + count, path)

  def rollback(self, lengths: jax.Array) -> "RecurrentCache":
    return self._written(jnp.asarray(lengths, jnp.int32))

  def reserve(self, size: int) -> "RecurrentCache":
    raise ValueError(
        "reserve was called on the cache of a model with recurrent layers, "
        "which evaluate a draft in one pass; use this model as the target")

  def until(self, lengths: jax.Array) -> "RecurrentCache":
    return self.replace(end=lengths - 1)

  def specs(self, axis: str | None, rows: str | None) -> Any:
    every = jax.tree.map(lambda _: PartitionSpec(rows), self)
    return every.replace(attention=self.attention.specs(axis, rows))

  def _written(self, lengths: jax.Array, path: jax.Array | None = None
               ) -> "RecurrentCache":
    """Returns a cache with `lengths [B]` and the states after these tokens.

    Args:
      lengths: `[B]` int32, new number of committed tokens.
      path: `[B, T]` int32, nodes of the draft in order of depth. None: all
        nodes in order.
    """
    old = self.lengths
    attention = (self.attention.rollback(lengths) if path is None else
                 self.attention.commit(path, lengths - old))
    # The call after the prompt does not increase the lengths. Tokens after it
    # are not padding.
    end = jnp.where(lengths <= old, _NEVER, self.end)
    if not self.new:
      return self.replace(attention=attention, end=end)
    size = self.new[0].inputs.shape[1]
    if path is None:
      path = jnp.broadcast_to(jnp.arange(size), (len(lengths), size))
    count = jnp.maximum(
        jnp.minimum(lengths, self.end) - jnp.minimum(old, self.end), 0)
    states = tuple(_advanced(state, new, path, count)
                   for state, new in zip(self.states, self.new))
    return self.replace(attention=attention, states=states, end=end, new=())


def _advanced(state: LayerState, new: Contributions, path: jax.Array,
              count: jax.Array) -> LayerState:
  """Returns the state after the first `count [B]` nodes of `path [B, T]`."""
  before = state.tail.shape[1]
  order = count[:, None] + jnp.arange(before)  # in the tail and then the path
  node = jnp.take_along_axis(
      path, jnp.clip(order - before, 0, path.shape[1] - 1), axis=1)
  source = jnp.where(order < before, order, before + node)
  both = jnp.concatenate(
      [state.tail, new.inputs.astype(state.tail.dtype)], axis=1)
  tail = jnp.take_along_axis(both, source[..., None], axis=1)
  if state.matrix is None:
    return state.replace(tail=tail)
  steps = jnp.arange(path.shape[1])
  nodes = np.arange(new.inputs.shape[1])
  taken = (path[..., None] == nodes) & (steps < count[:, None])[..., None]
  taken = taken.any(1)[:, None]  # [B, 1, T]
  last = jnp.take_along_axis(path, jnp.maximum(count - 1, 0)[:, None], axis=1)
  total = jnp.take_along_axis(new.decays, last[:, None], axis=2)
  total = jnp.where(count[:, None, None] > 0, total, 0)
  # Nodes that are not on the path may be NaN, if their row has failed.
  weight = jnp.exp(jnp.where(taken, total - new.decays, 0))[..., None]
  keys, writes = (jnp.where(taken[..., None], x, 0)
                  for x in (weight * new.keys, new.writes))
  product = functools.partial(_einsum, "bhtd,bhte->bhde")
  # Except on a TPU, a product is a second array of the state's size, but XLA
  # merges a sum of few terms and the state into one loop.
  terms = lambda keys, writes: sum(
      keys[:, :, i, :, None] * writes[:, :, i, None] for i in nodes)
  added = jax.lax.platform_dependent(
      keys, writes, tpu=product,
      default=terms if len(nodes) <= _FEW else product)
  return LayerState(tail, jnp.exp(total)[..., None] * state.matrix + added)
