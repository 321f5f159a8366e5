"""A proof, or the model that refutes it, in one line."""

from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import functools
import itertools
import math
from typing import Any
from typing import NamedTuple

import numpy as np

from specjax.drafters import stop_rules
from specjax.exact import drafts
from specjax.exact import enumeration
from specjax.exact import larger
from specjax.exact import schemes as schemes_lib
from specjax.exact import stopping
from specjax.exact import trees as trees_lib
from specjax.exact.compiled import Compiled
from specjax.exact.optima import full_information_optimum
from specjax.exact.pairs import KINDS
from specjax.exact.pairs import random_pair
from specjax.types import Verifier

_TOLERANCE = {"float64": 1e-9, "float32": 1e-5}
_MOST_NODES = 7  # of a tree by default; smaller ones are padded to share code
_ALL_TREES, _SOME_TREES = 81, 729  # drafts of a tree, V**(N - 1), at most
_SEVERAL_ROUNDS = 27  # drafts of a tree, at most, for more than one round
_TWO_ROUNDS = 1 << 15  # chains and contexts, V**(2 gamma + 1), likewise

# What is tried beside the small models, see `certify`.
_TELLING_KINDS = ("dense", "mixed")
_LARGER_CHAINS = ((11, 7), (101, 5))  # V, gamma
_LARGER_TREE = (23, (-1, 0, 0, 1, 1, 2, 3, 3, 4, 6))  # V, parents
_LARGER_WITH_STATE = (5, 5)
_LONG_MEMORY = (3, 2, 14)  # V, gamma, rounds


class _Found(NamedTuple):
  """One enumeration.

  Attributes:
    trial: which kind of trial it belongs to.
    outcome: an `Outcome` or a `SparseOutcome`.
    dtype: of the numbers.
    witness: what to repeat it with.
  """

  trial: str
  outcome: Any
  dtype: str
  witness: dict[str, Any]

  @property
  def fails(self) -> bool:
    return (self.outcome.total_variation > _TOLERANCE[self.dtype]
            or bool(self.outcome.defects))


