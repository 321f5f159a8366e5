"""Directories of training runs: their owner and the lengths of the run."""

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
_EXTRA = {"format", "steps"}  # entries of a manifest that `claim_run` adds
# Files of a run. A tokenizer is not one, because it may exist before the run.
_FILES = ("config.json", "heads.json", "*.safetensors*", "*.bin", "metrics.csv",
          "checkpoints", "best")


def claim_run(directory: str | os.PathLike[str], manifest: Mapping[str, Any],
              steps: int) -> tuple[int, ...]:
  """Claims a directory for a run before anything else is written to it.

  A run with other data or settings is refused. A finished run may be extended:
  it continues from its end as the rest of a run of the new length. All lengths
  are stored, so an interruption does not change the result. A run may also end
  early, see `last_step`; the shorter length is not stored. All processes of a
  run call this function.

  >>> import tempfile
  >>> with tempfile.TemporaryDirectory() as directory:
  ...   claim_run(directory, {"seed": 1}, steps=100)
  (100,)

  Args:
    directory: path of the directory, which this process should have locked
      (`files.locked`).
    manifest: settings and data that determine the run, except its length.
    steps: length of the run.

  Returns:
    All lengths of the run: one, unless it was extended. The last one is
    `steps`, unless the run ends early.

  Raises:
    ValueError: the directory belongs to another run or to no run, `steps`
      extends a run that is not finished, or all checkpoints are of later steps.
  """
  return processes.by_the_first(
      lambda: _claim_run(pathlib.Path(directory), manifest, steps))


def check_claimable(directory: str | os.PathLike[str]) -> None:
  """Refuses a directory with a model that does not belong to a run.

  `claim_run` includes this check. Call it before long work whose result is part
  of the manifest.

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
    raise ValueError(f"{directory} contains {left[0]} and no {MANIFEST}, so "
                     "it belongs to no run; choose another path, or move it")


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
        "missing here, as by another version of specjax or without this option")
  lengths, saved = existing["steps"], _saved(directory)
  length, done = lengths[-1], max(saved, default=0)
  if steps > length > done or steps < length and not saved:
    raise ValueError(
        f"{directory} holds a run of {length} steps, of which {done} are "
        f"saved, and --steps is {steps}; finish it with --steps={length}, or "
        "choose another path")
  if steps < length:
    _check_end(directory, length, steps, saved)
  elif steps > length:
    lengths.append(steps)
    files.write_json(path, {**existing, "steps": lengths}, indent=2)
    print(f"the finished run of {length} steps in {directory} goes on to "
          f"{steps}: from here its learning rate is that of a run of {steps} "
          "steps, which may rise before it falls to 0 again", file=sys.stderr)
  return tuple(lengths)


def _saved(directory: pathlib.Path) -> list[int]:
  """Returns the steps of a run's checkpoints, sorted."""
  return sorted(int(path.name) for path in directory.glob("checkpoints/*")
                if path.name.isdigit())


def _check_end(directory: pathlib.Path, length: int, steps: int,
               saved: Sequence[int]) -> None:
  """Prints where a run ends early, or raises `ValueError`."""
  if saved[0] > steps:
    raise ValueError(
        f"--steps is {steps} and the run in {directory} has taken {saved[-1]} "
        f"steps, with checkpoints after {', '.join(map(str, saved))}; give one "
        "of these numbers, or more, or choose another path")
  end = (f"at its checkpoint after {_last_step(saved, steps)} steps"
         if saved[-1] > steps else
         f"after {steps}, with the learning rates of a run of {length}")
  print(f"the run of {length} steps in {directory} ends {end}; "
        f"--steps={length} continues it", file=sys.stderr)


def last_step(directory: str | os.PathLike[str], steps: int) -> int:
  """Returns the step after which a claimed run ends.

  This is `steps`, unless the run has taken more. Then it is the newest
  checkpoint at or before `steps`, and the run ends there without a step.

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
  """Returns the length of a run at a step.

  >>> part_length((100, 150), step=120)
  150

  Args:
    lengths: result of `claim_run`.
    step: number of steps taken.
  """
  return next((length for length in lengths if step < length), lengths[-1])


def schedule(lengths: Sequence[int], of_length: Callable[[int], optax.Schedule]
             ) -> optax.Schedule:
  """Returns the schedule of an extended run.

  >>> rate = schedule((2, 4), lambda steps: lambda step: steps)
  >>> [int(rate(step)) for step in range(4)]
  [2, 2, 4, 4]

  Args:
    lengths: result of `claim_run`.
    of_length: function from a length to the schedule of a run of that length.
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
  """Returns `optimizers.trapezoid` for a run.

  Args:
    lengths: result of `claim_run`.
    peak: learning rate of the plateau.
    warmup_fraction: fraction of a length in which the rate rises to the peak.
    decay_fraction: fraction of a length in which the rate falls to 0.
  """
  return schedule(lengths, lambda steps: optimizers.trapezoid(
      peak, steps, round(steps * warmup_fraction),
      int(steps * decay_fraction)))


def cosine(lengths: Sequence[int], peak: float, warmup_fraction: float
           ) -> optax.Schedule:
  """Returns `optimizers.cosine` for a run; arguments as in `trapezoid`."""
  return schedule(lengths, lambda steps: optimizers.cosine(
      peak, steps, round(steps * warmup_fraction)))
