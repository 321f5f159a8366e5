"""Environment variables for compiling for TPUs on a machine without one."""

import importlib.util
import os

# Set these variables before jax starts. A lock in libtpu prevents two processes
# from using the same chip. Any process in which jax has searched for a TPU may
# hold the lock. Compiling uses no chip, so ALLOW_MULTIPLE_LIBTPU_LOAD disables
# the lock.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


def prepare() -> None:
  """Sets `ENVIRONMENT` in this process.

  Raises:
    ValueError: the TPU compiler is not installed.
  """
  if importlib.util.find_spec("libtpu") is None:
    raise ValueError("libtpu, the TPU compiler, is not installed: pip install "
                     "-e '.[tpu-aot]'")
  os.environ.update(ENVIRONMENT)
