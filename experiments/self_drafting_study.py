"""Compares self-drafting heads with small draft models on the same target.

Every drafter decodes the same prompts, with each verification rule that applies
to its drafts. The script prints block efficiency (tokens per target call), the
number of parameters that the drafter adds, and the speed-up over autoregressive
decoding. Configurations:

  small, tiny                   chain drafted by a bundled draft model
  pass, two passes              PaSS as published: one pass drafts with
                                look-ahead tokens, another pass verifies
  pass, folded                  PaSS with drafting and verification in one pass
  blockwise                     chain of the heads' most likely tokens
  medusa, top-k tree            tree of the most likely tokens, whose shape
                                depends on the heads' measured accuracies
  medusa, sampled chain         chain, each token sampled from its head
  medusa, sampled tree          tree of the same shape, with children sampled
                                without replacement
  medusa, i.i.d. tree           tree of the same shape, with children sampled
                                independently
  eagle3, sampled chain         chain, each token sampled given the previous one
  eagle3, dynamic tree          EAGLE-2's tree of the most likely tokens
  eagle3, sampled dynamic tree  tree of sampled tokens; the nodes with the
                                largest q get children
  parallel, sampled chain       chain, each token sampled given the previous one
  parallel, sampled tree        tree of such tokens, without replacement
  parallel, best-first tree     tree of the most likely paths (DDTree)

  python experiments/self_drafting_study.py
  python experiments/self_drafting_study.py \\
    --heads=pass,medusa,/tmp/blockwise,/tmp/medusa2

If a directory in --heads contains its own target (Medusa-2), the heads are
measured on this target. Their speed-up is relative to its autoregressive
decoding.

--batch=B decodes B prompts together, on several devices with --mesh. In
float32, B changes the results only by rounding. Speed is not measured then,
so autoregressive decoding and the speed columns are omitted:

  python experiments/self_drafting_study.py --batch=16

The expected number of accepted tokens is computed exactly for every draft, so
random accept and reject decisions add no noise to block efficiency. Rules are
also compared on the same drafts. The predicted speed-up is block efficiency
divided by the time of a round, in units of an autoregressive step. Random
accept and reject decisions add noise only to the measured speed-up.

Results of each prompt are appended to runs.jsonl in --output_dir. If the script
is killed, the same command resumes it. Output: self_drafting.csv,
self_drafting.json (the last line of stdout names it), and the plots
self_drafting_tokens.png, self_drafting_speed.png, self_drafting_positions.png
and self_drafting_training.png.
"""

from collections.abc import Sequence
import dataclasses
import functools
import pathlib
import statistics
from typing import Any

from lib import common  # before jax, which takes long to import

# isort: split
from absl import flags
import jax
from lib import drafters as drafters_lib
from lib import flags as shared
from lib import models
from lib import progress
from lib.configurations import decoders
from lib.prompts import reading as prompts_lib
from lib.reports import self_drafting_report as report
from lib.reports import text_rounds
from lib.rollouts import batches
from lib.rollouts import resumable
from lib.rollouts import timing
import numpy as np

import specjax as sj
from specjax import analysis
from specjax import methods
from specjax import strategies
from specjax.models import Pretrained
from specjax.strategies import Strategy
from specjax.training import evaluation

_TARGET = shared.target()
_DTYPE = shared.dtype()
_DRAFTERS = shared.drafters(
    "small,tiny", "Draft models to compare with the heads, comma-separated: ")
_HEADS = flags.DEFINE_list(
    "heads", list(sj.zoo.HEADS),
    "Self-drafting heads to compare, comma-separated: bundled heads "
    f"({', '.join(sj.zoo.HEADS)}) or output directories of train_drafter.py")
_UNTRAINED = flags.DEFINE_bool(
    "untrained", True, "Also measure all heads with random initial weights, "
    "for comparison")
_TEMPERATURE = shared.temperatures("0,1")
_GAMMA = shared.gamma(4, "Draft length in tokens of the draft models in "
                      "--drafter. Heads have their own draft lengths")
_NODES = shared.nodes(64)
_PROMPTS = shared.prompts()
_FIELD = shared.prompt_field()
_CHAT = shared.chat()
_NUM_PROMPTS = shared.num_prompts(16)
_PROMPT_TOKENS = shared.prompt_tokens()
_NEW_TOKENS = shared.new_tokens(96)
_SEED = shared.seed()
_BATCH = batches.flags()
_OUTPUT_DIR = shared.output_dir("results/self_drafting")
shared.figure_style()

