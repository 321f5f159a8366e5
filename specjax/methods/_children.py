"""How the children of a node are drawn, and the laws that say so.

All functions work on the nodes of one level of one sequence:

  (logits [n, V], counts, uniforms [M, 2], transform) -> tokens [M], probs [M,
  V]

Node i gets counts[i] children; M is their sum, and the children of a node
stand together in the order in which they are tried. Uniforms are uniform in
[0, 1), those of one `inverse_cdf` for each child. Row j of `probs` is the law
of `tokens[j]` given its earlier siblings. A law can run out of tokens: at
temperature 0 after the first child, with a small nucleus after a few. Then the
next child is the likeliest token that is left, with certainty. Its row says
so, and it is the most useful guess.
"""

import jax
import jax.numpy as jnp
import numpy as np

from specjax.sampling import inverse_cdf
from specjax.sampling import LogitsTransform
from specjax.sampling import smallest_mass


def iid(logits, counts, uniforms, transform):
  """Independent draws from q; equal siblings happen and must be kept."""
  probs = transform(logits)[_parents(counts)]
  return _drawn(probs, uniforms), probs


def without_replacement(logits, counts, uniforms, transform):
  """Draws from q renormalised without the earlier siblings, in that order.

  Jeon et al. 2024 (RSD, arXiv:2402.14160) and Chen et al. 2024 (Sequoia,
  arXiv:2402.12374). One inverse CDF a draw costs less than Gumbel noise over
  the vocabulary and a top-k of it.
  """
  first, nodes = _first_children(counts), np.arange(len(counts))
  rest, scores = transform(logits), allowed(logits, transform)
  tokens, probs, places = [], [], []
  for rank in range(max(counts)):
    more = np.flatnonzero(np.array(counts)[nodes] > rank)
    nodes, rest, scores = nodes[more], rest[more], scores[more]
    law = _law(rest, jnp.argmax(scores, axis=-1))
    token = _drawn(law, uniforms[first[nodes] + rank])
    row = jnp.arange(len(nodes))
    rest = rest.at[row, token].set(0)
    scores = scores.at[row, token].set(-jnp.inf)
    tokens.append(token)
    probs.append(law)
    places.append(first[nodes] + rank)
  order = np.argsort(np.concatenate(places))
  return jnp.concatenate(tokens)[order], jnp.concatenate(probs)[order]


def top_k(logits, counts, uniforms, transform):
  """The likeliest tokens, with certainty; the temperature does not matter."""
  del uniforms
  best, likeliest = jax.lax.top_k(allowed(logits, transform), max(counts))
  nodes = _parents(counts)
  tokens = likeliest[nodes, _ranks(counts)]
  probs = jax.nn.one_hot(tokens, logits.shape[-1], dtype=best.dtype)
  # Certainty must not hide that a model's numbers broke down.
  finite = jnp.isfinite(best[:, :1])[nodes]
  return tokens, jnp.where(finite, probs, jnp.nan)


def hybrid(logits, counts, uniforms, transform):
  """One draw from q outside the K - 1 likeliest tokens S, and then S.

  Hu et al. 2025 (arXiv:2502.18779, "greedy" drafts). The drawn token is tried
  first; then acceptance is p(S) + sum_{x not in S} min(p, q'), the most that
  any verification of this draft can reach.
  """
  nodes, ranks = _parents(counts), _ranks(counts)
  _, likeliest = jax.lax.top_k(allowed(logits, transform), max(counts))
  fixed = ranks < np.array(counts)[nodes] - 1
  at = (nodes[fixed], likeliest[nodes[fixed], ranks[fixed]])
  outside = transform(logits).at[at].set(0)
  ends = likeliest[np.arange(len(counts)), np.array(counts) - 1]
  law = _law(outside, ends)
  drawn = _drawn(law, uniforms[_first_children(counts)])
  tokens = jnp.concatenate([drawn[:, None], likeliest], axis=1)[nodes, ranks]
  probs = jax.nn.one_hot(tokens, logits.shape[-1], dtype=law.dtype)
  return tokens, jnp.where(ranks[:, None] == 0, law[nodes], probs)


_drawn = jax.vmap(inverse_cdf)


def _parents(counts):
  """`[M]`, the node above each child."""
  return np.repeat(np.arange(len(counts)), counts)


def _first_children(counts):
  """`[n]`, the place of each node's first child."""
  return np.cumsum([0, *counts[:-1]])


def _ranks(counts):
  """`[M]`, how many earlier siblings a child has."""
  return np.arange(sum(counts)) - _first_children(counts)[_parents(counts)]


def allowed(logits: jax.Array, transform: LogitsTransform) -> jax.Array:
  """The logits by which tokens are ranked: those of banned ones are -inf."""
  if not transform.banned:
    return logits
  return logits.at[..., np.array(transform.banned)].set(-jnp.inf)


def _law(weights, otherwise):
  """`weights [n, V]` as laws; certainty of `otherwise [n]` without mass."""
  total = jnp.sum(weights, axis=-1, keepdims=True)
  empty = total <= smallest_mass(weights.dtype)
  one_hot = jax.nn.one_hot(otherwise, weights.shape[-1], dtype=weights.dtype)
  return jnp.where(empty, one_hot, weights / jnp.where(empty, 1, total))


# By the names that drafters give them.
DRAWS = {"iid": iid, "without_replacement": without_replacement,
         "top_k": top_k, "hybrid": hybrid}


def check_proposal(proposal: str) -> None:
  """Raises a `ValueError` where no children are drawn in such a way."""
  if proposal not in DRAWS:
    raise ValueError(f"proposal is {proposal!r}; it must be one of "
                     f"{', '.join(DRAWS)}")


def drawer(proposal: str, transform: LogitsTransform, temperature: jax.Array):
  """A function that draws the children of a level for a whole batch.

  Args:
    proposal: a key of `DRAWS`.
    transform: from logits to laws.
    temperature: `[B]`, used where the transform has none of its own.

  Returns:
    `(logits [B, n, V], counts, uniforms [B, M, 2]) -> (tokens [B, M],
    probs [B, M, V])`.
  """
  def draw(logits, counts, uniforms):
    one = lambda logits, uniforms, temperature: DRAWS[proposal](
        logits, counts, uniforms, transform.at(temperature))
    return jax.vmap(one)(logits, uniforms, temperature)

  return draw
