"""Trials of `certify`.

A trial is one enumeration of all drafts of a pair of models, or one audit
(`exact.audit`).
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import functools
import itertools
import math
from typing import Any
from typing import NamedTuple

import jax
import numpy as np

from specjax.exact import audit
from specjax.exact import drafts
from specjax.exact import enumeration
from specjax.exact import larger
from specjax.exact import schemes as schemes_lib
from specjax.exact.compiled import Compiled
from specjax.exact.compiled import Example
from specjax.exact.compiled import NOT_FINITE
from specjax.exact.pairs import Pair
from specjax.exact.pairs import random_pair
from specjax.interfaces import Verifier
from specjax.types import Draft

_MOST_NODES = 7  # largest number of nodes of default trees
# Largest V**(N - 1) for which all trees, or some trees, of N nodes are tried.
_ALL_TREES, _SOME_TREES = 81, 729
_SEVERAL_ROUNDS = 27  # largest V**(N - 1) for more than one round with trees
_TELLING_KINDS = ("dense", "mixed", "varied", "greedy")
_DENSE = ((5, 1), (12, 1), (7, 2))  # V, gamma; q positive at more than 4 tokens
_DENSE_TREES = (5, ((-1, 0, 0), (-1, 0, 1, 0)))  # V, parents
# Chains of 8 nodes after the root, of which the first few are real: V for rules
# without and with state, largest number of real tokens, dtype (None: that of
# `certify`).
_MOSTLY_PADDING = ((11, 5, 8, None), (301, 5, 3, "float32"))

# Sizes of the trials of larger models, see `thorough` of `certify`.
_LARGER_CHAINS = (  # V, gamma; every second entry for rules on trees
    (11, 7), (101, 5), (300, 2), (5, 6), (5, 8), (7, 9), (3, 12), (33, 10),
    (257, 3), (20, 11), (13, 13), (11, 14), (128, 4), (9, 15))
_LARGER_TREE = (11, (-1, 0, 0, 1, 1, 2, 3, 3, 4, 6))  # V, parents
_SINGLE = 0.55  # share of contexts after which q has one token, largest trees
_LARGEST_TREES = (17, (  # V, parents; all trees are padded to one size
    (-1, 0, 0, 0, 1, 1, 2, 2, 4, 4, 5, 6, 8, 8, 9, 12),
    (-1, *[0] * 9), (-1, 0, 1, *[2] * 9), tuple(range(-1, 12)),
    (-1, 0, 0, 0, 2, 3, 3, 3, 7, 7, 9, 10, 11, 12, 13, 14, 14),
    (-1, *[0] * 7, *[4] * 3, *[7] * 4)))
_EXPANDED = ((-1, 0, 0, 1, 1, 2), (-1, 0, 0, 2, 2, 1))
_LARGER_WITH_STATE = ((5, 5), (101, 3), (3, 9))
_LONG_MEMORY = (3, 2, 14)  # V, gamma, rounds
_WALK = (4, 6, 160, 400)  # gamma, V, tokens, rows
_PRODUCTION_CHAINS = ((16, 32_000), (8, 151_936))  # gamma, V
_LARGEST_VOCAB = 262_144  # for drafts of 2 tokens with few possible values
PRODUCTION_TREES = (  # parents, V; the first tree has 64 nodes
    ((-1, *[0] * 5, 1, 1, 2, *range(8, 20), *range(2, 13), 3, 3, 4, 4, 20, 20,
      *range(8, 34)), 32_000),
    ((-1, 0, 0, 1), 151_936))


class Found(NamedTuple):
  """Result of one trial.

  Attributes:
    trial: name of the kind of trial.
    outcome: result with a total variation, defects and the number of laws.
    dtype: dtype of the law's inputs.
    witness: settings that reproduce the result.
    sizes: `(gamma, V, N)` for N nodes of a tree. N is 0 for a chain.
    tolerance: largest total variation that rounding explains.
    plan: plan of the enumeration, or None for an audit.
  """

  trial: str
  outcome: enumeration.Outcome | larger.SparseOutcome | audit.Audited
  dtype: str
  witness: dict[str, Any]
  sizes: tuple[int, int, int]
  tolerance: float
  plan: enumeration.Plan | None = None

  @property
  def fails(self) -> bool:
    return (not self.outcome.total_variation <= self.tolerance
            or bool(self.outcome.defects))

  def example(self) -> Example | None:
    """Returns a draft that shows the error, or None."""
    if self.plan is None:
      return self.outcome.example
    run, starts, _ = self.plan.run()
    found = larger.deviation(starts, self.plan.pair)
    if NOT_FINITE in run.defects or found.context is None or (
        self.outcome.total_variation <= self.tolerance):
      return run.example
    example = self.plan.run(watch=found.context)[0].watched
    return example and example._replace(obtained=found.obtained)


def _found(trial: str, outcome: audit.Audited | larger.SparseOutcome
           | enumeration.Outcome, dtype: str, witness: dict[str, Any],
           sizes: tuple[int, int, int], plan: enumeration.Plan | None = None
           ) -> Found:
  tolerance = (audit.TOLERANCE if plan is None
               else enumeration.TOLERANCE[dtype])
  return Found(trial, outcome, dtype, witness, sizes, tolerance, plan)


def _enumerated(trial: str, compiled: Compiled, pair: Pair | larger.SparsePair,
                scheme: Callable[[np.ndarray, np.ndarray], drafts.Drafts],
                nodes: int, longest: int, rounds: int, dtype: str,
                witness: dict[str, Any], tree: int = 0) -> Found:
  plan = enumeration.Plan(compiled, pair, scheme, nodes, longest, rounds, dtype)
  enumerate_drafts = (enumeration.enumerate_drafts
                      if not isinstance(pair, larger.SparsePair)
                      else larger.enumerate_sparse)
  return _found(trial, enumerate_drafts(*plan), dtype, witness,
                (longest, pair.vocab_size, tree), plan)


def _pair(rule: Verifier, kind: str, vocab_size: int, depth: int, seed: int
          ) -> Pair:
  """Returns a random pair with rows of q that the rule's `requires` allows."""
  pair = random_pair(kind, vocab_size, depth, seed)
  if "deterministic" not in rule.requires:
    return pair
  one_hot = np.eye(vocab_size)
  return Pair(pair.p, [one_hot[q.argmax(-1)] for q in pair.q])


