"""Token verification: accept token by token, stop at the first rejection.

Leviathan et al. 2022 (arXiv:2211.17192, Algorithm 1) and Chen et al. 2023
(arXiv:2302.01318, Algorithm 2).
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.interfaces.verifier import Verifier
from specjax.types import Draft
from specjax.types import Law
from specjax.verifiers import residual
from specjax.verifiers._by_row import law_by_row


@dataclasses.dataclass(frozen=True)
class Token(Verifier):
  """Accepts x_i with probability min(1, p(x_i) / q(x_i)); lossless."""

  lossless = True
  requires = ("chain",)

  def law(self, draft: Draft, target_probs: jax.Array) -> Law:
    """The law of the outcome for one chain.

    Args:
      draft: a chain of N nodes.
      target_probs: `[N, V]`, p of the token after every node.

    Returns:
      stop[i] = prod_{j<=i} a_j (1 - a_{i+1}) with a_i = min(1, p/q) and
      a_N = 0; next_token[i] = norm((p_i - q_i)+), which is p_{N-1} at the end.
    """
    accept = jnp.minimum(residual.chain_ratios(draft, target_probs), 1)
    one = jnp.ones((1,), accept.dtype)
    reach = jnp.concatenate([one, jnp.cumprod(accept)])
    reject = jnp.concatenate([1 - accept, one])

    def next_row(node):
      p = residual.at_node(target_probs, node)
      rest = p - residual.next_draft_row(draft, node, p.dtype)
      return residual.normalised(jnp.maximum(rest, 0), p)

    return law_by_row(stop=reach * reject, row=next_row)

  def survival(self, draft: Draft, target_probs: jax.Array) -> jax.Array:
    """`[N]`, P(tau >= i | x_1..x_i) = prod_{j<=i} min(1, p/q)."""
    accept = jnp.minimum(residual.chain_ratios(draft, target_probs), 1)
    return jnp.concatenate([jnp.ones((1,), accept.dtype), jnp.cumprod(accept)])
