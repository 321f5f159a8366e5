"""Helpers of all drafters: drafts, checks, and passes of a drafting model."""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.decoding import round_steps
from specjax.interfaces import Drafter
from specjax.interfaces import Model
from specjax.sampling import LogitsTransform
from specjax.sampling import UNIFORMS_A_DRAW
from specjax.trees import topology
from specjax.types import DecodeState
from specjax.types import Draft


def tree_drafts(state: DecodeState, parents: Sequence[int], tokens: jax.Array,
                probs: jax.Array) -> Draft:
  """The batch of drafts that are one tree, below the root of every row.

  Args:
    state: the `DecodeState`.
    parents: N entries.
    tokens: `[B, N - 1]` int32 of the nodes below the root.
    probs: `[B, N - 1, V]`, the laws that they were drawn from.
  """
  parents = jnp.array(parents, jnp.int32)
  tree = lambda root, tokens, probs: Draft.tree(root, parents, tokens, probs)
  return jax.vmap(tree)(round_steps.roots(state), tokens, probs)


def deterministic(state: DecodeState, parents: Sequence[int], tokens: jax.Array,
            vocab_size: int) -> Draft:
  """The batch of drafts that propose what they are given with certainty.

  Args:
    state: the `DecodeState`.
    parents: N entries, of every row's tree.
    tokens: `[B, N - 1]` int32 of the nodes below the root; an id outside of
      [0, V) is padding.
    vocab_size: V.
  """
  known = (tokens >= 0) & (tokens < vocab_size)
  probs = jax.nn.one_hot(jnp.where(known, tokens, -1), vocab_size)
  return tree_drafts(state, parents, jnp.where(known, tokens, 0), probs)


class DrawnChain(Drafter):
  """The base of drafters that draw one chain of `gamma` tokens, in order."""

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
  """The drafter with the transform that it drafts with, as `bind` returns it.

  A drafter keeps a transform of its own, with its temperature, truncation and
  bans; one that has None takes the target's. Either way its constraints are the
  target's, in place of its own: the state remembers no others. The target's
  bans come with them, for a decoder puts them first among its constraints where
  it has any; without any, a transform of its own knows only its own bans.

  Args:
    drafter: a frozen dataclass that has `transform`.
    transform: the target's.
    **changes: other fields that `bind` fills in.
  """
  own = drafter.transform or transform
  return dataclasses.replace(
      drafter, transform=own.under(transform), **changes)


def check_vocabulary(model: Model, target: Model) -> None:
  """Raises a `ValueError` where a drafter's model has other tokens."""
  if model.vocab_size != target.vocab_size:
    raise ValueError(
        f"the drafter has {model.vocab_size} tokens and the target "
        f"{target.vocab_size}; both need the same vocabulary: train the "
        "drafter with the target's tokenizer, or draft by "
        "strategies.token_intersection or strategies.string_match")


def check_target_size(size: int, target: Model) -> None:
  """Raises a `ValueError` where a drafter was made for another target."""
  if size != target.vocab_size:
    raise ValueError(
        f"the drafter was made for a target of {size} tokens and this one has "
        f"{target.vocab_size}; make it with this target's tokenizer and size")


def model_step(model: Model, params):
  """A language model as a `growth` step; it carries its cache."""
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
    params: its parameters.
    state: the `DecodeState`.
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
  """`feed_last` with the hidden state `[B, F]` of the root between the two."""
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
             since: jax.Array, size: int = round_steps.CATCH_UP):
  """Reads what rounds without a draft have added, a block at a time.

  Args:
    model: a `Model`.
    params: its parameters.
    state: the `DecodeState`; rows that are done are not waited for.
    cache: the model's, which holds the first `since [B]` committed tokens.
    since: see above.
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
  """A pass over `size` tokens of the text from `start [B]` on, the cache's."""
  batch = state.lengths.shape[0]
  tokens = jnp.take_along_axis(
      state.tokens, start[:, None] + jnp.arange(size), axis=1)
  return model(params, tokens, *topology.causal(batch, size), cache)


def keep_path(cache, slots, path, size: int, count):
  """Keeps what a drafter computed of the accepted path.

  The deepest accepted token may never have been fed; `feed_last` of two
  tokens makes up for it and for the extra token.

  Args:
    cache: with a block of `size` drafted tokens after the committed ones.
    slots: `[B, N]` int32, where each node of the draft lies in that block;
      anything for the root and for nodes that were not fed.
    path: `[B, N]` int32, of the verdict.
    size: tokens of the block.
    count: `[B]` int32, tokens committed.
  """
  below = path[:, 1:size + 1]
  kept = jnp.take_along_axis(slots, below, axis=1)
  kept = jnp.pad(kept, ((0, 0), (0, size - kept.shape[1])))
  return cache.commit(kept, count).settle()
