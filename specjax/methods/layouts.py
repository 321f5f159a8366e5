"""Helpers that read and write the files of published drafters.

A layout is the file format of one project, for example the tensor names and
configuration keys of SpecForge's EAGLE-3 drafters. A `Layout` object describes
one layout. A `Found` object contains the opened files of one drafter.
"""

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
from specjax.models.architectures import without_idle_windows
from specjax.models.configuration import TransformerConfig
from specjax.models.configuration_keys import Keys
from specjax.models.configuration_keys import whole_numbers
from specjax.models.export import express
from specjax.models.safetensors_files import StoredTensor
from specjax.models.settings import FULL
from specjax.models.settings import layer_windows
from specjax.models.settings import SLIDING
from specjax.models.tensor_layouts import Table
from specjax.models.transformer import Transformer

# Supported architectures of a drafter's transformer layers.
_LAYERS = ("llama", "mistral", "qwen2", "qwen3", "qwen3_next", "qwen3_5_text",
           "mimo")
# Keys that training tools write to the configuration. Drafting ignores them.
_NOTES = """
    attention_mode base_model_name_or_path confidence_head_alpha
    decoder_sparse_step draft_num_hidden_layers embed_requires_grad
    has_no_defaults_at_init max_anchors max_window_layers num_anchors
    speculators_config speculators_model_type speculators_version
    step_loss_decay target_model_name_or_path target_model_type
    target_vocab_size ttt_length
""".split()
DEPTH = 5  # default draft length, for configurations without a draft length
# Copies of the target's final norm and LM head in a drafter's files. Training
# tools need these copies. specjax does not load them, because drafting uses the
# target's own parameters.
OF_VERIFIER = ("verifier_norm.weight", "verifier_lm_head.weight")
WEIGHTS = "model.safetensors"
_NEAR = dict(rtol=2.0**-7, atol=1e-4)  # tolerance for rounding to bfloat16


