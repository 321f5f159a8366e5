"""Evaluates one drafter, and looks for the reason if drafts are rejected often.

The drafter is a draft model, heads (a directory of train_drafter.py or of a
published drafter), or a drafter without training such as ngram. Every prompt is
decoded once per temperature and kind of draft (chain or tree). All rules and
sizes are evaluated on these drafts. Given a draft, the expected number of
accepted tokens under a rule is computed exactly from the probabilities of both
models, so random accept and reject decisions add no noise. Confidence intervals
are 95 %, over prompts.

  python experiments/evaluate_drafter.py --drafter=small
  python experiments/evaluate_drafter.py --target=smollm2 --chat \\
    --drafter=results/my_heads --prompts=gsm8k=test.jsonl,mine.txt
  python experiments/evaluate_drafter.py --drafter=ngram --trace=answers.jsonl

Output in --output_dir: report.md with these tables, evaluation.csv,
positions.csv, and a figure as PNG and PDF.

  block efficiency  tokens per target call, for every rule, length and size.
                    Chains are drafted with the largest length in --gamma while
                    token verification generates the text. For shorter lengths,
                    a long draft is evaluated as several short rounds. Heads are
                    less accurate later in a draft, so for them only the first
                    tokens of a draft are used. Heads whose method drafts trees
                    are also evaluated with sampled trees. Trees of the largest
                    size in --nodes are drafted while traversal verification
                    generates the text. Smaller trees are parts of these trees.
                    Results for shorter lengths and smaller sizes are
                    approximate
  positions         for every position of a draft: probability that the position
                    is reached (all earlier tokens are accepted), probability
                    that its token is accepted if it is reached, and recall@K,
                    the target's total probability of the drafter's K most
                    likely tokens
  oracle length     tokens per target call of an ideal draft tree with the K
                    most likely tokens at every position: 1 + the sum over
                    positions of the product of the recalls up to the position.
                    If a draft can be short, each recall is multiplied by the
                    probability that the draft has this position
  entropy           acceptance probability of a token, by the entropy of the
                    target's distribution
  faults            probable errors in the heads' configuration or weights

Faults: with --conformance, the script tests whether decoding computes heads
differently from their training. It scores the heads on text that the target
generated at temperature 0, and again after each of these changes: hidden states
of another layer, position or order, or before the norm; another RoPE base or
order; tensors that are swapped, transposed or joined in another order; heads or
layers in another order; norms and embeddings with another scale. A change is
reported as a fault if it restores the heads: it clearly improves the score and,
if training.json contains the accuracy in training, it reaches this accuracy.
If the heads are less accurate than in training and no change restores them, the
report says that something differs. Without training.json, it says so if the
acceptance rate is below 0.2. The script also reports tensors that are constant
or not used, a wrong map from draft tokens to target tokens, a precision that is
too low, a drafter state that is wrong after rejected drafts, and prompts that
lack the chat template of the training, or have one that the training lacked.

Trace: with --trace, a drafter without a model, such as ngram, is evaluated on
stored token ids instead of a target. These ids are the greedy output
(temperature 0) of any model. For the largest length in --gamma, the result is
exact for that model. recycling needs the target's probabilities, so --trace
refuses it.

If the script is killed, the same command resumes it.
"""

from lib import common  # before jax, which takes long to import

# isort: split
from collections.abc import Sequence

from absl import flags
import jax
from lib import conformance
from lib import drafters as drafters_lib
from lib import extensions
from lib import flags as shared
from lib import models
from lib import progress
from lib.configurations import compositions
from lib.configurations import decoders
from lib.prompts import reading as prompts_lib
from lib.reports import drafter_evaluation as report
from lib.rollouts import batches
from lib.rollouts import judging
from lib.rollouts import traces
import numpy as np

import specjax as sj

_TARGET = shared.target()
_DRAFTER = shared.drafter(
    "Drafter: small or tiny (bundled draft models, for the bundled target), "
    f"smol (bundled, for smollm2), {', '.join(models.HEADS)} (bundled heads), "
    "the directory of heads of train_drafter.py or of a published drafter, "
    f"{compositions.HELP}, or another draft model: {shared.PUBLISHED}")
