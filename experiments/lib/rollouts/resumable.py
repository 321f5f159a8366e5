"""Resumable rollouts of many configurations on the same prompts.

A unit is a tuple that begins with (fingerprint, temperature, ...) and
identifies one prompt. Units of one group have the same configurations, and
every configuration continues the prompt. Each result (run) is appended to a
JSONL file. A killed study resumes from this file.
"""

from collections.abc import Callable
from collections.abc import Sequence
import functools
import pathlib
import sys
import time
from typing import Any

import jax
import tqdm

from lib import compilation
from lib import extensions
from lib.rollouts import records
from specjax.utils import fingerprints

_MOST_DECODERS = 30  # largest number of compiled programs in memory (see `run`)
_BAR = "{desc}{percentage:3.0f}%|{bar}| {elapsed}<{remaining}"


def fingerprint(params: Any, *settings: Any) -> str:
  """Returns a short hash of parameters, settings, backend and jax version.

  If the settings contain rules or drafters that are not part of specjax, the
  hash includes the text of their files.
  """
  return fingerprints.fingerprint(
      params, settings, jax.default_backend(), jax.__version__,
      *extensions.sources(settings))


def digest(prompt: Sequence[int]) -> str:
  """Returns a short hash of a prompt's token ids."""
  return fingerprints.fingerprint(prompt)


