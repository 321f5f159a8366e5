"""Target walk: sample from the target as long as the tree contains the token.

Miao et al. 2023, "SpecInfer" (arXiv:2305.09781), calls this naive sampling. On
deterministic trees, such as those of EAGLE-2 (arXiv:2406.16858), the outcome
has the same distribution as in recursive rejection sampling. On such trees, no
lossless rule with an unmodified target accepts more tokens in one round.
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
class TargetWalk(Verifier):
  """Lossless rule that samples tokens from the target along a path of the tree.

  The walk stops at the first sampled token that is not in the tree. The rule is
  exact for every tree that does not depend on the target's random numbers, such
  as sampled, ranked or merged trees, or trees pruned by value. The rule does
  not use q, so it accepts fewer tokens on sampled trees than other rules.

  Example: one of the drafted tokens 0 and 1 is accepted with probability
  0.25 + 0.5.

    >>> import jax.numpy as jnp
    >>> import specjax as sj
    >>> draft = sj.Draft.tree(
    ...     root=2, parents=jnp.array([-1, 0, 0]), tokens=jnp.array([0, 1]),
    ...     probs=jnp.array([[1., 0., 0.], [0., 1., 0.]]))
    >>> target_probs = jnp.array(
    ...     [[0.25, 0.5, 0.25], [1., 0., 0.], [0., 1., 0.]])
    >>> law = sj.verifiers.TargetWalk().law(draft, target_probs)
    >>> print(law.stop, law.next_token[0])
    [0.25 0.25 0.5 ] [0. 0. 1.]
  """

  lossless = True
  requires = ()

  def law(self, draft: Draft, target_probs: jax.Array) -> Law:
    """Returns the distribution of the outcome for one tree.

    stop[i] is the product of p over the tokens of the path to node i, times the
    sum of p over all tokens that are not children of node i. next_token[i] is p
    restricted to these tokens and normalised.

    Args:
      draft: tree of N nodes. If the paths to several nodes have the same
        tokens, the rule merges these nodes into the first one. It then has the
        children of all of them.
      target_probs: `[N, V]`, distribution p of the token after every node.
    """
    chex.assert_rank([draft.tokens, draft.parents, target_probs], [1, 1, 2])
    chex.assert_equal_shape([draft.probs, target_probs])
    node = jnp.arange(target_probs.shape[0])
    same = tree.same_text(draft)
    real = jnp.diagonal(same)
    first = jnp.where(real, jnp.argmax(same, axis=-1), node)
    parent = jnp.where(node > 0, first[draft.parents], 0)

    counts = real & (first == node) & (node > 0)
    p = target_probs.at[parent, draft.tokens].get(mode="fill", fill_value=0)
    below = tree.children(jnp.where(counts, parent, -1))
    inside = jnp.sum(jnp.where(below, p, 0), axis=-1)
    # An ancestor may be a later copy of another node. The p of the first node
    # with the same path of tokens is then used.
    path = tree.multiply_marked(
        topology.ancestors(draft.parents), p[first].at[0].set(1))
    outside = jnp.maximum(1 - inside, 0)

    def next_row(node: jax.Array) -> jax.Array:
      p = residual.at_node(target_probs, node)
      taken = jnp.where(counts & (parent == node), draft.tokens, p.shape[0])
      return residual.normalise(p.at[taken].set(0, mode="drop"), p)

    stop = jnp.where(counts | (node == 0), path * outside, 0)
    return residual.LawByRow(stop, next_row)
