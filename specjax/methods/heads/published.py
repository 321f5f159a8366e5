"""File layouts of published Medusa and Hydra heads."""

import dataclasses
import functools
from typing import Any

import chex

from specjax.methods.heads.hydra import HydraHeads
from specjax.methods.heads.medusa import MedusaHeads
from specjax.methods.layouts import check_target
from specjax.methods.layouts import Found
from specjax.methods.layouts import Layout
from specjax.methods.layouts import Writer
from specjax.models.tensor_layouts import Each
from specjax.models.tensor_layouts import table

_MEDUSA = {
    "blocks": Each(("{}.{}.linear",), axes=2),
    "block_bias": Each(("{}.{}.linear",), axes=2),
    "output": Each(("{}.{blocks}",)),
}
_MEDUSA_VLLM = {
    "blocks": Each(("blocks.{}.layers.{}",), axes=2),
    "block_bias": Each(("blocks.{}.layers.{}",), axes=2),
    "output": Each(("lm_heads.{}",)),
}
_HYDRA = table({
    "head_{i}.skip": "hydra_mlp.{i}.0.res_connection",
    "head_{i}.inner": "hydra_mlp.{i}.0.linear",
    "head_{i}.block_{j}": "hydra_mlp.{i}.{j}.linear",
    "head_{i}.output": "hydra_lm_head.{i}",
})


def _read_medusa(found: Found) -> MedusaHeads:
  """Returns the heads of a file in the format of the Medusa repository.

  The tensor names determine the number of heads, because some published
  configurations contain the number 2 for 5 heads.
  """
  keys = found.keys()
  if keys("model_type"):  # the file has a copy of the target's configuration
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
  check_target(found, heads)
  return heads


def _read_medusa_vllm(found: Found) -> MedusaHeads:
  """Returns the Medusa heads of a file in vLLM's format.

  Raises:
    ValueError: the heads have a reduced vocabulary or a shared output matrix.
  """
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
      found.fail(f"has {keys(name)!r} for {name}, but specjax supports only "
                 f"{value!r}, Medusa heads with the complete vocabulary and a "
                 "separate output matrix each")
  keys.ignore("max_paths", "topk", "max_seq_len")
  keys.refuse_others()
  check_target(found, heads)
  return heads


def _read_hydra(found: Found) -> HydraHeads:
  """Returns the Hydra heads of a file with Hydra's architecture "mlp".

  Raises:
    ValueError: the file has another architecture.
  """
  keys = found.keys()
  for name in ("hydra_num_heads", "hydra_num_layers"):
    keys(name)
  for name, plain, otherwise in (
      ("hydra_head_arch", "mlp", "mlp"), ("grounded_heads", True, False),
      ("hidden_state_offset", 0, 0)):
    if keys(name, otherwise) != plain:
      found.fail(f"has {name} {keys(name, otherwise)!r}; specjax supports "
                 f"Hydra heads with {name} {plain!r}")
  keys.refuse_others()
  rows, width = found.shape("hydra_mlp.0.0.linear.weight")
  found.check("width", width, 2 * rows)
  heads = HydraHeads(
      heads=found.count(r"hydra_mlp\.(\d+)\."), width=rows,
      blocks=found.count(r"hydra_mlp\.0\.(\d+)\."),
      vocab_size=found.shape("hydra_lm_head.0.weight")[0])
  check_target(found, heads)
  return heads


def _own_outputs(heads: MedusaHeads) -> MedusaHeads:
  """Returns heads of the same sizes with separate output matrices."""
  return dataclasses.replace(heads, output="own", rank=MedusaHeads.rank)


def _merged(form: MedusaHeads, heads: MedusaHeads, params: chex.ArrayTree,
            target_params: chex.ArrayTree) -> Any:
  del form
  return heads.merged(params, target_params)[1]


def _write_medusa(heads: MedusaHeads) -> dict[str, Any]:
  return {"medusa_num_heads": heads.heads, "medusa_num_layers": heads.blocks}


def _write_medusa_vllm(heads: MedusaHeads) -> dict[str, Any]:
  return {"architectures": ["MedusaModel"], "model_type": "medusa",
          "hidden_size": heads.width, "vocab_size": heads.vocab_size,
          "truncated_vocab_size": heads.vocab_size, "num_heads": heads.heads,
          "num_hidden_layers": heads.blocks, "medusa_fc_bias": heads.bias}


_medusa = functools.partial(
    Layout, kind="medusa",
    sizes=lambda heads, target: {"blocks": heads.blocks})
# Servers read the first two layouts: Text Generation Inference reads "medusa",
# vLLM reads "medusa of vllm".
LAYOUTS = {
    "medusa": _medusa(
        read=_read_medusa, names=_MEDUSA, sign=r"0\.0\.linear\.",
        file="medusa_lm_head.safetensors", write=Writer(
            config=_write_medusa, form=_own_outputs, params=_merged)),
    "medusa of vllm": _medusa(
        read=_read_medusa_vllm, names=_MEDUSA_VLLM,
        architectures=("MedusaModel",), sign=r"blocks\.0\.layers\.0\.",
        write=Writer(config=_write_medusa_vllm, form=_own_outputs,
                     params=_merged)),
    "medusa in its target": _medusa(
        read=_read_medusa, names=_MEDUSA, sign=r"medusa_head\.",
        prefix="medusa_head."),
    "hydra": Layout(
        kind="hydra", read=_read_hydra, names=_HYDRA,
        file="hydra_lm_head.safetensors", sign=r"hydra_mlp\."),
}
