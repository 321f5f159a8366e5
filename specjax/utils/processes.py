"""Coordination of several processes of one program.

`jax.distributed.initialize` joins processes whose devices then form one mesh.
All of them run the same Python. The first process prints, and writes the files
(`files.atomically`). In a program of one process these functions cost nothing.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import itertools
import os
import pickle
import signal
import threading
from types import FrameType
from typing import Any
from typing import TypeVar

import chex
import jax
from jax.experimental import multihost_utils
from jax.experimental.layout import Format
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

_T = TypeVar("_T")
# Work of the first process, for which the other processes wait.
_ALONE: list[Callable[[], Any]] = []
_LOOKS = itertools.count(1)  # numbers of the calls of `told_to_stop`
_TOLD: list[bool] = []  # not empty after SIGTERM to one of several processes
_HEARD: list[int] = []  # signals to a single process that is `listening`
_STOPS = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}


class Stopped(Exception):
  """A run was asked to stop, and all its processes have saved their state.

  Attributes:
    signal: the number of the signal.
  """

  def __init__(self, message: str, number: int = signal.SIGTERM):
    super().__init__(message)
    self.signal = number


def is_first() -> bool:
  """Returns True in the process that prints and writes files for all.

  In a program of one process, this function does not start a JAX backend.

  >>> is_first()
  True
  """
  return not jax.distributed.is_initialized() or jax.process_index() == 0


def by_the_first(work: Callable[[], _T]) -> _T:
  """Calls `work` in the first process and returns its result in all of them.

  All processes must call this function. It is for reading and claiming files,
  whose state may change between the reads of different processes. An exception
  of `work` is raised in all processes.

  >>> by_the_first(lambda: 3)
  3

  Args:
    work: function without arguments; its result can be pickled.
  """
  if not jax.distributed.is_initialized() or _ALONE:
    return work()
  error, data = None, b""
  if is_first():
    _ALONE.append(work)
    try:
      data = pickle.dumps((work(), None))
    except Exception as e:  # any error, because the other processes wait
      error, data = e, _pickled(e)
    finally:
      _ALONE.pop()
  send = multihost_utils.broadcast_one_to_all
  size = int(send(np.asarray(len(data), np.int32)))
  data = (np.frombuffer(data, np.uint8) if is_first()
          else np.zeros(size, np.uint8))
  data = np.asarray(send(data)).tobytes()
  if error is not None:
    raise error
  result, error = pickle.loads(data)
  if error is not None:
    raise error
  return result


def _pickled(error: Exception) -> bytes:
  """Pickles an error, or its message if its class cannot be pickled."""
  try:
    data = pickle.dumps((None, error))
    pickle.loads(data)
    return data
  except Exception:  # pickle calls the methods of any class
    return pickle.dumps(
        (None, RuntimeError(f"{type(error).__name__}: {error}")))


@contextlib.contextmanager
def listening() -> Iterator[None]:
  """Lets `told_to_stop` report SIGTERM and Ctrl-C to a single process.

  The first signal only sets a mark, so the program can save before it ends. A
  second signal acts as it would outside of this context. A signal that is
  ignored stays ignored. In two cases the context changes nothing: several
  processes use JAX's service for SIGTERM, and threads other than the main
  thread cannot receive signals.
  """
  before: dict[int, Any] = {}

  def restore() -> None:
    for number, handler in before.items():
      signal.signal(number, handler)

  def hear(number: int, frame: FrameType | None) -> None:
    del frame
    restore()
    _HEARD.append(number)
    # `print` is not safe here: the signal may arrive while its buffer is used.
    os.write(2, f"\n{_STOPS[number]}: the run ends after this step, with a "
             "checkpoint; a second signal ends it at once\n".encode())

  if not jax.distributed.is_initialized() and (
      threading.current_thread() is threading.main_thread()):
    before = {number: signal.getsignal(number) for number in _STOPS}
    before = {number: handler for number, handler in before.items()
              if handler not in (None, signal.SIG_IGN)}
  try:
    for number in before:
      signal.signal(number, hear)
    yield
  finally:
    restore()
    _HEARD.clear()


def told_to_stop() -> bool:
  """Returns True if the program was asked to end.

  Several processes all return True from the same call on, if one of them has
  received SIGTERM. They must all call this function equally often, because JAX
  identifies the call by a running number. A single process must be `listening`.
  """
  if not jax.distributed.is_initialized():
    return bool(_HEARD)
  if not _TOLD:
    try:
      if multihost_utils.reached_preemption_sync_point(next(_LOOKS)):
        _TOLD.append(True)
    except RuntimeError:  # without JAX's service SIGTERM ends the process
      pass
  return bool(_TOLD)


def stopped(what: str) -> Stopped:
  """Returns the error of a program that was `told_to_stop`.

  Args:
    what: state of the program, such as "after step 3, which is saved".
  """
  number = _HEARD[0] if _HEARD else signal.SIGTERM
  return Stopped(f"stopped by {_STOPS[number]} {what}", number)


def gathered(tree: _T) -> _T:
  """Returns the tree with leaves that every process can read completely.

  Arrays with parts on devices of other processes become complete numpy arrays.
  Other leaves are unchanged. All processes must call this function.

  Args:
    tree: tree of arrays.
  """
  def gather(x: Any) -> Any:
    if not isinstance(x, jax.Array) or x.is_fully_addressable or (
        x.is_fully_replicated):
      return x
    return multihost_utils.process_allgather(x, tiled=True)

  return jax.tree.map(gather, tree)


def placed(tree: chex.ArrayTree, shardings: Any) -> Any:
  """Places arrays on devices; every process has the complete arrays.

  A device receives only its part. Arrays that already are on several devices
  are moved between them.

  Args:
    tree: tree of arrays, of numpy or on one device, or of typed keys.
    shardings: tree of `NamedSharding` or `Format` with the same structure.
  """
  def place(x: Any, sharding: Any) -> jax.Array:
    devices = sharding.sharding if isinstance(sharding, Format) else sharding
    if devices.is_fully_addressable or (
        isinstance(x, jax.Array) and not x.is_fully_addressable):
      return jax.device_put(x, sharding)
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(
        x.dtype, jax.dtypes.prng_key):
      data = NamedSharding(
          sharding.mesh, PartitionSpec(
              *sharding.spec, *[None] * (x.ndim + 1 - len(sharding.spec))))
      return jax.random.wrap_key_data(
          place(jax.random.key_data(x), data), impl=jax.random.key_impl(x))
    array = np.asarray(x)
    return jax.make_array_from_callback(
        array.shape, sharding, lambda index: array[index])

  return jax.tree.map(place, tree, shardings)
