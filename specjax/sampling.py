"""From logits to laws, and from laws to tokens."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax import topology
from specjax.types import Draft
from specjax.types import Law
from specjax.types import Verdict

COINS_A_DRAW = 2  # of `inverse_cdf`
VERDICT_COINS = 2 * COINS_A_DRAW  # the stop and the extra token

_ONE_AS_BITS = 0x3F800000  # float32 1.0; non-negative floats sort as integers


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogitsTransform:
  """The law that tokens are drawn from, given a model's logits.

  Target and drafter share one transform, so that p and q are what was really
  sampled from. The steps are taken in the order of the fields below:
  temperature, top-k, top-p, min-p. Tokens that tie with the last one kept by
  top-k or top-p are kept too, so no order among equals is needed.

  Attributes:
    temperature: divides the logits; 0 puts all mass on the argmax (the lowest
      id among equals). None: it is given with every call, as the loop does
      with the temperature of each row.
    top_k: keep the k likeliest tokens; 0 keeps all.
    top_p: keep the likeliest tokens until their mass reaches top_p
      (nucleus sampling, Holtzman et al. 2020); in (0, 1].
    min_p: keep tokens at least min_p times as likely as the likeliest.
    banned: token ids that are never drawn.

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
  banned: tuple[int, ...] = ()

  def __post_init__(self):
    object.__setattr__(self, "banned", tuple(self.banned))
    if self.temperature is not None and not 0 <= self.temperature < math.inf:
      raise ValueError(f"temperature is {self.temperature}; it must be at "
                       "least 0: 0 is greedy, 1 is the model's own law")
    if self.top_k < 0 or self.top_k != int(self.top_k):
      raise ValueError(f"top_k is {self.top_k}; it must be a whole number of "
                       "at least 0: 0 keeps all tokens")
    if not 0 < self.top_p <= 1:
      raise ValueError(f"top_p is {self.top_p}; it must lie in (0, 1]: 1 keeps "
                       "all tokens")
    if not 0 <= self.min_p <= 1:
      raise ValueError(f"min_p is {self.min_p}; it must lie in [0, 1]: 0 keeps "
                       "all tokens")
    if any(token < 0 for token in self.banned):
      raise ValueError(f"banned holds {min(self.banned)}; token ids start at 0")

  def __call__(self, logits: jax.Array,
               temperature: jax.Array | float | None = None) -> jax.Array:
    """Probabilities `[..., V]` of `logits [..., V]`, float32 at least.

    Args:
      logits: of a model.
      temperature: `[...]`, or what broadcasts to it, where `self.temperature`
        is None; greedy and sampled rows share a program.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    if self.banned:
      logits = logits.at[..., jnp.array(self.banned)].set(-jnp.inf)
    logits = self._scaled(logits, temperature)
    if 0 < self.top_k < logits.shape[-1]:
      kept = jax.lax.top_k(logits, self.top_k)[0]
      logits = jnp.where(logits >= kept[..., -1:], logits, -jnp.inf)
    probs = jnp.exp(logits)  # the largest logit is 0
    probs = probs / jnp.sum(probs, axis=-1, keepdims=True)
    if self.top_p < 1:
      probs = _nucleus(probs, self.top_p)
    if self.min_p > 0:
      likeliest = jnp.max(probs, axis=-1, keepdims=True)
      probs = jnp.where(probs >= self.min_p * likeliest, probs, 0)
    if self.top_p < 1 or self.min_p > 0:
      probs = probs / jnp.sum(probs, axis=-1, keepdims=True)
    return probs

  def _scaled(self, logits, temperature):
    """Logits over the temperature, the largest 0; at 0 it is the only one."""
    largest = jnp.max(logits, axis=-1, keepdims=True)
    # Subtracting first keeps tiny temperatures from overflowing.
    below = logits - largest
    if self.temperature is not None:
      if self.temperature > 0:
        return below / self.temperature
      return _only_first(logits, largest)
    if temperature is None:
      raise ValueError("this transform takes the temperature of each row; call "
                       "transform(logits, state.temperature[:, None])")
    temperature = jnp.asarray(temperature, logits.dtype)[..., None]
    greedy = temperature <= 0
    return jnp.where(greedy, _only_first(logits, largest),
                     below / jnp.where(greedy, 1, temperature))

  def at(self, temperature: jax.Array | float | None) -> "RowTransform":
    """The transform of a row, or of rows, at a temperature; see `__call__`."""
    return RowTransform(self, temperature)


class RowTransform(NamedTuple):
  """A `LogitsTransform` with the temperature that it is called with.

  Attributes:
    transform: the transform.
    temperature: used where `transform.temperature` is None.
  """

  transform: LogitsTransform
  temperature: jax.Array | float | None

  @property
  def banned(self) -> tuple[int, ...]:
    return self.transform.banned

  def __call__(self, logits: jax.Array) -> jax.Array:
    """Probabilities `[..., V]` of `logits [..., V]`."""
    return self.transform(logits, self.temperature)


def _only_first(logits, largest):
  """0 at the first token whose logit is `largest [..., 1]`, else -inf."""
  size = logits.shape[-1]
  token = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
  first = jnp.min(jnp.where(logits == largest, token, size), axis=-1,
                  keepdims=True)
  return jnp.where(token == first, logits - largest, -jnp.inf)


def _nucleus(probs, top_p):
  """Zeroes the tokens outside the nucleus, without a sort.

  A token stays iff the mass of strictly likelier tokens is below top_p. That
  condition is monotone in its probability, so the smallest probability that
  stays is found by bisection over the bits of a float32: 30 reductions.
  """
  bits = jax.lax.bitcast_convert_type(
      probs.astype(jnp.float32), jnp.int32)

  def halve(_, bounds):
    low, high = bounds  # the mass above `high` is below top_p
    middle = (low + high) // 2
    above = jnp.sum(jnp.where(bits > middle, probs, 0), -1, keepdims=True)
    stays = above < top_p
    return jnp.where(stays, low, middle), jnp.where(stays, middle, high)

  shape = (*probs.shape[:-1], 1)
  _, threshold = jax.lax.fori_loop(
      0, 31, halve, (jnp.full(shape, -1, jnp.int32),
                     jnp.full(shape, _ONE_AS_BITS, jnp.int32)))
  return jnp.where(bits >= threshold, probs, 0)


def _first_above(weights, u):
  """Where the running sum of `weights [M]` first exceeds u times their sum.

  Whatever the rounding, that is the index of a positive weight, if any is.
  """
  total = jnp.cumsum(weights)
  positive = weights > 0
  hit = (total > u * total[-1]) & positive
  last = weights.shape[0] - 1 - jnp.argmax(positive[::-1])
  return jnp.where(jnp.any(hit), jnp.argmax(hit), last)


def inverse_cdf(weights: jax.Array, u: jax.Array) -> jax.Array:
  """Draws an index with probability proportional to its weight.

  Summing blocks first costs one pass over the weights and two short running
  sums, far less than Gumbel noise or one running sum of length V. Each of the
  two levels has a coin of its own: with one coin of 23 bits, a fifth of 128k
  tokens could never be drawn.

  Args:
    weights: `[V]`, not negative; they need not sum to 1.
    u: `[2]`, independent and uniform in [0, 1).

  Returns:
    `[]` int32.
  """
  size = weights.shape[0]
  block = 1 << max(0, math.ceil(math.log2(size) / 2))
  blocks = jnp.pad(weights, (0, -size % block)).reshape(-1, block)
  row = _first_above(jnp.sum(blocks, axis=-1), u[0])
  column = _first_above(blocks[row], u[1])
  return (row * block + column).astype(jnp.int32)


def toss(keys: jax.Array, rounds: jax.Array, count: int) -> jax.Array:
  """The coins of rows in one round or in many, uniform in [0, 1).

  Coin i of a row's round depends on (key, round, i) alone, not on `count`, nor
  on what else is tossed with it. The coins of many rounds cost about as much
  as those of one, and outside of a loop they cost it nothing.

  Args:
    keys: `[B]` PRNG keys.
    rounds: `[..., B]` int32, numbers of the rounds.
    count: coins of a row and round.

  Returns:
    `[..., B, count]` float32.
  """
  def one(key, number):
    return jax.random.uniform(
        jax.random.fold_in(key, number), (count,), jnp.float32)

  flat = jax.vmap(jax.vmap(one), (None, 0))(
      keys, rounds.reshape(-1, rounds.shape[-1]))
  return flat.reshape(*rounds.shape, count)


def sample(key: jax.Array, probs: jax.Array) -> jax.Array:
  """Draws one token `[]` from `probs [V]`."""
  return inverse_cdf(
      probs, jax.random.uniform(key, (COINS_A_DRAW,), probs.dtype))


def sample_verdict(law: Law, draft: Draft, u: jax.Array) -> Verdict:
  """Draws the outcome of a verification: the only coins that are tossed.

  Negative entries count as 0: the enumeration that proves a law lossless does
  not see this function, so it trusts nothing.

  Args:
    law: of one sequence.
    draft: N nodes.
    u: `[VERDICT_COINS]`, uniform in [0, 1).
  """
  node = inverse_cdf(jnp.maximum(law.stop, 0), u[:COINS_A_DRAW])
  ancestors = topology.ancestors(draft.parents)
  depths = topology.depths_of(ancestors)
  order = jnp.arange(depths.shape[0], dtype=jnp.int32)
  # The node of depth d on the path, and 0 beyond its end.
  at_depth = ancestors[node] & (depths == order[:, None])
  return Verdict(
      path=jnp.sum(jnp.where(at_depth, order, 0), axis=-1, dtype=jnp.int32),
      num_accepted=depths[node],
      next_token=inverse_cdf(jnp.maximum(law.next_token[node], 0),
                             u[COINS_A_DRAW:]),
  )
