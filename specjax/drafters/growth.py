"""Static trees, and growing one from a language model, a pass a level."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sampling
from specjax import trees
from specjax.drafters import children


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

  @property
  def below(self) -> slice:
    """Where its children are among the N - 1 nodes below the root."""
    return slice(self.first - 1, self.first - 1 + sum(self.counts))


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


class StaticTree:
  """The base of drafters that draw the same tree in every round.

  Classes that derive from it are frozen dataclasses that have `parents`
  (breadth-first), `proposal` and `transform`.
  """

  conditional = True

  def __post_init__(self):
    object.__setattr__(self, "parents", trees.breadth_first(self.parents))
    if self.proposal not in children.DRAWS:
      raise ValueError(f"proposal is {self.proposal!r}; it must be one of "
                       f"{', '.join(children.DRAWS)}")

  @property
  def chain(self) -> bool:
    return self._most_children <= 1

  @property
  def iid(self) -> bool:
    return self.chain or self.proposal == "iid"

  @property
  def num_nodes(self) -> int:
    return len(self.parents)

  @property
  def depth(self) -> int:
    return len(levels(self.parents))

  @property
  def _most_children(self) -> int:
    return max((max(level.counts) for level in levels(self.parents)), default=0)

  def bind(self, target, transform):
    """The same drafter, with the target's transform unless it has its own.

    Raises:
      ValueError: a node has more children than there are tokens.
    """
    if not self.iid and self._most_children > target.vocab_size:
      raise ValueError(
          f"a node has {self._most_children} children and the vocabulary "
          f"{target.vocab_size} tokens; siblings must differ: use a narrower "
          "tree")
    return dataclasses.replace(self, transform=self.transform or transform)


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
    drawn, law = jax.vmap(
        lambda logits, coins, level=level: draw(logits, level.counts, coins))(
            logits, coins[:, level.below])
    tokens = jnp.concatenate([tokens, drawn], axis=1)
    probs.append(law)
  return tokens[:, 1:], jnp.concatenate(probs, axis=1), cache
