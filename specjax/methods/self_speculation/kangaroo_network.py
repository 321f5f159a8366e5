"""Kangaroo: one more layer after an early exit (arXiv:2404.18911)."""

from collections.abc import Mapping
import dataclasses
from typing import Any
from typing import ClassVar

from flax import struct
import jax
import jax.numpy as jnp

from specjax.methods.networks import Params
from specjax.models.shortened import check_exit
from specjax.models.sublayers import Sublayers
from specjax.models.transformer import Transformer
from specjax.types import ModelOutput
from specjax.utils import fields

_LAYER = Sublayers.between(0, 1)
_SHARED = ("embedding", "head")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KangarooAdapter:
  """A decoder layer and a norm on the target's stream before layer `exit`.

  Liu et al. 2024 (arXiv:2404.18911, section 3.2). What it makes of the stream
  goes through the target's LM head. Its parameters are those of a `Transformer`
  of one layer without embedding and head, with the target's sizes.

  Attributes:
    width: D.
    vocab_size: V.
    exit: E, layers of the target before it; 2 or 3 in the paper.
    forecasts: K, tokens after the next one that are measured; it drafts as many
      as one likes.
  """

  width: int
  vocab_size: int
  exit: int
  forecasts: int = 3

  kind: ClassVar[str] = "kangaroo"

  def __post_init__(self):
    fields.check_fields(self, "width", "vocab_size", "exit", "forecasts")

  @property
  def num_forecasts(self) -> int:
    """K, tokens after the next one that are forecast."""
    return self.forecasts

  @classmethod
  def for_target(cls, target: Transformer, count: int, exit: int
                 ) -> "KangarooAdapter":
    """An adapter of the target's sizes.

    Raises:
      ValueError: the target has no layer after the exit.
    """
    check_exit(exit, target)
    return cls(width=target.config.width, vocab_size=target.vocab_size,
               forecasts=count, exit=exit)

  def init(self, key: jax.Array, target_params: Params) -> dict[str, Any]:
    """Float32 parameters to begin with: the target's next layer, and its norm.

    Args:
      key: not used.
      target_params: of the target.

    Returns:
      Those of layer 0 and the final norm of a `Transformer`.
    """
    del key
    end = f"_{self.exit}"
    layer = {name.removesuffix(end) + "_0": x
             for name, x in target_params.items() if name.endswith(end)}
    own = {**layer, "final_norm": target_params["final_norm"]}
    return jax.tree.map(lambda x: x.astype(jnp.float32), own)

  def attach(self, target: Transformer, target_params: Params, params: Params
             ) -> tuple[Transformer, dict[str, Any]]:
    """`(target, {"target", "drafter"})`: the two sets of parameters."""
    return target, {"target": target_params, "drafter": params}

  def model(self, target: Transformer) -> Transformer:
    """The adapter as a `Transformer` of one layer; `run` takes the stream."""
    config = target.config
    windows = config.windows[self.exit:self.exit + 1]
    return dataclasses.replace(target, config=dataclasses.replace(
        config, layers=1, features=(), windows=windows))

  def parameters(self, params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of `model`.

    Args:
      params: `{"target": ..., "drafter": the adapter's}`.
    """
    shared = {name: x for name, x in params["target"].items()
              if name in _SHARED}
    return {**shared, **params["drafter"]}


@struct.dataclass
class Caches:
  """The caches of the exit's layers and of the adapter, of one text."""

  exit: Any
  adapter: Any

  @property
  def lengths(self) -> jax.Array:
    return self.adapter.lengths

  def commit(self, path: jax.Array, count: jax.Array) -> "Caches":
    """See `specjax.types.Cache`."""
    return Caches(exit=self.exit.commit(path, count),
                  adapter=self.adapter.commit(path, count))

  def rollback(self, lengths: jax.Array) -> "Caches":
    """See `specjax.types.Cache`."""
    return Caches(exit=self.exit.rollback(lengths),
                  adapter=self.adapter.rollback(lengths))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptedExit:
  """The exit and its adapter as a `ModelFn` with caches of its own.

  Its parameters are `{"target": ..., "drafter": the adapter's}`.

  Attributes:
    target: the model.
    adapter: of it.
  """

  target: Transformer
  adapter: KangarooAdapter

  @property
  def vocab_size(self) -> int:
    return self.target.vocab_size

  @property
  def context_length(self) -> int:
    return self.target.context_length

  def init_cache(self, params: Any, batch: int, capacity: int) -> Caches:
    """Empty caches."""
    empty = lambda model, layers: model.init_cache(
        params["target"], batch, capacity, layers=layers)
    return Caches(exit=empty(self.target, self.adapter.exit),
                  adapter=empty(self.adapter.model(self.target), 1))

  def __call__(self, params: Any, tokens: jax.Array,
               depths: jax.Array | None = None,
               ancestors: jax.Array | None = None,
               cache: Caches | None = None) -> ModelOutput:
    """One pass, as in `ModelFn`."""
    exit = self.target.run(
        params["target"], Sublayers.between(0, self.adapter.exit), tokens,
        depths, ancestors, cache and cache.exit)
    return self.after(params, exit, depths, ancestors,
                      cache and cache.replace(exit=exit.cache))

  def after(self, params: Any, exit: ModelOutput,
            depths: jax.Array | None = None,
            ancestors: jax.Array | None = None, cache: Caches | None = None
            ) -> ModelOutput:
    """What the adapter makes of the exit's output.

    Args:
      params: see above.
      exit: of a pass through the first layers.
      depths: as in `ModelFn`.
      ancestors: as in `ModelFn`.
      cache: None: the tokens have no past.
    """
    out = self.adapter.model(self.target).run(
        self.adapter.parameters(params), _LAYER, None, depths, ancestors,
        cache and cache.adapter, hidden=exit.hidden)
    return out.replace(cache=cache and cache.replace(adapter=out.cache))
