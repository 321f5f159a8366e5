"""Dual certificates: exact bounds on all lossless rules for one instance.

A rule is lossless if decoding with it follows the target's distribution p. An
instance is a pair of models, the shape of a draft tree, and the scheme that
draws the tree's tokens. Let z be a sequence one token longer than the deepest
path, and phi(z) any function. Phi(c) = E_p[phi(z) | z begins with c], and Phi()
is Phi of the empty context.

A lossless rule stops at a node v of the draft tree T and emits a token y. vy is
the path to v, followed by y. The target alone continues after vy, so the
sequence has distribution p. The mean of Phi(vy) is therefore Phi(), and

  E[depth(v)] = E[depth(v) + Phi(vy)] - Phi() <= E_T[max_{v, y} (depth(v) +
  Phi(vy))] - Phi().

The maximum is over the nodes v of T and the tokens y with p(vy) > 0. The
right-hand side is a bound for every phi. `dual_bound` evaluates it in
fractions. Its code is independent of the solver that finds a good phi.
"""

from collections.abc import Sequence
import fractions
import functools
import math

import numpy as np

from specjax.analysis import optima
from specjax.exact import schemes
from specjax.exact.pairs import Pair

Fraction = fractions.Fraction

# Values of phi from the solver are rounded to multiples of 1 / _ROUNDED.
_ROUNDED = 1 << 30


def tree_potential(pair: Pair, parents: Sequence[int],
                   scheme: str | schemes.Scheme) -> list[Fraction]:
  """Returns the phi with the lowest `dual_bound`, as rational numbers.

  The docstring of this module defines phi. The result is a rounded solution of
  the dual of the linear program of `tree_optimum`. Its `dual_bound` exceeds the
  optimum by about 1e-9. The excess can be larger for models with probabilities
  below 1e-9, because the solver cannot resolve them.

  Args:
    pair: models of depth at least height + 1.
    parents: N parents, see `enumerate_trees`.
    scheme: function that draws the tokens, or its name in `exact.schemes`.

  Returns:
    `V**(height + 1)` rational numbers, one for every sequence z.
  """
  potentials = [[-Fraction(round(float(price) * _ROUNDED), _ROUNDED)
                 for price in prices]
                for prices in optima.tree_prices(pair, parents, scheme)]
  return min(potentials, key=functools.partial(
      dual_bound, pair, parents, scheme))


def chain_potential(pair: Pair, gamma: int) -> list[Fraction]:
  """Returns the phi with the lowest `dual_bound` for a chain, in closed form.

  The docstring of this module defines phi. R_i is the product of p / q over the
  first i tokens of a sequence z. Block verification passes position l of z with
  probability 1 / max_{i<=l} R_i. j(l) <= l is the position of this maximum. It
  is 0 if no R_i exceeds R_0 = 1. Then phi(z) = sum over j > 0 of
  E[number of l <= gamma with j(l) = j | z^j], where z^j is the first j tokens
  of z. With this phi, `dual_bound` equals the expected number of tokens
  accepted by block verification.

  Args:
    pair: models of depth at least gamma + 1.
    gamma: draft length.

  Returns:
    `V**(gamma + 1)` rational numbers, one for every sequence z.
  """
  vocab = pair.vocab_size
  p, q = (_rational(tables, gamma) for tables in (pair.p, pair.q))

  def walk(context, depth, ratio, largest, at):
    """Returns `(sums of phi below, E[number of l > depth with j(l) = at])`."""
    if depth == gamma:
      return [Fraction(0)] * vocab, Fraction(0)
    texts, count = [], Fraction(0)
    for y in range(vocab):
      p_y, q_y = p[depth][context][y], q[depth][context][y]
      new = ratio * p_y / q_y if q_y else (math.inf if p_y else Fraction(0))
      rises = new > largest
      below, same = walk(context * vocab + y, depth + 1,
                         new, new if rises else largest,
                         depth + 1 if rises else at)
      if rises:  # position depth + 1 is the maximum, at least for itself
        texts += [phi + 1 + same for phi in below]
      else:
        texts += below
        count += p_y * (1 + same)
    return texts, count

  return walk(0, 0, Fraction(1), Fraction(1), 0)[0]


