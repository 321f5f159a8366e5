"""Formulas for block efficiency and speed-up.

The formulas of Leviathan et al. 2022 (arXiv:2211.17192) are for token
verification of chains. They assume that each of gamma drafted tokens is
accepted independently with probability a, the acceptance rate. Other functions
of this module apply if a varies or if costs were measured. Terms:

  tokens    tokens that a round emits: accepted tokens and one bonus token
  cost      c, time of a drafter's step divided by time of a target's pass
  speed-up  relative to decoding with the target alone: above 1 is faster

Arguments without a stated shape are numbers or arrays that broadcast.
"""

from collections.abc import Mapping
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

Numbers = np.ndarray | np.float64
# Survival, the probability P(tau >= i) of accepting at least i tokens, falls
# with i. Its estimate, a mean over rounds, may rise by up to this much.
_RISE = 0.01


def expected_tokens(acceptance: ArrayLike, gamma: ArrayLike) -> Numbers:
  """Returns the expected tokens of a round, 1 + a + ... + a^gamma.

  Leviathan et al., equation 1: (1 - a^(gamma+1)) / (1 - a), and gamma + 1 at
  a = 1. It is 3.3616 at a = 0.8, gamma = 4. As a sum over the stopping position
  it is sum_{t=1..gamma} (1 - a) a^(t-1) t + a^gamma (gamma + 1). A widely
  copied derivation has a wrong factor 1 - a in the last term. At a = 0.8,
  gamma = 10 it gives 3.6256 instead of 4.5705.

  Args:
    acceptance: acceptance rate a, in [0, 1].
    gamma: drafted tokens of a round, an integer, at least 0.

  Raises:
    ValueError: an argument is out of range.
  """
  acceptance, gamma = _acceptance(acceptance), _gamma(gamma)
  return _powers(acceptance, gamma + 1)


def expected_accepted(acceptance: ArrayLike, gamma: ArrayLike) -> Numbers:
  """Returns the expected accepted tokens of a round, a + ... + a^gamma.

  It is `expected_tokens` minus 1. At a = 0.7, gamma = 8 it is 2.1988; a widely
  copied worked example has 1.96, the `expected_tokens` of a = 0.6, gamma = 2.
  With an acceptance rate of 80 %, 2.689 of 5 tokens are accepted and not 4,
  because tokens after a rejection are lost. 4 of 5 need a = 0.9265.

  Args:
    acceptance: acceptance rate a, in [0, 1].
    gamma: drafted tokens of a round, an integer, at least 0.

  Raises:
    ValueError: an argument is out of range.
  """
  acceptance, gamma = _acceptance(acceptance), _gamma(gamma)
  return acceptance * _powers(acceptance, gamma)


def speedup(acceptance: ArrayLike, gamma: ArrayLike, cost: ArrayLike
            ) -> Numbers:
  """Returns the expected speed-up if a pass of any length costs the same.

  Leviathan et al., Theorem 3.8: `expected_tokens` / (gamma c + 1). Some gamma
  has a speed-up above 1 iff a > c, and gamma = 1 then gives (1 + a) / (1 + c)
  (Corollary 3.9). A widely copied formula omits the bonus token. At a = 0.8,
  gamma = 5, c = 0.1 the speed-up is 2.46. It is not 5 / 1.5 = 3.33, because
  fewer than 4 of 5 tokens are accepted.

  Args:
    acceptance: acceptance rate a, in [0, 1].
    gamma: drafted tokens of a round, an integer, at least 0.
    cost: time of a drafter's step divided by time of a target's pass, c.

  Raises:
    ValueError: an argument is out of range.
  """
  tokens = expected_tokens(acceptance, gamma)
  return tokens / (np.asarray(gamma) * _cost("cost", cost) + 1)


def operations_factor(acceptance: ArrayLike, gamma: ArrayLike, cost: ArrayLike
                      ) -> Numbers:
  """Returns the arithmetic operations per token, relative to the target alone.

  Leviathan et al., Theorem 3.11: (gamma c + gamma + 1) / `expected_tokens`. It
  is at least 1: speculation saves time and not operations.

  Args:
    acceptance: acceptance rate a, in [0, 1].
    gamma: drafted tokens of a round, an integer, at least 0.
    cost: operations per token of the drafter divided by operations per token of
      the target.

  Raises:
    ValueError: an argument is out of range.
  """
  tokens = expected_tokens(acceptance, gamma)
  gamma = np.asarray(gamma)
  return (gamma * _cost("cost", cost) + gamma + 1) / tokens


