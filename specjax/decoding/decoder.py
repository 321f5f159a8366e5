"""The face of the loop: prompts, limits and keys in, tokens out."""

from collections.abc import Sequence
import dataclasses
from typing import Any
from typing import NamedTuple

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
  """What `generate` returns.

  Attributes:
    tokens: a list of int32 arrays, each row's prompt and continuation.
    stats: `RoundStats` summed over the rounds; `active` counts them.
  """

  tokens: list[np.ndarray]
  stats: RoundStats


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder:
  """A target, a drafter and a verifier as one compiled program.

  It holds static parts only and hashes by value: equal decoders share their
  compiled code, and so do decoders that differ in temperature or eos alone.
  Weights and state are arguments: `params = {"target": ..., "drafter": ...}`.

  Attributes:
    target: the `Model` whose law the output follows.
    drafter: the `Drafter`.
    verifier: the `Verifier` whose verdicts are committed.
    transform: from logits to the law that is sampled from; shared with the
      drafter unless that has its own. Its temperature is that of every row
      unless `prefill` is given others.
    observers: verifiers whose laws are evaluated on the same drafts and
      reported in `RoundStats`, never acted on.
    eos: the token id that ends a row, or several of them, or None; for every
      row unless `prefill` is given others.
    controller: chooses the length of the drafts before every round, down to
      none, see `decoding.controller`; None: it is the drafter's. With one, the
      text of a row at a temperature above 0 depends on the rows beside it; its
      law does not.
    debug: whether the numbers of every round are checked: that laws sum to 1,
      that the rows of q are laws, that a chain is one, that commits stay
      within the capacity. It costs time; a `ValueError` names the part. (A
      single `decode_round` reports in `RoundStats.checks`.)
    parts: no argument, but what is made of them: the `rounds.Round` that is
      repeated, with the drafter bound, or a `RoundsByLength` of rounds where
      there is a controller.

  Raises:
    ValueError: the drafter does not declare what the verifier requires, or does
      not fit the target; a banned id or `eos` is out of range; the transform's
      temperature is None; the controller does not fit the drafter.

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
    named = lambda x: (f"the class {x.__name__}" if isinstance(x, type) else
                       f"a {type(x).__name__}")
    if not isinstance(self.observers, tuple | list):
      raise ValueError(f"observers is {named(self.observers)}; give a "
                       "tuple of verifiers, such as (Token(),)")
    object.__setattr__(self, "observers", tuple(self.observers))
    interfaces.check_model("target", self.target)
    for name, kind in (("transform", LogitsTransform),
                       ("controller", Controller)):
      value = getattr(self, name)
      if not isinstance(value, kind) and (
          name == "transform" or value is not None):
        raise ValueError(
            f"{name} is {named(value)}; give a {kind.__name__}(...)")
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
    # No field: two decoders are equal if what they were made of is.
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
                       "temperature of rows that name none")
    constraints_lib.check_target(
        self.transform.constraints, vocab_size, self.transform.banned)

  @property
  def num_nodes(self) -> int:
    """N, the nodes of a draft, the root included."""
    return self.parts.drafter.num_nodes

  @property
  def context_length(self) -> int:
    """Longest sequence that both models were made for, in tokens."""
    return min(self.target.context_length,
               self.parts.drafter.context_length)

  @property
  def context_owner(self) -> str:
    """The model that `context_length` is of: "target" or "drafter"."""
    return ("target" if self.context_length == self.target.context_length
            else "drafter")

  @property
  def changes_law(self) -> tuple[str, ...]:
    """Class names of the parts that change the law of the output.

    They are the target if it says `changes_law = True`, as `Contrastive` does,
    and every constraint. The output follows autoregressive decoding with these
    parts, and not the plain model.
    """
    parts = [self.target] if self.target.changes_law else []
    return tuple(type(part).__name__
                 for part in (*parts, *self.transform.constraints))

  def prefill(self, params: Any, prompts: Sequence[Sequence[int]],
              key: jax.Array, *, limits: Any = None, request_ids: Any = None,
              capacity: int = 0, temperature: Any = None, eos: Any = None,
              context: Any = None, grows: bool = False,
              placement: sharding.Placement | None = None) -> DecodeState:
    """Reads the prompts and prepares the loop.

    Args:
      params: `{"target": ..., "drafter": ...}`.
      prompts: B sequences of token ids, each of at least one token; lengths
        may differ.
      key: a PRNG key of `jax.random.key`, threefry.
      limits: `[B]` or one number, the length of prompt and output together at
        which a row is done; default: the context length.
      request_ids: `[B]` whole numbers from 0 to 2^32 - 1; a row's randomness is
        a function of (key, its request id) alone. Default: 0..B-1.
      capacity: least number of slots of a row, rounded up to a multiple of
        128; default: what the limits and a draft need. More slots take memory,
        and time in drafters that scan them (`NGram`); on a CPU attention costs
        only those in use.
      temperature: one number for all rows, or `[B]`; at least 0. Default: the
        transform's.
      eos: a token id, or several in one flat sequence, for all rows; or B
        lists of ids, one for each row, such as `[[1, 2], []]`. Default: the
        decoder's.
      context: a tree of arrays `[B, ...]` that the drafter may read, as
        `Prompt.context` and `DecodeState.context`.
      grows: whether to begin with few slots. `decode_until` adds more as rows
        grow; for any other loop call `grow` in time, or rows overwrite
        themselves.
      placement: where the state is to lie on a mesh; the parameters lie there
        already (`Placement.put`).

    Returns:
      The state of the loop.

    Raises:
      ValueError: a prompt is empty, or longer than its limit; a limit exceeds
        the context length; a token id, a request id or a temperature is out of
        range; a leaf of the context has another number of rows; `params` lack
        the target's; a constraint cannot be fulfilled; a part cannot grow that
        should; a mesh does not divide the rows or a cache.
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
      # Most often because of parameters that are not the model's.
      inputs.explain_parameters(params, {
          "target": self.target,
          "drafter": getattr(self.drafter, "model", None)})
      raise

  def start(self, params: Any, prompt: Prompt, limits: jax.Array,
            keys: jax.Array, temperature: jax.Array | None = None,
            eos: jax.Array | None = None) -> DecodeState:
    """`prefill` without its checks: pure, for use inside a program.

    A drafter can so be a decoder itself. Outside of a program, give copies of
    arrays that are needed later: the loops donate the state.

    Args:
      params: `{"target": ..., "drafter": ...}`.
      prompt: B rows, padded to `prefill.padded_length` columns; its capacity
        must hold every limit and the nodes of a draft.
      limits: `[B]` int32.
      keys: `[B]` PRNG keys.
      temperature: `[B]` float32; default: the transform's.
      eos: `[B, E]` int32, filled up with -1; default: the decoder's.
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
    """Puts the rows of another state of this decoder in the place of some.

    So a batch stays full: a row that is done gives its slot to a new prompt,
    and the other rows do not notice.

    Args:
      state: B rows; it is donated.
      slot: the row to replace, or as many rows as `fresh` has.
      fresh: of `prefill` with the same capacity, and as many eos ids. Give
        it `request_ids` that no other row had, or the rows would draw the same
        numbers.

    Raises:
      ValueError: a slot is out of range, the two states are of different
        structure, shapes or dtypes, or the pages are those of a `Pool`.
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

  def grow(self, params: Any, state: DecodeState, capacity: int
           ) -> DecodeState:
    """The same state with more slots in every row.

    Decoding goes on as if they had been there from the start.

    Args:
      params: `{"target": ..., "drafter": ...}`.
      state: it is donated.
      capacity: least number of slots, as in `prefill`.

    Raises:
      ValueError: the state has more slots already, or a part cannot grow.
    """
    self._check_state(state)
    return capacity_lib.grow(
        self.parts, params, state, capacity_lib.rounded(capacity))

  @property
  def _whole(self) -> int:
    """Slots for the longest text, the most that are ever needed."""
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

  def decode_round(self, params: Any, state: DecodeState
                   ) -> tuple[DecodeState, RoundStats]:
    """One round for every row; rows that are done stay as they are.

    A row whose numbers broke down has stopped, and is not reported: call
    `raise_if_not_finite` with the stats. So it is with all that decodes and is
    not `generate`.
    """
    state, stats, _ = self.decode_round_traced(params, state)
    return state, stats

  def decode_round_traced(self, params: Any, state: DecodeState
                   ) -> tuple[DecodeState, RoundStats, Trace]:
    """`decode_round`, and what the verifier saw and decided."""
    self._check_state(state)
    return self.parts(params, state, self.parts.draw_uniforms(state, 1)[0])

  def decode(self, params: Any, state: DecodeState, rounds: int
             ) -> tuple[DecodeState, RoundStats]:
    """Runs a fixed number of rounds, compiled.

    Args:
      params: `{"target": ..., "drafter": ...}`.
      state: it is donated and must not be used again.
      rounds: how many.

    Returns:
      `(state, stats)` with every field of the stats stacked, `[rounds, ...]`.

    Raises:
      ValueError: a row has too few pages of a `Pool`; with `debug=True`, a part
        returned bad numbers.
    """
    fields.check_at_least("rounds", rounds, 0)
    self._check_state(state)
    paged.check_pages(state, rounds * self.num_nodes)
    state, stats = rounds_lib.scan(self.parts, params, state, rounds=rounds)
    checks.raise_if_bad(stats.checks)
    return state, stats

  def decode_traced(self, params: Any, state: DecodeState, rounds: int
                    ) -> tuple[DecodeState, RoundStats, Trace]:
    """`decode` for records: `(state, stats, traces)`.

    Arguments and errors are its. The traces are stacked like the stats; they
    take rounds * B * 2 * N * V floats.
    """
    fields.check_at_least("rounds", rounds, 0)
    self._check_state(state)
    paged.check_pages(state, rounds * self.num_nodes)
    state, (stats, traces) = rounds_lib.scan(
        self.parts, params, state, rounds=rounds, traced=True)
    checks.raise_if_bad(stats.checks)
    return state, stats, traces

  def decode_until(self, params: Any, state: DecodeState
                   ) -> tuple[DecodeState, RoundStats]:
    """Runs until every row is done, compiled.

    Whenever a row comes near the end of its slots, all rows get twice as many:
    one program for every capacity.

    Args:
      params: `{"target": ..., "drafter": ...}`.
      state: it is donated and must not be used again.

    Returns:
      `(state, stats)` with the stats summed over the rounds: `active` counts
      a row's rounds; `finite`, `draft_finite` and `law_finite` say whether all
      were.

    Raises:
      ValueError: with `debug=True`, a part returned bad numbers.
    """
    self._check_state(state)
    if state.target_cache.pooled:
      raise ValueError(
          "a Pool gives out the pages of the state, and rows would outgrow "
          "them here; call Pool.extend and decode by turns")
    state, stats, ended = rounds_lib.until(self.parts, params, state)
    if not ended:
      state, stats = capacity_lib.continued(
          self.parts, params, state, stats, self._whole)
    checks.raise_if_bad(stats.checks)
    return state, stats

  def generate(self, params: Any, prompts: Sequence[Sequence[int]],
               key: jax.Array, *, max_new_tokens: int, request_ids: Any = None,
               temperature: Any = None, eos: Any = None, context: Any = None,
               grows: bool | None = None,
               placement: sharding.Placement | None = None) -> Generation:
    """Continues every prompt by at most `max_new_tokens` tokens.

    Args:
      params: `{"target": ..., "drafter": ...}`.
      prompts: B sequences of token ids, of any lengths, none empty.
      key: a threefry PRNG key.
      max_new_tokens: of every row, at least 0.
      request_ids: `[B]`, numbers that seed the rows; default: 0 to B - 1.
      temperature: a number or `[B]`; default: the transform's.
      eos: one token id or several for all rows, or a list of them for each
        row; default: the decoder's.
      context: per-row arrays for a drafter that reads them.
      grows: whether slots are added as texts grow; default: True, except on a
        CPU, whose attention costs what is used and not what is allocated, and
        where a part cannot grow.
      placement: where everything lives on a mesh. In several processes each
        gets all texts. `prefill` says more of every argument.

    Raises:
      ValueError: bad arguments, as in `prefill`.
      FloatingPointError: a model's logits were not finite.
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


# Fields of `RoundStats`, and what was not finite where they are False.
FINITE = {"finite": "target's logits",
          "draft_finite": "drafter's probabilities",
          "law_finite": "verifier's laws"}


def raise_if_not_finite(stats: RoundStats) -> None:
  """Raises where numbers broke down, naming the part and the row.

  Such a row has stopped by itself and emitted nothing from bad numbers.

  Raises:
    FloatingPointError: some logits, or a verifier's law, were not finite.
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
