"""From logits to laws, and from laws to tokens."""

from collections.abc import Iterable
import dataclasses
import functools
import math
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.trees import topology
from specjax.types import Draft
from specjax.types import Law
from specjax.types import Verdict
from specjax.utils import fields

UNIFORMS_A_DRAW = 2  # of `inverse_cdf`
VERDICT_UNIFORMS = 2 * UNIFORMS_A_DRAW  # the stop and the extra token

LARGEST = 1e30  # temperature or penalty, so that float32 logits stay finite

_ONE_LEVEL = 64  # up to so many weights one running sum is accurate enough
_SPLIT = 16  # divides the number of blocks: so many devices hold whole ones
_NEARLY_ALL = 0.999  # what a top_p above it cuts off is below rounding error


def smallest_mass(dtype: Any) -> float:
  """The mass of weights `[V]` up to which a law of them counts as empty.

  Less than that, and its entries lose digits as subnormal numbers.

  Raises:
    ValueError: laws in this dtype are too coarse: float16 would lose a mass of
      a sixteenth.
  """
  limits = jnp.finfo(dtype)
  least = float(limits.tiny) / float(limits.eps)
  if least > limits.eps:
    raise ValueError(f"a law is in {jnp.dtype(dtype).name}, in which small "
                     "residuals are lost; give laws in float32 or float64")
  return least


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogitsTransform:
  """The law that tokens are drawn from, given a model's logits.

  Target and drafter share one transform, so that p and q are what was really
  sampled from. The steps, in their order: banned, constraints, temperature,
  top-k, top-p, min-p; probabilities are normalised again after each cut. Tokens
  that tie with the last one kept by top-k or top-p are kept too, so no order
  among equals is needed.

  Attributes:
    temperature: divides the logits; 0 puts all mass on the argmax (the lowest
      id among equals). None: it is given with every call, as the loop does
      with the temperature of each row.
    top_k: keep the k likeliest tokens; 0 keeps all.
    top_p: keep the likeliest tokens until their mass reaches top_p
      (nucleus sampling, Holtzman et al. 2020); in (0, 1].
    min_p: keep tokens at least min_p times as likely as the likeliest (Nguyen
      et al. 2024, arXiv:2407.01082); in [0, 1].
    banned: token ids that are never drawn.
    constraints: what changes the logits by the text so far, in order, after
      the ban and before all else, see `specjax.constraints`. The loop and the
      drafters apply them, along every drafted path; a call of the transform
      itself, which is not told the text, does not.

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
  constraints: tuple[Any, ...] = ()

  def __post_init__(self):
    for name in ("banned", "constraints"):
      if not isinstance(getattr(self, name), Iterable):
        raise ValueError(f"{name} is {getattr(self, name)!r}; give a tuple, "
                         "which may hold one alone")
    for token in self.banned:
      fields.check_at_least("a token that is banned", token, 0)
    object.__setattr__(self, "banned", tuple(map(int, self.banned)))
    object.__setattr__(self, "constraints", tuple(self.constraints))
    for name in ("temperature", "top_p", "min_p"):
      value = getattr(self, name)
      if not fields.is_number(value) and (
          name != "temperature" or value is not None):
        raise ValueError(f"{name} is {value!r}; it must be a number")
    if self.temperature is not None and not (
        0 <= self.temperature <= LARGEST):
      raise ValueError(f"temperature is {self.temperature}; it must be at "
                       f"least 0 and at most {LARGEST:g}: 0 is greedy, 1 is "
                       "the model's own law")
    fields.check_fields(self, "top_k", least=0, more=": 0 keeps all tokens")
    object.__setattr__(self, "top_k", int(self.top_k))
    if not 0 < self.top_p <= 1:
      raise ValueError(f"top_p is {self.top_p}; it must lie in (0, 1]: 1 keeps "
                       "all tokens")
    if not 0 <= self.min_p <= 1:
      raise ValueError(f"min_p is {self.min_p}; it must lie in [0, 1]: 0 keeps "
                       "all tokens")

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
    temperature = self._given(temperature, logits.dtype)
    # Smaller numbers count as 0 in compiled code.
    least = jnp.finfo(logits.dtype).tiny
    greedy = temperature < least
    # Subtracting first keeps tiny temperatures from overflowing.
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
    # The largest weight is 1, or NaN where the logits are bad.
    return jnp.where(greedy, _first_only(logits, weights, greedy), probs)

  def _given(self, temperature, dtype):
    """The temperature, `[..., 1]`."""
    if self.temperature is not None:
      temperature = self.temperature
    if temperature is None:
      raise ValueError("this transform takes the temperature of each row; call "
                       "transform(logits, state.temperature[:, None])")
    return jnp.asarray(temperature, dtype)[..., None]

  def under(self, shared: "LogitsTransform") -> "LogitsTransform":
    """This transform under the constraints of another, the decoder's."""
    return dataclasses.replace(self, constraints=shared.constraints)

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


