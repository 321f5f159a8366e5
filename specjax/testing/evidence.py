"""Statistics of drawn tokens whose probabilities are known.

A drafter is correct if each draft token X is a sample of the distribution q in
the draft. Let f be any function fixed before the draw. Given all earlier draws,
f(X) - E_q f then has mean 0 and variance Var_q f. Sums over many draws are
martingales with known predictable variance, for any order of the draws.

If f has a range of at most 1, then for every number t >= 0

  exp(t S - (e^t - 1 - t) W),   S = sum f(X) - E_q f,   W = sum Var_q f

has a mean of at most 1 (Freedman 1975, "On tail probabilities for
martingales"). The average over several t also has a mean of at most 1. By
Markov's inequality, the inverse of this average is a p-value. In contrast to a
normal approximation, it is valid for any number of draws, for rare tokens and
for deterministic distributions.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

# Values of t in the formula above, for S and for -S. If S is d standard
# deviations, the best t is d / sqrt(W). The range covers 10 to a million draws.
_RATES = 2.0 ** np.arange(-8, 5)
_SMALLEST_LOG = -4.0  # log-probabilities are clipped at this value
_FEW_IDS = 8  # largest number of tokens tested individually


class Functions(NamedTuple):
  """Values of F functions of n drawn tokens, with their variances.

  Attributes:
    names: descriptions of the F functions.
    centred: `[n, F]` float32 values f(X) - E_q f.
    variances: `[n, F]` float32 variances Var_q f.
  """

  names: tuple[str, ...]
  centred: np.ndarray
  variances: np.ndarray

  def taken(self, draws: np.ndarray) -> "Functions":
    """Returns the values for the draws selected by a mask `[n]`."""
    return Functions(self.names, self.centred[draws], self.variances[draws])


class Deviation(NamedTuple):
  """The sum S with the smallest p-value of all tested sums.

  Attributes:
    log_p: logarithm of the p-value times the number of tested sums, at most 0.
    name: description of the function and of the group of draws.
    total: value of S.
    deviation: standard deviation of S, the square root of W.
    draws: number of draws in the sum.
    tried: number of tested sums.
  """

  log_p: float
  name: str
  total: float
  deviation: float
  draws: int
  tried: int

  def __str__(self) -> str:
    return (f"the sum of {self.name} deviates by {self.total:.4g}, its "
            f"standard deviation is {self.deviation:.3g} ({self.draws} draws; "
            f"p = 1e{self.log_p / np.log(10):.0f}, the {self.tried} sums that "
            "were tried included)")


def log_p_values(totals: np.ndarray, variances: np.ndarray) -> np.ndarray:
  """Returns the logarithms of the two-sided p-values of sums.

  `totals` are the sums S, and `variances` are W.
  """
  t = _RATES.reshape(-1, *[1] * np.ndim(totals))
  bound = (np.expm1(t) - t) * variances
  both = np.concatenate([t * totals - bound, -t * totals - bound])
  largest = both.max(0)
  mean = np.exp(both - largest).mean(0)
  return np.minimum(0, -largest - np.log(mean))


def subsets(vocab_size: int) -> dict[str, np.ndarray]:
  """Returns sets of tokens, `[V]` bool, by name.

  The sets are random halves of the vocabulary, and sets of one token.
  """
  rng = np.random.default_rng(vocab_size)
  found = {f"the random half {i} of the tokens": rng.random(vocab_size) < 0.5
           for i in range(3 if vocab_size <= _FEW_IDS else 16)}
  for token in range(min(vocab_size, _FEW_IDS)):
    found[f"token {token}"] = np.arange(vocab_size) == token
  return found


def functions(tokens: np.ndarray, laws: np.ndarray, others: np.ndarray | None,
              ends: np.ndarray, letter: str) -> Functions:
  """Returns functions of single draws.

  Args:
    tokens: `[n]` drawn tokens.
    laws: `[n, V]` distributions of the tokens. Rows sum to 1.
    others: `[n, V]` other distributions p, known before the draw, or None.
    ends: `[n, E]` eos ids for each draw, padded with -1.
    letter: name of the distribution `laws`, such as "q".
  """
  columns, own = [], np.arange(len(tokens))

  def add(name, values):
    mean = np.einsum("nv,nv->n", laws, values)
    square = np.einsum("nv,nv,nv->n", laws, values, values)
    columns.append((name, values[own, tokens] - mean, square - mean**2))

  def add_set(name, mass, inside):
    columns.append((name, inside - mass, mass * (1 - mass)))

  add(f"{letter}(x)", laws)
  with np.errstate(divide="ignore"):
    logs = np.maximum(np.log(laws), _SMALLEST_LOG) / -_SMALLEST_LOG
  add(f"log {letter}(x) / {-_SMALLEST_LOG:g}", logs)
  if others is not None:
    add("p(x)", others)
  is_end = np.zeros(laws.shape, bool)
  for ids in ends.T:
    has = np.flatnonzero(ids >= 0)
    is_end[has, ids[has]] = True
  add_set("x is an eos", (laws * is_end).sum(1), is_end[own, tokens])
  for name, members in subsets(laws.shape[1]).items():
    add_set(f"x is {name}", laws[:, members].sum(1), members[tokens])
  return _stacked(columns)


def pairs(tokens: np.ndarray, laws: np.ndarray,
          partners: Mapping[str, np.ndarray],
          unordered: Mapping[str, np.ndarray] | None = None) -> Functions:
  """Returns functions of two draws.

  The functions detect correlations. Two draws are correlated if they use the
  same uniform sample.

  Args:
    tokens: `[n]` drawn tokens.
    laws: `[n, V]` distributions of the tokens.
    partners: by name, the index `[n]` of an earlier draw for each draw, or -1.
    unordered: by name, the index `[n]` of another draw for each draw, or -1.
      The other draw may be earlier or later. For one name, a draw is the
      partner of at most one other draw.
  """
  own, columns = np.arange(len(tokens)), []
  # Middle of the drawn token's interval in the cumulative distribution, shifted
  # to [-1/2, 1/2]. Its mean is 0.
  upto = np.cumsum(laws, axis=1)[own, tokens]
  place = upto - laws[own, tokens] / 2 - 0.5
  spread = np.maximum(1 - (laws**3).sum(1), 0) / 12
  for name, partner in partners.items():
    has = partner >= 0
    other, before = tokens[partner], place[partner]
    mass = np.where(has, laws[own, other], 0)
    columns.append((f"x is {name}", (tokens == other) * has - mass,
                    mass * (1 - mass)))
    columns.append((
        f"the product of the quantiles of x and of {name}",
        np.where(has, 4 * place * before, 0),
        np.where(has, 16 * before**2 * spread, 0)))
  for name, partner in (unordered or {}).items():
    # A draw is a factor of at most two products, each at most 1/2. Either draw
    # of a product may be the earlier one. The variance is therefore the sum of
    # both cases.
    has, before = partner >= 0, place[partner]
    columns.append((
        f"the product of the quantiles of x and of {name}",
        np.where(has, 2 * place * before, 0),
        np.where(has, 8 * (before**2 * spread + place**2 * spread[partner]),
                 0)))
  return _stacked(columns)


def _stacked(columns):
  names, centred, variances = zip(*columns)
  as_array = lambda x: np.stack(x, axis=1).astype(np.float32)
  return Functions(names, as_array(centred), np.maximum(as_array(variances), 0))


def largest(single: Functions, double: Functions,
            groups: Mapping[str, np.ndarray], crossed: int) -> Deviation:
  """Returns the largest deviation of a sum over all draws or a group of draws.

  Args:
    single: functions of n single draws.
    double: functions of n pairs of a draw and its partner.
    groups: by name, `[n]` integers that are known before the draw. Draws with
      equal integers form a group. Draws with -1 are in no group.
    crossed: number of leading entries of `groups` to combine with all later
      entries, for the single functions. A combination contains the draws in
      both groups.
  """
  numbers = [_compact(values) for values in groups.values()]
  numbers.append((np.zeros(len(single.centred), np.int32), np.zeros(1, int)))
  names, last = [*groups, "all"], len(groups)
  kinds = [(double, last, range(last + 1))] + [
      (single, first, range(first + 1, last)) for first in range(crossed)] + [
          (single, last, range(last + 1))]
  found, tried = [], 0
  for functions_, first, others in kinds:
    values = np.concatenate([functions_.centred, functions_.variances], axis=1)
    for other in others:
      (group, ones), (number, twos) = numbers[first], numbers[other]
      cell = np.where((group >= 0) & (number >= 0),
                      group * len(twos) + number, len(ones) * len(twos))
      sums = _sums(values, cell, len(ones) * len(twos))
      if not sums.size:
        continue
      totals, variances = np.split(sums, 2, axis=1)
      logs = log_p_values(totals, variances)
      tried += logs.size
      at = np.unravel_index(logs.argmin(), logs.shape)
      a, b = divmod(int(at[0]), len(twos))
      where = [names[i].format(value) for i, value in (
          (first, ones[a]), (other, twos[b])) if i < last]
      found.append(Deviation(
          float(logs[at]), functions_.names[at[1]] + (
              f" over draws with {' and '.join(where)}" if where else ""),
          float(totals[at]), float(variances[at]) ** 0.5,
          int((cell == at[0]).sum()), 0))
  worst = min(found)
  return worst._replace(
      log_p=min(0.0, worst.log_p + float(np.log(tried))), tried=tried)


def _compact(values):
  """Renumbers groups from 0, without gaps. -1 is unchanged.

  Returns:
    The new number of each draw, and the old number of each new group.
  """
  kinds = np.flatnonzero(np.bincount(values + 1)[1:])
  number = np.full(values.max(initial=0) + 2, -1, np.int32)
  number[kinds + 1] = np.arange(len(kinds))
  return number[values + 1], kinds


def _sums(values, cell, count):
  """Returns the sums `[count, F]` of `values [n, F]` over the draws of a cell.

  `cell [n]` is the number of each draw's cell, or `count` for no cell.
  """
  import scipy.sparse  # a slow import  # pylint: disable=g-import-not-at-top
  draws = len(values)
  member = scipy.sparse.csc_matrix(
      (np.ones(draws, np.float32), cell, np.arange(draws + 1)),
      shape=(count + 1, draws))
  return (member @ values)[:count].astype(np.float64)
