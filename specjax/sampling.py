"""From logits to laws, and from laws to tokens."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from specjax import topology
from specjax.types import Draft
from specjax.types import Law
from specjax.types import Verdict

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
      id among equals).
    top_k: keep the k likeliest tokens; 0 keeps all.
    top_p: keep the likeliest tokens until their mass reaches top_p
      (nucleus sampling, Holtzman et al. 2020); in (0, 1].
    min_p: keep tokens at least min_p times as likely as the likeliest.
    banned: token ids that are never drawn.
  """

  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  banned: tuple[int, ...] = ()

  def __post_init__(self):
    object.__setattr__(self, "banned", tuple(self.banned))
    if not 0 <= self.temperature < math.inf:
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

  def __call__(self, logits):
    """Probabilities `[..., V]` of `logits [..., V]`, float32 at least."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    if self.banned:
      logits = logits.at[..., jnp.array(self.banned)].set(-jnp.inf)
    if self.temperature == 0:
      return jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1],
                            dtype=logits.dtype)
    logits = logits / self.temperature
    if 0 < self.top_k < logits.shape[-1]:
      kept = jax.lax.top_k(logits, self.top_k)[0]
      logits = jnp.where(logits >= kept[..., -1:], logits, -jnp.inf)
    probs = jax.nn.softmax(logits)
    if self.top_p < 1:
      probs = _nucleus(probs, self.top_p)
    if self.min_p > 0:
      likeliest = jnp.max(probs, axis=-1, keepdims=True)
      probs = jnp.where(probs >= self.min_p * likeliest, probs, 0)
    if self.top_p < 1 or self.min_p > 0:
      probs = probs / jnp.sum(probs, axis=-1, keepdims=True)
    return probs


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


def _first_above(weights, target):
  """Where the running sum of `weights [M]` first exceeds `target`.

  Returns the index, always of a positive weight whatever the rounding, and
  the part of the target that is left at its start.
  """
  total = jnp.cumsum(weights)
  positive = weights > 0
  hit = (total > target) & positive
  last = weights.shape[0] - 1 - jnp.argmax(positive[::-1])
  index = jnp.where(jnp.any(hit), jnp.argmax(hit), last)
  return index, target - (total[index] - weights[index])


def inverse_cdf(weights, u):
  """Draws an index with probability proportional to its weight.

  Args:
    weights: `[V]`, not negative; they need not sum to 1.
    u: `[]`, uniform in [0, 1).

  Returns:
    `[]` int32. Summing blocks first costs one pass over the weights and two
    short running sums, far less than Gumbel noise or one sum of length V.
  """
  size = weights.shape[0]
  block = 1 << max(0, math.ceil(math.log2(size) / 2))
  blocks = jnp.pad(weights, (0, -size % block)).reshape(-1, block)
  sums = jnp.sum(blocks, axis=-1)
  row, rest = _first_above(sums, u * jnp.sum(sums))
  column, _ = _first_above(blocks[row], rest)
  return (row * block + column).astype(jnp.int32)


def coins(key, count: int, dtype=jnp.float32):
  """`[count]` numbers, uniform in [0, 1); number i does not depend on `count`.

  A program draws all that it needs of a key at once: every place that makes
  random bits costs time to compile and to run.
  """
  keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(count))
  return jax.vmap(lambda key: jax.random.uniform(key, (), dtype))(keys)


def sample(key, probs):
  """Draws one token from `probs [V]`."""
  return inverse_cdf(probs, jax.random.uniform(key, (), probs.dtype))


def sample_verdict(law: Law, draft: Draft, key) -> Verdict:
  """Draws the outcome of a verification: the only coins that are tossed.

  Negative entries count as 0: the enumeration that proves a law lossless does
  not see this function, so it trusts nothing.
  """
  u = coins(key, 2, law.stop.dtype)
  node = inverse_cdf(jnp.maximum(law.stop, 0), u[0])
  on_path = topology.ancestors(draft.parents)[node]
  path = jnp.nonzero(on_path, size=on_path.shape[0], fill_value=0)[0]
  return Verdict(
      path=path.astype(jnp.int32),
      num_accepted=jnp.sum(on_path, dtype=jnp.int32) - 1,
      next_token=inverse_cdf(jnp.maximum(law.next_token[node], 0), u[1]),
  )
