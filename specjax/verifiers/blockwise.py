"""Lossy rules for chains that accept tokens close to the target's choice.

Stern et al. 2018, "Blockwise Parallel Decoding" (arXiv:1811.03115, section 5).
The output follows neither the target's distribution nor its greedy choice.
`exact.certify` measures the total variation between the output's distribution
and the target's.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp

from specjax.interfaces.verifier import Verifier
from specjax.types import Draft
from specjax.types import Law
from specjax.utils import fields
from specjax.verifiers import residual


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopK(Verifier):
  """Lossy rule that accepts a token among the k most likely of the target.

  Section 5.1 of the paper. The next token is the target's most likely token, so
  the outcome is deterministic. A token of probability 0 is accepted only if
  `minimum` requires it. So at temperature 0 all values of k are equivalent.

  Attributes:
    k: a drafted token is accepted if it is one of the target's k most likely
      tokens; at least 1. 1 is greedy matching. Among tokens with equal
      probabilities, those with the lowest ids come first.
    minimum: number of drafted tokens that are always accepted. The paper's l
      (section 5.3) also counts the next token, so l is `minimum` + 1.

  Example: the drafted token is the target's second choice.

    >>> import jax.numpy as jnp
    >>> import specjax as sj
    >>> draft = sj.Draft.chain(root=0, tokens=jnp.array([1]),
    ...                        probs=jnp.array([[0., 1., 0.]]))
    >>> target_probs = jnp.array([[0.1, 0.3, 0.6], [0.8, 0.1, 0.1]])
    >>> print(sj.verifiers.TopK(k=1).law(draft, target_probs).stop)
    [1. 0.]
    >>> print(sj.verifiers.TopK(k=2).law(draft, target_probs).stop)
    [0. 1.]
  """

  k: int
  minimum: int = 0

  lossless = False
  requires = ("chain",)

  def __post_init__(self):
    fields.check_at_least("k", self.k, 1, ": 1 is greedy matching")
    fields.check_at_least("minimum", self.minimum, 0)

  def law(self, draft: Draft, target_probs: jax.Array) -> Law:
    """Returns the outcome for one chain, with `stop` and all rows one-hot.

    Args:
      draft: chain of N nodes.
      target_probs: `[N, V]`, distribution p of the token after every node.
    """
    chex.assert_rank([draft.tokens, target_probs], [1, 2])
    chex.assert_equal_shape([draft.probs, target_probs])
    p = residual.at_drafted(draft, target_probs, first=0)
    rows, x = target_probs[:-1], draft.tokens[1:]
    likelier = (rows > p[:, None]) | (
        (rows == p[:, None]) & (jnp.arange(rows.shape[-1]) < x[:, None]))
    near = (jnp.sum(likelier, axis=-1) < self.k) & (p > 0)
    return _stop_at_mismatch(near, self.minimum, draft, target_probs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distance(Verifier):
  """Lossy rule that accepts x if its id is within epsilon of the argmax of p.

  Section 5.2 of the paper, for vocabularies whose ids are ordered quantities,
  such as intensities of pixels. The next token is the target's most likely
  token, so the outcome is deterministic.

  Attributes:
    epsilon: largest accepted |x - argmax p|, in ids. 0 is greedy matching.
    minimum: number of drafted tokens that are always accepted, see `TopK`.

  Example: the drafted intensity 1 is one step from the target's choice, 2.

    >>> import jax.numpy as jnp
    >>> import specjax as sj
    >>> draft = sj.Draft.chain(root=0, tokens=jnp.array([1]),
    ...                        probs=jnp.array([[0., 1., 0.]]))
    >>> target_probs = jnp.array([[0.3, 0.1, 0.6], [0.8, 0.1, 0.1]])
    >>> print(sj.verifiers.Distance(epsilon=1).law(draft, target_probs).stop)
    [0. 1.]
  """

  epsilon: int
  minimum: int = 0

  lossless = False
  requires = ("chain",)

  def __post_init__(self):
    fields.check_at_least(
        "epsilon", self.epsilon, 0, ": 0 is greedy matching")
    fields.check_at_least("minimum", self.minimum, 0)

  def law(self, draft: Draft, target_probs: jax.Array) -> Law:
    """Returns the outcome for one chain, see `TopK.law`."""
    chex.assert_rank([draft.tokens, target_probs], [1, 2])
    chex.assert_equal_shape([draft.probs, target_probs])
    best = jnp.argmax(target_probs[:-1], axis=-1)
    near = jnp.abs(draft.tokens[1:] - best) <= self.epsilon
    return _stop_at_mismatch(near, self.minimum, draft, target_probs)


def _stop_at_mismatch(near: jax.Array, minimum: int, draft: Draft,
                      target_probs: jax.Array) -> Law:
  """Returns the law that stops before the first mismatch.

  Args:
    near: `[N - 1]` bool, True if a drafted token matches.
    minimum: number of drafted tokens that are accepted without a match. Padding
      is never accepted.
    draft: chain of N nodes.
    target_probs: `[N, V]`, distribution p of the token after every node.
  """
  forced = jnp.arange(near.shape[0]) < minimum
  real = residual.at_drafted(draft, draft.probs) > 0
  length = jnp.sum(jnp.cumprod((near | forced) & real))
  return residual.greedy_law(length, target_probs)
