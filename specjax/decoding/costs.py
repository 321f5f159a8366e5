"""What rounds with drafts of several lengths cost on this machine.

The seconds that a `Controller` compares are measured once for a machine, a
pair of models, a batch size and the slots of a row, in the loops in which it
will choose, and kept in the user's cache directory.
"""

from collections.abc import Sequence
import contextlib
import dataclasses
import math
import os
import pathlib
import platform
import statistics
import time
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax import interfaces
from specjax.decoding import growth as capacity_lib
from specjax.decoding import rounds as rounds_lib
from specjax.decoding.controller import Controller
from specjax.decoding.controller import ControllerState
from specjax.decoding.decoder import Decoder
from specjax.utils import files
from specjax.utils.fingerprints import fingerprint
from specjax.version import __version__

_ROUNDS, _TIMES = 16, 9  # rounds of a timed call, and calls of each kind
_READ = 32  # tokens that a drafter reads to find what a missed one costs
_PERIOD = 4  # rounds from one draft to the next, to find what changing costs
_FORM = 2  # of the files; another one is for costs that mean something else


@struct.dataclass
class _Script(ControllerState):
  """In which rounds a `_Scripted` controller drafts, and how much.

  Attributes:
    index: `[B]` int32, equal: of the length that is drafted.
    period: `[B]` int32, equal: rounds, in the last of which it is, over and
      over.
  """

  index: jax.Array
  period: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Scripted(Controller):
  """Drafts in the rounds that its state names: one program for every timing.

  All that may be drafted is verified.
  """

  cuts = False

  def init(self, lengths):
    own = super().init(lengths)
    zeros = jnp.zeros_like(lengths)
    return _Script(**vars(own), index=zeros, period=zeros + 1)

  def choose(self, state):
    drafts = self._rest_of_period(state) == 0
    return jnp.where(drafts, state.controller.index[0], 0)

  def rests(self, state, chosen):
    rests = jnp.maximum(self._rest_of_period(state), 1)
    return state.controller, jnp.where(chosen > 0, 0, rests)

  def learned(self, state, stats, lengths, chosen, verified):
    return state.controller.replace(known=lengths - 2)

  def _rest_of_period(self, state):
    period = state.controller.period[0]
    return period - 1 - state.rounds[0] % period


