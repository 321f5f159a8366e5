"""Memory traffic of a round of Llama-3-8B with Llama-3.2-1B on four TPU chips.

  python experiments/runs/tpu_rounds.py [layers of the target, of the drafter]

The TPU compiler compiles the round without a TPU (`pip install -e
'.[tpu-aot]'`), and the compiled program is analysed. Each row takes a few
minutes. The chips are a v5e 2x2 unless the row names another generation. In a
pair of numbers, the first is with all cache slots in use, the second with 128.
"""

import importlib.util
import os
import pathlib
import sys
import time

_LAYERS = (32, 16)  # layers of Llama-3-8B and Llama-3.2-1B


def layers_of(arguments: list[str]) -> tuple[int, int]:
  """Returns the numbers of layers from the command line.

  Raises:
    SystemExit: the arguments are invalid, or the TPU compiler is missing.
  """
  if not arguments:
    layers = _LAYERS
  elif len(arguments) == 2 and all(
      x.isdecimal() and int(x) > 0 for x in arguments):
    layers = int(arguments[0]), int(arguments[1])
  else:
    sys.exit(f"error: arguments are {' '.join(arguments)!r}; give the layers "
             "of the target and of the drafter, two whole numbers of at least "
             f"1, or nothing for {_LAYERS[0]} {_LAYERS[1]}")
  if importlib.util.find_spec("libtpu") is None:
    sys.exit("error: libtpu is not installed, and it compiles for TPUs: pip "
             "install -e '.[tpu-aot]'")
  return layers


if __name__ == "__main__":  # before the slow import of jax
  asked = layers_of(sys.argv[1:])

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from lib.compiler import tpu_compiler  # noqa: E402

os.environ.update(tpu_compiler.ENVIRONMENT)

from lib.compiler import llama  # noqa: E402
from lib.compiler import tpu_rounds  # noqa: E402

import specjax as sj  # noqa: E402


def settings() -> dict[str, dict]:
  """Returns the options of `llama.Setting` by the name of the row."""
  tree = sj.trees.full_tree((3, 3, 2, 1, 1))[:64]
  study = dict(capacity=2048, gamma=8, observers=(
      sj.verifiers.Token(), sj.verifiers.Block(), sj.verifiers.GreedyBlock()))
  return {
      "2048 slots, batch 8": dict(capacity=2048),
      "8192 slots, batch 8": dict(capacity=8192),
      f"tree of {len(tree)} nodes, 2048 slots, batch 4":
          dict(capacity=2048, batch=4, parents=tree),
      "verification study, batch 8": study,
      "verification study, batch 64": study | dict(batch=64),
      "verification study, batch 64, v5p":
          study | dict(batch=64, topology="v5p:2x2x1"),
      "verification study, batch 64, v6e":
          study | dict(batch=64, topology="v6e:2x2"),
  }


def main(layers: tuple[int, int]) -> None:
  print("| round | cache layers copied | temporaries (GB) | moved (GB) | least "
        "possible (GB) | ms at the chip's bandwidth | cycles (M) | loops | "
        "compiled in (s) |")
  print("|---|---|---|---|---|---|---|---|---|")
  for name, options in settings().items():
    setting = llama.Setting(layers=layers, **options)
    lowered, params, state = tpu_rounds.lowered(setting)
    start = time.time()
    compiled = lowered.compile()
    seconds = time.time() - start
    traffic = tpu_rounds.figures(setting, compiled.as_text(),
                                 compiled.memory_analysis(), params, state)
    pair = lambda numbers, unit: " / ".join(f"{x / unit:.2f}" for x in numbers)
    bandwidth = tpu_rounds.BANDWIDTH[setting.topology.split(":")[0]]
    print(f"| {name} | {len(traffic['copied'])} | "
          f"{traffic['temporaries'] / 1e9:.3f} | {pair(traffic['moved'], 1e9)} "
          f"| {pair(traffic['floor'], 1e9)} | "
          f"{pair(traffic['moved'], bandwidth / 1e3)} | "
          f"{traffic['cycles'] / 1e6:.0f} | {traffic['loops']} | {seconds:.0f} "
          "|", flush=True)


if __name__ == "__main__":
  main(asked)
