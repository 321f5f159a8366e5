"""Measures the relative cost of the parts of a decoding round on this machine.

In a round of speculative decoding, a drafter proposes gamma tokens and one pass
of the target verifies them. Absolute times vary on shared machines. So every
result is the ratio of the times of two operations that run alternately, as the
median over --pairs timings. The speed of a round also depends on the memory
addresses of arrays. So rounds are timed with --made different allocations. Run
the script on an idle machine:

  python experiments/benchmark.py

Results, where "A / B" is the time of A divided by the time of B:

  bandwidth            memory bandwidth of an autoregressive loop (bytes of
                       weights and KV cache per second) divided by the
                       bandwidth of summing a large array
  round_overhead       complete round / sum of its parts (one verification pass
                       and gamma draft steps, timed separately)
  allocation           pass over one token with 4096 allocated cache slots /
                       the same pass with 256 slots; --used slots are filled
  block_over_token     round with block verification / round with token
                       verification
  autoregressive_loop  decoding without drafts by specjax / a minimal loop
                       (`jax.lax.scan`) with the same model
  pass_cost            pass over 5, 9 or 17 tokens / pass over one token; also
                       in milliseconds
  tree_law             verification of a draft tree of --nodes nodes / target
                       pass over as many nodes, for batch sizes 1 and 8
  training             parts of a training step of four Medusa heads (forward
                       pass of the target, forward and backward pass of the
                       heads, timed separately) / the complete step. It is the
                       fraction of the best possible throughput. Bundled pair
                       only

Two pairs of models are timed: a target of 134M parameters and a drafter of 19M
(Llama architecture, random weights), and the bundled pair. With --mesh the
target is split over the devices, and each device has a full copy of the
drafter. Results are printed, and written to benchmark.json in --output_dir. The
last line of stdout names the file.
"""

from collections.abc import Callable
import functools
import statistics
import sys
from typing import Any

from lib import common  # before jax, which takes long to import

# isort: split
from absl import flags
import jax
import jax.numpy as jnp
from lib import flags as shared
from lib import meshes
from lib.rollouts.timing import bytes_read
from lib.rollouts.timing import filled_cache
from lib.rollouts.timing import large_sum
from lib.rollouts.timing import passes
from lib.rollouts.timing import STEPS
from lib.rollouts.timing import Timed
import numpy as np
import tqdm

import specjax as sj
from specjax import methods
from specjax import objectives
from specjax.decoding import placement as sharding
from specjax.decoding.placement import Placement
from specjax.interfaces import Verifier
from specjax.methods import _trees
from specjax.models import Transformer
from specjax.sampling import sample
from specjax.training import loop
from specjax.training import optimizers
from specjax.training.objective import weights_of

_PAIRS = flags.DEFINE_integer(
    "pairs", 15, "Number of timings per ratio, at least 3. Each timing "
    "measures both operations of the ratio", 3)
_MADE = flags.DEFINE_integer(
    "made", 3, "Number of times that the arrays of round_overhead and "
    "block_over_token are allocated again and timed --pairs times, because the "
    "speed depends on memory addresses", 1)
_GAMMA = shared.gamma(4, "Draft length of the timed rounds, in tokens")
_USED = flags.DEFINE_integer(
    "used", 64, "Number of tokens in the KV cache before each timed operation, "
    "at least 2", 2)
_TREE_NODES = shared.nodes(
    64, "Number of nodes of the draft trees in the ratio tree_law")
_SUM_MEGABYTES = flags.DEFINE_integer(
    "sum_megabytes", 512, "Size in MiB of the array whose sum measures the "
    "memory bandwidth", 1)
_OUTPUT_DIR = shared.output_dir(
    "results/benchmark", "Directory for benchmark.json")
