"""From heads to the configurations that they are read from.

Nothing is checked here: `export_drafter` reads what was written again, and
refuses a layout in which something of the heads is lost.
"""

import dataclasses
from typing import Any

from specjax.models.configuration import TransformerConfig
from specjax.models.heads import Heads
from specjax.models.published.export import express

_MARKOV = {"none": "vanilla", "plain": "vanilla", "gated": "gated",
           "rnn": "rnn"}
# Of DeepSpec: what only trains, and what its models ask for all the same.
_TRAINS_EAGLE = {"ttt_length": 7, "step_loss_decay": 0.8}
_TRAINS_DSPARK = {"num_anchors": 512}


def _layers(heads, **changed):
  """The keys of the draft layers."""
  fields = {field.name: getattr(heads, field.name)
            for field in dataclasses.fields(TransformerConfig)}
  model_type, keys = express(TransformerConfig(**fields | dict(
      tie_embeddings=False) | changed))
  return {"model_type": model_type, **keys}


def medusa(heads: Heads) -> dict[str, Any]:
  return {"medusa_num_heads": heads.heads, "medusa_num_layers": heads.blocks}


def hydra(heads: Heads) -> dict[str, Any]:
  return {"hydra_num_heads": heads.heads, "hydra_num_layers": heads.blocks,
          "hydra_head_arch": "mlp", "grounded_heads": True,
          "hidden_state_offset": 0}


def eagle1(heads: Heads) -> dict[str, Any]:
  return {"architectures": ["LlamaForCausalLM"], **_layers(heads),
          "bias": heads.fusion_bias}


def _eagle3(heads):
  return {"draft_vocab_size": heads.draft_size,
          "fc_norm": heads.entry_norm == "each",
          "norm_before_fc": heads.entry_norm == "all"}


def safeailab(heads: Heads) -> dict[str, Any]:
  return {"architectures": ["LlamaForCausalLM"], **_layers(heads),
          **_eagle3(heads)}


def specforge(heads: Heads) -> dict[str, Any]:
  return {"architectures": ["LlamaForCausalLMEagle3"], **_layers(heads),
          **_eagle3(heads), "norm_output": heads.final_norm is not None,
          "eagle_config": {"eagle_aux_hidden_state_layer_ids": _ids(heads)}}


def deepspec(heads: Heads) -> dict[str, Any]:
  return {"architectures": ["Qwen3Eagle3Model"], **_layers(heads),
          **_eagle3(heads), "target_layer_ids": _ids(heads), **_TRAINS_EAGLE}


def _ids(heads):
  """Numbers of the layers whose outputs are read."""
  return [tap - 1 for tap in heads.taps]


def _speculators(heads, algorithm, architecture, **keys):
  return {
      "speculators_model_type": algorithm, "architectures": [architecture],
      "transformer_layer_config": _layers(heads), **keys,
      "speculators_config": {
          "algorithm": algorithm, "default_proposal_method": "greedy",
          "proposal_methods": [{"proposal_type": "greedy",
                                "speculative_tokens": heads.num_forecasts}],
          "verifier": {"name_or_path": None, "architectures": []}}}


def eagle3_speculators(heads: Heads) -> dict[str, Any]:
  return _speculators(
      heads, "eagle3", "Eagle3Speculator", **_eagle3(heads),
      eagle_aux_hidden_state_layer_ids=list(heads.taps),
      norm_before_residual=heads.norm_before_residual,
      norm_output=heads.feed_normed)


def mtp_speculators(heads: Heads) -> dict[str, Any]:
  return _speculators(heads, "mtp", "MTPDraftModel",
                      num_nextn_predict_layers=1)


def mtp_qwen(heads: Heads) -> dict[str, Any]:
  del heads  # the names of the tensors say all
  return {}


def mtp_deepseek(heads: Heads) -> dict[str, Any]:
  return {"num_nextn_predict_layers": heads.modules}


def _parallel(heads, architecture):
  return {"architectures": [architecture],
          **_layers(heads, logit_softcap=None, embedding_scale=1.0),
          "block_size": heads.block_size}


def _dspark(heads):
  markov = heads.markov != "none"
  return {"markov_rank": heads.markov_rank if markov else 0,
          "markov_head_type": _MARKOV[heads.markov],
          "enable_confidence_head": heads.confidence != "none",
          "confidence_head_with_markov": heads.confidence == "markov"}


def _parallel_speculators(heads, algorithm, architecture, **keys):
  written = _speculators(
      heads, algorithm, architecture, block_size=heads.block_size,
      draft_vocab_size=heads.draft_size, mask_token_id=heads.mask_token,
      aux_hidden_state_layer_ids=list(heads.taps),
      sample_from_anchor=heads.from_anchor, **keys)
  return written | {"transformer_layer_config": _layers(
      heads, logit_softcap=None, embedding_scale=1.0)}


def dflash_speculators(heads: Heads) -> dict[str, Any]:
  return _parallel_speculators(heads, "dflash", "DFlashSpeculator")


def dspark_speculators(heads: Heads) -> dict[str, Any]:
  return _parallel_speculators(
      heads, "dspark", "DSparkSpeculator", **_dspark(heads))


def _own(heads):
  return {"mask_token_id": heads.mask_token, "target_layer_ids": _ids(heads)}


def dflash(heads: Heads) -> dict[str, Any]:
  return {**_parallel(heads, "DFlashDraftModel"), "dflash_config": _own(heads)}


def dspark_specforge(heads: Heads) -> dict[str, Any]:
  return {**_parallel(heads, "DSparkDraftModel"), "dflash_config": {
      "projector_type": "dspark", **_own(heads), **_dspark(heads)}}


def dspark_deepspec(heads: Heads) -> dict[str, Any]:
  return {**_parallel(heads, "Qwen3DSparkModel"), **_own(heads),
          **_dspark(heads), **_TRAINS_DSPARK}
