"""`Decoder`, the public interface of the decoding loop."""

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
from specjax.utils import fields
from specjax.utils import processes


class Generation(NamedTuple):
  """Result of `Decoder.generate`.

  Attributes:
    tokens: list of int32 arrays, prompt and continuation of each row.
    stats: `RoundStats` summed over the rounds. `active` is the number of rounds
      of each row.
  """

  tokens: list[np.ndarray]
  stats: RoundStats


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder:
  """A target, a drafter and a verifier as one compiled program.

  A decoder contains only static configuration and hashes by value. Equal
  decoders share their compiled code. So do decoders that differ only in
  temperature or eos. Parameters and state are arguments of the methods:
  `params = {"target": ..., "drafter": ...}`.

  Attributes:
    target: target model. The output follows its distribution.
    drafter: method that proposes tokens, with its draft model if it has one.
    verifier: verification rule that decides which tokens are accepted.
    transform: transform from logits to probabilities. A drafter without its own
      transform uses it too. Its temperature is the default of `prefill`.
    observers: rules that are evaluated on the same drafts and reported in
      `RoundStats`. They have no effect on the output.
    eos: token id that ends a row, or several ids, or None. It is the default of
      `prefill`.
    controller: controller that chooses the draft length before every round, see
      `decoding.controller`. None: all drafts have the drafter's length. With a
      controller, the sequence of a row at a temperature above 0 depends on the
      other rows of the batch, unless the transform is `coupled`. Its
      distribution does not.
    debug: True checks the values of every round, which takes time: laws and the
      drafter's distributions sum to 1, drafts have the declared capabilities,
      and committed tokens fit the capacity. A `ValueError` names the component.
      `decode_round` does not raise, but reports in `RoundStats.checks`.
    stage: not an argument. The `rounds.Round` with the drafter bound to the
      target, or a `RoundsByLength` if there is a controller.

  Raises:
    ValueError: the drafter does not provide a capability that the verifier
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
    ...     drafter=sj.drafters.draft_model(model=model, gamma=3),
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
    # `stage` is not a field, so that decoders with equal arguments are equal.
    one = rounds_lib.Round(
        target=self.target, drafter=drafter, rule=self.verifier,
        transform=shared, observers=self.observers, debug=self.debug)
    object.__setattr__(self, "stage", one if self.controller is None else
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
    """N, number of nodes of a draft, including its root."""
    return self.stage.drafter.num_nodes

  @property
  def context_length(self) -> int:
    """Length in tokens of the longest sequence that both models can read."""
    return min(self.target.context_length,
               self.stage.drafter.context_length)

  @property
  def context_owner(self) -> str:
    """Name of the model with the shorter context: "target" or "drafter"."""
    return ("target" if self.context_length == self.target.context_length
            else "drafter")

  @property
  def changes_law(self) -> tuple[str, ...]:
    """Class names of the components that change the output distribution.

    These components are every constraint, and a target with `changes_law =
    True`, such as `Contrastive`. The output then follows autoregressive
    decoding with these components, not with the plain model.
    """
    laws = [self.target] if self.target.changes_law else []
    return tuple(type(part).__name__
                 for part in (*laws, *self.transform.constraints))

  def prefill(self, params: chex.ArrayTree, prompts: Sequence[Sequence[int]],
              key: jax.Array, *, limits: Any = None, request_ids: Any = None,
              capacity: int = 0, temperature: Any = None, eos: Any = None,
              context: chex.ArrayTree | None = None, grows: bool = False,
              placement: sharding.Placement | None = None) -> DecodeState:
    """Reads the prompts and returns the state of the decoding loop.

    Args:
      params: `{"target": ..., "drafter": ...}`.
      prompts: B non-empty sequences of token ids. Their lengths may differ.
      key: threefry PRNG key, from `jax.random.key`.
      limits: `[B]` or one number, the total length of prompt and output at
        which a row is done. Default: the context length.
      request_ids: `[B]` whole numbers from 0 to 2^32 - 1. The random numbers of
        a row depend only on the key and its request id. Default: 0..B-1.
      capacity: minimum number of slots per row, rounded up to a multiple of
        128. Default: the slots that the limits and a draft need. Additional
        slots cost memory. They also cost time in drafters that scan all slots
        (`NGram`), and in attention except on a CPU.
      temperature: one number or `[B]`, at least 0. Default: the temperature of
        the decoder's transform.
      eos: token ids for all rows, or B lists of ids, such as `[[1, 2], []]`.
        Default: the decoder's `eos`.
      context: tree of arrays `[B, ...]` that the drafter may read, see
        `Prompt.context`.
      grows: True starts with few slots. `decode_until` adds slots as rows
        become longer. Any other loop must call `grow` before the slots are
        full. Otherwise new tokens overwrite earlier tokens of their row.
      placement: placement of the state on a mesh. The parameters must already
        be placed on it (`Placement.put`). None: no mesh.

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
    needed = (capacity_lib.first(self.stage, lengths, limits, self._whole)
              if grows else int(limits.max()) + self.num_nodes)
    capacity = capacity_lib.rounded(max(needed, tokens.shape[1], capacity))
    eos = inputs.eos_rows(
        eos, self.eos, len(lengths), self.target.vocab_size)
    constraints_lib.check_rows(
        self.transform.constraints, limits - lengths, eos)
    prompt = Prompt(tokens=jnp.asarray(tokens), lengths=jnp.asarray(lengths),
                    capacity=capacity, context=context)
    arguments = (
        self.stage, params, prompt, jnp.asarray(limits), keys,
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
    """Reads the prompts and returns the state, without the checks of `prefill`.

    This method is pure and works inside a compiled program, so a decoder can be
    part of a drafter. The state contains the arrays passed to this method, and
    the decoding loops donate the state. So outside of a compiled program, pass
    copies of arrays that you need later.

    Args:
      params: `{"target": ..., "drafter": ...}`.
      prompt: B rows with `prefill.padded_length` columns. Its capacity must be
        at least every limit plus the nodes of a draft.
      limits: `[B]` int32, lengths at which rows are done.
      keys: `[B]` PRNG keys.
      temperature: `[B]` float32. Default: the temperature of the decoder's
        transform.
      eos: `[B, E]` int32, padded with -1. Default: the decoder's `eos`.
    """
    rows = prompt.lengths.shape[0]
    if temperature is None:
      temperature = jnp.asarray(inputs.temperatures(
          None, self.transform.temperature, rows))
    if eos is None:
      eos = jnp.asarray(inputs.eos_rows(
          None, self.eos, rows, self.target.vocab_size))
    return self.stage.start(params, prompt, limits, keys, temperature, eos)

  def insert(self, state: DecodeState, slot: int | Sequence[int],
             fresh: DecodeState) -> DecodeState:
    """Replaces rows of a batch by the rows of a fresh state.

    In this way, a new prompt can take the slot of a row that is done. The other
    rows do not change.

    Args:
      state: state of B rows. It is donated.
      slot: index of the row to replace, or one index for each row of `fresh`.
      fresh: state from `prefill` with the same capacity and number of eos ids.
        Its `request_ids` must differ from those of all other rows. Otherwise
        two rows draw the same random numbers.

    Raises:
      ValueError: a slot is out of range; the states differ in structure, shapes
        or dtypes.
    """
    for one in (state, fresh):
      self._check_state(one)
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

    Decoding continues as if the slots had been allocated by `prefill`.

    Args:
      params: `{"target": ..., "drafter": ...}`.
      state: state of the decoding loop. It is donated.
      capacity: minimum number of slots per row, as in `prefill`.

    Raises:
      ValueError: the state already has more slots, or a component cannot grow.
    """
    self._check_state(state)
    return capacity_lib.grow(
        self.stage, params, state, capacity_lib.rounded(capacity))

  @property
  def _whole(self) -> int:
    """Number of slots per row for the longest sequence of the models."""
    return capacity_lib.rounded(self.context_length + self.num_nodes)

  def _check_state(self, state: DecodeState) -> None:
    """Raises `ValueError` unless this decoder can decode a state.

    The state must not be donated already, and must not belong to another
    drafter.
    """
    if not isinstance(state, DecodeState):
      advice = ("; decode returns (state, stats)"
                if isinstance(state, tuple) else "")
      raise ValueError(f"state is a {type(state).__name__}; give the "
                       f"DecodeState of prefill or of the last call{advice}")
    drafter = interfaces.kind_of(self.stage.drafter)
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

  def decode_round(self, params: chex.ArrayTree, state: DecodeState,
                   traced: bool = False) -> tuple[Any, ...]:
    """Runs one round. Rows that are done do not change.

    If a model returns non-finite numbers, the row stops without an error. So
    call `raise_if_not_finite` with the stats. This applies to all decoding
    methods except `generate`.

    Args:
      params: `{"target": ..., "drafter": ...}`.
      state: state of the decoding loop.
      traced: True also returns the `Trace` of the round.

    Returns:
      `(state, stats)`, or `(state, stats, trace)`.
    """
    self._check_state(state)
    return self.stage(
        params, state, self.stage.draw_uniforms(state, 1)[0], traced)

  def decode(self, params: chex.ArrayTree, state: DecodeState, rounds: int,
             traced: bool = False) -> tuple[Any, ...]:
    """Runs a fixed number of rounds as one compiled program.

    Args:
      params: `{"target": ..., "drafter": ...}`.
      state: state of the decoding loop. It is donated and must not be used
        again.
      rounds: number of rounds.
      traced: True also returns the traces, stacked like the stats. They contain
        rounds * B * 2 * N * V floats, for B rows, N nodes of a draft and a
        vocabulary of V tokens.

    Returns:
      `(state, stats)`, or `(state, stats, traces)`. The fields of the stats are
      stacked, `[rounds, ...]`.

    Raises:
      ValueError: with `debug=True`, a component returned wrong values.
    """
    fields.check_at_least("rounds", rounds, 0)
    self._check_state(state)
    state, stats, *traces = rounds_lib.scan(
        self.stage, params, state, rounds=rounds, traced=traced)
    checks.raise_if_bad(stats.checks)
    return state, stats, *traces

  def decode_until(self, params: chex.ArrayTree, state: DecodeState
                   ) -> tuple[DecodeState, RoundStats]:
    """Runs compiled rounds until every row is done.

    If a row has no room for another draft, the slots of all rows are doubled.
    Each capacity requires a compiled program.

    Args:
      params: `{"target": ..., "drafter": ...}`.
      state: state of the decoding loop. It is donated and must not be used
        again.

    Returns:
      `(state, stats)`. The stats are sums over the rounds. `active` is the
      number of rounds of each row. `finite`, `draft_finite` and `law_finite`
      are True if they were True in all rounds.

    Raises:
      ValueError: with `debug=True`, a component returned wrong values.
    """
    self._check_state(state)
    state, stats, ended = rounds_lib.until(self.stage, params, state)
    if not ended:
      state, stats = capacity_lib.continued(
          self.stage, params, state, stats, self._whole)
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
      prompts: B non-empty sequences of token ids. Their lengths may differ.
      key: threefry PRNG key, from `jax.random.key`.
      max_new_tokens: maximum number of new tokens per row, at least 0.
      request_ids: `[B]` whole numbers, see `prefill`. Default: 0..B-1.
      temperature: one number or `[B]`. Default: the temperature of the
        decoder's transform.
      eos: token ids for all rows, or one list per row. Default: the decoder's
        `eos`.
      context: tree of arrays `[B, ...]` that the drafter may read.
      grows: True starts with few slots and adds slots as rows become longer.
        Default: True, unless a component cannot grow, or the device is a CPU
        (where the cost of attention depends only on the used slots).
      placement: placement on a mesh. Every process returns all sequences. None:
        no mesh.

    Raises:
      ValueError: an argument is invalid, see `prefill`.
      FloatingPointError: the target's logits, the drafter's probabilities or
        the verifier's laws were not finite.
    """
    fields.check_at_least("max_new_tokens", max_new_tokens, 0)
    prompts = inputs.as_rows(prompts)
    limits = [row.size + int(max_new_tokens) for row in prompts]
    if grows is None:
      grows = capacity_lib.grows(self.stage)
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


# Fields of `RoundStats`, each with the numbers that are not finite if False.
FINITE = {"finite": "target's logits",
          "draft_finite": "drafter's probabilities",
          "law_finite": "verifier's laws"}


def raise_if_not_finite(stats: RoundStats) -> None:
  """Raises an error if the numbers of a row were not finite.

  The error names the component and the row. The round with these numbers
  emitted no token.

  Raises:
    FloatingPointError: logits, drafter probabilities or laws were not finite.
  """
  for field, part in FINITE.items():
    ok = np.asarray(processes.gathered(getattr(stats, field)))
    rows = np.flatnonzero(~ok.reshape(-1, ok.shape[-1]).all(0))
    if rows.size:
      advice = ("certify the rule, and check where it divides by 0"
                if field == "law_finite" else
                "check the model's weights and its dtype, and whether the "
                "transform's constraints left a token")
      raise FloatingPointError(
          f"the {part} of row {rows[0]} are not finite; decoding of that row "
          f"stopped: {advice}")
