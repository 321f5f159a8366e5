"""Models that skip sublayers of a `Transformer`, with the same parameters.

Draft & Verify (Zhang et al. 2023, arXiv:2309.08168) and SWIFT (Xia et al. 2024,
arXiv:2410.06916) draft with a part of the target. The parameters are shared:
pass `params["target"]` as `params["drafter"]`.

  Shortened   the sublayers are fixed at compile time; skipped sublayers take no
              time
  Masked      an array selects the sublayers; there is no speed-up, but one
              compiled program for all selections

These models have separate caches, because keys and values of the target's later
layers depend on the skipped layers. With the target's cache, the draft
distribution would depend on the position at which the draft began.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from specjax.interfaces import Cache
from specjax.models.around import AroundModel
from specjax.models.sublayers import Sublayers
from specjax.models.transformer import Transformer
from specjax.types import ModelOutput

_HEAD = Sublayers.between(0, 0)  # no sublayers: only final norm and LM head


@dataclasses.dataclass(frozen=True)
class Shortened(AroundModel):
  """`Transformer` without some of its attentions and MLPs.

  Attributes:
    model: the full model.
    sublayers: the sublayers that run, at least one attention.
  """

  model: Transformer
  sublayers: Sublayers

  def __post_init__(self):
    check_whole(self.model)
    object.__setattr__(self, "sublayers", dataclasses.replace(
        self.sublayers, packed=True))
    layers = self.model.config.layers
    for number in self.sublayers.layers:
      if number not in range(layers):
        raise ValueError(f"sublayers has layer {number}; layers of the model "
                         f"are 0 to {layers - 1}")
    if not self.sublayers.attention:
      raise ValueError("sublayers has no attention; at least one is required")

  @classmethod
  def early_exit(cls, model: Transformer, layers: int) -> "Shortened":
    """Returns a model of the first `layers` layers, final norm and LM head."""
    return cls(model, Sublayers.between(0, layers))

  def init_cache(self, params: chex.ArrayTree, batch: int, capacity: int
                 ) -> Cache:
    return self.model.init_cache(
        params, batch, capacity, layers=len(self.sublayers.attention))

  def __call__(self, params: chex.ArrayTree, tokens: jax.Array,
               depths: jax.Array | None = None,
               ancestors: jax.Array | None = None, cache: Cache | None = None
               ) -> ModelOutput:
    """Runs one pass, see `Model`. `hidden` is the state before the final norm.
    """
    return self.model.run(
        params, self.sublayers, tokens, depths, ancestors, cache)

  def logits_at(self, params: chex.ArrayTree, output: ModelOutput, at: jax.Array
                ) -> jax.Array:
    """Returns the logits `[B, K, V]` at positions `at [B, K]` of a pass.

    `output` is the output of the pass.
    """
    hidden = jnp.take_along_axis(output.hidden, at[..., None], axis=1)
    return self.model.run(params, _HEAD, hidden=hidden).logits

  def param_specs(self, axis: str, size: int) -> dict[str, Any]:
    return self.model.param_specs(axis, size)


@dataclasses.dataclass(frozen=True)
class Masked(AroundModel):
  """`Transformer` with sublayers selected by an array.

  Parameters are `{"model": parameters of the model, "keep": [L, 2]}`. `keep` is
  1 for an attention or MLP that runs and 0 for the others, see `mask`. Its
  shape is `[L, 2, B]` if rows of the batch differ.

  Attributes:
    model: the full model.
  """

  model: Transformer

  def __post_init__(self):
    check_whole(self.model)

  def init_cache(self, params: chex.ArrayTree, batch: int, capacity: int
                 ) -> Cache:
    return self.model.init_cache(params["model"], batch, capacity)

  def __call__(self, params: Mapping[str, chex.ArrayTree], tokens: jax.Array,
               depths: jax.Array | None = None,
               ancestors: jax.Array | None = None, cache: Cache | None = None
               ) -> ModelOutput:
    """Runs one pass, see `Model`. `hidden` is the state before the final norm.
    """
    return self.model.run(
        params["model"], Sublayers.between(0, self.model.config.layers), tokens,
        depths, ancestors, cache, keep=params["keep"])

  def param_specs(self, axis: str, size: int) -> dict[str, Any]:
    return {"model": self.model.param_specs(axis, size),
            "keep": PartitionSpec()}


def mask(sublayers: Sublayers, layers: int) -> jax.Array:
  """Returns `keep [layers, 2]` float32 of `Masked` for these sublayers."""
  numbers = jnp.arange(layers)[:, None]
  runs = lambda chosen: jnp.any(
      numbers == jnp.array(chosen, jnp.int32), axis=1)
  return jnp.stack([runs(sublayers.attention), runs(sublayers.mlp)],
                   axis=1).astype(jnp.float32)


def check_whole(model: Any) -> None:
  """Raises `ValueError` unless the model is a `Transformer` of attentions."""
  if not isinstance(model, Transformer):
    raise ValueError(f"the model is a {type(model).__name__}; running some of "
                     "its layers requires a models.Transformer")
  if model.config.recurrent:
    raise ValueError("the model has recurrent layers, and their state requires "
                     "that every pass runs all layers; use a drafter that does "
                     "not run a part of the target")
  if model.config.layer_inputs or not model.config.has_uniform_keys:
    raise ValueError("the layers of the model have inputs of their own, or "
                     "share keys and values, or these differ in shape, so "
                     "every pass must run all layers; use a drafter that does "
                     "not run a part of the target")


def check_exit(exit: int, model: Any) -> None:
  """Raises `ValueError` unless `exit` is from 1 to the number of layers - 1.

  `exit` is the number of layers that draft.
  """
  check_whole(model)
  layers = model.config.layers
  if not 1 <= exit < layers:
    raise ValueError(f"exit is {exit}; with {layers} layers of the target it "
                     f"must be from 1 to {layers - 1}")
