"""Copy of the committed tokens in the drafter's vocabulary.

For drafters whose model has another vocabulary than the target. A round is

  amended   the new text replaces the end of the old one
  caught_up the model reads what it has not read yet, a few tokens a pass
  drafted   what was drafted is noted, with how much of it the model has read

and after the round the next `amended` finds out what of it still holds: the
cache is kept as far as the new text repeats what the model has read, token by
token. So nothing needs to know how many drafted tokens were accepted, nor
whether the two tokenizers split the accepted text alike.

Rows have room for a fixed number of tokens. A row whose text outgrows it is
lost: it drafts nothing from then on, and nothing of it is cut. It stays lost
where slots are added, for what it committed meanwhile was not noted.
"""

from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from specjax.decoding.prefill import padded_length
from specjax.decoding.prefill import read_prompt
from specjax.interfaces import Drafter
from specjax.interfaces import Model
from specjax.trees import topology
from specjax.types import Prompt
from specjax.utils import rows

_PASS = 2  # tokens of a pass that catches up: mostly one pass is enough
_LOST = 2**30  # the length of a lost text: more than any room


@struct.dataclass
class Reading:
  """State of the drafter's model; every leaf has the rows B first.

  Attributes:
    tokens: `[B, C]` int32, the text, then what was drafted last.
    lengths: `[B]` int32, tokens of the text; 2**30 of one that is lost.
    fed: `[B]` int32, the cache holds the first `fed` of `tokens`.
    seen: `[B]` int32, target tokens that the text stands for.
    cache: cache of the model.
  """

  tokens: jax.Array
  lengths: jax.Array
  fed: jax.Array
  seen: jax.Array
  cache: Any

  def amended(self, start: jax.Array, ids: jax.Array, count: jax.Array,
              seen: jax.Array, room: int) -> "Reading":
    """Returns the reading with another end.

    Args:
      start: `[B]` int32, where the new end begins, at most `lengths`.
      ids: `[B, K]` int32.
      count: `[B]` int32, how many of them.
      seen: `[B]` int32, target tokens that the new text stands for.
      room: tokens; a text that is longer is lost.
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

  def drafted(self, length: jax.Array, ids: jax.Array, cache: Any) -> "Reading":
    """Returns the reading with the drafted tokens appended.

    Args:
      length: `[B]` int32, of the text as `caught_up` gave it.
      ids: `[B, gamma]` int32; all but the last were read.
      cache: cache of the model.
    """
    return self.replace(tokens=rows.put(self.tokens, ids, length),
                        fed=length + ids.shape[1] - 1, cache=cache)


class Reader(Drafter):
  """Base of drafters with a `Reading`.

  They have a `model`, a `gamma` and an `expansion`, see `TokenIntersection`.
  """

  model: Model
  gamma: int
  expansion: int

  def _room(self, capacity: int) -> int:
    """Returns the maximal number of draft tokens of a row."""
    return min(self.expansion * capacity, self.model.context_length)

  def _columns(self, prompt: Prompt) -> int:
    """Returns the columns for `begun`."""
    return padded_length(min(self.expansion * prompt.tokens.shape[1],
                             self._room(prompt.capacity)))


def slots_needed(room: int, gamma: int) -> int:
  """Returns the capacity for `room` tokens and drafts of gamma."""
  return room + gamma + _PASS


def begun(model: Model, params: Any, ids: jax.Array, count: jax.Array,
          seen: jax.Array, room: int, gamma: int) -> Reading:
  """Reads the prompts.

  Args:
    model: the drafter's.
    params: parameters of the model.
    ids: `[B, W]` int32, `prefill.padded_length` columns.
    count: `[B]` int32, tokens of each row; one that has more than W, or than
      `room`, is lost.
    seen: `[B]` int32, target tokens that they stand for.
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


def caught_up(model: Model, params: Any, reading: Reading,
              wanted: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
  """Feeds all unread tokens, and the last token in any case.

  The number of passes depends on the row that needs most; a row that needs
  less feeds its last tokens again, which changes nothing.

  Args:
    model: the drafter's.
    params: parameters of the model.
    reading: state of the drafter's model.
    wanted: `[B]` bool, rows that draft; the others count as empty.

  Returns:
    The lengths `[B]`, 0 for rows that do not draft, the logits `[B, D]` of
    the token after each text, and the cache of that length.
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
