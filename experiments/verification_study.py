"""Measures the gain of block verification over token verification.

Token verification, the usual rule of speculative decoding, accepts or rejects
drafted tokens one by one. Block verification decides on the whole draft at
once, and never accepts fewer tokens in expectation. This script measures the
gain in accepted tokens and in speed. It produces the tables and figures of
"Block Verification Accelerates Speculative Decoding" (Sun et al. 2024,
arXiv:2403.10444) for any pair of models and any prompts.

Example, with the bundled models (about two minutes on two CPU cores):

  python experiments/verification_study.py

Output: a table with one row per drafter, temperature, draft length gamma and
verifier. The same figures go to verification.md, verification.csv and three
plots in --output_dir. Columns of the table:

  tokens of a round  block efficiency: tokens per target call
    own rollouts       each verifier generates its own output
    same drafts        all verifiers are evaluated on the drafts of one output,
                       which token verification generates at the largest gamma.
                       Greedy block verification has state, which is reset at
                       every draft
  gain over token    relative gain in block efficiency over token verification
    own rollouts       the gain that a user of the rule gets
    same drafts        less noise, but not the gain of own rollouts, where
                       rounds start elsewhere
  speed-up           speed relative to autoregressive decoding of the same
                     prompt, both timed in alternation; median over prompts
  predicted          speed-up predicted from the prompt's own block efficiency
                     and the cost of a round on the other half of the prompts

A second table has the rounds per output: target calls until --max_new_tokens or
an end-of-text token, a measure of latency. Columns: the mean over outputs, the
90 % quantile, the mean relative to token verification, and the share of slow
outputs, which need more rounds than the 90 % quantile of token verification.
rounds_study.py computes these figures for token and block verification exactly,
given the output, without noise from accept and reject decisions.

Accuracy: given a draft, the expected number of accepted tokens is computed
exactly (Rao-Blackwell), so block efficiency and gain have no noise from accept
and reject decisions. Intervals are 95 % intervals (`analysis.estimate`) over
clusters of prompts. A cluster contains all seeds of a prompt, equal prompts,
and the code and the docstrings of one module.

Number of prompts: a pilot run on other prompts estimates the number of prompts
at which the interval of block verification's gain (on the same drafts) has half
width --error. The study decodes this number of prompts, equally many of every
set. The number does not depend on the results of the study, so its intervals
have the coverage of a study of fixed size. --error=0 decodes all prompts.

--batch=B decodes B prompts together with the same tokens and acceptance in
float32, and --mesh splits them over devices. Speed is then not measured unless
--timing=throughput. --noown_rollouts leaves only the columns "same drafts".

More examples:

  python experiments/verification_study.py --batch=16 --noown_rollouts
  python experiments/verification_study.py --error=0
  python experiments/verification_study.py --gamma=4,6,8,16 \\
    --drafter=small,tiny --temperature=1,0.6,0 --seeds=3
  python experiments/verification_study.py --prompts=gsm8k=test.jsonl,mine.txt
  python experiments/verification_study.py --target=smollm2 \\
    --drafter=mine.gguf --prompts=mt_bench=question.jsonl --chat

Results of each prompt are appended to runs.jsonl in --output_dir. A killed
study resumes from there if started again with the same models, prompts and
flags. Temperatures, seeds and prompt sets may be added. The CSV also splits the
cost of a round into passes timed alone (verify_ms, gamma times draft_ms) and
the rest (overhead_ms). The last line of stdout names verification.json. The
plots are verification_tokens.png, verification_gain.png and
verification_speed.png.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import functools
import pathlib
import sys
from typing import Any

from absl import flags
from lib import common
from lib import flags as shared
from lib import models
from lib.configurations import decoders
from lib.configurations import one_of
from lib.prompts import reading as prompts_lib
from lib.reports import verification_cells as cells
from lib.reports import verification_report as report
from lib.rollouts import batches
from lib.rollouts import resumable
from lib.rollouts import timing

import specjax as sj
from specjax.data import prompt_sets
from specjax.models import Pretrained

_GAMMAS = shared.gammas("2,4,8,16")
_TEMPERATURE = shared.temperatures("1")
_TOP_P = shared.top_p()
_VERIFIERS = shared.verifiers(
    "token,block,greedy_block",
    "Verification rules to compare, comma-separated: "
    f"{', '.join(common.VERIFIERS)}. token is required; typical and top_2 are "
    "lossy")
_PROMPTS = shared.prompts(list(prompt_sets.EMBEDDED))
_FIELD = shared.prompt_field()
_CHAT = shared.chat()
_NUM_PROMPTS = shared.num_prompts(12)
_ERROR = flags.DEFINE_float(
    "error", 3.5, "Required accuracy of the gain of block over token "
    "verification: half width of its 95 % interval in percentage points, for "
    "every drafter, temperature and draft length. A pilot run on other prompts "
    "estimates the number of prompts that reaches it, and only these are "
    "decoded. 0 decodes all prompts", 0.0)
_PROMPT_TOKENS = shared.prompt_tokens()
_NEW_TOKENS = shared.new_tokens(128)
_TARGET = shared.target()
_DRAFTER = shared.drafters()
_DRAFT_VOCABULARY = shared.draft_vocabulary()
_VOCABULARY_DATA = shared.vocabulary_data()
_DTYPE = shared.dtype()
_SEED = shared.seed()
_SEEDS = flags.DEFINE_integer(
    "seeds", 1, "Number of random seeds, and so of outputs, per prompt and "
    "rule. Temperature 0 always uses one", 1)
_BATCH = batches.flags("throughput")
_OWN_ROLLOUTS = flags.DEFINE_bool(
    "own_rollouts", True, "Also decode every prompt with every verifier, and "
    "without drafts, to measure the speed-up and the block efficiency of a "
    "verifier on its own output. --noown_rollouts only compares verifiers on "
    "the same drafts, which is faster")
_OUTPUT_DIR = shared.output_dir("results/verification")

_PILOT = 12  # prompts of the pilot run, which estimates the prompts needed


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Setting:
  """Models, prompts and compared settings of the study.

  Attributes:
    target: target model.
    drafters: draft models by name.
    chains: `{drafter: (gamma -> Strategy, parameters of both models)}`.
    read: prompts of the study and further prompts.
    temperatures: sampling temperatures of both models.
    gammas: draft lengths.
    verifiers: names of the verification rules.
    eos: token ids that end a row, or None.
    batch: `decoders.Batch`, or None to decode prompts alone.
  """

  target: Pretrained
  drafters: dict[str, Pretrained]
  chains: dict[str, Any]
  read: prompts_lib.Prompts
  temperatures: list[float]
  gammas: Sequence[int]
  verifiers: list[str]
  eos: tuple[int, ...] | None
  batch: decoders.Batch | None

  @property
  def capacity(self):
    """Cache slots per row."""
    return self.read.longest + _NEW_TOKENS.value + max(self.gammas) + 1

  def configurations(self, temperature: float):
    """Returns `{name: DecoderRows}` of a temperature.

    One configuration per drafter has the shared drafts, on which all verifiers
    are evaluated. --own_rollouts adds the autoregressive baseline and one
    configuration per drafter, gamma and verifier. All rules of a draft length
    share one compiled program. All configurations of a drafter share the
    prefill.
    """
    rules = one_of.OneOf(tuple(map(common.VERIFIERS.get, self.verifiers)))
    decoder = functools.partial(
        sj.Decoder, target=self.target.model, eos=self.eos,
        transform=sj.LogitsTransform(
            temperature=temperature, top_p=_TOP_P.value))
    longest = max(self.gammas)
    variants = {}
    for name, (chain, params) in self.chains.items():
      draft = lambda gamma, chain=chain: chain(gamma).drafter
      # The prefill depends neither on the draft length nor on the rule.
      reader = decoders.Reader(
          decoder(drafter=draft(longest), verifier=rules.rules[0]), params,
          self.capacity, memory=batches.window(self.batch) or 1)
      make = functools.partial(
          decoders.DecoderRows, params=params, new_tokens=_NEW_TOKENS.value,
          capacity=self.capacity, reader=reader, batch=self.batch)
      if not variants and _OWN_ROLLOUTS.value:
        variants[cells.BASELINE] = make(
            decoder(drafter=sj.drafters.Empty(), verifier=rules.rules[0]),
            change=lambda state: state.replace(drafter=None, made_by=None))
      for gamma in self.gammas:
        own = decoder(drafter=draft(gamma), verifier=rules)
        for verifier in self.verifiers if _OWN_ROLLOUTS.value else ():
          variants[cells.key(name, gamma, verifier)] = make(
              own, change=_acting(rules, verifier, gamma))
      # Evaluating all rules on one rollout takes time. So the rollouts with
      # the shared drafts are a separate configuration, whose time is not used.
      variants[cells.shared_key(name)] = make(
          dataclasses.replace(own, observers=rules.rules),
          change=_acting(rules, "token", longest))
    return variants

  def shared_drafts(self, temperature: float):
    """Returns the configurations with the shared drafts, for the pilot."""
    variants = self.configurations(temperature)
    return {name: variants[name] for name in map(cells.shared_key, self.chains)}

  def check_room(self):
    """Raises `ValueError` if rows are longer than the models' context.

    Decoders also check their configuration when they are created here.
    """
    prompts_lib.check_room(self.read.longest, _NEW_TOKENS.value, min(
        variant.decoder.context_length for temperature in self.temperatures
        for variant in self.configurations(temperature).values()))

  @functools.cached_property
  def fingerprint(self):
    """Hash of the parameters and settings that determine a rollout."""
    members = [self.target, *self.drafters.values()]
    return resumable.fingerprint(
        [m.params for m in members], [m.model for m in members],
        list(self.drafters), self.gammas, self.verifiers, _TOP_P.value,
        _NEW_TOKENS.value, self.eos,
        *([self.batch.timed and self.batch.size] if self.batch else ()))

  def decode(self, prompts: dict[str, list[list[int]]], path: pathlib.Path,
             make: Callable, costs: "_Costs | None"):
    """Returns the runs of the prompts, which are stored in `path`.

    Args:
      prompts: prompts by the name of their set.
      path: JSONL file of the runs.
      make: function from a temperature to `{name: DecoderRows}`.
      costs: passes that are compiled together with the decoders, or None.
    """
    return resumable.run(
        _units(self.fingerprint, self.temperatures, prompts),
        lambda unit: (prompts[unit[3]][unit[4]], unit[2], unit[4]), make, path,
        beside=costs.compiled if costs else (),
        window=batches.window(self.batch), new_tokens=_NEW_TOKENS.value)

  def study(self, runs: dict[tuple, Any], costs: dict[str, Any] | None = None):
    """Returns the `cells.Study` of runs; see there for the costs."""
    return cells.Study(runs, list(self.drafters), self.gammas, self.verifiers,
                       costs, self.read.cluster)


def _load(temperatures: list[float], gammas: Sequence[int],
          verifiers: list[str], batch: decoders.Batch | None):
  """Loads the models and reads the prompts of the flags."""
  target, drafters, tokenizer = models.load_models(
      _TARGET.value, _DRAFTER.value, dtype=_DTYPE.value)
  read = prompts_lib.read(
      tokenizer, _PROMPTS.value, field=_FIELD.value, count=_NUM_PROMPTS.value,
      tokens=_PROMPT_TOKENS.value, seed=_SEED.value, chat=_CHAT.value,
      extra=_PILOT if _ERROR.value else 0, needs_extra=False)
  drafters = {name: models.narrowed(
      member, tokenizer, name, _DRAFT_VOCABULARY.value, _VOCABULARY_DATA.value)
              for name, member in drafters.items()}
  target = batches.with_placed_params(batch, target)
  chains = {}
  for name, member in drafters.items():
    chain, params = models.chain(target, member, name)
    chains[name] = chain, batches.placed(
        batch, chain(max(gammas)).decoder(target.model),
        {"target": target.params, "drafter": params})
  return _Setting(
      target=target, drafters=drafters, read=read, temperatures=temperatures,
      gammas=gammas, verifiers=verifiers, batch=batch,
      chains=chains,
      eos=models.ends(target, tokenizer) if _CHAT.value else None)


def _batch_of_flags():
  """Returns the `decoders.Batch`, or None to decode prompts alone."""
  timing_ = _BATCH.timing.value
  if timing_ not in (None, "none") and not _OWN_ROLLOUTS.value:
    raise ValueError(f"--timing={timing_} requires --own_rollouts; give "
                     "--timing=none")
  return batches.settings(_BATCH, timed=_OWN_ROLLOUTS.value)


def _acting(rules: one_of.OneOf, verifier: str, gamma: int):
  """Returns a function that selects one rule for all rows of a state."""
  rule = common.VERIFIERS[verifier]
  return lambda state: state.replace(
      verifier=rules.start(rule, gamma, len(state.lengths)))


class _Costs:
  """Times, in seconds, of single passes of the target and of the drafters."""

  def __init__(self, target: Pretrained, drafters: dict[str, Pretrained],
               gammas: Sequence[int], capacity: int, longest: int):
    used = longest + _NEW_TOKENS.value // 2
    passes = lambda member, tokens: functools.cache(functools.partial(
        timing.passes, member.model, member.params, capacity, used, tokens))
    self._verify = {gamma: passes(target, gamma + 1) for gamma in gammas}
    self._draft = {name: passes(drafter, 1)
                   for name, drafter in drafters.items()}

  @property
  def compiled(self):
    """Functions that compile the passes."""
    return [*self._verify.values(), *self._draft.values()]

  def seconds(self):
    """Returns `{"verify": {gamma: seconds}, "draft": {drafter: seconds}}`."""
    measured = lambda calls: {
        name: timing.median(call()) for name, call in calls.items()}
    return {"verify": measured(self._verify), "draft": measured(self._draft)}


def _units(fingerprint: str, temperatures: list[float],
           prompts: dict[str, list[list[int]]]):
  """Returns the rollouts to decode, in order.

  The prompt sets alternate, so that early stopping decodes equally many of
  each. At temperature 0 there is one seed, because all give the same rollout.
  """
  return [(fingerprint, t, _SEED.value + s, name, i, resumable.digest(row))
          for t in temperatures
          for name, i, row in prompts_lib.alternating(prompts)
          for s in range(_SEEDS.value if t > 0 else 1)]


def _turns(needed: int, read: prompts_lib.Prompts):
  """Returns the first prompts of every set, as few as give enough clusters.

  A cluster is a group of correlated prompts (`analysis.estimate`). Every set
  contributes equally many prompts. Together they have at least `needed`
  clusters, or all that exist.
  """
  found = set()
  for turn in range(max(map(len, read.sets.values()))):
    found |= {read.cluster(resumable.digest(rows[turn]))
              for rows in read.sets.values() if turn < len(rows)}
    if len(found) >= needed:
      break
  return {name: rows[:turn + 1] for name, rows in read.sets.items()}


def _needed(read: prompts_lib.Prompts, decode: Callable, study_of: Callable):
  """Returns the number of clusters that --error needs, by a pilot.

  The pilot decodes prompts of other documents than the study, so the number
  does not depend on the results of the study.

  Args:
    read: prompts of the study and further prompts.
    decode: function from the pilot's prompts to the runs of the shared drafts.
    study_of: function from runs to a `cells.Study`.

  Returns:
    The number, or None (decode all) if there are too few other prompts.
  """
  measured = set(read.clusters)
  pilot = [row for row in read.extra
           if read.cluster(resumable.digest(row)) not in measured]
  found = pilot and study_of(decode(pilot)).clusters_needed(
      "block", _ERROR.value / 100)
  if not found:
    print("--error needs further prompts to find out how many are enough, and "
          "there are too few; all are decoded", file=sys.stderr)
  return found or None


def _report(study: cells.Study, runs: dict[tuple, Any],
            prompts: dict[str, list[list[int]]], source: dict[str, Any],
            output_dir: pathlib.Path):
  """Prints and writes all tables and figures."""
  rows = study.rows()
  by_prompts = [row for name in prompts for row in study.rows(name)]
  report.print_table(rows)
  decoded = len({unit[3:] for unit in runs})
  reached = study.half_width("block") if "block" in _VERIFIERS.value else None
  print(f"{decoded} of {sum(map(len, prompts.values()))} prompts were decoded"
        + ("" if reached is None else "; the interval of block's gain on the "
           f"same drafts is at most 2 x {100 * reached:.2f} points wide"))
  report.write(output_dir, rows + by_prompts, study.prompt_rows())
  print(f"wrote verification.md, .csv, {cells.PROMPTS} and figures to "
        f"{output_dir}")
  common.finish(output_dir, "verification", {
      "rows": rows, "by_prompts": by_prompts, "source": source,
      "seeds": _SEEDS.value, "num_prompts": decoded, "error": reached,
      "draft_vocabulary": _DRAFT_VOCABULARY.value and {
          "size": _DRAFT_VOCABULARY.value, "data": _VOCABULARY_DATA.value},
      "autoregressive_tokens_per_second": study.baseline_speed()})


def _verifiers() -> list[str]:
  """Returns the names of --verifier."""
  names = common.verifier_names("--verifier", _VERIFIERS.value)
  if "token" not in names:
    raise ValueError("--verifier must contain 'token', with which the other "
                     "rules are compared; add it")
  return names


def main():
  gammas = common.draft_lengths("--gamma", _GAMMAS.value)
  verifiers = _verifiers()
  temperatures = common.numbers("--temperature", _TEMPERATURE.value)
  common.given("--drafter", _DRAFTER.value, "one at least, such as small")
  shared.check_vocabulary_data(_DRAFT_VOCABULARY, _VOCABULARY_DATA)
  batch = _batch_of_flags()
  setting = _load(temperatures, gammas, verifiers, batch)
  setting.check_room()
  output_dir = common.output_directory(_OUTPUT_DIR.value, "study")
  read = setting.read
  costs = None if batch else _Costs(
      setting.target, setting.drafters, gammas, setting.capacity, read.longest)
  prompts = read.sets
  if _ERROR.value and "block" in verifiers:
    needed = _needed(read, lambda pilot: setting.decode(
        {"pilot": pilot}, output_dir / "pilot.jsonl", setting.shared_drafts,
        costs), setting.study)
    prompts = _turns(needed, read) if needed else prompts
  runs = setting.decode(
      prompts, output_dir / "runs.jsonl", setting.configurations, costs)
  _report(setting.study(runs, costs and costs.seconds()), runs, read.sets,
          read.source, output_dir)


if __name__ == "__main__":
  common.run(main)