def _first_only(logits, weights, wanted):
  """`weights` at the first of the largest logits, 0 elsewhere.

  The search is left out where no row wants it: rows at temperature 0 share
  their program with others, which should not pay for them.
  """
  size = logits.shape[-1]
  # Each use has its own: what a branch is given from outside is an array.
  token = lambda: jax.lax.broadcasted_iota(
      jnp.int32, logits.shape, logits.ndim - 1)

  def first(logits):  # on CPU an argmax costs several times as much
    largest = jnp.max(logits, axis=-1, keepdims=True)
    return jnp.min(jnp.where(logits == largest, token(), size - 1), axis=-1)

  found = jax.lax.cond(
      jnp.any(wanted), first,
      lambda logits: jnp.zeros(logits.shape[:-1], jnp.int32), logits)
  return jnp.where(token() == found[..., None], weights, 0)


def _scaled(logits, largest, temperature, least=None):
  """Logits at most 0, at a temperature; -inf where that is below `least`."""
  scaled = (logits - largest) / temperature
  return scaled if least is None else jnp.where(
      scaled >= least, scaled, -jnp.inf)


def _outside(top_p, probs, logits, total, *scalars):
  """`[..., 1]` float32: the nucleus is what is likelier, without a sort.

  A token stays iff the mass of strictly likelier tokens is below top_p. That
  condition is monotone in its probability, so that it is enough to search over
  the bits of a float32. A CPU, which computes, cuts their range in two with
  every pass over the laws; an accelerator, which waits for memory, in four, and
  makes the laws anew from the logits, which are there already.
  """
  given = jax.lax.stop_gradient((probs, logits, total, *scalars))

  def anew(probs, logits, total, *scalars):
    def laws(bounds):
      # Tied to the bounds, or the compiler would make them once, and keep them.
      _, own = jax.lax.optimization_barrier((bounds, logits))
      return jnp.exp(_scaled(own, *scalars)) / total

    # What is equal here may be rounded otherwise elsewhere.
    return _search(top_p, laws, total, logits.shape[-1], parts=4) * (
        1 - 4 * jnp.finfo(jnp.float32).eps)

  return jax.lax.platform_dependent(
      *given, default=anew, cpu=lambda probs, logits, total, *_: _search(
          top_p, lambda _: probs, total, logits.shape[-1], parts=2))


def _search(top_p, laws, like, vocab, parts):
  """`_outside` by passes over `laws(bounds) [..., V]`.

  A row is done once a single token is left in its range, so that its result
  depends on no other row's, and the search ends when all are.
  """
  as_float = lambda bits: jax.lax.bitcast_convert_type(bits, jnp.float32)
  # All that is as unlikely as this could be left out, rounding included.
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
  low, *_ = jax.lax.while_loop(
      lambda bounds: jnp.any(going(bounds)), narrow,
      (full(np.float32(least).view(np.int32)),
       full(np.float32(1).view(np.int32)),
       full(1, like.dtype), full(0, like.dtype)))
  return as_float(low)


