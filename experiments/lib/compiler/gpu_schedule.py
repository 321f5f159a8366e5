"""Launches of a decoding round on an NVIDIA GPU, counted without a GPU.

XLA's CUDA backend compiles for a described GPU on any machine, and dumps the
sequence of launches after its last pass. The tiles of matrix products are
chosen on a real GPU by measuring, which needs the device. So the products of
a real program may be other kernels, and the counts are close to those of a real
program.
"""

import collections
import importlib.util
import os
import pathlib
import re
import tempfile
from typing import Any
from typing import NamedTuple

# Set before jax starts. A plugin for CUDA would otherwise look for a device.
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
_H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 3352320000000
  l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84978434048 shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  driver_version: "13.0.0" runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
_LINE = re.compile(r"( *)\d+: k(\w+)")
_COUNTED = {  # entry of the dump: field of `Counts`
    "Conditional": "waits", "CommandBuffer": "graphs", "CuDnn": "cudnn"
} | dict.fromkeys(
    ("CustomKernel", "Kernel", "Copy", "Memset", "Memzero", "Gemm",
     "CublasLtMatmul", "CustomCall", "TriangularSolve"), "launches")
_CONTAINERS = ("DynamicSliceFusion", "Sequential")  # their content is counted


class Counts(NamedTuple):
  """Launches of one iteration of a loop, without the loops inside it.

  Attributes:
    launches: number of kernels, copies and calls of libraries.
    cudnn: number of calls of cuDNN among them.
    graphs: number of CUDA graphs.
    waits: number of times that the host waits for a condition: of a branch, or
      of a loop without a known number of iterations. Those of all loops of a
      program are in its first loop.
  """

  launches: int
  cudnn: int
  graphs: int
  waits: int

  def __sub__(self, other: "Counts") -> "Counts":
    return Counts(*(a - b for a, b in zip(self, other)))


def prepare() -> pathlib.Path:
  """Sets up this process for `loops`, before jax is imported.

  Returns:
    The directory of the dumps.

  Raises:
    ValueError: the CUDA plugin is not installed.
  """
  if importlib.util.find_spec("jax_cuda13_plugin") is None:
    raise ValueError("jax_cuda13_plugin, the compiler for NVIDIA GPUs, is not "
                     "installed: pip install -e '.[gpu-aot]'")
  dump = pathlib.Path(tempfile.mkdtemp(prefix="specjax-gpu-"))
  os.environ.update(ENVIRONMENT, XLA_FLAGS=" ".join([
      os.environ.get("XLA_FLAGS", ""), "--xla_gpu_autotune_level=0",
      f"--xla_dump_to={dump}"]))
  return dump


def loops(dump: pathlib.Path, function: Any, *arguments: Any,
          donate: int | None = None) -> list[Counts]:
  """Compiles a function for an H100, and counts the launches of its loops.

  Args:
    dump: result of `prepare`.
    function: function of trees of arrays.
    *arguments: shapes of its arguments.
    donate: index of the argument whose buffers the result uses.

  Returns:
    The counts outside of all loops, and of one iteration of every loop, in the
    order of the program. A loop comes before the loops inside it.
  """
  import jax  # after `prepare`
  from jax.experimental import topologies
  from jax.sharding import SingleDeviceSharding

  [chip] = topologies.get_topology_desc(
      platform="cuda", topology_name="h100", target_config=_H100,
      topology="1x1x1").devices
  place = lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=SingleDeviceSharding(chip))
  jax.default_backend = lambda: "gpu"  # selects the GPU kernels
  jax.jit(function, donate_argnums=donate).trace(
      *jax.tree.map(place, arguments)).lower().compile()

  def largest(suffix: str) -> str:
    """Returns the dump of the function, which is larger than its constants."""
    return max(dump.glob(f"*{suffix}.txt"),
               key=lambda file: file.stat().st_size).read_text("utf-8")

  found = counted(largest("thunk_sequence_after_thunk_passes"),
                  largest("gpu_after_optimizations"))
  for file in dump.iterdir():
    if file.is_file():
      file.unlink()
  return found


def counted(launches: str, program: str) -> list[Counts]:
  """Returns the result of `loops` for a dump of launches and one of the HLO."""
  found = [collections.Counter()]
  opened = [(-1, found[0])]  # indentation and counter of the enclosing loops
  is_condition = False
  for line in launches.splitlines():
    match = _LINE.match(line)
    if not match:
      # The condition of a loop with a known number of iterations never runs.
      is_condition = line.strip() == "condition:"
      continue
    if is_condition:
      continue
    indent, kind = len(match[1]), match[2]
    while indent <= opened[-1][0]:
      opened.pop()
    counter = opened[-1][1]
    if kind == "While":
      found.append(collections.Counter())
      opened.append((indent, found[-1]))
    elif kind in _COUNTED:
      counter[_COUNTED[kind]] += 1
    elif kind not in _CONTAINERS:
      raise ValueError(f"the schedule contains k{kind}, which is not known; "
                       "add it to gpu_schedule.py")
    counter["launches"] += kind == "CuDnn"
  # The dump of launches does not show the number of iterations.
  found[-1 if len(found) < 2 else 1]["waits"] += sum(
      "known_trip_count" not in line for line in program.splitlines()
      if " while(" in line)
  return [Counts(c["launches"], c["cudnn"], c["graphs"], c["waits"])
          for c in found]
