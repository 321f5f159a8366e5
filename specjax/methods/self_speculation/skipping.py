"""SWIFT: the target drafts for itself with some of its sublayers skipped.

Sublayers are the attention and the MLP of each layer. SWIFT (Xia et al. 2024,
arXiv:2410.06916) chooses the set of skipped sublayers during decoding: it
scores sets on the tokens that were just generated. So it needs no training and
no search before decoding. A set is an array, so a new set requires no
compilation.

The drafter has no cache of its own. It reads the target's cache, and computes
keys and values only for the last two tokens and the drafted tokens. So its
draft distribution q depends on the position where the draft began.

The output distribution is exact for every choice of sets, for two reasons. The
set changes only between rounds and depends only on committed tokens. The
verifier receives the distribution q from which each token was sampled.
"""

import dataclasses

import chex
from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding import rounds
from specjax.interfaces import Model
from specjax.interfaces import Verifier
from specjax.methods import _common
from specjax.methods.draft_models.language_model import draft_model
from specjax.methods.drafting import NetworkState
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
  """State of the drafter `Swift`: the skipped sublayers of B batch rows.

  Attributes:
    keep: `[B, L, 2]` float32, for the attention and the MLP of each of L
      layers: 0 if it is skipped, else 1.
    since: `[B]` int32, number of committed tokens when a new set was last
      tried; initially the length of the prompt.
    tried: `[B]` int32, number of sets that were tried.
    score: `[B]` float32, expected number of accepted tokens per draft with this
      set, measured on the last window of tokens; 0 before the first window.
  """

  keep: jax.Array
  since: jax.Array
  tried: jax.Array
  score: jax.Array

  def sublayers(self, row: int) -> Sublayers:
    """Returns the sublayers that are not skipped for one row of the batch."""
    attention, mlp = np.asarray(self.keep[row]).T
    return Sublayers(attention=np.flatnonzero(attention),
                     mlp=np.flatnonzero(mlp))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Swift(_common.DrawnChain):
  """SWIFT: drafts with the target and skips some of its sublayers.

  Sublayers are the attention and the MLP of each layer. The set of skipped
  sublayers is improved during decoding, separately for each row of the batch.
  After every `window` tokens of a row, a new set is tried, in which one skipped
  sublayer is replaced by another. The old and the new set are scored on these
  tokens, and the better set is used from then on. The score is the expected
  number of accepted tokens per draft (see `survival`). The SWIFT paper counts
  the positions with equal argmax instead. A pass that scores a set computes its
  own keys and values for the window, and does not read the target's. A try
  takes three passes over the window. Its three arrays have B * window * V
  floats each, for B rows and V tokens of the vocabulary. As in the paper, the
  first and the last layer always run.

  This drafter saves no time, because skipped sublayers are computed and
  multiplied by 0. To save time, draft with a `models.Shortened` that runs only
  the sublayers of the best set (see `Skipped.sublayers`).

  `params["drafter"]` is not read.

  Attributes:
    gamma: draft length, at least 1.
    count: number of skipped attentions and MLPs, initially spread evenly over
      the layers. The paper skips 45 % of the sublayers between the first and
      the last layer.
    window: number of tokens between two tries, at least gamma.
    tries: number of sets that are tried per row; with 0 the initial set never
      changes.
    seed: seed of the random replacements.
    transform: transform from logits to draft probabilities; None uses the
      target's transform.
    model: target model; `bind` sets it.
    law: transform from logits to the target's probabilities; `bind` sets it.
  """

  gamma: int
  count: int
  window: int = 48
  tries: int = 64
  seed: int = 0
  transform: LogitsTransform | None = None
  model: Transformer | None = None
  law: LogitsTransform | None = None

  def __post_init__(self):
    fields.check_fields(self, "gamma", "count")
    fields.check_at_least("window", self.window, self.gamma)
    fields.check_at_least("tries", self.tries, 0)

  def bind(self, target: Model, transform: LogitsTransform) -> "Swift":
    """Returns the drafter with its model and the transforms set.

    Raises:
      ValueError: the target has too few layers to skip `count` sublayers, or
        its cache cannot be rewound by a window.
    """
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
    """Returns the state with the initial set of skipped sublayers.

    The skipped sublayers are spread evenly over all layers except the first and
    the last one.
    """
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
    """Returns a sampled chain for each row, and the new state.

    In rows that generated `window` tokens since the last try, a new set of
    skipped sublayers is tried before drafting.
    """
    before = state.drafter
    due = ~state.done & (before.tried < self.tries) & (
        state.lengths - before.since >= self.window)
    skipped = rounds.once(
        jnp.any(due), lambda old: self._searched(params, state, old, due),
        before)
    drafter = draft_model(
        Masked(self.model), self.gamma, transform=self.transform)
    draft, _ = drafter.propose(
        {"drafter": {"model": params["target"], "keep": _last(skipped.keep)}},
        uniforms, state.replace(drafter=NetworkState(
            memory=state.target_cache)))
    return draft, skipped

  def _searched(self, params: chex.ArrayTree, state: DecodeState, old: Skipped,
                due: jax.Array) -> Skipped:
    """Tries a new set of skipped sublayers in some rows.

    Args:
      params: `{"target": ..., "drafter": ...}`.
      state: decoding state of B rows.
      old: state of the drafter.
      due: `[B]` bool, True for rows in which a new set is tried.

    Returns:
      The new state of the drafter.
    """
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
    """Returns the expected number of accepted tokens per draft of one row.

    Args:
      p: target's distributions `[S, V]` after the S tokens of a window.
      q: draft distributions `[S, V]` at the same positions.
      tokens: token `[S]` int32 that follows each position.
    """
    at = lambda law: jnp.take_along_axis(law, tokens[:, None], axis=1)[:, 0]
    passed = jnp.minimum(1, at(q) / jnp.maximum(at(p), 1e-30))
    return jnp.sum(survival(
        passed, jnp.sum(jnp.minimum(p, q), axis=-1), self.gamma))

  def _swapped(self, keep: jax.Array, tried: jax.Array) -> jax.Array:
    """Swaps a random skipped sublayer with a random running one, for one row.

    Args:
      keep: `[L, 2]`, 0 for the skipped attentions and MLPs, else 1.
      tried: number of sets that were tried before, used as a random seed.

    Returns:
      New array `keep`.
    """
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


