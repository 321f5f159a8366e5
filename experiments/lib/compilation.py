"""Persistent cache of compiled code, and parallel compilation.

The library does not change jax's settings. The scripts store compiled code in
the user's cache directory, so that later runs only trace their programs.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from concurrent import futures
import os
import pathlib
import shutil
import sys
from typing import Any

import jax

_LARGEST = 2**30  # largest size of the cache in bytes when a script starts


def keep(enabled: bool) -> None:
  """Turns the persistent cache on or off.

  If the environment variable JAX_COMPILATION_CACHE_DIR is set, it names the
  directory of the cache.
  """
  if not enabled:
    jax.config.update("jax_enable_compilation_cache", False)
    return
  if "JAX_COMPILATION_CACHE_DIR" in os.environ:
    return
  try:
    directory = cache_directory()
    directory.mkdir(parents=True, exist_ok=True)
    shrink(directory.glob("*-cache"), _LARGEST)
  except OSError as e:
    print(f"compiled code is not stored: {e}", file=sys.stderr)
    return
  jax.config.update("jax_compilation_cache_dir", str(directory))
  # Cache small programs too, because a study compiles dozens of them.
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def cache_directory() -> pathlib.Path:
  """Returns the cache directory of the scripts.

  Raises:
    OSError: the user has no home directory.
  """
  try:
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  except RuntimeError as e:
    raise OSError(str(e)) from None
  return pathlib.Path(home) / "specjax"


def shrink(paths: Iterable[pathlib.Path], largest: int) -> None:
  """Deletes the least recently used entries of a cache until the rest fits.

  Args:
    paths: entries of the cache: files, or directories of files.
    largest: largest total size of the entries in bytes.
  """
  entries = []
  for path in paths:
    try:
      stats = [x.stat() for x in (path.iterdir() if path.is_dir() else [path])]
    except OSError:  # another process is deleting this entry
      continue
    times = [max(x.st_atime, x.st_mtime) for x in stats]
    entries.append((max(times, default=0), sum(x.st_size for x in stats), path))
  total = sum(size for _, size, _ in entries)
  for _, size, path in sorted(entries):
    if total <= largest:
      break
    if path.is_dir():
      shutil.rmtree(path, ignore_errors=True)
    else:
      path.unlink(missing_ok=True)
    total -= size


def side_by_side(calls: Sequence[Callable[[], Any]]):
  """Runs functions that compile, in one thread per core.

  XLA compiles without Python's global interpreter lock, so the threads run in
  parallel.

  Args:
    calls: functions without arguments.

  Yields:
    Number of completed calls, after each call.
  """
  pool = futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))
                                    if hasattr(os, "sched_getaffinity")
                                    else os.cpu_count())
  try:
    waiting = [pool.submit(call) for call in calls]
    for done, one in enumerate(futures.as_completed(waiting), 1):
      one.result()
      yield done
  finally:  # Ctrl-C does not wait for the compiler
    pool.shutdown(wait=False, cancel_futures=True)
