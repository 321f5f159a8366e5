"""Traversal verification: judge whole paths of a tree, from its leaves up.

Weng et al. 2025 (arXiv:2505.12398), in a form that carries probability mass.
On a chain it is block verification.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.interfaces.verifier import Verifier
from specjax.trees import topology
from specjax.types import Draft
from specjax.types import Law
from specjax.verifiers import tree
from specjax.verifiers._by_row import law_by_row


@dataclasses.dataclass(frozen=True)
class Traversal(Verifier):
  """Visits the nodes children first and stops at the first accepted one.

  Exact wherever row i of `probs` is the law of `tokens[i]` given all that was
  drawn before it: its ancestors, its earlier siblings AND other nodes, such as
  descendants of those. No pair of models is known for which it accepts less
  than `Recursive`, on average over the drafts, if no child has a larger subtree
  than an earlier sibling; otherwise it can.
  """

  lossless = True
  requires = ("conditional",)

  def law(self, draft: Draft, target_probs: jax.Array) -> Law:
    """The law of the outcome for one tree.

    Args:
      draft: a tree of N nodes.
      target_probs: `[N, V]`, p of the token after every node.

    Returns:
      Node c with parent v is entered with mass a_c = min(1, u_v(x) / q_c(x))
      and u_c = a_c p; the root with mass 1. When c is left without being
      accepted, u_v becomes (u_v - q_c)+ / (S + (1 - m_v)), S the sum of the
      numerator. With m_i the mass of u_i after the last child of i: stop[i]
      = m_i times (1 - m_j) of every node j that is left before i;
      next_token[i] = u_i / m_i.
    """
    _, mass, rest = tree.try_children(draft, target_probs, inherit=True)
    on_path = topology.ancestors(draft.parents)
    below = on_path.T & ~jnp.eye(mass.shape[0], dtype=bool)
    paths = on_path.astype(jnp.float32)
    elder = tree.elder_siblings(draft.parents).astype(jnp.float32)
    # Left before i: what is below i, and what lies under an elder sibling of
    # a node on the path to i. All counts are small and exact.
    before = below | (paths @ elder @ paths.T > 0.5)
    return law_by_row(stop=mass * tree.over_marked(before, 1 - mass),
                      row=rest)
