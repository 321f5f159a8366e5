"""File layouts of published drafters that draft a block in one pass."""

from collections.abc import Iterable
import dataclasses
import functools
from typing import Any

import chex
import numpy as np

from specjax.methods.blocks._lattice import UNIT_EPSILON
from specjax.methods.blocks.parallel_network import ParallelHeads
from specjax.methods.layouts import check_taps
from specjax.methods.layouts import Found
from specjax.methods.layouts import layer_keys
from specjax.methods.layouts import Layout
from specjax.methods.layouts import NAME_THEM
from specjax.methods.layouts import named_taps
from specjax.methods.layouts import OF_VERIFIER
from specjax.methods.layouts import reduced_vocabulary
from specjax.methods.layouts import speculators_keys
from specjax.methods.layouts import Writer
from specjax.models.configuration_keys import Keys
from specjax.models.safetensors_files import StoredTensor
from specjax.models.settings import FULL
from specjax.models.settings import SLIDING
from specjax.models.tensor_layouts import Same
from specjax.models.tensor_layouts import Stored
from specjax.models.tensor_layouts import table
from specjax.models.tensor_layouts import turned
from specjax.models.tensor_names import decoder_layer

_MARKOV_READ = {"vanilla": "plain", "gated": "gated", "rnn": "rnn"}
_MARKOV_WRITTEN = {"none": "vanilla", "plain": "vanilla", "gated": "gated",
           "rnn": "rnn"}


@dataclasses.dataclass(frozen=True)
class Expanded(Stored):
  """Parameter stored with additional axes of size 1, at the positions `at`."""

  at: tuple[int, ...] = (0,)

  def shapes(self, config, shape):
    stand_in = np.broadcast_to(np.zeros((), np.bool_), shape)
    return [np.expand_dims(stand_in, self.at).shape]

  def join(self, config, shape, tensors: Iterable[StoredTensor], dtype):
    [tensor] = tensors
    return tensor.read(dtype).reshape(shape)

  def split(self, config, x):
    return [np.expand_dims(np.asarray(x), self.at)]


def input_size(heads: ParallelHeads) -> int:
  """Returns the number of input ids: V, or V + 1 with a trained mask."""
  return heads.vocab_size + (heads.mask_token is None)


class MaskRow(Stored):
  """Trained mask, stored as an additional row after the target's embedding.

  The argument of `split` is the complete matrix, the embedding with this row.
  """

  def shapes(self, config, shape):
    return [(input_size(config), *shape)]

  def join(self, config, shape, tensors: Iterable[StoredTensor], dtype):
    [tensor] = tensors
    return tensor.read(dtype)[-1]

  def split(self, config, x):
    return [x]


class InputRows(Stored):
  """Table with one row per token, stored with a row for a trained mask.

  With a trained mask, the file has a last row of zeros. The parameter does not
  contain this row, because the Markov head never reads a mask token.
  """

  def shapes(self, config, shape):
    return [(input_size(config), *shape[1:])]

  def join(self, config, shape, tensors: Iterable[StoredTensor], dtype):
    [tensor] = tensors
    return tensor.read(dtype)[:shape[0]]

  def split(self, config, x):
    return [np.pad(x, ((0, input_size(config) - len(x)), (0, 0)))]


_PARALLEL = decoder_layer("layers.{i}") | table({
    "fc": "fc", "hidden_norm": "hidden_norm", "final_norm": "norm",
    "markov.w1": "markov_head.markov_w1", "markov.w2": "markov_head.markov_w2",
    "markov.gate": "markov_head.gate_proj",
    "markov.joint": "markov_head.joint_proj",
    "confidence": Expanded(("confidence_head.proj",)),
})
_PARALLEL_SPECULATORS = _PARALLEL | {
    "mask": MaskRow(("embed_tokens",)),
    "markov.w1": InputRows(("markov_head.markov_w1",)),
}


def _outputs_first(c, x):
  del c
  return [[np.moveaxis(x, 0, -1)]]


