"""Measures the speed-up of drafters that need no training.

Every prompt is continued without drafts, and then with each drafter. Each
drafter runs with a fixed draft length and with the adaptive controller, which
chooses the length of every draft (possibly 0). If the library transformers is
installed, the script also runs it on the same prompts with the same weights,
without drafts and with its prompt lookup. At temperature 0 all outputs of a
prompt must be equal. Prompts with different outputs are excluded from the
table.

  python experiments/free_drafts_study.py
  python experiments/free_drafts_study.py --target=smollm2 --chat \\
    --prompts=rename,summarise,gsm8k=test.jsonl --temperature=0,1

Drafters (--drafter, comma-separated):

  ngram           copies from the sequence itself (prompt lookup)
  suffix          most frequent continuations of the last tokens, from earlier
                  text of the sequence (and --datastore)
  sampled_suffix  as suffix, but sampled from the counts of continuations
  suffix_tree     tree of such samples
  recycling       tree of tokens that earlier target calls ranked highest
  rest            tree of frequent continuations in a --datastore
  noise           uniformly random tokens, to measure the cost of drafting
  a+b             cascade: a drafts for b, and b drafts for the target
  a|b             b drafts in rows where a has no draft
  others          name or directory of a draft model (such as small), or of
                  heads (bundled or from train_drafter.py) with their default
                  strategy

A measured time covers one generation, from the prompt's token ids to the last
token. A speed ratio compares two variants on one prompt. The table contains its
median and quartiles over prompts. The columns "all" contain the ratio of tokens
per second over all prompts together, in which long outputs weigh more. The
columns "decoding" exclude the prefill.

"gain" is the relative gain in block efficiency (tokens per target call) over
the first drafter of --drafter, on the same prompts. Each drafter generates its
own text. Confidence intervals are 95 %, over prompts. For transformers, tokens
per round are a lower bound, because --max_new_tokens cuts the last round.

--batch=B decodes B prompts together, on several devices with --mesh. With
--batch, speed is not measured, so the speed columns, the controller and
transformers are omitted. In float32, B changes the results only by rounding:

  python experiments/free_drafts_study.py --batch=16

Measure speed on an idle machine. If the script is killed, the same command
resumes it. Writes free_drafts.csv, free_drafts.json and two figures to
--output_dir.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import importlib.util
import pathlib
import sys
from typing import Any

from absl import flags
from lib import common
from lib import drafters as drafters_lib
from lib import flags as shared
from lib import models
from lib.configurations import decoders
from lib.configurations import generation
from lib.prompts import reading as prompts_lib
from lib.reports import free_drafts_report as report
from lib.rollouts import batches
from lib.rollouts import resumable
import numpy as np

import specjax as sj
from specjax import analysis
from specjax.models import Pretrained

_TARGET = shared.target()
_DRAFTER = shared.drafters(
    default="ngram,suffix,recycling",
    help_=drafters_lib.HELP)
_GAMMA = shared.gamma(8)
_CONTROLLER = flags.DEFINE_bool(
    "controller", True, "If --timing is latency, also measure every drafter "
    "with the adaptive controller, which chooses the draft length before every "
    "target call. The costs of rounds, from which it chooses, are measured "
    "once per machine")
_TAIL = flags.DEFINE_bool(
    "tail", True, "For a cascade --drafter=a+b, in which a drafts for b: "
    "append tokens that a drafts directly for the target to the tokens of b")
_DATASTORE = shared.datastore()
_TRANSFORMERS = flags.DEFINE_enum(
    "transformers", "auto", ["auto", "yes", "no"],
    "Whether to also decode with the library transformers: yes (requires "
    "--timing=latency), no, or auto (yes if it is installed and --timing is "
    "latency)")
_PROMPTS = shared.prompts("rename,summarise,code,prose")
_FIELD = shared.prompt_field()
_CHAT = shared.chat()
_NUM_PROMPTS = shared.num_prompts(6, "Maximum number of prompts per set")
_PROMPT_TOKENS = shared.prompt_tokens(384)
_NEW_TOKENS = shared.new_tokens(96)
_TEMPERATURE = shared.temperatures("0")
_SEED = shared.seed()
_BATCH = batches.flags()
_DTYPE = shared.dtype()
_OUTPUT_DIR = shared.output_dir("results/free_drafts")
shared.figure_style()

_ALONE = report.ALONE
_THEIRS, _LOOKUP = "transformers", "transformers, prompt lookup"
_LOOKUP_TOKENS = 10  # draft length in the documentation of transformers
_CONTROLLED = ", controller"
_NODES = 64  # size of the draft trees of heads


def _our_variants(target: Pretrained, drafters: Mapping[str, Any],
                  temperature: float, eos: tuple[int, ...] | None,
                  prompts: Sequence[Sequence[int]], capacity: int,
                  batch: decoders.Batch | None):
  """Returns `{name: variant}` of specjax, first the variant without drafts."""
  variant = functools.partial(
      generation.Ours, prompts=prompts) if batch is None else functools.partial(
          decoders.DecoderRows, batch=batch)
  variant = functools.partial(
      variant, new_tokens=_NEW_TOKENS.value, capacity=capacity)
  alone = dataclasses.replace(
      common.autoregressive(target.model, temperature), eos=eos)
  variants = {_ALONE: variant(alone, {"target": target.params})}
  for name, drafter in drafters.items():
    decoder = drafter.strategy.decoder(
        drafter.model, transform=alone.transform, eos=eos)
    params = drafter.params
    variants[name] = variant(decoder, params)
    if _CONTROLLER.value and batch is None:
      print(f"measuring the cost of rounds of {name}, or reading stored costs",
            file=sys.stderr)
      controller = sj.decoding.costs.measured(
          decoder, params, capacity=capacity, used=int(np.median(
              [len(row) for row in prompts])) + _NEW_TOKENS.value // 2)
      variants[name + _CONTROLLED] = variant(
          dataclasses.replace(decoder, controller=controller), params)
  return variants


def _versions(timed: bool):
  """Returns the versions of the libraries, if transformers is compared.

  Returns None if the flags exclude transformers, or it is not installed.

  Args:
    timed: whether latency is measured.
  """
  choice = _TRANSFORMERS.value
  if choice == "yes" and not timed:
    raise ValueError("--transformers=yes compares speed and requires "
                     "--timing=latency, with --batch=1 and no --mesh")
  if not timed or choice == "no" or (
      choice == "auto" and importlib.util.find_spec("torch") is None):
    return None
  return generation.prepare_torch()


def _their_variants(target: Pretrained, temperature: float,
                    eos: tuple[int, ...] | None,
                    versions: dict[str, Any] | None):
  """Returns `{name: variant}` of transformers: without and with prompt lookup.

  The result is empty if `versions` is None.
  """
  if versions is None:
    return {}
  variant = functools.partial(
      generation.Theirs, model=_torch_model(target),
      new_tokens=_NEW_TOKENS.value, temperature=temperature, eos=eos)
  return {_THEIRS: variant(_THEIRS),
          _LOOKUP: variant(_LOOKUP, lookup=_LOOKUP_TOKENS)}


@functools.cache
def _torch_model(target: Pretrained):
  return generation.load_torch(_TARGET.value, target)


def _row(prompts: str, temperature: float, name: str, rule: str,
         runs: list[dict[str, dict[str, Any]]], base: str,
         clusters: Sequence[str]):
  """Returns the table row of a drafter on a prompt set.

  Args:
    prompts: name of the prompt set.
    temperature: sampling temperature.
    name: name of the variant in `runs`.
    rule: name of its verification rule.
    runs: `{variant: run}` of every prompt.
    base: variant over which the gain is computed.
    clusters: cluster label of every prompt.
  """
  mine = [run[name] for run in runs]
  accepted, rounds = _accepted(runs, name)
  tokens = analysis.block_efficiency(accepted, rounds, clusters)
  gain = analysis.relative_gain(
      accepted, rounds, *_accepted(runs, base), clusters=clusters)
  row = {"target": models.label(_TARGET.value), "prompts": prompts,
         "temperature": temperature, "drafter": name, "verifier": rule,
         "num_prompts": len(runs), "clusters": tokens.clusters,
         **tokens.columns("tokens_per_round"), **gain.columns("gain")}
  if "reading" in mine[0]:
    _put_ratio(row, "decoding_speedup", runs, name, _ALONE, decoding=True)
  if "seconds" not in mine[0]:
    return row
  for column, other in (("speedup", _ALONE),
                        ("speedup_over_transformers", _THEIRS),
                        ("speedup_over_prompt_lookup", _LOOKUP)):
    if other in runs[0]:
      _put_ratio(row, column, runs, name, other)
  return row


def _put_ratio(row: dict[str, Any], column: str,
               runs: list[dict[str, dict[str, Any]]], *variants: str,
               **options: Any):
  """Adds the speed ratio of two variants to a row.

  The columns are the median and quartiles over prompts, and the ratio over all
  prompts together.
  """
  row[column], row[f"{column}_low"], row[f"{column}_high"] = (
      generation.speed_ratio(runs, *variants, **options))
  row[f"{column}_total"] = generation.total_ratio(runs, *variants, **options)


def _accepted(runs: list[dict[str, dict[str, Any]]], name: str):
  """Returns a variant's accepted tokens and rounds, each per prompt."""
  found = [generation.accepted(run[name]) for run in runs]
  return np.array(found), np.array([run[name]["rounds"] for run in runs])


