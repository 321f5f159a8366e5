"""Cascades: a small model drafts for the target and also has a drafter.

Staged speculative decoding (Spector and Re 2023, arXiv:2308.04623), the
vertical cascade of Cascade Speculative Drafting (Chen et al. 2023,
arXiv:2312.11462) and TriForce (Sun et al. 2024, arXiv:2404.11912).

  target  <-  gamma tokens  <-  small model  <-  chain or tree  <-  drafter

The inner loop is speculative decoding with the small model as the target of the
inner drafter. It is lossless. So every drafted token follows the small model's
distribution given the tokens before it, as if the small model had drafted
alone. The verifier uses this distribution as the draft distribution q.

The last inner round may write more than gamma tokens. All tokens after the
first gamma are dropped. This is exact, because only the position decides which
tokens are dropped. A choice by the tokens themselves would bias the draft.

A tail consists of further tokens from the inner drafter after the gamma tokens,
as in the horizontal cascade of CS Drafting. The last tokens of a draft are
rarely accepted, so a cheaper drafter proposes them.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp

from specjax import interfaces
from specjax import sampling
from specjax import verifiers
from specjax.caches import dense
from specjax.decoding import rounds
from specjax.decoding.prefill import read_prompt
from specjax.interfaces import Drafter
from specjax.interfaces import Model
from specjax.interfaces import Verifier
from specjax.methods import _common
from specjax.methods import _following
from specjax.methods.networks import Params
from specjax.methods.strategy import BLOCK
from specjax.methods.strategy import Strategy
from specjax.sampling import LogitsTransform
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.types import Trace
from specjax.utils import fields

# End-of-sequence id of the inner loop. No token has this id, so no draft token
# ends a sequence. Only the target's tokens do.
_NO_TOKEN = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cascade(Drafter):
  """Drafts with a small model that itself decodes speculatively.

  The inner loop runs the decoder's rounds with the small model as the target.
  It ends when every row has gamma new tokens or has reached its limit, after at
  most gamma rounds. A round costs a pass of the small model over the inner
  draft. The inner verifier's state is reset before each draft.

  `params["drafter"]` is `{"target": parameters of the small model, "drafter":
  parameters of the inner drafter}`. The inner drafter may be a cascade.

  Attributes:
    model: draft model over the target's vocabulary.
    drafter: drafter of the small model. If it has a state, it must provide
      "follows", see `interfaces.CAPABILITIES`.
    gamma: draft length, at least 1.
    verifier: lossless rule by which the small model verifies its drafter.
    tail: True to append a chain of the inner drafter to the gamma tokens,
      without a pass of the small model. The draft distribution of these tokens
      is the inner drafter's.
    transform: transform of the small model's logits; None uses the decoder's
      transform. The inner drafter also uses it, unless it has its own.
  """

  model: Model
  drafter: Drafter
  gamma: int
  verifier: Verifier = verifiers.Block()
  tail: bool = False
  transform: LogitsTransform | None = None

  def __post_init__(self):
    fields.check_at_least("gamma", self.gamma, 1)
    interfaces.check_verifier(self.verifier)
    if not self.verifier.lossless:
      raise ValueError(
          f"verifier is {type(self.verifier).__name__}, which is lossy, so the "
          "draft distributions of the cascade would be wrong; give a lossless "
          "rule")

  @property
  def provides(self) -> tuple[str, ...]:
    # `propose` compares the tokens in the small model's cache with the
    # committed tokens, so it follows any sequence.
    return interfaces.provided(
        chain=True, iid=True, conditional=True, autoregressive=not self.tail,
        rests=True, follows=True)

  @property
  def num_nodes(self) -> int:
    return 1 + self.gamma + self.tail * (self.drafter.num_nodes - 1)

  @property
  def num_uniforms(self) -> int | None:
    inner = self.drafter.num_uniforms
    return None if inner is None else (self.gamma + self.tail) * (
        sampling.VERDICT_UNIFORMS + inner)

  @property
  def context_length(self) -> float:
    return min(self.model.context_length,
               self.drafter.context_length)

  @property
  def _stage(self) -> rounds.Round:
    return rounds.Round(
        target=self.model, drafter=self.drafter, transform=self.transform,
        rule=self.verifier, drafts=True)

  def bind(self, target: Model, transform: LogitsTransform) -> "Cascade":
    reader = next((
        part for part in interfaces.contained(self.drafter)
        if isinstance(part, Drafter) and "reads_cache" in part.provides), None)
    if reader is not None:
      part = "" if reader is self.drafter else (
          f" with a {type(reader).__name__} in it")
      raise ValueError(
          f"drafter is a {interfaces.kind_of(self.drafter)}{part}, which reads "
          "the small model's cache, but the cascade writes that cache only "
          "after its rounds; make the cascade the drafter of the "
          f"{type(reader).__name__}")
    _common.check_vocabulary(self.model, target)
    rounds.check_slack(self.model, self.gamma + _following.PASS)
    bound = _common.with_transform(self, transform)
    drafter = _following.followed(self.drafter, self.model, bound.transform)
    interfaces.check_pair(self.verifier, drafter)
    if self.tail and "chain" not in interfaces.capabilities(drafter):
      raise ValueError(f"tail is True, but {interfaces.kind_of(drafter)} "
                       "drafts trees; give a drafter of chains, or tail=False")
    return dataclasses.replace(bound, drafter=drafter)

  def init(self, params: Params, prompt: Prompt, prefill_output: ModelOutput
           ) -> DecodeState:
    own = params["drafter"]
    if not (isinstance(own, Mapping) and "target" in own):
      raise ValueError(
          "params['drafter'] of a cascade must be {'target': parameters of "
          "the small model, 'drafter': parameters of its drafter}")
    prompt = prompt.replace(capacity=prompt.capacity + self.drafter.num_nodes)
    batch = prompt.lengths.shape[0]
    state = self._stage.begun(
        own, prompt, self._read(own, prompt, prefill_output), prompt.lengths,
        None, jnp.zeros((batch,), jnp.float32),
        jnp.full((batch, 1), _NO_TOKEN, jnp.int32))
    _following.check_follows(self.drafter, state.drafter)
    return state.replace(context=None)

  def _read(self, own: Mapping[str, chex.ArrayTree], prompt: Prompt,
            prefill_output: ModelOutput) -> ModelOutput:
    """Runs the small model on the prompt and returns its output."""
    del prefill_output
    return read_prompt(self.model, own["target"], prompt)

  def propose(self, params: Params, uniforms: jax.Array, state: DecodeState
              ) -> tuple[Draft, DecodeState]:
    own, before = params["drafter"], state.drafter
    takes_keys = self.num_uniforms is None
    inner = self._resumed(own, state, uniforms if takes_keys else None)
    uniforms = None if takes_keys else uniforms.reshape(
        uniforms.shape[0], self.gamma + self.tail, -1).swapaxes(0, 1)
    # The rounds of the inner loop write to a reserved block of the cache. After
    # the loop, `settle` moves the block into the cache once.
    inner = inner.replace(target_cache=inner.target_cache.reserve(
        self.gamma + self.drafter.num_nodes))
    inner, laws = self._written(own, inner, uniforms)
    inner = inner.replace(target_cache=inner.target_cache.settle())
    at = state.lengths[:, None] + jnp.arange(self.gamma)
    drafted = at < inner.lengths[:, None]
    tokens = jnp.take_along_axis(inner.tokens, at, axis=1, mode="clip")
    tokens = jnp.where(drafted, tokens, 0)
    # A row ends before its limit only if its logits are not finite. Then its
    # probabilities are set to NaN, so that the decoding loop reports the error.
    broken = ~state.done & (inner.lengths < inner.limits)
    probs = jnp.where(drafted[..., None], laws,
                      jnp.where(broken, jnp.nan, 0.0)[:, None, None])
    if self.tail:
      tail, drafter = self._tail(own, state, inner, uniforms)
      tokens = jnp.concatenate([tokens, tail.tokens[:, 1:]], axis=1)
      probs = jnp.concatenate(
          [probs, tail.probs[:, 1:].astype(probs.dtype)], axis=1)
      inner = inner.replace(drafter=drafter)
    draft = jax.vmap(Draft.chain)(rounds.roots(state), tokens, probs)
    return draft, inner.replace(
        keys=None, context=None, verifier=before.verifier,
        constraints=before.constraints)

  def _resumed(self, own: Mapping[str, chex.ArrayTree], state: DecodeState,
               keys: jax.Array | None) -> DecodeState:
    """Returns the inner loop's state with the tokens of the outer loop.

    Args:
      own: parameters of the small model and of its drafter.
      state: state of the outer loop.
      keys: PRNG key per row, or None if the inner drafter takes uniforms.
    """
    before = state.drafter
    room = before.tokens.shape[1] - state.tokens.shape[1]
    return before.replace(
        tokens=jnp.pad(state.tokens, ((0, 0), (0, room))),
        lengths=state.lengths, done=state.done,
        limits=jnp.minimum(state.lengths + self.gamma, state.limits),
        keys=state.keys if self.transform.coupled else keys,
        rounds=jnp.zeros_like(before.rounds),
        temperature=state.temperature, context=state.context,
        constraints=state.constraints, target_cache=self._cache(own, state))

  def _cache(self, own: Mapping[str, chex.ArrayTree], state: DecodeState
             ) -> Any:
    """Returns the small model's cache with all committed tokens but the root.
    """
    before = state.drafter
    since = _following.agreed(before.tokens, before.lengths - 1, state)
    return _following.caught_up(
        self.model, own["target"], state, before.target_cache, since)

  def _written(self, own: Mapping[str, chex.ArrayTree], inner: DecodeState,
               uniforms: jax.Array | None) -> tuple[DecodeState, jax.Array]:
    """Runs the inner loop until every row is done.

    Returns:
      The inner state, and the distributions `[B, gamma, V]` of its new tokens.
    """
    stage, start = self._stage, inner.lengths

    def one_round(carry):
      i, inner, laws = carry
      new, _, trace = stage(
          own, inner, self._round_uniforms(inner, uniforms, i))
      # `put_rows` also writes distributions after those of the new tokens. The
      # next round overwrites these. In a finished row they come after the first
      # gamma distributions and are cut off below.
      laws = dense.put_rows(laws, self._on_path(trace).astype(laws.dtype),
                      inner.lengths - start)
      return i + 1, new, laws

    laws = jnp.zeros((start.shape[0], self.gamma + self.drafter.num_nodes,
                      self.model.vocab_size))
    _, inner, laws = jax.lax.while_loop(
        lambda carry: ~jnp.all(carry[1].done), one_round,
        (jnp.zeros((), jnp.int32), inner, laws))
    return inner, laws[:, :self.gamma]

  def _on_path(self, trace: Trace) -> jax.Array:
    """Returns the distributions `[B, N, V]` along the accepted path."""
    if "chain" in interfaces.capabilities(self.drafter):
      return trace.target_probs
    return jnp.take_along_axis(
        trace.target_probs, trace.verdict.path[..., None], axis=1)

  def _tail(self, own: Mapping[str, chex.ArrayTree], state: DecodeState,
            inner: DecodeState, uniforms: jax.Array | None
            ) -> tuple[Draft, Any]:
    """Returns the inner drafter's chain after the gamma tokens, and its state.

    Args:
      own: parameters of the small model and of its drafter.
      state: state of the outer loop.
      inner: state after the inner loop.
      uniforms: uniforms of the rounds, or None if the inner drafter takes keys.
    """
    # A round's keys are derived from the round's number. The rounds of the
    # inner loop have numbers below gamma. So the tail uses the number gamma.
    inner = inner.replace(limits=state.limits, done=state.done,
                          rounds=jnp.full_like(inner.rounds, self.gamma))
    tail, drafter = self._stage.propose(
        own, inner, self._round_uniforms(inner, uniforms, self.gamma))
    # A row with fewer than gamma new tokens has reached its limit. So it gets
    # no tail.
    complete = inner.lengths == state.lengths + self.gamma
    return tail.replace(probs=jnp.where(
        complete[:, None, None], tail.probs, 0)), drafter

  def _round_uniforms(self, inner: DecodeState, uniforms: jax.Array | None,
                      i: jax.Array | int) -> jax.Array:
    """Returns `[B, count]`, the uniforms of round i of the inner loop."""
    if uniforms is None:
      return self._stage.draw_uniforms(inner, 1)[0]
    return uniforms[i]

  def param_specs(self, axis: str, size: int) -> Any:
    return {"target": self.model.param_specs(axis, size),
            "drafter": self.drafter.param_specs(axis, size)}


def cascade(model: Model, drafter: Drafter, gamma: int,
            inner: Verifier = BLOCK, verifier: Verifier = BLOCK,
            tail: bool = False) -> Strategy:
  """Drafts a chain with a small model that itself decodes speculatively.

  Staged speculation (Spector and Re 2023, arXiv:2308.04623), the vertical
  cascade of CS Drafting (Chen et al. 2023, arXiv:2312.11462) and TriForce (Sun
  et al. 2024, arXiv:2404.11912). The drafted tokens follow the small model's
  distribution, but need fewer passes of the small model than there are tokens.

  >>> import jax
  >>> import specjax as sj
  >>> from specjax import drafters
  >>> small = sj.testing.MarkovModel(7)
  >>> tiny = drafters.draft_model(model=small, gamma=3)
  >>> table = small.init(jax.random.key(0))
  >>> decoder = cascade(small, tiny, gamma=8).decoder(small)
  >>> params = {"target": table,
  ...           "drafter": {"target": table, "drafter": table}}
  >>> state = decoder.prefill(params, [[1]], jax.random.key(1), limits=20)
  >>> state, _ = decoder.decode_round(params, state)
  >>> int(state.lengths[0]) - 1, int(state.drafter.rounds[0])
  (9, 2)

  Args:
    model: draft model over the target's vocabulary.
    drafter: drafter of the small model; it may be a cascade.
    gamma: draft length.
    inner: lossless rule by which the small model verifies its drafter.
    verifier: rule for chains by which the target verifies the draft.
    tail: True to append tokens of the inner drafter to the gamma tokens, as in
      the horizontal cascade of CS Drafting.
  """
  return Strategy(Cascade(
      model=model, drafter=drafter, gamma=gamma, verifier=inner, tail=tail),
      verifier)
