"""Configuration of feature layers, which draft from hidden states of a target.

A feature is one or several hidden states of the target at a position. At
position t, a feature layer reads the target's feature g_t and the next token
x_{t+1}, and predicts x_{t+2}. In the next draft step, the layer's output
replaces g_{t+1}, because the target has not computed g_{t+1} yet. Four families
differ only in normalisation, fusion, chaining and output head
(`FeatureConfig`):

  EAGLE-1 and 2   Li et al. 2024 (arXiv:2401.15077, arXiv:2406.16858)
  EAGLE-3         Li et al. 2025 (arXiv:2503.01840)
  MTP             DeepSeek-V3 (arXiv:2412.19437, section 2.2)
  parallel layers Gloeckle et al. 2024 (arXiv:2404.19737)
"""

from collections.abc import Sequence
import dataclasses
from typing import ClassVar

from specjax.models.configuration import FINAL
from specjax.models.configuration import TransformerConfig
from specjax.utils import fields

_CHOICES = {
    "entry_norm": (None, "each", "all"),
    "fusion": ("project", "attention", "none"),
    "final_norm": (None, "own", "target"),
}


def check_ids(ids: Sequence[int], vocab_size: int) -> None:
  """Raises `ValueError` unless `ids` is sorted, unique and in the vocabulary.

  Args:
    ids: tokens that can be drafted. An empty sequence means all tokens.
    vocab_size: vocabulary size of the target.
  """
  if ids and (list(ids) != sorted(set(ids)) or ids[0] < 0
              or ids[-1] >= vocab_size):
    raise ValueError(f"ids must be sorted, each once, in [0, {vocab_size}); "
                     f"it has {len(ids)} ids from {ids[0]} to {ids[-1]}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureConfig(TransformerConfig):
  """Configuration of a feature layer.

  Inherited fields describe the decoder layer and its norms.

  Attributes:
    layers: number of decoder layers of a module; 1 except in P-EAGLE. Only
      the first of them reads the token embedding.
    target_width: width of the target's residual stream.
    taps: hidden states of the target that the layer reads, by the names of
      `TransformerConfig.features`.
    forecasts: default draft length K. With `reuse=False`, also the number of
      modules.
    entry: if True, project the concatenated hidden states of `taps` to the
      layer's width (EAGLE-3's fc). If False, the concatenation is the feature.
    entry_bias: True if the entry projection has a bias.
    entry_norm: norm before the entry projection. "each" is a norm per hidden
      state (fc_norm of EAGLE-3.1). "all" is one norm of the concatenation
      (norm_before_fc). None is no norm.
    fusion: combination of the token embedding e with the feature g. With
      "project" the layer reads W [e; g] (EAGLE-1, MTP). With "attention",
      attention reads [e; g], and the residual stream is g (EAGLE-3). With
      "none" the layer reads no token.
    fusion_bias: True if W has a bias.
    fusion_norms: if True, normalise e and g before the fusion.
    norm_before_residual: if True, the normalised g is the residual stream. This
      requires fusion "attention" and `fusion_norms`.
    attention_norm: if True, normalise the input of attention in the layer.
    final_norm: norm before the LM head: "own" for a separate norm, "target" for
      the target's norm, or None.
    feed_normed: if True, the next draft step reads the output after the final
      norm (norm_output of EAGLE-3.1). If False, it reads the output before this
      norm.
    own_embedding: if True, the layer has a separate embedding table. If False,
      it uses that of the target.
    own_head: if True, the layer has a separate LM head. If False, it uses that
      of the target.
    narrow_head: if True, the LM head is the columns `ids` of the target's. The
      columns are copied when the layer is attached to a target. They are
      neither trained nor stored.
    ids: sorted ids of the tokens that can be drafted. An empty tuple means all
      tokens. `ids` is configuration and not a parameter, because optimisers
      must not change it.
    reuse: if True, one module is applied repeatedly to its own output, one
      position further each time. If False, there are K modules. At position t,
      module k reads token t + k and predicts token t + k + 1.
    chained: if True, module k reads the output of module k - 1. If False, all
      modules read the target's features.
  """

  layers: int = 1
  target_width: int
  taps: tuple[int | str, ...] = (FINAL,)
  forecasts: int
  entry: bool = False
  entry_bias: bool = False
  entry_norm: str | None = None
  fusion: str = "project"
  fusion_bias: bool = False
  fusion_norms: bool = False
  norm_before_residual: bool = False
  attention_norm: bool = False
  final_norm: str | None = None
  feed_normed: bool = False
  own_embedding: bool = False
  own_head: bool = False
  narrow_head: bool = False
  ids: tuple[int, ...] = ()
  reuse: bool = True
  chained: bool = True

  one_layer: ClassVar[bool] = True  # `layers` must be 1

  def __post_init__(self):
    super().__post_init__()
    for name in ("taps", "ids"):
      object.__setattr__(self, name, tuple(getattr(self, name)))
    fields.check_fields(self, "target_width", "forecasts")
    for name, choices in _CHOICES.items():
      if getattr(self, name) not in choices:
        raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one "
                         f"of {choices}")
    self._check_parts()
    self._check_widths()

  def _check_parts(self) -> None:
    others = ("features", "lookahead", "learned_positions", "experts",
              "unrotated", "sinks")
    if self.one_layer and self.layers != 1 or any(
        getattr(self, name) for name in others):
      values = ", ".join(f"{x} {getattr(self, x)}" for x in others)
      raise ValueError(
          f"layers is {self.layers}, {values}; for a feature layer set "
          "layers=1 and leave out the others")
    if not self.taps or len(set(self.taps)) < len(self.taps):
      raise ValueError(f"taps is {self.taps}; name at least one of the "
                       "target's hidden states, and each once")
    self._check_conflicts()
    self._check_unused()
    check_ids(self.ids, self.vocab_size)

  def _check_conflicts(self) -> None:
    """Raises `ValueError` if two options exclude each other."""
    for name, conflict, fix in (
        ("reuse", self.reuse and self.fusion == "none", "reuse=False"),
        ("attention_norm", self.attention_norm and self.fusion == "attention",
         "attention_norm=False, because fusion_norms normalises the input"),
        ("entry_norm", self.entry_norm and not self.entry, "entry=True")):
      if conflict:
        raise ValueError(
            f"{name} is {getattr(self, name)!r}, fusion is {self.fusion!r} and "
            f"entry {self.entry}, which exclude each other: set {fix}")
    if self.reuse and not self.chained:
      raise ValueError("chained is False and reuse True; a reused module reads "
                       "its own output: set chained=True or reuse=False")

  def _check_unused(self) -> None:
    """Raises `ValueError` if an option has no effect."""
    for name, read in (
        ("entry_bias", self.entry), ("fusion_bias", self.fusion == "project"),
        ("norm_before_residual",
         self.fusion == "attention" and self.fusion_norms)):
      if getattr(self, name) and not read:
        raise ValueError(f"{name} is True, but has no effect with entry "
                         f"{self.entry}, fusion {self.fusion!r} and "
                         f"fusion_norms {self.fusion_norms}: set {name}=False")

  def _check_widths(self) -> None:
    joined = len(self.taps) * self.target_width
    if not self.entry and joined != self.width:
      raise ValueError(
          f"width is {self.width}, but the {len(self.taps)} hidden states of "
          f"taps have width {joined}; both must be equal unless entry=True, "
          "which adds a projection")
    self._check_head()
    if self.width == self.target_width:
      return
    for name, own in (("own_head", self.own_head),
                      ("own_embedding", self.own_embedding
                       or self.fusion == "none"),
                      ("final_norm", self.final_norm != "target")):
      if not own:
        raise ValueError(
            f"width is {self.width} and target_width {self.target_width}, but "
            f"{name} is {getattr(self, name)!r}, which uses the target's; a "
            "layer of another width needs its own")

  def _check_head(self) -> None:
    if self.ids and not (self.own_head or self.narrow_head):
      raise ValueError(f"ids has {len(self.ids)} tokens and own_head is "
                       "False, but the target's head has all tokens: set "
                       "own_head=True, or narrow_head=True for these columns "
                       "of the target's head")
    if self.narrow_head and (self.own_head or not self.ids):
      raise ValueError(f"narrow_head is True, own_head is {self.own_head} and "
                       f"ids has {len(self.ids)} tokens; narrow_head uses the "
                       "target's head for the tokens in ids: set "
                       "own_head=False and give ids")

  @property
  def modules(self) -> int:
    """Returns the number of modules, each with one decoder layer."""
    return 1 if self.reuse else self.forecasts

  @property
  def draft_size(self) -> int:
    """Returns the number of tokens that can be drafted."""
    return len(self.ids) or self.vocab_size