def lengths_for(drafter: Any) -> tuple[int, ...]:
  """Lengths to choose from: none, one, two fifths and all of a drafter's own.

  One token costs little to try, so that a few tries tell whether drafts pay. A
  drafter whose drafts are not as long as its field `gamma` says, or that has
  none, drafts all or nothing.
  """
  longest = drafter.num_nodes - 1
  some = 1, -(-2 * longest // 5)
  fit = all(_has_chain_of(drafter, n) for n in some)
  return tuple(sorted({0, *(some if fit else ()), longest}))


def _has_chain_of(drafter, length):
  """Whether with that gamma the drafts have `length` tokens."""
  try:
    chain = drafter.with_gamma(length)
  except ValueError:
    return False
  return chain is not None and chain.num_nodes == length + 1


def measured(decoder: Decoder, params: Any, *, batch: int = 1,
             lengths: Sequence[int] | None = None, used: int = 64,
             capacity: int = 0, context: Any = None,
             directory: str | os.PathLike[str] | None = None,
             again: bool = False, **options: Any) -> Controller:
  """A controller for a decoder, with what its rounds cost on this machine.

  The first call takes some seconds, most of them for compiling; later ones
  read a file. `dataclasses.replace(decoder, controller=...)` makes use of it.

  Of a `Fallback` whose first drafter draws nothing the rounds of that one alone
  are timed as well.

  `reading` is timed for drafters whose `catch_up` reads. It is 0 for those that
  find out in `propose` what they have missed, which are cascades, fallbacks,
  merges and drafters with a vocabulary of their own: for these the controller
  takes the first draft after a rest for cheaper than it is.

  Args:
    decoder: what is to be controlled.
    params: `{"target": ..., "drafter": ...}`.
    batch: rows, B: a batch of another size has other costs.
    lengths: of drafts, from 0; default: `lengths_for` the decoder's drafter.
    used: tokens of each row at which the rounds are timed, such as those of a
      prompt and half of what follows; fewer where there is no room for them.
    capacity: least number of slots of a row, as in `Decoder.prefill`: what will
      be decoded in. Default: what `used` and the rounds that are timed take.
    context: of the rows, as in `Decoder.prefill`.
    directory: of the files; default: `specjax/costs` in the user's cache
      directory. A directory that cannot be written to is done without.
    again: whether to measure anew what a file says.
    **options: of the `Controller`.

  Raises:
    ValueError: a controller does not fit the decoder, the context length has
      no room for a draft, drafts are too dear to be made, or an option is what
      is measured.
  """
  measured_here = {"seconds", "first", "reading", "switching"} & set(options)
  if measured_here:
    raise ValueError(
        f"{min(measured_here)} is given and is measured here; leave it out, "
        "or set it by dataclasses.replace in the controller that is returned")
  lengths = tuple(
      lengths_for(decoder.drafter) if lengths is None else lengths)
  # A constraint may have no text as random as those that are decoded here.
  trial = dataclasses.replace(
      decoder, observers=(), debug=False, eos=None,
      transform=dataclasses.replace(decoder.transform, constraints=()),
      controller=_Scripted(
          lengths=lengths, seconds=(1.0,) * len(lengths), **options))
  capacity = capacity and capacity_lib.rounded(capacity)
  path = _path(directory, trial, params, batch, (used, capacity), context)
  found = None if again else _kept(path, len(lengths))
  if found is None:
    found = _measure(trial, params, batch, used, capacity, context)
    first, own = _first(trial, params)
    found["first"] = _measure(
        first, own, batch, used, capacity, context)["seconds"] if first else []
    # What is refused as too dear may be a disturbance: no file keeps it.
    Controller(lengths=lengths, **found)
    if path is not None:
      with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(path, found)
  return Controller(lengths=lengths, **found, **options)


def _first(decoder, params):
  """The decoder with the first drafter alone, and its parameters.

  `(None, None)` for a drafter that is no `Fallback`, or cannot tell whose turn
  it is, or whose first drafter has no drafts of the lengths.
  """
  drafter = decoder.drafter
  if not drafter.tells:
    return None, None
  if not all(_has_chain_of(drafter.first, n)
             for n in decoder.controller.lengths[1:]):
    return None, None
  return (dataclasses.replace(decoder, drafter=drafter.first),
          drafter.params_of_parts(params)[0])


def _path(directory, decoder, params, batch, slots, context):
  """The file of these costs; None where a part does not say what it is."""
  if directory is None:
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    directory = pathlib.Path(home, "specjax", "costs")
  shapes = jax.tree.map(
      lambda x: f"{jnp.result_type(x)}{np.shape(x)}", (params, context))
  device = jax.devices()[0]
  cores = (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity")
           else os.cpu_count())
  machine = (_FORM, platform.node(), platform.machine(), device.platform,
             device.device_kind, cores, os.environ.get("XLA_FLAGS"),
             jax.__version__, __version__)
  try:
    name = fingerprint(
        decoder.target, decoder.drafter, decoder.verifier, decoder.transform,
        decoder.controller.lengths, shapes, batch, slots, machine)
  except TypeError:
    return None
  return pathlib.Path(directory, f"{name}.json")


def _kept(path, count):
  """What the file holds, or None."""
  if path is None or not path.is_file():
    return None
  with contextlib.suppress(ValueError, OSError):
    found = files.read_json(path, "delete it")
    seconds = found.get("seconds")
    others = {name: found.get(name, 0.0) for name in ("reading", "switching")}
    first = found.get("first") or []
    if isinstance(seconds, list) and len(seconds) == count and isinstance(
        first, list) and len(first) in (0, count) and all(
            isinstance(x, float) and 0 <= x < math.inf
            for x in (*seconds, *first, *others.values())) and all(
                seconds + first):
      return {"seconds": seconds, "first": first, **others}
  return None


def _measure(decoder, params, batch, used, capacity, context):
  """`seconds` of a round of each length, of `reading` and of `switching`."""
  by_length, longest = decoder.parts, decoder.num_nodes
  whole = decoder.context_length
  used, rounds = _room(
      used, min(whole, capacity - longest) if capacity else whole, longest)
  rng = np.random.default_rng(0)
  prompts = rng.integers(decoder.target.vocab_size, size=(batch, used))
  state = decoder.prefill(
      params, list(prompts), jax.random.key(0), context=context,
      limits=used + rounds * longest, capacity=capacity)
  own = state.controller

  def of(index, rounds, period=1):
    script = own.replace(index=jnp.full_like(own.index, index),
                         period=jnp.full_like(own.period, period))
    return lambda state: rounds_lib.until(
        by_length, params, state.replace(controller=jax.tree.map(
            jnp.copy, script)), rounds)

  # What a call costs, and its first rounds more than others, is left out.
  few = rounds // 4
  kinds = [(i, n) for i in range(len(by_length.rungs)) for n in (few, rounds)]
  kinds = [one for one in kinds if one[1]]
  calls = [of(*one) for one in kinds] + [of(1, rounds, _PERIOD)]
  *times, changing = _timed(calls, state)
  took = dict(zip(kinds, times))
  # Where calls take longer than rounds the difference may be any number.
  seconds = [max((took[i, rounds] - took.get((i, few), 0.0)) / (rounds - few),
                 took[i, rounds] / (2 * rounds))
             for i in range(len(by_length.rungs))]
  reading = 0.0
  if interfaces.has_model(by_length.drafter):
    known = jnp.maximum(state.lengths - 2 - _READ, 0)
    read = jax.jit(by_length.drafter.catch_up)
    long, short = _timed([lambda state: read(params, state, known),
                          lambda state: read(params, state, state.lengths)],
                         state)
    reading = max(long - short, 0.0) / min(_READ, max(used - 2, 1))
  drafts = rounds // _PERIOD
  switching = drafts and (changing - took[0, rounds]) / drafts - (
      seconds[1] - seconds[0]) - reading * (_PERIOD - 1)
  return {"seconds": seconds, "reading": reading,
          "switching": float(max(switching, 0.0))}


def _room(used, context_length, nodes):
  """Tokens of a prompt, and rounds after it, that a context has room for."""
  if context_length <= nodes:
    raise ValueError(
        f"drafts of {nodes - 1} tokens leave no room for a prompt in a context "
        f"of {context_length}; draft less")
  rounds = min(_ROUNDS, max((context_length - min(
      used, context_length // 2)) // nodes, 1))
  return min(used, context_length - rounds * nodes), rounds


def _timed(calls, state):
  """Median seconds of each of the calls, which may donate the state.

  They take turns, so that what disturbs the machine disturbs all of them.
  """
  found = [[] for _ in calls]
  for _ in range(1 + _TIMES):  # the first time compiles
    for times, call in zip(found, calls):
      fresh = jax.block_until_ready(jax.tree.map(jnp.copy, state))
      start = time.perf_counter()
      jax.block_until_ready(call(fresh))
      times.append(time.perf_counter() - start)
  return [statistics.median(times[1:]) for times in found]
