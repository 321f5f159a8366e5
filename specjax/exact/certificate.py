"""`certify`: a proof that a rule is lossless, or a counterexample."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import functools
import itertools
import math
from typing import Any
from typing import NamedTuple

import tqdm

from specjax.exact import enumeration
from specjax.exact import schemes as schemes_lib
from specjax.exact import trials
from specjax.exact.compiled import Compiled
from specjax.exact.compiled import Example
from specjax.exact.drafts import Drafts
from specjax.exact.drafts import ended_by
from specjax.exact.drafts import Stop
from specjax.exact.pairs import full_information_optimum
from specjax.exact.pairs import KINDS
from specjax.interfaces import Verifier
from specjax.utils import fields

_TWO_ROUNDS = 1 << 12  # largest V**(2 gamma + 1) for two rounds
_ENUMERATED = 1 << 14  # largest V**(gamma + 1) that `at` enumerates
_AUDITED = 1 << 23  # largest (gamma + 1) V that `at` audits


@dataclasses.dataclass(frozen=True)
class Certificate:
  """Result of `certify` for a selection of models and drafts.

  The result for an enumerated model is a sum over all drafts after all roots.
  It does not depend on random numbers. A rule without state that is lossless
  for one round after every context is lossless for all rounds, by induction.

  A certificate does not exclude a defect that appears only with another draft
  length, tree, vocabulary or kind of model, or after more rounds of a rule with
  state. Audits at production sizes sample their drafts. Their false-alarm
  probability is below 1e-9, see `exact.audit`.

  Attributes:
    lossless: True if every law is a probability distribution and agrees with
      the rule's `figures` and `survival` (probability of accepting at least i
      tokens), no audit failed, and no total variation exceeds the tolerance.
      The tolerance is 1e-9 in float64, 1e-5 in float32 and 1e-4 at production
      sizes. Negative entries of laws count as rounding if their total is at
      most 1e-12 in float64 and 1e-6 in float32, with every draft weighted by
      its probability.
    total_variation: total variation between the distributions of the rule's
      output and of the target: the largest over the small models. If all
      failures are in other trials, the largest over those.
    witness: settings of the trial with this total variation: arguments of
      `random_pair`, draft length gamma, rounds, and the kind of drafting unless
      autoregressive.
    expected_tokens: expected tokens of the first round, averaged over the small
      models with chains.
    bound: upper bound on `expected_tokens` of lossless rules: 1 +
      `full_information_optimum`, averaged over the same models. A lossy rule
      can exceed it.
    defects: reasons why a law is not a probability distribution, or why an
      audit failed.
    models: number of pairs of small models enumerated with chains.
    laws: number of evaluated laws.
    dtype: dtype of the law's inputs, unless a line of `tried` names another.
    declared_lossy: True if the rule declares `lossless = False`.
    trees: number of enumerations with trees. Each has one tree, one drawing
      scheme and one pair of models.
    tried: one line for every kind of trial that `thorough` or `at` adds.
    sizes: largest enumerated sizes and all audited sizes, as text.
    cause: probable cause of a failure, or an empty string.
    coverage: number of evaluated drafts for each property of a draft at which
      rules are often wrong, such as "padding in float32". `show` prints it.
    example: a draft that shows the failure, with p and q at every node and the
      rule's law; or None.
  """

  lossless: bool
  total_variation: float
  witness: dict[str, Any]
  expected_tokens: float
  bound: float
  defects: tuple[str, ...]
  models: int
  laws: int
  dtype: str
  declared_lossy: bool = False
  trees: int = 0
  tried: tuple[str, ...] = ()
  sizes: str = ""
  cause: str = ""
  coverage: dict[str, int] = dataclasses.field(default_factory=dict)
  example: Example | None = dataclasses.field(
      default=None, compare=False, repr=False)

  def __str__(self):
    where = ", ".join(f"{k}={v}" for k, v in self.witness.items())
    models = f"{self.models} models"
    if self.trees:
      models += f" with chains, {self.trees:,} with trees"
    lines = [
        self._verdict(),
        f"  worst total variation  {self.total_variation:.2e}  ({where})",
        f"  tokens per round       {self.expected_tokens:.4f}",
        f"  full-information bound {self.bound:.4f}  (of lossless rules)",
        f"  enumerated             {models}, {self.laws:,} laws, "
        f"{self.dtype}",
        *(f"  and                    {line}" for line in self.tried),
        "  on these models; exact.Certificate says what follows for others",
        *(f"  defect: {defect}" for defect in self.defects),
    ]
    if self.example is not None:
      lines.append(str(self.example))
    return "\n".join(lines)

  def _verdict(self) -> str:
    if self.lossless:
      return f"lossless on everything tried: {self.sizes}"
    verdict = "NOT LOSSLESS"
    if self.declared_lossy:
      verdict += ", as the rule declares"
    reasons = [*self.defects[:1], *([self.cause] if self.cause else [])]
    return f"{verdict}: {'; '.join(reasons)}" if reasons else verdict

  def show(self) -> None:
    """Prints the certificate and its coverage."""
    print(self)
    print("drafts tried, by property")
    for name, count in self.coverage.items():
      print(f"  {count:9,d}  {name}")


def certify(verifier: Verifier | Compiled, *,
            vocab_sizes: Sequence[int] | None = None,
            gammas: Sequence[int] = (1, 2, 3, 4), rounds: int | None = None,
            seeds: Sequence[int] = (0,), kinds: Sequence[str] = KINDS,
            dtype: str = "float64", drafting: str | None = None,
            trees: Sequence[Sequence[int]] | None = None,
            schemes: Sequence[str | schemes_lib.Scheme] | None = None,
            thorough: bool = True, at: Sequence[tuple[int, int]] = (),
            stop: Stop | None = None, progress: bool | None = None
            ) -> Certificate:
  """Proves a verifier lossless on small models, or shows a counterexample.

  Use at least two vocabularies of 3 or more tokens. Most bugs do not appear
  with V = 2, or with models that ignore their context. On two cores, a rule on
  chains takes about 20 seconds and a rule on trees about 40.

  Args:
    verifier: the rule, or a `Compiled` rule.
    vocab_sizes: vocabulary sizes V, each at least 2. None means (3, 4). For a
      rule with state it means (3,), because its number of histories is larger.
    gammas: draft lengths of chains, each at least 1.
    rounds: number of rounds, see `enumerate_chains`. For a rule without state
      one round is a proof, by induction. None means 2, or 1 if V^(2 gamma + 1)
      is above 2^12. For a rule with state it means 3. Trees with more than 27
      drafts are enumerated for one round.
    seeds: seeds of the random models. Each seed produces a model of each kind.
    kinds: kinds of models, see `random_pair`.
    dtype: "float64" or "float32".
    drafting: kind of drafting, see `enumerate_chains`. None means every kind
      allowed by the rule's `requires`. "product" excludes trees.
    trees: the `parents` of the trees to enumerate. None means no trees for a
      rule that requires a chain. For other rules None means all trees of up to
      5 nodes, in every order of nodes, and some of up to 7 (fewer for larger
      V).
    schemes: drawing schemes for tokens of trees, see `enumerate_trees`. None
      means all schemes of `exact.schemes` with which the rule is lossless.
    thorough: if True, also run the following trials, until one fails:
      chains that end in padding; padding before real nodes of a tree; product
      drafts, unless the rule requires an autoregressive drafter; q positive at
      up to 12 tokens; float32; gamma up to 15, V up to 301 and trees of up to
      17 nodes; many rounds of a rule with state; audits in float32 at
      production sizes (gamma 16 with V = 32,000 and gamma 8 with V = 151,936,
      or trees of 64 nodes, and gamma 2 with V = 262,144), see `exact.audit`.
      Trials with padding are left out for a rule that requires full drafts. For
      a rule that requires deterministic drafts, all rows of q are one-hot.
    at: additional sizes `(gamma, V)`, with chains. A size with at most 2^14
      drafts is enumerated. A larger size is audited. The result is in `tried`.
    stop: rule that ends the drafted chains, used with the small models only. It
      may be a `drafters.stop_rules.StopRule`, used in its first round with rows
      of q as hidden states. It may also be a jax function `(probs [gamma, V],
      tokens [gamma]) -> length []` that returns the number of submitted tokens.
      A function is refuted if its result depends on dropped tokens.
    progress: if True, report progress on stderr. None means only on a terminal.

  Returns:
    A `Certificate`. Its string is a report, after a failure with a draft that
    shows it. `Certificate.show` also prints which drafts were tried.

  Raises:
    ValueError: a size is not a whole number of at least its minimum, or has too
      many drafts to enumerate; `kinds` or `dtype` is unknown; `trees` is
      combined with `stop` or with a drafting other than autoregressive;
      `schemes` is set and there are no trees.

  Example:
    >>> import specjax as sj
    >>> found = sj.exact.certify(
    ...     sj.verifiers.Token(), vocab_sizes=(3,), gammas=(2,))
    >>> found.lossless, found.total_variation < 1e-12, found.models
    (True, True, 13)
  """
  compiled = Compiled.of(verifier)
  rule = compiled.rule
  compiled.coverage.clear()
  if vocab_sizes is None:
    vocab_sizes = (3,) if rule.remembers else (3, 4)
  if trees is None and _is_chain_only(rule, drafting, stop):
    trees = ()
  _check_settings(kinds, dtype, drafting, trees, stop)
  settings = _Settings(
      compiled, vocab_sizes, gammas, rounds, seeds, kinds, dtype, drafting,
      trees, _schemes(rule, schemes, trees),
      None if stop is None else ended_by(stop))
  settings.check()
  _check_at(at)
  others = [*(settings.thorough_groups() if thorough else ()),
            *(settings.at_size(*size) for size in at)]
  with tqdm.tqdm(total=2 + len(others), desc="certifying", unit="group",
                 dynamic_ncols=True,
                 disable=None if progress is None else not progress) as bar:
    counted = functools.partial(_counted, bar)
    chains, small_trees = map(
        list, (counted(settings.chains()), counted(settings.small_trees())))
    found = []
    for trial in itertools.chain.from_iterable(map(counted, others)):
      found.append(trial)
      if trial.fails:  # the other groups are left out
        break
  return _certificate(chains, small_trees, found, dtype, rule,
                      dict(compiled.coverage))


def _counted(bar: tqdm.tqdm, group: Iterable[trials.Found]
             ) -> Iterator[trials.Found]:
  """Yields the trials of a group, and shows their number in a progress bar."""
  for number, trial in enumerate(group, 1):
    bar.set_postfix_str(f"trial {number} of group {bar.n + 1}")
    yield trial
  bar.update()


def _is_chain_only(rule: Verifier, drafting: str | None,
                   stop: Stop | None) -> bool:
  """Returns True if no trees are enumerated by default."""
  return ("chain" in rule.requires or stop is not None
          or drafting not in (None, "autoregressive"))


def _schemes(rule: Verifier, schemes: Sequence[str | schemes_lib.Scheme] | None,
             trees: Sequence[Sequence[int]] | None
             ) -> Sequence[str | schemes_lib.Scheme]:
  """Returns the drawing schemes of the trees.

  Raises `ValueError` if only one of `schemes` and `trees` is empty.
  """
  if schemes is None:
    return schemes_lib.sound_for(rule)
  if bool(schemes) != (trees is None or bool(trees)):
    raise ValueError(f"schemes is {schemes} and trees {trees}; trees are drawn "
                     "by schemes: give both, or leave the schemes out")
  return schemes


class _Settings(NamedTuple):
  """Arguments of `certify` with defaults applied, and its trials.

  If `trees` is None, the default trees are enumerated. `ended` is the result of
  `exact.ended_by` for the argument `stop`, or None.
  """

  compiled: Compiled
  vocab_sizes: Sequence[int]
  gammas: Sequence[int]
  rounds: int | None
  seeds: Sequence[int]
  kinds: Sequence[str]
  dtype: str
  drafting: str | None
  trees: Sequence[Sequence[int]] | None
  schemes: Sequence[str | schemes_lib.Scheme]
  ended: Callable[[Drafts], Drafts] | None

  @property
  def several_rounds(self) -> int:
    """Number of rounds in an enumeration of small models."""
    if self.rounds is not None:
      return self.rounds
    return 3 if self.compiled.rule.remembers else 2

  @property
  def padded_to(self) -> int:
    """Number of nodes to which chains are padded; 0 means no padding.

    Chains for a rule on trees are padded to equal numbers of nodes. They then
    share one compiled program.
    """
    unpadded = {"chain", "full"} & {*self.compiled.rule.requires}
    return 0 if unpadded else max(self.gammas) + 1

  def check(self) -> None:
    """Raises `ValueError` unless all sizes are valid and small enough."""
    _check_sizes(
        vocab_sizes=(self.vocab_sizes, 2), gammas=(self.gammas, 1),
        rounds=((self.several_rounds,), 1), seeds=(self.seeds, 0))
    lengths = {*self.gammas, *(len(tree) - 1 for tree in self.trees or ())}
    for vocab_size, drafted in itertools.product(self.vocab_sizes, lengths):
      enumeration.check_size(vocab_size, drafted, drafted + 1)

  def chains(self) -> Iterator[trials.Found]:
    """Yields the results of all enumerations of small models with chains."""
    for vocab_size, gamma in itertools.product(self.vocab_sizes, self.gammas):
      once = (self.rounds is None and not self.compiled.rule.remembers
              and vocab_size**(2 * gamma + 1) > _TWO_ROUNDS)
      yield from trials.on_chains(
          self.compiled, vocab_size, (gamma,), self.kinds, self.seeds,
          1 if once else self.several_rounds, self.dtype,
          self.drafting or "autoregressive", self.padded_to, self.ended)

  def small_trees(self) -> Iterator[trials.Found]:
    """Yields the results of all enumerations of small models with trees."""
    for vocab_size in self.vocab_sizes:
      yield from trials.on_trees(
          self.compiled, vocab_size, self.trees, self.schemes, self.kinds,
          self.seeds, self.several_rounds, self.dtype)

  def thorough_groups(self) -> Iterator[Iterator[trials.Found]]:
    """Yields groups of the trials that `thorough` of `certify` adds."""
    rule, default_trees = self.compiled.rule, self.trees is None
    largest = max(self.vocab_sizes)
    telling = trials.telling(self.kinds)
    if self.drafting is None and "autoregressive" not in rule.requires:
      yield trials.on_chains(
          self.compiled, largest, self.gammas, telling, self.seeds,
          self.several_rounds if rule.remembers else 1, self.dtype, "product",
          self.padded_to, self.ended)
    if "greedy" in self.kinds:  # a pair of such models has one draft
      yield trials.on_chains(
          self.compiled, largest, self.gammas, ("greedy",), range(1, 16), 1,
          self.dtype, self.drafting or "autoregressive", self.padded_to,
          self.ended)
    if "full" not in rule.requires:
      yield trials.padded(self.compiled, largest, self.gammas, self.seeds,
                          telling, self.dtype)
      yield trials.mostly_padding(self.compiled, self.seeds, self.dtype)
    yield trials.dense(self.compiled, self.kinds, self.seeds, self.dtype,
                       self.schemes if default_trees else ())
    if self.dtype == "float64":
      yield trials.in_float32(self.compiled, largest, self.gammas, self.seeds,
                              telling, self.trees, self.schemes)
    if default_trees:
      yield trials.on_special_trees(self.compiled, largest, self.schemes,
                                    telling, self.seeds, self.dtype)
    yield trials.on_larger_models(self.compiled, self.seeds, self.dtype,
                                  self.schemes if default_trees else ())
    yield trials.unbatched(self.compiled, self.dtype)
    yield trials.audits(self.compiled, default_trees, self.seeds)

  def at_size(self, gamma: int, vocab_size: int) -> Iterator[trials.Found]:
    """Enumerates a size of the argument `at`, or audits it if it is large."""
    if vocab_size**(gamma + 1) <= _ENUMERATED:
      return trials.on_chains(
          self.compiled, vocab_size, (gamma,), trials.telling(self.kinds),
          self.seeds, 1, self.dtype, "autoregressive")
    return (trial for seed in self.seeds for trial in trials.audited(
        self.compiled, tuple(range(-1, gamma)), vocab_size, seed))


def _check_sizes(**sizes: tuple[Sequence[int], int]) -> None:
  """Raises `ValueError` unless all numbers of each setting are large enough.

  Args:
    **sizes: `name=(numbers, least)` for each setting: its numbers, and the
      smallest allowed number.
  """
  for name, (values, least) in sizes.items():
    if not (isinstance(values, Sequence) and values and all(
        fields.is_whole(x) and x >= least for x in values)):
      raise ValueError(f"{name} is {values}; give whole numbers of at least "
                       f"{least} in a non-empty tuple, such as ({least},)")


def _check_settings(kinds: Sequence[str], dtype: str, drafting: str | None,
                    trees: Sequence[Sequence[int]] | None,
                    stop: Stop | None) -> None:
  """Raises `ValueError` if a setting is unknown or two settings conflict."""
  if isinstance(kinds, str) or not kinds or not set(kinds) <= set(KINDS):
    raise ValueError(f"kinds is {kinds!r}; give one or more of "
                     f"{', '.join(KINDS)}")
  if dtype not in enumeration.TOLERANCE:
    raise ValueError(f"dtype is {dtype!r}; it must be 'float64' or 'float32'")
  if trees and stop is not None:
    raise ValueError("stop and trees cannot be combined, because stop ends "
                     "chains; leave one of them out")
  if trees and drafting not in (None, "autoregressive"):
    raise ValueError(f"drafting is {drafting!r} and trees are given; trees are "
                     "drafted by schemes: leave one of them out")


def _check_at(at: Sequence[tuple[int, int]]) -> None:
  """Raises `ValueError` unless all sizes `(gamma, V)` can be audited."""
  for size in at:
    is_pair = isinstance(size, Sequence) and len(size) == 2
    if not is_pair or not all(fields.is_whole(x) for x in size) or (
        size[0] < 1 or size[1] < 2):
      raise ValueError(f"at contains {size!r}; give pairs (gamma, V) of at "
                       "least (1, 2), such as at=[(8, 32000)]")
    gamma, vocab_size = size
    if (gamma + 1) * vocab_size > _AUDITED:
      raise ValueError(
          f"at contains gamma {gamma} with V = {vocab_size:,}; its law has "
          f"(gamma + 1) V = {(gamma + 1) * vocab_size:,} numbers, and the "
          f"limit is {_AUDITED:,}: make gamma or V smaller")


def _certificate(chains: list[trials.Found], trees: list[trials.Found],
                 others: list[trials.Found], dtype: str, rule: Verifier,
                 coverage: dict[str, int]) -> Certificate:
  """Returns the certificate of all trials.

  Args:
    chains: trials on small models with chains.
    trees: trials on small models with trees.
    others: all other trials.
    dtype: the argument `dtype` of `certify`.
    rule: the tested rule.
    coverage: numbers of drafts by property.
  """
  found = [*chains, *trees, *others]
  worst = _worst(chains + trees, others)
  defects = frozenset().union(*(trial.outcome.defects for trial in found))
  tried = itertools.groupby(trial.trial for trial in others)
  return Certificate(
      lossless=not worst.fails, total_variation=worst.outcome.total_variation,
      witness=worst.witness | (
          {} if worst.dtype == dtype else {"dtype": worst.dtype}),
      expected_tokens=_mean(
          1 + trial.outcome.expected_accepted for trial in chains),
      bound=_mean(map(_bound, chains)), defects=_sorted(defects),
      models=len(chains), laws=sum(trial.outcome.laws for trial in found),
      dtype=dtype, declared_lossy=not rule.lossless, trees=len(trees),
      tried=tuple(f"{len(list(same)):,} x {trial}" for trial, same in tried),
      sizes=_sizes(found), cause=_cause(found), coverage=coverage,
      example=worst.example() if worst.fails else None)


def _worst(small: list[trials.Found], others: list[trials.Found]
           ) -> trials.Found:
  """Returns the trial with the largest error.

  Failed trials on small models have priority over other failed trials.
  """
  failed = lambda trials_: [trial for trial in trials_ if trial.fails]
  return max(failed(small) or failed(others) or small, key=lambda trial: (
      trial.outcome.total_variation, len(trial.outcome.defects)))


def _mean(values: Iterable[float]) -> float:
  values = [*values]
  return math.fsum(values) / len(values)


def _bound(trial: trials.Found) -> float:
  """Returns the largest expected tokens per round of any lossless rule.

  The value is an upper bound for the pair of models of one trial with chains.
  """
  return 1 + full_information_optimum(trial.plan.pair, trial.witness["gamma"])


def _sorted(defects: Iterable[str]) -> tuple[str, ...]:
  """Returns the defects in order, with causes of other defects first."""
  first = ("a law is not finite", "a law is negative")
  return tuple(sorted(defects, key=lambda x: (x not in first, x)))


def _sizes(found: list[trials.Found]) -> str:
  """Returns the largest enumerated and all audited sizes, as text."""
  gamma, vocab_size, nodes = map(max, zip(*(
      x.sizes for x in found if x.plan is not None)))
  text = f"gamma <= {gamma}, V <= {vocab_size:,}"
  if nodes:
    text += f", trees of up to {nodes} nodes"
  audited = [f"{f'{nodes} nodes' if nodes else f'gamma {gamma}'} with V = "
             f"{vocab_size:,}" for gamma, vocab_size, nodes in dict.fromkeys(
                 x.sizes for x in found if x.trial.startswith("audit"))]
  return text + ("; audited at " + " and ".join(audited) if audited else "")


def _cause(found: list[trials.Found]) -> str:
  """Returns a likely cause of all failures, or an empty string.

  If errors in float64 are as small as those in float32, the rule probably
  computes its law in float32.
  """
  failed = [x for x in found if x.fails]
  if failed and all(
      x.dtype == "float64" and not x.outcome.defects
      and x.outcome.total_variation < enumeration.TOLERANCE["float32"]
      for x in failed):
    return ("rounding? every total variation is below 1e-5, as in float32: let "
            "the law compute in the dtype of target_probs")
  return ""
