"""Coordination of several processes of one program.

`jax.distributed.initialize` joins the processes, and their devices can form one
mesh. All processes run the same Python code. Only the first process prints and
writes files (`files.atomically`). In a program of one process, these functions
have no cost.
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
# Argument of the running `by_the_first`. Nested calls run it directly.
_ALONE: list[Callable[[], Any]] = []
_LOOKS = itertools.count(1)  # numbers of the calls of `told_to_stop`
_TOLD: list[bool] = []  # not empty after SIGTERM to one of several processes
_HEARD: list[int] = []  # signals received by a single process in `listening`
_STOPS = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}


class Stopped(Exception):
  """Error of a run that ended because of a signal, after saving its state.

  Attributes:
    signal: number of the signal.
  """

  def __init__(self, message: str, number: int = signal.SIGTERM):
    super().__init__(message)
    self.signal = number


def is_first() -> bool:
  """Returns True in the process that prints and writes files.

  In a program of one process, this function does not start a JAX backend.

  >>> is_first()
  True
  """
  return not jax.distributed.is_initialized() or jax.process_index() == 0


def by_the_first(work: Callable[[], _T]) -> _T:
  """Calls `work` in the first process and returns its result in all processes.

  All processes must call this function. Use it to read or claim files, because
  files may change between the reads of different processes. An exception of
  `work` is raised in all processes.

  >>> by_the_first(lambda: 3)
  3

  Args:
    work: function without arguments. Its result must support pickle.
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
  """Returns the pickle of an error.

  If the error cannot be pickled, it is replaced by a `RuntimeError` with its
  message.
  """
  try:
    data = pickle.dumps((None, error))
    pickle.loads(data)
    return data
  except Exception:  # pickle calls the methods of any class
    return pickle.dumps(
        (None, RuntimeError(f"{type(error).__name__}: {error}")))


@contextlib.contextmanager
def listening() -> Iterator[None]:
  """Context in which `told_to_stop` reports SIGTERM and Ctrl-C.

  The first signal does not end the program, so that the program can save its
  state. A second signal has its effect outside of this context. An ignored
  signal remains ignored. The context has no effect in two cases: several
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
    # `print` is not safe in a signal handler, because the signal may arrive
    # while the buffer of `print` is in use.
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
  """Returns True after a signal to end the program.

  In a program of one process, call this function in the context `listening`. In
  a program of several processes, SIGTERM to one process is sufficient. The
  result is True in all processes from the same call on. All processes must call
  this function equally often, because JAX identifies a call by its number.
  """
  if not jax.distributed.is_initialized():
    return bool(_HEARD)
  if not _TOLD:
    try:
      if multihost_utils.reached_preemption_sync_point(next(_LOOKS)):
        _TOLD.append(True)
    except RuntimeError:  # without JAX's service, SIGTERM ends the process
      pass
  return bool(_TOLD)


def stopped(what: str) -> Stopped:
  """Returns the error to raise after `told_to_stop` returned True.

  Args:
    what: state of the program, such as "after step 3, which is saved".
  """
  number = _HEARD[0] if _HEARD else signal.SIGTERM
  return Stopped(f"stopped by {_STOPS[number]} {what}", number)


def gathered(tree: _T) -> _T:
  """Returns the tree with leaves that every process can read completely.

  Arrays with parts on devices of other processes become complete NumPy arrays.
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
  """Returns the arrays of a tree, placed on devices.

  Every process must have the complete arrays. A device receives only its part.
  Arrays that already are on several devices are moved between devices.

  Args:
    tree: tree of NumPy arrays, JAX arrays or typed PRNG keys.
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
