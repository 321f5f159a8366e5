"""Rollouts of many decoders on the same prompts, resumable.

A unit is a tuple that begins with (fingerprint, temperature, ...): one rollout
of one prompt by every arm of its group, all in turn, so that they see the same
machine. A unit is a line of a JSONL file, written when it is complete.
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
from specjax.utils import files
from specjax.utils import fingerprints

_MOST_DECODERS = 30  # compiled at a time, see `run`
_BAR = "{desc}{percentage:3.0f}%|{bar}| {elapsed}<{remaining}"


class Reader:
  """A prompt, read once for all arms that continue it."""

  def __init__(self, decoder, params, capacity):
    self._decoder, self._params = decoder, params
    self._capacity = capacity
    self._lock = threading.Lock()  # arms are compiled side by side
    self._last = None, None

  def __call__(self, prompt, seed, request_id, limit):
    """A state of its own, for the loop donates it."""
    wanted = prompt, seed, request_id, limit
    with self._lock:
      if self._last[0] != wanted:
        self._last = wanted, self._decoder.prefill(
            self._params, [prompt], jax.random.key(seed), limits=limit,
            request_ids=[request_id], capacity=self._capacity)
      return jax.tree.map(jnp.copy, self._last[1])


class Arm:
  """One decoder, its parameters and what is kept of its rollouts."""

  def __init__(self, decoder, params, new_tokens, capacity, *, reader=None,
               change=lambda state: state):
    """An arm.

    Args:
      decoder: the `Decoder`.
      params: of its models.
      new_tokens: tokens of a rollout.
      capacity: slots of a row.
      reader: a `Reader` that others share; default: one of its own.
      change: makes the decoder's state of the reader's.
    """
    self.decoder = decoder
    self._params, self._new_tokens = params, new_tokens
    self._read = reader or Reader(decoder, params, capacity)
    self._change = change

  @property
  def program(self):
    """What equal programs have in common: temperatures share them."""
    return dataclasses.replace(self.decoder, transform=dataclasses.replace(
        self.decoder.transform, temperature=1.0))

  def _state(self, prompt, seed, request_id, new_tokens):
    return jax.block_until_ready(self._change(
        self._read(prompt, seed, request_id, len(prompt) + new_tokens)))

  def compile(self, prompt):
    """Compiles what it runs, by decoding nothing."""
    state = self._state(prompt, 0, 0, 0)
    jax.block_until_ready(self.decoder.decode_until(self._params, state))

  def decode(self, prompt, seed, request_id):
    """Decodes one prompt, alone: speculation is about latency.

    Returns:
      "seconds", "tokens", "rounds", and per law of the decoder (its verifier's
      first) "expected" [laws] and "survival" [laws, nodes], summed over rounds.
    """
    state = self._state(prompt, seed, request_id, self._new_tokens)
    start = time.perf_counter()
    _, stats = jax.block_until_ready(
        self.decoder.decode_until(self._params, state))
    seconds = time.perf_counter() - start
    sj.raise_if_not_finite(stats)
    numbers = lambda x: np.asarray(x[0], np.float64).tolist()
    return {"seconds": seconds, "tokens": int(stats.emitted[0]),
            "rounds": int(stats.active[0]), "expected": numbers(stats.expected),
            "survival": numbers(stats.survival)}


def fingerprint(params, *settings) -> str:
  """A short hash of parameters and of whatever else a rollout depends on."""
  return fingerprints.fingerprint(
      params, settings, jax.default_backend(), jax.__version__)


def digest(prompt) -> str:
  """A short hash of a prompt's token ids."""
  return fingerprints.fingerprint(prompt)


