"""What would other verifiers have accepted? Judges them on recorded drafts.

Decodes prompts with a target, a drafter and one acting verifier, and records
the drafts and both models' laws; then evaluates every verifier on the record,
where no uniform is drawn and no model runs. A recording that was interrupted is
completed by the same command.

  python experiments/replay.py
  python experiments/replay.py --acting=block --record=results/replay_block
  python experiments/replay.py --evaluate_only --record=mine --verifier=token
  python experiments/replay.py --prompts=mt_bench=question.jsonl

The rounds start where the acting verifier left off: compare the rules within
one record, not with rollouts of their own.

The column "over the best" compares a rule with the best possible in one round
on these drafts. Let R_i be the product of p/q over the first i drafted tokens.
A rule is valid if it emits one extra token and the unmodified target continues.
Every valid rule accepts the first l drafted tokens with probability at most
min_{i<=l} R_l / R_i, given these tokens. This needs only the rows along the
draft. Block verification attains it for every l, so it is at 0 %. The bound is
for one round, and does not hold for lossy rules or for those with state.

Writes replay.json to --output_dir;
the last line of stdout names it.
"""

from collections.abc import Sequence
import pathlib
from typing import Any

from lib import common  # before jax, which takes long to import

# isort: split
from absl import flags
import jax
from lib import flags as shared
from lib import models
from lib import progress
from lib.prompts import reading as prompts
import numpy as np

import specjax as sj
from specjax import analysis
from specjax.utils import files

_RECORD = shared.directory(
    "record", None, "Directory of the record. Default: --output_dir",
    required=False)
_EVALUATE_ONLY = flags.DEFINE_bool(
    "evaluate_only", False, "take the record as it is, whatever made it")
_VERIFIERS = shared.verifiers(
    list(common.VERIFIERS), "Verification rules to evaluate, comma-separated")
_ACTING = flags.DEFINE_enum(
    "acting", "token", sorted(common.VERIFIERS), "the recorded verifier")
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
_OUTPUT_DIR = shared.output_dir(
    "results/replay", "Directory for the results as JSON, and for the record "
    "unless --record is set")

_MOST_BYTES = 2**31  # of a prompt's record
_CLUSTERS = "clusters.json"  # beside the record, labels of its prompts


def _place():
  """Returns the directory of the record."""
  return _RECORD.value or _OUTPUT_DIR.value


def _record():
  """Makes the record, or completes it."""
  target, drafters, tokenizer = models.load_models(
      _TARGET.value, [_DRAFTER.value], dtype=_DTYPE.value)
  [drafter] = drafters.values()
  read = prompts.read(
      tokenizer, _PROMPTS.value, field=_FIELD.value, count=_NUM_PROMPTS.value,
      tokens=_PROMPT_TOKENS.value, seed=_SEED.value, chat=_CHAT.value)
  chain, params = models.chain(target, drafter, _DRAFTER.value)
  decoder = sj.Decoder(
      target=target.model, drafter=chain(_GAMMA.value).drafter,
      verifier=common.VERIFIERS[_ACTING.value],
      transform=sj.LogitsTransform(temperature=_TEMPERATURE.value),
      eos=models.ends(target, tokenizer) if _CHAT.value else None)
  prompts.check_room(read.longest, _NEW_TOKENS.value, decoder.context_length)
  _check_size(target.model.vocab_size)
  record = analysis.record(
      decoder, {"target": target.params, "drafter": params}, read.all,
      jax.random.key(_SEED.value), _place(),
      max_new_tokens=_NEW_TOKENS.value)
  files.write_json(record.path / _CLUSTERS, {"clusters": read.clusters})
  return record


def _check_size(vocab_size: int):
  """Refuses a prompt whose laws, of both models, would fill the memory."""
  size = 4 * 2 * _NEW_TOKENS.value * (_GAMMA.value + 1) * vocab_size
  if size > _MOST_BYTES:
    raise ValueError(f"a prompt's laws take up to {size / 2**30:.1f} GiB, with "
                     f"--max_new_tokens={_NEW_TOKENS.value}, --gamma="
                     f"{_GAMMA.value} and {vocab_size} tokens, and are held at "
                     f"once; ask for less, up to {_MOST_BYTES / 2**30:.0f} GiB")


