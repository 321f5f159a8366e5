"""What a verification needs beside its inputs, by the real TPU compiler.

Of B N V numbers, the laws of a batch, a round has three: the target's logits,
the drafter's laws, and the target's laws. The first two are inputs here. As in
tpu_aot_test.py each program is compiled in a process of its own, this file run
as a script, and its answer is kept.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import pathlib
import re
import sys
import tempfile

import pytest
import tpu_processes

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_BATCH, _NODES, _VOCAB = 32, 17, 128512
_SPLIT = 4  # devices of the mesh
_SPLIT_VOCAB = 128256  # Llama's: no whole number of blocks on each of four
_MOVED = re.compile(r" = (.*?) (?:all-gather|all-to-all|collective-permute|"
                    r"all-reduce|reduce-scatter)(?:-start)?\(")


def _verification(top_p):
  """Temporaries in bytes of transform, block verification and verdict."""
  import jax
  from jax.experimental import topologies
  import jax.numpy as jnp

  import specjax as sj

  device = topologies.get_topology_desc("v5e:2x2", platform="tpu").devices[0]
  transform = sj.LogitsTransform(temperature=None, top_p=top_p)
  rule = sj.verifiers.Block()

  def verify(logits, temperature, draft, uniforms):
    probs = transform(logits, temperature[:, None])
    draw = lambda draft, probs, uniforms: sj.sampling.sample_outcome(
        rule.law(draft, probs), draft, uniforms)
    verdict, row = jax.vmap(draw)(draft, probs, uniforms)
    # What the loop asks besides.
    return verdict, [jnp.isfinite(x.sum(-1)) for x in (row, probs, draft.probs)]

  shape = lambda *sizes, dtype=jnp.float32: jax.ShapeDtypeStruct(
      (_BATCH, *sizes), dtype,
      sharding=jax.sharding.SingleDeviceSharding(device))
  ids, laws = shape(_NODES, dtype=jnp.int32), shape(_NODES, _VOCAB)
  lowered = jax.jit(verify).lower(
      laws, shape(), sj.Draft(tokens=ids, parents=ids, probs=laws),
      shape(sj.sampling.VERDICT_UNIFORMS))
  key = hashlib.sha256("\0".join([
      lowered.as_text(), pathlib.Path(__file__).read_text("utf-8"),
      *map(importlib.metadata.version, ("jax", "jaxlib", "libtpu"))
  ]).encode()).hexdigest()
  kept = pathlib.Path(os.environ.get("JAX_COMPILATION_CACHE_DIR")
                      or tempfile.mkdtemp(), f"tpu-memory-{key}.json")
  if not kept.exists():
    sj.utils.files.write_json(
        kept, lowered.compile().memory_analysis().temp_size_in_bytes)
  return json.loads(kept.read_text("utf-8"))


def _moved():
  """Sizes of what a split round moves between devices, in numbers."""
  import jax
  from jax.sharding import Mesh
  import numpy as np

  import specjax as sj
  from specjax.decoding import placement

  model = sj.models.Transformer(sj.models.TransformerConfig(
      vocab_size=_SPLIT_VOCAB, context_length=32, width=16, layers=1,
      heads=4, kv_heads=4, head_dim=4, mlp_width=16))
  decoder = sj.Decoder(
      target=model, verifier=sj.verifiers.Block(),
      drafter=sj.drafters.draft_model(model=model, gamma=3),
      transform=sj.LogitsTransform(top_p=0.9))
  weights = jax.eval_shape(model.init, jax.random.key(0))
  params = {"target": weights, "drafter": weights}
  state = jax.eval_shape(
      lambda params, key: decoder.prefill(params, [[1, 2]] * 8, key, limits=9),
      params, jax.random.key(0))
  mesh = Mesh(np.array(jax.devices()).reshape(1, _SPLIT), ("data", "model"))
  shardings = placement.decode_shardings(decoder, params, state, mesh)
  hlo = jax.jit(
      decoder.decode_round, in_shardings=shardings,
      out_shardings=(shardings[1], None)).lower(
          params, state).compile().as_text()
  return [math.prod(map(int, re.findall(r"\d+", sizes)))
          for moved in _MOVED.findall(hlo)
          for sizes in re.findall(r"\w+\[([\d,]*)\]", moved)]


def _answer(question):
  """What this file, run as a script, prints in answer."""
  return tpu_processes.answer(
      __file__, question,
      XLA_FLAGS=f"--xla_force_host_platform_device_count={_SPLIT}")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_verification_holds_the_laws_once():
  # Broken: the rows that nobody draws from are made, rows are copied to be
  # compared with the next node's, or top-p keeps the laws beside their bits.
  # A batch of 32 drafts of 16 tokens so lost 1.2 GB.
  held = _answer("verifications")
  assert max(held) < 1.05 * 4 * _BATCH * _NODES * _VOCAB, held


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_split_law_stays_where_it_lies():
  # Broken: every draw gathers a law of V numbers on every device. A block of
  # them travels, and the sums of all blocks.
  moved = _answer("moved")
  assert max(moved) < 8 * _SPLIT_VOCAB / 16


if __name__ == "__main__":
  print(json.dumps({
      "moved": _moved,
      "verifications": lambda: [_verification(1.0), _verification(0.9)],
  }[sys.argv[1]]()))
