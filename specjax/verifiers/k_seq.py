"""K-SEQ: K independent drafts of one token, accepted at one reduced rate.

Sun et al. 2023, "SpecTr" (arXiv:2310.15141, K-SEQ), at every node of a tree.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.interfaces.verifier import Verifier
from specjax.types import Draft
from specjax.types import Law
from specjax.verifiers import residual
from specjax.verifiers import tree
from specjax.verifiers._by_row import law_by_row

# Steps of false position in the search of rho; bisection has the rest. On
# laws of text about 8 are enough for float32.
_SECANTS = 24


@dataclasses.dataclass(frozen=True)
class KSeq(Verifier):
  """Walks to the first child that is accepted with p(x) / (rho q(x)).

  rho is the least number at which the target can still make up for what the
  children take, by node. Exact where the children of a node are drawn
  independently from one law; their number must not depend on their tokens.
  """

  lossless = True
  requires = ("iid",)

  def _rho(self, p, q, count):
    return least_rho(p, q, count)

  def law(self, draft: Draft, target_probs: jax.Array) -> Law:
    """The law of the outcome for one tree.

    Args:
      draft: a tree of N nodes, the children of each drawn from one law q.
      target_probs: `[N, V]`, p of the token after every node.

    Returns:
      With K children, beta = sum_x min(q, p / rho) and A = 1 - (1 - beta)^K:
      a = min(1, p(x) / (rho q(x))), stop as for `Recursive`; next_token =
      norm(p - min(q, p / rho) A / beta), which is p at a leaf.
    """
    dtype = target_probs.dtype
    drawn = tree.drafted_probs(draft).astype(dtype)
    real = tree.children(draft.parents) & (drawn > 0)
    counts = jnp.sum(real, axis=-1).astype(dtype)
    eldest = jnp.argmax(real, axis=-1)

    def laws(node):
      return (residual.at_node(target_probs, node),
              residual.at_node(draft.probs, eldest[node]).astype(dtype))

    # Node by node, each search on rows that stay in a cache.
    rhos = jax.lax.map(lambda node: self._rho(*laws(node), counts[node]),
                       jnp.arange(drawn.shape[0], dtype=jnp.int32))

    def next_row(node):
      p, q = laws(node)
      taken = jnp.minimum(q, p / rhos[node])
      share = _share(taken, q, counts[node])
      return residual.normalised(jnp.maximum(p - share * taken, 0), p)

    parents = jnp.maximum(draft.parents, 0)
    p = target_probs.at[parents, draft.tokens].get(mode="fill", fill_value=0)
    accept = jnp.minimum(residual.over(p, rhos[parents] * drawn), 1)
    return law_by_row(stop=tree.first_accepted(draft.parents, accept),
                      row=next_row)


@jax.custom_jvp
def least_rho(p: jax.Array, q: jax.Array, count: jax.Array) -> jax.Array:
  """rho* `[]`, the least rho with A(rho) <= rho beta(rho); in [1, K].

  In s = 1 / rho the condition reads s A / beta <= 1, its left side never
  falls, and it holds at s = 1 / K. False position with halved weights (the
  Illinois method), then bisection. The result is the end of the bracket at
  which the condition holds: the other one would leave a negative residual.

  Args:
    p: `[V]`, the target's law at a node.
    q: `[V]`, the law of its children.
    count: `[]`, K, as a float.
  """
  dtype = p.dtype
  near = 4 * jnp.finfo(dtype).eps

  def step(carry):
    step, low, high, low_value, high_value, side = carry
    middle = (low + high) / 2
    secant = (low * high_value - high * low_value) / (high_value - low_value)
    inside = (secant > low) & (secant < high) & (step < _SECANTS)
    # The first question is whether rho = 1 will do.
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

  # Any negative number will do for the value at 1 / K, which is not taken.
  one = jnp.ones((), dtype)
  found = jax.lax.while_loop(
      lambda carry: carry[2] - carry[1] > near * carry[2], step,
      (0, 1 / jnp.maximum(count, 1), one, -one, one, 0))
  return 1 / found[1]


@least_rho.defjvp
def _least_rho_jvp(primals, tangents):
  """The search has no derivative; what it solves, an equation, has one.

  Where rho is 1 the condition is none, and rho does not move.
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


def _excess(s, p, q, count):
  """s A / beta - 1, which must not be positive, at s = 1 / rho."""
  return s * _share(jnp.minimum(q, s * p), q, count) - 1


def _share(taken, q, count):
  """A / beta = (1 - (1 - beta)^K) / beta, beta = sum(taken); K where it is 0.

  1 - beta is summed from q - taken where it is small. As a difference it would
  be the rounding of the sum of q, whose cube root moves rho by 5e-3 at p = q.
  """
  beta, left = jnp.sum(taken), jnp.sum(jnp.maximum(q - taken, 0))
  few = beta < 0.5
  # The logarithm of 0 has no derivative.
  power = jnp.maximum(count, 1) * jnp.where(
      few, jnp.log1p(-jnp.where(few, beta, 0)),
      jnp.log(jnp.where(few | (left <= 0), 1, left)))
  some = jnp.where(few | (left > 0), -jnp.expm1(power), 1)
  share = residual.over(some, jnp.where(few, beta, 1 - left), count)
  return jnp.where(count > 0, share, 0)
