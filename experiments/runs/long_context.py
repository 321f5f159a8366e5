"""What a drafted token reads of a 16k-token context, by the compiler's text.

  python experiments/runs/long_context.py        # for this machine
  python experiments/runs/long_context.py tpu    # for a TPU v5e

Two layers of SmolLM2-135M in float32, or of Llama-3.1-8B in bfloat16 with 8
rows (the chip need not be there: `pip install -e '.[tpu-aot]'`; a layer of one
row's cache would fit into its fast memory); layers are alike. A token of
the target's own pass against one that is drafted from a view of its cache, for
which a round of 6 tokens copies the view together once.
"""

import os
import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from lib import tpu_compiler  # noqa: E402

if "tpu" in sys.argv:
  os.environ.update(tpu_compiler.ENVIRONMENT)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from lib import long_context  # noqa: E402

from specjax.models import cache_views  # noqa: E402

CONTEXT, GAMMA = 16384, 6
SMOL = dict(vocab_size=49152, width=576, heads=9, kv_heads=3, head_dim=64,
            mlp_width=1536)
LLAMA = dict(vocab_size=128256, width=4096, heads=32, kv_heads=8, head_dim=128,
             mlp_width=14336)
VIEWS = (cache_views.Retrieved(budget=1024, chunk=8, recent=256),
         cache_views.Retrieved(budget=2048, chunk=8, recent=256),
         cache_views.Recent(sinks=4, window=1020))


def main() -> None:
  shape, options = SMOL, {}
  if "tpu" in sys.argv:
    # pylint: disable-next=g-import-not-at-top
    from jax.experimental import topologies
    chip = topologies.get_topology_desc("v5e:2x2", platform="tpu").devices[0]
    shape, options = LLAMA, dict(
        rows=8, dtype=jnp.bfloat16,
        sharding=jax.sharding.SingleDeviceSharding(chip))
  print("| view | whole cache, MB | view, MB | copied together, MB | share of "
        "a drafted token |")
  print("|---|---|---|---|---|")
  for view in VIEWS:
    found = long_context.figures(long_context.Setting(
        config=long_context.shape(layers=2, **shape), context=CONTEXT,
        view=view, gamma=GAMMA, **options))
    whole, part, opened = (
        found[name] / 1e6 for name in ("whole", "part", "opened"))
    print(f"| {view} | {whole:.1f} | {part:.1f} | {opened:.1f} | "
          f"{found['share']:.3f} |", flush=True)


if __name__ == "__main__":
  main()
