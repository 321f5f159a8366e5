"""What products with several rows cost of one row's, by layout of the weights.

  XLA_FLAGS=--xla_cpu_multi_thread_eigen=false \\
      python experiments/runs/products.py

The MLP of SmolLM2-135M, and a sixth of its head, each call with weights that
come from memory; the least of all repeats, so that what else runs disturbs
little.
"""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[1]))
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from lib.timing import fresh_times  # noqa: E402

WIDTH, INNER, VOCAB = 576, 1536, 8192
ROWS = (1, 2, 5, 9, 17)
SECONDS = 60


def product(x, kernel, contracted):
  return jax.lax.dot_general(x, kernel, (((1,), (contracted,)), ((), ())))


def mlp(contracted, pad=1):
  def call(x, kernels):
    wide = jnp.pad(x, ((0, -len(x) % pad), (0, 0)))
    inner = product(wide, kernels[0], contracted)
    inner = jax.nn.silu(inner[:, :INNER]) * inner[:, INNER:]
    return (wide + product(inner, kernels[1], contracted))[:len(x)]
  return call


def weights(count, *shapes):
  keys = jax.random.split(jax.random.key(0), count)
  return [[0.02 * jax.random.normal(key, shape) for shape in shapes]
          for key in keys]


def main():
  kernels = weights(16, (WIDTH, 2 * INNER), (INNER, WIDTH))
  turned = [[kernel.T for kernel in pair] for pair in kernels]
  tables = weights(8, (VOCAB, WIDTH))
  forms = {
      "[in, out]": (mlp(0), kernels), "[out, in]": (mlp(1), turned),
      "[in, out], padded to 8": (mlp(0, pad=8), kernels),
      "head [V, D].T": (lambda x, w: product(x, w[0].T, 0), tables),
      "head [D, V]": (lambda x, w: product(x, w[0], 0),
                      [[table.T for table in pair] for pair in tables])}
  calls = {}
  for name, (form, given) in forms.items():
    for rows in ROWS:
      x = jax.random.normal(jax.random.key(rows), (rows, WIDTH))
      calls[name, rows] = (jax.jit(form), x, given)
      jax.block_until_ready(calls[name, rows][0](x, given[0]))
  least = fresh_times(calls, SECONDS)
  print(f"jax {jax.__version__}", file=sys.stderr)
  for name in forms:
    # The layouts in use are what the others are compared with.
    base = "head [V, D].T" if name.startswith("head") else "[in, out]"
    print(f"{name:24s}", *(f"{rows}: {least[name, rows] / least[base, 1]:.2f}"
                            for rows in ROWS))


if __name__ == "__main__":
  main()
