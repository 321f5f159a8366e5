"""Directories of training runs: whose they are, and how long the runs are."""

from collections.abc import Callable
from collections.abc import Sequence
import os
import pathlib
import sys
from typing import Any

import jax.numpy as jnp
import optax

from specjax.training import optimizers
from specjax.utils import files
from specjax.utils import processes

MANIFEST = "run.json"
_OWN = {"format", "steps"}  # of a manifest, not of the run
# What a run leaves, besides a tokenizer, which may be there before it.
_LEFT = ("config.json", "heads.json", "*.safetensors*", "*.bin", "metrics.csv",
         "checkpoints", "best")


def claim_run(directory: str | os.PathLike[str], manifest: dict[str, Any],
              steps: int) -> tuple[int, ...]:
  """Makes a directory a run's own before anything else is written to it.

  A run of other data or settings is refused. A finished run may be extended:
  it goes on from its end, as the rest of a run of the new length. It is so a
  function of all its lengths, which are remembered, wherever it is killed. It
  may also end before its length, see `last_step`; this changes no step that it
  takes, and is not remembered. All processes of a run call it, and the first
  does it.

  Args:
    directory: of the run; this process should have it `files.locked`.
    manifest: what the run depends on besides its length.
    steps: its length.

  Returns:
    The lengths that it had: one, unless it was extended. The last one is
    `steps`, unless the run ends before its length.

  Raises:
    ValueError: the directory holds another run, something that no run
      describes, or one that is not finished and shorter, or all checkpoints of
      which are of later steps.
  """
  return processes.by_the_first(
      lambda: _claim_run(pathlib.Path(directory), manifest, steps))


def check_claimable(directory: str | os.PathLike[str]) -> None:
  """Refuses a directory that holds a model which no run describes.

  `claim_run` does so too. This is for whoever has hours of work to do before
  all is known that a run depends on.

  Raises:
    ValueError: see above.
  """
  directory = pathlib.Path(directory)
  if (directory / MANIFEST).exists():
    return
  left = sorted(path.name for name in _LEFT for path in directory.glob(name))
  if left:
    raise ValueError(f"{directory} holds {left[0]} and no {MANIFEST} that says "
                     "whose it is; choose another path, or move it")


def _claim_run(directory, manifest, steps):
  path = directory / MANIFEST
  if not path.exists():
    check_claimable(directory)
    files.claim(path, {**manifest, "steps": [steps]}, "run")
    return (steps,)
  files.claim(path, manifest, "run")
  found = files.read_manifest(path, "run")
  more = found.keys() - manifest.keys() - _OWN
  if more:
    name = min(more)
    raise files.OtherRunError(
        directory, "run", f"{name} is {str(found[name])[:60]} there and not "
        "told here, as by another version of specjax or without this option")
  lengths = found.get("steps")
  if not (isinstance(lengths, list) and lengths
          and all(isinstance(x, int) for x in lengths)):
    raise ValueError(f"{path} describes no run: steps is {lengths!r}; choose "
                     f"another path, or delete {directory}")
  length, saved = lengths[-1], _saved(directory)
  done = max(saved, default=0)
  if steps > length > done or steps < length and not saved:
    raise ValueError(
        f"{directory} holds a run of {length} steps, of which {done} are "
        f"saved, and --steps is {steps}; finish it with --steps={length}, or "
        "choose another path")
  if steps < length:
    _check_end(directory, length, steps, saved)
  elif steps > length:
    lengths.append(steps)
    files.write_json(path, {**found, "steps": lengths}, indent=2)
    print(f"the finished run of {lengths[-2]} steps in {directory} goes on to "
          f"{steps}: from here its learning rate is that of a run of {steps} "
          "steps, which may rise before it falls to 0 again", file=sys.stderr)
  return tuple(lengths)


def _saved(directory):
  """Returns the steps of a run's checkpoints, sorted."""
  return sorted(int(path.name) for path in directory.glob("checkpoints/*")
                if path.name.isdigit())


def _check_end(directory, length, steps, saved):
  """Explains where a run ends before its length, or raises `ValueError`."""
  if saved[0] > steps:
    raise ValueError(
        f"--steps is {steps} and the run in {directory} has taken {saved[-1]} "
        f"steps, with checkpoints after {', '.join(map(str, saved))}; give one "
        "of these numbers, or more, or choose another path")
  if saved[-1] > steps:
    end = f"at its checkpoint after {_last_step(directory, steps)} steps"
  else:
    end = f"after {steps}, with the learning rates of a run of {length}"
  print(f"the run of {length} steps in {directory} ends {end}; "
        f"--steps={length} continues it", file=sys.stderr)


def last_step(directory: str | os.PathLike[str], steps: int) -> int:
  """Returns the step after which a run ends, once it is claimed.

  This is `steps`, unless the run has taken more. Then it is the newest
  checkpoint at or before `steps`, and the run ends there without a step.

  Args:
    directory: the run's directory.
    steps: the argument of `claim_run`.
  """
  return processes.by_the_first(
      lambda: _last_step(pathlib.Path(directory), steps))


def _last_step(directory, steps):
  saved = _saved(directory)
  if max(saved, default=0) <= steps:
    return steps
  return max(step for step in saved if step <= steps)


def part_length(lengths: Sequence[int], step: int) -> int:
  """The length that a run had when it took a step, of `claim_run`'s."""
  return next((length for length in lengths if step < length), lengths[-1])


def schedule(lengths: Sequence[int], of_length: Callable[[int], optax.Schedule]
             ) -> optax.Schedule:
  """The schedule of a run: of each length, up to its end.

  Args:
    lengths: of `claim_run`.
    of_length: from a length to the schedule of a run of that many steps.
  """
  parts = [of_length(length) for length in lengths]

  def rate(step):
    value = parts[-1](step)
    for length, part in zip(lengths[-2::-1], parts[-2::-1]):
      value = jnp.where(step < length, part(step), value)
    return value

  return rate


def trapezoid(lengths: Sequence[int], peak: float, warmup_fraction: float,
              decay_fraction: float) -> optax.Schedule:
  """`optimizers.trapezoid` for a run.

  Args:
    lengths: of `claim_run`.
    peak: learning rate of the plateau.
    warmup_fraction: share of a length in which the rate rises to the peak.
    decay_fraction: share of a length in which the rate falls to 0.
  """
  return schedule(lengths, lambda steps: optimizers.trapezoid(
      peak, steps, round(steps * warmup_fraction),
      int(steps * decay_fraction)))


def cosine(lengths: Sequence[int], peak: float, warmup_fraction: float
           ) -> optax.Schedule:
  """`optimizers.cosine` for a run; arguments as in `trapezoid`."""
  return schedule(lengths, lambda steps: optimizers.cosine(
      peak, steps, round(steps * warmup_fraction)))
