"""Verification of the first drafted token alone: a toy rule."""

import dataclasses

import jax.numpy as jnp

from specjax.interfaces import Verifier
from specjax.types import Law


@dataclasses.dataclass(frozen=True)
class FirstToken(Verifier):
  """Token verification of the first drafted token; the others are dropped."""

  def law(self, draft, target_probs):
    x, p, q = draft.tokens[1], target_probs[0], draft.probs[1]
    drawn = q.at[x].get(mode="fill", fill_value=0)  # 0: padding
    accept = jnp.where(
        drawn > 0, jnp.minimum(1, p[x] / jnp.where(drawn > 0, drawn, 1)), 0)
    residual = jnp.maximum(p - q, 0)
    mass = residual.sum()
    residual = jnp.where(mass > 0, residual / jnp.where(mass > 0, mass, 1), p)
    stop = jnp.zeros(len(target_probs), p.dtype).at[:2].set(
        jnp.stack([1 - accept, accept]))
    return Law(stop=stop, next_token=target_probs.at[0].set(residual))
