"""Settings of the whole suite: one backend, and a cache of programs."""

import functools
import gc
import importlib
import importlib.util
import mmap
import os
import pathlib
import tempfile
import threading

# Compiled programs are kept between runs, for most of the time goes into
# compiling small ones. Those used last stay, up to so many bytes.
_KEPT = 1 << 30


def _cache_directory():
  """In the user's cache directory, or a new one where there is none."""
  home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
  directory = pathlib.Path(home, "specjax", "tests")
  try:
    directory.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=directory).close()
  except OSError:
    return pathlib.Path(tempfile.mkdtemp(prefix="specjax-tests-"))
  return directory


def _bound(directory, limit):
  """Deletes the files that were used longest ago beyond `limit` bytes."""
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
  """Whether the installed compiler has a flag: it dies of those it has not."""
  spec = importlib.util.find_spec("jaxlib")
  for path in pathlib.Path(spec.origin).parent.glob("libjax_common.*"):
    with open(path, "rb") as f:
      code = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
      # Without the end it may be the name of a field that is no flag any more.
      return code.find(flag.encode() + b"\0") >= 0
  return False


os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most programs compile for longer than they run, so they are not optimised.
# What depends on how the compiler rounds is tested with its usual settings, in
# lossless_test.py.
if "xla_backend_optimization_level" not in os.environ.get("XLA_FLAGS", ""):
  os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "")
                             + " --xla_backend_optimization_level=0")
  if _compiler_knows("xla_cpu_use_fusion_emitters"):  # half of the time
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
  # Small programs are not worth splitting between threads.
  if _compiler_knows("xla_cpu_parallel_codegen_split_count"):
    os.environ["XLA_FLAGS"] += " --xla_cpu_parallel_codegen_split_count=1"
# Programs that hold no lines of ours are smaller to lower and to compile; what
# Python raises has its traceback all the same.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# Tracing makes millions of small objects that stay: looking for garbage among
# them over and over takes an eighth of the time.
gc.set_threshold(200_000, 20, 50)
# Workers and scripts inherit it: what one compiles is there for all. A file
# that was cut, or that another process is still writing, is no program: jax
# says so and compiles.
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

# The files with the most work, which come first so that no worker is left with
# one of them at the end. A file that marks itself slow comes before them.
_LONGEST = ("contribution_test", "lossless_test", "tree_laws_test",
            "smollm2_test", "free_drafters_test", "constrained_law_test",
            "tree_drafters_test", "self_drafters_test", "joint_law_test",
            "rounds_by_length_test", "greedy_test", "rounds_test",
            "vocabularies_test", "train_drafter_test", "published_test")


def pytest_collection_modifyitems(items):
  """Puts the files with the most work first."""
  def place(item):
    name = item.path.stem
    if name in _LONGEST:
      return 1 + _LONGEST.index(name)
    marks = item.getparent(pytest.Module).own_markers
    return 0 if "slow" in [mark.name for mark in marks] else 1 + len(_LONGEST)

  items.sort(key=place)  # stable


@pytest.fixture(autouse=True, scope="module")
def _forget_compiled_code():
  """Clears jax's caches after every file.

  Compiled programs need memory maps, of which a process has 65,530. And a
  cached trace in 32 bits would be found by the tests in 64 bits.
  """
  yield
  jax.clear_caches()


@pytest.fixture(autouse=True, scope="module")
def _one_context():
  """The programs of a file are lowered in one MLIR context.

  jax makes one for each, which takes longer than to lower a small program, and
  has no public switch for it. Other threads go on making theirs.
  """
  lowering = importlib.import_module("jax._src.interpreters.mlir")
  make = getattr(lowering, "make_ir_context", None)
  if make is None:  # this version of jax has it elsewhere
    yield
    return
  kept = functools.cache(make)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(lowering, "make_ir_context", lambda: (
        kept if threading.current_thread() is threading.main_thread() else make
    )())
    yield
