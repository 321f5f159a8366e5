"""Formulas for block efficiency and speed-up.

The formulas of Leviathan et al. 2022 (arXiv:2211.17192) are for token
verification of chains. They assume that each of gamma draft tokens is accepted
independently with probability a, the acceptance rate. Other functions of this
module are for rates that vary, or for measured costs. Terms:

  tokens    tokens emitted by a round: accepted tokens and the next token
  cost      c, time of a drafter's step divided by time of a target call
  speed-up  relative to decoding with the target alone: above 1 is faster

Arguments without a stated shape are numbers or arrays that broadcast.
"""

from collections.abc import Mapping
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

Numbers = np.ndarray | np.float64
# Survival P(tau >= i), the probability of accepting at least i tokens, does not
# increase with i. An estimate of it, a mean over rounds, may increase by _RISE.
_RISE = 0.01


def expected_tokens(acceptance: ArrayLike, gamma: ArrayLike) -> Numbers:
  """Returns the expected tokens of a round, 1 + a + ... + a^gamma.

  Leviathan et al., equation 1: (1 - a^(gamma+1)) / (1 - a), and gamma + 1 at
  a = 1. The value at a = 0.8, gamma = 4 is 3.3616. The equivalent sum over the
  stopping position is sum_{t=1..gamma} (1 - a) a^(t-1) t + a^gamma (gamma + 1).
  A widely copied derivation has a wrong factor 1 - a in the last term. At
  a = 0.8, gamma = 10, that derivation gives 3.6256 instead of 4.5705.

  Args:
    acceptance: acceptance rate a, in [0, 1].
    gamma: draft length, an integer of at least 0.

  Raises:
    ValueError: an argument is out of range.
  """
  acceptance, gamma = _acceptance(acceptance), _gamma(gamma)
  return _powers(acceptance, gamma + 1)


def expected_accepted(acceptance: ArrayLike, gamma: ArrayLike) -> Numbers:
  """Returns the expected accepted tokens of a round, a + ... + a^gamma.

  The value is `expected_tokens` - 1. At a = 0.7, gamma = 8 it is 2.1988. A
  widely copied worked example has 1.96, the `expected_tokens` of a = 0.6,
  gamma = 2. With an acceptance rate of 80 %, 2.689 of 5 tokens are accepted.
  The number is not 4, because tokens after a rejection are lost. 4 of 5 tokens
  require a = 0.9265.

  Args:
    acceptance: acceptance rate a, in [0, 1].
    gamma: draft length, an integer of at least 0.

  Raises:
    ValueError: an argument is out of range.
  """
  acceptance, gamma = _acceptance(acceptance), _gamma(gamma)
  return acceptance * _powers(acceptance, gamma)


def speedup(acceptance: ArrayLike, gamma: ArrayLike, cost: ArrayLike
            ) -> Numbers:
  """Returns the expected speed-up if all target calls cost the same.

  A target call over gamma + 1 tokens is assumed to take as long as over one.
  Leviathan et al., Theorem 3.8: `expected_tokens` / (gamma c + 1). Some gamma
  has a speed-up above 1 iff a > c. In this case gamma = 1 has the speed-up
  (1 + a) / (1 + c) (Corollary 3.9). A widely copied formula omits the next
  token. At a = 0.8, gamma = 5, c = 0.1, the speed-up is 2.46. The speed-up is
  not 5 / 1.5 = 3.33, because fewer than 4 of 5 tokens are accepted.

  Args:
    acceptance: acceptance rate a, in [0, 1].
    gamma: draft length, an integer of at least 0.
    cost: c, time of a drafter's step divided by time of a target call.

  Raises:
    ValueError: an argument is out of range.
  """
  tokens = expected_tokens(acceptance, gamma)
  return tokens / (np.asarray(gamma) * _cost("cost", cost) + 1)


def operations_factor(acceptance: ArrayLike, gamma: ArrayLike, cost: ArrayLike
                      ) -> Numbers:
  """Returns the arithmetic operations per token, relative to the target alone.

  Leviathan et al., Theorem 3.11: (gamma c + gamma + 1) / `expected_tokens`. The
  factor is at least 1, because speculation saves time and not operations.

  Args:
    acceptance: acceptance rate a, in [0, 1].
    gamma: draft length, an integer of at least 0.
    cost: c, operations per token of the drafter divided by operations per token
      of the target.

  Raises:
    ValueError: an argument is out of range.
  """
  tokens = expected_tokens(acceptance, gamma)
  gamma = np.asarray(gamma)
  return (gamma * _cost("cost", cost) + gamma + 1) / tokens


