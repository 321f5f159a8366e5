"""Recursive rejection sampling: the children of a node are tried in order.

Miao et al. 2023, "SpecInfer" (arXiv:2305.09781, multi-step speculative
sampling); Jeon et al. 2024 (arXiv:2402.14160, recursive rejection sampling);
Chen et al. 2024, "Sequoia" (arXiv:2402.12374), for children drawn without
replacement. On a chain, recursive rejection sampling is token verification.
"""

import dataclasses

import chex
import jax

from specjax.interfaces.verifier import Verifier
from specjax.types import Draft
from specjax.types import Law
from specjax.verifiers import residual
from specjax.verifiers import tree


@dataclasses.dataclass(frozen=True)
class Recursive(Verifier):
  """Lossless rule that walks down the tree to the first accepted child.

  Each rejection replaces the node's target distribution by the residual. The
  rule is exact if row i of `probs` is the distribution of `tokens[i]` given its
  ancestors and earlier siblings. Children may be drawn independently, without
  replacement, from several drafters, or deterministically.

  Example: two independent draws below the root. The first is accepted with
  probability 0.25 / 0.5. After a rejection, the residual contains only token 1.

    >>> import jax.numpy as jnp
    >>> import specjax as sj
    >>> draft = sj.Draft.tree(
    ...     root=1, parents=jnp.array([-1, 0, 0]), tokens=jnp.array([0, 1]),
    ...     probs=jnp.array([[0.5, 0.5], [0.5, 0.5]]))
    >>> target_probs = jnp.array([[0.25, 0.75], [0.5, 0.5], [0.5, 0.5]])
    >>> print(sj.verifiers.Recursive().law(draft, target_probs).stop)
    [0.  0.5 0.5]
  """

  lossless = True
  requires = ("conditional",)

  def law(self, draft: Draft, target_probs: jax.Array) -> Law:
    """Returns the distribution of the outcome for one tree.

    Every node starts with r_0 = p. Its children k = 1, 2, ... have a_k =
    min(1, r_{k-1}(x_k) / q_k(x_k)) and r_k = norm((r_{k-1} - q_k)+). stop[i]
    is a product of acceptance and rejection probabilities. The factors are a
    for every node on the path to i, (1 - a) for the earlier siblings of these
    nodes, and (1 - a) for all children of i. next_token[i] is the last r of
    node i.

    Args:
      draft: tree of N nodes.
      target_probs: `[N, V]`, distribution p of the token after every node.
    """
    chex.assert_rank([draft.tokens, draft.parents, target_probs], [1, 1, 2])
    chex.assert_equal_shape([draft.probs, target_probs])
    accept, _, row = tree.try_children(draft, target_probs, inherit=False)
    stop = tree.first_accepted(draft.parents, accept)
    return residual.LawByRow(stop, row)