_SIZES = (5, 9, 17)  # tokens per pass; timed against one token
_SLOTS, _MANY_SLOTS = 256, 4096  # allocated in a KV cache
_ACCEPTANCE = (0.5, 0.16, 0.08, 0.05, 0.03, 0.02)  # per rank, for the tree
_TREE_VERIFIERS = (sj.verifiers.Recursive(), sj.verifiers.TargetWalk(),
                   sj.verifiers.KSeq(), sj.verifiers.Traversal())
_PAIRS_OF_MODELS = flags.DEFINE_multi_enum(
    "models", ["random", "bundled"], ["random", "bundled"],
    "Pair of target and drafter to time: random (134M and 19M parameters, "
    "random weights) or bundled (models that ship with specjax). Repeat the "
    "flag to time both. Default: both")
_MESH = shared.mesh()


def _random_pair():
  """Returns a 134M target and a 19M drafter with random weights."""
  same = dict(vocab_size=32_000, head_dim=64, context_length=8192,
              tie_embeddings=False)
  target = sj.models.Transformer(sj.models.TransformerConfig(
      width=768, layers=12, heads=12, kv_heads=12, mlp_width=2048, **same))
  drafter = sj.models.Transformer(sj.models.TransformerConfig(
      width=256, layers=4, heads=4, kv_heads=4, mlp_width=688, **same))
  dtype = sj.models.default_dtype()
  params = {
      name: loop.cast(jax.jit(model.init)(jax.random.key(seed)), dtype)
      for seed, (name, model) in enumerate(
          (("target", target), ("drafter", drafter)))}
  return target, drafter, params


def _bundled_pair():
  pair = sj.zoo.load()
  drafter = pair.drafters["small"]
  return pair.target.model, drafter.model, {
      "target": pair.target.params, "drafter": drafter.params}


def _bare_autoregression(model: Transformer, params: Any, capacity: int,
                         used: int):
  """Returns timed autoregressive sampling in a scan, without specjax's loop."""
  depths, ancestors = jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1, 1), bool)
  transform = sj.LogitsTransform()

  def run(params, carry):
    cache, ids, key = carry

    def step(carry, index):
      cache, ids = carry
      out = model(params, ids, depths, ancestors, cache)
      token = sample(jax.random.fold_in(key, index),
                     transform(out.logits)[0, 0])
      cache = out.cache.rollback(cache.lengths + 1)
      return (cache, token[None, None]), None

    (new, ids), _ = jax.lax.scan(step, (cache, ids), jnp.arange(STEPS))
    return new.rollback(cache.lengths), ids, jax.random.fold_in(key, STEPS)

  return Timed(run, params, (filled_cache(model, params, capacity, used),
                              jnp.ones((1, 1), jnp.int32), jax.random.key(0)))


def _rounds(target: Transformer, drafter: Any, params: Any, verifier: Verifier,
            capacity: int, used: int, placement: Placement | None):
  """Returns timed decoding rounds after a prompt of `used` tokens."""
  decoder = sj.Decoder(target=target, drafter=drafter, verifier=verifier)
  state = decoder.prefill(params, [jnp.ones((used,), jnp.int32)],
                          jax.random.key(0), limits=capacity // 2,
                          capacity=capacity, placement=placement)

  def run(params, state):
    new, _ = decoder.decode(params, state, STEPS)
    cache = new.target_cache.rollback(state.target_cache.lengths)
    return new.replace(lengths=state.lengths, target_cache=cache,
                       done=state.done)

  return Timed(run, params, state)


