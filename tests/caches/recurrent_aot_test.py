"""A round on recurrent states, compiled for a v5e.

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

_BATCH, _CAPACITY = 8, 256
_KINDS = ("delta", "delta", "attention", "attention")
_CHAIN, _TREE = (-1, 0, 1, 2, 3), (-1, 0, 0, 1, 1)


def lowered(place, parents):
  """A round with the target's own module for drafts, lowered for a chip.

  Args:
    place: sharding of all arrays, on a single chip.
    parents: the draft's.

  Returns:
    The lowered program, and the shapes of its parameters and its state.
  """
  import jax
  import jax.numpy as jnp
  from lib.compiler import pairs

  import specjax as sj
  from specjax import methods

  target = pairs.hybrid(_KINDS)
  depth = int(max(sj.trees.depths(parents)))
  own = methods.MTPHeads.for_target(target, depth, reuse=True)
  attached = []

  def init(key):
    params = target.init(key)
    attached.append(own.attach(target, params, own.init(key, params)))
    return attached[0][1]

  params = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=place),
      jax.eval_shape(init, jax.random.key(0)))
  shape = (sj.drafters.Chain(depth) if parents == _CHAIN else
           sj.drafters.Tree(parents))
  decoder = sj.Decoder(
      target=attached[0][0],
      verifier=(sj.verifiers.Block() if parents == _CHAIN else
                sj.verifiers.Traversal()),
      drafter=sj.drafters.NetworkDrafter(
          network=sj.drafters.FeatureLayer(heads=own), shape=shape))
  state = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
      jax.eval_shape(functools.partial(
          decoder.prefill, prompts=[[0]] * _BATCH, limits=_CAPACITY // 2,
          capacity=_CAPACITY), params, key=jax.random.key(
              0, impl="threefry2x32")))
  return jax.jit(decoder.decode_round, donate_argnums=1).trace(
      params, state).lower(), params, state


def _compile(parents):
  """Prints what the program moves, and which operations write a state."""
  import jax
  from jax.experimental import topologies
  from lib.compiler import hlo
  from lib.compiler import tpu_rounds

  from specjax import trees

  chip = topologies.get_topology_desc("v5e:2x2", platform="tpu").devices[0]
  program, params, state = lowered(
      jax.sharding.SingleDeviceSharding(chip), parents)
  compiled = program.compile()
  text = compiled.as_text()
  read = hlo.Program(text)
  size = lambda tree: sum(
      math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
  states = [x.matrix for x in state.target_cache.states]
  head = size(params["target"]["embedding"])  # tied
  depth = int(max(trees.depths(parents)))  # passes of the module
  print(json.dumps({
      "moved": read.total + tpu_rounds.caches_read(read),
      "target": (size(params["target"]) + size(state.target_cache)
                 + size(states)),
      "drafter": depth * (size(params["drafter"]) + head + size(state.drafter)),
      "law": 4 * _BATCH * len(parents) * params["target"]["embedding"].shape[0],
      "states": size(states),
      "writes": [(op.name, op.kind) for _, where, op in read.executed
                 if size(states[:1]) in read.written(where, op)],
      "of_nodes": [op.name for _, where, op in read.executed
                   if size(states[:1]) * len(parents)
                   in read.written(where, op)],
      "temporaries": compiled.memory_analysis().temp_size_in_bytes,
      "aliased": compiled.memory_analysis().alias_size_in_bytes,
      "state": size(state),
      "host": re.findall(r"is_host_transfer=true|infeed\(|outfeed\(", text)}))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("draft", ["chain", "tree"])
def test_a_round_reads_and_writes_each_state_once(draft):
  # Broken: a state is copied, is stored for every node, or has another layout
  # in the pass than in the commit; or a loop over nodes waits for the host.
  found = tpu_processes.answer(__file__, draft)
  # Both models have a vocabulary of 248,320 tokens, so that distributions of 8
  # rows are a sixth of what is moved.
  assert found["moved"] < (found["target"] + found["drafter"]
                           + 14 * found["law"]), found
  assert len(found["writes"]) == _KINDS.count("delta"), found
  assert found["aliased"] >= found["state"] and not found["host"], found
  assert not found["of_nodes"], found
  assert found["temporaries"] < 5 * found["law"], found


if __name__ == "__main__":
  sys.path.append(str(pathlib.Path(__file__).parents[2] / "experiments"))
  _compile({"chain": _CHAIN, "tree": _TREE}[sys.argv[1]])
