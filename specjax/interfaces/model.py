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
  """A language model. It contains only static configuration and is hashable.

  `model(params, tokens [B, S], depths [B, S], ancestors [B, S, T], cache)` runs
  one pass over the last S of the T tokens of a block. Earlier passes have read
  the first T - S tokens. These are in the cache but not committed, so a drafter
  can build a tree level by level. The position of a token is
  `cache.lengths + depth`. A token attends to all committed tokens and to its
  ancestors in the block: `ancestors[b, i, j]` is True if token j is on the path
  to new token i, including i itself.

  The decoding loop passes all five arguments. Training calls `model(params,
  tokens)`. Such a pass has no cache, and every token sees the tokens before it.

  A subclass implements `__call__` and `init_cache` and has the attributes
  `vocab_size` and `context_length`. The other members have defaults.

  Attributes:
    vocab_size: V, size of the vocabulary.
    context_length: length in tokens of the longest supported sequence,
      including the prompt.
    grows: True if appending zeros to the cache's arrays gives a valid cache of
      larger capacity, see `Decoder.grow`.
    changes_law: True if the model combines other models and its output
      distribution differs from theirs, see `Decoder.changes_law`.
  """

  vocab_size: int
  context_length: int
  grows = True
  changes_law = False

  @property
  def slack(self) -> float:
    """Number of tokens that can be removed from the model's cache.

    Removing more tokens would lose others, see `Cache.slack`.
    """
    return math.inf

  def init(self, key: jax.Array) -> Any:
    """Returns random parameters. Implementing this method is optional."""
    raise NotImplementedError

  def init_cache(self, params: chex.ArrayTree, batch: int, capacity: int
                 ) -> Any:
    """Returns an empty `Cache` for `batch` rows of `capacity` slots."""
    raise NotImplementedError

  def __call__(self, params: chex.ArrayTree, tokens: jax.Array,
               depths: jax.Array | None = None,
               ancestors: jax.Array | None = None, cache: Cache | None = None
               ) -> ModelOutput:
    """Runs one pass, see the docstring of the class."""
    raise NotImplementedError

  def logits_at(self, params: chex.ArrayTree, output: ModelOutput, at: jax.Array
                ) -> jax.Array:
    """Returns the logits `[B, K, V]` at positions `at [B, K]` of a pass.

    A model that can avoid computing the other logits overrides this method.
    """
    del params
    return jnp.take_along_axis(output.logits, at[..., None], axis=1)

  def param_specs(self, axis: str, size: int) -> Any:
    """Returns a `PartitionSpec` for every parameter or branch of parameters.

    Args:
      axis: mesh axis over which the model is split.
      size: number of devices of the axis.

    Raises:
      ValueError: in the default, if `size` is above 1.
    """
    if size == 1:
      return PartitionSpec()
    raise ValueError(
        f"{type(self).__name__} has no `param_specs(axis, size)`, and mesh "
        f"axis {axis!r} has {size} devices; implement it, or use an axis of "
        "one device")
