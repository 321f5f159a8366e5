"""Settings of batched rollouts, from the flags of a study.

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
  timing: absl_flags.FlagHolder | None  # of studies that measure speed
  mesh: shared.MeshFlags


def untimed_flags(size: int = 1) -> BatchFlags:
  """Defines --batch and --mesh of a study that does not measure speed."""
  return BatchFlags(shared.batch(size), None, shared.mesh())


def flags(*timings: str) -> BatchFlags:
  """Defines --batch, --timing and --mesh.

  Args:
    *timings: values of --timing in addition to none and latency.
  """
  return BatchFlags(shared.batch(), shared.timing(*timings), shared.mesh())


def settings(given: BatchFlags, *, timed: bool = True,
             splits_prompts: bool = True) -> Batch | None:
  """Joins the processes and returns the batch, or None to measure latency.

  Args:
    given: flags of the study.
    timed: whether the study measures speed if --timing is not set.
    splits_prompts: whether processes decode different prompts, each on a mesh
      of its own devices. Otherwise all decode the same prompts on one mesh.

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
  # Every device has the complete drafter, because the number of its heads may
  # not be a multiple of the model axis.
  return None if timing == "latency" else Batch(
      size=size, timed=timing == "throughput",
      placement=joined and Placement(mesh=joined, drafter="replicate"))


def placed(batch: Batch | None, decoder: sj.Decoder, params: Any) -> Any:
  """Returns the parameters, on the mesh if there is one.

  Args:
    batch: result of `settings`.
    decoder: decoder of these parameters.
    params: `{"target": ..., "drafter": ...}`.
  """
  if batch is None or batch.placement is None:
    return params
  return batch.placement.put(decoder, params)


def with_placed_params(batch: Batch | None, target: Any) -> Any:
  """Returns a target, which several decoders share, with its parameters placed.

  Args:
    batch: result of `settings`.
    target: dataclass with `model` and `params`.
  """
  params = placed(batch, common.autoregressive(target.model, 1.0),
                  {"target": target.params})
  return dataclasses.replace(target, params=params["target"])


def window(batch: Batch | None) -> int | None:
  """Returns the argument `window` of `resumable.run`, None without a batch.

  A larger window leaves fewer rows idle, but stores more prefilled states.
  """
  return None if batch is None else 4 * batch.size
