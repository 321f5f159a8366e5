"""File layouts of published EAGLE, P-EAGLE and multi-token-prediction layers.

A layout has a table of tensor names, a reader and possibly a writer. A reader
returns the heads that a file's configuration describes. If the configuration
omits a detail of the architecture, the reader derives the detail from the
tensors. A configuration key that contradicts the tensors is an error.
"""

import dataclasses
import functools
import sys
from typing import Any

import chex
import numpy as np

from specjax.methods.blocks.published import Expanded
from specjax.methods.features.assistant import AssistantHeads
from specjax.methods.features.assistant import key_sources
from specjax.methods.features.eagle import Eagle1Heads
from specjax.methods.features.eagle import Eagle3Heads
from specjax.methods.features.eagle import PEagleHeads
from specjax.methods.features.mtp import MTPHeads
from specjax.methods.features.network import FeatureHeads
from specjax.methods.layouts import check_taps
from specjax.methods.layouts import DEPTH
from specjax.methods.layouts import Found
from specjax.methods.layouts import layer_keys
from specjax.methods.layouts import Layout
from specjax.methods.layouts import NAME_THEM
from specjax.methods.layouts import named_taps
from specjax.methods.layouts import num_steps
from specjax.methods.layouts import OF_VERIFIER
from specjax.methods.layouts import reduced_vocabulary
from specjax.methods.layouts import speculators_keys
from specjax.methods.layouts import Writer
from specjax.models.configuration import FINAL
from specjax.models.configuration_keys import Keys
from specjax.models.settings import gemma4
from specjax.models.tensor_layouts import HalvesSwapped
from specjax.models.tensor_layouts import Ids
from specjax.models.tensor_layouts import Stored
from specjax.models.tensor_layouts import Table
from specjax.models.tensor_layouts import table
from specjax.models.tensor_layouts import turned
from specjax.models.tensor_names import decoder_layer
from specjax.models.tensor_names import GEMMA_4

_MTP_DEEPSEEK_COPIES = {
    "model.layers.{i}.embed_tokens.weight": "embedding",
    "model.layers.{i}.shared_head.head.weight": "head",
}


_ORDERING = "masked_embedding.token_ordering"


def _module(layer: str, embedding_norm: str, hidden_norm: str,
            fusion: str | Stored, final_norm: str) -> Table:
  """Returns the names of a multi-token-prediction module's tensors."""
  return decoder_layer(layer, "module_{i}.", "{j}") | table({
      "module_{i}.embedding_norm": embedding_norm,
      "module_{i}.hidden_norm": hidden_norm,
      "module_{i}.fusion": fusion, "module_{i}.final_norm": final_norm})


def _eagle_3(layer: str) -> Table:
  # Only the first layer has no `attention_norm`: it normalises its two inputs.
  first = layer.format(j=0)
  return decoder_layer(layer, "module_{i}.", "{j}") | table({
      "embedding": "embed_tokens", "head": "lm_head", "entry": "fc",
      "entry_norm": "input_norm", "entry_norm_{i}": "fc_norm.{i}",
      "module_{i}.embedding_norm": f"{first}.input_layernorm",
      "module_{i}.hidden_norm": f"{first}.hidden_norm",
      "module_{i}.final_norm": "norm",
      "mask_hidden": Expanded(
          ("mask_hidden",), ending="", at=(0, 1))})


_ASSISTANT = {
    path: dataclasses.replace(stored, names=tuple(
        f"model.{name}" for name in stored.names))
    for path, stored in GEMMA_4.items()} | table({
        "entry": "pre_projection",
        "exit": Stored(("post_projection",), turned),
        "centroids": Stored(("masked_embedding.centroids",), turned),
        "ordering": Ids((_ORDERING,), ending="")})
_EAGLE_1 = decoder_layer("layers.{j}", "module_{i}.", "{j}") | table({
    "embedding": "embed_tokens", "module_{i}.fusion": "fc"})
