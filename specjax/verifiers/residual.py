"""What the rules on chains share."""

import jax.numpy as jnp


def chain_ratios(draft, target_probs):
  """p(x) / q(x) of every drafted token of a chain, `[N - 1]`.

  0 where q(x) = 0: such a token cannot have been drawn, so it is padding.
  """
  tokens = draft.tokens[1:, None]
  pick = lambda probs: jnp.take_along_axis(
      probs, tokens, axis=-1, mode="fill", fill_value=0)[:, 0]
  p, q = pick(target_probs[:-1]), pick(draft.probs[1:])
  return jnp.where(q > 0, p / jnp.where(q > 0, q, 1), 0).astype(p.dtype)


def next_draft_probs(draft, target_probs):
  """q at the position behind each node of a chain, `[N, V]`; 0 at the end."""
  end = jnp.zeros_like(target_probs[:1])
  return jnp.concatenate([draft.probs[1:].astype(end.dtype), end])


def normalised(residual, fallback):
  """`residual [N, V]` row by row as laws; `fallback` where a row is empty.

  A row whose mass is so small that its entries lose digits as subnormal
  numbers counts as empty.
  """
  limits = jnp.finfo(residual.dtype)
  total = jnp.sum(residual, axis=-1, keepdims=True)
  some = total > limits.tiny / limits.eps
  return jnp.where(some, residual / jnp.where(some, total, 1), fallback)
