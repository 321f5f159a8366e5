"""How long to draft, decided before every round, down to not at all.

  choose a length  ->  propose  ->  verify what was drafted  ->  learn

A draft pays where its accepted tokens are worth the time of the longer round.
The controller keeps, for every row, how often the i-th drafted token was
accepted of late, and takes the length that makes the most tokens per second of
the batch (goodput, as SmartSpec: Liu et al. 2024, arXiv:2406.14066). The choice
depends on the past alone, so that every rule without a state stays exact.

A batch has one length, for its rows share one pass: rows for which it is too
long lose nothing by it. So with a controller the text of a row at a temperature
above 0 depends on the rows beside it. Its law does not.

What it may lose is bounded. A row has a budget, in tokens of decoding without
drafts: what the rows of a round emit, with a share of `risk` on top, is put
into their purses alike, and what the round cost is taken out: rounds that pay
fill them. A draft is made only if the purses can bear that nothing of it is
accepted. More than half of what they hold is risked only on the shortest draft
and on those that cost little more: the first tokens of a text tell little, and
who stakes all on them has nothing left when drafts begin to pay. If the
measured seconds are right, n tokens therefore never take longer than
(1 + risk) n + `credit` tokens without drafts, or one draft more if that is
dearer. What `risk` buys is that drafting is tried again, however long it did
not pay.

A batch whose rows are all waited for (`waits`) is done when its slowest row is.
Then the length counts with which that row is done first, and each row has a
budget of its own, so that none is done later than without drafts.

Rounds without a draft are most of what a useless drafter leaves, and the
controller has no part in them: how many there will be is said before the first.

A `Fallback` such as of n-grams and a small model has rounds of two *kinds*. In
one the first drafter has a draft in every row, and the second is not asked: it
costs less, and other tokens are accepted. Which kind the next round is can be
told beforehand if the first drafter draws nothing. So either kind has costs and
a memory of its own.
"""

import dataclasses

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax.types import DecodeState
from specjax.types import RoundStats
from specjax.utils import fields

_PRIOR_ROUNDS = 2.0  # how much what is believed of a place counts
_REST = 0.95  # of what was seen, kept in a round without a draft
_PAUSE = 8  # such rounds before a draft that does not pay is thought of again
_LONGEST_PAUSE = 32  # and before the purses are looked at again
_MOST = 16.0  # tokens in a budget: how much of a gain may be lost again
_STAKE = 0.5  # of a budget, that a draft may lose if a cheaper one will do
_CHEAPER = 0.8  # of what a draft may lose, for the shortest one to be that


