"""The parameters of a model from tensors, none of which may be overlooked."""

from collections.abc import Mapping
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.published import names
from specjax.models.safetensors_files import check_float
from specjax.models.safetensors_files import StoredTensor
from specjax.models.transformer import Transformer


def fill(model: Transformer, table: names.Table,
         tensors: Mapping[str, StoredTensor], dtype: np.dtype, source: str,
         kind: str) -> dict[str, Any]:
  """The parameters of a model, from tensors that are all used.

  Args:
    model: the model.
    table: what its tensors are called, and how they are stored.
    tensors: by name.
    dtype: of the parameters.
    source: what errors call the file.
    kind: what errors call the architecture.

  Raises:
    ValueError: a tensor is missing, of another shape, left over, or of whole
      numbers. Nothing has been read then.
  """
  expected = flax.traverse_util.flatten_dict(
      jax.eval_shape(model.init, jax.random.key(0)), sep=".")
  places = {path: names.locate(table, path) for path in expected}
  used = set()
  for path, (stored, parts) in places.items():
    shapes = stored.shapes(model.config, expected[path].shape)
    for name, shape in zip(parts, shapes):
      if name not in tensors:
        raise ValueError(f"{source} has no tensor {name} {shape}, which a "
                         f"{kind} of its configuration has; download the file "
                         "again, or give the model that it is of")
      if tensors[name].shape != shape:
        raise ValueError(f"{source} has the tensor {name} "
                         f"{tensors[name].shape} where its configuration asks "
                         f"for {shape}; the two do not belong together")
      check_float(source, name, tensors[name])
      used.add(name)
  for name in sorted(tensors.keys() - used):
    raise ValueError(f"{source} has the tensor {name} {tensors[name].shape}, "
                     f"which specjax does not know in a {kind}; the model "
                     "computes something else")
  params = {}
  for path, (stored, parts) in places.items():
    read = stored.join(model.config, expected[path].shape,
                       [tensors[name] for name in parts], dtype)
    # A copy that is waited for: the file's pages and `read` are given back.
    params[path] = jnp.array(read).block_until_ready()
  return flax.traverse_util.unflatten_dict(params, sep=".")
