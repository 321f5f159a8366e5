"""Measures how well a target drafts for itself with some layers skipped.

In this form of self-speculation, the drafter is the target without some of its
sublayers (attentions and MLPs). The target first continues training text and
held-out text. The script searches for sets of skipped sublayers on the training
text, and measures them on the held-out text. No draft is decoded. One pass over
a row computes the expected number of tokens that token verification accepts
from a draft at every position
(specjax.methods.self_speculation.skip_search). Compared drafters:

  exit E     the first E layers of the target (LayerSkip)
  random     the best of --tries random sets of skipped sublayers (SWIFT)
  greedy     a set to which the best sublayer is added one at a time
  local      the best random set, improved by swaps of two sublayers
  clasp      the target without some complete layers, chosen by hidden states
             (CLaSp); only if at least two sublayers are skipped

--searches selects the searches, and --skip the number of skipped sublayers. The
searches random, greedy and local maximise the values of --scores:

  accepted   expected number of accepted tokens of a draft
  agreement  fraction of tokens for which drafter and target have the same
             argmax

  python experiments/skip_study.py
  python experiments/skip_study.py --target=smollm2 --rows=8 --skip=0.1,0.2

The table contains agreement and block efficiency (tokens per round), with 95 %
confidence intervals over the held-out rows. "cost" is the fraction of the
target's weights that a pass of the drafter reads, including the LM head.
"speed" is (1 + accepted) / (1 + length * cost) at the best draft length. It is
the speed-up if reading weights takes all the time. A second list contains the
gain in block efficiency of searches by "accepted" over searches by "agreement".
Output: skipping.csv and skipping.json in --output_dir.
"""

from collections.abc import Callable
import pathlib
import sys
from typing import Any

from lib import common  # before jax, which takes long to import

# isort: split
from absl import flags
import jax
from lib import flags as shared
from lib import models
from lib import progress
from lib.configurations.decoders import Batch
from lib.rollouts import batches
import numpy as np

from specjax import analysis
from specjax.data import corpora
from specjax.data import Tokenizer
from specjax.methods.self_speculation import skip_search
from specjax.models import Pretrained
from specjax.models import Sublayers
from specjax.training import distillation

_SEARCHES = ("random", "greedy", "local", "clasp")
_SCORES = {
    "accepted": lambda found: float(found.accepted.mean()),
    "agreement": lambda found: float(found.agreement.mean())}

_TARGET = shared.target()
_DTYPE = shared.dtype()
_DATA = shared.data("Text from which prompts are cut (from training documents "
                    "for the searches, from held-out documents for the "
                    "measurement)")
_FIELD = shared.field()
_EXITS = flags.DEFINE_bool(
    "exits", True, "Also measure drafters that consist of the target's first E "
    "layers, for every E (early exit)")
_SKIP = flags.DEFINE_list(
    "skip", ["0.25", "0.45"], "Fractions of the target's sublayers "
    "(attentions and MLPs) that a drafter skips, comma-separated, above 0 and "
    "at most 1. Sublayers of the first and the last layer are never skipped "
    "and not counted. SWIFT uses 0.45")
_SEARCH = flags.DEFINE_list(
    "searches", list(_SEARCHES),
    "Search methods for the sublayers to skip, comma-separated: "
    f"{', '.join(_SEARCHES)}")
_SCORE = flags.DEFINE_list(
    "scores", list(_SCORES), "Objectives that the searches random, greedy and "
    f"local maximise, comma-separated: {', '.join(_SCORES)}. accepted is the "
    "expected number of accepted tokens of a draft, agreement the fraction of "
    "tokens with the target's argmax")
_TRIES = flags.DEFINE_integer(
    "tries", 64, "Number of sets of sublayers that each of the searches random "
    "and local evaluates", 1)
_ROWS = flags.DEFINE_integer(
    "rows", 16, "Number of sequences for the searches. The measurement uses "
    "equally many held-out sequences", 2)
_PROMPT_TOKENS = shared.prompt_tokens(
    32, "Length in tokens of the prompt from --data at the start of each "
    "sequence")
_CONTINUATION = flags.DEFINE_integer(
    "continuation", 96, "Number of tokens that the target generates after each "
    "prompt; at least --gamma", 1)
_GAMMA = shared.gamma(8, "Maximum draft length in tokens")
_TEMPERATURE = flags.DEFINE_enum(
    "temperature", "1", ["0", "1"], "Sampling temperature of target and "
    "drafter; 0 is greedy decoding")
_SEED = shared.seed("Random seed for prompts, sampling and the searches")
_BATCH = batches.untimed_flags()
_OUTPUT_DIR = shared.output_dir("results/skipping")