def run(units: list[tuple], prompt_of: Callable[[tuple], tuple],
        make_configurations: Callable[[Any], dict[str, Any]],
        path: pathlib.Path,
        group_of: Callable[[tuple], Any] = lambda unit: unit[1], *,
        beside: Sequence[Callable] = (), window: int | None = None,
        new_tokens: int | None = None):
  """Decodes the units that are missing in a file, and appends their runs.

  With `window`, several processes share the units, and each process returns all
  runs. Compiled programs are discarded when more than 30 are in memory. The
  reason is that a compiled CPU decoder maps up to 2,000 memory regions, and
  Linux allows 65,530 per process.

  Args:
    units: units, sorted by their group.
    prompt_of: function from a unit to (token ids, seed, request id).
    make_configurations: function from a group to `{name: Configuration}`, with
      at most about 30 entries.
    path: JSONL file of the runs.
    group_of: function from a unit to its group. By default, the group is the
      temperature.
    beside: functions without arguments that compile more programs. They run in
      parallel with the compilation of the decoders.
    window: for batched decoding, number of units that a configuration decodes
      before the next configuration does. Units are sorted by length. If None,
      all configurations decode a unit before the next unit. They are then
      measured under the same conditions.
    new_tokens: maximum number of tokens per rollout. If given, the number of
      missing prompts, programs and tokens is printed before decoding, and an
      estimate of the time after the first rollouts.

  Returns:
    `{unit: {name: run}}`.
  """
  record = records.Record(path)
  groups = {}
  for unit in units:
    groups.setdefault(group_of(unit), []).append(unit)
  left, made = _missing(record, groups, make_configurations, window)
  missing = sum(map(len, left.values()))
  if missing < len(units):
    print(f"{len(units) - missing} of {len(units)} prompts are in {path}; "
          "delete it to measure them again", file=sys.stderr)
  if missing and new_tokens is not None:
    _print_size(left, made, new_tokens)
  own = {group: _share(some, prompt_of) if window else some
         for group, some in left.items()}
  missing = sum(map(len, own.values()))
  with record.open() as add, tqdm.tqdm(
      total=missing + missing // 2 + 1, bar_format=_BAR, dynamic_ncols=True
  ) as bar:
    programs = _Programs(beside, bar)
    for group in filter(own.get, groups):
      # The states of a group are freed when the next one is decoded.
      configurations, some = made.pop(group), own[group]
      programs.compile(configurations, _longest(groups[group], prompt_of),
                       1 + len(some) // 2)
      start, expected = time.perf_counter(), new_tokens is not None
      total = len(some) * len(configurations)
      for count, (unit, found) in enumerate(_decode(
          configurations, some, prompt_of, bar, window, record.runs), 1):
        add(unit, found)
        # After a prompt with all configurations, or a window with the first.
        done = count * len(found)
        if expected and min(window or 1, len(some)) <= done < total:
          seconds = (time.perf_counter() - start) * (total / done - 1)
          bar.write(f"about {seconds:.0f} s for the next {total - done:,} "
                    "rollouts", file=sys.stderr)
          expected = False
    bar.set_description("decoded")
    bar.n = bar.total
    bar.refresh()
  record.merge()
  return {unit: record.runs[unit] for unit in units}


def _missing(record: records.Record, groups: dict[Any, list[tuple]],
             make_configurations: Callable[[Any], dict[str, Any]],
             window: int | None):
  """Returns missing units by group, and the configurations that decode them.

  With `window`, the runs of a unit are stored one by one. The search for
  missing runs then needs the names of the configurations. So configurations are
  created for all groups. Without `window`, they are created only for groups
  with missing units.
  """
  left, made = {}, {}
  for group, units in groups.items():
    if window:
      made[group] = make_configurations(group)
    left[group] = record.missing(units, made.get(group, ()))
    if left[group] and not window:
      made[group] = make_configurations(group)
  return left, made


def _print_size(left: dict[Any, list[tuple]],
                made: dict[Any, dict[str, Any]], new_tokens: int):
  """Prints the numbers of prompts, programs and tokens that will be decoded.

  Args:
    left: missing units by group. The entries of a unit from the fourth on
      identify the prompt.
    made: configurations by group.
    new_tokens: maximum number of tokens per rollout.
  """
  groups = [group for group, units in left.items() if units]
  prompts = len({unit[3:] for group in groups for unit in left[group]})
  programs = len({variant.program for group in groups
                  for variant in made[group].values()})
  rollouts = sum(len(left[group]) * len(made[group]) for group in groups)
  print(f"{prompts} prompts, {programs} program{'s' * (programs != 1)}, "
        f"{rollouts:,} rollouts of at "
        f"most {rollouts * new_tokens:,} tokens in all", file=sys.stderr)


def _share(units: list[tuple], prompt_of: Callable[[tuple], tuple]
           ) -> list[tuple]:
  """Returns the units that this process decodes, the longest prompt first."""
  units = sorted(units, key=lambda unit: -len(prompt_of(unit)[0]))
  return units[jax.process_index()::jax.process_count()]


def _longest(units: list[tuple], prompt_of: Callable[[tuple], tuple]
             ) -> Sequence[int]:
  return max((prompt_of(unit)[0] for unit in units), key=len)


def _decode(configurations: dict[str, Any], units: list[tuple],
            prompt_of: Callable[[tuple], tuple], bar: tqdm.tqdm,
            window: int | None, stored: dict):
  """Yields units with their runs, in the order that `run` describes."""
  if window is None:
    yield from _in_turn(configurations, units, prompt_of, bar)
  else:
    yield from _in_windows(configurations, units, prompt_of, bar, window,
                           stored)


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
                window: int, stored: dict):
  """Yields pairs of a unit and one run; configurations alternate by window."""
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
  """Compiles the programs of one group after another."""

  def __init__(self, beside: Sequence[Callable[[], Any]], bar: tqdm.tqdm):
    self._beside, self._bar = beside, bar
    self._compiled = set()

  def compile(self, configurations: dict[str, Any], longest: Sequence[int],
              share: float) -> None:
    """Compiles every program of a group once.

    Args:
      configurations: configurations of the group, by name.
      longest: longest prompt of the group.
      share: length of the progress bar's part for compilation. The unit is the
        length for decoding one prompt.
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
  """Moves the bar by a step, but not beyond its end.

  The sum of all steps may exceed the length because of rounding.
  """
  bar.update(min(step, bar.total - bar.n))
