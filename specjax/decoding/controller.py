"""Choice of the draft length before every round, including no draft.

  choose a length  ->  propose  ->  verify the draft  ->  update statistics

A draft makes its round longer. It pays if the accepted tokens are worth this
time. For every row (a sequence of the batch), the controller counts how often
the i-th drafted token was accepted in recent rounds. It chooses the length with
the most tokens per second of the batch (goodput, as in SmartSpec: Liu et al.
2024, arXiv:2406.14066). The choice depends only on past rounds, so every
verification rule without a state remains exact.

All rows of a batch have the same length, because they share one pass. So at a
temperature above 0, the sequence of a row depends on the other rows. The
distribution of the sequence does not.

A budget per row bounds the possible loss. The unit of budgets and costs is the
time of one token in decoding without drafts. After a round, every row receives
an equal share of the emitted tokens, times 1 + `risk`, and pays the cost of the
round. A draft is made only if the budgets cover its cost with no token
accepted. At most half of a budget is spent on long drafts, because acceptance
over the first tokens is a poor predictor. The shortest draft, and drafts of
similar cost, may use all of it. `risk` allows new attempts after drafts did not
pay.

If the measured seconds are correct, n tokens never take longer than
(1 + `risk`) n + `credit` tokens without drafts. If a draft costs more than
`credit`, the bound is (1 + `risk`) n tokens without drafts and one draft.

With `waits`, a batch is done when its slowest row is done. The controller then
minimises the time of that row. Each row has its own budget, so that no row is
done later than without drafts.

If drafts do not pay, most rounds have no draft. The controller is not called in
these rounds: it sets their number before the first one.

A `Fallback` calls its second drafter if the first one has no draft for a row.
For example, the first copies n-grams and the second is a small model. There are
rounds of two *kinds*. In one kind the first drafter has a draft in every row,
so the second is not called. These rounds cost less and have a different
acceptance rate. The kind of the next round is known in advance if the first
drafter draws no random numbers. In that case, each kind has its own costs and
statistics.
"""

import dataclasses

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax.types import DecodeState
from specjax.types import RoundStats
from specjax.utils import fields

_PRIOR_ROUNDS = 2.0  # weight of the prior of a position, in rounds
_REST = 0.95  # factor of past statistics in a round without a draft
_PAUSE = 8  # rounds without drafts if budgets suffice and drafts do not pay
_LONGEST_PAUSE = 32  # maximum number of rounds of a pause without drafts
_MOST = 16.0  # tokens; maximum of a budget, so of a past gain that may be lost
_STAKE = 0.5  # share of a budget for a draft if a cheaper draft exists
_CHEAPER = 0.8  # the shortest draft is cheaper if it costs less than this share


