"""SWIFT: the target drafts without some sublayers, chosen while it decodes.

SWIFT (Xia et al. 2024, arXiv:2410.06916) needs no training and no search before
decoding, because the generated tokens score the sets of skipped sublayers. A
set is an array, so a new set requires no compilation.

The drafter has no cache. It reads the target's cache, and computes keys and
values only for the last two tokens and the drafted tokens. Its distribution q
depends on the position where the draft began. The set changes only between
rounds, and depends only on committed tokens. Drafts contain the q from which
their tokens were sampled, so verification is exact for every search.
"""

import dataclasses

import chex
from flax import struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from specjax.decoding import rounds
from specjax.interfaces import Model
from specjax.interfaces import Verifier
from specjax.methods import _common
from specjax.methods.draft_models.draft_model import DraftModel
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
  """State of a `Swift`; the first axis of every leaf is the batch B.

  Attributes:
    keep: factors `[B, L, 2]` float32 of the attention and the MLP of each
      layer, 0 if skipped, else 1.
    since: number of committed tokens when a set was last tried, `[B]` int32;
      initially the length of the prompt.
    tried: number of tried sets, `[B]` int32.
    score: expected number of accepted tokens per draft with `keep`, on the last
      scored window, `[B]` float32; 0 before the first window.
  """

  keep: jax.Array
  since: jax.Array
  tried: jax.Array
  score: jax.Array

  def sublayers(self, row: int) -> Sublayers:
    """Returns the sublayers that the drafter runs for one row of the batch."""
    attention, mlp = np.asarray(self.keep[row]).T
    return Sublayers(attention=np.flatnonzero(attention),
                     mlp=np.flatnonzero(mlp))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Swift(_common.DrawnChain):
  """Drafts with the target without some sublayers, searched during decoding.

  After every `window` tokens of a row, one skipped sublayer is swapped for
  another. The old and the new set are scored on these tokens, and the better
  one is used from then on. The score is the expected number of accepted tokens
  of a draft (see `survival`). SWIFT counts positions with equal argmax instead.
  In scoring, a set reads the keys and values that it computes itself for the
  window. A try takes three passes over the window and three arrays of B *
  window * V floats. As in SWIFT, the first and the last layer always run.

  Skipped sublayers are computed and multiplied by 0, which saves no time. A
  `models.Shortened` with `Skipped.sublayers` does save time.

  `params["drafter"]` is not read.

  Attributes:
    gamma: draft length, at least 1.
    count: number of skipped attentions and MLPs, initially spread over the
      layers. SWIFT skips 45 % of the sublayers between the first and the last
      layer.
    window: number of tokens between two tries, at least gamma.
    tries: number of sets that a row tries; 0: the initial set is never changed.
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
          f"count is {self.count}; a target of {target.config.layers} layers "
          f"allows at most {most}, because the first and the last layer always "
          "run and one more sublayer must run for swaps")
    rounds.check_slack(target, self.window + self.gamma + 1)
    return _common.with_transform(
        self, transform, model=target, law=transform)

  @property
  def _layers(self) -> int:
    return self.model.config.layers

  def init(self, params: chex.ArrayTree, prompt: Prompt,
           prefill_output: ModelOutput) -> Skipped:
    """Returns the state with the initial set, and score 0."""
    del params, prefill_output
    keep, free = np.ones((self._layers, 2)), 2 * (self._layers - 2)
    spread = np.arange(self.count) * free // self.count
    keep.reshape(-1)[2 + spread] = 0
    rows = prompt.lengths.shape
    return Skipped(
        keep=jnp.tile(jnp.asarray(keep, jnp.float32), (*rows, 1, 1)),
        since=prompt.lengths, tried=jnp.zeros(rows, jnp.int32),
        score=jnp.zeros(rows, jnp.float32))

  def propose(self, params: chex.ArrayTree, uniforms: jax.Array,
              state: DecodeState) -> tuple[Draft, Skipped]:
    """Tries a new set in rows with a full window, then drafts a chain each."""
    before = state.drafter
    due = ~state.done & (before.tried < self.tries) & (
        state.lengths - before.since >= self.window)
    skipped = rounds.once(
        jnp.any(due), lambda old: self._searched(params, state, old, due),
        before)
    drafter = DraftModel(model=Masked(self.model), gamma=self.gamma,
                         transform=self.transform)
    draft, _ = drafter.propose(
        {"drafter": {"model": params["target"], "keep": _last(skipped.keep)}},
        uniforms, state.replace(drafter=state.target_cache))
    return draft, skipped

  def _searched(self, params: chex.ArrayTree, state: DecodeState, old: Skipped,
                due: jax.Array) -> Skipped:
    """Returns the state after the rows where `due [B]` tried a new set."""
    start = jnp.maximum(state.lengths - 1 - self.window, 0)
    at = start[:, None] + jnp.arange(self.window + 1)
    text = jnp.take_along_axis(state.tokens, at, axis=1, mode="clip")
    cache = state.target_cache.rollback(start)
    depths, causal = topology.causal(len(start), self.window)

    def laws(keep, transform):
      out = Masked(self.model)(
          {"model": params["target"], "keep": _last(keep)}, text[:, :-1],
          depths, causal, cache)
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
    """Returns the expected number of accepted tokens of one row's drafts."""
    at = lambda law: jnp.take_along_axis(law, tokens[:, None], axis=1)[:, 0]
    passed = jnp.minimum(1, at(q) / jnp.maximum(at(p), 1e-30))
    return jnp.sum(survival(
        passed, jnp.sum(jnp.minimum(p, q), axis=-1), self.gamma))

  def _swapped(self, keep: jax.Array, tried: jax.Array) -> jax.Array:
    """Swaps a skipped sublayer of one row's set for a random other one."""
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
    """Returns an empty specification."""
    del axis, size
    return PartitionSpec()


