"""Block verification (Sun et al. 2024, arXiv:2403.10444, Algorithm 2).

Token verification stops at the first token whose test fails. Block verification
tests all prefixes of the draft and accepts the longest one that passes.

A valid rule is a lossless rule that emits one next token per round and then
continues with the unmodified target. In one round, no valid rule accepts more
tokens in expectation: block verification accepts every prefix with the largest
possible probability (Lemma 4). Among valid rules, it also needs the fewest
expected rounds for a sequence of any length (`analysis.rounds`). Theorem 2 of
the paper states that it emits the most expected tokens after every number of
rounds. This statement is wrong after two rounds for gamma >= 3, and after three
rounds for gamma = 2 (`analysis.patient_pair`).
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
class Block(Verifier):
  """Lossless rule that accepts the longest prefix i with a uniform below h_i.

  h_i is defined in `law`, and p_i in `survival`.

  Example: the two models of section 2 of the paper and the draft (0, 1). p/q is
  1/2 for the first token and 2 for the second, so p_2 = 1. Both tokens are
  accepted, whereas `Token` rejects the first token with probability 1/2.

    >>> import jax.numpy as jnp
    >>> import specjax as sj
    >>> draft = sj.Draft.chain(root=0, tokens=jnp.array([0, 1]),
    ...                        probs=jnp.array([[2/3, 1/3], [2/3, 1/3]]))
    >>> target_probs = jnp.array([[1/3, 2/3], [1/3, 2/3], [1/3, 2/3]])
    >>> print(sj.verifiers.Block().law(draft, target_probs).stop.round(3))
    [0. 0. 1.]
  """

  lossless = True
  requires = ("chain",)

  def law(self, draft: Draft, target_probs: jax.Array) -> Law:
    """Returns the distribution of the outcome for one chain.

    At node i, p and q are the distributions of the token after this node, and
    the number p_i is `survival[i]`. With S_i = sum_x (p_i p(x) - q(x))+, h_i is
    S_i / (S_i + 1 - p_i), and h_0 = 1. Then stop[i] = h_i prod_{j>i} (1 - h_j)
    and next_token[i] = norm((p_i p - q)+). After the last drafted token q is 0,
    so h_{N-1} = p_{N-1} and the bonus token follows p.

    Args:
      draft: chain of N nodes.
      target_probs: `[N, V]`, distribution p of the token after every node.
    """
    chex.assert_rank([draft.tokens, target_probs], [1, 2])
    chex.assert_equal_shape([draft.probs, target_probs])
    survive = self.survival(draft, target_probs)

    def positive_part(survive: jax.Array, p: jax.Array, q: jax.Array | int
                      ) -> jax.Array:
      # The inner maximum changes no value. Without it, the compiler fuses
      # product and difference into one rounding in only one of the two calls of
      # this function. Then float32 rows sum to 1 only within 2e-6.
      return jnp.maximum(jnp.maximum(survive * p, 0) - q, 0)

    def next_row(node: jax.Array) -> jax.Array:
      p = residual.at_node(target_probs, node)
      q = residual.next_draft_row(draft, node, p.dtype)
      return residual.normalise(positive_part(survive[node], p, q), p)

    # The last row is computed separately, because appending a row of zeros to q
    # would copy q.
    q = draft.probs[1:].astype(target_probs.dtype)
    mass = jnp.append(
        positive_part(survive[:-1, None], target_probs[:-1], q).sum(-1),
        positive_part(survive[-1], target_probs[-1], 0).sum())
    return residual.LawByRow(residual.last_success(mass, survive), next_row)

  def survival(self, draft: Draft, target_probs: jax.Array) -> jax.Array:
    """Returns p_i = P(tau >= i | x_1..x_i), `[N]`, for drafted tokens x_i.

    The recursion is p_i = min(1, p_{i-1} p(x_i) / q(x_i)) with p_0 = 1.
    """
    ratios = residual.chain_ratios(draft, target_probs)
    first = jnp.ones((), ratios.dtype)

    def step(survive: jax.Array, ratio: jax.Array
             ) -> tuple[jax.Array, jax.Array]:
      survive = jnp.minimum(first, survive * ratio)
      return survive, survive

    _, survive = jax.lax.scan(step, first, ratios, unroll=8)
    return jnp.concatenate([first[None], survive])
