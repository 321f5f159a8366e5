"""Protocol and base class of draft heads, and checks of sizes.

Draft heads are networks that predict tokens from the target's hidden states,
for example Medusa heads or an EAGLE layer.
"""

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
  """Networks that draft from the hidden states of a particular target.

  Implementations are frozen dataclasses that contain sizes and no parameters.
  Their fields can be stored as JSON.

  Attributes:
    kind: name of the class in files, for example "medusa".
    num_forecasts: number K of draft tokens, the maximum draft length. The draft
      tokens follow the next token, which the target predicts.
  """

  kind: ClassVar[str]

  @property
  def num_forecasts(self) -> int:
    ...

  @classmethod
  def for_target(cls, target: Transformer, count: int, **options: Any) -> Self:
    """Returns heads for this target, with `num_forecasts` equal to `count`."""

  def init(self, key: jax.Array, target_params: Params) -> Params:
    """Returns initial float32 parameters of the heads.

    Some classes copy them from the target's parameters.
    """

  def attach(self, target: Transformer, target_params: Params, params: Params
             ) -> tuple[Transformer, dict[str, Any]]:
    """Returns the target and the parameters for a decoder with these heads.

    Returns:
      `(target, params)`. The returned target outputs the hidden states that the
      heads read. `params` is a dictionary with the keys "target" and "drafter".
    """


def lm_head(params: Params) -> jax.Array:
  """Returns the LM head `[width, vocab_size]` of a `Transformer`.

  If `params` contains no LM head, the result is the transposed embedding.
  """
  return params["head"] if "head" in params else params["embedding"].T


def project(hidden: jax.Array, matrix: jax.Array) -> jax.Array:
  """Returns the logits `[..., V]` of hidden states, with a given LM head.

  Products are summed in float32, or in the dtype of `hidden` if that is wider.

  Args:
    hidden: hidden states `[..., D]` of width D.
    matrix: LM head `[D, V]`.
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
    ids: token ids of the reduced vocabulary. If `ids` is empty, `logits` must
      cover all V tokens, and the function returns `logits` unchanged.
    vocab_size: size V of the target's vocabulary.

  Returns:
    Logits `[..., V]`.
  """
  if not ids:
    return logits
  return placed(logits, np.array(ids), vocab_size)


class HiddenStateHeads:
  """Base class of K independent heads that read the same hidden state.

  Head k predicts draft token k, as in Medusa. The target's `logit_divisor` and
  `logit_softcap` are not applied. The parameters of the heads are stacked along
  a first axis of size K. Subclasses are frozen dataclasses with the fields
  `width`, `vocab_size` and `heads` (K), and a method `head(params, hidden,
  lm_head)` that returns the logits of one head.
  """

  @property
  def num_forecasts(self) -> int:
    """Number K of heads, which is the maximum draft length."""
    return self.heads

  @classmethod
  def for_target(cls, target: Transformer, count: int, **options: Any) -> Self:
    """Returns `count` heads with the width and vocabulary size of the target.

    Args:
      target: target model.
      count: number of heads K.
      **options: other fields of the class.
    """
    return cls(width=target.config.width, vocab_size=target.vocab_size,
               heads=count, **options)

  def attach(self, target: Transformer, target_params: Params, params: Params
             ) -> tuple[Transformer, dict[str, Any]]:
    """Returns `(target, {"target": target_params, "drafter": params})`."""
    return target, {"target": target_params, "drafter": params}

  def __call__(self, params: Params, hidden: jax.Array, lm_head: jax.Array
               ) -> jax.Array:
    """Returns the logits `[..., K, V]` of all K heads for V tokens."""
    return jax.vmap(self.head, (0, None, None), -2)(params, hidden, lm_head)


def check_sizes_match(heads: Heads, target: Model) -> TransformerConfig:
  """Checks that heads and target have the same width and vocabulary size.

  Returns:
    The configuration of the target.

  Raises:
    ValueError: the target is not a `Transformer`, or a size differs.
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
  """Checks that a target returns the input of the LM head, for these heads.

  Raises:
    ValueError: the width or the vocabulary size differs, or the target is
      configured to return other hidden states (`TransformerConfig.features`).
  """
  config = check_sizes_match(heads, target)
  if config.features:
    raise ValueError(f"features of the target is {config.features}; these "
                     "heads read the input of the LM head: set features=()")