_CALIBRATION_PROMPTS = 16  # extra prompts on which head accuracy is measured
_RANKS = 10  # maximum number of candidates per head in a tree
_BASELINE = "autoregressive"


@dataclasses.dataclass(frozen=True, eq=False)
class _Source:
  """A drafter and its target.

  Attributes:
    name: name in the tables and figures.
    target: a `Pretrained`, or another pair of `model` and `params`.
    drafts: `{name: strategies with the same drafts}`. Their rules are compared
      on the rollouts of the first strategy.
    params: parameters of the decoder.
    added: number of parameters that the drafter adds to the target.
    training: content of training.json from train_drafter.py, or {}.
    accuracy: `[K, ranks]` accuracy by head and rank. None for draft models.
    first_rule_only: whether only the first strategy of each draft is measured.
  """

  name: str
  target: Any
  drafts: dict[str, tuple[Strategy, ...]]
  params: Any
  added: int
  training: dict[str, Any] = dataclasses.field(default_factory=dict)
  accuracy: Any = None
  first_rule_only: bool = False


def _language_model(name: str, drafter: drafters_lib.Loaded):
  """Returns the `_Source` of a draft model."""
  drafts = tuple(drafter.strategy._replace(verifier=rule) for rule in (
      sj.verifiers.Block(), sj.verifiers.Token(), sj.verifiers.GreedyBlock()))
  return _Source(name, drafter.target, {name: drafts}, drafter.params,
                 common.num_parameters(drafter.draft_model.params))


def _placed(target: Any, strategy: Strategy, params: Any,
            batch: decoders.Batch | None):
  """Returns the parameters of a decoder, on the mesh if there is one."""
  return batches.placed(batch, strategy.decoder(target.model), params)


def _self_drafter(label: str, target: Pretrained, heads: Any, params: Any,
                  rows: tuple[np.ndarray, int], batch: decoders.Batch | None,
                  **kwargs: Any):
  """Returns the `_Source` of heads or look-ahead embeddings.

  Args:
    label: name in the tables.
    target: target model.
    heads: configuration of the heads.
    params: parameters of the heads.
    rows: result of `_written_rows`, to measure the heads' accuracy.
    batch: settings of the rollouts, or None if latency is measured.
    **kwargs: other attributes of the `_Source`.
  """
  method = methods.of(heads)
  accuracy = _accuracy(method, target, heads, params, *rows)
  compared = method.compared(
      heads, lambda: sj.trees.medusa_tree(accuracy, _NODES.value))
  model, both = heads.attach(target.model, target.params, params)
  if model is not target.model:
    target = sj.zoo.Member(model, both["target"])
  both = _placed(target, next(iter(compared.values()))[0], both, batch)
  return _Source(
      label, target,
      {", ".join(filter(None, (label, name))): drafts
       for name, drafts in compared.items()},
      both, common.num_parameters(params), accuracy=accuracy, **kwargs)


def _accuracy(method: Any, target: Pretrained, heads: Any, params: Any,
              rows: np.ndarray, first: int):
  """Returns the accuracy of K heads, `[K, ranks]`.

  Entry (k, r) is the frequency with which the candidate of rank r of head k is
  the target's token. Positions before `first` are excluded.
  """
  measured = evaluation.head_accuracy(
      method.measure(target.model, heads), rows, top=_RANKS, first=first)(
          {"target": target.params, "drafter": params})
  return np.diff(evaluation.by_head(measured, "top")[1:], axis=1, prepend=0)


def _written_rows(target: Any, prompts: Sequence[Sequence[int]]):
  """Returns the target's continuations of prompts at temperature 0.

  All rows have the same prompt length n. Shorter prompts are excluded, and
  longer prompts lose their first tokens. n maximises the total number of
  remaining prompt tokens.

  Returns:
    `([R, S + 1] tokens, position that predicts the first generated token)`.
  """
  decoder = common.autoregressive(target.model, temperature=0)
  length = max(map(len, prompts), key=lambda n: n * sum(
      len(row) >= n for row in prompts))
  full = [row[-length:] for row in prompts if len(row) >= length]
  generation = decoder.generate({"target": target.params}, full,
                                jax.random.key(0),
                                max_new_tokens=_NEW_TOKENS.value)
  return np.stack(generation.tokens), length - 1


