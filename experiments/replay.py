"""What would other verifiers have accepted? Judges them on recorded drafts.

Decodes prompts with a target, a drafter and one acting verifier, and records
the drafts and both models' laws; then evaluates every verifier on the record,
where no coin is tossed and no model runs. A recording that was interrupted is
completed by the same command.

  python experiments/replay.py
  python experiments/replay.py --acting=block --record=results/replay_block
  python experiments/replay.py --evaluate_only --record=mine --verifiers=token

The rounds start where the acting verifier left off: compare the rules within
one record, not with rollouts of their own. Writes replay.json to --output_dir;
the last line of stdout names it.
"""

from absl import flags
import jax
from lib import common
from lib import flags as shared

import specjax as sj
from specjax import analysis
from specjax import contract
from specjax.data import corpora
from specjax.data import prompts as prompts_lib

_RECORD = shared.directory(
    "record", "results/replay", "directory of the record")
_EVALUATE_ONLY = flags.DEFINE_bool(
    "evaluate_only", False, "take the record as it is, whatever made it")
_VERIFIERS = flags.DEFINE_list(
    "verifiers", list(common.VERIFIERS), "to evaluate")
_ACTING = flags.DEFINE_enum(
    "acting", "token", sorted(common.VERIFIERS), "the recorded verifier")
_DRAFTER = shared.drafter()
_TARGET = shared.target()
_GAMMA = shared.gamma(8)
_TEMPERATURE = shared.temperature()
_NUM_PROMPTS = shared.num_prompts(8)
_PROMPT_TOKENS = shared.prompt_tokens(96, "tokens kept of every prompt")
_NEW_TOKENS = shared.new_tokens(64)
_SEED = shared.seed()
_OUTPUT_DIR = shared.output_dir("results/replay", "for the figures as JSON")


def _record():
  """Makes the record, or completes it."""
  target, drafters, tokenizer = common.load_models(
      _TARGET.value, [_DRAFTER.value])
  [drafter] = drafters.values()
  held_out = [d for d in corpora.stdlib_documents() if d.held_out]
  texts = prompts_lib.excerpts(
      held_out, _NUM_PROMPTS.value, 4 * _PROMPT_TOKENS.value, _SEED.value)
  decoder = sj.Decoder(
      target=target.model, verifier=common.VERIFIERS[_ACTING.value],
      drafter=sj.drafters.LanguageModel(model=drafter.model,
                                        gamma=_GAMMA.value),
      transform=sj.LogitsTransform(temperature=_TEMPERATURE.value))
  return analysis.record(
      decoder, {"target": target.params, "drafter": drafter.params},
      [tokenizer.encode(text)[:_PROMPT_TOKENS.value] for text in texts],
      jax.random.key(_SEED.value), _RECORD.value,
      max_new_tokens=_NEW_TOKENS.value)


def _row(name, record):
  verifier = common.VERIFIERS[name]
  replayed = analysis.evaluate(record, verifier)
  online = None
  if repr(verifier) == record.manifest["verifier"]:
    online = analysis.online(record).block_efficiency
  return {"verifier": name, "block_efficiency": replayed.block_efficiency,
          "stderr": replayed.stderr, "online_block_efficiency": online,
          "lossless": contract.rule(verifier).lossless}


def _print_table(rows):
  print(f"{'verifier':14s} {'block efficiency':>18s} {'online':>10s} "
        f"{'lossless':>9s}")
  for r in rows:
    online = r["online_block_efficiency"]
    print(f"{r['verifier']:14s} {r['block_efficiency']:10.4f} ± "
          f"{r['stderr']:.3f} {'' if online is None else f'{online:.4f}':>10s} "
          f"{'yes' if r['lossless'] else 'no':>9s}")
  acted = {r["verifier"] for r in rows if r["online_block_efficiency"]}
  afresh = [r["verifier"] for r in rows if r["verifier"] not in acted
            and contract.rule(common.VERIFIERS[r["verifier"]]).remembers]
  if afresh:
    print(f"{', '.join(afresh)}: judged from a fresh state in every round, "
          "which is not what a rollout of its own would give")


def main():
  names = common.verifier_names("--verifiers", _VERIFIERS.value)
  if _EVALUATE_ONLY.value:
    record = analysis.Record.open(_RECORD.value)
  else:
    record = _record()
  rows = [_row(name, record) for name in names]
  _print_table(rows)
  common.finish(_OUTPUT_DIR.value, "replay", {
      "rows": rows, "record": {"path": str(record.path), **record.manifest}})


if __name__ == "__main__":
  common.run(main)
