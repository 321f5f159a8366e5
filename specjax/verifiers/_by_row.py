"""A `Law` with rows that are computed when they are read."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax.types import Law


class LawByRow(Law):
  """A `Law` with rows of `next_token` that are computed when they are read.

  The decoding loop reads one row of N, and all N V numbers would be the
  largest array of a verification. As a pytree, such as the result of a jitted
  function, it is a `Law` with all of its rows.

  Args:
    stop: `[N]`, as in `Law`.
    row: `node [] -> [V]`, a row of `next_token`.
  """

  def __init__(self, stop: jax.Array, row: Callable[[jax.Array], jax.Array]):
    object.__setattr__(self, "stop", stop)
    object.__setattr__(self, "next_row", row)

  @property
  def next_token(self) -> jax.Array:
    nodes = jnp.arange(self.stop.shape[0], dtype=jnp.int32)
    return jax.vmap(self.next_row)(nodes)

  def replace(self, **updates: jax.Array) -> Law:
    return Law(**{"stop": self.stop, "next_token": self.next_token, **updates})


jax.tree_util.register_pytree_node(
    LawByRow, lambda law: ((law.stop, law.next_token), None),
    lambda _, rows: Law(*rows))
