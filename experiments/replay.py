"""Evaluates verification rules on recorded drafts.

First, a target and a drafter decode prompts with one rule, the acting verifier
(--acting). The script records the drafts and the probabilities of both models.
Then it evaluates all rules of --verifier on this record, without a model and
without sampling. If the recording is interrupted, the same command completes
it.

  python experiments/replay.py
  python experiments/replay.py --acting=block --record=results/replay_block
  python experiments/replay.py --evaluate_only --record=mine --verifier=token
  python experiments/replay.py --prompts=mt_bench=question.jsonl
  python experiments/replay.py --batch=8 --mesh=data:2,model:4

--batch=B decodes B prompts together, on several devices with --mesh. In float32
the record does not depend on B up to rounding.

Every recorded round starts where the acting verifier ended the previous round.
So compare rules only within one record. Block efficiencies of rules that
generate their own text are not comparable.

The column "over the best" compares a rule with the best possible rule of one
round on these drafts. Let p and q be the probabilities of target and drafter,
and R_i the product of p/q over the first i draft tokens. A rule is valid if its
accepted tokens, one further token and a continuation by the unmodified target
together have the target's distribution. Every valid rule accepts the first l
draft tokens with probability at most min_{i<=l} R_l / R_i, given these tokens.
Block verification attains this bound for every l, so its value is 0 %. The
bound does not hold over several rounds, for lossy rules or for rules with
state.

Writes replay.json to --output_dir; the last line of stdout names the file.
"""

import pathlib
from typing import Any

from lib import common  # before jax, which takes long to import

# isort: split
from absl import flags
import jax
from lib import drafters as drafters_lib
from lib import extensions
from lib import flags as shared
from lib import models
from lib import progress
from lib.prompts import reading as prompts
from lib.rollouts import batches
import numpy as np

import specjax as sj
from specjax import analysis
from specjax.utils import files

_RECORD = shared.directory(
    "record", None, "Directory to which the drafts and probabilities are "
    "recorded, or of an existing record. Default: --output_dir",
    required=False)
_EVALUATE_ONLY = flags.DEFINE_bool(
    "evaluate_only", False,
    "Evaluate the existing record in --record without decoding, even if it is "
    "incomplete. Default: record the drafts, or complete an existing record, "
    "and then evaluate")
_VERIFIERS = shared.verifiers(
    list(common.VERIFIERS), "Verification rules to evaluate on the recorded "
    "drafts, comma-separated, of specjax or your own as "
    f"{extensions.FORM}. Default: all rules of specjax for chains. typical and "
    "top_2 are lossy (they change the output distribution)")
_ACTING = flags.DEFINE_string(
    "acting", "token", "Verification rule that generates the text of the "
    "record, one of the values of --verifier")
_DRAFTER = shared.drafter()
_TARGET = shared.target()
_DTYPE = shared.dtype()
_GAMMA = shared.gamma(8)
_TEMPERATURE = shared.temperature()
_PROMPTS = shared.prompts()
_FIELD = shared.prompt_field()
_CHAT = shared.chat()
_NUM_PROMPTS = shared.num_prompts(8)
_PROMPT_TOKENS = shared.prompt_tokens()
_NEW_TOKENS = shared.new_tokens(64)
_SEED = shared.seed()
_BATCH = batches.untimed_flags()
_OUTPUT_DIR = shared.output_dir(
    "results/replay", "Directory for replay.json, and also for the record if "
    "--record is not set; it is created if needed")

_MOST_BYTES = 2**31  # maximum memory for the probabilities of one batch
_CLUSTERS = "clusters.json"  # file in the record: cluster label of each prompt


def _place() -> str:
  """Returns the directory of the record."""
  return _RECORD.value or _OUTPUT_DIR.value


def _record(acting: sj.Verifier) -> analysis.Record:
  """Records all prompts, or completes an existing record, and returns it."""
  batch = batches.settings(_BATCH, splits_prompts=False)
  target, loaded, tokenizer = drafters_lib.load(
      _TARGET.value, [_DRAFTER.value],
      drafters_lib.Options(gamma=_GAMMA.value, verifier=acting),
      dtype=_DTYPE.value)
  [drafter] = loaded.values()
  read = prompts.read(
      tokenizer, _PROMPTS.value, field=_FIELD.value, count=_NUM_PROMPTS.value,
      tokens=_PROMPT_TOKENS.value, seed=_SEED.value, chat=_CHAT.value)
  decoder = drafter.strategy.decoder(
      drafter.model,
      transform=sj.LogitsTransform(temperature=_TEMPERATURE.value),
      eos=models.ends(target, tokenizer) if _CHAT.value else None)
  prompts.check_room(read.longest, _NEW_TOKENS.value, decoder.context_length,
                     decoder.context_owner)
  _check_size(target.model.vocab_size)
  if own := extensions.sources(drafter.strategy):
    files.claim(pathlib.Path(_place(), "sources.json"), {"sources": own},
                "record")
  record = analysis.record(
      decoder, drafter.params, read.all,
      jax.random.key(_SEED.value), _place(),
      max_new_tokens=_NEW_TOKENS.value, batch=batch.size,
      placement=batch.placement)
  files.write_json(record.path / _CLUSTERS, {"clusters": read.clusters})
  return record


