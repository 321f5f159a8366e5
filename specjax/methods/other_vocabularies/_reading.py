"""Committed sequence in the vocabulary of a draft model (`Reading`).

If the draft model has another vocabulary than the target, the committed tokens
are translated to draft tokens. The draft model reads these draft tokens. A
`Reading` stores the draft tokens and the draft model's cache for every row of
the batch. A round calls these functions:

  amended     replaces the last draft tokens by those of the newly committed
              target tokens
  caught_up   runs the draft model on the tokens that are not in its cache, a
              few per pass
  drafted     stores the drafted tokens, and how many of them are in the cache

The translation of an accepted string may differ from the draft tokens that
generated it. So `amended` compares old and new tokens, and keeps the part of
the cache before the first difference.

Every row has space for a fixed number of draft tokens. A row that needs more is
*lost*: nothing is drafted for it any more, even if slots are added later. Only
`TokenIntersection.catch_up`, which translates the complete row again, can end
this.
"""

from typing import Any

import chex
from flax import struct
import jax
import jax.numpy as jnp

from specjax.caches import dense
from specjax.decoding.prefill import padded_length
from specjax.decoding.prefill import read_prompt
from specjax.interfaces import Cache
from specjax.interfaces import Drafter
from specjax.interfaces import Model
from specjax.trees import topology
from specjax.types import Prompt

_PASS = 2  # tokens per row in a catch-up pass; one pass is usually enough
_LOST = 2**30  # length that marks a lost row; larger than any number of tokens


@struct.dataclass
class Reading:
  """Committed sequences in the draft model's vocabulary, and its cache.

  The first axis of every leaf is the batch, B rows.

  Attributes:
    tokens: `[B, C]` int32, the committed sequence in draft tokens, followed by
      the last draft.
    lengths: `[B]` int32, number of draft tokens without the last draft; 2**30
      if the row is lost, because it needs more space than it has.
    fed: `[B]` int32, number of draft tokens in the cache.
    seen: `[B]` int32, number of committed target tokens that are translated.
    cache: cache of the draft model.
  """

  tokens: jax.Array
  lengths: jax.Array
  fed: jax.Array
  seen: jax.Array
  cache: Cache

  def amended(self, start: jax.Array, ids: jax.Array, count: jax.Array,
              seen: jax.Array, room: int) -> "Reading":
    """Returns the state after replacing the draft tokens from a position on.

    Tokens from the first changed one on are removed from the cache.

    Args:
      start: `[B]` int32, position of the first new token, at most `lengths`.
        Later tokens are replaced.
      ids: `[B, K]` int32, new draft tokens, at most K per row.
      count: `[B]` int32, number of new tokens.
      seen: `[B]` int32, number of committed target tokens that the result
        translates.
      room: maximum number of draft tokens of a row; a longer row is lost.
    """
    order = jnp.arange(ids.shape[1], dtype=jnp.int32)
    slots = start[:, None] + order
    new = order < count[:, None]
    old = jnp.take_along_axis(self.tokens, slots, axis=1, mode="clip")
    agree = jnp.sum(jnp.cumprod(new & (old == ids), axis=1), axis=1)
    put = jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))
    known = self.lengths < _LOST
    fits = known & (start + count <= room)
    return self.replace(
        tokens=put(self.tokens, jnp.where(
            new & known[:, None], slots, self.tokens.shape[1]), ids),
        lengths=jnp.where(fits, start + count, _LOST),
        fed=jnp.minimum(self.fed, start + agree.astype(jnp.int32)), seen=seen)

  def drafted(self, length: jax.Array, ids: jax.Array, cache: Cache
              ) -> "Reading":
    """Returns the state with a new draft stored after the sequence.

    Args:
      length: `[B]` int32, number of committed draft tokens, from `caught_up`.
      ids: `[B, gamma]` int32, drafted tokens.
      cache: cache of the draft model with all of these tokens except the last
        drafted one.
    """
    return self.replace(tokens=dense.put_rows(self.tokens, ids, length),
                        fed=length + ids.shape[1] - 1, cache=cache)


