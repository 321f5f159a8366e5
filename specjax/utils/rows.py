"""Writes to rows of a batch at different positions."""

import chex
import jax


def put(rows: jax.Array, new: jax.Array, at: jax.Array) -> jax.Array:
  """Writes a block into every row, at a position of its own.

  >>> import jax.numpy as jnp
  >>> put(jnp.zeros((2, 3)), jnp.ones((2, 1)), jnp.array([0, 2])).tolist()
  [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]

  Args:
    rows: `[B, C, ...]` rows.
    new: `[B, S, ...]` blocks of the same dtype, with S <= C.
    at: `[B]` int32 positions of the first entries. XLA shifts a block back if
      it would exceed the row.

  Returns:
    `[B, C, ...]`.
  """
  chex.assert_equal_shape_prefix([rows, new, at], 1)
  return jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice_in_dim(
      row, new, at, 0))(rows, new, at)
