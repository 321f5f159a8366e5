"""Look-ahead embeddings (PaSS, Monea et al. 2023, arXiv:2311.13581)."""

import dataclasses
from typing import Any
from typing import ClassVar
from typing import Self

import jax
import jax.numpy as jnp

from specjax.methods.networks import Params
from specjax.models.transformer import Transformer
from specjax.utils import fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class LookaheadEmbeddings:
  """The embeddings of [LA]_1..[LA]_L (PaSS, Monea et al. 2023).

  arXiv:2311.13581, section 3. The only parameters: L D numbers.

  Attributes:
    count: L, look-ahead tokens; their ids are V..V + L - 1.
    width: D.
  """

  count: int
  width: int

  kind: ClassVar[str] = "lookahead"

  def __post_init__(self):
    fields.check_fields(self, "count", "width")

  @property
  def num_forecasts(self) -> int:
    """L, tokens after the next one that are forecast."""
    return self.count

  @classmethod
  def for_target(cls, target: Transformer, count: int) -> Self:
    """`count` look-ahead tokens of the target's width."""
    return cls(count=count, width=target.config.width)

  def attach(self, target: Transformer, target_params: Params, params: Params
             ) -> tuple[Transformer, dict[str, Any]]:
    """`(target, {"target", "drafter"})`, the target with the embeddings."""
    target, extended = with_lookahead(target, target_params, params)
    return target, {"target": extended, "drafter": ()}

  def init(self, key: jax.Array, target_params: Params
           ) -> dict[str, jax.Array]:
    """`{"embeddings": [L, D]}` float32, spread as the target's embeddings are.

    Args:
      key: a PRNG key.
      target_params: of the `Transformer` that the embeddings are for.
    """
    table = target_params["embedding"].astype(jnp.float32)
    noise = jax.random.normal(key, (self.count, self.width), jnp.float32)
    return {"embeddings": table.mean(0) + table.std(0) * noise}


def with_lookahead(target: Transformer, params: Params, embeddings: Params
                   ) -> tuple[Transformer, dict[str, Any]]:
  """The same target, which can also read look-ahead tokens.

  Args:
    target: the `Transformer` that the embeddings are for.
    params: its parameters.
    embeddings: `{"embeddings": [L, D]}`, of `LookaheadEmbeddings`.

  Returns:
    `(target, params)`, with which a decoder drafts by `drafters.Lookahead`. On
    ids below V they are what they were.

  Raises:
    ValueError: the embeddings are of another width.
  """
  table = embeddings["embeddings"]
  count, width = table.shape
  if width != target.config.width:
    raise ValueError(
        f"width of the look-ahead embeddings is {width} and of the target "
        f"{target.config.width}; both must be equal: train them for this "
        "target")
  config = dataclasses.replace(target.config, lookahead=count)
  table = table.astype(params["embedding"].dtype)
  return dataclasses.replace(target, config=config), {
      **params, "lookahead": table}
