"""Gemma 4's assistants: networks that read the target's keys and values.

An assistant is a small decoder whose layers have queries, but no keys and
values. They read those of two of the target's layers: the last layer with a
window and the last without one, among those with keys of their own. So an
assistant reads no prompt and has no cache. In a draft step it reads the
embedding of the last token and a hidden state. At the root, this is the
target's state before its LM head at the token before the root. Below the root,
it is the assistant's own output. The keys of drafted tokens do not exist, so
all steps of a round see the same keys, from the position of the root.

An assistant may compute only some logits. Each centroid stands for V / C tokens
of the vocabulary, and only the tokens of the best centroids have a logit. All
other tokens have probability 0 in q.
"""

import dataclasses
from typing import Any
from typing import ClassVar
from typing import NamedTuple
from typing import Self

import chex
from flax import linen as nn
from flax import struct
import jax
import jax.numpy as jnp

from specjax import attention
from specjax.caches.dense import KVCache
from specjax.decoding import rounds
from specjax.interfaces import Cache
from specjax.interfaces import Model
from specjax.methods import _common
from specjax.methods.draft_shapes import Shape
from specjax.methods.features import _drafter
from specjax.methods.features.network import FeatureHeads
from specjax.methods.networks import HiddenStateHeads
from specjax.methods.networks import Params
from specjax.methods.networks import project
from specjax.methods.stop_rules import Forecast
from specjax.models import layers
from specjax.models.configuration import TransformerConfig
from specjax.models.transformer import Transformer
from specjax.models.vocabulary_subset import placed
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.types import Verdict


@struct.dataclass
class _Committed(Cache):
  """The target's committed keys and values, without those of a block.

  Attributes:
    cache: the target's cache. With None, attention returns its queries.
  """

  cache: KVCache | None

  def attend(self, layer: int, query: jax.Array, ancestors: jax.Array,
             window: int = 0, softcap: float = 0.0) -> jax.Array:
    own = self.cache
    if own is None:  # only the shapes of the parameters are of interest
      return query
    # As in transformers, a window begins that many tokens before the last key,
    # which is the key before the root.
    ends = jnp.broadcast_to(own.lengths[:, None] - 1, query.shape[:2])
    out, _ = attention.past_attention(
        query, own.k[layer], own.v[layer], own.lengths, positions=ends,
        window=window and window + 1, softcap=softcap,
        heads_axis=own.heads_axis)
    return out.astype(own.v[layer].dtype)


class _Module(nn.Module):
  """Linen module of `AssistantHeads`, without its LM head."""

  config: "AssistantHeads"

  @nn.compact
  def __call__(self, read, positions, cache):
    c, (rows, size) = self.config, positions.shape
    x = layers.Linear((c.width,), name="entry")(read)
    tables = layers.RotaryTables.of(c, positions, x.dtype)
    block = jnp.zeros((rows, size, size), bool)
    for i in range(c.layers):
      x, _ = layers.decoder_layer(c, i, x, tables, block, cache)
    x = layers.Norm(c, name="final_norm")(x)
    return layers.Linear((c.target_width,), name="exit")(x), x


