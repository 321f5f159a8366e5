"""Optima over all lossless rules for several rounds, by linear programs.

A rule is lossless if decoding with it follows the target's distribution. The
method is backward induction over contexts. At each context, a linear program
optimises over all lossless rules of one round (`optima.emission_optimum`). It
uses the value of every context at which the round may end. A rule may therefore
depend on the sequence so far in any way, and may use shorter drafts. The result
is a bound for every rule without state other than its output.
"""

import numpy as np

from specjax.analysis import optima
from specjax.analysis import rounds as rounds_lib
from specjax.exact import enumeration
from specjax.exact.pairs import Pair

_PROGRAMS = 64  # programs solved in one call


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
  expected tokens, see `analysis.patient_pair`.

  Args:
    pair: models of depth at least rounds * (gamma + 1).
    gamma: draft length.
    rounds: number of rounds.

  Raises:
    ValueError: `gamma` or `rounds` is out of range, the tables are not deep
      enough, or a row of the models does not sum to 1 within 1e-12.
    ArithmeticError: the solver found no solution.
  """
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
