"""Optima over all lossless rules for several rounds.

A rule is lossless if decoding with it follows the target's distribution. Both
methods of this module are backward induction over contexts, with a maximum over
all lossless rules of one round at each context. The rules may use the sequence
so far and both models in any way, and may use shorter drafts. The results are
therefore bounds for every rule without state other than its output.

`fewest_rounds` and `most_tokens` compute the maximum of one round by a linear
program (`optima.emission_optimum`). `best_rule_over_rounds` and `best_quantile`
compute it in closed form, as follows. p is the target and q the draft model.
Let a_l(z^l) be the probability that at least l draft tokens are accepted, given
that the generated sequence begins with z^l. A family of numbers a_l in [0, 1]
belongs to a lossless rule if and only if it does not increase along a sequence,
and a_l(z^l) <= q(z^l) / p(z^l). The value of a round is linear in these
numbers:

  E_y V(c y) + sum over l of E[a_l(z^l) D(c z^l)],
  D(c) = E_y V(c y) - V(c).

c is the context at which the round starts, y has the distribution p(. | c), and
V(c) is the value of a round that ends at c. D is the value of one more token,
and may be negative. The best numbers are

  a_l(z^l) = min(a_{l-1}(z^{l-1}), q(z^l) / p(z^l), kappa(z^l)).

This rule is block verification with caps: the acceptance probability of the
draft z^l never exceeds kappa(z^l). If all caps are 1, it is block verification.
`docs/results/several_rounds_proofs.md` has the proof.
"""

from collections.abc import Callable
import functools
import numbers
from typing import NamedTuple

import numpy as np

from specjax.analysis import optima
from specjax.analysis import rounds as rounds_lib
from specjax.exact import enumeration
from specjax.exact.pairs import check_pair
from specjax.exact.pairs import Pair
from specjax.utils import fields

_PROGRAMS = 64  # programs solved in one call
_ROUNDING = 1e-12  # rounding error of float weights of kinks

Context = tuple[int, ...]


class BestRule(NamedTuple):
  """Lossless rule with the most expected tokens after a number of rounds.

  The rule is block verification with caps. The docstring of
  `analysis.several_rounds` defines it.

  Attributes:
    tokens: expected tokens after the last round.
    caps: `{(round, context, draft): kappa}`. kappa limits the probability that
      `draft` is accepted, given that the generated sequence continues `context`
      with it. `round` counts from 1. `context` is the tuple of tokens before
      the round, and `draft` the tuple of draft tokens. Only caps below the
      probability of block verification are included, also for contexts that
      the rule does not reach. All other caps are 1.
  """

  tokens: numbers.Real
  caps: dict[tuple[int, Context, Context], numbers.Real]


def fewest_rounds(pair: Pair, gamma: int, length: int, *,
                  eos: int | None = None) -> float:
  """Returns the smallest expected number of rounds of any lossless rule.

  Block verification attains this minimum for every length, see
  `analysis.rounds`. This function checks that theorem independently.

  Args:
    pair: models of depth at least `length`.
    gamma: largest draft length.
    length: number of tokens to generate, at least 1.
    eos: end-of-sequence token, or None.

  Raises:
    ValueError: `gamma`, `length` or `eos` is out of range, the tables are not
      deep enough, or a row of the models does not sum to 1 within 1e-12.
    ArithmeticError: the solver found no solution.
  """
  return float(fewest_remaining_rounds(pair, gamma, length, eos=eos)[0])


def fewest_remaining_rounds(pair: Pair, gamma: int, length: int, *,
                            eos: int | None = None) -> np.ndarray:
  """Returns `fewest_rounds` from every context to the end, `[contexts]`.

  Contexts are numbered as in the result of `analysis.remaining_rounds`.
  `fewest_rounds` documents the arguments and errors.
  """
  rounds_lib.check(pair, gamma, length, eos, length)
  vocab = pair.vocab_size
  complete = rounds_lib.complete_contexts(vocab, length, eos)
  offsets = enumeration.first_contexts(vocab, length + 1)
  rounds = np.zeros(offsets[-1])
  rounds[offsets[length - 1]:offsets[length]] = 1
  rounds[complete] = 0
  for n in reversed(range(length - 1)):
    # Tokens after `length` have no value, so drafts need not extend beyond it.
    drafted = min(gamma, length - n - 1)
    level = np.flatnonzero(~complete[offsets[n]:offsets[n + 1]])
    rounds[offsets[n] + level] = 1 - _maxima(
        [_from_context(pair, -rounds, offsets, drafted, n, context)
         for context in level])
  return rounds[:offsets[length]]


