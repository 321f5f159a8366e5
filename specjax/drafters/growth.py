"""Growing a static tree from a language model, one pass a level."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sampling


class Level(NamedTuple):
  """The nodes of one depth that have children.

  Attributes:
    nodes: `[S]` their numbers.
    counts: S numbers of children.
    first: number of the first child; the others follow.
    ancestors: `[S, T]` bool, over the T nodes fed so far, these included;
      the root is not one of them, for it is committed before.
  """

  nodes: np.ndarray
  counts: tuple[int, ...]
  first: int
  ancestors: np.ndarray


@functools.cache
def levels(parents: tuple[int, ...]) -> tuple[Level, ...]:
  """The levels of a breadth-first tree that have children, the root first."""
  size = len(parents)
  counts = np.bincount(np.array(parents[1:], np.int64), minlength=size)
  reach, depths = np.eye(size, dtype=bool), np.zeros(size, np.int64)
  for node, parent in enumerate(parents[1:], 1):
    reach[node] |= reach[parent]
    depths[node] = depths[parent] + 1
  inner = np.flatnonzero(counts)
  found = []
  for depth in range(depths.max()):
    nodes = inner[depths[inner] == depth]
    fed = inner[(inner > 0) & (depths[inner] <= depth)]
    found.append(Level(nodes, tuple(counts[nodes].tolist()),
                       int(np.argmax(depths > depth)),
                       reach[np.ix_(nodes, fed)]))
  return tuple(found)


def fed_slots(parents: tuple[int, ...]) -> tuple[np.ndarray, int]:
  """Where each node lies in the block that `grow` feeds, and its size.

  Returns:
    `[N]` int32, 0 for the root and for leaves, which are not fed.
  """
  fed = [node for level in levels(parents)[1:] for node in level.nodes]
  slots = np.zeros(len(parents), np.int32)
  slots[fed] = np.arange(len(fed))
  return slots, len(fed)


def grow(model, params, cache, logits, keys, parents, draw):
  """Draws a tree of N nodes, level by level.

  Args:
    model: a `ModelFn`.
    params: its parameters.
    cache: the model's, with all committed tokens.
    logits: `[B, V]` behind the root.
    keys: `[B]`, one key for each row.
    parents: of the tree, breadth-first, N at least 2.
    draw: `(logits [n, V], counts, coins [M]) -> (tokens [M], probs [M, V])`,
      see `children`.

  Returns:
    Tokens `[B, N - 1]` and probs `[B, N - 1, V]` of the nodes below the root,
    and the cache with the block of `fed_slots` behind `lengths`.
  """
  batch = logits.shape[0]
  coins = jax.vmap(lambda key: sampling.coins(key, len(parents) - 1))(keys)
  tokens, probs = jnp.zeros((batch, 1), jnp.int32), []
  logits = logits[:, None]
  for depth, level in enumerate(levels(parents)):
    if depth > 0:
      out = model(params, tokens[:, level.nodes],
                  jnp.full((batch, len(level.nodes)), depth - 1, jnp.int32),
                  jnp.tile(level.ancestors, (batch, 1, 1)), cache)
      logits, cache = out.logits, out.cache
    below = slice(level.first - 1, level.first - 1 + sum(level.counts))
    drawn, law = jax.vmap(
        lambda logits, coins, level=level: draw(logits, level.counts, coins))(
            logits, coins[:, below])
    tokens = jnp.concatenate([tokens, drawn], axis=1)
    probs.append(law)
  return tokens[:, 1:], jnp.concatenate(probs, axis=1), cache
