"""Configuration of a `Transformer`."""

import dataclasses

from specjax.models.rotary import RopeScaling
from specjax.utils import fields

FINAL = "final"  # name of the hidden state before the LM head
KINDS = ("attention", "conv", "delta")
_CHOICES = {
    "activation": ("silu", "gelu", "gelu_tanh"),
    "norm": ("rms", "layer"),
    "qk_norm": (None, "head", "all"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentLayers:
  """Layers with a recurrent state in place of attention.

  Attributes:
    kinds: kind of each layer: "attention", "conv" (the gated short convolution
      of LFM2) or "delta" (Gated DeltaNet, arXiv:2412.06464).
    taps: number of tokens that a short convolution reads, including the current
      token.
    heads: number of value heads of a "delta" layer, each with a state.
    key_heads: number of its query and key heads, a divisor of `heads`.
    key_dim: width of a query or a key.
    value_dim: width of a value.
  """

  kinds: tuple[str, ...]
  taps: int
  heads: int = 0
  key_heads: int = 0
  key_dim: int = 0
  value_dim: int = 0

  def __post_init__(self):
    object.__setattr__(self, "kinds", tuple(self.kinds))
    if not {"attention"} < {*self.kinds} <= {*KINDS}:
      raise ValueError(f"kinds is {self.kinds}; each must be one of {KINDS}, "
                       "with at least one 'attention' and one other kind")
    fields.check_at_least("taps", self.taps, 2, ": a convolution of one token "
                          "has no state")
    if "delta" in self.kinds:
      fields.check_fields(self, "heads", "key_heads", "key_dim", "value_dim")
      if self.heads % self.key_heads:
        raise ValueError(f"heads is {self.heads} and key_heads "
                         f"{self.key_heads}; heads must be a multiple of "
                         "key_heads")

  @property
  def widths(self) -> tuple[int, int, int]:
    """Returns the widths of all queries, keys and values of a "delta" layer."""
    keys = self.key_heads * self.key_dim
    return keys, keys, self.heads * self.value_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertConfig:
  """Sizes and variants of a mixture of experts in place of an MLP.

  A router scores the experts for every token. The MLP's output is the weighted
  sum of the outputs of the experts with the highest scores (Shazeer et al.
  2017, arXiv:1701.06538). Every expert is a gated MLP.

  Attributes:
    count: number E of experts of a layer.
    chosen: number k of experts per token.
    width: inner width F of an expert.
    dense_layers: layers that have an ordinary MLP instead.
    shared_width: inner width of the MLP that is added for every token. 0 means
      no such MLP.
    shared_gate: if True, multiply the output of this MLP by the sigmoid of a
      gate, a product of the input with one vector (Qwen2-MoE).
    scores: "softmax" over all experts, or "sigmoid" of each (DeepSeek-V3).
    normalise: if True, divide the weights of the chosen experts by their sum.
    choice_bias: if True, add a bias to the scores for the choice of the
      experts, but not for their weights (DeepSeek-V3, arXiv:2408.15664).
    scale: factor on the weights.
    biases: if True, the router and the experts have biases.
    limit: constant c of the experts of GPT-OSS. They are down(g sigmoid(1.702
      g) (u + 1)), where g is the gate, at most c, and u the up projection,
      clipped to [-c, c]. None means the gated MLP of the configuration.
  """

  count: int
  chosen: int
  width: int
  dense_layers: tuple[int, ...] = ()
  shared_width: int = 0
  shared_gate: bool = False
  scores: str = "softmax"
  normalise: bool = True
  choice_bias: bool = False
  scale: float = 1.0
  biases: bool = False
  limit: float | None = None

  def __post_init__(self):
    object.__setattr__(self, "dense_layers", tuple(self.dense_layers))
    fields.check_fields(self, "count", "chosen", "width",
                        more=": correct the model's configuration")
    if self.chosen > self.count:
      raise ValueError(f"chosen is {self.chosen} and count {self.count}; a "
                       "token has at most all experts")
    if self.shared_gate and not self.shared_width:
      raise ValueError("shared_gate is True and shared_width 0; without a "
                       "shared MLP set shared_gate=False")
    if self.scores not in ("softmax", "sigmoid"):
      raise ValueError(f"scores is {self.scores!r}; it must be 'softmax' or "
                       "'sigmoid'")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
  """Sizes and variants of a decoder.

  Attributes:
    vocab_size: vocabulary size V.
    width: width D of the residual stream.
    layers: number L of layers.
    heads: number of query heads.
    kv_heads: number of key-value heads, a divisor of `heads`.
    head_dim: width of one head. The number of rotated dimensions must be even.
    mlp_width: inner width of the MLP.
    context_length: length of the longest sequence of the model, in tokens.
    rope_theta: base of the rotary frequencies.
    rope_fraction: share of the dimensions of a head that are rotated, from the
      first dimension.
    rope_scaling: scaling of the frequencies for long sequences, or None.
    local_rope_theta: base in layers with a window (Gemma 3, OLMo 3). These
      layers then have no scaling. None means that all layers have the same base
      and scaling.
    unrotated: layers whose queries and keys are not rotated (SmolLM3).
    learned_positions: if True, add a table of `context_length` positions to the
      embedding and rotate nothing (GPT-2).
    norm: "rms", or "layer" with a bias.
    norm_epsilon: number added to the mean square or the variance.
    norm_plus_one: if True, norms multiply by 1 + scale instead of scale
      (Gemma).
    pre_norm: if True, normalise the inputs of attention and MLP.
    post_norm: if True, normalise the outputs of attention and MLP (Gemma 2,
      OLMo-2).
    parallel_residual: if True, attention and MLP read the same residual stream
      (GPT-NeoX).
    qk_norm: RMSNorm of queries and keys before rotation: "head" per head (Qwen
      3), "all" over all heads (OLMo-2), or None.
    qkv_bias: True if query, key and value have biases.
    out_bias: True if the attention output has a bias.
    mlp_bias: True if the MLP has biases.
    gated: if True, the MLP is down(activation(gate(x)) * up(x)). If False, it
      is down(activation(up(x))).
    activation: "silu", "gelu" or "gelu_tanh".
    experts: mixture of experts that replaces the MLP, or None.
    windows: attention window of each layer in tokens, including the current
      token. 0 means no limit. An empty tuple means no limit in all layers.
    attention_softcap: constant c. Attention scores x become c tanh(x / c)
      (Gemma 2). None leaves x unchanged.
    logit_softcap: constant c. Logits x become c tanh(x / c). None leaves x
      unchanged.
    query_scale: factor on attention scores. None means head_dim^(-1/2).
    embedding_scale: factor on the embeddings (Gemma).
    residual_scale: factor on the outputs of attention and MLP (Granite).
    logit_divisor: number by which logits are divided (Granite).
    tie_embeddings: if True, the embedding table is also the LM head.
    attention_gate: if True, multiply the output of attention by the sigmoid of
      a gate, which is projected together with the query (Qwen3-Next).
    sinks: if True, each query head has a sink: a learned logit that its softmax
      counts as one more key, of value 0 (GPT-OSS).
    recurrent: kinds and sizes of recurrent layers. None means that all layers
      have attention.
    global_head_dim: width of one head in layers without a window (Gemma 4).
      None means `head_dim`.
    global_kv_heads: number of key-value heads in these layers. None means
      `kv_heads`.
    global_values: if False, the values of these layers are their keys before
      norm and rotation.
    value_norm: if True, values have an RMSNorm per head without a scale.
    shared_layers: number of last layers that have no keys and values. Each of
      them reads those of the last earlier layer of its kind: with a window if
      it has a window itself, and without one otherwise.
    wide_shared: if True, the MLPs of these layers are twice as wide.
    layer_inputs: width of an embedding of the token for every layer, which is
      added after the MLP through a gate. 0 means no such embeddings.
    layer_scales: if True, multiply the output of every layer by a number.
    features: hidden states to concatenate into `hidden`, in this order. Integer
      i is the residual stream before layer i, from 0. `layers` is the output of
      the last layer, before the final norm. "final" is the input of the LM
      head. An empty tuple means "final" only. Hugging Face's `hidden_states`
      and vLLM use the same index. Other projects call the hidden state i + 1
      "the output of layer i".
    lookahead: number of look-ahead tokens, with ids V..V + lookahead - 1. These
      tokens are inputs, and the model never predicts them.
    lookahead_rank: rank of the adapters of all kernels, which only look-ahead
      tokens pass through (see `layers.Adapted`). 0 means no adapters.
  """

  vocab_size: int
  width: int
  layers: int
  heads: int
  kv_heads: int
  head_dim: int
  mlp_width: int
  context_length: int
  rope_theta: float = 10_000.0
  rope_fraction: float = 1.0
  rope_scaling: RopeScaling | None = None
  local_rope_theta: float | None = None
  unrotated: tuple[int, ...] = ()
  learned_positions: bool = False
  norm: str = "rms"
  norm_epsilon: float = 1e-5
  norm_plus_one: bool = False
  pre_norm: bool = True
  post_norm: bool = False
  parallel_residual: bool = False
  qk_norm: str | None = None
  qkv_bias: bool = False
  out_bias: bool = False
  mlp_bias: bool = False
  gated: bool = True
  activation: str = "silu"
  experts: ExpertConfig | None = None
  windows: tuple[int, ...] = ()
  attention_softcap: float | None = None
  logit_softcap: float | None = None
  query_scale: float | None = None
  embedding_scale: float = 1.0
  residual_scale: float = 1.0
  logit_divisor: float = 1.0
  tie_embeddings: bool = True
  attention_gate: bool = False
  sinks: bool = False
  recurrent: RecurrentLayers | None = None
  global_head_dim: int | None = None
  global_kv_heads: int | None = None
  global_values: bool = True
  value_norm: bool = False
  shared_layers: int = 0
  wide_shared: bool = False
  layer_inputs: int = 0
  layer_scales: bool = False
  features: tuple[int | str, ...] = ()
  lookahead: int = 0
  lookahead_rank: int = 0

  def __post_init__(self):
    for name in ("features", "windows", "unrotated"):
      object.__setattr__(self, name, tuple(getattr(self, name)))
    for name, kind in (("rope_scaling", RopeScaling),
                       ("recurrent", RecurrentLayers),
                       ("experts", ExpertConfig)):
      if isinstance(getattr(self, name), dict):  # read from a JSON file
        object.__setattr__(self, name, kind(**getattr(self, name)))
    sizes = ("vocab_size", "width", "layers", "heads", "kv_heads",
             "head_dim", "mlp_width", "context_length")
    fields.check_fields(
        self, *sizes, more=": correct the model's configuration")
    for name in sizes:
      # The same type as after reading a JSON file.
      object.__setattr__(self, name, int(getattr(self, name)))
    self._check_choices()
    self._check_features()
    self._check_sizes()
    self._check_experts()
    self._check_shared()

  def _check_choices(self) -> None:
    for name, choices in _CHOICES.items():
      if getattr(self, name) not in choices:
        raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one "
                         f"of {choices}")

  def _check_features(self) -> None:
    for name in self.features:
      if name != FINAL and name not in range(self.layers + 1):
        raise ValueError(f"features contains {name!r}; each must be {FINAL!r} "
                         f"or an integer from 0 to {self.layers}, the number "
                         "of layers")
    if len(set(self.features)) < len(self.features):
      raise ValueError(f"features is {self.features}; name each hidden state "
                       "only once")
    fields.check_at_least("lookahead", self.lookahead, 0,
                          ": 0 is a plain decoder")
    fields.check_at_least("lookahead_rank", self.lookahead_rank, 0,
                          ": 0 is a decoder without adapters")

  def _check_experts(self) -> None:
    if self.experts is None:
      return
    for name, wanted in (("gated", True), ("mlp_bias", False),
                         ("lookahead_rank", 0)):
      if getattr(self, name) != wanted:
        raise ValueError(f"{name} is {getattr(self, name)} and experts is set; "
                         f"experts require {name}={wanted}")

  def _check_sizes(self) -> None:
    for name in ("kv_heads", "global_kv_heads"):
      if self.heads % (count := getattr(self, name) or 1):
        raise ValueError(f"heads is {self.heads} and {name} {count}; heads "
                         f"must be a multiple of {name}")
    if self.windows and (len(self.windows) != self.layers
                         or min(self.windows) < 0):
      raise ValueError(f"windows is {self.windows}; it must have one number, "
                       f"at least 0, for each of the {self.layers} layers")
    if self.recurrent and len(self.recurrent.kinds) != self.layers:
      raise ValueError(f"kinds is {self.recurrent.kinds}; it must have one "
                       f"kind for each of the {self.layers} layers")
    if self.rotated % 2 or not 0 <= self.rotated <= self.head_dim:
      raise ValueError(
          f"head_dim is {self.head_dim} and rope_fraction "
          f"{self.rope_fraction}, which give {self.rotated} rotary dimensions; "
          "this number must be even and at most head_dim")

  def _check_shared(self) -> None:
    for name in ("shared_layers", "layer_inputs"):
      fields.check_at_least(name, getattr(self, name), 0)
    for name in ("global_head_dim", "global_kv_heads"):
      if getattr(self, name) is not None:
        fields.check_fields(self, name)
    if self.global_head_dim is not None and self.local_rope_theta is None:
      raise ValueError(
          f"global_head_dim is {self.global_head_dim} and local_rope_theta is "
          "None; layers of another head_dim have rotary frequencies of their "
          "own: set local_rope_theta")
    if self.recurrent and not self.has_uniform_keys:
      raise ValueError("recurrent is set, so all layers with attention must "
                       "have keys and values of one shape: leave out "
                       "shared_layers, global_head_dim and global_kv_heads")
    for i in range(self.layers):
      self.key_layer(i)  # raises for a layer that finds no keys

  @property
  def rotated(self) -> int:
    """Returns the number of rotated dimensions of a head."""
    return 0 if self.learned_positions else int(
        self.head_dim * self.rope_fraction)

  def window(self, layer: int) -> int:
    """Returns the attention window of a layer in tokens; 0 means no limit."""
    return self.windows[layer] if self.windows else 0

  def layer_kind(self, layer: int) -> str:
    """Returns the kind of a layer, see `RecurrentLayers.kinds`."""
    return self.recurrent.kinds[layer] if self.recurrent else "attention"

  @property
  def has_uniform_keys(self) -> bool:
    """Returns True if all layers have keys and values of the same shape."""
    return not self.shared_layers and len({
        self.key_shape(i) for i in range(self.layers)}) == 1

  def key_shape(self, layer: int) -> tuple[int, int]:
    """Returns the number of key-value heads of a layer, and their width."""
    if self.window(layer):
      return self.kv_heads, self.head_dim
    return (self.global_kv_heads or self.kv_heads,
            self.global_head_dim or self.head_dim)

  def has_keys(self, layer: int) -> bool:
    """Returns False if a layer reads the keys and values of another one."""
    return not self.shared_layers or layer < self.layers - self.shared_layers

  def key_layer(self, layer: int) -> int:
    """Returns the layer whose keys and values a layer reads."""
    for i in range(layer, -1, -1):
      if self.has_keys(i) and bool(self.window(i)) == bool(
          self.window(layer)):
        return i
    raise ValueError(f"shared_layers is {self.shared_layers}, but no earlier "
                     f"layer has keys for layer {layer} of {self.layers}; a "
                     "layer reads those of one that also has a window, or also "
                     f"has none, and windows is {self.windows}")

  def cache_slot(self, layer: int) -> int:
    """Returns the index of a layer in its cache.

    A cache has one list of all layers with attention and one of all others.
    """
    attends = [self.layer_kind(i) == "attention" for i in range(layer + 1)]
    return attends[:layer].count(attends[layer])

  def experts_of(self, layer: int) -> ExpertConfig | None:
    """Returns the experts of a layer, or None if it has an ordinary MLP."""
    dense = self.experts is None or layer in self.experts.dense_layers
    return None if dense else self.experts
