"""Files of published drafters, and the records of their layouts."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import re
from typing import Any

import chex
import numpy as np

from specjax.methods.networks import Heads
from specjax.methods.networks import lm_head
from specjax.models.architectures import ARCHITECTURES
from specjax.models.configuration import TransformerConfig
from specjax.models.configuration_keys import Keys
from specjax.models.configuration_keys import whole_numbers
from specjax.models.export import express
from specjax.models.safetensors_files import StoredTensor
from specjax.models.tensor_layouts import Table
from specjax.models.transformer import Transformer

_LAYERS = ("llama", "mistral", "qwen2", "qwen3")  # architectures of drafters
# Keys that training tools write and that do not change the computation.
_NOTES = """
    attention_mode base_model_name_or_path confidence_head_alpha
    decoder_sparse_step draft_num_hidden_layers embed_requires_grad
    has_no_defaults_at_init max_anchors max_window_layers num_anchors
    speculators_config speculators_model_type speculators_version
    step_loss_decay target_model_name_or_path target_model_type
    target_vocab_size ttt_length
""".split()
DEPTH = 5  # draft length if the file has none
# Copies of the target's tensors; training tools read them, drafting does not.
OF_VERIFIER = ("verifier_norm.weight", "verifier_lm_head.weight")
WEIGHTS = "model.safetensors"
_NEAR = dict(rtol=2.0**-7, atol=1e-4)  # rounding to bfloat16


@dataclasses.dataclass
class Found:
  """Opened files of a published drafter, and the drafter's target.

  Attributes:
    source: name of the directory in errors.
    config: configuration of the drafter.
    tensors: tensors of the drafter by name.
    target: target model.
    target_params: parameters of the target, or None.
    layout: name of the layout.
    used: names of tensors that were read although no parameter of the heads is
      stored in them, such as a map of token ids.
  """

  source: str
  config: Mapping[str, Any]
  tensors: Mapping[str, StoredTensor]
  target: Transformer
  target_params: Any = None
  layout: str = ""
  used: set[str] = dataclasses.field(default_factory=set)

  def keys(self, outer: Keys | None = None, place: str = "") -> Keys:
    """Returns the configuration, or a part of it, with defaults.

    Args:
      outer: keys around a part, which may also contain keys of the part.
      place: key of the part in `outer`.
    """
    config = self.config if outer is None else outer.mapping(place)
    model_type = config.get("model_type")
    known = ARCHITECTURES.get(model_type) if isinstance(
        model_type, str) else None
    keys = Keys(config, f"the configuration of {self.source}",
                known.defaults if known else {}, place=place, outer=outer)
    keys.ignore(*_NOTES, "tie_word_embeddings")
    # The model type of an enclosing configuration names a project's drafter,
    # not an architecture.
    if outer is not None:
      keys.trust("model_type", model_type)
    for name, size in (("num_target_layers", self.target.config.layers),
                       ("target_hidden_size", self.target.config.width)):
      self.check(name, keys(name, size), size)
    return keys

  def layer(self, keys: Keys, layers: int | None = None) -> dict[str, Any]:
    """Returns the fields of `TransformerConfig` of the drafter's layers.

    Args:
      keys: keys of the configuration.
      layers: number of layers in the tensors. It replaces the configuration's
        number, which may be the target's. None: the configuration's number.

    Raises:
      ValueError: the layers are unsupported, or belong to another target.
    """
    self._check_dense()
    model_type = keys("model_type", "llama")
    if model_type not in _LAYERS:
      self.fail(f"has layers of the architecture {model_type!r}; specjax "
                f"supports drafters with layers of {', '.join(_LAYERS)}")
    if layers is not None:
      _trust_layers(keys, layers)
    if not keys("use_sliding_window"):
      keys("sliding_window")  # a copy of the target's value, not used
    fields = ARCHITECTURES[model_type].read(keys)
    config = TransformerConfig(**fields)
    if any(0 < size < config.context_length for size in config.windows):
      self.fail(f"has layers with a window of {max(config.windows)} tokens; "
                "draft layers of specjax attend to the complete sequence: take "
                "another drafter")
    for name, bias in (("qkv_bias", "q_proj.bias"), ("out_bias", "o_proj.bias"),
                       ("mlp_bias", "down_proj.bias")):
      fields[name] = any(x.endswith(bias) for x in self.tensors)
    fields.pop("windows", None)
    # Unscaled rotary embeddings work at any position, so the drafter does not
    # limit the length of a sequence.
    if config.rope_scaling is None:
      fields["context_length"] = max(config.context_length,
                                     self.target.context_length)
    self.check("vocab_size", config.vocab_size, self.target.vocab_size)
    return fields

  def _check_dense(self) -> None:
    """Raises a `ValueError` if a tensor is of an unsupported kind of layer."""
    for part, kind in (("mlp.experts.", "a mixture of experts"),
                       ("mlp.gate.", "a mixture of experts"),
                       ("kv_a_proj", "latent attention (MLA)")):
      for name in self.tensors:
        if part in name:
          self.fail(f"has the tensor {name}, of {kind}, which specjax does not "
                    "support; take a drafter with dense layers")

  def check_target(self, keys: Keys) -> None:
    """Checks a configuration that must equal the target's.

    Raises:
      ValueError: the architecture is not supported, or the target differs.
    """
    self.check_sizes(keys.choice("model_type", ARCHITECTURES).read(keys))

  def check_sizes(self, fields: Mapping[str, Any]) -> None:
    """Raises a `ValueError` if these fields differ from the target's."""
    for name in ("layers", "width", "vocab_size"):
      self.check(name, fields[name], getattr(self.target.config, name))

  def check(self, name: str, value: int, wanted: int) -> None:
    """Raises a `ValueError` if a size differs from the target's."""
    if value != wanted:
      self.fail(f"has {name} {value} and the target {wanted}; give the target "
                "for which the drafter was made")

  def fail(self, what: str) -> None:
    """Raises a `ValueError` whose message is the directory's name and `what`.
    """
    raise ValueError(f"{self.source} {what}")

  def count(self, pattern: str) -> int:
    """Returns 1 + the largest number in the tensors' names; 0 without one.

    Args:
      pattern: regular expression whose first group matches the number.
    """
    return 1 + max((int(match[1]) for match in (
        re.match(pattern, name) for name in self.tensors) if match), default=-1)

  def columns(self, name: str) -> int:
    """Returns the number of columns of a required tensor."""
    return self.shape(name)[-1]

  def shape(self, name: str) -> tuple[int, ...]:
    """Returns the shape of a required tensor."""
    if name not in self.tensors:
      self.fail(f"has no tensor {name}, which the layout {self.layout!r} "
                "requires; give another layout, or download the drafter again")
    return self.tensors[name].shape

  def own(self, name: str, part: str, ids: Sequence[int] = (),
          more: int = 0) -> bool:
    """Returns True if a tensor exists and is not a copy of the target's.

    Without the target's parameters an existing tensor is assumed to differ.

    Args:
      name: name of the tensor.
      part: target's matrix, "embedding" or "head".
      ids: tokens of the tensor's rows; (): all.
      more: number of additional rows after these.
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
    """Drops a tensor that must be a copy of the target's.

    The arguments are as in `own`.

    Raises:
      ValueError: the tensor differs from the target's.
    """
    if self.target_params is not None and self.own(name, part, ids, more):
      self.fail(f"has a tensor {name} that differs from the target's, so it "
                "was made for other weights: give the target for which the "
                "drafter was made")
    self.used.add(name)


def _trust_layers(keys: Keys, layers: int) -> None:
  """Replaces the number of layers, and a list of equal types of layers."""
  keys.trust("num_hidden_layers", layers)
  types = keys("layer_types")
  if isinstance(types, list) and len(types) != layers and (
      types[1:] == types[:-1]):
    keys.trust("layer_types", types[:1] * layers)


def _same(heads: Heads) -> Heads:
  return heads


def _same_params(form: Heads, heads: Heads, params: chex.ArrayTree,
                 target_params: chex.ArrayTree) -> Any:
  del form, heads, target_params
  return params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Writer:
  """Conversion of heads to a layout that servers read.

  A writer does not check that the layout can store the heads. `export_drafter`
  reads the written configuration again, and raises an error if a field of the
  heads is lost.

  Attributes:
    config: function of the converted heads; returns the keys of config.json.
    form: function of the heads; returns them as the layout stores them, with
      defaults for unused fields.
    params: function `(form, heads, params, target_params)` that returns the
      parameters of `form`.
    ids: function of the heads; returns the ids of a reduced vocabulary, or ().
    input_size: function of the heads; returns the size of the tensor `t2d`, a
      mask over the target's tokens.
    stores_head: True if a drafter with a reduced vocabulary stores its columns
      of the target's head, because vLLM can share only a complete head.
  """

  config: Callable[[Any], dict[str, Any]]
  form: Callable[[Any], Any] = _same
  params: Callable[[Any, Any, Any, Any], Any] = _same_params
  ids: Callable[[Any], Sequence[int]] = lambda heads: ()
  input_size: Callable[[Any], int] = lambda heads: heads.vocab_size
  stores_head: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
  """Format of the files of a published drafter.

  Attributes:
    kind: kind of the heads.
    read: function of the files; returns the heads.
    names: names of the tensors.
    write: inverse of `read`. None: specjax only reads this layout.
    sizes: function `(heads, target)` that returns the values of the words in
      braces in `names`.
    file: name of the file with the weights.
    algorithm: value of the key `speculators_model_type` in configurations of
      this layout; "": none.
    architectures: possible first entries of the key `architectures`.
    sign: pattern at the start of a tensor name that identifies this layout.
    prefix: prefix of the drafter's tensor names, which `names` omits. Tensors
      without the prefix are the target's.
    within: pattern at the start of the drafter's tensor names, which `names`
      includes. Tensors that do not match are the target's.
  """

  kind: str
  read: Callable[[Found], Heads]
  names: Table
  write: Writer | None = None
  sizes: Callable[[Any, Transformer], dict[str, int]] = (
      lambda heads, target: {})
  file: str = WEIGHTS
  algorithm: str = ""
  architectures: tuple[str, ...] = ()
  sign: str = ""
  prefix: str = ""
  within: str = ""

  @property
  def in_target(self) -> bool:
    """True if the drafter is in the files of its target."""
    return bool(self.prefix or self.within)

  def known_by(self, config: Mapping[str, Any], tensors: Mapping[str, Any]
               ) -> bool:
    """Returns True if a configuration or names of tensors have this layout."""
    algorithm = config.get("speculators_model_type")
    if algorithm or self.algorithm:
      return algorithm == self.algorithm
    names = config.get("architectures") or [""]
    if isinstance(names, list) and names[0] in self.architectures:
      return True
    return bool(self.sign) and any(re.match(self.sign, x) for x in tensors)


def check_target(found: Found, heads: Any) -> None:
  """Raises `ValueError` unless heads have the target's width and vocabulary."""
  found.check("width", heads.width, found.target.config.width)
  found.check("vocab_size", heads.vocab_size, found.target.vocab_size)


