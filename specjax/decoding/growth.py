"""Number of slots of the rows of a decoding state, and its growth.

A slot stores one token of a row, in the token array and in every cache. A state
is allocated with slots for the longest possible row, or with few slots that are
doubled when a row comes near their end. Each number of slots (the capacity) is
a compiled program. So capacities are multiples of 128, and powers of two while
a state grows, up to the capacity of the longest sequence. On a CPU, the cost of
attention depends on the used slots only, so a state is allocated completely.
On other devices attention scans all slots, so a state begins with few.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np

from specjax import interfaces
from specjax.decoding import prefill
from specjax.decoding import rounds
from specjax.decoding.rounds_by_length import RoundsByLength
from specjax.types import DecodeState
from specjax.types import Prompt
from specjax.types import RoundStats

STEP = 128  # slots; batches of similar size then share a program
_AHEAD = 64  # tokens that a row may get before the slots are doubled


def rounded(slots: int) -> int:
  """Rounds up to a multiple of `STEP`."""
  return -(-slots // STEP) * STEP


def power_of_two(slots: int) -> int:
  """Rounds up to a power of two of at least `STEP`."""
  return max(STEP, 1 << (slots - 1).bit_length())


def grows(parts: rounds.Round | RoundsByLength) -> bool:
  """Returns True if a state should begin with few slots and can grow."""
  return jax.default_backend() != "cpu" and not interfaces.cannot_grow(parts)


def first(parts: rounds.Round | RoundsByLength, lengths: np.ndarray,
          limits: np.ndarray, whole: int) -> int:
  """Returns the initial capacity for prompts: a power of two.

  Args:
    parts: `Round` or `RoundsByLength`.
    lengths: `[B]`, tokens of the prompts.
    limits: `[B]`, lengths at which rows are done.
    whole: slots for the longest sequence, an upper bound.

  Raises:
    ValueError: a component cannot grow.
  """
  _check_grows(parts)
  longest = int(np.minimum(lengths + _AHEAD, limits).max())
  return min(power_of_two(longest + parts.drafter.num_nodes), whole)


def continued(parts: rounds.Round | RoundsByLength, params: chex.ArrayTree,
              state: DecodeState, stats: RoundStats, whole: int
              ) -> tuple[DecodeState, RoundStats]:
  """Continues `rounds.until` with more slots, until all rows are done.

  Args:
    parts: `Round` or `RoundsByLength`.
    params: `{"target": ..., "drafter": ...}`.
    state: state in which a row has no slots for another draft; it is donated.
    stats: sum of the statistics so far.
    whole: slots for the longest sequence.
  """
  ended = False
  while not ended:
    slots = state.tokens.shape[1]
    more = min(2 * slots, whole) if slots < whole else 2 * slots
    state, added, ended = rounds.until(
        parts, params, grow(parts, params, state, more))
    stats = _added(stats, added)
  return state, stats


def _added(stats: RoundStats, more: RoundStats) -> RoundStats:
  """Returns the sum of two statistics, with the checks of both.

  `RoundStats.checks` has its error messages as keys. They may differ, because
  they contain the number of slots.
  """
  checks = stats.checks and {
      text: stats.checks.get(text, True) & more.checks.get(text, True)
      for text in {**stats.checks, **more.checks}}
  return jax.tree.map(rounds.add, stats.replace(checks=None),
                      more.replace(checks=None)).replace(checks=checks)


def grow(parts: rounds.Round | RoundsByLength, params: chex.ArrayTree,
         state: DecodeState, capacity: int) -> DecodeState:
  """Appends zeros to all arrays that have a slot for each token.

  The axes are found by comparing shapes with those of the state that
  `parts.start` would create at this capacity.

  Args:
    parts: `Round` or `RoundsByLength` of the state.
    params: `{"target": ..., "drafter": ...}`.
    state: state of the loop. It is donated array by array, so that two complete
      caches never exist at the same time.
    capacity: number of slots of each row afterwards.

  Raises:
    ValueError: the state has more slots, or a component cannot grow.
  """
  have = state.tokens.shape[1]
  if capacity < have:
    raise ValueError(f"capacity is {capacity} and the state has {have} slots "
                     "already; give more, or leave it as it is")
  _check_grows(parts)
  rows = state.lengths.shape[0]
  prompt = Prompt(
      tokens=jax.ShapeDtypeStruct((rows, prefill.padded_length(1)), jnp.int32),
      lengths=state.lengths, capacity=capacity, context=state.context)
  form = jax.eval_shape(
      functools.partial(rounds.start, parts), params, prompt, state.limits,
      state.keys, state.temperature, state.eos)
  # Static fields of caches, such as `heads_axis`, come from the state.
  form = jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(form))
  return interfaces.map_caches(
      lambda cache, like: cache.grow(like, _longer), _longer, state, form)


def _check_grows(parts: rounds.Round | RoundsByLength) -> None:
  stuck = interfaces.cannot_grow(parts)
  if stuck:
    raise ValueError(f"{stuck} says `grows = False`: its state cannot get more "
                     "slots; leave out grows=True, and all of them are "
                     "allocated at once")


def _longer(x: jax.Array, form: jax.ShapeDtypeStruct) -> jax.Array:
  """Appends zeros along every axis that is longer in `form`.

  A shorter axis depends on the prompts and does not change.
  """
  more = tuple(max(0, new - old) for old, new in zip(x.shape, form.shape))
  if not any(more):
    return x
  split = isinstance(x.sharding, jax.sharding.NamedSharding)
  new = _padded(x, more, x.sharding if split else None)
  x.delete()
  return new


@functools.partial(jax.jit, static_argnames=("more", "sharding"))
def _padded(x: jax.Array, more: tuple[int, ...],
            sharding: jax.sharding.NamedSharding | None) -> jax.Array:
  new = jnp.pad(x, [(0, count) for count in more])
  return new if sharding is None else jax.lax.with_sharding_constraint(
      new, sharding)
