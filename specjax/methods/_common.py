"""Base classes and helpers that drafters of several families share."""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import functools
from typing import Any
from typing import TypeVar

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from specjax.decoding import constraining as constraints_lib
from specjax.decoding import rounds
from specjax.interfaces import Cache
from specjax.interfaces import Drafter
from specjax.interfaces import Model
from specjax.sampling import inverse_cdf
from specjax.sampling import LogitsTransform
from specjax.sampling import UNIFORMS_A_DRAW
from specjax.trees import topology
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelOutput

_T = TypeVar("_T")


class Replicated(Drafter):
  """Base of drafters whose parameters are copied to every device."""

  def param_specs(self, axis: str, size: int) -> PartitionSpec:
    """Returns an empty specification."""
    del axis, size
    return PartitionSpec()


class ModelFree(Replicated):
  """Base of drafters without a model; `bind` sets the field `vocab_size`."""

  vocab_size: int | None

  def bind(self, target: Model, transform: LogitsTransform) -> Any:
    """Returns the drafter specialised to a target."""
    del transform
    if self.vocab_size is not None:
      check_target_size(self.vocab_size, target)
    return dataclasses.replace(self, vocab_size=target.vocab_size)


class OneModel(Drafter):
  """Base of drafters with one `model` over the target's vocabulary."""

  model: Model

  @property
  def context_length(self) -> int:
    return self.model.context_length

  def bind(self, target: Model, transform: LogitsTransform) -> Any:
    """Returns the drafter specialised to a target."""
    check_vocabulary(self.model, target)
    return super().bind(target, transform)

  def param_specs(self, axis: str, size: int) -> Any:
    """Returns the specifications of the model."""
    return self.model.param_specs(axis, size)


class DrawnChain(Drafter):
  """Base of drafters that sample a chain of `gamma` tokens in order."""

  gamma: int
  transform: LogitsTransform | None

  chain = True
  iid = True
  conditional = True
  proposal = "iid"

  @property
  def num_uniforms(self) -> int:
    return UNIFORMS_A_DRAW * self.gamma

  def bind(self, target: Model, transform: LogitsTransform) -> Any:
    """Returns the drafter specialised to a target."""
    del target
    return with_transform(self, transform)


def tree_drafts(state: DecodeState, parents: Sequence[int], tokens: jax.Array,
                probs: jax.Array) -> Draft:
  """Returns drafts with the same tree below the root of every row.

  Args:
    state: decoding state.
    parents: draft tree of N nodes.
    tokens: tokens `[B, N - 1]` int32 of the nodes below the root.
    probs: distributions `[B, N - 1, V]` of the tokens.
  """
  parents = jnp.array(parents, jnp.int32)
  tree = lambda root, tokens, probs: Draft.tree(root, parents, tokens, probs)
  return jax.vmap(tree)(rounds.roots(state), tokens, probs)


def deterministic(state: DecodeState, parents: Sequence[int], tokens: jax.Array,
                  vocab_size: int) -> Draft:
  """Returns deterministic drafts with the same tree in every row.

  Args:
    state: decoding state.
    parents: draft tree of N nodes.
    tokens: tokens `[B, N - 1]` int32 of the nodes below the root; an id outside
      [0, V) is padding.
    vocab_size: vocabulary size V.
  """
  known = (tokens >= 0) & (tokens < vocab_size)
  probs = jax.nn.one_hot(jnp.where(known, tokens, -1), vocab_size)
  return tree_drafts(state, parents, jnp.where(known, tokens, 0), probs)


