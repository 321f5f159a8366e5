"""Network of DFlash and DSpark, which drafts a block of tokens in one pass.

DFlash (arXiv:2602.06036) and DSpark (arXiv:2607.05147). A block consists of the
last committed token, the *anchor* of the block, and mask tokens. In the draft
layers all slots of the block attend to each other. The slots attend to earlier
committed tokens through the target's hidden states h_l after layers l:

  H = norm(W [h_l1; ..; h_lm])                                   (`context`)
  k, v of layer i = keys and values computed from H         (`with_context`)
  block -> draft layers with k, v of H and of the block -> norm -> LM head

The layers do not change H. Therefore the keys and values of a committed token
are computed only once, by one product with H per layer. The embedding and the
LM head are those of the target.

Newer drafters have layers with a window, in which a slot attends only to the
last committed tokens. In most of these layers the attention within the block is
causal: a slot attends only to itself and to earlier slots.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any
from typing import ClassVar
from typing import NamedTuple
from typing import Self

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from specjax.caches.dense import KVCache
from specjax.interfaces import Cache
from specjax.interfaces import Model
from specjax.methods import networks
from specjax.methods.blocks import _coupling
from specjax.methods.networks import Params
from specjax.models import layers as layers_lib
from specjax.models.configuration import FINAL
from specjax.models.configuration import TransformerConfig
from specjax.models.features import check_ids
from specjax.models.transformer import Transformer
from specjax.utils import fields

_CONFIDENCE = ("none", "hidden", "markov")
_WINDOW_ENDS = ("anchor", "slot")
_TAPS = 3
# Fields that the draft layers share with the layers of their target.
_SHARED = (
    "width", "vocab_size", "heads", "kv_heads", "head_dim", "context_length",
    "rope_theta", "rope_fraction", "rope_scaling", "norm", "norm_epsilon",
    "norm_plus_one", "activation", "gated", "logit_softcap", "embedding_scale",
    "logit_divisor")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelHeads(TransformerConfig):
  """Block-parallel network of a target, which predicts K tokens.

  Attributes:
    block_size: number of slots of a block, including the slot of the anchor.
    taps: hidden states of the target that are fused to H, by the names of
      `TransformerConfig.features`. A "target layer id" i of published files is
      i + 1 here.
    from_anchor: True if each slot predicts the next token, so K = block_size
      (DSpark). False if each mask predicts the token at its own position, so
      K = block_size - 1 (DFlash).
    markov: type of the Markov head, one of `_coupling.KINDS`. With "none" the
      tokens of a block are independent.
    markov_rank: rank r of the Markov head.
    confidence: input of the confidence head, which predicts the acceptance of a
      token. "hidden" is the slot's hidden state h. "markov" is [h; W1[x]] with
      the Markov head's embedding of the previous token x. "none" means that
      there is no confidence head.
    mask_token: id of a token whose target embedding is the mask. None means
      that the mask is a trained vector.
    ids: sorted ids of the Vd tokens that can be drafted. Empty means all
      tokens.
    causal: for each layer, True if a slot attends only to itself and to earlier
      slots of the block. Empty means False in all layers.
    window_end: position at which a window of w tokens (`windows`) ends. With
      "anchor" all slots of a block attend to the same w tokens before the
      anchor (speculators). With "slot" the window of a slot ends at the slot
      and includes it (z-lab, SpecForge).

  All other attributes configure the draft layers. The width and the vocabulary
  size are those of the target.
  """

  block_size: int
  taps: tuple[int | str, ...]
  from_anchor: bool = True
  markov: str = "none"
  markov_rank: int = 32
  confidence: str = "none"
  mask_token: int | None = None
  ids: tuple[int, ...] = ()
  causal: tuple[bool, ...] = ()
  window_end: str = "anchor"
  qk_norm: str | None = "head"

  kind: ClassVar[str] = "parallel"

  def __post_init__(self):
    super().__post_init__()
    for name in ("taps", "ids", "causal"):
      object.__setattr__(self, name, tuple(getattr(self, name)))
    check_ids(self.ids, self.vocab_size)
    fields.check_fields(self, "markov_rank")
    least = 1 if self.from_anchor else 2
    fields.check_at_least(
        "block_size", self.block_size, least, ": the anchor's slot "
        f"{'predicts' if self.from_anchor else 'does not'}")
    self._check_heads()
    if not self.taps or len(set(self.taps)) < len(self.taps):
      raise ValueError(f"taps is {self.taps}; name at least one hidden state "
                       "of the target, and each once")
    if self.causal and len(self.causal) != self.layers:
      raise ValueError(f"causal is {self.causal}; it must have one value for "
                       f"each of the {self.layers} layers")
    if self.mask_token is not None and not (
        0 <= self.mask_token < self.vocab_size):
      raise ValueError(f"mask_token is {self.mask_token}; it must be a token "
                       f"id in [0, {self.vocab_size}), or None for a trained "
                       "mask")

  def _check_heads(self) -> None:
    """Checks the fields `markov`, `confidence` and `window_end`."""
    for name, choices in (("markov", _coupling.KINDS),
                          ("confidence", _CONFIDENCE),
                          ("window_end", _WINDOW_ENDS)):
      if getattr(self, name) not in choices:
        raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one "
                         f"of {', '.join(choices)}")
    if self.confidence == "markov" and self.markov == "none":
      raise ValueError("confidence is 'markov' and markov is 'none'; the "
                       "confidence head would read the Markov head's "
                       "embedding: set confidence='hidden'")

  @property
  def draft_size(self) -> int:
    """Number Vd of tokens that can be drafted."""
    return len(self.ids) or self.vocab_size

  @property
  def num_forecasts(self) -> int:
    """Number K of tokens predicted after the anchor."""
    return self.block_size - (not self.from_anchor)

  @classmethod
  def for_target(cls, target: Transformer, count: int, layers: int = 1,
                 mlp_width: int | None = None,
                 taps: str | Sequence[int | str] = (), **options: Any) -> Self:
    """Returns heads with the target's sizes that predict `count` tokens.

    Args:
      target: target model.
      count: number K of predicted tokens.
      layers: number of draft layers.
      mlp_width: inner width of the layers' MLPs. None means the target's.
      taps: hidden states of the target that the heads read, or a string such as
        "2,4,final". If it is empty, the heads read three hidden states, evenly
        spread up to the input of the last layer.
      **options: other fields of the class.
    """
    config = target.config
    if isinstance(taps, str):
      taps = _states(taps)
    if not taps:
      last = max(1, config.layers - 1)
      taps = sorted({round(float(x)) for x in np.linspace(1, last, _TAPS)})
    shared = {name: getattr(config, name) for name in _SHARED}
    from_anchor = options.get("from_anchor", True)
    heads = cls(**{
        **shared, "layers": layers, "taps": tuple(taps),
        "mlp_width": mlp_width or config.mlp_width,
        "block_size": count + (not from_anchor), **options})
    heads.check_taps(target)
    return heads

  def check_taps(self, target: Transformer) -> None:
    """Raises `ValueError` unless the target has the states named in `taps`."""
    for tap in self.taps:
      if tap != FINAL and tap not in range(target.config.layers + 1):
        raise ValueError(
            f"taps contains {tap}; the target has the hidden states 0 to "
            f"{target.config.layers} and {FINAL!r}: use these names, such as "
            f"1,{FINAL}")

  def init(self, key: jax.Array, target_params: Params) -> dict[str, Any]:
    """Returns initial float32 parameters.

    Args:
      key: PRNG key.
      target_params: parameters of the target.

    Returns:
      Dictionary with the draft layers and `final_norm`, named as in a
      `Transformer`, and `fc` and `hidden_norm`, which compute H. Depending on
      the fields, it also contains `mask [D]`, `markov` (see `_coupling.init`)
      and `confidence`, the `kernel` and `bias []` of the confidence head.
    """
    stack, fusion, mask, markov = jax.random.split(key, 4)
    x = jnp.zeros((1, 1, self.width))
    params = dict(_Layers(self).init(
        stack, x, jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1, 1), bool),
        None)["params"])
    inputs = len(self.taps) * self.width
    params["fc"] = {"kernel": inputs**-0.5 * jax.random.normal(
        fusion, (inputs, self.width), jnp.float32)}
    params["hidden_norm"] = layers_lib.Norm(self).init(fusion, x)["params"]
    if self.mask_token is None:
      table = target_params["embedding"].astype(jnp.float32)
      params["mask"] = table.mean(0) + table.std(0) * jax.random.normal(
          mask, (self.width,), jnp.float32)
    if self.markov != "none":
      params["markov"] = _coupling.init(
          markov, self.markov, self.vocab_size, self.width, self.markov_rank,
          self.draft_size)
    if self.confidence != "none":
      size = self.width + self.markov_rank * (self.confidence == "markov")
      params["confidence"] = {"kernel": jnp.zeros((size,), jnp.float32),
                              "bias": jnp.zeros((), jnp.float32)}
    return params

  def tapped(self, target: Transformer) -> Transformer:
    """Returns a target that also outputs the hidden states in `taps`."""
    self.check_taps(target)
    names = target.config.features or (FINAL,)
    features = tuple(dict.fromkeys((*self.taps, *names)))
    return dataclasses.replace(target, config=dataclasses.replace(
        target.config, features=features))

  def attach(self, target: Transformer, target_params: Params, params: Params
             ) -> tuple[Transformer, dict[str, Any]]:
    """Returns the target and the parameters for decoding with these heads.

    Args:
      target: target model.
      target_params: parameters of the target.
      params: parameters of the heads.

    Returns:
      `(target, {"target": target_params, "drafter": params})`. The returned
      target also outputs the hidden states in `taps`.
    """
    return self.tapped(target), {"target": target_params, "drafter": params}

  def check_fits(self, target: Model) -> None:
    """Checks that a target fits these heads.

    Raises:
      ValueError: a size differs, or the target does not output the hidden
        states named in `taps`.
    """
    features = networks.check_sizes_match(self, target).features
    if not set(self.taps) <= set(features):
      raise ValueError(
          f"the target returns the hidden states {features}, but the heads "
          f"read {self.taps}: use the target that `heads.attach` returns")

  def tap(self, target: Transformer, hidden: jax.Array) -> jax.Array:
    """Returns the m hidden states in `taps`, concatenated, `[..., m D]`.

    Args:
      target: target model.
      hidden: hidden states in the target's output.
    """
    return jnp.concatenate(
        [target.feature(hidden, tap) for tap in self.taps], axis=-1)

  def context(self, params: Params, features: jax.Array) -> jax.Array:
    """Returns H `[B, S, D]`, fused from m hidden states `[B, S, m D]`."""
    kernel = params["fc"]["kernel"]
    fused = layers_lib.product(features.astype(kernel.dtype), kernel)
    return layers_lib.Norm(self).apply(
        {"params": params["hidden_norm"]}, fused.astype(kernel.dtype))

  def init_cache(self, params: Params, batch: int, capacity: int,
                 cache: type[Cache] = KVCache) -> Cache:
    """Returns an empty cache of the draft layers in the parameters' dtype."""
    return cache.empty(
        layers=self.layers, batch=batch, heads=self.kv_heads,
        capacity=capacity, head_dim=self.head_dim,
        dtype=params["fc"]["kernel"].dtype)

  def with_context(self, params: Params, cache: Cache, context: jax.Array,
                   positions: jax.Array) -> Cache:
    """Returns the cache with the keys and values of S tokens as its block.

    The methods `rollback` and `commit` of the returned cache make tokens of the
    block part of the cached sequence.

    Args:
      params: parameters of the network.
      cache: cache of the draft layers.
      context: fused features H `[B, S, D]` of the tokens.
      positions: positions `[B, S]` int32.
    """
    alone = jnp.zeros((*positions.shape, positions.shape[1]), bool)
    tables = layers_lib.RotaryTables.of(self, positions, context.dtype)
    for i in range(self.layers):
      _, kept = layers_lib.Attention(self, i).apply(
          {"params": params[f"attention_{i}"]}, context, tables, alone,
          _Kept(cache))
      cache = kept.cache
    return cache

  def slots(self, params: Params, target_params: Params, anchors: jax.Array
            ) -> jax.Array:
    """Returns the inputs of blocks, `[..., block_size, D]`.

    Args:
      params: parameters of the network.
      target_params: parameters of the target, for the embedding.
      anchors: token ids of the anchors, `[...]` int32.
    """
    table = target_params["embedding"]
    dtype = params["fc"]["kernel"].dtype
    mask = (params["mask"] if self.mask_token is None
            else self._embedded(table, self.mask_token)).astype(dtype)
    first = self._embedded(table, anchors).astype(dtype)[..., None, :]
    rest = (*anchors.shape, self.block_size - 1, self.width)
    return jnp.concatenate([first, jnp.broadcast_to(mask, rest)], axis=-2)

  def _embedded(self, table, tokens):
    return table[tokens] * jnp.asarray(self.embedding_scale, table.dtype)

  def read(self, params: Params, slots: jax.Array, positions: jax.Array,
           visible: jax.Array, cache: Cache) -> jax.Array:
    """Returns the hidden states of slots after the final norm.

    Args:
      params: parameters of the network.
      slots: inputs `[B, S, D]` of the slots of one or several blocks.
      positions: positions `[B, S]` int32.
      visible: attention mask `[B, S, T]` bool over the T tokens after the
        committed tokens of the cache, before causal layers and windows reduce
        it. The slots are the last S of the T tokens.
      cache: cache of the draft layers.

    Returns:
      Hidden states `[B, S, D]`.
    """
    return _Layers(self).apply(
        {"params": params}, slots, positions, visible, cache)

  def block(self, params: Params, target_params: Params, anchors: jax.Array,
            cache: Cache) -> jax.Array:
    """Runs the network on one block per row.

    Args:
      params: parameters of the network.
      target_params: parameters of the target, for the embedding.
      anchors: last committed tokens, `[B]` int32.
      cache: cache with all committed tokens except the anchors.

    Returns:
      Hidden states `[B, K, D]` of the slots that predict tokens.
    """
    size, batch = self.block_size, anchors.shape[0]
    positions = cache.lengths[:, None] + jnp.arange(size, dtype=jnp.int32)
    hidden = self.read(
        params, self.slots(params, target_params, anchors), positions,
        jnp.ones((batch, size, size), bool), cache)
    return self.predicting(hidden)

  def predicting(self, hidden: jax.Array) -> jax.Array:
    """Returns the K of `block_size` slots that predict tokens, `[..., K, D]`.
    """
    return hidden if self.from_anchor else hidden[..., 1:, :]

  def logits(self, target_params: Params, hidden: jax.Array) -> jax.Array:
    """Returns the slots' logits `[..., K, Vd]` without the Markov head's bias.

    The logits are in float32 or a wider dtype.
    """
    head = networks.lm_head(target_params)
    if self.ids:
      head = head[:, np.array(self.ids)]
    raw = networks.project(hidden, head) / self.logit_divisor
    cap = self.logit_softcap
    return cap * jnp.tanh(raw / cap) if cap else raw

  def coupled(self, params: Params, hidden: jax.Array, before: jax.Array
              ) -> jax.Array:
    """Returns the Markov head's biases `[..., K, Vd]` for known tokens.

    Args:
      params: parameters of the network.
      hidden: hidden states `[..., K, D]` of the slots that predict tokens.
      before: token before each predicted token, `[..., K]` int32.
    """
    return _coupling.along(self.markov, params["markov"], hidden, before)

  def whole(self, logits: jax.Array) -> jax.Array:
    """Expands logits `[..., Vd]` to `[..., V]`.

    Tokens that cannot be drafted get probability 0.
    """
    return networks.whole(logits, self.ids, self.vocab_size)

  def evidence(self, params: Params, hidden: jax.Array, before: jax.Array
               ) -> jax.Array:
    """Returns the input of the confidence head, `[..., D]` or `[..., D + r]`.

    Args:
      params: parameters of the network.
      hidden: hidden states `[..., D]` of slots that predict tokens.
      before: token before each predicted token, `[...]` int32.
    """
    if self.confidence != "markov":
      return hidden
    embedding = params["markov"]["w1"][before]
    return jnp.concatenate([hidden, embedding.astype(hidden.dtype)], axis=-1)

  def confidences(self, params: Params, hidden: jax.Array, before: jax.Array
                  ) -> jax.Array:
    """Returns the logits `[..., K]` of the predicted acceptance probabilities.

    The arguments are those of `coupled`.
    """
    own = params["confidence"]
    evidence = self.evidence(params, hidden, before).astype(jnp.float32)
    return evidence @ own["kernel"] + own["bias"]


