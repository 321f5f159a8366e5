"""Typical acceptance: keep what the target finds plausible.

Cai et al. 2024, "Medusa" (arXiv:2401.10774, section 2.3.1). NOT lossless: the
output follows neither the target's law nor any law that is independent of the
drafter. `exact.certify` measures how far it is off.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.interfaces.verifier import Verifier
from specjax.trees import topology
from specjax.types import Draft
from specjax.types import Law
from specjax.verifiers import residual
from specjax.verifiers._by_row import law_by_row


@dataclasses.dataclass(frozen=True, kw_only=True)
class Typical(Verifier):
  """Accepts x where p(x) > min(epsilon, delta exp(-H(p))), H in nats.

  The longest accepted path of the tree wins, among equals the likelier one;
  the extra token is the target's likeliest. No uniform is drawn.

  Attributes:
    epsilon: the hard threshold on p(x).
    delta: the factor of the threshold that falls with the target's entropy;
      the paper takes the root of epsilon, 0.3.
  """

  epsilon: float = 0.09
  delta: float = 0.3

  lossless = False
  requires = ()

  def __post_init__(self):
    for name in ("epsilon", "delta"):
      value = getattr(self, name)
      if not 0 <= value <= 1:
        raise ValueError(f"{name} is {value}; it must lie in [0, 1]: 0 accepts "
                         "all that the target can emit")

  def law(self, draft: Draft, target_probs: jax.Array) -> Law:
    """The outcome for one tree, which is deterministic: one-hot `stop` and
    rows.

    Args:
      draft: a tree of N nodes.
      target_probs: `[N, V]`, p of the token after every node.
    """
    nodes, vocab = target_probs.shape
    entropy = jnp.sum(jax.scipy.special.entr(target_probs), axis=-1)
    threshold = jnp.minimum(self.epsilon, self.delta * jnp.exp(-entropy))
    parents = jnp.maximum(draft.parents, 0)
    pick = lambda probs: jnp.take_along_axis(
        probs, draft.tokens[:, None], axis=-1, mode="fill", fill_value=0)[:, 0]
    p = pick(target_probs[parents])
    accept = (p > threshold[parents]) & (pick(draft.probs) > 0)

    root = jnp.arange(nodes) == 0
    on_path = topology.ancestors(draft.parents)
    reached = jnp.all(accept | root | ~on_path, axis=-1)
    depth = jnp.where(reached, jnp.sum(on_path, axis=-1), 0)
    log_p = jnp.where(root, 0, jnp.log(jnp.where(accept, p, 1)))
    likelihood = jnp.where(depth == jnp.max(depth), on_path @ log_p, -jnp.inf)
    dtype = target_probs.dtype
    return law_by_row(
        stop=jax.nn.one_hot(jnp.argmax(likelihood), nodes, dtype=dtype),
        row=lambda node: jax.nn.one_hot(
            jnp.argmax(residual.at_node(target_probs, node)), vocab,
            dtype=dtype))
