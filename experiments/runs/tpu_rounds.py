"""What a round of Llama-3-8B with Llama-3.2-1B moves on a TPU v5e 2x2.

  python experiments/runs/tpu_rounds.py [layers of the target, of the drafter]

The real compiler compiles the round for chips that need not be there
(`pip install -e '.[tpu-aot]'`), and the program is read. Takes some minutes a
line.
"""

import os
import pathlib
import sys
import time

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from lib import tpu_compiler  # noqa: E402

os.environ.update(tpu_compiler.ENVIRONMENT)

from lib import tpu_rounds  # noqa: E402

import specjax as sj  # noqa: E402


def main(layers) -> None:
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
    setting = tpu_rounds.Setting(layers=layers, **options)
    lowered, params, state = tpu_rounds.lowered(setting)
    start = time.time()
    compiled = lowered.compile()
    seconds = time.time() - start
    found = tpu_rounds.figures(setting, compiled.as_text(),
                               compiled.memory_analysis(), params, state)
    moved, floor = ([n / 1e9 for n in found[name]]
                    for name in ("moved", "floor"))
    print(f"| {name} | {len(found['copied'])} | "
          f"{found['temporaries'] / 1e9:.2f} | {moved[0]:.2f} / {moved[1]:.2f} "
          f"| {floor[0]:.2f} / {floor[1]:.2f} | {found['cycles'] / 1e6:.0f} | "
          f"{found['loops']} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
  main(tuple(map(int, sys.argv[1:])) or (32, 16))
