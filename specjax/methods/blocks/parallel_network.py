"""Network of DFlash and its relatives, which drafts a block in one pass.

DFlash (arXiv:2602.06036), DSpark (arXiv:2607.05147). A block consists of the
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
last committed tokens. In most of these layers, and in all layers of JetSpec
(arXiv:2606.18394), the attention within the block is causal: a slot attends
only to itself and to earlier slots. In DFlare (arXiv:2606.02091) each layer has
its own mixture H of the hidden states (`fusion`). DFlash 2 applies convolutions
over neighbouring slots (`conv_kernel`). `_coupling` lists the transitions that
make the tokens of a block dependent (`markov`).
"""

from collections.abc import Sequence
import dataclasses
from typing import Any
from typing import ClassVar
from typing import Self

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from specjax.caches.dense import KVCache
from specjax.interfaces import Cache
from specjax.interfaces import Model
from specjax.methods import networks
from specjax.methods.blocks import _coupling
from specjax.methods.blocks import _layers
from specjax.methods.networks import Params
from specjax.models import layers as layers_lib
from specjax.models.configuration import FINAL
from specjax.models.configuration import TransformerConfig
from specjax.models.features import check_ids
from specjax.models.transformer import Transformer
from specjax.utils import fields

_CONFIDENCE = ("none", "hidden", "markov")
_WINDOW_ENDS = ("anchor", "slot")
_FUSIONS = ("linear", "layers")
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
    markov: type of the transition, which conditions a token on the token before
      it, one of `_coupling.KINDS`. With "none" the tokens of a block are
      independent.
    markov_rank: rank r of the transition.
    markov_width: width of the state of "gru", or of the network of "lilicorr".
    candidates: number n of tokens that can be drafted in a slot, for "selector"
      and "lilicorr".
    free_slots: number of first slots that "gru" does not correct.
    lattice_layers: number of layers of the network of "lilicorr".
    lattice_heads: number of attention heads of this network.
    lattice_mlp_width: inner width of the MLPs of this network.
    logit_scale: logit of "lilicorr" for a cosine of 1.
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
    fusion: computation of H. "linear" is one linear layer for all draft layers.
      With "layers" each draft layer has its own weighted mean of the hidden
      states, and its own keys and values of H (DFlare).
    conv_kernel: number of slots that a convolution reads, before and after each
      attention and MLP. 1 means no convolutions.
    conv_group: number of neighbouring channels with the same input-dependent
      kernel.

  All other attributes configure the draft layers. The width and the vocabulary
  size are those of the target.
  """

  block_size: int
  taps: tuple[int | str, ...]
  from_anchor: bool = True
  markov: str = "none"
  markov_rank: int = 32
  markov_width: int = 64
  candidates: int = 16
  free_slots: int = 1
  lattice_layers: int = 2
  lattice_heads: int = 4
  lattice_mlp_width: int = 128
  logit_scale: float = 10.0
  confidence: str = "none"
  mask_token: int | None = None
  ids: tuple[int, ...] = ()
  causal: tuple[bool, ...] = ()
  window_end: str = "anchor"
  fusion: str = "linear"
  conv_kernel: int = 1
  conv_group: int = 16
  qk_norm: str | None = "head"

  kind: ClassVar[str] = "parallel"

  def __post_init__(self):
    super().__post_init__()
    for name in ("taps", "ids", "causal"):
      object.__setattr__(self, name, tuple(getattr(self, name)))
    check_ids(self.ids, self.vocab_size)
    fields.check_fields(
        self, "markov_rank", "markov_width", "candidates", "lattice_layers",
        "lattice_heads", "lattice_mlp_width", "conv_kernel", "conv_group")
    fields.check_fields(self, "free_slots", least=0)
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
    """Checks the fields that select a part, and the sizes of the parts."""
    for name, choices in (("markov", _coupling.KINDS),
                          ("confidence", _CONFIDENCE),
                          ("window_end", _WINDOW_ENDS), ("fusion", _FUSIONS)):
      if getattr(self, name) not in choices:
        raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one "
                         f"of {', '.join(choices)}")
    if self.confidence == "markov" and self.markov not in _coupling.EMBEDS:
      raise ValueError(f"confidence is 'markov' and markov is {self.markov!r}; "
                       "the confidence head would read the Markov head's "
                       "embedding: set confidence='hidden'")
    if self.is_lattice and self.candidates > self.draft_size:
      raise ValueError(f"candidates is {self.candidates}; it must be at most "
                       f"the {self.draft_size} tokens that can be drafted")
    if self.markov == "lilicorr" and self.fusion != "linear":
      raise ValueError("fusion is 'layers' and markov is 'lilicorr', which "
                       "reads one H for all layers: set fusion='linear'")
    for used, whole, part in (
        (self.markov == "lilicorr", "markov_width", "lattice_heads"),
        (self.conv_kernel > 1, "width", "conv_group")):
      if used and getattr(self, whole) % getattr(self, part):
        raise ValueError(f"{part} is {getattr(self, part)}; it must divide "
                         f"{whole}, which is {getattr(self, whole)}")
    if self.conv_kernel > 1 and (
        self.parallel_residual or self.post_norm or not self.pre_norm):
      raise ValueError(
          f"conv_kernel is {self.conv_kernel}, and the layers have "
          "parallel_residual, post_norm or no pre_norm: set conv_kernel=1")

  @property
  def draft_size(self) -> int:
    """Number Vd of tokens that can be drafted."""
    return len(self.ids) or self.vocab_size

  @property
  def is_lattice(self) -> bool:
    """True if only `candidates` tokens can be drafted in a slot."""
    return self.markov in _coupling.LATTICES

  @property
  def children(self) -> int:
    """Number of tokens with a positive probability in a slot."""
    return self.candidates if self.is_lattice else self.draft_size

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
      **options: other fields of the class. A bool for `causal` applies to all
        layers.
    """
    config = target.config
    if isinstance(options.get("causal"), bool):
      options["causal"] = (True,) * layers if options["causal"] else ()
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
      the fields, it contains `mix [layers, m]` and the `kernel` of
      `context_<i>` for keys and values of H instead of `fc`, and also `mask
      [D]`, `markov` (see `_coupling.init`) and `confidence`, the `kernel` and
      `bias []` of the confidence head.
    """
    stack, fusion, mask, markov = jax.random.split(key, 4)
    size = self.block_size
    x = jnp.zeros((1, size, self.width))
    params = dict(_layers.DraftLayers(self).init(
        stack, x, jnp.zeros((1, size), jnp.int32),
        jnp.ones((1, size, size), bool), None)["params"])
    inputs = len(self.taps) * self.width
    if self.fusion == "linear":
      params["fc"] = {"kernel": inputs**-0.5 * jax.random.normal(
          fusion, (inputs, self.width), jnp.float32)}
    else:
      # As published, layer i of the L layers first prefers tap i m / L.
      preferred = np.arange(self.layers) * len(self.taps) // self.layers
      params["mix"] = 2 * jax.nn.one_hot(preferred, len(self.taps))
      for i in range(self.layers):
        kernel = params[f"attention_{i}"]["qkv"]["kernel"][:, :, -2:]
        params[f"context_{i}"] = {"kernel": kernel}
    params["hidden_norm"] = layers_lib.Norm(self).init(fusion, x)["params"]
    if self.mask_token is None:
      table = target_params["embedding"].astype(jnp.float32)
      params["mask"] = table.mean(0) + table.std(0) * jax.random.normal(
          mask, (self.width,), jnp.float32)
    if self.markov != "none":
      params["markov"] = _coupling.init(markov, self)
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
    """Returns H, fused from m hidden states `[B, S, m D]`.

    H is `[B, S, D]`, or `[B, S, layers, D]` with `fusion` "layers".
    """
    dtype = _dtype(params)
    if self.fusion == "linear":
      fused = layers_lib.product(
          features.astype(dtype), params["fc"]["kernel"])
    else:
      weights = jax.nn.softmax(params["mix"], axis=-1)
      fused = jnp.einsum("bstd,lt->bsld", features.astype(dtype).reshape(
          *features.shape[:-1], -1, self.width), weights)
    return layers_lib.Norm(self).apply(
        {"params": params["hidden_norm"]}, fused.astype(dtype))

  def init_cache(self, params: Params, batch: int, capacity: int,
                 cache: type[Cache] = KVCache) -> Cache:
    """Returns an empty cache of the draft layers in the parameters' dtype."""
    return cache.empty(
        layers=self.layers, batch=batch, heads=self.kv_heads,
        capacity=capacity, head_dim=self.head_dim, dtype=_dtype(params))

  def with_context(self, params: Params, cache: Cache, context: jax.Array,
                   positions: jax.Array) -> Cache:
    """Returns the cache with the keys and values of S tokens as its block.

    The methods `rollback` and `commit` of the returned cache make tokens of the
    block part of the cached sequence.

    Args:
      params: parameters of the network.
      cache: cache of the draft layers.
      context: fused features H of the tokens, see `context`.
      positions: positions `[B, S]` int32.
    """
    alone = jnp.zeros((*positions.shape, positions.shape[1]), bool)
    tables = layers_lib.RotaryTables.of(self, positions, context.dtype)
    for i in range(self.layers):
      own, read = params[f"attention_{i}"], context
      if self.fusion == "layers":
        read, qkv = context[:, :, i], own["qkv"]
        own = {**own, "qkv": {**qkv, "kernel": jnp.concatenate(
            [qkv["kernel"][:, :, :-2], params[f"context_{i}"]["kernel"]],
            axis=2)}}
      _, kept = layers_lib.Attention(self, i).apply(
          {"params": own}, read, tables, alone, _layers.Kept(cache))
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
    dtype = _dtype(params)
    mask = (params["mask"] if self.mask_token is None
            else self.embedded(target_params, self.mask_token)).astype(dtype)
    first = self.embedded(target_params, anchors).astype(dtype)[..., None, :]
    rest = (*anchors.shape, self.block_size - 1, self.width)
    return jnp.concatenate([first, jnp.broadcast_to(mask, rest)], axis=-2)

  def embedded(self, target_params: Params, tokens: ArrayLike) -> jax.Array:
    """Returns the target's embeddings `[..., D]` of tokens `[...]`."""
    table = target_params["embedding"]
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
    return _layers.DraftLayers(self).apply(
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
    """Returns the slots' logits `[..., K, Vd]` without the transition.

    The logits are in float32 or a wider dtype.
    """
    head = networks.lm_head(target_params)
    if self.ids:
      head = head[:, np.array(self.ids)]
    raw = networks.project(hidden, head) / self.logit_divisor
    cap = self.logit_softcap
    return cap * jnp.tanh(raw / cap) if cap else raw

  def lattice(self, params: Params, target_params: Params, hidden: jax.Array,
              logits: jax.Array, anchors: jax.Array,
              last: jax.Array | None = None) -> dict[str, jax.Array]:
    """Returns the arrays `[..., K, ...]` that the transition reads.

    Args:
      params: parameters of the network.
      target_params: parameters of the target.
      hidden: hidden states `[..., K, D]` of the slots that predict tokens.
      logits: logits `[..., K, Vd]` of these slots.
      anchors: token ids of the anchors, `[...]` int32.
      last: fused features H `[..., D]` of the token before the anchor, 0 if
        there is none. Only LiLiCorr reads them.
    """
    return _coupling.slots(
        self, params.get("markov"), target_params, hidden, logits, anchors,
        last)

  def coupled(self, params: Params, target_params: Params,
              read: dict[str, jax.Array], before: jax.Array) -> jax.Array:
    """Returns the logits `[..., K, Vd]` of the slots for known tokens.

    Args:
      params: parameters of the network.
      target_params: parameters of the target.
      read: result of `lattice`.
      before: token before each predicted token, `[..., K]` int32.
    """
    return _coupling.along(
        self, params.get("markov"), target_params, read, before)

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

    The arguments are those of `evidence`.
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


def _dtype(params):
  return params["hidden_norm"]["scale"].dtype