@dataclasses.dataclass(frozen=True)
class Certificate:
  """What `certify` found: a statement about the models and drafts it tried.

  On each model every draft is summed over, so nothing is left to chance, and a
  rule without state that is exact for one round from every context is exact for
  all rounds. But the models are some of those that exist. A defect that needs a
  draft length, a tree, a vocabulary or numbers unlike the ones that were tried,
  or a state after more rounds, is not excluded.

  Attributes:
    lossless: every law was a probability law and no total variation exceeded
      the tolerance, 1e-9 in float64 and 1e-5 in float32.
    total_variation: the worst over the small models, with chains and with
      trees; or over what was tried beyond these, if only there one failed.
    witness: the model that shows it: `random_pair`'s arguments, gamma, rounds,
      and how it was drafted if that was special.
    expected_tokens: tokens of one round, averaged over the small models with
      chains.
    bound: the average of what no verifier can exceed on those models, with
      full information about both of them (1 + Lemma 8).
    defects: ways in which a law was not a probability law.
    models: pairs of small models enumerated with chains.
    laws: laws evaluated.
    dtype: of the numbers handed to the law, where `tried` names no other.
    declared_lossy: the rule itself says `lossless = False`.
    trees: enumerations with trees: a tree, a scheme and a pair of models each.
    tried: a line for every kind of trial beyond those, see `thorough`.
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

  def __str__(self):
    where = ", ".join(f"{k}={v}" for k, v in self.witness.items())
    models = f"{self.models} models"
    if self.trees:
      models += f" with chains, {self.trees:,} with trees"
    verdict = "lossless" if self.lossless else "NOT LOSSLESS"
    if self.declared_lossy and not self.lossless:
      verdict += ", as the rule declares"
    lines = [
        verdict,
        f"  worst total variation  {self.total_variation:.2e}  ({where})",
        f"  tokens per round       {self.expected_tokens:.4f}",
        f"  full-information bound {self.bound:.4f}",
        f"  enumerated             {models}, {self.laws:,} laws, "
        f"{self.dtype}",
        *(f"  and                    {line}" for line in self.tried),
        "  on these models; exact.Certificate says what follows for others",
        *(f"  defect: {defect}" for defect in self.defects),
    ]
    return "\n".join(lines)


def certify(verifier: Verifier | Compiled, *,
            vocab_sizes: Sequence[int] | None = None,
            gammas: Sequence[int] = (1, 2, 3, 4), rounds: int | None = None,
            seeds: Sequence[int] = (0,), kinds: Sequence[str] = KINDS,
            dtype: str = "float64", drafting: str | None = None,
            trees: Sequence[Sequence[int]] | None = None,
            schemes: Sequence[str | schemes_lib.Scheme] | None = None,
            thorough: bool = True,
            stop: stop_rules.StopRule | stopping.Kept | None = None
            ) -> Certificate:
  """Proves a verifier lossless on small models, or shows where it is not.

  Try at least two sizes of the vocabulary, of 3 or more: with V = 2, or with
  models that ignore their context, most bugs do not show.

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
      whose end is padding (ids 0 and V), as the loop makes them where a
      drafter has little to say; drafts from position laws ("product") unless
      the rule requires an autoregressive drafter; float32; models too large
      for all of their texts, with a tree of 10 nodes where `trees` is left to
      the rule; many rounds of a rule with state.
    stop: what ends the chains that are drafted, a `drafters.stop_rules.
      StopRule`, as it is before its first round and with the rows of q as
      hidden states; or any function `(probs [gamma, V], tokens [gamma]) ->
      length []` that says how many tokens of a chain are submitted, in jax: one
      that looks at tokens and then drops them is seen. It is tried on the small
      models. What else `thorough` tries, padding, float32 and larger models, is
      tried without it, and there are no trees.

  Returns:
    A `Certificate`; print it.

  Raises:
    ValueError: a size is no whole number of at least its minimum; `kinds` or
      `dtype` is unknown; trees are given with `stop`, or with a drafting other
      than autoregressive; schemes are given where there are no trees.

  Example:
    >>> import specjax as sj
    >>> found = sj.exact.certify(
    ...     sj.verifiers.Token(), vocab_sizes=(3,), gammas=(2,))
    >>> found.lossless, found.total_variation < 1e-12, found.models
    (True, True, 7)
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
  ended = None if stop is None else stopping.kept_by(stop)
  if trees is None and ("chain" in rule.requires or stop is not None
                        or drafting not in (None, "autoregressive")):
    trees = ()
  by_default = trees is None
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
      small += _on_chains(compiled, vocab_size, (gamma,), kinds, seeds,
                          1 if once else some_rounds, dtype,
                          drafting or "autoregressive", padded_to, ended)
  expected = [1 + one.outcome.expected_accepted for one in small]
  bounds = [1 + full_information_optimum(
      random_pair(one.witness["kind"], one.witness["vocab_size"],
                  one.witness["gamma"] + 1, one.witness["seed"]),
      one.witness["gamma"]) for one in small]
  for vocab_size in vocab_sizes:
    small += _on_trees(compiled, vocab_size, trees, schemes, kinds, seeds,
                       some_rounds, dtype)
  more = []
  if thorough:
    most = dict(vocab_size=max(vocab_sizes), gammas=gammas, seeds=seeds)
    telling = tuple(k for k in kinds if k in _TELLING_KINDS) or kinds[:1]
    if drafting is None and "autoregressive" not in rule.requires:
      more += _on_chains(
          compiled, **most, kinds=telling, dtype=dtype, drafting="product",
          rounds=some_rounds if rule.remembers else 1, padded_to=padded_to,
          ended=ended)
    more += _padded(compiled, **most, kinds=telling, dtype=dtype)
    if dtype == "float64":
      more += _in_float32(compiled, **most, kinds=telling, trees=trees,
                          schemes=schemes)
    more += _on_larger_models(
        compiled, seeds, dtype, schemes if by_default else ())
  return _certificate(small, more, expected, bounds, dtype, rule)


