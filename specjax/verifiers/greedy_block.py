"""Greedy block verification (Sun et al. 2024, arXiv:2403.10444, Alg. 4 to 6).

Greedy block verification is block verification without the cap of 1 on the
running product of p/q. Without the cap, the output alone would be biased. To
correct the bias, the target is modified at the positions of the rejected draft
tokens. The modification is the verifier's state.

No rule accepts more tokens in one round (Theorem 3). Over several rounds,
greedy block verification can accept fewer tokens than block verification, and
also fewer than token verification.
"""

import dataclasses

import chex
from flax import struct
import jax
import jax.numpy as jnp

from specjax.interfaces.verifier import Verifier
from specjax.sampling import smallest_mass
from specjax.types import Draft
from specjax.types import Law
from specjax.types import Verdict
from specjax.verifiers import residual


@struct.dataclass
class GreedyBlockState:
  """The active modifications of the target, oldest first.

  The unmodified target is T_0 = p. Entry k modifies the distributions of the
  next `remaining[k]` tokens: T_{k+1} = norm((T_k - w q)+). Every emitted token
  changes w.

  Attributes:
    remaining: `[gamma - 1]` int32, number of positions that an entry still
      modifies. It is at most k + 1 for entry k, because every round appends one
      entry and emits at least one token.
    weights: `[gamma - 1]`, weight w of each entry after the committed tokens.
  """

  remaining: jax.Array
  weights: jax.Array


@dataclasses.dataclass(frozen=True)
class GreedyBlock(Verifier):
  """Lossless rule that accepts x^i with probability min(1, T(x^i) / q(x^i)).

  x^i is the prefix of i draft tokens, and T is the modified target, see
  `GreedyBlockState`. The rule is exact only if q depends on the context alone,
  because the modification uses the current q in place of the q of an earlier
  draft. All drafts of a sequence must also have the same length.

  Example: the first round of a sequence, in which the target is not modified.

    >>> import jax.numpy as jnp
    >>> import specjax as sj
    >>> rule = sj.verifiers.GreedyBlock()
    >>> draft = sj.Draft.chain(root=0, tokens=jnp.array([0, 1]),
    ...                        probs=jnp.array([[2/3, 1/3], [2/3, 1/3]]))
    >>> target_probs = jnp.array([[1/3, 2/3], [1/3, 2/3], [1/3, 2/3]])
    >>> print(rule.law(draft, target_probs, rule.init(2)).stop.round(3))
    [0. 0. 1.]
  """

  lossless = True
  requires = ("chain", "autoregressive")

  def init(self, gamma: int) -> GreedyBlockState:
    """Returns the state before the first round, without modifications.

    Args:
      gamma: number of draft tokens per round.
    """
    entries = max(gamma - 1, 0)
    return GreedyBlockState(remaining=jnp.zeros((entries,), jnp.int32),
                            weights=jnp.zeros((entries,), float))

  def law(self, draft: Draft, target_probs: jax.Array,
          state: GreedyBlockState | None = None) -> Law:
    """Returns the distribution of the outcome for one chain.

    T is the modified target, and R_i is the product of T/q over the drafted
    tokens up to i, not capped at 1. With S_i = sum_x (R_i T(x) - q(x))+, h_i is
    S_i / (S_i + (1 - R_i)+), and h_0 = 1. Then stop[i] = h_i prod_{j>i} (1 -
    h_j) and next_token[i] = norm((R_i T - q)+).

    Args:
      draft: chain of N nodes.
      target_probs: `[N, V]`, distribution p of the token after every node.
      state: modifications of the target. None: the target is not modified.
    """
    chex.assert_rank([draft.tokens, target_probs], [1, 2])
    chex.assert_equal_shape([draft.probs, target_probs])
    modified = _modify(draft, target_probs, state)
    ratio = _running_ratio(draft, target_probs, modified)
    survive = jnp.minimum(ratio, 1)
    # A huge ratio R would overflow in (R T - q)+. If R is above 1, both terms
    # are therefore divided by R, which gives (T - q / R)+. This changes neither
    # h nor the normalised row.
    scale = 1 / jnp.maximum(ratio, 1)

    def positive_part(target: jax.Array, q: jax.Array, survive: jax.Array,
                      scale: jax.Array) -> jax.Array:
      # The inner maximum prevents a fusion of the operations, see block.py.
      return jnp.maximum(jnp.maximum(survive * target, 0) - scale * q, 0)

    def next_row(node: jax.Array) -> jax.Array:
      p = residual.at_node(target_probs, node)
      q = residual.next_draft_row(draft, node, p.dtype)
      target = modified.target(p, q, node)
      return residual.normalise(
          positive_part(target, q, survive[node], scale[node]), target)

    q = residual.next_draft_probs(draft, target_probs)
    every = jnp.arange(q.shape[0])[:, None]
    target = modified.target(target_probs, q, every)
    mass = jnp.sum(positive_part(target, q, survive[:, None], scale[:, None]),
                   axis=-1)
    return residual.LawByRow(residual.last_success(mass, survive), next_row)

  def survival(self, draft: Draft, target_probs: jax.Array,
               state: GreedyBlockState | None = None) -> jax.Array:
    """Returns P(tau >= i | x_1..x_i) = min(1, R_i), `[N]` (Lemma 7)."""
    modified = _modify(draft, target_probs, state)
    return jnp.minimum(_running_ratio(draft, target_probs, modified), 1)

  def commit(self, state: GreedyBlockState, draft: Draft,
             target_probs: jax.Array, verdict: Verdict) -> GreedyBlockState:
    """Returns the modifications after a round.

    The weight w of an old entry is multiplied by q(y)/T_k(y) for every emitted
    token y. A new entry, which starts at the root of this draft, is appended.
    Its w is the product of q/T over the emitted tokens, equal to q(y)/T(y) of
    the next token y, divided by R_tau. The oldest entry has expired and is
    removed.
    """
    tau, token = verdict.num_accepted, verdict.next_token
    modified = _modify(draft, target_probs, state)
    # q is 0 after a full acceptance, so the new entry has w = 0.
    p = target_probs[tau, token]
    q = residual.next_draft_row(draft, tau, p.dtype)[token]
    before = (jnp.maximum(p - modified.omega[:, tau] * q, 0)
              / modified.mass[:, tau])
    ratio = _running_ratio(draft, target_probs, modified)[tau]
    pushed = residual.divide(q, modified.target(p, q, tau) * ratio)
    weights = jnp.append(modified.weights[:, tau] * residual.divide(q, before),
                         pushed)
    drafted = jnp.sum(draft.drafted, dtype=jnp.int32)
    remaining = jnp.append(state.remaining, drafted) - (tau + 1)
    # The oldest entry has expired: it had at most one position.
    weights, remaining = weights[1:], remaining[1:]
    alive = (remaining > 0) & (weights > 0)
    return GreedyBlockState(
        remaining=jnp.where(alive, remaining, 0),
        weights=jnp.where(alive, weights, 0).astype(state.weights.dtype))


