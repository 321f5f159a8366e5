"""Costs of stop rules for drafts, estimated from recorded sequences.

A stop rule chooses the draft length from q, the drafter's distributions. The
cost of a sequence is its number of rounds (target calls) plus a price for every
drafted token. At every position of a sequence, one recorded draft determines
the expected number of drafted tokens. Given the sequence, block verification
passes each position with a known probability, if the draft is long enough
(`analysis.draft_lengths`). So the cost of a stop rule has no noise from random
acceptance.

Drafting one more token saves survival * D target calls. The survival is the
probability that the draft is accepted up to this token. D is the number of
target calls that an accepted token saves. The survival is estimated as a
product of acceptance rates, one for each bin of the confidence max q. D is
estimated from the costs of sequences, either as one number, or for each bin of
the confidence of the distribution that drew the token.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import numpy as np

from specjax import analysis

_BINS = 12  # number of bins of the confidence
_SWEEPS = 4  # alternating updates of the stop rule and of D
_THRESHOLDS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9,
               1.0)  # 1: no drafts


@dataclasses.dataclass(frozen=True, eq=False)
class Text:
  """Sequence of T tokens, with a draft of G tokens from every position.

  Attributes:
    ratios: `[T]`, p/q of every token of the sequence.
    confidence: `[T, G]`, max q of the distributions that drew the draft tokens.
    survival: `[T, G]`, probability that block verification accepts the draft up
      to each token.
  """

  ratios: np.ndarray
  confidence: np.ndarray
  survival: np.ndarray

  @functools.cached_property
  def passed(self):
    """`[T, G]`, P(a round accepts at least l + 1 tokens | the sequence).

    Entry (t, l) applies to a round that starts at position t and drafts more
    than l tokens.
    """
    logs = np.log(np.maximum(self.ratios, 1e-300))
    rows = _ahead(logs, self.confidence.shape[1], np.inf)
    most = np.maximum.accumulate(np.cumsum(rows, 1), 1)
    return np.exp(-np.maximum(most, 0))

  @functools.cached_property
  def along(self):
    """`[T, G]`, max q at the next G positions of the sequence."""
    return _ahead(self.confidence[:, 0], self.confidence.shape[1], 0)

  @functools.cached_property
  def room(self):
    """`[T, G]` bool, False if a drafted token is beyond the sequence's end."""
    length, most = self.confidence.shape
    return np.arange(length)[:, None] + np.arange(most) + 1 < length


def _ahead(values: np.ndarray, most: int, otherwise: float):
  padded = np.r_[values, np.full(most, otherwise)]
  return np.lib.stride_tricks.sliding_window_view(padded, most)[:len(values)]


def costs_to_go(text: Text, rule: Callable[[np.ndarray], np.ndarray],
                price: float):
  """Returns `[T + 1]`, the expected remaining cost from every position.

  Args:
    text: sequence. The expectation is conditional on the sequence.
    rule: stop rule, a function that maps confidences `[T, G]` to a mask
      `[T, G]` bool. The mask is True for drafted tokens. Its entry (t, l) may
      only depend on the confidences (t, 0) to (t, l).
    price: cost of a drafted token, in target calls.
  """
  reach, drafted = (
      np.logical_and.accumulate(rule(rows) & text.room, axis=1)
      for rows in (text.along, text.confidence))
  length = len(text.ratios)
  passes = np.where(reach, text.passed, 0)
  ends = (np.concatenate([np.ones((length, 1)), passes], 1)
          - np.concatenate([passes, np.zeros((length, 1))], 1))
  here = 1 + price * drafted.sum(1)
  cost = np.zeros(length + 1 + passes.shape[1])
  for n in reversed(range(length)):
    cost[n] = here[n] + ends[n] @ cost[n + 1:n + 1 + ends.shape[1]]
  return cost[:length + 1]


def fixed(gamma: int):
  """Returns the stop rule that always drafts gamma tokens."""
  return lambda rows: np.broadcast_to(np.arange(rows.shape[1]) < gamma,
                                      rows.shape)


def confident(threshold: float, gamma: int):
  """Returns the stop rule that drafts while max q > threshold.

  It drafts at most gamma tokens.
  """
  return lambda rows: (rows > threshold) & fixed(gamma)(rows)


