"""Search for layers that a target can skip when it drafts for itself.

A set of attentions and MLPs is scored by one pass over windows of the target's
own text, with what is left out as data (`models.Masked`), so that one program
scores all sets. For every token the pass gives q beside the target's p, and

  agreement   the share of tokens whose argmax is the target's, SWIFT's
              "matchness" (Xia et al. 2024, arXiv:2410.06916)
  accepted    the expected number of accepted tokens of a draft that begins
              there, sum_(i <= gamma) prod_(j < i) min(1, q_j / p_j)
              sum_v min(p_i(v), q_i(v)): that of token verification, with no
              draft drawn (see `objectives.AcceptedLength`). At temperature 0
              sum_i prod_(j <= i) [argmax q_j = argmax p_j].

The searches know a score and nothing of models. `clasp` looks at hidden states
instead. What they find is `Sublayers`, for `models.Shortened`.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from specjax.interfaces import Verifier
from specjax.methods import stop_rules
from specjax.methods.draft_models.language_model import LanguageModel
from specjax.methods.self_speculation.skipping import survival
from specjax.methods.strategy import BLOCK
from specjax.methods.strategy import STOP
from specjax.methods.strategy import Strategy
from specjax.models.shortened import mask
from specjax.models.shortened import Shortened
from specjax.models.sublayers import Sublayers
from specjax.models.transformer import Transformer

PARTS = ("attention", "mlp")


Skipped = frozenset[tuple[int, int]]  # pairs of a layer and a place in PARTS


@dataclasses.dataclass(frozen=True, eq=False)
class Scored:
  """Scores of a set on R windows.

  Attributes:
    agreement: `[R]`, share of tokens whose argmax is the target's.
    survival: probability `[R, gamma]` that i = 1..gamma tokens of a draft are
      accepted, averaged over starting positions.
  """

  agreement: np.ndarray
  survival: np.ndarray

  @property
  def accepted(self) -> np.ndarray:
    """Expected number of accepted tokens `[R]`."""
    return self.survival.sum(-1)


def scorer(model: Transformer, params: Any, tokens: ArrayLike, gamma: int, *,
           temperature: float = 1.0, first: int = 0
           ) -> Callable[[Sublayers], Scored]:
  """Returns a function that scores a set; the target itself is run once.

  Args:
    model: target model.
    params: parameters of the model.
    tokens: `[R, S + 1]` int32, text of the target at this temperature. Its laws
      take R S V floats.
    gamma: draft length.
    temperature: 0 or 1.
    first: place of the first token that was the target's; the laws of those
      from there on count.

  Raises:
    ValueError: the rows have too few tokens for a draft, or the temperature is
      another.
  """
  tokens = jnp.asarray(tokens, jnp.int32)
  own, start = tokens.shape[1] - max(first, 1), max(first, 1) - 1
  if temperature not in (0.0, 1.0):
    raise ValueError(f"temperature is {temperature}; sets are scored at 0 or 1")
  if own < gamma:
    raise ValueError(f"windows have {max(own, 0)} tokens of the target's own "
                     f"and gamma is {gamma}; give as many at least")
  whole = Sublayers.between(0, model.config.layers)

  def logits(params, row, keep):
    out = model.run(params, whole, row[None, :-1], keep=keep)
    return out.logits[0, start:]

  @jax.jit
  def laws(params):
    ones = mask(whole, model.config.layers)
    return jax.lax.map(lambda row: logits(params, row, ones), tokens)

  @jax.jit
  def measure(params, laws, keep):
    def one(x):
      row, p = x
      q = logits(params, row, keep)
      same = jnp.argmax(p, -1) == jnp.argmax(q, -1)
      if temperature:
        found = _chances(p, q, row[start + 1:])
      else:
        found = same.astype(jnp.float32), same.astype(jnp.float32)
      return jnp.mean(same), survival(*found, gamma)

    return jax.lax.map(one, (tokens, laws))

  p = laws(params)
  return lambda sublayers: Scored(*map(np.asarray, measure(
      params, p, mask(sublayers, model.config.layers))))


def _chances(p_logits: jax.Array, q_logits: jax.Array, tokens: jax.Array
             ) -> tuple[jax.Array, jax.Array]:
  """Returns min(1, q / p) of the tokens and sum_v min(p, q), `[S]` each."""
  log_p, log_q = map(jax.nn.log_softmax, (p_logits, q_logits))
  ratio = jnp.take_along_axis(log_q - log_p, tokens[:, None], axis=1)[:, 0]
  return (jnp.exp(jnp.minimum(ratio, 0)),
          jnp.sum(jnp.exp(jnp.minimum(log_p, log_q)), axis=-1))


def without(layers: int, skipped: Iterable[tuple[int, int]]) -> Sublayers:
  """Returns a model of `layers` layers without the `skipped` parts."""
  left_out = [[layer for layer, part in skipped if part == i]
              for i in range(len(PARTS))]
  return Sublayers.without(layers, *left_out)


def _free(layers: int, parts: Sequence[int]) -> list[tuple[int, int]]:
  """Returns the parts that may be skipped: not in the first or last layer
  (SWIFT)."""
  return [(layer, part) for layer in range(1, layers - 1) for part in parts]


def _check(layers: int, count: int, parts: Sequence[int]) -> None:
  most = len(_free(layers, parts))
  if not 1 <= count <= most:
    raise ValueError(f"{count} parts are to be left out of {layers} layers; "
                     f"give 1 to {most}, for the first and the last layer stay")


def random_search(score: Callable[[Sublayers], float], layers: int, count: int,
                  *, tries: int, seed: int = 0, parts: tuple[int, ...] = (0, 1)
                  ) -> tuple[Skipped, float]:
  """Returns the best of random sets, like SWIFT's first proposals.

  Args:
    score: function to maximise.
    layers: number of layers L.
    count: number of skipped attentions and MLPs.
    tries: number of scored sets.
    seed: seed of the sets.
    parts: skippable parts, of `PARTS`.

  Returns:
    The set and its score.

  Raises:
    ValueError: `count` is out of range.
  """
  _check(layers, count, parts)
  rng, free = np.random.default_rng(seed), _free(layers, parts)
  draw = lambda: frozenset(
      free[i] for i in rng.choice(len(free), count, replace=False))
  return _best(score, layers, (draw() for _ in range(tries)))


def _best(score: Callable[[Sublayers], float], layers: int,
          sets: Iterable[Skipped]) -> tuple[Skipped, float]:
  # Equal scores go to the set that came first.
  scored = [(score(without(layers, one)), one) for one in dict.fromkeys(sets)]
  best, found = max(scored, key=lambda pair: pair[0])
  return found, best


def greedy_search(score: Callable[[Sublayers], float], layers: int, count: int,
                  *, parts: tuple[int, ...] = (0, 1)
                  ) -> tuple[Skipped, float]:
  """Skips one part after the other, the best one each time.

  Arguments, results and errors are those of `random_search`. A search for
  `count` parts scores about 2 L count sets.
  """
  _check(layers, count, parts)
  found, best = frozenset(), float("-inf")
  for _ in range(count):
    found, best = _best(score, layers, (
        found | {one} for one in _free(layers, parts) if one not in found))
  return found, best


def local_search(score: Callable[[Sublayers], float], layers: int,
                 start: Skipped, *, tries: int, seed: int = 0,
                 parts: tuple[int, ...] = (0, 1)) -> tuple[Skipped, float]:
  """Swaps one skipped part for another as long as the score increases.

  Args:
    score: function to maximise.
    layers: number of layers L.
    start: initial set.
    tries: number of scored swaps.
    seed: seed of the swaps.
    parts: skippable parts, of `PARTS`.

  Returns:
    As there.
  """
  _check(layers, len(start), parts)
  rng, free = np.random.default_rng(seed), _free(layers, parts)
  found, best = start, score(without(layers, start))
  for _ in range(tries):
    kept = [one for one in free if one not in found]
    if not kept:
      break
    out = sorted(found)[rng.integers(len(found))]
    new = found - {out} | {kept[rng.integers(len(kept))]}
    other = score(without(layers, new))
    if other > best:
      found, best = new, other
  return found, best


def clasp(model: Transformer, params: Any, tokens: ArrayLike, count: int
          ) -> Skipped:
  """Returns whole layers to skip, by a dynamic program over hidden states.

  CLaSp (2025, arXiv:2505.24196). D[i][j] is the stream before layer i of the
  best way to leave out j of the layers before it. D[i + 1][j] is the one of
  layer i applied to D[i][j], and D[i][j - 1] as it is, that has the larger
  cosine with the whole model's stream. Here the cosine is a mean over all
  tokens of some windows, where the paper takes the last verified token. It
  costs about `count` passes.

  Args:
    model: target model.
    params: parameters of the model.
    tokens: token ids `[R, S]` int32.
    count: layers to leave out; the first and the last one stay.

  Returns:
    Both parts of `count` layers.

  Raises:
    ValueError: `count` is out of range.
  """
  layers = model.config.layers
  _check(layers, count, (0,))
  passes = np.asarray(_program(model, params, jnp.asarray(tokens), count))
  found, left = set(), count
  for layer in range(layers - 1, -1, -1):
    if passes[layer, left]:
      found.add(layer)
      left -= 1
  return frozenset((layer, part) for layer in found for part in (0, 1))


def _program(model: Transformer, params: Any, tokens: jax.Array, count: int
             ) -> jax.Array:
  """Returns `[L, count + 1]` bool, True if D[i + 1][j] skips layer i."""
  layers = model.config.layers

  @jax.jit
  def program(params, tokens):
    start = model.run(params, Sublayers.between(0, 0), tokens).hidden
    whole, ways = start, jnp.tile(start, (count + 1, 1, 1, 1))
    reached = jnp.arange(count + 1) == 0  # ways of leaving out j so far
    found = []
    for layer in range(layers):
      run = lambda x, layer=layer: model.run(
          params, Sublayers.between(layer, layer + 1), hidden=x).hidden
      whole, after = run(whole), jax.lax.map(run, ways)
      past, can = jnp.roll(ways, 1, axis=0), jnp.roll(reached, 1).at[0].set(
          False) & (0 < layer < layers - 1)
      better = _cosine(past, whole) > _cosine(after, whole)
      passed = can & (better | ~reached)
      ways = jnp.where(passed[:, None, None, None], past, after)
      reached = reached | can
      found.append(passed)
    return jnp.stack(found)

  return program(params, tokens)


def _cosine(ways: jax.Array, whole: jax.Array) -> jax.Array:
  """Returns `[J]`, the mean cosine of streams `[J, R, S, D]` with `[R, S,
  D]`."""
  unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
  return jnp.mean(jnp.sum(unit(ways) * unit(whole), axis=-1), axis=(1, 2))


# The sets that Draft & Verify (Zhang et al. 2023, arXiv:2309.08168) found for
# Llama-2-13B by Bayesian optimisation of its speed.
LLAMA_2_13B = frozenset(
    [(layer, 0) for layer in (3, 5, 6, 8, 10, 11, 14, 15, 18, *range(22, 32),
                              *range(33, 38))]
    + [(layer, 1) for layer in (6, 9, 10, 11, 15, 24, 25, 27, 28, 35)])


def draft_and_verify(target: Transformer, sublayers: Sublayers, gamma: int,
                     stop: stop_rules.StopRule | None = STOP,
                     verifier: Verifier = BLOCK) -> Strategy:
  """Drafts with the target without some of its attentions and MLPs.

  Zhang et al. 2023 (arXiv:2309.08168). What to leave out is searched by
  `skip_search`; `params["drafter"]` are the target's parameters.

  >>> from specjax import models, testing
  >>> target = testing.tiny_pair(7, layers=3).target
  >>> left = models.Sublayers.without(3, attention=[1])
  >>> draft_and_verify(target, left, gamma=4).drafter.model.sublayers.attention
  (0, 2)

  Args:
    target: complete target model.
    sublayers: parts that run.
    gamma: maximal draft length.
    stop: stop rule; None: all chains have gamma tokens.
    verifier: rule for chains, see `early_exit`.
  """
  model = Shortened(target, sublayers)
  return Strategy(LanguageModel(model=model, gamma=gamma, stop=stop),
                  verifier)
