"""Shapes of published pairs of a target and a draft model.

The weights are not required, because the cost of a round does not depend on
their values.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import specjax as sj
from specjax.models.configuration import RecurrentLayers

_LLAMA = dict(vocab_size=128_256, context_length=1 << 16, rope_theta=500_000.0)
_QWEN = dict(vocab_size=152_064, context_length=1 << 15, qkv_bias=True,
             rope_theta=1_000_000.0)
_QWEN_3 = dict(vocab_size=151_936, context_length=1 << 15, qk_norm="head",
               rope_theta=1_000_000.0)
PAIRS = {  # name: (target, draft model)
    "llama": (  # Llama-3-8B and Llama-3.2-1B
        dict(_LLAMA, width=4096, layers=32, heads=32, kv_heads=8, head_dim=128,
             mlp_width=14336, tie_embeddings=False),
        dict(_LLAMA, width=2048, layers=16, heads=32, kv_heads=8, head_dim=64,
             mlp_width=8192)),
    "qwen": (  # Qwen2.5-7B and Qwen2.5-0.5B, with the vocabulary of the target
        dict(_QWEN, width=3584, layers=28, heads=28, kv_heads=4, head_dim=128,
             mlp_width=18944, tie_embeddings=False),
        dict(_QWEN, width=896, layers=24, heads=14, kv_heads=2, head_dim=64,
             mlp_width=4864)),
    "experts": (  # Qwen3-30B-A3B and Qwen3-0.6B
        dict(_QWEN_3, width=2048, layers=48, heads=32, kv_heads=4, head_dim=128,
             mlp_width=6144, tie_embeddings=False, experts=dict(
                 count=128, chosen=8, width=768)),
        dict(_QWEN_3, width=1024, layers=28, heads=16, kv_heads=8, head_dim=128,
             mlp_width=3072)),
}


def hybrid(kinds: tuple[str, ...]) -> sj.models.Transformer:
  """Returns a target with the shapes of Qwen3.5-0.8B.

  Args:
    kinds: kind of each layer, "delta" (Gated DeltaNet) or "attention".
  """
  return sj.models.Transformer(sj.models.TransformerConfig(
      vocab_size=248_320, width=1024, layers=len(kinds), heads=8, kv_heads=2,
      head_dim=256, mlp_width=3584, context_length=1 << 15, rope_fraction=0.25,
      rope_theta=10_000_000.0, qk_norm="head", norm_plus_one=True,
      attention_gate=True, norm_epsilon=1e-6, recurrent=RecurrentLayers(
          kinds=kinds, taps=4, heads=16, key_heads=16, key_dim=128,
          value_dim=128)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
  """Settings of a round to compile in bfloat16.

  Attributes:
    capacity: number of cache slots per row, C.
    models: name of a pair in `PAIRS`.
    layers: number of layers of the target and of the draft model. None means
      the published numbers.
    batch: batch size, B.
    gamma: draft length of a chain, verified by `Block`. Not used with a tree.
    parents: parents of a top-k draft tree, verified by `Traversal`. If empty,
      the draft is a chain.
    drafter: placement of the draft model. "split" divides it over the chips,
      like the target. "replicate" copies it to all chips.
    observers: verifiers that are also evaluated on the drafts of a chain.
    topology: libtpu's name of a TPU generation and an arrangement of 4 chips.
  """

  capacity: int
  models: str = "llama"
  layers: tuple[int, int] | None = None
  batch: int = 8
  gamma: int = 4
  parents: tuple[int, ...] = ()
  drafter: str = "split"
  observers: tuple[sj.interfaces.Verifier, ...] = ()
  topology: str = "v5e:2x2"

  @property
  def vocab_size(self) -> int:
    """Vocabulary size of both models."""
    return PAIRS[self.models][0]["vocab_size"]

  def decoder(self) -> sj.Decoder:
    """Returns the decoder of the round."""
    shapes = PAIRS[self.models]
    layers = self.layers or [shape["layers"] for shape in shapes]
    target, drafter = (
        sj.models.Transformer(sj.models.TransformerConfig(
            **shape | {"layers": n})) for shape, n in zip(shapes, layers))
    if self.parents:
      return sj.Decoder(
          target=target, verifier=sj.verifiers.Traversal(),
          drafter=sj.drafters.NetworkDrafter(
              network=sj.drafters.LanguageModel(model=drafter),
              shape=sj.drafters.Tree(parents=self.parents)))
    return sj.Decoder(
        target=target, verifier=sj.verifiers.Block(),
        observers=self.observers,
        drafter=sj.drafters.draft_model(model=drafter, gamma=self.gamma))


def state(decoder: sj.Decoder, params: Any, keys: jax.Array, capacity: int,
          used: int = 1) -> sj.types.DecodeState:
  """Returns a decoding state whose tokens and caches are zeros.

  Args:
    decoder: result of `Setting.decoder`, or a decoder with the same target and
      no drafter.
    params: parameters of the decoder, or their shapes.
    keys: `[B]`, random keys of the rows.
    capacity: number of cache slots per row, C.
    used: number of cache slots per row marked as filled, U.
  """
  rows = len(keys)
  filled = jnp.full((rows,), used, jnp.int32)
  cache = lambda model, params: model.init_cache(
      params, rows, capacity).rollback(filled)
  own = () if isinstance(decoder.drafter, sj.drafters.Empty) else (
      decoder.drafter.first_state(cache(
          decoder.drafter.network.model, params["drafter"]), rows))
  verifier = jax.tree.map(
      lambda x: jnp.broadcast_to(x, (rows, *jnp.shape(x))),
      decoder.verifier.init(decoder.num_nodes - 1))
  return sj.types.DecodeState(
      tokens=jnp.zeros((rows, capacity), jnp.int32), lengths=filled + 1,
      limits=jnp.full((rows,), capacity, jnp.int32),
      done=jnp.zeros((rows,), bool), keys=keys, rounds=jnp.ones_like(filled),
      temperature=jnp.ones((rows,), jnp.float32),
      eos=jnp.full((rows, 1), -1, jnp.int32),
      target_cache=cache(decoder.target, params["target"]), drafter=own,
      verifier=verifier)
