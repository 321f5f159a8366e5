"""Helpers of all drafters: drafts, checks, and passes of a drafting model."""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.decoding import rounds
from specjax.interfaces import Drafter
from specjax.interfaces import Model
from specjax.sampling import LogitsTransform
from specjax.sampling import UNIFORMS_A_DRAW
from specjax.trees import topology
from specjax.types import DecodeState
from specjax.types import Draft


def tree_drafts(state: DecodeState, parents: Sequence[int], tokens: jax.Array,
                probs: jax.Array) -> Draft:
  """Returns drafts of one static tree below the root of every row.

  Args:
    state: decoding state.
    parents: N entries of the tree.
    tokens: `[B, N - 1]` int32 of the nodes below the root.
    probs: distributions `[B, N - 1, V]` of the tokens.
  """
  parents = jnp.array(parents, jnp.int32)
  tree = lambda root, tokens, probs: Draft.tree(root, parents, tokens, probs)
  return jax.vmap(tree)(rounds.roots(state), tokens, probs)


def deterministic(state: DecodeState, parents: Sequence[int], tokens: jax.Array,
            vocab_size: int) -> Draft:
  """Returns deterministic drafts of given tokens.

  Args:
    state: decoding state.
    parents: N entries, of every row's tree.
    tokens: `[B, N - 1]` int32 of the nodes below the root; an id outside of
      [0, V) is padding.
    vocab_size: vocabulary size V.
  """
  known = (tokens >= 0) & (tokens < vocab_size)
  probs = jax.nn.one_hot(jnp.where(known, tokens, -1), vocab_size)
  return tree_drafts(state, parents, jnp.where(known, tokens, 0), probs)


class DrawnChain(Drafter):
  """Base of drafters that sample a chain of `gamma` tokens in order."""

  gamma: int

  chain = True
  iid = True
  conditional = True
  proposal = "iid"

  @property
  def num_uniforms(self) -> int:
    return UNIFORMS_A_DRAW * self.gamma


def with_transform(drafter: Any, transform: LogitsTransform, **changes: Any
                   ) -> Any:
  """Returns the drafter with the transform for its draft distributions.

  A drafter keeps a transform of its own, with its temperature, truncation and
  bans; one that has None takes the target's. Either way its constraints are the
  target's, in place of its own: the state remembers no others. The target's
  bans come with them, for a decoder puts them first among its constraints where
  it has any; without any, a transform of its own knows only its own bans.

  Args:
    drafter: a frozen dataclass that has `transform`.
    transform: transform of the target.
    **changes: other fields that `bind` fills in.
  """
  own = drafter.transform or transform
  return dataclasses.replace(
      drafter, transform=own.under(transform), **changes)


def check_vocabulary(model: Model, target: Model) -> None:
  """Raises `ValueError` if a model has another vocabulary than the target."""
  if model.vocab_size != target.vocab_size:
    raise ValueError(
        f"the drafter has {model.vocab_size} tokens and the target "
        f"{target.vocab_size}; both need the same vocabulary: train the "
        "drafter with the target's tokenizer, or draft by "
        "strategies.token_intersection or strategies.string_match")


def check_target_size(size: int, target: Model) -> None:
  """Raises `ValueError` if `size` is not the target's vocabulary size."""
  if size != target.vocab_size:
    raise ValueError(
        f"the drafter was made for a target of {size} tokens and this one has "
        f"{target.vocab_size}; make it with this target's tokenizer and size")


def model_step(model: Model, params):
  """Returns a language model as a step of `_trees`; it carries its cache."""
  def step(tokens, depths, ancestors, above, cache):
    del above
    out = model(params, tokens, depths, ancestors, cache)
    return out.logits, out.cache

  return step


def feed_last(model: Model, params, state: DecodeState, cache, size: int,
              more: int = 0):
  """Catches up with the committed tokens by feeding the last `size` again.

  Feeding a token that the cache holds already changes nothing, so one pass of
  a fixed size serves every row, wherever its last round stopped.

  Args:
    model: a `Model`.
    params: parameters of the model.
    state: decoding state.
    cache: the model's; it may lack up to `size` of the committed tokens.
    size: tokens to feed.
    more: tokens that are fed after them in this round. If there are any, the
      cache that is returned may not have written what it was fed: give
      the settled cache back.

  Returns:
    The logits `[B, V]` of the token after the root, and the cache with all
    committed tokens, the root included.
  """
  logits, _, cache = read_last(model, params, state, cache, size, more)
  return logits, cache


def read_last(model: Model, params, state: DecodeState, cache, size: int,
              more: int = 0):
  """Returns `feed_last` with the hidden state `[B, F]` of the root."""
  start = jnp.maximum(state.lengths - size, 0)
  # A row with fewer committed tokens feeds stale ones after them, which the
  # next pass overwrites.
  last = (state.lengths - 1 - start)[:, None]
  cache = cache.rollback(start)
  cache = cache.reserve(size + more) if more else cache
  out = _feed(model, params, state, cache, start, size)
  logits = model.logits_at(params, out, last)
  hidden = jnp.take_along_axis(out.hidden, last[..., None], axis=1)
  return logits[:, 0], hidden[:, 0], out.cache.rollback(state.lengths)


def catch_up(model: Model, params, state: DecodeState, cache,
             since: jax.Array, size: int = rounds.CATCH_UP):
  """Reads the tokens of rounds without drafts, a block at a time.

  Args:
    model: a `Model`.
    params: parameters of the model.
    state: decoding state; rows that are done are ignored.
    cache: the model's, which holds the first `since [B]` committed tokens.
    since: number `[B]` int32 of cached tokens.
    size: tokens of a block.

  Returns:
    The cache, which lacks the last two committed tokens at most: what
    `feed_last` of two tokens makes up for.
  """
  missing = jnp.where(state.done, 0, state.lengths - 2 - since)

  def read(carry):
    i, cache = carry
    # The last block ends with the text, and so stays within the capacity.
    start = jnp.minimum(since + i * size, state.lengths - size)
    start = jnp.maximum(start, 0)
    out = _feed(model, params, state, cache.rollback(start), start, size)
    return i + 1, out.cache.rollback(start + size)

  carry = jnp.zeros((), jnp.int32), cache
  return jax.lax.while_loop(
      lambda carry: carry[0] * size < jnp.max(missing), read, carry)[1]


def _feed(model, params, state, cache, start, size):
  """Runs the model on `size` committed tokens from `start [B]`."""
  batch = state.lengths.shape[0]
  tokens = jnp.take_along_axis(
      state.tokens, start[:, None] + jnp.arange(size), axis=1)
  return model(params, tokens, *topology.causal(batch, size), cache)


def keep_path(cache, slots, path, size: int, count):
  """Keeps the keys and values of the accepted path.

  The deepest accepted token may never have been fed; `feed_last` of two
  tokens makes up for it and for the extra token.

  Args:
    cache: with a block of `size` drafted tokens after the committed ones.
    slots: `[B, N]` int32, where each node of the draft lies in that block;
      anything for the root and for nodes that were not fed.
    path: `[B, N]` int32, of the verdict.
    size: tokens of the block.
    count: number `[B]` int32 of committed tokens.
  """
  below = path[:, 1:size + 1]
  kept = jnp.take_along_axis(slots, below, axis=1)
  kept = jnp.pad(kept, ((0, 0), (0, size - kept.shape[1])))
  return cache.commit(kept, count).settle()
