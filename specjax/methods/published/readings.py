"""From a published configuration, and what tensors there are, to heads.

Where the two differ the tensors are trusted, unless what a key says outright
contradicts them.
"""

from collections.abc import Mapping
import functools

import numpy as np

from specjax.methods.blocks import parallel_network
from specjax.methods.features import eagle
from specjax.methods.features import mtp
from specjax.methods.heads.hydra import HydraHeads
from specjax.methods.heads.medusa import MedusaHeads
from specjax.methods.networks import Heads
from specjax.methods.published import taps as taps_lib
from specjax.methods.published.found import Found
from specjax.models.configuration import FINAL
from specjax.models.published.keys import Keys

_DEPTH = 5  # tokens of a draft where a file does not say
# Copies of the target's, which only train.
_OF_VERIFIER = ("verifier_norm.weight", "verifier_lm_head.weight")
_MTP_DEEPSEEK_COPIES = {
    "model.layers.{i}.embed_tokens.weight": "embedding",
    "model.layers.{i}.shared_head.head.weight": "head",
}
_MARKOV = {"vanilla": "plain", "gated": "gated", "rnn": "rnn"}


def medusa(found: Found) -> Heads:
  """Heads on the last hidden state; some uploaded configurations say 2 of 5."""
  keys = found.keys()
  if keys("model_type"):  # the target's configuration, which has the others
    found.check_target(keys)
  keys.refuse_others()
  blocks = found.count(r"0\.(\d+)\.linear\.")
  if not blocks:
    found.shape("0.0.linear.weight")
  heads = MedusaHeads(
      heads=found.count(r"(\d+)\."), blocks=blocks,
      width=found.columns("0.0.linear.weight"),
      vocab_size=found.shape(f"0.{blocks}.weight")[0],
      bias="0.0.linear.bias" in found.tensors)
  _check_target(found, heads)
  return heads


def medusa_vllm(found: Found) -> Heads:
  """Medusa heads as vLLM reads them, with the whole vocabulary."""
  keys = found.keys()
  heads = MedusaHeads(
      heads=found.count(r"lm_heads\.(\d+)\."),
      blocks=found.count(r"blocks\.0\.layers\.(\d+)\."),
      width=found.columns("blocks.0.layers.0.weight"),
      vocab_size=found.shape("lm_heads.0.weight")[0],
      bias="blocks.0.layers.0.bias" in found.tensors)
  for name, value in (
      ("num_heads", heads.heads), ("num_hidden_layers", heads.blocks),
      ("hidden_size", heads.width), ("vocab_size", heads.vocab_size),
      ("truncated_vocab_size", heads.vocab_size),
      ("medusa_fc_bias", heads.bias), ("original_lm_head", False),
      ("logit_scale", 1)):
    if keys(name, value) != value:
      found.fail(f"has {keys(name)!r} for {name}, and the tensors are of heads "
                 f"with {value!r}; specjax reads Medusa heads that have the "
                 "whole vocabulary and their own output matrices")
  keys.ignore("max_paths", "topk", "max_seq_len")
  keys.refuse_others()
  _check_target(found, heads)
  return heads


def hydra(found: Found) -> Heads:
  """Heads that read the drafted tokens: the kind "mlp" of Hydra."""
  keys = found.keys()
  for name in ("hydra_num_heads", "hydra_num_layers"):
    keys(name)
  for name, plain, otherwise in (
      ("hydra_head_arch", "mlp", "mlp"), ("grounded_heads", True, False),
      ("hidden_state_offset", 0, 0)):
    if keys(name, otherwise) != plain:
      found.fail(f"has {name} {keys(name, otherwise)!r}; specjax reads Hydra "
                 f"heads with {name} {plain!r}")
  keys.refuse_others()
  rows, width = found.shape("hydra_mlp.0.0.linear.weight")
  found.check("width", width, 2 * rows)
  heads = HydraHeads(
      heads=found.count(r"hydra_mlp\.(\d+)\."), width=rows,
      blocks=found.count(r"hydra_mlp\.0\.(\d+)\."),
      vocab_size=found.shape("hydra_lm_head.0.weight")[0])
  _check_target(found, heads)
  return heads


