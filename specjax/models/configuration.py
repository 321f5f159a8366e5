"""What a decoder is made of, as data."""

import dataclasses

from specjax.models.rotary import RopeScaling
from specjax.utils import fields

FINAL = "final"  # the name of the hidden state that the LM head reads
_CHOICES = {
    "activation": ("silu", "gelu", "gelu_tanh"),
    "norm": ("rms", "layer"),
    "qk_norm": (None, "head", "all"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
  """The shape of a decoder. Sizes are in units of their own axis.

  Attributes:
    vocab_size: V.
    width: D, of the residual stream.
    layers: L.
    heads: query heads.
    kv_heads: key-value heads, a divisor of `heads`.
    head_dim: width of one head; as much of it as is rotated must be even.
    mlp_width: inner width of the MLP.
    context_length: longest sequence the model was made for, in tokens.
    rope_theta: base of the rotary frequencies.
    rope_fraction: share of a head's dimensions that is rotated, from the first.
    rope_scaling: how the frequencies are stretched, or None.
    local_rope_theta: base, without stretching, of the layers with a window;
      None: as the others (Gemma 3 has two).
    learned_positions: a table of `context_length` positions is added to the
      embedding, and nothing is rotated (GPT-2).
    norm: "rms", or "layer", which has a bias.
    norm_epsilon: added to the mean square or the variance.
    norm_plus_one: norms multiply by 1 + their scale (Gemma).
    pre_norm: attention and MLP read a normed residual stream.
    post_norm: what attention and MLP return is normed (Gemma 2, OLMo-2).
    parallel_residual: the MLP reads what attention reads, and both are added
      together (GPT-NeoX).
    qk_norm: an RMSNorm of queries and keys before they are rotated: "head" of
      each head alone (Qwen 3), "all" of all heads together (OLMo-2), or None.
    qkv_bias: query, key and value have a bias.
    out_bias: the output of attention has one.
    mlp_bias: the products of the MLP have one.
    gated: the MLP is down(activation(gate(x)) * up(x)), and without it
      down(activation(up(x))).
    activation: "silu", "gelu" or "gelu_tanh".
    windows: for each layer, how many tokens back one sees, itself included; 0:
      all. Empty: all layers see all.
    attention_softcap: c of c tanh(x / c) on attention's scores (Gemma 2).
    logit_softcap: the same on the logits.
    query_scale: factor on attention's scores; None: head_dim^(-1/2).
    embedding_scale: factor on the embeddings (Gemma).
    tie_embeddings: the output head is the embedding table.
    features: the hidden states that are joined, in this order, into `hidden`.
      A number i is the residual stream before layer i, counted from 0: 0 is
      the embedding and `layers` what the last layer returns. "final" is that
      after the final norm, as the LM head reads it. Empty: "final" alone.
      (This is the index of vLLM and of Hugging Face's `hidden_states`; "the
      output of layer i" of other projects is i + 1 here.)
    lookahead: look-ahead tokens, whose ids are V..V + lookahead - 1; they are
      read and never predicted.
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
  windows: tuple[int, ...] = ()
  attention_softcap: float | None = None
  logit_softcap: float | None = None
  query_scale: float | None = None
  embedding_scale: float = 1.0
  tie_embeddings: bool = True
  features: tuple[int | str, ...] = ()
  lookahead: int = 0

  def __post_init__(self):
    for name in ("features", "windows"):
      object.__setattr__(self, name, tuple(getattr(self, name)))
    if isinstance(self.rope_scaling, dict):  # of a JSON file
      object.__setattr__(self, "rope_scaling", RopeScaling(**self.rope_scaling))
    sizes = ("vocab_size", "width", "layers", "heads", "kv_heads",
             "head_dim", "mlp_width", "context_length")
    fields.check_fields(
        self, *sizes, more=": correct the model's configuration")
    for name in sizes:
      object.__setattr__(self, name, int(getattr(self, name)))  # as JSON has it
    self._check_choices()
    self._check_features()
    self._check_sizes()

  def _check_choices(self) -> None:
    for name, choices in _CHOICES.items():
      if getattr(self, name) not in choices:
        raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one "
                         f"of {choices}")

  def _check_features(self) -> None:
    for name in self.features:
      if name != FINAL and name not in range(self.layers + 1):
        raise ValueError(f"features holds {name!r}; it must be {FINAL!r} or a "
                         f"whole number from 0 to the {self.layers} layers")
    if len(set(self.features)) < len(self.features):
      raise ValueError(f"features is {self.features}; name each state once")
    fields.check_at_least("lookahead", self.lookahead, 0,
                          ": 0 is a plain decoder")

  def _check_sizes(self) -> None:
    if self.heads % self.kv_heads:
      raise ValueError(f"heads is {self.heads} and kv_heads {self.kv_heads}; "
                       "heads must be a multiple of kv_heads")
    if self.windows and (len(self.windows) != self.layers
                         or min(self.windows) < 0):
      raise ValueError(f"windows is {self.windows}; it must hold a number of "
                       f"at least 0 for each of the {self.layers} layers")
    if self.rotated % 2 or not 0 <= self.rotated <= self.head_dim:
      raise ValueError(
          f"head_dim is {self.head_dim} and rope_fraction "
          f"{self.rope_fraction}; rotary positions need an even number of "
          f"dimensions within a head and not {self.rotated}")

  @property
  def rotated(self) -> int:
    """How many dimensions of a head are rotated."""
    return 0 if self.learned_positions else int(
        self.head_dim * self.rope_fraction)

  @property
  def group(self) -> int:
    """Query heads of a key-value head."""
    return self.heads // self.kv_heads

  def window(self, layer: int) -> int:
    """How many tokens back a layer sees; 0: all."""
    return self.windows[layer] if self.windows else 0
