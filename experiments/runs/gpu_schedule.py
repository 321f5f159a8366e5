"""Counts the kernel launches of decoding rounds on an NVIDIA GPU.

  pip install -e '.[experiments,gpu-aot]'
  python experiments/runs/gpu_schedule.py

On a GPU, a short kernel costs its launch. A program runs at the speed of the
memory only if it has few launches, and if the host never waits for a result.
The script compiles each round with XLA's CUDA backend, which needs no GPU, for
an H100, in bfloat16. Unless --rounds names another target, it has the shape of
Llama-3-8B, and the draft model that of Llama-3.2-1B. Two rounds that differ by
one layer show the launches of a layer. The last line of stdout contains the
path of the JSON file.
"""

import functools
import pathlib
import sys
from typing import Any

from absl import flags

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from lib.compiler import gpu_schedule  # noqa: E402

_DUMP = None
if __name__ == "__main__":  # before jax is imported
  try:
    _DUMP = gpu_schedule.prepare()
  except ValueError as e:
    sys.exit(f"error: {e}")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from lib import common  # noqa: E402
from lib.compiler import pairs  # noqa: E402

import specjax as sj  # noqa: E402
from specjax import methods  # noqa: E402

_BLOCKS = {
    "dflash": dict(from_anchor=False),
    "dspark": dict(markov="plain", markov_rank=256),
    "domino": dict(markov="gru", markov_rank=256, markov_width=1024),
    "dflash2": dict(from_anchor=False, markov="selector", markov_rank=256,
                    conv_kernel=2),
    "lilicorr": dict(from_anchor=False, markov="lilicorr", markov_width=256)}
# Heads for the target of Llama-3-8B: their number of layers, how often a round
# reads them, and how often it reads the target's LM head for drafts. EAGLE-3
# has an LM head of its own.
_HEADS = {"medusa": (1, 1, 1), "eagle3": (1, 4, 0), "mtp": (1, 1, 4),
          "pass": (1, 0, 0), "uno": (1, 0, 0),
          **dict.fromkeys(_BLOCKS, (5, 1, 1))}
_NAMES = ("chain", "tree", "top_p", *_HEADS, "experts", "deltanet",
          "deltanet_tree")
_BATCHES = flags.DEFINE_list(
    "batches", ["1", "8"], "Batch sizes in rows, comma-separated")
_ROUNDS = flags.DEFINE_list(
    "rounds", [name for name in _NAMES if not name.startswith("deltanet")],
    "Rounds to compile: 'chain' of 4 tokens; top-k 'tree' of 16 nodes; "
    "'medusa' heads with a tree of 16 nodes; 'top_p' is the chain under top-p; "
    "'eagle3', 'mtp', 'pass' and 'uno' are chains of 4 tokens; "
    "'experts' is the chain with Qwen3-30B-A3B and Qwen3-0.6B; 'deltanet' and "
    "'deltanet_tree' are a chain of 4 tokens and a tree of 5 nodes with "
    "Qwen3.5-0.8B and its own module for drafts, and require "
    "XLA_FLAGS=--xla_gpu_enable_triton_gemm=false; the others are networks "
    "that draft a block of 7 tokens in one pass")
_OUTPUT_DIR = flags.DEFINE_string(
    "output_dir", "results/gpu_schedule", "Directory for the JSON file")
_TREE = (3, 2, 1)  # children of a node at each depth: 16 nodes with the root
_CAPACITY = 2048
_ROUNDS_A_CALL = 4


