"""The heads of Hydra (Ankner et al. 2024, arXiv:2402.05109)."""

import dataclasses
from typing import Any
from typing import ClassVar
from typing import Self

import jax
import jax.numpy as jnp

from specjax.methods import networks
from specjax.methods.networks import Params
from specjax.models.transformer import Transformer
from specjax.utils import fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class HydraHeads:
  """Heads that read the drafted tokens: a true conditional law.

  Ankner et al. 2024 (arXiv:2402.05109, section 3). Head k = 1..K reads the
  hidden state h of the token before the root and the embeddings of the root
  and of the k - 1 drafted tokens on the path, u = [h; e(x_0); ..; e(x_{k-1})]:

    z = R u + r + SiLU(W u + b),   z <- z + SiLU(W' z + b') blocks - 1 times,
    p^(k) = softmax(U z + c).

  The embeddings are the target's. At the start R takes h, W and W' are 0 and U
  is the LM head, so that an untrained head predicts what the LM head does.

  Attributes:
    width: D.
    vocab_size: V.
    heads: K.
    blocks: residual blocks of a head; the first joins what it reads.
  """

  width: int
  vocab_size: int
  heads: int
  blocks: int = 1

  kind: ClassVar[str] = "hydra"

  def __post_init__(self):
    fields.check_fields(self, "width", "vocab_size", "heads", "blocks")

  @property
  def num_forecasts(self) -> int:
    """K, tokens after the next one that are forecast."""
    return self.heads

  @classmethod
  def for_target(cls, target: Transformer, count: int, **options: Any) -> Self:
    """`count` heads of the target's width and vocabulary."""
    return cls(width=target.config.width, vocab_size=target.vocab_size,
               heads=count, **options)

  def attach(self, target: Transformer, target_params: Params, params: Params
             ) -> tuple[Transformer, dict[str, Any]]:
    """`(target, {"target", "drafter"})`: the two sets of parameters."""
    return target, {"target": target_params, "drafter": params}

  def init(self, key: jax.Array, target_params: Params) -> dict[str, Any]:
    """Float32 parameters of heads that predict as the LM head does.

    Args:
      key: unused; nothing is drawn.
      target_params: of the `Transformer` that the heads are for.

    Returns:
      A tree: for `head_0`..`head_<K-1>`, of which head_k reads k + 2 vectors,
      `skip` and `inner` with a `kernel [(k + 2) D, D]`, `block_<l>` with one
      `[D, D]` for l = 1..blocks-1, `output` with one `[D, V]`, and the `bias`
      of each.
    """
    del key
    d, lm_head = self.width, networks.lm_head(target_params).astype(jnp.float32)
    linear = lambda kernel: {
        "kernel": kernel, "bias": jnp.zeros(kernel.shape[1], jnp.float32)}
    zeros = lambda *shape: linear(jnp.zeros(shape, jnp.float32))
    return {
        f"head_{k}": {
            "skip": linear(jnp.eye((k + 2) * d, d, dtype=jnp.float32)),
            "inner": zeros((k + 2) * d, d), "output": linear(lm_head),
            **{f"block_{i}": zeros(d, d) for i in range(1, self.blocks)}}
        for k in range(self.heads)}

  def head(self, params: Params, read: jax.Array) -> jax.Array:
    """Logits `[..., V]` of the head that reads so much.

    Args:
      params: of all heads.
      read: `[..., (k + 2) D]`, h and the embeddings of k + 1 tokens after one
        another: head k, counted from 0, reads it.
    """
    own = params[f"head_{read.shape[-1] // self.width - 2}"]
    hidden = _linear(own["skip"], read) + jax.nn.silu(
        _linear(own["inner"], read))
    for block in range(1, self.blocks):
      hidden = hidden + jax.nn.silu(_linear(own[f"block_{block}"], hidden))
    return networks.project(hidden, own["output"]["kernel"]) + own["output"]["bias"]


def _linear(params, x):
  return x @ params["kernel"] + params["bias"]
