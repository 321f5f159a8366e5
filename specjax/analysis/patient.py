"""A lossless rule with more tokens than block verification after two rounds.

Theorem 2 of Sun et al. 2024 (arXiv:2403.10444) states that no lossless rule has
more expected tokens than block verification after any number of rounds. gamma
is the draft length. The theorem holds for one round, for two rounds if
gamma = 2, and for every number of rounds if gamma = 1. It fails for two rounds
if gamma >= 3, and for three rounds if gamma = 2. The rule and the pairs of this
module are counterexamples.

The reason is that block verification accepts as many tokens as possible in
every round, even if the next round then starts at a worse context. Within a
round, a token with p/q < 1 and a later token with p/q > 1 compensate each
other. They do not if the round ends between them.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specjax.exact.pairs import Pair
from specjax.interfaces import Verifier
from specjax.types import Draft
from specjax.types import Law
from specjax.verifiers.block import Block


@dataclasses.dataclass(frozen=True)
class Patient(Verifier):
  """Block verification that omits a deterministic last draft token.

  The token is deterministic if its row of q is one-hot. The decision depends on
  this row and not on the token, so the rule is lossless on all models.
  """

  def law(self, draft: Draft, target_probs: jax.Array) -> Law:
    """Returns the law of `Block` for the remaining draft."""
    last = jnp.sum(draft.drafted, dtype=jnp.int32)
    omitted = ((jnp.arange(draft.probs.shape[0]) == last)
               & (draft.probs.max(-1) >= 1))
    probs = jnp.where(omitted[:, None], 0, draft.probs)
    return Block().law(draft.replace(probs=probs), target_probs)


def patient_pair(gamma: int, depth: int, certain: int | None = None) -> Pair:
  """Returns models on which `Patient` has more tokens than block verification.

  p is the target and q the draft model. The vocabulary is {a = 0, b = 1}. A
  draft token fails where q(b) = 1 and p(a) = 1. The models depend on the
  position and on a token x:

  * The first `certain` tokens are a with probability 1 under p and q.
  * The next token, x, has q(a) = 1 and p(a) = d. If x is b, all later draft
    tokens fail.
  * If x is a, the next token has q(a) = d and p(a) = 1.
  * For gamma >= 3, gamma - 2 tokens with p = q follow. Later draft tokens fail.
  * For gamma = 2, one failing draft token and two tokens with p = q follow.
    Later draft tokens fail.

  Block verification emits x in its first round. `Patient` leaves x to the
  second round. The advantage of `Patient` in expected tokens is

  * (gamma - 2)^2 / (4 (gamma - 1)) after two rounds, for gamma >= 3 and
    d = gamma / (2 (gamma - 1));
  * 1/3 after three rounds, for gamma = 2 and d = 2/3.

  Args:
    gamma: draft length, at least 2.
    depth: 1 + number of tokens of the longest context.
    certain: number of tokens before x. None means gamma. With gamma + 1 and
      gamma >= 3, block verification emits more tokens in two rounds with draft
      length gamma than with gamma + 1.

  Raises:
    ValueError: `gamma` is less than 2.

  Example:
    >>> import specjax as sj
    >>> pair = sj.analysis.patient_pair(gamma=3, depth=8)
    >>> for rule in sj.verifiers.Block(), sj.analysis.Patient():
    ...   print(sj.exact.expected_tokens(rule, pair, gamma=3, rounds=2))
    [4.    6.125]
    [3.   6.25]
  """
  if gamma < 2:
    raise ValueError(f"gamma is {gamma}; it must be at least 2, because no "
                     "lossless rule exceeds block verification for gamma = 1")
  certain = gamma if certain is None else certain
  d = 2 / 3 if gamma == 2 else gamma / (2 * (gamma - 1))
  a, b, even, x = (np.array(row) for row in (
      (1.0, 0.0), (0.0, 1.0), (0.5, 0.5), (d, 1 - d)))
  rows = [(a, a)] * certain + [(x, a), (a, x)]
  rows += [(a, b), (even, even), (even, even)] if gamma == 2 else (
      [(even, even)] * (gamma - 2))
  rows += [(a, b)] * (depth - len(rows))
  tables = []
  for side in range(2):
    levels = [np.tile(rows[n][side], (2**n, 1)) for n in range(depth)]
    for n in range(certain + 1, depth):  # if x is b, draft tokens fail
      was_b = np.arange(2**n) >> (n - certain - 1) & 1
      levels[n] = np.where(was_b[:, None], (a, b)[side], levels[n])
    tables.append(levels)
  return Pair(*tables)
