"""The heads of blockwise parallel decoding (Stern et al. 2018)."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from specjax.methods import networks
from specjax.methods.networks import Params
from specjax.utils import fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockwiseHeads(networks.HiddenStateHeads):
  """Residual feed-forward layers before one output projection.

  Stern et al. 2018 (arXiv:1811.03115, section 6): z_k = h + W2_k ReLU(W1_k h +
  b1_k) + b2_k, projected by the LM head. p_1 of the paper is here the LM head
  on h itself, so that the target stays the target; heads 1..K are its
  p_2..p_{K+1}. W2 and b2 are 0 at the start, so that an untrained head predicts
  what the LM head does.

  Attributes:
    width: D.
    vocab_size: V.
    heads: K.
    hidden_width: F, of the inner layer.
  """

  width: int
  vocab_size: int
  heads: int
  hidden_width: int

  kind: ClassVar[str] = "blockwise"

  def __post_init__(self):
    fields.check_fields(self, "width", "vocab_size", "heads", "hidden_width")

  def init(self, key: jax.Array, target_params: Params
           ) -> dict[str, jax.Array]:
    """Float32 parameters: `inner [K, D, F]`, `outer [K, F, D]` and biases.

    Args:
      key: a PRNG key.
      target_params: unused; the LM head is no parameter of the heads.
    """
    del target_params
    k, d, f = self.heads, self.width, self.hidden_width
    return {
        "inner": (2 / d)**0.5 * jax.random.normal(key, (k, d, f), jnp.float32),
        "inner_bias": jnp.zeros((k, f), jnp.float32),
        "outer": jnp.zeros((k, f, d), jnp.float32),
        "outer_bias": jnp.zeros((k, d), jnp.float32),
    }

  def head(self, params: Params, hidden: jax.Array, lm_head: jax.Array
           ) -> jax.Array:
    """Logits `[..., V]` of one head, whose parameters have no axis K.

    Args:
      params: of one head.
      hidden: `[..., D]`.
      lm_head: `[D, V]`.
    """
    inner = jax.nn.relu(hidden @ params["inner"] + params["inner_bias"])
    hidden = hidden + inner @ params["outer"] + params["outer_bias"]
    return networks.project(hidden, lm_head)
