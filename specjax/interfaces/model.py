"""Base class of language models."""

import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from specjax.interfaces.cache import Cache
from specjax.types import ModelOutput


class Model:
  """Language model: a hashable object of static configuration.

  `model(params, tokens [B, S], depths [B, S], ancestors [B, S, T], cache)` runs
  one pass over the last S of the T tokens of a block. The first T - S tokens
  were read by earlier passes. They are in the cache but not committed, so a
  drafter can add a level to its tree. The position of a token is
  `cache.lengths + depth`. A token attends to the committed past and to its
  ancestors in the block: `ancestors[b, i, j]` is True if token j is on the path
  to new token i, i included.

  The decoding loop passes all five arguments. Training calls `model(params,
  tokens)`: without a cache, a pass is causal over its own tokens.

  A subclass implements `__call__` and `init_cache` and has the attributes
  `vocab_size` and `context_length`. The other members have defaults.

  Attributes:
    vocab_size: V.
    context_length: longest sequence in tokens, prompt included.
    grows: True if zeros at the end of the state's arrays are equivalent to a
      larger capacity, see `Decoder.grow`.
    changes_law: True if the output distribution differs from that of the models
      it consists of, see `Decoder.changes_law`.
  """

  vocab_size: int
  context_length: int
  grows = True
  changes_law = False

  @property
  def slack(self) -> float:
    """Number of tokens that can be taken back of a cache without loss."""
    return math.inf

  def init(self, key: jax.Array) -> Any:
    """Returns random parameters; optional."""
    raise NotImplementedError

  def init_cache(self, params: chex.ArrayTree, batch: int, capacity: int
                 ) -> Any:
    """Returns an empty `Cache` for `batch` rows of `capacity` slots."""
    raise NotImplementedError

  def __call__(self, params: chex.ArrayTree, tokens: jax.Array,
               depths: jax.Array | None = None,
               ancestors: jax.Array | None = None, cache: Cache | None = None
               ) -> ModelOutput:
    """Runs one pass, see the class."""
    raise NotImplementedError

  def logits_at(self, params: chex.ArrayTree, output: ModelOutput, at: jax.Array
                ) -> jax.Array:
    """Returns the logits `[B, K, V]` at positions `at [B, K]` of a pass.

    A model that can avoid computing the other logits overrides it.
    """
    del params
    return jnp.take_along_axis(output.logits, at[..., None], axis=1)

  def param_specs(self, axis: str, size: int) -> Any:
    """Returns the `PartitionSpec` of every parameter, or of whole branches.

    Args:
      axis: mesh axis over which the model is split.
      size: number of devices of the axis.

    Raises:
      ValueError: the default supports one device only.
    """
    return unsplit(self, axis, size)


def unsplit(part: Any, axis: str, size: int) -> PartitionSpec:
  """Returns the specification of parameters that are not split.

  Args:
    part: the model or drafter that has them.
    axis: mesh axis.
    size: number of devices of the axis.

  Raises:
    ValueError: the axis has several devices.
  """
  if size == 1:
    return PartitionSpec()
  raise ValueError(
      f"{type(part).__name__} has no `param_specs(axis, size)`, and mesh axis "
      f"{axis!r} has {size} devices; implement it, or use an axis of one "
      "device")