def _tree_law(verifier: Verifier, vocab_size: int, batch: int):
  """Returns the timed verification of `batch` draft trees.

  The children of a node are drawn as `verifier` requires: independently,
  without replacement, or as the most likely tokens.
  """
  parents = sj.trees.breadth_first(
      sj.trees.sequoia_tree(_ACCEPTANCE, _TREE_NODES.value, depth=8))
  draw = {"iid": _trees.iid,
          "conditional": _trees.without_replacement}.get(
              next(iter(verifier.requires), None), _trees.top_k)
  keys = jax.random.split(jax.random.key(0), (batch, 2))
  # The distance between the distributions of `logits` and `near` is similar to
  # the distance between those of a target and its drafter.
  logits = 3 * jax.random.normal(
      jax.random.key(1), (batch, _TREE_NODES.value, vocab_size))
  near = 0.7 * logits + jax.random.normal(keys[0, 0], logits.shape)
  counts = np.bincount(parents[1:], minlength=_TREE_NODES.value)
  inner = np.flatnonzero(counts)

  @jax.jit
  def drafts(logits, key):
    tokens, probs = draw(
        logits[inner], tuple(counts[inner].tolist()),
        jax.random.uniform(key, (_TREE_NODES.value - 1, 2)),
        sj.LogitsTransform())
    return sj.Draft.tree(0, jnp.array(parents, jnp.int32), tokens, probs)

  data = (jax.vmap(drafts)(near, keys[:, 1]), jax.nn.softmax(logits),
          jax.random.uniform(jax.random.key(2),
                             (batch, sj.sampling.VERDICT_UNIFORMS)))
  judge = jax.vmap(lambda draft, probs, uniforms: sj.sampling.sample_outcome(
      verifier.law(draft, probs), draft, uniforms))
  first = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype),
                       jax.eval_shape(judge, *data))
  return Timed(lambda data, _: judge(*data), data, first, steps=1)


def _training(target: Transformer, params: Any):
  """Returns a timed training step of Medusa heads, and its two timed parts.

  The target is frozen. The parts are the target's forward pass, and the forward
  and backward pass of the heads.
  """
  heads = methods.MedusaHeads(
      width=target.config.width, vocab_size=target.vocab_size, heads=4,
      output="low_rank")
  objective = objectives.MedusaObjective(model=target, heads=heads)
  optimizer = optimizers.by_name({"drafter": optimizers.adamw(
      optimizers.trapezoid(1e-3, 1000, 10, 500), weight_decay=0.0)})
  trained = {"drafter": jax.jit(heads.init)(jax.random.key(0), params)}
  tokens = jax.random.randint(
      jax.random.key(1), (4, 257), 0, target.vocab_size)

  def step(params, state):
    return loop.train_step(
        state, {"target": params}, {"tokens": tokens}, jax.random.key(2),
        objective=objective, optimizer=optimizer, accumulate=1,
        dtype=sj.models.default_dtype())[0]

  def forward(params, _):
    return target(params, tokens[:, :-1]).hidden

  def both_ways(params, carry):
    hidden, drafter, _ = carry
    loss = lambda drafter: objective.loss(
        {"target": params, "drafter": drafter}, hidden, tokens,
        weights_of({"tokens": tokens}), False)[0]
    return hidden, drafter, jax.grad(loss)(drafter)

  hidden = jax.jit(forward)(params, None)
  copied = jax.tree.map(jnp.copy, trained)
  state = loop.TrainState(step=jnp.zeros((), jnp.int32), params=copied,
                          opt_state=jax.jit(optimizer.init)(trained))
  dtype = sj.models.default_dtype()  # precision of the gradients of a step
  drafter = loop.cast(trained["drafter"], dtype)
  return (Timed(step, params, state, steps=1),
          Timed(forward, params, hidden, steps=1),
          Timed(both_ways, params,
                (jnp.copy(hidden), drafter, jax.tree.map(jnp.copy, drafter)),
                steps=1))


def _interleaved(progress: tqdm.tqdm, *timed: Timed):
  """Times all operations one after another, and repeats this --pairs times.

  The order is reversed in every second repetition, so that a drift of the
  machine's speed affects all operations equally.

  Returns:
    Seconds, a list `[pairs][operations]`.
  """
  rows = []
  for i in range(_PAIRS.value):
    way = -1 if i % 2 else 1
    rows.append([t() for t in timed[::way]][::way])
    progress.update()
  return rows


