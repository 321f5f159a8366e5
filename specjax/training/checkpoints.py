"""Checkpoints of a training run: orbax's, with a checksum that we look at.

They are read on other meshes than they were written on. One that is damaged is
moved aside, and the run goes on from the one before.
"""

import os
import pathlib
import shutil
import sys
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from specjax.utils import processes
from specjax.utils.fingerprints import fingerprint

_DIGEST = "checksums"  # of a state, in a checkpoint's metadata
_NOTES = "notes"  # of the log, there too


class Manager(ocp.CheckpointManager):
  """Orbax's; the run looks for SIGTERM, by one count for all runs of it."""

  def reached_preemption(self, step: int) -> bool:
    return False


def newest(manager: ocp.CheckpointManager, like: Any, most: int
           ) -> tuple[Any, Any]:
  """Returns the newest checkpoint that all processes can read.

  Args:
    manager: manager of the run's checkpoints; there is at least one.
    like: `jax.ShapeDtypeStruct`s of the state, placed as it is to be.
    most: the largest step that is read.

  Returns:
    `(state, notes)`, as `save` was given them.

  Raises:
    ValueError: none can be read, or all of them are of later steps.
  """
  reasons = []
  there = processes.by_the_first(lambda: sorted(manager.all_steps()))
  steps = [step for step in reversed(there) if step <= most]
  if not steps:
    raise ValueError(
        f"{manager.directory.parent} has checkpoints after "
        f"{', '.join(map(str, there))} steps and the run has {most}; give one "
        "of these numbers, or another directory")
  for step in steps:
    state = saved = reason = None
    try:
      state, saved, notes = _read(manager, step, like)
    except Exception as e:  # whatever a library says of bytes it cannot read
      reason = e
    if processes.all_agree(reason is None):
      # Every process has its part, so all can sum what they have together.
      sums = _checksums(state)
      if processes.all_agree(saved in (None, sums)):
        _set_aside(manager, dict(zip(steps, reasons)), step)
        return state, notes
      reason = ValueError("its numbers are not those that were saved")
    reasons.append(reason or ValueError("another process cannot read it"))
  raise ValueError(
      f"no checkpoint in {manager.directory} can be read: they are of other "
      "parameters than this run's, or damaged; give another directory, or "
      "delete them and start again") from reasons[0]


def save(manager: ocp.CheckpointManager, step: int, state: Any,
         notes: Any = None) -> None:
  """Saves a checkpoint, while the run goes on.

  Args:
    manager: manager of the run's checkpoints.
    step: number of steps taken.
    state: tree of arrays, on one device or on a mesh.
    notes: a JSON value to return with it, such as the state of the log.

  Raises:
    OSError: this one, or the one before it, cannot be written.
  """
  try:
    # The format itself would not notice a bit that falls over.
    manager.save(step, args=ocp.args.StandardSave(state),
                 custom_metadata={
                     _DIGEST: _checksums(state), _NOTES: notes})
  except Exception as e:  # whatever a library says of a disk that is full
    if isinstance(e, jax.errors.JaxRuntimeError) and (
        jax.distributed.is_initialized()):
      raise  # another process has ended
    reason = str(e).rsplit(": ", 1)[-1]
    raise OSError(f"no checkpoint can be written to {manager.directory}: "
                  f"{reason}; make room, or choose another directory") from e


def _read(manager, step, like):
  """Returns `(state, its checksums when it was saved, notes)`, or raises.

  A process that cannot read it must not leave the others waiting, so none
  waits for another in here, as they would in the manager's `restore`.
  """
  me = jax.process_index()
  alone = ocp.options.MultiprocessingOptions(
      primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"{me}")
  with ocp.CheckpointManager(
      manager.directory, options=ocp.CheckpointManagerOptions(
          read_only=True, create=False, multiprocessing_options=alone)
  ) as reader:
    state = reader.restore(step, args=ocp.args.StandardRestore(like))
    metadata = reader.metadata(step).custom_metadata or {}
    return state, metadata.get(_DIGEST), metadata.get(_NOTES)


def _checksums(state):
  """A short hash of a state's bits, wherever they lie on a mesh.

  Sums of whole numbers modulo 2^32 have the same bits in every order, so no
  process has to see all of a state.
  """
  sums = processes.gathered(_leaf_sums(jax.tree.leaves(state)))
  return fingerprint(jax.tree.unflatten(
      jax.tree.structure(state), jax.device_get(sums)))


@jax.jit
def _leaf_sums(leaves):
  """`[2]` uint32 for each: sums of bits times odd numbers, by their place."""
  def one(x):
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
      x = jax.random.key_data(x)
    if x.dtype == jnp.bool_:
      x = x.astype(jnp.uint8)
    size = min(x.dtype.itemsize, 4)
    bits = jax.lax.bitcast_convert_type(
        x, jnp.dtype(f"uint{8 * size}")).astype(jnp.uint32)
    place = jnp.zeros(bits.shape, jnp.uint32)
    for axis, length in enumerate(bits.shape):
      place = place * jnp.uint32(length % 2**32) + (
          jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis))
    other = place * jnp.uint32(0x9E3779B1)
    weights = (2 * place + 1, (other ^ (other >> 15)) | 1)
    return jnp.stack([jnp.sum(bits * w, dtype=jnp.uint32) for w in weights])

  return [one(x) for x in leaves]


def _set_aside(manager, damaged, step):
  """Moves damaged checkpoints away, so that their steps can be saved again."""
  def move():
    for bad, reason in damaged.items():
      place = pathlib.Path(manager.directory).parent / f"damaged_{bad}"
      shutil.rmtree(place, ignore_errors=True)
      os.rename(pathlib.Path(manager.directory) / str(bad), place)
      reason = str(reason).split("\n")[0][:100] or type(reason).__name__
      print(f"warning: the checkpoint of step {bad} is damaged ({reason}): it "
            f"was moved to {place}, and the run goes on from step {step}",
            file=sys.stderr)

  if damaged:
    processes.by_the_first(move)
    manager.reload()
