"""Transforms of logits to probabilities, and sampling of tokens and verdicts.
"""

from collections.abc import Callable
from collections.abc import Iterable
import dataclasses
import functools
import math
from typing import Any
from typing import NamedTuple

import jax
from jax.extend import random as threefry
import jax.numpy as jnp
import numpy as np

from specjax import gpu
from specjax.gpu import sampling as gpu_sampling
from specjax.trees import topology
from specjax.types import Draft
from specjax.types import Law
from specjax.types import Verdict
from specjax.utils import fields

UNIFORMS_A_DRAW = 2  # see `inverse_cdf`
VERDICT_UNIFORMS = 2 * UNIFORMS_A_DRAW  # for the stop and the next token

LARGEST = 1e30  # a larger temperature or penalty would overflow float32 logits

_NOISE = 2**31 - 2  # folded into a row's key for the noise of `coupled`
_ONE_LEVEL = 64  # number of weights for which one running sum is accurate
_SPLIT = 16  # the number of blocks is a multiple of this, see `inverse_cdf`
# On a GPU, top-p divides the 2^30 floats up to 1 by 32 in each pass. The last
# part of a range is longer by up to 31, so seven passes are needed and not six.
_PARTS, _PASSES = 32, 7
_NEARLY_ALL = 0.999  # above this, 1 - top_p is within the rounding error