class Reader(Drafter):
  """Base class of drafters whose draft model has another vocabulary.

  The state of such a drafter is a `Reading`.

  Attributes:
    model: draft model over its own vocabulary.
    gamma: draft length.
    expansion: maximum number of draft tokens per slot for a target token.
  """

  model: Model
  gamma: int
  expansion: int

  def _room(self, capacity: int) -> int:
    """Returns the maximum number of draft tokens of a row.

    Args:
      capacity: number of slots of a row for target tokens.
    """
    return min(self.expansion * capacity, self.model.context_length)

  def _columns(self, prompt: Prompt) -> int:
    """Returns the number of columns for prompts in draft tokens."""
    return padded_length(min(self.expansion * prompt.tokens.shape[1],
                             self._room(prompt.capacity)))


def slots_needed(room: int, gamma: int) -> int:
  """Returns the cache slots for `room` tokens and a draft of gamma tokens."""
  return room + gamma + _PASS


def begun(model: Model, params: chex.ArrayTree, ids: jax.Array,
          count: jax.Array, seen: jax.Array, room: int, gamma: int) -> Reading:
  """Returns the state after the draft model has read the prompts.

  Args:
    model: draft model.
    params: parameters of the model.
    ids: `[B, W]` int32, prompts of B rows in draft tokens, padded to W columns
      (`prefill.padded_length`).
    count: `[B]` int32, number of draft tokens of each prompt. A row with more
      than W or `room` tokens is lost: nothing is drafted for it.
    seen: `[B]` int32, number of target tokens of each prompt.
    room: maximum number of draft tokens of a row.
    gamma: draft length.
  """
  columns = ids.shape[1]
  slots = max(slots_needed(room, gamma), columns)
  out = read_prompt(model, params, Prompt(
      tokens=ids, lengths=count, capacity=slots))
  lengths = jnp.where(count > min(columns, room), _LOST, count)
  return Reading(
      tokens=jnp.pad(ids, ((0, 0), (0, slots - columns))), lengths=lengths,
      fed=jnp.minimum(count, columns), seen=seen, cache=out.cache)


def caught_up(model: Model, params: chex.ArrayTree, reading: Reading,
              wanted: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
  """Runs the draft model on the tokens that are not in its cache.

  If all tokens of a row are cached, the model reads the last one again to
  compute its logits. The row with the most missing tokens determines the number
  of passes. When a row has no more missing tokens, the further passes read its
  last tokens again, which does not change its cache.

  Args:
    model: draft model.
    params: parameters of the model.
    reading: committed sequences in draft tokens, and the cache.
    wanted: `[B]` bool, True for rows in which tokens will be drafted; other
      rows are treated as empty.

  Returns:
    Number of draft tokens `[B]`, 0 in rows that are not wanted; logits `[B, D]`
    of the next token over the D tokens of the draft model's vocabulary; and the
    cache with all tokens.
  """
  batch = reading.lengths.shape[0]
  length = jnp.where(wanted, reading.lengths, 0)
  last = jnp.maximum(length - _PASS, 0)
  start = jnp.minimum(reading.fed, jnp.maximum(length - 1, 0))
  depths, causal = topology.causal(batch, _PASS)

  def one_pass(carry):
    i, cache, _ = carry
    at = jnp.minimum(start + i * _PASS, last)
    tokens = jnp.take_along_axis(
        reading.tokens, at[:, None] + jnp.arange(_PASS), axis=1)
    out = model(params, tokens, depths, causal, cache.rollback(at))
    node = jnp.clip(length - 1 - at, 0, _PASS - 1)
    logits = model.logits_at(params, out, node[:, None])
    return i + 1, out.cache.rollback(at + _PASS), logits[:, 0]

  passes = jnp.max(jnp.maximum(-(-(length - start) // _PASS), 1))
  carry = jnp.zeros((), jnp.int32), reading.cache
  logits = jax.eval_shape(one_pass, (*carry, None))[-1]
  _, cache, logits = jax.lax.while_loop(
      lambda carry: carry[0] < passes, one_pass,
      (*carry, jnp.zeros(logits.shape, logits.dtype)))
  return length, logits, cache.rollback(length)
