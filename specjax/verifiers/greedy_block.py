"""Greedy block verification: the most accepted tokens in one round.

Sun et al. 2024 (arXiv:2403.10444, Algorithms 4-6). Its uniforms are those of
block verification without the cap on the running ratio. Alone that would be
biased; what makes it exact is that the target of the positions that the
rejected part of the draft had covered is modified, and that modification is
the verifier's state. No rule accepts more in one round (Theorem 3). Over
several rounds it can fall behind block verification and also behind token
verification.
"""

import dataclasses

from flax import struct
import jax
import jax.numpy as jnp

from specjax.interfaces.verifier import Verifier
from specjax.sampling import smallest_mass
from specjax.types import Draft
from specjax.types import Law
from specjax.types import Verdict
from specjax.verifiers import residual
from specjax.verifiers._by_row import law_by_row


@struct.dataclass
class GreedyBlockState:
  """The modifications of the target that are alive, oldest first.

  Entry k turns the target T_k into norm((T_k - w q)+) for the next few
  positions, w following the path that is emitted.

  Attributes:
    remaining: `[gamma - 1]` int32, positions that an entry still modifies;
      entry k's are at most k + 1, because every round pushes one entry and
      emits at least one token.
    weights: `[gamma - 1]`, w at the current context.
  """

  remaining: jax.Array
  weights: jax.Array


@dataclasses.dataclass(frozen=True)
class GreedyBlock(Verifier):
  """Accepts every prefix with probability min(1, T(x^i) / q(x^i)).

  Exact only where the draft's law depends on the context alone, because the
  modification needs the old draft's law at new contexts, and where all drafts
  of a sequence are equally long.
  """

  lossless = True
  requires = ("chain", "autoregressive")

  def init(self, gamma: int) -> GreedyBlockState:
    """An unmodified target, for drafts of `gamma` tokens."""
    entries = max(gamma - 1, 0)
    return GreedyBlockState(remaining=jnp.zeros((entries,), jnp.int32),
                            weights=jnp.zeros((entries,), float))

  def law(self, draft: Draft, target_probs: jax.Array,
          state: GreedyBlockState | None = None) -> Law:
    """The law of the outcome for one chain.

    Args:
      draft: a chain of N nodes.
      target_probs: `[N, V]`, p of the token after every node.
      state: a `GreedyBlockState`; None is one without modifications.

    Returns:
      With T the modified target and R_i = prod_{j<=i} T/q, not capped:
      S_i = sum_x (R_i T - q)+, h_i = S_i / (S_i + (1 - R_i)+), h_0 = 1;
      stop[i] = h_i prod_{j>i} (1 - h_j); next_token[i] = norm((R_i T - q)+).
    """
    found = _modified(draft, target_probs, state)
    ratio = _running_ratio(draft, target_probs, found)
    survive = jnp.minimum(ratio, 1)
    # Above 1 both sides are divided by the ratio, which may be huge.
    scale = 1 / jnp.maximum(ratio, 1)

    def rest(target, q, survive, scale):
      # The inner maximum keeps the compiler from fusing in one use alone; see
      # block.py.
      return jnp.maximum(jnp.maximum(survive * target, 0) - scale * q, 0)

    def next_row(node):
      p = residual.at_node(target_probs, node)
      q = residual.next_draft_row(draft, node, p.dtype)
      target = found.target(p, q, node)
      return residual.normalised(
          rest(target, q, survive[node], scale[node]), target)

    q = residual.next_draft_probs(draft, target_probs)
    every = jnp.arange(q.shape[0])[:, None]
    mass = jnp.sum(rest(found.target(target_probs, q, every), q,
                        survive[:, None], scale[:, None]), axis=-1)
    return law_by_row(stop=residual.last_heads(mass, survive), row=next_row)

  def survival(self, draft: Draft, target_probs: jax.Array,
               state: GreedyBlockState | None = None) -> jax.Array:
    """`[N]`, P(tau >= i | x_1..x_i) = min(1, R_i) (Lemma 7)."""
    found = _modified(draft, target_probs, state)
    return jnp.minimum(_running_ratio(draft, target_probs, found), 1)

  def commit(self, state: GreedyBlockState, draft: Draft,
             target_probs: jax.Array, verdict: Verdict) -> GreedyBlockState:
    """The modifications after `verdict`: the old ones moved on, one pushed.

    An entry's w is multiplied by q(y)/T_k(y) for every emitted token y. The
    new entry starts from the root of this draft, so its w is q/T of the whole
    emitted path: q(y)/T(y) of the extra token over R_tau.
    """
    tau, token = verdict.num_accepted, verdict.next_token
    found = _modified(draft, target_probs, state)
    # q is 0 after the end of the draft: nothing is pushed after a bonus token.
    p = target_probs[tau, token]
    q = residual.next_draft_row(draft, tau, p.dtype)[token]
    before = jnp.maximum(p - found.omega[:, tau] * q, 0) / found.mass[:, tau]
    ratio = _running_ratio(draft, target_probs, found)[tau]
    pushed = residual.over(q, found.target(p, q, tau) * ratio)
    weights = jnp.append(found.weights[:, tau] * residual.over(q, before),
                         pushed)
    drafted = jnp.sum(draft.drafted, dtype=jnp.int32)
    remaining = jnp.append(state.remaining, drafted) - (tau + 1)
    # The oldest entry has expired: it had at most one position.
    weights, remaining = weights[1:], remaining[1:]
    alive = (remaining > 0) & (weights > 0)
    return GreedyBlockState(
        remaining=jnp.where(alive, remaining, 0),
        weights=jnp.where(alive, weights, 0).astype(state.weights.dtype))


