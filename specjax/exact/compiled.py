"""Rules compiled for many drafts, and what their laws show.

A rule can be wrong only where some property of the draft holds, for example at
temperature 0 or for a draft that ends in padding. `Compiled` counts the
evaluated drafts by property. `Defects` checks laws, and keeps a draft that
shows a defect, an `Example`.
"""

import collections
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.interfaces import check_verifier
from specjax.interfaces import Verifier
from specjax.trees import topology
from specjax.types import Draft
from specjax.types import Law
from specjax.types import Verdict

# XLA_FLAGS may lower the optimisation level, for example in tests. The programs
# of this file run thousands of times, so they set the level explicitly. For
# programs that run a few times, compiling without optimisation takes less time.
_LEVEL = "xla_backend_optimization_level"
_SMALL, _LARGE, _PRODUCTION = 4, 300, 128_259  # vocabularies in the properties
_TINY = 1e-30
NOT_FINITE, NEGATIVE = "a law is not finite", "a law is negative"
SURVIVAL = "survival is not P(tau >= i)"
_EXPECTED = "the first of `figures` is not E[tau | draft]"
# Largest total of negative entries that counts as rounding. Every draft is
# weighted by its probability. The sampler uses 0 in place of a negative entry.
ROUNDING = {"float64": 1e-12, "float32": 1e-6}
_EXPECTED_OFF = {"float64": 1e-6, "float32": 1e-3}  # of E[tau], in tokens


class Compiled:
  """A rule compiled once for several enumerations.

  Every function that enumerates a rule accepts a rule or a `Compiled`. A rule
  is compiled again at each call, so that edits of its class in a notebook take
  effect.

  Attributes:
    rule: the verification rule.
    coverage: number of evaluated drafts by property, see `_properties`.
  """

  def __init__(self, rule: Verifier, optimised: bool = True):
    check_verifier(rule)
    self.rule, self.coverage = rule, collections.Counter()
    has_figures = rule.has_survival or (
        type(rule).figures is not Verifier.figures)

    def law(tokens, parents, q, p, state):
      draft = Draft(tokens=tokens, parents=parents, probs=q)
      law = rule.evaluate(draft, p, state)
      figures = None
      if has_figures:
        figures = rule.figures(draft, p, state, law, topology.depths(parents))
      return law.stop, law.next_token, figures

    def commit(tokens, parents, q, p, state, verdict):
      draft = Draft(tokens=tokens, parents=parents, probs=q)
      return rule.next_state(state, draft, p, verdict)

    self._law, self._commit = (
        jax.jit(jax.vmap(f), compiler_options={_LEVEL: "02"[optimised]})
        for f in (law, commit))

  @classmethod
  def of(cls, verifier: "Verifier | Compiled") -> "Compiled":
    """Returns a rule as a `Compiled`. A `Compiled` is returned unchanged."""
    return verifier if isinstance(verifier, cls) else cls(verifier)

  @functools.cached_property
  def quick(self) -> "Compiled":
    """The rule compiled without optimisation, for few drafts of a shape."""
    new = Compiled(self.rule, optimised=False)
    new.coverage = self.coverage
    return new

  def initial_state(self, gamma: int, dtype: str) -> Any:
    """Returns the rule's state before the first round, or None.

    Args:
      gamma: draft length.
      dtype: dtype of the floating-point arrays of the state.
    """
    return jax.tree.map(lambda x: _in_dtype(np.asarray(x), dtype),
                        self.rule.init(gamma))

  def laws(self, drafts: tuple, chunk: int, dtype: str
           ) -> tuple[np.ndarray, np.ndarray, tuple | None]:
    """Returns `(stop, next_token, figures)` of n drafts.

    `stop [n, N]` and `next_token [n, N, V]` are the fields of `Law`. `figures`
    is the result of `Verifier.figures`, with leaves `[n]` and `[n, N]`. It is
    None if the rule does not compute figures of its own.

    Args:
      drafts: tuple of tokens `[n, N]`, parents `[n, N]`, q `[n, N, V]`,
        p `[n, N, V]` and states.
      chunk: number of drafts per call. Each number compiles one program.
      dtype: dtype of q and p.
    """
    self.coverage.update({
        name: int(np.sum(has))
        for name, has in _properties(*drafts[1:4], dtype).items()})
    return _in_chunks(self._law, drafts, chunk, dtype)

  def commits(self, drafts: tuple, verdicts: Verdict, chunk: int, dtype: str
              ) -> Any:
    """Returns the rule's states after rounds with these verdicts.

    Args:
      drafts: the drafts of the rounds, as in `laws`.
      verdicts: outcomes of the rounds, with n rows.
      chunk: number of drafts per call.
      dtype: dtype of q and p.
    """
    return _in_chunks(self._commit, (*drafts, verdicts), chunk, dtype)