def optimal_gamma(acceptance: ArrayLike, cost: ArrayLike, largest: int = 64
                  ) -> np.ndarray | np.int64:
  """Returns the smallest draft length with the largest `speedup`.

  0 means that no draft length is faster than the target alone. The solution is
  numerical, as in section 3.5 of Leviathan et al.

  Args:
    acceptance: acceptance rate a, in [0, 1].
    cost: c, time of a drafter's step divided by time of a target call.
    largest: longest draft to try. The result is `largest` if the speed-up
      increases up to this length, for example at a = 1 or c = 0.

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

  The formula is 1 + sum_{i=1..gamma} prod_{j<=i} rates[j].

  Args:
    rates: `[..., gamma]` acceptance rate of each position, in rounds with all
      earlier positions accepted.

  Returns:
    Array of shape `[...]`.

  Raises:
    ValueError: a rate is out of range.
  """
  rates = _acceptance(rates)
  return 1 + np.cumprod(rates, axis=-1).sum(axis=-1)


def expected_tokens_over(acceptances: ArrayLike, gamma: ArrayLike,
                         weights: ArrayLike | None = None) -> np.float64:
  """Returns `expected_tokens` averaged over contexts with different rates.

  `expected_tokens` is convex in a. The average is therefore at least the value
  at the mean rate, although many reports use the mean rate. For a ~ Beta(2, 1)
  and gamma = 5, the average is 3.19, and the mean rate of 2/3 gives 2.74. The
  mean rate is correct only if every position draws its rate independently.

  Args:
    acceptances: acceptance rate of each context, in [0, 1].
    gamma: draft length, one number.
    weights: frequency of each context, with the shape of `acceptances`. None
      means equal frequencies.

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
  """Returns the speed-up predicted from measured times.

  The formula is block_efficiency * step / time of a round. `speedup` assumes
  that a target call over gamma + 1 tokens takes as long as over one token. This
  function does not.

  Args:
    block_efficiency: tokens per round, in [1, gamma + 1].
    step: seconds to decode one token with the target alone.
    verify: seconds of a target call over gamma + 1 tokens.
    draft: seconds to draft one token.
    gamma: draft length.
    overhead: seconds of everything else in a round.

  Raises:
    ValueError: an argument is out of range, or a round takes no time.
  """
  gamma = _gamma(gamma)
  tokens = np.asarray(block_efficiency, np.float64)
  # A mean of float32 numbers may exceed the range by a rounding error.
  inside = (tokens >= 1 - 1e-5) & (tokens <= (gamma + 1) * (1 + 1e-5))
  _require("block_efficiency", tokens, inside,
           "a round emits at least 1 and at most gamma + 1 tokens")
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
  have sum_{i<=gamma} survival[i] expected tokens per round. This holds if
  P(tau >= i) depends on the first i draft tokens alone, for example with token
  and block verification. A rule with state, such as greedy block verification,
  requires a measurement at every gamma.

  The prediction is exact for rounds that start at the recorded contexts. With
  another draft length, rounds start at other contexts. This changed the tokens
  per round by -4 to +12 %. For an exact value, record a rollout with this
  gamma, and call `predicted_speedup` with its block efficiency.

  Args:
    survival: `[G + 1]` probabilities P(tau >= i) for i = 0..G. survival[0] is 1
      and the values do not increase. An increase of up to 0.01 is accepted as
      sampling error of a mean over rounds.
    step: seconds to decode one token with the target alone.
    verify: seconds of a target call over gamma + 1 tokens, for every gamma to
      try. It is a mapping from gamma, or a sequence that starts at gamma = 0.
    draft: seconds to draft one token.
    overhead: seconds of everything else in a round.

  Returns:
    `(gamma, predicted speed-up)`. The result is `(0, 1.0)` if no draft length
    is faster than decoding with the target alone.

  Raises:
    ValueError: an argument is out of range, or `verify` contains a gamma above
      G.
  """
  survival = np.asarray(survival, np.float64)
  if survival.ndim != 1 or not survival.size:
    raise ValueError(f"survival has shape {survival.shape}; it must be "
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
      raise ValueError(f"verify has a time for gamma {gamma}, but survival "
                       f"ends at {survival.size - 1}: measure survival with "
                       "longer drafts")
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
  # For a = 0, log(a) = -inf gives the correct sum, except for count = 0, where
  # 0 * -inf is NaN.
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
           "it must be a whole number of at least 0: 0 means no draft")
  return values.astype(np.int64)


def _cost(name: str, values: ArrayLike) -> np.ndarray:
  values = np.asarray(values, np.float64)
  _require(name, values, (values >= 0) & np.isfinite(values),
           "it must be finite and at least 0")
  return values
