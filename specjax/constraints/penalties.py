"""Penalties for tokens that the text has already."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.decoding import constraining
from specjax.sampling import LARGEST
from specjax.utils import fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repetition(constraining.Constraint):
  """Divides the positive logits of tokens of the text, multiplies the others.

  CTRL (Keskar et al. 2019, arXiv:1909.05858, section 4.1) as transformers has
  it: over prompt and output, before the temperature.

  Attributes:
    penalty: above 0; 1 changes nothing, above 1 repeats less.
  """

  penalty: float

  def __post_init__(self) -> None:
    if not 1 / LARGEST <= self.penalty <= LARGEST:
      raise ValueError(f"the repetition penalty is {self.penalty}; it must be "
                       f"above 0, from {1 / LARGEST:g} to {LARGEST:g}: 1 "
                       "changes nothing, 1.2 repeats less")

  def init(self, row: constraining.Row) -> jax.Array:
    """`[V]` bool, the tokens of the prompt."""
    real = jnp.arange(row.tokens.shape[0]) < row.length
    ids = jnp.where(real, row.tokens, row.vocab_size)
    return jnp.zeros((row.vocab_size,), bool).at[ids].set(True, mode="drop")

  def advance(self, memory: jax.Array, token: jax.Array) -> jax.Array:
    """One token more."""
    return memory.at[token].set(True, mode="drop")

  def apply(self, memory: jax.Array, logits: jax.Array) -> jax.Array:
    """The logits of the text's tokens, made smaller."""
    less = jnp.where(logits > 0, logits / self.penalty, logits * self.penalty)
    return jnp.where(memory, less, logits)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputPenalty(constraining.Constraint):
  """Subtracts from the logits of tokens of the output, not of the prompt.

  The frequency and presence penalties of OpenAI's interface and of vLLM:
  logit - frequency * count - presence * (count > 0).

  Attributes:
    frequency: for each time that the output has the token; below 0 it is a
      reward.
    presence: once, if it has.
  """

  frequency: float = 0.0
  presence: float = 0.0

  def __post_init__(self) -> None:
    for name in ("frequency", "presence"):
      if not -LARGEST <= getattr(self, name) <= LARGEST:
        raise ValueError(f"the {name} penalty is {getattr(self, name)}; it "
                         f"must be a number from {-LARGEST:g} to {LARGEST:g}: "
                         "0 changes nothing")

  def init(self, row: constraining.Row) -> jax.Array:
    """`[V]` int32, how often the output has each token."""
    return jnp.zeros((row.vocab_size,), jnp.int32)

  def advance(self, memory: jax.Array, token: jax.Array) -> jax.Array:
    """One token more."""
    return memory.at[token].add(1, mode="drop")

  def apply(self, memory: jax.Array, logits: jax.Array) -> jax.Array:
    """The logits, less the penalties."""
    return logits - self.frequency * memory - self.presence * (memory > 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoRepeatNGram(constraining.Constraint):
  """Forbids the token that would complete an n-gram of the text once more.

  Over prompt and output, as transformers' `no_repeat_ngram_size`. (Paulus et
  al. 2017, arXiv:1705.04304, section 2.5, never repeat a trigram.)

  Attributes:
    size: n, at least 1; 1 forbids every token that the text has.
  """

  size: int

  def __post_init__(self) -> None:
    fields.check_fields(self, "size", more=": of the n-grams, in tokens")

  def init(self, row: constraining.Row) -> Any:
    """`([C], [])` int32: the text and its length."""
    return row.tokens, row.length

  def advance(self, memory: Any, token: jax.Array) -> Any:
    """One token more."""
    tokens, length = memory
    return tokens.at[length].set(token, mode="drop"), length + 1

  def apply(self, memory: Any, logits: jax.Array) -> jax.Array:
    """-inf for what followed the last n - 1 tokens before."""
    tokens, length = memory
    first = length - self.size + 1
    at = jnp.arange(tokens.shape[0])
    found = (at + self.size - 1 < length) & (first >= 0)
    for k in range(self.size - 1):
      last = tokens[jnp.maximum(first + k, 0)]
      found &= jnp.roll(tokens, -k) == last
    ids = jnp.where(found, jnp.roll(tokens, 1 - self.size), logits.shape[0])
    return logits.at[ids].set(-jnp.inf, mode="drop")
