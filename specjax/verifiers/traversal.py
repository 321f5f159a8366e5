"""Traversal verification: tests the paths of a tree from the leaves up.

Weng et al. 2025 (arXiv:2505.12398). On a chain, traversal verification is block
verification. Each node has an unnormalised target distribution. The mass of a
node is the sum of this distribution.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp

from specjax.interfaces.verifier import Verifier
from specjax.trees import topology
from specjax.types import Draft
from specjax.types import Law
from specjax.verifiers import residual
from specjax.verifiers import tree


@dataclasses.dataclass(frozen=True)
class Traversal(Verifier):
  """Lossless rule that tests children before parents.

  The rule stops at the first accepted node. It is exact if row i of `probs` is
  the distribution of `tokens[i]` given all tokens drawn before it. These are
  its ancestors, its earlier siblings AND all other nodes drawn before, such as
  descendants of earlier siblings.

  On trees in which no child has a larger subtree than an earlier sibling, no
  pair of models is known for which this rule accepts fewer tokens than
  `Recursive` on average over the drafts. On other trees it can accept fewer
  tokens.

  Example: two independent draws below the root, as for `Recursive`.

    >>> import jax.numpy as jnp
    >>> import specjax as sj
    >>> draft = sj.Draft.tree(
    ...     root=1, parents=jnp.array([-1, 0, 0]), tokens=jnp.array([0, 1]),
    ...     probs=jnp.array([[0.5, 0.5], [0.5, 0.5]]))
    >>> target_probs = jnp.array([[0.25, 0.75], [0.5, 0.5], [0.5, 0.5]])
    >>> print(sj.verifiers.Traversal().law(draft, target_probs).stop)
    [0.  0.5 0.5]
  """

  lossless = True
  requires = ("conditional",)

  def law(self, draft: Draft, target_probs: jax.Array) -> Law:
    """Returns the distribution of the outcome for one tree.

    Node v has the distribution u_v with mass m_v = sum_x u_v(x). The root
    starts with u = p. Node c with token x and parent v starts with u_c = a_c p,
    where a_c = min(1, u_v(x) / q_c(x)). If the traversal leaves c without
    accepting it, u_v becomes (u_v - q_c)+ / (S + (1 - m_v)), where S is the sum
    of the numerator.

    Below, u_i and m_i are the values after the last child of i. stop[i] is the
    product of m_i and (1 - m_j) for every node j that the traversal leaves
    before i. next_token[i] = u_i / m_i.

    Args:
      draft: tree of N nodes.
      target_probs: `[N, V]`, distribution p of the token after every node.
    """
    chex.assert_rank([draft.tokens, draft.parents, target_probs], [1, 1, 2])
    chex.assert_equal_shape([draft.probs, target_probs])
    _, mass, row = tree.try_children(draft, target_probs, inherit=True)
    on_path = topology.ancestors(draft.parents)
    below = on_path.T & ~jnp.eye(mass.shape[0], dtype=bool)
    paths = on_path.astype(jnp.float32)
    earlier = tree.earlier_siblings(draft.parents).astype(jnp.float32)
    # Nodes that the traversal leaves before it leaves node i: the descendants
    # of i, and the subtrees of earlier siblings of nodes on the path to i. The
    # product below contains small integers, which float32 represents exactly.
    before = below | (paths @ earlier @ paths.T > 0.5)
    stop = mass * tree.multiply_marked(before, 1 - mass)
    return residual.LawByRow(stop, row)