def _decoder(name: str, layers: tuple[int, int]) -> tuple[Any, Any]:
  """Returns a decoder, and a function from a key to its parameters."""
  shapes = pairs.PAIRS["experts" if name == "experts" else "llama"]
  target, draft = (
      sj.models.Transformer(sj.models.TransformerConfig(
          **shape | {"layers": n})) for shape, n in zip(shapes, layers))
  tree = sj.trees.full_tree(_TREE)
  own, transform = None, sj.LogitsTransform()
  if name in ("chain", "top_p", "experts"):
    strategy = sj.strategies.block_verification(draft, 4)
    if name == "top_p":
      transform = sj.LogitsTransform(top_p=0.9)
  elif name == "tree":
    strategy = (sj.drafters.NetworkDrafter(
        network=sj.drafters.LanguageModel(model=draft),
        shape=sj.drafters.Tree(parents=tree)),
                sj.verifiers.Traversal())
  elif name == "medusa":
    own = methods.MedusaHeads(
        width=target.config.width, vocab_size=target.vocab_size, heads=3,
        output="shared")
    strategy = sj.strategies.medusa(own, tree)
  elif name in _BLOCKS:
    own = methods.ParallelHeads.for_target(
        target, 7, layers=layers[1], taps=(0, 1), **_BLOCKS[name])
    strategy = sj.strategies.parallel(own)
  elif name.startswith("deltanet"):
    target = pairs.hybrid(("delta",) * (layers[0] - 1) + ("attention",))
    own = methods.MTPHeads.for_target(target, 4, reuse=True)
    strategy = sj.strategies.mtp(
        own, parents=(-1, 0, 0, 1, 1) if name.endswith("tree") else None)
  else:
    kind, options = {
        "eagle3": (methods.Eagle3Heads, dict(taps=(0, 1))),
        "mtp": (methods.MTPHeads, {}),
        "pass": (methods.PaSSEmbeddings, {}),
        "uno": (methods.PaSSEmbeddings, dict(lookahead_rank=128))}[name]
    own = kind.for_target(target, 4, **options)
    strategy = methods.of(own).strategy(own, None, 4, None)
  drafter, verifier = strategy

  def init(key):
    params = target.init(key)
    if own is None:
      return target, {"target": params, "drafter": draft.init(key)}
    return own.attach(target, params, own.init(key, params))

  attached = []
  params = jax.eval_shape(
      lambda key: attached.append(init(key)) or attached[0][1],
      jax.random.key(0))
  return sj.Decoder(target=attached[0][0], drafter=drafter, verifier=verifier,
                    transform=transform), params


def _counts(name: str, layers: tuple[int, int], batch: int
            ) -> list[gpu_schedule.Counts]:
  """Returns the counts of the loops of `_ROUNDS_A_CALL` rounds."""
  decoder, params = _decoder(name, layers)
  params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(
      x.shape, jnp.bfloat16 if x.dtype == jnp.float32 else x.dtype), params)
  state = jax.eval_shape(functools.partial(
      decoder.prefill, prompts=[[0]] * batch, limits=_CAPACITY // 2,
      capacity=_CAPACITY), params, key=jax.random.key(0))
  decode = lambda params, state: decoder.decode(params, state, _ROUNDS_A_CALL)
  return gpu_schedule.loops(_DUMP, decode, params, state, donate=1)


def row(name: str, batch: int, counts: Any) -> dict[str, Any]:
  """Returns the table row of a round.

  Args:
    name: name of the round.
    batch: number of rows.
    counts: function from the numbers of layers of target and draft model to the
      `Counts` of the program's loops: outside, round, and draft loop if there
      is one.
  """
  base, deeper, wider = counts((2, 2)), counts((3, 2)), counts((2, 3))
  difference = lambda other, i: other[i] - base[i]
  target, first = difference(deeper, 1), difference(wider, 1)
  found = {
      "round": name, "batch": batch, "target_layer": target.launches,
      "draft_layer_outside": first.launches,
      "rest": base[1].launches - 2 * (target.launches + first.launches),
      "graphs": sum(x.graphs for x in base[1:]),
      "cudnn": sum(x.cudnn for x in base[1:]),
      "waits": sum(x.waits for x in base[1:]),
      "draft_layer": "", "draft_step": ""}
  # A loop without draft layers is not a draft loop but part of a verification.
  if len(base) > 2 and (layer := difference(wider, 2).launches):
    found |= {"draft_layer": layer, "draft_step": base[2].launches - 2 * layer}
  return found


def whole(row: dict[str, Any]) -> dict[str, Any]:
  """Returns the launches of a round of a complete model with heads.

  The result also contains the gigabytes of the weights that the round reads. It
  is empty for other rounds.

  Args:
    row: result of `row`.
  """
  if row["round"] not in _HEADS:
    return {}
  layers, networks, heads = _HEADS[row["round"]]
  size = lambda tree: 2e-9 * sum(x.size for x in jax.tree.leaves(tree))
  _, params = _decoder(row["round"], (32, layers))
  read = {k: x for k, x in params["target"].items() if k != "embedding"}
  return {"launches": row["rest"] + 32 * row["target_layer"]
                      + layers * row["draft_layer_outside"],
          "gigabytes": size(read) + networks * size(params["drafter"])
                       + heads * size(params["target"]["head"])}


def main():
  batches = common.batch_sizes("--batches", _BATCHES.value)
  for name in _ROUNDS.value:
    if name not in _NAMES:
      raise ValueError(f"--rounds contains {name!r}; choose among "
                       f"{', '.join(_NAMES)}")
  found = []
  for name in _ROUNDS.value:
    for batch in batches:
      found.append(row(name, batch, functools.partial(
          _counts, name, batch=batch)))
      found[-1] |= whole(found[-1])
      print(found[-1], file=sys.stderr, flush=True)
  common.finish(_OUTPUT_DIR.value, "gpu_schedule", {
      "jax": jax.__version__, "rows": found})


if __name__ == "__main__":
  common.run(main)