def telling(kinds: Sequence[str]) -> Sequence[str]:
  """Returns the kinds of models most sensitive to defects."""
  return tuple(k for k in kinds if k in _TELLING_KINDS) or kinds[:1]


def on_chains(compiled: Compiled, vocab_size: int, gammas: Sequence[int],
              kinds: Sequence[str], seeds: Sequence[int], rounds: int,
              dtype: str, drafting: str, padded_to: int = 0,
              ended: Callable[[drafts.Drafts], drafts.Drafts] | None = None
              ) -> Iterator[Found]:
  """Enumerates small models with chains. `ended` can shorten the chains."""
  if dtype == "float64":
    compiled = _quick(compiled)
  for gamma, kind, seed in itertools.product(gammas, kinds, seeds):
    depth = enumeration.depth_of(compiled.rule, gamma, rounds)
    nodes = max(padded_to, gamma + 1)
    scheme = enumeration.chain_scheme(gamma, drafting, nodes, ended)
    witness = dict(kind=kind, vocab_size=vocab_size, seed=seed, gamma=gamma,
                   rounds=rounds)
    if drafting != "autoregressive":
      witness["drafting"] = drafting
    yield _enumerated(
        f"{drafting} chains of {', '.join(map(str, gammas))} tokens, V = "
        f"{vocab_size}, {dtype}", compiled,
        _pair(compiled.rule, kind, vocab_size, depth, seed), scheme, nodes,
        gamma, rounds, dtype, witness)


def _quick(compiled: Compiled) -> Compiled:
  """Returns the program for small chains in float64.

  Optimising it would take longer than a few thousand laws. The laws of a rule
  with state are many. Rounding is tested in float32, with optimisation.
  """
  return compiled if compiled.rule.remembers else compiled.quick