def draw_chain(law: Callable[[jax.Array, Any, jax.Array | int], jax.Array],
               read: Callable[[jax.Array, _T], tuple[jax.Array, _T]], carry: _T,
               logits: jax.Array, uniforms: jax.Array, state: DecodeState,
               transform: LogitsTransform, vocab_size: int
               ) -> tuple[Draft, _T]:
  """Samples a chain of gamma tokens per row and reads all except the last.

  Args:
    law: function `(logits, memory of the constraints, k)` that returns the
      distribution `[B, V]` of token k = 1..gamma.
    read: function `(tokens [B, 1], carry) -> (logits, carry)`.
    carry: initial carry of `read`.
    logits: logits of the first token.
    uniforms: uniform samples in [0, 1), `[B, gamma * UNIFORMS_A_DRAW]`.
    state: decoding state.
    transform: transform with the constraints that the tokens advance.
    vocab_size: vocabulary size V.

  Returns:
    The drafts and the last carry.
  """
  rows = uniforms.shape[0]
  u = uniforms.reshape(rows, -1, UNIFORMS_A_DRAW).swapaxes(0, 1)
  gamma = u.shape[0]

  def draw(tokens, probs, memory, logits, node, u):
    put = functools.partial(
        jax.lax.dynamic_update_index_in_dim, index=node, axis=1)
    q = law(logits, memory, node)
    token = jax.vmap(inverse_cdf)(q, u)
    return token, put(tokens, token), put(probs, q), constraints_lib.advanced(
        transform.constraints, memory, token)

  def extend(loop, step):
    carry, logits, *drawn = loop
    token, *drawn = draw(*drawn, logits, *step)
    logits, carry = read(token[:, None], carry)
    return (carry, logits, *drawn), None

  tokens = jnp.pad(rounds.roots(state)[:, None], ((0, 0), (0, gamma)))
  probs = jnp.zeros((rows, gamma + 1, vocab_size),
                    jnp.promote_types(logits.dtype, jnp.float32))
  (carry, logits, *drawn), _ = jax.lax.scan(
      extend, (carry, logits, tokens, probs, state.constraints),
      (jnp.arange(1, gamma), u[:-1]))
  _, tokens, probs, _ = draw(*drawn, logits, gamma, u[-1])
  parents = jnp.tile(topology.chain(gamma), (rows, 1))
  return Draft(tokens=tokens, parents=parents, probs=probs), carry


def with_transform(drafter: Any, transform: LogitsTransform, **changes: Any
                   ) -> Any:
  """Returns the drafter with the transform for its draft distributions.

  If the drafter's transform is None, the target's is used. The constraints are
  always the target's, because the decoding state has memory only for them. If
  the target has constraints, its banned tokens are also banned in drafts.

  Args:
    drafter: drafter, a frozen dataclass with a field `transform`.
    transform: transform of the target.
    **changes: other fields that `bind` sets.
  """
  transform = (drafter.transform or transform).under(transform)
  return dataclasses.replace(drafter, transform=transform, **changes)


def check_vocabulary(model: Model, target: Model) -> None:
  """Raises `ValueError` if a model has another vocabulary than the target."""
  if model.vocab_size != target.vocab_size:
    raise ValueError(
        f"the drafter has {model.vocab_size} tokens and the target "
        f"{target.vocab_size}; both need the same vocabulary: train the "
        "drafter with the target's tokenizer, or use "
        "strategies.token_intersection or strategies.string_match")


def check_target_size(size: int, target: Model) -> None:
  """Raises `ValueError` if `size` is not the target's vocabulary size."""
  if size != target.vocab_size:
    raise ValueError(
        f"the drafter was made for a target of {size} tokens, but this target "
        f"has {target.vocab_size}; make the drafter with this target's "
        "tokenizer and size")


def check_siblings(children: int, target: Model) -> None:
  """Raises `ValueError` if a node has more children than there are tokens."""
  if children > target.vocab_size:
    raise ValueError(
        f"a node has {children} children, but the vocabulary has "
        f"{target.vocab_size} tokens; siblings must differ: use a narrower "
        "tree")


def read_token(model: Model, params: chex.ArrayTree, token: jax.Array,
               cache: Cache) -> tuple[ModelOutput, Any]:
  """Runs the model on one token `[B, 1]` per row.

  Returns:
    The output and the cache.
  """
  out = model(params, token, jnp.zeros_like(token),
              jnp.ones((len(token), 1, 1), bool), cache)
  return out, out.cache.rollback(cache.lengths + 1)


def model_step(model: Model, params: chex.ArrayTree
               ) -> Callable[..., tuple[Any, Any]]:
  """Returns a step of `_trees` that runs a model; its carry is the cache."""
  def step(tokens, depths, ancestors, above, cache):
    del above
    out = model(params, tokens, depths, ancestors, cache)
    return out.logits, out.cache

  return step


