"""Compares the adaptive controller with the best fixed draft length.

The controller chooses the draft length before every round (one draft and one
target pass). Every random batch of prompts is decoded without drafts, with each
fixed draft length of --gamma, and with the controller. A speed ratio compares
two of these variants on the same batch, without the prefill. The table contains
medians over batches. The best fixed length is the one with the largest median
speed-up in the same measurements. It may be 0 (no drafts).

  python experiments/controller_study.py
  python experiments/controller_study.py --drafter=noise,ngram \\
    --target=smollm2 --chat --prompts=rename,summarise --slots=1

Run the script on an idle machine. If it is killed, the same command resumes it.
Writes controller.csv and controller.json to --output_dir.
"""

from collections.abc import Callable
import dataclasses
import random
import sys
import time
from typing import Any

from lib import common  # before jax, which takes long to import

# isort: split
from absl import flags
import jax
from lib import drafters as drafters_lib
from lib import flags as shared
from lib import models
from lib.configurations import base
from lib.prompts import reading as prompts_lib
from lib.rollouts import resumable
import numpy as np

import specjax as sj
from specjax.models import Pretrained

_TARGET = shared.target()
_DRAFTER = shared.drafters(
    default="small,noise", help_="Drafters of trees, such as recycling, are "
    f"rejected. {drafters_lib.HELP}")
_DATASTORE = shared.datastore()
_BATCH = flags.DEFINE_list(
    "slots", "1,4,16", "Batch sizes to compare (numbers of prompts decoded "
    "together), comma-separated")
_LENGTHS = shared.gammas(
    "2,4,8", "Fixed draft lengths in tokens, comma-separated. The controller "
    "chooses among these and 0. Length 0 (no draft) is always measured")
_BATCHES = flags.DEFINE_integer(
    "batches", 6, "Number of random batches that are decoded per batch size, "
    "at least 2", 2)
_PROMPTS = shared.prompts("code,tests,docstrings,prose")
_FIELD = shared.prompt_field()
_CHAT = shared.chat()
_NUM_PROMPTS = shared.num_prompts(8, "Maximum number of prompts per set")
_PROMPT_TOKENS = shared.prompt_tokens(256)
_NEW_TOKENS = shared.new_tokens(96)
_TEMPERATURE = shared.temperatures("0")
_SEED = shared.seed()
_DTYPE = shared.dtype()
_OUTPUT_DIR = shared.output_dir("results/controller")

_CONTROLLER = "controller"


class _Together(base.Configuration):
  """Decoder that continues the prompts of a batch together."""

  def __init__(self, decoder: sj.Decoder, params: Any, capacity: int):
    self.program = decoder
    self._params, self._capacity = params, capacity

  def compile(self, prompts: list[list[int]]):
    """Compiles the decoder and calls it once, because a first call is slow."""
    self.decode(prompts, 0, 0)

  def decode(self, prompts: list[list[int]], seed: int, request_id: int):
    """Returns the emitted "tokens" (a count) and "seconds" of the rounds."""
    state = jax.block_until_ready(self.program.prefill(
        self._params, prompts, jax.random.key(seed + request_id),
        limits=np.array([len(row) + _NEW_TOKENS.value for row in prompts]),
        capacity=self._capacity))
    start = time.perf_counter()
    state, stats = jax.block_until_ready(
        self.program.decode_until(self._params, state))
    seconds = time.perf_counter() - start
    sj.decoding.raise_if_not_finite(stats)
    return {"seconds": seconds, "tokens": int(np.sum(stats.emitted))}


