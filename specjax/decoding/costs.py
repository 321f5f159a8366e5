"""Measurement of the costs of rounds with drafts of several lengths.

A `Controller` compares draft lengths by the seconds of their rounds. The
seconds are measured once per machine, pair of models, batch size and capacity,
in the loops that the controller will run. The results are stored in the user's
cache directory.
"""

from collections.abc import Callable
from collections.abc import Sequence
import contextlib
import dataclasses
import functools
import math
import os
import pathlib
import platform
import statistics
import time
from typing import Any

import chex
from flax import struct
import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from specjax import interfaces
from specjax.decoding import growth as capacity_lib
from specjax.decoding import rounds as rounds_lib
from specjax.decoding.controller import Controller
from specjax.decoding.controller import ControllerState
from specjax.decoding.decoder import Decoder
from specjax.interfaces import Drafter
from specjax.types import DecodeState
from specjax.types import RoundStats
from specjax.utils import files
from specjax.utils.fingerprints import fingerprint
from specjax.version import __version__

_ROUNDS, _TIMES = 16, 9  # rounds per timed call, and number of timed calls
_SECONDS = 4  # duration of a measurement of `seconds_of_rounds`
_READ = 32  # number of tokens that a drafter reads when `reading` is timed
_PERIOD = 4  # when `switching` is timed, one of this many rounds has a draft
_FORM = 2  # version of the file format


@struct.dataclass
class _Script(ControllerState):
  """State of a `_Scripted` controller.

  Attributes:
    index: `[B]` int32, index of the drafted length, equal for all rows.
    period: `[B]` int32, number of rounds of a period, equal for all rows. Only
      the last round of a period has a draft.
  """

  index: jax.Array
  period: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Scripted(Controller):
  """Controller that drafts in every n-th round, with a fixed length.

  n and the length are arrays in the state, so all timings share one compiled
  program. All drafted tokens are verified.
  """

  cuts = False

  def init(self, lengths: jax.Array) -> _Script:
    own = super().init(lengths)
    zeros = jnp.zeros_like(lengths)
    return _Script(**vars(own), index=zeros, period=zeros + 1)

  def choose(self, state: DecodeState) -> jax.Array:
    drafts = self._rest_of_period(state) == 0
    return jnp.where(drafts, state.controller.index[0], 0)

  def rests(self, state: DecodeState, chosen: jax.Array
            ) -> tuple[ControllerState, jax.Array]:
    rests = jnp.maximum(self._rest_of_period(state), 1)
    return state.controller, jnp.where(chosen > 0, 0, rests)

  def learned(self, state: DecodeState, stats: RoundStats, lengths: jax.Array,
              chosen: jax.Array, verified: jax.Array) -> ControllerState:
    return state.controller.replace(known=lengths - 2)

  def _rest_of_period(self, state: DecodeState) -> jax.Array:
    period = state.controller.period[0]
    return period - 1 - state.rounds[0] % period


