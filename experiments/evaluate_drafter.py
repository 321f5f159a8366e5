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

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import pathlib
from typing import Any

from absl import flags
import jax
from lib import common
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
from lib.rollouts import resumable
from lib.rollouts import statistics
from lib.rollouts import traces
import numpy as np

import specjax as sj
from specjax import interfaces
from specjax.models import Pretrained

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

_CHAIN, _TREE = "chain", "default tree"
_PROBED = 8  # prompts whose continuations the conformance check reads


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Setting:
  """Drafter and target of the evaluation.

  Attributes:
    target: target model, or a `traces.Trace`.
    drafters: `{kind of draft: loading.Loaded}`.
    read: prompts.
    eos: token ids that end a row, or None.
    limit: largest number of new tokens.
    batch: `decoders.Batch`.
  """

  target: Any
  drafters: Mapping[str, loading.Loaded]
  read: prompts_lib.Prompts
  eos: tuple[int, ...] | None
  limit: int
  batch: decoders.Batch

  def decoder(self, kind: str, temperature: float,
              observers: Sequence[sj.Verifier] = ()) -> sj.Decoder:
    """Returns the decoder of a kind of draft."""
    drafter = self.drafters[kind]
    rule = (common.VERIFIERS["token"] if self.is_chain(kind)
            else drafter.strategy.verifier)
    return sj.Decoder(
        target=drafter.model, drafter=drafter.strategy.drafter, verifier=rule,
        eos=self.eos, observers=tuple(observers),
        transform=sj.LogitsTransform(temperature=temperature))

  def is_chain(self, kind: str) -> bool:
    """Returns whether the drafts are chains."""
    return "chain" in interfaces.capabilities(
        self.drafters[kind].strategy.drafter)

  def observed(self, kind: str, temperature: float) -> dict[str, sj.Verifier]:
    """Returns the rules and statistics of a kind of draft, by name."""
    if not self.is_chain(kind):
      return {}
    rules = {name: common.VERIFIERS[name] for name in _VERIFIERS.value}
    return rules | statistics.statistics(
        temperature, self.target.model.vocab_size)

  def params(self, kind: str) -> dict[str, Any]:
    """Returns the parameters of a decoder."""
    return {"target": self.target.params,
            "drafter": self.drafters[kind].params}

  def configurations(self, temperature: float
                     ) -> dict[str, decoders.DecoderRows]:
    """Returns a configuration per kind of draft."""
    nodes = max(x.strategy.drafter.num_nodes for x in self.drafters.values())
    return {kind: decoders.DecoderRows(
        self.decoder(kind, temperature,
                     self.observed(kind, temperature).values()),
        self.params(kind), self.limit,
        self.read.longest + self.limit + nodes, batch=self.batch)
            for kind in self.drafters}


def _drafters(name: str, target: Pretrained, loaded: Mapping[str, Pretrained],
              tokenizer: sj.data.Tokenizer, gamma: int,
              batch: decoders.Batch | None) -> dict[str, loading.Loaded]:
  """Returns the drafter as a chain, and heads also with their default tree."""
  load = lambda rule: next(iter(loading.load(
      [name], target, loaded, tokenizer, gamma=gamma, nodes=_NODES.value,
      datastore=_DATASTORE.value, dtype=_DTYPE.value, batch=batch,
      rule=rule).values()))
  chain = load(sj.verifiers.Block())
  if chain.heads is None:
    return {_CHAIN: chain}
  return {_CHAIN: chain, _TREE: load(None)}


def _of_models(gamma: int, batch: decoders.Batch) -> _Setting:
  """Returns the setting of --target and --prompts."""
  target, loaded, tokenizer = loading.load_target(
      [_DRAFTER.value], _TARGET.value, _DTYPE.value, batch)
  drafters = _drafters(
      _DRAFTER.value, target, loaded, tokenizer, gamma, batch)
  read = prompts_lib.read(
      tokenizer, _PROMPTS.value, field=_FIELD.value, count=_NUM_PROMPTS.value,
      tokens=_PROMPT_TOKENS.value, seed=_SEED.value, chat=_CHAT.value)
  prompts_lib.check_room(read.longest, _NEW_TOKENS.value, min(
      x.strategy.decoder(x.model).context_length for x in drafters.values()))
  return _Setting(
      target=target, drafters=drafters, read=read, limit=_NEW_TOKENS.value,
      eos=models.ends(target, tokenizer) if _CHAT.value else None, batch=batch)