def _check_target(found, heads):
  found.check("width", heads.width, found.target.config.width)
  found.check("vocab_size", heads.vocab_size, found.target.vocab_size)


def _one_layer(found, keys):
  """The fields of a feature layer that are its decoder layer's."""
  layers = max(1, found.count(r"layers\.(\d+)\."))
  if layers != 1:
    found.fail(f"has {layers} layers; a feature layer is one here: take a "
               "drafter of one layer")
  return found.layer(keys, layers) | dict(
      target_width=found.target.config.width)


def eagle1(found: Found) -> Heads:
  """EAGLE-1 and 2: what the target's head reads, and no norm at either end."""
  keys = found.keys()
  fields = _one_layer(found, keys)
  for name in ("qkv_bias", "eagle_fc_bias"):
    keys(name)
  bias = "fc.bias" in found.tensors
  if keys("bias") is not None and bool(keys("bias")) != bias:
    found.fail(f"has {keys('bias')!r} for bias and {'a' if bias else 'no'} "
               "tensor fc.bias; correct the configuration")
  depth = keys.size("num_lookahead_tokens", _DEPTH)
  keys.refuse_others()
  return eagle.Eagle1Heads(
      **fields, forecasts=depth, taps=(FINAL,), fusion_bias=bias,
      own_embedding=found.own("embed_tokens.weight", "embedding"))


def eagle3(found: Found, *, bare: bool = False) -> Heads:
  """EAGLE-3 of SafeAILab, SpecForge and DeepSpec.

  All feed back what was before the final norm.

  Args:
    found: the files.
    bare: whether there is a key `norm_output`, which if false says that the
      head reads a state without the final norm.
  """
  keys = found.keys()
  head_norm = keys("norm_output", True)
  if not bare and keys("norm_output") is not None:
    found.fail(f"has {keys('norm_output')!r} for norm_output, by which "
               "projects mean different things; say that it is SpecForge's by "
               "layout='eagle3 of specforge'")
  if not head_norm:
    found.used.add("norm.weight")
  fields = _eagle3(found, keys, keys)
  depth = keys.size("num_lookahead_tokens", _DEPTH)
  keys.refuse_others()
  return eagle.Eagle3Heads(
      **fields, forecasts=depth, final_norm="own" if head_norm else None)