def dense(compiled: Compiled, kinds: Sequence[str], seeds: Sequence[int],
          dtype: str, schemes: Sequence[str | schemes_lib.Scheme]
          ) -> Iterator[Found]:
  """Enumerates drafts with q positive at more than 4 tokens.

  `schemes` is empty for a rule on chains.
  """
  if compiled.rule.remembers:  # its rounds multiply the number of drafts
    kinds = telling(kinds)
  # One pair of these kinds has few rows of each kind, or few drafts.
  varying = [kind for kind in ("mixed", "greedy") if kind in kinds]
  for vocab_size, gamma in _DENSE[:2 if compiled.rule.remembers else 3]:
    for some, of in (kinds, seeds), (varying, range(max(seeds) + 1,
                                                    max(seeds) + 5)):
      yield from on_chains(compiled, vocab_size, (gamma,), some, of, 1, dtype,
                           "autoregressive")
  vocab_size, trees = _DENSE_TREES
  yield from on_trees(compiled, vocab_size, trees, schemes,
                      [*telling(kinds), *({"equal"} & {*kinds})], seeds, 1,
                      dtype)


def padded(compiled: Compiled, vocab_size: int, gammas: Sequence[int],
           seeds: Sequence[int], kinds: Sequence[str], dtype: str
           ) -> Iterator[Found]:
  """Enumerates chains that end in padding."""
  gamma, compiled = max(gammas), _quick(compiled)
  for real, token, chain, kind, seed in itertools.product(
      range(gamma), (0, vocab_size, None), (True, False), kinds, seeds):
    def scheme(q, contexts, real=real, token=token, chain=chain):
      found = drafts.chains(q, contexts, real).padded(gamma + 1, token, chain)
      found.probs[:, 0] = found.probs[:, 1] if token is None else 0
      return found

    pair = _pair(compiled.rule, kind, vocab_size,
                 enumeration.depth_of(compiled.rule, gamma, 1), seed)
    yield _enumerated(
        f"chains of {gamma} tokens that end in padding, V = {vocab_size}, "
        f"{dtype}", compiled, pair, scheme, gamma + 1, gamma, 1, dtype, dict(
            kind=kind, vocab_size=vocab_size, seed=seed, gamma=gamma, rounds=1,
            real=real, padding="any" if token is None else token))


def mostly_padding(compiled: Compiled, seeds: Sequence[int], dtype: str
                   ) -> Iterator[Found]:
  """Enumerates long chains with few real tokens, as stop rules leave them."""
  rule, gamma = compiled.rule, 8
  for (vocab_size, with_state, most, own), seed in itertools.product(
      _MOSTLY_PADDING, seeds):
    vocab_size, own = with_state if rule.remembers else vocab_size, own or dtype
    for real in range(most + 1):
      token = (0, vocab_size, None)[real % 3]
      # Below chained padding, a wrong rule can stop at contexts of gamma
      # tokens, which must be within the depth of the models.
      chained = most == gamma and real % 2 == 0

      def scheme(q, contexts, real=real, token=token, chained=chained):
        found = drafts.chains(q, contexts, real)
        return found.padded(gamma + 1, token, chained)

      pair = larger.sparse_pair(
          vocab_size, enumeration.depth_of(rule, most, 1), seed,
          rule.remembers, _single(rule, 0.5))
      yield _enumerated(
          f"chains of {gamma} tokens with 0 to {most} real ones, V = "
          f"{vocab_size}, {own}", compiled.quick, pair, scheme, gamma + 1,
          most, 1, own, dict(
              kind="sparse", vocab_size=vocab_size, seed=seed, rounds=1,
              gamma=gamma, real=real,
              padding="any" if token is None else token))


def _single(rule: Verifier, share: float | None) -> float | None:
  """Returns the share of one-hot q for `sparse_pair`; None is the default."""
  return 1.0 if "deterministic" in rule.requires else share


def in_float32(compiled: Compiled, vocab_size: int, gammas: Sequence[int],
               seeds: Sequence[int], kinds: Sequence[str],
               trees: Sequence[Sequence[int]] | None,
               schemes: Sequence[str | schemes_lib.Scheme]) -> Iterator[Found]:
  """Enumerates a few small models in the precision of the decoding loop."""
  if trees is None:
    trees = list(default_trees(vocab_size))
  if not trees:
    yield from on_chains(
        compiled, vocab_size, tuple(sorted({min(gammas), max(gammas)})), kinds,
        seeds, 1, "float32", "autoregressive")
  yield from on_trees(compiled, vocab_size, trees[-3:], schemes, kinds[-2:],
                      seeds, 1, "float32")


