"""A proof, or the model that refutes it, in one line."""

from collections.abc import Sequence
import dataclasses
import itertools
import math
from typing import Any

import numpy as np

from specjax.exact import enumeration
from specjax.exact import schemes as schemes_lib
from specjax.exact import trials
from specjax.exact.compiled import Compiled
from specjax.exact.compiled import Example
from specjax.exact.drafts import ended_by
from specjax.exact.pairs import full_information_optimum
from specjax.exact.pairs import KINDS
from specjax.exact.pairs import random_pair
from specjax.interfaces import Verifier

_TWO_ROUNDS = 1 << 15  # chains and contexts, V**(2 gamma + 1), at most
_ENUMERATED = 1 << 14  # drafts of a size of `at`, roots included, at most
_AUDITED = 1 << 23  # numbers of one law of a size of `at`, at most


@dataclasses.dataclass(frozen=True)
class Certificate:
  """Result of `certify`: a statement about the models and drafts it tried.

  On each enumerated model every draft from every root is summed over, so
  nothing is left to chance. A rule without state that is exact for one round
  from every context is exact for all rounds. But the models are some of those
  that exist. A defect that needs a draft length, a tree, a vocabulary or
  numbers unlike the tried ones, or a state after more rounds, is not excluded.
  At production sizes an audit draws drafts; see `exact.audit` for its
  false-alarm probability, below 1e-9.

  Attributes:
    lossless: every law was a probability law, no total variation exceeded the
      tolerance (1e-9 in float64, 1e-5 in float32, 1e-4 in float32 at production
      sizes), `survival` agreed with the law, and no audit failed.
    total_variation: the largest one over the small models, with chains and with
      trees; or over the other trials, if only there one failed.
    witness: the model that shows it: `random_pair`'s arguments, gamma, rounds,
      and how it was drafted if that was special.
    expected_tokens: tokens of one round, averaged over the small models with
      chains.
    bound: the average of the most tokens that a lossless rule can have on those
      models, with full information about both of them (1 + Lemma 8). A lossy
      rule can exceed it.
    defects: ways in which a law was not a probability law, or an audit failed.
    models: pairs of small models enumerated with chains.
    laws: laws evaluated.
    dtype: of the numbers handed to the law, where `tried` names no other.
    declared_lossy: the rule itself declares `lossless = False`.
    trees: enumerations with trees: a tree, a scheme and a pair of models each.
    tried: a line for every kind of trial beyond those, see `thorough`.
    sizes: the largest sizes that were enumerated and audited, in words.
    cause: a guess at the cause of a failure, or empty.
    example: a draft that shows the failure, or None; `show` prints it.
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
    return "\n".join(lines)

  def _verdict(self):
    if self.lossless:
      return f"lossless on everything tried: {self.sizes}"
    verdict = "NOT LOSSLESS"
    if self.declared_lossy:
      verdict += ", as the rule declares"
    reasons = [*self.defects[:1], *([self.cause] if self.cause else [])]
    return f"{verdict}: {'; '.join(reasons)}" if reasons else verdict

  def show(self) -> None:
    """Prints the certificate and, of a failure, the draft that shows it.

    It lists the draft's tokens with the two distributions at every node, the
    rule's law, and the next token's distribution: the target's, and the one
    that decoding with the rule has.
    """
    print(self)
    if self.example is not None:
      print(self.example)
    elif not self.lossless:
      print("no single draft shows it: the failure is a mean over many")


def certify(verifier: Verifier | Compiled, *,
            vocab_sizes: Sequence[int] | None = None,
            gammas: Sequence[int] = (1, 2, 3, 4), rounds: int | None = None,
            seeds: Sequence[int] = (0,), kinds: Sequence[str] = KINDS,
            dtype: str = "float64", drafting: str | None = None,
            trees: Sequence[Sequence[int]] | None = None,
            schemes: Sequence[str | schemes_lib.Scheme] | None = None,
            thorough: bool = True, at: Sequence[tuple[int, int]] = (),
            stop: Any = None) -> Certificate:
  """Proves a verifier lossless on small models, or shows where it is not.

  Try at least two sizes of the vocabulary, of 3 or more: with V = 2, or with
  models that ignore their context, most bugs do not show. A rule on chains
  takes about 20 seconds on two cores, one on trees 40.

  Args:
    verifier: any object with `law(draft, target_probs)`, and with `init` and
      `commit` if it remembers earlier rounds; or a `Compiled`.
    vocab_sizes: V, each at least 2; default (3, 4), and (3,) for a rule with
      state, whose histories multiply.
    gammas: draft lengths of chains, each at least 1.
    rounds: rounds of the loop, see `enumerate_chains`. One is a proof for a
      rule without state, by induction. Default: 2, but 1 where V^(2 gamma + 1)
      is more than 2^15; and 3 for a rule with state. Trees with more than 27
      drafts take one round.
    seeds: one set of random models for each.
    kinds: see `random_pair`.
    dtype: "float64" or "float32".
    drafting: see `enumerate_chains`; default: "autoregressive", and what else
      the rule, by its `requires`, is exact for. With "product" there are no
      trees.
    trees: the `parents` of the trees to enumerate besides. Default: none for a
      rule that requires a chain, as one does that states no `requires`; else
      all trees of up to 5 nodes, in every order of nodes, and some of up to 7
      (fewer for larger V).
    schemes: how the tokens of trees are drawn, see `enumerate_trees`; default:
      all of `exact.schemes` for which the rule, by its `requires`, is exact.
    thorough: also try what small models in one precision cannot show: chains
      whose end is padding, as the loop makes them where a drafter has little to
      propose; padding before real nodes of a tree; drafts from position laws
      ("product") unless the rule requires an autoregressive drafter; float32;
      gamma up to 15 and V up to 300, and trees of up to 17 nodes; many rounds
      of a rule with state; and audits in float32 at two production sizes
      (gamma 16 with V = 32,000, and V = 128,259), see `exact.audit`.
      The first failure ends them.
    at: `(gamma, V)` of further sizes, with chains. A size with at most 2^14
      drafts is enumerated, a larger one is audited; `tried` tells which.
    stop: the rule that ends the drafted chains: a `methods.stop_rules.
      StopRule`, as it is before its first round and with the rows of q as
      hidden states; or any function `(probs [gamma, V], tokens [gamma]) ->
      length []` in jax that returns how many tokens of a chain are submitted.
      One that looks at tokens and then drops them is found. It is tried on the
      small models. Everything that `thorough` adds, padding, float32 and larger
      models, is tried without it, and there are no trees.

  Returns:
    A `Certificate`; print it.

  Raises:
    ValueError: a size is not a whole number of at least its minimum, or has too
      many drafts to enumerate; `kinds` or `dtype` is unknown; trees are given
      with `stop`, or with a drafting other than autoregressive; schemes are
      given where there are no trees.

  Example:
    >>> import specjax as sj
    >>> found = sj.exact.certify(
    ...     sj.verifiers.Token(), vocab_sizes=(3,), gammas=(2,))
    >>> found.lossless, found.total_variation < 1e-12, found.models
    (True, True, 12)
  """
  compiled = Compiled.of(verifier)
  rule = compiled.rule
  if vocab_sizes is None:
    vocab_sizes = (3,) if rule.remembers else (3, 4)
  some_rounds = rounds
  if rounds is None:
    some_rounds = 3 if rule.remembers else 2
  _check_sizes(vocab_sizes=(vocab_sizes, 2), gammas=(gammas, 1),
               rounds=((some_rounds,), 1), seeds=(seeds, 0))
  _check_settings(kinds, dtype, drafting, trees, stop)
  _check_at(at)
  ended = None if stop is None else ended_by(stop)
  if trees is None and ("chain" in rule.requires or stop is not None
                        or drafting not in (None, "autoregressive")):
    trees = ()
  by_default = trees is None
  for vocab_size, drafted in itertools.product(vocab_sizes, {
      *gammas, *(len(tree) - 1 for tree in trees or ())}):
    enumeration.check_size(vocab_size, drafted, drafted + 1)
  if schemes is None:
    schemes = schemes_lib.sound_for(rule)
  elif bool(schemes) != (trees is None or bool(trees)):
    raise ValueError(f"schemes is {schemes} and trees {trees}; trees are drawn "
                     "by schemes: give both, or leave the schemes out")
  small = []
  # A rule for trees takes padding anywhere: chains share compiled code.
  padded_to = 0 if "chain" in rule.requires else max(gammas) + 1
  for vocab_size in vocab_sizes:
    for gamma in gammas:
      once = (rounds is None and not rule.remembers
              and vocab_size**(2 * gamma + 1) > _TWO_ROUNDS)
      small += trials.on_chains(
          compiled, vocab_size, (gamma,), kinds, seeds,
          1 if once else some_rounds, dtype, drafting or "autoregressive",
          padded_to, ended)
  expected = [1 + one.outcome.expected_accepted for one in small]
  bounds = [1 + full_information_optimum(
      random_pair(one.witness["kind"], one.witness["vocab_size"],
                  one.witness["gamma"] + 1, one.witness["seed"]),
      one.witness["gamma"]) for one in small]
  for vocab_size in vocab_sizes:
    small += trials.on_trees(compiled, vocab_size, trees, schemes, kinds, seeds,
                             some_rounds, dtype)
  groups = []
  if thorough:
    most = dict(vocab_size=max(vocab_sizes), gammas=gammas, seeds=seeds)
    telling = trials.telling(kinds)
    if drafting is None and "autoregressive" not in rule.requires:
      groups.append(trials.on_chains(
          compiled, **most, kinds=telling, dtype=dtype, drafting="product",
          rounds=some_rounds if rule.remembers else 1, padded_to=padded_to,
          ended=ended))
    groups.append(trials.padded(compiled, **most, kinds=telling, dtype=dtype))
    if dtype == "float64":
      groups.append(trials.in_float32(
          compiled, **most, kinds=telling, trees=trees, schemes=schemes))
    if by_default:
      groups.append(trials.on_special_trees(
          compiled, most["vocab_size"], schemes, telling, seeds, dtype))
    groups += [trials.on_larger_models(
        compiled, seeds, dtype, schemes if by_default else ()),
               trials.unbatched(compiled, dtype),
               trials.audits(compiled, by_default, seeds)]
  groups += [_at(compiled, gamma, vocab_size, kinds, seeds, dtype)
             for gamma, vocab_size in at]
  more = []
  for found in itertools.chain(*groups):  # until the rule is refuted
    more.append(found)
    if found.fails:
      break
  return _certificate(small, more, expected, bounds, dtype, rule)


def _at(compiled, gamma, vocab_size, kinds, seeds, dtype):
  """One size of the user's: enumerated if it is small enough, else audited."""
  if vocab_size**(gamma + 1) <= _ENUMERATED:
    return trials.on_chains(
        compiled, vocab_size, (gamma,), trials.telling(kinds), seeds, 1, dtype,
        "autoregressive")
  return (found for seed in seeds for found in trials.audited(
      compiled, tuple(range(-1, gamma)), vocab_size, seed))