def _of_trace(gamma: int, batch: decoders.Batch) -> _Setting:
  """Returns the setting of --trace."""
  name = _DRAFTER.value
  if not compositions.composes(name) or compositions.members(name):
    raise ValueError(f"--trace={_TRACE.value} requires a drafter without a "
                     f"model, such as --drafter=ngram, and --drafter is {name}")
  trace = traces.read(_TRACE.value)
  strategy, params = compositions.strategy(
      name, gamma, trace, {}, datastore=_DATASTORE.value)
  return _Setting(
      target=trace, drafters={_CHAIN: loading.Loaded(
          strategy, params, trace.model)},
      read=trace.prompts, eos=(trace.model.end,), limit=trace.longest,
      batch=batch)


def _runs(setting: _Setting, temperatures: Sequence[float],
          path: pathlib.Path) -> dict[tuple, dict[str, Any]]:
  """Returns `{unit: {kind of draft: run}}` of all prompts."""
  fingerprint = resumable.fingerprint(
      [setting.target.params, *(x.params for x in setting.drafters.values())],
      [x.strategy for x in setting.drafters.values()], setting.eos,
      _VERIFIERS.value, setting.limit)
  units = [(fingerprint, t, _SEED.value, name, i, resumable.digest(row))
           for t in temperatures
           for name, i, row in prompts_lib.alternating(setting.read.sets)]
  return resumable.run(
      units, lambda unit: (
          setting.read.sets[unit[3]][unit[4]], unit[2], unit[4]),
      setting.configurations, path, window=batches.window(setting.batch),
      new_tokens=setting.limit)


def _faults(setting: _Setting) -> list[conformance.Finding]:
  """Returns the faults of heads, see `conformance`."""
  progress.say("looking for faults of the heads")
  heads, target = setting.drafters[_CHAIN].heads, setting.target
  prompts = setting.read.all[:_PROBED]
  written = common.autoregressive(target.model, 1.0).generate(
      {"target": target.params}, prompts, jax.random.key(_SEED.value),
      max_new_tokens=_NEW_TOKENS.value)
  shortest = min(map(len, written.tokens))
  rows = np.array([row[-shortest:] for row in written.tokens])
  return conformance.check(heads.heads, heads.params, target, rows) + (
      conformance.check_state(setting.decoder(_CHAIN, 1.0),
                              setting.params(_CHAIN), prompts))


def main() -> None:
  temperatures = common.numbers("--temperature", _TEMPERATURE.value)
  gammas = common.draft_lengths("--gamma", _GAMMAS.value)
  rules = common.verifier_names("--verifier", _VERIFIERS.value)
  batch = batches.settings(_BATCH) or decoders.Batch(size=1)
  if _TRACE.value is None:
    setting = _of_models(gammas[-1], batch)
  else:
    temperatures, setting = [0.0], _of_trace(gammas[-1], batch)
  output_dir = common.output_directory(_OUTPUT_DIR.value, "evaluation")
  runs = _runs(setting, temperatures, output_dir / "runs.jsonl")
  results = report.Results(
      runs=runs, gammas=gammas, rules=rules, cluster_of=setting.read.cluster,
      observed={(kind, t): list(setting.observed(kind, t))
                for kind in setting.drafters for t in temperatures},
      own_rule={kind: common.VERIFIER_NAMES[x.strategy.verifier]
                for kind, x in setting.drafters.items()})
  faults = (_faults(setting) if _CONFORMANCE.value
            and setting.drafters[_CHAIN].heads else None)
  name = models.label(_DRAFTER.value)
  target = _TRACE.value or models.label(_TARGET.value)
  report.write(output_dir, results, faults, f"{name} for {target}")
  common.finish(output_dir, "evaluation", {
      "rows": results.rows(), "positions": results.positions(),
      "faults": faults and [fault._asdict() for fault in faults],
      "source": setting.read.source})


if __name__ == "__main__":
  common.run(main)
