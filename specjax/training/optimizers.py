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
    steps: length of the run.
    warmup: number of steps in which the rate rises.
    decay: number of steps in which the rate falls.
  """
  warmup, decay = max(warmup, 1), max(decay, 1)

  def schedule(step: jax.typing.ArrayLike) -> jax.Array:
    step = jnp.asarray(step, jnp.float32)
    rise = (step + 1) / warmup
    fall = (steps - step) / decay
    return peak * jnp.clip(jnp.minimum(rise, fall), 0.0, 1.0)

  return schedule


def cosine(peak: float, steps: int, warmup: int) -> optax.Schedule:
  """Returns a schedule with linear warm-up and half a cosine to 0 (SGDR).

  >>> rate = cosine(1.0, steps=100, warmup=10)
  >>> [round(float(rate(step)), 2) for step in (0, 9, 55, 100)]
  [0.1, 1.0, 0.5, 0.0]

  Args:
    peak: largest learning rate.
    steps: length of the run.
    warmup: number of steps in which the rate rises.
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
  """Returns AdamW with gradient clipping and settings of language models.

  Args:
    schedule: learning rate by step.
    weight_decay: decay of parameters with more than one axis.
  """
  return optax.chain(
      optax.clip_by_global_norm(1.0),
      optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=weight_decay,
                  mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)))


def by_name(optimizers: Mapping[str, optax.GradientTransformation]
            ) -> optax.GradientTransformation:
  """Returns an optimiser with its own settings for every named tree.

  >>> optimizer = by_name({"target": adamw(lambda step: 1e-4),
  ...                      "drafter": muon(lambda step: 0.02)})

  Args:
    optimizers: optimisers by the names of the trained parameters.
  """
  return optax.multi_transform(optimizers, lambda params: {
      name: jax.tree.map(lambda _, name=name: name, tree)
      for name, tree in params.items()})


def muon(schedule: optax.Schedule, embedding_ratio: float = 0.15
         ) -> optax.GradientTransformation:
  """Returns Muon (Jordan et al., 2024) for matrices of layers, Adam for others.

  Args:
    schedule: learning rate of the matrices, for example with peak `MUON_RATE`.
    embedding_ratio: Adam's learning rate divided by Muon's. Adam updates the
      embedding table, the head and the norms.
  """
  def dimensions(path: tuple[Any, ...], x: jax.Array
                 ) -> optax.contrib.MuonDimensionNumbers | None:
    name = jax.tree_util.keystr(path)
    if x.ndim < 2 or any(
        part in name for part in ("embedding", "head", "positions")):
      return None
    if "qkv" in name:  # [D, K, G + 2, H]: G + 2 matrices with the same input
      return optax.contrib.MuonDimensionNumbers(0, (1, 3))
    if "gate_up" in name:  # [D, 2, F]: two matrices with the same input
      return optax.contrib.MuonDimensionNumbers(0, 2)
    return optax.contrib.MuonDimensionNumbers()

  return optax.contrib.muon(
      schedule, adam_b2=0.95,
      adam_learning_rate=lambda step: embedding_ratio * schedule(step),
      muon_weight_dimension_numbers=lambda params:
          jax.tree_util.tree_map_with_path(dimensions, params))
