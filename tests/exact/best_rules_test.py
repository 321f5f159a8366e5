"""Best lossless rules over several rounds: block verification with caps."""

import fractions
import functools
import itertools

import numpy as np
import pytest

from specjax import analysis
from specjax import exact
from specjax.analysis import several_rounds

Fraction = fractions.Fraction


def _exactly(pair):
  """The same pair with fractions, which must have small denominators."""
  table = np.vectorize(lambda x: Fraction(float(x)).limit_denominator(1000),
                       otypes=[object])
  return exact.Pair(*([table(rows) for rows in tables] for tables in pair))


def _random_fractions(rng, vocab, depth):
  """A pair of rational tables with many equal ratios, and with zeros."""
  def row():
    weights = rng.choice([0, 1, 1, 2, 3, 5], size=vocab)
    weights[rng.integers(vocab)] += not weights.any()
    return [Fraction(int(x), int(weights.sum())) for x in weights]

  tables = lambda: [np.array([row() for _ in range(vocab**n)], object)
                    for n in range(depth)]
  return exact.Pair(tables(), tables())


@pytest.mark.parametrize("gamma,rounds,most", [
    (2, 3, Fraction(20, 3)), (3, 2, Fraction(25, 4)), (4, 2, Fraction(23, 3))])
def test_best_rule_of_the_counterexamples(gamma, rounds, most):
  # Broken: the recursion over caps, or its arithmetic in fractions.
  pair = analysis.patient_pair(gamma, rounds * (gamma + 1))
  best = analysis.best_rule_over_rounds(_exactly(pair), gamma, rounds)
  assert best.tokens == most and isinstance(best.tokens, Fraction)
  # One cap: the last of the draft tokens that are always a, as in `Patient`.
  assert best.caps == {(1, (), (0,) * gamma): 0}
  as_floats = analysis.best_rule_over_rounds(pair, gamma, rounds)
  assert abs(as_floats.tokens - most) <= 1e-12 and as_floats.caps == best.caps


@pytest.mark.parametrize("length,rounds,probability", [
    (7, 2, Fraction(3, 4)), (8, 3, Fraction(3, 4)), (5, 2, 1), (8, 2, 0),
    (8, 0, 0)])
def test_best_quantiles_of_the_counterexample(length, rounds, probability):
  # Broken: the value of a complete sequence.
  pair = _exactly(analysis.patient_pair(3, length))
  assert analysis.best_quantile(pair, 3, length, rounds) == probability


def test_best_rule_equals_the_linear_program():
  # Broken: the characterisation of lossless rules by a_l p <= q, or a maximum.
  for kind, seed in itertools.product(
      ("dense", "zeros", "ties", "varied"), range(10)):
    pair = exact.random_pair(kind, 2, 8, seed)
    best = analysis.best_rule_over_rounds(pair, 3, 2)
    assert abs(best.tokens - analysis.most_tokens(pair, 3, 2)[-1]) <= 1e-9


def _quantile_by_linear_programs(pair, gamma, length, rounds, eos):
  """`best_quantile` by one linear program over all rules at each context."""
  vocab = pair.vocab_size
  complete = lambda context: len(context) >= length or eos in context

  @functools.cache
  def best(left, context):
    if not left or complete(context):
      return float(complete(context))
    number = functools.reduce(lambda n, y: n * vocab + y, context, 0)
    drafted = min(gamma, length - len(context) - 1)
    below = exact.Pair(*([
        tables[len(context) + d][number * vocab**d:(number + 1) * vocab**d]
        for d in range(drafted + 1)] for tables in pair))
    values = [np.array([best(left - 1, context + more) for more in
                        itertools.product(range(vocab), repeat=m)])
              for m in range(1, drafted + 2)]
    return analysis.emission_optimum(below, drafted, values)

  return best(rounds, ())


@pytest.mark.parametrize("eos", [None, 1])
def test_best_quantile_equals_linear_programs(eos):
  # Broken: the end of a sequence, by its length or by the end token.
  for kind, rounds in itertools.product(("dense", "zeros", "varied"), (2, 3)):
    pair = exact.random_pair(kind, 2, 5, 1)
    found = analysis.best_quantile(pair, 2, 5, rounds, eos=eos)
    assert abs(found - _quantile_by_linear_programs(
        pair, 2, 5, rounds, eos)) <= 1e-9


def _value_with_caps(pair, gamma, rounds, caps, value):
  """Expected value of block verification with caps, from its definition."""
  longest, vocab = rounds * (gamma + 1), pair.vocab_size
  total = 0
  for text in itertools.product(range(vocab), repeat=longest):
    rows = [functools.reduce(lambda n, y: n * vocab + y, text[:n], 0)
            for n in range(longest)]
    p, q = ([tables[n][rows[n]][text[n]] for n in range(longest)]
            for tables in pair)
    if not all(p):
      continue
    positions = {0: functools.reduce(lambda a, b: a * b, p)}
    for number in range(1, rounds + 1):
      then = {}
      for start, weight in positions.items():
        passes, ratio = [1], 1
        for at in range(start, start + gamma):
          ratio = ratio * q[at] / p[at]
          passes.append(min(passes[-1], ratio, caps.get(
              (number, text[:start], text[start:at + 1]), 1)))
        for accepted, (now, after) in enumerate(zip(passes, [*passes[1:], 0])):
          end = start + accepted + 1
          then[end] = then.get(end, 0) + weight * (now - after)
      positions = then
    total += sum(value(text[:end]) * weight
                 for end, weight in positions.items())
  return total


def test_caps_attain_the_optimum():
  # Broken: a cap that is returned for another draft, or with a wrong value.
  pair = _exactly(analysis.patient_pair(3, 8))
  best = analysis.best_rule_over_rounds(pair, 3, 2)
  assert _value_with_caps(pair, 3, 2, best.caps, len) == best.tokens
  assert _value_with_caps(pair, 3, 2, {}, len) == Fraction(49, 8)


def test_caps_between_0_and_1():
  # Broken: the kinks of the concave functions. Random values of the contexts
  # make D negative at many of them, so that caps of every size are best.
  rng, sizes = np.random.default_rng(0), set()
  for _ in range(12):
    pair = _random_fractions(rng, 2, 4)
    values = [rng.integers(-9, 10, size=2**m) for m in range(1, 5)]
    value = lambda context, values=values: int(
        values[len(context) - 1][int("".join(map(str, context)), 2)])
    most, caps = several_rounds._best(
        pair, 3, 1, is_complete=lambda context: False, value=value)
    assert most == _value_with_caps(pair, 3, 1, caps, value)
    as_floats = exact.Pair(*([rows.astype(float) for rows in tables]
                             for tables in pair))
    assert abs(most - analysis.emission_optimum(as_floats, 3, values)) <= 1e-9
    sizes |= set(caps.values())
  assert 0 in sizes and any(0 < kappa < 1 for kappa in sizes)