_ROWS_PER_FILE = 32  # maximum, unless --batch is larger


def _texts(target: Pretrained, tokenizer: Tokenizer, output_dir: pathlib.Path,
           batch: Batch):
  """Returns the target's continuations of training text and held-out text.

  Both are token ids `[R, S + 1]`, including the prompts.
  """
  decoder = common.autoregressive(target.model, float(_TEMPERATURE.value))
  found = []
  for i, side in enumerate(corpora.split(
      corpora.read_documents(_DATA.value, _FIELD.value))):
    prompts = distillation.cut_prompts(
        tokenizer.encode_stream([d.text for d in side]), _ROWS.value,
        _PROMPT_TOKENS.value, _SEED.value)
    found.append(distillation.sample_rows(
        decoder, {"target": target.params}, prompts,
        length=_PROMPT_TOKENS.value + _CONTINUATION.value,
        directory=output_dir / ("rows" if i == 0 else "held_out"),
        seed=_SEED.value + i, placement=batch.placement,
        rows_per_file=max(1, _ROWS_PER_FILE // batch.size) * batch.size))
  return found


def _scorer(target: Pretrained, tokens: np.ndarray, batch: Batch):
  """Returns `skip_search.scorer` of the target, on the mesh if there is one."""
  rows = batch.placement and jax.sharding.NamedSharding(
      batch.placement.mesh, jax.sharding.PartitionSpec("data"))
  return skip_search.scorer(
      target.model, target.params, tokens, _GAMMA.value,
      temperature=float(_TEMPERATURE.value), first=_PROMPT_TOKENS.value,
      batch=batch.size, rows=rows)


def _counts(layers: int):
  """Returns the numbers of skipped sublayers according to --skip."""
  free, found = 2 * (layers - 2), []
  for share in common.numbers("--skip", _SKIP.value) if _SKIP.value else ():
    if not 0 < share <= 1:
      raise ValueError(f"--skip contains {share:g}; set fractions above 0 and "
                       "at most 1")
    if free:
      found.append(max(1, round(share * free)))
  return list(dict.fromkeys(found))


def _searched(search: str, score: Callable, layers: int, count: int):
  """Returns the set of `count` skipped sublayers that a search finds."""
  if search == "greedy":
    return skip_search.greedy_search(score, layers, count)[0]
  tries = _TRIES.value if search == "random" else max(1, _TRIES.value // 2)
  found, _ = skip_search.random_search(
      score, layers, count, tries=tries, seed=_SEED.value)
  if search == "local":
    found, _ = skip_search.local_search(
        score, layers, found, tries=_TRIES.value - tries, seed=_SEED.value)
  return found


def _parts(target: Pretrained, rows: np.ndarray, batch: Batch):
  """Yields the subsets to compare: `(name, search, score, count, Sublayers)`.
  """
  layers = target.model.config.layers
  if _EXITS.value:
    for exit in range(1, layers):
      yield f"exit {exit}", "", "", 0, Sublayers.between(0, exit)
  scored = _scorer(target, rows, batch)
  for count in _counts(layers):
    for search in dict.fromkeys(_SEARCH.value):
      if search == "clasp":
        whole = count // 2
        if not whole:
          continue
        found = skip_search.clasp(
            target.model, target.params, rows[:, :-1], whole)
        yield (f"clasp, {len(found)} parts", "clasp", "", len(found),
               skip_search.without(layers, found))
        continue
      for name in dict.fromkeys(_SCORE.value):
        print(f"{search} search for {count} parts by {name}", file=sys.stderr)
        found = _searched(search, lambda one, name=name: _SCORES[name](
            scored(one)), layers, count)
        yield (f"{search}, {count} parts, {name}", search, name, count,
               skip_search.without(layers, found))


def _cost(params: Any, sublayers: Sublayers):
  """Returns the fraction of the target's weights that a drafter's pass reads.

  Args:
    params: parameters of the target.
    sublayers: sublayers of the drafter.
  """
  size = {name: common.num_parameters(x) for name, x in params.items()}
  head = size.get("head", size["embedding"])
  of = lambda kind, i: sum(
      n for name, n in size.items()
      if name.startswith(kind) and name.endswith(f"_{i}"))
  layers = 1 + max(int(name.rsplit("_", 1)[1]) for name in size
                   if name.startswith("mlp_"))
  whole = head + sum(of("attention", i) + of("mlp", i) for i in range(layers))
  return (head + sum(of("attention", i) for i in sublayers.attention)
          + sum(of("mlp", i) for i in sublayers.mlp)) / whole


def _row(part: tuple, found: Any, params: Any):
  name, search, score, count, sublayers = part
  cost = _cost(params, sublayers)
  ones = np.ones(len(found.accepted))
  tokens = analysis.block_efficiency(
      found.accepted, ones, longest=_GAMMA.value)
  agreement = analysis.ratio_estimate(found.agreement, ones, least=0, most=1)
  lengths = np.arange(1, _GAMMA.value + 1)
  speeds = (1 + np.cumsum(found.survival.mean(0))) / (1 + lengths * cost)
  best = int(speeds.argmax())
  return {
      "target": models.label(_TARGET.value), "part": name, "search": search,
      "score": score, "left_out": count, "cost": cost,
      "clusters": tokens.clusters, **agreement.columns("agreement"),
      **tokens.columns("tokens_per_round"),
      "speed": float(speeds[best]), "length": best + 1,
      "attention": " ".join(map(str, sublayers.attention)),
      "mlp": " ".join(map(str, sublayers.mlp))}


def _gains(rows: list[dict[str, Any]], found: list):
  """Returns the gains in block efficiency of one objective over the other.

  The gain is that of "accepted" over "agreement", for every search and number
  of skipped sublayers.

  Args:
    rows: rows of the table.
    found: measurement of every row.
  """
  by = {(row["search"], row["left_out"], row["score"]): one
        for row, one in zip(rows, found)}
  gains = []
  for (search, count, score), one in by.items():
    other = by.get((search, count, "agreement"))
    if score != "accepted" or other is None:
      continue
    ones = np.ones(len(one.accepted))
    gain = analysis.relative_gain(one.accepted, ones, other.accepted, ones,
                                  longest=_GAMMA.value)
    gains.append({"search": search, "left_out": count,
                  "clusters": gain.clusters, **gain.columns("gain")})
  return gains


def _print_table(rows: list[dict[str, Any]], gains: list[dict[str, Any]]):
  wide = max(len(row["part"]) for row in rows)
  print(f"{'part':{wide}s} {'cost':>5s} {'agreement':>26s} "
        f"{'tokens/round':>26s} {'speed':>6s} {'length':>6s}")
  for row in rows:
    shown = lambda name, row=row: format(
        analysis.Estimate.of_columns(row, name), ".3f")
    print(f"{row['part']:{wide}s} {row['cost']:5.2f} {shown('agreement'):>26s} "
          f"{shown('tokens_per_round'):>26s} {row['speed']:6.2f} "
          f"{row['length']:6d}")
  for gain in gains:
    print(f"{gain['search']}, {gain['left_out']} parts: block efficiency of "
          "the search by accepted over the search by agreement "
          f"{analysis.Estimate.of_columns(gain, 'gain'):+.2%}")


def main():
  for flag, names in ((_SEARCH, _SEARCHES), (_SCORE, tuple(_SCORES))):
    for name in common.given(
        f"--{flag.name}", flag.value, f"some of {', '.join(names)}"):
      if name not in names:
        raise ValueError(f"--{flag.name} contains {name!r}; choose among "
                         f"{', '.join(names)}")
  if _CONTINUATION.value < _GAMMA.value:
    raise ValueError(f"--continuation is {_CONTINUATION.value}, less than "
                     f"--gamma={_GAMMA.value}; set at least --gamma")
  batch = batches.settings(_BATCH, splits_prompts=False)
  target, tokenizer = models.load_target(_TARGET.value, _DTYPE.value)
  target = batches.with_placed_params(batch, target)
  _counts(target.model.config.layers)
  output_dir = common.output_directory(_OUTPUT_DIR.value, "study")
  common.claim(output_dir, "skipping")
  progress.say("reading the text")
  rows, held_out = _texts(target, tokenizer, output_dir, batch)
  progress.say("compiling the target")
  measure = _scorer(target, held_out, batch)
  parts = list(_parts(target, rows, batch))
  if not parts:
    raise ValueError("--exits is off, and no layer of --target can be skipped, "
                     "because the first and the last layer are never skipped; "
                     "remove --noexits, or use a target with at least 3 layers")
  progress.say(f"measuring {len(parts)} configurations")
  found = [measure(part[-1]) for part in parts]
  table = [_row(part, one, target.params) for part, one in zip(parts, found)]
  gains = _gains(table, found)
  _print_table(table, gains)
  common.write_csv(output_dir / "skipping.csv", table)
  common.finish(output_dir, "skipping", {
      "rows": table, "gains": gains, "gamma": _GAMMA.value,
      "temperature": float(_TEMPERATURE.value)})


if __name__ == "__main__":
  common.run(main)