def _check_sizes(**sizes):
  """Refuses settings that are no list of whole numbers, or an empty one.

  Args:
    **sizes: `(numbers, the least that each may be)` by name.
  """
  for name, (values, least) in sizes.items():
    if not (isinstance(values, Sequence) and values and all(
        isinstance(x, (int, np.integer)) and not isinstance(x, bool)
        and x >= least for x in values)):
      raise ValueError(f"{name} is {values}; give whole numbers of at least "
                       f"{least}, one or more, such as ({least},)")


def _check_settings(kinds, dtype, drafting, trees, stop):
  if isinstance(kinds, str) or not kinds or not set(kinds) <= set(KINDS):
    raise ValueError(f"kinds is {kinds!r}; give one or more of "
                     f"{', '.join(KINDS)}")
  if dtype not in enumeration.TOLERANCE:
    raise ValueError(f"dtype is {dtype!r}; it must be 'float64' or 'float32'")
  if trees and stop is not None:
    raise ValueError("stop ends chains, and trees are given; leave one of the "
                     "two out")
  if trees and drafting not in (None, "autoregressive"):
    raise ValueError(f"drafting is {drafting!r}; trees are drafted by schemes: "
                     "leave one of the two out")


def _check_at(at):
  for size in at:
    whole = (isinstance(size, Sequence) and len(size) == 2 and all(
        isinstance(x, (int, np.integer)) for x in size))
    if not whole or size[0] < 1 or size[1] < 2:
      raise ValueError(f"at holds {size!r}; give pairs (gamma, V) of at least "
                       "(1, 2), such as at=[(8, 32000)]")
    gamma, vocab_size = size
    if (gamma + 1) * vocab_size > _AUDITED:
      raise ValueError(
          f"at holds gamma {gamma} with V = {vocab_size:,}; its law has "
          f"(gamma + 1) V = {(gamma + 1) * vocab_size:,} numbers, and at most "
          f"{_AUDITED:,} can be audited: make one of the two smaller")


