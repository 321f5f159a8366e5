"""What the rules on chains share."""

import jax
import jax.numpy as jnp

from specjax.sampling import smallest_mass
from specjax.types import Draft


def chain_ratios(draft: Draft, target_probs: jax.Array) -> jax.Array:
  """p(x) / q(x) of every drafted token of a chain, `[N - 1]`.

  0 where q(x) = 0: such a token cannot have been drawn, so it is padding.
  """
  p = at_drafted(draft, target_probs, first=0)
  return over(p, at_drafted(draft, draft.probs)).astype(p.dtype)


def at_drafted(draft: Draft, probs: jax.Array, first: int = 1) -> jax.Array:
  """Rows of `probs [N, V]` at the drafted tokens, `[N - 1]`; 0 at ids >= V.

  The first drafted token is looked up in row `first`: 1 for what nodes were
  drawn from, 0 for p of a chain. A slice of the rows would be a copy of them.
  """
  tokens = draft.tokens[1:]
  rows = first + jnp.arange(tokens.shape[0], dtype=jnp.int32)
  return jnp.asarray(probs).at[rows, tokens].get(mode="fill", fill_value=0)


def over(a: jax.Array, b: jax.Array, otherwise: jax.Array | float = 0
         ) -> jax.Array:
  """a / b, and `otherwise` where b is not positive."""
  return jnp.where(b > 0, a / jnp.where(b > 0, b, 1), otherwise)


def next_draft_probs(draft: Draft, target_probs: jax.Array) -> jax.Array:
  """q of the token after each node of a chain, `[N, V]`; 0 at the end."""
  end = jnp.zeros_like(target_probs[:1])
  return jnp.concatenate([draft.probs[1:].astype(end.dtype), end])


def at_node(rows: jax.Array, node: jax.Array) -> jax.Array:
  """`[V]`, one of the rows `[N, V]`; 0 after the last.

  A gather would decide how a TPU lays out all that the rows come from, nodes
  and not the batch in tiles of 8, with copies of everything that has another
  layout. A sum over the nodes leaves the layout as it is.
  """
  def summed(rows, node):
    nodes = jnp.arange(rows.shape[0], dtype=jnp.int32)[:, None]
    return jnp.sum(jnp.where(nodes == node, rows, 0), axis=0)

  def gathered(rows, node):
    return jnp.asarray(rows).at[node].get(mode="fill", fill_value=0)

  return jax.lax.platform_dependent(
      rows, node, tpu=summed, default=gathered)


def next_draft_row(draft: Draft, node: jax.Array, dtype) -> jax.Array:
  """q of the token after `node []` of a chain, `[V]`; 0 at the end."""
  return at_node(draft.probs, node + 1).astype(dtype)


def normalised(residual: jax.Array, fallback: jax.Array) -> jax.Array:
  """`residual [..., V]` row by row as laws; `fallback` where a row is empty.

  What counts as empty is in `sampling.smallest_mass`.
  """
  total = jnp.sum(residual, axis=-1, keepdims=True)
  some = total > smallest_mass(residual.dtype)
  return jnp.where(some, residual / jnp.where(some, total, 1), fallback)


def last_heads(mass: jax.Array, survive: jax.Array) -> jax.Array:
  """`stop [N]` at the last node whose independent uniform shows heads.

  Args:
    mass: `[N]`, S, of the residual of a stop at each node.
    survive: `[N]`, at most 1, the mass that the residual was cut from.

  Returns:
    With h = S / (S + 1 - survive) and 0/0 = 1, h_0 = 1: stop[i] = h_i
    prod_{j>i} (1 - h_j).
  """
  # The parentheses keep h <= 1 in floating point: left to right, it exceeds
  # 1 in a third of the rounds and a stop probability turns negative.
  heads = over(mass, mass + (1 - survive), otherwise=1).at[0].set(1)
  tails_after = jnp.cumprod((1 - heads)[::-1])[::-1]
  tails_after = jnp.append(tails_after[1:], jnp.ones_like(heads[:1]))
  return heads * tails_after
