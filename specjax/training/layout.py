"""Where a training run lies on a mesh of devices.

Placements only: the step is compiled from them by GSPMD, as it is.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

from specjax.decoding.placement import named
from specjax.utils import processes

Specs = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Layout:
  """Of a run's rows and of its state, hashable for a jit.

  Attributes:
    mesh: the devices.
    data_axis: the mesh axis over which rows are split; one that the mesh has
      not splits nothing.
    state: a `NamedSharding` for every leaf of the run's state, in order.
  """

  mesh: Mesh
  data_axis: str
  state: tuple[NamedSharding, ...]

  @property
  def _rows(self) -> str | None:
    return self.data_axis if self.data_axis in self.mesh.shape else None

  def pin(self, state: Any) -> Any:
    """The state, inside a program, where it was before."""
    return jax.lax.with_sharding_constraint(
        state, jax.tree.unflatten(jax.tree.structure(state), self.state))

  def pin_parts(self, parts: Any) -> Any:
    """A batch that was cut into parts `[A, R, ...]`: R stays split."""
    return jax.lax.with_sharding_constraint(parts, jax.tree.map(
        lambda x: NamedSharding(self.mesh, PartitionSpec(
            None, *[self._rows] * (x.ndim > 1))), parts))

  def batch(self, batch: Any) -> Any:
    """A batch of numpy on the mesh; this process feeds the rows of its own."""
    rows = NamedSharding(self.mesh, PartitionSpec(self._rows))
    whole = NamedSharding(self.mesh, PartitionSpec())
    return processes.placed(batch, jax.tree.map(
        lambda x: rows if np.ndim(x) else whole, batch))


def of_params(mesh: Mesh, params: Mapping[str, Any], specs: Specs) -> Any:
  """`NamedSharding`s of named parameters; what has no specs is replicated.

  Args:
    mesh: the devices.
    params: trees by name.
    specs: by name; those of other names are for other parameters.

  Raises:
    ValueError: a size is no multiple of its axis.
  """
  found = {name: named(mesh, specs.get(name, PartitionSpec()), tree)
           for name, tree in params.items()}
  # JAX's own words, before anything is compiled.
  jax.tree.map(lambda x, sharding: sharding.shard_shape(x.shape), params, found)
  return found


def of_state(mesh: Mesh, state: Any, params: Any) -> Any:
  """`NamedSharding`s of a `TrainState`, whose moments lie as what they are of.

  Args:
    mesh: the devices.
    state: arrays or shapes.
    params: `of_params` of its parameters.
  """
  places = {
      path: (x.shape, sharding) for (path, x), sharding in zip(
          jax.tree.leaves_with_path(state.params), jax.tree.leaves(params))}

  def place(path, x):
    # A moment has its parameter's path in a tree of the optimiser's.
    for start in range(len(path)):
      shape, sharding = places.get(path[start:], (None, None))
      if shape == x.shape:
        return sharding
    return NamedSharding(mesh, PartitionSpec())

  return jax.tree.map_with_path(place, state)