def dual_bound(pair: Pair, parents: Sequence[int], scheme: str | schemes.Scheme,
               potential: Sequence[Fraction]) -> Fraction:
  """Returns an exact upper bound on the accepted tokens of any lossless rule.

  Rows of p and of the drafts' `probs` are converted exactly to rational numbers
  and divided by their sum.

  Args:
    pair: models of depth at least height + 1.
    parents: N parents, see `enumerate_trees`.
    scheme: drawing scheme. It must draw each token from the row of `probs` that
      it returns.
    potential: `V**(height + 1)` rational numbers phi(z). Any values give a
      valid bound.

  Returns:
    Bound on the expected number of accepted tokens of one round, for this pair,
    shape and scheme.

  Raises:
    ValueError: `potential` has the wrong size, or the scheme draws from other
      probabilities than the rows that it returns.

  Example: in the Bernoulli example of the block verification paper with a draft
  of two tokens, no lossless rule accepts more than 11/9 tokens on average.

    >>> import specjax as sj
    >>> pair = sj.exact.iid_pair((1 / 3, 2 / 3), (2 / 3, 1 / 3), depth=3)
    >>> bound = sj.analysis.dual_bound(
    ...     pair, (-1, 0, 1), "iid", sj.analysis.chain_potential(pair, gamma=2))
    >>> print(round(float(bound * 9), 6))
    11.0
  """
  vocab, length = pair.vocab_size, schemes.height(parents) + 1
  if len(potential) != vocab**length:
    raise ValueError(f"potential has {len(potential)} numbers; it must have "
                     f"V**(height + 1) = {vocab**length}")
  p = _rational(pair.p, length)
  means = _means(potential, p, vocab)
  best = _largest(means, p, vocab)
  drafts = schemes.draw(scheme, parents, np.concatenate(pair.q),
                      np.zeros(1, np.int64))
  total = Fraction(0)
  for tokens, above, probs, weight in zip(
      drafts.tokens, drafts.parents, drafts.probs, drafts.weights):
    chance, stops = _drawn(tokens, above, probs, best)
    if abs(float(chance) - weight) > 1e-9:
      raise ValueError(f"scheme {schemes.name_of(schemes.named(scheme))} draws "
                       "from other probabilities than it reports; its drafts "
                       "have no exact probability here")
    total += chance * max(stops)
  return total - means[0][0]


def _means(potential: Sequence[Fraction], p: list[list[list[Fraction]]],
           vocab: int) -> list[list[Fraction]]:
  """Returns E[phi(z) | c] under p for all contexts c of n tokens, by n."""
  means = [list(potential)]
  for rows in reversed(p):
    means.insert(0, [sum(a * b for a, b in zip(row, means[0][i * vocab:]))
                     for i, row in enumerate(rows)])
  return means


def _largest(means: list[list[Fraction]], p: list[list[list[Fraction]]],
             vocab: int) -> list[list[Fraction | None]]:
  """Returns the largest of `means` after one more token, by length and context.

  Only tokens with p > 0 are considered. The value is None for a context with
  p = 0.
  """
  possible, best = [True], []
  for n, rows in enumerate(p):
    possible = [before and bool(x)
                for before, row in zip(possible, rows) for x in row]
    best.append([
        max((means[n + 1][c * vocab + y] for y in range(vocab)
             if possible[c * vocab + y]), default=None)
        for c in range(vocab**n)])
  return best


def _drawn(tokens: np.ndarray, above: np.ndarray, probs: np.ndarray,
           best: list[list[Fraction | None]]
           ) -> tuple[Fraction, list[Fraction]]:
  """Returns a draft's exact probability, and depth + largest Phi of its nodes.

  `best` is the result of `_largest`. Nodes without a possible next token are
  left out.
  """
  chance = Fraction(1)
  at = [(0, 0)]  # depth and context of every node; None is padding
  for token, parent, row in zip(tokens[1:], above[1:], probs[1:]):
    row = [Fraction(float(x)) for x in row]
    total = sum(row)
    if not total or at[parent] is None:
      at.append(None)
      continue
    chance *= row[token] / total
    depth, context = at[parent]
    at.append((depth + 1, context * len(row) + int(token)))
  nodes = [node for node in at if node is not None]
  return chance, [depth + best[depth][context] for depth, context in nodes
                  if best[depth][context] is not None]


def _rational(tables: Sequence[np.ndarray], length: int
              ) -> list[list[list[Fraction]]]:
  """Returns the rows of the first `length` tables as fractions.

  Each row is divided by its sum, so that it sums to exactly 1.
  """
  def row(numbers: np.ndarray) -> list[Fraction]:
    numbers = [Fraction(float(x)) for x in numbers]
    total = sum(numbers)
    return [x / total for x in numbers]

  return [[row(numbers) for numbers in table] for table in tables[:length]]
