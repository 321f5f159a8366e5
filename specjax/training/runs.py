"""Directories of training runs.

A run owns its directory. The directory stores the run's settings and lengths.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import os
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax

from specjax.training import optimizers
from specjax.utils import files
from specjax.utils import processes

MANIFEST = "run.json"
# Entries added to a manifest by `claim_run`, and `accumulate`, which earlier
# versions stored although it changes only the memory of a step.
_EXTRA = {"format", "steps", "accumulate"}
# Files written only by runs. Files of the tokenizer may exist before a run.
_FILES = ("config.json", "heads.json", "*.safetensors*", "*.bin", "metrics.csv",
          "checkpoints", "best")


def claim_run(directory: str | os.PathLike[str], manifest: Mapping[str, Any],
              steps: int) -> tuple[int, ...]:
  """Claims a directory for a run before anything else is written to it.

  A directory with a run of other data or settings is an error. A finished run
  may be extended to a larger length. Its remaining steps are then those of a
  run of the new length. All lengths are stored, so an interruption does not
  change the result. A run may also end early, see `last_step`. The shorter
  length is not stored. All processes of a run call this function.

  >>> import tempfile
  >>> with tempfile.TemporaryDirectory() as directory:
  ...   claim_run(directory, {"seed": 1}, steps=100)
  (100,)

  Args:
    directory: path of the directory. The caller must lock it before, see
      `files.locked`.
    manifest: settings and data that determine the run, except its length.
    steps: length of the run in steps.

  Returns:
    All lengths of the run in increasing order: one length, or several if the
    run was extended. The last length is `steps`, unless the run ends early.

  Raises:
    ValueError: the directory belongs to another run or contains files of no
      run, `steps` extends a run that is not finished, or all checkpoints are of
      later steps.
  """
  return processes.by_the_first(
      lambda: _claim_run(pathlib.Path(directory), manifest, steps))


def check_claimable(directory: str | os.PathLike[str]) -> None:
  """Raises an error if a directory has files of a run but no manifest.

  `claim_run` includes this check. Call this function earlier if the manifest
  requires a long computation.

  Args:
    directory: path of the directory.

  Raises:
    ValueError: the directory has files of a run and no manifest.
  """
  directory = pathlib.Path(directory)
  if (directory / MANIFEST).exists():
    return
  left = sorted(path.name for name in _FILES for path in directory.glob(name))
  if left:
    raise ValueError(f"{directory} contains {left[0]} but no {MANIFEST}, so "
                     "it is not the directory of a run; choose another path, "
                     "or move it")


def _claim_run(directory: pathlib.Path, manifest: Mapping[str, Any], steps: int
               ) -> tuple[int, ...]:
  path = directory / MANIFEST
  if not path.exists():
    check_claimable(directory)
    files.claim(path, {**manifest, "steps": [steps]}, "run")
    return (steps,)
  files.claim(path, manifest, "run")
  existing = files.read_manifest(path, "run")
  if extra := existing.keys() - manifest.keys() - _EXTRA:
    name = min(extra)
    raise files.OtherRunError(
        directory, "run", f"{name} is {str(existing[name])[:60]} there and "
        "missing here, because of another version of specjax or a missing "
        "option")
  lengths, saved = existing["steps"], _saved(directory)
  length, done = lengths[-1], max(saved, default=0)
  if steps > length > done or steps < length and not saved:
    raise ValueError(
        f"--steps is {steps}, but {directory} contains a run of {length} "
        f"steps, of which {done} are saved; finish it with --steps={length}, "
        "or choose another path")
  if steps < length:
    _check_end(directory, length, steps, saved)
  elif steps > length:
    lengths.append(steps)
    files.write_json(path, {**existing, "steps": lengths}, indent=2)
    print(f"the finished run of {length} steps in {directory} continues to "
          f"step {steps}. Its learning rate is now that of a run of {steps} "
          "steps, so it may rise before it falls to 0 again", file=sys.stderr)
  return tuple(lengths)


def _saved(directory: pathlib.Path) -> list[int]:
  """Returns the sorted steps of the checkpoints in a run's directory."""
  return sorted(int(path.name) for path in directory.glob("checkpoints/*")
                if path.name.isdigit())


def _check_end(directory: pathlib.Path, length: int, steps: int,
               saved: Sequence[int]) -> None:
  """Prints at which step a run ends early.

  Raises `ValueError` if all checkpoints are of later steps.
  """
  if saved[0] > steps:
    raise ValueError(
        f"--steps is {steps}, but the run in {directory} has taken {saved[-1]} "
        f"steps, with checkpoints after {', '.join(map(str, saved))}; give one "
        "of these numbers or a larger one, or choose another path")
  end = (f"at its checkpoint after {_last_step(saved, steps)} steps"
         if saved[-1] > steps else
         f"after {steps}, with the learning rates of a run of {length}")
  print(f"the run of {length} steps in {directory} ends {end}; "
        f"--steps={length} continues it", file=sys.stderr)


def last_step(directory: str | os.PathLike[str], steps: int) -> int:
  """Returns the step after which a claimed run ends.

  The result is `steps` unless the run has already taken more steps. In this
  case, it is the step of the newest checkpoint at or before `steps`.

  Args:
    directory: path of the run's directory.
    steps: the argument of `claim_run`.
  """
  return processes.by_the_first(
      lambda: _last_step(_saved(pathlib.Path(directory)), steps))


def _last_step(saved: Sequence[int], steps: int) -> int:
  if max(saved, default=0) <= steps:
    return steps
  return max(step for step in saved if step <= steps)


def part_length(lengths: Sequence[int], step: int) -> int:
  """Returns the length of an extended run that applies at a step.

  >>> part_length((100, 150), step=120)
  150

  Args:
    lengths: result of `claim_run`.
    step: number of steps taken.
  """
  return next((length for length in lengths if step < length), lengths[-1])


def schedule(lengths: Sequence[int], of_length: Callable[[int], optax.Schedule]
             ) -> optax.Schedule:
  """Returns the learning-rate schedule of a run, extended or not.

  >>> rate = schedule((2, 4), lambda steps: lambda step: steps)
  >>> [int(rate(step)) for step in range(4)]
  [2, 2, 4, 4]

  Args:
    lengths: result of `claim_run`.
    of_length: function `length -> schedule` for a run of that length.
  """
  parts = [of_length(length) for length in lengths]

  def rate(step: jax.typing.ArrayLike) -> jax.Array:
    value = parts[-1](step)
    for length, part in zip(lengths[-2::-1], parts[-2::-1]):
      value = jnp.where(step < length, part(step), value)
    return value

  return rate


def trapezoid(lengths: Sequence[int], peak: float, warmup_fraction: float,
              decay_fraction: float) -> optax.Schedule:
  """Returns `optimizers.trapezoid` for a run, extended or not.

  Args:
    lengths: result of `claim_run`.
    peak: learning rate of the plateau.
    warmup_fraction: steps of the warm-up as a fraction of the length.
    decay_fraction: steps of the decay as a fraction of the length.
  """
  return schedule(lengths, lambda steps: optimizers.trapezoid(
      peak, steps, round(steps * warmup_fraction),
      int(steps * decay_fraction)))


def cosine(lengths: Sequence[int], peak: float, warmup_fraction: float
           ) -> optax.Schedule:
  """Returns `optimizers.cosine` for a run, extended or not.

  Args:
    lengths: result of `claim_run`.
    peak: largest learning rate.
    warmup_fraction: steps of the warm-up as a fraction of the length.
  """
  return schedule(lengths, lambda steps: optimizers.cosine(
      peak, steps, round(steps * warmup_fraction)))
