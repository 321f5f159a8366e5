"""Costs of draft lengths on recorded texts, against exact enumeration."""

import sys

import jax.numpy as jnp
import numpy as np
import pytest
from scripts import ROOT

import specjax as sj
from specjax.verifiers import Block

sys.path.append(str(ROOT / "experiments"))

from lib.reports import draft_stopping  # noqa: E402
from lib.reports import text_rounds  # noqa: E402


def _recorded(pair, length, gamma, rng):
  """A text of p, with a draft of q from every position."""
  draw = lambda row: rng.choice(len(row), p=row)
  context, ratios, confidence, survival = 0, [], [], []
  for n in range(length):
    at, passed, rows, along = context, 1.0, [], []
    for depth in range(n, n + gamma):
      p, q = pair.p[depth][at], pair.q[depth][at]
      token = draw(q)
      passed = min(1, passed * p[token] / q[token])
      rows.append(q.max())
      along.append(passed)
      at = at * pair.vocab_size + token
    token = draw(pair.p[n][context])
    with np.errstate(divide="ignore"):
      ratios.append(pair.p[n][context, token] / pair.q[n][context, token])
    confidence.append(rows)
    survival.append(along)
    context = context * pair.vocab_size + token
  return draft_stopping.Text(*map(np.array, (ratios, confidence, survival)))


def _confident(threshold, length):
  """The same rule for enumerated drafts, which it ends with the text."""
  stops = sj.exact.ended_by(
      lambda probs, tokens: jnp.cumprod(probs.max(-1) > threshold).sum())

  def ended(drafts):
    start = np.searchsorted(2**np.arange(1, 9) - 1, drafts.contexts[:, 0],
                            side="right")
    return stops(drafts).cut(length - 1 - start)

  return ended


@pytest.mark.slow
def test_costs_are_those_of_the_production_rule():
  # Broken: a draft goes on where the rule has ended it, its tokens are counted
  # along the text and not along the draft, or beyond the end of the text.
  length, gamma, price, threshold = 4, 3, 0.3, 0.6
  pair = sj.exact.random_pair("dense", 2, length + gamma, 2)
  exact = sj.analysis.remaining_rounds(
      Block(), pair, gamma, length, token_cost=price,
      ended=_confident(threshold, length))
  rng = np.random.default_rng(0)
  costs = [draft_stopping.costs_to_go(
      _recorded(pair, length, gamma, rng),
      draft_stopping.confident(threshold, gamma), price)[0]
           for _ in range(4000)]
  error = np.std(costs) / len(costs)**0.5
  assert error < 0.02 and abs(np.mean(costs) - exact[0]) < 4 * error


@pytest.fixture(scope="module")
def texts():
  pair = sj.exact.random_pair("mixed", 2, 16, 5)
  rng = np.random.default_rng(1)
  return [_recorded(pair, 12, 4, rng) for _ in range(40)]


def test_without_a_price_a_text_costs_its_rounds(texts):
  # Broken: rounds other than those of the table of rounds.
  for text in texts[:5]:
    within = text_rounds.given_text(text.ratios, 4, "block")
    assert draft_stopping.costs_to_go(text, draft_stopping.fixed(4), 0)[0] == (
        pytest.approx((1 - within).sum()))


def test_rules_know_when_to_draft(texts):
  # Broken: the value of a token or the survival; a rule is judged on the texts
  # that it was tuned on.
  gain = {}
  for price in (1e-3, 0.15, 2.0):
    rows = {r["rule"]: r for r in draft_stopping.compare(
        texts, range(len(texts)), price)}
    for name, row in rows.items():
      gain[name, price] = row["over_fixed"]
    assert rows["fixed length"]["over_fixed"] == 0
  for name in ("survival * D", "survival * D(context)"):
    assert abs(gain[name, 1e-3]) < 1e-3  # it drafts all
    assert gain[name, 2.0] == 0  # it drafts nothing
    assert gain[name, 0.15] < 0.02
