"""Block verification: judge the whole block together.

Sun et al. 2024, "Block Verification Accelerates Speculative Decoding"
(arXiv:2403.10444, Algorithm 2). It is lossless. In this file a rule is valid if
it emits one extra token and then continues with the unmodified target.

In one round no valid rule accepts more tokens in expectation: block
verification accepts every prefix with the largest possible probability (Lemma
4). It also needs the fewest expected rounds of all valid rules to write a
sequence of any given length (`analysis.rounds`). Theorem 2 of the paper states
that it has the most expected tokens after every number of rounds. That fails
after two rounds for gamma >= 3, and after three for gamma = 2
(`analysis.patient_pair`).
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.interfaces.verifier import Verifier
from specjax.types import Draft
from specjax.types import Law
from specjax.verifiers import residual
from specjax.verifiers._by_row import law_by_row


@dataclasses.dataclass(frozen=True)
class Block(Verifier):
  """Accepts the longest prefix whose uniform, of probability h_i, shows heads.

  Algorithm 2 of Sun et al. 2024 (arXiv:2403.10444); h_i is in `by_row`.
  """

  lossless = True
  requires = ("chain",)

  def law(self, draft: Draft, target_probs: jax.Array) -> Law:
    """The law of the outcome for one chain.

    Args:
      draft: a chain of N nodes.
      target_probs: `[N, V]`, p of the token after every node.

    Returns:
      With p_0 = 1, p_i = min(1, p_{i-1} p/q) and S_i = sum_x (p_i p - q)+:
      h_i = S_i / (S_i + 1 - p_i), h_0 = 1; stop[i] = h_i prod_{j>i} (1 - h_j);
      next_token[i] = norm((p_i p - q)+). At the end of the draft q is 0, so
      that h_{N-1} = p_{N-1} and the extra token follows p without a special
      case.
    """
    survive = self.survival(draft, target_probs)

    def rest(survive, p, q):
      # The inner maximum changes no value. It keeps the compiler from fusing
      # product and difference into one rounding in one use of `rest` and not
      # in the other, after which float32 rows sum to 1 only within 2e-6.
      return jnp.maximum(jnp.maximum(survive * p, 0) - q, 0)

    def next_row(node):
      p = residual.at_node(target_probs, node)
      q = residual.next_draft_row(draft, node, p.dtype)
      return residual.normalised(rest(survive[node], p, q), p)

    # The end apart, where q is 0: to join a row of zeros to q would copy it.
    q = draft.probs[1:].astype(target_probs.dtype)
    mass = jnp.append(
        rest(survive[:-1, None], target_probs[:-1], q).sum(-1),
        rest(survive[-1], target_probs[-1], 0).sum())
    return law_by_row(stop=residual.last_heads(mass, survive), row=next_row)

  def survival(self, draft: Draft, target_probs: jax.Array) -> jax.Array:
    """`[N]`, P(tau >= i | x_1..x_i) = p_i = min(1, p_{i-1} p(x_i)/q(x_i))."""
    ratios = residual.chain_ratios(draft, target_probs)
    one = jnp.ones((), ratios.dtype)

    def step(survive, ratio):
      survive = jnp.minimum(one, survive * ratio)
      return survive, survive

    _, survive = jax.lax.scan(step, one, ratios, unroll=8)
    return jnp.concatenate([one[None], survive])
