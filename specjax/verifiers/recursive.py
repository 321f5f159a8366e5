"""Recursive rejection sampling: try the children of a node one after another.

Miao et al. 2023, "SpecInfer" (arXiv:2305.09781, multi-step speculative
sampling); Jeon et al. 2024 (arXiv:2402.14160, recursive rejection sampling);
Chen et al. 2024, "Sequoia" (arXiv:2402.12374), for children drawn without
replacement. On a chain it is token verification.
"""

import dataclasses

import jax

from specjax.interfaces.verifier import Verifier
from specjax.types import Draft
from specjax.types import Law
from specjax.verifiers import tree
from specjax.verifiers._by_row import law_by_row


@dataclasses.dataclass(frozen=True)
class Recursive(Verifier):
  """Walks to the first accepted child; each rejection cuts q from the target.

  Exact wherever row i of `probs` is the law of `tokens[i]` given its ancestors
  and its earlier siblings: children drawn independently, without replacement,
  from several drafters, deterministically, or some of each.
  """

  lossless = True
  requires = ("conditional",)

  def law(self, draft: Draft, target_probs: jax.Array) -> Law:
    """The law of the outcome for one tree.

    Args:
      draft: a tree of N nodes.
      target_probs: `[N, V]`, p of the token after every node.

    Returns:
      At every node r_0 = p, and for its children k = 1, 2, ...: a_k = min(1,
      r_{k-1}(x_k) / q_k(x_k)), r_k = norm((r_{k-1} - q_k)+). stop[i] is the
      product of a and of (1 - a) of the siblings tried before it over the path
      to node i, times (1 - a) of all children of i; next_token[i] is the last
      r of node i.
    """
    accept, _, rest = tree.try_children(draft, target_probs, inherit=False)
    return law_by_row(stop=tree.first_accepted(draft.parents, accept),
                      row=rest)