def _check_size(vocab_size: int) -> None:
  """Raises `ValueError` if a batch's probabilities exceed `_MOST_BYTES`."""
  nodes = _GAMMA.value + 1
  size = 4 * 2 * _BATCH.size.value * _NEW_TOKENS.value * nodes * vocab_size
  if size > _MOST_BYTES:
    raise ValueError(
        f"--batch={_BATCH.size.value}, --max_new_tokens={_NEW_TOKENS.value} "
        f"and --gamma={_GAMMA.value} with {vocab_size} tokens need up to "
        f"{size / 2**30:.1f} GiB of memory; the limit is "
        f"{_MOST_BYTES / 2**30:.0f} GiB: use smaller values")


def _over_best(replayed: analysis.Replayed, best: analysis.Replayed,
               clusters: list[str] | None) -> analysis.Estimate:
  """Returns the relative gain in block efficiency over the best possible rule.

  `best` is the evaluation of block verification, which attains the bound of
  the module docstring. Proof of the bound: let tau be the number of accepted
  tokens, X the draft, x^l its first l tokens, and z the generated sequence. For
  all i <= l, a valid rule has

    P(tau >= l, X^l = x^l) <= P(tau >= i, z^l = x^l)
      = P(tau >= i, X^i = x^i) p(x_{i+1..l} | x^i) <= q(x^i) p(x_{i+1..l} | x^i)

  The equality holds because z follows p, and the target itself continues if
  tau < i. So given tau >= i, the tokens after i also follow p. Division by
  q(x^l) gives P(tau >= l | x^l) <= R_l / R_i.
  """
  accepted, most = ([x[:, 1:].sum(dtype=np.float64) for x in rule.survival]
                    for rule in (replayed, best))
  rounds = [len(x) for x in replayed.survival]
  return analysis.relative_gain(accepted, rounds, most, rounds,
                                clusters=clusters,
                                longest=replayed.survival[0].shape[1] - 1)


def _row(name: str, verifier: sj.Verifier, record: analysis.Record,
         best: analysis.Replayed) -> dict[str, Any]:
  replayed = analysis.evaluate(record, verifier)
  online = None
  if repr(verifier) == record.manifest["verifier"]:
    online = analysis.online(record).block_efficiency
  path = record.path / _CLUSTERS  # absent if another program made the record
  clusters = (files.read_json(path, "delete it")["clusters"][:len(record)]
              if path.exists() else None)
  efficiency = replayed.estimate(clusters)
  over_best = dict.fromkeys(("over_best", "over_best_low", "over_best_high"))
  if verifier.lossless and not verifier.remembers:
    over_best = _over_best(replayed, best, clusters).columns("over_best")
  return {"verifier": name, "clusters": efficiency.clusters,
          **efficiency.columns("block_efficiency"), **over_best,
          "online_block_efficiency": online, "lossless": verifier.lossless}


def _print_table(rows: list[dict[str, Any]],
                 rules: dict[str, sj.Verifier]) -> None:
  width = max(14, *map(len, rules))
  print(f"{'verifier':{width}s} {'block efficiency':>29s} {'online':>10s} "
        f"{'lossless':>9s} {'over the best':>29s}")
  for r in rows:
    online = r["online_block_efficiency"]
    efficiency = f"{analysis.Estimate.of_columns(r, 'block_efficiency'):.4f}"
    over = ("" if r["over_best"] is None else
            f"{analysis.Estimate.of_columns(r, 'over_best'):+.1%}")
    print(f"{r['verifier']:{width}s} {efficiency:>29s} "
          f"{'' if online is None else f'{online:.4f}':>10s} "
          f"{'yes' if r['lossless'] else 'no':>9s} {over:>29s}")
  fresh = [r["verifier"] for r in rows if not r["online_block_efficiency"]
           and rules[r["verifier"]].remembers]
  if fresh:
    print(f"{', '.join(fresh)}: here every round starts from a fresh state. "
          "In generation, the state continues from round to round")


def main() -> None:
  if _RECORD.value and not _EVALUATE_ONLY.value:
    common.check_directory("--record", _RECORD.value)
  rules = common.verifiers("--verifier", _VERIFIERS.value)
  [acting] = common.verifiers("--acting", [_ACTING.value]).values()
  if _EVALUATE_ONLY.value:
    if not pathlib.Path(_place(), "record.json").exists():
      raise ValueError(f"--evaluate_only requires a record, and {_place()} has "
                       "none; set --record to the directory of a record")
    record = analysis.Record.open(_place())
    if not record.is_complete:
      progress.say(f"{record.path} is incomplete: {len(record)} of "
                   f"{record.manifest['num_prompts']} prompts are evaluated")
  else:
    record = _record(acting)
  progress.say("evaluating the verifiers on the record")
  best = analysis.evaluate(record, sj.verifiers.Block())
  rows = [_row(name, rule, record, best) for name, rule in rules.items()]
  _print_table(rows, rules)
  common.finish(_OUTPUT_DIR.value, "replay", {
      "rows": rows, "record": {"path": str(record.path), **record.manifest}})


if __name__ == "__main__":
  common.run(main)