def run(units, prompt_of, make_arms, path, group_of=lambda unit: unit[1], *,
        beside=()):
  """Decodes the units that `path` does not hold yet, appending to it.

  Compiled code is let go before it becomes too much: a decoder maps one to two
  thousand pieces of memory on a CPU, and Linux allows a process 65,530.

  Args:
    units: sorted by their group.
    prompt_of: from a unit to (token ids, seed, request id).
    make_arms: from a group to {name: `Arm`}, at most 30 or so; or to anything
      else with `program`, what those share that are compiled once, `compile`
      and `decode`.
    path: of the JSONL file.
    group_of: from a unit to its group; default: its temperature.
    beside: functions without arguments to be compiled beside the decoders.

  Returns:
    {unit: {name: what the `Arm` returned}}.
  """
  found = _read(path)
  missing = sum(unit not in found for unit in units)
  if missing < len(units):
    print(f"{len(units) - missing} of {len(units)} prompts are in {path}; "
          "delete it to measure them again", file=sys.stderr)
  groups = {}
  for unit in units:
    groups.setdefault(group_of(unit), []).append(unit)
  runs = {}
  with (files.naming(path), open(path, "ab") as f,
        tqdm.tqdm(total=missing + missing // 2 + 1, bar_format=_BAR,
                  dynamic_ncols=True) as bar):
    programs = _Programs(make_arms, beside, bar)
    for group, mine in groups.items():
      left = sum(unit not in found for unit in mine)
      longest = max((prompt_of(unit)[0] for unit in mine), key=len)
      # Made when the first unit of the group needs them.
      arms = functools.cache(functools.partial(
          programs.arms, group, longest, 1 + left // 2))

      for unit in mine:
        if unit not in found:
          found[unit] = _decode(arms(), prompt_of(unit), bar)
          f.write(_line(unit, found[unit]))
          f.flush()
        runs[unit] = found[unit]
    bar.set_description("decoded")
    bar.n = bar.total
    bar.refresh()
  return runs


class _Programs:
  """Compiles the arms of one group after another, not too many at a time."""

  def __init__(self, make_arms, beside, bar):
    self._make_arms, self._beside, self._bar = make_arms, beside, bar
    self._compiled = set()

  def arms(self, group, longest, share):
    """Those of a group, compiled; see `run` and `_compile`."""
    made = self._make_arms(group)
    new = {arm.program for arm in made.values()}
    if len(self._compiled | new) > _MOST_DECODERS:
      jax.clear_caches()
      self._compiled.clear()
    self._compiled |= new
    _compile(made, longest, share, self._beside, self._bar)
    return made


def _compile(arms, longest, share, beside, bar):
  """Compiles every program once, side by side, and moves the bar.

  Args:
    arms: {name: `Arm`}.
    longest: the longest prompt.
    share: of the bar.
    beside: see `run`.
    bar: it says what is done.
  """
  programs = {arm.program: arm for arm in arms.values()}
  calls = [*beside, *(functools.partial(arm.compile, longest)
                      for arm in programs.values())]
  what = "compiling {} of " + f"{len(calls)} programs"
  bar.set_description(what.format(1))
  for done in compilation.side_by_side(calls):
    bar.set_description(what.format(min(done + 1, len(calls))))
    _advance(bar, share / len(calls))


def _advance(bar, step):
  """Never beyond the end: fractions add up to a little more than 1."""
  bar.update(min(step, bar.total - bar.n))


def _decode(arms, prompt, bar):
  """What every arm makes of a prompt: `(token ids, seed, request id)`."""
  found = {}
  for name, arm in arms.items():
    bar.set_description(name)
    found[name] = arm.decode(*prompt)
    _advance(bar, 1 / len(arms))
  return found


def _read(path):
  """Complete lines by their unit; a last line that was cut is dropped."""
  if not path.exists():
    return {}
  runs = {}
  *lines, cut = path.read_bytes().split(b"\n")
  for number, line in enumerate(lines, 1):
    try:
      record = json.loads(line)
      runs[tuple(record["unit"])] = dict(record["arms"])
    except (ValueError, TypeError, KeyError):
      raise ValueError(f"{path} line {number} is no run of a study; delete the "
                       "line, or choose another path") from None
  if cut:
    with files.atomically(path) as f:  # what follows begins a line
      f.write(b"".join(line + b"\n" for line in lines))
  return runs


def _line(unit, arms):
  return (json.dumps({"unit": unit, "arms": arms}) + "\n").encode()