def on_trees(compiled: Compiled, vocab_size: int,
             trees: Sequence[Sequence[int]] | None,
             schemes: Sequence[str | schemes_lib.Scheme], kinds: Sequence[str],
             seeds: Sequence[int], rounds: int, dtype: str,
             scattered: bool = False) -> Iterator[Found]:
  """Enumerates small models with trees.

  `trees` is a list of `parents`; None means the default trees. If `scattered`
  is True, padding is inserted before and between the real nodes.
  """
  if trees is None:
    trees = list(default_trees(vocab_size))
  full = "full" in compiled.rule.requires
  if full:  # a node with more than V children has padding
    trees = [tree for tree in trees
             if max(map(tree.count, tree)) <= vocab_size]
  largest = max(map(len, trees), default=1) + 3 * scattered
  for parents, scheme, kind, seed in itertools.product(
      trees, map(schemes_lib.named, schemes), kinds, seeds):
    if full:
      largest = len(parents)
    few = vocab_size**(len(parents) - 1) <= _SEVERAL_ROUNDS
    times = rounds if few else 1
    longest = schemes_lib.height(parents)
    depth = enumeration.depth_of(compiled.rule, longest, times)
    draw = functools.partial(_drawn_tree, scheme, parents, largest, scattered)
    witness = dict(kind=kind, vocab_size=vocab_size, seed=seed,
                   parents=tuple(parents), scheme=schemes_lib.name_of(scheme),
                   rounds=times)
    if scattered:
      witness["padding"] = "before and between"
    what = "nodes with padding between" if scattered else "nodes"
    yield _enumerated(
        f"trees of up to {largest} {what}, V = {vocab_size}, {dtype}", compiled,
        _pair(compiled.rule, kind, vocab_size, depth, seed), draw, largest,
        longest, times, dtype, witness, len(parents))


def _drawn_tree(scheme: schemes_lib.Scheme, parents: Sequence[int], nodes: int,
                scattered: bool, q: np.ndarray, contexts: np.ndarray
                ) -> drafts.Drafts:
  trees = schemes_lib.draw(scheme, parents, q, contexts)
  return trees.scattered(nodes) if scattered else trees.padded(nodes)


