"""Judges a drafter: acceptance by rule, draft length and position, and faults.

The drafter is anything that loads: a language model, heads (a directory of
train_drafter.py or of a published drafter), or a drafter without training. No
server is needed. A batch of prompts is decoded once per temperature. All
figures come from this one rollout: given a draft, the acceptance of a rule is
computed exactly from the probabilities of both models, so accept and reject
decisions add no noise. Intervals are 95 %, over prompts.

  python experiments/evaluate_drafter.py --drafter=small
  python experiments/evaluate_drafter.py --target=smollm2 --chat \\
    --drafter=results/my_heads --prompts=gsm8k=test.jsonl,mine.txt
  python experiments/evaluate_drafter.py --drafter=ngram --trace=answers.jsonl

Output, in --output_dir: report.md with the tables below, evaluation.csv,
positions.csv, and a figure as PNG and PDF.

  block efficiency  tokens per target call, for every rule and draft length. The
                    drafts are those of token verification at the largest
                    --gamma. Drafters of trees are judged by their own rule
  positions         of a draft: probability that the position is reached (all
                    earlier tokens are accepted) and that its token is accepted
                    if it is reached. recall@K: probability under the target of
                    the K most likely tokens of the drafter
  oracle length     tokens per target call of an ideal tree of the K most likely
                    tokens per position: 1 + the sum over positions of the
                    product of the recalls so far
  entropy           probability of acceptance by the entropy of the target
  faults            of heads, see below

Faults: --conformance reads text that the target generated, and scores the heads
as they are and with one difference of reading undone at a time: hidden states
one layer off, before instead of after the norm or in another order, another
RoPE base or RoPE order, tensors joined in another order, heads shifted by a
position, norms and embeddings with another scale. It also reports tensors that
are constant or not used, a wrong map from draft tokens to tokens, a precision
that is too low, and a state that is wrong after rejected drafts.

--trace judges a drafter that needs no training on a file of token ids that any
model wrote, at temperature 0 and exactly. A line is a JSON object with the
lists "prompt" and "completion". No target is loaded.

A killed evaluation resumes if it is started again with the same flags.
"""

from lib import common  # before jax, which takes long to import

# isort: split
from absl import flags
import jax
from lib import conformance
from lib import flags as shared
from lib import models
from lib import progress
from lib.configurations import compositions
from lib.configurations import decoders
from lib.configurations import loading
from lib.prompts import reading as prompts_lib
from lib.reports import drafter_evaluation as report
from lib.rollouts import batches
from lib.rollouts import judging
from lib.rollouts import traces
import numpy as np

import specjax as sj

_TARGET = shared.target()
_DRAFTER = shared.drafter()
_GAMMAS = shared.gammas("2,4,8")
_TEMPERATURE = shared.temperatures("1,0")
_VERIFIERS = shared.verifiers(
    "token,block", "Verification rules of chains, comma-separated: "
    f"{', '.join(common.VERIFIERS)}. typical and top_2 are lossy")
_PROMPTS = shared.prompts("code,docstrings")
_FIELD = shared.prompt_field()
_CHAT = shared.chat()
_NUM_PROMPTS = shared.num_prompts(12)
_PROMPT_TOKENS = shared.prompt_tokens()
_NEW_TOKENS = shared.new_tokens(64)
_NODES = flags.DEFINE_integer(
    "nodes", 32, "Size of the draft tree of heads, root included. Heads are "
    "judged as a chain, and with the default tree of their method", 2)
_DATASTORE = shared.datastore()
_TRACE = flags.DEFINE_string(
    "trace", None, "JSONL file of token ids, one sequence per line: "
    '{"prompt": [...], "completion": [...]}. Replaces --target and --prompts, '
    "for drafters without training")
_CONFORMANCE = flags.DEFINE_bool(
    "conformance", True, "Also look for faults of heads. Takes about a minute, "
    "because every possible fault compiles a program")
_DTYPE = shared.dtype()
_SEED = shared.seed()
_BATCH = batches.untimed_flags(size=16)
_OUTPUT_DIR = shared.output_dir("results/evaluation")

_PROBED = 8  # prompts whose continuations the conformance check reads


