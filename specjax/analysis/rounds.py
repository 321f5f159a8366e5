"""Number of rounds of a rule for a sequence, exact on small pairs of models.

p is the target and q the draft model. A round starts at a context c and ends at
a longer context: c followed by the emitted tokens. This module computes the
probabilities of these ends. It runs the rule's production code on all drafts,
as in `exact.enumeration`. All other results follow from these probabilities.

A sequence is complete if it has `length` tokens or contains `eos`. W(c) is the
expected number of rounds from c to a complete sequence.
D(c) = W(c) - sum_y p(y|c) W(cy) is the value of one more token y, in rounds.

For block verification, on all models, D(c) is at least the probability under q
of a token with p = 0. D(c) is therefore at least 0. It follows that no lossless
rule with at most gamma draft tokens per round needs fewer expected rounds, for
any length. Block verification does not always maximise the number of tokens
after a fixed number of rounds, see `analysis.patient_pair`.
"""

from collections.abc import Callable
import dataclasses

import jax
import numpy as np

from specjax.exact import drafts as drafts_lib
from specjax.exact import enumeration
from specjax.exact.compiled import Compiled
from specjax.exact.pairs import Pair
from specjax.interfaces import Verifier
from specjax.utils import fields

_DRAFTS = 1 << 16  # drafts that are enumerated together; limits memory

Ended = Callable[[drafts_lib.Drafts], drafts_lib.Drafts]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RoundsDistribution:
  """Distribution of the number of rounds until a sequence is complete.

  Attributes:
    probs: `[length + 1]` probability of k = 0, 1, ..., length rounds.
  """

  probs: np.ndarray

  @property
  def mean(self) -> float:
    """Expected number of rounds."""
    return float(self.probs @ np.arange(len(self.probs)))

  @property
  def variance(self) -> float:
    """Variance of the number of rounds."""
    return float(self.probs @ (np.arange(len(self.probs)) - self.mean)**2)

  def quantile(self, level: float) -> int:
    """Returns the smallest k with P(number of rounds <= k) >= `level`.

    The comparison has a tolerance of 1e-12, so that rounding errors do not
    change the result.

    Raises:
      ValueError: `level` is not in (0, 1].
    """
    if not 0 < level <= 1:
      raise ValueError(f"level is {level}; it must be in (0, 1]")
    enough = np.cumsum(self.probs)[:-1] >= level - 1e-12
    return int((~enough).sum())


def expected_rounds(rule: Verifier | Compiled, pair: Pair, gamma: int,
                    length: int, *, eos: int | None = None,
                    ended: Ended | None = None) -> float:
  """Returns the expected number of rounds to generate `length` tokens.

  The value is the mean of `rounds_distribution`. The arguments and errors are
  documented there.

  Example: the Bernoulli example of the block verification paper.

    >>> import specjax as sj
    >>> pair = sj.exact.iid_pair((1 / 3, 2 / 3), (2 / 3, 1 / 3), depth=6)
    >>> for rule in sj.verifiers.Token(), sj.verifiers.Block():
    ...   print(round(sj.analysis.expected_rounds(rule, pair, 2, length=4), 4))
    2.2963
    2.2222
  """
  return rounds_distribution(
      rule, pair, gamma, length, eos=eos, ended=ended).mean


def rounds_distribution(rule: Verifier | Compiled, pair: Pair, gamma: int,
                        length: int, *, eos: int | None = None,
                        ended: Ended | None = None) -> RoundsDistribution:
  """Returns the distribution of the number of rounds for `length` tokens.

  Decoding starts at the empty context. It ends after the first round with
  `length` tokens or an `eos` in the sequence.

  Args:
    rule: any verifier for chains, with or without state, or a `Compiled`.
    pair: models of depth at least length + gamma.
    gamma: draft length.
    length: number of tokens to generate, at least 1.
    eos: end-of-sequence token, or None.
    ended: function that shortens chains, from `exact.ended_by`, or None.

  Raises:
    ValueError: `gamma`, `length` or `eos` is out of range, or the tables are
      not deep enough.
  """
  check(pair, gamma, length, eos, length + gamma)
  scheme = lambda q, contexts: _chains(q, contexts, gamma, ended)
  run = enumeration.Run(Compiled.of(rule), pair, scheme, gamma + 1, "float64")
  complete = complete_contexts(pair.vocab_size, length, eos)
  offsets = enumeration.first_contexts(pair.vocab_size, length + 1)
  alive, probs = {0: [run.first()]}, [0.0]
  while alive:
    after, done = {}, 0.0
    for start, pieces in alive.items():
      pieces = jax.tree.map(lambda *x: np.concatenate(x), *pieces)
      for end, found in run.round(start, pieces, length).items():
        ends = complete[offsets[end] + found.contexts]
        done += found.weights[ends].sum()
        if not ends.all():
          after.setdefault(end, []).append(
              jax.tree.map(lambda x, ends=ends: x[~ends], found))
    alive = after
    probs.append(done)
  probs += [0.0] * (length + 1 - len(probs))
  return RoundsDistribution(probs=np.array(probs))


