"""Small models, drafters and tokenizers for tests.

`MarkovModel` is a language model that is a table, `ListTokenizer` a tokenizer
that is a list, `OracleDrafter` proposes what it is told, and `tiny_pair` is a
real pair of transformers with weights that make their laws far from uniform.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any
from typing import NamedTuple

from flax import struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from specjax.data.vocabularies import longest_match
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
  """The cache of a model that needs no past.

  Attributes:
    lengths: `[B]` int32, committed tokens of each row.
  """

  lengths: jax.Array

  def commit(self, path: jax.Array, count: jax.Array) -> "LengthCache":
    """Counts `count [B]` nodes of `path [B, N]` as committed."""
    del path
    return self.replace(lengths=self.lengths + count)

  def rollback(self, lengths: jax.Array) -> "LengthCache":
    """Sets the committed tokens of every row to `lengths [B]`."""
    return self.replace(lengths=jnp.asarray(lengths, jnp.int32))

  def specs(self, axis: str, rows: str | None = None) -> "LengthCache":
    """A `PartitionSpec` of the lengths."""
    del axis
    return LengthCache(lengths=PartitionSpec(rows))


@dataclasses.dataclass(frozen=True)
class MarkovModel(Model):
  """A `Model` whose law depends on the current token alone.

  Its params are a table `[V, V]`: row t holds the logits of what follows
  token t. It compiles in a moment and its joint laws are products of rows.

  Attributes:
    vocab_size: V.
    context_length: longest sequence that the loop may decode, in tokens.
  """

  vocab_size: int
  context_length: int = 256

  def init(self, key: jax.Array, scale: float = 1.0) -> jax.Array:
    """A random table `[V, V]` of logits with standard deviation `scale`."""
    return scale * jax.random.normal(key, (self.vocab_size, self.vocab_size))

  def init_cache(self, params: jax.Array, batch: int, capacity: int
                 ) -> LengthCache:
    """The cache of `batch` empty rows; nothing needs `capacity`."""
    del params, capacity
    return LengthCache(lengths=jnp.zeros((batch,), jnp.int32))

  def param_specs(self, axis: str, size: int = 1) -> PartitionSpec:
    """Every device holds the whole table."""
    del axis, size
    return PartitionSpec()

  def __call__(self, params: jax.Array, tokens: jax.Array,
               depths: jax.Array | None = None,
               ancestors: jax.Array | None = None, cache: Any = None
               ) -> ModelOutput:
    """Logits `[B, S, V]` after `tokens [B, S]`; they are `hidden` as well."""
    del depths, ancestors
    logits = params[tokens].astype(jnp.float32)
    return ModelOutput(logits=logits, hidden=logits, cache=cache)


@dataclasses.dataclass(frozen=True)
class ListTokenizer:
  """A tokenizer that is a list of tokens; it takes the longest match.

  Attributes:
    tokens: the bytes of every id; b"" is a special token.
    bos: id of the token before a text, or None.
    eos: id of the token after a text, or None.
  """

  tokens: tuple[bytes, ...]
  bos: int | None = None
  eos: int | None = None

  @property
  def vocab_size(self) -> int:
    return len(self.tokens)

  def token_bytes(self, token: int) -> bytes:
    """The bytes of one token."""
    return self.tokens[token]

  def encode(self, text: str, bos: bool = True) -> list[int]:
    """Token ids of `text`; none where the tokens cannot spell it."""
    ids = {t: i for i, t in reversed(list(enumerate(self.tokens))) if t}
    found = longest_match(text.encode(), ids, max(map(len, ids)))
    start = [self.bos] if bos and self.bos is not None else []
    return start + (found or [])


@dataclasses.dataclass(frozen=True, kw_only=True)
class OracleDrafter(Drafter):
  """Proposes tokens that it is given, with certainty.

  `params["drafter"]` is `[B, T]` int32: entry t is the token proposed for
  position t of the row, the prompt included. Positions after T are padding.
  With the target's own greedy continuation every draft is accepted, and an
  EOS can be put anywhere inside a draft.

  Attributes:
    gamma: drafted tokens of a round.
    vocab_size: V; the decoder fills it in.
  """

  gamma: int
  vocab_size: int | None = None

  chain = True
  iid = True
  conditional = True
  autoregressive = True
  deterministic = True
  num_uniforms = 0
  proposal = "deterministic"

  def bind(self, target: Model, transform: LogitsTransform
           ) -> "OracleDrafter":
    """The same drafter, for this target."""
    del transform
    return dataclasses.replace(self, vocab_size=target.vocab_size)

  def propose(self, params: Mapping[str, Any], uniforms: jax.Array,
              state: DecodeState) -> tuple[Draft, Any]:
    """A chain with one-hot `probs [B, gamma + 1, V]` and no state."""
    del uniforms
    root = jnp.take_along_axis(state.tokens, state.lengths[:, None] - 1, axis=1)
    positions = state.lengths[:, None] + jnp.arange(self.gamma)
    tokens = jnp.take_along_axis(params["drafter"], positions, axis=1,
                                 mode="fill", fill_value=self.vocab_size)
    probs = jax.nn.one_hot(tokens, self.vocab_size)
    return jax.vmap(Draft.chain)(root[:, 0], tokens, probs), state.drafter


class TinyPair(NamedTuple):
  """Two small transformers that agree often, but not always.

  Attributes:
    target: a `Transformer`.
    drafter: another one, or the same where `noise` alone tells them apart.
    params: `{"target": ..., "drafter": ...}`, as a `Decoder` takes them.
  """

  target: Transformer
  drafter: Transformer
  params: dict[str, Any]


def tiny_pair(vocab_size: int = 5, *, seed: int = 0, scale: float = 20.0,
              noise: float = 0.5, **config: Any) -> TinyPair:
  """A random pair whose laws are far from uniform and depend on the context.

  Args:
    vocab_size: V.
    seed: of the weights.
    scale: of the matrices over their initial size; at 1 a random model's laws
      are almost uniform, and a test of them sees little.
    noise: standard deviation of what is added to the target's weights to make
      the drafter's, over that of the weights; 0 makes them equal.
    **config: sizes that differ from the default `TransformerConfig` (width
      16, one layer of two heads sharing one key-value head, untied).

  Returns:
    A `TinyPair`.
  """
  sizes = dict(width=16, layers=1, heads=2, kv_heads=1, head_dim=8,
               mlp_width=16, context_length=512, tie_embeddings=False)
  model = Transformer(TransformerConfig(
      vocab_size=vocab_size, **{**sizes, **config}))
  # By numpy: the model's own `init` would run as a hundred small programs.
  shapes = jax.eval_shape(lambda: model.init(jax.random.key(0)))
  rng = np.random.default_rng(seed)

  def drawn(path, leaf):
    *_, part, name = ("", *(entry.key for entry in path))
    if leaf.ndim == 1:
      value = name == "scale" and not model.config.norm_plus_one
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
