"""Weights as safetensors beside a JSON configuration.

A checkpoint is a directory with `config.json` and `model.safetensors`. The
tensors' names are the paths of the parameter tree, joined by dots.
"""

from collections.abc import Mapping
import dataclasses
import functools
import json
import os
import pathlib
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.configuration import TransformerConfig
from specjax.models.safetensors_files import check_arrays
from specjax.models.safetensors_files import check_float
from specjax.models.safetensors_files import converted
from specjax.models.safetensors_files import float_dtype
from specjax.models.safetensors_files import open_safetensors
from specjax.models.safetensors_files import StoredTensor
from specjax.models.safetensors_files import write_safetensors
from specjax.models.transformer import default_dtype
from specjax.models.transformer import Transformer
from specjax.utils import processes
from specjax.utils.files import write_json


def save_model(directory: str | os.PathLike[str], model: Transformer,
               params: Mapping[str, Any], dtype: Any = None) -> None:
  """Writes the model to `directory`; each file appears whole or not at all.

  Args:
    directory: created if needed.
    model: the model.
    params: its parameters; all processes call it if these are split over them.
    dtype: to store the weights in; None keeps theirs.

  Raises:
    ValueError: `dtype` does not hold the weights, or one is no array.
  """
  dtype = dtype and float_dtype(dtype)
  flat = flax.traverse_util.flatten_dict(params, sep=".")
  check_arrays(flat)
  directory = pathlib.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  write_safetensors(
      directory / "model.safetensors",
      {name: (x.shape, dtype or x.dtype) for name, x in flat.items()},
      (converted(np.asarray(processes.gathered(x)), dtype)
       for x in flat.values()))
  write_json(directory / "config.json", dataclasses.asdict(model.config),
             indent=2)


def load_model(directory: str | os.PathLike[str], dtype: Any = None
               ) -> tuple[Transformer, dict[str, Any]]:
  """Reads a checkpoint.

  Args:
    directory: where `save_model` wrote it.
    dtype: of the parameters; None is `default_dtype()`.

  Returns:
    `(model, params)`.

  Raises:
    ValueError: a file is missing or truncated, or the weights do not fit the
      configuration.
  """
  directory = pathlib.Path(directory)
  config_path = directory / "config.json"
  weights_path = directory / "model.safetensors"
  for path in (config_path, weights_path):
    if not path.is_file():
      raise ValueError(f"no checkpoint at {directory}: {path.name} is missing")
  try:
    config = TransformerConfig(**json.loads(config_path.read_text("utf-8")))
  except (json.JSONDecodeError, TypeError) as e:
    raise ValueError(f"{config_path} is not a model configuration: {e}"
                     ) from None
  tensors = _fused(config, open_safetensors(weights_path))
  model = Transformer(config)
  expected = flax.traverse_util.flatten_dict(
      jax.eval_shape(model.init, jax.random.key(0)), sep=".")
  for name in sorted(set(expected) | set(tensors)):
    has = tensors[name].shape if name in tensors else "nothing"
    wants = expected[name].shape if name in expected else "nothing"
    if has != wants:
      raise ValueError(
          f"{weights_path} holds {has} for {name} where {config_path.name} "
          f"asks for {wants}; the two files do not belong together")
    check_float(str(weights_path), name, tensors[name])
  dtype = float_dtype(dtype or default_dtype())
  # A copy that is waited for: the file's pages are given back.
  params = {name: jnp.array(tensor.read(), dtype).block_until_ready()
            for name, tensor in tensors.items()}
  return model, flax.traverse_util.unflatten_dict(params, sep=".")


def _fused(config, tensors):
  """What earlier versions stored apart is joined: q, k and v; gate and up."""
  shapes = {part: (config.width, heads * config.head_dim) for part, heads in (
      ("query", config.heads), ("key", config.kv_heads),
      ("value", config.kv_heads))}
  shapes |= dict.fromkeys(("gate", "up"), (config.width, config.mlp_width))
  shapes |= {"qkv": (config.width, config.kv_heads, config.group + 2,
                     config.head_dim),
             "gate_up": (config.width, 2, config.mlp_width)}
  by_head = lambda x: x.reshape(len(x), config.kv_heads, -1, config.head_dim)
  joins = {
      ("qkv", "query", "key", "value"): lambda parts: np.concatenate(
          [by_head(x) for x in parts], axis=2),
      ("gate_up", "gate", "up"): lambda parts: np.stack(parts, axis=1)}
  tensors = dict(tensors)
  for layer in {name.split(".")[0] for name in tensors}:
    for (joined, *parts), join in joins.items():
      names = [f"{layer}.{part}.kernel" for part in parts]
      if all(name in tensors and tensors[name].shape == shapes[part]
             for name, part in zip(names, parts)):
        parts = [tensors.pop(name) for name in names]
        tensors[f"{layer}.{joined}.kernel"] = StoredTensor(
            shapes[joined], parts[0].dtype,
            functools.partial(_joined, parts, join))
  return tensors


def _joined(parts, join, dtype):
  del dtype
  return join([part.read() for part in parts])
