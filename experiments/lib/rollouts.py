"""Rollouts of many decoders on the same prompts, resumable.

A unit is a tuple that begins with (fingerprint, temperature, ...): one rollout
of one prompt by every arm of its group. Units that are timed are decoded alone,
by all arms in turn, so that these see the same machine; others may share a
batch, which changes no token of theirs. A unit is a line of a JSONL file,
written when it is complete.
"""

import dataclasses
import functools
import json
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from lib import compilation
import specjax as sj
from specjax import files

_MOST_DECODERS = 30  # compiled at a time, see `run`
_BAR = "{desc}{percentage:3.0f}%|{bar}| {elapsed}<{remaining}"


class Reader:
  """The prompts of a batch, read once for all arms that continue them."""

  def __init__(self, decoder, params, capacity):
    self._decoder, self._params = decoder, params
    self._capacity = capacity
    self._lock = threading.Lock()  # arms are compiled side by side
    self._last = None, None

  def __call__(self, prompts, seed, request_ids, limits):
    """A state of its own, for the loop donates it."""
    wanted = prompts, seed, request_ids, limits
    with self._lock:
      if self._last[0] != wanted:
        self._last = wanted, self._decoder.prefill(
            self._params, prompts, jax.random.key(seed), limits=limits,
            request_ids=request_ids, capacity=self._capacity)
      return jax.tree.map(jnp.copy, self._last[1])


class Arm:
  """One decoder, its parameters and what is kept of its rollouts.

  Attributes:
    decoder: the `Decoder` of a prompt that is decoded alone.
    batch_decoder: the one of batches.
    alone: whether it decodes the units that are timed.
    together: whether it decodes the others.
    everywhere: whether it decodes all units in batches, also the timed ones.
  """

  def __init__(self, decoder, params, new_tokens, capacity, *, reader=None,
               change=lambda state: state, batch_decoder=None, alone=True,
               together=True, everywhere=False):
    """An arm.

    Args:
      decoder: the `Decoder`.
      params: of its models.
      new_tokens: tokens of a rollout.
      capacity: slots of a row.
      reader: a `Reader` that others share; default: one of its own.
      change: makes the decoder's state of the reader's.
      batch_decoder: for batches; default: `decoder`.
      alone: see the class.
      together: see the class.
      everywhere: see the class.
    """
    self.decoder, self.batch_decoder = decoder, batch_decoder or decoder
    self.alone, self.together, self.everywhere = alone, together, everywhere
    self._params, self._new_tokens = params, new_tokens
    self._read = reader or Reader(decoder, params, capacity)
    self._change = change

  def _state(self, prompts, seed, request_ids, new_tokens):
    limits = [len(prompt) + n for prompt, n in zip(prompts, new_tokens)]
    return jax.block_until_ready(self._change(
        self._read(prompts, seed, request_ids, limits)))

  def compile(self, decoder, prompt, rows):
    """Compiles what one of its decoders runs, by decoding nothing."""
    state = self._state([prompt] * rows, 0, list(range(rows)), [0] * rows)
    jax.block_until_ready(decoder.decode_until(self._params, state))

  def decode(self, prompt, seed, request_id):
    """Decodes one prompt, alone: speculation is about latency.

    Returns:
      "seconds", "tokens", "rounds", and per law of the decoder (its verifier's
      first) "expected" [laws] and "survival" [laws, nodes], summed over rounds.
    """
    state = self._state([prompt], seed, [request_id], [self._new_tokens])
    start = time.perf_counter()
    _, stats = jax.block_until_ready(
        self.decoder.decode_until(self._params, state))
    seconds = time.perf_counter() - start
    sj.raise_if_not_finite(stats)
    return {"seconds": seconds, **_kept(stats, 0)}

  def decode_together(self, prompts, seed, request_ids, rows):
    """Decodes up to `rows` prompts in a batch of so many; nothing is timed.

    Returns:
      For each prompt what `decode` returns, without "seconds".
    """
    spare = rows - len(prompts)  # rows that are done from the start
    state = self._state(
        prompts + prompts[:1] * spare, seed,
        list(request_ids) + [0] * spare,
        [self._new_tokens] * len(prompts) + [0] * spare)
    _, stats = self.batch_decoder.decode_until(self._params, state)
    sj.raise_if_not_finite(stats)
    stats = jax.device_get(stats)
    return [_kept(stats, row) for row in range(len(prompts))]


def _kept(stats, row):
  numbers = lambda x: np.asarray(x[row], np.float64).tolist()
  return {"tokens": int(stats.emitted[row]), "rounds": int(stats.active[row]),
          "expected": numbers(stats.expected),
          "survival": numbers(stats.survival)}


def fingerprint(params, *settings) -> str:
  """A short hash of parameters and of whatever else a rollout depends on."""
  return files.fingerprint(
      params, settings, jax.default_backend(), jax.__version__)


def digest(prompt) -> str:
  """A short hash of a prompt's token ids."""
  return files.fingerprint(prompt)


