"""Functions that save and load trained draft heads.

Heads are networks that draft from the target's hidden states, for example
Medusa heads or an EAGLE layer. The loader checks that the heads fit the target.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import json
import os
import pathlib
from typing import Any

import flax.traverse_util
import jax
import safetensors.numpy

from specjax.methods.networks import Heads
from specjax.methods.networks import Params
from specjax.models.safetensors_files import check_arrays
from specjax.models.safetensors_files import converted
from specjax.models.safetensors_files import float_dtype
from specjax.models.safetensors_files import open_safetensors
from specjax.models.transformer import default_dtype
from specjax.models.transformer import Transformer
from specjax.models.weights import fill
from specjax.utils.files import atomically

_CONFIG, _WEIGHTS = "heads.json", "heads.safetensors"


def save_heads(directory: str | os.PathLike[str], heads: Heads, params: Params,
               target: Transformer, dtype: jax.typing.DTypeLike | None = None
               ) -> None:
  """Writes the configuration and the parameters of draft heads to two files.

  The file `heads.json` contains the configuration, and `heads.safetensors`
  contains the parameters. Each file is written atomically.

  Args:
    directory: output directory, created if needed. It may also contain the
      target's checkpoint.
    heads: draft heads of any class in `METHODS`.
    params: parameters of the heads, a nested dictionary. The name of an array
      in the file consists of the keys on the path to the array, joined by dots.
    target: target model of the heads. `heads.json` also contains the target's
      width, vocabulary size and number of layers. `load_heads` compares them.
    dtype: dtype of the stored weights. None means the dtype of the parameters.

  Raises:
    ValueError: `dtype` cannot store the weights, or a leaf is not an array.
  """
  flat = _flat(params)
  check_arrays(flat)
  directory = pathlib.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  tensors = {name: converted(jax.device_get(x), dtype)
             for name, x in flat.items()}
  config = json.dumps({"kind": heads.kind, "heads": dataclasses.asdict(heads),
                       "target": _sizes(target)}, indent=2) + "\n"
  for name, data in ((_WEIGHTS, safetensors.numpy.save(tensors)),
                     (_CONFIG, config.encode())):
    with atomically(directory / name) as f:
      f.write(data)


def load_heads(directory: str | os.PathLike[str], target: Transformer,
               dtype: jax.typing.DTypeLike, kinds: Sequence[type[Heads]]
               ) -> tuple[Heads, dict[str, Any]]:
  """Loads draft heads that `save_heads` wrote.

  Args:
    directory: directory with `heads.json` and `heads.safetensors`.
    target: target model.
    dtype: dtype of the loaded parameters. None means `default_dtype()`.
    kinds: classes of heads that the directory may contain.

  Returns:
    `(heads, params)`, the configuration of the heads and their parameters.

  Raises:
    ValueError: a file is missing or damaged, the configuration does not match
      the weights, or the heads were trained for a target of another width,
      vocabulary size or number of layers.
  """
  directory = pathlib.Path(directory)
  config_path, weights_path = directory / _CONFIG, directory / _WEIGHTS
  for path in (config_path, weights_path):
    if not path.is_file():
      raise ValueError(f"{directory} contains no heads: {path.name} is "
                       "missing")
  try:
    record = json.loads(config_path.read_text("utf-8"))
    by_name = {kind.kind: kind for kind in kinds}
    heads = by_name[record["kind"]](**record["heads"])
    trained_for = _described(record["target"])
  except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as e:
    raise ValueError(f"{config_path} is not a configuration of heads: "
                     f"{type(e).__name__} {e}; copy the directory again, or "
                     "run train_drafter.py again") from None
  if trained_for != _described(_sizes(target)):
    raise ValueError(
        f"the heads in {directory} were trained for a target of {trained_for}, "
        f"but this target has {_described(_sizes(target))}: give the target "
        "that they were trained for, or train heads with train_drafter.py")
  shapes = jax.eval_shape(lambda key: heads.init(key, target.init(key)),
                          jax.random.key(0))
  return heads, fill(
      shapes, None, open_safetensors(weights_path),
      float_dtype(dtype or default_dtype()), source=str(weights_path),
      kind=f"the {type(heads).__name__} of {config_path.name}")


def _flat(params: Params) -> dict[str, jax.Array]:
  return flax.traverse_util.flatten_dict(params, sep=".")


def _sizes(target: Transformer) -> dict[str, int]:
  c = target.config
  return {"width": c.width, "vocab_size": c.vocab_size, "layers": c.layers}


def _described(sizes: Mapping[str, int]) -> str:
  return (f"width {sizes['width']}, {sizes['vocab_size']} tokens and "
          f"{sizes['layers']} layers")
