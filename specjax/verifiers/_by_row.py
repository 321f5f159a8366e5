"""A `Law` whose rows are computed when they are read."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.types import Law


@jax.tree_util.register_pytree_node_class
class LawByRow(Law):
  """A `Law` that stores a function in place of `next_token`.

  The decoding loop reads one of the N rows. The array of all rows, N V numbers,
  would be the largest of a verification. `next_row` therefore computes one row,
  and `next_token` computes all of them. As a pytree it is a `Law` with all
  rows.

  Attributes:
    stop: `[N]`, see `Law`.
  """

  def __init__(self, stop: jax.Array,
               row: Callable[[jax.Array], jax.Array]):
    """Stores a law.

    Args:
      stop: `[N]`, see `Law`.
      row: function `node [] -> [V]` that returns a row of `next_token`.
    """
    object.__setattr__(self, "stop", stop)  # a `Law` is frozen
    object.__setattr__(self, "_row", row)

  @property
  def next_token(self) -> jax.Array:
    """All rows, `[N, V]`."""
    return jax.vmap(self._row)(jnp.arange(self.stop.shape[0], dtype=jnp.int32))

  def next_row(self, node: jax.Array) -> jax.Array:
    """Returns one row, `[V]`."""
    return self._row(node)

  def replace(self, **changes: Any) -> Law:
    """Returns a `Law` with all rows and the given fields replaced."""
    return Law(self.stop, self.next_token).replace(**changes)

  def tree_flatten(self) -> tuple[tuple[jax.Array, jax.Array], None]:
    return (self.stop, self.next_token), None

  @classmethod
  def tree_unflatten(cls, _: None, arrays: tuple[Any, Any]) -> Law:
    return Law(*arrays)
