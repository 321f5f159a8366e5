"""Computes memory use and memory traffic of decoding rounds on four TPU chips.

  python experiments/runs/tpu_rounds.py [TARGET_LAYERS DRAFTER_LAYERS]

The models have the shapes of Llama-3-8B with Llama-3.2-1B, or of Qwen2.5-7B
with Qwen2.5-0.5B. The drafter of Qwen2.5 is replicated on every chip. The
script compiles each round with the TPU compiler, which needs no TPU
(`pip install -e '.[tpu-aot]'`). It then analyses the compiled program. Each row
takes a few minutes. In a pair of numbers, all cache slots are in use for the
first number, and 128 slots per row for the second.
"""

import pathlib
import sys
import time


def layers_of(arguments: list[str]) -> tuple[int, int] | None:
  """Returns the numbers of layers of target and drafter from the command line.

  Returns None for the published numbers.

  Raises:
    SystemExit: the arguments are invalid.
  """
  if not arguments:
    layers = None
  elif len(arguments) == 2 and all(
      x.isdecimal() and int(x) > 0 for x in arguments):
    layers = int(arguments[0]), int(arguments[1])
  else:
    sys.exit(f"error: arguments are {' '.join(arguments)!r}; give the layers "
             "of the target and of the drafter, two whole numbers of at least "
             "1, or nothing for the published numbers")
  return layers


sys.path.append(str(pathlib.Path(__file__).parents[1]))
from lib.compiler import tpu_compiler  # noqa: E402

if __name__ == "__main__":  # check the arguments before the slow import of jax
  asked = layers_of(sys.argv[1:])
  try:
    tpu_compiler.prepare()
  except ValueError as e:
    sys.exit(f"error: {e}")

from lib.compiler import pairs  # noqa: E402
from lib.compiler import tpu_rounds  # noqa: E402

import specjax as sj  # noqa: E402


def settings() -> dict[str, dict]:
  """Returns the arguments of `pairs.Setting` for each row, by its name."""
  tree = sj.trees.full_tree((3, 3, 2, 1, 1))[:64]
  study = dict(capacity=2048, gamma=8, observers=(
      sj.verifiers.Token(), sj.verifiers.Block(), sj.verifiers.GreedyBlock()))
  qwen = dict(models="qwen", drafter="replicate")
  rows = {
      "Llama, gamma 4, 2048 slots, batch 8": dict(capacity=2048),
      "Llama, gamma 4, 8192 slots, batch 8": dict(capacity=8192),
      f"Llama, tree of {len(tree)} nodes, batch 4":
          dict(capacity=2048, batch=4, parents=tree),
      "Llama, study, batch 8": study,
      "Qwen2.5, study, batch 8": study | qwen,
  }
  for topology in "v5e:2x2", "v5p:2x2x1", "v6e:2x2":
    rows["Llama, study, batch 64, " + topology.partition(":")[0]] = (
        study | dict(batch=64, topology=topology))
  return rows | {"Qwen2.5, study, batch 64": study | qwen | dict(batch=64)}


def main(layers: tuple[int, int] | None) -> None:
  print("| round | cache layers copied | arguments + temporaries (GB) | moved "
        "(GB) | least possible (GB) | ms at the chip's bandwidth | cycles (M) "
        "| loops | compiled in (s) |")
  print("|---|---|---|---|---|---|---|---|---|")
  for name, options in settings().items():
    setting = pairs.Setting(layers=layers, **options)
    lowered, params, state = tpu_rounds.lowered(setting)
    start = time.time()
    compiled = lowered.compile()
    seconds = time.time() - start
    traffic = tpu_rounds.figures(setting, compiled.as_text(),
                                 compiled.memory_analysis(), params, state)
    pair = lambda numbers, unit: " / ".join(f"{x / unit:.2f}" for x in numbers)
    bandwidth = tpu_rounds.BANDWIDTH[setting.topology.split(":")[0]]
    print(f"| {name} | {len(traffic['copied'])} | "
          f"{traffic['arguments'] / 1e9:.2f} + "
          f"{traffic['temporaries'] / 1e9:.2f} | {pair(traffic['moved'], 1e9)} "
          f"| {pair(traffic['floor'], 1e9)} | "
          f"{pair(traffic['moved'], bandwidth / 1e3)} | "
          f"{traffic['cycles'] / 1e6:.0f} | {traffic['loops']} | {seconds:.0f} "
          "|", flush=True)


if __name__ == "__main__":
  main(asked)
