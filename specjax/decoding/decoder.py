"""`Decoder`: prompts, limits and keys in, tokens out."""

from collections.abc import Sequence
import dataclasses
from typing import Any
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from specjax import interfaces
from specjax.caches import dense
from specjax.caches import paged
from specjax.decoding import constraining as constraints_lib
from specjax.decoding import growth as capacity_lib
from specjax.decoding import inputs
from specjax.decoding import placement as sharding
from specjax.decoding import rounds as rounds_lib
from specjax.decoding import rounds_by_length
from specjax.decoding.controller import Controller
from specjax.interfaces import checks
from specjax.interfaces import Drafter
from specjax.interfaces import Model
from specjax.interfaces import Verifier
from specjax.sampling import LogitsTransform
from specjax.types import DecodeState
from specjax.types import Prompt
from specjax.types import RoundStats
from specjax.types import Trace
from specjax.utils import fields
from specjax.utils import processes


class Generation(NamedTuple):
  """Result of `Decoder.generate`.

  Attributes:
    tokens: list of int32 arrays, prompt and continuation of each row.
    stats: `RoundStats` summed over the rounds; `active` counts them.
  """

  tokens: list[np.ndarray]
  stats: RoundStats


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder:
  """A target, a drafter and a verifier as one compiled program.

  A decoder has only static configuration and hashes by value. Equal decoders
  share their compiled code, as do decoders that differ only in temperature or
  eos. Parameters and state are arguments: `params = {"target": ...,
  "drafter": ...}`.

  Attributes:
    target: target model; the output follows its distribution.
    drafter: method that proposes tokens, with its draft model if it has one.
    verifier: verification rule that decides which tokens are accepted.
    transform: transform from logits to probabilities, shared with a drafter
      that has none. Its temperature is the default of `prefill`.
    observers: rules that are evaluated on the same drafts and reported in
      `RoundStats`. They have no effect on the output.
    eos: token id that ends a row, or several, or None. It is the default of
      `prefill`.
    controller: chooses the draft length before every round, see
      `decoding.controller`. None: the length of the drafter. With a controller,
      the sequence of a row at a temperature above 0 depends on the other rows
      of the batch; its distribution does not.
    debug: True to check the values of every round: laws and the drafter's
      distributions sum to 1, declared chains are chains, and commits fit the
      capacity. It costs time. A `ValueError` names the component. A single
      `decode_round` reports in `RoundStats.checks` instead.
    parts: not an argument: the `rounds.Round` with the drafter bound, or with a
      controller a `RoundsByLength`.

  Raises:
    ValueError: the drafter does not declare a capability that the verifier
      requires, or does not fit the target; a banned id or `eos` is out of
      range; the transform's temperature is None; the controller does not fit
      the drafter.

  Example:
    >>> import jax
    >>> import specjax as sj
    >>> model = sj.testing.MarkovModel(vocab_size=4)
    >>> table = model.init(jax.random.key(0))
    >>> decoder = sj.Decoder(
    ...     target=model, verifier=sj.verifiers.Block(),
    ...     drafter=sj.drafters.DraftModel(model=model, gamma=3),
    ...     transform=sj.LogitsTransform(temperature=0))
    >>> generation = decoder.generate(
    ...     {"target": table, "drafter": table}, [[1, 2], [3]],
    ...     jax.random.key(1), max_new_tokens=8)
    >>> [len(row) for row in generation.tokens]
    [10, 9]
    >>> generation.stats.active.tolist()  # rounds: all drafts were accepted
    [2, 2]
    >>> float(generation.stats.block_efficiency)  # tokens per target call
    4.0
    >>> float(generation.stats.acceptance_rate)
    1.0
  """

  target: Model
  drafter: Drafter
  verifier: Verifier
  transform: LogitsTransform = LogitsTransform()
  observers: tuple[Verifier, ...] = ()
  eos: int | tuple[int, ...] | None = None
  debug: bool = False
  controller: Controller | None = None

  def __post_init__(self):
    if not isinstance(self.observers, tuple | list):
      raise ValueError(f"observers is {_described(self.observers)}; give a "
                       "tuple of verifiers, such as (Token(),)")
    object.__setattr__(self, "observers", tuple(self.observers))
    interfaces.check_model("target", self.target)
    _check_kind("transform", self.transform, LogitsTransform)
    if self.controller is not None:
      _check_kind("controller", self.controller, Controller)
    self._check_target()
    ids = inputs.eos_ids("eos", self.eos, self.target.vocab_size)
    object.__setattr__(self, "eos", None if self.eos is None else (
        ids if np.ndim(self.eos) else ids[0]))
    shared = dataclasses.replace(
        self.transform, temperature=None, constraints=constraints_lib.after_ban(
            self.transform.constraints, self.transform.banned))
    drafter = interfaces.bind(self.drafter, self.target, shared)
    for rule in (self.verifier, *self.observers):
      interfaces.check_pair(rule, drafter)
    # `parts` is not a field, so that decoders with equal arguments are equal.
    one = rounds_lib.Round(
        target=self.target, drafter=drafter, rule=self.verifier,
        transform=shared, observers=self.observers, debug=self.debug)
    object.__setattr__(self, "parts", one if self.controller is None else
                       rounds_by_length.build(one, self.controller))

  def _check_target(self):
    vocab_size = self.target.vocab_size
    if len(set(self.transform.banned)) >= vocab_size:
      raise ValueError(f"all {vocab_size} tokens of the vocabulary are banned; "
                       "leave at least one")
    for token in self.transform.banned:
      if token >= vocab_size:
        raise ValueError(f"banned token {token} is out of range; the target's "
                         f"vocabulary has {vocab_size} tokens")
    if self.transform.temperature is None:
      raise ValueError("the decoder's transform has temperature None; give the "
                       "default temperature of the rows")
    constraints_lib.check_target(
        self.transform.constraints, vocab_size, self.transform.banned)

  @property
  def num_nodes(self) -> int:
    """Number of nodes N of a draft; its root, a committed token, is included.
    """
    return self.parts.drafter.num_nodes

  @property
  def context_length(self) -> int:
    """Longest sequence in tokens that both models can read."""
    return min(self.target.context_length,
               self.parts.drafter.context_length)

  @property
  def context_owner(self) -> str:
    """The model with the shorter context: "target" or "drafter"."""
    return ("target" if self.context_length == self.target.context_length
            else "drafter")

  @property
  def changes_law(self) -> tuple[str, ...]:
    """Class names of the components that change the output distribution.

    They are the target if `changes_law` is True, as for `Contrastive`, and
    every constraint. The output then follows autoregressive decoding with these
    components, not that of the plain model.
    """
    parts = [self.target] if self.target.changes_law else []
    return tuple(type(part).__name__
                 for part in (*parts, *self.transform.constraints))

  def prefill(self, params: chex.ArrayTree, prompts: Sequence[Sequence[int]],
              key: jax.Array, *, limits: Any = None, request_ids: Any = None,
              capacity: int = 0, temperature: Any = None, eos: Any = None,
              context: chex.ArrayTree | None = None, grows: bool = False,
              placement: sharding.Placement | None = None) -> DecodeState:
    """Reads the prompts and returns the state of the loop.

    Args:
      params: `{"target": ..., "drafter": ...}`.
      prompts: B sequences of token ids, none empty; lengths may differ.
      key: threefry PRNG key of `jax.random.key`.
      limits: `[B]` or one number, the length of prompt and output together at
        which a row is done. Default: the context length.
      request_ids: `[B]` whole numbers from 0 to 2^32 - 1. The random numbers of
        a row depend only on the key and its request id. Default: 0..B-1.
      capacity: minimum number of slots per row, rounded up to a multiple of
        128. Default: the slots that the limits and a draft need. More slots
        take memory, and time in drafters that scan them (`NGram`). On a CPU,
        the cost of attention follows the used slots.
      temperature: one number or `[B]`, at least 0. Default: the transform's.
      eos: token ids for all rows, or B lists of ids, such as `[[1, 2], []]`.
        Default: the decoder's.
      context: tree of arrays `[B, ...]` that the drafter may read, see
        `Prompt.context`.
      grows: True to begin with few slots. `decode_until` adds slots as rows
        grow. Any other loop must call `grow` in time, or rows overwrite
        themselves.
      placement: placement of the state on a mesh. The parameters must be there
        already (`Placement.put`).

    Raises:
      ValueError: an argument is out of range or has the wrong shape; a prompt
        is empty or longer than its limit; a limit exceeds the context length; a
        constraint cannot be fulfilled; with `grows`, a component cannot grow;
        the mesh does not divide the rows or a cache.
    """
    tokens, lengths = inputs.prompts(prompts, self.target.vocab_size)
    limits = inputs.limits(limits, lengths, self.context_length,
                           self.context_owner)
    keys = inputs.row_keys(key, request_ids, len(lengths))
    context = inputs.context(context, len(lengths))
    inputs.parameters(params)
    needed = (capacity_lib.first(self.parts, lengths, limits, self._whole)
              if grows else int(limits.max()) + self.num_nodes)
    capacity = capacity_lib.rounded(max(needed, tokens.shape[1], capacity))
    eos = inputs.eos_rows(
        eos, self.eos, len(lengths), self.target.vocab_size)
    constraints_lib.check_rows(
        self.transform.constraints, limits - lengths, eos)
    prompt = Prompt(tokens=jnp.asarray(tokens), lengths=jnp.asarray(lengths),
                    capacity=capacity, context=context)
    arguments = (
        self.parts, params, prompt, jnp.asarray(limits), keys,
        jnp.asarray(inputs.temperatures(
            temperature, self.transform.temperature, len(lengths))),
        jnp.asarray(eos))
    try:
      if placement is not None:
        return placement.start(self, *arguments)
      return rounds_lib.start(*arguments)
    except Exception:
      # The most frequent cause of an error is parameters of another model.
      inputs.explain_parameters(params, {
          "target": self.target,
          "drafter": interfaces.model_of(self.drafter)})
      raise

  def start(self, params: chex.ArrayTree, prompt: Prompt, limits: jax.Array,
            keys: jax.Array, temperature: jax.Array | None = None,
            eos: jax.Array | None = None) -> DecodeState:
    """Returns the state after the prompts, without the checks of `prefill`.

    This method is pure and works inside a compiled program, so a drafter can be
    a decoder itself. The decoding loops donate the state, which contains the
    arrays passed here. So outside of a program, pass copies of arrays that are
    needed later.

    Args:
      params: `{"target": ..., "drafter": ...}`.
      prompt: B rows of `prefill.padded_length` columns. Its capacity must fit
        every limit and the nodes of a draft.
      limits: `[B]` int32.
      keys: `[B]` PRNG keys.
      temperature: `[B]` float32. Default: the transform's.
      eos: `[B, E]` int32, padded with -1. Default: the decoder's.
    """
    rows = prompt.lengths.shape[0]
    if temperature is None:
      temperature = jnp.asarray(inputs.temperatures(
          None, self.transform.temperature, rows))
    if eos is None:
      eos = jnp.asarray(inputs.eos_rows(
          None, self.eos, rows, self.target.vocab_size))
    return self.parts.start(params, prompt, limits, keys, temperature, eos)

  def insert(self, state: DecodeState, slot: int | Sequence[int],
             fresh: DecodeState) -> DecodeState:
    """Replaces rows of a batch by the rows of a fresh state.

    A row that is done can give its slot to a new prompt. The other rows are
    unaffected.

    Args:
      state: B rows; it is donated.
      slot: index of the row to replace, or as many indices as `fresh` has rows.
      fresh: state from `prefill` with the same capacity and number of eos ids.
        Its `request_ids` must differ from those of all other rows, or rows draw
        the same numbers.

    Raises:
      ValueError: a slot is out of range; the states differ in structure, shapes
        or dtypes; the state has the pages of a `Pool`.
    """
    for one in (state, fresh):
      self._check_state(one)
    if state.target_cache.pooled:
      raise ValueError("a Pool gives out the pages of the state; use "
                       "Pool.insert, which gives the new row its own")
    slots = np.atleast_1d(np.asarray(slot))
    rows, new = len(state.lengths), len(fresh.lengths)
    if slots.shape != (new,) or len(set(slots.tolist())) != new:
      raise ValueError(f"slot is {slot} and the fresh state has {new} rows; "
                       "give as many different slots as there are rows")
    if not ((0 <= slots) & (slots < rows)).all():
      raise ValueError(f"slot is {slot}; the state has rows 0 to {rows - 1}")
    row = lambda state: jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state)
    fresh = dense.divided_as(state, fresh)
    checks.check_same("a row of the fresh state", row(fresh), row(state))
    return rounds_lib.insert(state, jnp.asarray(slots), fresh)

  def grow(self, params: chex.ArrayTree, state: DecodeState, capacity: int
           ) -> DecodeState:
    """Returns the state with more slots in every row.

    Decoding continues as if the slots had been there from the start.

    Args:
      params: `{"target": ..., "drafter": ...}`.
      state: state of the loop; it is donated.
      capacity: minimum number of slots, as in `prefill`.

    Raises:
      ValueError: the state already has more slots, or a component cannot grow.
    """
    self._check_state(state)
    return capacity_lib.grow(
        self.parts, params, state, capacity_lib.rounded(capacity))

  @property
  def _whole(self) -> int:
    """Slots for the longest sequence of the models."""
    return capacity_lib.rounded(self.context_length + self.num_nodes)

  def _check_state(self, state: DecodeState) -> None:
    """Raises `ValueError` if a state is deleted or of another drafter."""
    if not isinstance(state, DecodeState):
      advice = ("; decode returns (state, stats)"
                if isinstance(state, tuple) else "")
      raise ValueError(f"state is a {type(state).__name__}; give the "
                       f"DecodeState of prefill or of the last call{advice}")
    drafter = type(self.parts.drafter).__name__
    if state.made_by not in (None, drafter):
      raise ValueError(
          f"the state was made for the drafter {state.made_by} and this "
          f"decoder's is {drafter}; prefill with this decoder")
    for x in jax.tree.leaves(state):
      if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and (
          x.is_deleted()):
        raise ValueError(
            "the state was donated to an earlier call and is gone; use the "
            "state that the call returned, or prefill again")

  def decode_round(self, params: chex.ArrayTree, state: DecodeState
                   ) -> tuple[DecodeState, RoundStats]:
    """Runs one round; rows that are done do not change.

    A row with non-finite numbers stops without an error. Call
    `raise_if_not_finite` with the stats after this and every other decoding
    method except `generate`.
    """
    state, stats, _ = self.decode_round_traced(params, state)
    return state, stats

  def decode_round_traced(self, params: chex.ArrayTree, state: DecodeState
                          ) -> tuple[DecodeState, RoundStats, Trace]:
    """Runs `decode_round` and also returns the trace of the round.

    The trace has the drafts, the target's distributions and the verdicts.
    """
    self._check_state(state)
    return self.parts(params, state, self.parts.draw_uniforms(state, 1)[0])

  def decode(self, params: chex.ArrayTree, state: DecodeState, rounds: int
             ) -> tuple[DecodeState, RoundStats]:
    """Runs a fixed number of rounds, compiled.

    Args:
      params: `{"target": ..., "drafter": ...}`.
      state: state of the loop; it is donated and must not be used again.
      rounds: number of rounds.

    Returns:
      `(state, stats)`; the fields of the stats are stacked, `[rounds, ...]`.

    Raises:
      ValueError: a row has too few pages of a `Pool`; with `debug=True`, a
        component returned wrong values.
    """
    fields.check_at_least("rounds", rounds, 0)
    self._check_state(state)
    paged.check_pages(state, rounds * self.num_nodes)
    state, stats = rounds_lib.scan(self.parts, params, state, rounds=rounds)
    checks.raise_if_bad(stats.checks)
    return state, stats

  def decode_traced(self, params: chex.ArrayTree, state: DecodeState,
                    rounds: int) -> tuple[DecodeState, RoundStats, Trace]:
    """Runs `decode` and also returns the traces: `(state, stats, traces)`.

    Traces are stacked like the stats. They have rounds * B * 2 * N * V floats,
    for B rows, N nodes of a draft and a vocabulary of V tokens.
    """
    fields.check_at_least("rounds", rounds, 0)
    self._check_state(state)
    paged.check_pages(state, rounds * self.num_nodes)
    state, (stats, traces) = rounds_lib.scan(
        self.parts, params, state, rounds=rounds, traced=True)
    checks.raise_if_bad(stats.checks)
    return state, stats, traces

  def decode_until(self, params: chex.ArrayTree, state: DecodeState
                   ) -> tuple[DecodeState, RoundStats]:
    """Runs until every row is done, compiled.

    When a row comes near the end of its slots, the slots of all rows are
    doubled. Each capacity is a compiled program.

    Args:
      params: `{"target": ..., "drafter": ...}`.
      state: state of the loop; it is donated and must not be used again.

    Returns:
      `(state, stats)` with sums over the rounds. `active` counts the rounds of
      a row; `finite`, `draft_finite` and `law_finite` are True if all rounds
      were.

    Raises:
      ValueError: with `debug=True`, a component returned wrong values.
    """
    self._check_state(state)
    if state.target_cache.pooled:
      raise ValueError(
          "a Pool gives out the pages of the state, and rows would exceed "
          "them here; call Pool.extend and decode in turn")
    state, stats, ended = rounds_lib.until(self.parts, params, state)
    if not ended:
      state, stats = capacity_lib.continued(
          self.parts, params, state, stats, self._whole)
    checks.raise_if_bad(stats.checks)
    return state, stats

  def generate(self, params: chex.ArrayTree, prompts: Sequence[Sequence[int]],
               key: jax.Array, *, max_new_tokens: int, request_ids: Any = None,
               temperature: Any = None, eos: Any = None,
               context: chex.ArrayTree | None = None, grows: bool | None = None,
               placement: sharding.Placement | None = None) -> Generation:
    """Continues every prompt by at most `max_new_tokens` tokens.

    Args:
      params: `{"target": ..., "drafter": ...}`.
      prompts: B sequences of token ids, none empty; lengths may differ.
      key: threefry PRNG key.
      max_new_tokens: maximum number of new tokens per row, at least 0.
      request_ids: `[B]` seeds of the rows. Default: 0..B-1.
      temperature: one number or `[B]`. Default: the transform's.
      eos: token ids for all rows, or one list per row. Default: the decoder's.
      context: arrays per row that the drafter may read.
      grows: True to add slots as rows grow. Default: True, except on a CPU,
        where attention follows the used slots, and if a component cannot grow.
      placement: placement on a mesh. Every process gets all sequences.

    Raises:
      ValueError: an argument is invalid, see `prefill`.
      FloatingPointError: the logits of a model were not finite.
    """
    fields.check_at_least("max_new_tokens", max_new_tokens, 0)
    prompts = inputs.as_rows(prompts)
    limits = [row.size + int(max_new_tokens) for row in prompts]
    if grows is None:
      grows = capacity_lib.grows(self.parts)
    state = self.prefill(
        params, prompts, key, limits=limits, request_ids=request_ids,
        temperature=temperature, eos=eos, context=context, grows=grows,
        placement=placement)
    state, stats = self.decode_until(params, state)
    tokens, lengths, stats = processes.gathered(
        (state.tokens, state.lengths, stats))
    raise_if_not_finite(stats)
    return Generation(
        [row[:n] for row, n in zip(np.asarray(tokens), np.asarray(lengths))],
        stats)