def _over_best(replayed: Any, best: Any, clusters: Sequence[str]):
  """Returns block efficiency over the best possible, less 1, an `Estimate`.

  `best` is block verification. Both are summed from P(tau >= l) given the first
  l drafted tokens, for which the bound holds. For all i <= l, with X the draft
  and z the text, a valid rule has

    P(tau >= l, X^l = x^l) <= P(tau >= i, z^l = x^l)
      = P(tau >= i, X^i = x^i) p(x_{i+1..l} | x^i) <= q(x^i) p(x_{i+1..l} | x^i)

  where the equality holds because the target continues whenever tau < i, so
  that the remaining text follows p also given tau >= i. Division by q(x^l)
  gives R_l / R_i.
  """
  accepted, most = ([x[:, 1:].sum(dtype=np.float64) for x in one.survival]
                    for one in (replayed, best))
  rounds = [len(x) for x in replayed.survival]
  return analysis.relative_gain(accepted, rounds, most, rounds,
                                clusters=clusters)


def _row(name: str, record: analysis.Record, best: Any):
  verifier = common.VERIFIERS[name]
  replayed = analysis.evaluate(record, verifier)
  online = None
  if repr(verifier) == record.manifest["verifier"]:
    online = analysis.online(record).block_efficiency
  path = record.path / _CLUSTERS  # another record may have been made without
  clusters = (files.read_json(path, "delete it")["clusters"] if path.exists()
              else None)
  found = replayed.estimate(clusters)
  over_best = dict.fromkeys(("over_best", "over_best_low", "over_best_high"))
  if verifier.lossless and not verifier.remembers:
    over_best = _over_best(replayed, best, clusters).columns("over_best")
  return {"verifier": name, "clusters": found.clusters,
          **found.columns("block_efficiency"), **over_best,
          "online_block_efficiency": online, "lossless": verifier.lossless}


def _print_table(rows: list[dict[str, Any]]):
  print(f"{'verifier':14s} {'block efficiency':>29s} {'online':>10s} "
        f"{'lossless':>9s} {'over the best':>29s}")
  for r in rows:
    online = r["online_block_efficiency"]
    found = f"{analysis.Estimate.of_columns(r, 'block_efficiency'):.4f}"
    over = ("" if r["over_best"] is None else
            f"{analysis.Estimate.of_columns(r, 'over_best'):+.1%}")
    print(f"{r['verifier']:14s} {found:>29s} "
          f"{'' if online is None else f'{online:.4f}':>10s} "
          f"{'yes' if r['lossless'] else 'no':>9s} {over:>29s}")
  acted = {r["verifier"] for r in rows if r["online_block_efficiency"]}
  afresh = [r["verifier"] for r in rows if r["verifier"] not in acted
            and common.VERIFIERS[r["verifier"]].remembers]
  if afresh:
    print(f"{', '.join(afresh)}: judged from a fresh state in every round, "
          "which is not what a rollout of its own would give")


def main():
  names = common.verifier_names("--verifier", _VERIFIERS.value)
  if _EVALUATE_ONLY.value:
    if not pathlib.Path(_place(), "record.json").exists():
      raise ValueError(f"--evaluate_only needs a record, and {_place()} has "
                       "none; name the directory of one by --record")
    record = analysis.Record.open(_place())
  else:
    record = _record()
  progress.say("evaluating the verifiers on the record")
  best = analysis.evaluate(record, sj.verifiers.Block())
  rows = [_row(name, record, best) for name in names]
  _print_table(rows)
  common.finish(_OUTPUT_DIR.value, "replay", {
      "rows": rows, "record": {"path": str(record.path), **record.manifest}})


if __name__ == "__main__":
  common.run(main)
