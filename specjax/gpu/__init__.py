"""Kernels for NVIDIA GPUs, written in Pallas (Triton).

Decoding at a small batch consists of thousands of short kernels, and on a GPU
the launch of a short kernel takes longer than the kernel. XLA fuses elementwise
operations with one reduction or one product at most. The kernels of this
package replace chains of operations that XLA would launch one by one:

  attention   rotation, write to the block and attention of a layer
  layers      residual sum and norm
  slots       writes the blocks of all layers to a cache
  sampling    softmax of logits, and the draw of a token

`in_use` decides whether they run. They never wait for the host, and XLA records
them in its CUDA graphs. The environment variable SPECJAX_GPU_KERNELS=0 disables
them.
"""

import functools
import os

import jax
import jax.numpy as jnp

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def in_use(*arrays: jax.Array) -> bool:
  """Returns True if the kernels run on arrays like these.

  The program must run on an NVIDIA GPU of generation Ampere or later, and all
  arrays must have the same dtype of at most 32 bits. The compiler cannot split
  a kernel over the devices of a mesh, so the arrays must not belong to one.

  Args:
    *arrays: operands of the kernel, which may be tracers.
  """
  return (jax.default_backend() == "gpu" and _is_enabled()
          and all(x.dtype == arrays[0].dtype and x.dtype in _DTYPES
                  and jax.typeof(x).sharding.mesh.size <= 1 for x in arrays))


@functools.cache
def _is_enabled() -> bool:
  # The devices of a process that compiles for another machine have no
  # capability. That of an AMD GPU is not a number.
  capability = str(getattr(jax.devices()[0], "compute_capability", "8.0"))
  return (os.environ.get("SPECJAX_GPU_KERNELS", "1") != "0"
          and capability[0].isdigit() and float(capability) >= 8)
