"""Settings of the test suite: CPU backend, compiler flags, compilation cache.
"""

import functools
import gc
import importlib
import importlib.util
import mmap
import os
import pathlib
import tempfile
import threading

# Maximum size in bytes of the compilation cache. Compiled programs are stored
# between test runs, because the tests spend most of their time on compiling
# small programs. The least recently used programs are deleted.
_KEPT = 1 << 30


def _cache_directory():
  """Returns the directory of the compilation cache.

  It is in the user's cache directory. If that is not writable, it is a new
  temporary directory.
  """
  home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
  directory = pathlib.Path(home, "specjax", "tests")
  try:
    directory.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=directory).close()
  except OSError:
    return pathlib.Path(tempfile.mkdtemp(prefix="specjax-tests-"))
  return directory


def _bound(directory, limit):
  """Deletes the least recently used files until at most `limit` bytes remain.
  """
  files = []
  for entry in os.scandir(directory):
    if entry.is_file():
      stat = entry.stat()
      files.append((max(stat.st_atime, stat.st_mtime), stat.st_size, entry))
  for _, size, entry in sorted(files, key=lambda file: file[0], reverse=True):
    limit -= size
    if limit < 0:
      pathlib.Path(entry.path).unlink(missing_ok=True)


def _compiler_knows(flag):
  """Returns whether the installed XLA compiler has a flag.

  The compiler aborts if `XLA_FLAGS` contains an unknown flag.
  """
  spec = importlib.util.find_spec("jaxlib")
  for path in pathlib.Path(spec.origin).parent.glob("libjax_common.*"):
    with open(path, "rb") as f:
      code = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
      # The terminating zero byte excludes fields of former flags, whose names
      # can also be in the file.
      return code.find(flag.encode() + b"\0") >= 0
  return False


os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most programs of the tests take longer to compile than to run, so they are not
# optimised. lossless_test.py tests properties that depend on the compiler's
# rounding, with the compiler's default settings.
if "xla_backend_optimization_level" not in os.environ.get("XLA_FLAGS", ""):
  os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "")
                             + " --xla_backend_optimization_level=0")
  # Without fusion emitters, compilation takes half of the time.
  if _compiler_knows("xla_cpu_use_fusion_emitters"):
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
  # Splitting small programs between threads takes longer than it saves.
  if _compiler_knows("xla_cpu_parallel_codegen_split_count"):
    os.environ["XLA_FLAGS"] += " --xla_cpu_parallel_codegen_split_count=1"
# Without source locations, programs are smaller and faster to lower and to
# compile. Python exceptions still have complete tracebacks.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# Tracing allocates millions of small objects that are never freed, so frequent
# garbage collection is useless. With Python's default thresholds, it takes an
# eighth of the time.
gc.set_threshold(200_000, 20, 50)
# Test workers and scripts inherit the environment variable, so they share the
# compiled programs. If a file is truncated, or another process is still writing
# it, jax prints a warning and compiles the program again.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
  _directory = _cache_directory()
  _bound(_directory, _KEPT)
  os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_directory)
if "SPECJAX_TOKENS" not in os.environ:
  _tokens = tempfile.TemporaryDirectory(prefix="specjax-tokens-")
  os.environ["SPECJAX_TOKENS"] = _tokens.name
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import jax  # noqa: E402
import pytest  # noqa: E402

# Test files with the longest run time. They run first, because otherwise one
# worker could still run a long file after all others have finished. Files with
# the mark "slow" run before them.
_LONGEST = ("contribution_test", "lossless_test", "tree_laws_test",
            "smollm2_test", "free_drafters_test", "constrained_law_test",
            "tree_drafters_test", "self_drafters_test", "joint_law_test",
            "rounds_by_length_test", "greedy_test", "rounds_test",
            "vocabularies_test", "train_drafter_test", "published_test")


def _mark_cases(items):
  """Marks cases of tests with the mark "default_cases" as slow.

  The cases that are not marked are spread evenly.
  """
  tests = {}
  for item in items:
    mark = item.get_closest_marker("default_cases")
    if mark and not item.get_closest_marker("slow"):
      tests.setdefault((item.path, item.originalname), (mark.args[0], []))[
          1].append(item)
  for number, cases in tests.values():
    for i, item in enumerate(cases):
      if i * number % len(cases) >= number:
        item.add_marker("slow")


@pytest.hookimpl(tryfirst=True)  # before slow tests are left out
def pytest_collection_modifyitems(items):
  """Sorts the tests so that the files with the longest run time come first."""
  _mark_cases(items)

  def place(item):
    name = item.path.stem
    if name in _LONGEST:
      return 1 + _LONGEST.index(name)
    marks = item.getparent(pytest.Module).own_markers
    return 0 if "slow" in [mark.name for mark in marks] else 1 + len(_LONGEST)

  items.sort(key=place)  # stable


@pytest.fixture(autouse=True, scope="module")
def _forget_compiled_code():
  """Clears jax's caches after every test file.

  Compiled programs need memory maps, and Linux allows 65,530 per process. Also,
  tests in 64 bits would use traces that were cached in 32 bits.
  """
  yield
  jax.clear_caches()


@pytest.fixture(autouse=True, scope="module")
def _one_context():
  """Lowers all programs of a test file in one MLIR context.

  By default, jax creates a context per program, which takes longer than
  lowering a small program. jax has no public option for this, so the fixture
  replaces a private function. Other threads still create a context per program.
  """
  lowering = importlib.import_module("jax._src.interpreters.mlir")
  make = getattr(lowering, "make_ir_context", None)
  if make is None:  # another version of jax, without this private function
    yield
    return
  kept = functools.cache(make)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(lowering, "make_ir_context", lambda: (
        kept if threading.current_thread() is threading.main_thread() else make
    )())
    yield