def survival(passed: jax.Array, last: jax.Array, gamma: int) -> jax.Array:
  """Returns the probabilities that at least i = 1..gamma tokens are accepted.

  The estimate needs no drafting. It uses S tokens x_0, x_1, ... that the target
  generated, and the distributions p of the target and q of the drafter at these
  tokens. Consider a draft whose first token is at x_j. Token verification
  (Leviathan et al. 2022, arXiv:2211.17192) accepts at least i of its tokens
  with the expected probability

    prod_(k < i - 1) min(1, q(x_(j + k)) / p(x_(j + k))) sum_v min(p(v), q(v)),

  where k = 0, 1, ..., and p and q in the sum are those of the draft's i-th
  token. The result is the mean over all positions j where a draft of gamma
  tokens can begin.

  >>> half = jax.numpy.full((4,), 0.5)
  >>> survival(half, half, gamma=2).tolist()
  [0.5, 0.25]

  Args:
    passed: min(1, q(x) / p(x)) of each of the S tokens x, `[S]`.
    last: sum_v min(p(v), q(v)) at each token, `[S]`.
    gamma: draft length, at most S.

  Returns:
    Probabilities `[gamma]`.
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
  """Returns `keep [B, L, 2]` with the batch as its last axis, `[L, 2, B]`.

  `models.Masked`, which skips sublayers, expects this order of axes.
  """
  return jnp.moveaxis(keep, 0, -1)


def swift(gamma: int, count: int, window: int = 48, tries: int = 64,
          verifier: Verifier = BLOCK) -> Strategy:
  """Returns the strategy SWIFT (Xia et al. 2024, arXiv:2410.06916).

  The target drafts with some of its attentions and MLPs skipped. The set of
  skipped parts is improved during decoding: sets are scored by the expected
  number of accepted tokens, see `drafters.Swift`. The trees and the stop rule
  of the paper are not implemented. The strategy measures acceptance but saves
  no time, because skipped attentions and MLPs are computed and multiplied by 0.

  >>> "autoregressive" in swift(gamma=4, count=2).drafter.provides
  False

  Args:
    gamma: draft length.
    count: number of skipped attentions and MLPs.
    window: number of generated tokens after which a new set is tried.
    tries: number of sets that are tried per row of the batch.
    verifier: verification rule for chains.
  """
  return Strategy(Swift(
      gamma=gamma, count=count, window=window, tries=tries), verifier)