def survival(passed: jax.Array, last: jax.Array, gamma: int) -> jax.Array:
  """Returns the probabilities that drafts have i accepted tokens, i = 1..gamma.

  They are computed from S tokens x that the target generated, without drafting.
  If a draft begins with token x_j, token verification (Leviathan et al. 2022,
  arXiv:2211.17192) accepts at least i of its tokens with the probability
  E[prod_(k < i - 1) min(1, q / p)(x_(j + k)) sum_v min(p, q)(v)], k = 0, 1, ...
  q and p are the drafter's and the target's distributions, and the sum is at
  the draft's i-th token.

  >>> half = jax.numpy.full((4,), 0.5)
  >>> survival(half, half, gamma=2).tolist()
  [0.5, 0.25]

  Args:
    passed: values min(1, q / p) of the recorded tokens, `[S]`.
    last: sum_v min(p, q) at each token, `[S]`.
    gamma: draft length, at most S.

  Returns:
    Means `[gamma]` over all starting positions of a draft of gamma tokens.
  """
  chex.assert_rank([passed, last], 1)
  places = passed.shape[0] - gamma + 1
  take = lambda x, i: jax.lax.dynamic_slice_in_dim(x, i, places)
  before, means = jnp.ones((places,), passed.dtype), []
  for i in range(gamma):
    means.append(jnp.mean(before * take(last, i)))
    before = before * take(passed, i)
  return jnp.stack(means)


def _last(keep: jax.Array) -> jax.Array:
  """Returns `keep [B, L, 2]` as `[L, 2, B]`, the layout of `Masked`."""
  return jnp.moveaxis(keep, 0, -1)


def swift(gamma: int, count: int, window: int = 48, tries: int = 64,
          verifier: Verifier = BLOCK) -> Strategy:
  """Drafts with the target without some sublayers, searched during decoding.

  SWIFT, Xia et al. 2024 (arXiv:2410.06916), without its trees and its stop
  rule. Sets of skipped sublayers are scored by the expected number of accepted
  tokens, see `drafters.Swift`. Skipped sublayers are computed and multiplied by
  0. So the search measures acceptance, but saves no time.

  >>> swift(gamma=4, count=2).drafter.autoregressive
  False

  Args:
    gamma: draft length.
    count: number of skipped attentions and MLPs.
    window: number of tokens after which a new set is tried.
    tries: number of sets that are tried per row.
    verifier: verification rule for chains.
  """
  return Strategy(Swift(
      gamma=gamma, count=count, window=window, tries=tries), verifier)