def run(units, prompt_of, make_arms, path, group_of=lambda unit: unit[1], *,
        timed=lambda unit: True, rows=1, enough=lambda runs: False, beside=()):
  """Decodes the units that `path` does not hold yet, appending to it.

  Compiled code is let go before it becomes too much: a decoder maps one to two
  thousand pieces of memory on a CPU, and Linux allows a process 65,530.

  Args:
    units: sorted by their group.
    prompt_of: from a unit to (token ids, seed, request id).
    make_arms: from a group to {name: `Arm`}; at most 30 or so.
    path: of the JSONL file.
    group_of: from a unit to its group; default: its temperature.
    timed: from a unit to whether it is decoded alone. A group's timed units
      come first; the others follow in their order, in batches.
    rows: units of a batch.
    enough: from the {unit: its runs} of a group's first units to whether its
      other units may be left out. Asked before every batch.
    beside: functions without arguments to be compiled beside the decoders.

  Returns:
    {unit: {name: what the `Arm` returned}}, without those that were left out.
  """
  found = _read(path)
  missing = sum(unit not in found for unit in units)
  if missing < len(units):
    print(f"{len(units) - missing} of {len(units)} prompts are in {path}; "
          "delete it to measure them again", file=sys.stderr)
  groups = {}
  for unit in units:
    groups.setdefault(group_of(unit), []).append(unit)
  longest = max((prompt_of(unit)[0] for unit in units), key=len)
  runs, decoders = {}, set()
  with (tqdm.tqdm(total=missing + missing // 2 + 1, bar_format=_BAR,
                  dynamic_ncols=True) as bar, open(path, "ab") as f):
    for group, mine in groups.items():
      left = [unit for unit in mine if unit not in found]
      share = 1 + len(left) // 2  # of the bar, for compiling

      @functools.cache
      def arms(group=group, left=left, share=share):
        """Made when the first unit of the group needs them."""
        made = make_arms(group)
        new = {_program(decoder) for arm in made.values()
               for decoder in (arm.decoder, arm.batch_decoder)}
        if len(decoders | new) > _MOST_DECODERS:
          jax.clear_caches()
          decoders.clear()
        decoders.update(new)
        _compile(made, longest, rows, left, timed, share, beside, bar)
        return made

      portions = _portions(mine, timed, rows, prompt_of)
      for number, (alone, portion) in enumerate(portions):
        if not alone and enough({u: runs[u] for u in mine if u in runs}):
          skipped = {u for _, others in portions[number:] for u in others}
          bar.total -= len(skipped - found.keys())
          break
        todo = [unit for unit in portion if unit not in found]
        if todo:
          _decode(todo, alone, arms(), prompt_of, rows, found, f, bar)
        runs.update((unit, found[unit]) for unit in portion)
    bar.set_description("decoded")
    bar.n = bar.total
    bar.refresh()
  return {unit: runs[unit] for unit in units if unit in runs}


def _program(decoder):
  """What equal programs have in common: temperatures share them."""
  return dataclasses.replace(decoder, transform=dataclasses.replace(
      decoder.transform, temperature=1.0))


def _portions(units, timed, rows, prompt_of):
  """Pairs (decoded alone, units that share a batch), the timed ones first."""
  portions = []
  for alone in (True, False):
    by_seed = {}
    for unit in units:
      if timed(unit) == alone:
        by_seed.setdefault(prompt_of(unit)[1], []).append(unit)
    portions += [(alone, mine[i:i + rows]) for mine in by_seed.values()
                 for i in range(0, len(mine), rows)]
  return portions


def _compile(arms, longest, rows, units, timed, share, beside, bar):
  """Compiles every program once, side by side, and moves the bar."""
  batches = not all(map(timed, units))
  calls, seen = list(beside), set()
  for arm in arms.values():
    in_batches = batches and arm.together or arm.everywhere
    for wanted, program in ((arm.alone, (arm.decoder, 1)),
                            (in_batches, (arm.batch_decoder, rows))):
      if wanted and program not in seen:
        seen.add(program)
        decoder, size = program
        calls.append(functools.partial(arm.compile, decoder, longest, size))
  what = "compiling {} of " + f"{len(calls)} programs"
  bar.set_description(what.format(1))
  for done in compilation.side_by_side(calls):
    bar.set_description(what.format(min(done + 1, len(calls))))
    _advance(bar, share / len(calls))


def _advance(bar, step):
  """Never beyond the end: fractions add up to a little more than 1."""
  bar.update(min(step, bar.total - bar.n))


def _decode(units, alone, arms, prompt_of, rows, runs, file, bar):
  """Decodes units and writes them down."""
  prompts, seeds, request_ids = zip(*map(prompt_of, units))
  together = {name: arm for name, arm in arms.items()
              if arm.everywhere or arm.together and not alone}
  singly = {name: arm for name, arm in arms.items() if alone and arm.alone}
  step = 1 / (len(together) + len(singly))
  new = {unit: {} for unit in units}
  for name, arm in together.items():
    bar.set_description(f"{len(units)} prompts together, {name}")
    for unit, found in zip(units, arm.decode_together(
        list(prompts), seeds[0], request_ids, rows)):
      new[unit][name] = found
      _advance(bar, step)
  for unit in units:
    for name, arm in singly.items():
      bar.set_description(f"one prompt alone, {name}")
      new[unit][name] = arm.decode(*prompt_of(unit))
      _advance(bar, step)
    runs[unit] = new[unit]
    file.write(_line(unit, runs[unit]))
    file.flush()


def _read(path):
  """Complete lines by their unit; a last line that was cut is dropped."""
  runs = {}
  if path.exists():
    for line in path.read_text("utf-8").splitlines(keepends=True):
      try:
        record = json.loads(line) if line.endswith("\n") else None
      except json.JSONDecodeError:
        record = None
      if record:
        runs[tuple(record["unit"])] = record["arms"]
    with files.atomically(path) as f:  # what follows begins a line
      for unit, arms in runs.items():
        f.write(_line(unit, arms))
  return runs


def _line(unit, arms):
  return (json.dumps({"unit": unit, "arms": arms}) + "\n").encode()