def _sources(loaded: dict[str, drafters_lib.Loaded], sources: list[_Source],
             calibration: list[list[int]], batch: decoders.Batch | None):
  """Returns the sources of draft models, then heads, then untrained heads.

  Args:
    loaded: heads of --heads by label.
    sources: sources of the draft models.
    calibration: prompts for measuring the accuracy of heads.
    batch: settings of the rollouts, or None if latency is measured.
  """
  sources = list(sources)
  written = functools.cache(lambda own: _written_rows(own, calibration))
  untrained = []
  for label, drafter in loaded.items():
    own, (heads, params, training) = drafter.target, drafter.heads
    sources.append(_self_drafter(
        label, own, heads, params, written(own), batch, training=training))
    if _UNTRAINED.value:
      fresh = heads.init(jax.random.key(0), own.params)
      untrained.append(_self_drafter(
          f"untrained {label}", own, heads, fresh, written(own), batch,
          first_rule_only=True))
  return sources + untrained


def _load(batch: decoders.Batch | None):
  """Returns the target, the drafters of --drafter and --heads, the tokenizer.
  """
  target, loaded, tokenizer = drafters_lib.load(
      _TARGET.value, [*_DRAFTERS.value, *_HEADS.value],
      drafters_lib.Options(gamma=_GAMMA.value),
      dtype=_DTYPE.value, batch=batch, own_target=True)
  for name in _HEADS.value:
    drafter = loaded[models.label(name)]
    if drafter.heads is None:
      raise ValueError(f"--heads contains {name}, which has no heads; choose "
                       f"among {', '.join(models.HEADS)}, or give an "
                       "--output_dir of train_drafter.py")
    if not drafter.tokenizer.same_tokens(tokenizer):
      raise ValueError(f"--heads contains {name}, whose target has another "
                       "tokenizer than --target, and all drafters must read "
                       "the same prompts; leave it out")
  heads = {label: x for label, x in loaded.items() if x.heads is not None}
  members = {label: x for label, x in loaded.items() if label not in heads}
  return target, members, heads, tokenizer


def _capacity(sources: list[_Source], longest: int):
  """Returns the number of cache slots per row that suffices for all drafts."""
  widest = max(x.num_nodes for x in _drafters(sources))
  return longest + _NEW_TOKENS.value + widest


def _drafters(sources: list[_Source]) -> list[Any]:
  """Returns the drafters of all sources."""
  return [drafts[0].drafter for source in sources
          for drafts in source.drafts.values()]


def _pass_seconds(sources: list[_Source], capacity: int, longest: int):
  """Returns `{draft: seconds}` of a target pass over the nodes of each draft.

  Passes are timed before the rollouts, because a process that has run many
  programs is slower.
  """
  used = longest + _NEW_TOKENS.value // 2

  @functools.cache
  def seconds(member, nodes):
    return timing.median(timing.passes(
        member.model, member.params, capacity, used, nodes))

  return {name: seconds(source.target, drafts[0].drafter.num_nodes)
          for source in sources for name, drafts in source.drafts.items()}


def _variants(source: _Source, temperature: float, capacity: int,
              eos: tuple[int, ...] | None, batch: decoders.Batch | None):
  """Returns `{"draft | rule": DecoderRows}` of a source.

  If latency is measured, the first entry is the autoregressive baseline. At
  temperature 0 all lossless rules are equal, so only the first rule is decoded.
  Greedy block verification is not evaluated on another rule's drafts, because
  its gain in one round reduces acceptance in the next one.
  """
  def variant(strategy, observers=(), params=source.params):
    decoder = strategy.decoder(
        source.target.model, observers=observers, eos=eos,
        transform=sj.LogitsTransform(temperature=temperature))
    return decoders.DecoderRows(
        decoder, params, _NEW_TOKENS.value, capacity, batch=batch)

  # The baseline has only the target's parameters. So all sources with the same
  # target share its compiled program.
  variants = {} if batch else {_BASELINE: variant(
      strategies.autoregressive(),
      params={"target": source.params["target"]})}
  for name, drafts in source.drafts.items():
    if temperature == 0 or source.first_rule_only:
      drafts = drafts[:1]
    paired = tuple(s.verifier for s in drafts[1:] if s.verifier.lossless
                   and s.verifier != sj.verifiers.GreedyBlock())
    for number, strategy in enumerate(drafts):
      key = f"{name} | {common.verifier_name(strategy.verifier)}"
      variants[key] = variant(strategy, () if number else paired)
  return variants


