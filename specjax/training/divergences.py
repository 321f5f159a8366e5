"""Divergences of a drafter's distribution q from the target's p, by token.

The arguments of each function are the logits `[..., V]` of p and of q. The
result `[...]` is in nats if the formula contains a logarithm. The docstrings
include the gradient with respect to the logits of q. In these gradients, s(v)
is -1 if q(v) < p(v), and 0 if not. The acceptance rate of a draft token is
alpha = sum_v min(p(v), q(v)) = 1 - TV(p, q), with the total variation distance
TV (Leviathan et al. 2023, arXiv:2211.17192, corollary 3.6).

>>> p, q = jnp.log(jnp.array([0.5, 0.5])), jnp.log(jnp.array([0.25, 0.75]))
>>> {name: round(float(f(p, q)), 3) for name, f in DIVERGENCES.items()}
{'forward_kl': 0.144, 'reverse_kl': 0.131, 'jensen_shannon': 0.034, \
'likeliest': 1.386, 'total_variation': 0.25, 'lk_alpha': 0.288, \
'lk_hybrid': 0.239}
"""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

Divergence = Callable[[jax.Array, jax.Array], jax.Array]

_LEAST = 1e-5  # lower limit of alpha in `lk_alpha`, so that log alpha is finite
_ETA = 3.0  # constant of `lk_hybrid`


def forward_kl(p_logits: jax.Array, logits: jax.Array) -> jax.Array:
  """Returns KL(p || q).

  The gradient is q - p. DistillSpec (Zhou et al. 2023, arXiv:2310.08461) uses
  this divergence.
  """
  log_p, log_q = _logs(p_logits, logits)
  return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def reverse_kl(p_logits: jax.Array, logits: jax.Array) -> jax.Array:
  """Returns KL(q || p).

  The gradient is q (log(q / p) - KL(q || p)). DistillSpec uses this divergence.
  """
  log_p, log_q = _logs(p_logits, logits)
  return jnp.sum(jnp.exp(log_q) * (log_q - log_p), axis=-1)


def jensen_shannon(p_logits: jax.Array, logits: jax.Array) -> jax.Array:
  """Returns KL(p || m) / 2 + KL(q || m) / 2 with m = (p + q) / 2.

  The gradient is q (log(q / m) - KL(q || m)) / 2. DistillSpec uses this
  divergence.
  """
  log_p, log_q = _logs(p_logits, logits)
  log_m = jnp.logaddexp(log_p, log_q) - jnp.log(2.0)
  return jnp.sum(jnp.exp(log_p) * (log_p - log_m)
                 + jnp.exp(log_q) * (log_q - log_m), axis=-1) / 2


def likeliest(p_logits: jax.Array, logits: jax.Array) -> jax.Array:
  """Returns -log q(argmax p), for drafts at temperature 0.

  The gradient is q - onehot(argmax p).
  """
  chex.assert_equal_shape([p_logits, logits])
  best = jnp.argmax(p_logits, axis=-1)[..., None]
  log_q = jax.nn.log_softmax(logits)
  return -jnp.take_along_axis(log_q, best, axis=-1)[..., 0]


def total_variation(p_logits: jax.Array, logits: jax.Array) -> jax.Array:
  """Returns TV(p, q) = 1 - alpha = 1 - sum_v min(p(v), q(v)).

  The gradient is q (s - E_q s). It is almost 0 if p and q hardly overlap.
  """
  log_p, log_q = _logs(p_logits, logits)
  return 1 - jnp.sum(jnp.exp(jnp.minimum(log_p, log_q)), axis=-1)


def lk_alpha(p_logits: jax.Array, logits: jax.Array) -> jax.Array:
  """Returns -log alpha (arXiv:2602.23881).

  The gradient is that of `total_variation`, divided by alpha.
  """
  return -jnp.log(jnp.maximum(1 - total_variation(p_logits, logits), _LEAST))


def lk_hybrid(p_logits: jax.Array, logits: jax.Array) -> jax.Array:
  """Returns w KL(p || q) + (1 - w) TV(p, q) with w = exp(-3 alpha).

  w has no gradient. The KL divergence dominates if q is far from p, and the
  total variation if q is near p (arXiv:2602.23881).
  """
  variation = total_variation(p_logits, logits)
  weight = jax.lax.stop_gradient(jnp.exp(-_ETA * (1 - variation)))
  return weight * forward_kl(p_logits, logits) + (1 - weight) * variation


DIVERGENCES: dict[str, Divergence] = {f.__name__: f for f in (
    forward_kl, reverse_kl, jensen_shannon, likeliest, total_variation,
    lk_alpha, lk_hybrid)}


def _logs(p_logits: jax.Array, logits: jax.Array
          ) -> tuple[jax.Array, jax.Array]:
  chex.assert_equal_shape([p_logits, logits])
  return jax.nn.log_softmax(p_logits), jax.nn.log_softmax(logits)
