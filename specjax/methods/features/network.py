"""Feature layers, which draft from the hidden states of a target.

A draft starts from the target's features: its hidden states of the committed
tokens. Later draft steps read the layer's own output instead.
`models.features.FeatureConfig` configures the layer.
"""

import dataclasses
from typing import Any
from typing import ClassVar
from typing import Self

import chex
from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax.caches.dense import KVCache
from specjax.interfaces import Cache
from specjax.interfaces import Model
from specjax.methods import networks
from specjax.methods.features import _layer
from specjax.methods.features._layer import Keys
from specjax.methods.networks import lm_head
from specjax.methods.networks import Params
from specjax.models import layers
from specjax.models.configuration import FINAL
from specjax.models.configuration import TransformerConfig
from specjax.models.features import FeatureConfig
from specjax.models.transformer import Transformer


@struct.dataclass
class FeatureOutput:
  """Output of a pass of a feature layer.

  Attributes:
    hidden: input `[B, S, D]` of the next draft step.
    read: input `[B, S, D]` of the LM head.
    keys: keys and values of a pass without a cache, which later passes read;
      None with a cache.
    cache: cache with the keys and values of the pass, not yet committed; None
      without a cache.
  """

  hidden: jax.Array
  read: jax.Array
  keys: Keys | None = None
  cache: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureHeads(FeatureConfig):
  """Feature layer, which drafts from the hidden states of a target.

  The parameters are a dict: `module_{m}` for module m, and `entry` with its
  norms if the layer projects its input. `embedding [V, D]` and `head [D, Vd]`
  are present unless the layer shares the target's matrices. Vd is `draft_size`,
  the number of tokens that can be drafted. With `narrow_head`, `attach` adds
  `head`, the columns of the target's head for these tokens.
  """

  kind: ClassVar[str] = "features"

  @property
  def num_forecasts(self) -> int:
    """Number K of draft steps in training, and the default draft length."""
    return self.forecasts

  @classmethod
  def default_taps(cls, layers: int) -> tuple[int | str, ...]:
    """Returns the names of the hidden states that are read by default.

    Args:
      layers: number of layers of the target.
    """
    del layers
    return (FINAL,)

  @classmethod
  def for_target(cls, target: Transformer, count: int, **options: Any) -> Self:
    """Returns a layer with the sizes of the target.

    Args:
      target: target model.
      count: number K of draft steps.
      **options: other fields of the class. `taps` may be a string, such as
        "2,4,final"; the empty string means `default_taps`.

    Raises:
      ValueError: the target does not have a named hidden state, or the fields
        exclude each other.
    """
    c = target.config
    like = {field.name: getattr(c, field.name)
            for field in dataclasses.fields(TransformerConfig)}
    like.update(layers=1, windows=(), features=(), lookahead=0,
                lookahead_rank=0, pre_norm=True, post_norm=False,
                parallel_residual=False, learned_positions=False,
                recurrent=None, unrotated=(), experts=None,
                global_head_dim=None, global_kv_heads=None, global_values=True,
                shared_layers=0, wide_shared=False, layer_inputs=0,
                layer_scales=False, sinks=False)
    taps = options.pop("taps", ())
    if isinstance(taps, str):
      taps = [int(name) if name.isdecimal() else name
              for name in taps.replace(",", " ").split()]
    for name in taps:
      if name != FINAL and name not in range(c.layers + 1):
        raise ValueError(f"taps contains {name!r}; the target has the hidden "
                         f"states 0 to {c.layers} and {FINAL!r}: use these "
                         "names, such as 1,final")
    return cls(**{**like, "target_width": c.width, "forecasts": count,
                  "taps": tuple(taps) or cls.default_taps(c.layers),
                  **options})

  def init(self, key: jax.Array, target_params: Params) -> dict[str, Any]:
    """Returns initial float32 parameters.

    A separate head or embedding is initialised with a copy of the target's, or
    with random numbers if the widths differ. All other parameters are random.

    Args:
      key: PRNG key.
      target_params: parameters of the target.
    """
    entry, embedding, head, *modules = jax.random.split(key, 3 + self.modules)
    row = jnp.zeros((1, 1, self.width), jnp.float32)
    place, seen = jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1, 1), bool)
    network, params = _layer.FeatureModule(self), {}
    for m, own in enumerate(modules):
      params[f"module_{m}"] = network.init(
          own, row, row, place, seen, None)["params"]
    if self.entry:
      taps = jnp.zeros((1, 1, len(self.taps) * self.target_width))
      params.update(_layer.Entry(self).init(entry, taps)["params"])
    same = self.width == self.target_width
    random = lambda key, *shape: 0.02 * jax.random.normal(
        key, shape, jnp.float32)
    if self.own_embedding:
      params["embedding"] = (
          jnp.array(target_params["embedding"], jnp.float32) if same else
          random(embedding, self.vocab_size, self.width))
    if self.own_head:
      params["head"] = jnp.array(self.columns(
          target_params if same else
          {"head": random(head, self.width, self.vocab_size)}), jnp.float32)
    return params

  def attach(self, target: Transformer, target_params: Params, params: Params
             ) -> tuple[Transformer, dict[str, Any]]:
    """Returns a target that outputs the hidden states read by this layer.

    Args:
      target: target model.
      target_params: parameters of the target.
      params: parameters of the layer.

    Returns:
      `(target, {"target": ..., "drafter": ...})`: the target, and the
      parameters for decoding with it.

    Raises:
      ValueError: the layer was made for another target.
    """
    self.check_sizes(target)
    taps = self.taps if FINAL in self.taps else (*self.taps, FINAL)
    config = dataclasses.replace(target.config, features=taps)
    if self.narrow_head:
      params = {**params, "head": self.columns(target_params)}
    return dataclasses.replace(target, config=config), {
        "target": target_params, "drafter": params}

  def columns(self, target_params: Params) -> jax.Array:
    """Returns the columns `[D, Vd]` of the target's head for draft tokens.

    Args:
      target_params: parameters of the target.
    """
    whole = lm_head(target_params)
    return whole[:, np.array(self.ids)] if self.ids else whole

  def check_sizes(self, target: Model) -> None:
    """Raises a `ValueError` if the target has another width or vocabulary."""
    config = getattr(target, "config", None)
    if config is None:
      raise ValueError(f"the target is a {type(target).__name__}; a feature "
                       "layer reads hidden states of the target: give a "
                       "models.Transformer")
    for name, wants in (("width", self.target_width),
                        ("vocab_size", self.vocab_size)):
      if getattr(config, name) != wants:
        raise ValueError(
            f"the feature layer needs a target with {name} {wants}, but the "
            f"target has {getattr(config, name)}: make a layer for this target "
            "with for_target")

  def check_target(self, target: Model) -> None:
    """Checks that the target's output contains the taps of the layer.

    Raises:
      ValueError: the width or the vocabulary differs, or the target does not
        output the hidden states that the layer reads.
    """
    self.check_sizes(target)
    names = target.config.features or (FINAL,)
    if names[:len(self.taps)] != self.taps:
      raise ValueError(
          f"the target returns the hidden states {names}, but the feature "
          f"layer reads {self.taps} first: use the target that `heads.attach` "
          "returns")

  def init_cache(self, params: Params, batch: int, capacity: int,
                 modules: int | None = None) -> KVCache:
    """Returns an empty cache in the parameters' dtype.

    Args:
      params: parameters of the layer.
      batch: number of rows.
      capacity: slots per row.
      modules: number of modules that get cache layers; None means all.
    """
    return KVCache.empty(
        layers=(modules or self.modules) * self.layers, batch=batch,
        heads=self.kv_heads, capacity=capacity, head_dim=self.head_dim,
        dtype=_dtype(params))

  def taps_of(self, hidden: jax.Array) -> jax.Array:
    """Returns the hidden states `[..., F]` that this layer reads.

    Args:
      hidden: concatenated hidden states that the target outputs.
    """
    return hidden[..., :len(self.taps) * self.target_width]

  def enter(self, params: Params, taps: jax.Array) -> jax.Array:
    """Returns the input `[B, S, D]` of the first draft step.

    Args:
      params: parameters of the layer.
      taps: hidden states `[B, S, F]` of the target that the layer reads.
    """
    chex.assert_rank(taps, 3)
    taps = taps.astype(_dtype(params))
    if not self.entry:
      return taps
    own = {name: x for name, x in params.items() if name.startswith("entry")}
    return _layer.Entry(self).apply({"params": own}, taps)

  def step(self, params: Params, target_params: Params, hidden: jax.Array,
           tokens: jax.Array, *, positions: jax.Array | None = None,
           visible: jax.Array | None = None, keys: Keys | None = None,
           cache: Cache | None = None, module: int = 0) -> FeatureOutput:
    """Runs one pass of a module over S positions.

    A first pass without a cache uses causal attention over the S positions,
    or the mask `visible`. A later pass receives the `keys` of the pass before
    it. Without `visible`, each position then attends to the keys that were
    visible to it in the first pass, and to its own later keys. With `visible
    [B or 1, S, T + S]`, the mask covers the T earlier keys and the S new keys.

    Args:
      params: parameters of the layer.
      target_params: parameters of the target.
      hidden: result `[B, S, D]` of `enter` or of the previous step.
      tokens: token after each position, `[B, S]` int32.
      positions: positions `[B, S]` int32. None means consecutive positions,
        from 0 without a cache, and after the committed tokens with a cache.
      visible: attention mask `[B or 1, S, S]` bool over the S positions. With a
        cache it is `[B, S, T]`, over the T tokens after the committed ones.
      keys: keys of an earlier `FeatureOutput`.
      cache: cache with `append` and `attend` of `interfaces.Cache`.
      module: index of the module.
    """
    chex.assert_rank([hidden, tokens], [3, 2])
    chex.assert_equal_shape_prefix([hidden, tokens], 2)
    batch, size = hidden.shape[:2]
    dtype = _dtype(params)
    if positions is None:
      first = jnp.zeros((batch,), jnp.int32) if cache is None else cache.lengths
      positions = first[:, None] + jnp.arange(size, dtype=jnp.int32)
    if keys is not None:
      memory = keys.replace(own=visible is None)
      visible = keys.visible if visible is None else visible
      memory = memory.replace(visible=visible)
    else:
      if visible is None:
        visible = jnp.tril(jnp.ones((1, size, size), bool))
      memory = (Keys(visible=visible) if cache is None else
                _layer.LayerOf(cache, module * self.layers))
    hidden, read, memory = _layer.FeatureModule(self).apply(
        {"params": params[f"module_{module}"]}, hidden.astype(dtype),
        self._embedded(params, target_params, tokens, dtype), positions,
        visible, memory)
    if self.final_norm == "target":
      read = layers.Norm(self).apply(
          {"params": target_params["final_norm"]}, read)
    output = FeatureOutput(hidden=read if self.feed_normed else hidden,
                           read=read)
    if cache is None:
      return output.replace(keys=memory)
    return output.replace(cache=memory.cache)

  def later_input(self, params: Params, hidden: jax.Array, tokens: jax.Array
                  ) -> tuple[jax.Array, jax.Array]:
    """Returns the input of a draft step after the first.

    Args:
      params: parameters of the layer.
      hidden: output `[B, S, D]` of the previous step.
      tokens: token after each position, `[B, S]` int32.

    Returns:
      The arguments `(hidden, tokens)` of `step`.
    """
    del params
    return hidden, tokens

  def _embedded(self, params, target_params, tokens, dtype):
    """Returns embeddings `[B, S, D]`, or None if the layer reads no tokens."""
    if self.fusion == "none":
      return None
    own = params if self.own_embedding else target_params
    return own["embedding"][tokens].astype(dtype) * jnp.asarray(
        self.embedding_scale, dtype)

  def logits(self, params: Params, target_params: Params, read: jax.Array
             ) -> jax.Array:
    """Returns the logits `[B, S, Vd]` in float32 or a wider dtype.

    Args:
      params: parameters of the layer.
      target_params: parameters of the target.
      read: input `[B, S, D]` of the LM head, see `FeatureOutput`.
    """
    head = (params["head"] if "head" in params  # trained, or from `attach`
            else self.columns(target_params))
    return layers.logits(read.astype(head.dtype), head, self)

  def whole(self, logits: jax.Array) -> jax.Array:
    """Expands logits `[..., Vd]` to `[..., V]`; other tokens get -inf."""
    return networks.whole(logits, self.ids, self.vocab_size)


def _dtype(params):
  return jax.tree.leaves(params["module_0"]["attention_0"])[0].dtype
