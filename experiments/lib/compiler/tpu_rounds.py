"""Decoding rounds compiled for four TPU chips, without a TPU.

The models are those of `pairs.PAIRS`. libtpu reads environment variables when
it is loaded (see `experiments/runs/tpu_rounds.py`).
"""

import functools
import math
from typing import Any

import jax
from jax.experimental import topologies
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from lib.compiler import hlo
from lib.compiler import pairs
import specjax as sj
from specjax.attention import tpu
from specjax.caches import dense
from specjax.decoding import placement

# Published bandwidth of a chip's main memory in bytes per second.
BANDWIDTH = {"v5e": 819e9, "v5p": 2765e9, "v6e": 1640e9}
SHORT = 128  # number of used slots per row for short sequences
_KERNEL = "tpu_custom_call"
_EXPERTS = "%experts", "%ragged-dot"  # kernels that read experts
_CHIPS = 4  # the models are split over all chips


def placed(setting: pairs.Setting, decoder: sj.Decoder | None = None):
  """Returns `(params, state)` of a round as shapes with shardings.

  Args:
    setting: settings of the round, such as models, batch size and chips.
    decoder: decoder with the same models. None means `setting.decoder()`.
  """
  decoder, rows = decoder or setting.decoder(), setting.batch
  weights = lambda model: jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16),
      jax.eval_shape(model.init, jax.random.key(0)))
  params = {"target": weights(decoder.target),
            "drafter": weights(decoder.drafter.network.model)}

  keys = jax.random.split(jax.random.key(0, impl="threefry2x32"), rows)
  state = jax.eval_shape(
      functools.partial(pairs.state, decoder, capacity=setting.capacity),
      params, keys)
  if setting.drafter == "replicate":
    state = state.replace(drafter=dense.undivided(state.drafter))
  chips = topologies.get_topology_desc(
      setting.topology, platform="tpu").devices
  mesh = Mesh(np.array(chips).reshape(1, _CHIPS), ("data", "model"))
  shardings = placement.decode_shardings(decoder, params, state, mesh,
                                        drafter=setting.drafter)
  place = lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)
  return jax.tree.map(place, (params, state), shardings)


def lowered(setting: pairs.Setting):
  """Lowers a round to a program for the chips.

  Returns:
    `(lowered, params, state)`. The last two are the arguments of the round, as
    shapes with shardings.
  """
  params, state = placed(setting)
  same = jax.tree.map(lambda x: x.sharding, state)
  traced = jax.jit(
      setting.decoder().decode_round, donate_argnames="state",
      out_shardings=(same, None)).trace(params, state)
  return traced.lower(), params, state


def on_a_chip(tree: Any) -> int:
  """Returns the size in bytes of a tree on one chip.

  The leaves of the tree are shapes with shardings.
  """
  return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
             for x in jax.tree.leaves(tree))


def caches_read(program: hlo.Program) -> int:
  """Returns the number of bytes that the kernels of one chip read from caches.

  All slots are assumed to be in use. A kernel takes the keys and values of a
  layer without a copy. It reads them once, because all queries of a draft fit
  in one block.
  """
  keys = [times * max(sizes) for times, where, op in program.executed
          if _KERNEL in op.rest and not op.name.startswith(_EXPERTS)
          and (sizes := [n for shape in program.operands(where, op)
                         for n in hlo.sizes(shape)])]
  return 2 * sum(keys)


def _copied(program: hlo.Program, params: Any, caches: Any) -> list[str]:
  """Returns the names of operations that write an entire layer of a cache."""
  layers = {on_a_chip(x) for x in jax.tree.leaves(caches) if x.ndim == 4}
  # Copies of a cache are recognised by their size. Some weights have the same
  # size as a layer of a cache. So operations with the shape of a weight are
  # excluded.
  shards = {x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(params)}
  of_weights = lambda op: any(dims in shards for dims in hlo.shapes(op.shape))
  return [op.name for _, where, op in program.executed
          if layers & set(program.written(where, op)) and not of_weights(op)]


def figures(setting: pairs.Setting, text: str, memory: Any, params: Any,
            state: Any) -> dict:
  """Returns the memory traffic and memory use of a compiled round.

  Args:
    setting: settings of the compiled round.
    text: HLO text of the optimised program.
    memory: result of `memory_analysis` of the program.
    params: parameters from `lowered`.
    state: decoding state from `lowered`.

  Returns:
    Dict. Sizes are in bytes on one chip.

    * "moved": traffic of main memory, for all slots in use and for `SHORT`
      used slots per row.
    * "floor": size of the weights and caches that the passes must read, for the
      same two cases. The kernels read only the chosen experts, so both numbers
      contain their expected size if tokens choose independently.
    * "experts": names of the operations, except kernels, that read from an
      array of all experts of a chip.
    * "cache": size of both caches.
    * "law": size of one distribution for every node of the batch, over all
      chips.
    * "copied": names of the operations that write an entire layer of a cache.
    * "loops": number of times that the program enters a loop.
    * "cycles": the compiler's estimate of cycles.
    * "temporaries": size of the temporary memory.
    * "arguments": size of parameters and state.
  """
  program = hlo.Program(text)
  passes = (len(set(sj.trees.depths(setting.parents)))
            if setting.parents else setting.gamma)
  nodes = len(setting.parents) or setting.gamma + 1
  weights = dict(params["target"])
  del weights["embedding"]  # a pass reads only a few rows
  # Bytes of the experts that the nodes choose, and shapes of all experts.
  chosen, all_experts = 0, set()
  for i in range(setting.decoder().target.config.layers):
    e = setting.decoder().target.config.experts_of(i)
    if e:
      layer = dict(weights[f"mlp_{i}"])
      own = [layer.pop(name) for name in ("expert_gate_up", "expert_down")]
      all_experts |= {x.sharding.shard_shape(x.shape) for x in own}
      weights[f"mlp_{i}"] = layer
      chosen += on_a_chip(own) / e.count * sj.analysis.expected_experts(
          [e.chosen / e.count] * e.count, nodes * setting.batch)
  caches = state.target_cache, state.drafter
  read, needed = caches_read(program), (
      on_a_chip(caches[0]) + passes * on_a_chip(caches[1]))
  # Kernels read complete blocks, and only blocks with slots in use.
  capacity, block = setting.capacity, tpu.block_size(setting.capacity)
  fetched = min(capacity, -(-SHORT // block) * block)
  must = (on_a_chip(weights) + passes * on_a_chip(params["drafter"])
          + float(chosen))
  return {
      "moved": [program.total + float(chosen) + share * read
                for share in (1, fetched / capacity)],
      "floor": [must + share * needed for share in (1, SHORT / capacity)],
      "experts": [
          op.name for _, where, op in program.executed
          if op.kind not in hlo.FREE and any(
              dims in all_experts for shape in program.operands(where, op)
              for dims in hlo.shapes(shape))],
      "cache": on_a_chip(caches), "copied": _copied(program, params, caches),
      "law": 4 * setting.batch * nodes * setting.vocab_size,
      "loops": program.loops, "cycles": program.cycles,
      "arguments": memory.argument_size_in_bytes,
      "temporaries": memory.temp_size_in_bytes}
