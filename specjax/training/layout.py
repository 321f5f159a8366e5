"""Placement of a training run on a mesh of devices.

This module only assigns shardings to arrays. XLA's partitioner (GSPMD) uses the
shardings to parallelise the unchanged training step.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

import chex
import jax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

from specjax.decoding.placement import named
from specjax.utils import processes

Specs = Mapping[str, Any]
Tree = chex.ArrayTree


@dataclasses.dataclass(frozen=True)
class Layout:
  """Shardings of the rows of a batch and of the run's state.

  The object is hashable and can be a static argument of `jit`.

  Attributes:
    mesh: the devices.
    data_axis: mesh axis that splits the rows. Rows are replicated if the mesh
      does not have it.
    state: `NamedSharding` of every leaf of the run's state, in order.
  """

  mesh: Mesh
  data_axis: str
  state: tuple[NamedSharding, ...]

  @property
  def _rows(self) -> str | None:
    return self.data_axis if self.data_axis in self.mesh.shape else None

  def pin(self, state: Tree) -> Tree:
    """Returns `state` with a constraint to its shardings, in a jitted function.
    """
    return jax.lax.with_sharding_constraint(
        state, jax.tree.unflatten(jax.tree.structure(state), self.state))

  def pin_parts(self, parts: Tree) -> Tree:
    """Returns the parts of a batch, constrained to be sharded along their rows.

    Args:
      parts: arrays `[A, R, ...]` of A parts with R rows each.
    """
    return jax.lax.with_sharding_constraint(parts, jax.tree.map(
        lambda x: NamedSharding(self.mesh, PartitionSpec(
            None, *[self._rows] * (x.ndim > 1))), parts))

  def batch(self, batch: Tree) -> Tree:
    """Returns a NumPy batch as arrays on the mesh.

    Each process copies only the rows of its own devices.
    """
    rows = NamedSharding(self.mesh, PartitionSpec(self._rows))
    replicated = NamedSharding(self.mesh, PartitionSpec())
    return processes.placed(batch, jax.tree.map(
        lambda x: rows if np.ndim(x) else replicated, batch))


def of_params(mesh: Mesh, params: Mapping[str, Tree], specs: Specs) -> Tree:
  """Returns the tree of `NamedSharding` of named parameters.

  Args:
    mesh: the devices.
    params: trees of parameters by name.
    specs: trees of `PartitionSpec` by name. Parameters without specs are
      replicated.

  Raises:
    ValueError: the size of an array axis is not a multiple of the size of its
      mesh axis.
  """
  shardings = {name: named(mesh, specs.get(name, PartitionSpec()), tree)
               for name, tree in params.items()}
  # `shard_shape` raises an error if a size is not a multiple of its mesh axis.
  # The error must be raised before compilation.
  jax.tree.map(lambda x, sharding: sharding.shard_shape(x.shape), params,
               shardings)
  return shardings


def of_state(mesh: Mesh, state: Tree, params: Tree) -> Tree:
  """Returns the tree of `NamedSharding` of a `TrainState`.

  Moments of the optimiser have the shardings of their parameters.

  Args:
    mesh: the devices.
    state: `TrainState` of arrays or shapes.
    params: result of `of_params` for the state's parameters.
  """
  places = {
      path: (x.shape, sharding) for (path, x), sharding in zip(
          jax.tree.leaves_with_path(state.params), jax.tree.leaves(params))}

  def place(path: tuple[Any, ...], x: jax.ShapeDtypeStruct) -> NamedSharding:
    # The path of a moment in the optimiser's state ends with the path of its
    # parameter.
    for start in range(len(path)):
      shape, sharding = places.get(path[start:], (None, None))
      if shape == x.shape:
        return sharding
    return NamedSharding(mesh, PartitionSpec())

  return jax.tree.map_with_path(place, state)