def _in_dtype(x: np.ndarray, dtype: str) -> np.ndarray:
  is_float = jnp.issubdtype(x.dtype, jnp.floating)
  return x.astype(dtype, copy=False) if is_float else x


def _in_chunks(function: Callable, arguments: tuple, chunk: int, dtype: str
               ) -> Any:
  tokens, parents, q, p, *rest = arguments
  arguments = (tokens.astype(np.int32), parents.astype(np.int32),
               q.astype(dtype, copy=False), p.astype(dtype, copy=False), *rest)
  count = len(tokens)

  def rows(start: int) -> tuple:
    """Returns one chunk. The last chunk is padded with copies of row 0."""
    missing = max(start + chunk - count, 0)
    return jax.tree.map(lambda x: np.concatenate(
        [x[start:], np.repeat(x[:1], missing, axis=0)]) if missing
                        else x[start:start + chunk], arguments)

  with jax.enable_x64(True):
    results = [function(*rows(start)) for start in range(0, count, chunk)]
    join = lambda *x: np.concatenate(x) if len(x) > 1 else np.asarray(x[0])
    return jax.tree.map(lambda *x: join(*x)[:count], *results)


def _properties(parents, q, p, dtype) -> dict[str, np.ndarray]:
  """Returns a mask `[n]` of the drafts with each property.

  Args:
    parents: `[n, N]` parents of n drafts of N nodes.
    q: `[n, N, V]` draft distributions. Row 0 is ignored.
    p: `[n, N, V]` target distributions.
    dtype: dtype of the inputs of the law.
  """
  count, nodes, vocab = q.shape
  gamma = nodes - 1
  # Numbers of entries and largest entries: few passes over large arrays.
  positive, largest = np.count_nonzero(p, axis=-1), p.max(-1)
  positive_q, largest_q = np.count_nonzero(q, axis=-1), q.max(-1)
  real = positive_q > 0
  real[:, 0] = False
  in_use = real.copy()  # nodes whose row of p can be used
  in_use[:, 0] = True
  drafted = real.sum(-1)
  padding = gamma - drafted
  is_chain = ((parents == np.arange(-1, gamma)) | ~in_use).all(-1)
  is_float32 = dtype == "float32"
  found = {
      "temperature 0 of both models, 2 or more tokens": (
          ((largest == 1) | ~in_use) & ((largest_q == 1) | ~real)).all(-1)
      & (drafted > 1),
      f"0 < p < {_TINY:g}": (
          (np.count_nonzero(p >= _TINY, axis=-1) < positive) & in_use).any(-1),
      "more than 4 nodes of padding": padding > 4,
      "padding in float32": (padding > 0) & is_float32,
      "chains of 2 tokens in float32": is_chain & (drafted == 2) & is_float32,
      "chains of 5 to 15 tokens in float32":
          is_chain & (drafted >= 5) & (drafted <= 15) & is_float32,
      "trees of more than 38 nodes": ~is_chain & (drafted >= 38),
  }
  if vocab <= _SMALL:
    return found
  same = np.zeros((count, nodes), bool)
  draft, node = np.nonzero(real)
  above = parents[draft, node]
  near = ((largest[draft, above] == largest_q[draft, node])
          & (positive[draft, above] == positive_q[draft, node]))
  draft, node, above = draft[near], node[near], above[near]
  same[draft, node] = (p[draft, above] == q[draft, node]).all(-1)
  dense = ((positive_q == vocab) | ~real).all(-1) & (drafted > 0)
  found |= {
      f"1 token, V > {_SMALL}": drafted == 1,
      f"q = p in a row, V > {_SMALL}": same.any(-1),
      f"q = p in all rows, V > {_SMALL}":
          (same | ~real).all(-1) & (drafted > 1),
  }
  if vocab <= _LARGE:
    return found | {f"q > 0 at all tokens, {_SMALL} < V <= {_LARGE}": dense}
  ties = np.count_nonzero(p == largest[..., None], axis=-1)
  return found | {
      f"q > 0 at all tokens, V > {_LARGE}": dense,
      f"equal largest p, V > {_LARGE}": ((ties > 1) & in_use).any(-1),
      f"p = 0 at over half of the tokens, V > {_LARGE}": (
          (positive > 1) & (2 * positive < vocab) & in_use).any(-1),
      f"padding, V > {_LARGE}": padding > 0,
      "chains of 4 to 12 tokens, V >= 1,000":
          is_chain & (drafted >= 4) & (drafted <= 12) & (vocab >= 1000),
      f"V > {_PRODUCTION:,}": np.full(count, vocab > _PRODUCTION),
  }


