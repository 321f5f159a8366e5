"""Where weights and decoding state live on a mesh of devices.

A mesh has an axis over which models are split (tensor parallelism) and may
have one over which the rows of a batch are. Every part answers for itself: a
model by `param_specs`, a cache by `specs`, a drafter by `param_specs`. These
are placements only: the loop is compiled from them, unchanged.
"""

from typing import Any
from typing import TYPE_CHECKING

import jax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from specjax import contract
from specjax.models.transformer import check_divisible
from specjax.types import DecodeState

if TYPE_CHECKING:  # a model does not need the loop
  from specjax.decoder import Decoder


def named(mesh: Mesh, specs: Any, tree: Any) -> Any:
  """A `NamedSharding` for every leaf of a tree.

  Args:
    mesh: the devices.
    specs: a tree of `PartitionSpec` whose leaves are those of `tree` or whole
      branches of it.
    tree: of arrays, or of their shapes.
  """
  return jax.tree.map(
      lambda spec, branch: jax.tree.map(
          lambda _: NamedSharding(mesh, spec), branch),
      specs, tree, is_leaf=lambda node: isinstance(node, PartitionSpec))


def decode_shardings(decoder: "Decoder", params: Any, state: DecodeState,
                     mesh: Mesh, *, axis: str = "model",
                     data_axis: str = "data") -> tuple[Any, Any]:
  """Placements of everything that `decoder.decode_round` takes.

  Weights are placed as the target and the drafter say, caches as they say
  themselves. Rows, the first axis of every leaf of the state, are split over
  `data_axis` if the mesh has one.

  Args:
    decoder: the `Decoder`.
    params: `{"target": ..., "drafter": ...}`, arrays or their shapes.
    state: a `DecodeState` of arrays or of shapes.
    mesh: a mesh with `axis`.
    axis: over which models are split.
    data_axis: over which rows are split.

  Returns:
    `(params, state)` as trees of `NamedSharding`, for `jax.device_put` or
    the `in_shardings` and `out_shardings` of a jit.

  Raises:
    ValueError: the mesh lacks `axis`; a size is no multiple of its axis; or a
      part does not say how it is split over an axis of several devices.
  """
  if axis not in mesh.shape:
    raise ValueError(f"the mesh has axes {tuple(mesh.shape)} and no {axis!r}; "
                     "give it one, of size 1 where nothing is to be split")
  size = mesh.shape[axis]
  rows = data_axis if data_axis in mesh.shape else None
  if rows:
    check_divisible("batch", state.lengths.shape[0], mesh.shape[rows], rows)

  is_cache = lambda node: hasattr(node, "rollback")

  def place_state(node):
    if not is_cache(node):
      return NamedSharding(mesh, PartitionSpec(rows))
    if not hasattr(node, "specs"):
      if size == 1:
        return jax.tree.map(
            lambda _: NamedSharding(mesh, PartitionSpec(rows)), node)
      raise ValueError(f"the cache {type(node).__name__} does not say how it "
                       f"is split, and mesh axis {axis!r} has {size} devices; "
                       "give it `specs(axis, rows)`, or an axis of one device")
    specs = node.specs(axis, rows)
    for leaf, spec in zip(
        jax.tree.leaves(node), jax.tree.leaves(
            specs, is_leaf=lambda x: isinstance(x, PartitionSpec))):
      for place, name in enumerate(spec):
        if name == axis:
          check_divisible(f"axis {place} of a cache of shape {leaf.shape}",
                          leaf.shape[place], size, axis)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs,
                        is_leaf=lambda x: isinstance(x, PartitionSpec))

  parts = {"target": decoder.target, "drafter": decoder.drafter}
  specs = {name: contract.param_specs(parts[name], axis, size)
           for name in params}
  return (named(mesh, specs, params),
          jax.tree.map(place_state, state, is_leaf=is_cache))
