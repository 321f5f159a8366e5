"""What the rules on chains share."""

import jax
import jax.numpy as jnp

from specjax.types import Draft
from specjax.types import Law


def chain_ratios(draft: Draft, target_probs: jax.Array) -> jax.Array:
  """p(x) / q(x) of every drafted token of a chain, `[N - 1]`.

  0 where q(x) = 0: such a token cannot have been drawn, so it is padding.
  """
  p = at_drafted(draft, target_probs[:-1])
  return over(p, at_drafted(draft, draft.probs[1:])).astype(p.dtype)


def at_drafted(draft: Draft, probs: jax.Array) -> jax.Array:
  """`probs [N - 1, V]` at the drafted tokens, `[N - 1]`; 0 at ids >= V."""
  return jnp.take_along_axis(probs, draft.tokens[1:, None], axis=-1,
                             mode="fill", fill_value=0)[:, 0]


def over(a: jax.Array, b: jax.Array, otherwise: jax.Array | float = 0
         ) -> jax.Array:
  """a / b, and `otherwise` where b is not positive."""
  return jnp.where(b > 0, a / jnp.where(b > 0, b, 1), otherwise)


def next_draft_probs(draft: Draft, target_probs: jax.Array) -> jax.Array:
  """q of the token after each node of a chain, `[N, V]`; 0 at the end."""
  end = jnp.zeros_like(target_probs[:1])
  return jnp.concatenate([draft.probs[1:].astype(end.dtype), end])


def normalised(residual: jax.Array, fallback: jax.Array) -> jax.Array:
  """`residual [N, V]` row by row as laws; `fallback` where a row is empty.

  A row whose mass is so small that its entries lose digits as subnormal
  numbers counts as empty.
  """
  limits = jnp.finfo(residual.dtype)
  total = jnp.sum(residual, axis=-1, keepdims=True)
  some = total > limits.tiny / limits.eps
  return jnp.where(some, residual / jnp.where(some, total, 1), fallback)


def last_heads(rest: jax.Array, survive: jax.Array, fallback: jax.Array
               ) -> Law:
  """Stops at the last node whose independent coin shows heads.

  Args:
    rest: `[N, V]`, the residual of a stop at each node, not normalised.
    survive: `[N]`, at most 1, the mass that `rest` was cut from.
    fallback: `[N, V]`, the law of the extra token where `rest` is empty.

  Returns:
    With S = sum(rest): h = S / (S + 1 - survive) and 0/0 = 1, h_0 = 1;
    stop[i] = h_i prod_{j>i} (1 - h_j); next_token = norm(rest).
  """
  mass = jnp.sum(rest, axis=-1)
  # The parentheses keep h <= 1 in floating point: left to right, it exceeds
  # 1 in a third of the rounds and a stop probability turns negative.
  heads = over(mass, mass + (1 - survive), otherwise=1).at[0].set(1)
  tails_after = jnp.cumprod((1 - heads)[::-1])[::-1]
  tails_after = jnp.append(tails_after[1:], jnp.ones_like(heads[:1]))
  return Law(stop=heads * tails_after,
             next_token=normalised(rest, fallback))