def _key_and_value(c, x):
  """Stores a kernel `[D, K, 2, H]` in two tensors."""
  del c
  x = np.moveaxis(x, 0, -1)
  return [[x[:, :1]], [x[:, 1:]]]


_convolutions = {
    f"{part}_conv_{{i}}.{module}": stored for part in ("attention", "mlp")
    for module, stored in (
        ("base", Same((f"layers.{{i}}.{part}_conv.base_kernel",), ending="")),
        ("dynamic", Stored((f"layers.{{i}}.{part}_conv.kernel_projection",),
                           _outputs_first)))}
_selector = lambda stored: {
    "markov.w1": stored(("candidate_selector.predecessor_codebook",),
                        ending=""),
    "markov.w2": stored(("candidate_selector.successor_codebook",), ending=""),
    "markov.hidden": Stored(("candidate_selector.hidden_projection",), turned)}
_DFLASH_2 = _PARALLEL | _convolutions | _selector(Stored)
_DFLASH_2_SPECULATORS = (
    _PARALLEL_SPECULATORS | _convolutions | _selector(InputRows))
_DOMINO = _PARALLEL | table({
    "markov.entry": Stored(("prefix_gru.weight_ih_l0",), turned, ending=""),
    "markov.carry": Stored(("prefix_gru.weight_hh_l0",), turned, ending=""),
    "markov.joint": "embed_proj.0", "markov.w2": "embed_proj.2"})
_DFLARE = _PARALLEL | {
    "mix": Stored(("layer_fusion_weights",), ending=""),
    "context_{i}": Stored(("layers.{i}.self_attn.k_proj_target",
                           "layers.{i}.self_attn.v_proj_target"),
                          _key_and_value)}
_LILICORR = _PARALLEL | _convolutions | {
    "markov.slot": Expanded(
        ("lilicorr.slot_embedding",), ending="", at=(0, 1, 3)),
    "markov.rank": Expanded(
        ("lilicorr.rank_embedding",), ending="", at=(0, 1, 2)),
    "markov.distance": Stored(("lilicorr.relative_slot_bias",), ending=""),
    "markov.same": Stored(("lilicorr.same_slot_bias",), ending=""),
    "markov.layer_{i}.qkv": Stored(
        ("lilicorr.layers.{i}.attn.in_proj",), turned, ending="_{leaf}"),
    **{f"markov.{module}": Stored((f"lilicorr.{name}",), turned)
       for module, name in (
           ("token", "token_proj"), ("hidden", "pass_hidden_proj"),
           ("features_norm", "feature_norm"),
           ("features_up", "feature_mlp.up_proj"),
           ("features_down", "feature_mlp.down_proj"),
           ("context", "context_proj"), ("output_norm", "output_norm"),
           ("anchor_norm", "anchor_norm"), ("factors", "factor_input_proj"),
           ("out", "out_head"), ("in", "in_head"),
           ("anchor_out", "anchor_out_head"),
           ("layer_{i}.norm", "layers.{i}.attn_norm"),
           ("layer_{i}.out", "layers.{i}.attn.out_proj"),
           ("layer_{i}.mlp_norm", "layers.{i}.mlp_norm"),
           ("layer_{i}.up", "layers.{i}.mlp.up_proj"),
           ("layer_{i}.down", "layers.{i}.mlp.down_proj"))}}


def _convolved(own: Keys) -> dict[str, Any]:
  return dict(conv_kernel=own.size("conv_kernel_size"),
              conv_group=own.size("conv_group_size"))


def _dflash_2(own: Keys) -> dict[str, Any]:
  return _convolved(own) | dict(
      markov="selector", markov_rank=own.size("selector_rank"),
      candidates=own.size("selector_top_k"))


def _domino(own: Keys) -> dict[str, Any]:
  return dict(
      markov="gru", markov_rank=own.size("emb_dim"),
      markov_width=own.size("gru_hidden_dim"),
      free_slots=own("pure_draft_prefix_len", 0),
      from_anchor=own.switch("shift_label", False))