def reduced_vocabulary(found: Found, keys: Keys, size: int
                       ) -> tuple[int, ...]:
  """Returns the token ids of a reduced vocabulary; () if it is complete."""
  complete = found.target.vocab_size
  if keys.size("draft_vocab_size", size) != size:
    found.fail(f"has draft_vocab_size {keys('draft_vocab_size')}, but {size} "
               "rows in lm_head.weight; both must be equal: download it again")
  found.used.update({"d2t", "t2d"})
  if size == complete:
    _check_complete(found)
    return ()
  if "d2t" not in found.tensors:
    found.fail(f"has no tensor d2t, which maps its {size} tokens to the "
               f"target's {complete}: download it again")
  ids = _stored_ids(found)
  if len(ids) != size or (np.diff(ids) < 1).any() or not (
      0 <= ids[0] and ids[-1] < complete):
    found.fail(f"has ids from {ids.min()} to {ids.max()} in d2t, after row "
               f"numbers are added; it must have {size} of the ids 0 to "
               f"{complete - 1} in order: if it contains the ids themselves, "
               "subtract the row numbers")
  return tuple(ids.tolist())


def _stored_ids(found: Found) -> np.ndarray:
  """Returns the target's id of every token of a reduced vocabulary.

  The tensor `d2t` stores each id minus its row number. The tensor `t2d`, a mask
  over the target's tokens, must agree with it if it exists.
  """
  offsets = np.asarray(found.tensors["d2t"].read(), np.int64)
  ids = np.arange(len(offsets)) + offsets
  if "t2d" not in found.tensors:
    return ids
  known = found.tensors["t2d"].read()
  # In one project `t2d` is not a mask: it has the token's row number in `d2t`,
  # or -1 for a token outside of the reduced vocabulary.
  known = np.flatnonzero(known >= 0 if (known < 0).any() else known)
  # Some tools store the ids in `d2t` without subtracting row numbers.
  if not (np.array_equal(known, ids) or np.array_equal(known, offsets)):
    found.fail("has tensors d2t and t2d with different tokens; download it "
               "again")
  return known


