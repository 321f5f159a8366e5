"""Heads that add a learned offset to the target's logits: a toy method."""

import dataclasses
from typing import ClassVar

import chex
import jax
import jax.numpy as jnp

from specjax import verifiers
from specjax.methods import networks
from specjax.methods.heads import blockwise
from specjax.methods.heads import medusa
from specjax.methods.networks import Heads
from specjax.methods.networks import Params
from specjax.methods.strategy import Strategy


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffsetHeads(networks.HiddenStateHeads):
  """Head k adds a vector to the logits of the LM head.

  Attributes:
    width: hidden width D.
    vocab_size: vocabulary size V.
    heads: number of heads K.
  """

  width: int
  vocab_size: int
  heads: int

  kind: ClassVar[str] = "offsets"

  def init(self, key: jax.Array, target_params: Params
           ) -> dict[str, jax.Array]:
    """Returns `{"offset": [K, V]}`, zeros."""
    del key, target_params
    return {"offset": jnp.zeros((self.heads, self.vocab_size))}

  def head(self, params: Params, hidden: jax.Array, lm_head: jax.Array
           ) -> jax.Array:
    """Returns logits `[..., V]` of one head."""
    chex.assert_axis_dimension(hidden, -1, self.width)
    return networks.project(hidden, lm_head) + params["offset"]


class Offsets(blockwise.Blockwise):
  """Drafts the most likely token of each head as a chain."""


def offsets(heads: Heads, gamma: int | None = None) -> Strategy:
  """Drafts a chain with `OffsetHeads`.

  >>> offsets(OffsetHeads(width=8, vocab_size=7, heads=3)).verifier
  Block()

  Args:
    heads: heads of the target.
    gamma: number of drafted tokens, at most K. Default: K.
  """
  return Strategy(Offsets(heads=heads, gamma=gamma), verifiers.Block())


OFFSETS = dataclasses.replace(
    medusa.MEDUSA, name="offsets", heads=OffsetHeads, head_options=())