def _median_ratio(rows: list[list[float]], numerator: Callable,
                  denominator: Callable):
  """Returns the median ratio of two linear combinations of a row's times."""
  return statistics.median(numerator(row) / denominator(row) for row in rows)


def _first(row: list[float]):
  return row[0]


def _second(row: list[float]):
  return row[1]


def _pass_costs(target_pass: Callable, one: Timed, progress: tqdm.tqdm):
  """Returns the time of passes over several tokens.

  The milliseconds are also returned, because a changed ratio does not show
  which of its two times has changed.

  Args:
    target_pass: function `tokens -> Timed`.
    one: timed pass over one token.
    progress: progress bar.

  Returns:
    `{tokens: time divided by that of one token}`, and `{tokens: milliseconds}`
    for the same numbers of tokens and for one token.
  """
  costs, milliseconds = {}, {}
  for size in _SIZES:
    rows = _interleaved(progress, target_pass(size), one)
    costs[str(size)] = _median_ratio(rows, _first, _second)
    for tokens, column in ((1, 1), (size, 0)):
      milliseconds[str(tokens)] = 1e3 * statistics.median(
          row[column] for row in rows)
  return costs, milliseconds


def _loop_ratios(target: Transformer, drafter: Any, params: Any,
                 rounds: Callable, target_pass: Callable, progress: tqdm.tqdm):
  """Returns the ratios of decoding loops, and the bandwidth of a large sum.

  The ratios are bandwidth, autoregressive_loop, round_overhead and
  block_over_token. The bandwidth is in bytes per second.

  Args:
    target: target model.
    drafter: chain of a language model.
    params: parameters of target and drafter.
    rounds: function `(drafter, verifier) -> Timed` that times decoding rounds.
    target_pass: function `tokens -> Timed` that times a pass over this number
      of tokens, at the same cache length.
    progress: progress bar, advanced once per timing.
  """
  used, gamma, ratios = _USED.value, drafter.shape.gamma, {}
  sum_bytes = _SUM_MEGABYTES.value * 2**20
  summed = large_sum(sum_bytes)
  bare = _bare_autoregression(target, params["target"], _SLOTS, used)
  per_step = bytes_read(target, params["target"], used) / sum_bytes
  rows = _interleaved(progress, summed, bare)
  ratios["bandwidth"] = _median_ratio(rows, lambda r: per_step * r[0], _second)
  sum_speed = sum_bytes / statistics.median(r[0] for r in rows)
  del summed

  empty = rounds(sj.drafters.Empty(), verifier=sj.verifiers.Token())
  rows = _interleaved(progress, empty, bare)
  ratios["autoregressive_loop"] = _median_ratio(rows, _first, _second)
  del empty, bare

  alone, beside = [], []
  for _ in range(_MADE.value):
    block = rounds(drafter, verifier=sj.verifiers.Block())
    verify = target_pass(gamma + 1)
    draft = passes(drafter.network.model, params["drafter"], _SLOTS, used, 1)
    alone += _interleaved(progress, block, verify, draft)
    del verify, draft
    token = rounds(drafter, verifier=sj.verifiers.Token())
    beside += _interleaved(progress, block, token)
    del block, token
  ratios["round_overhead"] = _median_ratio(
      alone, _first, lambda r: r[1] + gamma * r[2])
  ratios["block_over_token"] = _median_ratio(beside, _first, _second)
  return ratios, sum_speed


def _tree_ratios(vocab_size: int, passes_of: Callable, progress: tqdm.tqdm):
  """Returns the time of each tree verifier divided by that of a target pass.

  The result is `{"VERIFIER BATCH": ratio}` for batch sizes 1 and 8, such as
  `"Recursive 8"`.
  """
  ratios = {}
  for batch in (1, 8):
    verify = passes_of(_SLOTS, _USED.value, _TREE_NODES.value, batch, steps=1)
    for verifier in _TREE_VERIFIERS:
      law = _tree_law(verifier, vocab_size, batch)
      rows = _interleaved(progress, law, verify)
      ratios[f"{type(verifier).__name__} {batch}"] = _median_ratio(
          rows, _first, _second)
  return ratios


