"""K-SEQ at every node of a tree (Sun et al. 2023, SpecTr, arXiv:2310.15141).

The K children of a node are independent samples from one distribution q. Each
is accepted with a probability that depends on its ratio p/q, divided by a
factor rho common to all children of the node.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp

from specjax.interfaces.verifier import Verifier
from specjax.types import Draft
from specjax.types import Law
from specjax.verifiers import residual
from specjax.verifiers import tree

# Maximum number of false-position steps in the search for rho. Bisection
# follows. For distributions of language models, about 8 steps suffice in
# float32.
_SECANTS = 24


@dataclasses.dataclass(frozen=True)
class KSeq(Verifier):
  """Lossless rule that tests every child x with p(x) / (rho q(x)).

  The first child that passes is accepted. rho >= 1 is the smallest number for
  which the rule is exact, computed for every node. The children of a node must
  be drawn independently from one distribution, and their number must not depend
  on their tokens.

  Example: two draws from q, both of token 0, with p(0) = q(0) / 2.

    >>> import jax.numpy as jnp
    >>> import specjax as sj
    >>> draft = sj.Draft.tree(
    ...     root=1, parents=jnp.array([-1, 0, 0]), tokens=jnp.array([0, 0]),
    ...     probs=jnp.array([[0.5, 0.5], [0.5, 0.5]]))
    >>> target_probs = jnp.array([[0.25, 0.75], [0.5, 0.5], [0.5, 0.5]])
    >>> print(sj.verifiers.KSeq().law(draft, target_probs).stop.round(1))
    [0.4 0.4 0.2]
  """

  lossless = True
  requires = ("iid",)

  def _rho(self, p: jax.Array, q: jax.Array, count: jax.Array) -> jax.Array:
    return least_rho(p, q, count)

  def law(self, draft: Draft, target_probs: jax.Array) -> Law:
    """Returns the distribution of the outcome for one tree.

    At a node with K children, a tested child x is accepted with probability a =
    min(1, p(x) / (rho q(x))). stop is the product in `Recursive.law` with this
    a. A child passes with probability beta = sum_x min(q(x), p(x) / rho). At
    least one child passes with probability A = 1 - (1 - beta)^K. next_token is
    norm(p - min(q, p / rho) A / beta), which is p at a leaf.

    Args:
      draft: tree of N nodes. Siblings are drawn from one distribution q.
      target_probs: `[N, V]`, distribution p of the token after every node.
    """
    chex.assert_rank([draft.tokens, draft.parents, target_probs], [1, 1, 2])
    chex.assert_equal_shape([draft.probs, target_probs])
    dtype = target_probs.dtype
    drawn = tree.drafted_probs(draft).astype(dtype)
    real = tree.children(draft.parents) & (drawn > 0)
    counts = jnp.sum(real, axis=-1).astype(dtype)
    eldest = jnp.argmax(real, axis=-1)

    def models_at(node: jax.Array) -> tuple[jax.Array, jax.Array]:
      return (residual.at_node(target_probs, node),
              residual.at_node(draft.probs, eldest[node]).astype(dtype))

    # The loop over nodes keeps the rows of one search in the CPU's cache.
    rhos = jax.lax.map(lambda node: self._rho(*models_at(node), counts[node]),
                       jnp.arange(drawn.shape[0], dtype=jnp.int32))

    def next_row(node: jax.Array) -> jax.Array:
      p, q = models_at(node)
      taken = jnp.minimum(q, p / rhos[node])
      share = _share(taken, q, counts[node])
      return residual.normalise(jnp.maximum(p - share * taken, 0), p)

    parents = jnp.maximum(draft.parents, 0)
    p = target_probs.at[parents, draft.tokens].get(mode="fill", fill_value=0)
    accept = jnp.minimum(residual.divide(p, rhos[parents] * drawn), 1)
    stop = tree.first_accepted(draft.parents, accept)
    return residual.LawByRow(stop, next_row)


@jax.custom_jvp
def least_rho(p: jax.Array, q: jax.Array, count: jax.Array) -> jax.Array:
  """Returns the smallest rho `[]` with A(rho) <= rho beta(rho), in [1, K].

  A and beta are defined in `KSeq.law`. With s = 1 / rho the condition is s A /
  beta <= 1. The left side does not decrease with s, and the condition holds at
  s = 1 / K. The search first uses false position with halved weights (the
  Illinois method), then bisection. It returns the end of the bracket at which
  the condition holds. The other end would give a negative residual.

  Args:
    p: `[V]`, target distribution at a node.
    q: `[V]`, distribution of the node's children.
    count: `[]`, number K of children, as a float.
  """
  chex.assert_rank([p, q, count], [1, 1, 0])
  chex.assert_equal_shape([p, q])
  dtype = p.dtype
  near = 4 * jnp.finfo(dtype).eps

  def step(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    step, low, high, low_value, high_value, side = carry
    middle = (low + high) / 2
    secant = (low * high_value - high * low_value) / (high_value - low_value)
    inside = (secant > low) & (secant < high) & (step < _SECANTS)
    # The first step tries rho = 1.
    s = jnp.where(step == 0, high, jnp.where(inside, secant, middle))
    value = _excess(s, p, q, count)
    holds = value <= 0
    again = jnp.where(holds, side < 0, side > 0)
    half = jnp.where(again, 0.5, 1).astype(dtype)
    return (step + 1,
            jnp.where(holds, s, low),
            jnp.where(holds, high, s),
            jnp.where(holds, value, half * low_value),
            jnp.where(holds, half * high_value, value),
            jnp.where(holds, -1, 1))

  # The value at 1 / K is not computed, because any negative number can replace
  # it.
  one = jnp.ones((), dtype)
  bracket = jax.lax.while_loop(
      lambda carry: carry[2] - carry[1] > near * carry[2], step,
      (0, 1 / jnp.maximum(count, 1), one, -one, one, 0))
  return 1 / bracket[1]


@least_rho.defjvp
def _least_rho_jvp(primals: tuple[jax.Array, ...],
                   tangents: tuple[jax.Array, ...]
                   ) -> tuple[jax.Array, jax.Array]:
  """Differentiates rho by the implicit function theorem.

  If rho is 1 the condition is not active, and the derivative is 0.
  """
  p, q, count = primals
  rho = least_rho(*primals)
  s = 1 / rho
  slope = jax.grad(_excess)(s, p, q, count)
  _, change = jax.jvp(lambda p, q: _excess(s, p, q, count), (p, q),
                      tangents[:2])
  binding = (rho > 1) & (slope > 0)
  return rho, jnp.where(
      binding, rho**2 * change / jnp.where(binding, slope, 1), 0)


def _excess(s: jax.Array, p: jax.Array, q: jax.Array, count: jax.Array
            ) -> jax.Array:
  """Returns s A / beta - 1 at s = 1 / rho; exact rules require at most 0."""
  return s * _share(jnp.minimum(q, s * p), q, count) - 1


def _share(taken: jax.Array, q: jax.Array, count: jax.Array) -> jax.Array:
  """Returns A / beta = (1 - (1 - beta)^K) / beta, or K if beta is 0.

  beta is the sum of `taken`. If beta is at least 0.5, 1 - beta is computed as
  the sum of q - taken. A subtraction would have the rounding error of the sum
  of q. At p = q, this would change rho by the cube root of that error: 5e-3 in
  float32.

  Args:
    taken: `[V]`, min(q, p / rho).
    q: `[V]`, distribution of the children.
    count: `[]`, number K of children. The result is 0 if it is 0.
  """
  beta, left = jnp.sum(taken), jnp.sum(jnp.maximum(q - taken, 0))
  few = beta < 0.5
  # The logarithm of 0 has no derivative.
  power = jnp.maximum(count, 1) * jnp.where(
      few, jnp.log1p(-jnp.where(few, beta, 0)),
      jnp.log(jnp.where(few | (left <= 0), 1, left)))
  some = jnp.where(few | (left > 0), -jnp.expm1(power), 1)
  share = residual.divide(some, jnp.where(few, beta, 1 - left), count)
  return jnp.where(count > 0, share, 0)