def _eagle3(found, keys, outer):
  """The fields that all EAGLE-3 files have in common."""
  fields = _one_layer(found, keys)
  norms = [name for name, key in (("each", "fc_norm"), ("all", "norm_before_fc")
                                  ) if outer(key)]
  if len(norms) > 1:
    found.fail("has both fc_norm and norm_before_fc; one of them is meant")
  target = found.target.config
  columns = found.columns("fc.weight")
  taps = taps_lib.of_eagle3(found, outer, columns // target.width)
  if columns != len(taps) * target.width:
    found.fail(f"has {columns} columns in fc.weight; {len(taps)} hidden states "
               f"of a target of width {target.width} have "
               f"{len(taps) * target.width}: give the target that it was made "
               "for, or correct the number of layers in its config.json")
  taps_lib.check(found, taps)
  return fields | dict(
      taps=taps, entry_norm=norms[0] if norms else None,
      ids=_ids(found, outer, found.shape("lm_head.weight")[0]),
      own_embedding=found.own("embed_tokens.weight", "embedding"))


def _ids(found, keys, size):
  """The target's ids of a vocabulary of `size`; () where it is the whole."""
  whole = found.target.vocab_size
  if keys.size("draft_vocab_size", size) != size:
    found.fail(f"has draft_vocab_size {keys('draft_vocab_size')} and {size} "
               "rows in lm_head.weight; the two do not belong together")
  found.used.update({"d2t", "t2d"})
  if size == whole:
    _check_whole(found)
    return ()
  if "d2t" not in found.tensors:
    found.fail(f"has no tensor d2t; without it nobody knows which {size} of "
               f"the target's {whole} tokens it drafts: download it again")
  offsets = np.asarray(found.tensors["d2t"].read(), np.int64)
  ids = np.arange(len(offsets)) + offsets
  if "t2d" in found.tensors:
    known = found.tensors["t2d"].read()
    # One project writes the number of the row there, and -1.
    known = np.flatnonzero(known >= 0 if (known < 0).any() else known)
    if not np.array_equal(known, ids):
      # Some tools write the ids themselves.
      if not np.array_equal(known, offsets):
        found.fail("has tensors d2t and t2d that name different tokens; the "
                   "two do not belong together")
      ids = known
  if len(ids) != size or (np.diff(ids) < 1).any() or not (
      0 <= ids[0] and ids[-1] < whole):
    found.fail(f"has in d2t the ids from {ids.min()} to {ids.max()} once row "
               f"numbers are added; {size} of 0 to {whole - 1} in order are "
               "needed: if it holds the ids themselves, subtract the row "
               "numbers")
  return tuple(ids.tolist())


def _check_whole(found):
  """Refuses a map of a whole vocabulary that changes tokens."""
  if "d2t" not in found.tensors:
    return
  offsets = np.asarray(found.tensors["d2t"].read(), np.int64)
  if offsets.any() and not np.array_equal(offsets, np.arange(len(offsets))):
    found.fail("has a tensor d2t that gives the tokens of a whole vocabulary "
               "other numbers; specjax reads those in the target's order")


def eagle3_speculators(found: Found) -> Heads:
  """EAGLE-3 and 3.1 of speculators, where `norm_output` says what is fed."""
  outer = found.keys()
  found.used.update(_OF_VERIFIER)
  keys = found.keys(outer, "transformer_layer_config")
  fields = _eagle3(found, keys, outer)
  heads = eagle.Eagle3Heads(
      **fields, forecasts=_steps(outer),
      norm_before_residual=outer.switch("norm_before_residual", False),
      feed_normed=outer.switch("norm_output", False))
  for given in (keys, outer):
    given.refuse_others()
  return heads


def _steps(keys):
  """Tokens that speculators notes to be drafted."""
  name = "proposal_methods"
  methods = keys.mapping("speculators_config").get(name) or [{}]
  if not isinstance(methods, list) or not isinstance(methods[0], Mapping):
    raise ValueError(f"{keys.source} has {methods!r} for {name}; a list of "
                     "objects is needed")
  return Keys(methods[0], f"{keys.source}, in {name},").size(
      "speculative_tokens", _DEPTH)


def mtp_deepseek(found: Found) -> Heads:
  """Modules after the target's layers, each with copies of its matrices.

  The first one reads what the target's head reads, after the final norm, and
  each further step what the module's own head read, as vLLM, SGLang and
  Megatron do. One module is used again on its own output. More of them are
  chained, as DeepSeek trains them; where each reads the target's state
  (MiMo-V2), set `chained=False` with `dataclasses.replace`.
  """
  first = found.target.config.layers
  modules = found.count(r"model\.layers\.(\d+)\.") - first
  for i in range(first, first + modules):
    for name, part in _MTP_DEEPSEEK_COPIES.items():
      found.copy(name.format(i=i), part)
  return _mtp_of_target(found, modules)


def mtp_qwen(found: Found) -> Heads:
  """The module in the files of a Qwen, which reads as DeepSeek's does."""
  modules = found.count(r"mtp\.layers\.(\d+)\.")
  if modules != 1:
    found.fail(f"has {modules} modules with one final norm; specjax reads one "
               "such module")
  return _mtp_of_target(found, modules)


def _mtp_of_target(found, modules):
  """Modules made as the target is, whose configuration has all other keys."""
  keys, config = found.keys(), found.target.config
  if keys("attn_output_gate") or keys("model_type") == "qwen3_next":
    found.fail("has attention with an output gate, which specjax does not "
               "have; take a drafter without it")
  fields = found.layer(keys)
  keys.refuse_others()
  found.check_sizes(fields)
  return mtp.MTPHeads(**fields | dict(
      layers=1, target_width=config.width, forecasts=modules, taps=(FINAL,),
      reuse=modules == 1, feed_normed=True))


def mtp_speculators(found: Found) -> Heads:
  """The one module of speculators; its next step reads its normed state.

  Its first one is trained on the target's state before the final norm.
  """
  outer = found.keys()
  keys = found.keys(outer, "transformer_layer_config")
  fields = found.layer(keys, 1)
  for name, part in (("embed_tokens", "embedding"), ("lm_head", "head")):
    found.copy(f"{name}.weight", part)
  keys.ignore("layer_types")
  for given in (keys, outer):
    given.refuse_others()
  config = found.target.config
  return mtp.MTPHeads(**fields | dict(
      layers=1, target_width=config.width, forecasts=_steps(outer),
      taps=(config.layers,), reuse=True, feed_normed=True))


def parallel(found: Found, *, from_anchor: bool) -> Heads:
  """DFlash of z-lab and SpecForge, DSpark of SpecForge and DeepSpec.

  Their layer ids are those of outputs; `from_anchor` is their convention. Keys
  lie in `dflash_config`, beside it, or in both places.
  """
  keys = found.keys()
  own = found.keys(keys, "dflash_config")
  for name, plain in (("projector_type", "dspark" if from_anchor else "dflash"),
                      ("sample_from_anchor", from_anchor)):
    if own(name, plain) != plain:
      found.fail(f"has {own(name)!r} for {name}, and drafters of this layout "
                 f"{plain!r}; specjax does not know what is meant")
  taps = taps_lib.named(found, keys, own, "dflash_config")
  heads = _parallel(found, keys, own, taps, own("block_size"), from_anchor,
                    True)
  for given in (keys, own):
    given.refuse_others()
  return heads


def parallel_speculators(found: Found, *, from_anchor: bool) -> Heads:
  """DFlash and DSpark of speculators.

  A mask that is the token after the target's vocabulary is a learned one.
  """
  outer = found.keys()
  keys = found.keys(outer, "transformer_layer_config")
  found.used.update(_OF_VERIFIER)
  outer("sliding_window_non_causal")  # there are no windows
  size = (found.shape("lm_head.weight")[0] if "lm_head.weight" in found.tensors
          else outer.size("draft_vocab_size"))
  from_anchor = outer.switch("sample_from_anchor", from_anchor)
  part = found.keys(outer, "dflash_config")
  heads = _parallel(
      found, keys, outer, taps_lib.named(found, outer, part, "dflash_config"),
      outer("block_size"), from_anchor, False,
      _ids(found, outer, size))
  if heads.markov == "rnn" and not from_anchor:
    found.fail("has markov_head_type 'rnn' and sample_from_anchor False; there "
               "the recurrence begins at the anchor's slot, and here after it: "
               "take another drafter")
  for given in (keys, outer, part):
    given.refuse_others()
  return heads


def _parallel(found, keys, own, taps, size, from_anchor, normed, ids=()):
  mask, whole = own("mask_token_id"), found.target.vocab_size
  learned = mask == whole and keys("vocab_size") == whole + 1
  if learned:
    keys.trust("vocab_size", whole)
  fields = found.layer(keys, max(1, found.count(r"layers\.(\d+)\.")))
  config = found.target.config
  found.check("width", fields["width"], config.width)
  found.copy("embed_tokens.weight", "embedding", more=learned)
  found.copy("lm_head.weight", "head", ids)
  if not taps:
    found.fail("does not name the target's layers whose input it reads; "
               f"{taps_lib.NAME_THEM}")
  taps_lib.check(found, taps, normed)
  rank = own("markov_rank", 0)
  kind = own("markov_head_type", "vanilla")
  if kind not in _MARKOV:
    found.fail(f"has markov_head_type {kind!r}; specjax knows "
               f"{', '.join(_MARKOV)}")
  with_markov = own("confidence_head_with_markov")
  confident = own("enable_confidence_head")
  if confident is None:
    confident = "confidence_head.proj.weight" in found.tensors
  return parallel_network.ParallelHeads(**fields | dict(
      block_size=size, taps=tuple(taps), ids=ids, from_anchor=from_anchor,
      markov=_MARKOV[kind] if rank else "none", **(
          dict(markov_rank=rank) if rank else {}),
      confidence=("markov" if with_markov else "hidden") if confident
      else "none", mask_token=None if learned else mask,
      logit_softcap=config.logit_softcap,
      embedding_scale=config.embedding_scale))


specforge = functools.partial(eagle3, bare=True)