def _agreeing(runs: dict[tuple, dict[str, Any]]):
  """Returns the units to compare, and the number of excluded units.

  At temperature 0, a unit is excluded if the outputs of its variants differ.
  """
  text = lambda run: run.get("text") or tuple(run["tokens"])
  same = {unit: variants for unit, variants in runs.items()
          if unit[1] > 0 or len(set(map(text, variants.values()))) == 1}
  return same, len(runs) - len(same)


def _rows(runs: dict[tuple, dict[str, Any]], sets: list[str],
          temperatures: list[float], rules: Mapping[str, str], base: str,
          cluster_of: Callable[[str], str]):
  """Returns one row per prompt set (and all sets), temperature and drafter.

  Args:
    runs: `{unit: {variant: run}}`.
    sets: names of the prompt sets.
    temperatures: sampling temperatures.
    rules: verification rule by variant.
    base: variant over which the gain is computed.
    cluster_of: function from a prompt's digest to its cluster label.
  """
  rows = []
  for temperature in temperatures:
    for name in (*sets, *(("all",) if len(sets) > 1 else ())):
      some = {unit: run for unit, run in runs.items()
              if unit[1] == temperature and name in ("all", unit[2])}
      clusters = [cluster_of(unit[5]) for unit in some]
      some = list(some.values())
      for variant in some[0] if some else ():
        rows.append(_row(name, temperature, variant, rules.get(variant, ""),
                         some, base, clusters))
  return rows


