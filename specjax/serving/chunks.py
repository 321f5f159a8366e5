"""Compiled programs of a queue: chunks of rounds, and rearranging rows."""

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

  With this key, a request has the random numbers that `Decoder.generate` uses
  for its prompt alone.
  """
  key = jax.random.key(seed, impl="threefry2x32")
  return jax.random.fold_in(key, 0)[None]


@jax.jit
def moved(state: DecodeState, rows: jax.Array) -> DecodeState:
  """Returns a state with the rows `rows` of `state`, in this order.

  Args:
    state: state of the batch.
    rows: `[R]` int32, indices of rows. An index may occur several times.
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
    parts: `Round` or `RoundsByLength` of the decoder.
    params: `{"target": ..., "drafter": ...}`.
    state: state of the batch. It is donated.
    free: `[B]` bool, True for slots without a request. They count as done rows.
    rounds: `[]` int32, maximum number of rounds.
    done: `[]` int32, number of done rows at which the chunk ends early.
    window: number of new tokens to return for each row.

  Returns:
    The state, and `(tokens [B, window], done [B], stats)`. Row b of `tokens`
    has `stats.emitted[b]` new tokens. Later entries are arbitrary.
  """
  at = state.lengths[:, None] + jnp.arange(window, dtype=jnp.int32)
  state, stats, _ = rounds_lib.until(
      parts, params, state.replace(done=state.done | free), rounds, done)
  tokens = jnp.take_along_axis(
      state.tokens, jnp.minimum(at, state.tokens.shape[1] - 1), axis=1)
  return state, (tokens, state.done, stats)