def most_tokens(pair: Pair, gamma: int, rounds: int) -> np.ndarray:
  """Returns the largest expected tokens after 1, 2, ... rounds, `[rounds]`.

  The maximum is over all lossless rules. The best rule may differ between
  entries. Block verification attains the first entry, the first two if
  gamma = 2, and all entries if gamma = 1. Other entries can be larger than its
  expected tokens, see `analysis.patient_pair`. This function checks
  `best_rule_over_rounds`, which is faster, independently.

  Args:
    pair: models of depth at least rounds * (gamma + 1).
    gamma: draft length.
    rounds: number of rounds.

  Raises:
    ValueError: `gamma` or `rounds` is out of range, the tables are not deep
      enough, or a row of the models does not sum to 1 within 1e-12.
    ArithmeticError: the solver found no solution.
  """
  fields.check_at_least("rounds", rounds, 1)
  longest = rounds * (gamma + 1)
  rounds_lib.check(pair, gamma, longest, None, longest)
  offsets = enumeration.first_contexts(pair.vocab_size, longest + 1)
  tokens, found = np.zeros(offsets[-1]), []
  lengths = np.repeat(np.arange(longest + 1), np.diff(offsets))
  for last in range(longest - gamma - 1, -1, -gamma - 1):
    then, tokens = tokens + lengths, np.zeros_like(tokens)
    for n in range(last + 1):
      level = np.arange(pair.vocab_size**n)
      tokens[offsets[n] + level] = _maxima(
          [_from_context(pair, then, offsets, gamma, n, context)
           for context in level]) - n
    found.append(tokens[0])
  return np.array(found)


def best_rule_over_rounds(pair: Pair, gamma: int, rounds: int) -> BestRule:
  """Returns the lossless rule with the most expected tokens after `rounds`.

  The maximum is over the same rules as in `most_tokens`, but the method needs
  no linear program. The rule uses both models at contexts beyond the draft.
  It is therefore a bound, and not a rule for decoding.

  Args:
    pair: models of depth at least rounds * (gamma + 1). Tables with dtype
      object and `fractions.Fraction` entries give exact fractions.
    gamma: draft length, at least 0.
    rounds: number of rounds, at least 1.

  Raises:
    ValueError: `gamma` or `rounds` is out of range, the tables are not deep
      enough, or a row of the models is not a distribution.

  Example: the counterexample to Theorem 2 of the block verification paper
  (arXiv:2403.10444). Block verification has 6.125 tokens after two rounds. The
  best rule never accepts the third draft token of the first round.

    >>> import specjax as sj
    >>> pair = sj.analysis.patient_pair(gamma=3, depth=8)
    >>> best = sj.analysis.best_rule_over_rounds(pair, gamma=3, rounds=2)
    >>> print(best.tokens, best.caps)
    6.25 {(1, (), (0, 0, 0)): 0}
  """
  fields.check_at_least("rounds", rounds, 1)
  longest = rounds * (gamma + 1)
  rounds_lib.check(pair, gamma, longest, None, longest)
  return BestRule(*_best(
      pair, gamma, rounds, is_complete=lambda context: False, value=len))


def best_quantile(pair: Pair, gamma: int, length: int, rounds: int, *,
                  eos: int | None = None) -> numbers.Real:
  """Returns the largest P(at most `rounds` rounds for `length` tokens).

  The maximum is over all lossless rules. With the smallest `rounds` for which
  the result is at least 0.9, no lossless rule has a smaller 90 % quantile of
  the number of rounds. `rounds_distribution` returns these probabilities for
  one rule. Like `best_rule_over_rounds`, the result is a bound.

  Args:
    pair: models of depth at least `length`. Tables with dtype object and
      `fractions.Fraction` entries give exact fractions.
    gamma: draft length, at least 0.
    length: number of tokens to generate, at least 1.
    rounds: number of rounds, at least 0.
    eos: end-of-sequence token, or None.

  Raises:
    ValueError: `gamma`, `length`, `rounds` or `eos` is out of range, the tables
      are not deep enough, or a row of the models is not a distribution.

  Example: block verification generates 7 tokens in two rounds with probability
  9/16.

    >>> import specjax as sj
    >>> pair = sj.analysis.patient_pair(gamma=3, depth=7)
    >>> print(sj.analysis.best_quantile(pair, gamma=3, length=7, rounds=2))
    0.75
  """
  fields.check_at_least("rounds", rounds, 0)
  rounds_lib.check(pair, gamma, length, eos, length)
  is_complete = lambda context: len(context) >= length or eos in context
  return _best(pair, gamma, rounds, is_complete,
               value=lambda context: int(is_complete(context)))[0]


