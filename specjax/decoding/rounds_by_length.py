"""Rounds with several draft lengths, for use with a controller.

A `RoundsByLength` replaces a `Round` in the decoding loops. It contains one
round per draft length, and the controller selects one of them. In the shortest
round, nothing is drafted and the target reads only the root. This is decoding
without drafts.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp

from specjax import interfaces
from specjax.decoding import rounds
from specjax.decoding.controller import Controller
from specjax.decoding.rounds import Round
from specjax.interfaces import checks
from specjax.interfaces import Drafter
from specjax.interfaces import Model
from specjax.sampling import LogitsTransform
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelOutput
from specjax.types import RoundStats
from specjax.types import Trace
from specjax.types import Verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class Empty(Drafter):
  """Drafter without draft tokens, so that every round emits one token.

  Attributes:
    vocab_size: V, vocabulary size of the target. `bind` sets it.
    drafter: drafter that does not draft in these rounds. Its `commit` is called
      after each round. None if there is no such drafter.
  """

  vocab_size: int | None = None
  drafter: Drafter | None = None

  num_nodes = 1
  num_uniforms = 0
  @property
  def provides(self) -> tuple[str, ...]:
    # The structure of its drafts is that of the other drafter's drafts.
    same = {"chain", "deterministic"} if self.drafter is None else (
        {"chain", "deterministic", "full"} & {*self.drafter.provides})
    return "iid", "conditional", "autoregressive", *same

  def bind(self, target: Model, transform: LogitsTransform) -> "Empty":
    del transform
    return dataclasses.replace(self, vocab_size=target.vocab_size)

  def propose(self, params: chex.ArrayTree, uniforms: jax.Array,
              state: DecodeState) -> tuple[Draft, Any]:
    del params, uniforms
    return rounds.root_only(state, self.vocab_size), state.drafter

  def commit(self, params: chex.ArrayTree, drafter: chex.ArrayTree,
             draft: Draft, verdict: Verdict, target_output: ModelOutput,
             count: jax.Array, own: jax.Array) -> Any:
    if self.drafter is None:
      return drafter
    return self.drafter.commit(
        params, drafter, draft, verdict, target_output, count,
        jnp.zeros_like(own))


@dataclasses.dataclass(frozen=True)
class RoundsByLength:
  """Rounds that differ in draft length, shortest first.

  Attributes:
    rungs: one `Round` for each length of the controller.
    controller: controller that selects a length before every round.
  """

  rungs: tuple[Round, ...]
  controller: Controller

  @property
  def drafter(self) -> Drafter:
    """The drafter with the longest drafts."""
    return self.rungs[-1].drafter

  def start(self, *arguments: Any) -> DecodeState:
    """Reads the prompts and returns the state, see `Round.start`."""
    state = self.rungs[-1].start(*arguments)
    return state.replace(controller=self.controller.init(state.lengths))

  def draw_uniforms(self, state: DecodeState, rounds: int) -> jax.Array:
    """Returns the uniforms for the longest drafts, see `Round.draw_uniforms`.
    """
    return self.rungs[-1].draw_uniforms(state, rounds)

  def __call__(self, params: chex.ArrayTree, state: DecodeState,
               uniforms: jax.Array, traced: bool = True) -> tuple[Any, ...]:
    """Runs one round and returns `(state, stats[, trace])`, see `Round`.

    Stats and trace are padded to the size of the longest draft.
    """
    return _flat(*_round(self, params, state, uniforms, traced=traced))

  def some_rounds(self, params: chex.ArrayTree,
                  is_going: Callable[[chex.ArrayTree], jax.Array],
                  play: Callable[..., Any], carry: chex.ArrayTree) -> Any:
    """Runs a number of rounds without drafts, then rounds with drafts.

    The controller sets the number of rounds without drafts. These run in a
    separate loop that does not call the controller. Calling it before every
    round costs a small model a few percent. The second loop ends when the
    controller selects length 0. The arguments are those of `Round.some_rounds`.
    """
    untraced = lambda only, chosen=None: lambda *arguments: _flat(*_round(
        self, *arguments, chosen, traced=False, only=only))

    def asked(carry):
      (before, *rest), *more = carry
      before = self._told(params, before)
      return ((before, *rest), *more), self.controller.choose(before)

    carry, chosen = asked(carry)
    (before, *rest), *more = carry
    own, rests = self.controller.rests(before, chosen)
    carry = (before.replace(controller=own), *rest), *more

    def rested(loop):
      carry, rests = loop
      return play(carry, untraced("rests")), rests - 1

    def drafted(loop):
      carry, chosen = loop
      return asked(play(carry, untraced("drafts", chosen)))

    wanted = lambda loop: is_going(loop[0]) & (loop[1] > 0)
    carry, _ = jax.lax.while_loop(wanted, rested, (carry, rests))
    return jax.lax.while_loop(wanted, drafted, (carry, chosen))[0]

  def one_round(self, params: chex.ArrayTree, state: DecodeState,
                uniforms: jax.Array, chosen: jax.Array | None = None, *,
                traced: bool, only: str | None = None
                ) -> tuple[DecodeState, tuple[Any, ...]]:
    """Runs a round; returns the state and `(stats,)` or `(stats, trace)`.

    Args:
      params: `{"target": ..., "drafter": ...}`.
      state: state before the round.
      uniforms: `[B, count]` uniforms of this round.
      chosen: `[]` int32, result of `Controller.choose`. Required only if `only`
        is "drafts".
      traced: True returns the trace.
      only: "rests" runs a round without a draft. "drafts" runs a round with a
        draft of the chosen length, which must be above 0. None calls the
        controller and runs a round of the length that it chooses.
    """
    if only is None:
      state = self._told(params, state)
      chosen = self.controller.choose(state)
      own, _ = self.controller.rests(state, chosen)
      state = state.replace(controller=own)
    attempt = _Attempt(self, params, state, uniforms, chosen, traced)
    full = "full" in interfaces.capabilities(self.drafter)
    drafts = attempt.drafts_whole if full else attempt.drafts_and_cuts
    carry = state, attempt.nothing_found()
    if only is not None:
      return attempt.rests(carry) if only == "rests" else drafts(carry)
    return rounds.once(chosen > 0, drafts, rounds.once(
        chosen == 0, attempt.rests, carry))

  def _told(self, params: chex.ArrayTree, state: DecodeState) -> DecodeState:
    """Stores the kind of every row's next round in the controller's state.

    `decoding.controller` defines kinds. If there is only one kind, the state
    does not change.
    """
    if not self.controller.first:
      return state
    kind = self.drafter.lacking(params, state).astype(jnp.int32)
    return state.replace(controller=state.controller.replace(kind=kind))

  def needed(self, draft: Draft, done: jax.Array, rung: int) -> jax.Array:
    """Returns `[]` int32, the index of the lowest rung that fits all drafts.

    A rung is an entry of `rungs`, a round with one draft length. Drafts that
    ended early fit a lower rung than the rung that drafted them.

    Args:
      draft: drafts of B rows.
      done: `[B]` bool, True for rows that are ignored.
      rung: index of the rung that drafted.
    """
    if not self.controller.cuts or (
        self.drafter.with_gamma(1) is None):
      # A drafter without `gamma` may have look-ahead positions, which would be
      # counted as padding. So its drafts are not shortened.
      return jnp.asarray(rung, jnp.int32)
    drafted = draft.drafted & ~done[:, None]
    last = jnp.max(jnp.where(drafted, jnp.arange(drafted.shape[1]), 0))
    lengths = jnp.array([one.drafter.num_nodes - 1 for one in self.rungs])
    return jnp.sum(last > lengths, dtype=jnp.int32)


_Carry = tuple[DecodeState, tuple[Any, ...]]


class _Attempt:
  """One round, with one of the draft lengths (rungs) of a `RoundsByLength`.

  The rung is chosen at run time. So the program contains all rungs, each in a
  `rounds.once`. A carry is `(state, found)`. `found` contains the statistics,
  and the trace if `traced` is True, padded to the size of the longest draft.
  """

  def __init__(self, by_length: RoundsByLength, params: chex.ArrayTree,
               state: DecodeState, uniforms: jax.Array,
               chosen: jax.Array | None, traced: bool):
    self._rounds, self._params, self._uniforms = by_length, params, uniforms
    self._chosen, self._kept = chosen, 1 + traced
    draft, drafter = jax.eval_shape(
        functools.partial(self._propose, -1), state)
    # `rounds.once` carries the drafter's state through a loop, so its shapes
    # must not change.
    name = interfaces.kind_of(by_length.drafter)
    checks.check_same(f"the state that {name}.propose returned", drafter,
                      state.drafter)
    self._draft_form = jax.eval_shape(self._packed, draft)
    _, self._stats_form, trace = jax.eval_shape(
        functools.partial(_judge, by_length.rungs[-1]), params, state, uniforms,
        draft, drafter)
    self._found_form = jax.eval_shape(
        self._as_longest, self._stats_form, trace)

  def nothing_found(self):
    """Returns the initial `found` of a carry."""
    return _blank(self._found_form)

  def rests(self, carry: _Carry) -> _Carry:
    """Runs a round without a draft. The controller's state does not change."""
    state, _ = carry
    return self._judged(0, state, *self._propose(0, state))

  def drafts_whole(self, carry: _Carry) -> _Carry:
    """Runs a round of the chosen length, for drafters without padding."""
    before, found = carry
    carry = self._caught_up(before), found
    for i in range(1, len(self._rounds.rungs)):
      carry = rounds.once(
          self._chosen == i, lambda carry, i=i: self._judged(
              i, carry[0], *self._propose(i, carry[0])), carry)
    return self._learned(before, *carry, self._chosen)

  def drafts_and_cuts(self, carry: _Carry) -> _Carry:
    """Drafts the chosen length and verifies the shortest length that fits."""
    before, found = carry
    state = self._caught_up(before)
    draft, drafter, size = self._drafted(state)
    carry = state.replace(drafter=drafter), found
    for i, one in enumerate(self._rounds.rungs):
      # The draft is cut inside the branch, so that a round writes only one of
      # the cut drafts.
      short = lambda n=one.drafter.num_nodes: self._unpacked(
          jax.tree.map(lambda x: x[:, :n], draft))
      carry = rounds.once(
          size == i, lambda carry, i=i, short=short: self._judged(
              i, carry[0], short(), carry[0].drafter), carry)
    return self._learned(before, *carry, size)

  def _drafted(self, state: DecodeState) -> tuple[Draft, Any, jax.Array]:
    """Drafts the chosen length.

    Returns:
      Three values: the draft, see `_packed`; the drafter's state; and the index
      of the lowest rung that fits the draft.
    """
    nodes = self._rounds.drafter.num_nodes

    def on(i, drafter):
      draft, drafter = self._propose(i, state.replace(drafter=drafter))
      size = self._rounds.needed(draft, state.done, i)
      return self._packed(_padded_draft(draft, nodes)), drafter, size

    carry = _blank(self._draft_form), state.drafter, jnp.zeros((), jnp.int32)
    for i in range(1, len(self._rounds.rungs)):
      carry = rounds.once(
          self._chosen == i, lambda carry, i=i: on(i, carry[1]), carry)
    return carry

  def _propose(self, i: int, state: DecodeState) -> tuple[Draft, Any]:
    return _propose(self._rounds.rungs[i], self._params, state, self._uniforms)

  def _judged(self, i: int, state: DecodeState, draft: Draft,
              drafter: chex.ArrayTree) -> _Carry:
    """Returns the carry after rung i has verified a draft."""
    state, stats, trace = _judge(
        self._rounds.rungs[i], self._params, state, self._uniforms, draft,
        drafter)
    return state, self._as_longest(stats, trace)

  def _as_longest(self, stats: RoundStats, trace: Trace) -> tuple[Any, ...]:
    return _padded(stats, trace, self._stats_form)[:self._kept]

  def _learned(self, before: DecodeState, state: DecodeState,
               found: tuple[Any, ...], size: jax.Array) -> _Carry:
    return state.replace(controller=self._rounds.controller.learned(
        before, found[0], state.lengths, self._chosen, size)), found

  def _caught_up(self, state: DecodeState) -> DecodeState:
    """Lets the drafter read the tokens that it missed; returns the state."""
    drafter = self._rounds.drafter
    return state.replace(drafter=drafter.catch_up(
        self._params, state, state.controller.known))

  def _packed(self, draft: Draft) -> Draft:
    """Returns a smaller form of a deterministic draft.

    Its `probs [B, N]` are the probabilities of the draft tokens. The complete
    rows have V numbers for each of N nodes. Passing these through the branches
    costs a few percent of a round in which an n-gram drafter finds no match.
    Other drafts are returned unchanged.
    """
    if not self._packs:
      return draft
    own = jnp.take_along_axis(  # padding may have an id out of range
        draft.probs, draft.tokens[..., None], axis=-1, mode="fill",
        fill_value=0)
    return draft.replace(probs=own[..., 0])

  def _unpacked(self, draft: Draft) -> Draft:
    """Inverts `_packed`."""
    if not self._packs:
      return draft
    ids = jnp.arange(self._rounds.rungs[0].target.vocab_size)
    chosen = ids == draft.tokens[..., None]
    return draft.replace(probs=jnp.where(chosen, draft.probs[..., None], 0))

  @property
  def _packs(self):
    # Unpacking makes every row one-hot. With debug, this would hide a drafter
    # that wrongly declares to be deterministic.
    return not self._rounds.rungs[0].debug and (
        "deterministic" in interfaces.capabilities(self._rounds.drafter))