def feed_last(model: Model, params: chex.ArrayTree, state: DecodeState,
              cache: Cache, size: int, more: int = 0) -> tuple[jax.Array, Any]:
  """Completes a cache by reading the last `size` committed tokens again.

  Rows lack different numbers of tokens. Reading a cached token again does not
  change the cache. So one pass of a fixed size completes every row.

  Args:
    model: draft model.
    params: parameters of the model.
    state: decoding state.
    cache: cache of the model; it may lack up to `size` committed tokens.
    size: number of tokens to read.
    more: number of drafted tokens that the model reads afterwards in this
      round. If it is not 0, the cache reserves a block for them, and `propose`
      has to return `cache.settle()`.

  Returns:
    The logits `[B, V]` of the token after the root, and the cache with all
    committed tokens, including the root.
  """
  logits, _, cache = read_last(model, params, state, cache, size, more)
  return logits, cache


def read_last(model: Model, params: chex.ArrayTree, state: DecodeState,
              cache: Cache, size: int, more: int = 0
              ) -> tuple[jax.Array, jax.Array, Any]:
  """Completes a cache like `feed_last`, and returns the root's hidden state.

  Returns:
    Logits `[B, V]`, the root's hidden state `[B, width]`, and the cache.
  """
  start = jnp.maximum(state.lengths - size, 0)
  # If a row has fewer than `size` committed tokens, the pass also reads
  # arbitrary tokens after them. The next pass overwrites their cache entries.
  last = (state.lengths - 1 - start)[:, None]
  cache = cache.rollback(start)
  cache = cache.reserve(size + more) if more else cache
  out = _feed(model, params, state, cache, start, size)
  logits = model.logits_at(params, out, last)
  hidden = jnp.take_along_axis(out.hidden, last[..., None], axis=1)
  return logits[:, 0], hidden[:, 0], out.cache.rollback(state.lengths)


def catch_up(model: Model, params: chex.ArrayTree, state: DecodeState,
             cache: Cache, since: jax.Array, size: int = rounds.CATCH_UP
             ) -> Any:
  """Reads the tokens committed in rounds without drafts, a block at a time.

  Args:
    model: draft model.
    params: parameters of the model.
    state: decoding state; finished rows are ignored.
    cache: cache of the model with the first `since` committed tokens.
    since: number `[B]` int32 of cached tokens.
    size: number of tokens of a block.

  Returns:
    The cache. It lacks at most the last two committed tokens, which `feed_last`
    with `size=2` reads.
  """
  missing = jnp.where(state.done, 0, state.lengths - 2 - since)

  def read(carry):
    i, cache = carry
    # A last block that exceeds the sequence could exceed the cache's capacity.
    # So it is moved back, and ends with the sequence.
    start = jnp.minimum(since + i * size, state.lengths - size)
    start = jnp.maximum(start, 0)
    out = _feed(model, params, state, cache.rollback(start), start, size)
    return i + 1, out.cache.rollback(start + size)

  carry = jnp.zeros((), jnp.int32), cache
  return jax.lax.while_loop(
      lambda carry: carry[0] * size < jnp.max(missing), read, carry)[1]


def _feed(model: Model, params: chex.ArrayTree, state: DecodeState,
          cache: Cache, start: jax.Array, size: int) -> ModelOutput:
  """Runs the model on `size` committed tokens from `start [B]`."""
  batch = state.lengths.shape[0]
  tokens = jnp.take_along_axis(
      state.tokens, start[:, None] + jnp.arange(size), axis=1)
  return model(params, tokens, *topology.causal(batch, size), cache)


def keep_path(cache: Cache, slots: jax.Array, path: jax.Array, size: int,
              count: jax.Array) -> Any:
  """Returns the cache with the keys and values of the accepted path only.

  The deepest accepted token and the bonus token may be missing, because the
  draft model did not read them. `feed_last` with `size=2` reads them in the
  next round.

  Args:
    cache: cache with a block of `size` drafted tokens after the committed ones.
    slots: slot of each node in that block, `[B, N]` int32; arbitrary for the
      root and for nodes that were not read.
    path: accepted nodes `[B, N]` int32, see `Verdict.path`.
    size: number of tokens of the block.
    count: number `[B]` int32 of committed tokens.
  """
  accepted = jnp.take_along_axis(slots, path[:, 1:size + 1], axis=1)
  accepted = jnp.pad(accepted, ((0, 0), (0, size - accepted.shape[1])))
  return cache.commit(accepted, count).settle()