def _print_table(rows: list[dict[str, Any]]):
  wide = max(len(row["drafter"]) for row in rows)
  speeds = {column: title for column, title in (
      ("speedup", "speed over none"),
      ("decoding_speedup", "decoding over none"),
      ("speedup_over_prompt_lookup", "over prompt lookup"))
            if any(column in row for row in rows)}
  print(f"{'prompts':10s} {'T':>3s} {'drafter':{wide}s} {'tokens/round':>22s} "
        f"{'gain, own rollouts':>29s}"
        + "".join(f" {title:>21s} {'all':>5s}" for title in speeds.values()))
  shown = lambda row, name, form: format(
      analysis.Estimate.of_columns(row, name), form)
  for row in rows:
    print(f"{row['prompts']:10s} {row['temperature']:3g} "
          f"{row['drafter']:{wide}s} "
          f"{shown(row, 'tokens_per_round', '.2f'):>22s} "
          f"{shown(row, 'gain', '+.1%'):>29s}"
          + "".join(_ratio(row, column) for column in speeds))


def _ratio(row: dict[str, Any], column: str) -> str:
  """Returns a speed ratio as text, or blanks if the row has no such column."""
  if column not in row:
    return " " * 28
  ratio = (f"{row[column]:.2f} ({row[f'{column}_low']:.2f} to "
           f"{row[f'{column}_high']:.2f})")
  return f" {ratio:>21s} {row[f'{column}_total']:5.2f}"