def default_trees(vocab_size: int) -> Iterator[tuple[int, ...]]:
  """Yields `parents` of trees of up to 7 nodes, fewer trees for larger V.

  For V = 3, these are all trees of up to 5 nodes and some of 6 and 7 nodes.
  """
  for nodes in range(2, _MOST_NODES + 1):
    drafted = vocab_size**(nodes - 1)
    if drafted <= _SOME_TREES:
      few = nodes <= 5 and drafted <= _ALL_TREES
      step = 1 if few else max(math.factorial(nodes - 1) // 5, 1)
      yield from itertools.islice(
          schemes_lib.all_trees(nodes), step // 2, None, step)
      if not few:  # a star: all nodes are children of the root
        yield (-1, *[0] * (nodes - 1))


def on_special_trees(compiled: Compiled, vocab_size: int,
                     schemes: Sequence[str | schemes_lib.Scheme],
                     kinds: Sequence[str], seeds: Sequence[int], dtype: str
                     ) -> Iterator[Found]:
  """Enumerates trees with padding before real nodes, and by score.

  `schemes.expanded_by_score` draws the second kind of tree.
  """
  few = [tree for tree in default_trees(3) if len(tree) in (3, 4, 5)][::4]
  if "full" not in compiled.rule.requires:
    yield from on_trees(compiled, vocab_size, few, schemes, kinds, seeds, 1,
                        dtype, scattered=True)
  expanded = [schemes_lib.expanded_iid]
  if schemes_lib.without_replacement in schemes:
    expanded.append(schemes_lib.expanded_by_score)
  if not {"iid", "conditional", "full"} >= set(compiled.rule.requires):
    return
  yield from on_trees(compiled, 3, _EXPANDED, expanded, kinds, seeds, 1, dtype)


def on_larger_models(compiled: Compiled, seeds: Sequence[int], dtype: str,
                     schemes: Sequence[str | schemes_lib.Scheme]
                     ) -> Iterator[Found]:
  """Enumerates long chains, large V, large trees and many rounds.

  Long chains are enumerated in float32, the precision of decoding. In float64,
  a fifth of their sizes shows smaller errors.
  """
  chains = (_LARGER_WITH_STATE if compiled.rule.remembers
            else _LARGER_CHAINS[::2 if schemes else 1])
  for seed in seeds:
    for own in dict.fromkeys((dtype, "float32")):
      sizes = chains[::5] if own != "float32" and len(chains) > 7 else chains
      listed = ", ".join(str((gamma, vocab)) for vocab, gamma in sizes)
      chain = functools.partial(_larger_chain, compiled.quick, own,
                                bool(schemes),
                                f"chains of (gamma, V) = {listed}", seed)
      if compiled.rule.remembers and own == dtype:
        yield chain(*_LONG_MEMORY)
      for size in sizes:
        yield chain(*size)
    if not compiled.rule.remembers:
      yield from on_larger_trees(compiled, dtype, schemes, seed)


def _larger_chain(compiled: Compiled, dtype: str, has_trees: bool, trial: str,
                  seed: int, vocab_size: int, gamma: int, rounds: int = 1
                  ) -> Found:
  """Enumerates long chains on one pair of models.

  The models for a rule with state are `narrow`, see `larger.sparse_pair`.
  """
  if rounds > 1:
    trial = f"{rounds} rounds of {gamma} tokens, V = {vocab_size}"
  narrow = compiled.rule.remembers
  # For long chains, q has only one token after more contexts. This limits the
  # number of drafts.
  single = 0.6 if gamma > 8 and not narrow else None
  parents = tuple(range(-1, gamma))
  pair = larger.sparse_pair(
      vocab_size, enumeration.depth_of(compiled.rule, gamma, rounds), seed,
      narrow, _single(compiled.rule, single))
  return _on_sparse(trial, compiled, pair, "iid", parents, seed, dtype,
                    dict(gamma=gamma), rounds, has_trees)


def on_larger_trees(compiled: Compiled, dtype: str,
                    schemes: Sequence[str | schemes_lib.Scheme], seed: int
                    ) -> Iterator[Found]:
  """Enumerates trees of 10 nodes and trees of up to 17 nodes."""
  schemes = tuple(map(schemes_lib.named, schemes))
  # After each context q has at most two tokens. After these, drawing without
  # replacement draws from all V tokens. The largest trees would then have too
  # many drafts.
  few = [scheme for scheme in schemes if scheme in (
      schemes_lib.iid, schemes_lib.top_k, schemes_lib.several)]
  (vocab_size, parents), (largest_vocab, largest) = (
      _LARGER_TREE, _LARGEST_TREES)
  for schemes_, vocab, trees, single in (
      (schemes, vocab_size, (parents,), None),
      (few, largest_vocab, largest, _SINGLE)):
    nodes = max(map(len, trees))
    upto = "up to " if single else ""
    for scheme, tree in itertools.product(schemes_, trees):
      depth = enumeration.depth_of(compiled.rule, schemes_lib.height(tree), 1)
      yield _on_sparse(
          f"trees of {upto}{nodes} nodes, V = {vocab}", compiled,
          larger.sparse_pair(vocab, depth, seed, single=_single(
              compiled.rule, single)), scheme, tree,
          seed, dtype, dict(parents=tree, scheme=schemes_lib.name_of(scheme)),
          nodes=nodes)


def _on_sparse(trial: str, compiled: Compiled, pair: larger.SparsePair,
               scheme: str | schemes_lib.Scheme, parents: Sequence[int],
               seed: int, dtype: str, witness: dict[str, Any], rounds: int = 1,
               has_trees: bool = True, nodes: int = 0) -> Found:
  """Enumerates all drafts of a `SparsePair`."""
  nodes = nodes or len(parents)
  draw = functools.partial(_drawn_tree, scheme, parents, nodes, False)
  return _enumerated(
      f"{trial}, {dtype}", compiled, pair, draw, nodes,
      schemes_lib.height(parents), rounds, dtype, dict(
          kind="sparse", vocab_size=pair.vocab_size, seed=seed, rounds=rounds,
          **witness), len(parents) if has_trees else 0)


def audits(compiled: Compiled, is_tree: bool, seeds: Sequence[int]
           ) -> Iterator[Found]:
  """Audits production sizes, and many rounds of a rule with state."""
  sizes = [(tuple(range(-1, gamma)), vocab_size)
           for gamma, vocab_size in _PRODUCTION_CHAINS]
  for seed in seeds:
    for parents, vocab_size in PRODUCTION_TREES if is_tree else sizes:
      yield from audited(compiled, parents, vocab_size, seed, is_tree)
    yield from audited(
        compiled, (-1, 0, 1), _LARGEST_VOCAB, seed, only_few=True)
    if compiled.rule.remembers:
      gamma, vocab_size, tokens, rows = _WALK
      yield _found(
          f"sampled decoding of {rows} x {tokens} tokens, gamma {gamma}, V = "
          f"{vocab_size}", audit.walk(compiled, *_WALK, seed=seed), "float32",
          dict(kind="walk", vocab_size=vocab_size, gamma=gamma, seed=seed),
          (gamma, vocab_size, 0))


def audited(compiled: Compiled, parents: Sequence[int], vocab_size: int,
            seed: int, is_tree: bool = False, only_few: bool = False
            ) -> Iterator[Found]:
  """Runs the audits of one size.

  A rule with state has one audit, because `sample_dense` requires a rule
  without state.
  """
  nodes, longest = len(parents), schemes_lib.height(parents)
  shape = f"trees of {nodes} nodes" if is_tree else f"gamma {nodes - 1}"
  for run in (audit.enumerate_few, audit.sample_dense)[
      :1 if only_few or compiled.rule.remembers else 2]:
    yield _found(
        f"audit at {shape}, V = {vocab_size:,}, float32, false alarm below "
        "1e-9", run(compiled, parents, vocab_size, seed), "float32",
        dict(kind="audit", vocab_size=vocab_size, seed=seed,
             **(dict(parents=parents) if is_tree else dict(gamma=longest))),
        (longest, vocab_size, nodes if is_tree else 0))


def unbatched(compiled: Compiled, dtype: str) -> Iterator[Found]:
  """Compares the laws of drafts without `vmap` and in a batch of three."""
  rule, rng = compiled.rule, np.random.default_rng(0)
  # With the first p and q of this seed, verification can stop at every node.
  batch = 3
  q, p = (np.stack([rng.dirichlet(np.ones(3), 3) for _ in range(batch)])
          .astype(dtype) for _ in "qp")
  first = (0, 1, 2)
  if "deterministic" in rule.requires:
    q = np.eye(3, dtype=dtype)[q.argmax(-1)]
    first = (0, *q[0, :-1].argmax(-1))
  q[:, 1:] = q[:, :-1].copy()
  q[:, 0] = 0
  tokens = q.argmax(-1).astype(np.int32)
  tokens[0] = first
  parents = np.tile(np.arange(-1, 2, dtype=np.int32), (batch, 1))
  state = compiled.initial_state(2, dtype)
  states = jax.tree.map(lambda x: np.repeat(x[None], batch, axis=0), state)
  stop, next_token, *_ = compiled.laws(
      (tokens, parents, q, p, states), batch, dtype)
  defects, example = set(), None
  with jax.enable_x64(True):
    evaluate = jax.jit(rule.evaluate)
    for row in range(batch):
      draft = Draft(tokens[row], parents[row], q[row])
      law = jax.tree.map(np.asarray, evaluate(draft, p[row], state))
      off = np.abs(stop[row, :, None] * next_token[row]
                   - law.stop[:, None] * law.next_token).sum()
      if not off <= 1e-5:
        defects.add("the law of one draft depends on vmap")
        example = example or Example(
            draft, p[row], law, reason="the law above is that of the draft "
            f"alone; in a batch, stop is {np.round(stop[row], 4).tolist()}")
  yield _found("law without vmap", audit.Audited(
      0.0, frozenset(defects), 2 * batch, example), dtype,
               dict(kind="unbatched", vocab_size=3, gamma=2), (2, 3, 0))
