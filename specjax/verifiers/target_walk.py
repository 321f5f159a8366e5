"""Target walk: write with the target, as long as the tree holds the text.

Miao et al. 2023, "SpecInfer" (arXiv:2305.09781), calls it naive sampling; on
deterministic trees, such as those of EAGLE-2 (arXiv:2406.16858), its law is
also that of recursive rejection sampling, and no valid rule accepts more in
one round.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.interfaces.verifier import Verifier
from specjax.trees import topology
from specjax.types import Draft
from specjax.types import Law
from specjax.verifiers import residual
from specjax.verifiers import tree
from specjax.verifiers._by_row import law_by_row


@dataclasses.dataclass(frozen=True)
class TargetWalk(Verifier):
  """Accepts the longest path of the tree that the target would have written.

  Exact for every tree that was built without looking at the target's
  randomness, however: sampled, ranked, merged, or pruned by value. It makes
  no use of q, and so accepts less of sampled trees than other rules.
  """

  lossless = True
  requires = ()

  def law(self, draft: Draft, target_probs: jax.Array) -> Law:
    """The law of the outcome for one tree.

    Args:
      draft: a tree of N nodes. Nodes that spell the same text count as one, so
        that a text may go on below any of them; the first one stands for all.
      target_probs: `[N, V]`, p of the token after every node.

    Returns:
      stop[i] is p of the text that node i spells times p of all tokens that
      continue it in no path of the tree; next_token[i] is p of these tokens,
      normalised.
    """
    nodes = target_probs.shape[0]
    node = jnp.arange(nodes)
    same = tree.same_text(draft)
    known = jnp.diagonal(same)
    first = jnp.where(known, jnp.argmax(same, axis=-1), node)
    parent = jnp.where(node > 0, first[draft.parents], 0)

    counts = known & (first == node) & (node > 0)
    p = target_probs.at[parent, draft.tokens].get(mode="fill", fill_value=0)
    below = tree.children(jnp.where(counts, parent, -1))
    inside = jnp.sum(jnp.where(below, p, 0), axis=-1)
    # A node's ancestors may be later copies; their p is that of the first.
    text = tree.over_marked(
        topology.ancestors(draft.parents), p[first].at[0].set(1))
    outside = jnp.maximum(1 - inside, 0)

    def next_row(node):
      p = residual.at_node(target_probs, node)
      taken = jnp.where(counts & (parent == node), draft.tokens, p.shape[0])
      return residual.normalised(p.at[taken].set(0, mode="drop"), p)

    return law_by_row(stop=jnp.where(counts | (node == 0), text * outside, 0),
                      row=next_row)
