"""Rotary positions (Su et al. 2021, arXiv:2104.09864) and their scaling."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_KINDS = ("linear", "llama3", "yarn", "longrope", "proportional")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
  """Scaling of rotary frequencies for sequences longer than in first training.

  Attributes:
    kind: "linear" divides all frequencies by `factor` (position interpolation,
      arXiv:2306.15595). "llama3" divides low frequencies, with a smooth
      transition (Llama 3.1). "yarn" also divides low frequencies, with a linear
      ramp over the dimensions (YaRN, arXiv:2309.00071, section 3.2). "longrope"
      has a divisor per frequency (LongRoPE, arXiv:2402.13753). "proportional"
      divides all frequencies by `factor` and sets the lowest to 0 (Gemma 4).
    factor: ratio of the new to the original length.
    original_length: length of the longest sequence of the first training, in
      tokens, for "llama3" and "yarn".
    low_frequency_factor: constant of "llama3". Frequencies with a wavelength
      above original_length / low_frequency_factor are divided by `factor`.
    high_frequency_factor: constant of "llama3". Frequencies with a wavelength
      below original_length / high_frequency_factor are not changed.
    beta_fast: constant of "yarn". Frequencies with more than beta_fast
      rotations over original_length are not changed.
    beta_slow: constant of "yarn". Frequencies with fewer than beta_slow
      rotations over original_length are divided by `factor`.
    truncate: if True, "yarn" rounds the ends of its ramp to integers.
    attention_factor: factor on cosines and sines.
    factors: divisor of every frequency, for "longrope".
    query_growth: constant b. Queries at position p are multiplied by
      1 + b log(1 + floor(p / original_length)) (Llama 4, Ministral 3).
    fraction: share of the frequencies above 0, for "proportional".
  """

  kind: str
  factor: float = 1.0
  original_length: int = 0
  low_frequency_factor: float = 1.0
  high_frequency_factor: float = 4.0
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  truncate: bool = True
  attention_factor: float = 1.0
  factors: tuple[float, ...] = ()
  query_growth: float = 0.0
  fraction: float = 1.0

  def __post_init__(self):
    object.__setattr__(self, "factors", tuple(self.factors))
    if self.kind not in _KINDS:
      raise ValueError(f"the kind of rope scaling is {self.kind!r}; it must be "
                       f"one of {', '.join(_KINDS)}")
    if self.kind in ("llama3", "yarn") and self.original_length < 1:
      raise ValueError(f"original_length is {self.original_length}; for rope "
                       f"scaling {self.kind} it must be the context length "
                       "of the original training, at least 1")
    if self.factor <= 0:
      raise ValueError(f"factor is {self.factor}; for rope scaling it must be "
                       "above 0")


class Rotation(NamedTuple):
  """Rotation of the queries and keys of a pass.

  Attributes:
    positions: `[B, S]` int32 positions of the tokens.
    frequency: `[half]` result of `frequencies`.
    scale: factor on cosines and sines.
    table: `[2, B, S, half]` result of `cosines_and_sines`.
  """

  positions: jax.Array
  frequency: np.ndarray
  scale: float
  table: jax.Array


def frequencies(dims: int, theta: float, scaling: RopeScaling | None = None
                ) -> np.ndarray:
  """Returns the frequencies `[dims / 2]` float64, in radians per position.

  Args:
    dims: number of rotated dimensions of a head, even.
    theta: base. Without scaling, frequency i is theta^(-2i / dims).
    scaling: scaling of the frequencies, or None.

  Raises:
    ValueError: the number of factors of "longrope" is not dims / 2.
  """
  half = dims // 2
  plain = theta ** (-np.arange(half) / half)
  if scaling is None:
    return plain
  if scaling.kind == "linear":
    return plain / scaling.factor
  if scaling.kind == "proportional":
    rotated = np.arange(half) < int(scaling.fraction * dims // 2)
    return np.where(rotated, plain / scaling.factor, 0)
  if scaling.kind == "longrope":
    if len(scaling.factors) != half:
      raise ValueError(f"rope scaling has {len(scaling.factors)} factors; a "
                       f"head of {dims} rotated dimensions needs {half}")
    return plain / np.asarray(scaling.factors)
  if scaling.kind == "llama3":
    turns = scaling.original_length * plain / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)
  else:
    kept = 1 - _yarn_ramp(dims, theta, scaling)
  return kept * plain + (1 - kept) * plain / scaling.factor


def _yarn_ramp(dims: int, theta: float, scaling: RopeScaling) -> np.ndarray:
  """Returns the ramp 1 - gamma of YaRN, for each frequency.

  The ramp is 0 for an unchanged frequency and 1 for a frequency divided by
  `factor`.
  """
  # Returns the index of the frequency with this number of rotations over the
  # original length.
  def dimension(turns: float) -> float:
    return dims * math.log(scaling.original_length / (turns * 2 * math.pi)) / (
        2 * math.log(theta))

  low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
  if scaling.truncate:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, dims - 1)
  width = high - low if high != low else 1e-3
  return np.clip((np.arange(dims // 2) - low) / width, 0, 1)


def cosines_and_sines(positions: jax.Array, frequency: np.ndarray,
                      scale: float = 1.0,
                      dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
  """Returns the cosines and sines `[2, B, S, half]` of the rotation angles.

  Args:
    positions: `[B, S]` positions of the tokens.
    frequency: `[half]` result of `frequencies`.
    scale: factor on the result.
    dtype: dtype of the result.
  """
  angle = positions[..., None].astype(dtype) * jnp.asarray(frequency, dtype)
  # XLA would fuse the cosines into every operation that reads them, and compute
  # them again each time (5 to 8 % of a pass on a CPU). XLA stores the result of
  # a matrix product. The factor is therefore applied as a product with a
  # diagonal matrix.
  return jnp.tensordot(jnp.stack([jnp.cos(angle), jnp.sin(angle)]),
                       scale * jnp.eye(len(frequency), dtype=dtype), 1,
                       precision=jax.lax.Precision.HIGHEST)


def rotate(x: jax.Array, table: jax.Array) -> jax.Array:
  """Returns `x` with the first 2 * half dimensions of every head rotated.

  Dimensions i and i + half are rotated as a pair.

  Args:
    x: `[B, S, H, D]` queries or keys.
    table: `[2, B, S, half]` result of `cosines_and_sines`.
  """
  dtype, half = table.dtype, table.shape[-1]
  cos, sin = table[:, :, :, None]
  first, second, rest = jnp.split(x, [half, 2 * half], axis=-1)
  first, second = first.astype(dtype), second.astype(dtype)
  turned = [first * cos - second * sin, second * cos + first * sin]
  return jnp.concatenate([*(part.astype(x.dtype) for part in turned), rest],
                         axis=-1)
