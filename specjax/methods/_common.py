"""Base classes and helpers for drafters.

There are base classes for drafters without a model, with one draft model and
with sampled chains, and functions that make drafts and update the draft model's
cache.
"""

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
  """Base class of drafters whose parameters are replicated on every device."""

  def param_specs(self, axis: str, size: int) -> PartitionSpec:
    """Returns an empty `PartitionSpec`, which replicates all parameters."""
    del axis, size
    return PartitionSpec()


class ModelFree(Replicated):
  """Base class of drafters without a draft model.

  Attributes:
    vocab_size: vocabulary size of the target. If it is None, `bind` sets it.
  """

  vocab_size: int | None

  def bind(self, target: Model, transform: LogitsTransform) -> Any:
    """Returns the drafter with the target's vocabulary size.

    Raises:
      ValueError: the drafter was made for another vocabulary size.
    """
    del transform
    if self.vocab_size is not None:
      check_target_size(self.vocab_size, target)
    return dataclasses.replace(self, vocab_size=target.vocab_size)


class OneModel(Drafter):
  """Base class of drafters with one draft model, the field `model`.

  The draft model must have the same vocabulary as the target.
  """

  model: Model

  @property
  def context_length(self) -> int:
    return self.model.context_length

  def bind(self, target: Model, transform: LogitsTransform) -> Any:
    """Returns the drafter, after comparing vocabulary sizes.

    Raises:
      ValueError: the draft model and the target differ in vocabulary size.
    """
    check_vocabulary(self.model, target)
    return super().bind(target, transform)

  def param_specs(self, axis: str, size: int) -> Any:
    """Returns the partition specifications of the draft model's parameters."""
    return self.model.param_specs(axis, size)


class DrawnChain(Drafter):
  """Base class of drafters that sample a chain of `gamma` tokens in order.

  Attributes:
    gamma: draft length.
    transform: transform from logits to draft probabilities. If it is None,
      `bind` uses the target's transform.
  """

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
    """Returns the drafter with its transform, see `with_transform`."""
    del target
    return with_transform(self, transform)


def tree_drafts(state: DecodeState, parents: Sequence[int], tokens: jax.Array,
                probs: jax.Array) -> Draft:
  """Returns B drafts whose trees have the same shape but different tokens.

  Args:
    state: decoding state of the B batch rows. The root of each tree is the last
      committed token of its row.
    parents: parent index of each of the N nodes; -1 for the root, node 0.
    tokens: tokens `[B, N - 1]` int32 of the nodes below the root.
    probs: draft distributions `[B, N - 1, V]` of these nodes over the V tokens
      of the vocabulary.
  """
  parents = jnp.array(parents, jnp.int32)
  tree = lambda root, tokens, probs: Draft.tree(root, parents, tokens, probs)
  return jax.vmap(tree)(rounds.roots(state), tokens, probs)


def deterministic(state: DecodeState, parents: Sequence[int], tokens: jax.Array,
                  vocab_size: int) -> Draft:
  """Returns B drafts with one-hot draft distributions and trees of one shape.

  Args:
    state: decoding state of the B batch rows.
    parents: parent index of each of the N nodes; -1 for the root, node 0.
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
  """Samples a chain of gamma draft tokens in each of B batch rows.

  The draft model runs on every drafted token except the last, because no draft
  token follows the last one.

  Args:
    law: function `(logits, memory, k)` that returns the draft distribution
      `[B, V]` of token k = 1..gamma. `memory` is the state of the constraints,
      such as a grammar's automaton, after the tokens before k.
    read: function `(tokens [B, 1], carry) -> (logits, carry)` that runs the
      draft model on one token per row.
    carry: initial carry of `read`, such as the draft model's cache.
    logits: draft model's logits of the first drafted token.
    uniforms: uniform samples in [0, 1), `[B, gamma * UNIFORMS_A_DRAW]`.
    state: decoding state of the B rows.
    transform: transform whose `constraints` are updated after every token.
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
  """Returns a copy of the drafter whose field `transform` is set.

  The transform converts logits to probabilities (temperature, top-k, banned
  tokens, constraints such as a grammar). If the drafter's transform is None,
  the target's transform is used. Otherwise only its constraints are replaced by
  those of the target, because the decoding state stores only the target's
  constraints. If the target has constraints, its banned tokens are also banned
  in drafts.

  Args:
    drafter: drafter, a frozen dataclass with a field `transform`.
    transform: transform of the target.
    **changes: new values of other fields of the drafter.
  """
  transform = (drafter.transform or transform).under(transform)
  return dataclasses.replace(drafter, transform=transform, **changes)


def check_vocabulary(model: Model, target: Model) -> None:
  """Raises `ValueError` if the two models differ in vocabulary size."""
  if model.vocab_size != target.vocab_size:
    raise ValueError(
        f"the drafter has {model.vocab_size} tokens and the target "
        f"{target.vocab_size}; both need the same vocabulary: train the "
        "drafter with the target's tokenizer, or use "
        "strategies.token_intersection or strategies.string_match")


def check_target_size(size: int, target: Model) -> None:
  """Checks that a drafter was made for the target's vocabulary size.

  Args:
    size: vocabulary size for which the drafter was made.
    target: target model.

  Raises:
    ValueError: the target has another vocabulary size.
  """
  if size != target.vocab_size:
    raise ValueError(
        f"the drafter was made for a target of {size} tokens, but this target "
        f"has {target.vocab_size}; make the drafter with this target's "
        "tokenizer and size")


def check_siblings(children: int, target: Model) -> None:
  """Raises `ValueError` if `children` exceeds the target's vocabulary size."""
  if children > target.vocab_size:
    raise ValueError(
        f"a node has {children} children, but the vocabulary has "
        f"{target.vocab_size} tokens; siblings must differ: use a narrower "
        "tree")


