"""Optimisers and learning-rate schedules for small decoders and drafters."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

MUON_RATE = 0.02  # usual peak learning rate of Muon (Jordan et al., 2024)


def trapezoid(peak: float, steps: int, warmup: int, decay: int
              ) -> optax.Schedule:
  """Returns a schedule with linear warm-up, plateau and linear decay to 0.

  >>> rate = trapezoid(1.0, steps=100, warmup=10, decay=50)
  >>> [round(float(rate(step)), 2) for step in (0, 9, 50, 75)]
  [0.1, 1.0, 1.0, 0.5]

  Args:
    peak: learning rate of the plateau.
    steps: number of steps of the run.
    warmup: number of steps of the warm-up.
    decay: number of steps of the decay.
  """
  warmup, decay = max(warmup, 1), max(decay, 1)

  def schedule(step: jax.typing.ArrayLike) -> jax.Array:
    step = jnp.asarray(step, jnp.float32)
    rise = (step + 1) / warmup
    fall = (steps - step) / decay
    return peak * jnp.clip(jnp.minimum(rise, fall), 0.0, 1.0)

  return schedule


def cosine(peak: float, steps: int, warmup: int) -> optax.Schedule:
  """Returns a schedule with linear warm-up and cosine decay to 0 (SGDR).

  >>> rate = cosine(1.0, steps=100, warmup=10)
  >>> [round(float(rate(step)), 2) for step in (0, 9, 55, 100)]
  [0.1, 1.0, 0.5, 0.0]

  Args:
    peak: largest learning rate.
    steps: number of steps of the run.
    warmup: number of steps of the warm-up.
  """
  warmup = max(warmup, 1)

  def schedule(step: jax.typing.ArrayLike) -> jax.Array:
    step = jnp.asarray(step, jnp.float32)
    rise = (step + 1) / warmup
    share = jnp.clip((step - warmup) / max(steps - warmup, 1), 0.0, 1.0)
    fall = 0.5 * (1 + jnp.cos(jnp.pi * share))
    return peak * jnp.where(step < warmup, jnp.minimum(rise, 1.0), fall)

  return schedule


def adamw(schedule: optax.Schedule, weight_decay: float = 0.1
          ) -> optax.GradientTransformation:
  """Returns AdamW with gradient clipping, with settings for language models.

  Args:
    schedule: learning rate as a function of the step.
    weight_decay: weight decay of parameters with more than one axis. Other
      parameters have no weight decay.
  """
  return optax.chain(
      optax.clip_by_global_norm(1.0),
      optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=weight_decay,
                  mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)))


def by_name(optimizers: Mapping[str, optax.GradientTransformation]
            ) -> optax.GradientTransformation:
  """Returns an optimiser that applies one of `optimizers` to each named tree.

  >>> optimizer = by_name({"target": adamw(lambda step: 1e-4),
  ...                      "drafter": muon(lambda step: 0.02)})

  Args:
    optimizers: optimisers by the name of the tree of trained parameters.
  """
  return optax.multi_transform(optimizers, lambda params: {
      name: jax.tree.map(lambda _, name=name: name, tree)
      for name, tree in params.items()})


def muon(schedule: optax.Schedule, embedding_ratio: float = 0.15
         ) -> optax.GradientTransformation:
  """Returns an optimiser with Muon for matrices of layers and Adam for others.

  Muon is the optimiser of Jordan et al. (2024). Adam updates embedding,
  positions, head, and parameters with fewer than two axes.

  Args:
    schedule: learning rate of Muon as a function of the step, for example with
      peak `MUON_RATE`.
    embedding_ratio: Adam's learning rate divided by Muon's.
  """
  def dimensions(path: tuple[Any, ...], x: jax.Array
                 ) -> optax.contrib.MuonDimensionNumbers | None:
    name = jax.tree_util.keystr(path)
    if x.ndim < 2 or any(
        part in name for part in ("embedding", "head", "positions")):
      return None
    if "qkv" in name:  # [D, K, G + 2, H]: G + 2 matrices [D, K * H]
      return optax.contrib.MuonDimensionNumbers(0, (1, 3))
    if "gate_up" in name:  # [D, 2, F]: two matrices [D, F]
      return optax.contrib.MuonDimensionNumbers(0, 2)
    return optax.contrib.MuonDimensionNumbers()

  return optax.contrib.muon(
      schedule, adam_b2=0.95,
      adam_learning_rate=lambda step: embedding_ratio * schedule(step),
      muon_weight_dimension_numbers=lambda params:
          jax.tree_util.tree_map_with_path(dimensions, params))
