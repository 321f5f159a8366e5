"""What several processes of one program do together.

`jax.distributed.initialize` joins processes whose devices then form one mesh.
All of them run the same Python, and what concerns the outside is done by the
first: it prints, and it writes the files (`files.atomically` knows). In a
program of one process every function here is free.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import itertools
import os
import pickle
import signal
import threading
from typing import Any
from typing import TypeVar

import jax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

_T = TypeVar("_T")
_ALONE = []  # what the first process does while the others wait
_LOOKS, _TOLD = itertools.count(1), []  # for SIGTERM; whether one was found
_HEARD = []  # signals to a single process, while it is `listening`
_STOPS = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}


class Stopped(Exception):
  """A run was asked to stop, and all its processes have saved what they had.

  Attributes:
    signal: the number of the signal that asked.
  """

  def __init__(self, message: str, number: int = signal.SIGTERM):
    super().__init__(message)
    self.signal = number


def is_first() -> bool:
  """Whether this process speaks and writes for all.

  It starts no backend in a program of one process.
  """
  return not jax.distributed.is_initialized() or jax.process_index() == 0


def by_the_first(work: Callable[[], _T]) -> _T:
  """What `work` returns, or raises, in the first process; called by all.

  For reading and claiming files, of which each process might see another
  state: so none goes on where another stops.

  Args:
    work: called in the first process alone; its result can be pickled.
  """
  if not jax.distributed.is_initialized() or _ALONE:
    return work()
  error, data = None, b""
  if is_first():
    _ALONE.append(work)
    try:
      data = pickle.dumps((work(), None))
    except Exception as e:  # whatever it is, the others wait for it
      error, data = e, _packed(e)
    finally:
      _ALONE.pop()
  send = multihost_utils.broadcast_one_to_all
  size = int(send(np.asarray(len(data), np.int32)))
  data = (np.frombuffer(data, np.uint8) if is_first()
          else np.zeros(size, np.uint8))
  data = np.asarray(send(data)).tobytes()
  if error is not None:
    raise error
  found, error = pickle.loads(data)
  if error is not None:
    raise error
  return found


def _packed(error):
  """An error for the others, or its words where it is none to them."""
  try:
    data = pickle.dumps((None, error))
    pickle.loads(data)
    return data
  except Exception:  # of a class that cannot be sent, or not made again
    return pickle.dumps(
        (None, RuntimeError(f"{type(error).__name__}: {error}")))


def all_agree(good: bool) -> bool:
  """Whether it is so in every process; called by all."""
  if not jax.distributed.is_initialized():
    return good
  return bool(multihost_utils.process_allgather(np.asarray(good)).all())


@contextlib.contextmanager
def listening() -> Iterator[None]:
  """Lets `told_to_stop` report SIGTERM and Ctrl-C to a single process.

  The first signal only sets a mark, so the program can save before it ends. A
  second one acts as it would outside of this context. A signal that is ignored
  stays ignored. Joined processes use JAX's service for SIGTERM instead, and
  threads other than the main one cannot receive signals.
  """
  before = {}

  def restore():
    for number, handler in before.items():
      signal.signal(number, handler)

  def hear(number, frame):
    del frame
    restore()
    _HEARD.append(number)
    # Not print: its buffer may be in use where the signal arrives.
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
  """Returns whether the program was asked to end; called by all processes.

  For joined processes it is true if SIGTERM has come to one of them, in every
  process from the same call on. All of them must call it equally often: JAX
  identifies the place where they stop by a running number. A single process
  must be `listening`.
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
    what: the state in which it ends, such as "after step 3, which is saved".
  """
  number = _HEARD[0] if _HEARD else signal.SIGTERM
  return Stopped(f"stopped by {_STOPS[number]} {what}", number)


def gathered(tree: Any) -> Any:
  """The tree with every leaf readable in this process; called by all.

  Arrays that lie in part on the devices of other processes become numpy arrays
  of the whole; the others stay as they are.
  """
  def one(x):
    if not isinstance(x, jax.Array) or x.is_fully_addressable or (
        x.is_fully_replicated):
      return x
    return multihost_utils.process_allgather(x, tiled=True)

  return jax.tree.map(one, tree)


def placed(tree: Any, shardings: Any) -> Any:
  """Arrays that every process has whole, put where their shardings say.

  No device gets more than its part. Arrays that lie on several devices already
  are moved between these.

  Args:
    tree: of arrays of numpy or of one device, typed keys among them.
    shardings: a tree of `NamedSharding` like it; a `Format` may say besides in
      what order the axes of an array lie.
  """
  def one(x, sharding):
    devices = getattr(sharding, "sharding", sharding)  # of a `Format`
    if devices.is_fully_addressable or (
        isinstance(x, jax.Array) and not x.is_fully_addressable):
      return jax.device_put(x, sharding)
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(
        x.dtype, jax.dtypes.prng_key):
      data = NamedSharding(
          sharding.mesh, PartitionSpec(
              *sharding.spec, *[None] * (x.ndim + 1 - len(sharding.spec))))
      return jax.random.wrap_key_data(
          one(jax.random.key_data(x), data), impl=jax.random.key_impl(x))
    whole = np.asarray(x)
    return jax.make_array_from_callback(
        whole.shape, sharding, lambda index: whole[index])

  return jax.tree.map(one, tree, shardings)