def _first_above(weights, u):
  """Where the running sum of `weights [M]` first exceeds u times their sum.

  Whatever the rounding, that is the index of a positive weight, if any is.
  """
  total = jnp.cumsum(weights)
  index = jnp.arange(weights.shape[0], dtype=jnp.int32)
  # One search: the first hit has the first of the highest scores; without a
  # hit, through rounding at u near 1, the last positive weight has it.
  score = jnp.where(total > u * total[-1], weights.shape[0], index)
  return jnp.argmax(jnp.where(weights > 0, score, -1)).astype(jnp.int32)


def inverse_cdf(weights: jax.Array, u: jax.Array) -> jax.Array:
  """Draws an index with probability proportional to its weight.

  Summing blocks first costs one pass over the weights and two short running
  sums, far less than Gumbel noise or one running sum of length V. Each of the
  two levels has a uniform of its own: with one uniform of 23 bits, a fifth of
  128k tokens could never be drawn. Few weights need one level alone.

  The number of blocks is a multiple of 16: a law that is split over up to 16
  devices keeps whole blocks on each, and the sums and one block travel. Without
  that the law does.

  Args:
    weights: `[V]`, not negative; they need not sum to 1.
    u: `[2]`, independent and uniform in [0, 1).

  Returns:
    `[]` int32.
  """
  size = weights.shape[0]
  if size <= _ONE_LEVEL:
    return _first_above(weights, u[0])
  block = 1 << math.ceil(math.log2(size) / 2)
  blocks = jnp.pad(weights, (0, -size % (_SPLIT * block))).reshape(-1, block)
  row = _first_above(jnp.sum(blocks, axis=-1), u[0])
  return row * block + _first_above(blocks[row], u[1])


def uniforms(keys: jax.Array, rounds: jax.Array, count: int) -> jax.Array:
  """The uniforms of rows in one round or in many, uniform in [0, 1).

  Coin i of a row's round depends on (key, round, i) alone, not on `count`, nor
  on what else is drawn with it. The uniforms of many rounds cost about as much
  as those of one, and outside of a loop they cost it nothing.

  Args:
    keys: `[B]` PRNG keys.
    rounds: `[..., B]` int32, numbers of the rounds.
    count: uniforms of a row and round.

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
      probs, jax.random.uniform(key, (UNIFORMS_A_DRAW,), probs.dtype))


def sample_verdict(law: Law, draft: Draft, u: jax.Array) -> Verdict:
  """Draws the outcome of a verification: the only uniforms that are drawn.

  Negative entries count as 0: the enumeration that proves a law lossless does
  not see this function, so it trusts nothing.

  Args:
    law: of one sequence.
    draft: N nodes.
    u: `[VERDICT_UNIFORMS]`, uniform in [0, 1).
  """
  return sample_outcome(law, draft, u)[0]


def sample_outcome(law: Law, draft: Draft, u: jax.Array
                   ) -> tuple[Verdict, jax.Array]:
  """`sample_verdict`, and the row `[V]` of the law that its token is from."""
  node = inverse_cdf(jnp.maximum(law.stop, 0), u[:UNIFORMS_A_DRAW])
  ancestors = topology.ancestors(draft.parents)
  depths = topology.depths_of(ancestors)
  order = jnp.arange(depths.shape[0], dtype=jnp.int32)
  # The node of depth d on the path, and 0 beyond its end.
  at_depth = ancestors[node] & (depths == order[:, None])
  row = law.next_row(node)
  return Verdict(
      path=jnp.sum(jnp.where(at_depth, order, 0), axis=-1, dtype=jnp.int32),
      num_accepted=depths[node],
      next_token=inverse_cdf(jnp.maximum(row, 0), u[UNIFORMS_A_DRAW:]),
  ), row
