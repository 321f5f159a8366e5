"""Rollouts of many decoders on the same prompts, resumable.

A unit is a tuple that begins with (fingerprint, temperature, ...): one rollout
of one prompt by every arm of its group, all in turn, so that they see the same
machine. Each is a line of a JSONL file, written when it is complete.
"""

import json
import sys
import time

import jax
import numpy as np
import tqdm

import specjax as sj
from specjax import files


class Arm:
  """One decoder, its parameters and what is kept of its rollouts."""

  def __init__(self, decoder, params, new_tokens, capacity):
    self.decoder = decoder
    self._params = params
    self._new_tokens, self._capacity = new_tokens, capacity

  def decode(self, prompt, seed, request_id):
    """Decodes one prompt, alone: speculation is about latency.

    Returns:
      "seconds", "tokens", "rounds", and per law of the decoder (its verifier's
      first) "expected" [laws] and "survival" [laws, nodes], summed over rounds.
    """
    state = self.decoder.prefill(
        self._params, [prompt], jax.random.key(seed), request_ids=[request_id],
        limits=len(prompt) + self._new_tokens, capacity=self._capacity)
    jax.block_until_ready(state)
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
  return files.fingerprint(
      params, settings, jax.default_backend(), jax.__version__)


def digest(prompt) -> str:
  """A short hash of a prompt's token ids."""
  return files.fingerprint(prompt)


def run(units, prompt_of, make_arms, path, group_of=lambda unit: unit[1]):
  """Decodes the units that `path` does not hold yet, appending to it.

  What was compiled goes with its group: a decoder maps one to two thousand
  pieces of memory on a CPU, and Linux allows a process 65,530.

  Args:
    units: sorted by their group.
    prompt_of: from a unit to (token ids, seed, request id).
    make_arms: from a group to {name: `Arm`}; at most 30 or so.
    path: of the JSONL file.
    group_of: from a unit to its group; default: its temperature.

  Returns:
    {unit: {name: what `Arm.decode` returned}}.
  """
  runs = _read(path)
  missing = [unit for unit in units if unit not in runs]
  if len(missing) < len(units):
    print(f"{len(units) - len(missing)} of {len(units)} prompts are in {path}; "
          "delete it to measure them again", file=sys.stderr)
  longest = max((prompt_of(unit)[0] for unit in units), key=len)
  group, arms = None, {}
  with (tqdm.tqdm(total=len(units), initial=len(units) - len(missing),
                  unit="prompt", dynamic_ncols=True) as bar,
        open(path, "ab") as f):
    for unit in missing:
      if group_of(unit) != group:
        group = group_of(unit)
        jax.clear_caches()
        arms = make_arms(group)
        for number, arm in enumerate(arms.values(), 1):
          bar.set_description(f"compiling {number} of {len(arms)}")
          arm.decode(longest, 0, 0)
        bar.set_description(f"temperature {unit[1]:g}")
      runs[unit] = {name: arm.decode(*prompt_of(unit))
                    for name, arm in arms.items()}
      f.write(_line(unit, runs[unit]))
      f.flush()
      bar.update()
  return {unit: runs[unit] for unit in units}


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
