"""Compares the speed of specjax and transformers with the same weights.

The variants continue every prompt one after another, on one machine in one run:

  specjax                   autoregressive decoding by specjax
  specjax, DRAFTER          speculative decoding by specjax, with the draft
                            model --drafter and block verification
  transformers              `generate` of transformers
  transformers, assisted    assisted generation with the same drafter and
                            default settings: at most 20 draft tokens, fewer
                            if the drafter's confidence is low
  transformers, assisted G  assisted generation with G = --gamma draft tokens
                            in every round

All variants run on the CPU, in float32, one prompt at a time, with the same
number of threads. A measured time covers one generation, from the prompt's
token ids to the last token, including the prefill. Compilation and a warm-up
call are not timed. Both libraries get token ids from specjax's tokenizer.
Without --chat, end-of-text tokens are ignored and every output has
--max_new_tokens tokens. Run the script on an idle machine, because other
processes slow torch down more than specjax.

  python experiments/against_transformers.py --target=smollm2 --chat
  python experiments/against_transformers.py --target=big --drafter=small_one \\
    --prompts=copy,gsm8k=test.jsonl

At temperature 0 all outputs of a prompt must be equal. If they differ, the
script prints the first two different tokens and the gap between their logits,
and leaves the prompt out of the table. Small differences are expected, because
the libraries round differently: two tokens with almost equal logits can change
places. The script fails if the outputs differ on more than the fraction
--most_different of the prompts.

A speed ratio compares the tokens per second of two variants on one prompt. The
table contains the median and quartiles of this ratio over prompts. Times are
appended to runs.jsonl in --output_dir. If the script is killed, the same
command resumes it. Results: against_transformers.csv and .json in
--output_dir; the last line of stdout names them.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import itertools
import pathlib
import sys
from typing import Any

from absl import flags
from lib import common
from lib import drafters as drafters_lib
from lib import flags as shared
from lib import models
from lib import progress
from lib.configurations import generation
from lib.prompts import reading as prompts_lib
from lib.rollouts import resumable
import numpy as np

from specjax import analysis
from specjax.data import Tokenizer
from specjax.models import Pretrained

_TARGET = shared.target()
_DRAFTER = shared.drafter(
    "Draft model for speculative decoding in both libraries: none (compare "
    "decoding without drafts only), small or tiny (bundled, for the bundled "
    f"target), smol (bundled, for smollm2), {shared.PUBLISHED}",
    default="none")
_GAMMA = shared.gamma(4)
_PROMPTS = shared.prompts("copy")
_FIELD = shared.prompt_field()
_CHAT = shared.chat()
_NUM_PROMPTS = shared.num_prompts(12, "Maximum number of prompts per set")
_PROMPT_TOKENS = shared.prompt_tokens(512)
_NEW_TOKENS = shared.new_tokens(128)
_TEMPERATURE = shared.temperature(0.0)
_MOST_DIFFERENT = flags.DEFINE_float(
    "most_different", 0.1, "Largest allowed fraction of prompts, in [0, 1], on "
    "which the outputs of the libraries differ at temperature 0 (because they "
    "round differently). If the fraction is larger, the script fails", 0.0, 1.0)
_SEED = shared.seed()
_OUTPUT_DIR = shared.output_dir("results/against_transformers")

_OURS, _THEIRS = "specjax", "transformers"


def _our_variants(target: Pretrained, drafters: Mapping[str, Any],
              eos: tuple[int, ...] | None, prompts: Sequence[Sequence[int]],
              capacity: int):
  """Returns `{name: variant}`: specjax without drafts and with each drafter."""
  alone = dataclasses.replace(
      common.autoregressive(target.model, _TEMPERATURE.value), eos=eos)
  variant = functools.partial(
      generation.Ours, new_tokens=_NEW_TOKENS.value, capacity=capacity,
      prompts=prompts)
  variants = {_OURS: variant(alone, {"target": target.params})}
  for name, drafter in drafters.items():
    variants[f"{_OURS}, {name}"] = variant(
        drafter.strategy.decoder(
            drafter.model, transform=alone.transform, eos=alone.eos),
        drafter.params)
  return variants


def _assistant(target: Pretrained, name: str, member: Pretrained):
  """Returns the drafter as a model of transformers.

  If transformers cannot use this drafter, prints a message and returns None.
  """
  try:
    models.check_tokens(target, member, name)
    return generation.load_torch(name, member)
  except ValueError as e:
    print(f"transformers does not draft: {e}", file=sys.stderr)
    return None


def _their_variants(model: Any, assistant: Any, eos: tuple[int, ...] | None):
  """Returns `{name: variant}` of transformers.

  With an assistant, there are three variants: decoding without the assistant,
  with the default draft-length schedule, and with a constant draft length.
  """
  variant = functools.partial(
      generation.Theirs, model=model, new_tokens=_NEW_TOKENS.value,
      temperature=_TEMPERATURE.value, eos=eos)
  variants = {_THEIRS: variant(_THEIRS)}
  if assistant is not None:
    constant = dict(num_assistant_tokens=_GAMMA.value,
                    num_assistant_tokens_schedule="constant",
                    assistant_confidence_threshold=0.0)
    for how, drafting in (("", {}), (f" {_GAMMA.value}", constant)):
      name = f"{_THEIRS}, assisted{how}"
      variants[name] = variant(name, assistant=assistant, drafting=drafting)
  return variants


def _differences(runs: dict[tuple, dict[str, Any]], model: Any,
                 prompt_of: Callable[[tuple], tuple], tokenizer: Tokenizer):
  """Returns the first difference of each output from the output of specjax.

  Args:
    runs: `{unit: {variant: result}}`.
    model: target model in transformers. The gap between two different tokens is
      the absolute difference of their logits under this model.
    prompt_of: function `unit -> (token ids, seed, request id)`.
    tokenizer: specjax's tokenizer.

  Returns:
    A list with one dict per output that differs.
  """
  differences = []
  for unit, variants in runs.items():
    first = variants[_OURS]["tokens"]
    for name, run in variants.items():
      pairs = itertools.zip_longest(first, run["tokens"])
      place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
      if place is not None:
        differences.append({
            "prompts": unit[2], "number": unit[3], "variant": name,
            "token": place, **_tokens_at(
                place, first, run["tokens"], model, prompt_of(unit)[0],
                tokenizer)})
  return differences


def _tokens_at(place: int, first: list[int], second: list[int], model: Any,
               prompt: list[int], tokenizer: Tokenizer):
  """Returns the strings of two different tokens and the gap of their logits.

  If one output ended before this place, its token and the gap are None.
  """
  pair = [ids[place:place + 1] for ids in (first, second)]
  gap = None
  if all(pair):
    logits = generation.logits_after(model, prompt + first[:place])
    gap = abs(logits[pair[0][0]] - logits[pair[1][0]])
  return {"tokens": [tokenizer.decode(ids) if ids else None for ids in pair],
          "logit_gap": gap}


def _rows(runs: dict[tuple, dict[str, Any]], variants: list[str],
          cluster_of: Callable[[str], str]):
  """Returns a row per prompt set and variant, then rows over all sets."""
  sets = dict.fromkeys(unit[2] for unit in runs)
  chosen = {name: [unit for unit in runs if unit[2] == name] for name in sets}
  if len(sets) > 1:
    chosen["all"] = list(runs)
  return [_row(name, variant, [runs[unit] for unit in units],
               [cluster_of(unit[5]) for unit in units])
          for name, units in chosen.items() for variant in variants]


def _row(name: str, variant: str, runs: list[dict[str, dict[str, Any]]],
         clusters: Sequence[str]):
  speed = lambda run: len(run["tokens"]) / run["seconds"]
  tokens = analysis.block_efficiency(
      [generation.accepted(r[variant]) for r in runs],
      [r[variant]["rounds"] for r in runs], clusters)
  row = {"prompts": name, "variant": variant, "num_prompts": len(runs),
         "clusters": tokens.clusters, **tokens.columns("tokens_per_round"),
         "tokens_per_second": float(np.median([
             speed(r[variant]) for r in runs]))}
  for other in (_OURS, _THEIRS):
    quartiles = generation.speed_ratio(runs, variant, other)
    for end, value in zip(("", "_low", "_high"), quartiles):
      row[f"over_{other}{end}"] = value
  return row


def _print_table(rows: list[dict[str, Any]]):
  wide = max(len(r["variant"]) for r in rows)
  head = f"{'prompts':10s} {'variant':{wide}s} {'tokens/round':>22s} "
  print(head + f"{'tokens/s':>8s} {'over specjax':>21s} "
        f"{'over transformers':>21s}")
  for r in rows:
    ratios = [f"{r[f'over_{other}']:.2f} ({r[f'over_{other}_low']:.2f} to "
              f"{r[f'over_{other}_high']:.2f})" for other in (_OURS, _THEIRS)]
    tokens = f"{analysis.Estimate.of_columns(r, 'tokens_per_round'):.2f}"
    print(f"{r['prompts']:10s} {r['variant']:{wide}s} {tokens:>22s} "
          f"{r['tokens_per_second']:8.1f} "
          f"{ratios[0]:>21s} {ratios[1]:>21s}")


def _report(runs: dict[tuple, dict[str, Any]],
            prompt_of: Callable[[tuple], tuple], model: Any,
            tokenizer: Tokenizer, variants: list[str],
            cluster_of: Callable[[str], str], facts: dict[str, Any],
            output_dir: pathlib.Path):
  """Prints and writes the results.

  Raises:
    ValueError: the outputs differ on more than --most_different of the prompts.
  """
  different = [] if _TEMPERATURE.value else _differences(
      runs, model, prompt_of, tokenizer)
  _print_differences(different)
  left_out = {(d["prompts"], d["number"]) for d in different}
  equal = {unit: run for unit, run in runs.items()
           if unit[2:4] not in left_out}
  rows = _rows(equal, variants, cluster_of) if equal else []
  if rows:
    _print_table(rows)
    common.write_csv(output_dir / "against_transformers.csv", rows)
  print(f"{len(equal)} of {len(runs)} prompts; speeds are medians over prompts "
        "(quartiles), tokens/round has 95 % intervals. For transformers, "
        "tokens/round is a lower bound, because --max_new_tokens cuts the last "
        "round.")
  common.finish(output_dir, "against_transformers", {
      "rows": rows, "different": different, **facts})
  if len(left_out) / len(runs) > _MOST_DIFFERENT.value or not equal:
    raise ValueError(
        f"{len(left_out)} of {len(runs)} prompts have different outputs at "
        f"temperature 0, and --most_different is {_MOST_DIFFERENT.value:g}; "
        "the libraries do not compute the same model, or they round "
        "differently; the lines above the table list the differences")


def _print_differences(different: list[dict[str, Any]]):
  for d in different:
    gap = d["logit_gap"]
    print(f"left out: {d['prompts']} {d['number']}, token {d['token']}: "
          f"{_OURS} {d['tokens'][0]!r}, {d['variant']} {d['tokens'][1]!r}"
          + ("" if gap is None else f", {gap:.1e} apart"))


def main():
  progress.say("importing torch and transformers")
  versions = generation.prepare_torch()
  named = [] if _DRAFTER.value == "none" else [_DRAFTER.value]
  target, drafters, tokenizer = drafters_lib.load(
      _TARGET.value, named, drafters_lib.Options(gamma=_GAMMA.value),
      dtype="float32")
  members = {name: drafter.draft_model for name, drafter in drafters.items()}
  prompts = prompts_lib.read(
      tokenizer, _PROMPTS.value, field=_FIELD.value, count=_NUM_PROMPTS.value,
      tokens=_PROMPT_TOKENS.value, seed=_SEED.value, chat=_CHAT.value)
  limit = prompts.longest + _NEW_TOKENS.value
  eos = models.ends(target, tokenizer) if _CHAT.value else None
  variants = _our_variants(target, drafters, eos, prompts.all,
                           limit + _GAMMA.value + 1)
  prompts_lib.check_room(prompts.longest, _NEW_TOKENS.value, *min(
      (variant.program.context_length, variant.program.context_owner)
      for variant in variants.values()))
  progress.say("loading the models into transformers")
  model = generation.load_torch(_TARGET.value, target)
  [assistant] = [_assistant(target, name, member) for name, member in zip(
      named, members.values())] or [None]
  variants |= _their_variants(model, assistant, eos)

  output_dir = common.output_directory(_OUTPUT_DIR.value, "study")
  common.claim(output_dir, "against_transformers")
  used = [target, *members.values()]
  fingerprint = resumable.fingerprint(
      [m.params for m in used], [m.model for m in used], list(variants),
      eos, _GAMMA.value, _NEW_TOKENS.value, versions, "accepted")
  units = [(fingerprint, _TEMPERATURE.value, name, i, _SEED.value,
            resumable.digest(row))
           for name, i, row in prompts_lib.alternating(prompts.sets)]
  prompt_of = lambda unit: (prompts.sets[unit[2]][unit[3]], unit[4], unit[3])
  runs = resumable.run(
      units, prompt_of, lambda temperature: variants, output_dir / "runs.jsonl")
  _report(runs, prompt_of, model, tokenizer, list(variants), prompts.cluster, {
      "versions": versions, "source": prompts.source, "gamma": _GAMMA.value,
      "target": models.label(_TARGET.value), "drafters": list(drafters),
      "temperature": _TEMPERATURE.value, "new_tokens": _NEW_TOKENS.value},
          output_dir)


if __name__ == "__main__":
  common.run(main)
