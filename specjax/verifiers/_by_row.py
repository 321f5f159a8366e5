"""Laws with rows that are computed when they are read."""

from collections.abc import Callable

import jax

from specjax.types import Law


def law_by_row(stop: jax.Array, row: Callable[[jax.Array], jax.Array]) -> Law:
  """Returns a `Law` with rows of `next_token` that are computed when read.

  The decoding loop reads one row of N, and all N V numbers would be the
  largest array of a verification. As a pytree, such as the result of a jitted
  function, the law has all of its rows.

  Args:
    stop: `[N]`, as in `Law`.
    row: `node [] -> [V]`, a row of `next_token`.
  """
  law = object.__new__(Law)
  object.__setattr__(law, "stop", stop)
  object.__setattr__(law, "next_row", row)
  return law
