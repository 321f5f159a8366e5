"""Interface of training objectives, as used by the training loop."""

from collections.abc import Callable
from collections.abc import Mapping
from typing import Any
from typing import Protocol
from typing import runtime_checkable

import chex
from flax import struct
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
        Without them, all weights are 1. With gradient accumulation, the arrays
        are a part of a batch. `whole` is then the complete batch, and `part []`
        int32 the number of the part, from 0 (see `Weights`).
      key: PRNG key of the step, equal for all parts of a batch.

    Returns:
      The loss, usually in nats, and scalar metrics by name, see `Trainer`.
    """

  # An objective may also have `before_parts(params, batch) -> arrays by name`.
  # With gradient accumulation, the loop calls it for all parts of a batch
  # before the first gradient, and adds the arrays to the parts and to `whole`.


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


@struct.dataclass
class Weights:
  """Weights of the tokens after the first in a batch, for weighted means.

  With gradient accumulation, an objective computes its loss for one part of a
  batch at a time, and the loop averages the losses of the parts. The result is
  the loss of the complete batch because every mean is divided by the total
  weight of the complete batch, scaled to the size of a part.

  Attributes:
    all: `[B, S]` float32 weights of the complete batch.
    part: `[]` int32, number of the part, from 0.
    size: number b of rows of a part.
  """

  all: jax.Array
  part: jax.Array | int
  size: int = struct.field(pytree_node=False)

  def of_part(self, x: jax.Array, axis: int = 0) -> jax.Array:
    """Returns the part's rows of an array of the complete batch.

    Draw random numbers for the complete batch and select the part's rows, so
    that they do not depend on the number of parts.

    Args:
      x: array with B entries along `axis`.
      axis: axis of the rows.
    """
    if self.size == len(self.all):
      return x
    return jax.lax.dynamic_slice_in_dim(
        x, self.part * self.size, self.size, axis)

  def divide(self, total: jax.Array, by: jax.Array) -> jax.Array:
    """Returns the part's weighted sum, divided by the total weight.

    Args:
      total: weighted sum `[...]` over the rows of the part.
      by: total weight `[...]` of the complete batch. If it is 0, the result is
        0.
    """
    return total / jnp.where(by > 0, by * (self.size / len(self.all)), 1)

  def mean(self, x: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """Returns the weighted mean `[]` of `x`, or 0 if all weights are 0.

    >>> batch = {"tokens": jnp.array([[5, 1, 2]]),
    ...          "weights": jnp.array([[3.0, 1.0]])}
    >>> float(weights_of(batch).mean(jnp.array([[1.0, 5.0]])))
    2.0

    Args:
      x: values of the part, `[b, ...]`.
      weights: weights `[B, ...]` of the values of the complete batch. None
        means `all`.
    """
    weights = self.all if weights is None else weights
    part = self.of_part(weights)
    chex.assert_equal_shape([x, part])
    return self.divide(jnp.sum(part * x), jnp.sum(weights))


def weights_of(batch: Batch) -> Weights:
  """Returns the weights of a batch's tokens after the first.

  >>> weights_of({"tokens": jnp.array([[5, 1, 2]])}).all.tolist()
  [[1.0, 1.0]]
  """
  whole = batch.get("whole", batch)
  weights = whole.get(
      "weights", jnp.ones(whole["tokens"][:, 1:].shape, jnp.float32))
  return Weights(jnp.asarray(weights, jnp.float32), batch.get("part", 0),
                 len(batch["tokens"]))


def has_weight(weights: jax.Array, size: int) -> jax.Array:
  """Returns the mask of windows with at least one positive weight.

  Objectives that train at sampled positions sample them from this mask, because
  labels without a weight contribute nothing to the loss.

  >>> has_weight(jnp.array([[0.0, 0.0, 1.0, 0.0]]), 2).tolist()
  [[False, True, True]]

  Args:
    weights: weights `[B, S]`.
    size: number of weights in a window.

  Returns:
    `[B, S - size + 1]` bool, one entry for the start of each window.
  """
  before = jnp.pad(jnp.cumsum(weights > 0, axis=1), ((0, 0), (1, 0)))
  return before[:, size:] > before[:, :-size]


def check_same_tokens(model: Model, target: Model) -> None:
  """Raises `ValueError` if drafter and target have different vocabularies."""
  if model.vocab_size != target.vocab_size:
    raise ValueError(f"vocab_size of the drafter is {model.vocab_size} and of "
                     f"the target {target.vocab_size}; both must be equal: "
                     "train the drafter with the target's tokenizer, or use "
                     "objectives.StoredLaws")
