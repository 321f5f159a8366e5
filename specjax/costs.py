"""What rounds with drafts of several lengths cost on this machine.

The seconds that a `Controller` compares are measured once for a machine, a
pair of models and a batch size, with the very programs that it will choose
from, and kept in the user's cache directory.
"""

from collections.abc import Sequence
import contextlib
import dataclasses
import math
import os
import pathlib
import platform
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax import contract
from specjax import files
from specjax import rounds as rounds_lib
from specjax.controller import Controller
from specjax.decoder import Decoder

_ROUNDS, _TIMES = 16, 5  # rounds of a timed call, and calls of each length
_READ = 32  # tokens that a drafter reads to find what a missed one costs


def lengths_for(drafter: Any) -> tuple[int, ...]:
  """Lengths to choose from: none, a quarter, half and all of a drafter's own.

  A drafter whose drafts are not as long as its field `gamma` says, or that has
  none, drafts all or nothing.
  """
  longest = drafter.num_nodes - 1
  some = -(-longest // 4), -(-longest // 2)
  make = contract.with_gamma(drafter)
  fit = make is not None and all(_is_chain_of(make, n) for n in some)
  return tuple(sorted({0, *(some if fit else ()), longest}))


def _is_chain_of(make, length):
  """Whether with that gamma the drafts have `length` tokens."""
  try:
    return make(length).num_nodes == length + 1
  except ValueError:
    return False


def measured(decoder: Decoder, params: Any, *, batch: int = 1,
             lengths: Sequence[int] | None = None, used: int = 64,
             context: Any = None,
             directory: str | os.PathLike[str] | None = None,
             again: bool = False, **options: Any) -> Controller:
  """A controller for a decoder, with what its rounds cost on this machine.

  The first call takes some seconds, most of them for compiling; later ones
  read a file. `dataclasses.replace(decoder, controller=...)` makes use of it.

  `reading` is timed for drafters whose `catch_up` reads. It is 0 for those that
  find out in `propose` what they have missed, which are cascades, fallbacks,
  merges and drafters with a vocabulary of their own: for these the controller
  takes the first draft after a rest for cheaper than it is.

  Args:
    decoder: what is to be controlled.
    params: `{"target": ..., "drafter": ...}`.
    batch: rows, B: a batch of another size has other costs.
    lengths: of drafts, from 0; default: `lengths_for` the decoder's drafter.
    used: tokens of each row at which the rounds are timed; fewer where the
      context length has no room for them.
    context: of the rows, as in `Decoder.prefill`.
    directory: of the files; default: `specjax/costs` in the user's cache
      directory. A directory that cannot be written to is done without.
    again: whether to measure anew what a file says.
    **options: of the `Controller`.

  Raises:
    ValueError: a controller does not fit the decoder, the context length has
      no room for a draft, or drafts are too dear to be made.
  """
  lengths = tuple(lengths or lengths_for(decoder.drafter))
  # A constraint may have no text as random as those that are decoded here.
  trial = dataclasses.replace(
      decoder, observers=(), debug=False, eos=None,
      transform=dataclasses.replace(decoder.transform, constraints=()),
      controller=Controller(lengths=lengths, seconds=(1.0,) * len(lengths)))
  path = _path(directory, trial, params, batch, used)
  found = None if again else _kept(path, len(lengths))
  if found is None:
    found = _measure(trial, params, batch, used, context)
    if path is not None:
      with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(path, found)
  return Controller(lengths=lengths, **found, **options)


def _path(directory, decoder, params, batch, used):
  """The file of these costs; None where a part does not say what it is."""
  if directory is None:
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    directory = pathlib.Path(home, "specjax", "costs")
  shapes = jax.tree.map(lambda x: f"{x.dtype}{x.shape}", params)
  device = jax.devices()[0]
  cores = (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity")
           else os.cpu_count())
  machine = (platform.node(), platform.machine(), device.platform,
             device.device_kind, cores, jax.__version__,
             specjax.__version__)
  try:
    name = files.fingerprint(
        decoder.target, decoder.drafter, decoder.verifier, decoder.transform,
        decoder.controller.lengths, shapes, batch, used, machine)
  except TypeError:
    return None
  return pathlib.Path(directory, f"{name}.json")


def _kept(path, count):
  """What the file holds, or None."""
  if path is None or not path.is_file():
    return None
  with contextlib.suppress(ValueError, OSError):
    found = files.read_json(path, "delete it")
    seconds, reading = found.get("seconds"), found.get("reading")
    numbers = [*seconds, reading] if isinstance(seconds, list) else [None]
    if len(numbers) == count + 1 and all(
        isinstance(x, float) and 0 <= x < math.inf for x in numbers) and all(
            seconds):
      return {"seconds": seconds, "reading": reading}
  return None


def _measure(decoder, params, batch, used, context):
  """`seconds` of a round of each length, and of `reading` a token."""
  rungs, longest = decoder._round.rungs, decoder.num_nodes
  used, rounds = _room(used, decoder.context_length, longest)
  rng = np.random.default_rng(0)
  prompts = rng.integers(decoder.target.vocab_size, size=(batch, used))
  state = decoder.prefill(
      params, list(prompts), jax.random.key(0), context=context,
      limits=used + rounds * longest)
  run = lambda one: lambda state: rounds_lib.scan(
      one, params, state, rounds=rounds)
  found = _timed([run(one) for one in rungs], state)
  reading = 0.0
  if hasattr(decoder._round.drafter, "catch_up"):
    known = jnp.maximum(state.lengths - 2 - _READ, 0)
    read = jax.jit(decoder._round.drafter.catch_up)
    long, short = _timed([lambda state: read(params, state, known),
                          lambda state: read(params, state, state.lengths)],
                         state)
    reading = max(long - short, 0.0) / min(_READ, max(used - 2, 1))
  return {"seconds": [one / rounds for one in found], "reading": reading}


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
  """Least seconds of each of the calls, which may donate the state.

  They take turns, so that what disturbs the machine disturbs all of them.
  """
  found = [[] for _ in calls]
  for _ in range(1 + _TIMES):  # the first time compiles
    for times, call in zip(found, calls):
      fresh = jax.block_until_ready(jax.tree.map(jnp.copy, state))
      start = time.perf_counter()
      jax.block_until_ready(call(fresh))
      times.append(time.perf_counter() - start)
  return [min(times[1:]) for times in found]