_GAMMAS = shared.gammas("2,4,8")
_TEMPERATURE = shared.temperatures("1,0")
_VERIFIERS = shared.verifiers(
    "token,block", "Verification rules for chains, comma-separated: "
    f"{', '.join(common.VERIFIERS)}, or {extensions.FORM} for your own rule. "
    "typical and top_2 are lossy (they change the output distribution). Trees "
    "always use their own rules, and yours if it does not require chains")
_PROMPTS = shared.prompts("code,docstrings")
_FIELD = shared.prompt_field()
_CHAT = shared.chat()
_NUM_PROMPTS = shared.num_prompts(12)
_PROMPT_TOKENS = shared.prompt_tokens()
_NEW_TOKENS = shared.new_tokens(64)
_NODES = flags.DEFINE_list(
    "nodes", "8,16,32", "Sizes in nodes, including the root, of the draft "
    "trees of heads, comma-separated. If their method drafts trees, heads are "
    "evaluated with chains and with sampled trees. The flag has no effect on "
    "other drafters")
_DATASTORE = shared.datastore()
_TRACE = flags.DEFINE_string(
    "trace", None, "JSONL file of token ids, one sequence per line: "
    '{"prompt": [...], "completion": [...]}. Completions are greedy output '
    "(temperature 0) of a model. The drafter must have no model, such as "
    "ngram, and flags of the target, of prompts and of sampling have no "
    "effect. Default: decode --prompts with --target")
_CONFORMANCE = flags.DEFINE_bool(
    "conformance", True, "If the drafter has heads, also compare their "
    "accuracy with that in training, and look for faults in their "
    "configuration and weights. This takes about a minute for small models")
_DTYPE = shared.dtype()
_SEED = shared.seed()
_BATCH = batches.untimed_flags(size=16)
_OUTPUT_DIR = shared.output_dir("results/evaluation")
shared.figure_style()

# Flags that have no effect with --trace.
_OF_TARGET = ("target", "dtype", "prompts", "field", "chat", "num_prompts",
              "chat_template_kwargs", "prompt_tokens", "max_new_tokens",
              "temperature", "nodes", "conformance")
_PROBED = 16  # number of prompts whose continuations the conformance check uses


def _of_models(rules: dict[str, sj.Verifier], gammas: Sequence[int],
               sizes: Sequence[int], batch: decoders.Batch, greedy: bool
               ) -> tuple[judging.Judge, drafters_lib.TrainedHeads | None,
                          sj.data.Tokenizer]:
  """Returns the `Judge` for --target and --prompts, the heads and a tokenizer.

  The heads are those of the drafter, or None if it has none. The tokenizer is
  that of the target.
  """
  name = _DRAFTER.value
  target, loaded, tokenizer = drafters_lib.load(
      _TARGET.value, [name], drafters_lib.Options(
          gamma=gammas[-1], nodes=sizes[-1], datastore=_DATASTORE.value),
      dtype=_DTYPE.value, batch=batch, compared=True)
  [drafter] = loaded.values()
  found = {"chain": judging.of_loaded(drafter)}
  tree = judging.sampled_tree(drafter, sizes)
  if tree is not None:
    found["sampled tree"] = tree
  else:
    shared.reject_unread(["nodes"], f"--drafter={name}")
    if drafter.heads is None and not drafter.is_chain:
      found = {"tree": found["chain"]}
  read = _read(tokenizer, _CHAT.value)
  prompts_lib.check_room(
      read.longest, _NEW_TOKENS.value, *judging.context(found))
  return judging.Judge(
      target=target, candidates=found, rules=rules, gammas=gammas,
      read=read, new_tokens=_NEW_TOKENS.value, batch=batch, seed=_SEED.value,
      eos=models.ends(target, tokenizer) if _CHAT.value else None,
      detailed=True, greedy=greedy), drafter.heads, tokenizer


def _read(tokenizer: sj.data.Tokenizer, chat: bool) -> prompts_lib.Prompts:
  """Reads --prompts, with the target's chat template if `chat` is True."""
  return prompts_lib.read(
      tokenizer, _PROMPTS.value, field=_FIELD.value, count=_NUM_PROMPTS.value,
      tokens=_PROMPT_TOKENS.value, seed=_SEED.value, chat=chat)