def _best(pair: Pair, gamma: int, rounds: int,
          is_complete: Callable[[Context], bool],
          value: Callable[[Context], numbers.Real]
          ) -> tuple[numbers.Real, dict]:
  """Returns the largest E[value(sequence after the last round)], and the caps.

  A complete sequence remains as it is. The caps are those of `BestRule`.
  """
  check_pair(pair)
  p, q = ([table.tolist() for table in tables] for tables in pair)
  caps = {}

  def row(tables, context):
    number = functools.reduce(
        lambda n, token: n * pair.vocab_size + token, context, 0)
    return tables[len(context)][number]

  @functools.cache
  def best(left, context):
    """Returns the largest expected value with `left` rounds after `context`."""
    if not left or is_complete(context):
      return value(context)
    return after(left, context) + sum(
        weight * kink for kink, weight in gain(left, context, (), 1, 1).items())

  @functools.cache
  def after(left, context):
    """Returns E_y best(left - 1, context y)."""
    return sum(p_y * best(left - 1, (*context, y))
               for y, p_y in enumerate(row(p, context)) if p_y)

  def gain(left, context, draft, ratio, survival):
    """Returns the gain F(a) of accepting `draft` with probability a.

    F(a) is the maximum of E[sum of a_l D] over the tokens after the draft, if
    a_l <= a. It is concave, does not decrease, and is linear between kinks:
    F(a) = sum of weight * min(a, kink) for a <= survival.

    Args:
      left: number of rounds, including this one.
      context: tokens before this round.
      draft: draft tokens z^l, all accepted.
      ratio: q / p of these tokens.
      survival: probability of accepting them with block verification, given
        the sequence.

    Returns:
      `{kink: weight}`, with positive weights.
    """
    kinks = {}
    if len(draft) == gamma:
      return kinks
    text = context + draft
    for y, (p_y, q_y) in enumerate(zip(row(p, text), row(q, text))):
      then = (*text, y)
      if not p_y or not q_y or is_complete(then):
        continue
      new_ratio = ratio * q_y / p_y
      highest = min(survival, new_ratio)
      later = gain(left, context, (*draft, y), new_ratio, highest)
      more = after(left, then) - best(left - 1, then)
      later[highest] = later.get(highest, 0) + more
      # The slope up to a kink is the sum of the weights of this kink and of all
      # larger kinks. kappa is the largest kink with a slope of at least 0.
      slope = kappa = 0
      for kink in sorted(later, reverse=True):
        slope += later.pop(kink)
        if slope >= (-_ROUNDING if isinstance(slope, float) else 0):
          kappa, later[kink] = kink, slope
          break
      if kappa < highest:
        caps[rounds - left + 1, context, (*draft, y)] = kappa
      for kink, weight in later.items():
        kinks[kink] = kinks.get(kink, 0) + p_y * weight
    return kinks

  return best(rounds, ()), caps


def _maxima(programs: list[tuple[np.ndarray, ...]]) -> np.ndarray:
  """Returns the optima of programs, solved in groups of `_PROGRAMS`."""
  return np.concatenate([optima.maxima(programs[i:i + _PROGRAMS])
                         for i in range(0, len(programs), _PROGRAMS)])


def _from_context(pair: Pair, values: np.ndarray, offsets: np.ndarray,
                  gamma: int, n: int, context: int) -> tuple[np.ndarray, ...]:
  """Returns the linear program of one round from a context of n tokens.

  Args:
    pair: the models.
    values: `[contexts]` value of a round that ends at each context.
    offsets: number of the first context of every length.
    gamma: draft length.
    n: number of tokens of the context.
    context: index of the context among all contexts of n tokens.
  """
  vocab = pair.vocab_size
  below = lambda tables: [
      tables[n + d][context * vocab**d:(context + 1) * vocab**d]
      for d in range(gamma + 1)]
  values = [
      values[offsets[n + m] + context * vocab**m:][:vocab**m]
      for m in range(1, gamma + 2)]
  return optima.program(Pair(below(pair.p), below(pair.q)), gamma, values)
