"""Copy of the committed tokens in the drafter's vocabulary (`Reading`).

Drafters whose model has another vocabulary than the target use it. A round
calls

  amended   replaces the end of the copy by the newly committed tokens
  caught_up reads the tokens that are not in the model's cache, a few per pass
  drafted   stores the drafted tokens, and the number of them that was read

The next `amended` keeps the cache of all tokens before the first that changed.
So the drafter's tokens of an accepted string may differ from the drafted ones.

Rows have room for a fixed number of tokens. A row that exceeds it is *lost*: it
has no drafts any more, even if slots are added later.
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

_PASS = 2  # unread tokens that a pass reads; one pass is usually enough
_LOST = 2**30  # length of a lost row, larger than any room


@struct.dataclass
class Reading:
  """State of the drafter's model; the first axis of every leaf is the batch B.

  Attributes:
    tokens: `[B, C]` int32, committed tokens, then the last draft.
    lengths: `[B]` int32, number of committed tokens; 2**30 in a lost row.
    fed: `[B]` int32, number of tokens in the cache.
    seen: `[B]` int32, number of the target's committed tokens that `tokens`
      covers.
    cache: cache of the model.
  """

  tokens: jax.Array
  lengths: jax.Array
  fed: jax.Array
  seen: jax.Array
  cache: Cache

  def amended(self, start: jax.Array, ids: jax.Array, count: jax.Array,
              seen: jax.Array, room: int) -> "Reading":
    """Returns the reading with new tokens at its end.

    Args:
      start: `[B]` int32, place of the first new token, at most `lengths`.
        Tokens from this place on are replaced.
      ids: `[B, K]` int32, new tokens.
      count: `[B]` int32, number of new tokens.
      seen: `[B]` int32, number of the target's committed tokens that the result
        covers.
      room: maximal number of tokens; a longer row is lost.
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
    """Returns the reading with the drafted tokens appended.

    Args:
      length: `[B]` int32, result of `caught_up`.
      ids: `[B, gamma]` int32; all except the last were read.
      cache: cache of the model.
    """
    return self.replace(tokens=dense.put_rows(self.tokens, ids, length),
                        fed=length + ids.shape[1] - 1, cache=cache)


class Reader(Drafter):
  """Base of drafters with a `Reading`.

  Its fields are a `model`, a `gamma` and an `expansion`, see
  `TokenIntersection`.
  """

  model: Model
  gamma: int
  expansion: int

  def _room(self, capacity: int) -> int:
    """Returns the maximal number of draft tokens of a row."""
    return min(self.expansion * capacity, self.model.context_length)

  def _columns(self, prompt: Prompt) -> int:
    """Returns the number of columns for the tokens of prompts, see `begun`."""
    return padded_length(min(self.expansion * prompt.tokens.shape[1],
                             self._room(prompt.capacity)))


def slots_needed(room: int, gamma: int) -> int:
  """Returns the capacity for `room` tokens and drafts of gamma."""
  return room + gamma + _PASS


def begun(model: Model, params: chex.ArrayTree, ids: jax.Array,
          count: jax.Array, seen: jax.Array, room: int, gamma: int) -> Reading:
  """Returns the reading of prompts.

  Args:
    model: draft model.
    params: parameters of the model.
    ids: `[B, W]` int32, `prefill.padded_length` columns.
    count: `[B]` int32, number of tokens of each row. A row with more than W or
      `room` tokens is lost.
    seen: `[B]` int32, number of target tokens of each prompt.
    room: maximal number of tokens.
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
  """Reads all unread tokens, and the last token again if all were read.

  The row with the most unread tokens decides the number of passes. In the last
  passes other rows read their last tokens again, which changes nothing.

  Args:
    model: draft model.
    params: parameters of the model.
    reading: state of the drafter's model.
    wanted: `[B]` bool, rows that draft; other rows are treated as empty.

  Returns:
    Number of tokens `[B]`, 0 for rows that do not draft; logits `[B, D]` of the
    next token over the drafter's D tokens; and the cache of all these tokens.
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
