"""Optimisers and schedules for small decoders and their drafters."""

import jax
import jax.numpy as jnp
import optax

MUON_RATE = 0.02  # the usual peak of Muon (Jordan et al., 2024)


def trapezoid(peak: float, steps: int, warmup: int, decay: int
              ) -> optax.Schedule:
  """Linear warm-up, a plateau, and a linear descent to 0 in the last steps."""
  warmup, decay = max(warmup, 1), max(decay, 1)

  def schedule(step):
    step = jnp.asarray(step, jnp.float32)
    rise = (step + 1) / warmup
    fall = (steps - step) / decay
    return peak * jnp.clip(jnp.minimum(rise, fall), 0.0, 1.0)

  return schedule


def cosine(peak: float, steps: int, warmup: int) -> optax.Schedule:
  """Linear warm-up, and half a cosine from the peak to 0 (SGDR's first cycle).
  """
  warmup = max(warmup, 1)

  def schedule(step):
    step = jnp.asarray(step, jnp.float32)
    rise = (step + 1) / warmup
    share = jnp.clip((step - warmup) / max(steps - warmup, 1), 0.0, 1.0)
    fall = 0.5 * (1 + jnp.cos(jnp.pi * share))
    return peak * jnp.where(step < warmup, jnp.minimum(rise, 1.0), fall)

  return schedule


def adamw(schedule: optax.Schedule, weight_decay: float = 0.1
          ) -> optax.GradientTransformation:
  """AdamW with the settings common for language models."""
  return optax.chain(
      optax.clip_by_global_norm(1.0),
      optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=weight_decay,
                  mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)))


def by_name(optimizers: dict[str, optax.GradientTransformation]
            ) -> optax.GradientTransformation:
  """An optimiser of its own for every named tree of the parameters.

  Args:
    optimizers: by the names of the trained parameters, such as "target" and
      "drafter".
  """
  return optax.multi_transform(optimizers, lambda params: {
      name: jax.tree.map(lambda _, name=name: name, tree)
      for name, tree in params.items()})


def muon(schedule: optax.Schedule, embedding_ratio: float = 0.15
         ) -> optax.GradientTransformation:
  """Muon (Jordan et al., 2024) on the layers' matrices, Adam on the rest.

  Args:
    schedule: learning rate of the matrices, such as with peak `MUON_RATE`.
    embedding_ratio: Adam's learning rate over Muon's, for the embedding
      table, the head and the norms.
  """
  def is_matrix(path, x):
    name = jax.tree_util.keystr(path)
    if x.ndim < 2 or any(
        other in name for other in ("embedding", "head", "positions")):
      return None
    if "qkv" in name:  # [D, K, G + 2, H]: G + 2 matrices that read the same
      return optax.contrib.MuonDimensionNumbers(0, (1, 3))
    if "gate_up" in name:  # [D, 2, F]: two
      return optax.contrib.MuonDimensionNumbers(0, 2)
    return optax.contrib.MuonDimensionNumbers()

  return optax.contrib.muon(
      schedule, adam_b2=0.95,
      adam_learning_rate=lambda step: embedding_ratio * schedule(step),
      muon_weight_dimension_numbers=lambda params:
          jax.tree_util.tree_map_with_path(is_matrix, params))
