"""Search for layers that a target can skip when it drafts for itself.

The draft model is the target without some of its attentions and MLPs. A search
looks for the best *set* of skipped attentions and MLPs. `scorer` scores a set
on windows of text that the target generated. One pass that skips the set
computes the draft distribution q at every token. The score compares q with the
target's distribution p. The set is an array in this pass, so one compiled
program scores all sets. There are two scores:

  agreement   the fraction of positions where q and p have the same argmax,
              called "matchness" in SWIFT (Xia et al. 2024, arXiv:2410.06916)
  accepted    the expected number of accepted tokens of a draft of gamma tokens
              with token verification, averaged over the positions where a draft
              can begin

Let q_j and p_j be the distributions of the j-th token after the position where
a draft begins, and x_j that token in the window. Then

  accepted = sum_(i <= gamma) prod_(j < i) min(1, q_j(x_j) / p_j(x_j))
             sum_v min(p_i(v), q_i(v)).

At temperature 0 it is sum_i prod_(j <= i) [argmax q_j = argmax p_j].

`random_search`, `greedy_search` and `local_search` maximise any score function.
`clasp` uses hidden states instead of a score. Every search returns a set, and
`without` converts it to the argument `sublayers` of `models.Shortened`, the
model that skips the set.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from specjax.interfaces import Verifier
from specjax.methods import stop_rules
from specjax.methods.draft_models.language_model import draft_model
from specjax.methods.self_speculation.skipping import survival
from specjax.methods.strategy import BLOCK
from specjax.methods.strategy import STOP
from specjax.methods.strategy import Strategy
from specjax.models.shortened import mask
from specjax.models.shortened import Shortened
from specjax.models.sublayers import Sublayers
from specjax.models.transformer import Transformer
from specjax.utils import processes

PARTS = ("attention", "mlp")
# Set of skipped parts: pairs of a layer and an index in `PARTS`.
Skipped = frozenset[tuple[int, int]]


@dataclasses.dataclass(frozen=True, eq=False)
class Scored:
  """Scores of a target with skipped layers as a draft model, on R windows.

  Attributes:
    agreement: fraction of positions at which draft model and target have the
      same most likely token, `[R]`.
    survival: probability `[R, gamma]` that at least i = 1..gamma tokens of a
      draft are accepted, averaged over the positions where a draft can begin.
  """

  agreement: np.ndarray
  survival: np.ndarray

  @property
  def accepted(self) -> np.ndarray:
    """Expected number of accepted tokens per draft, `[R]`."""
    return self.survival.sum(-1)


def scorer(model: Transformer, params: chex.ArrayTree, tokens: ArrayLike,
           gamma: int, *, temperature: float = 1.0, first: int = 0,
           batch: int = 1, rows: jax.sharding.Sharding | None = None
           ) -> Callable[[Sublayers], Scored]:
  """Returns a function that scores the target with some sublayers skipped.

  The argument of the returned function is the `Sublayers` that are not skipped,
  and the result is a `Scored`. The complete target runs only once: its logits
  at all positions, R * S * V numbers, are stored.

  Args:
    model: target model.
    params: parameters of the model.
    tokens: R windows of S + 1 tokens that the target generated at this
      temperature, `[R, S + 1]` int32.
    gamma: draft length.
    temperature: temperature, 0 or 1.
    first: index of the first generated token in a window. Earlier tokens, such
      as the prompt, are not scored.
    batch: number of windows per pass of the target.
    rows: sharding of the windows of a pass, if `params` are distributed over a
      mesh of devices.

  Raises:
    ValueError: the windows have fewer than gamma generated tokens, or the
      temperature is neither 0 nor 1.
  """
  tokens = np.asarray(tokens, np.int32)
  total = len(tokens)
  count, start = tokens.shape[1] - max(first, 1), max(first, 1) - 1
  if temperature not in (0.0, 1.0):
    raise ValueError(f"temperature is {temperature}; it must be 0 or 1")
  if count < gamma:
    raise ValueError(f"`tokens` has {max(count, 0)} generated tokens in a "
                     f"window, but gamma is {gamma}; give at least gamma")
  every = Sublayers.between(0, model.config.layers)

  def logits(params, row, keep):
    out = model.run(params, every, row[None, :-1], keep=keep)
    return out.logits[0, start:]

  @jax.jit
  def laws(params, tokens):
    ones = mask(every, model.config.layers)
    return jax.vmap(lambda row: logits(params, row, ones))(tokens)

  @jax.jit
  def measure(params, tokens, laws, keep):
    def score_row(x):
      row, p = x
      q = logits(params, row, keep)
      same = jnp.argmax(p, -1) == jnp.argmax(q, -1)
      if temperature:
        passed, last = _chances(p, q, row[start + 1:])
      else:
        passed = last = same.astype(jnp.float32)
      return jnp.mean(same), survival(passed, last, gamma)

    return jax.vmap(score_row)((tokens, laws))

  # The windows are padded to a multiple of `batch`. So all passes have the same
  # number of windows and share one compiled program.
  padded = np.pad(tokens, ((0, -total % batch), (0, 0)), "edge")
  parts = [processes.placed(part, rows) if rows else jnp.asarray(part)
           for part in np.split(padded, len(padded) // batch)]
  parts = [(part, laws(params, part)) for part in parts]

  def score(sublayers):
    keep = mask(sublayers, model.config.layers)
    scored = processes.gathered([
        measure(params, *part, keep) for part in parts])
    return Scored(*(np.concatenate(x)[:total] for x in zip(*scored)))

  return score


def _chances(p_logits: jax.Array, q_logits: jax.Array, tokens: jax.Array
             ) -> tuple[jax.Array, jax.Array]:
  """Returns acceptance probabilities of token verification at S positions.

  Args:
    p_logits: target's logits `[S, V]`.
    q_logits: draft model's logits `[S, V]`.
    tokens: token x that follows each position, `[S]` int32.

  Returns:
    Two arrays `[S]`: min(1, q(x) / p(x)) and sum_v min(p(v), q(v)).
  """
  log_p, log_q = map(jax.nn.log_softmax, (p_logits, q_logits))
  ratio = jnp.take_along_axis(log_q - log_p, tokens[:, None], axis=1)[:, 0]
  return (jnp.exp(jnp.minimum(ratio, 0)),
          jnp.sum(jnp.exp(jnp.minimum(log_p, log_q)), axis=-1))


def without(layers: int, skipped: Iterable[tuple[int, int]]) -> Sublayers:
  """Returns the attentions and MLPs that run if some are skipped.

  Args:
    layers: number of layers of the model.
    skipped: skipped parts, pairs of a layer and 0 (attention) or 1 (MLP).
  """
  left_out = [[layer for layer, part in skipped if part == i]
              for i in range(len(PARTS))]
  return Sublayers.without(layers, *left_out)


def _free(layers: int, parts: Sequence[int]) -> list[tuple[int, int]]:
  """Returns the parts that may be skipped, pairs of a layer and a part.

  As in SWIFT, the first and the last layer are never skipped.

  Args:
    layers: number of layers of the model.
    parts: parts that may be skipped, 0 (attention) and 1 (MLP).
  """
  return [(layer, part) for layer in range(1, layers - 1) for part in parts]


def _check(layers: int, count: int, parts: Sequence[int]) -> None:
  most = len(_free(layers, parts))
  if not 1 <= count <= most:
    raise ValueError(f"count is {count}; {layers} layers allow 1 to {most}, "
                     "because the first and the last layer always run")


def random_search(score: Callable[[Sublayers], float], layers: int, count: int,
                  *, tries: int, seed: int = 0, parts: tuple[int, ...] = (0, 1)
                  ) -> tuple[Skipped, float]:
  """Returns the best of `tries` random sets of skipped attentions and MLPs.

  SWIFT begins with random sets like these.

  >>> skipped, score = random_search(
  ...     lambda sublayers: len(sublayers.mlp), layers=4, count=1, tries=8)
  >>> skipped <= {(1, 0), (2, 0)}, score
  (True, 4)

  Args:
    score: function of the `Sublayers` that run; its result is maximised.
    layers: number of layers of the model.
    count: number of skipped attentions and MLPs.
    tries: number of random sets.
    seed: seed of the random number generator.
    parts: parts that may be skipped, 0 (attention) and 1 (MLP).

  Returns:
    The best set, and its score.

  Raises:
    ValueError: `count` is not between 1 and the number of parts that may be
      skipped.
  """
  _check(layers, count, parts)
  rng, free = np.random.default_rng(seed), _free(layers, parts)
  draw = lambda: frozenset(
      free[i] for i in rng.choice(len(free), count, replace=False))
  return _best(score, layers, (draw() for _ in range(tries)))


def _best(score: Callable[[Sublayers], float], layers: int,
          sets: Iterable[Skipped]) -> tuple[Skipped, float]:
  # If several sets have the best score, `max` returns the first of them.
  scored = [(score(without(layers, skipped)), skipped)
            for skipped in dict.fromkeys(sets)]
  best, skipped = max(scored, key=lambda pair: pair[0])
  return skipped, best


def greedy_search(score: Callable[[Sublayers], float], layers: int, count: int,
                  *, parts: tuple[int, ...] = (0, 1)
                  ) -> tuple[Skipped, float]:
  """Returns a set of skipped attentions and MLPs, chosen one at a time.

  Each step adds the attention or MLP that gives the new set with the best
  score. For a model of L layers, about 2 * L * `count` sets are scored.
  Arguments, results and errors are those of `random_search`.
  """
  _check(layers, count, parts)
  skipped, best = frozenset(), float("-inf")
  for _ in range(count):
    skipped, best = _best(score, layers, (
        skipped | {part} for part in _free(layers, parts)
        if part not in skipped))
  return skipped, best


def local_search(score: Callable[[Sublayers], float], layers: int,
                 start: Skipped, *, tries: int, seed: int = 0,
                 parts: tuple[int, ...] = (0, 1)) -> tuple[Skipped, float]:
  """Improves a set of skipped attentions and MLPs by random swaps.

  In each try, a random skipped part is replaced by a random part that is not
  skipped. The new set is kept if its score is higher.

  Args:
    score: function of the `Sublayers` that run; its result is maximised.
    layers: number of layers of the model.
    start: initial set, pairs of a layer and a part.
    tries: number of swaps that are tried.
    seed: seed of the random number generator.
    parts: parts that may be skipped, 0 (attention) and 1 (MLP).

  Returns:
    The best set, and its score.
  """
  _check(layers, len(start), parts)
  rng, free = np.random.default_rng(seed), _free(layers, parts)
  skipped, best = start, score(without(layers, start))
  for _ in range(tries):
    running = [part for part in free if part not in skipped]
    if not running:
      break
    removed = sorted(skipped)[rng.integers(len(skipped))]
    new = skipped - {removed} | {running[rng.integers(len(running))]}
    new_score = score(without(layers, new))
    if new_score > best:
      skipped, best = new, new_score
  return skipped, best


def clasp(model: Transformer, params: chex.ArrayTree, tokens: ArrayLike,
          count: int) -> Skipped:
  """Returns layers to skip, chosen by CLaSp (2025, arXiv:2505.24196).

  CLaSp is a dynamic program over hidden states. D[i][j] is the residual stream
  before layer i if j of the earlier layers are skipped in the best way. There
  are two candidates for D[i + 1][j]: layer i applied to D[i][j], or D[i][j - 1]
  unchanged, which skips layer i. The program takes the candidate with the
  larger cosine similarity to the residual stream of the complete model. Here
  the similarity is averaged over all tokens of the windows; the paper uses only
  the last verified token. The program costs about as much as `count` + 2 passes
  of the model.

  Args:
    model: target model.
    params: parameters of the model.
    tokens: token ids of R windows of S tokens, `[R, S]` int32.
    count: number of skipped layers. The first and the last layer always run.

  Returns:
    The skipped parts: the attention and the MLP of each of `count` layers.

  Raises:
    ValueError: `count` is out of range.
  """
  layers = model.config.layers
  _check(layers, count, (0,))
  passes = np.asarray(_program(model, params, jnp.asarray(tokens), count))
  skipped, left = set(), count
  for layer in range(layers - 1, -1, -1):
    if passes[layer, left]:
      skipped.add(layer)
      left -= 1
  return frozenset((layer, part) for layer in skipped for part in (0, 1))


def _program(model: Transformer, params: chex.ArrayTree, tokens: jax.Array,
             count: int) -> jax.Array:
  """Runs the dynamic program of `clasp` and returns its decisions.

  Returns:
    `[L, count + 1]` bool for L layers. Entry [i, j] is True if layer i is
    skipped in the best way to skip j of the layers 0..i.
  """
  layers = model.config.layers

  @jax.jit
  def program(params, tokens):
    start = model.run(params, Sublayers.between(0, 0), tokens).hidden
    complete, ways = start, jnp.tile(start, (count + 1, 1, 1, 1))
    # The first and the last layer always run. reached[j] is True if at least j
    # of the layers before the current one may be skipped.
    reached = jnp.arange(count + 1) == 0
    skips = []
    for layer in range(layers):
      run = lambda x, layer=layer: model.run(
          params, Sublayers.between(layer, layer + 1), hidden=x).hidden
      complete, after = run(complete), jax.lax.map(run, ways)
      past, can = jnp.roll(ways, 1, axis=0), jnp.roll(reached, 1).at[0].set(
          False) & (0 < layer < layers - 1)
      better = _cosine(past, complete) > _cosine(after, complete)
      passed = can & (better | ~reached)
      ways = jnp.where(passed[:, None, None, None], past, after)
      reached = reached | can
      skips.append(passed)
    return jnp.stack(skips)

  return program(params, tokens)


def _cosine(ways: jax.Array, complete: jax.Array) -> jax.Array:
  """Returns `[J]`, the mean cosine similarity of hidden states.

  Args:
    ways: J alternative hidden states `[J, R, S, D]` for R windows of S tokens.
    complete: hidden states `[R, S, D]` of the complete model.
  """
  unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
  return jnp.mean(jnp.sum(unit(ways) * unit(complete), axis=-1), axis=(1, 2))


# Attentions (0) and MLPs (1) of Llama-2-13B that Draft & Verify skips (Zhang et
# al. 2023, arXiv:2309.08168). They found this set by Bayesian optimisation of
# the decoding speed.
LLAMA_2_13B = frozenset(
    [(layer, 0) for layer in (3, 5, 6, 8, 10, 11, 14, 15, 18, *range(22, 32),
                              *range(33, 38))]
    + [(layer, 1) for layer in (6, 9, 10, 11, 15, 24, 25, 27, 28, 35)])


def draft_and_verify(target: Transformer, sublayers: Sublayers, gamma: int,
                     stop: stop_rules.StopRule | None = STOP,
                     verifier: Verifier = BLOCK) -> Strategy:
  """Returns the strategy Draft & Verify (Zhang et al. 2023).

  The draft model is the target without some of its attentions and MLPs
  (arXiv:2309.08168). The functions of this module find attentions and MLPs that
  can be skipped. Pass the target's parameters as `params["drafter"]`.

  >>> from specjax import models, testing
  >>> target = testing.tiny_pair(7, layers=3).target
  >>> left = models.Sublayers.without(3, attention=[1])
  >>> model = draft_and_verify(target, left, gamma=4).drafter.network.model
  >>> model.sublayers.attention
  (0, 2)

  Args:
    target: complete target model.
    sublayers: attentions and MLPs that the draft model runs.
    gamma: maximum draft length.
    stop: stop rule; None drafts gamma tokens in all chains.
    verifier: verification rule for chains. `GreedyBlock` cannot be combined
      with a stop rule.
  """
  model = Shortened(target, sublayers)
  return Strategy(draft_model(model, gamma, stop=stop),
                  verifier)