def _ratios(name: str, target: Transformer, drafter_model: Transformer,
            params: Any, progress: tqdm.tqdm, placement: Placement | None):
  """Returns the ratios of the module docstring for one pair of models.

  Also returns absolute speeds: GB/s of a large sum, and milliseconds of passes.
  """
  drafter = sj.drafters.draft_model(model=drafter_model, gamma=_GAMMA.value)
  if placement:
    params = placement.put(sj.Decoder(
        target=target, drafter=drafter, verifier=sj.verifiers.Block()), params)
  passes_of = functools.partial(passes, target, params["target"])
  target_pass = functools.partial(passes_of, _SLOTS, _USED.value)
  progress.set_description(name)
  ratios, sum_speed = _loop_ratios(
      target, drafter, params,
      functools.partial(_rounds, target, params=params, capacity=_SLOTS,
                        used=_USED.value, placement=placement),
      target_pass, progress)
  one = target_pass(1)
  rows = _interleaved(progress, passes_of(_MANY_SLOTS, _USED.value, 1), one)
  ratios["allocation"] = _median_ratio(rows, _first, _second)
  ratios["pass_cost"], pass_ms = _pass_costs(target_pass, one, progress)
  del one
  ratios["tree_law"] = _tree_ratios(target.vocab_size, passes_of, progress)
  if name == "bundled":
    rows = _interleaved(progress, *_training(target, params["target"]))
    ratios["training"] = _median_ratio(rows, lambda r: r[1] + r[2], _first)
  return ratios, {"sum_gb_per_second": sum_speed / 1e9,
                  "step_milliseconds": pass_ms["1"],
                  "pass_milliseconds": pass_ms}


def main():
  mesh = meshes.join(_MESH, rows=1, trains=False)
  placement = mesh and sharding.Placement(mesh=mesh, drafter="replicate")
  load = {"random": _random_pair, "bundled": _bundled_pair}
  device = jax.devices()[0]
  print(f"device: {device.device_kind} ({device.platform}), jax "
        f"{jax.__version__}")
  results = {}
  ratios = (6 + 2 * _MADE.value + 2 * len(_TREE_VERIFIERS)) * len(
      _PAIRS_OF_MODELS.value)
  ratios += "bundled" in _PAIRS_OF_MODELS.value  # training
  progress = tqdm.tqdm(total=ratios * _PAIRS.value, file=sys.stderr,
                       dynamic_ncols=True)
  for name in _PAIRS_OF_MODELS.value:
    target, drafter, params = load[name]()
    ratios, absolute = _ratios(
        name, target, drafter, params, progress, placement)
    results[name] = {"ratios": ratios, **absolute}
  progress.close()
  for name, result in results.items():
    print(f"\n{name} pair (a step {result['step_milliseconds']:.2f} ms, a "
          f"large sum {result['sum_gb_per_second']:.1f} GB/s)")
    for key, value in result["ratios"].items():
      if isinstance(value, dict):
        for size, cost in value.items():
          times = result["pass_milliseconds"] if key == "pass_cost" else {}
          print(f"  {key + ' ' + size:22s} {cost:6.3f}"
                + (f"  ({times[size]:.2f} ms)" if times else ""))
      else:
        print(f"  {key:22s} {value:6.3f}")
  main_pair = _PAIRS_OF_MODELS.value[0]
  common.finish(_OUTPUT_DIR.value, "benchmark", {
      "device": device.device_kind, "ratios": results[main_pair]["ratios"],
      "pairs": results})


if __name__ == "__main__":
  common.run(main)
