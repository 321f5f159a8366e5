"""Tokens that must not come, and tokens that must."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.decoding import constraining
from specjax.utils import fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class Banned(constraining.Constraint):
  """Tokens that are never drawn among the first new tokens, or at all.

  With the row's eos it is a least length of the output. Tokens that are banned
  for good are cheaper as `LogitsTransform.banned`.

  Attributes:
    tokens: their ids.
    first: how many of the new tokens must not be one of them; None: all.
  """

  tokens: tuple[int, ...]
  first: int | None = None

  def __post_init__(self) -> None:
    object.__setattr__(self, "tokens", tuple(self.tokens))
    if self.first is not None:
      fields.check_fields(self, "first", least=0, more=", or None for all")

  def check_target(self, vocab_size: int) -> None:
    """Raises a `ValueError` where an id does not exist, or none is left."""
    constraining.check_ids("Banned.tokens", self.tokens, vocab_size)
    if len(set(self.tokens)) == vocab_size:
      raise ValueError(f"Banned.tokens holds all {vocab_size} tokens; leave at "
                       "least one")

  def init(self, row: constraining.Row) -> jax.Array:
    """`[]` int32, how many new tokens there are."""
    return jnp.zeros_like(row.length)

  def advance(self, memory: jax.Array, token: jax.Array) -> jax.Array:
    """One more."""
    del token
    return memory + 1

  def apply(self, memory: jax.Array, logits: jax.Array) -> jax.Array:
    """-inf for the tokens, as long as that holds."""
    banned = logits.at[jnp.array(self.tokens, jnp.int32)].set(-jnp.inf)
    if self.first is None:
      return banned
    return jnp.where(memory < self.first, banned, logits)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forced(constraining.Constraint):
  """Tokens that come with certainty, at a place or after another token.

  Attributes:
    at: pairs of a place and the token there; the first new token is at 0.
    after: pairs of a token and the one that follows it, also that of the
      prompt's last token; what `at` says goes before.
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
        raise ValueError(f"Forced.{name} is {pairs}; it says twice what is to "
                         "come in one place: leave one of them out")
    if any(place < 0 for place, _ in self.at):
      raise ValueError(f"Forced.at is {self.at}; places count from 0, the "
                       "first new token")

  @property
  def must_come(self) -> tuple[int, ...]:
    """The ids that come with certainty."""
    return tuple(token for _, token in (*self.at, *self.after))

  def check_target(self, vocab_size: int) -> None:
    """Raises a `ValueError` where an id does not exist."""
    constraining.check_ids(
        "Forced.at", [token for _, token in self.at], vocab_size)
    constraining.check_ids("Forced.after", sum(self.after, ()), vocab_size)

  def init(self, row: constraining.Row) -> Any:
    """`([], [])` int32: how many new tokens there are, and the last token."""
    return jnp.zeros_like(row.length), row.tokens[row.length - 1]

  def advance(self, memory: Any, token: jax.Array) -> Any:
    """One more, and it is the last one."""
    return memory[0] + 1, token

  def apply(self, memory: Any, logits: jax.Array) -> jax.Array:
    """-inf for all but the token that must come."""
    wanted = jnp.full((), -1, jnp.int32)
    for pairs, now in ((self.after, memory[1]), (self.at, memory[0])):
      for one, token in pairs:
        wanted = jnp.where(now == one, token, wanted)
    others = jnp.arange(logits.shape[0]) != wanted
    return jnp.where(others & (wanted >= 0), -jnp.inf, logits)
