"""Rows of a batch that are written at different places."""

import jax


def put(rows: jax.Array, new: jax.Array, at: jax.Array) -> jax.Array:
  """`rows`, in each of which a block stands from its own place on.

  Args:
    rows: `[B, C, ...]`.
    new: `[B, S, ...]`, of the same dtype; S is at most C.
    at: `[B]` int32, the place of the first entry. Where the block would pass
      the end of a row, XLA shifts it back, so that it ends with the row.

  Returns:
    `[B, C, ...]`.
  """
  return jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice_in_dim(
      row, new, at, 0))(rows, new, at)
