"""Times the linear layers of a decoder in float32 and bfloat16.

  python experiments/runs/bfloat16.py

The layers have the shape of those in SmolLM2-135M (106M of its 134M parameters)
and are multiplied as in `models.Transformer`. The script prints the time of all
layers in milliseconds (median of 11 calls), by number of rows. One line is for
float32. Three lines are for weights in bfloat16: products in bfloat16, products
in float32, and products in float32 with a single row duplicated. The results
are in docs/guides/published_models.md. Run no other program at the same time.
"""

from collections.abc import Callable
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

_LAYERS, _WIDTH, _INNER, _HEADS = 30, 576, 1536, (3, 5, 64)
_TIMES = 11


def _weights(dtype: Any):
  layer = dict(qkv=(_WIDTH, *_HEADS), out=(_WIDTH, _WIDTH),
               gate_up=(_WIDTH, 2, _INNER), down=(_INNER, _WIDTH))
  return [{name: jnp.ones(shape, dtype) for name, shape in layer.items()}
          for _ in range(_LAYERS)]


def _layers(product: Callable):
  """Returns a function that applies all layers in sequence."""
  def run(weights, x):
    for layer in weights:
      qkv = product(x, layer["qkv"]).reshape(*x.shape[:2], -1)
      x = x + product(qkv[..., :_WIDTH], layer["out"])
      gate, up = jnp.moveaxis(product(x, layer["gate_up"]), 2, 0)
      x = x + product(gate * up, layer["down"])
    return x

  return jax.jit(run)


def _in_own_type(x: jax.Array, kernel: Any):
  return jnp.tensordot(x, kernel, 1)


def _in_float32(x: jax.Array, kernel: Any):
  out = jax.lax.dot_general(x, kernel, (((2,), (0,)), ((), ())),
                            preferred_element_type=jnp.float32)
  return out.astype(x.dtype)


def _twice(x: jax.Array, kernel: Any):
  rows = x.shape[1]
  return _in_float32(jnp.concatenate([x, x], axis=1), kernel)[:, :rows]


def _milliseconds(function: Callable, *args: Any):
  jax.block_until_ready(function(*args))
  seconds = []
  for _ in range(_TIMES):
    start = time.perf_counter()
    jax.block_until_ready(function(*args))
    seconds.append(time.perf_counter() - start)
  return 1e3 * statistics.median(seconds)


def main():
  for name, dtype, product, sizes in (
      ("float32", jnp.float32, _in_float32, (1, 2, 5, 9, 17)),
      ("bfloat16 in bfloat16", jnp.bfloat16, _in_own_type, (1, 2, 5)),
      ("bfloat16 in float32", jnp.bfloat16, _in_float32, (1, 2, 5, 9, 17)),
      ("the same, fed twice", jnp.bfloat16, _twice, (1,))):
    weights, run = _weights(dtype), _layers(product)
    found = {size: _milliseconds(
        run, weights, jnp.ones((1, size, _WIDTH), dtype)) for size in sizes}
    print(f"{name:22s}", "  ".join(
        f"{size}: {ms:6.1f}" for size, ms in found.items()))


if __name__ == "__main__":
  main()
