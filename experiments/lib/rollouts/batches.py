"""Settings of batched rollouts, from the flags of a study.

  _BATCH = batches.flags()
  ...
  batch = batches.settings(_BATCH)  # before models are loaded
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import pathlib
import sys
from typing import Any
from typing import NamedTuple

from absl import flags as absl_flags

from lib import common
from lib import flags as shared
from lib import meshes
from lib.configurations.decoders import Batch
from lib.rollouts import resumable
import specjax as sj


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
  return None if timing == "latency" else Batch(
      size=size, timed=timing == "throughput",
      placement=meshes.placement(joined))


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


def run(batch: Batch | None, new_tokens: int, units: list[tuple],
        prompt_of: Callable[[tuple], tuple],
        make_configurations: Callable[[Any], dict[str, Any]],
        path: pathlib.Path,
        group_of: Callable[[tuple], Any] = lambda unit: unit[1],
        beside: Sequence[Callable] = ()) -> dict[tuple, dict[str, Any]]:
  """Prints the size of a study, and decodes it with `resumable.run`.

  Args:
    batch: result of `settings`.
    new_tokens: tokens per rollout.
    units: units of the study. Their entries from the fourth name the prompt.
    prompt_of: see `resumable.run`, as are the arguments below.
    make_configurations: function from a group to its configurations.
    path: JSONL file of the runs.
    group_of: function from a unit to its group.
    beside: functions that are compiled together with the decoders.

  Returns:
    `{unit: {name: run}}`.
  """
  made = {group: make_configurations(group)
          for group in dict.fromkeys(map(group_of, units))}
  prompts = len({unit[3:] for unit in units})
  programs = len({variant.program for variants in made.values()
                  for variant in variants.values()})
  rollouts = sum(len(made[group_of(unit)]) for unit in units)
  print(f"{prompts} prompts, {programs} programs, {rollouts:,} rollouts of at "
        f"most {rollouts * new_tokens:,} tokens in all", file=sys.stderr)
  return resumable.run(units, prompt_of, make_configurations, path, group_of,
                       beside=beside, window=window(batch))
