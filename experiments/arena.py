"""Compares drafters, verification rules and draft trees on one target.

A drafter drafts chains, trees or both. Every verification rule that applies to
a kind of draft is evaluated on the same drafts of this kind. The expected
number of accepted tokens is computed exactly from the probabilities of both
models, so random accept and reject decisions add no noise.

  python experiments/arena.py
  python experiments/arena.py --add=results/my_heads
  python experiments/arena.py --target=smollm2 --chat \\
    --drafter=smol,smol_eagle,ngram --prompts=gsm8k=test.jsonl,mine.txt

--add=NAME adds one drafter to the table of an earlier run with the same flags.
Only the new drafter is decoded, because --output_dir contains the results of
the others. If the script is killed, the same command resumes it.

Output: arena.md, arena.csv and arena.png in --output_dir. Each row is one
combination of drafter, kind of draft, rule, draft length (chains only) and
temperature. The block efficiency is the number of tokens per target call, with
a 95 % confidence interval over prompts.

Chains are drafted with the largest length in --gamma, and those of heads with
the heads' own length, while token verification generates the text. For shorter
lengths, a long draft is evaluated as several short rounds. Heads are less
accurate later in a draft, so for them only the first tokens of a draft are
used. Results for shorter lengths are approximate. Trees are drafted while
traversal verification (sampled and i.i.d. trees) or the target walk (other
trees) generates the text. All other rules are evaluated on the same drafts.
"""

from lib import common  # before jax, which takes long to import

# isort: split
from absl import flags
from lib import drafters as drafters_lib
from lib import extensions
from lib import flags as shared
from lib import models
from lib.configurations import decoders
from lib.prompts import reading as prompts_lib
from lib.reports import arena_report as report
from lib.rollouts import batches
from lib.rollouts import judging

from specjax.data import prompt_sets

_TARGET = shared.target()
_DRAFTER = shared.drafters(
    default="small,tiny,ngram,suffix,recycling,medusa,pass,eagle3,parallel",
    help_=drafters_lib.HELP)
_ADD = flags.DEFINE_list(
    "add", [], "Drafters to compare in addition to those of --drafter, "
    "comma-separated, such as the output directory of train_drafter.py. "
    "Default: none")
_GAMMAS = shared.gammas("2,4,8")
_NODES = flags.DEFINE_integer(
    "nodes", 32, "Size in nodes of the draft trees of draft models and heads, "
    "including the root (the last generated token). Other drafters have their "
    "own tree sizes", 2)
_TEMPERATURE = shared.temperatures("1,0")
_VERIFIERS = shared.verifiers(
    "token,block", "Verification rules for chains, comma-separated: "
    f"{', '.join(common.VERIFIERS)}, or {extensions.FORM} for your own rule. "
    "typical and top_2 are lossy (they change the output distribution). Trees "
    "always use their own rules, and yours if it does not require chains")
_PROMPTS = shared.prompts(list(prompt_sets.EMBEDDED))
_FIELD = shared.prompt_field()
_CHAT = shared.chat()
_NUM_PROMPTS = shared.num_prompts(12)
_PROMPT_TOKENS = shared.prompt_tokens()
_NEW_TOKENS = shared.new_tokens(64)
_DATASTORE = shared.datastore()
_DTYPE = shared.dtype()
_SEED = shared.seed()
_BATCH = batches.untimed_flags(size=16)
_OUTPUT_DIR = shared.output_dir("results/arena")
shared.figure_style()


def main() -> None:
  temperatures = common.numbers("--temperature", _TEMPERATURE.value)
  gammas = common.draft_lengths("--gamma", _GAMMAS.value)
  rules = common.verifiers("--verifier", _VERIFIERS.value)
  names = [*common.given("--drafter", _DRAFTER.value, "some drafters"),
           *_ADD.value]
  batch = batches.settings(_BATCH) or decoders.Batch(size=1)
  target, loaded, tokenizer = drafters_lib.load(
      _TARGET.value, names, drafters_lib.Options(
          gamma=gammas[-1], nodes=_NODES.value, datastore=_DATASTORE.value),
      dtype=_DTYPE.value, batch=batch, compared=True)
  found = judging.candidates(loaded)
  read = prompts_lib.read(
      tokenizer, _PROMPTS.value, field=_FIELD.value, count=_NUM_PROMPTS.value,
      tokens=_PROMPT_TOKENS.value, seed=_SEED.value, chat=_CHAT.value)
  prompts_lib.check_room(
      read.longest, _NEW_TOKENS.value, *judging.context(found))
  output_dir = common.output_directory(_OUTPUT_DIR.value, "arena")
  common.claim(output_dir, "arena", drafter=names, add=[])
  rows = []
  for name, candidate in found.items():
    # Each candidate's runs are stored in a separate file. So --add decodes only
    # the new drafter.
    judge = judging.Judge(
        target=target, candidates={name: candidate}, rules=rules,
        gammas=gammas, read=read, new_tokens=_NEW_TOKENS.value, batch=batch,
        seed=_SEED.value,
        eos=models.ends(target, tokenizer) if _CHAT.value else None)
    rows += judge.results(temperatures, output_dir / "runs" / (
        name.replace(", ", "_").replace(" ", "_") + ".jsonl")).rows()
  report.write(output_dir, rows, models.label(_TARGET.value))
  common.finish(output_dir, "arena", {
      "rows": rows, "source": read.source, "models": {
          "target": _TARGET.value, "drafters": names, "dtype": _DTYPE.value,
          "gamma": gammas[-1], "nodes": _NODES.value,
          "datastore": _DATASTORE.value}})


if __name__ == "__main__":
  common.run(main)
