"""Trees of DDTree, the best trees of a product distribution.

See arXiv:2604.12989. Networks such as block-parallel drafters without a Markov
head, or Medusa's heads, predict K distributions q_1..q_K that do not depend on
the drafted tokens. The probability of a path is the
product of the probabilities of its tokens. This product never exceeds the
probability of the path without its last token. The N - 1 most likely paths
therefore form a tree, the best tree of N nodes.

The paper finds the paths with a heap. This module computes each level from the
level above. Let the nodes p = 0, 1, ... of a level and the tokens r = 0, 1, ...
of the next level be sorted by probability. At least (p + 1)(r + 1) - 1 other
paths are at least as likely as the path of token r below node p. Therefore it
suffices to consider the pairs (p, r) with (p + 1)(r + 1) <= n for the n best.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np


@functools.cache
def _pairs(above: int, ranks: int, size: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the pairs (p, r) to consider for the `size` best paths of a level.

  Args:
    above: number of nodes p in the level above.
    ranks: number of tokens r.
    size: number of paths to select.
  """
  place, rank = np.divmod(np.arange(above * ranks), ranks)
  few = (place + 1) * (rank + 1) <= size
  return place[few], rank[few]


def best_tree(log_probs: jax.Array, num_nodes: int
              ) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns the most likely paths of one sequence as a tree.

  Among equally likely paths, the function prefers the path nearest to the root,
  then the path with the most likely parent, then the lowest token id.

  Args:
    log_probs: log probabilities `[K, V]` of the tokens at depths 1..K. A token
      with -inf is selected only if there are too few other paths.
    num_nodes: number of nodes N, at most that of the complete tree.

  Returns:
    Tokens `[N - 1]` int32, parents `[N]` int32, and log probabilities `[N - 1]`
    of the paths, level by level.
  """
  chex.assert_rank(log_probs, 2)
  size = num_nodes - 1
  likeliest, ids = jax.lax.top_k(log_probs, min(size, log_probs.shape[1]))
  ids = ids.astype(jnp.int32)
  # Because of rounding, a probability can exceed 1. A path could then be more
  # likely than its parent. Clipping the log probabilities at 0 prevents this.
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
  # `top_k` must also select the parent of every selected node. This holds
  # because a parent is at least as likely and has a lower index, and `top_k`
  # prefers lower indices among equal values.
  _, best = jax.lax.top_k(values, size)
  best = jnp.sort(best)
  nodes = jnp.append(jnp.zeros_like(best[:1]), best + 1)
  place = jnp.argmax(parents[best][:, None] == nodes, axis=-1)
  return (tokens[best],
          jnp.append(jnp.full((1,), -1, jnp.int32), place.astype(jnp.int32)),
          values[best])
