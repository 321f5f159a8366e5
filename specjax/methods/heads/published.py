"""File layouts of published Medusa and Hydra heads, and of UNO's adapters."""

import dataclasses
import functools
import pathlib
from typing import Any

import chex
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from specjax.methods.heads.hydra import HydraHeads
from specjax.methods.heads.medusa import MedusaHeads
from specjax.methods.heads.pass_embeddings import PaSSEmbeddings
from specjax.methods.layouts import check_target
from specjax.methods.layouts import Found
from specjax.methods.layouts import Layout
from specjax.methods.layouts import Writer
from specjax.models.architectures import ARCHITECTURES
from specjax.models.configuration_keys import Keys
from specjax.models.export import express
from specjax.models.safetensors_files import StoredTensor
from specjax.models.tensor_layouts import Each
from specjax.models.tensor_layouts import table
from specjax.models.weights import Place
from specjax.models.weights import places
from specjax.utils.files import read_json

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


# Keys of adapter_config.json that do not change the output.
_PEFT_NOTES = """
    base_model_name_or_path inference_mode init_lora_weights lora_dropout
    megatron_core peft_type peft_version qalora_group_size revision
    runtime_config target_modules task_type
""".split()
_NOISE = 7  # noise tokens of a round in the authors' examples for SGLang


def _rank(found: Found) -> tuple[int, float]:
  """Returns the rank and the factor of the adapters in adapter_config.json."""
  keys = Keys(
      read_json(pathlib.Path(found.source) / "adapter_config.json",
                "download it again"), f"the configuration of {found.source}")
  keys.ignore(*_PEFT_NOTES)
  rank, alpha = keys.size("r"), keys.number("lora_alpha")
  if keys("bias", "none") != "none":
    keys.refuse("bias", keys("bias"))
  rooted = keys.switch("use_rslora", False)
  keys.refuse_others()
  return rank, alpha / (rank**0.5 if rooted else rank)


def _adapted(found: Found) -> list[tuple[Place, dict[int, str]]]:
  """Returns the target's kernels, each with the names of its adapters.

  A kernel of specjax contains one or more matrices of the file. The adapter of
  the i-th matrix has the tensors `{name}A.weight` and `{name}B.weight`, where
  `name` is the i-th value of the dict. Some matrices may have no adapter.
  """
  name = express(found.target.config)[0]
  prefix = f"base_model.model.{ARCHITECTURES[name].prefix}"
  kernels, known = [], set()
  for place in places(jax.eval_shape(found.target.init, jax.random.key(0)),
                      ARCHITECTURES[name].names):
    if place.path.endswith(".kernel"):
      parts = [f"{prefix}{part.removesuffix('weight')}lora_"
               for part in place.names]
      kernels.append((place, {i: part for i, part in enumerate(parts)
                              if f"{part}A.weight" in found.tensors}))
      known |= {f"{part}{side}.weight" for part in parts for side in "AB"}
  for name in sorted(found.tensors.keys() - known):
    found.fail(f"has the tensor {name}, an adapter of no matrix in a layer of "
               "the target; give the target for which it was trained")
  return kernels


def _load_uno(found: Found, dtype: np.dtype
              ) -> tuple[PaSSEmbeddings, dict[str, Any]]:
  """Returns the look-ahead tokens of UNO's adapter, and their parameters.

  The adapter has PEFT's format, and its files do not contain the number of
  look-ahead tokens. The inputs of these tokens are embeddings of noise tokens,
  which are drawn from the vocabulary. The authors draw new ones in every round.
  """
  kernels, (rank, scale) = _adapted(found), _rank(found)
  if found.target_params is None:
    raise ValueError("target_params is None; the inputs of UNO's adapter are "
                     "embeddings of the target: give the target's parameters")
  config = found.target.config
  heads = PaSSEmbeddings(
      count=_NOISE, width=config.width,
      lookahead_rank=rank * max(len(parts) for _, parts in kernels))
  adapters = {}
  for place, parts in kernels:
    width, *outputs = place.shape
    shapes = place.stored.shapes(config, (rank, *outputs))
    # A kernel without an adapter gets one of rank 1 that adds nothing.
    inner = [] if parts else [np.zeros((width, 1))]
    outer = [] if parts else [np.zeros((1, *outputs))]
    for i, part in parts.items():
      a, b = (f"{part}{side}.weight" for side in "AB")
      for name, shape in ((a, (rank, width)), (b, shapes[i])):
        if found.shape(name) != shape:
          found.fail(f"has the tensor {name} {found.shape(name)}, but the "
                     f"target and the configuration require {shape}; give the "
                     "target for which the adapter was trained")
      values = [np.zeros(shape, np.float32) for shape in shapes]
      values[i] = scale * found.tensors[b].read(np.float32)
      inner.append(found.tensors[a].read(np.float32).T)
      outer.append(place.stored.join(config, (rank, *outputs), [
          StoredTensor(x.shape, x.dtype, lambda x=x: x) for x in values],
                                     np.dtype(np.float32)))
    path = tuple(place.path.split(".")[:-1])
    adapters[*path, "adapter_in"] = np.concatenate(inner, 1)
    adapters[*path, "adapter_out"] = np.concatenate(outer)
  noise = np.random.default_rng(0).integers(config.vocab_size, size=heads.count)
  embeddings = found.target_params["embedding"][noise]
  return heads, {"embeddings": jnp.asarray(embeddings, dtype),
                 "adapters": traverse_util.unflatten_dict({
                     path: jnp.asarray(x, dtype)
                     for path, x in adapters.items()})}


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
    "uno": Layout(
        kind="lookahead", load=_load_uno,
        file="adapter_model.safetensors", sign=r"base_model\.model\."),
}