def _running_ratio(draft: Draft, p: jax.Array, modified: "_Modified"
                   ) -> jax.Array:
  """Returns R `[N]`, the product of T/q over the drafted tokens up to a node.

  Products that would overflow are replaced by the largest finite number.

  Args:
    draft: chain of N nodes.
    p: `[N, V]`, distribution p of the token after every node.
    modified: the modified target.
  """
  largest = jnp.finfo(p.dtype).max
  one = jnp.ones((), p.dtype)
  q_drafted = residual.at_drafted(draft, draft.probs).astype(p.dtype)
  target = modified.target(residual.at_drafted(draft, p, first=0), q_drafted,
                        jnp.arange(p.shape[0] - 1))

  def step(ratio: jax.Array, factor: jax.Array
           ) -> tuple[jax.Array, jax.Array]:
    ratio = jnp.minimum(ratio * factor, largest)
    return ratio, ratio

  _, ratios = jax.lax.scan(
      step, one, residual.divide(target, q_drafted), unroll=8)
  return jnp.concatenate([one[None], ratios])


@struct.dataclass
class _Modified:
  """The modified target T, and the target T_k before every entry k.

  Both have the form (p - omega q)+ / mass.

  Attributes:
    last: `[2, N]`, omega and mass of T. Mass 0 means that T = p.
    omega: `[gamma - 1, N]`, omega of T_k at every node.
    mass: `[gamma - 1, N]`, mass of T_k at every node.
    weights: `[gamma - 1, N]`, weight w of every entry at every node.
  """

  last: jax.Array
  omega: jax.Array
  mass: jax.Array
  weights: jax.Array

  def target(self, p: jax.Array, q: jax.Array, nodes: jax.Array) -> jax.Array:
    """Returns the modified target T after some nodes.

    Args:
      p: values of p after these nodes.
      q: values of q after these nodes.
      nodes: indices of the nodes. All arguments are broadcast.
    """
    omega, mass = self.last[:, nodes]
    some = mass > 0
    return jnp.where(some, _cut(p, omega, q) / jnp.where(some, mass, 1), p)