def _lilicorr(own: Keys) -> dict[str, Any]:
  prefix = "lilicorr_"
  epsilon = own.number(prefix + "vector_eps")
  if epsilon != UNIT_EPSILON:
    own.refuse(prefix + "vector_eps", epsilon)
  if not own.switch(prefix + "enabled", True):
    own.refuse(prefix + "enabled", False)
  # A width of 0 stands for that of the draft layers.
  width = own(prefix + "hidden_size") or own.size("hidden_size")
  # The draft layers have no biases. `Found.layer` finds those of the network,
  # because their names have the same end.
  return (_convolved(own) if own("conv_kernel_size") else {}) | dict(
      markov="lilicorr", markov_width=width, mlp_bias=False,
      markov_rank=own.size(prefix + "factor_dim"),
      candidates=own.size(prefix + "candidate_topk"),
      lattice_layers=own.size(prefix + "num_layers"),
      lattice_heads=own.size(prefix + "num_heads"),
      lattice_mlp_width=int(width * own.number(prefix + "mlp_ratio")),
      logit_scale=float(own.number(prefix + "logit_scale", positive=True)))


# Functions that return the fields of `ParallelHeads` that are particular to a
# layout, by the value of its key `projector_type`.
_PROJECTORS = {
    "dflash": lambda own: {}, "dspark": lambda own: dict(from_anchor=True),
    "dflash2": _dflash_2, "domino": _domino, "lilicorr": _lilicorr,
    "dflare": lambda own: dict(fusion="layers")}


def _read(found: Found, *, projector: str) -> ParallelHeads:
  """Returns the heads of a DFlash drafter or of one of its relatives.

  Layouts of z-lab (DFlash, DFlash 2), SpecForge (DFlash, DSpark, Domino),
  DeepSpec (DSpark), ModelOpt (LiLiCorr) and AngelSlim (DFlare). Keys are in
  `dflash_config`, at the top level, or in both places. Layer ids refer to layer
  outputs.

  Args:
    found: opened files of the drafter.
    projector: key of `_PROJECTORS`.
  """
  keys = found.keys()
  own = found.keys(keys, "dflash_config")
  more = {"from_anchor": False} | _PROJECTORS[projector](own)
  for name, plain in (("projector_type", projector),
                      ("sample_from_anchor", more["from_anchor"])):
    if own(name, plain) != plain:
      found.fail(f"has {own(name)!r} for {name}, but drafters of this layout "
                 f"have {plain!r}; correct the configuration")
  taps = named_taps(found, keys, own, "dflash_config")
  # vLLM reads "causal", z-lab's code "is_causal", and JetSpec "causal_head".
  causal = {name: own.switch(name, False) for name in (
      "is_causal", "causal", "causal_head") if own(name) is not None}
  config = found.target.config
  heads = _parallel(
      found, keys, own, taps, own("block_size"), more | dict(
          logit_softcap=config.logit_softcap,
          embedding_scale=config.embedding_scale), True,
      window_end="slot", causal=keys.agreed(causal) if causal else None)
  for given in (keys, own):
    given.refuse_others()
  return heads


def _read_speculators(found: Found, *, projector: str) -> ParallelHeads:
  """Returns the heads of a DFlash, DFlash 2 or DSpark drafter of speculators.

  The mask is trained if its id is the first id after the target's vocabulary.
  Unlike in other layouts, embeddings and logits are not scaled like the
  target's (Gemma).

  Args:
    found: opened files of the drafter.
    projector: key of `_PROJECTORS`.
  """
  outer = found.keys()
  keys = found.keys(outer, "transformer_layer_config")
  found.used.update(OF_VERIFIER)
  size = (found.shape("lm_head.weight")[0] if "lm_head.weight" in found.tensors
          else outer.size("draft_vocab_size"))
  more = {"from_anchor": False} | _PROJECTORS[projector](outer)
  more["from_anchor"] = from_anchor = outer.switch(
      "sample_from_anchor", more["from_anchor"])
  non_causal = outer.switch("sliding_window_non_causal", projector == "dflash2")
  part = found.keys(outer, "dflash_config")
  heads = _parallel(
      found, keys, outer, named_taps(found, outer, part, "dflash_config"),
      outer("block_size"), more, False,
      reduced_vocabulary(found, outer, size), window_end="anchor",
      causal=False if non_causal else None)
  if heads.markov == "rnn" and not from_anchor:
    found.fail("has markov_head_type 'rnn' and sample_from_anchor False, which "
               "specjax does not support, because its recurrence begins after "
               "the anchor's slot: take another drafter")
  for given in (keys, outer, part):
    given.refuse_others()
  return heads


