"""How many slots the rows of a state have, and how they get more.

A state is allocated whole, for the longest that a row may become, or with few
slots, which double whenever a row comes near their end. Programs are compiled
for a capacity. So capacities are multiples of 128 and, while a state grows,
powers of two, up to that of the longest text. On a CPU, whose attention costs
what is used, a state is allocated whole; elsewhere what scans all slots, and
the memory, follow the rows.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import interfaces
from specjax.decoding import prefill
from specjax.decoding import rounds
from specjax.types import DecodeState
from specjax.types import Prompt
from specjax.types import RoundStats

STEP = 128  # slots; rounding up lets runs of similar size share code
_AHEAD = 64  # tokens that a row may get before the slots double


def rounded(slots: int) -> int:
  """The next multiple of the step."""
  return -(-slots // STEP) * STEP


def power_of_two(slots: int) -> int:
  """The least power of two that is no less, and no less than the step."""
  return max(STEP, 1 << (slots - 1).bit_length())


def grows(one: Any) -> bool:
  """Whether it is worth while to begin with few slots, and possible."""
  return jax.default_backend() != "cpu" and not interfaces.cannot_grow(one)


def first(one: Any, lengths: np.ndarray, limits: np.ndarray, whole: int
          ) -> int:
  """Slots that hold the prompts and what comes next: a power of two.

  Args:
    one: a `Round` or a `RoundsByLength`.
    lengths: `[B]`, of the prompts.
    limits: `[B]`, the length at which each row is done.
    whole: slots for the longest text that the models read, the most there are.

  Raises:
    ValueError: a part cannot grow.
  """
  _check_grows(one)
  longest = int(np.minimum(lengths + _AHEAD, limits).max())
  return min(power_of_two(longest + one.drafter.num_nodes), whole)


def continued(one: Any, params: Any, state: DecodeState, stats: RoundStats,
              whole: int) -> tuple[DecodeState, RoundStats]:
  """Continues `rounds.until` with twice as many slots, until all rows are done.

  Args:
    one: `Round` or `RoundsByLength`.
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
        one, params, grow(one, params, state, more))
    stats = _added(stats, added)
  return state, stats


def _added(stats, more):
  """Both together; some texts of the checks name the slots, which differ."""
  checks = stats.checks and {
      text: stats.checks.get(text, True) & more.checks.get(text, True)
      for text in {**stats.checks, **more.checks}}
  return jax.tree.map(rounds.add, stats.replace(checks=None),
                      more.replace(checks=None)).replace(checks=checks)


def grow(one: Any, params: Any, state: DecodeState, capacity: int
         ) -> DecodeState:
  """The state with zeros after the end of what has a slot for each token.

  The axes to extend are found by comparing shapes with those of the state that
  `one.start` would make at this capacity.

  Args:
    one: the `Round` or `RoundsByLength` that the state is for.
    params: its parameters.
    state: it is donated, an array at a time, so that there are never two whole
      caches.
    capacity: C.

  Raises:
    ValueError: the state has more slots, or a part cannot grow.
  """
  have = state.tokens.shape[1]
  if capacity < have:
    raise ValueError(f"capacity is {capacity} and the state has {have} slots "
                     "already; give more, or leave it as it is")
  _check_grows(one)
  rows = state.lengths.shape[0]
  prompt = Prompt(
      tokens=jax.ShapeDtypeStruct((rows, prefill.padded_length(1)), jnp.int32),
      lengths=state.lengths, capacity=capacity, context=state.context)
  form = jax.eval_shape(
      functools.partial(rounds.start, one), params, prompt, state.limits,
      state.keys, state.temperature, state.eos)
  # What a cache says of itself, such as `heads_axis`, is that of the state.
  form = jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(form))
  return interfaces.map_caches(
      lambda cache, like: cache.grow(like, _longer), _longer, state, form)


def _check_grows(one):
  stuck = interfaces.cannot_grow(one)
  if stuck:
    raise ValueError(f"{stuck} says `grows = False`: its state cannot get more "
                     "slots; leave out grows=True, and all of them are "
                     "allocated at once")


def _longer(x, form):
  """An array with zeros after the end of every axis that is longer in `form`.

  An axis that is shorter there follows the prompts, and stays.
  """
  more = tuple(max(0, new - old) for old, new in zip(x.shape, form.shape))
  if not any(more):
    return x
  split = isinstance(x.sharding, jax.sharding.NamedSharding)
  new = _padded(x, more, x.sharding if split else None)
  x.delete()
  return new


@functools.partial(jax.jit, static_argnames=("more", "sharding"))
def _padded(x, more, sharding):
  new = jnp.pad(x, [(0, count) for count in more])
  return new if sharding is None else jax.lax.with_sharding_constraint(
      new, sharding)
