"""What a layer that drafts from the features of another model is made of.

At position t it holds (g_t, x_{t+1}): what the target computed of the text up
to t, and the token after it. It forecasts x_{t+2}, and what it returns stands
for g_{t+1}, which the target has not computed yet. Four families differ in
norms, fusion, chaining and head alone, which are data of a `FeatureConfig`:

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
  """Raises a `ValueError` where ids of some tokens are not sorted, or others.

  Args:
    ids: those that can be drafted; none of them: all.
    vocab_size: of the target.
  """
  if ids and (list(ids) != sorted(set(ids)) or ids[0] < 0
              or ids[-1] >= vocab_size):
    raise ValueError(f"ids must be sorted, each once, in [0, {vocab_size}); "
                     f"got {len(ids)} of them from {ids[0]} to {ids[-1]}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureConfig(TransformerConfig):
  """What a feature layer is made of; what it inherits is its decoder layer's.

  The norms of all its parts are as the inherited fields say.

  Attributes:
    layers: 1.
    target_width: of the target's residual stream.
    taps: the target's hidden states that it reads, by the names of
      `TransformerConfig.features`.
    forecasts: K, tokens of a draft; without `reuse` also the number of modules.
    entry: the taps, joined, go through a matrix to the layer's width
      (EAGLE-3's fc). Without it one tap is read as it is.
    entry_bias: that product has a bias.
    entry_norm: a norm before it, of "each" tap alone (EAGLE-3.1's fc_norm) or
      of "all" joined (norm_before_fc), or None.
    fusion: how the token's embedding e comes to the features g. "project": the
      layer reads W [e; g] (EAGLE-1, MTP); "attention": attention reads [e; g]
      and the residual stream is g (EAGLE-3); "none": no token is read.
    fusion_bias: the product of "project" has a bias.
    fusion_norms: e and g are normed before the fusion.
    norm_before_residual: with "attention", the stream is the normed g.
    attention_norm: what attention reads is normed by the layer itself.
    final_norm: before the head, the layer's "own", the "target"'s, or None.
    feed_normed: the next step is fed what the head reads, and not what was
      before the final norm (norm_output of EAGLE-3.1).
    own_embedding: a table of its own; else the target's.
    own_head: a head of its own; else the target's.
    narrow_head: of the target's head, the columns of `ids`: neither trained nor
      stored, and cut out once, when the layer is attached.
    ids: the tokens that its head knows, sorted; empty: all. They are part of
      the configuration, since no optimiser may touch them.
    reuse: one module is used again on its own output, a position further each
      time. Without it there are K modules: at position t module k reads the
      token t + k and forecasts t + k + 1.
    chained: module k reads what module k - 1 returned; else, without `reuse`,
      the target's features, as the first one does.
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
    if (self.layers != 1 or self.windows or self.features or self.lookahead
        or self.learned_positions):
      raise ValueError(
          f"a feature layer has layers {self.layers}, windows {self.windows}, "
          f"features {self.features}, lookahead {self.lookahead} and "
          f"learned_positions {self.learned_positions}; it is one layer "
          "without the others: layers=1 and nothing of these")
    if not self.taps or len(set(self.taps)) < len(self.taps):
      raise ValueError(f"taps is {self.taps}; name at least one of the "
                       "target's hidden states, and each once")
    if self.reuse and self.fusion == "none":
      raise ValueError("fusion is 'none' and reuse True; a layer that reads no "
                       "token cannot go on from its own draft: set reuse=False")
    if self.attention_norm and self.fusion == "attention":
      raise ValueError("fusion is 'attention' and attention_norm True; what "
                       "attention reads is normed by fusion_norms there: set "
                       "attention_norm=False")
    if self.entry_norm and not self.entry:
      raise ValueError(f"entry_norm is {self.entry_norm!r} and entry False; "
                       "the norm stands before that product: set entry=True")
    for name, read in (
        ("entry_bias", self.entry), ("fusion_bias", self.fusion == "project"),
        ("norm_before_residual",
         self.fusion == "attention" and self.fusion_norms)):
      if getattr(self, name) and not read:
        raise ValueError(f"{name} is True, and entry {self.entry}, fusion "
                         f"{self.fusion!r} and fusion_norms "
                         f"{self.fusion_norms} leave it nothing to do: set "
                         f"{name}=False")
    if self.reuse and not self.chained:
      raise ValueError("chained is False and reuse True; a module that is used "
                       "again reads its own output: set one of the two")
    check_ids(self.ids, self.vocab_size)

  def _check_widths(self) -> None:
    joined = len(self.taps) * self.target_width
    if not self.entry and joined != self.width:
      raise ValueError(
          f"width is {self.width} and the {len(self.taps)} taps have {joined}; "
          "without the matrix of entry=True both must be equal")
    if self.ids and not (self.own_head or self.narrow_head):
      raise ValueError(f"ids names {len(self.ids)} tokens and own_head is "
                       "False; the target's head knows all: set own_head=True, "
                       "or narrow_head=True for these columns of the target's")
    if self.narrow_head and (self.own_head or not self.ids):
      raise ValueError(f"narrow_head is True, own_head {self.own_head} and ids "
                       f"names {len(self.ids)} tokens; it is the target's head "
                       "of some tokens: set own_head=False and name them")
    if self.width == self.target_width:
      return
    for name, own in (("own_head", self.own_head),
                      ("own_embedding", self.own_embedding
                       or self.fusion == "none"),
                      ("final_norm", self.final_norm != "target")):
      if not own:
        raise ValueError(
            f"width is {self.width} and target_width {self.target_width}, and "
            f"{name} is {getattr(self, name)!r}, the target's; a layer of "
            "another width needs its own")

  @property
  def modules(self) -> int:
    """How many decoder layers there are."""
    return 1 if self.reuse else self.forecasts

  @property
  def draft_size(self) -> int:
    """How many tokens the head knows."""
    return len(self.ids) or self.vocab_size
