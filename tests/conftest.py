"""What the whole suite shares: one backend, and compiled code."""

import atexit
import os
import shutil
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
  # Most of the time goes into compiling small programs once. What depends on
  # how the compiler rounds is tested at its usual level, in lossless_test.py.
  os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "")
                             + " --xla_backend_optimization_level=0")
  # Workers and scripts inherit it: what one compiles is there for all.
  _cache = tempfile.mkdtemp(prefix="specjax-tests-")
  atexit.register(shutil.rmtree, _cache, ignore_errors=True)
  os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache
  os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"

import jax  # noqa: E402
import pytest  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def _forget_compiled_code():
  """Every program that is kept maps memory, and a process has 65,530 maps."""
  yield
  jax.clear_caches()
