"""A proof, or the model that refutes it, in one line."""

import dataclasses
import itertools
import math
from typing import Any

from specjax.exact import enumeration
from specjax.exact import schemes as schemes_lib
from specjax.exact import trees as trees_lib
from specjax.exact.compiled import Compiled
from specjax.exact.optima import full_information_optimum
from specjax.exact.pairs import KINDS
from specjax.exact.pairs import random_pair

_TOLERANCE = {"float64": 1e-9, "float32": 1e-5}
_MOST_NODES = 7  # of a tree by default; smaller ones are padded to share code
_ALL_TREES, _SOME_TREES = 81, 729  # drafts of a tree, V**(N - 1), at most
_SEVERAL_ROUNDS = 27


@dataclasses.dataclass(frozen=True)
class Certificate:
  """What `certify` found.

  Attributes:
    lossless: every law was a probability law and no total variation exceeded
      the tolerance.
    total_variation: the worst over all models.
    witness: the model that shows it: `random_pair`'s arguments, gamma, rounds.
    expected_tokens: tokens of one round, averaged over the models tried with
      chains.
    bound: the average of what no verifier can exceed on those models, with
      full information about both of them (1 + Lemma 8).
    defects: ways in which a law was not a probability law.
    models: pairs of models enumerated with chains.
    laws: laws evaluated.
    dtype: of the numbers handed to the law.
    declared_lossy: the rule itself says `lossless = False`.
    trees: enumerations with trees: a tree, a scheme and a pair of models each.
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
    ]
    return "\n".join(lines + [f"  defect: {d}" for d in self.defects])


def certify(verifier, *, vocab_sizes=None, gammas=(1, 2, 3, 4), rounds=None,
            seeds=(0,), kinds=KINDS, dtype="float64",
            drafting="autoregressive", trees=None, schemes=None) -> Certificate:
  """Proves a verifier lossless, or shows the model where it is not.

  Two vocabularies are the least worth trying where there is time: with V = 2
  most real bugs do not show, nor do they where the models ignore their
  context.

  Args:
    verifier: any object with `law(draft, target_probs)`, and with `init` and
      `commit` if it remembers earlier rounds; or a `Compiled`.
    vocab_sizes: V, each at least 2; default (3, 4), and (3,) for a rule with
      state, whose histories multiply.
    gammas: draft lengths of chains, each at least 1.
    rounds: rounds of the loop, see `enumerate_chains`. One is a proof for a
      rule without state, by induction; default 2, and 3 for one with state.
      With trees that have many drafts it is one.
    seeds: one set of random models for each.
    kinds: see `random_pair`.
    dtype: "float64" or "float32".
    drafting: see `enumerate_chains`; with "product" there are no trees.
    trees: the `parents` of the trees to enumerate besides. Default: none for a
      rule that requires a chain, as one does that states no `requires`; else
      all trees of up to 5 nodes, in every order of nodes, and some of up to 7
      (fewer for larger V).
    schemes: how the tokens of trees are drawn, see `enumerate_trees`; default:
      all of `exact.schemes` for which the rule, by its `requires`, is exact.

  Returns:
    A `Certificate`; print it.

  Example:
    >>> import specjax as sj
    >>> found = sj.exact.certify(
    ...     sj.verifiers.Token(), vocab_sizes=(3,), gammas=(2,))
    >>> found.lossless, found.total_variation < 1e-12, found.models
    (True, True, 7)
  """
  compiled = Compiled.of(verifier)
  rule = compiled.rule
  vocab_sizes = vocab_sizes or ((3,) if rule.remembers else (3, 4))
  rounds = rounds or (3 if rule.remembers else 2)
  if dtype not in _TOLERANCE:
    raise ValueError(f"dtype is {dtype!r}; it must be 'float64' or 'float32'")
  if not gammas or min(gammas) < 1:
    raise ValueError(f"gammas is {gammas}; every draft length must be at "
                     "least 1")
  if trees and drafting != "autoregressive":
    raise ValueError(f"drafting is {drafting!r}; trees are drafted by schemes: "
                     "leave one of the two out")
  found, expected, bounds = [], [], []
  for vocab_size, gamma, kind, seed in itertools.product(
      vocab_sizes, gammas, kinds, seeds):
    depth = enumeration.depth_of(rule, gamma, rounds)
    pair = random_pair(kind, vocab_size, depth, seed)
    outcome = enumeration.enumerate_chains(
        compiled, pair, gamma, rounds, dtype, drafting)
    expected.append(1 + outcome.expected_accepted)
    bounds.append(1 + full_information_optimum(pair, gamma))
    found.append((outcome, dict(kind=kind, vocab_size=vocab_size, seed=seed,
                                gamma=gamma, rounds=rounds)))
  if trees is None and ("chain" in rule.requires
                        or drafting != "autoregressive"):
    trees = ()
  if schemes is None:
    schemes = schemes_lib.sound_for(rule)
  for vocab_size in vocab_sizes:
    found += _on_trees(compiled, vocab_size, trees, schemes, kinds, seeds,
                       rounds, dtype)

  worst, witness = max(found, key=lambda one: one[0].total_variation)
  defects = frozenset().union(*(outcome.defects for outcome, _ in found))
  return Certificate(
      lossless=worst.total_variation <= _TOLERANCE[dtype] and not defects,
      total_variation=worst.total_variation, witness=witness,
      expected_tokens=math.fsum(expected) / len(expected),
      bound=math.fsum(bounds) / len(bounds), defects=tuple(sorted(defects)),
      models=len(expected), laws=sum(outcome.laws for outcome, _ in found),
      dtype=dtype, declared_lossy=not rule.lossless,
      trees=len(found) - len(expected))


def _on_trees(compiled, vocab_size, trees, schemes, kinds, seeds, rounds,
              dtype):
  """`[(outcome, witness)]` of one vocabulary; trees None is the default."""
  if trees is None:
    trees = list(_default_trees(vocab_size))
  largest = max(map(len, trees), default=1)
  found = []
  for parents, scheme, kind, seed in itertools.product(
      trees, map(schemes_lib.named, schemes), kinds, seeds):
    few = vocab_size**(len(parents) - 1) <= _SEVERAL_ROUNDS
    times = rounds if few else 1
    depth = enumeration.depth_of(
        compiled.rule, trees_lib.height(parents), times)
    outcome = trees_lib.enumerate_trees(
        compiled, random_pair(kind, vocab_size, depth, seed), parents, scheme,
        times, dtype, nodes=largest)
    name = getattr(scheme, "__name__", repr(scheme))
    found.append((outcome, dict(
        kind=kind, vocab_size=vocab_size, seed=seed, parents=tuple(parents),
        scheme=name, rounds=times)))
  return found


def _default_trees(vocab_size):
  for nodes in range(2, _MOST_NODES + 1):
    drafts = vocab_size**(nodes - 1)
    if drafts <= _SOME_TREES:
      few = nodes <= 5 and drafts <= _ALL_TREES
      step = 1 if few else max(math.factorial(nodes - 1) // 5, 1)
      yield from itertools.islice(
          trees_lib.all_trees(nodes), step // 2, None, step)