def _modify(draft: Draft, p: jax.Array, state: GreedyBlockState | None
            ) -> _Modified:
  """Applies all entries of the state to the target.

  T_k is (p - Omega_k q)+ / Z_k, with scalars Omega_k and Z_k at every node.
  Omega_0 = 0 and Z_0 = 1. Then Omega_{k+1} = Omega_k + Z_k w_k and Z_{k+1} =
  sum_x (p - Omega_{k+1} q)+. Every entry needs one reduction over the rows that
  it can still modify.

  Args:
    draft: chain of N nodes.
    p: `[N, V]`, distribution p of the token after every node.
    state: the modifications, or None.
  """
  nodes = p.shape[0]
  entries = 0 if state is None else state.remaining.shape[0]
  omega, mass = jnp.zeros((nodes,), p.dtype), jnp.ones((nodes,), p.dtype)
  history = []
  p_drafted = residual.at_drafted(draft, p, first=0)
  q_drafted = residual.at_drafted(draft, draft.probs).astype(p.dtype)
  q = residual.next_draft_probs(draft, p)
  for k in range(entries):
    rows = min(k + 1, nodes - 1)
    # T_k at the drafted tokens, and w_k along the drafted path.
    t = jnp.maximum(p_drafted - omega[:-1] * q_drafted, 0) / mass[:-1]
    steps = jnp.cumprod(residual.divide(q_drafted, t))
    weights = state.weights[k].astype(p.dtype) * jnp.append(1, steps)
    alive = jnp.arange(nodes) < state.remaining[k]
    weights = jnp.where(alive, weights, 0)
    history.append((omega, mass, weights))
    new_omega = (omega + mass * weights)[:rows]
    new_mass = _mass(p, q, new_omega)
    # The mass is 0 only if the path has probability 0. Then the result has no
    # effect, so the old target is kept.
    some = new_mass > 0
    omega = omega.at[:rows].set(jnp.where(some, new_omega, omega[:rows]))
    mass = mass.at[:rows].set(jnp.where(some, new_mass, mass[:rows]))
  total = jnp.zeros_like(mass)
  if entries:
    total = jnp.sum(_cut(p, omega[:, None], q), axis=-1)
    # `residual.normalise` has the same threshold.
    total = jnp.where(total > smallest_mass(p.dtype), total, 0)
  empty = jnp.zeros((0, nodes), p.dtype)
  columns = [jnp.stack(x) for x in zip(*history)] or [empty] * 3
  return _Modified(jnp.stack([omega, total]), *columns)


def _mass(p: jax.Array, q: jax.Array, omega: jax.Array) -> jax.Array:
  """Returns `[R]`, the sum over x of (p - omega q)+ for the first R of N rows.

  On a CPU, XLA would copy these rows of every sequence of a batch. That takes
  longer than the sums over all rows.

  Args:
    p: `[N, V]`.
    q: `[N, V]`.
    omega: `[R]`.
  """
  rows, more = omega.shape[0], p.shape[0] - omega.shape[0]
  sums = lambda p, q, omega: jnp.sum(_cut(p, omega[:, None], q), axis=-1)
  return jax.lax.platform_dependent(
      p, q, omega,
      cpu=lambda p, q, omega: sums(p, q, jnp.pad(omega, (0, more)))[:rows],
      default=lambda p, q, omega: sums(p[:rows], q[:rows], omega))


def _cut(p: jax.Array, omega: jax.Array, q: jax.Array) -> jax.Array:
  """Returns (p - omega q)+.

  The inner maximum prevents a fusion of the operations, see block.py.
  """
  return jnp.maximum(p - jnp.maximum(omega * q, 0), 0)
