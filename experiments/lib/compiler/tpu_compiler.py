"""Environment variables for compiling for TPUs on a machine without one."""

# Set these before jax starts. libtpu's lock prevents two processes from using
# one chip. No chip is used here, and any process in which jax searched for a
# TPU can hold the lock, so several processes may load libtpu.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
