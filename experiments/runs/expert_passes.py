"""Computes what a pass over N nodes costs on targets with and without experts.

  python experiments/runs/expert_passes.py

First table: bytes of the weights that a pass reads, relative to a pass over one
node, for published shapes in bfloat16. Tokens are assumed to choose experts
independently, with equal frequencies. Second table: the smallest acceptance
with which one drafted token pays, and for several batch sizes the tree with the
most expected tokens per second on an H100 (roofline), with its speed-up. Third
table: a small random model on text, on this machine: distinct experts
(measured, and expected from the measured frequencies) and the time of the pass
(the fastest of several, because other programs may run).
docs/results/experts.md has the results.
"""

import pathlib
import statistics
import sys
import time

sys.path.append(str(pathlib.Path(__file__).parents[1]))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from lib.reports import tables  # noqa: E402
import numpy as np  # noqa: E402

import specjax as sj  # noqa: E402
from specjax.data import copy_prompts  # noqa: E402

_NODES = (1, 2, 4, 8, 16, 32, 64)
_BATCHES = (1, 8, 32)
# Acceptance of the first, second and third child of a node, and the cost of
# drafting one level of a tree, as a share of the target's pass over one node.
_ACCEPTANCE, _DRAFT = (0.7, 0.1, 0.05), 0.05
_RIDGE = 989e12 / 3.35e12  # operations of an H100 in the time of one byte
_COMMON = dict(context_length=4096, tie_embeddings=False)
_SHAPES = {  # experts: (number, chosen, width, dense layers, shared width)
    "Qwen3-8B": (dict(vocab_size=151_936, width=4096, layers=36, heads=32,
                      kv_heads=8, head_dim=128, mlp_width=12_288), None),
    "Mixtral-8x7B": (dict(
        vocab_size=32_000, width=4096, layers=32, heads=32, kv_heads=8,
        head_dim=128, mlp_width=14_336), (8, 2, 14_336, 0, 0)),
    "Granite 3.1 3B-A800M": (dict(
        vocab_size=49_155, width=1536, layers=32, heads=24, kv_heads=8,
        head_dim=64, mlp_width=512, tie_embeddings=True), (40, 8, 512, 0, 0)),
    "OLMoE-1B-7B": (dict(
        vocab_size=50_304, width=2048, layers=16, heads=16, kv_heads=16,
        head_dim=128, mlp_width=1024), (64, 8, 1024, 0, 0)),
    "Qwen3-30B-A3B": (dict(
        vocab_size=151_936, width=2048, layers=48, heads=32, kv_heads=4,
        head_dim=128, mlp_width=6144), (128, 8, 768, 0, 0)),
    "GLM-4.5-Air": (dict(
        vocab_size=151_552, width=4096, layers=46, heads=96, kv_heads=8,
        head_dim=128, mlp_width=10_944), (128, 8, 1408, 1, 1408)),
}


def _config(sizes, experts):
  if experts is not None:
    count, chosen, width, dense, shared = experts
    experts = dict(count=count, chosen=chosen, width=width, shared_width=shared,
                   dense_layers=tuple(range(dense)))
  return sj.models.TransformerConfig(**_COMMON | sizes, experts=experts)


def _costs(config):
  """Returns functions from tokens to the bytes and the cost of a pass.

  The cost is in bytes that a chip could read in the same time.
  """
  shapes = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16),
      jax.eval_shape(sj.models.Transformer(config).init, jax.random.key(0)))
  e = config.experts
  read = lambda tokens: sj.analysis.pass_bytes(
      shapes, sj.analysis.expected_experts(
          [e.chosen / e.count] * e.count, tokens) if e else 0.0)
  # A multiply-add of a 2-byte weight is two operations.
  return read, lambda tokens: max(read(tokens), read(1) * tokens / _RIDGE)


def _published():
  costs = {name: _costs(_config(*shape)) for name, shape in _SHAPES.items()}
  print(tables.markdown([{
      "target": name, "one node (GB)": f"{cost(1) / 1e9:.1f}",
      **{f"{n} nodes": f"{cost(n) / cost(1):.2f}" for n in _NODES[1:]}}
      for name, (cost, _) in costs.items()]))
  rows = []
  for name, (_, cost) in costs.items():
    row = {"target": name, "break-even acceptance": (
        f"{cost(2) / cost(1) - 1 + _DRAFT:.2f}")}
    for batch in _BATCHES:
      seconds = {n: cost(n * batch) / cost(batch) for n in range(1, 65)}
      tree = sj.trees.best_tree(_ACCEPTANCE, seconds, _DRAFT, depth=12)
      depth = max(sj.trees.depths(tree))
      speed = sj.trees.expected_tokens(tree, _ACCEPTANCE) / (
          seconds[len(tree)] + depth * _DRAFT)
      row[f"batch {batch}"] = f"{len(tree) - 1}, {speed:.2f}x"
    rows.append(row)
  print(tables.markdown(rows))


def _measured():
  config = sj.models.TransformerConfig(
      vocab_size=256, width=512, layers=4, heads=8, kv_heads=8, head_dim=64,
      mlp_width=512, context_length=1024, experts=dict(
          count=64, chosen=8, width=512))
  model = sj.models.Transformer(config)
  params = jax.jit(model.init)(jax.random.key(0))
  params["embedding"] = 50 * params["embedding"]  # as large as the layers' part
  text = np.frombuffer("".join(copy_prompts.SUMMARISE).encode(), np.uint8)
  text = text[:1024].astype(np.int32)
  routes = np.asarray(jax.jit(model.routes)(params, text[None]))[:, 0]
  frequencies = sj.analysis.router_frequencies(routes, config.experts.count)

  @jax.jit
  def run(params, tokens):
    cache = model.init_cache(params, 1, 128)
    return model(params, tokens, cache=cache).logits

  rows = []
  for n in _NODES:
    parts = text[:1024 // n * n].reshape(-1, n)[:16]
    own = routes[:, :1024 // n * n].reshape(len(routes), -1, n, 8)[:, :16]
    times = [[] for _ in parts]
    for _ in range(8):
      for part, own_times in zip(parts, times):
        start = time.perf_counter()
        run(params, part[None]).block_until_ready()
        own_times.append(time.perf_counter() - start)
    rows.append({
        "nodes": str(n),
        "distinct experts": f"{sj.analysis.distinct_experts(own).mean():.1f}",
        **{name: f"{sj.analysis.expected_experts(share, n).mean():.1f}"
           for name, share in (("expected", frequencies),
                               ("balanced router", [1 / 8] * 64))},
        "pass (ms)": f"{1e3 * statistics.median(map(min, times)):.1f}"})
  print(tables.markdown(rows))


if __name__ == "__main__":
  _published()
  _measured()
