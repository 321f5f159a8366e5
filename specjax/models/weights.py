"""Loading of parameters from the named tensors of a file of any format."""

from collections.abc import Collection
from collections.abc import Mapping
import re
from typing import Any
from typing import NamedTuple

import chex
import jax
import numpy as np

from specjax.models.model_files import unmerged
from specjax.models.safetensors_files import check_float
from specjax.models.safetensors_files import NOT_QUANTIZED
from specjax.models.safetensors_files import StoredTensor
from specjax.models.tensor_layouts import Ids
from specjax.models.tensor_layouts import locate
from specjax.models.tensor_layouts import Same
from specjax.models.tensor_layouts import Stored
from specjax.models.tensor_layouts import Table

# Tensors of AWQ, GPTQ, bitsandbytes, compressed-tensors, FP8 and mlx.
_QUANTIZED = re.compile(
    r"\.(qweight|qzeros|scales|g_idx|SCB|weight\.(absmax|quant_map|quant_state"
    r"\..*)|weight_packed|weight_scale|weight_scale_inv)$")
# Tensors of PEFT.
_ADAPTER = re.compile(
    r"\.(lora_([AB]|embedding_[AB]|magnitude_vector)|base_layer"
    r"|modules_to_save|original_module)(\.|$)")


class Place(NamedTuple):
  """Location of a parameter in a file.

  Attributes:
    path: keys of the parameter in its tree, joined by dots.
    shape: shape of the parameter.
    stored: layout of the tensors that contain the parameter.
    names: names of these tensors.
  """

  path: str
  shape: tuple[int, ...]
  stored: Stored
  names: list[str]


def places(template: chex.ArrayTree, table: Table | None,
           sizes: Mapping[str, int] | None = None) -> list[Place]:
  """Returns the locations of a tree's parameters, in the order of the tree.

  Args:
    template: tree of dicts. Each leaf has a `shape`.
    table: table of tensor names, see `locate`. None means that the name of a
      tensor is the path of its parameter, as in the files of `save_model`.
    sizes: values of the words in braces in the table's names, or None.

  Raises:
    ValueError: the table has no entry for a parameter.
  """
  result = []
  for keys, leaf in jax.tree_util.tree_flatten_with_path(template)[0]:
    path = ".".join(entry.key for entry in keys)
    try:
      stored, names = (Same((path,)), [path]) if table is None else locate(
          table, path, leaf.shape, sizes or {})
    except KeyError:
      raise ValueError(
          f"the layout has no tensor for the parameter {path}") from None
    result.append(Place(path, leaf.shape, stored, names))
  return result


def fill(template: chex.ArrayTree, table: Table | None,
         tensors: Mapping[str, StoredTensor], dtype: np.dtype, *, source: str,
         kind: str, config: Any = None, sizes: Mapping[str, int] | None = None,
         used: Collection[str] = ()) -> Any:
  """Returns a tree of parameters, read from the tensors of a file.

  An unused tensor is an error. Parameters are copied to the device one at a
  time, so the host's memory contains at most one of them.

  Args:
    template: tree of the parameters' shapes, such as a result of
      `jax.eval_shape`.
    table: table of tensor names, see `places`.
    tensors: tensors of the file, by name.
    dtype: dtype of the parameters, except those with `Stored.wide`.
    source: name of the file in errors.
    kind: name of the architecture or the layout in errors.
    config: configuration with the sizes that layouts require, such as a
      `TransformerConfig`.
    sizes: values of the words in braces in the table's names, or None.
    used: names of tensors that the file may contain and that are ignored.

  Raises:
    ValueError: a tensor is missing, unknown, quantised or of another shape, or
      the table lacks a parameter. Errors are raised before any tensor is read.
  """
  _check_plain(source, tensors)
  stored = places(template, table, sizes)
  used = set(used)
  for place in stored:
    for name, shape in zip(place.names,
                           place.stored.shapes(config, place.shape)):
      _check(tensors, name, tuple(shape), source, kind)
      if not isinstance(place.stored, Ids):
        check_float(source, name, tensors[name])
      used.add(name)
  for name in sorted(tensors.keys() - used):
    raise ValueError(f"{source} has the tensor {name} {tensors[name].shape}, "
                     f"which {kind} does not have; give files of one model, or "
                     "a model that specjax supports")
  # Waiting for each transfer frees the host's array before the next is read.
  return jax.tree.unflatten(jax.tree.structure(template), [
      jax.device_put(place.stored.join(
          config, place.shape,
          # A parameter may have fewer tensors than the table has names.
          [tensors[name] for name, _ in zip(
              place.names, place.stored.shapes(config, place.shape))],
          place.stored.dtype(dtype))).block_until_ready() for place in stored])


def _check_plain(source: str, tensors: Collection[str]) -> None:
  """Raises `ValueError` for quantised weights and for unmerged adapters."""
  for name in tensors:
    if _QUANTIZED.search(name):
      raise ValueError(f"{source} has the tensor {name}, so the weights are "
                       f"quantised; {NOT_QUANTIZED}")
    if _ADAPTER.search(name):
      raise ValueError(unmerged(
          f"{source} has the tensor {name} of an adapter, which"))


def _check(tensors: Mapping[str, StoredTensor], name: str,
           shape: tuple[int, ...], source: str, kind: str) -> None:
  """Raises `ValueError` unless a tensor has this shape."""
  if name not in tensors:
    prefixed = next((x for x in tensors if x.endswith(f".{name}")), None)
    fix = "download the file again, or give files of one model"
    if prefixed:
      fix = (f"if {prefixed} is this tensor, remove the prefix "
             f"{prefixed.removesuffix(name)!r} from the names")
    raise ValueError(f"{source} has no tensor {name} {shape}, which {kind} "
                     f"requires; {fix}")
  if tensors[name].shape != shape:
    raise ValueError(f"{source} has the tensor {name} {tensors[name].shape}, "
                     f"but {kind} requires {shape}; give files of one model")