def optimal_gamma(acceptance: ArrayLike, cost: ArrayLike, largest: int = 64
                  ) -> np.ndarray | np.int64:
  """Returns the draft length with the largest `speedup`; 0: do not speculate.

  Of equally good lengths it is the smallest. The solution is numerical, as in
  section 3.5 of Leviathan et al.

  Args:
    acceptance: acceptance rate a, in [0, 1].
    cost: time of a drafter's step divided by time of a target's pass, c.
    largest: longest draft to try. It is the result if longer drafts are faster
      still, for example at a = 1 or c = 0.

  Returns:
    Integers in [0, largest].

  Raises:
    ValueError: an argument is out of range.
  """
  gammas = np.arange(_gamma(largest, "largest") + 1)
  gains = speedup(np.asarray(acceptance)[..., None], gammas,
                  np.asarray(cost)[..., None])
  # At a = c, gamma = 0 and gamma = 1 are equally fast except for rounding.
  best = gains.max(axis=-1, keepdims=True)
  return np.argmax(gains >= best * (1 - 1e-12), axis=-1)


def expected_tokens_by_position(rates: ArrayLike) -> Numbers:
  """Returns the expected tokens of a round from acceptance rates by position.

  1 + sum_{i=1..gamma} prod_{j<=i} rates[j].

  Args:
    rates: `[..., gamma]`, acceptance rate of position i in the rounds that
      accepted all earlier positions.

  Returns:
    `[...]`.

  Raises:
    ValueError: a rate is out of range.
  """
  rates = _acceptance(rates)
  return 1 + np.cumprod(rates, axis=-1).sum(axis=-1)


def expected_tokens_over(acceptances: ArrayLike, gamma: ArrayLike,
                         weights: ArrayLike | None = None) -> np.float64:
  """Returns `expected_tokens` averaged over contexts with different rates.

  `expected_tokens` is convex in a, so the average is at least its value at the
  mean rate, which is often reported instead. For a ~ Beta(2, 1) and gamma = 5
  the average is 3.19; the mean rate of 2/3 gives 2.74. The mean rate is correct
  only if every position draws its rate independently.

  Args:
    acceptances: acceptance rate of each context, in [0, 1].
    gamma: `[]`, drafted tokens of a round.
    weights: frequency of each context, of the same shape; None: equal.

  Raises:
    ValueError: an argument is out of range, or all weights are 0.
  """
  tokens = expected_tokens(acceptances, gamma)
  if weights is None:
    return tokens.mean()
  weights = np.asarray(weights, np.float64)
  _require("weights", weights, weights >= 0, "a weight must be at least 0")
  if not weights.sum() > 0:
    raise ValueError("weights sum to 0; give at least one context a weight")
  return np.average(tokens, weights=weights)


def predicted_speedup(block_efficiency: ArrayLike, *, step: ArrayLike,
                      verify: ArrayLike, draft: ArrayLike, gamma: ArrayLike,
                      overhead: ArrayLike = 0.0) -> Numbers:
  """Returns the speed-up from measured times, efficiency * step / round time.

  Unlike `speedup`, it does not assume that the target's pass over gamma + 1
  tokens takes as long as its pass over one token.

  Args:
    block_efficiency: tokens of a round, in [1, gamma + 1].
    step: seconds of decoding one token with the target alone.
    verify: seconds of the target's pass over gamma + 1 tokens.
    draft: seconds of drafting one token.
    gamma: drafted tokens of a round.
    overhead: seconds of everything else in a round.

  Raises:
    ValueError: an argument is out of range, or a round takes no time.
  """
  gamma = _gamma(gamma)
  tokens = np.asarray(block_efficiency, np.float64)
  # Means of float32 figures may exceed the range by a rounding error.
  inside = (tokens >= 1 - 1e-5) & (tokens <= (gamma + 1) * (1 + 1e-5))
  _require("block_efficiency", tokens, inside,
           "a round gives at least 1 and at most gamma + 1 tokens")
  seconds = (_cost("verify", verify) + gamma * _cost("draft", draft)
             + _cost("overhead", overhead))
  _require("verify + gamma * draft + overhead", seconds, seconds > 0,
           "a round takes more than 0 seconds")
  return tokens * _cost("step", step) / seconds