def lengths_for(drafter: Any) -> tuple[int, ...]:
  """Returns the default draft lengths of a controller for a drafter.

  These are 0, 1, two fifths of the drafter's length (rounded up), and its
  length. A draft of one token costs little, so a few attempts show whether
  drafts pay. If the drafter does not support chains of any length `gamma`, the
  lengths are only 0 and its own length.
  """
  longest = drafter.num_nodes - 1
  some = 1, -(-2 * longest // 5)
  fit = all(has_chain_of(drafter, n) for n in some)
  return tuple(sorted({0, *(some if fit else ()), longest}))


def has_chain_of(drafter: Drafter, length: int) -> bool:
  """Returns True if drafts with this gamma have `length` tokens."""
  try:
    chain = drafter.with_gamma(length)
  except ValueError:
    return False
  return chain is not None and chain.num_nodes == length + 1


def measured(decoder: Decoder, params: chex.ArrayTree, *, batch: int = 1,
             lengths: Sequence[int] | None = None, used: int = 64,
             capacity: int = 0, context: chex.ArrayTree | None = None,
             prompts: Sequence[ArrayLike] | None = None,
             directory: str | os.PathLike[str] | None = None,
             again: bool = False, **options: Any) -> Controller:
  """Returns a controller with the measured costs of a decoder's rounds.

  The first call takes some seconds, mostly for compilation. Later calls read a
  file. Use the result in `dataclasses.replace(decoder, controller=...)`.

  If the first drafter of a `Fallback` draws no random numbers, rounds with this
  drafter alone are also timed. `reading` is timed for drafters with `catch_up`.
  Other drafters read missed tokens in `propose` (cascades, fallbacks, merges
  and drafters with another vocabulary). For these, `reading` is 0, so the
  controller underestimates the cost of their first draft after a pause.

  Args:
    decoder: decoder that will use the controller.
    params: `{"target": ..., "drafter": ...}`.
    batch: B, number of rows of the batch.
    lengths: draft lengths, increasing from 0. Default: the result of
      `lengths_for(decoder.drafter)`.
    used: number of tokens per row at which rounds are timed, such as a prompt
      and half of its continuation. It is reduced if the context or the capacity
      is too small.
    capacity: minimum number of slots per row, as in `Decoder.prefill`. Default:
      the slots for `used` and the timed rounds.
    context: context of the rows, as in `Decoder.prefill`.
    prompts: token ids at which rounds are timed, one text or several. Default:
      random tokens. Give texts for a target with experts, because the time of
      its pass depends on the experts that the tokens choose.
    directory: directory of the stored costs. Default: `specjax/costs` in the
      user's cache directory. If it cannot be written, the costs are not stored.
    again: True measures even if stored costs exist.
    **options: other arguments of the `Controller`, such as `risk`.

  Raises:
    ValueError: a controller does not fit the decoder; a draft is as long as the
      context length, or longer; drafts are too expensive; or an option is a
      measured value.
  """
  measured_here = {"seconds", "first", "reading", "switching"} & set(options)
  if measured_here:
    raise ValueError(
        f"{min(measured_here)} is an option and is measured here; leave it "
        "out, or set it with dataclasses.replace in the returned controller")
  lengths = tuple(
      lengths_for(decoder.drafter) if lengths is None else lengths)
  # Constraints may not allow the random tokens that are decoded here.
  trial = dataclasses.replace(
      decoder, observers=(), debug=False, eos=None,
      transform=dataclasses.replace(decoder.transform, constraints=()),
      controller=_Scripted(
          lengths=lengths, seconds=(1.0,) * len(lengths), **options))
  capacity = capacity and capacity_lib.rounded(capacity)
  path = _path(directory, trial, params, batch, (used, capacity), context,
               prompts)
  found = None if again else _stored(path, len(lengths))
  if found is None:
    setting = batch, used, capacity, context, prompts
    found = _measure(trial, params, *setting)
    first, own = _first(trial, params)
    found["first"] = _measure(first, own, *setting)["seconds"] if first else []
    # The constructor rejects very large costs. They may be due to a disturbance
    # of the measurement, so the error is raised before the costs are stored.
    Controller(lengths=lengths, **found)
    if path is not None:
      with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(path, found)
  return Controller(lengths=lengths, **found, **options)


def seconds_of_rounds(
    decoders: Sequence[tuple[Decoder, chex.ArrayTree]], *, batch: int,
    used: int, prompts: Sequence[ArrayLike] | None = None) -> list[float]:
  """Returns the measured seconds of a round of each decoder.

  The decoders take turns, so ratios of their times are more reliable than the
  times. The measurement takes at least 4 seconds. Nothing is stored.

  Args:
    decoders: decoders without a controller, each with its
      `{"target": ..., "drafter": ...}`.
    batch: number of rows B of the batch.
    used: tokens per row at which rounds are timed; fewer if there is no room.
    prompts: token ids at which rounds are timed, as in `measured`.
  """
  longest = max(decoder.num_nodes for decoder, _ in decoders)
  used, rounds = _room(used, min(
      decoder.context_length for decoder, _ in decoders), longest)
  calls = []
  for decoder, params in decoders:
    state = decoder.prefill(
        params, _prompts(decoder, batch, used, prompts), jax.random.key(0),
        limits=used + rounds * longest)
    calls.append((functools.partial(
        rounds_lib.until, decoder.stage, params, rounds=rounds), state))
  return [seconds / rounds for seconds in _timed(calls, _SECONDS)]


def _prompts(decoder: Decoder, batch: int, used: int,
             prompts: Sequence[ArrayLike] | None) -> list[np.ndarray]:
  """Returns prompts of `used` tokens. Shorter texts are repeated."""
  if prompts is None:
    rng = np.random.default_rng(0)
    return list(rng.integers(decoder.target.vocab_size, size=(batch, used)))
  return [np.resize(np.asarray(prompts[i % len(prompts)]), used)
          for i in range(batch)]


def _first(decoder: Decoder, params: chex.ArrayTree
           ) -> tuple[Decoder | None, Any]:
  """Returns a decoder with only the first drafter of a `Fallback`, and params.

  Returns `(None, None)` if all rounds are of one kind (see `Controller`), or
  the first drafter does not support the controller's lengths.
  """
  drafter = decoder.drafter
  if "tells" not in drafter.provides:
    return None, None
  if not all(has_chain_of(drafter.first, n)
             for n in decoder.controller.lengths[1:]):
    return None, None
  return (dataclasses.replace(decoder, drafter=drafter.first),
          drafter.params_of_members(params)[0])


def _path(directory: str | os.PathLike[str] | None, decoder: Decoder,
          params: chex.ArrayTree, batch: int, slots: tuple[int, int],
          context: chex.ArrayTree, prompts: Any = None) -> pathlib.Path | None:
  """Returns the path of the file for these costs.

  The name of the file is a hash of the configuration and the machine. The
  result is None if a component has no stable `repr`, and therefore no hash.
  """
  if directory is None:
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    directory = pathlib.Path(home, "specjax", "costs")
  shapes, machine = conditions((params, context))
  try:
    name = fingerprint(
        decoder.target, decoder.drafter, decoder.verifier, decoder.transform,
        decoder.controller.lengths, shapes, batch, slots, (_FORM, *machine),
        *([] if prompts is None else [[np.asarray(x) for x in prompts]]))
  except TypeError:
    return None
  return pathlib.Path(directory, f"{name}.json")


def conditions(params: chex.ArrayTree) -> tuple[chex.ArrayTree, tuple]:
  """Returns the conditions of a measurement, for its `fingerprint`.

  They are the shapes and dtypes of the parameters, and the machine: host,
  device, number of cores, compiler flags and versions.
  """
  device = jax.devices()[0]
  cores = (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity")
           else os.cpu_count())
  shapes = jax.tree.map(
      lambda x: f"{jnp.result_type(x)}{np.shape(x)}", params)
  return shapes, (platform.node(), platform.machine(), device.platform,
                  device.device_kind, cores, os.environ.get("XLA_FLAGS"),
                  jax.__version__, __version__)


def _stored(path: pathlib.Path | None, count: int) -> dict[str, Any] | None:
  """Returns the costs of a file, or None if it is missing or invalid."""
  if path is None or not path.is_file():
    return None
  with contextlib.suppress(ValueError, OSError):
    costs = files.read_json(path, "delete it")
    costs = {"seconds": costs.get("seconds"), "first": costs.get("first") or [],
             "reading": costs.get("reading", 0.0),
             "switching": costs.get("switching", 0.0)}
    return costs if _is_valid(count, **costs) else None
  return None


def _is_valid(count: int, seconds: Any, first: Any, reading: Any,
              switching: Any) -> bool:
  """Returns True if all costs are finite and `count` lengths have seconds."""
  if not (isinstance(seconds, list) and isinstance(first, list)):
    return False
  numbers = [*seconds, *first, reading, switching]
  return len(seconds) == count and len(first) in (0, count) and all(
      isinstance(x, float) and 0 <= x < math.inf for x in numbers) and all(
          seconds + first)


def _measure(decoder: Decoder, params: chex.ArrayTree, batch: int, used: int,
             capacity: int, context: chex.ArrayTree,
             prompts: Sequence[ArrayLike] | None = None) -> dict[str, Any]:
  """Returns the measured values of `seconds`, `reading` and `switching`.

  `Controller` documents these fields.
  """
  by_length, longest = decoder.stage, decoder.num_nodes
  whole = decoder.context_length
  used, rounds = _room(
      used, min(whole, capacity - longest) if capacity else whole, longest)
  state = decoder.prefill(
      params, _prompts(decoder, batch, used, prompts), jax.random.key(0),
      context=context,
      limits=used + rounds * longest, capacity=capacity)
  own = state.controller

  def of(index, rounds, period=1):
    script = own.replace(index=jnp.full_like(own.index, index),
                         period=jnp.full_like(own.period, period))
    return lambda state: rounds_lib.until(
        by_length, params, state.replace(controller=jax.tree.map(
            jnp.copy, script)), rounds)

  # The seconds of a round are computed from the difference of a long and a
  # short call. This excludes the cost of a call and its slower first rounds.
  few = rounds // 4
  kinds = [(i, n) for i in range(len(by_length.rungs)) for n in (few, rounds)]
  kinds = [one for one in kinds if one[1]]
  calls = [of(*one) for one in kinds] + [of(1, rounds, _PERIOD)]
  *times, changing = _timed([(call, state) for call in calls])
  took = dict(zip(kinds, times))
  seconds = [_per_round(took.get((i, few), 0.0), few, took[i, rounds], rounds)
             for i in range(len(by_length.rungs))]
  reading = 0.0
  if interfaces.has_model(by_length.drafter):
    known = jnp.maximum(state.lengths - 2 - _READ, 0)
    read = jax.jit(by_length.drafter.catch_up)
    long, short = _timed([
        (lambda state: read(params, state, known), state),
        (lambda state: read(params, state, state.lengths), state)])
    reading = max(long - short, 0.0) / min(_READ, max(used - 2, 1))
  drafts = rounds // _PERIOD
  switching = drafts and (changing - took[0, rounds]) / drafts - (
      seconds[1] - seconds[0]) - reading * (_PERIOD - 1)
  return {"seconds": seconds, "reading": reading,
          "switching": float(max(switching, 0.0))}


def _room(used: int, context_length: int, nodes: int) -> tuple[int, int]:
  """Returns a prompt length and a number of rounds that fit a context.

  Args:
    used: desired number of tokens of the prompt.
    context_length: maximum number of tokens of a sequence.
    nodes: number of nodes of the longest draft, including the root.
  """
  if context_length <= nodes:
    raise ValueError(
        f"drafts of {nodes - 1} tokens leave no room for a prompt in a context "
        f"of {context_length} tokens; use shorter drafts")
  rounds = min(_ROUNDS, max((context_length - min(
      used, context_length // 2)) // nodes, 1))
  return min(used, context_length - rounds * nodes), rounds


def _per_round(short: float, few: int, long: float, rounds: int) -> float:
  """Returns the seconds per round, from the times of two calls.

  The difference excludes the time of starting a call. If starting takes longer
  than the rounds, the difference is unreliable. So a round takes at least half
  of the mean time.
  """
  return max((long - short) / (rounds - few), long / (2 * rounds))


def _timed(calls: Sequence[tuple[Callable[[DecodeState], Any], DecodeState]],
           seconds: float = 0.0) -> list[float]:
  """Returns the median seconds of each call.

  The calls alternate, so that a disturbance of the machine affects all of them.

  Args:
    calls: functions of a state, each with its state. A call receives a copy of
      its state and may donate it.
    seconds: time for which calls are repeated. They are called at least
      `_TIMES` times.
  """
  found, end = [[] for _ in calls], math.inf
  while len(found[0]) <= _TIMES or time.perf_counter() < end:
    for times, (call, state) in zip(found, calls):
      fresh = jax.block_until_ready(jax.tree.map(jnp.copy, state))
      start = time.perf_counter()
      jax.block_until_ready(call(fresh))
      times.append(time.perf_counter() - start)
    if len(found[0]) == 1:  # the first call compiles, and is not counted
      end = time.perf_counter() + seconds
  return [statistics.median(times[1:]) for times in found]