_TOKENS = 8  # most tokens printed per row


class Example(NamedTuple):
  """A draft with the distributions p and q and the rule's law.

  Attributes:
    draft: draft tree of N nodes.
    target_probs: `[N, V]` target distribution after each node.
    law: the rule's law of this draft.
    node: node with a wrong distribution of the next emitted token, or None.
    obtained: `[V]` distribution of the token emitted after the context of
      `node`, over all drafts, or None. A lossless rule has
      `target_probs[node]`.
    reason: sentence with the wrong value and the expected one, or "" if
      `obtained` shows them.
  """

  draft: Draft
  target_probs: np.ndarray
  law: Law
  node: int | None = None
  obtained: np.ndarray | None = None
  reason: str = ""

  def __str__(self):
    nodes, vocab = np.shape(self.target_probs)
    shown = self._shown(vocab)
    lines = [f"witness: a draft of {nodes - 1} tokens below root "
             f"{int(self.draft.tokens[0])}, V = {vocab}",
             f"  {'node':36s}{'token':8s}"
             + "  ".join(f"{t:<9d}" for t in shown)]
    for node in range(nodes):
      lines += self._node(node, shown)
    if self.reason:
      lines.append(self.reason)
    if self.obtained is not None:
      tokens = self._path(self.node)
      where = f"after {' '.join(map(str, tokens))}" if tokens else "first"
      lines += [f"the token that decoding emits {where}, over all drafts:",
                _line("expected, the target", "",
                      self.target_probs[self.node], shown),
                _line("obtained with the rule", "", self.obtained, shown)]
    return "\n".join(line.rstrip() for line in lines)

  def _node(self, node: int, shown: Sequence[int]) -> list[str]:
    """Returns the printed lines of one node: its distributions and its law."""
    law, rows = self.law, []
    if node:
      q = np.asarray(self.draft.probs[node])
      rows.append(("q, drawn from" if q.any() else "padding", q))
    rows += [("p, the target after it", self.target_probs[node]),
             (f"law: stops with {float(law.stop[node]):.4g}",
              law.next_token[node])]
    (head, values), *others = rows
    name = f"node {node} below {int(self.draft.parents[node])}"
    return [_line(f"{name if node else 'root'}: {head}",
                  str(int(self.draft.tokens[node])), values, shown),
            *(_line(f"  {head}", "", x, shown) for head, x in others)]

  def _path(self, node: int) -> list[int]:
    """Returns the tokens on the path to a node, without the root."""
    tokens = []
    while node > 0:
      tokens.insert(0, int(self.draft.tokens[node]))
      node = int(self.draft.parents[node])
    return tokens

  def _shown(self, vocab: int) -> Sequence[int]:
    """Returns the printed tokens, at most `_TOKENS`.

    In a large vocabulary, these are tokens of the draft, and tokens with the
    largest differences from the target.
    """
    if vocab <= _TOKENS:
      return range(vocab)
    drafted = {int(t) for t in self.draft.tokens[1:] if t < vocab}
    node = self.node or 0
    other = (self.obtained if self.obtained is not None
             else np.asarray(self.law.next_token[node]))
    far = np.argsort(-np.abs(np.nan_to_num(other - self.target_probs[node])))
    return sorted([*dict.fromkeys([*far[:_TOKENS // 2].tolist(), *drafted,
                                   *far[_TOKENS // 2:_TOKENS].tolist()])
                   ][:_TOKENS])


def _line(head: str, token: str, values: np.ndarray, shown: Sequence[int]
          ) -> str:
  row = "  ".join(f"{float(values[t]):<9.4g}" for t in shown)
  return f"  {head:36s}{token:8s}{row}"


class Defects:
  """Defects of the laws of one trial, with a draft that shows the first.

  Attributes:
    names: the defects.
    example: draft of the first defect, or None.
  """

  def __init__(self, dtype: str, sums: float, survival: float):
    """Creates an empty collection.

    Args:
      dtype: dtype of the laws.
      sums: tolerated error of the sum of a distribution.
      survival: tolerated total error of the survival.
    """
    self.names, self.example = set(), None
    self._dtype, self._sums, self._survival = dtype, sums, survival
    self._negative = 0.0

  def note(self, name: str, example: Example) -> None:
    """Adds a defect and, if it is the first one, its example."""
    if not self.names:
      self.example = example
    self.names.add(name)

  def check(self, stop: np.ndarray, next_token: np.ndarray,
            weights: np.ndarray, show: Callable[[int], Example]
            ) -> tuple[np.ndarray, np.ndarray]:
    """Checks n laws, and returns them with 0 in place of NaN and infinity.

    Args:
      stop: `[n, N]`, see `Law`.
      next_token: `[n, N, V]`, see `Law`. Rows with `stop` 0 are ignored.
      weights: `[n]` probabilities of the drafts.
      show: returns the example of the draft with this index.
    """
    for name, row, reason in self._found(stop, next_token, weights):
      if name not in self.names:
        self.note(name, show(row)._replace(reason=reason))
    if NOT_FINITE in self.names:
      stop, next_token = (np.where(np.isfinite(x), x, 0)
                          for x in (stop, next_token))
    return stop, next_token

  def _found(self, stop, next_token, weights) -> Iterator[tuple[str, int, str]]:
    """Yields defects, each with the worst draft and a sentence with values."""
    # A product with a vector of ones is much faster than a sum over the last
    # axis, and it contains NaN and infinity.
    sums = next_token @ np.ones(next_token.shape[-1], next_token.dtype)
    some = stop > 0
    bad = ~np.isfinite(stop).all(-1) | (some & ~np.isfinite(sums)).any(-1)
    if bad.any():
      yield NOT_FINITE, np.argmax(bad), "every entry of a law must be finite"
    lowest = np.where(some, next_token.min(-1), 0)
    below = np.maximum(-stop, 0).sum(-1)
    for row in np.flatnonzero((lowest < 0).any(-1)):  # rare
      below[row] += np.maximum(-next_token[row] * some[row, :, None], 0).sum()
    below = np.nan_to_num(below * weights)
    self._negative += below.sum()
    limit = ROUNDING[self._dtype]
    if self._negative > limit:
      row = np.argmax(below)
      least = np.minimum(stop[row].min(), lowest[row].min())
      yield NEGATIVE, row, (
          f"the smallest entry of this law is {least:.3g}; negative entries of "
          f"all drafts, weighted by probability, sum to {self._negative:.2g}, "
          f"and {limit:g} is allowed")
    for name, totals in (
        ("stop does not sum to 1", stop.sum(-1, keepdims=True)),
        ("a row of next_token does not sum to 1", np.where(some, sums, 1))):
      off = np.nan_to_num(np.abs(totals - 1))
      worst = np.unravel_index(np.argmax(off), off.shape)
      if off[worst] > self._sums:
        yield name, worst[0], f"the sum is {totals[worst]:.9g}; it must be 1"

  def check_figures(self, figures: tuple[np.ndarray, np.ndarray],
                    tails: np.ndarray, keys: np.ndarray, weights: np.ndarray,
                    show: Callable[[int], Example]) -> None:
    """Compares the results of `Verifier.figures` with the laws of n drafts.

    `survival` may be P(tau >= i | x^i). tau is the number of accepted tokens,
    and x^i are the first i tokens of the draft. This probability is a mean over
    all drafts that begin with x^i. The comparison is therefore between sums
    over these drafts.

    Args:
      figures: E[tau | draft] `[n]`, and survival `[n, N]`.
      tails: `[n, N]` P(tau >= i | draft) of the laws.
      keys: `[n, N]`, or `[n, 1]` for trees. Drafts with equal entries at i
        begin with the same first i tokens.
      weights: `[n]` probabilities of the drafts.
      show: returns the example of the draft with this index.
    """
    expected, survival = figures
    right = tails[:, 1:].sum(-1)
    off = np.nan_to_num(np.abs(expected - right), nan=np.inf)
    row = np.argmax(off)
    if off[row] > _EXPECTED_OFF[self._dtype]:
      self.note(_EXPECTED, show(row)._replace(
          reason=f"figures has {expected[row]:.6g} as E[tau | draft]; the law "
          f"has {right[row]:.6g}"))
    total, worst = 0.0, (-1.0, 0, 0)
    for node in range(survival.shape[1]):
      _, first, which = np.unique(keys[:, min(node, keys.shape[1] - 1)],
                                  return_index=True, return_inverse=True)
      gaps = np.nan_to_num(np.abs(np.bincount(
          which.reshape(-1), weights * (survival - tails)[:, node])),
                           nan=np.inf)
      total += gaps.sum()
      worst = max(worst, (gaps.max(), first[np.argmax(gaps)], node))
    if total > self._survival:
      _, row, node = worst
      self.note(SURVIVAL, show(row)._replace(
          reason=f"survival[{node}] is {survival[row, node]:.6g} for this "
          f"draft; over all drafts with the same first tokens, it differs from "
          f"P(tau >= {node}) by {worst[0]:.3g} in total"))


def tails(stop: np.ndarray, parents: np.ndarray) -> np.ndarray:
  """Returns P(tau >= i | draft) `[n, N]` of laws with `stop [n, N]`.

  `parents` is `[n, N]`.
  """
  count, nodes = stop.shape
  depths = np.zeros((count, nodes), int)
  for node in range(1, nodes):
    depths[:, node] = 1 + depths[np.arange(count), parents[:, node]]
  return np.stack([np.sum(stop * (depths >= i), axis=-1)
                   for i in range(nodes)], axis=-1)


def example_of(arguments: tuple, stop: np.ndarray, next_token: np.ndarray,
               row: int) -> Example:
  """Returns one of n drafts with its law.

  `arguments` has tokens, parents, q and p of the drafts, see `Compiled.laws`.
  """
  tokens, parents, q, p = (x[row] for x in arguments[:4])
  return Example(Draft(tokens, parents, q), p, Law(stop[row], next_token[row]))
