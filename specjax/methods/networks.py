"""Protocol of draft heads, their common base, and checks of their sizes."""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import ClassVar
from typing import Protocol
from typing import runtime_checkable
from typing import Self

import chex
import jax
import jax.numpy as jnp
import numpy as np

from specjax.interfaces import Model
from specjax.models.configuration import TransformerConfig
from specjax.models.transformer import Transformer
from specjax.models.vocabulary_subset import placed

Params = Mapping[str, Any]


@runtime_checkable
class Heads(Protocol):
  """Networks that draft from a target's hidden states, trained per target.

  Implementations are frozen dataclasses that contain sizes and no parameters.
  Their fields can be stored as JSON.

  Attributes:
    kind: name of the class in files.
    num_forecasts: number K of tokens predicted after the next one, which the
      target predicts.
  """

  kind: ClassVar[str]

  @property
  def num_forecasts(self) -> int:
    ...

  @classmethod
  def for_target(cls, target: Transformer, count: int, **options: Any) -> Self:
    """Returns heads of the target's sizes that predict `count` tokens."""

  def init(self, key: jax.Array, target_params: Params) -> Params:
    """Returns initial float32 parameters for a target's parameters."""

  def attach(self, target: Transformer, target_params: Params, params: Params
             ) -> tuple[Transformer, dict[str, Any]]:
    """Returns `(target, {"target", "drafter"})` for a decoder.

    The target outputs the hidden states that the heads read.
    """


def lm_head(params: Params) -> jax.Array:
  """Returns a `Transformer`'s output matrix `[width, vocab_size]`."""
  return params["head"] if "head" in params else params["embedding"].T


def project(hidden: jax.Array, matrix: jax.Array) -> jax.Array:
  """Multiplies hidden states `[..., D]` by a matrix `[D, V]`.

  Products are summed in float32, or in a wider type of `hidden`.
  """
  chex.assert_rank(matrix, 2)
  chex.assert_axis_dimension(hidden, -1, matrix.shape[0])
  return jnp.einsum("...d,dv->...v", hidden, matrix,
                    preferred_element_type=(
                        jnp.promote_types(hidden.dtype, jnp.float32)))


def whole(logits: jax.Array, ids: Sequence[int], vocab_size: int
          ) -> jax.Array:
  """Expands logits of a reduced vocabulary to the target's vocabulary.

  All tokens outside of `ids` get probability 0.

  Args:
    logits: logits `[..., len(ids)]` of the tokens `ids`.
    ids: token ids of the reduced vocabulary; (): `logits` is complete and is
      returned unchanged.
    vocab_size: size V of the target's vocabulary.

  Returns:
    Logits `[..., V]`.
  """
  if not ids:
    return logits
  return placed(logits, np.array(ids), vocab_size)


class HiddenStateHeads:
  """Base of K heads that read the same hidden state.

  The parameters of the heads are stacked along a first axis of size K.
  Subclasses are frozen dataclasses with the fields `width`, `vocab_size` and
  `heads` (K), and a method `head(params, hidden, lm_head)` that returns the
  logits of one head.
  """

  @property
  def num_forecasts(self) -> int:
    """Number K of tokens predicted after the next one."""
    return self.heads

  @classmethod
  def for_target(cls, target: Transformer, count: int, **options: Any) -> Self:
    """Returns `count` heads of the target's width and vocabulary.

    Args:
      target: target model.
      count: number of heads K.
      **options: other fields of the class.
    """
    return cls(width=target.config.width, vocab_size=target.vocab_size,
               heads=count, **options)

  def attach(self, target: Transformer, target_params: Params, params: Params
             ) -> tuple[Transformer, dict[str, Any]]:
    """Returns `(target, {"target", "drafter"})`."""
    return target, {"target": target_params, "drafter": params}

  def __call__(self, params: Params, hidden: jax.Array, lm_head: jax.Array
               ) -> jax.Array:
    """Returns the logits `[..., K, V]` of all heads."""
    return jax.vmap(self.head, (0, None, None), -2)(params, hidden, lm_head)


def check_sizes_match(heads: Heads, target: Model) -> TransformerConfig:
  """Returns the target's configuration after a check of width and vocabulary.

  Raises:
    ValueError: the target is not a `Transformer`, or the width or the
      vocabulary differs.
  """
  config = getattr(target, "config", None)
  if config is None:
    raise ValueError(f"the target is a {type(target).__name__}; heads read "
                     "hidden states of the target: give a models.Transformer")
  for name in ("width", "vocab_size"):
    has, wants = getattr(config, name), getattr(heads, name, None)
    if wants not in (None, has):
      raise ValueError(f"{name} of the heads is {wants} and of the target "
                       f"{has}; both must be equal: make heads for this target")
  return config


def check_fits(heads: Heads, target: Model) -> None:
  """Checks that heads fit a target and its hidden states.

  Raises:
    ValueError: the width or the vocabulary differs, or the target returns other
      hidden states than the input of its LM head (`features` is set).
  """
  config = check_sizes_match(heads, target)
  if config.features:
    raise ValueError(f"features of the target is {config.features}; these "
                     "heads read the input of the LM head: set features=()")
