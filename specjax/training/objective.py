"""What an objective is: the seam between a loss and the one training loop."""

from collections.abc import Callable
from collections.abc import Mapping
from typing import Any
from typing import Protocol
from typing import runtime_checkable

import jax
import jax.numpy as jnp

from specjax.interfaces import Model
from specjax.models.transformer import Transformer

Params = Mapping[str, Any]
Batch = Mapping[str, jax.Array]
Loss = tuple[jax.Array, dict[str, jax.Array]]
# `(k, logits [B, P, V], positions [B, P]) -> tree`, called for k = 1..K.
Score = Callable[[jax.Array, jax.Array, jax.Array], Any]


@runtime_checkable
class Objective(Protocol):
  """What is minimised: pure and hashable, as a frozen dataclass is.

  Attributes:
    needs: the names of the parameters that it reads, such as "target".
  """

  @property
  def needs(self) -> tuple[str, ...]:
    ...

  def __call__(self, trainable: Params, frozen: Params, batch: Batch,
               key: jax.Array) -> Loss:
    """`(loss [], metrics)`, in nats, a mean over what is predicted.

    Args:
      trainable: named trees of parameters that get a gradient.
      frozen: named trees that get none.
      batch: `tokens [B, S + 1]` int32, of which the first S are read, and
        `progress []` float32, the share of the run that is over. It may have
        `weights [B, S]` float32, how much each token after the first counts
        where it is forecast; default: all count alike.
      key: a PRNG key of the step.

    Returns:
      Metrics are scalars by name; see `Trainer`.
    """


@runtime_checkable
class DrafterObjective(Objective, Protocol):
  """An objective that trains what drafts, and can be measured head by head.

  Attributes:
    model: the target.
  """

  @property
  def model(self) -> Transformer:
    ...

  def score(self, params: Params, tokens: jax.Array, key: jax.Array,
            score: Score) -> Any:
    """What `score` finds of every forecast, stacked along K.

    Args:
      params: `{"target", "drafter"}`.
      tokens: `[B, S + 1]` int32.
      key: of the positions, where they are drawn.
      score: called with the logits of forecast k, which predict the tokens at
        `positions + 1 + k`.
    """


def weights_of(batch: Batch) -> jax.Array:
  """`[B, S]` float32, how much each token after the first of a row counts."""
  shape = batch["tokens"][:, 1:].shape
  return jnp.asarray(
      batch.get("weights", jnp.ones(shape, jnp.float32)), jnp.float32)


def weighted_mean(x: jax.Array, weights: jax.Array) -> jax.Array:
  """The mean of `x` as its `weights`, of the same shape, count; 0 of none."""
  total = jnp.sum(weights)
  return jnp.sum(weights * x) / jnp.where(total > 0, total, 1)


def check_same_tokens(model: Model, target: Model) -> None:
  """Raises a `ValueError` where a drafter has not the target's tokens."""
  if model.vocab_size != target.vocab_size:
    raise ValueError(f"the drafter has {model.vocab_size} tokens and the "
                     f"target {target.vocab_size}; laws of one vocabulary are "
                     "compared: train the drafter with the target's tokenizer, "
                     "or learn stored laws, objectives.StoredLaws")