def _described(x: Any) -> str:
  return (f"the class {x.__name__}" if isinstance(x, type) else
          f"a {type(x).__name__}")


def _check_kind(name: str, value: Any, kind: type) -> None:
  if not isinstance(value, kind):
    raise ValueError(
        f"{name} is {_described(value)}; give a {kind.__name__}(...)")


# Fields of `RoundStats`, and the numbers that are not finite if one is False.
FINITE = {"finite": "target's logits",
          "draft_finite": "drafter's probabilities",
          "law_finite": "verifier's laws"}


def raise_if_not_finite(stats: RoundStats) -> None:
  """Raises an error that names the component and row of non-finite numbers.

  The row stopped before the round with these numbers could emit a token.

  Raises:
    FloatingPointError: logits, drafter probabilities or laws were not finite.
  """
  for field, part in FINITE.items():
    ok = np.asarray(processes.gathered(getattr(stats, field)))
    rows = np.flatnonzero(~ok.reshape(-1, ok.shape[-1]).all(0))
    if rows.size:
      advice = ("certify the rule, and look where it divides by 0"
                if field == "law_finite" else
                "check the model's weights and its dtype, and whether the "
                "transform's constraints left a token")
      raise FloatingPointError(
          f"the {part} of row {rows[0]} are not finite; decoding of that row "
          f"stopped: {advice}")
