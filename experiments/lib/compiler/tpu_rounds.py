"""Rounds of Llama's shapes, compiled for a TPU v5e 2x2 that is not there.

libtpu reads its environment when it is loaded, see
`experiments/runs/tpu_rounds.py`.
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
from lib.compiler import llama
import specjax as sj
from specjax.attention import tpu
from specjax.caches import dense
from specjax.decoding import placement

# Published bandwidth of a chip's main memory in bytes per second.
BANDWIDTH = {"v5e": 819e9, "v5p": 2765e9, "v6e": 1640e9}
SHORT = 128  # slots in use, of short texts
_KERNEL = "tpu_custom_call"
_CHIPS = 4  # all of them split the models


def placed(setting: llama.Setting):
  """The parameters and the state of a round: shapes with shardings."""
  decoder, rows = setting.decoder(), setting.batch
  weights = lambda model: jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16),
      jax.eval_shape(model.init, jax.random.key(0)))
  params = {"target": weights(decoder.target),
            "drafter": weights(decoder.drafter.model)}

  keys = jax.random.split(jax.random.key(0, impl="threefry2x32"), rows)
  state = jax.eval_shape(
      functools.partial(llama.state, decoder, capacity=setting.capacity),
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


def lowered(setting: llama.Setting):
  """The round, lowered for the chips, and its arguments' shapes there.

  Returns:
    `(lowered, params, state)`, the last two with shardings.
  """
  params, state = placed(setting)
  same = jax.tree.map(lambda x: x.sharding, state)
  traced = jax.jit(
      setting.decoder().decode_round, donate_argnames="state",
      out_shardings=(same, None)).trace(params, state)
  return traced.lower(), params, state


def on_a_chip(tree: Any) -> int:
  """Bytes of a tree of shapes with shardings on one chip."""
  return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
             for x in jax.tree.leaves(tree))


def caches_read(program: hlo.Program) -> int:
  """Bytes that the kernels fetch of one chip's caches, were all slots in use.

  A kernel takes the keys and the values of a layer as they lie. It fetches them
  once: a draft has no more queries than it takes at a time.
  """
  keys = [times * max(sizes) for times, where, op in program.executed
          if _KERNEL in op.rest
          and (sizes := [n for shape in program.operands(where, op)
                         for n in hlo.sizes(shape)])]
  return 2 * sum(keys)


def figures(setting: llama.Setting, text: str, memory: Any, params: Any,
            state: Any) -> dict:
  """What a compiled round moves and holds, in bytes of one chip.

  Args:
    setting: of the round.
    text: the optimised program.
    memory: `memory_analysis` of it.
    params: as `lowered` returned them.
    state: likewise.

  Returns:
    `moved`, to and from main memory, and `floor`, what the passes must read of
    weights and caches: two numbers each, with all slots in use and with `SHORT`
    of each row; `cache`, what both caches hold; `law`, a law for every node of
    the batch, on all chips; `copied`, what writes a whole layer of a cache;
    `loops`, `cycles`, as the compiler estimates; `temporaries`.
  """
  program = hlo.Program(text)
  passes = (len(set(sj.trees.depths(setting.parents)))
            if setting.parents else setting.gamma)
  nodes = len(setting.parents) or setting.gamma + 1
  weights = dict(params["target"])
  del weights["embedding"]  # a few of its rows are gathered, it is not read
  caches = state.target_cache, state.drafter
  leaves = {on_a_chip(x) for x in jax.tree.leaves(caches) if x.ndim == 4}
  read, needed = caches_read(program), (
      on_a_chip(caches[0]) + passes * on_a_chip(caches[1]))
  # Whole blocks are fetched, and of each row no more than are in use.
  capacity, block = setting.capacity, tpu.block_size(setting.capacity)
  fetched = min(capacity, -(-SHORT // block) * block)
  must = on_a_chip(weights) + passes * on_a_chip(params["drafter"])
  # Some weights are as large as a layer of a cache.
  shards = {x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(params)}
  of_weights = lambda op: any(dims in shards for dims in hlo.shapes(op.shape))
  copied = [op.name for _, where, op in program.executed
            if leaves & set(program.written(where, op)) and not of_weights(op)]
  return {
      "moved": [program.total + share * read
                for share in (1, fetched / capacity)],
      "floor": [must + share * needed for share in (1, SHORT / capacity)],
      "cache": on_a_chip(caches), "copied": copied,
      "law": 4 * setting.batch * nodes * llama.VOCAB_SIZE,
      "loops": program.loops, "cycles": program.cycles,
      "temporaries": memory.temp_size_in_bytes}
