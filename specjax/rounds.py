"""The compiled draft-verify-commit loop.

  drafter.propose -> target pass -> transform -> law -> verdict -> commit

`decode_round` is pure. `decode` chains rounds with `lax.scan`, for studies;
`decode_until` with `lax.while_loop`, for generation. jit happens here, once;
nothing inside talks to the host.
"""

import dataclasses
import functools
from typing import Any
from typing import NamedTuple

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax import prefill as prefill_lib
from specjax import topology
from specjax.sampling import LogitsTransform
from specjax.sampling import sample_verdict
from specjax.types import Drafter
from specjax.types import ModelFn
from specjax.types import Prompt
from specjax.types import RoundStats
from specjax.types import Trace
from specjax.types import Verifier

_CAPACITY_STEP = 128  # slots; rounding up lets runs of similar size share code


@struct.dataclass
class DecodeState:
  """The carry of the loop: preallocated, of fixed shapes, donated.

  Attributes:
    tokens: `[B, C]` int32, prompt and output; the slots behind `lengths` are
      scratch.
    lengths: `[B]` int32, committed tokens. The target's cache holds one less:
      the last token is the root of the next draft.
    limits: `[B]` int32, the length at which a row is done.
    done: `[B]` bool.
    keys: `[B]` PRNG keys, constant: a round folds its number in.
    rounds: `[B]` int32, rounds that each row has lived.
    target_cache: the target's cache.
    drafter: the drafter's state.
    verifier: the verifier's state.
  """

  tokens: jax.Array
  lengths: jax.Array
  limits: jax.Array
  done: jax.Array
  keys: jax.Array
  rounds: jax.Array
  target_cache: Any
  drafter: Any = None
  verifier: Any = None


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
  compiled code. Weights and state are arguments:
  `params = {"target": ..., "drafter": ...}`.

  Attributes:
    target: the `ModelFn` whose law the output follows.
    drafter: the `Drafter`.
    verifier: the `Verifier` whose verdicts are committed.
    transform: from logits to the law that is sampled from; shared with the
      drafter unless that has its own.
    observers: verifiers whose laws are evaluated on the same drafts and
      reported in `RoundStats`, never acted on.
    eos: token id that ends a row, or None.
  """

  target: ModelFn
  drafter: Drafter
  verifier: Verifier
  transform: LogitsTransform = LogitsTransform()
  observers: tuple[Verifier, ...] = ()
  eos: int | None = None

  def __post_init__(self):
    vocab_size = self.target.vocab_size
    object.__setattr__(self, "observers", tuple(self.observers))
    drafter = self._drafter
    if len(set(self.transform.banned)) >= vocab_size:
      raise ValueError(f"all {vocab_size} tokens of the vocabulary are banned; "
                       "leave at least one")
    for token in self.transform.banned:
      if token >= vocab_size:
        raise ValueError(f"banned token {token} is out of range; the target's "
                         f"vocabulary has {vocab_size} tokens")
    if self.eos is not None and not 0 <= self.eos < vocab_size:
      raise ValueError(f"eos is {self.eos}; it must be a token id in "
                       f"[0, {vocab_size}), or None")
    for verifier in (self.verifier, *self.observers):
      for need in getattr(verifier, "requires", ()):
        if not getattr(drafter, need, True):
          raise ValueError(
              f"{type(verifier).__name__} is exact only with a drafter that "
              f"is {need}, and {type(drafter).__name__} is not; choose "
              "another pair")

  @property
  def _drafter(self) -> Drafter:
    """The drafter, specialised to this target and transform."""
    if hasattr(self.drafter, "bind"):
      return self.drafter.bind(self.target, self.transform)
    return self.drafter

  @property
  def context_length(self) -> int:
    """Longest sequence that both models were made for, in tokens."""
    return min(self.target.context_length,
               getattr(self._drafter, "context_length", np.inf))

  def prefill(self, params, prompts, key, *, limits=None, request_ids=None,
              capacity: int = 0) -> DecodeState:
    """Reads the prompts and prepares the loop.

    Args:
      params: `{"target": ..., "drafter": ...}`.
      prompts: B sequences of token ids, each of at least one token; lengths
        may differ.
      key: a PRNG key of `jax.random.key`, threefry.
      limits: `[B]` or one number, the length of prompt and output together at
        which a row is done; default: the context length.
      request_ids: `[B]` int32; a row's randomness is a function of (key, its
        request id) alone. Default: 0..B-1.
      capacity: least number of slots of a row; the loop's cost does not
        depend on it, but its compiled shape does.

    Returns:
      The state of the loop.

    Raises:
      ValueError: a prompt is empty, or longer than its limit; a limit exceeds
        the context length; a token id is out of range.
    """
    tokens, lengths = self._checked_prompts(prompts)
    limits = self._checked_limits(limits, lengths)
    if not (isinstance(key, jax.Array)
            and jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)):
      raise ValueError("key is no typed PRNG key; make it by "
                       "jax.random.key(seed, impl='threefry2x32')")
    if str(jax.random.key_impl(key)) != "threefry2x32":
      raise ValueError(
          f"key is of kind {jax.random.key_impl(key)}; rows draw the same "
          "numbers alone and in a batch only with 'threefry2x32'")
    if request_ids is None:
      request_ids = np.arange(len(lengths))
    keys = jax.vmap(jax.random.fold_in, (None, 0))(
        key, jnp.asarray(request_ids, jnp.uint32))
    needed = max(int(limits.max()) + self._drafter.num_nodes, tokens.shape[1],
                 capacity)
    capacity = -(-needed // _CAPACITY_STEP) * _CAPACITY_STEP
    return self._prefill(params, jnp.asarray(tokens), jnp.asarray(lengths),
                         jnp.asarray(limits), keys, capacity)

  def _checked_prompts(self, prompts):
    rows = [np.asarray(row) for row in prompts]
    if not rows:
      raise ValueError("there are no prompts; at least one is needed")
    for i, row in enumerate(rows):
      if row.ndim != 1 or row.size == 0:
        raise ValueError(f"prompt {i} is empty; it needs at least one token, "
                         "such as the tokenizer's bos")
      if not np.issubdtype(row.dtype, np.integer):
        raise ValueError(f"prompt {i} holds {row.dtype}; token ids are whole "
                         "numbers")
      bad = row[(row < 0) | (row >= self.target.vocab_size)]
      if bad.size:
        raise ValueError(
            f"prompt {i} holds token id {bad[0]}; ids must lie in "
            f"[0, {self.target.vocab_size}): use the target's tokenizer")
    lengths = np.array([row.size for row in rows], np.int32)
    columns = prefill_lib.padded_length(int(lengths.max()))
    tokens = np.zeros((len(rows), columns), np.int32)
    for i, row in enumerate(rows):
      tokens[i, :row.size] = row
    return tokens, lengths

  def _checked_limits(self, limits, lengths):
    if limits is None:
      limits = self.context_length
    limits = np.broadcast_to(np.asarray(limits, np.int32), lengths.shape)
    for i, (limit, length) in enumerate(zip(limits, lengths)):
      if limit > self.context_length:
        raise ValueError(
            f"row {i} may grow to {limit} tokens, prompt included; the "
            f"context length is {self.context_length}: ask for fewer tokens "
            "or shorten the prompt")
      if length > limit:
        raise ValueError(f"prompt {i} has {length} tokens; its limit is "
                         f"{limit}: shorten it or raise the limit")
    return limits

  @functools.partial(jax.jit, static_argnames=("self", "capacity"))
  def _prefill(self, params, tokens, lengths, limits, keys, capacity):
    prompt = Prompt(tokens=tokens, lengths=lengths, capacity=capacity)
    output = prefill_lib.read_prompt(self.target, params["target"], prompt)
    verifier = None
    if hasattr(self.verifier, "init"):
      verifier = jax.vmap(
          lambda _: self.verifier.init(self._drafter.num_nodes - 1))(lengths)
    return DecodeState(
        tokens=jnp.pad(tokens, ((0, 0), (0, capacity - tokens.shape[1]))),
        lengths=lengths, limits=limits, done=lengths >= limits, keys=keys,
        rounds=jnp.zeros_like(lengths), target_cache=output.cache,
        drafter=self._drafter.init(params, prompt, output), verifier=verifier)

  def decode_round(self, params, state: DecodeState
                   ) -> tuple[DecodeState, RoundStats]:
    """One round for every row; rows that are done stay as they are."""
    state, stats, _ = self.traced_round(params, state)
    return state, stats

  def traced_round(self, params, state: DecodeState
                   ) -> tuple[DecodeState, RoundStats, Trace]:
    """`decode_round`, and what the verifier saw and decided."""
    keys = jax.vmap(jax.random.fold_in)(state.keys, state.rounds)
    keys = jax.vmap(jax.random.split)(keys)  # to draft, to verify
    draft, drafter = self._drafter.propose(params, keys[:, 0], state)
    ancestors = jax.vmap(topology.ancestors)(draft.parents)
    depths = jnp.sum(ancestors, axis=-1, dtype=jnp.int32) - 1
    output = self.target(params["target"], draft.tokens, depths, ancestors,
                         state.target_cache)
    probs = self.transform(output.logits)
    law, expected, survival = self._laws(state, draft, probs, depths)
    verdict = jax.vmap(sample_verdict)(law, draft, keys[:, 1])

    # Logits of -inf are a model's own ban; its law must still be one.
    finite = jnp.isfinite(probs).all((-1, -2)) & ~(
        jnp.isnan(output.logits) | jnp.isposinf(output.logits)).any((-1, -2))
    draft_finite = jnp.isfinite(draft.probs).all((-1, -2))
    usable = finite & draft_finite
    tokens, count, ended = self._emitted(state, draft, verdict, usable)
    lengths = state.lengths + count
    put = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice_in_dim(
        row, new, at, 0))
    new_state = state.replace(
        tokens=put(state.tokens, tokens, state.lengths),
        lengths=lengths,
        done=state.done | ended | (lengths >= state.limits) | ~usable,
        rounds=state.rounds + 1,
        target_cache=output.cache.commit(verdict.path, count),
        drafter=self._drafter.commit(params, drafter, draft, verdict, output,
                                     count))
    if hasattr(self.verifier, "commit"):
      new_state = new_state.replace(verifier=jax.vmap(self.verifier.commit)(
          state.verifier, draft, probs, verdict))
    active = ~state.done
    weight = (active & usable)[:, None]
    return new_state, RoundStats(
        emitted=count, accepted=jnp.minimum(verdict.num_accepted, count),
        expected=jnp.where(weight, expected, 0),
        survival=jnp.where(weight[..., None], survival, 0),
        active=active, finite=finite | state.done,
        draft_finite=draft_finite | state.done), Trace(
            draft=draft, target_probs=probs, verdict=verdict)

  def _laws(self, state, draft, probs, depths):
    """The verifier's law, and two diagnostics of it and of the observers."""
    law = jax.vmap(self.verifier.law)(draft, probs, state.verifier)
    others = [jax.vmap(v.law)(draft, probs) for v in self.observers]
    # Observers are asked without a state, and rules without one have none.
    memories = [state.verifier, *(None for _ in others)]
    expected, survival = zip(*(
        jax.vmap(functools.partial(figures, verifier))(
            one, draft, probs, memory, depths)
        for verifier, one, memory in zip(
            (self.verifier, *self.observers), (law, *others), memories)))
    return law, jnp.stack(expected, axis=1), jnp.stack(survival, axis=1)

  def _emitted(self, state, draft, verdict, usable):
    """Tokens `[B, N]` of the verdict, how many count, and whether one ends."""
    tokens = jnp.take_along_axis(
        draft.tokens, jnp.roll(verdict.path, -1, axis=-1), axis=-1)
    slot = jnp.arange(tokens.shape[-1])
    tokens = jnp.where(slot == verdict.num_accepted[:, None],
                       verdict.next_token[:, None], tokens)
    count = jnp.minimum(verdict.num_accepted + 1, state.limits - state.lengths)
    ended = jnp.zeros_like(state.done)
    if self.eos is not None:
      is_end = (tokens == self.eos) & (slot < count[:, None])
      ended = jnp.any(is_end, axis=-1)
      count = jnp.where(ended, jnp.argmax(is_end, axis=-1) + 1, count)
    count = jnp.where(state.done | ~usable, 0, count)
    return tokens, count.astype(jnp.int32), ended & ~state.done

  # The state is donated in both loops: caches are updated in place, and the
  # state that was passed in must not be used again.
  @functools.partial(jax.jit, static_argnames=("self", "rounds"),
                     donate_argnames="state")
  def decode(self, params, state: DecodeState, rounds: int):
    """Runs a fixed number of rounds.

    Returns:
      `(state, stats)` with every field of the stats stacked, `[rounds, ...]`.
    """
    return jax.lax.scan(
        lambda carry, _: self.decode_round(params, carry), state,
        length=rounds)

  @functools.partial(jax.jit, static_argnames=("self", "rounds"),
                     donate_argnames="state")
  def decode_traced(self, params, state: DecodeState, rounds: int):
    """`decode` for records: `(state, stats, traces)`.

    The traces are stacked like the stats; they take rounds * B * 2 * N * V
    floats.
    """
    def step(carry, _):
      state, stats, trace = self.traced_round(params, carry)
      return state, (stats, trace)

    state, (stats, traces) = jax.lax.scan(step, state, length=rounds)
    return state, stats, traces

  @functools.partial(jax.jit, static_argnames="self", donate_argnames="state")
  def decode_until(self, params, state: DecodeState):
    """Runs until every row is done.

    Returns:
      `(state, stats)` with the stats summed over the rounds: `active` counts
      a row's rounds, `finite` and `draft_finite` say whether all were.
    """
    def totals(stats):
      return stats.replace(active=stats.active.astype(jnp.int32))

    def add(a, b):
      return a & b if a.dtype == jnp.bool_ else a + b

    def body(carry):
      state, total = carry
      state, stats = self.decode_round(params, state)
      return state, jax.tree.map(add, total, totals(stats))

    shapes = jax.eval_shape(self.decode_round, params, state)[1]
    zero = jax.tree.map(
        lambda x: (jnp.ones if x.dtype == jnp.bool_ else jnp.zeros)(
            x.shape, x.dtype), shapes)
    zero = zero.replace(active=jnp.zeros_like(state.lengths))
    return jax.lax.while_loop(lambda carry: ~jnp.all(carry[0].done), body,
                              (state, zero))

  def generate(self, params, prompts, key, *, max_new_tokens: int,
               request_ids=None) -> Generation:
    """Continues every prompt by at most `max_new_tokens` tokens.

    Raises:
      ValueError: bad prompts, as in `prefill`.
      FloatingPointError: a model's logits were not finite.
    """
    if max_new_tokens < 0:
      raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at "
                       "least 0")
    prompts = [np.asarray(row) for row in prompts]
    limits = [row.size + max_new_tokens for row in prompts]
    state = self.prefill(params, prompts, key, limits=limits,
                         request_ids=request_ids)
    state, stats = self.decode_until(params, state)
    raise_if_not_finite(stats)
    tokens, lengths = np.asarray(state.tokens), np.asarray(state.lengths)
    return Generation([row[:n] for row, n in zip(tokens, lengths)], stats)


