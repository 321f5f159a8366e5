"""Compares products with quantised weights and with float32 weights.

  XLA_FLAGS=--xla_cpu_multi_thread_eigen=false \\
      python experiments/runs/quantized_products.py        # times, on this CPU
  python experiments/runs/quantized_products.py tpu        # bytes, on a v5e

CPU: the table contains times of the MLP of SmolLM2-135M, relative to one row in
float32. Every call reads its weights from memory. A time is the minimum over
all repetitions, to reduce the effect of other programs.

TPU: the MLP of Llama-3-8B is compiled without a TPU (`pip install -e
'.[tpu-aot]'`). The table contains the size of the weights, and the number of
bytes that the compiled program moves to and from main memory.
"""

from collections.abc import Callable
import functools
import os
import pathlib
import sys
from typing import Any

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from lib.compiler import tpu_compiler  # noqa: E402

if "tpu" in sys.argv:
  os.environ.update(tpu_compiler.ENVIRONMENT)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from lib.compiler import hlo  # noqa: E402
from lib.rollouts.timing import fresh_times  # noqa: E402

from specjax.models import quantization  # noqa: E402

WIDTH, INNER = 576, 1536
ROWS = (1, 2, 5, 9, 17)
KEPT = 64  # copies of the MLP; in 4 bits 85 MB, larger than CPU caches
SECONDS = 120  # duration of the measurement


def dot(x: jax.Array, kernel: Any, contracted: int = 0, wide: Any = None):
  return jax.lax.dot_general(x, kernel, (((1,), (contracted,)), ((), ())),
                             preferred_element_type=wide)


def floats(x: jax.Array, kernel: Any):
  return dot(x, kernel)


def widened(x: jax.Array, matrix: Any):
  """Returns the library's product: weights as floats, in slices on a CPU."""
  return matrix.product(x[None])[0]


def rounded(x: jax.Array):
  """Returns activations rounded to 8 bits, and one scale per row."""
  scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 127
  return jnp.round(x / scale).astype(jnp.int8), scale


def whole_numbers(x: jax.Array, matrix: Any, contracted: int = 0):
  """Returns the product of int8 and int8, summed in int32."""
  x, scale = rounded(x)
  values, scales = matrix.values.astype(jnp.int8), matrix.scales
  if contracted:
    values = values.T
  return dot(x, values, contracted, jnp.int32) * scale * scales


def turned(x: jax.Array, kernel: Any):
  """Returns the product of int8 and int8 with weights `[out, in]`."""
  values, scales = kernel
  x, scale = rounded(x)
  return dot(x, values, 1, jnp.int32) * scale * scales


def fused(x: jax.Array, kernel: Any, kind: Any = jnp.int32):
  """Returns the product of `turned`, computed as explicit sums.

  XLA can fuse the conversion from int8 with the sums.
  """
  values, scales = kernel
  x, scale = rounded(x)
  sums = jnp.sum(x[:, None].astype(kind) * values.astype(kind), axis=-1,
                 dtype=jnp.int32)
  return sums * scale * scales


def fused_floats(x: jax.Array, kernel: Any):
  """Returns the product of float32 and 8-bit weights `[out, in]`.

  The product is computed as explicit sums.
  """
  values, scales = kernel
  return jnp.sum(x[:, None] * values.astype(x.dtype), axis=-1) * scales


def two_rows(form: Callable):
  return lambda x, kernel: form(jnp.concatenate([x, x]), kernel)[:len(x)]


def mlp(form: Callable, inner: int = INNER):
  def call(x, kernels):
    both = form(x, kernels[0])
    return x + form(jax.nn.silu(both[:, :inner]) * both[:, inner:], kernels[1])
  return call


def transposed(matrix: Any):
  return matrix.values.astype(jnp.int8).T, matrix.scales[0]


def cpu_forms():
  """Returns `{name: (product, weights of all copies of the MLP)}`."""
  keys = jax.random.split(jax.random.key(0), KEPT)
  kernels = [[{"kernel": 0.02 * jax.random.normal(key, size)}
              for size in ((WIDTH, 2 * INNER), (INNER, WIDTH))] for key in keys]
  def copies(*args):
    return [[quantization.quantize(one, *args)["kernel"] for one in pair]
            for pair in kernels]
  int8, int4 = copies(8), copies(4)
  rows = jax.tree.map(transposed, int8, is_leaf=lambda x: hasattr(x, "values"))
  return {
      "float32": (floats, [[one["kernel"] for one in p] for p in kernels]),
      "int8, widened": (widened, int8),
      "int8, groups of 64": (widened, copies(8, 64)),
      "int4, widened": (widened, int4),
      "int8 x int8": (whole_numbers, int8),
      "int8 x int8, two rows": (two_rows(whole_numbers), int8),
      "int8 x int8, [out, in]": (turned, rows),
      "int8 x int8, fused": (fused, rows),
      "int8 x int8, fused, int16": (
          functools.partial(fused, kind=jnp.int16), rows),
      "int8 x float32, fused": (fused_floats, rows),
      "int4 x int8": (whole_numbers, int4)}


def cpu():
  forms, calls = cpu_forms(), {}
  for name, (form, given) in forms.items():
    for count in ROWS:
      x = jax.random.normal(jax.random.key(count), (count, WIDTH))
      calls[name, count] = jax.jit(mlp(form)), x, given
      jax.block_until_ready(calls[name, count][0](x, given[0]))
  least = fresh_times(calls, SECONDS)
  print(f"jax {jax.__version__}; one row in float32 takes "
        f"{1e6 * least['float32', 1]:.0f} us", file=sys.stderr)
  for name in forms:
    print(f"{name:26s}", *(
        f"{n}: {least[name, n] / least['float32', 1]:.2f}" for n in ROWS))


def tpu():
  from jax.experimental import topologies  # pylint: disable=g-import-not-at-top
  jax.default_backend = lambda: "tpu"  # selects the TPU form of the products
  width, inner = 4096, 14336
  chip = topologies.get_topology_desc("v5e:2x2", platform="tpu").devices[0]
  place = jax.sharding.SingleDeviceSharding(chip)
  sizes = [{"kernel": jax.ShapeDtypeStruct(size, jnp.bfloat16)}
           for size in ((width, 2 * inner), (inner, width))]
  def copies(*args):
    return [jax.eval_shape(
        lambda one: quantization.quantize(one, *args)["kernel"], one)
            for one in sizes]
  forms = {"bfloat16": (floats, [one["kernel"] for one in sizes]),
           "int8, widened": (widened, copies(8)),
           "int8, groups of 128": (widened, copies(8, 128)),
           "int4, widened": (widened, copies(4)),
           "int4, groups of 128": (widened, copies(4, 128)),
           "int8 x int8": (whole_numbers, copies(8))}
  print("| form | rows | weights (MB) | moved (MB) | cycles (k) |")
  print("|---|---|---|---|---|")
  for name, (form, given) in forms.items():
    for count in (1, 5):
      x = jax.ShapeDtypeStruct((count, width), jnp.bfloat16)
      x, given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(
          x.shape, x.dtype, sharding=place), (x, given))
      program = hlo.Program(jax.jit(
          mlp(form, inner)).lower(x, given).compile().as_text())
      print(f"| {name} | {count} | {quantization.num_bytes(given) / 1e6:.1f} | "
            f"{program.total / 1e6:.1f} | {program.cycles / 1e3:.0f} |",
            flush=True)


if __name__ == "__main__":
  tpu() if "tpu" in sys.argv else cpu()