def _check_complete(found: Found) -> None:
  """Raises `ValueError` if `d2t` of a complete vocabulary changes an id."""
  if "d2t" not in found.tensors:
    return
  offsets = np.asarray(found.tensors["d2t"].read(), np.int64)
  if offsets.any() and not np.array_equal(offsets, np.arange(len(offsets))):
    found.fail("has a tensor d2t that changes the ids of a complete "
               "vocabulary; specjax supports only the target's ids")


def num_steps(keys: Keys) -> int:
  """Returns the draft length in a configuration of the project speculators."""
  name = "proposal_methods"
  methods = keys.mapping("speculators_config").get(name) or [{}]
  if not isinstance(methods, list) or not isinstance(methods[0], Mapping):
    raise ValueError(f"{keys.source} has {methods!r} for {name}; it must be a "
                     "list of objects")
  return Keys(methods[0], f"{keys.source}, in {name},").size(
      "speculative_tokens", DEPTH)


def layer_keys(heads: Any, **changed: Any) -> dict[str, Any]:
  """Returns the keys of config.json for the draft layers.

  Args:
    heads: heads with the fields of `TransformerConfig`.
    **changed: fields that replace those of the heads.
  """
  fields = {field.name: getattr(heads, field.name)
            for field in dataclasses.fields(TransformerConfig)}
  model_type, keys = express(TransformerConfig(**fields | dict(
      tie_embeddings=False) | changed))
  return {"model_type": model_type, **keys}