class Estimates:
  """Estimated acceptance rates and values D, by bins of the confidence."""

  def __init__(self, texts: list[Text]):
    rows = np.concatenate([x.confidence for x in texts])
    after = np.concatenate([x.survival for x in texts])
    before = np.concatenate([np.ones_like(after[:, :1]), after[:, :-1]], 1)
    self._edges = np.quantile(rows, np.arange(1, _BINS) / _BINS)
    self._texts = texts
    self._rate = self._means(rows, after, before)

  def _means(self, rows: np.ndarray, totals: np.ndarray, counts: np.ndarray):
    sums = [np.bincount(self._bins(rows).ravel(), np.ravel(x), _BINS)
            for x in (totals, counts)]
    return sums[0] / np.maximum(sums[1], 1e-9)

  def _bins(self, rows: np.ndarray):
    return np.searchsorted(self._edges, rows)

  def survival(self, rows: np.ndarray):
    """Returns `[T, G]`, the estimated survival of tokens.

    The estimate uses only confidences, which are known before the tokens are
    drawn.
    """
    return np.cumprod(self._rate[self._bins(rows)], axis=1)

  def worth(self, price: float, by_context: bool):
    """Returns the stop rule that drafts a token if survival * D > price.

    Args:
      price: cost of a drafted token, in target calls.
      by_context: if True, D depends on the bin of the confidence. If False, D
        is one number.
    """
    value = np.ones(_BINS)
    for _ in range(_SWEEPS):
      rule = functools.partial(self._pays, value, price)
      drops, rows, chances = [], [], []
      for text in self._texts:
        cost = costs_to_go(text, rule, price)
        drops.append((cost[:-1] - cost[1:])[1:])
        rows.append(text.confidence[:-1, 0])  # the row that drew the token
        chances.append(1 / np.maximum(text.ratios[:-1], 1))
      drops, rows, chances = map(np.concatenate, (drops, rows, chances))
      value = (self._means(rows, drops * chances, chances) if by_context else
               np.full(_BINS, drops @ chances / chances.sum()))
    return functools.partial(self._pays, value, price)

  def _pays(self, value: np.ndarray, price: float, rows: np.ndarray):
    return self.survival(rows) * value[self._bins(rows)] > price


def rules(texts: list[Text], price: float):
  """Returns stop rules by name, tuned on the given sequences."""
  most = texts[0].confidence.shape[1]
  found = Estimates(texts)
  tuned = lambda choices: min(choices, key=lambda rule: sum(
      costs_to_go(text, rule, price)[0] for text in texts))
  return {
      "fixed length": tuned([fixed(gamma) for gamma in range(most + 1)]),
      "confidence": tuned([confident(threshold, gamma) for gamma in
                           range(1, most + 1) for threshold in _THRESHOLDS]),
      "survival, tuned threshold": tuned([
          lambda rows, least=least: found.survival(rows) > least
          for least in _THRESHOLDS]),
      "survival * D": found.worth(price, by_context=False),
      "survival * D(context)": found.worth(price, by_context=True),
  }


def compare(texts: list[Text], clusters: Sequence[str], price: float):
  """Returns a row for every rule, tuned and evaluated on different prompts.

  Args:
    texts: sequences, one `Text` per prompt.
    clusters: `[prompts]`, cluster label of each prompt (see
      `analysis.estimate`).
    price: cost of a drafted token, in target calls.

  Returns:
    A dict for every rule. "cost" is the cost per sequence in target calls.
    "over_fixed" is the cost divided by that of the best fixed length, minus 1.
    "over_confidence" is the cost divided by that of the best confidence
    threshold, minus 1. All three have 95 % intervals.
  """
  places = {label: i for i, label in enumerate(dict.fromkeys(clusters))}
  half = np.array([places[label] % 2 for label in clusters])
  cost = {}
  for mine in (0, 1):
    chosen = rules([x for x, side in zip(texts, half) if side != mine], price)
    for name, rule in chosen.items():
      values = cost.setdefault(name, np.zeros(len(texts)))
      for i in np.flatnonzero(half == mine):
        values[i] = costs_to_go(texts[i], rule, price)[0]
  over = lambda name, base: analysis.estimate(
      lambda a, b: a / b - 1, cost[name], cost[base], clusters=clusters,
      least=-1)
  return [{
      "rule": name, "token_cost": price, "clusters": len(places),
      **analysis.estimate(np.divide, values, np.ones(len(texts)),
                          clusters=clusters, least=0).columns("cost"),
      **over(name, "fixed length").columns("over_fixed"),
      **over(name, "confidence").columns("over_confidence"),
  } for name, values in cost.items()]


def print_table(rows: list[dict[str, Any]]):
  """Prints the cost of every rule at every price."""
  shown = lambda row, name, form: format(
      analysis.Estimate.of_columns(row, name), form).rpartition(" ")[0]
  print("cost of a sequence: target calls + price * drafted tokens; tuned on "
        "one half of the prompts, evaluated on the other")
  print(f"{'drafter':10s} {'price':>5s} {'rule':26s} {'cost':>22s} "
        f"{'over fixed length':>26s} {'over confidence':>26s}")
  for r in rows:
    print(f"{r['drafter']:10s} {r['token_cost']:5g} {r['rule']:26s} "
          f"{shown(r, 'cost', '.2f'):>22s} "
          f"{shown(r, 'over_fixed', '+.2%'):>26s} "
          f"{shown(r, 'over_confidence', '+.2%'):>26s}")