# `_round` is compiled, because `decode_round` calls it outside of a loop. Its
# steps `_propose` and `_judge` have separate jits, so that `eval_shape` and the
# program share a trace.
_round = jax.jit(RoundsByLength.one_round, static_argnums=0,
                 static_argnames=("traced", "only"))
_propose = jax.jit(lambda one, *arguments: one.propose(*arguments),
                   static_argnums=0)
_judge = jax.jit(lambda one, *arguments: one.judge(*arguments),
                 static_argnums=0)


def build(one: Round, controller: Controller) -> RoundsByLength:
  """Returns the rounds with the draft lengths of a controller.

  Args:
    one: round whose drafter is bound to the target.
    controller: controller that selects the lengths.

  Raises:
    ValueError: the rule has a state, which depends on the draft length; the
      drafter does not support a length, shares the verifying pass, or has a
      model but no `catch_up`; or the controller has costs for two kinds of
      rounds and the drafter has one kind.
  """
  if one.rule.has_state:
    raise ValueError(
        f"{type(one.rule).__name__} has a state that is made for drafts of one "
        "length, and a controller varies the length; choose a rule without a "
        "state, such as Block")
  name = interfaces.kind_of(one.drafter)
  if interfaces.has_model(one.drafter) and (
      "rests" not in one.drafter.provides):
    raise ValueError(
        f"{name} has a model with a cache, and does not provide `rests`: it "
        "may not read the tokens of rounds without drafts; leave the "
        "controller out, or implement `catch_up` (specjax.interfaces.Drafter)")
  if "shares_pass" in one.drafter.provides:
    raise ValueError(
        f"{name} begins the verifying pass, and a controller may verify only "
        "a part of a draft; give the network shares_pass=False")
  if controller.first and "tells" not in one.drafter.provides:
    raise ValueError(
        "the controller has `first`, the seconds of rounds with only a first "
        f"drafter, and {name} cannot tell which rounds these are; leave "
        "`first` out")
  rounds.check_slack(
      one.drafter, one.drafter.num_nodes + rounds.CATCH_UP)
  rungs = [dataclasses.replace(one, drafter=Empty(
      drafter=one.drafter, vocab_size=one.target.vocab_size))]
  for length in controller.lengths[1:]:
    drafter = _of_length(one, length)
    interfaces.check_pair(one.rule, drafter)
    rungs.append(dataclasses.replace(one, drafter=drafter))
  return RoundsByLength(tuple(rungs), controller)