_EAGLE_3 = _eagle_3("midlayer")
_EAGLE_3_LAYERS = _eagle_3("layers.{j}")
_MTP_DEEPSEEK = _module(
    "model.layers.{i}", "model.layers.{i}.enorm", "model.layers.{i}.hnorm",
    "model.layers.{i}.eh_proj", "model.layers.{i}.shared_head.norm")
_MTP_QWEN = _module(
    "mtp.layers.{i}", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden",
    "mtp.fc", "mtp.norm")
# The projection of MiMo reads [g; e].
_MTP_MIMO = _module(
    "model.mtp_layers.{i}", "model.mtp_layers.{i}.token_layernorm",
    "model.mtp_layers.{i}.hidden_layernorm",
    HalvesSwapped(("model.mtp_layers.{i}.input_proj",)),
    "model.mtp_layers.{i}.final_layernorm")
_MTP_SPECULATORS = _module(*(f"mtp_layers.{{i}}{rest}" for rest in (
    "", ".token_layernorm", ".hidden_layernorm", ".input_proj",
    ".final_layernorm")))


def _layers(found: Found, keys: Keys, several: bool = False) -> dict[str, Any]:
  """Returns the fields of a feature layer that describe its decoder layers."""
  layers = max(1, found.count(r"layers\.(\d+)\."))
  if layers != 1 and not several:
    found.fail(f"has {layers} layers; specjax reads feature layers of one "
               "decoder layer: take a drafter with one layer")
  return found.layer(keys, layers) | dict(
      target_width=found.target.config.width)


def _read_eagle1(found: Found) -> FeatureHeads:
  """Reads EAGLE-1 and 2, whose feature is the input of the target's LM head."""
  keys = found.keys()
  fields = _layers(found, keys)
  for name in ("qkv_bias", "eagle_fc_bias"):
    keys(name)
  bias = "fc.bias" in found.tensors
  if keys("bias") is not None and bool(keys("bias")) != bias:
    found.fail(f"has the value {keys('bias')!r} for bias, but "
               f"{'a' if bias else 'no'} tensor fc.bias; correct the "
               "configuration")
  depth = keys.size("num_lookahead_tokens", DEPTH)
  keys.refuse_others()
  return Eagle1Heads(
      **fields, forecasts=depth, taps=(FINAL,), fusion_bias=bias,
      own_embedding=found.own("embed_tokens.weight", "embedding"))


def _read_eagle3(found: Found, *, bare: bool = False) -> FeatureHeads:
  """Reads EAGLE-3 of SafeAILab, SpecForge and DeepSpec.

  In all three, the next draft step reads the hidden state before the final
  norm.

  Args:
    found: files of the drafter.
    bare: True to accept SpecForge's key `norm_output`. If the key is false, the
      LM head also reads the hidden state before the norm.
  """
  keys = found.keys()
  head_norm = keys("norm_output", True)
  if not bare and keys("norm_output") is not None:
    found.fail(f"has {keys('norm_output')!r} for norm_output, a key with "
               "different meanings in different projects; if the drafter is "
               "from SpecForge, pass layout='eagle3 of specforge'")
  if not head_norm:
    found.used.add("norm.weight")
  fields = _eagle3_fields(found, keys, keys)
  depth = keys.size("num_lookahead_tokens", DEPTH)
  keys.refuse_others()
  return Eagle3Heads(
      **fields, forecasts=depth, final_norm="own" if head_norm else None)