def best_gamma(survival: ArrayLike, *, step: float,
               verify: Mapping[int, float] | Sequence[float], draft: float,
               overhead: float = 0.0) -> tuple[int, float]:
  """Returns the fastest draft length, from measured times and acceptance.

  tau is the number of accepted tokens of a round. Drafts cut to gamma tokens
  give sum_{i<=gamma} survival[i] tokens per round. This holds if P(tau >= i)
  depends on the first i drafted tokens alone, for example with token and block
  verification. A rule with state, such as greedy block verification, has to be
  measured at every gamma.

  The prediction is exact for rounds that start at the recorded contexts. Drafts
  of another length start at other contexts, which changed the tokens per round
  by -4 to +12 %. For an exact value record a rollout with this gamma, and call
  `predicted_speedup` with its block efficiency.

  Args:
    survival: `[G + 1]`, P(tau >= i) for i = 0..G. The first is 1 and the values
      do not increase. An increase of less than 0.01 is accepted as sampling
      error of a mean over rounds.
    step: seconds of decoding one token with the target alone.
    verify: seconds of the target's pass over gamma + 1 tokens, for every gamma
      to try: a mapping, or a sequence that starts at gamma = 0.
    draft: seconds of drafting one token.
    overhead: seconds of everything else in a round.

  Returns:
    `(gamma, predicted speed-up)`; `(0, 1.0)` if no draft length is faster than
    decoding with the target alone.

  Raises:
    ValueError: an argument is out of range, or `verify` contains a gamma above
      G.
  """
  survival = np.asarray(survival, np.float64)
  if survival.ndim != 1 or not survival.size:
    raise ValueError(f"survival is of shape {survival.shape}; it must be "
                     "[G + 1]: take the mean over rounds")
  if abs(survival[0] - 1) > 1e-5:
    raise ValueError(f"survival starts with {survival[0]}; its first entry is "
                     "P(tau >= 0) and must be 1")
  _require("survival", survival, (survival >= 0) & (survival <= 1 + 1e-5),
           "P(tau >= i) must lie in [0, 1]")
  rises = np.diff(survival)
  if (rises > _RISE).any():
    i = int(np.argmax(rises))
    raise ValueError(f"survival rises from {survival[i]:g} at {i} to "
                     f"{survival[i + 1]:g}; P(tau >= i) cannot rise: take the "
                     "mean over more rounds")
  if not isinstance(verify, Mapping):
    verify = dict(enumerate(verify))
  best = (0, 1.0)
  for gamma in sorted(verify):
    if _gamma(gamma) >= survival.size:
      raise ValueError(f"verify holds a time for gamma {gamma}; survival ends "
                       f"at {survival.size - 1}: measure it with longer drafts")
    gain = predicted_speedup(
        survival[:gamma + 1].sum(), step=step, verify=verify[gamma],
        draft=draft, gamma=gamma, overhead=overhead)
    if gamma and gain > best[1]:
      best = (int(gamma), float(gain))
  return best


def _powers(a: np.ndarray, count: np.ndarray) -> Numbers:
  """Returns 1 + a + ... + a^(count - 1), without cancellation near a = 1."""
  with np.errstate(divide="ignore", invalid="ignore"):
    total = -np.expm1(count * np.log(a)) / (1 - a)
  # log(0) is harmless, except that an empty sum computes 0 * -inf.
  return np.where(count == 0, 0.0, np.where(a == 1, count, total))[()]


def _require(name: str, values: ArrayLike, ok: ArrayLike, rule: str) -> None:
  """Raises `ValueError` with the first of `values` that is not ok."""
  if not np.all(ok):
    values, ok = np.broadcast_arrays(values, ok)
    raise ValueError(f"{name} is {values[~ok].flat[0]}; {rule}")


def _acceptance(values: ArrayLike) -> np.ndarray:
  values = np.asarray(values, np.float64)
  _require("acceptance", values, (values >= 0) & (values <= 1),
           "it is a probability and must lie in [0, 1]")
  return values


def _gamma(values: ArrayLike, name: str = 'gamma') -> np.ndarray:
  values = np.asarray(values)
  whole = (values == np.floor(values)) & np.isfinite(values)
  _require(name, values, (values >= 0) & whole,
           "it must be a whole number of at least 0: 0 drafts nothing")
  return values.astype(np.int64)


def _cost(name: str, values: ArrayLike) -> np.ndarray:
  values = np.asarray(values, np.float64)
  _require(name, values, (values >= 0) & np.isfinite(values),
           "it must be finite and at least 0")
  return values
