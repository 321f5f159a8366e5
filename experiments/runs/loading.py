"""Compares loading a GGUF file with dequantising its tensors in numpy.

  python experiments/runs/loading.py MODEL.gguf > experiments/results/loading.md

Each measurement runs in a new process. The two kinds of measurement alternate.
The script prints a Markdown table of the medians. It requires the package
`gguf`.
"""

import resource
import statistics
import subprocess
import sys
import time

_REPEATS = 3
_NAMES = {"specjax": "`load_pretrained`", "numpy": "`gguf.dequantize`"}


def _specjax(path: str) -> list:
  import jax

  import specjax as sj
  jax.devices()
  start = time.perf_counter()
  params = jax.block_until_ready(sj.models.load_pretrained(path).params)
  return [time.perf_counter() - start, *jax.tree.leaves(params)]


def _numpy(path: str) -> list:
  import gguf
  import numpy as np
  start = time.perf_counter()
  arrays = [gguf.dequantize(x.data, x.tensor_type).astype(np.float32)
            for x in gguf.GGUFReader(path).tensors]
  return [time.perf_counter() - start, *arrays]


def _measure(name: str, path: str) -> None:
  """Loads the file and prints the time in seconds and two sizes in GB.

  The sizes are that of all arrays, and the peak memory of the process.
  """
  seconds, *arrays = {"specjax": _specjax, "numpy": _numpy}[name](path)
  kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  print(seconds, sum(x.nbytes for x in arrays) / 1e9, kilobytes / 1e6)


def main():
  if len(sys.argv) == 3:
    _measure(*sys.argv[1:])
    return
  runs = {name: [] for name in _NAMES}
  for _ in range(_REPEATS):
    for name, found in runs.items():
      done = subprocess.run([sys.executable, __file__, name, sys.argv[1]],
                            check=True, capture_output=True, text=True)
      found.append(list(map(float, done.stdout.split())))
  print("| call | seconds | GB of weights | peak of the process in GB |\n"
        "|---|---|---|---|")
  for name, found in runs.items():
    seconds, size, peak = map(statistics.median, zip(*found))
    print(f"| {_NAMES[name]} | {seconds:.1f} | {size:.2f} | {peak:.2f} |")


if __name__ == "__main__":
  main()
