"""Times a round of Llama-3-8B with Llama-3.2-1B as draft model on one GPU.

  python experiments/runs/gpu_rounds.py

The models have random weights in bfloat16. Drafts are chains, verified by
`Block`. Every time is compared with a lower bound, its floor. The floor is a
number of bytes divided by a bandwidth. The bytes are the weights, used keys and
used values that the passes must read. The bandwidth is that of the fastest of a
large sum, copy and matrix-vector product on this GPU. Set
SPECJAX_GPU_KERNELS=0 to time the programs without the GPU kernels of specjax.
Calls alternate, and times are medians. Run no other program
at the same time. The last line of stdout contains the path of the JSON file.
"""

import functools
import pathlib
import statistics
import sys
import time
from typing import Any

from absl import flags
import jax
import jax.numpy as jnp

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from lib import common  # noqa: E402
from lib import flags as shared  # noqa: E402
from lib.compiler import pairs  # noqa: E402
from lib.rollouts import timing  # noqa: E402

import specjax as sj  # noqa: E402
from specjax.models import Transformer  # noqa: E402

_LAYERS = [
    flags.DEFINE_integer(
        f"{name}_layers", shape["layers"],
        f"Number of layers of the {name} model", 1)
    for name, shape in zip(("target", "drafter"), pairs.PAIRS["llama"])]
_BATCHES = flags.DEFINE_list("batches", ["1", "8"], "Batch sizes in "
                             "rows, comma-separated")
_CAPACITY = flags.DEFINE_integer(
    "capacity", 2048, "Number of cache slots per row (maximum sequence length)",
    64)
_USED = flags.DEFINE_list(
    "used", ["128", "1920"], "Numbers of cache slots per row that are filled "
    "when a timed call starts, comma-separated")
_SIZES = flags.DEFINE_list(
    "sizes", ["5", "9", "17", "65"], "Sizes of a target pass in tokens, "
    "comma-separated")
_GAMMA = shared.gamma(4, "Draft length in tokens")
_PAIRS = flags.DEFINE_integer(
    "pairs", 7, "Number of timed calls of each kind", 3)
_OUTPUT_DIR = shared.output_dir(
    "results/gpu_rounds", "Directory for the JSON file")
_BYTES = 2**32  # read to measure the bandwidth


def _weights(model: Transformer, seed: int):
  init = lambda key: jax.tree.map(
      lambda x: x.astype(jnp.bfloat16), model.init(key))
  return jax.jit(init)(jax.random.key(seed))


def _rounds(decoder: sj.Decoder, params: Any, rows: int, used: int):
  """Returns a timer of rounds that start with `used` filled slots per row."""
  keys = jax.random.split(jax.random.key(0), rows)
  state = jax.jit(functools.partial(
      pairs.state, decoder, capacity=_CAPACITY.value, used=used))(params, keys)

  def run(params, state):
    new, _ = decoder.decode(params, state, timing.STEPS)
    back = lambda tree: sj.interfaces.map_caches(
        lambda cache: cache.rollback(state.target_cache.lengths),
        lambda x: x, tree)
    return new.replace(lengths=state.lengths, done=state.done,
                       target_cache=back(new.target_cache),
                       drafter=back(new.drafter))

  return timing.Timed(run, params, state, timing.STEPS)


def _timed(decoder: sj.Decoder, params: Any, rows: int, used: int,
           sizes: list[int], speed: float):
  """Returns `{name: (timer, floor in seconds)}` for one batch size and length.

  Args:
    decoder: decoder of the round.
    params: parameters of the decoder's models.
    rows: batch size.
    used: number of filled cache slots per row.
    sizes: numbers of tokens per target pass.
    speed: measured bandwidth in bytes per second.
  """
  target, drafter = decoder.target, decoder.drafter
  least = lambda name, model: timing.bytes_read(
      model, params[name], rows * used) / speed
  read, draft = least("target", target), least("drafter", drafter.network.model)
  alone = common.autoregressive(target, 1.0)
  calls = {
      "a step without drafts": (_rounds(alone, params, rows, used), read),
      "a round": (_rounds(decoder, params, rows, used),
                  read + drafter.shape.gamma * draft),
      "a draft step": (timing.passes(drafter.network.model, params["drafter"],
                                     _CAPACITY.value, used, 1, rows), draft)}
  for size in sizes:
    calls[f"a pass of {size}"] = (timing.passes(
        target, params["target"], _CAPACITY.value, used, size, rows), read)
  return calls


def main():
  batches, lengths, sizes = (
      common.batch_sizes(f"--{flag.name}", flag.value)
      for flag in (_BATCHES, _USED, _SIZES))
  # Largest number of tokens that a timed call adds to a row.
  added = max(timing.STEPS * (_GAMMA.value + 1), sizes[-1])
  if lengths[-1] + added > _CAPACITY.value:
    raise ValueError(
        f"--used contains {lengths[-1]}, a timed call adds up to {added} "
        f"tokens, and --capacity is {_CAPACITY.value}; give --capacity of at "
        f"least {lengths[-1] + added}")
  layers = tuple(flag.value for flag in _LAYERS)
  decoder = pairs.Setting(
      layers=layers, capacity=_CAPACITY.value, gamma=_GAMMA.value).decoder()
  params = {"target": _weights(decoder.target, 0),
            "drafter": _weights(decoder.drafter.network.model, 1)}
  speeds = timing.bandwidths(_BYTES)
  speed = max(speeds.values())
  device = jax.devices()[0].device_kind
  print(f"{device}, jax {jax.__version__}; " + ", ".join(
      f"{name} {x / 1e9:.0f} GB/s" for name, x in speeds.items()),
        file=sys.stderr)
  print("| rows | slots in use | what | ms | floor, ms | over the floor |\n"
        "|---|---|---|---|---|---|")
  found = []
  for rows in batches:
    for used in lengths:
      start = time.perf_counter()
      calls = _timed(decoder, params, rows, used, sizes, speed)
      print(f"compiled in {time.perf_counter() - start:.0f} s",
            file=sys.stderr)
      times = [[call() for call, _ in calls.values()]
               for _ in range(_PAIRS.value)]
      for (name, (_, least)), column in zip(calls.items(), zip(*times)):
        seconds = statistics.median(column)
        print(f"| {rows} | {used} | {name} | {1e3 * seconds:.2f} | "
              f"{1e3 * least:.2f} | {seconds / least:.2f} |", flush=True)
        found.append({"rows": rows, "used": used, "what": name,
                      "milliseconds": 1e3 * seconds, "floor": 1e3 * least})
  common.finish(_OUTPUT_DIR.value, "gpu_rounds", {
      "device": device, "layers": layers, "gb_per_second": {
          name: x / 1e9 for name, x in speeds.items()},
      "rows": found})


if __name__ == "__main__":
  common.run(main)
