"""What a round of Llama-3-8B with Llama-3.2-1B moves on a TPU v5e 2x2.

  python experiments/runs/tpu_rounds.py [layers of the target, of the drafter]

The real compiler compiles the round for chips that need not be there
(`pip install -e '.[tpu-aot]'`), and the program is read. Takes some minutes a
line.
"""

import importlib.util
import os
import pathlib
import sys
import time

_LAYERS = (32, 16)  # of Llama-3-8B and of Llama-3.2-1B


def layers_of(arguments: list[str]) -> tuple[int, int]:
  """The numbers of layers that the command line asks for.

  Raises:
    SystemExit: it does not name two, or there is no compiler for TPUs.
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


if __name__ == "__main__":  # before jax, which takes seconds, is loaded
  asked = layers_of(sys.argv[1:])

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from lib.compiler import tpu_compiler  # noqa: E402

os.environ.update(tpu_compiler.ENVIRONMENT)

from lib.compiler import llama  # noqa: E402
from lib.compiler import tpu_rounds  # noqa: E402

import specjax as sj  # noqa: E402


def main(layers: tuple[int, int]) -> None:
  tree = sj.trees.full_tree((3, 3, 2, 1, 1))[:64]
  print("| round | whole layers copied | temporaries, GB | HBM, GB, full / "
        f"{tpu_rounds.SHORT} slots used | floor | cycles, M | loops | "
        "compiled in, s |")
  print("|---|---|---|---|---|---|---|---|")
  for name, options in (
      ("capacity 2048, batch 8", dict(capacity=2048)),
      ("capacity 8192, batch 8", dict(capacity=8192)),
      (f"tree of {len(tree)} nodes, capacity 2048, batch 4",
       dict(capacity=2048, batch=4, parents=tree))):
    setting = llama.Setting(layers=layers, **options)
    lowered, params, state = tpu_rounds.lowered(setting)
    start = time.time()
    compiled = lowered.compile()
    seconds = time.time() - start
    found = tpu_rounds.figures(setting, compiled.as_text(),
                               compiled.memory_analysis(), params, state)
    moved, floor = ([n / 1e9 for n in found[name]]
                    for name in ("moved", "floor"))
    print(f"| {name} | {len(found['copied'])} | "
          f"{found['temporaries'] / 1e9:.3f} | {moved[0]:.2f} / {moved[1]:.2f} "
          f"| {floor[0]:.2f} / {floor[1]:.2f} | {found['cycles'] / 1e6:.0f} | "
          f"{found['loops']} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
  main(asked)