def _row(runs: list[dict[str, dict[str, Any]]], name: str, source: _Source,
         decoder: sj.Decoder, pass_seconds: dict[str, float],
         clusters: Sequence[str]):
  """Returns the table row of the draft and rule `name`."""
  drafter, verifier = name.split(" | ")
  own = [r[name] for r in runs]
  rounds = [r["rounds"] for r in own]
  tokens = analysis.block_efficiency(
      [r["expected"][0] for r in own], rounds, clusters,
      longest=decoder.drafter.num_nodes - 1)
  survival = np.sum([r["survival"][0] for r in own], axis=0) / sum(rounds)
  reached = np.flatnonzero(survival > 0)[-1]
  speeds = {} if _BASELINE not in runs[0] else _speeds(
      own, [r[_BASELINE] for r in runs], tokens.value, pass_seconds[drafter],
      clusters)
  return {
      "drafter": drafter, "verifier": verifier,
      "temperature": decoder.transform.temperature,
      "lossless": decoder.verifier.lossless,
      "clusters": tokens.clusters, **tokens.columns("block_efficiency"),
      "added_parameters": source.added, **speeds,
      "nodes": decoder.drafter.num_nodes,
      "target_calls": decoder.drafter.target_calls,
      "survival": survival[1:reached + 1].tolist(),
      **{f"training_{key}": source.training.get(key)
         for key in ("method", "tokens", "minutes")}}


def _speeds(runs: list[dict[str, Any]], baseline: list[dict[str, Any]],
            tokens: float, pass_seconds: float, clusters: Sequence[str]):
  """Returns the speed columns of a row.

  Args:
    runs: rollouts of the draft, per prompt.
    baseline: autoregressive rollouts of the same prompts.
    tokens: block efficiency of the draft.
    pass_seconds: seconds of the target's pass over the nodes of the draft.
    clusters: cluster label of every prompt.
  """
  pace = lambda runs: np.array([r["seconds"] / r["tokens"] for r in runs])
  base = pace(baseline)
  step = statistics.median(base)
  spent = statistics.median(r["seconds"] / r["rounds"] for r in runs)
  speedup = text_rounds.median(base / pace(runs), clusters)
  return {**speedup.columns("speedup"),
          "predicted_speedup": tokens * step / spent,
          "round_over_step": spent / step,
          "draft_over_step": (spent - pass_seconds) / step}


def _paired(runs: list[dict[str, dict[str, Any]]], name: str,
            decoder: sj.Decoder, clusters: Sequence[str]):
  """Returns rows with the gain of one rule over other rules on the same drafts.

  Args:
    runs: `{variant: run}` of every prompt.
    name: "draft | rule" of the variant that generated the text.
    decoder: decoder of the variant. Its observers are the other rules.
    clusters: cluster label of every prompt.
  """
  drafter, verifier = name.split(" | ")
  rows, own = [], [r[name] for r in runs]
  rounds = [r["rounds"] for r in own]
  for law, other in enumerate(decoder.observers, 1):
    gain = analysis.relative_gain(
        [r["expected"][0] for r in own], rounds,
        [r["expected"][law] for r in own], rounds, clusters=clusters,
        longest=decoder.drafter.num_nodes - 1)
    rows.append({"drafter": drafter,
                 "temperature": decoder.transform.temperature,
                 "verifier": verifier, "over": common.verifier_name(other),
                 "clusters": gain.clusters, **gain.columns("gain")})
  return rows


def _groups(sources: list[_Source], temperatures: list[float], capacity: int,
            eos: tuple[int, ...] | None, batch: decoders.Batch | None):
  """Returns `{(fingerprint, temperature): (source, variants)}`.

  `variants` is the result of `_variants` for the source and temperature.
  """
  prints = [resumable.fingerprint(
      source.params, source.target.model, source.drafts, capacity,
      _NEW_TOKENS.value, _SEED.value, eos, *(["no times"] if batch else ()))
            for source in sources]
  return {(one, t): (source, _variants(source, t, capacity, eos, batch))
          for t in temperatures for one, source in zip(prints, sources)}


