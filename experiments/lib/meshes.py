"""Sets up the device mesh and the processes from the mesh flags.

  _MESH = shared.mesh()
  ...
  mesh = meshes.join(_MESH, rows)   # before the first computation

`jax.distributed` connects the processes. GSPMD partitions the programs.
"""

import math
from typing import Any

import jax
from jax.sharding import AxisType
from jax.sharding import Mesh

from lib import common
from lib import flags as shared
from specjax.decoding.placement import Placement

_AXES = ("data", "model")
_FIX = "give a size for each of data and model, such as data:2,model:4"


def join(flags: shared.MeshFlags, rows: int, *, trains: bool = True,
         splits_prompts: bool = False) -> Mesh | None:
  """Connects the processes and returns the mesh, or None without --mesh.

  The mesh has the axes data and model. An axis that --mesh omits has size 1.

  Args:
    flags: flags defined by `shared.mesh`.
    rows: batch size. It must be a multiple of the size of the data axis.
    trains: if True, SIGTERM stops all processes at a common point. Training
      stops after a step, with a checkpoint. Sampling stops between two files.
      If False, or without a coordinator, SIGTERM ends a process immediately.
    splits_prompts: if True, the processes decode different prompts. The mesh
      then contains only devices of this process, and --mesh is optional.

  Raises:
    ValueError: the flags contradict each other or do not match the devices.
  """
  sizes = _sizes(flags.mesh.value)
  _check_processes(flags, needs_mesh=sizes is None and not splits_prompts)
  if sizes and rows % sizes[0]:
    raise ValueError(f"--mesh={flags.mesh.value} splits a batch over "
                     f"{sizes[0]} devices, and a batch has {rows} rows; give a "
                     "divisor of the batch size, or change the batch size")
  if flags.coordinator.value is not None:
    _initialize(flags, trains)
  if sizes is None:
    return None
  alone = splits_prompts or jax.process_count() == 1
  devices = jax.local_devices() if alone else jax.devices()
  _check_devices(flags.mesh.value, math.prod(sizes), len(devices), alone)
  return jax.make_mesh(sizes, _AXES, axis_types=(AxisType.Auto,) * len(_AXES),
                       devices=devices[:math.prod(sizes)])


def _check_devices(text: str, count: int, there: int, alone: bool) -> None:
  """Raises `ValueError` unless the devices match the size of the mesh.

  Args:
    text: value of --mesh.
    count: number of devices in the mesh.
    there: number of available devices.
    alone: True if the mesh contains devices of one process. It may then contain
      fewer devices than are available.
  """
  if count > there or count < there and not alone:
    where = "" if alone else f" in {jax.process_count()} processes"
    fix = ("give smaller sizes" if alone and there > 1
           else "give sizes whose product is the number of devices")
    if jax.default_backend() == "cpu":
      fix += (", or more devices by XLA_FLAGS="
              "--xla_force_host_platform_device_count=N")
    raise ValueError(f"--mesh={text} needs {count} devices and there are "
                     f"{there}{where}; {fix}")


def specs(mesh: Mesh | None, models: dict[str, Any]) -> dict[str, Any] | None:
  """Returns `Trainer.param_shardings` of models, or None without a mesh.

  Raises:
    ValueError: the mesh does not divide a model.
  """
  return mesh and {name: model.param_specs("model", mesh.shape["model"])
                   for name, model in models.items()}


def placement(mesh: Mesh | None) -> Placement | None:
  """Returns the placement of a decoder on the mesh, or None without a mesh."""
  return mesh and Placement(mesh=mesh)


def _sizes(text: str | None):
  """Returns the sizes of `_AXES`, or None if --mesh is not set."""
  if text is None:
    return None
  found = {}
  for part in text.split(","):
    name, _, size = part.partition(":")
    if name not in _AXES or name in found or not size.isdecimal() or (
        int(size) < 1):
      raise ValueError(f"--mesh={text} contains {part!r}; {_FIX}")
    found[name] = int(size)
  return tuple(found.get(name, 1) for name in _AXES)


def _check_processes(flags: shared.MeshFlags, needs_mesh: bool):
  """Raises `ValueError` unless the process flags are complete."""
  place, number, count = (
      flags.coordinator.value, flags.process_id.value,
      flags.num_processes.value)
  if place is None:
    return
  if needs_mesh:
    raise ValueError(f"--coordinator={place} requires --mesh for the devices "
                     "of the processes; set it, such as "
                     "--mesh=data:2,model:4")
  if place == "auto":
    return
  if not place.rpartition(":")[0] or not place.rpartition(":")[2].isdecimal():
    raise ValueError(f"--coordinator is {place!r}; give HOST:PORT of process "
                     "0, or auto on a cluster that JAX recognises")
  if number is None or count is None or number >= count:
    raise ValueError(f"--process_id is {number} and --num_processes {count}; "
                     "set both, with a different --process_id from 0 to "
                     "--num_processes - 1 in each process")


def _initialize(flags: shared.MeshFlags, trains: bool):
  if not jax.distributed.is_initialized():
    jax.config.update("jax_enable_preemption_service", trains)
    place = flags.coordinator.value
    jax.distributed.initialize(*() if place == "auto" else (
        place, flags.num_processes.value, flags.process_id.value))
  common.first_speaks()
