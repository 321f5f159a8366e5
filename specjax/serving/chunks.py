"""Compiled programs of a queue: chunks of rounds, and moved rows."""

import functools

import chex
import jax
import jax.numpy as jnp

from specjax import interfaces
from specjax.decoding import rounds as rounds_lib
from specjax.types import DecodeState
from specjax.types import RoundStats


@jax.jit
def keys(seed: jax.Array) -> jax.Array:
  """Returns `[1]`, the key of row 0 in `Decoder.prefill` with this seed.

  So a request gets the random numbers that `Decoder.generate` would use for its
  prompt alone.
  """
  key = jax.random.key(seed, impl="threefry2x32")
  return jax.random.fold_in(key, 0)[None]


@jax.jit
def moved(state: DecodeState, rows: jax.Array) -> DecodeState:
  """Returns a state whose rows are rows of another state.

  `rows` are indices in the other state; an index may occur several times.
  """
  return interfaces.map_caches(
      lambda cache: cache.take_rows(rows), lambda x: x[rows], state)


@functools.partial(jax.jit, static_argnames=("parts", "window"),
                   donate_argnames="state")
def chunk(parts: rounds_lib.Round, params: chex.ArrayTree, state: DecodeState,
          free: jax.Array, rounds: jax.Array, done: jax.Array, *, window: int
          ) -> tuple[DecodeState, tuple[jax.Array, jax.Array, RoundStats]]:
  """Decodes some rounds and returns the new tokens.

  Args:
    parts: static parts of the rounds.
    params: parameters of the models.
    state: state of the batch; it is donated.
    free: `[B]` bool, slots without a request.
    rounds: maximum number of rounds.
    done: number of done rows at which the chunk ends early.
    window: number of new tokens that are returned for each row.

  Returns:
    The state, and `(tokens [B, window], done [B], stats)`.
  """
  at = state.lengths[:, None] + jnp.arange(window, dtype=jnp.int32)
  state, stats, _ = rounds_lib.until(
      parts, params, state.replace(done=state.done | free), rounds, done)
  tokens = jnp.take_along_axis(
      state.tokens, jnp.minimum(at, state.tokens.shape[1] - 1), axis=1)
  return state, (tokens, state.done, stats)
