"""From heads to the configurations that they are read from.

Nothing is checked here: `export_drafter` reads each configuration again, and
refuses a layout in which something of the heads is lost.
"""

import dataclasses
from typing import Any

from specjax.methods.networks import Heads
from specjax.methods.published.tables import input_size
from specjax.models.configuration import TransformerConfig
from specjax.models.published.export import express

_MARKOV = {"none": "vanilla", "plain": "vanilla", "gated": "gated",
           "rnn": "rnn"}


def _layers(heads, **changed):
  """Returns the keys of the draft layers."""
  fields = {field.name: getattr(heads, field.name)
            for field in dataclasses.fields(TransformerConfig)}
  model_type, keys = express(TransformerConfig(**fields | dict(
      tie_embeddings=False) | changed))
  return {"model_type": model_type, **keys}


def medusa(heads: Heads) -> dict[str, Any]:
  return {"medusa_num_heads": heads.heads, "medusa_num_layers": heads.blocks}


def medusa_vllm(heads: Heads) -> dict[str, Any]:
  return {"architectures": ["MedusaModel"], "model_type": "medusa",
          "hidden_size": heads.width, "vocab_size": heads.vocab_size,
          "truncated_vocab_size": heads.vocab_size, "num_heads": heads.heads,
          "num_hidden_layers": heads.blocks, "medusa_fc_bias": heads.bias}


def eagle1(heads: Heads) -> dict[str, Any]:
  return {"architectures": ["LlamaForCausalLM"], **_layers(heads),
          "bias": heads.fusion_bias, "num_lookahead_tokens": heads.forecasts}


def _eagle3(heads):
  return {"draft_vocab_size": heads.draft_size,
          "fc_norm": heads.entry_norm == "each",
          "norm_before_fc": heads.entry_norm == "all"}


def specforge(heads: Heads) -> dict[str, Any]:
  return {"architectures": ["LlamaForCausalLMEagle3"], **_layers(heads),
          **_eagle3(heads), "norm_output": heads.final_norm is not None,
          "num_lookahead_tokens": heads.forecasts,
          "eagle_config": {"eagle_aux_hidden_state_layer_ids": _ids(heads)}}


def _ids(heads):
  """Returns the numbers of the layers whose outputs are read."""
  return [tap - 1 for tap in heads.taps]


def _speculators(heads, algorithm, architecture, layers, **keys):
  """Returns a configuration of speculators; `export_drafter` adds the target.
  """
  return {
      "speculators_model_type": algorithm, "architectures": [architecture],
      "transformer_layer_config": layers, **keys,
      "speculators_config": {
          "algorithm": algorithm, "default_proposal_method": "greedy",
          "proposal_methods": [{"proposal_type": "greedy",
                                "speculative_tokens": heads.num_forecasts}]}}


def eagle3_speculators(heads: Heads) -> dict[str, Any]:
  return _speculators(
      heads, "eagle3", "Eagle3Speculator", _layers(heads), **_eagle3(heads),
      eagle_aux_hidden_state_layer_ids=list(heads.taps),
      norm_before_residual=heads.norm_before_residual,
      norm_output=heads.feed_normed)


def mtp_speculators(heads: Heads) -> dict[str, Any]:
  return _speculators(heads, "mtp", "MTPDraftModel", _layers(heads),
                      num_nextn_predict_layers=1)


def _parallel_speculators(heads, algorithm, architecture, **keys):
  """A learned mask is the token after the target's vocabulary."""
  mask = heads.mask_token
  return _speculators(
      heads, algorithm, architecture, _layers(
          heads, vocab_size=input_size(heads), logit_softcap=None,
          embedding_scale=1.0),
      block_size=heads.block_size, draft_vocab_size=heads.draft_size,
      mask_token_id=heads.vocab_size if mask is None else mask,
      aux_hidden_state_layer_ids=list(heads.taps), **keys)


def dflash_speculators(heads: Heads) -> dict[str, Any]:
  return _parallel_speculators(heads, "dflash", "DFlashSpeculator")


def dspark_speculators(heads: Heads) -> dict[str, Any]:
  return _parallel_speculators(
      heads, "dspark", "DSparkSpeculator", sample_from_anchor=heads.from_anchor,
      markov_rank=heads.markov_rank if heads.markov != "none" else 0,
      markov_head_type=_MARKOV[heads.markov],
      enable_confidence_head=heads.confidence != "none",
      confidence_head_with_markov=heads.confidence == "markov")


def dflash(heads: Heads) -> dict[str, Any]:
  return {"architectures": ["DFlashDraftModel"],
          **_layers(heads, logit_softcap=None, embedding_scale=1.0),
          "block_size": heads.block_size,
          "dflash_config": {"mask_token_id": heads.mask_token,
                            "target_layer_ids": _ids(heads)}}
