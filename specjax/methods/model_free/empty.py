"""Autoregressive decoding: a drafter without drafts."""

import dataclasses
from typing import Any

import jax
from jax.sharding import PartitionSpec

from specjax import verifiers
from specjax.decoding import round_steps
from specjax.interfaces import Drafter
from specjax.interfaces import Model
from specjax.methods.strategy import Strategy
from specjax.sampling import LogitsTransform
from specjax.types import DecodeState
from specjax.types import Draft


@dataclasses.dataclass(frozen=True, kw_only=True)
class Empty(Drafter):
  """Proposes the root alone, so that every round emits one token.

  Attributes:
    vocab_size: V; `bind` sets it.
  """

  vocab_size: int | None = None

  num_nodes = 1
  num_uniforms = 0
  chain = True
  iid = True
  conditional = True
  deterministic = True
  autoregressive = True
  proposal = "deterministic"

  def bind(self, target: Model, transform: LogitsTransform
           ) -> "Empty":
    """Returns the drafter specialised to a target."""
    del transform
    return dataclasses.replace(self, vocab_size=target.vocab_size)

  def propose(self, params: Any, uniforms: jax.Array, state: DecodeState
              ) -> tuple[Draft, Any]:
    """Returns the root alone."""
    del params, uniforms
    return round_steps.root_only(state, self.vocab_size), state.drafter

  def param_specs(self, axis: str, size: int) -> PartitionSpec:
    """Returns an empty specification."""
    del axis, size
    return PartitionSpec()


def autoregressive() -> Strategy:
  """Decodes with the target alone, one token per pass.

  >>> autoregressive().drafter.num_nodes  # the root alone
  1
  """
  return Strategy(Empty(), verifiers.Token())
