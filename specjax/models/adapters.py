"""Adapters that make a JAX function or a Flax NNX module a `Model`.

  CachedFunction   adapter for a function with a cache
  PlainFunction    adapter for a function from tokens to logits, without a cache
  split            splits an NNX module into a function and its parameters

Two equal adapters share compiled code. Adapters are equal if their fields are
equal, and a function is equal only to itself. Define each function once,
because an adapter with a new lambda is compiled again. Functions of `split` are
equal if the structures of their modules are equal.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import chex
from flax import struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from specjax.caches import dense
from specjax.interfaces import Cache
from specjax.interfaces import checks
from specjax.interfaces import Model
from specjax.trees import topology
from specjax.types import ModelOutput
from specjax.utils import fields


@struct.dataclass
class Slots(Cache):
  """Cache of arrays with one slot per token of a row.

  Attributes:
    arrays: tree of arrays `[B, C, ...]`, for B rows of C slots.
    lengths: `[B]` int32 number of committed tokens of each row. The slots after
      them are scratch space.
  """

  arrays: Any
  lengths: jax.Array

  @property
  def capacity(self) -> int:
    """Returns C, the number of slots of a row."""
    return jax.tree.leaves(self.arrays)[0].shape[1]

  def commit(self, path: jax.Array, count: jax.Array) -> "Slots":
    """Returns the cache with the first `count [B]` nodes of `path` committed.

    `path [B, T]` contains indices of nodes. Node i of a row is in the i-th slot
    after the committed tokens, counted from 0.
    """
    def move(row: jax.Array, start: jax.Array, path: jax.Array) -> jax.Array:
      return jax.lax.dynamic_update_slice_in_dim(
          row, row[start + path], start, axis=0)

    moved = jax.tree.map(
        lambda x: jax.vmap(move)(x, self.lengths, path), self.arrays)
    return Slots(arrays=moved, lengths=self.lengths + count)

  def rollback(self, lengths: jax.Array) -> "Slots":
    return self.replace(lengths=jnp.asarray(lengths, jnp.int32))

  def specs(self, axis: str, rows: str | None = None) -> "Slots":
    """Returns a `PartitionSpec` per array. Only the row axis is split."""
    del axis
    return jax.tree.map(lambda _: PartitionSpec(rows), self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachedFunction(Model):
  """`Model` that calls a function with a cache.

  The function writes the state of S new tokens to slots of the cache, and
  attends to the slots in a mask. The adapter handles rows of different lengths,
  trees, and the commit of accepted tokens.

  Attributes:
    apply: `apply(params, tokens [B, S], positions [B, S], slots [B, S],
      mask [B, S, C], cache) -> (logits [B, S, V], cache)`. The state of token
      `[b, i]` is written to slot `slots[b, i]` of row b. The token then attends
      to every slot c with `mask[b, i, c]`, including its own. In a tree, the
      slot of a token differs from its position.
    empty_cache: `empty_cache(params, batch, capacity)`, returns a tree of
      arrays `[B, C, ...]` with B = batch and C = capacity.
    vocab_size: vocabulary size V.
    context_length: length of the longest sequence of the model, in tokens. All
      positions are below this length.
  """

  apply: Callable[..., tuple[jax.Array, Any]]
  empty_cache: Callable[[Any, int, int], Any]
  vocab_size: int
  context_length: int

  def __post_init__(self):
    fields.check_fields(self, "vocab_size", "context_length")

  def init_cache(self, params: chex.ArrayTree, batch: int, capacity: int
                 ) -> Slots:
    """Returns the cache of `batch` empty rows.

    Raises:
      ValueError: an array of `empty_cache` does not begin with `[B, C]`.
    """
    arrays = self.empty_cache(params, batch, capacity)
    for path, x in jax.tree.leaves_with_path(arrays):
      if jnp.shape(x)[:2] != (batch, capacity):
        raise ValueError(
            f"empty_cache returned an array of shape {jnp.shape(x)} at "
            f"{jax.tree_util.keystr(path) or 'its top'}; the first axes must "
            f"be the {batch} rows and their {capacity} slots")
    return Slots(arrays=arrays, lengths=jnp.zeros((batch,), jnp.int32))

  def __call__(self, params: chex.ArrayTree, tokens: jax.Array,
               depths: jax.Array | None = None,
               ancestors: jax.Array | None = None, cache: Slots | None = None
               ) -> ModelOutput:
    """Runs one pass, see `Model`. `hidden` of the output is empty: `[B, S, 0]`.

    Raises:
      ValueError: `apply` does not return a pair of logits and a cache with the
        structure of its argument.
    """
    size = tokens.shape[1]
    past = self.init_cache(params, *tokens.shape) if cache is None else cache
    if depths is None:
      depths = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), tokens.shape)
    if ancestors is None:
      _, ancestors = topology.causal(*tokens.shape)
    # A draft may extend beyond the longest sequence of the model. Nodes there
    # are never committed, so their positions can be clipped.
    positions = jnp.minimum(past.lengths[:, None] + depths,
                            self.context_length - 1)
    first = past.lengths[:, None] + ancestors.shape[2] - size
    mask = dense.visible_slots(past.lengths, ancestors, past.capacity)
    out = self.apply(params, tokens, positions, first + jnp.arange(size), mask,
                     past.arrays)
    if not isinstance(out, tuple) or len(out) != 2:
      raise ValueError(f"apply returned a {type(out).__name__}; it must return "
                       "a pair (logits, cache)")
    logits, arrays = out
    checks.check_same("the cache that apply returned", arrays, past.arrays)
    return _output(logits, None if cache is None else past.replace(
        arrays=arrays))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainFunction(Model):
  """`Model` that calls a function of the complete sequence.

  Only the tokens are cached. A pass computes the complete sequence again, and
  for a tree once per leaf. This is slow. Use this adapter for small models, or
  to test a cache.

  Attributes:
    apply: `apply(params, tokens [B, S]) -> logits [B, S, V]`. Row i of the
      logits depends only on the first i + 1 tokens.
    vocab_size: vocabulary size V.
    context_length: length of the longest sequence of the model, in tokens. S is
      at most this length.
  """

  apply: Callable[[Any, jax.Array], jax.Array]
  vocab_size: int
  context_length: int

  def __post_init__(self):
    fields.check_fields(self, "vocab_size", "context_length")

  def init_cache(self, params: chex.ArrayTree, batch: int, capacity: int
                 ) -> Slots:
    del params
    return Slots(arrays=jnp.zeros((batch, capacity), jnp.int32),
                 lengths=jnp.zeros((batch,), jnp.int32))

  def __call__(self, params: chex.ArrayTree, tokens: jax.Array,
               depths: jax.Array | None = None,
               ancestors: jax.Array | None = None, cache: Slots | None = None
               ) -> ModelOutput:
    """Runs one pass, see `Model`. `hidden` of the output is empty: `[B, S, 0]`.
    """
    if cache is None and ancestors is None:
      return _output(self.apply(params, tokens), None)
    past = self.init_cache(params, *tokens.shape) if cache is None else cache
    if ancestors is None:
      _, ancestors = topology.causal(*tokens.shape)
    before = ancestors.shape[2] - tokens.shape[1]
    past = past.replace(arrays=dense.put_rows(
        past.arrays, tokens.astype(jnp.int32), past.lengths + before))
    logits = self._logits(params, past, ancestors)
    return _output(logits, None if cache is None else past)

  def _logits(self, params: chex.ArrayTree, past: Slots, ancestors: jax.Array
              ) -> jax.Array:
    """Returns the logits `[B, S, V]` of S nodes.

    Each pass of the loop computes the path to one leaf as a sequence. The pass
    includes all ancestors of the leaf. Parents precede their children, so the
    last node without logits is a leaf. A chain takes one pass.
    """
    batch, size, block = ancestors.shape
    # The depth of a node is its number of ancestors. The block also contains
    # nodes of earlier calls.
    places = past.lengths[:, None, None] + jnp.cumsum(
        ancestors, axis=2, dtype=jnp.int32) - 1
    slots = past.lengths[:, None] + jnp.arange(block)
    tokens = jnp.take_along_axis(past.arrays, slots, axis=1)
    columns = min(past.capacity, self.context_length)
    rows = jnp.arange(batch)

    def add_path(carry: tuple[jax.Array, jax.Array]
                 ) -> tuple[jax.Array, jax.Array]:
      logits, left = carry
      leaf = size - 1 - jnp.argmax(left[:, ::-1], axis=1)
      on_path, place = ancestors[rows, leaf], places[rows, leaf]
      # Nodes not on the path get an index out of range, so that `set` drops
      # them.
      put = jnp.where(on_path, place, past.capacity)
      sequence = past.arrays.at[rows[:, None], put].set(tokens, mode="drop")
      path_logits = self.apply(params, sequence[:, :columns])
      # A draft may extend beyond the longest sequence, where there are no
      # logits. Nodes there are never committed, so their positions can be
      # clipped.
      here = jnp.minimum(place[:, block - size:], columns - 1)
      path_logits = jnp.take_along_axis(path_logits, here[..., None], axis=1)
      new = on_path[:, block - size:] & left
      return (jnp.where(
          new[..., None], path_logits.astype(logits.dtype), logits),
              (left & ~new).at[rows, leaf].set(False))

    form = jax.eval_shape(self.apply, params, past.arrays[:, :columns])
    logits = jnp.zeros((batch, size, form.shape[-1]), form.dtype)
    return jax.lax.while_loop(
        lambda carry: carry[1].any(), add_path,
        (logits, jnp.ones((batch, size), bool)))[0]


@dataclasses.dataclass(frozen=True)
class _Merged:
  """Function `(params, *args)` that calls an NNX module with `params`.

  `graphdef` is the structure of the module.
  """

  graphdef: Any

  def __call__(self, params: chex.ArrayTree, *args: Any) -> Any:
    from flax import nnx  # pylint: disable=g-import-not-at-top
    return nnx.merge(self.graphdef, params)(*args)


def split(module: Any) -> tuple[Callable[..., Any], dict[Any, Any]]:
  """Splits an NNX module into a function for an adapter and its parameters.

  State changes of the module during a call are lost. Call `module.eval()` first
  if the module has dropout or counters.

  Args:
    module: `nnx.Module` with a `__call__` that has the arguments of the
      adapter's `apply`, without `params`.

  Returns:
    `(apply, params)`. `apply(params, *args)` equals `module(*args)`. `params`
    is a dictionary of arrays.
  """
  # This import is slow and few programs need it, so it is local.
  from flax import nnx  # pylint: disable=g-import-not-at-top
  graphdef, state = nnx.split(module)
  return _Merged(graphdef), nnx.to_pure_dict(state)


def _output(logits: jax.Array, cache: Slots | None) -> ModelOutput:
  """Returns an output with logits of at least float32 and no hidden states."""
  wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
  return ModelOutput(logits=wide, hidden=wide[..., :0], cache=cache)
