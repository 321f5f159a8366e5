"""Optimal draft lengths for block verification, exact on small pairs of models.

The draft length is a problem of optimal stopping. A draft token costs
`token_cost` target calls. Let c be the context including the draft so far, and
x the next draft token. Block verification accepts x with probability
survival(x). An accepted x saves D(c x), the value of one more token after c x.
D is defined in `analysis.rounds`, but here with the total cost instead of the
number of rounds. Drafting should continue while the expected saving by x and by
later tokens exceeds their cost. Published stop rules use the expected number of
accepted tokens instead of the saving.
"""

import dataclasses

import numpy as np

from specjax.analysis import rounds as rounds_lib
from specjax.exact import enumeration
from specjax.exact.drafts import Drafts
from specjax.exact.pairs import Pair


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DraftLengths:
  """Optimal stopping of drafts for block verification.

  Attributes:
    cost: `[contexts]` expected total cost from every context to the end of the
      sequence: rounds + token_cost * draft tokens. Contexts are numbered as in
      the result of `analysis.remaining_rounds`.
    goes_on: True where one more token should be drafted. goes_on[n][l] is
      `[V**(n + l)]` bool, for a round that starts after n tokens and has
      drafted l tokens.
    vocab_size: vocabulary size V.
  """

  cost: np.ndarray
  goes_on: list[list[np.ndarray]]
  vocab_size: int

  def ended(self, drafts: Drafts) -> Drafts:
    """Returns chains that end at the optimal length.

    This function can be used like a result of `exact.ended_by`.
    """
    offsets = enumeration.first_contexts(self.vocab_size, len(self.goes_on) + 1)
    lengths = np.searchsorted(offsets, drafts.contexts[:, 0], "right") - 1
    kept = np.zeros(len(lengths), int)
    for n, rows in enumerate(self.goes_on):
      these = np.flatnonzero(lengths == n)
      for drafted, going in enumerate(rows):
        first = (self.vocab_size**(n + drafted) - 1) // (self.vocab_size - 1)
        these = these[going[drafts.contexts[these, drafted] - first]]
        kept[these] += 1
    return drafts.cut(kept)


def best_draft_lengths(pair: Pair, gamma: int, length: int, token_cost: float,
                       *, eos: int | None = None) -> DraftLengths:
  """Returns the draft lengths with the lowest cost for block verification.

  The decision to stop depends on the sequence and on the draft so far. No stop
  rule that depends on these, and no fixed draft length, has a lower expected
  cost with block verification. The method is backward induction over contexts
  and, within a round, over the draft tokens.

  Args:
    pair: models of depth at least `length`.
    gamma: largest draft length.
    length: number of tokens to generate, at least 1.
    token_cost: cost of one draft token, in target calls.
    eos: end-of-sequence token, or None.

  Raises:
    ValueError: a size is out of range, or the tables are not deep enough.
  """
  rounds_lib.check(pair, gamma, length, eos, length)
  vocab = pair.vocab_size
  complete = rounds_lib.complete_contexts(vocab, length, eos)
  offsets = enumeration.first_contexts(vocab, length + 1)
  level = lambda table, n: table[offsets[n]:offsets[n + 1]]
  cost, value = np.zeros(offsets[-1]), np.zeros(offsets[-1])
  goes_on = []
  for n in reversed(range(length)):
    after = (pair.p[n] * level(cost, n + 1).reshape(-1, vocab)).sum(-1)
    most = min(gamma, length - n - 1)
    saved, going = _stopping(pair, n, [
        level(value, n + drafted) for drafted in range(1, most + 1)],
                             token_cost)
    done = level(complete, n)
    level(cost, n)[:] = np.where(done, 0, 1 + after - saved)
    level(value, n)[:] = np.where(done, 0, 1 - saved)
    goes_on.insert(0, going)
  return DraftLengths(cost=cost[:offsets[length]], goes_on=goes_on,
                      vocab_size=vocab)


def _stopping(pair: Pair, n: int, values: list[np.ndarray], token_cost: float
              ) -> tuple[np.ndarray, list[np.ndarray]]:
  """Returns the optimal stopping in one round after every context of n tokens.

  Args:
    pair: the models.
    n: number of tokens of the contexts.
    values: values[l - 1] is D (see the docstring of this module) for each
      context with l draft tokens.
    token_cost: cost of one draft token, in target calls.

  Returns:
    `(saved [V**n], goes_on)`: the expected cost that the draft saves, and one
    bool array for each number of draft tokens, see `DraftLengths`.
  """
  survive, pays = np.ones(pair.vocab_size**n), []
  for drafted, value in enumerate(values):
    p, q = pair.p[n + drafted], pair.q[n + drafted]
    ratio = np.divide(p, q, out=np.zeros_like(p), where=q > 0)
    survive = np.minimum(1, survive[:, None] * ratio).reshape(-1)
    pays.append(survive * value)
  saved, goes_on = np.zeros(len(survive)), []
  for drafted in reversed(range(len(values))):
    q = pair.q[n + drafted]
    gain = (q * (pays[drafted] + saved).reshape(q.shape)).sum(-1) - token_cost
    goes_on.insert(0, gain > 0)
    saved = np.maximum(gain, 0)
  return saved, goes_on
