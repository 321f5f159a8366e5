"""A model that is a part of another one: fewer layers, the same parameters.

Draft & Verify (Zhang et al. 2023, arXiv:2309.08168) and SWIFT (Xia et al. 2024,
arXiv:2410.06916) draft with a part of the target. Nothing is copied: give
`params["target"]` as `params["drafter"]`.

  Shortened   a part that is known when the program is compiled; it saves time
  Masked      a part that is data; it saves none, and one program tries all

Both have caches of their own. A part that read the target's keys and values of
its later layers would be another model: they depend on the layers that it left
out, so that its law would depend on where the draft began.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from specjax.interfaces import Cache
from specjax.models.around import AroundModel
from specjax.models.sublayers import Sublayers
from specjax.models.transformer import Transformer
from specjax.types import ModelOutput

_HEAD = Sublayers.between(0, 0)


@dataclasses.dataclass(frozen=True)
class Shortened(AroundModel):
  """A `Transformer` without some of its attentions and MLPs, as a `Model`.

  Attributes:
    model: the whole model.
    sublayers: what is left of it, one attention at least.
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
        raise ValueError(f"sublayers names layer {number} and the model has "
                         f"{layers}; they are numbered from 0")
    if not self.sublayers.attention:
      raise ValueError("sublayers has no attention, so that the model would "
                       "know nothing but the last token; leave one at least")

  @classmethod
  def early_exit(cls, model: Transformer, layers: int) -> "Shortened":
    """The first `layers` layers, with the norm and the head of the whole."""
    return cls(model, Sublayers.between(0, layers))

  def init_cache(self, params: Any, batch: int, capacity: int) -> Cache:
    """An empty cache of the layers that attend."""
    return self.model.init_cache(
        params, batch, capacity, layers=len(self.sublayers.attention))

  def __call__(self, params: Any, tokens: jax.Array,
               depths: jax.Array | None = None,
               ancestors: jax.Array | None = None,
               cache: Cache | None = None) -> ModelOutput:
    """One pass, as in `Model`; `hidden` is the stream before the norm."""
    return self.model.run(
        params, self.sublayers, tokens, depths, ancestors, cache)

  def logits_at(self, params: Any, output: ModelOutput, at: jax.Array
                ) -> jax.Array:
    """`[B, K, V]`, the rows `at [B, K]` of the logits of a pass."""
    hidden = jnp.take_along_axis(output.hidden, at[..., None], axis=1)
    return self.model.run(params, _HEAD, hidden=hidden).logits

  def param_specs(self, axis: str, size: int) -> dict[str, Any]:
    """The model's."""
    return self.model.param_specs(axis, size)


@dataclasses.dataclass(frozen=True)
class Masked(AroundModel):
  """A `Transformer` of which data says what is left out, as a `Model`.

  Its parameters are `{"model": the model's, "keep": [L, 2]}`, 1 for each
  attention and each MLP that counts and 0 for the others, see `mask`; or
  `[L, 2, B]`, where rows differ.

  Attributes:
    model: the whole model.
  """

  model: Transformer

  def __post_init__(self):
    check_whole(self.model)

  def init_cache(self, params: Any, batch: int, capacity: int) -> Cache:
    """The model's."""
    return self.model.init_cache(params["model"], batch, capacity)

  def __call__(self, params: Mapping[str, Any], tokens: jax.Array,
               depths: jax.Array | None = None,
               ancestors: jax.Array | None = None,
               cache: Cache | None = None) -> ModelOutput:
    """One pass, as in `Model`; `hidden` is the stream before the norm."""
    return self.model.run(
        params["model"], Sublayers.between(0, self.model.config.layers), tokens,
        depths, ancestors, cache, keep=params["keep"])

  def param_specs(self, axis: str, size: int) -> dict[str, Any]:
    """The model's; the mask is on every device."""
    return {"model": self.model.param_specs(axis, size),
            "keep": PartitionSpec()}


def mask(sublayers: Sublayers, layers: int) -> jax.Array:
  """`[layers, 2]` float32, `Masked`'s parameters for what `Shortened` runs."""
  numbers = jnp.arange(layers)[:, None]
  runs = lambda kept: jnp.any(
      numbers == jnp.array(kept, jnp.int32), axis=1)
  return jnp.stack([runs(sublayers.attention), runs(sublayers.mlp)],
                   axis=1).astype(jnp.float32)


def check_whole(model: Any) -> None:
  """Raises a `ValueError` where the layers of a model are not known."""
  if not isinstance(model, Transformer):
    raise ValueError(f"the model is a {type(model).__name__}, of which no "
                     "hidden states are known; running some of its layers "
                     "needs a models.Transformer")


def check_exit(exit: int, model: Any) -> None:
  """Raises a `ValueError` where a model has no layer after an exit."""
  check_whole(model)
  layers = model.config.layers
  if not 1 <= exit < layers:
    raise ValueError(f"exit is {exit} and the target has {layers} layers; it "
                     f"must be from 1 to {layers - 1}: leave one layer at "
                     "least that the draft does without")