def _check_sizes(**sizes):
  """Refuses settings that are no list of whole numbers, or an empty one.

  Args:
    **sizes: `(numbers, the least that each may be)` by name.
  """
  for name, (values, least) in sizes.items():
    if not (isinstance(values, Sequence) and values and all(
        isinstance(x, (int, np.integer)) and x >= least for x in values)):
      raise ValueError(f"{name} is {values}; give whole numbers of at least "
                       f"{least}, one or more, such as ({least},)")


def _check_settings(kinds, dtype, drafting, trees, stop):
  if isinstance(kinds, str) or not kinds or not set(kinds) <= set(KINDS):
    raise ValueError(f"kinds is {kinds!r}; give one or more of "
                     f"{', '.join(KINDS)}")
  if dtype not in _TOLERANCE:
    raise ValueError(f"dtype is {dtype!r}; it must be 'float64' or 'float32'")
  if trees and stop is not None:
    raise ValueError("stop ends chains, and trees are given; leave one of the "
                     "two out")
  if trees and drafting not in (None, "autoregressive"):
    raise ValueError(f"drafting is {drafting!r}; trees are drafted by schemes: "
                     "leave one of the two out")


def _certificate(small, more, expected, bounds, dtype, rule) -> Certificate:
  """What was found, in one record.

  Args:
    small: what was found on small models, chains before trees.
    more: and elsewhere.
    expected: tokens a round of every chain of `small`.
    bounds: the most that any rule has there.
    dtype: that was asked for.
    rule: the `Rule`.
  """
  # A small model is the better witness.
  found, failed = small + more, lambda some: [x for x in some if x.fails]
  worst = max(failed(small) or failed(more) or small,
              key=lambda one: one.outcome.total_variation)
  defects = frozenset().union(*(one.outcome.defects for one in found))
  return Certificate(
      lossless=not worst.fails, total_variation=worst.outcome.total_variation,
      witness=worst.witness | (
          {} if worst.dtype == dtype else {"dtype": worst.dtype}),
      expected_tokens=math.fsum(expected) / len(expected),
      bound=math.fsum(bounds) / len(bounds), defects=tuple(sorted(defects)),
      models=len(expected), laws=sum(one.outcome.laws for one in found),
      dtype=dtype, declared_lossy=not rule.lossless,
      trees=len(small) - len(expected),
      tried=tuple(f"{len(list(same)):,} x {trial}" for trial, same
                  in itertools.groupby(one.trial for one in more)))


def _on_chains(compiled, vocab_size, gammas, kinds, seeds, rounds, dtype,
               drafting, padded_to=0, ended=None) -> Iterator[_Found]:
  """Small models, all drafts of every length, or `ended` by a rule."""
  for gamma, kind, seed in itertools.product(gammas, kinds, seeds):
    depth = enumeration.depth_of(compiled.rule, gamma, rounds)
    outcome = enumeration.enumerate_chains(
        compiled, random_pair(kind, vocab_size, depth, seed), gamma, rounds,
        dtype, drafting, padded_to, ended)
    witness = dict(kind=kind, vocab_size=vocab_size, seed=seed, gamma=gamma,
                   rounds=rounds)
    if drafting != "autoregressive":
      witness["drafting"] = drafting
    yield _Found(f"{drafting} chains of {_listed(gammas)} tokens, V = "
                 f"{vocab_size}, {dtype}", outcome, dtype, witness)


def _padded(compiled, vocab_size, gammas, seeds, kinds, dtype
            ) -> Iterator[_Found]:
  """Chains of which the first `real` tokens are drawn."""
  gamma = max(gammas)
  for real, token, chain, kind, seed in itertools.product(
      range(gamma), (0, vocab_size), (True, False), kinds, seeds):
    scheme = lambda q, contexts, real=real, token=token, chain=chain: (
        drafts.chains(q, contexts, real).padded(gamma + 1, token, chain))
    pair = random_pair(
        kind, vocab_size, enumeration.depth_of(compiled.rule, gamma, 1), seed)
    outcome = enumeration.enumerate_drafts(
        compiled, pair, scheme, gamma + 1, gamma, 1, dtype)
    yield _Found(f"chains of {gamma} tokens that end in padding, V = "
                 f"{vocab_size}, {dtype}", outcome, dtype, dict(
                     kind=kind, vocab_size=vocab_size, seed=seed, gamma=gamma,
                     rounds=1, real=real, padding=token))


