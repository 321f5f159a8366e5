"""A pass with its commit, and a round, on recurrent states, for a v5e.

The compiler needs no chip. See attention/tpu_aot_test.py for the form.
"""

import functools
import json
import math
import pathlib
import re
import sys

import pytest
import tpu_processes

pytestmark = pytest.mark.slow

_BATCH, _NODES, _CAPACITY = 8, 5, 256
_KINDS = ("delta", "delta", "attention", "attention")
_CHAIN, _TREE = (-1, 0, 1, 2, 3), (-1, 0, 0, 1, 1)


def _passes(place, parents):
  """A pass over a draft and its commit, lowered for a chip.

  Args:
    place: sharding of all arrays, on a single chip.
    parents: the draft's.

  Returns:
    The lowered program, what it reads at least, and its cache.
  """
  import jax
  import jax.numpy as jnp
  from lib.compiler import pairs

  from specjax.trees import topology

  model, tree = pairs.hybrid(_KINDS), parents == _TREE
  put = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=place), tree)
  params = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16),
      jax.eval_shape(model.init, jax.random.key(0)))
  cache = jax.eval_shape(
      lambda params: model.init_cache(params, _BATCH, _CAPACITY), params)
  tokens = jax.ShapeDtypeStruct((_BATCH, _NODES), jnp.int32)

  def step(params, cache, tokens, parents, limit):
    ancestors = jax.vmap(topology.ancestors)(parents)
    depths = topology.depths_of(ancestors)
    if not tree:
      depths, ancestors = topology.causal(_BATCH, _NODES)
    out = model(params, tokens, depths, ancestors, cache)
    # As after a verdict, the path depends on the logits.
    best = out.logits.argmax(-1)
    count = jnp.minimum(1 + (best == tokens).sum(1), limit)
    path = jnp.sort(best % _NODES, axis=1)
    return best, (out.cache.commit(path, count) if tree else
                  out.cache.rollback(cache.lengths + count))

  args = put((params, cache, tokens, tokens, tokens))
  args = (*args[:4], put(jax.ShapeDtypeStruct((_BATCH,), jnp.int32)))
  return (jax.jit(step, donate_argnums=1).trace(*args).lower(),
          _size(params) + _size(cache), cache, cache)


def _round(place, parents):
  """A round with the target's own module for drafts, see `_passes`."""
  import jax
  import jax.numpy as jnp
  from lib.compiler import pairs

  import specjax as sj
  from specjax import methods

  target = pairs.hybrid(_KINDS)
  depth = int(max(sj.trees.depths(parents)))  # passes of the module
  own = methods.MTPHeads.for_target(target, depth, reuse=True)
  drafter, verifier = sj.strategies.mtp(
      own, parents=parents if parents == _TREE else None)
  attached = []

  def init(key):
    params = target.init(key)
    attached.append(own.attach(target, params, own.init(key, params)))
    return attached[0][1]

  params = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=place),
      jax.eval_shape(init, jax.random.key(0)))
  decoder = sj.Decoder(
      target=attached[0][0], drafter=drafter, verifier=verifier)
  state = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
      jax.eval_shape(functools.partial(
          decoder.prefill, prompts=[[0]] * _BATCH, limits=_CAPACITY // 2,
          capacity=_CAPACITY), params, key=jax.random.key(
              0, impl="threefry2x32")))
  head = params["target"]["embedding"]  # tied
  floor = _size((params["target"], state.target_cache)) + depth * _size(
      (params["drafter"], head, state.drafter))
  return (jax.jit(decoder.decode_round, donate_argnums=1).trace(
      params, state).lower(), floor, state.target_cache, state)


def _size(tree):
  import jax

  return sum(math.prod(x.shape) * x.dtype.itemsize
             for x in jax.tree.leaves(tree))


def _compile(lower, parents):
  """Prints what the program moves, and which operations write a state.

  The floor is what the program reads and writes at least.
  """
  import jax
  from jax.experimental import topologies
  from lib.compiler import hlo
  from lib.compiler import pairs
  from lib.compiler import tpu_rounds

  chip = topologies.get_topology_desc("v5e:2x2", platform="tpu").devices[0]
  program, floor, cache, kept = lower(
      jax.sharding.SingleDeviceSharding(chip), parents)
  compiled = program.compile()
  text = compiled.as_text()
  read, memory = hlo.Program(text), compiled.memory_analysis()
  states = [x.matrix for x in cache.states]
  writers = lambda size: [(op.name, op.kind) for _, where, op in read.executed
                          if size in read.written(where, op)]
  print(json.dumps({
      "moved": read.total + tpu_rounds.caches_read(read),
      "floor": floor + _size(states), "states": _size(states),
      "law": 4 * _BATCH * _NODES * pairs.hybrid(_KINDS).vocab_size,
      "writes": writers(_size(states[:1])),
      "of_nodes": writers(_size(states[:1]) * _NODES),
      "cycles": read.cycles, "temporaries": memory.temp_size_in_bytes,
      "aliased": memory.alias_size_in_bytes, "kept": _size(kept),
      "host": re.findall(r"is_host_transfer=true|infeed\(|outfeed\(", text)}))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("draft", ["chain", "tree"])
@pytest.mark.parametrize("program", ["pass", "round"])
def test_a_program_reads_and_writes_each_state_once(program, draft):
  # Broken: a state is copied, is stored for every node, or has another layout
  # in the pass than in the commit; or a loop over nodes waits for the host.
  found = tpu_processes.answer(__file__, program, draft)
  assert len(found["writes"]) == _KINDS.count("delta"), found
  assert not found["of_nodes"] and not found["host"], found
  assert found["aliased"] >= found["kept"], found
  if program == "pass":
    assert found["moved"] < 1.05 * found["floor"], found
    assert found["temporaries"] < 0.1 * found["states"], found
  else:  # it also computes distributions over 248,320 tokens
    assert found["moved"] < found["floor"] + 14 * found["law"], found
    assert found["temporaries"] < 5 * found["law"], found


if __name__ == "__main__":
  sys.path.append(str(pathlib.Path(__file__).parents[2] / "experiments"))
  _compile({"pass": _passes, "round": _round}[sys.argv[1]],
           {"chain": _CHAIN, "tree": _TREE}[sys.argv[2]])
