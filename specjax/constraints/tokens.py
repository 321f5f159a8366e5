"""Banned tokens and forced tokens."""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp

from specjax.decoding import constraining
from specjax.utils import fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class Banned(constraining.Constraint):
  """Forbids tokens among the first new tokens, or in the entire output.

  Banning the eos of a row sets a minimum length of the output. A permanent ban
  is cheaper as `LogitsTransform.banned`.

  Attributes:
    tokens: ids of the banned tokens.
    first: number of new tokens that the ban covers. None bans the tokens in the
      entire output.
  """

  tokens: tuple[int, ...]
  first: int | None = None

  def __post_init__(self) -> None:
    object.__setattr__(self, "tokens", tuple(self.tokens))
    if self.first is not None:
      fields.check_fields(self, "first", least=0, more=", or None for all")

  def check_target(self, vocab_size: int) -> None:
    """Raises `ValueError` if an id does not exist or no token remains."""
    constraining.check_ids("Banned.tokens", self.tokens, vocab_size)
    if len(set(self.tokens)) == vocab_size:
      raise ValueError(f"Banned.tokens holds all {vocab_size} tokens; leave at "
                       "least one")

  def init(self, row: constraining.Row) -> jax.Array:
    """Returns 0, the number of new tokens so far, `[]` int32."""
    return jnp.zeros_like(row.length)

  def advance(self, memory: jax.Array, token: jax.Array) -> jax.Array:
    """Returns the number of new tokens, plus 1."""
    del token
    return memory + 1

  def apply(self, memory: jax.Array, logits: jax.Array) -> jax.Array:
    """Sets the logits of the banned tokens to -inf."""
    banned = logits.at[jnp.array(self.tokens, jnp.int32)].set(-jnp.inf)
    if self.first is None:
      return banned
    return jnp.where(memory < self.first, banned, logits)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forced(constraining.Constraint):
  """Forces tokens at positions of the output or after other tokens.

  Attributes:
    at: pairs `(position, token)`. Position 0 is the first new token. `at` takes
      precedence over `after`.
    after: pairs `(token, next token)`. They also apply to the last token of the
      prompt.
  """

  at: tuple[tuple[int, int], ...] = ()
  after: tuple[tuple[int, int], ...] = ()

  def __post_init__(self) -> None:
    for name in ("at", "after"):
      pairs = tuple(
          (int(one), int(token)) for one, token in getattr(self, name))
      object.__setattr__(self, name, pairs)
      twice = len(pairs) - len({one for one, _ in pairs})
      if twice:
        raise ValueError(f"Forced.{name} is {pairs}; two pairs have the same "
                         "first element, which must not occur twice: leave one "
                         "of them out")
    if any(place < 0 for place, _ in self.at):
      raise ValueError(f"Forced.at is {self.at}; positions count from 0, the "
                       "first new token")

  @property
  def must_come(self) -> tuple[int, ...]:
    """Ids of the forced tokens."""
    return tuple(token for _, token in (*self.at, *self.after))

  def check_target(self, vocab_size: int) -> None:
    """Raises `ValueError` if an id does not exist."""
    constraining.check_ids(
        "Forced.at", [token for _, token in self.at], vocab_size)
    constraining.check_ids("Forced.after", sum(self.after, ()), vocab_size)

  def init(self, row: constraining.Row) -> Any:
    """Returns the number of new tokens so far, 0, and the prompt's last token.

    Both are `[]` int32.
    """
    return jnp.zeros_like(row.length), row.tokens[row.length - 1]

  def advance(self, memory: chex.ArrayTree, token: jax.Array) -> Any:
    """Returns the number of new tokens plus 1, and the token."""
    return memory[0] + 1, token

  def apply(self, memory: chex.ArrayTree, logits: jax.Array) -> jax.Array:
    """Sets all logits except that of the forced token to -inf."""
    wanted = jnp.full((), -1, jnp.int32)
    for pairs, now in ((self.after, memory[1]), (self.at, memory[0])):
      for one, token in pairs:
        wanted = jnp.where(now == one, token, wanted)
    others = jnp.arange(logits.shape[0]) != wanted
    return jnp.where(others & (wanted >= 0), -jnp.inf, logits)