def _of_trace(rules: dict[str, sj.Verifier], gammas: Sequence[int],
              batch: decoders.Batch) -> judging.Judge:
  """Returns the `Judge` for the sequences of --trace."""
  name = _DRAFTER.value
  if not compositions.composes(name) or compositions.members(name):
    raise ValueError(f"--trace={_TRACE.value} requires a drafter without a "
                     f"model, such as --drafter=ngram, and --drafter is {name}")
  if name == "recycling":
    raise ValueError("--drafter is recycling, which drafts tokens that were "
                     "likely under the target, and --trace has only the "
                     "target's tokens; set --target and leave --trace out")
  shared.reject_unread(_OF_TARGET, f"--trace={_TRACE.value}")
  trace, loaded, _ = drafters_lib.load(
      traces.read(_TRACE.value), [name], drafters_lib.Options(
          gamma=gammas[-1], datastore=_DATASTORE.value), batch=batch)
  [drafter] = loaded.values()
  return judging.Judge(
      target=trace, candidates={"draft": judging.of_loaded(drafter)},
      rules=rules, gammas=gammas, read=trace.prompts, eos=(trace.model.end,),
      new_tokens=trace.longest, batch=batch, seed=_SEED.value, detailed=True,
      greedy=True)


def _written(target: sj.models.Pretrained, prompts: list[list[int]]
             ) -> np.ndarray:
  """Returns prompts with the target's continuations, cut to equal lengths.

  The temperature is 0. On this text, heads are about as accurate as on held-out
  text of their training. They are less accurate on text of temperature 1.
  """
  written = common.autoregressive(target.model, 0.0).generate(
      {"target": target.params}, prompts, jax.random.key(_SEED.value),
      max_new_tokens=_NEW_TOKENS.value)
  shortest = min(map(len, written.tokens))
  return np.array([row[-shortest:] for row in written.tokens])


def _faults(judge: judging.Judge, own: drafters_lib.TrainedHeads,
            tokenizer: sj.data.Tokenizer) -> conformance.Result:
  """Returns the probable faults of heads, found on text of the target."""
  progress.say("looking for faults of the heads")
  target, prompts = judge.target, judge.read.all[:_PROBED]
  state = conformance.check_state(
      judge.decoder("chain", 1.0), judge.params("chain"), prompts)
  if isinstance(own.heads, sj.methods.AssistantHeads):
    return conformance.Result(
        "An assistant reads the target's cache, so it cannot be scored on "
        "text. Only its state after rejected drafts was tested", state)
  start = conformance.Reading.of(own.heads, own.params, target)
  score = conformance.Scorer(target, _written(target, prompts), start.taps)
  summary, found = conformance.check(
      own.heads, own.params, score, own.recorded)
  found += state
  if tokenizer.chat_template is not None:
    other = _read(tokenizer, not _CHAT.value).all[:_PROBED]
    length, _ = judging.context(judge.candidates)
    if max(map(len, other)) + _NEW_TOKENS.value <= length:
      found += conformance.check_format(
          own.heads, own.params, score, _written(target, other),
          chat=_CHAT.value)
  return conformance.Result(summary, found)


def main() -> None:
  temperatures = common.numbers("--temperature", _TEMPERATURE.value)
  gammas = common.draft_lengths("--gamma", _GAMMAS.value)
  sizes = common.draft_lengths("--nodes", _NODES.value, least=2)
  rules = common.verifiers("--verifier", _VERIFIERS.value)
  batch = batches.settings(_BATCH) or decoders.Batch(size=1)
  heads = tokenizer = None
  if _TRACE.value is None:
    judge, heads, tokenizer = _of_models(
        rules, gammas, sizes, batch, greedy=not any(temperatures))
  else:
    temperatures, judge = [0.0], _of_trace(rules, gammas, batch)
  output_dir = common.output_directory(_OUTPUT_DIR.value, "evaluation")
  common.claim(output_dir, "evaluation")
  results = judge.results(temperatures, output_dir / "runs.jsonl")
  faults = (_faults(judge, heads, tokenizer)
            if _CONFORMANCE.value and heads else None)
  target = _TRACE.value or models.label(_TARGET.value)
  report.write(output_dir, results, faults,
               f"{models.label(_DRAFTER.value)} for {target}")
  common.finish(output_dir, "evaluation", {
      "rows": results.rows(), "positions": results.positions(),
      "faults": faults and [fault._asdict() for fault in faults.findings],
      "source": judge.read.source})


if __name__ == "__main__":
  common.run(main)
