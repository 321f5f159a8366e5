"""Predicts which drafter, rule and draft length is fastest, and by how much.

Speed is the number of tokens per round divided by the seconds per round. The
tokens are those that arena.py recorded. The seconds are measured on this
machine, or predicted for a chip that is not at hand:

  python experiments/arena.py
  python experiments/advise.py --arena=results/arena --batch=1,2,4,8,16
  python experiments/advise.py --arena=results/arena --chip=v5e --batch=1,8,64

On this machine, rounds are timed at every second of the draft lengths, batch
sizes and contexts, and at the largest. All others are interpolated. Drafts
whose predicted speed is within 20 % of the best are also timed. --check times
all rounds, and reports the errors of the interpolation.

For a chip, the TPU compiler counts the bytes and the operations of a round
(`pip install -e '.[tpu-aot]'`, no TPU is needed). The time of the target's pass
is the larger of bytes over peak bandwidth and operations over peak throughput,
and the same holds for the draft. For a target with experts, the number of
experts that a pass reads is predicted from the experts that text chooses. Real
rounds take longer, with and without drafts. For the GPUs the counts are still
those of the TPU compiler.

Output: advice.md and advice.csv in --output_dir. An interrupted run continues.
"""

from lib import common  # before jax, which takes long to import

# isort: split
import os
from typing import Any

from absl import flags
import jax
from lib import drafters as drafters_lib
from lib import flags as shared
from lib import models
from lib.compiler import chips
from lib.compiler import tpu_compiler
from lib.configurations import decoders
from lib.prompts import reading as prompts_lib
from lib.reports import advice
from lib.rollouts import judging
from lib.rollouts import round_costs

import specjax as sj
from specjax.data import prompt_sets
from specjax.utils import files

_ARENA = shared.directory(
    "arena", "results/arena", "Directory of the recorded acceptance: the "
    "--output_dir of arena.py")
_CHIP = flags.DEFINE_enum(
    "chip", None, list(chips.CHIPS), "Chip for which speed is predicted. "
    "Default: this machine, by measurement")
_BATCH = flags.DEFINE_list(
    "batch", ["1", "2", "4", "8", "16"], "Batch sizes, comma-separated")
_CONTEXT = flags.DEFINE_list(
    "context", ["128"], "Numbers of tokens per row (prompt and generated "
    "text), comma-separated")
_CHECK = flags.DEFINE_bool(
    "check", False, "Also measure all interpolated rounds, and report the "
    "errors of the interpolation. Not available with --chip")
_OUTPUT_DIR = shared.output_dir("results/advice")


def main() -> None:
  batches = common.batch_sizes("--batch", _BATCH.value)
  contexts = common.batch_sizes("--context", _CONTEXT.value)
  if _CHIP.value and _CHECK.value:
    raise ValueError("--check requires a measurement on this machine; leave "
                     "out --chip or --check")
  path = os.path.join(_ARENA.value, "arena.json")
  if not os.path.exists(path):
    raise ValueError(f"--arena is {_ARENA.value}, which contains no arena.json;"
                     " run arena.py, and give its --output_dir")
  recorded = files.read_json(path, "run arena.py again")
  if "models" not in recorded:
    raise ValueError(f"{path} was written by an older version; run arena.py "
                     "again, which only rewrites its tables")
  if _CHIP.value:
    # A TPU of this machine is not needed, and may belong to another process.
    tpu_compiler.prepare()
    jax.config.update("jax_platforms", "cpu")
  used = recorded["models"]
  rows = [row for row in recorded["rows"] if row["prompts"] == "all"]
  gammas = sorted({row["gamma"] for row in rows if row["gamma"]})
  target, loaded, tokenizer = drafters_lib.load(
      used["target"], used["drafters"], drafters_lib.Options(
          gamma=used["gamma"], nodes=used["nodes"],
          datastore=used["datastore"]),
      dtype=used["dtype"], batch=decoders.Batch(size=1), compared=True)
  candidates = judging.candidates(loaded)
  length, owner = judging.context(candidates)
  room = length - max(x.drafter.num_nodes for x in candidates.values())
  if max(contexts) > room:
    raise ValueError(f"--context contains {max(contexts)}, and the {owner} has "
                     f"room for {room} tokens before a draft; give at most "
                     f"{room}")
  output_dir = common.output_directory(_OUTPUT_DIR.value, "advice")
  common.claim(output_dir, "advice")
  rounds = round_costs.Rounds(
      target=target, candidates=candidates, gammas=gammas or [1],
      batches=batches, contexts=contexts,
      texts=_texts(target.model, tokenizer, max(contexts)))
  stored = round_costs.Stored(output_dir / "costs.json")
  costs = (round_costs.Compiled(rounds, stored, chips.CHIPS[_CHIP.value])
           if _CHIP.value else round_costs.Measured(rounds, stored))
  rows = advice.comparable(rows, rounds)
  predicted = (advice.predict if _CHIP.value else advice.confirmed)(
      rows, costs, batches, contexts)
  advice.write(output_dir, predicted, title=(
      f"{models.label(used['target'])} on {_CHIP.value or 'this machine'}"),
               chip=_CHIP.value,
               limits=advice.limits(rows, costs, batches, contexts),
               check=advice.check(predicted, costs)
               if _CHECK.value else None)
  common.finish(output_dir, "advice", {"rows": predicted})


def _texts(model: sj.interfaces.Model, tokenizer: Any, tokens: int
           ) -> list[list[int]] | None:
  """Returns token ids of text for a target with experts, otherwise None."""
  if getattr(getattr(model, "config", None), "experts", None) is None:
    return None
  return prompts_lib.read(
      tokenizer, list(prompt_sets.EMBEDDED), field="text", count=4,
      tokens=tokens, seed=0, chat=False).all


if __name__ == "__main__":
  common.run(main)
