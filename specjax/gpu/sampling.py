"""Softmax of logits and the draw of a token, with two kernels each.

Each pair reads the vocabulary in blocks. The first kernel writes a few numbers
per block, and the second combines the blocks.
"""

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
import jax.numpy as jnp
import numpy as np

_BLOCK = 1024  # tokens that a program reads
_LARGEST = np.iinfo(np.int32).max


def supports(size: int) -> bool:
  """Returns True if the kernels are for vocabularies of `size` tokens."""
  return size >= _BLOCK


def _range(size: int) -> jax.Array:
  return jax.lax.broadcasted_iota(jnp.int32, (size,), 0)


def _parallel(kernel, name, shapes, grid):
  return pl.pallas_call(
      kernel, grid=grid, out_shape=shapes, name=name,
      compiler_params=triton.CompilerParams(num_warps=4))


@jax.custom_jvp
def softmax(logits: jax.Array, temperature: jax.Array) -> jax.Array:
  """Returns probabilities `[R, V]` float32.

  Args:
    logits: `[R, V]` float32.
    temperature: `[B]` float32 divisors of the logits, each of R / B rows in
      order. At 0, all mass is on the lowest id with the largest logit.
  """
  rows, size = logits.shape
  blocks = pl.cdiv(size, _BLOCK)
  padded = pl.next_power_of_2(blocks)

  def block(logits):
    row, i = pl.program_id(0), pl.program_id(1)
    token = i * _BLOCK + _range(_BLOCK)
    inside = token < size
    return row, i, token, inside, triton.load(
        logits.at[row, token], mask=inside, other=-jnp.inf)

  def divided(temperature, row):
    """Returns whether a row is greedy, and the divisor of its logits."""
    t = temperature[row // (rows // temperature.shape[0])]
    greedy = t < jnp.finfo(jnp.float32).tiny
    return greedy, jnp.where(greedy, 1.0, t)

  def statistics(logits, temperature, tops, firsts, sums):
    row, i, token, _, x = block(logits)
    top = jnp.max(x)
    # An entire block of -inf would otherwise have the weights exp(-inf + inf).
    base = jnp.where(top == -jnp.inf, 0, top)
    tops[row, i] = top
    firsts[row, i] = jnp.min(jnp.where(x == top, token, _LARGEST))
    _, divisor = divided(temperature, row)
    sums[row, i] = jnp.sum(jnp.exp((x - base) / divisor))

  def weigh(logits, temperature, tops, firsts, sums, out):
    row, i, token, inside, x = block(logits)
    greedy, t = divided(temperature, row)
    at = _range(padded)
    load = lambda ref, other: triton.load(
        ref.at[row, at], mask=at < blocks, other=other)
    tops = load(tops, -jnp.inf)
    top = jnp.max(tops)
    share = jnp.where(tops == -jnp.inf, 0, jnp.exp((tops - top) / t))
    total = jnp.sum(load(sums, 0) * share)
    first = jnp.min(jnp.where(tops == top, load(firsts, _LARGEST), _LARGEST))
    # `total` is NaN if a logit is NaN or inf, and so is every probability.
    probs = jnp.where(
        greedy, jnp.where(token == first, 1, 0) + 0 * total,
        jnp.exp((x - top) / t) / total)
    triton.store(out.at[row, token], probs, mask=inside)

  number = lambda dtype: jax.ShapeDtypeStruct((rows, blocks), dtype)
  found = _parallel(statistics, "softmax_blocks", [
      number(jnp.float32), number(jnp.int32), number(jnp.float32)],
                    (rows, blocks))(logits, temperature)
  return _parallel(
      weigh, "softmax", jax.ShapeDtypeStruct(logits.shape, jnp.float32),
      (rows, blocks))(logits, temperature, *found)


@softmax.defjvp
def _(primals, tangents):
  """Differentiates the softmax. Greedy rows are constant."""
  (logits, temperature), (change, of_temperature) = primals, tangents
  probs = softmax(logits, temperature)
  count = len(logits) // len(temperature)
  temperature, of_temperature = (
      jnp.repeat(x, count) for x in (temperature, of_temperature))
  greedy = (temperature < jnp.finfo(jnp.float32).tiny)[:, None]
  t = jnp.where(greedy, 1, temperature[:, None])
  top = jnp.max(logits, axis=1, keepdims=True)
  scaled = (change - jnp.where(probs > 0, logits - top, 0)
            * of_temperature[:, None] / t) / t
  mean = jnp.sum(probs * scaled, axis=1, keepdims=True)
  return probs, jnp.where(greedy, 0, probs * (scaled - mean))


def draw(weights: jax.Array, u: jax.Array) -> jax.Array:
  """Returns indices `[R]` int32, drawn in proportion to their weights.

  Args:
    weights: `[R, V]` float32, not negative.
    u: `[R, 2]` float32, uniform in [0, 1), see `sampling.inverse_cdf`.
  """
  rows, size = weights.shape
  blocks = pl.cdiv(size, _BLOCK)
  padded = pl.next_power_of_2(blocks)

  def load_block(weights, row, i):
    token = i * _BLOCK + _range(_BLOCK)
    return triton.load(weights.at[row, token], mask=token < size, other=0)

  def add_up(weights, sums):
    row, i = pl.program_id(0), pl.program_id(1)
    sums[row, i] = jnp.sum(load_block(weights, row, i))

  def first_above(x, u):
    """Returns the first index whose running sum exceeds u times the total.

    If rounding leaves no such index, this is the last one with a weight.
    """
    index, sums = _range(x.shape[0]), jnp.cumsum(x)
    above = (x > 0) & (sums > u * jnp.max(sums))
    first = jnp.min(jnp.where(above, index, _LARGEST))
    last = jnp.max(jnp.where(x > 0, index, 0))
    return jnp.where(first == _LARGEST, last, first)

  def pick(weights, u, sums, out):
    row, at = pl.program_id(0), _range(padded)
    i = first_above(triton.load(
        sums.at[row, at], mask=at < blocks, other=0), u[row, 0])
    out[row] = i * _BLOCK + first_above(load_block(weights, row, i), u[row, 1])

  sums = _parallel(add_up, "draw_blocks", jax.ShapeDtypeStruct(
      (rows, blocks), jnp.float32), (rows, blocks))(weights)
  return _parallel(pick, "draw", jax.ShapeDtypeStruct((rows,), jnp.int32),
                   (rows,))(weights, u, sums)
