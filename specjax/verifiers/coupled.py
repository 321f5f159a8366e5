"""Gumbel coupling: drafter and target choose their tokens with the same noise.

Daliri et al. 2024 (arXiv:2408.07978). `LogitsTransform.coupled` decodes with
shared noise. This module has the distribution of the outcome over the noise.

Let S_i be independent Exp(1) variables, X = argmin S_i / q_i the drafted token,
and Y = argmin S_i / p_i the target's token. X is accepted iff X = Y.

* X = Y = x iff S_i >= S_x max(q_i / q_x, p_i / p_x) for all i. Integration over
  S_x yields P(X = Y = x) = 1 / sum_i max(q_i / q_x, p_i / p_x).
* Let x != y, S_x = a q_x and S_y = b p_y. Then X = x and Y = y iff
  S_i >= max(a q_i, b p_i) for all other i, a q_x >= b p_x and b p_y >= a q_y.
  The density of (a, b) is q_x p_y exp(-sum_i max(a q_i, b p_i)). In the
  coordinates a = s (1 - t) and b = s t, with da db = s ds dt, the exponent is
  -s D(t), D(t) = sum_i max(q_i (1 - t), p_i t), and the integral over s is
  1 / D(t)^2. With t_i = q_i / (q_i + p_i),

    P(X = x, Y = y) = q_x p_y (G(t_x) - G(t_y))+,  G(t) = int_0^t du / D(u)^2.

  D is linear between the values t_i. There, the integral from u to v is
  (v - u) / (D(u) D(v)).
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
class Coupled(Verifier):
  """Lossless rule that accepts x with probability P(X = Y = x) / q(x).

  This is the distribution of the outcome of `LogitsTransform.coupled` for a
  chain, given the draft and averaged over the noise. As an observer, it has the
  exact expected number of tokens that decoding with shared noise accepts. As
  the rule of a decoder without shared noise, it accepts as many tokens, but the
  text then depends on the drafter.

  Example: X = Y = 0 has probability 1 / (max(1, 1) + max(1, 3)), and X = 0 has
  probability 1/2.

    >>> import jax.numpy as jnp
    >>> import specjax as sj
    >>> draft = sj.Draft.chain(root=1, tokens=jnp.array([0]),
    ...                        probs=jnp.array([[0.5, 0.5]]))
    >>> target_probs = jnp.array([[0.25, 0.75], [0.5, 0.5]])
    >>> law = sj.verifiers.Coupled().law(draft, target_probs)
    >>> print(law.stop, law.next_token[0])
    [0.5 0.5] [0. 1.]
  """

  lossless = True
  requires = ("chain",)

  def law(self, draft: Draft, target_probs: jax.Array) -> Law:
    """Returns the distribution of the outcome for one chain.

    stop[i] is the probability that all tokens up to node i are accepted and the
    next token is not. next_token[i] is the distribution of Y, given X and that
    Y differs from X. After the last node it is p.

    Args:
      draft: chain of N nodes.
      target_probs: `[N, V]`, distribution p of the token after every node.
    """
    chex.assert_rank([draft.tokens, target_probs], [1, 2])
    chex.assert_equal_shape([draft.probs, target_probs])
    reach = self.survival(draft, target_probs)

    def next_row(node: jax.Array) -> jax.Array:
      p = residual.at_node(target_probs, node)
      q = residual.next_draft_row(draft, node, p.dtype)
      x = jnp.append(draft.tokens, 0)[node + 1]
      place, order, _, integral = _pieces(p, q)
      integral = jnp.zeros_like(p).at[order].set(integral)
      # After the last node q is 0, so the residual is 0 and p replaces it.
      above = jnp.take(integral, x, mode="clip") - integral
      return residual.normalise(
          jnp.where(place < place[x], p * jnp.maximum(above, 0), 0), p)

    return residual.LawByRow(reach - jnp.append(reach[1:], 0), next_row)

  def survival(self, draft: Draft, target_probs: jax.Array) -> jax.Array:
    """Returns `[N]`, prod_{j<=i} P(Y = x_j | X = x_j)."""
    p, q = target_probs[:-1], draft.probs[1:].astype(target_probs.dtype)
    at_p = residual.at_drafted(draft, target_probs, first=0)
    at_q = residual.at_drafted(draft, q, first=0)
    # P(Y = x | X = x) = 1 / sum_i max(q_i, p_i q_x / p_x). Numerator and
    # denominator are multiplied by p_x and rounded alike, so that the quotient
    # is exactly 1 if p is q or if both choose x at temperature 0.
    scaled = q * at_p[:, None]
    accept = residual.divide(
        jnp.sum(scaled, axis=-1),
        jnp.sum(jnp.maximum(scaled, p * at_q[:, None]), axis=-1))
    accept = jnp.where(at_q > 0, jnp.minimum(accept, 1), 0)
    return jnp.concatenate([jnp.ones((1,), accept.dtype), jnp.cumprod(accept)])


def coupled_acceptance(p: jax.Array, q: jax.Array) -> jax.Array:
  """Returns `[V]`, P(X = Y = x) of every token x.

  The sum over x is the probability that a drafted token is accepted.

  >>> import jax.numpy as jnp
  >>> print(coupled_acceptance(jnp.array([0.25, 0.75]), jnp.array([0.5, 0.5])))
  [0.25 0.5 ]

  Args:
    p: `[V]` distribution of the target.
    q: `[V]` distribution of the drafter.
  """
  place, order, density, _ = _pieces(p, q)
  return residual.divide(p * place, jnp.zeros_like(p).at[order].set(density))


def _pieces(p: jax.Array, q: jax.Array) -> tuple[jax.Array, ...]:
  """Returns t_i, their order, and D and G at the sorted t_i, all `[V]`."""
  place = residual.divide(q, q + p)
  order = jnp.argsort(place)
  t, p, q = place[order], p[order], q[order]
  density = (jnp.cumsum(q[::-1])[::-1] - q) * (1 - t) + jnp.cumsum(p) * t
  before = jnp.append(jnp.sum(q)[None], density[:-1])  # D(0), D(t_1), ...
  steps = jnp.diff(t, prepend=0) * residual.divide(1, density * before)
  return place, order, density, jnp.cumsum(steps)
