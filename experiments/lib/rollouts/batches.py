"""Settings of batched rollouts from the flags of a study.

  _BATCH = batches.flags()
  ...
  batch = batches.settings(_BATCH)  # before models are loaded
"""

import dataclasses
from typing import Any
from typing import NamedTuple

from absl import flags as absl_flags

from lib import common
from lib import flags as shared
from lib import meshes
from lib.configurations.decoders import Batch
import specjax as sj
from specjax.decoding.placement import Placement


class BatchFlags(NamedTuple):
  """Flags for batched rollouts."""

  size: absl_flags.FlagHolder
  timing: absl_flags.FlagHolder | None  # None if the study never measures speed
  mesh: shared.MeshFlags


def untimed_flags(size: int = 1) -> BatchFlags:
  """Defines --batch and --mesh for a study that never measures speed."""
  return BatchFlags(shared.batch(size), None, shared.mesh())


def flags(*timings: str) -> BatchFlags:
  """Defines --batch, --timing and --mesh.

  Args:
    *timings: values of --timing in addition to none and latency.
  """
  return BatchFlags(shared.batch(), shared.timing(*timings), shared.mesh())


def settings(given: BatchFlags, *, timed: bool = True,
             splits_prompts: bool = True) -> Batch | None:
  """Connects the processes and returns the settings; None: measure latency.

  Args:
    given: flags of the study.
    timed: if True, the study measures speed by default (without --timing).
    splits_prompts: if True, each process decodes different prompts on a mesh of
      its own devices. If False, all processes decode the same prompts on one
      mesh.

  Raises:
    ValueError: the flags contradict each other, or the mesh does not divide
      the batch.
  """
  size, timing, mesh = given.size.value, given.timing, given.mesh
  alone = size == 1 and mesh.mesh.value is mesh.coordinator.value is None
  timing = "none" if timing is None else timing.value or (
      "latency" if alone and timed else "none")
  if timing == "latency" and not alone:
    raise ValueError("--timing=latency requires --batch=1 without --mesh and "
                     f"--coordinator, and --batch is {size}, --mesh "
                     f"{mesh.mesh.value} and --coordinator "
                     f"{mesh.coordinator.value}; set --timing=none, or leave "
                     "all of them out")
  joined = meshes.join(mesh, rows=size, trains=False,
                       splits_prompts=splits_prompts)
  # The drafter is replicated on every device, because its number of heads may
  # not be a multiple of the size of the model axis.
  return None if timing == "latency" else Batch(
      size=size, timed=timing == "throughput",
      placement=joined and Placement(mesh=joined, drafter="replicate"))


def placed(batch: Batch | None, decoder: sj.Decoder, params: Any) -> Any:
  """Returns the parameters, placed on the mesh if there is one.

  Args:
    batch: result of `settings`.
    decoder: decoder that uses these parameters.
    params: `{"target": ..., "drafter": ...}`.
  """
  if batch is None or batch.placement is None:
    return params
  return batch.placement.put(decoder, params)


def with_placed_params(batch: Batch | None, target: Any) -> Any:
  """Returns a target with its parameters placed on the mesh, if there is one.

  Several decoders can share this target.

  Args:
    batch: result of `settings`.
    target: dataclass with `model` and `params`.
  """
  if batch is None or batch.placement is None:
    return target
  params = placed(batch, common.autoregressive(target.model, 1.0),
                  {"target": target.params})
  return dataclasses.replace(target, params=params["target"])


def window(batch: Batch | None) -> int | None:
  """Returns the argument `window` of `resumable.run`, or None without a batch.

  A larger window leaves fewer rows idle, but stores more prefilled states.
  """
  return None if batch is None else 4 * batch.size