def remaining_rounds(rule: Verifier | Compiled, pair: Pair, gamma: int,
                     length: int, *, eos: int | None = None,
                     ended: Ended | None = None, token_cost: float = 0.0
                     ) -> np.ndarray:
  """Returns W, the expected number of further rounds from every context.

  Args:
    rule: any verifier for chains without state, or a `Compiled`.
    pair: models of depth at least length + gamma.
    gamma: draft length.
    length: length of the complete sequence, including the tokens of a context.
    eos: end-of-sequence token, or None.
    ended: function that shortens chains, from `exact.ended_by`, or None.
    token_cost: cost of one draft token, in rounds. If it is not 0, W is the
      expected total cost, rounds + token_cost * draft tokens.

  Returns:
    `[contexts]`, W of every context of fewer than `length` tokens. Contexts are
    numbered as in `exact.drafts`: W[0] is that of the empty context. W is 0 for
    contexts that contain `eos`.

  Raises:
    ValueError: the rule has state, or an argument is invalid for
      `rounds_distribution`.
  """
  ends, drafted = _round_ends(rule, pair, gamma, length, eos, ended)
  vocab = pair.vocab_size
  complete = complete_contexts(vocab, length, eos)
  offsets = enumeration.first_contexts(vocab, length + 1)
  rounds = np.zeros(offsets[-1])
  for n in reversed(range(length)):
    level = slice(offsets[n], offsets[n + 1])
    rounds[level] = 1 + token_cost * drafted[level]
    for m in range(1, min(gamma + 1, length - n) + 1):
      later = slice(offsets[n + m], offsets[n + m + 1])
      rounds[level] += (ends[m - 1, later] * rounds[later]).reshape(
          vocab**n, -1).sum(-1)
    rounds[level] = np.where(complete[level], 0, rounds[level])
  return rounds[:offsets[length]]


def token_value(rule: Verifier | Compiled, pair: Pair, gamma: int, length: int,
                *, eos: int | None = None) -> np.ndarray:
  """Returns D, the expected number of rounds that one more token saves.

  D(c) = W(c) - sum_y p(y|c) W(cy), where W(c) is the expected number of rounds
  from context c. `remaining_rounds` documents W, the arguments, the order of
  contexts and the errors. For block verification D(c) is at least q(p = 0 | c),
  the probability under q of a token with p = 0. If p(eos | c) > 0, D(c) is at
  least q(p = 0 | c) + q(eos | c).
  """
  rounds = remaining_rounds(rule, pair, gamma, length, eos=eos)
  vocab = pair.vocab_size
  after = np.concatenate([rounds[1:], np.zeros(vocab**length)])
  p = np.concatenate(pair.p[:length])
  complete = complete_contexts(vocab, length, eos)[:len(rounds)]
  return np.where(
      complete, 0, rounds - (p * after.reshape(-1, vocab)).sum(-1))