def figures(verifier, law, draft, target_probs, state, depths):
  """What `RoundStats` says of a verifier's law, for one sequence.

  Args:
    verifier: its `survival` is used where it has one.
    law: its `Law` on this draft.
    draft: N nodes.
    target_probs: `[N, V]`.
    state: the verifier's, or None.
    depths: `[N]` of the nodes.

  Returns:
    `([], [N])`: E[tau | draft] and P(tau >= i).
  """
  expected = jnp.sum(law.stop * depths)
  if hasattr(verifier, "survival"):
    memory = () if state is None else (state,)
    return expected, verifier.survival(draft, target_probs, *memory)
  deep = depths >= jnp.arange(depths.shape[0])[:, None]
  return expected, jnp.sum(law.stop * deep, axis=-1)


def raise_if_not_finite(stats: RoundStats) -> None:
  """Raises where a model's numbers broke down, naming the model and the row.

  Such a row has stopped by itself and emitted nothing from bad numbers.
  """
  for model, ok in (("target", stats.finite), ("drafter", stats.draft_finite)):
    ok = np.asarray(ok)
    rows = np.flatnonzero(~ok.reshape(-1, ok.shape[-1]).all(0))
    if rows.size:
      raise FloatingPointError(
          f"the {model}'s logits of row {rows[0]} are not finite; decoding of "
          "that row stopped: check the model's weights and its dtype")