def _running_ratio(draft, p, found):
  """R `[N]`: the product of T/q over the path to each node, finite."""
  largest = jnp.finfo(p.dtype).max
  one = jnp.ones((), p.dtype)
  q_drafted = residual.at_drafted(draft, draft.probs).astype(p.dtype)
  target = found.target(residual.at_drafted(draft, p, first=0), q_drafted,
                        jnp.arange(p.shape[0] - 1))

  def step(ratio, factor):
    ratio = jnp.minimum(ratio * factor, largest)
    return ratio, ratio

  _, ratios = jax.lax.scan(
      step, one, residual.over(target, q_drafted), unroll=8)
  return jnp.concatenate([one[None], ratios])


@struct.dataclass
class _Modified:
  """The modified target and, for every entry k, what it was made from.

  Attributes:
    last: `[2, N]`, omega and mass of T itself; mass 0 is an unmodified p.
    omega: `[gamma - 1, N]`, with `mass`: T_k = (p - omega_k q)+ / mass_k.
    mass: `[gamma - 1, N]`.
    weights: `[gamma - 1, N]`, w of every entry at every node.
  """

  last: jax.Array
  omega: jax.Array
  mass: jax.Array
  weights: jax.Array

  def target(self, p, q, nodes):
    """T where p and q are those after `nodes`, which broadcast with them."""
    omega, mass = self.last[:, nodes]
    some = mass > 0
    return jnp.where(some, _rest(p, omega, q) / jnp.where(some, mass, 1), p)


def _modified(draft, p, state) -> _Modified:
  """All entries at once: T_k = norm((p - Omega_k q)+) with one scalar Omega_k.

  Omega_0 = 0, Z_0 = 1; Omega_{k+1} = Omega_k + Z_k w_k and Z_{k+1} = sum_x
  (p - Omega_{k+1} q)+. One reduction for every entry, over the few rows that
  it can still modify.
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
    steps = jnp.cumprod(residual.over(q_drafted, t))
    weights = state.weights[k].astype(p.dtype) * jnp.append(1, steps)
    alive = jnp.arange(nodes) < state.remaining[k]
    weights = jnp.where(alive, weights, 0)
    history.append((omega, mass, weights))
    new_omega = (omega + mass * weights)[:rows]
    new_mass = jnp.sum(_rest(p[:rows], new_omega[:, None], q[:rows]), axis=-1)
    # Empty only where the path has no probability: leave it unmodified.
    some = new_mass > 0
    omega = omega.at[:rows].set(jnp.where(some, new_omega, omega[:rows]))
    mass = mass.at[:rows].set(jnp.where(some, new_mass, mass[:rows]))
  total = jnp.zeros_like(mass)
  if entries:
    total = jnp.sum(_rest(p, omega[:, None], q), axis=-1)
    # As in `residual.normalised`.
    total = jnp.where(total > smallest_mass(p.dtype), total, 0)
  empty = jnp.zeros((0, nodes), p.dtype)
  columns = [jnp.stack(x) for x in zip(*history)] or [empty] * 3
  return _Modified(jnp.stack([omega, total]), *columns)


def _rest(p, omega, q):
  """(p - omega q)+; the inner maximum is as in block.py."""
  return jnp.maximum(p - jnp.maximum(omega * q, 0), 0)
