"""Helper functions of the rules: ratios, residuals and laws."""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp

from specjax.sampling import smallest_mass
from specjax.types import Draft
from specjax.types import Law


@jax.tree_util.register_pytree_node_class
class LawByRow(Law):
  """A `Law` that stores a function instead of the array `next_token`.

  The decoding loop reads only one of the N rows. An array of all rows (N V
  numbers) would be the largest array of a verification. So `next_row` computes
  one row, and `next_token` computes all rows. Flattened as a pytree, the object
  becomes a `Law` with all rows.

  Attributes:
    stop: `[N]`, see `Law`.
  """

  def __init__(self, stop: jax.Array,
               row: Callable[[jax.Array], jax.Array]):
    """Stores `stop` and the function of rows.

    Args:
      stop: `[N]`, see `Law`.
      row: function `node [] -> [V]` that returns a row of `next_token`.
    """
    object.__setattr__(self, "stop", stop)  # a `Law` is frozen
    object.__setattr__(self, "_row", row)

  @property
  def next_token(self) -> jax.Array:
    """`[N, V]`, the distribution of the next token after a stop at each node.
    """
    return jax.vmap(self._row)(jnp.arange(self.stop.shape[0], dtype=jnp.int32))

  def next_row(self, node: jax.Array) -> jax.Array:
    """Returns the row `[V]` of `next_token` for a stop at `node`."""
    return self._row(node)

  def replace(self, **changes: Any) -> Law:
    """Returns a `Law` with all rows, in which some fields are replaced."""
    return Law(self.stop, self.next_token).replace(**changes)

  def tree_flatten(self) -> tuple[tuple[jax.Array, jax.Array], None]:
    return (self.stop, self.next_token), None

  @classmethod
  def tree_unflatten(cls, _: None, arrays: tuple[Any, Any]) -> Law:
    return Law(*arrays)


def chain_ratios(draft: Draft, target_probs: jax.Array) -> jax.Array:
  """Returns `[N - 1]`, p(x) / q(x) of every drafted token of a chain.

  If q(x) = 0, the ratio is 0: x cannot have been drawn from q, so the node is
  padding.
  """
  chex.assert_equal_shape([draft.probs, target_probs])
  p = at_drafted(draft, target_probs, first=0)
  return divide(p, at_drafted(draft, draft.probs)).astype(p.dtype)


def at_drafted(draft: Draft, probs: jax.Array, first: int = 1) -> jax.Array:
  """Returns `[N - 1]`, the entries of `probs [N, V]` at the drafted tokens.

  The entry of an id >= V is 0.

  Args:
    draft: draft of N nodes.
    probs: `[N, V]`, an array with one row per node.
    first: index of the row for node 1, the first drafted token. In a chain it
      is 1 for q and 0 for p. Passing a slice of `probs` instead would copy the
      rows.
  """
  chex.assert_rank([draft.tokens, probs], [1, 2])
  tokens = draft.tokens[1:]
  rows = first + jnp.arange(tokens.shape[0], dtype=jnp.int32)
  return jnp.asarray(probs).at[rows, tokens].get(mode="fill", fill_value=0)


def divide(a: jax.Array, b: jax.Array, otherwise: jax.Array | float = 0
           ) -> jax.Array:
  """Returns a / b, or `otherwise` if b is not positive, elementwise."""
  return jnp.where(b > 0, a / jnp.where(b > 0, b, 1), otherwise)


def next_draft_probs(draft: Draft, target_probs: jax.Array) -> jax.Array:
  """Returns `[N, V]`, q of the token after each node of a chain.

  The last row is 0.
  """
  chex.assert_equal_shape([draft.probs, target_probs])
  end = jnp.zeros_like(target_probs[:1])
  return jnp.concatenate([draft.probs[1:].astype(end.dtype), end])


def at_node(rows: jax.Array, node: jax.Array) -> jax.Array:
  """Returns row `node []` of `rows [N, V]`, or zeros if `node` is N.

  On a TPU the row is a masked sum over the nodes. A gather would require arrays
  tiled by 8 nodes. The arrays from which `rows` is computed are tiled by 8
  batch rows, so XLA would copy them.
  """
  chex.assert_rank([rows, node], [2, 0])

  def masked_sum(rows: jax.Array, node: jax.Array) -> jax.Array:
    nodes = jnp.arange(rows.shape[0], dtype=jnp.int32)[:, None]
    return jnp.sum(jnp.where(nodes == node, rows, 0), axis=0)

  def gather(rows: jax.Array, node: jax.Array) -> jax.Array:
    return jnp.asarray(rows).at[node].get(mode="fill", fill_value=0)

  return jax.lax.platform_dependent(rows, node, tpu=masked_sum, default=gather)


def next_draft_row(draft: Draft, node: jax.Array, dtype: jnp.dtype
                   ) -> jax.Array:
  """Returns `[V]`, q of the token after `node []` of a chain.

  After the last node it is 0.
  """
  return at_node(draft.probs, node + 1).astype(dtype)


def normalise(rows: jax.Array, fallback: jax.Array) -> jax.Array:
  """Returns `rows [..., V]` normalised, with empty rows replaced by `fallback`.

  A row is empty if its sum is at most `sampling.smallest_mass`.
  """
  total = jnp.sum(rows, axis=-1, keepdims=True)
  some = total > smallest_mass(rows.dtype)
  return jnp.where(some, rows / jnp.where(some, total, 1), fallback)


def last_success(mass: jax.Array, survive: jax.Array) -> jax.Array:
  """Returns `stop [N]` of a rule that stops at the last successful test.

  Test i succeeds independently with probability h_i = S_i / (S_i + 1 -
  survive_i), where 0/0 = 1 and h_0 = 1. So stop[i] = h_i prod_{j>i} (1 - h_j).

  In block verification, S_i is the sum of (survive_i p - q)+. In greedy block
  verification, p is the modified target, and survive_i is min(R_i, 1) for the
  running ratio R_i. If R_i is above 1, q is also scaled: S_i is the sum of
  (p - q / R_i)+. The scaling does not change h_i, which is 1 in this case.

  Args:
    mass: `[N]`, S_i, the sum of the unnormalised residual at each node.
    survive: `[N]`, survive_i, the factor of p in the residual; at most 1.
  """
  chex.assert_rank([mass, survive], 1)
  chex.assert_equal_shape([mass, survive])
  # The parentheses keep h <= 1 in floating point. Without them, h would exceed
  # 1 in a third of the rounds, and a stop probability would be negative.
  success = divide(mass, mass + (1 - survive), otherwise=1).at[0].set(1)
  failures_after = jnp.cumprod((1 - success)[::-1])[::-1]
  failures_after = jnp.append(
      failures_after[1:], jnp.ones_like(success[:1]))
  return success * failures_after


def greedy_law(stop: jax.Array, target_probs: jax.Array) -> Law:
  """Returns the law that stops at node `stop []` and emits the argmax of p."""
  chex.assert_rank([stop, target_probs], [0, 2])
  nodes, vocab = target_probs.shape
  dtype = target_probs.dtype
  return LawByRow(
      stop=jax.nn.one_hot(stop, nodes, dtype=dtype),
      row=lambda node: jax.nn.one_hot(
          jnp.argmax(at_node(target_probs, node)), vocab, dtype=dtype))
