"""Other people's models as a `Model`: JAX functions and Flax NNX modules.

  CachedFunction   a function that reads new tokens and a cache of its own
  PlainFunction    a function from tokens to logits that remembers nothing
  split            an NNX module as such a function, and its parameters

Both hash by the value of their fields. Functions hash by identity: define each
once, for a new lambda is a new program. What `split` returns hashes by the
structure of the module, so that modules that are built alike share their
compiled code, whatever their weights.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

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
  """A cache of any arrays that have a slot for each token of a row.

  Attributes:
    arrays: a tree of arrays `[B, C, ...]`.
    lengths: `[B]` int32, committed tokens of each row. Slots after it are
      scratch.
  """

  arrays: Any
  lengths: jax.Array

  @property
  def capacity(self) -> int:
    """C, the slots of a row."""
    return jax.tree.leaves(self.arrays)[0].shape[1]

  def commit(self, path: jax.Array, count: jax.Array) -> "Slots":
    """Keeps the first `count [B]` nodes of `path [B, T]` of the block."""
    def kept(row, start, path):
      return jax.lax.dynamic_update_slice_in_dim(
          row, row[start + path], start, axis=0)

    moved = jax.tree.map(
        lambda x: jax.vmap(kept)(x, self.lengths, path), self.arrays)
    return Slots(arrays=moved, lengths=self.lengths + count)

  def rollback(self, lengths: jax.Array) -> "Slots":
    """Sets the committed tokens of every row to `lengths [B]`."""
    return self.replace(lengths=jnp.asarray(lengths, jnp.int32))

  def specs(self, axis: str, rows: str | None = None) -> "Slots":
    """A `PartitionSpec` of every array: a mesh splits the rows alone."""
    del axis
    return jax.tree.map(lambda _: PartitionSpec(rows), self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachedFunction(Model):
  """A function with a cache as a `Model`.

  The function writes what it remembers of S new tokens to the slots that it is
  told, and attends over those that it is told. Rows of several lengths, trees
  and what is kept of a draft are the adapter's business.

  Attributes:
    apply: `apply(params, tokens [B, S], positions [B, S], slots [B, S],
      mask [B, S, C], cache) -> (logits [B, S, V], cache)`. What belongs to
      token `[b, i]` is written to slot `slots[b, i]` of row b; then the token
      attends to every slot c with `mask[b, i, c]`, its own among them. In a
      tree a token's slot is not its position.
    empty_cache: `empty_cache(params, batch, capacity)`, a tree of arrays
      `[B, C, ...]` with C = capacity.
    vocab_size: V.
    context_length: longest sequence that the model reads, in tokens; positions
      stay below it.
  """

  apply: Callable[..., tuple[jax.Array, Any]]
  empty_cache: Callable[[Any, int, int], Any]
  vocab_size: int
  context_length: int

  def __post_init__(self):
    fields.check_fields(self, "vocab_size", "context_length")

  def init_cache(self, params: Any, batch: int, capacity: int) -> Slots:
    """The cache of `batch` empty rows.

    Raises:
      ValueError: an array does not begin with `[B, C]`.
    """
    arrays = self.empty_cache(params, batch, capacity)
    for path, x in jax.tree.leaves_with_path(arrays):
      if jnp.shape(x)[:2] != (batch, capacity):
        raise ValueError(
            f"empty_cache made an array of shape {jnp.shape(x)} at "
            f"{jax.tree_util.keystr(path) or 'its top'}; the first axes must "
            f"be the {batch} rows and their {capacity} slots")
    return Slots(arrays=arrays, lengths=jnp.zeros((batch,), jnp.int32))

  def __call__(self, params: Any, tokens: jax.Array,
               depths: jax.Array | None = None,
               ancestors: jax.Array | None = None,
               cache: Slots | None = None) -> ModelOutput:
    """One pass, as in `Model`; `hidden` is empty, `[B, S, 0]`.

    Raises:
      ValueError: `apply` does not return logits and a cache like that given.
    """
    size = tokens.shape[1]
    past = self.init_cache(params, *tokens.shape) if cache is None else cache
    if depths is None:
      depths = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), tokens.shape)
    if ancestors is None:
      _, ancestors = topology.causal(*tokens.shape)
    # Nodes beyond the context are drafted at times and never committed.
    positions = jnp.minimum(past.lengths[:, None] + depths,
                            self.context_length - 1)
    first = past.lengths[:, None] + ancestors.shape[2] - size
    mask = dense.visible_slots(past.lengths, ancestors, past.capacity)
    out = self.apply(params, tokens, positions, first + jnp.arange(size), mask,
                     past.arrays)
    if not isinstance(out, tuple) or len(out) != 2:
      raise ValueError(f"apply returned a {type(out).__name__}; it must be the "
                       "pair (logits, cache)")
    logits, arrays = out
    checks.check_same("the cache that apply returned", arrays, past.arrays)
    return _output(logits, None if cache is None else past.replace(
        arrays=arrays))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainFunction(Model):
  """A function from tokens to logits as a `Model`.

  Nothing is remembered but the tokens: a pass reads the whole row again, and a
  tree once for each of its leaves. That is slow; it is for small models, for
  proofs, and to check a cache against.

  Attributes:
    apply: `apply(params, tokens [B, S]) -> logits [B, S, V]`, where row i of
      the logits depends on the first i + 1 tokens alone.
    vocab_size: V.
    context_length: longest sequence that the model reads, in tokens; S stays
      within it.
  """

  apply: Callable[[Any, jax.Array], jax.Array]
  vocab_size: int
  context_length: int

  def __post_init__(self):
    fields.check_fields(self, "vocab_size", "context_length")

  def init_cache(self, params: Any, batch: int, capacity: int) -> Slots:
    """The cache of `batch` empty rows: their tokens."""
    del params
    return Slots(arrays=jnp.zeros((batch, capacity), jnp.int32),
                 lengths=jnp.zeros((batch,), jnp.int32))

  def __call__(self, params: Any, tokens: jax.Array,
               depths: jax.Array | None = None,
               ancestors: jax.Array | None = None,
               cache: Slots | None = None) -> ModelOutput:
    """One pass, as in `Model`; `hidden` is empty, `[B, S, 0]`."""
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

  def _logits(self, params: Any, past: Slots, ancestors: jax.Array
              ) -> jax.Array:
    """`[B, S, V]`: each path is read as a row of its own, deepest first.

    Parents stand before their children, so the last node that is left is a
    leaf, and the nodes above it are done with it: a chain takes one pass.
    """
    batch, size, block = ancestors.shape
    # Depths follow from the ancestors for those nodes too that earlier passes
    # wrote.
    places = past.lengths[:, None, None] + jnp.cumsum(
        ancestors, axis=2, dtype=jnp.int32) - 1
    slots = past.lengths[:, None] + jnp.arange(block)
    tokens = jnp.take_along_axis(past.arrays, slots, axis=1)
    columns = min(past.capacity, self.context_length)
    rows = jnp.arange(batch)

    def one_path(carry):
      logits, left = carry
      leaf = size - 1 - jnp.argmax(left[:, ::-1], axis=1)
      on_path, place = ancestors[rows, leaf], places[rows, leaf]
      put = jnp.where(on_path, place, past.capacity)  # the others are dropped
      text = past.arrays.at[rows[:, None], put].set(tokens, mode="drop")
      found = self.apply(params, text[:, :columns])
      # Nodes beyond the context are drafted at times and never committed.
      here = jnp.minimum(place[:, block - size:], columns - 1)
      found = jnp.take_along_axis(found, here[..., None], axis=1)
      new = on_path[:, block - size:] & left
      return (jnp.where(new[..., None], found.astype(logits.dtype), logits),
              (left & ~new).at[rows, leaf].set(False))

    form = jax.eval_shape(self.apply, params, past.arrays[:, :columns])
    logits = jnp.zeros((batch, size, form.shape[-1]), form.dtype)
    return jax.lax.while_loop(
        lambda carry: carry[1].any(), one_path,
        (logits, jnp.ones((batch, size), bool)))[0]


@dataclasses.dataclass(frozen=True)
class _Merged:
  """Calls an NNX module of this structure with other parameters."""

  graphdef: Any

  def __call__(self, params: Any, *args: Any) -> Any:
    from flax import nnx  # pylint: disable=g-import-not-at-top
    return nnx.merge(self.graphdef, params)(*args)


def split(module: Any) -> tuple[Callable[..., Any], dict[Any, Any]]:
  """An NNX module as a function for the adapters, and its parameters.

  What the module changes in itself during a call is lost. One that drops out
  or counts must be told to stop, by `module.eval()`.

  Args:
    module: an `nnx.Module` whose `__call__` takes and returns what `apply` of
      an adapter does, but for the parameters.

  Returns:
    `(apply, params)`: `apply(params, *args)` is `module(*args)`, and `params` a
    dictionary of arrays.
  """
  # Who has no such module need not wait for its import.
  from flax import nnx  # pylint: disable=g-import-not-at-top
  graphdef, state = nnx.split(module)
  return _Merged(graphdef), nnx.to_pure_dict(state)


def _output(logits: jax.Array, cache: Slots | None) -> ModelOutput:
  """Logits in float32 at least, and no hidden states."""
  wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
  return ModelOutput(logits=wide, hidden=wide[..., :0], cache=cache)
