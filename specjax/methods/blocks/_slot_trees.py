"""DDTree: the best tree of a product law (arXiv:2604.12989).

A block-parallel drafter forecasts K laws q_1..q_K at once, whatever the tokens
before. The probability of a path is a product of their entries, and the tree of
N nodes with the largest sum of these is that of the N - 1 likeliest paths: no
path is likelier than the one above it. The paper finds them with a heap. Here
a level is found from the one above: of n nodes in falling order, that of rank
r below the p-th has (p + 1)(r + 1) - 1 others before it, so that few pairs can
be among the best n.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np

from specjax.utils import fields


def most_nodes(depth: int, vocab_size: int) -> int:
  """Returns N of the complete tree of paths of at most `depth` tokens."""
  return sum(vocab_size**d for d in range(depth + 1))


def check_sizes(depth: int, vocab_size: int, num_nodes: int) -> None:
  """Raises `ValueError` if `best_tree` cannot find such a tree."""
  fields.check_at_least("depth", depth, 1)
  fields.check_at_least("num_nodes", num_nodes, 2)
  most = most_nodes(depth, vocab_size)
  if num_nodes > most:
    raise ValueError(f"num_nodes is {num_nodes}; depth {depth} and "
                     f"{vocab_size} tokens allow {most}: draft fewer nodes")


@functools.cache
def _pairs(above: int, ranks: int, size: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns pairs of parent index and rank that can be among the best
  `size`."""
  place, rank = np.divmod(np.arange(above * ranks), ranks)
  few = (place + 1) * (rank + 1) <= size
  return place[few], rank[few]


def best_tree(log_probs: jax.Array, num_nodes: int
              ) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns the most likely paths of one sequence as a tree.

  Of equal ones that nearest to the root comes first, then that below the
  likelier node, then that of the lower token.

  Args:
    log_probs: log probabilities `[K, V]` of the levels; -inf excludes a token
      as long as others remain.
    num_nodes: N, at most `most_nodes(K, V)`.

  Returns:
    Tokens `[N - 1]` int32, parents `[N]` int32 and the logarithms `[N - 1]` of
    the paths' probabilities. Levels are contiguous.
  """
  chex.assert_rank(log_probs, 2)
  size = num_nodes - 1
  likeliest, ids = jax.lax.top_k(log_probs, min(size, log_probs.shape[1]))
  ids = ids.astype(jnp.int32)
  # Where a rounded probability exceeds 1, no path may be above its beginning.
  likeliest = jnp.minimum(likeliest, 0)
  values, first = jnp.zeros((1,), log_probs.dtype), 0  # of the root
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
  # The first of equal ones is the one above: what is kept is connected.
  _, best = jax.lax.top_k(values, size)
  best = jnp.sort(best)
  nodes = jnp.append(jnp.zeros_like(best[:1]), best + 1)
  place = jnp.argmax(parents[best][:, None] == nodes, axis=-1)
  return (tokens[best],
          jnp.append(jnp.full((1,), -1, jnp.int32), place.astype(jnp.int32)),
          values[best])
