"""Typical acceptance: accepts tokens that are plausible under the target.

Cai et al. 2024, "Medusa" (arXiv:2401.10774, section 2.3.1). The rule is lossy:
the distribution of its output depends on the drafter. `exact.certify` measures
the total variation between this distribution and the target's.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Typical(Verifier):
  """Lossy rule that accepts x if p(x) > min(epsilon, delta exp(-H(p))).

  H is the entropy in nats, and p is the target's distribution after the parent
  of x. The longest accepted path of the tree is emitted. Among paths of equal
  length, the rule selects the most likely one under the target. The next token
  is the target's most likely token, so the outcome is deterministic.

  Attributes:
    epsilon: threshold on p(x), in [0, 1].
    delta: factor of the threshold that decreases with the target's entropy, in
      [0, 1]. The paper uses the square root of epsilon, 0.3.

  Example: the threshold is 0.09 at both nodes.

    >>> import jax.numpy as jnp
    >>> import specjax as sj
    >>> draft = sj.Draft.chain(root=0, tokens=jnp.array([1, 2]),
    ...                        probs=jnp.array([[0., 1., 0.], [0., 0., 1.]]))
    >>> target_probs = jnp.array([[0.8, 0.15, 0.05], [0.9, 0.05, 0.05],
    ...                           [0.2, 0.2, 0.6]])
    >>> law = sj.verifiers.Typical().law(draft, target_probs)
    >>> print(law.stop, law.next_token[1])
    [0. 1. 0.] [1. 0. 0.]
  """

  epsilon: float = 0.09
  delta: float = 0.3

  lossless = False
  requires = ()

  def __post_init__(self):
    for name in ("epsilon", "delta"):
      value = getattr(self, name)
      if not 0 <= value <= 1:
        raise ValueError(f"{name} is {value}; it must be in [0, 1]: 0 accepts "
                         "every token that the target can emit")

  def law(self, draft: Draft, target_probs: jax.Array) -> Law:
    """Returns the outcome for one tree, with `stop` and all rows one-hot.

    Args:
      draft: tree of N nodes.
      target_probs: `[N, V]`, distribution p of the token after every node.
    """
    chex.assert_rank([draft.tokens, draft.parents, target_probs], [1, 1, 2])
    chex.assert_equal_shape([draft.probs, target_probs])
    entropy = jnp.sum(jax.scipy.special.entr(target_probs), axis=-1)
    threshold = jnp.minimum(self.epsilon, self.delta * jnp.exp(-entropy))
    parents = jnp.maximum(draft.parents, 0)
    pick = lambda probs: jnp.take_along_axis(
        probs, draft.tokens[:, None], axis=-1, mode="fill", fill_value=0)[:, 0]
    p = pick(target_probs[parents])
    accept = (p > threshold[parents]) & (pick(draft.probs) > 0)

    root = jnp.arange(target_probs.shape[0]) == 0
    on_path = topology.ancestors(draft.parents)
    reached = jnp.all(accept | root | ~on_path, axis=-1)
    depth = jnp.where(reached, jnp.sum(on_path, axis=-1), 0)
    log_p = jnp.where(root, 0, jnp.log(jnp.where(accept, p, 1)))
    likelihood = jnp.where(depth == jnp.max(depth), on_path @ log_p, -jnp.inf)
    return residual.greedy_law(jnp.argmax(likelihood), target_probs)
