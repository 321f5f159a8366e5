"""Small models, drafters and tokenizers for tests.

`MarkovModel` is a language model stored as a table. `ListTokenizer` is a
tokenizer stored as a list. `OracleDrafter` proposes tokens from its parameters.
`tiny_pair` returns two small transformers with distributions far from uniform.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any
from typing import NamedTuple

import chex
from flax import struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from specjax.data.vocabularies import longest_match
from specjax.decoding import rounds
from specjax.interfaces import Cache
from specjax.interfaces import Drafter
from specjax.interfaces import Model
from specjax.models.configuration import TransformerConfig
from specjax.models.transformer import Transformer
from specjax.sampling import LogitsTransform
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelOutput


@struct.dataclass
class LengthCache(Cache):
  """Cache of a model that uses only the current token.

  Attributes:
    lengths: `[B]` int32 number of committed tokens of each row.
  """

  lengths: jax.Array

  def commit(self, path: jax.Array, count: jax.Array) -> "LengthCache":
    del path
    return self.replace(lengths=self.lengths + count)

  def rollback(self, lengths: jax.Array) -> "LengthCache":
    return self.replace(lengths=jnp.asarray(lengths, jnp.int32))

  def specs(self, axis: str, rows: str | None = None) -> "LengthCache":
    """Returns a `PartitionSpec` of the lengths."""
    del axis
    return LengthCache(lengths=PartitionSpec(rows))


@dataclasses.dataclass(frozen=True)
class MarkovModel(Model):
  """`Model` whose distribution depends only on the current token.

  The parameters are a table `[V, V]`: row t contains the logits of the token
  after t. This model compiles fast, and joint distributions are products of
  rows.

  Attributes:
    vocab_size: vocabulary size V.
    context_length: length of the longest sequence, in tokens.
  """

  vocab_size: int
  context_length: int = 256

  def init(self, key: jax.Array, scale: float = 1.0) -> jax.Array:
    """Returns random logits `[V, V]` with standard deviation `scale`."""
    return scale * jax.random.normal(key, (self.vocab_size, self.vocab_size))

  def init_cache(self, params: jax.Array, batch: int, capacity: int
                 ) -> LengthCache:
    del params, capacity
    return LengthCache(lengths=jnp.zeros((batch,), jnp.int32))

  def param_specs(self, axis: str, size: int = 1) -> PartitionSpec:
    del axis, size
    return PartitionSpec()

  def __call__(self, params: jax.Array, tokens: jax.Array,
               depths: jax.Array | None = None,
               ancestors: jax.Array | None = None, cache: Cache | None = None
               ) -> ModelOutput:
    """Returns the logits `[B, S, V]` after `tokens [B, S]`.

    `hidden` of the output is equal to `logits`.
    """
    del depths, ancestors
    logits = params[tokens].astype(jnp.float32)
    return ModelOutput(logits=logits, hidden=logits, cache=cache)


@dataclasses.dataclass(frozen=True)
class ListTokenizer:
  """Tokenizer with a list of tokens and greedy longest match.

  Attributes:
    tokens: bytes of the token of every id. b"" is a special token.
    bos: id of the first token of a sequence, or None.
    eos: id of the last token of a sequence, or None.
  """

  tokens: tuple[bytes, ...]
  bos: int | None = None
  eos: int | None = None

  @property
  def vocab_size(self) -> int:
    return len(self.tokens)

  def token_bytes(self, token: int) -> bytes:
    """Returns the bytes of one token."""
    return self.tokens[token]

  def encode(self, text: str, bos: bool = True) -> list[int]:
    """Returns the ids of `text`, after `bos` unless `bos` is False.

    If the tokens cannot spell the text, its ids are left out.
    """
    ids = {t: i for i, t in reversed(list(enumerate(self.tokens))) if t}
    found = longest_match(text.encode(), ids, max(map(len, ids)))
    start = [self.bos] if bos and self.bos is not None else []
    return start + (found or [])


@dataclasses.dataclass(frozen=True, kw_only=True)
class OracleDrafter(Drafter):
  """Drafter that deterministically proposes the tokens in its parameters.

  `params["drafter"]` is `[B, T]` int32: entry t is the proposal for position t
  of the row. Positions include the prompt. Draft tokens from position T on are
  padding. If the tokens are the target's greedy continuation, every draft is
  accepted. Tests can place an eos anywhere in a draft.

  Attributes:
    gamma: draft length.
    vocab_size: vocabulary size V, set by the decoder.
  """

  gamma: int
  vocab_size: int | None = None

  provides = ("chain", "iid", "conditional", "autoregressive", "deterministic")
  num_uniforms = 0

  def bind(self, target: Model, transform: LogitsTransform
           ) -> "OracleDrafter":
    del transform
    return dataclasses.replace(self, vocab_size=target.vocab_size)

  def propose(self, params: Mapping[str, chex.ArrayTree], uniforms: jax.Array,
              state: DecodeState) -> tuple[Draft, Any]:
    """Returns chains of the proposed tokens with one-hot `probs`."""
    del uniforms
    positions = state.lengths[:, None] + jnp.arange(self.gamma)
    tokens = jnp.take_along_axis(params["drafter"], positions, axis=1,
                                 mode="fill", fill_value=self.vocab_size)
    probs = jax.nn.one_hot(tokens, self.vocab_size)
    return jax.vmap(Draft.chain)(
        rounds.roots(state), tokens, probs), state.drafter


class TinyPair(NamedTuple):
  """Two small transformers that agree often, but not always.

  Attributes:
    target: target model.
    drafter: draft model.
    params: parameters `{"target": ..., "drafter": ...}` of both models.
  """

  target: Transformer
  drafter: Transformer
  params: dict[str, Any]


def tiny_pair(vocab_size: int = 5, *, seed: int = 0, scale: float = 20.0,
              noise: float = 0.5, **config: Any) -> TinyPair:
  """Returns a random pair of models with distributions far from uniform.

  The drafter's weights are the target's weights plus noise, rescaled.

  Args:
    vocab_size: vocabulary size V.
    seed: seed of the weights.
    scale: factor on the initial matrices. With 1 the distributions are almost
      uniform, and tests detect few errors.
    noise: standard deviation of the noise divided by that of the weights. With
      0 both models are equal.
    **config: fields of `TransformerConfig` that replace the defaults (width
      16, one layer, two heads that share one key-value head, untied).

  Returns:
    A `TinyPair`.
  """
  sizes = dict(width=16, layers=1, heads=2, kv_heads=1, head_dim=8,
               mlp_width=16, context_length=512, tie_embeddings=False)
  model = Transformer(TransformerConfig(
      vocab_size=vocab_size, **{**sizes, **config}))
  # Draw the weights with NumPy, because `model.init` would compile about a
  # hundred small programs.
  shapes = jax.eval_shape(lambda: model.init(jax.random.key(0)))
  rng = np.random.default_rng(seed)

  def drawn(path, leaf):
    *_, part, name = ("", *(entry.key for entry in path))
    if leaf.ndim == 1:
      value = name == "factor" or (
          name == "scale" and not model.config.norm_plus_one)
      return np.full(leaf.shape, value, leaf.dtype)
    into_stream = part in ("out", "down")
    deviation = 0.02 * (2 * model.config.layers) ** (-0.5 * into_stream)
    return scale * deviation * rng.normal(size=leaf.shape)

  def disturbed(x):
    if x.ndim == 1:
      return x
    other = rng.normal(size=x.shape) * np.std(x)
    return (x + noise * other) / (1 + noise**2) ** 0.5

  target = jax.tree_util.tree_map_with_path(drawn, shapes)
  drafter = jax.tree.map(disturbed, target)
  on_device = lambda x: jax.device_put(np.asarray(x, np.float32))
  return TinyPair(model, model, jax.tree.map(
      on_device, {"target": target, "drafter": drafter}))
