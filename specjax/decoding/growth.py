"""Capacity of a decoding state, and its growth.

A slot stores one token of a row, in the token array and in every cache. The
capacity of a state is its number of slots per row. A state is allocated with
slots for the longest possible row, or with few slots. In the second case the
capacity is doubled when a row has almost filled its slots. Each capacity
requires a compiled program. So capacities are multiples of 128, and powers of
two while a state grows, up to the capacity of the longest sequence.

On a CPU, the cost of attention depends only on the used slots, so a state is
allocated completely. On other devices attention may read all slots, so a state
begins with few slots.
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

STEP = 128  # slots; batches with similar lengths then share a program
_AHEAD = 64  # tokens for which a new state has room after the prompt


def rounded(slots: int) -> int:
  """Rounds up to a multiple of `STEP`."""
  return -(-slots // STEP) * STEP


def power_of_two(slots: int) -> int:
  """Rounds up to a power of two of at least `STEP`."""
  return max(STEP, 1 << (slots - 1).bit_length())


def grows(stage: rounds.Round | RoundsByLength) -> bool:
  """Returns True if a state begins with few slots: not on a CPU.

  The result is False if a component cannot grow.
  """
  return jax.default_backend() != "cpu" and not interfaces.cannot_grow(stage)


def first(stage: rounds.Round | RoundsByLength, lengths: np.ndarray,
          limits: np.ndarray, whole: int) -> int:
  """Returns the initial capacity for prompts, a power of two or `whole`.

  Args:
    stage: `Round` or `RoundsByLength` of the state.
    lengths: `[B]`, number of tokens of each prompt.
    limits: `[B]`, lengths at which rows are done.
    whole: capacity for the longest sequence, the upper bound of the result.

  Raises:
    ValueError: a component cannot grow.
  """
  _check_grows(stage)
  longest = int(np.minimum(lengths + _AHEAD, limits).max())
  return min(power_of_two(longest + stage.drafter.num_nodes), whole)


def continued(stage: rounds.Round | RoundsByLength, params: chex.ArrayTree,
              state: DecodeState, stats: RoundStats, whole: int
              ) -> tuple[DecodeState, RoundStats]:
  """Continues `rounds.until` with more slots, until all rows are done.

  Args:
    stage: `Round` or `RoundsByLength` of the state.
    params: `{"target": ..., "drafter": ...}`.
    state: state in which a row has no slots for another draft. It is donated.
    stats: sum of the statistics so far.
    whole: capacity for the longest sequence.

  Returns:
    The final state, and the sum of the statistics of all rounds.
  """
  ended = False
  while not ended:
    slots = state.tokens.shape[1]
    more = min(2 * slots, whole) if slots < whole else 2 * slots
    state, added, ended = rounds.until(
        stage, params, grow(stage, params, state, more))
    stats = _added(stats, added)
  return state, stats


def _added(stats: RoundStats, more: RoundStats) -> RoundStats:
  """Returns the sum of two statistics, with the checks of both.

  The keys of `RoundStats.checks` are error messages. They may differ between
  the arguments, because they contain the number of slots.
  """
  checks = stats.checks and {
      text: stats.checks.get(text, True) & more.checks.get(text, True)
      for text in {**stats.checks, **more.checks}}
  return jax.tree.map(rounds.add, stats.replace(checks=None),
                      more.replace(checks=None)).replace(checks=checks)


def grow(stage: rounds.Round | RoundsByLength, params: chex.ArrayTree,
         state: DecodeState, capacity: int) -> DecodeState:
  """Returns a state of larger capacity, with zeros in the new slots.

  The axes to extend are found by comparing shapes with those of the state that
  `rounds.start` would create at the new capacity.

  Args:
    stage: `Round` or `RoundsByLength` of the state.
    params: `{"target": ..., "drafter": ...}`.
    state: state of the decoding loop. It is donated array by array, so that two
      complete caches never exist at the same time.
    capacity: new number of slots per row.

  Raises:
    ValueError: `capacity` is below the current capacity, or a component cannot
      grow.
  """
  have = state.tokens.shape[1]
  if capacity < have:
    raise ValueError(f"capacity is {capacity} and the state has {have} slots "
                     "already; it must be at least as large")
  _check_grows(stage)
  rows = state.lengths.shape[0]
  prompt = Prompt(
      tokens=jax.ShapeDtypeStruct((rows, prefill.padded_length(1)), jnp.int32),
      lengths=state.lengths, capacity=capacity, context=state.context)
  form = jax.eval_shape(
      functools.partial(rounds.start, stage), params, prompt, state.limits,
      state.keys, state.temperature, state.eos)
  # Static fields of caches, such as `heads_axis`, come from the state.
  form = jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(form))
  return interfaces.map_caches(
      lambda cache, like: cache.grow(like, _longer), _longer, state, form)


def _check_grows(stage: rounds.Round | RoundsByLength) -> None:
  stuck = interfaces.cannot_grow(stage)
  if stuck:
    raise ValueError(f"{stuck} says `grows = False`: its state cannot get more "
                     "slots; leave out grows=True to allocate all slots at "
                     "once")


def _longer(x: jax.Array, form: jax.ShapeDtypeStruct) -> jax.Array:
  """Appends zeros to `x` along every axis that is longer in `form`.

  An axis that is shorter in `form` depends on the prompts and does not change.
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
