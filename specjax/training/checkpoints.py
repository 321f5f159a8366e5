"""Checkpoints of a training run, in orbax's format.

Orbax writes a checkpoint atomically. A checkpoint can be read on a mesh that
differs from the mesh of the writer.
"""

from typing import Any

import chex
import jax
import orbax.checkpoint as ocp

from specjax.utils import processes

_NOTES = "notes"  # key of the `notes` of `save` in a checkpoint's metadata


class Manager(ocp.CheckpointManager):
  """Orbax's manager without the handling of SIGTERM.

  `Trainer` handles SIGTERM.
  """

  def reached_preemption(self, step: int) -> bool:
    return False


def newest(manager: ocp.CheckpointManager, like: chex.ArrayTree, most: int
           ) -> tuple[Any, Any]:
  """Returns the newest checkpoint up to a step.

  Args:
    manager: manager of the run's checkpoints. At least one checkpoint exists.
    like: tree of `jax.ShapeDtypeStruct` like the state, with shardings.
    most: latest step of a checkpoint to read.

  Returns:
    `(state, notes)`, the arguments of `save`.

  Raises:
    ValueError: the checkpoint cannot be read, or all checkpoints are of later
      steps than `most`.
  """
  saved = processes.by_the_first(lambda: sorted(manager.all_steps()))
  step = max((step for step in saved if step <= most), default=None)
  if step is None:
    raise ValueError(
        f"{manager.directory.parent} has checkpoints after "
        f"{', '.join(map(str, saved))} steps, but the run has only {most} "
        "steps; give one of these numbers, or another directory")
  try:
    state = manager.restore(step, args=ocp.args.StandardRestore(like))
    notes = (manager.metadata(step).custom_metadata or {}).get(_NOTES)
  except Exception as e:  # orbax raises many kinds of errors
    raise ValueError(
        f"the checkpoint {manager.directory / str(step)} cannot be read: it "
        "has other parameters than this run, or is damaged; give another "
        "directory, or delete the checkpoint to continue from the previous one"
    ) from e
  return state, notes


def save(manager: ocp.CheckpointManager, step: int, state: chex.ArrayTree,
         notes: Any = None) -> None:
  """Saves a checkpoint in the background.

  Args:
    manager: manager of the run's checkpoints.
    step: number of training steps taken so far.
    state: tree of arrays, on one device or on a mesh.
    notes: JSON value that `newest` returns with the state.

  Raises:
    OSError: this checkpoint or the previous one cannot be written.
  """
  try:
    manager.save(step, args=ocp.args.StandardSave(state),
                 custom_metadata={_NOTES: notes})
  except Exception as e:  # orbax raises many kinds of errors
    if isinstance(e, jax.errors.JaxRuntimeError) and (
        jax.distributed.is_initialized()):
      raise  # another process has ended
    reason = str(e).rsplit(": ", 1)[-1]
    raise OSError(f"no checkpoint can be written to {manager.directory}: "
                  f"{reason}; make room, or choose another directory") from e