def _parallel(found, keys, own, taps, size, more, normed, ids=(), *, window_end,
              causal):
  mask, whole = found.mask_token(own), found.target.vocab_size
  learned = mask == whole and keys("vocab_size") == whole + 1
  if learned:
    keys.trust("vocab_size", whole)
  fields = found.layer(keys, max(1, found.count(r"layers\.(\d+)\.")))
  if fields["windows"]:
    fields["window_end"] = window_end
  # Unless the configuration sets `causal`, the layers with a window are causal,
  # even if `windows` omits their window because it has no effect.
  causal = [kind == SLIDING if causal is None else causal
            for kind in keys("layer_types", [FULL] * fields["layers"])]
  found.check("width", fields["width"], found.target.config.width)
  found.copy("embed_tokens.weight", "embedding", more=learned)
  found.copy("lm_head.weight", "head", ids)
  if not taps:
    found.fail("does not name the target's layers whose input it reads; "
               f"{NAME_THEM}")
  check_taps(found, taps, normed)
  rank = own("markov_rank", 0)
  kind = own("markov_head_type", "vanilla")
  if kind not in _MARKOV_READ:
    found.fail(f"has markov_head_type {kind!r}; specjax supports "
               f"{', '.join(_MARKOV_READ)}")
  confidence = _confidence(found, own)
  heads = ParallelHeads(**fields | dict(
      block_size=size, taps=tuple(taps), ids=ids,
      causal=causal if any(causal) else (),
      markov=_MARKOV_READ[kind] if rank else "none", **(
          dict(markov_rank=rank) if rank else {}),
      confidence=confidence, mask_token=None if learned else mask) | more)
  # In shorter windows, z-lab's slots see fewer slots of the block than those of
  # SpecForge.
  if heads.window_end == "slot" and 0 < max(
      heads.windows, default=0) < heads.block_size:
    found.fail(f"has sliding_window {max(heads.windows)} and block_size "
               f"{heads.block_size}; specjax supports only windows that are at "
               "least as long as a block")
  return heads


def _confidence(found, own):
  """Returns the field `ParallelHeads.confidence`."""
  with_markov = own("confidence_head_with_markov")
  has_head = own("enable_confidence_head")
  if has_head is None:
    has_head = "confidence_head.proj.weight" in found.tensors
  if not has_head:
    return "none"
  return "markov" if with_markov else "hidden"


def _parallel_speculators(heads, algorithm, architecture, **keys):
  """Returns the contents of config.json in speculators' format.

  The id of a trained mask is the first id after the target's vocabulary.
  """
  mask = heads.mask_token
  # In speculators only layers with a window are causal. So a causal layer
  # without a window is written with a window that has no effect.
  causal = heads.causal or (False,) * heads.layers
  windows = [heads.window(i) or (heads.context_length if causal[i] else 0)
             for i in range(heads.layers)]
  return speculators_keys(
      heads, algorithm, architecture, layer_keys(
          heads, windows, vocab_size=input_size(heads), logit_softcap=None,
          embedding_scale=1.0),
      sliding_window_non_causal=any(windows) and not any(causal),
      block_size=heads.block_size, draft_vocab_size=heads.draft_size,
      mask_token_id=heads.vocab_size if mask is None else mask,
      aux_hidden_state_layer_ids=list(heads.taps), **keys)


def _write_dflash_speculators(heads: ParallelHeads) -> dict[str, Any]:
  return _parallel_speculators(heads, "dflash", "DFlashSpeculator")


