"""Statistics of the number of rounds until a sequence is complete.

This number is the latency in target calls. A sequence is complete at the token
limit or at an eos. All verifiers have the same token limit.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from lib.figures import style
from specjax import analysis

LEVEL = 0.9  # level of the reported quantile
_TAIL = 0.025  # probability outside a 95 % interval, on each side


def columns(rounds: Any, clusters: Sequence[str]):
  """Returns the mean and the 90 % quantile of a verifier's rounds as columns.

  Args:
    rounds: `[N]`, numbers of rounds of N sequences. Or `[N, K]`, for each
      sequence the probabilities of at most k = 0, ..., K - 1 rounds.
    clusters: `[N]`, cluster labels of the sequences (see `analysis.estimate`).
  """
  [within] = _within(rounds)
  mean = analysis.estimate(np.divide, (1 - within).sum(1),
                           np.ones(len(within)), clusters=clusters, least=0)
  return {**mean.columns("rounds"),
          **quantile(within, clusters).columns("rounds_p90")}


def compared(rounds: Any, base: Any, clusters: Sequence[str]):
  """Returns columns that compare the rounds of two verifiers.

  Args:
    rounds: rounds of the first verifier (see `columns`).
    base: rounds of the other verifier with the same prompts.
    clusters: `[N]`, cluster labels of the N sequences.

  Returns:
    "rounds_gain" is the mean divided by the mean of `base`, minus 1. A sequence
    is slow if it needs more rounds than the 90 % quantile of `base`.
    "slow_texts" is the share of slow sequences minus their share in `base`.
    Both columns are negative if the first verifier is better.

    If `rounds` are numbers of rounds, few sequences are slow, so the interval
    of "slow_texts" is too short. In a simulation, it missed the true value in
    12 % of the cases with 40 sequences, and in 8 % with 100 sequences. The
    interval of "rounds_p90" missed the true value in 0 to 4 % of the cases.
  """
  within, within_base = _within(rounds, base)
  limit = _quantile(within_base.mean(0), LEVEL)
  gain = analysis.estimate(
      lambda mine, other: mine / other - 1, (1 - within).sum(1),
      (1 - within_base).sum(1), clusters=clusters, least=-1)
  slow = analysis.estimate(
      lambda other, mine, count: (other - mine) / count,
      within_base[:, limit], within[:, limit], np.ones(len(within)),
      clusters=clusters, least=-1, most=1)
  return gain.columns("rounds_gain") | slow.columns("slow_texts")


# Name, header and number format of the columns that `columns()` and
# `compared()` return.
SHOWN = (("rounds", "mean", ".1f"), ("rounds_p90", "90 % quantile", ".0f"),
         ("rounds_gain", "mean over token's", "+.1%"),
         ("slow_texts", "share slow - token's", "+.1%"))


def print_table(rows: list[dict[str, Any]]):
  """Prints the columns `SHOWN` of every row of a table."""
  width = max(len("drafter"), *(len(r["drafter"]) for r in rows))
  rules = max(13, *(len(style.label(r["verifier"])) for r in rows))
  print(f"{'drafter':{width}s} {'T':>4s} {'gamma':>5s} {'verifier':{rules}s} "
        + " ".join(f"{head:>23s}" for _, head, _ in SHOWN))
  for r in rows:
    shown = (format(analysis.Estimate.of_columns(r, name), form)
             for name, _, form in SHOWN)
    print(f"{r['drafter']:{width}s} {r['temperature']:4g} {r['gamma']:5d} "
          f"{style.label(r['verifier']):{rules}s} "
          + " ".join(f"{text.rpartition(' ')[0]:>23s}" for text in shown))
  print("Slow sequences need more rounds than the 90 % quantile of token "
        "verification. The column\nis their share minus that of token "
        "verification.")


def median(values: Any, clusters: Sequence[str]) -> analysis.Estimate:
  """Returns the median of `values [N]`, with the interval of `quantile`.

  Args:
    values: one number per sequence, such as its speed-up.
    clusters: `[N]`, cluster labels of the sequences.
  """
  values = np.asarray(values, np.float64)
  steps = np.unique(values)
  found = quantile((values[:, None] <= steps).astype(np.float64), clusters, 0.5)
  low, high = (x if np.isnan(x) else float(steps[int(x)])
               for x in (found.low, found.high))
  return analysis.Estimate(
      float(np.median(values)), low, high, found.clusters)


def quantile(within: np.ndarray, clusters: Sequence[str],
             level: float = LEVEL) -> analysis.Estimate:
  """Returns a quantile of the rounds, with its 95 % interval.

  P(at most k rounds) is a mean over sequences. The interval of the quantile
  contains every k for which the interval of this mean contains `level`
  (Woodruff 1952). The lower end of the mean's interval is at most the
  Clopper-Pearson bound for the case that all sequences need at most k rounds,
  with clusters as observations. With fewer than 36 clusters, this bound is
  below 0.9 (below 0.5 with fewer than 6), and the interval is NaN.

  Args:
    within: `[N, K]`, P(at most k rounds) of each of N sequences.
    clusters: `[N]`, cluster labels of the sequences.
    level: probability of the quantile, such as 0.5 for the median.
  """
  value = _quantile(within.mean(0), level)
  low = 0
  for k in range(within.shape[1]):
    share = analysis.estimate(np.divide, within[:, k], np.ones(len(within)),
                              clusters=clusters, least=0, most=1)
    if share.high < level:
      low = k + 1
    if min(share.low, _TAIL**(1 / share.clusters)) >= level:
      return analysis.Estimate(value, low, k, share.clusters)
  return analysis.Estimate(value, np.nan, np.nan, share.clusters)


def given_text(ratios: np.ndarray, gamma: int, rule: str):
  """Returns the distribution of the number of rounds for a given sequence.

  The drafter's q must depend only on the sequence. Given the sequence, the
  position after each round is then a Markov chain
  (`analysis.progress_given_text`). Let r_1, ..., r_l be the ratios of the l
  tokens after position n. A round that starts at n continues beyond n + l with
  probability prod_j min(1, 1 / r_j) under token verification. Under block
  verification, the probability is 1 / max(1, max_j r_1 ... r_j).

  Args:
    ratios: `[T]`, p/q of every token of the sequence. It is inf where q is 0.
    gamma: draft length.
    rule: "token" or "block".

  Returns:
    `[T + 1]`, P(at most k rounds) for k = 0, ..., T.
  """
  length = len(ratios)
  ends = np.zeros((length, length + 1))  # P(a round from n ends at m)
  for n in range(length):
    ahead = np.asarray(ratios[n:n + gamma], np.float64)
    with np.errstate(divide="ignore"):
      logs = np.log(ahead)
    lost = (np.cumsum(np.maximum(logs, 0)) if rule == "token" else
            np.maximum.accumulate(np.maximum(np.cumsum(logs), 0)))
    passed = np.r_[1.0, np.exp(-lost)]
    ends[n, n + 1:n + 1 + len(passed)] = (
        passed - np.r_[passed[1:], 0])[:length - n]
    ends[n, length] += 1 - ends[n].sum()
  now, within = np.r_[1.0, np.zeros(length)], [0.0]
  for _ in range(length):
    now = np.r_[now[:length] @ ends[:, :length],
                now[length] + now[:length] @ ends[:, length]]
    within.append(now[length])
  return np.array(within)


def _within(*rounds: Any):
  """Returns P(at most k rounds), `[N, K]`, with the same K for all arguments.

  `columns` describes the two possible forms of an argument.
  """
  rounds = [np.asarray(x, np.float64) for x in rounds]
  if rounds[0].ndim == 2:
    return rounds
  most = 1 + int(max(x.max() for x in rounds))
  return [(x[:, None] <= np.arange(most)).astype(np.float64) for x in rounds]


def _quantile(shares: np.ndarray, level: float):
  # The smallest k with P(at most k rounds) >= level.
  return int((shares < level - 1e-9).sum())
