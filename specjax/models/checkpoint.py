"""Checkpoints of specjax: safetensors and a JSON configuration.

A checkpoint is a directory with `config.json` and `model.safetensors`. The name
of a tensor is its path in the parameter tree, joined by dots.
"""

from collections.abc import Mapping
import dataclasses
import json
import os
import pathlib
from typing import Any

import chex
import flax.traverse_util
import jax
import numpy as np

from specjax.models.configuration import TransformerConfig
from specjax.models.safetensors_files import check_arrays
from specjax.models.safetensors_files import converted
from specjax.models.safetensors_files import float_dtype
from specjax.models.safetensors_files import open_safetensors
from specjax.models.safetensors_files import write_safetensors
from specjax.models.transformer import default_dtype
from specjax.models.transformer import Transformer
from specjax.models.weights import fill
from specjax.utils import processes
from specjax.utils.files import write_json


def save_model(directory: str | os.PathLike[str], model: Transformer,
               params: Mapping[str, chex.ArrayTree],
               dtype: jax.typing.DTypeLike | None = None) -> None:
  """Writes a checkpoint. Each file is replaced atomically.

  Args:
    directory: directory of the checkpoint, created if it does not exist.
    model: the model.
    params: parameters of the model. If `params` are sharded over processes, all
      processes must call this function.
    dtype: dtype of the stored weights. None means the dtypes of `params`.

  Raises:
    ValueError: a weight overflows in `dtype`, or a parameter is not an array.
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


def load_model(directory: str | os.PathLike[str],
               dtype: jax.typing.DTypeLike | None = None
               ) -> tuple[Transformer, dict[str, Any]]:
  """Reads a checkpoint.

  Args:
    directory: directory written by `save_model`.
    dtype: dtype of the parameters. None means `default_dtype()`.

  Returns:
    `(model, params)`.

  Raises:
    ValueError: a file is missing or truncated, or the weights do not match the
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
  model = Transformer(config)
  return model, fill(
      jax.eval_shape(model.init, jax.random.key(0)), None,
      open_safetensors(weights_path), float_dtype(dtype or default_dtype()),
      source=str(weights_path), kind=f"a model of {config_path.name}")
