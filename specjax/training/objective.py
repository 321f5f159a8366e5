"""Interface of training objectives, as used by the training loop."""

from collections.abc import Callable
from collections.abc import Mapping
from typing import Any
from typing import Protocol
from typing import runtime_checkable

import chex
import jax
import jax.numpy as jnp

from specjax.interfaces import Model
from specjax.models.transformer import Transformer

Params = Mapping[str, Any]
Batch = Mapping[str, jax.Array]
Loss = tuple[jax.Array, dict[str, jax.Array]]
# Function `(k, logits [B, P, V], positions [B, P]) -> tree` for heads k = 1..K.
Score = Callable[[jax.Array, jax.Array, jax.Array], Any]


@runtime_checkable
class Objective(Protocol):
  """Interface of training objectives.

  An objective is pure and hashable, such as a frozen dataclass.

  Attributes:
    needs: names of the parameters that the objective reads, such as "target".
  """

  @property
  def needs(self) -> tuple[str, ...]:
    ...

  def __call__(self, trainable: Params, frozen: Params, batch: Batch,
               key: jax.Array) -> Loss:
    """Returns `(loss [], metrics)`. The loss is a mean over predictions.

    Args:
      trainable: trees of parameters to differentiate, by name.
      frozen: trees of parameters without gradients, by name.
      batch: arrays by name. `tokens [B, S + 1]` int32 are the rows. The model
        reads the first S tokens of a row. `progress []` float32 is the
        completed fraction of the run's steps. `weights [B, S]` float32, which
        are optional, are the weights in the mean of all tokens after the first.
        Without them, all weights are 1.
      key: PRNG key of the step.

    Returns:
      The loss, usually in nats, and scalar metrics by name, see `Trainer`.
    """


@runtime_checkable
class DrafterObjective(Objective, Protocol):
  """Interface of a drafter's objective that can be evaluated head by head.

  Attributes:
    model: the target.
  """

  @property
  def model(self) -> Transformer:
    ...

  def score(self, params: Params, tokens: jax.Array, key: jax.Array,
            score: Score) -> Any:
    """Returns the results of `score` for the K heads, stacked along a new axis.

    Args:
      params: `{"target": ..., "drafter": ...}` parameters.
      tokens: `[B, S + 1]` int32 rows.
      key: PRNG key for objectives that sample positions.
      score: function `(k, logits [B, P, V], positions [B, P]) -> tree`. The
        logits of head k = 1..K predict the tokens at `positions + 1 + k`.
    """


def check_batch(batch: Batch) -> None:
  """Raises an error unless tokens and weights have valid shapes and dtypes.

  >>> check_batch({"tokens": jnp.zeros((2, 3), jnp.int32)})

  Args:
    batch: arrays by name, see `Objective`.
  """
  tokens = batch["tokens"]
  chex.assert_rank(tokens, 2)
  chex.assert_type(tokens, int)
  if "weights" in batch:
    chex.assert_equal_shape([batch["weights"], tokens[:, 1:]])


def weights_of(batch: Batch) -> jax.Array:
  """Returns the weights `[B, S]` float32 of the tokens after the first.

  >>> weights_of({"tokens": jnp.array([[5, 1, 2]])}).tolist()
  [[1.0, 1.0]]
  """
  shape = batch["tokens"][:, 1:].shape
  return jnp.asarray(
      batch.get("weights", jnp.ones(shape, jnp.float32)), jnp.float32)


def weighted_mean(x: jax.Array, weights: jax.Array) -> jax.Array:
  """Returns the weighted mean of `x`, or 0 if all weights are 0.

  >>> float(weighted_mean(jnp.array([1.0, 5.0]), jnp.array([3.0, 1.0])))
  2.0

  Args:
    x: values of any shape.
    weights: weights of the same shape.
  """
  chex.assert_equal_shape([x, weights])
  total = jnp.sum(weights)
  return jnp.sum(weights * x) / jnp.where(total > 0, total, 1)


def check_same_tokens(model: Model, target: Model) -> None:
  """Raises `ValueError` if drafter and target have different vocabularies."""
  if model.vocab_size != target.vocab_size:
    raise ValueError(f"vocab_size of the drafter is {model.vocab_size} and of "
                     f"the target {target.vocab_size}; both must be equal: "
                     "train the drafter with the target's tokenizer, or use "
                     "objectives.StoredLaws")