def _write_dspark_speculators(heads: ParallelHeads) -> dict[str, Any]:
  return _parallel_speculators(
      heads, "dspark", "DSparkSpeculator", sample_from_anchor=heads.from_anchor,
      markov_rank=heads.markov_rank if heads.markov != "none" else 0,
      markov_head_type=_MARKOV_WRITTEN.get(heads.markov, "vanilla"),
      enable_confidence_head=heads.confidence != "none",
      confidence_head_with_markov=heads.confidence == "markov")


def _write_dflash_2_speculators(heads: ParallelHeads) -> dict[str, Any]:
  return _parallel_speculators(
      heads, "dflash2", "DFlash2DraftModel",
      sample_from_anchor=heads.from_anchor, selector_rank=heads.markov_rank,
      selector_top_k=heads.candidates, conv_kernel_size=heads.conv_kernel,
      conv_group_size=heads.conv_group)


def _without_unused_rank(heads: ParallelHeads) -> ParallelHeads:
  return (heads if heads.markov != "none" else dataclasses.replace(
      heads, markov_rank=ParallelHeads.markov_rank))


def _with_mask_row(form: ParallelHeads, heads: ParallelHeads,
                   params: chex.ArrayTree, target_params: chex.ArrayTree
                   ) -> Any:
  """Returns parameters with the trained mask as a row after the embedding."""
  del form
  if heads.mask_token is not None:
    return params
  table = np.asarray(target_params["embedding"], np.float32)
  mask = np.asarray(params["mask"], np.float32)
  return {**params, "mask": np.concatenate([table, mask[None]])}


_writer = functools.partial(
    Writer, form=_without_unused_rank, params=_with_mask_row,
    ids=lambda heads: heads.ids, input_size=input_size,
    # With a trained mask, the embedding has more rows than the LM head. Then
    # speculators does not take the LM head from the target.
    stores_head=lambda heads: bool(heads.ids) or heads.mask_token is None)
_parallel_layout = functools.partial(
    Layout, kind="parallel", names=_PARALLEL)
_dspark = functools.partial(_read, projector="dspark")
# Only the layouts of speculators have a writer, because vLLM reads them.
LAYOUTS = {
    "dspark of deepspec": _parallel_layout(
        read=_dspark, architectures=("Qwen3DSparkModel",)),
    "dspark of specforge": _parallel_layout(
        read=_dspark, architectures=("DSparkDraftModel",)),
    "dflash of speculators": _parallel_layout(
        read=functools.partial(_read_speculators, projector="dflash"),
        names=_PARALLEL_SPECULATORS, algorithm="dflash",
        write=_writer(config=_write_dflash_speculators)),
    "dspark of speculators": _parallel_layout(
        read=functools.partial(_read_speculators, projector="dspark"),
        names=_PARALLEL_SPECULATORS, algorithm="dspark",
        write=_writer(config=_write_dspark_speculators)),
    "dflash2 of speculators": _parallel_layout(
        read=functools.partial(_read_speculators, projector="dflash2"),
        names=_DFLASH_2_SPECULATORS, algorithm="dflash2",
        write=_writer(config=_write_dflash_2_speculators)),
    "dflash2": _parallel_layout(
        read=functools.partial(_read, projector="dflash2"), names=_DFLASH_2,
        architectures=("DFlash2DraftModel",)),
    "domino": _parallel_layout(
        read=functools.partial(_read, projector="domino"), names=_DOMINO,
        architectures=("DominoDraftModel",)),
    "lilicorr": _parallel_layout(
        read=functools.partial(_read, projector="lilicorr"), names=_LILICORR,
        architectures=("LiLiCorrDraftModel",)),
    # Some files of DFlare have the name of DFlash's architecture.
    "dflare": _parallel_layout(
        read=functools.partial(_read, projector="dflare"), names=_DFLARE,
        architectures=("QwenDFlareDraftModel", "DFlareDraftModel"),
        sign=r"layer_fusion_weights"),
    "dflash": _parallel_layout(
        read=functools.partial(_read, projector="dflash"),
        architectures=("DFlashDraftModel",)),
}
