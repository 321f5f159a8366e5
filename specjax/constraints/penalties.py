"""Penalties for tokens that already occur in the sequence."""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp

from specjax.decoding import constraining
from specjax.sampling import LARGEST
from specjax.utils import fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repetition(constraining.Constraint):
  """Repetition penalty for tokens of the prompt and the output.

  Positive logits of these tokens are divided by the penalty, and negative ones
  are multiplied by it. The temperature applies afterwards. This is the penalty
  of CTRL (Keskar et al. 2019, arXiv:1909.05858, section 4.1) as implemented in
  transformers.

  Attributes:
    penalty: factor above 0. 1 disables it; values above 1 reduce repetition.
  """

  penalty: float

  def __post_init__(self) -> None:
    if not 1 / LARGEST <= self.penalty <= LARGEST:
      raise ValueError(f"the repetition penalty is {self.penalty}; it must be "
                       f"above 0, from {1 / LARGEST:g} to {LARGEST:g}: 1 "
                       "changes nothing, 1.2 repeats less")

  def init(self, row: constraining.Row) -> jax.Array:
    """Returns a mask of the tokens in the prompt, `[V]` bool."""
    real = jnp.arange(row.tokens.shape[0]) < row.length
    ids = jnp.where(real, row.tokens, row.vocab_size)
    return jnp.zeros((row.vocab_size,), bool).at[ids].set(True, mode="drop")

  def advance(self, memory: jax.Array, token: jax.Array) -> jax.Array:
    """Returns the mask after adding a token."""
    return memory.at[token].set(True, mode="drop")

  def apply(self, memory: jax.Array, logits: jax.Array) -> jax.Array:
    """Returns the logits with the penalty applied."""
    less = jnp.where(logits > 0, logits / self.penalty, logits * self.penalty)
    return jnp.where(memory, less, logits)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputPenalty(constraining.Constraint):
  """Frequency and presence penalties for tokens of the output.

  The new logit is logit - frequency * count - presence * (count > 0), as in
  OpenAI's interface and vLLM. `count` is the number of occurrences in the
  output, without the prompt.

  Attributes:
    frequency: penalty for each occurrence. Negative values encourage
      repetition.
    presence: penalty for tokens that occur at least once.
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
    """Returns zero counts for all tokens, `[V]` int32."""
    return jnp.zeros((row.vocab_size,), jnp.int32)

  def advance(self, memory: jax.Array, token: jax.Array) -> jax.Array:
    """Returns the counts with one more occurrence of the token."""
    return memory.at[token].add(1, mode="drop")

  def apply(self, memory: jax.Array, logits: jax.Array) -> jax.Array:
    """Subtracts the penalties from the logits."""
    return logits - self.frequency * memory - self.presence * (memory > 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoRepeatNGram(constraining.Constraint):
  """Forbids tokens that would repeat an n-gram of the prompt or output.

  Equivalent to `no_repeat_ngram_size` of transformers. Paulus et al. 2017
  (arXiv:1705.04304, section 2.5) use n = 3.

  Attributes:
    size: n-gram length n, at least 1. 1 forbids every earlier token.
  """

  size: int

  def __post_init__(self) -> None:
    fields.check_fields(self, "size", more=": of the n-grams, in tokens")

  def init(self, row: constraining.Row) -> Any:
    """Returns the tokens of the row and their number, `([C], [])` int32.

    C is the number of slots of the row.
    """
    return row.tokens, row.length

  def advance(self, memory: chex.ArrayTree, token: jax.Array) -> Any:
    """Returns the tokens after appending `token`, and their number."""
    tokens, length = memory
    return tokens.at[length].set(token, mode="drop"), length + 1

  def apply(self, memory: chex.ArrayTree, logits: jax.Array) -> jax.Array:
    """Sets the logits of tokens that would repeat an n-gram to -inf."""
    tokens, length = memory
    first = length - self.size + 1
    at = jnp.arange(tokens.shape[0])
    found = (at + self.size - 1 < length) & (first >= 0)
    for k in range(self.size - 1):
      last = tokens[jnp.maximum(first + k, 0)]
      found &= jnp.roll(tokens, -k) == last
    ids = jnp.where(found, jnp.roll(tokens, 1 - self.size), logits.shape[0])
    return logits.at[ids].set(-jnp.inf, mode="drop")