def _fingerprint(target: Pretrained, drafters: Mapping[str, Any],
                 eos: tuple[int, ...] | None, versions: dict[str, Any] | None,
                 batch: decoders.Batch | None):
  """Returns a hash of all settings that affect outputs or times."""
  return resumable.fingerprint(
      [target.params,
       *(drafters_lib.own_params(drafter.params, target.params)
         for drafter in drafters.values())],
      list(drafters), eos, _GAMMA.value, _NEW_TOKENS.value, _CONTROLLER.value,
      _TAIL.value, versions, "accepted" if batch is None else "no times")


def _decoded(read: prompts_lib.Prompts, temperatures: list[float],
             fingerprint: str, make_variants: Callable[[float], dict[str, Any]],
             path: pathlib.Path, batch: decoders.Batch | None):
  """Returns `{unit: {variant: run}}` of all prompts and temperatures."""
  units = [(fingerprint, t, name, i, _SEED.value, resumable.digest(row))
           for t in temperatures
           for name, i, row in prompts_lib.alternating(read.sets)]
  return resumable.run(
      units, lambda unit: (read.sets[unit[2]][unit[3]], unit[4], unit[3]),
      make_variants, path, window=batches.window(batch),
      new_tokens=_NEW_TOKENS.value)


def main():
  temperatures = common.numbers("--temperature", _TEMPERATURE.value)
  names = list(common.given("--drafter", _DRAFTER.value, "at least one "
                            "drafter, such as ngram"))
  batch = batches.settings(_BATCH)
  versions = _versions(timed=batch is None)
  target, drafters, tokenizer = drafters_lib.load(
      _TARGET.value, names, drafters_lib.Options(
          gamma=_GAMMA.value, nodes=_NODES, tail=_TAIL.value,
          datastore=_DATASTORE.value),
      dtype=_DTYPE.value, batch=batch)
  read = prompts_lib.read(
      tokenizer, _PROMPTS.value, field=_FIELD.value, count=_NUM_PROMPTS.value,
      tokens=_PROMPT_TOKENS.value, seed=_SEED.value, chat=_CHAT.value)
  eos = models.ends(target, tokenizer) if _CHAT.value else None
  nodes = max(drafter.strategy.drafter.num_nodes
              for drafter in drafters.values())
  capacity = read.longest + _NEW_TOKENS.value + nodes
  prompts_lib.check_room(read.longest, _NEW_TOKENS.value,
                         target.model.context_length)

  output_dir = common.output_directory(_OUTPUT_DIR.value, "study")
  common.claim(output_dir, "free_drafts")
  runs = _decoded(
      read, temperatures, _fingerprint(target, drafters, eos, versions, batch),
      lambda temperature: {
          **_our_variants(target, drafters, temperature, eos, read.all,
                          capacity, batch),
          **_their_variants(target, temperature, eos, versions)},
      output_dir / "runs.jsonl", batch)
  agreeing, different = _agreeing(runs)
  rules = {name + end: common.verifier_name(drafter.strategy.verifier)
           for name, drafter in drafters.items()
           for end in ("", _CONTROLLED)}
  rows = _rows(agreeing, list(read.sets), temperatures, rules,
               next(iter(drafters)), read.cluster)
  _check_different(different, len(runs))
  _print_table(rows)
  common.write_csv(output_dir / "free_drafts.csv", rows)
  report.draw(output_dir, rows)
  common.finish(output_dir, "free_drafts", {
      "rows": rows, "source": read.source, "gamma": _GAMMA.value,
      "different": different})


def _check_different(different: int, total: int) -> None:
  """Prints the number of prompts with different outputs at temperature 0.

  Raises:
    ValueError: they are more than a quarter of all prompts.
  """
  if different:
    print(f"{different} of {total} prompts were left out: at temperature 0, "
          "the variants' outputs differ", file=sys.stderr)
  if different > total / 4:
    raise ValueError(f"{different} of {total} prompts have different outputs "
                     "at temperature 0, so the variants do not compute the "
                     "same model")


if __name__ == "__main__":
  common.run(main)
