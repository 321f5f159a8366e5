"""DDTree: the best tree of a product distribution (arXiv:2604.12989).

A block-parallel drafter predicts K distributions q_1..q_K at once, independent
of the drafted tokens. The probability of a path is the product of its entries.
The best tree of N nodes consists of the N - 1 most likely paths, because a path
is never more likely than its parent.

The paper finds the paths with a heap. This module computes each level from the
level above. In a level sorted by probability, the token of rank r below node p
has at least (p + 1)(r + 1) - 1 paths before it. So only a few pairs (p, r) can
be among the best n.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np

from specjax.utils import fields


def most_nodes(depth: int, vocab_size: int) -> int:
  """Returns the node count N of the complete tree of depth `depth`."""
  return sum(vocab_size**d for d in range(depth + 1))


def check_sizes(depth: int, vocab_size: int, num_nodes: int) -> None:
  """Raises a `ValueError` if `best_tree` cannot find a tree of this size."""
  fields.check_at_least("depth", depth, 1)
  fields.check_at_least("num_nodes", num_nodes, 2)
  most = most_nodes(depth, vocab_size)
  if num_nodes > most:
    raise ValueError(f"num_nodes is {num_nodes}; depth {depth} and "
                     f"{vocab_size} tokens allow {most}: draft fewer nodes")


@functools.cache
def _pairs(above: int, ranks: int, size: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns pairs (parent index, rank) that can be among the best `size`."""
  place, rank = np.divmod(np.arange(above * ranks), ranks)
  few = (place + 1) * (rank + 1) <= size
  return place[few], rank[few]


def best_tree(log_probs: jax.Array, num_nodes: int
              ) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns the most likely paths of one sequence as a tree.

  Ties are resolved in this order: nearest to the root, most likely parent,
  lowest token id.

  Args:
    log_probs: log probabilities `[K, V]` of the levels; -inf excludes a token
      unless no others remain.
    num_nodes: number of nodes N, at most `most_nodes(K, V)`.

  Returns:
    Tokens `[N - 1]` int32, parents `[N]` int32 and log probabilities `[N - 1]`
    of the paths. Levels are contiguous.
  """
  chex.assert_rank(log_probs, 2)
  size = num_nodes - 1
  likeliest, ids = jax.lax.top_k(log_probs, min(size, log_probs.shape[1]))
  ids = ids.astype(jnp.int32)
  # A rounded probability can exceed 1. Clip it so that no path is more likely
  # than its parent.
  likeliest = jnp.minimum(likeliest, 0)
  values, first = jnp.zeros((1,), log_probs.dtype), 0  # root
  levels = []
  for scores, tokens in zip(likeliest, ids):
    place, rank = _pairs(values.shape[0], tokens.shape[0], size)
    new, chosen = jax.lax.top_k(
        values[place] + scores[rank], min(size, len(place)))
    chosen_place, chosen_rank = (
        jnp.array(x, jnp.int32)[chosen] for x in (place, rank))
    levels.append((new, tokens[chosen_rank], first + chosen_place))
    first, values = first + values.shape[0], new
  values, tokens, parents = (jnp.concatenate(x) for x in zip(*levels))
  # Among ties, `top_k` prefers ancestors, so the selected nodes form a tree.
  _, best = jax.lax.top_k(values, size)
  best = jnp.sort(best)
  nodes = jnp.append(jnp.zeros_like(best[:1]), best + 1)
  place = jnp.argmax(parents[best][:, None] == nodes, axis=-1)
  return (tokens[best],
          jnp.append(jnp.full((1,), -1, jnp.int32), place.astype(jnp.int32)),
          values[best])