@dataclasses.dataclass(frozen=True, kw_only=True)
class AssistantHeads(TransformerConfig):
  """Configuration of an assistant. Inherited fields describe its decoder.

  `embedding_scale` is the target's, and `shared_layers` is `layers`. The
  parameters are those of the layers, `entry`, `final_norm`, `exit`, the LM head
  `embedding [V, D]`, and with centroids `centroids [D, C]` and `ordering [V]`
  int32, the tokens of the first centroid, then those of the second and so on.

  Attributes:
    target_width: width of the target's residual stream.
    sources: layers of the target whose keys and values layers with and without
      a window read. -1 means that the target has no such layer.
    forecasts: default draft length.
    centroids: number C of centroids, a divisor of V. 0 means that all tokens
      have logits.
    active: number of centroids whose tokens have logits.
  """

  target_width: int
  sources: tuple[int, int]
  forecasts: int
  centroids: int = 0
  active: int = 0

  kind: ClassVar[str] = "assistant"
  reuse: ClassVar[bool] = True  # as of FeatureConfig
  attach = HiddenStateHeads.attach

  def __post_init__(self):
    object.__setattr__(self, "sources", tuple(self.sources))
    super().__post_init__()
    if self.shared_layers != self.layers:
      raise ValueError(f"shared_layers is {self.shared_layers} of "
                       f"{self.layers} layers; an assistant has no keys and "
                       "values: set shared_layers=layers")
    if self.centroids and (self.vocab_size % self.centroids or not (
        1 <= self.active <= self.centroids)):
      raise ValueError(
          f"centroids is {self.centroids} and active {self.active}; the "
          f"vocabulary of {self.vocab_size} tokens must be a multiple of "
          "centroids, and active must be from 1 to centroids")

  @property
  def num_forecasts(self) -> int:
    return self.forecasts

  @property
  def draft_size(self) -> int:
    """Returns the number of tokens that can be drafted after a token."""
    return (self.active * (self.vocab_size // self.centroids)
            if self.centroids else self.vocab_size)

  def key_layer(self, layer: int) -> int:
    return self.sources[not self.window(layer)]

  @classmethod
  def for_target(cls, target: Transformer, count: int, **options: Any) -> Self:
    """Returns an assistant with the layers of the target.

    Args:
      target: target model.
      count: default draft length.
      **options: other fields of the class.
    """
    c = target.config
    like = {field.name: getattr(c, field.name)
            for field in dataclasses.fields(TransformerConfig)}
    like.update(features=(), lookahead=0, lookahead_rank=0, layer_inputs=0,
                wide_shared=False, shared_layers=options.get(
                    "layers", c.layers), logit_softcap=None)
    return cls(**like | dict(target_width=c.width, sources=key_sources(c),
                             forecasts=count) | options)

  def init(self, key: jax.Array, target_params: Params) -> dict[str, Any]:
    """Returns random float32 parameters."""
    own, head, centroids = jax.random.split(key, 3)
    params = _Module(self).init(
        own, jnp.zeros((1, 1, 2 * self.target_width)),
        jnp.zeros((1, 1), jnp.int32), _Committed(None))["params"]
    normal = lambda key, *shape: 0.02 * jax.random.normal(
        key, shape, jnp.float32)
    params["embedding"] = normal(head, self.vocab_size, self.width)
    if self.centroids:
      params["centroids"] = normal(centroids, self.width, self.centroids)
      params["ordering"] = jnp.arange(self.vocab_size, dtype=jnp.int32)
    return params

  def check_target(self, target: Model) -> None:
    """Raises `ValueError` unless the assistant can read the target's cache."""
    FeatureHeads.check_sizes(self, target)
    config = target.config
    if target.cache is not KVCache or config.recurrent or config.features:
      raise ValueError("an assistant reads the keys and values in a KVCache "
                       "and the input of the LM head; give a target with "
                       "cache=KVCache and features=(), and without recurrent "
                       "layers")
    wants = self.sources, [self.key_shape(i) for i in range(self.layers)]
    has = key_sources(config), [
        config.key_shape(self.key_layer(i)) for i in range(self.layers)]
    if wants != has or any(self.key_layer(i) < 0 for i in range(self.layers)):
      raise ValueError(
          f"the assistant reads layers {wants[0]} of the target, whose number "
          f"and width of key-value heads must be {wants[1]}, but the target's "
          f"last layers with keys of their own are {has[0]}, which have "
          f"{has[1]}: give the assistant of this target")

  def step(self, params: Params, target_params: Params, hidden: jax.Array,
           tokens: jax.Array, cache: KVCache) -> tuple[jax.Array, jax.Array]:
    """Runs a draft step after S nodes of every row.

    Args:
      params: parameters of the assistant.
      target_params: parameters of the target.
      hidden: `[B, S, D]` target's state before the root, or the first result
        of the step at the node before.
      tokens: `[B, S]` int32 tokens of the nodes.
      cache: the target's cache. It has all committed tokens but the root.

    Returns:
      The input `[B, S, D]` of the next step, and the input of the LM head.
    """
    dtype = params["entry"]["kernel"].dtype
    embedded = target_params["embedding"][tokens].astype(dtype) * jnp.asarray(
        self.embedding_scale, dtype)
    own = {name: x for name, x in params.items()
           if name not in ("embedding", "centroids", "ordering")}
    return _Module(self).apply(
        {"params": own},
        jnp.concatenate([embedded, hidden.astype(dtype)], axis=-1),
        jnp.broadcast_to(cache.lengths[:, None], tokens.shape),
        _Committed(cache))

  def logits(self, params: Params, read: jax.Array) -> jax.Array:
    """Returns the logits `[B, S, V]` for the LM head's input `[B, S, D]`."""
    head = params["embedding"]
    if not self.centroids:
      return project(read, head.T)
    scores = project(read, params["centroids"])
    _, best = jax.lax.top_k(scores, self.active)
    ids = params["ordering"].reshape(self.centroids, -1)[best].reshape(
        *best.shape[:2], -1)
    some = jnp.einsum("bsd,bsnd->bsn", read, head[ids],
                      preferred_element_type=scores.dtype)
    return placed(some, ids, self.vocab_size)


def key_sources(config: TransformerConfig) -> tuple[int, int]:
  """Returns a target's last layers with keys of their own, or -1.

  The first has a window, and the second has none.
  """
  own = range(config.layers - config.shared_layers)
  return tuple(max((i for i in own if bool(config.window(i)) == has_window),
                   default=-1) for has_window in (True, False))


class AssistantState(NamedTuple):
  """State of an assistant after the committed tokens.

  Attributes:
    hidden: `[B, D]` target's state before its LM head at the token before the
      root.
    known: `[B]` bool, False for rows with a single token, which have no such
      state yet.
  """

  hidden: jax.Array
  known: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assistant(_drafter.FeatureNetwork):
  """A network that drafts from the target's keys and values.

  After a prompt of one token there are no keys, so the first draft is padding.
  In a round the assistant runs one pass over each level of the draft except the
  last, and one over the root.

  Attributes:
    heads: the assistant.
  """

  heads: AssistantHeads

  reads_cache = True

  def logits(self, params: chex.ArrayTree, read: jax.Array) -> jax.Array:
    return self.heads.logits(params["drafter"], read)

  def init(self, params: chex.ArrayTree, prompt: Prompt, output: ModelOutput
           ) -> AssistantState:
    last = jnp.maximum(prompt.lengths - 2, 0)[:, None, None]
    return AssistantState(
        hidden=jnp.take_along_axis(output.hidden, last, axis=1)[:, 0],
        known=prompt.lengths >= 2)

  def begin(self, params: chex.ArrayTree, state: DecodeState, shape: Shape
            ) -> tuple[Forecast, Any]:
    return self.extend(params, rounds.roots(state)[:, None], (
        state.target_cache, state.drafter.hidden[:, None]))

  def extend(self, params: chex.ArrayTree, token: jax.Array, carry: Any
             ) -> tuple[Forecast, Any]:
    logits, carry = self.step(
        params, token, None, None, jnp.zeros_like(token), carry)
    return (logits[:, 0], carry[1][:, 0]), carry

  def step(self, params: chex.ArrayTree, tokens: jax.Array, depths: Any,
           ancestors: Any, above: jax.Array, carry: Any
           ) -> tuple[jax.Array, Any]:
    cache, hidden = carry
    dtype = hidden.dtype
    hidden = jnp.take_along_axis(hidden, above[..., None], axis=1)
    hidden, read = self.heads.step(
        params["drafter"], params["target"], hidden, tokens, cache)
    return self.logits(params, read), (cache, hidden.astype(dtype))

  def end(self, params: chex.ArrayTree, memory: AssistantState, carry: Any,
          draft: Draft, slots: jax.Array | None
          ) -> tuple[Draft, AssistantState]:
    return _common.known_only(draft, memory.known), memory

  def commit(self, params: chex.ArrayTree, memory: AssistantState, draft: Draft,
             slots: jax.Array | None, shape: Shape, verdict: Verdict,
             output: ModelOutput, count: jax.Array) -> AssistantState:
    size = min(shape.depth + 1, draft.tokens.shape[1])
    last = jnp.maximum(count - 1, 0)[:, None, None]
    hidden = jnp.take_along_axis(
        _drafter.on_path(output.hidden, verdict, size), last, axis=1)[:, 0]
    return AssistantState(
        hidden=jnp.where((count > 0)[:, None], hidden, memory.hidden),
        known=memory.known | (count > 0))