@struct.dataclass
class ControllerState:
  """What the controller knows of every row.

  Attributes:
    reached: `[B, D, G]` float32, recent rounds whose draft was to be i tokens
      long at least, and accepted up to token i - 1; D is the number of kinds
      of rounds and G the longest length.
    accepted: `[B, D, G]` float32, those of them that accepted token i too.
    budget: `[B]` float32, tokens.
    needed: `[B, D]` float32, of the time that drafts of the length chosen would
      have added to these rounds, the part that was needed: where less was
      drafted less is verified.
    kind: `[B]` int32, of which kind the next round is for each row; a batch has
      the highest one.
    known: `[B]` int32, committed tokens that the drafter has surely read.
    until: `[B]` int32, committed tokens up to which the row asks for no draft.
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
  """Chooses the length of the drafts of a batch, see the top of this file.

  Each length is a compiled program of its own. With length 0 nothing is
  proposed and one token is verified; where a chain turns out shorter than was
  allowed, because an n-gram has no match or a stop rule ended it, no more is
  verified than the next length needs. (Not so for a drafter without a field
  `gamma`: what it drafts is verified whole.)

  Attributes:
    lengths: lengths to choose from, increasing from 0. The drafter must have a
      field `gamma`, or lengths must be (0, its own length).
    seconds: of a whole round with each of the lengths and this batch size; only
      their ratios count.
    first: seconds of a round, for each of the lengths, in which only the first
      drafter of a `Fallback` drafts; (): all rounds are of one kind.
    reading: seconds that the drafter needs to read a token that was committed
      without it, before it drafts again. If it is more than `risk` allows, a
      drafter whose budget is empty is not asked again.
    switching: seconds that a round with a draft takes longer after one without
      than after one with, reading aside.
    prior: the share of drafted tokens that is accepted, before any was seen;
      rather too high, for what is tried in vain is bounded by the budget.
    memory: of what was seen, kept in a round with a draft, in [0, 1].
    risk: share of the time that may be spent on drafts that do not pay.
    credit: tokens that may be lost on such drafts at the beginning, over the
      rows that are prefilled together, for one try tells as much of them as so
      many of one row (a queue prefills row by row); if the shortest draft may
      lose more, as much as that, so that it is tried once.
    waits: whether the batch is done when all rows are, see the top of this
      file; otherwise, as where new rows take the place of those that are done,
      the tokens of all rows in a second count.
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

  cuts = True  # less is verified where less was drafted

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
    for name in ("seconds", *(("first",) if self.first else ())):
      seconds = getattr(self, name)
      if len(seconds) != len(lengths) or not all(
          0 < s < float("inf") for s in seconds):
        raise ValueError(f"{name} is {seconds}; give a number above 0 for "
                         f"each of the {len(lengths)} lengths")
    for name, most in (("prior", 1), ("memory", 1), ("risk", None),
                       ("credit", _MOST), ("reading", None),
                       ("switching", None)):
      value = getattr(self, name)
      if not 0 <= value < float("inf") or (most is not None and value > most):
        limit = ("a number of at least 0" if most is None else
                 f"in [0, {most:g}]")
        raise ValueError(f"{name} is {value}; it must be {limit}")
    if self._least[-1] > _MOST:
      raise ValueError(
          f"a round with the shortest draft takes {1 + self._least[-1]:.3g} "
          f"times as long as one without, and more than {1 + _MOST:g} times is "
          "never risked; take a cheaper drafter, or decode without one")

  @property
  def costs(self) -> np.ndarray:
    """`[D, K]`, the time of a round of each length over that of one token."""
    kinds = [seconds for seconds in (self.first, self.seconds) if seconds]
    # A longer round that was measured to be faster was measured badly, and so
    # was one in which more drafters are asked.
    ratios = np.array([np.array(one) / one[0] for one in kinds])
    return np.maximum.accumulate(
        np.maximum.accumulate(ratios, axis=1), axis=0).astype(np.float32)

  @property
  def _least(self) -> np.ndarray:
    """`[D]`, tokens that the shortest draft may lose, after a rest."""
    return self.costs[:, 1] - 1 + np.float32(self.switching / self.seconds[0])

  def init(self, lengths: jax.Array) -> ControllerState:
    """The state after prompts of `lengths [B]`."""
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
    """`[B, G]`, the probability that at least i tokens of a draft are accepted.

    In a round of the row's kind. The product of each place's share of accepted
    tokens. What is believed of a place before it was seen is what is known of
    the place before it: deep places are reached seldom, and drafts that
    survived so far go on.
    """
    believed, survived = jnp.full_like(own.budget, self.prior), []
    reached, accepted = (_of_kind(x, own) for x in (own.reached, own.accepted))
    for i in range(self.lengths[-1]):
      believed = ((accepted[:, i] + _PRIOR_ROUNDS * believed)
                  / (reached[:, i] + _PRIOR_ROUNDS))
      survived.append(believed * survived[-1] if survived else believed)
    return jnp.stack(survived, axis=1)

  def choose(self, state: DecodeState) -> jax.Array:
    """`[]` int32, the index of the length that the batch drafts now."""
    own, active = state.controller, ~state.done
    added = self._costs(state)[1:] - 1 + self._late(state)
    budget = self._shared(self._purse(state), active)
    affordable = added <= jnp.where(
        added[0] < _CHEAPER * added, _STAKE * budget, budget)
    asks = jnp.any(active & (own.until <= state.lengths))
    return jax.lax.cond(
        asks & affordable[0], lambda: self._choose(state, affordable),
        lambda: jnp.zeros((), jnp.int32))

  def _choose(self, state, affordable):
    """`choose` among those lengths above 0 that are `affordable [K - 1]`."""
    own, active = state.controller, ~state.done
    # A row emits no more than its limit allows.
    place = jnp.arange(self.lengths[-1] + 1)
    left = (state.limits - state.lengths)[:, None]
    tokens = jnp.pad(self.survival(own), ((0, 0), (1, 0)), constant_values=1)
    tokens = jnp.where(active[:, None] & (place < left), tokens, 0)
    within = place <= np.array(self.lengths)[:, None]
    tokens = jnp.sum(jnp.where(within[:, None], tokens, 0), axis=2)  # [K, B]
    if self.waits:  # the part of what is left that the slowest row gets done
      tokens = jnp.min(jnp.where(active, tokens / left[:, 0], jnp.inf), axis=1)
    else:
      tokens = jnp.sum(tokens, axis=1)
    # Every draft reaches its first token: so many rounds are counted.
    rounds = _of_kind(own.reached, own)[:, 0]
    share = _mean((_of_kind(own.needed, own) + _PRIOR_ROUNDS)
                  / (rounds + _PRIOR_ROUNDS), active)
    # What changing over takes has to be gained as well; what the drafter has
    # missed is read once, for all the drafts that follow.
    added = (share * (self._costs(state) - 1)).at[1:].add(
        self._changing(state))
    goodput = tokens / (1 + added)
    affordable = jnp.pad(affordable, (1, 0), constant_values=True)
    return jnp.argmax(jnp.where(affordable, goodput, 0)).astype(jnp.int32)

  def _costs(self, state):
    """`[K]`, `costs` of the kind that the next round is of."""
    kind = jnp.max(jnp.where(state.done, 0, state.controller.kind))
    return jnp.asarray(self.costs)[kind]

  def _late(self, state):
    """Time that a draft takes longer because others were left out, `[]`.

    In tokens: to read what the drafter has missed, and to change over.
    """
    reading = self.reading / self.seconds[0]
    return self._missed(state) * reading + self._changing(state)

  def _changing(self, state):
    """What `switching` adds to a draft now, in tokens, `[]`."""
    drafted = state.lengths - 2 == state.controller.known
    changes = jnp.any(~state.done & ~drafted)
    return changes * (self.switching / self.seconds[0])

  def _missed(self, state):
    """Committed tokens that the drafter has not read, of the row with most."""
    missed = state.lengths - 2 - state.controller.known
    return jnp.max(jnp.where(state.done, 0, missed), initial=0)

  def _purse(self, state):
    """What the purses hold now, `[B]`: `rests` fills them beforehand.

    A row that joins others which rest may end their rest before its time.
    """
    own = state.controller
    ahead = jnp.maximum(own.until - state.lengths, 0)
    return own.budget - self.risk * ahead

  def _shared(self, x, rows):
    """What rows that share a round have together of `x [B]`."""
    if self.waits:
      return jnp.min(jnp.where(rows, x, jnp.inf))
    return _mean(x, rows)

  def rests(self, state: DecodeState, chosen: jax.Array
            ) -> tuple[ControllerState, jax.Array]:
    """The state before some rounds without a draft, and how many there are.

    What they bring is known beforehand, a token for every row, and the state
    has it at once; those rounds leave it alone.

    Args:
      state: before the rounds.
      chosen: `[]` int32, what `choose` returned. If it is not 0, there is no
        such round.

    Returns:
      The state and `[]` int32.
    """
    own, active = state.controller, ~state.done
    left = jnp.max(jnp.where(active, state.limits - state.lengths, 1))
    reading = self.reading / self.seconds[0]
    lacks = self._least[0] + reading * self._missed(state) - self._shared(
        self._purse(state), active)
    gain = self.risk - reading
    pause = jnp.ceil(lacks / gain) if gain > 0 else jnp.inf
    # The next round may be of another kind, which pays.
    pause = jnp.where(lacks > 0, pause, 1 if self.first else _PAUSE)
    pause = jnp.clip(pause, 1, jnp.minimum(left, _LONGEST_PAUSE))
    pause = pause.astype(jnp.int32)

    waiting = jnp.min(jnp.where(active, own.until - state.lengths, left))
    asks = (waiting <= 0) & (chosen == 0)
    until = jnp.where(active & asks, state.lengths + pause, own.until)
    # A row may have waited when another one took a place beside it.
    more = until - jnp.maximum(own.until, state.lengths)
    more = jnp.where(active & asks, jnp.maximum(more, 0), 0)
    kept = jnp.float32(_REST) ** more
    new = own.replace(
        reached=kept[:, None, None] * own.reached,
        accepted=kept[:, None, None] * own.accepted,
        needed=kept[:, None] * own.needed,
        budget=jnp.minimum(own.budget + self.risk * more, _MOST),
        until=jnp.maximum(own.until, until))
    return new, jnp.where(
        chosen > 0, 0, jnp.where(asks, pause, waiting)).astype(jnp.int32)

  def learned(self, state: DecodeState, stats: RoundStats, lengths: jax.Array,
              chosen: jax.Array, verified: jax.Array) -> ControllerState:
    """The state after a round with drafts; rows that are done keep theirs.

    Args:
      state: before the round.
      stats: of the round.
      lengths: `[B]`, committed tokens after it.
      chosen: `[]` int32, what `choose` returned.
      verified: `[]` int32, the index of the length that was verified.
    """
    own, costs = state.controller, self._costs(state)
    place = jnp.arange(1, self.lengths[-1] + 1)
    taken = stats.accepted[:, None]
    reached = (place <= jnp.array(self.lengths)[chosen]) & (taken >= place - 1)
    added = costs[chosen] - 1
    needed = jnp.where(added > 0, (costs[verified] - 1)
                       / jnp.where(added > 0, added, 1), 1)
    kind = jnp.arange(len(self.costs)) == own.kind[:, None]

    def added_to(old, seen):  # of the round's kind alone
      mine = kind.reshape(kind.shape + (1,) * (old.ndim - 2))
      return jnp.where(mine, self.memory * old + seen, old)

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

  def _filled(self, state, emitted, cost):
    """The budget after a round that emitted so much and cost so much.

    Rows that share a round share what it earns, unless each of them `waits`:
    one that does not pay for itself may cost less than the others gain.
    """
    if not self.waits:
      emitted = _mean(emitted, ~state.done)
    earned = (1 + self.risk) * emitted - cost
    new = jnp.minimum(self._purse(state) + earned, _MOST)
    return jnp.where(state.done, state.controller.budget,
                     new.astype(jnp.float32))


def _of_kind(x, own):
  """`[B, ...]` of `x [B, D, ...]`, what is of the kind of each row's round."""
  return jax.vmap(lambda row, kind: row[kind])(x, own.kind)


def _mean(x, rows):
  """The mean of `x [B]` over some rows, `[]`."""
  return jnp.sum(jnp.where(rows, x, 0)) / jnp.maximum(jnp.sum(rows), 1)