@struct.dataclass
class ControllerState:
  """Statistics of each of the B rows of a batch.

  Attributes:
    reached: `[B, D, G]` float32 for D kinds of rounds (see the module) and the
      longest length G. Entry i = 1, ..., G counts the recent rounds whose draft
      had at least i tokens, of which the first i - 1 were accepted. Older
      rounds have a lower weight (`Controller.memory`).
    accepted: `[B, D, G]` float32. Entry i counts those of these rounds in which
      token i was also accepted.
    budget: `[B]` float32, budgets in tokens, see the module.
    needed: `[B, D]` float32, sum over recent rounds of the fraction of the
      extra time of the chosen length that was used. The fraction is below 1 for
      a draft that ended early, because it is verified in a shorter pass.
    kind: `[B]` int32, kind of the next round of each row. The kind of a batch
      is the highest kind of its rows.
    known: `[B]` int32, number of committed tokens that the drafter has
      certainly read.
    until: `[B]` int32, length of the row at which its pause without drafts
      ends.
  """

  reached: jax.Array
  accepted: jax.Array
  budget: jax.Array
  needed: jax.Array
  kind: jax.Array
  known: jax.Array
  until: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Controller:
  """Chooses the draft length of a batch, see the module.

  Each length is a compiled program. Length 0 drafts nothing, so the target
  reads only the last committed token. A chain may end early, by a stop rule or
  because an n-gram has no match. The target's pass then has the smallest length
  that fits the chain. Drafts of a drafter without a field `gamma` are always
  verified completely.

  Attributes:
    lengths: draft lengths, increasing from 0. For a drafter without a field
      `gamma`, they must be (0, number of its draft tokens).
    seconds: seconds of a round for each length at this batch size. Only their
      ratios matter.
    first: seconds of a round in which only the first drafter of a `Fallback`
      drafts, for each length. (): all rounds are of one kind.
    reading: seconds per token that the drafter needs to read the tokens of
      rounds without drafts, before it drafts again. If `reading` is at least
      `risk` times the seconds of a round without drafts, a drafter is not
      tried again once the budget is empty.
    switching: additional seconds of a draft after a round without one, not
      including `reading`.
    prior: acceptance rate before any observation. A high value is safe, because
      the budget bounds the loss.
    memory: factor of past statistics in a round with a draft, in [0, 1].
    risk: fraction of the time that may be spent on drafts that do not pay.
    credit: number of tokens that may be lost at the beginning. It is divided
      among rows prefilled together, because one attempt observes all of them.
      (A queue prefills rows one by one.) Each row receives at least the cost of
      one shortest draft.
    waits: True minimises the time until all rows are done, see the module.
      False is for batches in which new rows replace done rows: it maximises the
      tokens per second of all rows.
  """

  lengths: tuple[int, ...] = (0, 2, 4, 8)
  seconds: tuple[float, ...]
  first: tuple[float, ...] = ()
  reading: float = 0.0
  switching: float = 0.0
  prior: float = 0.7
  memory: float = 0.9
  risk: float = 0.01
  credit: float = 1.4
  waits: bool = False

  cuts = True  # shorter drafts are verified in shorter passes

  def __post_init__(self):
    for name in ("lengths", "seconds", "first"):
      object.__setattr__(self, name, tuple(getattr(self, name)))
    for length in self.lengths:
      fields.check_at_least("a length", length, 0)
    lengths, steps = self.lengths, np.diff(self.lengths)
    if len(lengths) < 2 or lengths[0] != 0 or (steps <= 0).any():
      raise ValueError(f"lengths is {lengths}; give whole numbers that "
                       "increase from 0, at least two: 0 is no draft")
    object.__setattr__(self, "lengths", tuple(map(int, lengths)))
    self._check_seconds("seconds", self.seconds)
    if self.first:
      self._check_seconds("first", self.first)
    for name, most in (("prior", 1), ("memory", 1), ("risk", None),
                       ("credit", _MOST), ("reading", None),
                       ("switching", None)):
      self._check_number(name, getattr(self, name), most)
    if self._least[-1] > _MOST:
      raise ValueError(
          f"a round with the shortest draft takes {1 + self._least[-1]:.3g} "
          "times as long as one without a draft, and the limit is "
          f"{1 + _MOST:g} times; use a cheaper drafter, or decode without one")

  def _check_seconds(self, name: str, seconds: tuple[float, ...]) -> None:
    if len(seconds) != len(self.lengths) or not all(
        0 < s < float("inf") for s in seconds):
      raise ValueError(f"{name} is {seconds}; give a number above 0 for "
                       f"each of the {len(self.lengths)} lengths")

  def _check_number(self, name: str, value: float, most: float | None) -> None:
    if not 0 <= value < float("inf") or (most is not None and value > most):
      limit = ("a number of at least 0" if most is None else
               f"in [0, {most:g}]")
      raise ValueError(f"{name} is {value}; it must be {limit}")

  @property
  def costs(self) -> np.ndarray:
    """`[D, K]`, time of a round divided by that of a round without a draft.

    D is the number of kinds of rounds, K the number of lengths.
    """
    kinds = [seconds for seconds in (self.first, self.seconds) if seconds]
    # A round with a longer draft or more drafters is never faster. Smaller
    # measured values are measurement errors and are raised.
    ratios = np.array([np.array(one) / one[0] for one in kinds])
    return np.maximum.accumulate(
        np.maximum.accumulate(ratios, axis=1), axis=0).astype(np.float32)

  @property
  def _least(self) -> np.ndarray:
    """`[D]`, extra cost of the shortest draft after a pause, in tokens.

    D is the number of kinds of rounds. The cost of reading missed tokens is not
    included.
    """
    return self.costs[:, 1] - 1 + np.float32(self.switching / self.seconds[0])

  def init(self, lengths: jax.Array) -> ControllerState:
    """Returns the state after prompts of `lengths [B]` tokens were read."""
    rows, kinds = lengths.shape[0], len(self.costs)
    zeros = jnp.zeros((rows, kinds, self.lengths[-1]), jnp.float32)
    budget = max(self.credit / rows, self._least[-1])
    return ControllerState(
        reached=zeros, accepted=zeros,
        budget=jnp.full((rows,), budget, jnp.float32),
        needed=jnp.zeros((rows, kinds), jnp.float32),
        kind=jnp.full((rows,), kinds - 1, jnp.int32),
        known=lengths - 1, until=lengths)

  def survival(self, own: ControllerState) -> jax.Array:
    """Returns `[B, G]`: entry i is the probability to accept at least i tokens.

    i runs from 1 to G, the longest length. The probability is the product of
    the estimated acceptance rates of the first i positions, in rounds of the
    row's next kind. The prior of a position is the estimate for the position
    before. Deep positions are rarely observed, and tokens after many accepted
    tokens tend to be accepted.
    """
    believed, survived = jnp.full_like(own.budget, self.prior), []
    reached, accepted = (_of_kind(x, own) for x in (own.reached, own.accepted))
    for i in range(self.lengths[-1]):
      believed = ((accepted[:, i] + _PRIOR_ROUNDS * believed)
                  / (reached[:, i] + _PRIOR_ROUNDS))
      survived.append(believed * survived[-1] if survived else believed)
    return jnp.stack(survived, axis=1)

  def choose(self, state: DecodeState) -> jax.Array:
    """Returns `[]` int32, the index of the length of the next draft."""
    own, active = state.controller, ~state.done
    added = self._costs(state)[1:] - 1 + self._late(state)
    budget = self._shared(self._purse(state), active)
    affordable = added <= jnp.where(
        added[0] < _CHEAPER * added, _STAKE * budget, budget)
    asks = jnp.any(active & (own.until <= state.lengths))
    return jax.lax.cond(
        asks & affordable[0], lambda: self._choose(state, affordable),
        lambda: jnp.zeros((), jnp.int32))

  def _choose(self, state: DecodeState, affordable: jax.Array) -> jax.Array:
    """Returns the index of the length with the highest goodput.

    Args:
      state: state before the round.
      affordable: `[K - 1]` bool, True for each length above 0 whose cost the
        budgets cover.
    """
    own, active = state.controller, ~state.done
    # A row emits at most the tokens up to its limit.
    place = jnp.arange(self.lengths[-1] + 1)
    left = (state.limits - state.lengths)[:, None]
    tokens = jnp.pad(self.survival(own), ((0, 0), (1, 0)), constant_values=1)
    tokens = jnp.where(active[:, None] & (place < left), tokens, 0)
    within = place <= np.array(self.lengths)[:, None]
    tokens = jnp.sum(jnp.where(within[:, None], tokens, 0), axis=2)  # [K, B]
    if self.waits:  # fraction of the slowest row's remaining tokens
      tokens = jnp.min(jnp.where(active, tokens / left[:, 0], jnp.inf), axis=1)
    else:
      tokens = jnp.sum(tokens, axis=1)
    # Every draft reaches its first token, so `reached` of position 1 is the
    # number of rounds with drafts.
    rounds = _of_kind(own.reached, own)[:, 0]
    share = _mean((_of_kind(own.needed, own) + _PRIOR_ROUNDS)
                  / (rounds + _PRIOR_ROUNDS), active)
    # A draft must also earn the cost of switching. The cost of reading missed
    # tokens is not included, because all later drafts profit from the reading.
    added = (share * (self._costs(state) - 1)).at[1:].add(
        self._changing(state))
    goodput = tokens / (1 + added)
    affordable = jnp.pad(affordable, (1, 0), constant_values=True)
    return jnp.argmax(jnp.where(affordable, goodput, 0)).astype(jnp.int32)

  def _costs(self, state: DecodeState) -> jax.Array:
    """Returns `[K]`, the cost of each length in a round of the next kind."""
    kind = jnp.max(jnp.where(state.done, 0, state.controller.kind))
    return jnp.asarray(self.costs)[kind]

  def _late(self, state: DecodeState) -> jax.Array:
    """Returns `[]`, the additional cost in tokens of a draft after a pause.

    It is the cost of reading the missed tokens and of switching.
    """
    reading = self.reading / self.seconds[0]
    return self._missed(state) * reading + self._changing(state)

  def _changing(self, state: DecodeState) -> jax.Array:
    """Returns `[]`, the cost of switching in tokens.

    It is 0 if all active rows had a draft in the previous round.
    """
    drafted = state.lengths - 2 == state.controller.known
    changes = jnp.any(~state.done & ~drafted)
    return changes * (self.switching / self.seconds[0])

  def _missed(self, state: DecodeState) -> jax.Array:
    """Returns `[]`, the largest number of tokens that the drafter has not read.
    """
    missed = state.lengths - 2 - state.controller.known
    return jnp.max(jnp.where(state.done, 0, missed), initial=0)

  def _purse(self, state: DecodeState) -> jax.Array:
    """Returns `[B]`, the budgets that rows have earned so far.

    `rests` adds the income of a complete pause when the pause begins. A row
    that joins the batch may end the pause early. So this function subtracts the
    income of the remaining pause.
    """
    own = state.controller
    ahead = jnp.maximum(own.until - state.lengths, 0)
    return own.budget - self.risk * ahead

  def _shared(self, x: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns `[]`, a common value for the rows of a round.

    With `waits`, it is the minimum of `x [B]` over the marked rows, else the
    mean.

    Args:
      x: `[B]`, value of each row.
      rows: `[B]` bool, marks the rows.
    """
    if self.waits:
      return jnp.min(jnp.where(rows, x, jnp.inf))
    return _mean(x, rows)

  def rests(self, state: DecodeState, chosen: jax.Array
            ) -> tuple[ControllerState, jax.Array]:
    """Starts rounds without drafts: returns the state and their number.

    Each of these rounds emits one token per row, so its effect on the state is
    known in advance. The state is updated for all rounds of the pause at once,
    and does not change during the pause.

    Args:
      state: state before the rounds.
      chosen: `[]` int32, result of `choose`. If it is not 0, the number is 0.

    Returns:
      The controller's state, and `[]` int32, the number of rounds.
    """
    own, active = state.controller, ~state.done
    left = jnp.max(jnp.where(active, state.limits - state.lengths, 1))
    reading = self.reading / self.seconds[0]
    lacks = self._least[0] + reading * self._missed(state) - self._shared(
        self._purse(state), active)
    gain = self.risk - reading
    pause = jnp.ceil(lacks / gain) if gain > 0 else jnp.inf
    # With two kinds of rounds, the next round may be of the other kind, in
    # which drafts may pay. So if budgets suffice, a pause then has one round.
    pause = jnp.where(lacks > 0, pause, 1 if self.first else _PAUSE)
    pause = jnp.clip(pause, 1, jnp.minimum(left, _LONGEST_PAUSE))
    pause = pause.astype(jnp.int32)

    waiting = jnp.min(jnp.where(active, own.until - state.lengths, left))
    asks = (waiting <= 0) & (chosen == 0)
    until = jnp.where(active & asks, state.lengths + pause, own.until)
    # A row may still be in a pause that another row ended by joining. Only the
    # rounds after that pause are new.
    more = until - jnp.maximum(own.until, state.lengths)
    more = jnp.where(active & asks, jnp.maximum(more, 0), 0)
    factor = jnp.float32(_REST) ** more
    new = own.replace(
        reached=factor[:, None, None] * own.reached,
        accepted=factor[:, None, None] * own.accepted,
        needed=factor[:, None] * own.needed,
        budget=jnp.minimum(own.budget + self.risk * more, _MOST),
        until=jnp.maximum(own.until, until))
    return new, jnp.where(
        chosen > 0, 0, jnp.where(asks, pause, waiting)).astype(jnp.int32)

  def learned(self, state: DecodeState, stats: RoundStats, lengths: jax.Array,
              chosen: jax.Array, verified: jax.Array) -> ControllerState:
    """Returns the state after a round with drafts.

    The entries of done rows do not change.

    Args:
      state: state before the round.
      stats: statistics of the round.
      lengths: `[B]`, number of committed tokens of each row after the round.
      chosen: `[]` int32, result of `choose`.
      verified: `[]` int32, index of the length of the verifying pass.
    """
    own, costs = state.controller, self._costs(state)
    place = jnp.arange(1, self.lengths[-1] + 1)
    taken = stats.accepted[:, None]
    reached = (place <= jnp.array(self.lengths)[chosen]) & (taken >= place - 1)
    added = costs[chosen] - 1
    needed = jnp.where(added > 0, (costs[verified] - 1)
                       / jnp.where(added > 0, added, 1), 1)
    kind = jnp.arange(len(self.costs)) == own.kind[:, None]

    def added_to(old, seen):  # adds only to the entries of the round's kind
      is_kind = kind.reshape(kind.shape + (1,) * (old.ndim - 2))
      return jnp.where(is_kind, self.memory * old + seen, old)

    new = own.replace(
        reached=added_to(own.reached, reached[:, None]),
        accepted=added_to(
            own.accepted, (reached & (taken >= place))[:, None]),
        budget=self._filled(
            state, stats.emitted, costs[verified] + self._late(state)),
        needed=added_to(own.needed, needed), known=lengths - 2,
        until=lengths)
    keep = lambda new, old: jax.vmap(jnp.where)(state.done, old, new)
    return jax.tree.map(keep, new, own)

  def _filled(self, state: DecodeState, emitted: jax.Array, cost: jax.Array
              ) -> jax.Array:
    """Returns the budgets `[B]` after a round with drafts.

    All rows receive an equal share of the emitted tokens, because a draft may
    pay for the batch although some rows accept few tokens. With `waits`, every
    row receives its own tokens.

    Args:
      state: state before the round.
      emitted: `[B]`, number of tokens that each row emitted in the round.
      cost: `[]`, cost of the round in tokens.
    """
    if not self.waits:
      emitted = _mean(emitted, ~state.done)
    earned = (1 + self.risk) * emitted - cost
    new = jnp.minimum(self._purse(state) + earned, _MOST)
    return jnp.where(state.done, state.controller.budget,
                     new.astype(jnp.float32))


def _of_kind(x: jax.Array, own: ControllerState) -> jax.Array:
  """Returns the entries `[B, ...]` of `x [B, D, ...]` for each row's next kind.
  """
  return jax.vmap(lambda row, kind: row[kind])(x, own.kind)


def _mean(x: jax.Array, rows: jax.Array) -> jax.Array:
  """Returns `[]`, the mean of `x [B]` over the marked rows."""
  return jnp.sum(jnp.where(rows, x, 0)) / jnp.maximum(jnp.sum(rows), 1)
