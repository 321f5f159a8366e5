"""The heads of Medusa (Cai et al. 2024, arXiv:2401.10774)."""

import dataclasses
from typing import Any
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from specjax.methods import networks
from specjax.methods.networks import Params
from specjax.utils import fields

_OUTPUTS = ("own", "low_rank", "shared")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaHeads(networks.HiddenStateHeads):
  """p^(k) = softmax(W2_k (SiLU(W1_k h) + h)): the heads of Medusa.

  Cai et al. 2024 (arXiv:2401.10774, section 2.1.1). W1 is 0 and W2 is the LM
  head at the start, so that an untrained head predicts what the LM head does.

  Attributes:
    width: D.
    vocab_size: V.
    heads: K.
    blocks: residual blocks `h + SiLU(W1 h)` of a head, one after the other.
    output: W2_k. "own" is a matrix per head; "low_rank" the LM head plus
      A_k B_k, with B_k = 0 at the start; "shared" the LM head itself. The LM
      head is an argument and no parameter of the heads.
    rank: columns of A_k, where `output` is "low_rank".
    bias: whether W1 has a bias, as in the published heads; 0 at the start.
  """

  width: int
  vocab_size: int
  heads: int
  blocks: int = 1
  output: str = "own"
  rank: int = 64
  bias: bool = False

  kind: ClassVar[str] = "medusa"

  def __post_init__(self):
    fields.check_fields(
        self, "width", "vocab_size", "heads", "blocks", "rank")
    if self.output not in _OUTPUTS:
      raise ValueError(f"output is {self.output!r}; it must be one of "
                       f"{', '.join(_OUTPUTS)}")

  def init(self, key: jax.Array, target_params: Params
           ) -> dict[str, jax.Array]:
    """Float32 parameters of heads that predict as the LM head does.

    Args:
      key: a PRNG key.
      target_params: of the `Transformer` that the heads are for.

    Returns:
      `blocks [K, blocks, D, D]`, with a bias `block_bias [K, blocks, D]`, and
      `output [K, D, V]` or `down [K, D, rank]` and `up [K, rank, V]`.
    """
    k, d, v = self.heads, self.width, self.vocab_size
    params = {"blocks": jnp.zeros((k, self.blocks, d, d), jnp.float32)}
    if self.bias:
      params["block_bias"] = jnp.zeros((k, self.blocks, d), jnp.float32)
    if self.output == "own":
      head = networks.lm_head(target_params).astype(jnp.float32)
      params["output"] = jnp.tile(head, (k, 1, 1))
    elif self.output == "low_rank":
      params["down"] = d**-0.5 * jax.random.normal(
          key, (k, d, self.rank), jnp.float32)
      params["up"] = jnp.zeros((k, self.rank, v), jnp.float32)
    return params

  def merged(self, params: Params, target_params: Params
             ) -> tuple["MedusaHeads", dict[str, Any]]:
    """Returns the same heads, each with an output matrix of its own.

    W2_k is the LM head, plus A_k B_k with `output="low_rank"`. The matrices
    are K D V numbers, where A_k and B_k were K rank (D + V).

    Args:
      params: of the heads.
      target_params: of the `Transformer` that they are for.

    Returns:
      `(heads, params)`; `output` is a float32 array in the host's memory.
    """
    heads = dataclasses.replace(self, output="own", rank=MedusaHeads.rank)
    if self.output == "own":
      return heads, dict(params)
    kept = {name: x for name, x in params.items() if name.startswith("block")}
    head = np.asarray(networks.lm_head(target_params), np.float32)
    output = np.empty((self.heads, *head.shape), np.float32)
    for k in range(self.heads):
      output[k] = head
      if self.output == "low_rank":
        output[k] += np.asarray(params["down"][k], np.float32) @ np.asarray(
            params["up"][k], np.float32)
    return heads, {**kept, "output": output}

  def head(self, params: Params, hidden: jax.Array, lm_head: jax.Array
           ) -> jax.Array:
    """Logits `[..., V]` of one head, whose parameters have no axis K.

    Args:
      params: of one head.
      hidden: `[..., D]`.
      lm_head: `[D, V]`.
    """
    for i in range(self.blocks):
      inner = hidden @ params["blocks"][i]
      if self.bias:
        inner = inner + params["block_bias"][i]
      hidden = hidden + jax.nn.silu(inner)
    if self.output == "own":
      return networks.project(hidden, params["output"])
    logits = networks.project(hidden, lm_head)
    if self.output == "low_rank":
      logits = logits + networks.project(hidden @ params["down"], params["up"])
    return logits