def _in_float32(compiled, vocab_size, gammas, seeds, kinds, trees, schemes
                ) -> Iterator[_Found]:
  """The same in the precision of the loop, on fewer models."""
  if trees is None:
    trees = list(_default_trees(vocab_size))
  if not trees:
    yield from _on_chains(
        compiled, vocab_size, tuple(sorted({min(gammas), max(gammas)})), kinds,
        seeds, 1, "float32", "autoregressive")
  yield from _on_trees(compiled, vocab_size, trees[-3:], schemes, kinds[-1:],
                       seeds, 1, "float32")


def _on_larger_models(compiled, seeds, dtype, schemes) -> Iterator[_Found]:
  """Long chains, large vocabularies, a large tree, many rounds."""
  def one(trial, seed, vocab_size, scheme, parents, witness, rounds=1,
          narrow=False):
    longest = trees_lib.height(parents)
    depth = enumeration.depth_of(compiled.rule, longest, rounds)
    outcome = larger.enumerate_sparse(
        compiled, larger.sparse_pair(vocab_size, depth, seed, narrow),
        functools.partial(trees_lib.draw, scheme, parents), len(parents),
        longest, rounds, dtype)
    return _Found(f"{trial}, V = {vocab_size}, {dtype}", outcome, dtype, dict(
        kind="sparse", vocab_size=vocab_size, seed=seed, rounds=rounds,
        **witness))

  def chain(seed, vocab_size, gamma, rounds=1, narrow=False):
    trial = f"{rounds} rounds" if rounds > 1 else "chains"
    return one(f"{trial} of {gamma} tokens", seed, vocab_size, "iid",
               range(-1, gamma), dict(gamma=gamma), rounds, narrow)

  for seed in seeds:
    if compiled.rule.remembers:
      yield chain(seed, *_LONG_MEMORY, narrow=True)
      yield chain(seed, *_LARGER_WITH_STATE, narrow=True)
      continue
    for vocab_size, gamma in _LARGER_CHAINS[:1 if schemes else None]:
      yield chain(seed, vocab_size, gamma)
    vocab_size, parents = _LARGER_TREE
    for scheme in map(schemes_lib.named, schemes):
      yield one(f"trees of {len(parents)} nodes", seed, vocab_size, scheme,
                parents, dict(parents=parents,
                              scheme=schemes_lib.name_of(scheme)))


def _on_trees(compiled, vocab_size, trees, schemes, kinds, seeds, rounds,
              dtype) -> Iterator[_Found]:
  """Small models, all drafts of every tree; trees None is the default."""
  if trees is None:
    trees = list(_default_trees(vocab_size))
  largest = max(map(len, trees), default=1)
  for parents, scheme, kind, seed in itertools.product(
      trees, map(schemes_lib.named, schemes), kinds, seeds):
    few = vocab_size**(len(parents) - 1) <= _SEVERAL_ROUNDS
    times = rounds if few else 1
    depth = enumeration.depth_of(
        compiled.rule, trees_lib.height(parents), times)
    outcome = trees_lib.enumerate_trees(
        compiled, random_pair(kind, vocab_size, depth, seed), parents, scheme,
        times, dtype, nodes=largest)
    yield _Found(f"trees of up to {largest} nodes, V = {vocab_size}, {dtype}",
                 outcome, dtype, dict(
                     kind=kind, vocab_size=vocab_size, seed=seed,
                     parents=tuple(parents), scheme=schemes_lib.name_of(scheme),
                     rounds=times))


def _listed(numbers):
  return ", ".join(map(str, numbers))


def _default_trees(vocab_size):
  for nodes in range(2, _MOST_NODES + 1):
    drafted = vocab_size**(nodes - 1)
    if drafted <= _SOME_TREES:
      few = nodes <= 5 and drafted <= _ALL_TREES
      step = 1 if few else max(math.factorial(nodes - 1) // 5, 1)
      yield from itertools.islice(
          trees_lib.all_trees(nodes), step // 2, None, step)
