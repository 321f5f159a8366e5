"""What a directory holds, and what a reading has looked at of it."""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import re
from typing import Any

import numpy as np

from specjax.methods.networks import lm_head
from specjax.models.configuration import TransformerConfig
from specjax.models.published.architectures import ARCHITECTURES
from specjax.models.published.keys import Keys
from specjax.models.safetensors_files import StoredTensor
from specjax.models.transformer import Transformer

_LAYERS = ("llama", "mistral", "qwen2", "qwen3")  # that drafters are made of
# What trainers note beside that; it says nothing about what is computed.
_NOTES = """
    attention_mode base_model_name_or_path confidence_head_alpha
    decoder_sparse_step draft_num_hidden_layers embed_requires_grad
    has_no_defaults_at_init max_anchors max_window_layers num_anchors
    speculators_config speculators_model_type speculators_version
    step_loss_decay target_model_name_or_path target_model_type
    target_vocab_size ttt_length
""".split()
_NEAR = dict(rtol=2.0**-7, atol=1e-4)  # what bfloat16 leaves of a number


@dataclasses.dataclass
class Found:
  """The files of a drafter, and the target that it is for.

  Attributes:
    source: what errors call the directory.
    config: its configuration.
    tensors: by name, those of the drafter alone.
    target: the model that is drafted for.
    target_params: its parameters, or None.
    layout: the name of the layout that it is read by.
    used: the tensors that the reading has accounted for, beside parameters.
  """

  source: str
  config: Mapping[str, Any]
  tensors: Mapping[str, StoredTensor]
  target: Transformer
  target_params: Any = None
  layout: str = ""
  used: set[str] = dataclasses.field(default_factory=set)

  def keys(self, outer: Keys | None = None, place: str = "") -> Keys:
    """The configuration, or a part of it, with an architecture's defaults.

    Args:
      outer: the configuration around a part. Keys of the part may be in it,
        too.
      place: the key of the part in `outer`.
    """
    config = self.config if outer is None else outer.mapping(place)
    model_type = config.get("model_type")
    known = ARCHITECTURES.get(model_type) if isinstance(
        model_type, str) else None
    keys = Keys(config, f"the configuration of {self.source}",
                known.defaults if known else {}, place=place, outer=outer)
    keys.ignore(*_NOTES, "tie_word_embeddings")
    if outer is not None:  # says there of which project the file is
      keys.trust("model_type", model_type)
    for name, size in (("num_target_layers", self.target.config.layers),
                       ("target_hidden_size", self.target.config.width)):
      self.check(name, keys(name, size), size)
    return keys

  def layer(self, keys: Keys, layers: int | None = None) -> dict[str, Any]:
    """The fields of `TransformerConfig` of the drafter's layers.

    Args:
      keys: the keys of the configuration.
      layers: the number of layers in the tensors, because the configuration may
        have the target's number. None: the configuration's number.

    Raises:
      ValueError: the layers are of a kind that specjax does not have, or for
        another target.
    """
    for part, what in (("mlp.experts.", "a mixture of experts"),
                       ("mlp.gate.", "a mixture of experts"),
                       ("kv_a_proj", "latent attention (MLA)")):
      for name in self.tensors:
        if part in name:
          self.fail(f"has the tensor {name}, of {what}, which specjax does not "
                    "have; take a drafter of dense layers")
    model_type = keys("model_type", "llama")
    if model_type not in _LAYERS:
      self.fail(f"is made of layers of the architecture {model_type!r}; "
                f"specjax reads drafters of {', '.join(_LAYERS)}")
    if layers is not None:
      keys.trust("num_hidden_layers", layers)
      types = keys("layer_types")
      if isinstance(types, list) and len(types) != layers and (
          types[1:] == types[:-1]):
        keys.trust("layer_types", types[:1] * layers)
    if not keys("use_sliding_window"):
      keys("sliding_window")  # what the target has; plain layers have none
    fields = ARCHITECTURES[model_type].read(keys)
    config = TransformerConfig(**fields)
    if any(0 < size < config.context_length for size in config.windows):
      self.fail(f"has layers with a window of {max(config.windows)} tokens; "
                "draft layers see the whole text here: take another drafter")
    for name, bias in (("qkv_bias", "q_proj.bias"), ("out_bias", "o_proj.bias"),
                       ("mlp_bias", "down_proj.bias")):
      fields[name] = any(x.endswith(bias) for x in self.tensors)
    fields.pop("windows", None)
    if config.rope_scaling is None:  # then it has no longest text
      fields["context_length"] = max(config.context_length,
                                     self.target.context_length)
    self.check("vocab_size", config.vocab_size, self.target.vocab_size)
    return fields

  def check_target(self, keys: Keys) -> None:
    """Looks at the keys of a configuration that are the target's.

    Raises:
      ValueError: it is of an architecture that specjax does not have, or of
        another target.
    """
    self.check_sizes(keys.choice("model_type", ARCHITECTURES).read(keys))

  def check_sizes(self, fields: Mapping[str, Any]) -> None:
    """Raises a `ValueError` where these fields are not the target's."""
    for name in ("layers", "width", "vocab_size"):
      self.check(name, fields[name], getattr(self.target.config, name))

  def check(self, name: str, value: int, wanted: int) -> None:
    """Raises a `ValueError` where a size is not the target's."""
    if value != wanted:
      self.fail(f"has {name} {value} and the target {wanted}; give the target "
                "that it was made for")

  def fail(self, what: str) -> None:
    """Raises the `ValueError` that says `what` of the directory."""
    raise ValueError(f"{self.source} {what}")

  def count(self, pattern: str) -> int:
    """One more than the largest number at the group of a pattern."""
    return 1 + max((int(match[1]) for match in (
        re.match(pattern, name) for name in self.tensors) if match), default=-1)

  def columns(self, name: str) -> int:
    """The columns of a tensor that must be there."""
    return self.shape(name)[-1]

  def shape(self, name: str) -> tuple[int, ...]:
    """The sizes of a tensor that must be there."""
    if name not in self.tensors:
      self.fail(f"has no tensor {name}, which the layout {self.layout!r} asks "
                "for; name another layout if it is of another, or download it "
                "again")
    return self.tensors[name].shape

  def own(self, name: str, part: str, ids: Sequence[int] = (),
          more: int = 0) -> bool:
    """Whether a tensor is more than a copy of the target's.

    Without the target's parameters nobody knows, and it is kept.

    Args:
      name: of the tensor, which need not be there.
      part: "embedding" or "head".
      ids: the tokens whose rows it has; (): all.
      more: rows after these, which are not the target's.
    """
    if name not in self.tensors:
      return False
    if self.target_params is None:
      return True
    ours = (self.target_params["embedding"] if part == "embedding"
            else lm_head(self.target_params).T)
    if ids:
      ours = ours[np.array(ids)]
    theirs, rows = self.tensors[name], len(ours)
    same = theirs.shape == (rows + more, *ours.shape[1:]) and np.allclose(
        np.asarray(ours, np.float32),
        theirs.read()[:rows].astype(np.float32), **_NEAR)
    if same:
      self.used.add(name)
    return not same

  def copy(self, name: str, part: str, ids: Sequence[int] = (),
           more: int = 0) -> None:
    """Leaves out a tensor that its trainer copied from the target, as `own`.

    Raises:
      ValueError: it is another one than the target's, as far as that is known.
    """
    if self.target_params is not None and self.own(name, part, ids, more):
      self.fail(f"has a tensor {name} that is not the target's; the drafter "
                "is for other weights: give the target that it was made for")
    self.used.add(name)
