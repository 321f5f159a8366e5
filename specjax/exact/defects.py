"""Checks that laws are probability distributions and agree with figures."""

from collections.abc import Callable
from collections.abc import Iterator

import numpy as np

from specjax.exact.compiled import Example
from specjax.types import Draft
from specjax.types import Law

NOT_FINITE, NEGATIVE = "a law is not finite", "a law is negative"
SURVIVAL = "survival is not P(tau >= i)"
_EXPECTED = "the first of `figures` is not E[tau | draft]"
# Largest total of negative entries that counts as rounding. Every draft is
# weighted by its probability. The sampler uses 0 in place of a negative entry.
ROUNDING = {"float64": 1e-12, "float32": 1e-6}
_EXPECTED_OFF = {"float64": 1e-6, "float32": 1e-3}  # of E[tau], in tokens


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