def smallest_mass(dtype: jax.typing.DTypeLike) -> float:
  """Returns the smallest sum at which weights `[V]` are precise.

  Callers treat weights with a smaller sum as empty, because such weights may
  contain subnormal numbers, which have fewer digits.

  Args:
    dtype: dtype of the weights.

  Raises:
    ValueError: the dtype is too coarse. In float16, for example, weights with
      a sum of 1/16 would count as empty.
  """
  limits = jnp.finfo(dtype)
  least = float(limits.tiny) / float(limits.eps)
  if least > limits.eps:
    raise ValueError(f"a distribution has dtype {jnp.dtype(dtype).name}, in "
                     "which small residuals are lost; use float32 or float64")
  return least


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogitsTransform:
  """The distribution of the next token, given the logits of a model.

  Target and drafter share one transform, so p and q are the distributions of
  the sampled tokens. The steps, in order: bans, constraints, temperature,
  top-k, top-p, min-p. Probabilities are normalised after top-k and again at the
  end. If tokens tie with the last token that top-k or top-p retains, they are
  also retained.

  Attributes:
    temperature: divisor of the logits. 0 is greedy: all mass on the argmax (the
      lowest id among equals). None: each call takes a temperature per row.
    top_k: number of most likely tokens that are retained; 0 retains all.
    top_p: mass of the most likely tokens that are retained (nucleus sampling,
      Holtzman et al. 2020); in (0, 1].
    min_p: smallest retained probability, relative to the largest one (Nguyen et
      al. 2024, arXiv:2407.01082); in [0, 1].
    coupled: True draws every token with noise that target and drafter share,
      see `noise_keys`. The text is then a function of the target, the row's key
      and this transform: no drafter, lossless rule, draft length or batch
      changes it. Over the keys, it still has the target's distribution.
    banned: token ids that are never drawn.
    constraints: constraints in their order, see `specjax.constraints`. The
      decoding loop and the drafters apply them after the bans, along every
      drafted path. `__call__` does not apply them, because it receives no
      sequence.

  Example:
    >>> import jax.numpy as jnp
    >>> import specjax as sj
    >>> logits = jnp.array([0.0, 0.0, -1.0])
    >>> print(sj.LogitsTransform(top_k=2)(logits))
    [0.5 0.5 0. ]
    >>> print(sj.LogitsTransform(temperature=0)(logits))
    [1. 0. 0.]
  """

  temperature: float | None = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  coupled: bool = False
  banned: tuple[int, ...] = ()
  constraints: tuple[Any, ...] = ()

  def __post_init__(self):
    for name in ("banned", "constraints"):
      if not isinstance(getattr(self, name), Iterable):
        raise ValueError(f"{name} is {getattr(self, name)!r}; give a tuple, "
                         "also for a single value")
    for token in self.banned:
      fields.check_at_least("a token that is banned", token, 0)
    object.__setattr__(self, "banned", tuple(map(int, self.banned)))
    object.__setattr__(self, "constraints", tuple(self.constraints))
    self._check_numbers()
    if not isinstance(self.coupled, bool):
      raise ValueError(f"coupled is {self.coupled!r}; it must be True or False")
    fields.check_fields(self, "top_k", least=0, more=": 0 keeps all tokens")
    object.__setattr__(self, "top_k", int(self.top_k))

  def _check_numbers(self) -> None:
    """Raises `ValueError` unless temperature, top_p and min_p are in range."""
    for name in ("temperature", "top_p", "min_p"):
      value = getattr(self, name)
      if not fields.is_number(value) and (
          name != "temperature" or value is not None):
        raise ValueError(f"{name} is {value!r}; it must be a number")
    if self.temperature is not None and not (
        0 <= self.temperature <= LARGEST):
      raise ValueError(f"temperature is {self.temperature}; it must be at "
                       f"least 0 and at most {LARGEST:g}: 0 is greedy, 1 is "
                       "the model's own distribution")
    if not 0 < self.top_p <= 1:
      raise ValueError(f"top_p is {self.top_p}; it must be in (0, 1]: 1 keeps "
                       "all tokens")
    if not 0 <= self.min_p <= 1:
      raise ValueError(f"min_p is {self.min_p}; it must be in [0, 1]: 0 keeps "
                       "all tokens")

  def __call__(self, logits: jax.Array,
               temperature: jax.Array | float | None = None) -> jax.Array:
    """Returns probabilities `[..., V]`, at least float32.

    Args:
      logits: `[..., V]`, logits of a model.
      temperature: temperature of each distribution, an array that broadcasts
        to `[...]`. It is used only if `self.temperature` is None. Greedy and
        sampled rows share a compiled program.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    if self.banned:
      logits = logits.at[..., jnp.array(self.banned)].set(-jnp.inf)
    temperature = self._given(temperature, logits.dtype)
    # Compiled code replaces subnormal numbers by 0.
    least = jnp.finfo(logits.dtype).tiny
    greedy = temperature < least
    keeps_all = self.top_k == 0 and self.top_p == 1 and self.min_p == 0
    if keeps_all and _uses_kernels(logits):
      is_of_rows = (temperature.ndim == logits.ndim
                    and temperature.size == len(logits))
      if temperature.size > 1 and not is_of_rows:
        temperature = jnp.broadcast_to(temperature, (*logits.shape[:-1], 1))
      return gpu_sampling.softmax(
          logits.reshape(-1, logits.shape[-1]), temperature.reshape(-1)
      ).reshape(logits.shape)
    # The maximum is subtracted before the division, because logits divided by a
    # tiny temperature would overflow.
    scalars = [jnp.max(logits, axis=-1, keepdims=True),
               jnp.where(greedy, 1, temperature)]
    if 0 < self.top_k < logits.shape[-1]:
      below = jax.lax.top_k(_scaled(logits, *scalars), self.top_k)[0]
      scalars.append(below[..., -1:])
    weights = jnp.exp(_scaled(logits, *scalars))
    scalars = [jnp.sum(weights, axis=-1, keepdims=True), *scalars]
    probs = weights / scalars[0]
    if self.top_p < 1:
      outside = _outside(self.top_p, probs, logits, *scalars)
      probs = jnp.where(probs.astype(jnp.float32) > outside, probs, 0)
    if self.min_p > 0:
      likeliest = jnp.max(probs, axis=-1, keepdims=True)
      probs = jnp.where(probs >= self.min_p * likeliest, probs, 0)
    if self.top_p < 1 or self.min_p > 0:
      probs = probs / jnp.sum(probs, axis=-1, keepdims=True)
    if self.temperature is not None and self.temperature >= least:
      return probs
    # The largest weight is 1, or NaN if the logits are not finite.
    return jnp.where(greedy, _first_only(logits, weights, greedy), probs)

  def _given(self, temperature: jax.Array | float | None,
             dtype: jax.typing.DTypeLike) -> jax.Array:
    """Returns the temperature, `[..., 1]`."""
    if self.temperature is not None:
      temperature = self.temperature
    if temperature is None:
      raise ValueError("this transform takes the temperature of each row; call "
                       "transform(logits, state.temperature[:, None])")
    return jnp.asarray(temperature, dtype)[..., None]

  def under(self, shared: "LogitsTransform") -> "LogitsTransform":
    """Returns a copy with the constraints and the coupling of `shared`."""
    return dataclasses.replace(self, constraints=shared.constraints,
                               coupled=shared.coupled)

  def at(self, temperature: jax.Array | float | None) -> "RowTransform":
    """Returns this transform with the temperature of one or more rows."""
    return RowTransform(self, temperature)


class RowTransform(NamedTuple):
  """A `LogitsTransform` with the temperature of one or more rows.

  Attributes:
    transform: the transform.
    temperature: temperature for the case that `transform.temperature` is None.
  """

  transform: LogitsTransform
  temperature: jax.Array | float | None

  @property
  def banned(self) -> tuple[int, ...]:
    return self.transform.banned

  def __call__(self, logits: jax.Array) -> jax.Array:
    """Returns probabilities `[..., V]` of `logits [..., V]`."""
    return self.transform(logits, self.temperature)


def _uses_kernels(x: jax.Array) -> bool:
  """Returns True if GPU kernels read `x [..., V]`."""
  return (gpu.in_use(x) and x.dtype == jnp.float32
          and gpu_sampling.supports(x.shape[-1]))


def _first_only(logits: jax.Array, weights: jax.Array, wanted: jax.Array
                ) -> jax.Array:
  """Returns `weights` with all entries 0 except at the argmax of the logits.

  The argmax is the lowest id among equal logits. Only rows marked in `wanted`
  (greedy rows) need the result. Greedy and sampled rows share a program, so the
  search is skipped at run time if no row is greedy.
  """
  size = logits.shape[-1]
  # Every use creates the ids again, because an operand of the branch below
  # would be stored in memory.
  token = lambda: jax.lax.broadcasted_iota(
      jnp.int32, logits.shape, logits.ndim - 1)

  def first(logits):  # several times as fast as an argmax on a CPU
    largest = jnp.max(logits, axis=-1, keepdims=True)
    return jnp.min(jnp.where(logits == largest, token(), size - 1), axis=-1)

  # On a GPU, the host would wait for the condition of a branch.
  found = jax.lax.platform_dependent(
      logits, wanted, cuda=lambda logits, wanted: first(logits),
      default=lambda logits, wanted: jax.lax.cond(
          jnp.any(wanted), first,
          lambda logits: jnp.zeros(logits.shape[:-1], jnp.int32), logits))
  return jnp.where(token() == found[..., None], weights, 0)


def _scaled(logits: jax.Array, largest: jax.Array, temperature: jax.Array,
            least: jax.Array | None = None) -> jax.Array:
  """Returns (logits - largest) / temperature; values below `least` are -inf.
  """
  scaled = (logits - largest) / temperature
  return scaled if least is None else jnp.where(
      scaled >= least, scaled, -jnp.inf)


def _outside(top_p: float, probs: jax.Array, logits: jax.Array,
             total: jax.Array, *scalars: jax.Array) -> jax.Array:
  """Returns the threshold of top-p, `[..., 1]` float32.

  The nucleus consists of the tokens with a probability above the threshold.
  The vocabulary is not sorted. A token is retained iff the mass of strictly
  more likely tokens is below top_p. This condition is monotone in the
  probability, so a search over the bits of a float32 suffices. A CPU is limited
  by computation and halves the range in every pass. An accelerator is limited
  by memory, so it divides the range by four and recomputes the probabilities
  from the logits. A GPU divides it by 32, so that a fixed and small number of
  passes suffices: the host would wait for the condition of another loop.
  """
  given = jax.lax.stop_gradient((probs, logits, total, *scalars))

  def recomputed(probs, logits, total, *scalars, **options):
    def laws(bounds):
      # The barrier ties the logits to the bounds. Otherwise the compiler would
      # compute the probabilities once and store them.
      _, own = jax.lax.optimization_barrier((bounds, logits))
      return jnp.exp(_scaled(own, *scalars)) / total

    # The recomputed probabilities may be rounded differently from those of the
    # caller, so the threshold is lowered by a few units in the last place.
    return _search(top_p, laws, total, logits.shape[-1], **options) * (
        1 - 4 * jnp.finfo(jnp.float32).eps)

  return jax.lax.platform_dependent(
      *given, default=functools.partial(recomputed, parts=4),
      cuda=functools.partial(recomputed, parts=_PARTS, passes=_PASSES),
      cpu=lambda probs, logits, total, *_: _search(
          top_p, lambda _: probs, total, logits.shape[-1], parts=2))


def _search(top_p: float, laws: Callable[[Any], jax.Array], like: jax.Array,
            vocab: int, parts: int, passes: int | None = None) -> jax.Array:
  """Returns the threshold of `_outside`, found by repeated passes over p.

  A row is done when its range contains a single token. Its bounds do not change
  after that, so its result does not depend on other rows. The search ends when
  all rows are done.

  Args:
    top_p: mass of the nucleus.
    laws: function of the bounds that returns the probabilities `[..., V]`.
    like: array with the shape and the dtype of the sums, `[..., 1]`.
    vocab: V, size of the vocabulary.
    parts: number of parts into which a pass divides the range.
    passes: number of passes. None: until all rows are done.
  """
  as_float = lambda bits: jax.lax.bitcast_convert_type(bits, jnp.float32)
  # Tokens below this bound are not in the nucleus: their total mass is at most
  # (1 - top_p) / 2. The factor 1/2 leaves a margin for rounding.
  least = 0 if top_p > _NEARLY_ALL else (1 - top_p) / (2 * vocab)

  def going(bounds):
    low, high, over_low, over_high = bounds
    # Two tokens in the range would have twice the mass of its lower end.
    single = over_low - over_high < 1.5 * as_float(low) - 1e-6
    return (high - low > 1) & ~single

  def narrow(bounds):
    low, high, *_ = new = bounds
    probs = laws(bounds)
    values = probs.astype(jnp.float32)
    for part in range(1, parts):
      middle = low + jnp.maximum((high - low) // parts, 1) * part
      over = jnp.sum(jnp.where(values > as_float(middle), probs, 0), -1,
                     keepdims=True)
      inside = over < top_p
      new = (jnp.where(inside, new[0], jnp.maximum(new[0], middle)),
             jnp.where(inside, jnp.minimum(new[1], middle), new[1]),
             jnp.where(inside, new[2], jnp.minimum(new[2], over)),
             jnp.where(inside, jnp.maximum(new[3], over), new[3]))
    goes_on = going(bounds)
    return tuple(jnp.where(goes_on, a, b) for a, b in zip(new, bounds))

  full = functools.partial(jnp.full, like.shape)
  bounds = (full(np.float32(least).view(np.int32)),
            full(np.float32(1).view(np.int32)),
            full(1, like.dtype), full(0, like.dtype))
  if passes is None:
    bounds = jax.lax.while_loop(
        lambda bounds: jnp.any(going(bounds)), narrow, bounds)
  else:
    bounds = jax.lax.fori_loop(0, passes, lambda _, x: narrow(x), bounds)
  return as_float(bounds[0])


def _first_above(weights: jax.Array, u: jax.Array) -> jax.Array:
  """Returns the first index whose running sum exceeds u times the total.

  If any weight is positive, the weight at the index is positive, even if sums
  are rounded.

  Args:
    weights: `[M]`, not negative.
    u: `[]` in [0, 1), a fraction of the sum of all weights.
  """
  total = jnp.cumsum(weights)
  index = jnp.arange(weights.shape[0], dtype=jnp.int32)
  # argmax returns the first of the highest scores. Every index whose running
  # sum exceeds u times the total has the score M. If u is near 1, rounding may
  # leave no such index. Then the last positive weight has the highest score.
  score = jnp.where(total > u * total[-1], weights.shape[0], index)
  return jnp.argmax(jnp.where(weights > 0, score, -1)).astype(jnp.int32)


def inverse_cdf(weights: jax.Array, u: jax.Array) -> jax.Array:
  """Draws an index with probability proportional to its weight.

  The weights are divided into blocks. The first draw selects a block by its
  sum, the second an index in the block. This costs one pass over the weights
  and two short running sums, much less than Gumbel noise or a running sum of
  length V. Each draw has its own uniform: with one uniform of 23 bits, a fifth
  of 128k tokens could never be drawn. Up to 64 weights need only one draw.

  The number of blocks is a multiple of 16. If the weights are split over up to
  16 devices, each device therefore has complete blocks. Only the sums and one
  block are transferred.

  Args:
    weights: `[V]`, not negative. Their sum need not be 1.
    u: `[2]`, independent and uniform in [0, 1).

  Returns:
    `[]` int32.
  """
  size = weights.shape[0]
  if size <= _ONE_LEVEL:
    return _first_above(weights, u[0])
  if _uses_kernels(weights):
    return gpu_sampling.draw(weights[None], u[None])[0]
  block = 1 << math.ceil(math.log2(size) / 2)
  blocks = jnp.pad(weights, (0, -size % (_SPLIT * block))).reshape(-1, block)
  row = _first_above(jnp.sum(blocks, axis=-1), u[0])
  return row * block + _first_above(blocks[row], u[1])


def uniforms(keys: jax.Array, rounds: jax.Array, count: int) -> jax.Array:
  """Returns uniforms in [0, 1) for each row in one or more rounds.

  Uniform i of a row in a round depends only on (key, round, i). Drawing the
  uniforms of many rounds costs about as much as drawing those of one round.

  Args:
    keys: `[B]` PRNG keys.
    rounds: `[..., B]` int32, numbers of the rounds.
    count: number of uniforms per row and round.

  Returns:
    `[..., B, count]` float32.
  """
  def one(key, number):
    return jax.random.uniform(
        jax.random.fold_in(key, number), (count,), jnp.float32)

  flat = jax.vmap(jax.vmap(one), (None, 0))(
      keys, rounds.reshape(-1, rounds.shape[-1]))
  return flat.reshape(*rounds.shape, count)


def noise_keys(keys: jax.Array, positions: jax.Array) -> jax.Array:
  """Returns the keys of the noise that `LogitsTransform.coupled` shares.

  The noise of a position consists of one Exp(1) variable S_i per token i. The
  target's token is Y = argmin S_i / p_i, and a drafted token of the same
  position is X = argmin S_i / q_i (Daliri et al. 2024, arXiv:2408.07978).

  * P(Y = i) = p_i: S_i / p_i is the first arrival of a Poisson process of rate
    p_i, and the first arrival of all processes is of process i with probability
    p_i / sum p. The noise of a position is independent of the tokens before it,
    because these depend on the noise of earlier positions only. So by induction
    the text has the target's distribution over the keys.
  * Y depends on no draft. A drafted token is accepted iff it equals Y, which is
    greedy decoding with one-hot distributions. The noise of a rejected position
    may be used again, because it yields the same Y.
  * P(X = Y) is at least (1 - TV) / (1 + TV), where TV is the total variation
    between p and q. `verifiers.Coupled` has the joint distribution of X and Y.

  Args:
    keys: `[B]` threefry PRNG keys of the rows.
    positions: `[B, n]` int32, indices of tokens in the sequences of the rows.

  Returns:
    `[B, n, 2]` uint32, see `draw`.
  """
  def one(key, positions):
    key = jax.random.fold_in(key, _NOISE)
    return jax.vmap(lambda position: jax.random.key_data(
        jax.random.fold_in(key, position)))(positions)

  return jax.vmap(one)(keys, positions)


def noise(key: jax.Array, size: int, dtype: jax.typing.DTypeLike = jnp.float32
          ) -> jax.Array:
  """Returns `[size]`, the Exp(1) variables S_i of a key of `noise_keys`.

  S_i depends on the key and on i, and not on `size`. So models whose
  vocabularies have common ids share the noise of these ids.

  Args:
    key: `[2]` uint32.
    size: number V of variables.
    dtype: floating-point type.
  """
  # The token is drawn by the smallest S, so S needs many digits near 0. With
  # uniforms of 23 bits, S would be 0 at one of 128k tokens in 1.5 % of all
  # positions, and that token would be drawn whatever its probability is.
  count = jnp.arange(size, dtype=jnp.uint32)
  high, low = threefry.threefry_2x32(
      key, jnp.stack([jnp.zeros_like(count), count])).astype(dtype)
  uniform = high * 2.0**-32 + (low + 0.5) * 2.0**-64
  # The largest uniforms are rounded to 1, for which S would be infinite.
  return -jnp.log1p(-jnp.minimum(uniform, 1 - jnp.finfo(dtype).epsneg))


def draw(weights: jax.Array, source: jax.Array) -> jax.Array:
  """Draws an index `[]` int32 with probability proportional to its weight.

  Args:
    weights: `[V]`, not negative.
    source: `[2]`. Floats are the uniforms of `inverse_cdf`. uint32 is a key of
      `noise_keys`: the result is the argmin of S_i / weights_i.
  """
  if source.dtype != jnp.uint32:
    return inverse_cdf(weights, source)
  return jnp.argmax(weights / noise(
      source, weights.shape[0], weights.dtype)).astype(jnp.int32)


def sample(key: jax.Array, probs: jax.Array) -> jax.Array:
  """Draws one token `[]` from `probs [V]`."""
  return inverse_cdf(
      probs, jax.random.uniform(key, (UNIFORMS_A_DRAW,), probs.dtype))


def sample_verdict(law: Law, draft: Draft, u: jax.Array) -> Verdict:
  """Draws the outcome of a verification.

  Negative entries of the law count as 0. `exact.certify` rejects rules with
  negative entries that rounding does not explain.

  Args:
    law: distribution of the outcome for one sequence.
    draft: draft with N nodes.
    u: `[VERDICT_UNIFORMS]`, uniform in [0, 1).
  """
  return sample_outcome(law, draft, u)[0]


def sample_outcome(law: Law, draft: Draft, u: jax.Array,
                   ancestors: jax.Array | None = None
                   ) -> tuple[Verdict, jax.Array]:
  """Returns the result of `sample_verdict`, and the next token's distribution.

  Args:
    law: distribution of the outcome for one sequence.
    draft: draft with N nodes.
    u: `[VERDICT_UNIFORMS]`, uniform in [0, 1).
    ancestors: `[N, N]` bool, result of `topology.ancestors`. None: it is
      computed.

  Returns:
    The verdict, and the row `[V]` of `law.next_token` at the sampled stop.
  """
  node = inverse_cdf(jnp.maximum(law.stop, 0), u[:UNIFORMS_A_DRAW])
  if ancestors is None:
    ancestors = topology.ancestors(draft.parents)
  depths = topology.depths_of(ancestors)
  order = jnp.arange(depths.shape[0], dtype=jnp.int32)
  # at_depth[d, i] is True if node i is the node of depth d on the path. Beyond
  # the end of the path it is False for all nodes, so the sum below is 0.
  at_depth = ancestors[node] & (depths == order[:, None])
  row = law.next_row(node)
  return Verdict(
      path=jnp.sum(jnp.where(at_depth, order, 0), axis=-1, dtype=jnp.int32),
      num_accepted=depths[node],
      next_token=inverse_cdf(jnp.maximum(row, 0), u[UNIFORMS_A_DRAW:]),
  ), row
