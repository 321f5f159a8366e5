"""How far a drafter's law q is from the target's p, token by token.

Each function takes the logits `[..., V]` of p and of q and returns `[...]`, in
nats where it has a logarithm. Its gradient is given with respect to the logits
of q, where s is the sign of what is accepted: s(v) = -1 where q(v) < p(v), else
0. The acceptance
rate of a drafted token is alpha = sum_v min(p(v), q(v)) = 1 - TV(p, q)
(Leviathan et al. 2023, arXiv:2211.17192, corollary 3.6).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

Divergence = Callable[[jax.Array, jax.Array], jax.Array]

_LEAST = 1e-5  # of an acceptance rate whose logarithm is taken
_ETA = 3.0  # of `lk_hybrid`


def forward_kl(p_logits: jax.Array, logits: jax.Array) -> jax.Array:
  """KL(p || q); gradient q - p.

  DistillSpec, Zhou et al. 2023 (arXiv:2310.08461).
  """
  log_p, log_q = _logs(p_logits, logits)
  return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def reverse_kl(p_logits: jax.Array, logits: jax.Array) -> jax.Array:
  """KL(q || p); gradient q (log(q / p) - KL(q || p)). DistillSpec."""
  log_p, log_q = _logs(p_logits, logits)
  return jnp.sum(jnp.exp(log_q) * (log_q - log_p), axis=-1)


def jensen_shannon(p_logits: jax.Array, logits: jax.Array) -> jax.Array:
  """KL(p || m) / 2 + KL(q || m) / 2 with m = (p + q) / 2.

  Gradient q (log(q / m) - KL(q || m)) / 2. DistillSpec.
  """
  log_p, log_q = _logs(p_logits, logits)
  log_m = jnp.logaddexp(log_p, log_q) - jnp.log(2.0)
  return jnp.sum(jnp.exp(log_p) * (log_p - log_m)
                 + jnp.exp(log_q) * (log_q - log_m), axis=-1) / 2


def likeliest(p_logits: jax.Array, logits: jax.Array) -> jax.Array:
  """-log q(argmax p), for temperature 0; gradient q - onehot(argmax p)."""
  best = jnp.argmax(p_logits, axis=-1)[..., None]
  log_q = jax.nn.log_softmax(logits)
  return -jnp.take_along_axis(log_q, best, axis=-1)[..., 0]


def total_variation(p_logits: jax.Array, logits: jax.Array) -> jax.Array:
  """1 - alpha = 1 - sum_v min(p, q); gradient q (s - E_q s).

  Nearly flat where p and q hardly overlap.
  """
  log_p, log_q = _logs(p_logits, logits)
  return 1 - jnp.sum(jnp.exp(jnp.minimum(log_p, log_q)), axis=-1)


def lk_alpha(p_logits: jax.Array, logits: jax.Array) -> jax.Array:
  """-log alpha (arXiv:2602.23881); gradient of the total variation / alpha."""
  return -jnp.log(jnp.maximum(1 - total_variation(p_logits, logits), _LEAST))


def lk_hybrid(p_logits: jax.Array, logits: jax.Array) -> jax.Array:
  """w KL(p || q) + (1 - w) TV, w = exp(-3 alpha) a constant of the gradient.

  The KL pulls q where it is far from p, and the total variation polishes it
  (arXiv:2602.23881).
  """
  variation = total_variation(p_logits, logits)
  weight = jax.lax.stop_gradient(jnp.exp(-_ETA * (1 - variation)))
  return weight * forward_kl(p_logits, logits) + (1 - weight) * variation


DIVERGENCES: dict[str, Divergence] = {one.__name__: one for one in (
    forward_kl, reverse_kl, jensen_shannon, likeliest, total_variation,
    lk_alpha, lk_hybrid)}


def _logs(p_logits, logits):
  return jax.nn.log_softmax(p_logits), jax.nn.log_softmax(logits)