def _variants(target: Pretrained, drafter: drafters_lib.Loaded,
              temperature: float, eos: tuple[int, ...] | None, batch: int,
              lengths: list[int], capacity: int):
  """Returns `{draft length or "controller": variant}`."""
  alone = dataclasses.replace(
      common.autoregressive(target.model, temperature), eos=eos)
  params = drafter.params
  fixed = lambda gamma: dataclasses.replace(
      alone, target=drafter.model, verifier=drafter.strategy.verifier,
      drafter=drafter.strategy.drafter.with_gamma(gamma))
  decoders = {"0": alone, **{str(n): fixed(n) for n in lengths}}
  longest = decoders[str(lengths[-1])]
  print(f"measuring the cost of rounds of {batch} rows, or reading stored "
        "costs", file=sys.stderr)
  decoders[_CONTROLLER] = dataclasses.replace(
      longest, controller=sj.decoding.costs.measured(
          longest, params, batch=batch, lengths=(0, *lengths), waits=True,
          capacity=capacity, used=capacity - longest.num_nodes
          - _NEW_TOKENS.value // 2))
  return {name: _Together(decoder, params, capacity)
          for name, decoder in decoders.items()}


def _rows(runs: dict[tuple, dict[str, Any]], unit_of: Callable[[tuple], tuple]):
  """Returns one table row per temperature, drafter, batch size and length."""
  groups = {}
  for unit, variants in runs.items():
    groups.setdefault(unit_of(unit), []).append(variants)
  rows = []
  for (temperature, drafter, batch), mine in groups.items():
    speed = {name: np.array([run[name]["tokens"] / run[name]["seconds"]
                             for run in mine]) for name in mine[0]}
    over_none = {name: np.median(found / speed["0"])
                 for name, found in speed.items()}
    best = max((name for name in speed if name != _CONTROLLER),
               key=over_none.get)
    for name, found in speed.items():
      over_best = np.percentile(found / speed[best], (50, 25, 75))
      rows.append({
          "target": models.label(_TARGET.value), "temperature": temperature,
          "drafter": drafter, "batch": batch, "length": name,
          "tokens_per_second": float(np.median(found)),
          "speedup": float(over_none[name]), "best": best,
          **dict(zip(("over_best", "over_best_low", "over_best_high"),
                     map(float, over_best)))})
  return rows


def _print_table(rows: list[dict[str, Any]]):
  print(f"{'T':>3s} {'drafter':16s} {'batch':>5s} {'length':>10s} "
        f"{'speed over none':>15s} {'over the best fixed length':>28s}")
  for row in rows:
    print(f"{row['temperature']:3g} {row['drafter']:16s} {row['batch']:5d} "
          f"{row['length']:>10s} {row['speedup']:15.2f} "
          f"{row['over_best']:8.3f} ({row['over_best_low']:.3f} to "
          f"{row['over_best_high']:.3f})")


def main():
  temperatures = common.numbers("--temperature", _TEMPERATURE.value)
  lengths = common.draft_lengths("--gamma", _LENGTHS.value)
  batches = common.batch_sizes("--slots", _BATCH.value)
  names = list(common.given("--drafter", _DRAFTER.value, "at least one "
                            "drafter, such as ngram"))
  target, loaded, tokenizer = drafters_lib.load(
      _TARGET.value, names, drafters_lib.Options(
          gamma=lengths[-1], datastore=_DATASTORE.value), dtype=_DTYPE.value)
  drafters = dict(zip(names, loaded.values()))
  for name, drafter in drafters.items():
    if drafter.strategy.drafter.with_gamma(1) is None:
      raise ValueError(f"--drafter={name} drafts trees, and the controller "
                       "chooses the length of chains; set drafters of chains, "
                       "such as small, ngram or suffix")
  read = prompts_lib.read(
      tokenizer, _PROMPTS.value, field=_FIELD.value, count=_NUM_PROMPTS.value,
      tokens=_PROMPT_TOKENS.value, seed=_SEED.value, chat=_CHAT.value)
  eos = models.ends(target, tokenizer) if _CHAT.value else None
  capacity = read.longest + _NEW_TOKENS.value + lengths[-1] + 1
  prompts_lib.check_room(read.longest, _NEW_TOKENS.value,
                         target.model.context_length)
  output_dir = common.output_directory(_OUTPUT_DIR.value, "study")
  common.claim(output_dir, "controller")

  fingerprint = resumable.fingerprint(
      [target.params, *(drafters_lib.own_params(x.params, target.params)
                        for x in drafters.values())], eos, lengths,
      _NEW_TOKENS.value, _DATASTORE.value, resumable.digest(read.all))
  # Batches with equal settings are adjacent, because compiled code is freed
  # when the settings change.
  units = [(fingerprint, t, name, batch, i, _SEED.value)
           for t in temperatures for name in names for batch in batches
           for i in range(_BATCHES.value)]

  def prompts_of(unit):
    rng = random.Random(f"{unit[3]} {unit[4]} {unit[5]}")
    return rng.choices(read.all, k=unit[3]), unit[5], unit[4]

  settings = lambda unit: unit[1:4]
  runs = resumable.run(
      units, prompts_of, lambda group: _variants(
          target, drafters[group[1]], group[0], eos, group[2], lengths,
          capacity),
      output_dir / "runs.jsonl", settings)
  rows = _rows(runs, settings)
  _print_table(rows)
  common.write_csv(output_dir / "controller.csv", rows)
  common.finish(output_dir, "controller", {
      "rows": rows, "source": read.source, "lengths": lengths})


if __name__ == "__main__":
  common.run(main)
