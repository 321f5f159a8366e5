"""Parameters of PaSS and UNO: embeddings of look-ahead tokens, and adapters."""

import dataclasses
from typing import Any
from typing import ClassVar
from typing import Self

from flax import traverse_util
import jax
import jax.numpy as jnp

from specjax.methods.networks import Params
from specjax.models.transformer import Transformer
from specjax.utils import fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaSSEmbeddings:
  """Embeddings of the look-ahead tokens [LA]_1..[LA]_L, and their adapters.

  PaSS, Monea et al. 2023 (arXiv:2311.13581, section 3). The embeddings, L
  vectors of width D, are the only parameters that PaSS trains.

  UNO, Sahoo et al. 2026 (arXiv:2609.04010), adds an adapter to every kernel of
  the target: query, key and value (one kernel here), attention output, and the
  kernels of the MLP. Look-ahead tokens pass through the adapters, and all other
  tokens through the unchanged kernels. So the target's output is that of the
  target without adapters. The inputs of UNO are embeddings of noise tokens of
  the vocabulary, as in files of its authors (`load_drafter`). Heads trained
  here have trained embeddings, as in PaSS.

  Attributes:
    count: number L of look-ahead tokens. Their ids are V..V + L - 1, after the
      V tokens of the vocabulary.
    width: hidden width D.
    lookahead_rank: largest rank of the adapters, and the rank of all new ones.
      0 means PaSS, without adapters.
  """

  count: int
  width: int
  lookahead_rank: int = 0

  kind: ClassVar[str] = "lookahead"

  def __post_init__(self):
    fields.check_fields(self, "count", "width")
    fields.check_at_least(
        "lookahead_rank", self.lookahead_rank, 0, ": 0 is PaSS")

  @property
  def num_forecasts(self) -> int:
    """Number L of draft tokens after the next token."""
    return self.count

  @classmethod
  def for_target(cls, target: Transformer, count: int, **options: int) -> Self:
    """Returns embeddings of `count` tokens with the target's width.

    Args:
      target: target model.
      count: number L of look-ahead tokens.
      **options: `lookahead_rank`.
    """
    return cls(count=count, width=target.config.width, **options)

  def attach(self, target: Transformer, target_params: Params, params: Params
             ) -> tuple[Transformer, dict[str, Any]]:
    """Returns the target and the parameters for a decoder, `(target, params)`.

    The target and `params["target"]` contain the embeddings and the adapters.
    `params["drafter"]` is ().
    """
    target, extended = with_lookahead(target, target_params, params)
    return target, {"target": extended, "drafter": ()}

  def init(self, key: jax.Array, target_params: Params) -> dict[str, Any]:
    """Returns random float32 parameters `{"embeddings": [L, D]}`.

    Each column has the mean and standard deviation of the target's embeddings.
    With `lookahead_rank`, the entry "adapters" contains the adapters under the
    names of the target's kernels (see `layers.Adapted`). `adapter_out` is 0, so
    that untrained adapters have no effect.

    Args:
      key: PRNG key.
      target_params: parameters of the target.
    """
    table = target_params["embedding"].astype(jnp.float32)
    noise = jax.random.normal(key, (self.count, self.width), jnp.float32)
    params = {"embeddings": table.mean(0) + table.std(0) * noise}
    if not self.lookahead_rank:
      return params
    adapters = {}
    for i, (path, kernel) in enumerate(sorted(
        traverse_util.flatten_dict(target_params).items())):
      if path[-1] == "kernel":
        width, *outputs = kernel.shape
        adapters[*path[:-1], "adapter_in"] = width**-0.5 * jax.random.normal(
            jax.random.fold_in(key, i), (width, self.lookahead_rank),
            jnp.float32)
        adapters[*path[:-1], "adapter_out"] = jnp.zeros(
            (self.lookahead_rank, *outputs), jnp.float32)
    return {**params, "adapters": traverse_util.unflatten_dict(adapters)}


def with_lookahead(target: Transformer, params: Params, embeddings: Params
                   ) -> tuple[Transformer, dict[str, Any]]:
  """Adds the embeddings of look-ahead tokens and their adapters to a target.

  Args:
    target: target model for which the embeddings were trained.
    params: parameters of the target.
    embeddings: parameters of `PaSSEmbeddings`, `{"embeddings": [L, D]}` and,
      with adapters, `{"adapters": ...}`.

  Returns:
    `(target, params)` for a decoder with `drafters.PaSS`. The outputs for the V
    tokens of the vocabulary are unchanged.

  Raises:
    ValueError: the width of the embeddings differs from the target's.
  """
  table = embeddings["embeddings"]
  count, width = table.shape
  if width != target.config.width:
    raise ValueError(
        f"width of the look-ahead embeddings is {width} and of the target "
        f"{target.config.width}; both must be equal: train them for this "
        "target")
  added = traverse_util.flatten_dict(embeddings.get("adapters", {}))
  rank = max((x.shape[-1] for path, x in added.items()
              if path[-1] == "adapter_in"), default=0)
  config = dataclasses.replace(
      target.config, lookahead=count, lookahead_rank=rank)
  added = {path: x.astype(params["embedding"].dtype)
           for path, x in {**added, ("lookahead",): table}.items()}
  return (dataclasses.replace(target, config=config),
          traverse_util.unflatten_dict(
              {**traverse_util.flatten_dict(params), **added}))
