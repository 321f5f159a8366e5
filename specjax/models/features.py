"""Configuration of layers that draft from the features of a target.

A feature is one or several hidden states of the target at a position. At
position t a feature layer reads the target's feature g_t and the next token
x_{t+1}, and predicts x_{t+2}. Its output replaces g_{t+1}, which the target has
not computed yet. Four families differ only in normalisation, fusion, chaining
and output head (`FeatureConfig`):

  EAGLE-1 and 2   Li et al. 2024 (arXiv:2401.15077, arXiv:2406.16858)
  EAGLE-3         Li et al. 2025 (arXiv:2503.01840)
  MTP             DeepSeek-V3 (arXiv:2412.19437, section 2.2)
  parallel layers Gloeckle et al. 2024 (arXiv:2404.19737)
"""

from collections.abc import Sequence
import dataclasses

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
    ids: tokens that can be drafted; empty: all.
    vocab_size: vocabulary size of the target.
  """
  if ids and (list(ids) != sorted(set(ids)) or ids[0] < 0
              or ids[-1] >= vocab_size):
    raise ValueError(f"ids must be sorted, each once, in [0, {vocab_size}); "
                     f"it has {len(ids)} ids from {ids[0]} to {ids[-1]}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureConfig(TransformerConfig):
  """Configuration of a feature layer.

  Inherited fields describe its decoder layer and its norms.

  Attributes:
    layers: number of decoder layers of a module, always 1.
    target_width: width of the target's residual stream.
    taps: hidden states of the target that are read, by the names of
      `TransformerConfig.features`.
    forecasts: default draft length K; without `reuse` also the number of
      modules.
    entry: projects the concatenated hidden states of `taps` to the layer's
      width (EAGLE-3's fc). Without it, a single hidden state is read unchanged.
    entry_bias: bias of this projection.
    entry_norm: norm before this projection. "each": a norm per hidden state
      (fc_norm of EAGLE-3.1). "all": one norm of the concatenation
      (norm_before_fc). None: no norm.
    fusion: combination of the token embedding e with the feature g. "project":
      the layer reads W [e; g] (EAGLE-1, MTP). "attention": attention reads
      [e; g], and the residual stream is g (EAGLE-3). "none": no token is read.
    fusion_bias: bias of W.
    fusion_norms: normalises e and g before the fusion.
    norm_before_residual: uses the normalised g as the residual stream, with
      fusion "attention".
    attention_norm: normalises the input of attention in the layer.
    final_norm: norm before the LM head: the layer's "own", the "target"'s, or
      None.
    feed_normed: feeds the output after the final norm to the next draft step
      (norm_output of EAGLE-3.1). Otherwise the output before this norm.
    own_embedding: separate embedding table, else the target's.
    own_head: separate LM head, else the target's.
    narrow_head: uses the columns `ids` of the target's LM head. They are copied
      when the layer is attached to a target, and neither trained nor stored.
    ids: tokens that can be drafted, sorted; empty: all. They are configuration
      because optimisers must not change them.
    reuse: applies one module repeatedly to its own output, one position further
      each time. Without it there are K modules: at position t, module k reads
      token t + k and predicts token t + k + 1.
    chained: module k reads the output of module k - 1. Otherwise all modules
      read the target's features.
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
    others = (self.windows, self.features, self.lookahead,
              self.learned_positions)
    if self.layers != 1 or any(others):
      raise ValueError(
          f"layers is {self.layers}, windows {self.windows}, features "
          f"{self.features}, lookahead {self.lookahead} and learned_positions "
          f"{self.learned_positions}; for a feature layer set layers=1 and "
          "leave out the others")
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
    """Raises `ValueError` if the fusion or the entry ignores an option."""
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
            f"{name} is {getattr(self, name)!r}, so the target's is used; a "
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
    """Returns the number of decoder layers."""
    return 1 if self.reuse else self.forecasts

  @property
  def draft_size(self) -> int:
    """Returns the number of tokens that can be drafted."""
    return len(self.ids) or self.vocab_size