def _eagle3_fields(found: Found, keys: Keys, outer: Keys,
                   several: bool = False) -> dict[str, Any]:
  """Returns the fields that all EAGLE-3 files have in common.

  Args:
    found: files of the drafter.
    keys: keys that describe the decoder layer.
    outer: keys of the complete configuration; equal to `keys` unless the layer
      has a nested configuration.
    several: True if several decoder layers are supported (P-EAGLE).
  """
  fields = _layers(found, keys, several)
  norms = [name for name, key in (("each", "fc_norm"), ("all", "norm_before_fc")
                                  ) if outer(key)]
  if len(norms) > 1:
    found.fail("has both fc_norm and norm_before_fc; remove one of them")
  target = found.target.config
  columns = found.columns("fc.weight")
  taps = _eagle3_taps(found, outer, columns // target.width)
  if columns != len(taps) * target.width:
    found.fail(f"has {columns} columns in fc.weight; {len(taps)} hidden states "
               f"of a target of width {target.width} have "
               f"{len(taps) * target.width}: give the target that the drafter "
               "was made for, or correct the number of layers in config.json")
  check_taps(found, taps)
  return fields | dict(
      taps=taps, entry_norm=norms[0] if norms else None,
      ids=reduced_vocabulary(found, outer, found.shape("lm_head.weight")[0]),
      own_embedding=found.own("embed_tokens.weight", "embedding"))


def _read_eagle3_speculators(found: Found) -> FeatureHeads:
  """Reads EAGLE-3 and 3.1 of speculators.

  If the key `norm_output` is true, the next draft step reads the hidden state
  after the final norm. Otherwise it reads the hidden state before this norm.
  """
  outer = found.keys()
  found.used.update(OF_VERIFIER)
  keys = found.keys(outer, "transformer_layer_config")
  fields = _eagle3_fields(found, keys, outer)
  heads = Eagle3Heads(
      **fields, forecasts=num_steps(outer),
      norm_before_residual=outer.switch("norm_before_residual", False),
      feed_normed=outer.switch("norm_output", False))
  for given in (keys, outer):
    given.refuse_others()
  return heads


def _read_peagle(found: Found, *, nested: bool) -> PEagleHeads:
  """Reads P-EAGLE of speculators or SpecForge.

  Args:
    found: files of the drafter.
    nested: True if the layers have a nested configuration (speculators).
  """
  outer = found.keys()
  keys = (found.keys(outer, "transformer_layer_config") if nested else outer)
  found.used.update(OF_VERIFIER)
  mask = found.mask_token(outer)
  fields = _eagle3_fields(found, keys, outer, several=True)
  outer.ignore("norm_output")  # no draft step reads another one's output
  heads = PEagleHeads(
      **fields, forecasts=(num_steps(outer) if nested else
                           outer.size("num_lookahead_tokens", DEPTH)),
      norm_before_residual=outer.switch("norm_before_residual", False),
      mask_token=mask)
  # In shorter windows, a mask of speculators sees masks that it would not see
  # in an inference server.
  if 0 < max(heads.windows, default=0) < heads.forecasts:
    found.fail(f"has sliding_window {max(heads.windows)} and "
               f"{heads.forecasts} draft tokens; specjax supports only windows "
               "that are at least as long as a draft")
  for given in (keys, outer):
    given.refuse_others()
  return heads


def _read_mtp_deepseek(found: Found) -> FeatureHeads:
  """Reads DeepSeek's modules, which are stored after the target's layers.

  Each module has copies of the target's embedding and LM head. The first draft
  step reads the input of the target's LM head, after the final norm. Each later
  step reads the input of the LM head in the previous step, as in vLLM, SGLang
  and Megatron. A single module is reused on its own output. Several modules are
  chained, as in DeepSeek's training. For a model whose modules all read the
  target's hidden state (MiMo-V2), set `chained=False` with
  `dataclasses.replace`.
  """
  first = found.target.config.layers
  modules = found.count(r"model\.layers\.(\d+)\.") - first
  for i in range(first, first + modules):
    for name, part in _MTP_DEEPSEEK_COPIES.items():
      found.copy(name.format(i=i), part)
  return _mtp_of_target(found, modules)


def _read_mtp_mimo(found: Found) -> FeatureHeads:
  """Reads MiMo's modules, which have the same inputs as DeepSeek's."""
  return _mtp_of_target(found, found.count(r"model\.mtp_layers\.(\d+)\."))


def _read_mtp_qwen(found: Found) -> FeatureHeads:
  """Reads the module in a Qwen model's files.

  The module has the same inputs as DeepSeek's.
  """
  modules = found.count(r"mtp\.layers\.(\d+)\.")
  if modules != 1:
    found.fail(f"has {modules} modules that share a final norm; specjax reads "
               "files with one module")
  return _mtp_of_target(found, modules)


def _without_windows(found: Found, fields: dict[str, Any]) -> dict[str, Any]:
  """Returns the fields of MTP layers, or raises an error for windows.

  The configuration describes the target's layers. It does not say which window
  a module has, and modules of speculators are trained without windows.
  """
  if fields["windows"]:
    found.fail(f"has sliding_window {max(fields['windows'])}; specjax reads "
               "modules for multi-token prediction only without windows: take "
               "another drafter")
  return fields


def _mtp_of_target(found: Found, modules: int) -> MTPHeads:
  """Returns heads whose `modules` layers have the target's architecture."""
  keys, config = found.keys(), found.target.config
  if keys.mapping("text_config"):  # a model with an image encoder
    keys = found.keys(keys, "text_config")
  fields = _without_windows(found, found.layer(keys))
  keys.refuse_others()
  found.check_sizes(fields)
  return MTPHeads(**fields | dict(
      layers=1, recurrent=None, target_width=config.width, forecasts=modules,
      taps=(FINAL,), reuse=modules == 1, feed_normed=True))


def _read_mtp_speculators(found: Found) -> FeatureHeads:
  """Reads the single module of speculators.

  The first step reads the target's hidden state before the final norm. Later
  steps read the module's hidden state after its final norm.
  """
  outer = found.keys()
  keys = found.keys(outer, "transformer_layer_config")
  fields = _without_windows(found, found.layer(keys, 1))
  for name, part in (("embed_tokens", "embedding"), ("lm_head", "head")):
    found.copy(f"{name}.weight", part)
  keys.ignore("layer_types")
  for given in (keys, outer):
    given.refuse_others()
  config = found.target.config
  return MTPHeads(**fields | dict(
      layers=1, target_width=config.width, forecasts=num_steps(outer),
      taps=(config.layers,), reuse=True, feed_normed=True))


def _read_assistant(found: Found) -> AssistantHeads:
  """Reads an assistant of Gemma 4.

  Its embedding table is the LM head. transformers does not apply the soft-cap
  of logits.
  """
  outer = found.keys()
  if not outer.switch("tie_word_embeddings", True):
    found.fail("has tie_word_embeddings false, and specjax reads assistants "
               "whose LM head is their embedding")
  keys, target = found.keys(outer, "text_config"), found.target
  fields = gemma4(keys)
  if fields["layer_inputs"] or fields["wide_shared"]:
    found.fail("has hidden_size_per_layer_input "
               f"{fields['layer_inputs']} and use_double_wide_mlp "
               f"{fields['wide_shared']}, which no assistant has: use another")
  found.check("backbone_hidden_size", outer.size("backbone_hidden_size", 1536),
              target.config.width)
  found.check("vocab_size", fields["vocab_size"], target.vocab_size)
  centroids = {}
  if outer.switch("use_ordered_embeddings", False):
    centroids = dict(
        centroids=outer.size("num_centroids", 2048),
        active=outer.size("centroid_intermediate_top_k", 32))
    ids = np.sort(found.tensors[_ORDERING].read())
    if not np.array_equal(ids, np.arange(target.vocab_size)):
      found.fail(f"has ids in {_ORDERING} that are not all of the target's "
                 f"{target.vocab_size} tokens once: download it again")
  outer.ignore("num_centroids", "centroid_intermediate_top_k", *(
      f"{name}_token_id" for name in (
          "audio", "image", "video", "boa", "boi", "eoa", "eoi")),
               "eoa_token_index")
  for given in (keys, outer):
    given.refuse_others()
  return AssistantHeads(**fields | centroids | dict(
      shared_layers=fields["layers"], logit_softcap=None,
      embedding_scale=target.config.embedding_scale,
      context_length=max(fields["context_length"], target.context_length),
      target_width=target.config.width, sources=key_sources(target.config),
      forecasts=DEPTH))


def _eagle3_taps(found: Found, keys: Keys, count: int) -> tuple[int, ...]:
  """Returns the hidden states of the target that EAGLE-3 reads.

  Hidden states are numbered as in `TransformerConfig.features`. If the files do
  not list any, the defaults of the authors' code are used and printed to
  stderr.

  Args:
    found: files of the drafter.
    keys: keys of the configuration.
    count: number of hidden states that the tensors require.

  Raises:
    ValueError: the files contradict each other, or they list no hidden states
      and `count` is not 3.
  """
  inner = found.keys(keys, "eagle_config")
  for name in ("use_aux_hidden_state", "use_last_layernorm",
               "use_input_layernorm_in_first_layer"):
    if not inner(name, True):
      found.fail(f"has {inner(name)!r} for {name}; specjax supports only "
                 "True: take another drafter")
  taps = named_taps(found, keys, inner, "eagle_config")
  inner.refuse_others()
  if taps:
    return taps
  if count != 3:
    found.fail(f"does not name the {count} hidden states of the target that "
               f"it reads; {NAME_THEM}")
  taps = Eagle3Heads.default_taps(found.target.config.layers)
  print(f"{found.source} does not name the target's layers whose input it "
        f"reads. As in the authors' code, {taps[0]}, {taps[1]} and {taps[2]} "
        f"are assumed. If it was trained on other layers, {NAME_THEM}",
        file=sys.stderr)
  return taps


def _write_eagle1(heads: FeatureHeads) -> dict[str, Any]:
  return {"architectures": ["LlamaForCausalLM"], **layer_keys(heads),
          "bias": heads.fusion_bias, "num_lookahead_tokens": heads.forecasts}


def _eagle3_keys(heads: FeatureHeads) -> dict[str, Any]:
  return {"draft_vocab_size": heads.draft_size,
          "fc_norm": heads.entry_norm == "each",
          "norm_before_fc": heads.entry_norm == "all"}


def _write_specforge(heads: FeatureHeads) -> dict[str, Any]:
  return {"architectures": ["LlamaForCausalLMEagle3"], **layer_keys(heads),
          **_eagle3_keys(heads), "norm_output": heads.final_norm is not None,
          "num_lookahead_tokens": heads.forecasts,
          "eagle_config": {"eagle_aux_hidden_state_layer_ids": [
              tap - 1 for tap in heads.taps]}}


def _speculators_eagle(heads: FeatureHeads, kind: str, name: str,
                       **own: Any) -> dict[str, Any]:
  return speculators_keys(
      heads, kind, name, layer_keys(heads, heads.windows),
      **_eagle3_keys(heads),
      eagle_aux_hidden_state_layer_ids=list(heads.taps),
      norm_before_residual=heads.norm_before_residual, **own)


def _write_eagle3_speculators(heads: FeatureHeads) -> dict[str, Any]:
  return _speculators_eagle(heads, "eagle3", "Eagle3Speculator",
                            norm_output=heads.feed_normed)


def _write_peagle_speculators(heads: PEagleHeads) -> dict[str, Any]:
  return _speculators_eagle(heads, "peagle", "PEagleSpeculator",
                            mask_token_id=heads.mask_token)


def _write_mtp_speculators(heads: FeatureHeads) -> dict[str, Any]:
  return speculators_keys(heads, "mtp", "MTPDraftModel", layer_keys(heads),
                          num_nextn_predict_layers=1)


def _with_own_head(heads: Eagle3Heads) -> Eagle3Heads:
  """Returns heads that store a copy of the columns of the target's head."""
  return (dataclasses.replace(heads, narrow_head=False, own_head=True)
          if heads.narrow_head else heads)


def _with_copies(heads: Eagle3Heads) -> Eagle3Heads:
  """Returns heads that also store a copy of the target's embedding.

  Files of speculators have it. Its loader does not define a missing embedding.
  """
  return dataclasses.replace(_with_own_head(heads), own_embedding=True)


def _copied_params(form: Eagle3Heads, heads: Eagle3Heads,
                   params: chex.ArrayTree, target_params: chex.ArrayTree
                   ) -> Any:
  copies = {}
  if form.own_head and not heads.own_head:
    copies["head"] = heads.columns(target_params)
  if form.own_embedding and not heads.own_embedding:
    copies["embedding"] = target_params["embedding"]
  return {**params, **copies}


_eagle3 = functools.partial(
    Writer, form=_with_own_head, params=_copied_params,
    ids=lambda heads: heads.ids)
_speculators = functools.partial(_eagle3, form=_with_copies)
# Inference servers read the layouts that have a writer: vLLM reads "eagle1" and
# the layouts of speculators, SGLang reads SpecForge's. If files do not name
# their layout, the first layout whose `sign` matches a tensor name is used.
# "eagle1" is the last, because its tensor fc.weight also occurs in others.
LAYOUTS = {
    "eagle3 of speculators": Layout(
        kind="eagle3", read=_read_eagle3_speculators, names=_EAGLE_3_LAYERS,
        algorithm="eagle3",
        write=_speculators(config=_write_eagle3_speculators)),
    "eagle3 of specforge": Layout(
        kind="eagle3", read=functools.partial(_read_eagle3, bare=True),
        names=_EAGLE_3, architectures=("LlamaForCausalLMEagle3",),
        write=_eagle3(config=_write_specforge)),
    "eagle3 of deepspec": Layout(
        kind="eagle3", read=_read_eagle3, names=_EAGLE_3_LAYERS,
        architectures=("Qwen3Eagle3Model",)),
    "eagle3": Layout(
        kind="eagle3", read=_read_eagle3, names=_EAGLE_3,
        sign=r"midlayer\."),
    "peagle of speculators": Layout(
        kind="peagle", read=functools.partial(_read_peagle, nested=True),
        names=_EAGLE_3_LAYERS, algorithm="peagle",
        write=_speculators(config=_write_peagle_speculators)),
    "peagle of specforge": Layout(
        kind="peagle", read=functools.partial(_read_peagle, nested=False),
        names=_EAGLE_3_LAYERS, architectures=("PEagleDraftModel",)),
    "mtp of speculators": Layout(
        kind="mtp", read=_read_mtp_speculators, names=_MTP_SPECULATORS,
        algorithm="mtp", write=Writer(config=_write_mtp_speculators)),
    "mtp of qwen": Layout(
        kind="mtp", read=_read_mtp_qwen, names=_MTP_QWEN, sign=r"mtp\.fc\.",
        within=r"mtp\."),
    "mtp of mimo": Layout(
        kind="mtp", read=_read_mtp_mimo, names=_MTP_MIMO,
        sign=r"model\.mtp_layers\.\d+\.input_proj\.",
        within=r"model\.mtp_layers\."),
    "mtp of deepseek": Layout(
        kind="mtp", read=_read_mtp_deepseek, names=_MTP_DEEPSEEK,
        sizes=lambda heads, target: {"first": target.config.layers},
        sign=r"model\.layers\.\d+\.eh_proj\.",
        within=r"model\.layers\.{modules}\."),
    "assistant of gemma4": Layout(
        kind="assistant", read=_read_assistant, names=_ASSISTANT,
        architectures=("Gemma4AssistantForCausalLM",),
        sign=r"pre_projection\."),
    "eagle1": Layout(
        kind="eagle1", read=_read_eagle1, names=_EAGLE_1, sign=r"fc\.weight",
        write=Writer(config=_write_eagle1)),
}