@dataclasses.dataclass
class Found:
  """Opened files of a published drafter, and the drafter's target.

  Attributes:
    source: directory of the files, for error messages.
    config: contents of the drafter's config.json.
    tensors: tensors of the drafter by name.
    target: target model.
    target_params: parameters of the target. If they are None, copies of the
      target's matrices in the files are not compared with them.
    layout: name of the file layout, a key of `published.LAYOUTS`.
    used: names of tensors that do not become parameters of the drafter but are
      not an error, such as a map of token ids. Any other unused tensor is an
      error.
  """

  source: str
  config: Mapping[str, Any]
  tensors: Mapping[str, StoredTensor]
  target: Transformer
  target_params: Any = None
  layout: str = ""
  used: set[str] = dataclasses.field(default_factory=set)

  def keys(self, outer: Keys | None = None, place: str = "") -> Keys:
    """Returns a reader of the configuration, or of a nested part of it.

    For missing keys, the reader returns the defaults of the architecture. This
    method also compares sizes of the target in the configuration with those of
    `target`.

    Args:
      outer: reader of the configuration that contains the nested part; None for
        the configuration itself. The returned reader searches both levels for a
        key, because some files store keys of the nested part on the outer
        level.
      place: key of the nested part in `outer`.

    Raises:
      ValueError: a size of the target differs.
    """
    config = self.config if outer is None else outer.mapping(place)
    model_type = config.get("model_type")
    known = ARCHITECTURES.get(model_type) if isinstance(
        model_type, str) else None
    keys = Keys(config, f"the configuration of {self.source}",
                known.defaults if known else {}, place=place, outer=outer)
    keys.ignore(*_NOTES, "tie_word_embeddings")
    # Both levels may have the key model_type. The outer key names the drafter's
    # project, and the nested key names an architecture. Only the nested value
    # is used.
    if outer is not None:
      keys.trust("model_type", model_type)
    for name, size in (("num_target_layers", self.target.config.layers),
                       ("target_hidden_size", self.target.config.width)):
      self.check(name, keys(name, size), size)
    return keys

  def layer(self, keys: Keys, layers: int | None = None) -> dict[str, Any]:
    """Returns the `TransformerConfig` fields of the drafter's own layers.

    Args:
      keys: reader of the drafter's configuration.
      layers: number of layers for which the files have tensors. It replaces the
        number in the configuration, because some configurations contain the
        target's number of layers. None means the number in the configuration.

    Raises:
      ValueError: the layers are of an unsupported kind, or the drafter was made
        for another target.
    """
    self._check_dense()
    model_type = keys("model_type", "llama")
    if model_type not in _LAYERS:
      self.fail(f"has layers of the architecture {model_type!r}; specjax "
                f"supports drafters with layers of {', '.join(_LAYERS)}")
    if layers is not None:
      _trust_layers(keys, layers)
    if not keys("use_sliding_window"):
      # Without use_sliding_window, the window size is an unused copy of the
      # target's value. This call only marks the key as known, because unknown
      # keys raise an error.
      keys("sliding_window")
    fields = ARCHITECTURES[model_type].read(keys)
    if model_type == "llama":
      fields |= _windows_of_llama(keys)
    config = TransformerConfig(**fields)
    for name, bias in (("qkv_bias", "q_proj.bias"), ("out_bias", "o_proj.bias"),
                       ("mlp_bias", "down_proj.bias")):
      fields[name] = any(x.endswith(bias) for x in self.tensors)
    # A drafter's configuration may have a shorter context length than its
    # target. Without RoPE scaling, rotary embeddings are defined at every
    # position. Therefore the longer of the two context lengths is valid.
    if config.rope_scaling is None:
      fields["context_length"] = max(config.context_length,
                                     self.target.context_length)
    self.check("vocab_size", config.vocab_size, self.target.vocab_size)
    fields["windows"] = without_idle_windows(
        TransformerConfig(**fields)).windows
    return fields

  def _check_dense(self) -> None:
    """Raises `ValueError` if the drafter has layers of an unsupported kind.

    The tensor names reveal a mixture of experts or latent attention (MLA).
    """
    for part, kind in (("mlp.experts.", "a mixture of experts"),
                       ("mlp.gate.", "a mixture of experts"),
                       ("kv_a_proj", "latent attention (MLA)")):
      for name in self.tensors:
        if part in name:
          self.fail(f"has the tensor {name}, of {kind}, which specjax does not "
                    "support; take a drafter with dense layers")

  def check_target(self, keys: Keys) -> None:
    """Checks the drafter's copy of the target's configuration.

    Args:
      keys: reader of this copy.

    Raises:
      ValueError: the architecture is not supported, or the copy has another
        width, vocabulary size or number of layers than the target.
    """
    self.check_sizes(keys.choice("model_type", ARCHITECTURES).read(keys))

  def check_sizes(self, fields: Mapping[str, Any]) -> None:
    """Raises `ValueError` if a size differs from the target's.

    The sizes are the number of layers, the width and the vocabulary size.

    Args:
      fields: fields of a `TransformerConfig`, with the keys `layers`, `width`
        and `vocab_size`.
    """
    for name in ("layers", "width", "vocab_size"):
      self.check(name, fields[name], getattr(self.target.config, name))

  def check(self, name: str, value: int, wanted: int) -> None:
    """Raises `ValueError` if the drafter's size `value` is not `wanted`.

    Args:
      name: name of the size in the error message.
      value: size in the drafter's files.
      wanted: size of the target.
    """
    if value != wanted:
      self.fail(f"has {name} {value} and the target {wanted}; give the target "
                "for which the drafter was made")

  def fail(self, what: str) -> None:
    """Raises a `ValueError` with the message "{source} {what}"."""
    raise ValueError(f"{self.source} {what}")

  def count(self, pattern: str) -> int:
    """Returns the number of layers or heads that the tensor names contain.

    This is 1 plus the largest index in the names, or 0 if no name matches.

    Args:
      pattern: regular expression of tensor names. Its first group matches the
        index, as in `layers.(3).weight`.
    """
    return 1 + max((int(match[1]) for match in (
        re.match(pattern, name) for name in self.tensors) if match), default=-1)

  def columns(self, name: str) -> int:
    """Returns the size of a tensor's last axis.

    Raises `ValueError` if the tensor is missing.
    """
    return self.shape(name)[-1]

  def shape(self, name: str) -> tuple[int, ...]:
    """Returns the shape of a tensor, or raises `ValueError` if it is missing.
    """
    if name not in self.tensors:
      self.fail(f"has no tensor {name}, which the layout {self.layout!r} "
                "requires; give another layout, or download the drafter again")
    return self.tensors[name].shape

  def own(self, name: str, part: str, ids: Sequence[int] = (),
          more: int = 0) -> bool:
    """Returns True if the drafter has a matrix that differs from the target's.

    The result is False if the tensor is missing, or equals the target's matrix
    up to rounding. If `target_params` is None, the result is True for every
    tensor that exists.

    Args:
      name: name of the drafter's tensor.
      part: matrix of the target, "embedding" or "head" (the LM head).
      ids: token ids of the tensor's rows, for a reduced vocabulary. () means
        all tokens in order.
      more: number of additional rows at the end of the tensor. These rows are
        not compared.
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

  def mask_token(self, keys: Keys) -> int:
    """Returns the id of the mask token."""
    mask = keys("mask_token_id")
    if mask is None:
      self.fail("has no mask_token_id in its configuration; add the id of the "
                "token with which it was trained as mask")
    return mask

  def copy(self, name: str, part: str, ids: Sequence[int] = (),
           more: int = 0) -> None:
    """Marks a tensor as a copy of the target's matrix, to be skipped.

    If `target_params` is None, the tensor is not compared with the matrix.

    Args:
      name: name of the drafter's tensor.
      part: matrix of the target, "embedding" or "head" (the LM head).
      ids: token ids of the tensor's rows. () means all tokens in order.
      more: number of additional rows at the end of the tensor. These rows are
        not compared.

    Raises:
      ValueError: the tensor differs from the target's matrix.
    """
    if self.target_params is not None and self.own(name, part, ids, more):
      self.fail(f"has a tensor {name} that differs from the target's, so it "
                "was made for other weights: give the target for which the "
                "drafter was made")
    self.used.add(name)


def _trust_layers(keys: Keys, layers: int) -> None:
  """Sets the number of layers in a drafter's configuration.

  If the configuration has a list with the type of each layer, and all types are
  equal, the list also gets this length.

  Args:
    keys: reader of the configuration.
    layers: number of layers for which the files have tensors.
  """
  keys.trust("num_hidden_layers", layers)
  types = keys("layer_types")
  if isinstance(types, list) and len(types) != layers and (
      types[1:] == types[:-1]):
    keys.trust("layer_types", types[:1] * layers)


def _windows_of_llama(keys: Keys) -> dict[str, Any]:
  """Returns the field `windows` of draft layers of the architecture Llama.

  Language models of this architecture have no windows, and transformers ignores
  the keys. speculators writes the keys for every architecture, and its draft
  layers follow `layer_types`.
  """
  if keys("use_sliding_window") and not keys("layer_types"):
    keys.refuse("use_sliding_window", keys("use_sliding_window"))
  return layer_windows(keys, [FULL] * keys.size("num_hidden_layers"))


def _same(heads: Heads) -> Heads:
  return heads


def _same_params(form: Heads, heads: Heads, params: chex.ArrayTree,
                 target_params: chex.ArrayTree) -> Any:
  del form, heads, target_params
  return params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Writer:
  """Conversion of draft heads to a file layout of inference servers.

  A writer does not check that the layout can store every field of the heads.
  `export_drafter` makes this check: it reads the heads back from the written
  configuration, and raises an error if a field differs.

  Attributes:
    config: function `heads -> dict` that returns the contents of config.json.
      Its argument is the result of the function `form`.
    form: function `heads -> heads` that returns the heads as read from the
      written files. Fields not stored in the layout have their defaults.
    params: function `(form, heads, params, target_params) -> params` that
      converts the parameters of `heads` to those of its argument `form`, the
      result of the function `form`.
    ids: function `heads -> ids` that returns the token ids of a reduced draft
      vocabulary, or () for the target's complete vocabulary.
    input_size: function `heads -> int` that returns the size of the tensor
      `t2d`, a mask of the target's tokens that are in the draft vocabulary.
    stores_head: function `heads -> bool` that returns True if the layout stores
      an LM head that consists of rows of the target's head. vLLM needs the copy
      of a reduced vocabulary, because it can share only a complete head.
  """

  config: Callable[[Any], dict[str, Any]]
  form: Callable[[Any], Any] = _same
  params: Callable[[Any, Any, Any, Any], Any] = _same_params
  ids: Callable[[Any], Sequence[int]] = lambda heads: ()
  input_size: Callable[[Any], int] = lambda heads: heads.vocab_size
  stores_head: Callable[[Any], bool] = lambda heads: False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
  """Format of the files of a published drafter.

  Attributes:
    kind: name of the class of draft heads, for example "eagle3".
    read: function that returns the heads' configuration from the opened files.
    names: table from parameters to names of tensors.
    load: function `(found, dtype) -> (heads, params)` for files without a
      table, instead of `read` and `names`.
    write: conversion of heads to this layout. None means that specjax cannot
      write this layout.
    sizes: function `(heads, target) -> dict` that returns the numbers for the
      placeholders in `names`, such as `{first}` for the first layer's number.
    file: name of the file with the weights.
    algorithm: value of the key `speculators_model_type` in configurations of
      this layout. "" means that the key does not exist.
    architectures: possible first entries of the configuration's list
      `architectures`.
    sign: regular expression. If it matches the start of a tensor name, the
      files have this layout.
    prefix: prefix of the drafter's tensor names, if the target is in the same
      files. Tensors without the prefix belong to the target. `names` contains
      the names without the prefix.
    within: regular expression for the start of the drafter's tensor names, if
      the target is in the same files. Other tensors belong to the target.
      `names` contains the complete names.
  """

  kind: str
  read: Callable[[Found], Heads] | None = None
  names: Table = dataclasses.field(default_factory=dict)
  load: Callable[[Found, np.dtype], tuple[Heads, Any]] | None = None
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
    """True if the drafter and its target are stored in the same files."""
    return bool(self.prefix or self.within)

  def known_by(self, config: Mapping[str, Any], tensors: Mapping[str, Any]
               ) -> bool:
    """Returns True if files have this layout.

    Args:
      config: contents of config.json.
      tensors: tensors of the files by name.
    """
    algorithm = config.get("speculators_model_type")
    if algorithm or self.algorithm:
      return algorithm == self.algorithm
    names = config.get("architectures") or [""]
    if isinstance(names, list) and names[0] in self.architectures:
      return True
    return bool(self.sign) and any(re.match(self.sign, x) for x in tensors)


def check_target(found: Found, heads: Any) -> None:
  """Checks that draft heads have the target's width and vocabulary size.

  Args:
    found: opened files of the drafter, and its target.
    heads: heads with the fields `width` and `vocab_size`.

  Raises:
    ValueError: the width or the vocabulary size differs.
  """
  found.check("width", heads.width, found.target.config.width)
  found.check("vocab_size", heads.vocab_size, found.target.vocab_size)


def reduced_vocabulary(found: Found, keys: Keys, size: int
                       ) -> tuple[int, ...]:
  """Returns the target's token ids of a drafter's reduced vocabulary.

  Args:
    found: opened files of the drafter, and its target.
    keys: reader of the drafter's configuration.
    size: number of rows of the drafter's LM head.

  Returns:
    `size` token ids in ascending order; () if the drafter has the complete
    vocabulary of the target.

  Raises:
    ValueError: the map of token ids is missing or damaged.
  """
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
  """Returns the target's id of every token of a reduced draft vocabulary.

  The tensor `d2t` ("draft to target") stores each id minus its row number. The
  optional tensor `t2d` ("target to draft") is a mask over the target's tokens,
  True for the tokens in the draft vocabulary. If both tensors exist, they must
  contain the same tokens.
  """
  offsets = np.asarray(found.tensors["d2t"].read(), np.int64)
  ids = np.arange(len(offsets)) + offsets
  if "t2d" not in found.tensors:
    return ids
  known = found.tensors["t2d"].read()
  # Usually `t2d` is a mask over the target's tokens. One project stores row
  # numbers of `d2t` instead, and -1 for tokens outside of the draft vocabulary.
  known = np.flatnonzero(known >= 0 if (known < 0).any() else known)
  # `d2t` usually stores each id minus its row number, but some tools store the
  # ids themselves. In both cases `known` contains the ids.
  if not (np.array_equal(known, ids) or np.array_equal(known, offsets)):
    found.fail("has tensors d2t and t2d with different tokens; download it "
               "again")
  return known


def _check_complete(found: Found) -> None:
  """Checks that a drafter with a complete vocabulary uses the target's ids.

  The tensor `d2t` maps draft ids to target ids. If the tensor exists, this map
  must be the identity. The tensor contains either the ids or the ids minus row
  numbers (all 0).

  Raises:
    ValueError: `d2t` is not the identity.
  """
  if "d2t" not in found.tensors:
    return
  offsets = np.asarray(found.tensors["d2t"].read(), np.int64)
  if offsets.any() and not np.array_equal(offsets, np.arange(len(offsets))):
    found.fail("has a tensor d2t that changes the ids of a complete "
               "vocabulary; specjax supports only the target's ids")


def num_steps(keys: Keys) -> int:
  """Returns the draft length in a configuration of the project speculators.

  If the configuration does not contain a draft length, the result is `DEPTH`.
  """
  name = "proposal_methods"
  methods = keys.mapping("speculators_config").get(name) or [{}]
  if not isinstance(methods, list) or not isinstance(methods[0], Mapping):
    raise ValueError(f"{keys.source} has {methods!r} for {name}; it must be a "
                     "list of objects")
  return Keys(methods[0], f"{keys.source}, in {name},").size(
      "speculative_tokens", DEPTH)


def layer_keys(heads: Any, windows: Sequence[int] = (), **changed: Any
               ) -> dict[str, Any]:
  """Returns the config.json entries that describe a drafter's layers.

  Args:
    heads: draft heads that have all fields of `TransformerConfig`.
    windows: attention window of each layer to write, 0 for a layer without a
      window; () if no layer has one, or if the readers of a layout ignore
      windows.
    **changed: values of fields that replace the values of the heads.

  Raises:
    ValueError: the windows have several sizes, or no published architecture
      matches.
  """
  fields = {field.name: getattr(heads, field.name)
            for field in dataclasses.fields(TransformerConfig)}
  model_type, keys = express(TransformerConfig(**fields | dict(
      tie_embeddings=False, windows=()) | changed))
  sizes = {size for size in windows if size}
  if len(sizes) > 1:
    raise ValueError(f"windows is {tuple(windows)}, and the key sliding_window "
                     "stores one size for all layers with a window")
  if sizes:
    # Written for every architecture, as speculators does.
    keys |= {"use_sliding_window": True, "sliding_window": sizes.pop(),
             "layer_types": [SLIDING if size else FULL for size in windows]}
  return {"model_type": model_type, **keys}


def speculators_keys(heads: Heads, algorithm: str, architecture: str,
                     layers: dict[str, Any], **keys: Any) -> dict[str, Any]:
  """Returns the contents of a drafter's config.json in speculators' format.

  Entries about the target are not included.

  Args:
    heads: draft heads.
    algorithm: name of the method in speculators, such as "eagle3".
    architecture: name of the drafter's class in speculators.
    layers: entries that describe the draft layers, from `layer_keys`.
    **keys: further entries.
  """
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
# Configuration keys with the numbers of the target's hidden states that a
# drafter reads: (True if the key is in a nested part of the file, name,
# offset). Projects number hidden states differently. A number in the file plus
# the offset is the number of the layer whose input is the hidden state.
_TAPS = ((True, "eagle_aux_hidden_state_layer_ids", 1),
         (True, "target_layer_ids", 1),
         (False, "eagle_aux_hidden_state_layer_ids", 0),
         (False, "aux_hidden_state_layer_ids", 0),
         (False, "target_layer_ids", 1))


def named_taps(found: Found, keys: Keys, inner: Keys, place: str
          ) -> tuple[int, ...] | None:
  """Returns the numbers of the target's hidden states that a drafter reads.

  Number i is the input of layer i of the target, as in vLLM and speculators.
  SpecForge, SGLang and DeepSpec give the same hidden state the number i - 1,
  because it is the output of layer i - 1. This function converts such numbers.

  Args:
    found: opened files of the drafter.
    keys: reader of the drafter's configuration.
    inner: reader of the nested part of the configuration.
    place: key of the nested part.

  Returns:
    The numbers in the order of the configuration. None if the configuration has
    no list of hidden states.

  Raises:
    ValueError: the configuration has several lists, and they differ both before
      and after conversion.
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
  """Checks that the target has the hidden states that a drafter reads.

  Args:
    found: opened files of the drafter, and its target.
    taps: numbers of hidden states. Number i is the input of layer i. The
      largest number, the number of layers, is the output of the last layer.
    normed: True if the drafter was trained on the last layer's output after the
      final norm. specjax has this output only before the norm.

  Raises:
    ValueError: the target does not have one of these hidden states.
  """
  layers = found.target.config.layers
  for tap in taps:
    if tap not in range(layers + 1):
      found.fail(f"reads the hidden state before layer {tap}; the target has "
                 f"{layers} layers")
    if normed and tap == layers:
      found.fail(f"reads the output of layer {layers - 1}, the target's last, "
                 "after the final norm (as transformers returns it); specjax "
                 "has only states before this norm: take another drafter")
