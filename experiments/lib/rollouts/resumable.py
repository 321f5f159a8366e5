"""Resumable rollouts of many configurations on the same prompts.

A unit is a tuple that begins with (fingerprint, temperature, ...). Its
rollouts continue one prompt by every configuration of its group. Every complete
run is appended to a JSONL file, from which a killed study resumes.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
import functools
import json
import os
import pathlib
import sys
from typing import Any

import jax
import tqdm

from lib import compilation
from specjax.utils import files
from specjax.utils import fingerprints
from specjax.utils import processes

_MOST_DECODERS = 30  # compiled programs in memory, see `run`
_BAR = "{desc}{percentage:3.0f}%|{bar}| {elapsed}<{remaining}"


def fingerprint(params: Any, *settings: Any) -> str:
  """Returns a short hash of parameters and all settings of a rollout."""
  return fingerprints.fingerprint(
      params, settings, jax.default_backend(), jax.__version__)


def digest(prompt: Sequence[int]) -> str:
  """Returns a short hash of a prompt's token ids."""
  return fingerprints.fingerprint(prompt)


def run(units: list[tuple], prompt_of: Callable[[tuple], tuple],
        make_configurations: Callable[[Any], dict[str, Any]],
        path: pathlib.Path,
        group_of: Callable[[tuple], Any] = lambda unit: unit[1], *,
        beside: Sequence[Callable] = (), window: int | None = None):
  """Decodes the units that are missing in `path`, and appends them.

  Compiled code is dropped when more than 30 programs are in memory. A CPU
  decoder maps up to 2,000 memory regions, and Linux allows 65,530 per process.

  Args:
    units: units, sorted by their group.
    prompt_of: function from a unit to (token ids, seed, request id).
    make_configurations: function from a group to `{name: Configuration}`, with
      at most about 30 entries.
    path: JSONL file of the runs.
    group_of: function from a unit to its group. Default: its temperature.
    beside: functions without arguments, compiled together with the decoders.
    window: number of units per turn of a configuration, for batched decoding.
      Units are sorted by length. Default: all configurations decode a unit
      before the next unit, so that they are measured under the same conditions.

  Returns:
    `{unit: {name: run}}`.
  """
  stored = processes.by_the_first(lambda: _read(path))
  groups = {}
  for unit in units:
    groups.setdefault(group_of(unit), []).append(unit)
  made = {group: make_configurations(group) for group in groups if window}
  left = {group: _missing(some, stored, made.get(group, ()))
          for group, some in groups.items()}
  missing = sum(map(len, left.values()))
  if missing < len(units):
    print(f"{len(units) - missing} of {len(units)} prompts are in {path}; "
          "delete it to measure them again", file=sys.stderr)
  writes = path if processes.is_first() else os.devnull
  with (files.naming(path), open(writes, "ab") as f,
        tqdm.tqdm(total=missing + missing // 2 + 1, bar_format=_BAR,
                  dynamic_ncols=True) as bar):
    programs = _Programs(beside, bar)
    for group, some in left.items():
      configurations = made.pop(group, None)
      if not some:
        continue
      configurations = configurations or make_configurations(group)
      programs.compile(
          configurations, max((prompt_of(unit)[0] for unit in groups[group]),
                              key=len), 1 + len(some) // 2)
      runs = (_in_turn(configurations, some, prompt_of, bar) if window is None
              else _in_windows(configurations, some, prompt_of, bar, window,
                               stored))
      for unit, found in runs:
        f.write(_line(unit, found))
        f.flush()
        stored.setdefault(unit, {}).update(found)
    bar.set_description("decoded")
    bar.n = bar.total
    bar.refresh()
  return {unit: stored[unit] for unit in units}


def _missing(units: list[tuple], stored: dict, names: Iterable[str]
             ) -> list[tuple]:
  """Returns the units that lack a run.

  Rows of a batch are stored one by one, so a unit may lack some of `names`.
  """
  return [unit for unit in units
          if unit not in stored or not set(names) <= stored[unit].keys()]


def _in_turn(configurations: dict[str, Any], units: list[tuple],
             prompt_of: Callable[[tuple], tuple], bar: tqdm.tqdm):
  """Yields each unit with the runs of all configurations."""
  for unit in units:
    runs = {}
    for name, configuration in configurations.items():
      bar.set_description(name)
      runs[name] = configuration.decode(*prompt_of(unit))
      _advance(bar, 1 / len(configurations))
    yield unit, runs


def _in_windows(configurations: dict[str, Any], units: list[tuple],
                prompt_of: Callable[[tuple], tuple], bar: tqdm.tqdm,
                window: int | None, stored: dict):
  """Yields a unit and one run at a time; configurations take turns."""
  units = sorted(units, key=lambda unit: -len(prompt_of(unit)[0]))
  for start in range(0, len(units), window):
    for name, configuration in configurations.items():
      some = [unit for unit in units[start:start + window]
              if name not in stored.get(unit, {})]
      bar.set_description(name)
      if some:
        for index, found in configuration.decode_rows(
            list(map(prompt_of, some))):
          _advance(bar, 1 / len(configurations))
          yield some[index], {name: found}


class _Programs:
  """Compiles the configurations of one group after another."""

  def __init__(self, beside: Sequence[Callable[[], Any]], bar: tqdm.tqdm):
    self._beside, self._bar = beside, bar
    self._compiled = set()

  def compile(self, configurations: dict[str, Any], longest: Sequence[int],
              share: float) -> None:
    """Compiles every program of a group once.

    Args:
      configurations: the configurations of the group, by name.
      longest: longest prompt of the group.
      share: part of the progress bar for compilation, in units of one prompt.
    """
    programs = {one.program: one for one in configurations.values()}
    if len(self._compiled | programs.keys()) > _MOST_DECODERS:
      jax.clear_caches()
      self._compiled.clear()
    self._compiled |= programs.keys()
    calls = [*self._beside, *(functools.partial(one.compile, longest)
                              for one in programs.values())]
    text = "compiling {} of " + f"{len(calls)} programs"
    self._bar.set_description(text.format(1))
    for done in compilation.side_by_side(calls):
      self._bar.set_description(text.format(min(done + 1, len(calls))))
      _advance(self._bar, share / len(calls))


def _advance(bar: tqdm.tqdm, step: float):
  """Moves the bar, but not beyond its end, because steps are rounded."""
  bar.update(min(step, bar.total - bar.n))


def _read(path: pathlib.Path):
  """Returns the stored runs by unit; removes an incomplete last line."""
  if not path.exists():
    return {}
  runs = {}
  *lines, cut = path.read_bytes().split(b"\n")
  for number, line in enumerate(lines, 1):
    try:
      record = json.loads(line)
      runs.setdefault(tuple(record["unit"]), {}).update(record["runs"])
    except (ValueError, TypeError, KeyError):
      raise ValueError(f"{path} line {number} is not a run of a study; delete "
                       "the line, or choose another path") from None
  if cut:
    with files.atomically(path) as f:  # the next record begins a line
      f.write(b"".join(line + b"\n" for line in lines))
  return runs


def _line(unit: tuple, runs: dict[str, dict[str, Any]]):
  return (json.dumps({"unit": unit, "runs": runs}) + "\n").encode()
