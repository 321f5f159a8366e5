"""Compiling for TPU chips that need not be there."""

# To be set before jax starts. libtpu's lock keeps two processes off one chip:
# none is used here, and any process that let jax look for a TPU may hold it.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