def progress_given_text(rule: Verifier | Compiled, pair: Pair, gamma: int,
                        length: int, rounds: int) -> np.ndarray:
  """Returns the distribution of the position after each round, given the text.

  The position is the number of emitted tokens. z^n is the first n tokens of the
  generated sequence z. Given z, the positions after successive rounds are a
  Markov chain. A round from z^n ends at z^(n+m) with probability
  P(the round emits these m tokens) / p(these m tokens | z^n), where p is the
  target. For every z and every number of rounds, the position of block
  verification stochastically dominates that of token verification.

  Args:
    rule: any lossless verifier for chains without state, or a `Compiled`.
    pair: models of depth at least length + gamma.
    gamma: draft length.
    length: number of tokens of z.
    rounds: number of rounds.

  Returns:
    `[rounds, V**length, length + 1]` probability of position k = 0, ..., length
    after each round, for each z. The last entry is for at least `length`
    tokens. For z with probability 0 under the target, the position is `length`
    after the first round.

  Raises:
    ValueError: an argument is invalid for `remaining_rounds`.
  """
  ends, _ = _round_ends(rule, pair, gamma, length, None, None)
  vocab = pair.vocab_size
  offsets = enumeration.first_contexts(vocab, length + 1)
  texts = np.arange(vocab**length)
  at = [offsets[n] + texts // vocab**(length - n) for n in range(length + 1)]
  p = [pair.p[n][texts // vocab**(length - n),
                 texts // vocab**(length - n - 1) % vocab]
       for n in range(length)]
  now, found = np.zeros((len(texts), length + 1)), []
  now[:, 0] = 1
  for _ in range(rounds):
    then = np.zeros_like(now)
    then[:, length] = now[:, length]
    for n in range(length):
      left, given = now[:, n].copy(), np.ones(len(texts))
      for m in range(1, min(gamma + 1, length - 1 - n) + 1):
        given = given * p[n + m - 1]
        moves = now[:, n] * np.divide(
            ends[m - 1, at[n + m]], given, out=np.zeros_like(given),
            where=given > 0)
        then[:, n + m] += moves
        left -= moves
      then[:, length] += left
    now = then
    found.append(now)
  return np.stack(found)


def _chains(q: np.ndarray, contexts: np.ndarray, gamma: int,
            ended: Ended | None) -> drafts_lib.Drafts:
  """Returns all chains, shortened by `ended`, with N = gamma + 1 nodes."""
  chains = drafts_lib.chains(q, contexts, gamma)
  return (ended(chains) if ended else chains).padded(gamma + 1)


def _round_ends(rule: Verifier | Compiled, pair: Pair, gamma: int, length: int,
                eos: int | None, ended: Ended | None
                ) -> tuple[np.ndarray, np.ndarray]:
  """Returns the probabilities of ends of rounds, and expected draft tokens.

  Returns:
    `(ends [gamma + 1, contexts], drafted [contexts])`. ends[m - 1, c] is the
    probability that a round ends at context c, if it starts at c without its
    last m tokens. c has up to `length` tokens. drafted[c] is the expected
    number of draft tokens of a round that starts at c, for contexts of fewer
    than `length` tokens.
  """
  compiled = Compiled.of(rule)
  if compiled.rule.remembers:
    raise ValueError(
        f"rule is {type(compiled.rule).__name__}, which has state, so a "
        "context alone does not determine the next round; use "
        "rounds_distribution")
  check(pair, gamma, length, eos, length + gamma)
  p, q = pair.tables()
  vocab = pair.vocab_size
  offsets = enumeration.first_contexts(vocab, length + 1)
  ends = np.zeros((gamma + 1, offsets[-1]))
  drafted = np.zeros(offsets[length])
  piece = max(1, _DRAFTS // vocab**gamma)
  state = compiled.initial_state(gamma, "float64")
  for first in range(0, offsets[length], piece):
    contexts = np.arange(first, min(first + piece, offsets[length]))
    chains = _chains(q, contexts, gamma, ended)
    count = len(chains.weights)
    states = jax.tree.map(
        lambda x, n=count: np.broadcast_to(x, (n, *x.shape)), state)
    stop, next_token, *_ = compiled.laws(
        (chains.tokens, chains.parents, chains.probs, p[chains.contexts],
         states), enumeration.CHUNK, "float64")
    lengths = chains.probs.any(-1).sum(-1)
    drafted[contexts] = np.bincount(
        chains.starts, chains.weights * lengths, minlength=len(contexts))
    for tau in range(gamma + 1):
      rate = (chains.weights * stop[:, tau])[:, None]
      mass = np.where(rate > 0, rate * next_token[:, tau], 0)
      after = drafts_lib.longer(chains.contexts[:, tau, None],
                                np.arange(vocab), vocab)
      kept = (after < offsets[-1]) & (mass > 0)
      ends[tau] += np.bincount(after[kept], mass[kept], minlength=offsets[-1])
  return ends, drafted


def complete_contexts(vocab: int, length: int, eos: int | None) -> np.ndarray:
  """Returns `[contexts]` bool, True for contexts with `length` tokens or eos.

  The contexts have up to `length` tokens.
  """
  levels = [np.zeros(1, bool)]
  for _ in range(length):
    levels.append((levels[-1][:, None] | (np.arange(vocab) == eos)).reshape(-1))
  levels[length][:] = True
  return np.concatenate(levels)


def check(pair: Pair, gamma: int, length: int, eos: int | None, depth: int
          ) -> None:
  """Raises `ValueError` if a size is too small or `pair.depth` below `depth`.
  """
  fields.check_at_least("gamma", gamma, 0)
  fields.check_at_least("length", length, 1)
  if eos is not None and not 0 <= eos < pair.vocab_size:
    raise ValueError(f"eos is {eos}; it must be in [0, {pair.vocab_size}), or "
                     "None")
  if pair.depth < depth:
    raise ValueError(f"the models are {pair.depth} deep; {length} tokens with "
                     f"gamma {gamma} need {depth}")
