"""Token verification: accepts token by token, stops at the first rejection.

Leviathan et al. 2022 (arXiv:2211.17192, Algorithm 1) and Chen et al. 2023
(arXiv:2302.01318, Algorithm 2).
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp

from specjax.interfaces.verifier import Verifier
from specjax.types import Draft
from specjax.types import Law
from specjax.verifiers import residual


@dataclasses.dataclass(frozen=True)
class Token(Verifier):
  """Lossless rule that accepts x_i with probability min(1, p(x_i) / q(x_i)).

  Example: the first drafted token is accepted with probability 0.25 / 0.5. The
  second one is then always accepted.

    >>> import jax.numpy as jnp
    >>> import specjax as sj
    >>> draft = sj.Draft.chain(root=1, tokens=jnp.array([0, 1]),
    ...                        probs=jnp.array([[0.5, 0.5], [0.5, 0.5]]))
    >>> target_probs = jnp.array([[0.25, 0.75], [0.5, 0.5], [0.2, 0.8]])
    >>> law = sj.verifiers.Token().law(draft, target_probs)
    >>> print(law.stop)
    [0.5 0.  0.5]
    >>> print(law.next_token[0], law.next_token[2])
    [0. 1.] [0.2 0.8]
  """

  lossless = True
  requires = ("chain",)

  def law(self, draft: Draft, target_probs: jax.Array) -> Law:
    """Returns the distribution of the outcome for one chain.

    Let a_i = min(1, p(x_i) / q(x_i)) for the drafted token x_i, and a_N = 0.
    Then stop[i] = (1 - a_{i+1}) prod_{j<=i} a_j. Let p_i and q_i be the
    distributions of the token after node i. Then next_token[i] =
    norm((p_i - q_i)+), which is p_{N-1} after the last node.

    Args:
      draft: chain of N nodes.
      target_probs: `[N, V]`, distribution p of the token after every node.
    """
    chex.assert_rank([draft.tokens, target_probs], [1, 2])
    chex.assert_equal_shape([draft.probs, target_probs])
    accept = jnp.minimum(residual.chain_ratios(draft, target_probs), 1)
    one = jnp.ones((1,), accept.dtype)
    reach = jnp.concatenate([one, jnp.cumprod(accept)])
    reject = jnp.concatenate([1 - accept, one])

    def next_row(node: jax.Array) -> jax.Array:
      p = residual.at_node(target_probs, node)
      difference = p - residual.next_draft_row(draft, node, p.dtype)
      return residual.normalise(jnp.maximum(difference, 0), p)

    return residual.LawByRow(reach * reject, next_row)

  def survival(self, draft: Draft, target_probs: jax.Array) -> jax.Array:
    """Returns P(tau >= i | x_1..x_i) = prod_{j<=i} min(1, p/q), `[N]`."""
    accept = jnp.minimum(residual.chain_ratios(draft, target_probs), 1)
    return jnp.concatenate([jnp.ones((1,), accept.dtype), jnp.cumprod(accept)])
