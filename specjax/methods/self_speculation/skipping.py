"""SWIFT: the target drafts without some parts, chosen while it decodes.

SWIFT (Xia et al. 2024, arXiv:2410.06916): no training and no search before the
text, for the text that is written says which parts it can do without. What is
left out is data, so that nothing is compiled again.

The draft reads the keys and values that the target has of the text, and its own
only of the last two tokens and of what it drafts: it has no cache. Its law
depends on where the draft began, and it changes between rounds alone, when what
is committed is known. It is reported as it was drawn from, so that no schedule
of searches changes what is written.
"""

import dataclasses
from typing import Any

import chex
from flax import struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from specjax.decoding import round_steps
from specjax.interfaces import Model
from specjax.interfaces import Verifier
from specjax.methods import _common
from specjax.methods.draft_models.language_model import LanguageModel
from specjax.methods.strategy import BLOCK
from specjax.methods.strategy import Strategy
from specjax.models.shortened import check_whole
from specjax.models.shortened import Masked
from specjax.models.sublayers import Sublayers
from specjax.models.transformer import Transformer
from specjax.sampling import LogitsTransform
from specjax.trees import topology
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.utils import fields


@struct.dataclass
class Skipped:
  """State of a `Swift`; every leaf has the rows B first.

  Attributes:
    keep: `[B, L, 2]` float32, 0 for each attention and each MLP left out.
    since: `[B]` int32, committed tokens when a set was tried last; at first
      those of the prompt.
    tried: `[B]` int32, sets that were tried.
    score: `[B]` float32, the expected number of accepted tokens of `keep` on
      the last window; 0 before the first.
  """

  keep: jax.Array
  since: jax.Array
  tried: jax.Array
  score: jax.Array

  def sublayers(self, row: int) -> Sublayers:
    """Returns the parts that a row runs, for a `models.Shortened`."""
    attention, mlp = np.asarray(self.keep[row]).T
    return Sublayers(attention=np.flatnonzero(attention),
                     mlp=np.flatnonzero(mlp))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Swift(_common.DrawnChain):
  """Drafts with a part of the target that is searched while it decodes.

  Whenever a row has written `window` more tokens, one part that it leaves out
  is swapped for one that it runs. Both sets are scored on these tokens by the
  number of tokens that a draft of gamma would have accepted, in expectation
  (see `survival`; SWIFT counts agreeing argmaxes), and the better one stays.
  There a set reads keys and values of its own of the whole window. This takes
  three passes over the window, and as many laws of B, window and V floats. The
  first and the last layer are never left out, as there.

  Parts that are left out are computed and multiplied by 0: it saves no time.
  What was found (`Skipped.sublayers`) does as a `models.Shortened`.

  `params["drafter"]` is not read.

  Attributes:
    gamma: draft length, at least 1.
    count: attentions and MLPs that are left out; at first they are spread over
      the layers. SWIFT leaves out 0.45 of those between first and last layer.
    window: number of tokens between two tries, at least gamma.
    tries: number of sets that a row tries; 0 keeps the first one.
    seed: seed of the swaps.
    transform: transform of the draft logits; None: the decoder's.
    model: target model; `bind` sets it.
    law: transform of the target's logits; `bind` sets it.
  """

  gamma: int
  count: int
  window: int = 48
  tries: int = 64
  seed: int = 0
  transform: LogitsTransform | None = None
  model: Transformer | None = None
  law: LogitsTransform | None = None

  autoregressive = False

  def __post_init__(self):
    fields.check_fields(self, "gamma", "count")
    fields.check_at_least("window", self.window, self.gamma)
    fields.check_at_least("tries", self.tries, 0)

  def bind(self, target: Model, transform: LogitsTransform) -> "Swift":
    """Returns the drafter specialised to a target."""
    check_whole(target)
    most = max(0, 2 * (target.config.layers - 2) - 1)
    if self.count > most:
      raise ValueError(
          f"count is {self.count} and of the target's {target.config.layers} "
          f"layers {most} parts can be left out, for the first and the last "
          "layer stay and one more part is to swap with: leave out fewer, or "
          "take a deeper target")
    round_steps.check_slack(target, self.window + self.gamma + 1)
    return _common.with_transform(
        self, transform, model=target, law=transform)

  @property
  def _layers(self) -> int:
    return self.model.config.layers

  def init(self, params: Any, prompt: Prompt, prefill_output: ModelOutput
           ) -> Skipped:
    """Returns the first set of skipped parts, with score 0."""
    del params, prefill_output
    keep, free = np.ones((self._layers, 2)), 2 * (self._layers - 2)
    spread = np.arange(self.count) * free // self.count
    keep.reshape(-1)[2 + spread] = 0
    rows = prompt.lengths.shape
    return Skipped(
        keep=jnp.tile(jnp.asarray(keep, jnp.float32), (*rows, 1, 1)),
        since=prompt.lengths, tried=jnp.zeros(rows, jnp.int32),
        score=jnp.zeros(rows, jnp.float32))

  def propose(self, params: Any, uniforms: jax.Array, state: DecodeState
              ) -> tuple[Draft, Skipped]:
    """Tries a set in rows where one is due, then drafts a chain per row."""
    before = state.drafter
    due = ~state.done & (before.tried < self.tries) & (
        state.lengths - before.since >= self.window)
    skipped = round_steps.once(
        jnp.any(due), lambda old: self._searched(params, state, old, due),
        before)
    drafter = LanguageModel(model=Masked(self.model), gamma=self.gamma,
                            transform=self.transform)
    draft, _ = drafter.propose(
        {"drafter": {"model": params["target"], "keep": _last(skipped.keep)}},
        uniforms, state.replace(drafter=state.target_cache))
    return draft, skipped

  def _searched(self, params: Any, state: DecodeState, old: Skipped,
                due: jax.Array) -> Skipped:
    """Returns the state after a try in rows where one is due."""
    start = jnp.maximum(state.lengths - 1 - self.window, 0)
    at = start[:, None] + jnp.arange(self.window + 1)
    text = jnp.take_along_axis(state.tokens, at, axis=1, mode="clip")
    cache = state.target_cache.rollback(start)
    depths, causal = topology.causal(len(start), self.window)

    def laws(keep, transform):
      own = {"model": params["target"], "keep": _last(keep)}
      out = Masked(self.model)(own, text[:, :-1], depths, causal, cache)
      return transform(out.logits, state.temperature[:, None])

    new = jax.vmap(self._swapped)(old.keep, old.tried)
    p = laws(jnp.ones_like(old.keep), self.law)
    score = jax.vmap(self._score)
    now, then = jax.lax.map(
        lambda keep: score(p, laws(keep, self.transform), text[:, 1:]),
        jnp.stack([old.keep, new]))
    better = due & (then > now)
    return Skipped(
        keep=jnp.where(better[:, None, None], new, old.keep),
        since=jnp.where(due, state.lengths, old.since),
        tried=old.tried + due,
        score=jnp.where(due, jnp.maximum(now, then).astype(old.score.dtype),
                        old.score))

  def _score(self, p: jax.Array, q: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the expected number of accepted tokens of one row."""
    own = lambda law: jnp.take_along_axis(law, tokens[:, None], axis=1)[:, 0]
    passed = jnp.minimum(1, own(q) / jnp.maximum(own(p), 1e-30))
    return jnp.sum(survival(
        passed, jnp.sum(jnp.minimum(p, q), axis=-1), self.gamma))

  def _swapped(self, keep: jax.Array, tried: jax.Array) -> jax.Array:
    """Swaps one skipped part of a row's set."""
    draws = jax.random.uniform(
        jax.random.fold_in(jax.random.key(self.seed), tried), (2, keep.size),
        keep.dtype)
    inner = (jnp.arange(keep.size) >= 2) & (
        jnp.arange(keep.size) < keep.size - 2)
    one_of = lambda draws, among: jax.nn.one_hot(
        jnp.argmax(jnp.where(among, draws, -1)), keep.size, dtype=keep.dtype)
    flat = keep.reshape(-1)
    flat = flat - one_of(draws[0], inner & (flat == 1)) + one_of(
        draws[1], flat == 0)
    return flat.reshape(keep.shape)

  def param_specs(self, axis: str, size: int) -> PartitionSpec:
    """Returns one specification: there are no parameters."""
    del axis, size
    return PartitionSpec()


def survival(passed: jax.Array, last: jax.Array, gamma: int) -> jax.Array:
  """Returns the survival of drafts on recorded tokens, without drafting.

  A draft that begins after token j - 1 has i tokens accepted with probability
  E[prod_(k < i) min(1, q / p)(x_(j + k)) sum_v min(p, q)(v)], where x is text
  of the target's and the sum is at its token i (token verification; Leviathan
  et al. 2022, arXiv:2211.17192).

  Args:
    passed: `[S]`, min(1, q / p) of the text's own tokens.
    last: `[S]`, sum_v min(p, q) there.
    gamma: draft length, at most S.

  Returns:
    `[gamma]`, the means over all places where a draft of gamma tokens fits.
  """
  chex.assert_rank([passed, last], 1)
  places = passed.shape[0] - gamma + 1
  take = lambda x, i: jax.lax.dynamic_slice_in_dim(x, i, places)
  before, found = jnp.ones((places,), passed.dtype), []
  for i in range(gamma):
    found.append(jnp.mean(before * take(last, i)))
    before = before * take(passed, i)
  return jnp.stack(found)


def _last(keep: jax.Array) -> jax.Array:
  """Returns `[L, 2, B]`, the layout of the model's factors."""
  return jnp.moveaxis(keep, 0, -1)


def swift(gamma: int, count: int, window: int = 48, tries: int = 64,
          verifier: Verifier = BLOCK) -> Strategy:
  """Drafts with the target without some parts, searched while it decodes.

  SWIFT, Xia et al. 2024 (arXiv:2410.06916), but for its trees and its stop
  rule; sets are scored by accepted length, see `drafters.Swift`. What is left
  out is computed and multiplied by 0, so that it says what could be saved.

  >>> swift(gamma=4, count=2).drafter.autoregressive
  False

  Args:
    gamma: draft length.
    count: number of skipped attentions and MLPs.
    window: number of tokens between two tries.
    tries: number of tried sets.
    verifier: rule for chains.
  """
  return Strategy(Swift(
      gamma=gamma, count=count, window=window, tries=tries), verifier)
