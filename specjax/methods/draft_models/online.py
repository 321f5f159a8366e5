"""Online speculative decoding: a draft model that is trained while decoding.

Online speculative decoding (OSD), Liu et al. 2023 (arXiv:2310.07177).
Verification computes the target's distributions at the drafted tokens anyway.
So distillation costs only the drafter's gradient. Updates may follow any
schedule without changing the output distribution, for two reasons: the drafter
changes only between rounds, and every draft contains the distributions from
which its tokens were sampled.

OSD trains all weights of one drafter for all requests. Here the weights of the
draft model are fixed. A learned correction is added to its logits z [V]. The
correction is a function of its last hidden state h [F]:

  z + c + U' A' h,   A [F, r], U [r, V], c [V].

Each row of the batch has its own correction. So the tokens of a row do not
depend on other rows, and rows can move between slots.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import chex
from flax import struct
import jax
import jax.numpy as jnp
import optax

from specjax.decoding import rounds
from specjax.decoding.prefill import read_prompt
from specjax.interfaces import Cache
from specjax.interfaces import Model
from specjax.interfaces import Verifier
from specjax.methods import _common
from specjax.methods.draft_models.language_model import draft_model
from specjax.methods.drafting import NetworkDrafter
from specjax.methods.drafting import NetworkState
from specjax.methods.networks import Params
from specjax.methods.strategy import BLOCK
from specjax.methods.strategy import Strategy
from specjax.models.around import AroundModel
from specjax.sampling import LogitsTransform
from specjax.trees import topology
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.types import Verdict
from specjax.utils import fields

POSITIONS = ("rejected", "path", "all")


@struct.dataclass
class Correction:
  """Learned correction c + U' A' h of each row's logits, for hidden states h.

  Attributes:
    down: matrices A, `[B, F, r]`.
    up: matrices U, `[B, r, V]`.
    bias: vectors c, `[B, V]`.
  """

  down: jax.Array
  up: jax.Array
  bias: jax.Array

  def __call__(self, logits: jax.Array, hidden: jax.Array) -> jax.Array:
    """Returns the corrected `logits [..., S, V]`, for `hidden [..., S, F]`."""
    inner = hidden.astype(self.down.dtype) @ self.down
    return logits + inner @ self.up + self.bias[..., None, :]


@struct.dataclass
class Learner:
  """State of an `Online` drafter; the first axis of every leaf is the batch B.

  Attributes:
    cache: cache of the draft model.
    correction: correction of each row's logits.
    optimizer: state of each row's optimizer.
    since: `[B]` int32, number of committed tokens before the last draft.
  """

  cache: Cache
  correction: Correction
  optimizer: Any
  since: jax.Array


@dataclasses.dataclass(frozen=True)
class _Corrected(AroundModel):
  """Model whose logits are corrected.

  Its parameters are `{"model": parameters of the inner model, "correction":
  Correction}`.
  """

  model: Model

  def init_cache(self, params: chex.ArrayTree, batch: int, capacity: int
                 ) -> Any:
    return self.model.init_cache(params["model"], batch, capacity)

  def __call__(self, params: chex.ArrayTree, tokens: jax.Array,
               depths: jax.Array | None = None,
               ancestors: jax.Array | None = None, cache: Cache = None
               ) -> ModelOutput:
    out = self.model(params["model"], tokens, depths, ancestors, cache)
    return out.replace(logits=params["correction"](out.logits, out.hidden))

  def logits_at(self, params: chex.ArrayTree, output: ModelOutput, at: jax.Array
                ) -> jax.Array:
    hidden = jnp.take_along_axis(output.hidden, at[..., None], axis=1)
    return params["correction"](
        self.model.logits_at(params["model"], output, at), hidden)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Online(_common.DrawnChain):
  """Chains of a language model whose logits get a learned correction.

  After a round the model reads its draft again in one pass, to compute its
  hidden states. Then the correction takes a gradient step. The loss is the
  cross-entropy -sum_x p(x) log q(x), averaged over the training positions. p is
  the target's distribution and q the drafter's, both at temperature 1. So the
  distribution of a draft depends on earlier rounds.

  `params["drafter"]` contains the parameters of the model, which do not change.

  Attributes:
    model: draft model over the target's vocabulary that returns hidden states.
    gamma: draft length, at least 1.
    rank: rank r of the correction; 0 leaves only the bias c.
    learning_rate: learning rate of the optimizer.
    optimizer: function from a learning rate to an optax transformation.
    positions: training positions. "rejected": the position of the rejected
      draft token (OSD). "path": the positions of all accepted tokens and of the
      next token. "all": the positions of all draft tokens and the position
      after the last.
    every: number of rounds over which gradients are averaged before a step.
    transform: transform of the draft logits, see `NetworkDrafter`.
  """

  model: Model
  gamma: int
  rank: int = 8
  learning_rate: float = 1e-3
  optimizer: Callable[[float], optax.GradientTransformation] = optax.adam
  positions: str = "path"
  every: int = 1
  transform: LogitsTransform | None = None

  def __post_init__(self):
    fields.check_at_least("gamma", self.gamma, 1)
    fields.check_at_least("rank", self.rank, 0)
    fields.check_at_least("every", self.every, 1)
    if not self.learning_rate >= 0:
      raise ValueError(f"learning_rate is {self.learning_rate}; it must be at "
                       "least 0")
    if self.positions not in POSITIONS:
      raise ValueError(f"positions is {self.positions!r}; it must be one of "
                       f"{POSITIONS}")

  @property
  def _drafter(self) -> NetworkDrafter:
    return draft_model(
        _Corrected(self.model), self.gamma, transform=self.transform)

  @property
  def _steps(self) -> optax.GradientTransformation:
    steps = self.optimizer(self.learning_rate)
    if self.every == 1:
      return steps
    return optax.MultiSteps(steps, self.every).gradient_transformation()

  def bind(self, target: Model, transform: LogitsTransform) -> "Online":
    _common.check_vocabulary(self.model, target)
    rounds.check_slack(self.model, self.gamma + 2)
    return super().bind(target, transform)

  @property
  def context_length(self) -> int:
    return self.model.context_length

  def param_specs(self, axis: str, size: int) -> Any:
    return self.model.param_specs(axis, size)

  def init(self, params: Params, prompt: Prompt, prefill_output: ModelOutput
           ) -> Learner:
    """Returns the cache after the prompt and a zero correction."""
    del prefill_output
    output = read_prompt(self.model, params["drafter"], prompt)
    batch, width = len(prompt.lengths), output.hidden.shape[-1]
    # U = 0, so the correction is 0 for any A. A is random and the same in all
    # rows.
    down = width**-0.5 * jax.random.normal(
        jax.random.key(0), (width, self.rank))
    size = self.model.vocab_size
    correction = Correction(
        down=jnp.tile(down, (batch, 1, 1)),
        up=jnp.zeros((batch, self.rank, size)), bias=jnp.zeros((batch, size)))
    return Learner(
        cache=output.cache, correction=correction,
        optimizer=jax.vmap(self._steps.init)(correction),
        since=jnp.zeros_like(prompt.lengths))

  def going_on(self, state: DecodeState, learned: Learner) -> DecodeState:
    """Returns a decoding state that continues learning from earlier sequences.

    Args:
      state: decoding state of the new sequences, from `Decoder.prefill` or
        later.
      learned: field `drafter` of the last decoding state of the earlier
        sequences. Row i continues with the correction and the optimizer state
        of row i.

    Raises:
      ValueError: `learned` has another number of rows, or comes from another
        model, rank, optimizer or `every`.
    """
    _check_alike(learned, state.drafter)
    return state.replace(drafter=state.drafter.replace(
        correction=learned.correction, optimizer=learned.optimizer))

  def propose(self, params: Params, uniforms: jax.Array, state: DecodeState
              ) -> tuple[Draft, Learner]:
    before = state.drafter
    own = {"model": params["drafter"], "correction": before.correction}
    draft, after = self._drafter.propose({"drafter": own}, uniforms, (
        state.replace(drafter=NetworkState(memory=before.cache))))
    return draft, before.replace(cache=after.memory, since=state.lengths)

  def commit(self, params: Params, drafter: Learner, draft: Draft,
             verdict: Verdict, target_output: ModelOutput, count: jax.Array,
             own: jax.Array) -> Learner:
    """Returns the state after a gradient step.

    Rows without new tokens or without training positions do not take a step.
    """
    place = jnp.arange(self.num_nodes, dtype=jnp.int32)
    stop = verdict.num_accepted[:, None]
    weights = {"rejected": (place == stop) & (stop < self.gamma),
               "path": place <= stop,
               "all": place <= self.gamma + 0 * stop}[self.positions]
    learns = (count > 0) & jnp.any(weights, axis=1)
    out = self._read_again(params["drafter"], drafter, draft)
    law = jax.nn.softmax(target_output.logits)
    correction, optimizer = jax.vmap(self._step)(
        drafter.correction, drafter.optimizer, out.logits, out.hidden, law,
        weights.astype(law.dtype))
    keep = lambda new, old: jax.vmap(jnp.where)(learns, new, old)
    correction, optimizer = jax.tree.map(
        keep, (correction, optimizer), (drafter.correction, drafter.optimizer))
    return drafter.replace(correction=correction, optimizer=optimizer)

  def _read_again(self, params: chex.ArrayTree, drafter: Learner, draft: Draft
                  ) -> ModelOutput:
    """Returns the model's output, without correction, at a draft's N nodes."""
    batch, size = draft.tokens.shape
    return self.model(
        params, draft.tokens, *topology.causal(batch, size),
        drafter.cache.rollback(jnp.maximum(drafter.since - 1, 0)))

  def _step(self, correction: Correction, optimizer: Any, logits: jax.Array,
            hidden: jax.Array, law: jax.Array, weights: jax.Array
            ) -> tuple[Correction, Any]:
    """Returns a row's correction and optimizer state after a gradient step.

    Args:
      correction: correction of the row.
      optimizer: optimizer state of the row.
      logits: logits `[N, V]` of the model without correction.
      hidden: hidden states `[N, F]` of the model.
      law: target distributions `[N, V]`.
      weights: `[N]`, 1 at training positions and 0 elsewhere.
    """
    def loss(correction):
      own = jax.nn.log_softmax(correction(logits, hidden))
      losses = -jnp.sum(law * own, axis=-1)
      return jnp.sum(weights * losses) / jnp.maximum(jnp.sum(weights), 1)

    updates, optimizer = self._steps.update(
        jax.grad(loss)(correction), optimizer, correction)
    return optax.apply_updates(correction, updates), optimizer


def _check_alike(learned: Learner, own: Learner) -> None:
  """Raises `ValueError` if two states have different sizes or optimizers.

  Args:
    learned: drafter state of the earlier sequences.
    own: drafter state of the new sequences.
  """
  sizes = lambda x: (*x.correction.down.shape, x.correction.up.shape[-1])
  if sizes(learned) != sizes(own):
    form = [f"{rows} rows, {width} hidden channels, rank {rank} and {size} "
            "tokens" for rows, width, rank, size in map(sizes, (learned, own))]
    raise ValueError(
        f"learned has {form[0]}, and the decoding state has {form[1]}; give a "
        "learned state of the same drafter with the same number of rows")
  # The states of different optimizers may have leaves of equal shapes. So the
  # tree structures are compared as well.
  forms = [(jax.tree.structure(x.optimizer), [
      (leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(x.optimizer)])
           for x in (learned, own)]
  if forms[0] != forms[1]:
    raise ValueError(
        "learned has the state of another optimizer than the drafter; give "
        "both the same `optimizer` and `every`")


def online(model: Model, gamma: int, learning_rate: float = 1e-3,
           positions: str = "path", verifier: Verifier = BLOCK) -> Strategy:
  """Drafts a chain, and learns from the target's distributions while decoding.

  Online speculative decoding (Liu et al. 2023, arXiv:2310.07177). Each row
  learns a correction of the draft model's logits.

  >>> from specjax import testing
  >>> model = testing.tiny_pair(7).drafter
  >>> online(model, gamma=4, positions="rejected").drafter.learning_rate
  0.001

  Args:
    model: draft model over the target's vocabulary.
    gamma: draft length.
    learning_rate: learning rate of Adam.
    positions: training positions "rejected", "path" or "all", see
      `drafters.Online`.
    verifier: rule for chains. It must not require an autoregressive drafter.
  """
  return Strategy(Online(
      model=model, gamma=gamma, learning_rate=learning_rate,
      positions=positions), verifier)