def read_token(model: Model, params: chex.ArrayTree, token: jax.Array,
               cache: Cache) -> tuple[ModelOutput, Any]:
  """Runs the model on one token for each of B batch rows.

  Args:
    model: language model.
    params: parameters of the model.
    token: token ids `[B, 1]` int32.
    cache: cache of the model.

  Returns:
    The model's output, and the cache that contains the token.
  """
  out = model(params, token, jnp.zeros_like(token),
              jnp.ones((len(token), 1, 1), bool), cache)
  return out, out.cache.rollback(cache.lengths + 1)


def model_step(model: Model, params: chex.ArrayTree
               ) -> Callable[..., tuple[Any, Any]]:
  """Returns a function that runs a language model on one level of a draft tree.

  The function has the arguments and results of a step, as described in
  `_trees`. Its carry is the model's cache.
  """
  def step(tokens, depths, ancestors, above, cache):
    del above
    out = model(params, tokens, depths, ancestors, cache)
    return out.logits, out.cache

  return step


def feed_last(model: Model, params: chex.ArrayTree, state: DecodeState,
              cache: Cache, size: int, more: int = 0) -> tuple[jax.Array, Any]:
  """Runs a draft model on the last `size` committed tokens of every row.

  The draft model's cache may lack some committed tokens, and a different number
  in each row. Running the model on a token that is already cached writes the
  same keys and values again. So one pass of a fixed size completes the cache of
  every row.

  Args:
    model: draft model.
    params: parameters of the model.
    state: decoding state of the B rows.
    cache: cache of the model; it may lack up to `size` committed tokens.
    size: number of committed tokens that the pass reads.
    more: number of drafted tokens that the model reads after this pass in the
      same round. If it is not 0, space for them is reserved in the cache, and
      the caller has to call `cache.settle()` after reading them.

  Returns:
    The logits `[B, V]` of the token after the root, and the cache with all
    committed tokens. The root is the last committed token.
  """
  logits, _, cache = read_last(model, params, state, cache, size, more)
  return logits, cache


def read_last(model: Model, params: chex.ArrayTree, state: DecodeState,
              cache: Cache, size: int, more: int = 0
              ) -> tuple[jax.Array, jax.Array, Any]:
  """Runs a draft model on the last committed tokens, as `feed_last` does.

  The arguments are those of `feed_last`. This function also returns a hidden
  state.

  Returns:
    The logits `[B, V]` of the token after the root, the hidden state
    `[B, width]` at the root, and the cache with all committed tokens. The root
    is the last committed token.
  """
  start = jnp.maximum(state.lengths - size, 0)
  # If a row has fewer than `size` committed tokens, the pass of fixed size also
  # reads arbitrary tokens after the committed ones. This does no harm, because
  # the next pass overwrites the cache entries of these arbitrary tokens.
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
  """Adds committed tokens that the draft model has not read to its cache.

  Such tokens were committed in rounds in which nothing was drafted. The model
  reads them in passes of `size` tokens per row.

  Args:
    model: draft model.
    params: parameters of the model.
    state: decoding state of the B rows; finished rows do not cause passes.
    cache: cache of the model with the first `since` committed tokens.
    since: number `[B]` int32 of tokens in the cache.
    size: number of tokens that one pass reads per row.

  Returns:
    The cache. It lacks at most the last two committed tokens of a row, which
    the next draft reads with `feed_last(..., size=2)`.
  """
  missing = jnp.where(state.done, 0, state.lengths - 2 - since)

  def read(carry):
    i, cache = carry
    # A block of `size` tokens that begins near the end of the sequence could
    # exceed the cache's capacity. So such a block begins earlier and ends at
    # the end of the sequence; it reads some cached tokens again.
    start = jnp.minimum(since + i * size, state.lengths - size)
    start = jnp.maximum(start, 0)
    out = _feed(model, params, state, cache.rollback(start), start, size)
    return i + 1, out.cache.rollback(start + size)

  carry = jnp.zeros((), jnp.int32), cache
  return jax.lax.while_loop(
      lambda carry: carry[0] * size < jnp.max(missing), read, carry)[1]


def _feed(model: Model, params: chex.ArrayTree, state: DecodeState,
          cache: Cache, start: jax.Array, size: int) -> ModelOutput:
  """Runs the model on `size` tokens per row, from position `start [B]`."""
  batch = state.lengths.shape[0]
  tokens = jnp.take_along_axis(
      state.tokens, start[:, None] + jnp.arange(size), axis=1)
  return model(params, tokens, *topology.causal(batch, size), cache)


def keep_path(cache: Cache, slots: jax.Array, path: jax.Array, size: int,
              count: jax.Array) -> Any:
  """Removes rejected draft tokens from a draft model's cache.

  The returned cache contains the accepted path of the draft tree. The draft
  model never ran on the bonus token, and possibly not on the deepest accepted
  token. Their entries are not valid until `feed_last(..., size=2)` runs the
  model on these two tokens in the next round.

  Args:
    cache: cache with a block of `size` drafted tokens after the committed ones.
    slots: index of each of the N tree nodes in that block, `[B, N]` int32 for B
      rows; arbitrary for the root and for nodes that the model did not read.
    path: accepted nodes `[B, N]` int32, beginning with the root, see
      `Verdict.path`.
    size: number of tokens of the block.
    count: number `[B]` int32 of tokens committed in this round, including the
      bonus token.
  """
  accepted = jnp.take_along_axis(slots, path[:, 1:size + 1], axis=1)
  accepted = jnp.pad(accepted, ((0, 0), (0, size - accepted.shape[1])))
  return cache.commit(accepted, count).settle()
