"""What a queue compiles: chunks of rounds, and rows moved to other slots."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax import interfaces
from specjax.decoding import rounds as rounds_lib
from specjax.types import RoundStats


@jax.jit
def keys(seed):
  """`[1]`, the key of the first row that `prefill` makes of a seed."""
  key = jax.random.key(seed, impl="threefry2x32")
  return jax.random.fold_in(key, 0)[None]


@jax.jit
def moved(state, rows):
  """A state of these rows of another, in order."""
  return interfaces.map_caches(
      lambda cache: cache.take_rows(rows), lambda x: x[rows], state)


@functools.partial(jax.jit, static_argnames=("parts", "window"),
                   donate_argnames="state")
def chunk(parts, params, state, free, rounds, done, *, window
           ) -> tuple[Any, tuple[jax.Array, jax.Array, RoundStats]]:
  """Some rounds, and what the host is told of them.

  Args:
    parts: the `Round`.
    params: of the models.
    state: it is donated.
    free: `[B]` bool, slots without a request.
    rounds: at most.
    done: rows that are done, at which it ends early.
    window: tokens of a row that the host is told, from its first new one on.

  Returns:
    The state, and `(tokens [B, window], done [B], stats)`.
  """
  at = state.lengths[:, None] + jnp.arange(window, dtype=jnp.int32)
  state, stats = rounds_lib.until(
      parts, params, state.replace(done=state.done | free), rounds, done)
  tokens = jnp.take_along_axis(
      state.tokens, jnp.minimum(at, state.tokens.shape[1] - 1), axis=1)
  return state, (tokens, state.done, stats)