def _decoded(groups: dict[tuple, Any], prompts: list[list[int]],
             path: pathlib.Path, batch: decoders.Batch | None):
  """Decodes all prompts and returns `{group: [{variant: run} per prompt]}`."""
  units = {group: [(*group, i, resumable.digest(row))
                   for i, row in enumerate(prompts)] for group in groups}
  runs = resumable.run(
      [unit for some in units.values() for unit in some],
      lambda unit: (prompts[unit[2]], _SEED.value, unit[2]),
      lambda group: groups[group][1], path, group_of=lambda unit: unit[:2],
      window=batches.window(batch), new_tokens=_NEW_TOKENS.value)
  return {group: [runs[unit] for unit in some]
          for group, some in units.items()}


def _temperatures():
  """Returns the values of --temperature.

  Raises:
    ValueError: a value is not a valid temperature.
  """
  temperatures = common.numbers("--temperature", _TEMPERATURE.value)
  for temperature in temperatures:
    sj.LogitsTransform(temperature=temperature)
  return temperatures


def main():
  temperatures = _temperatures()
  common.given("--drafter or --heads", _DRAFTERS.value + _HEADS.value,
               "at least one drafter or heads")
  batch = batches.settings(_BATCH)
  target, members, heads, tokenizer = _load(batch)
  read = prompts_lib.read(
      tokenizer, _PROMPTS.value, field=_FIELD.value, count=_NUM_PROMPTS.value,
      tokens=_PROMPT_TOKENS.value, seed=_SEED.value, chat=_CHAT.value,
      extra=_CALIBRATION_PROMPTS)
  eos = models.ends(target, tokenizer) if _CHAT.value else None
  sources = [_language_model(name, drafter)
             for name, drafter in members.items()]
  prompts_lib.check_room(read.longest, _NEW_TOKENS.value, *min(
      [(target.model.context_length, "target"),
       *((x.context_length, "drafter") for x in _drafters(sources))],
      key=lambda pair: pair[0]))
  progress.say("measuring the heads' accuracies")
  sources = _sources(heads, sources, read.extra, batch)
  capacity = _capacity(sources, read.longest)

  output_dir = common.output_directory(_OUTPUT_DIR.value, "study")
  common.claim(output_dir, "self_drafting")
  groups = _groups(sources, temperatures, capacity, eos, batch)
  pass_seconds = {}
  if batch is None:
    progress.say("timing passes")
    pass_seconds = _pass_seconds(sources, capacity, read.longest)
  decoded = _decoded(groups, read.all, output_dir / "runs.jsonl", batch)
  _report(groups, decoded, pass_seconds, read, output_dir)


def _report(groups: dict[tuple, Any], decoded: dict[tuple, list],
            pass_seconds: dict[str, float], read: prompts_lib.Prompts,
            output_dir: pathlib.Path) -> None:
  """Prints and writes all tables and figures.

  Args:
    groups: result of `_groups`.
    decoded: result of `_decoded`.
    pass_seconds: result of `_pass_seconds`, {} if latency is not measured.
    read: the prompts.
    output_dir: directory of the files.
  """
  rows, paired = [], []
  for group, (source, variants) in groups.items():
    for name in filter(_BASELINE.__ne__, variants):
      decoder = variants[name].decoder
      rows.append(_row(decoded[group], name, source, decoder, pass_seconds,
                       read.clusters))
      paired += _paired(decoded[group], name, decoder, read.clusters)
  sources = list(dict.fromkeys(source for source, _ in groups.values()))
  report.print_tables(rows, paired, sources)
  common.write_csv(output_dir / "self_drafting.csv", rows)
  curves = {s.name: s.training["curve"] for s in sources if s.training}
  report.draw(output_dir, rows, curves)
  print(f"wrote self_drafting.csv and figures to {output_dir}")
  common.finish(output_dir, "self_drafting", {
      "rows": rows, "paired": paired, "source": read.source,
      "curves": curves,
      "accuracy": {s.name: s.accuracy.tolist() for s in sources
                   if s.accuracy is not None}})


if __name__ == "__main__":
  common.run(main)
