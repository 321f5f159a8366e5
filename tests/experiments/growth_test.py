"""Largest gain of block over token verification in one round."""

import fractions
import math
import random
import sys

from scripts import ROOT

sys.path.insert(0, str(ROOT / "experiments"))
from lib.reports import growth  # noqa: E402

Fraction = fractions.Fraction


def test_ratio_of_one_round():
  # Broken: the theorem P(token >= k) >= P(block >= k)^k, or the bound on the
  # ratio of expected tokens that follows from it. In fractions.
  rng = random.Random(3)

  def row(vocab):
    weights = [rng.choice((0, 1, 1, 2, 3, 5, 9)) for _ in range(vocab)]
    return weights if any(weights) else [1] * vocab

  def walk(depth, weight, s, t):
    """Adds weight * s and weight * t of a prefix, and of all longer ones."""
    block[depth] += weight * s
    token[depth] += weight * t
    if depth < gamma and s:
      p, q = row(vocab), row(vocab)
      for p_y, q_y in zip(p, q):
        if q_y:
          r = Fraction(p_y * sum(q), sum(p) * q_y)
          walk(depth + 1, weight * Fraction(q_y, sum(q)),
               min(1, s * r), t * min(1, r))

  for _ in range(600):
    vocab, gamma = rng.choice(((2, 2), (2, 3), (2, 5), (3, 3), (4, 2)))
    block, token = [0] * (gamma + 1), [0] * (gamma + 1)
    walk(0, Fraction(1), Fraction(1), Fraction(1))
    assert all(t >= s**k for k, (s, t) in enumerate(zip(block, token)))
    ratio = sum(block) / sum(token)
    assert ratio <= growth.ratio_bound(gamma) + 1e-9
    assert gamma != 3 or ratio <= Fraction(9, 7)  # the supremum


def test_supremum_for_three_draft_tokens():
  # Broken: the proof that it is 9/7. Its lines must be above the value h of the
  # second move, and the value of the first move must not be positive.
  lam, points = Fraction(9, 7), [Fraction(i, 72) for i in range(73)]
  slack = []
  for s in points:
    start, slope = (
        (0, 2 - 2 * lam * s) if 2 * s <= 1 else (0, 2 - lam) if 3 * s <= 2 else
        (Fraction(1, 28), Fraction(2, 7)))
    for new in points:
      token = min(s, new)  # survival of token verification
      h = new - lam * token + new * max(0, 1 - lam * token)
      assert h <= start + slope * new and slope >= 0
    slack.append(1 - lam + (1 - lam) * s + start + slope * s)
  assert max(slack) == 0 == slack[24]  # at s = 1/3, the simple pair
  assert abs(growth.two_phase(3) - lam) <= 1e-12


def test_ratio_bound():
  # Broken: the maximum over x, or a bound that models exceed.
  assert growth.ratio_bound(1) == 1
  assert abs(growth.ratio_bound(2) - 2 / math.sqrt(3)) <= 1e-12
  for gamma in (16, 64, 1024):
    bound = growth.ratio_bound(gamma)
    assert 0 < bound - (gamma + 2) / 4 < 0.02
    assert max(growth.walk(gamma), growth.two_phase(gamma)) < bound


def test_constant():
  # Broken: moves that no models have, or costs that are not counted.
  coarse, fine, costly = (growth.constant(*sizes, columns=40) for sizes in (
      (10, 1e-3), (20, 1e-3), (20, 1e-4)))
  assert coarse < fine and 0.063 < costly < fine < 0.25