def speculators_keys(heads: Heads, algorithm: str, architecture: str,
                     layers: dict[str, Any], **keys: Any) -> dict[str, Any]:
  """Returns the keys of a speculators configuration, without the target's."""
  return {
      "speculators_model_type": algorithm, "architectures": [architecture],
      "transformer_layer_config": layers, **keys,
      "speculators_config": {
          "algorithm": algorithm, "default_proposal_method": "greedy",
          "proposal_methods": [{"proposal_type": "greedy",
                                "speculative_tokens": heads.num_forecasts}]}}


NAME_THEM = ("put their numbers into its config.json as "
             "eagle_aux_hidden_state_layer_ids, in which i is the state that "
             "layer i reads")
# Keys that list hidden states of the target: (True if the key is in a nested
# part of the configuration, name, offset). A number in the list plus the offset
# is the number of the layer that reads the hidden state.
_TAPS = ((True, "eagle_aux_hidden_state_layer_ids", 1),
         (True, "target_layer_ids", 1),
         (False, "eagle_aux_hidden_state_layer_ids", 0),
         (False, "aux_hidden_state_layer_ids", 0),
         (False, "target_layer_ids", 1))


def named_taps(found: Found, keys: Keys, inner: Keys, place: str
          ) -> tuple[int, ...] | None:
  """Returns the hidden states that a configuration lists; None without a list.

  A state is numbered here by the layer that reads it, as in vLLM and
  speculators. SpecForge, SGLang and DeepSpec number it by the layer that
  returns it, which is one less. Some files have the list in two places.

  Args:
    found: files of the drafter.
    keys: keys of the configuration.
    inner: keys of a part of the configuration.
    place: key of this part.

  Raises:
    ValueError: the two places differ.
  """
  given = {}
  for within, name, shift in _TAPS:
    part = keys.mapping(place) if within else found.config
    for config in (keys, inner):
      config.ignore(name)
    label = f"{place}.{name}" if within else name
    ids = whole_numbers(keys.source, label, part.get(name))
    if ids:
      given[label] = ids, tuple(i + shift for i in ids)
  if not given:
    return None
  ids, taps = zip(*given.values())
  if len(set(ids)) > 1 and len(set(taps)) > 1:
    keys.agreed(dict(zip(given, ids)))
  return taps[0]


def check_taps(found: Found, taps: Sequence[int], normed: bool = False) -> None:
  """Raises a `ValueError` if the target does not have these hidden states."""
  layers = found.target.config.layers
  for tap in taps:
    if tap not in range(layers + 1):
      found.fail(f"reads the hidden state before layer {tap}; the target has "
                 f"{layers} layers")
    if normed and tap == layers:
      found.fail(f"reads the output of layer {layers - 1}, the target's last, "
                 "after the final norm (as transformers returns it); specjax "
                 "has only states before this norm: take another drafter")