def _of_models(rules: list[str], gamma: int, batch: decoders.Batch
               ) -> tuple[judging.Judge, models.SelfDrafter | None]:
  """Returns the judge of --target and --prompts, and the drafter's heads."""
  name = _DRAFTER.value
  target, loaded, tokenizer = loading.load_target(
      [name], _TARGET.value, _DTYPE.value, batch)
  load = lambda rule: next(iter(loading.load(
      [name], target, loaded, tokenizer, gamma=gamma, nodes=_NODES.value,
      datastore=_DATASTORE.value, dtype=_DTYPE.value, batch=batch,
      rule=rule).values()))
  drafter = load(sj.verifiers.Block())
  found = {"chain": judging.of_loaded(drafter)}
  if drafter.heads is not None:
    found["default tree"] = judging.of_loaded(load(None))
  elif not found["chain"].is_chain:
    found = {"tree": found["chain"]}
  read = prompts_lib.read(
      tokenizer, _PROMPTS.value, field=_FIELD.value, count=_NUM_PROMPTS.value,
      tokens=_PROMPT_TOKENS.value, seed=_SEED.value, chat=_CHAT.value)
  prompts_lib.check_room(
      read.longest, _NEW_TOKENS.value, judging.context(found))
  return judging.Judge(
      target=target, candidates=found, rules=rules, read=read,
      new_tokens=_NEW_TOKENS.value, batch=batch, seed=_SEED.value,
      eos=models.ends(target, tokenizer) if _CHAT.value else None,
      detailed=True), drafter.heads


def _of_trace(rules: list[str], gamma: int, batch: decoders.Batch
              ) -> judging.Judge:
  """Returns the judge of --trace."""
  name = _DRAFTER.value
  if not compositions.composes(name) or compositions.members(name):
    raise ValueError(f"--trace={_TRACE.value} requires a drafter without a "
                     f"model, such as --drafter=ngram, and --drafter is {name}")
  trace = traces.read(_TRACE.value)
  strategy, params = compositions.strategy(
      name, gamma, trace, {}, datastore=_DATASTORE.value)
  return judging.Judge(
      target=trace, candidates={"draft": judging.Candidate(
          (strategy,), params, trace.model)},
      rules=rules, read=trace.prompts, eos=(trace.model.end,),
      new_tokens=trace.longest, batch=batch, seed=_SEED.value, detailed=True)


def _faults(judge: judging.Judge, own: models.SelfDrafter
            ) -> list[conformance.Finding]:
  """Returns the faults of heads, see `conformance`."""
  progress.say("looking for faults of the heads")
  target, prompts = judge.target, judge.read.all[:_PROBED]
  written = common.autoregressive(target.model, 1.0).generate(
      {"target": target.params}, prompts, jax.random.key(_SEED.value),
      max_new_tokens=_NEW_TOKENS.value)
  shortest = min(map(len, written.tokens))
  rows = np.array([row[-shortest:] for row in written.tokens])
  return conformance.check(own.heads, own.params, target, rows) + (
      conformance.check_state(
          judge.decoder("chain", 1.0), judge.params("chain"), prompts))


def main() -> None:
  temperatures = common.numbers("--temperature", _TEMPERATURE.value)
  gammas = common.draft_lengths("--gamma", _GAMMAS.value)
  rules = common.verifier_names("--verifier", _VERIFIERS.value)
  batch = batches.settings(_BATCH) or decoders.Batch(size=1)
  heads = None
  if _TRACE.value is None:
    judge, heads = _of_models(rules, gammas[-1], batch)
  else:
    temperatures, judge = [0.0], _of_trace(rules, gammas[-1], batch)
  output_dir = common.output_directory(_OUTPUT_DIR.value, "evaluation")
  results = judge.results(temperatures, gammas, output_dir / "runs.jsonl")
  faults = _faults(judge, heads) if _CONFORMANCE.value and heads else None
  target = _TRACE.value or models.label(_TARGET.value)
  report.write(output_dir, results, faults,
               f"{models.label(_DRAFTER.value)} for {target}")
  common.finish(output_dir, "evaluation", {
      "rows": results.rows(), "positions": results.positions(),
      "faults": faults and [fault._asdict() for fault in faults],
      "source": judge.read.source})


if __name__ == "__main__":
  common.run(main)