def _of_length(one: Round, length: int) -> Drafter:
  """Returns the drafter with drafts of `length` tokens."""
  drafter, name = one.drafter, interfaces.kind_of(one.drafter)
  if drafter.num_nodes == length + 1:
    return drafter
  drafter = drafter.with_gamma(length)
  if drafter is None:
    raise ValueError(
        f"{name} drafts {one.drafter.num_nodes - 1} tokens and has no field "
        f"`gamma`, and the controller's lengths contain {length}; use "
        f"lengths=(0, {one.drafter.num_nodes - 1})")
  drafter = interfaces.bind(drafter, one.target, one.transform)
  if drafter.num_nodes != length + 1:
    raise ValueError(
        f"{name} with gamma = {length} has drafts of {drafter.num_nodes} "
        f"nodes instead of {length + 1}; leave {length} out of the lengths")
  return drafter


def _flat(state: DecodeState, found: tuple[Any, ...]) -> tuple[Any, ...]:
  return state, *found


def _blank(shapes: Any) -> Any:
  return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def _padded(stats: RoundStats, trace: Trace, like: RoundStats
            ) -> tuple[RoundStats, Trace]:
  """Pads stats and trace to the size of the longest draft.

  Args:
    stats: statistics of a round.
    trace: trace of the round.
    like: shapes of the statistics of the longest draft.
  """
  nodes = like.survival.shape[2]
  # The keys of `checks` are error messages, some of which contain the draft
  # size. All rungs have the same checks in the same order, so the keys are
  # replaced by those of the longest draft.
  checks = stats.checks and dict(zip(like.checks, stats.checks.values()))
  return stats.replace(
      survival=_longer(stats.survival, nodes, axis=2), checks=checks), Trace(
          draft=_padded_draft(trace.draft, nodes),
          target_probs=_longer(trace.target_probs, nodes),
          verdict=trace.verdict.replace(
              path=_longer(trace.verdict.path, nodes)))


def _longer(x: jax.Array, size: int, axis: int = 1) -> jax.Array:
  """Appends zeros to `x`, up to `size` along an axis."""
  pads = [(0, 0)] * x.ndim
  pads[axis] = 0, size - x.shape[axis]
  return jnp.pad(x, pads)


def _padded_draft(draft: Draft, nodes: int) -> Draft:
  """Appends padding up to `nodes` nodes, as a chain below the last node."""
  order = jnp.arange(-1, nodes - 1, dtype=draft.parents.dtype)
  count = draft.parents.shape[1]
  parents = _longer(draft.parents, nodes)
  return Draft(tokens=_longer(draft.tokens, nodes),
               parents=jnp.where(jnp.arange(nodes) < count, parents, order),
               probs=_longer(draft.probs, nodes))