def _certificate(small, more, expected, bounds, dtype, rule) -> Certificate:
  """Returns the certificate of all trials.

  Args:
    small: the trials on small models, chains before trees.
    more: all others.
    expected: tokens per round of every chain of `small`.
    bounds: the most that any lossless rule has there.
    dtype: the dtype that was asked for.
    rule: the `Rule`.
  """
  found, failed = small + more, lambda some: [x for x in some if x.fails]
  # A small model is the better witness.
  worst = max(failed(small) or failed(more) or small, key=lambda one: (
      one.outcome.total_variation, len(one.outcome.defects)))
  defects = frozenset().union(*(one.outcome.defects for one in found))
  return Certificate(
      lossless=not worst.fails, total_variation=worst.outcome.total_variation,
      witness=worst.witness | (
          {} if worst.dtype == dtype else {"dtype": worst.dtype}),
      expected_tokens=math.fsum(expected) / len(expected),
      bound=math.fsum(bounds) / len(bounds), defects=_sorted(defects),
      models=len(expected), laws=sum(one.outcome.laws for one in found),
      dtype=dtype, declared_lossy=not rule.lossless,
      trees=len(small) - len(expected),
      tried=tuple(f"{len(list(same)):,} x {trial}" for trial, same
                  in itertools.groupby(one.trial for one in more)),
      sizes=_sizes(found), cause=_cause(found),
      example=worst.example() if worst.fails else None)