def _states(text):
  try:
    parts = (part.strip() for part in text.split(","))
    return tuple(part if part == FINAL else int(part) for part in parts if part)
  except ValueError:
    raise ValueError(f"taps is {text!r}; separate numbers of hidden states, or "
                     f"{FINAL}, by commas, such as 2,4") from None


class _Layers(nn.Module):
  """Draft layers and the final norm."""

  config: ParallelHeads

  @nn.compact
  def __call__(self, x, positions, visible, cache):
    c = self.config
    tables = layers_lib.RotaryTables.of(c, positions, x.dtype)
    size, count = visible.shape[1:]
    earlier = jnp.tril(jnp.ones((size, count), bool), count - size)
    if any(c.windows) and cache is not None:
      cache = _Windowed(cache, c, positions - cache.lengths[:, None])
    for i in range(c.layers):
      x, cache = layers_lib.decoder_layer(
          c, i, x, tables,
          visible & earlier if c.causal and c.causal[i] else visible, cache)
    return layers_lib.Norm(c, name="final_norm")(x)


class _Windowed(NamedTuple):
  """Cache wrapper that ends the windows of slots as `window_end` says.

  Without the wrapper, the window of a query ends at the last token of its mask.
  In a layer that is not causal, this is the last slot of the block.

  Attributes:
    cache: cache of the draft layers.
    config: configuration of the draft layers.
    depths: number `[B, S]` int32 of tokens between the committed tokens of the
      cache and each slot.
  """

  cache: Any
  config: ParallelHeads
  depths: jax.Array

  def append(self, layer, key, value, after):
    return self._replace(
        cache=self.cache.append(layer, key, value, after=after))

  def attend(self, layer, query, ancestors, window=0, **options):
    if not window:
      return self.cache.attend(layer, query, ancestors, **options)
    depths = self.depths
    if self.config.window_end == "anchor":
      slots = jnp.arange(depths.shape[1]) % self.config.block_size
      # A window of the cache includes the token at its end, here the anchor.
      depths, window = depths - slots, window + 1
    return self.cache.attend(
        layer, query, ancestors, window=window, depths=depths, **options)


class _Kept(NamedTuple):
  """Cache wrapper that stores keys and values, and skips the attention."""

  cache: Any

  def append(self, layer, key, value, after):
    return _Kept(self.cache.append(layer, key, value, after=after))

  def attend(self, layer, query, ancestors, **options):
    del layer, ancestors, options
    return jnp.zeros_like(query)