def _sorted(defects):
  """Defects, those first that explain others."""
  first = ("a law is not finite", "a law is negative")
  return tuple(sorted(defects, key=lambda x: (x not in first, x)))


def _sizes(found):
  """The largest sizes that were enumerated, and those audited, in words."""
  gamma, vocab_size, nodes = map(max, zip(*(
      x.sizes for x in found if x.plan is not None)))
  text = f"gamma <= {gamma}, V <= {vocab_size:,}"
  if nodes:
    text += f", trees of up to {nodes} nodes"
  audited = [f"{f'{nodes} nodes' if nodes else f'gamma {gamma}'} with V = "
             f"{vocab_size:,}" for gamma, vocab_size, nodes in dict.fromkeys(
                 x.sizes for x in found if x.trial.startswith("audit"))]
  return text + ("; audited at " + " and ".join(audited) if audited else "")


def _cause(found):
  """A guess: only rounding tells some rules from the target in float64."""
  failed = [x for x in found if x.fails]
  if failed and all(
      x.dtype == "float64" and not x.outcome.defects
      and x.outcome.total_variation < enumeration.TOLERANCE["float32"]
      for x in failed):
    return ("rounding? every total variation is below 1e-5, as in float32: let "
            "the law compute in the dtype of target_probs")
  return ""
