"""Static draft trees, sampled level by level, and the sampling of children.

A drafter provides its predictions as a *step*, a function that reads the S
nodes of a level:

  step(tokens [B, S], depths [B, S], ancestors [B, S, T], above [B, S], carry)
    -> (logits [B, S, V] of the token after each node, carry)

`depths` are 0 for the root's children. `ancestors` is a mask over the T nodes
read so far, with this level last. `above` is the index of each node's parent
among the nodes of the previous step, and 0 at depth 0. A drafter that passes
features from parents to children, such as EAGLE, gathers them from its carry
with `above`. A language model ignores `above`, and its carry is its cache
(`_common.model_step`).
"""

import functools
from typing import Any
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from specjax import sampling
from specjax.interfaces import Drafter
from specjax.interfaces import Model
from specjax.methods import _common
from specjax.sampling import inverse_cdf
from specjax.sampling import LogitsTransform
from specjax.sampling import smallest_mass
from specjax.trees import shapes
from specjax.types import DecodeState


class Level(NamedTuple):
  """Nodes of one depth that have children.

  Attributes:
    nodes: numbers of the nodes `[S]`.
    counts: number of children of each node, S numbers.
    first: number of the first child; the others follow.
    ancestors: mask `[S, T]` bool over the T nodes read so far, with this level
      last. The root is a committed token and not among them.
    above: index `[S]` of each node's parent in the previous level.
  """

  nodes: np.ndarray
  counts: tuple[int, ...]
  first: int
  ancestors: np.ndarray
  above: np.ndarray

  @property
  def below(self) -> slice:
    """Slice of the level's children among the nodes below the root."""
    return slice(self.first - 1, self.first - 1 + sum(self.counts))


@functools.cache
def levels(parents: tuple[int, ...]) -> tuple[Level, ...]:
  """Returns the levels with children of a breadth-first tree, from the root."""
  size = len(parents)
  counts = np.bincount(np.array(parents[1:], np.int64), minlength=size)
  reach, depths = np.eye(size, dtype=bool), np.array(shapes.depths(parents))
  for node, parent in enumerate(parents[1:], 1):
    reach[node] |= reach[parent]
  inner = np.flatnonzero(counts)
  found, before = [], np.zeros(1, np.int64)
  for depth in range(depths.max()):
    nodes = inner[depths[inner] == depth]
    fed = inner[(inner > 0) & (depths[inner] <= depth)]
    above = np.searchsorted(before, np.array(parents)[nodes]) if depth else (
        np.zeros(1, np.int64))
    found.append(Level(nodes, tuple(counts[nodes].tolist()),
                       int(np.argmax(depths > depth)),
                       reach[np.ix_(nodes, fed)], above.astype(np.int32)))
    before = nodes
  return tuple(found)


class StaticTree(Drafter):
  """Base of drafters with the same tree in every round.

  Subclasses are frozen dataclasses with `parents` (breadth-first), `proposal`
  and `transform`.
  """

  conditional = True

  def __post_init__(self):
    object.__setattr__(self, "parents", shapes.breadth_first(self.parents))
    check_proposal(self.proposal)

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
  def num_uniforms(self) -> int:
    return sampling.UNIFORMS_A_DRAW * (self.num_nodes - 1)

  @property
  def depth(self) -> int:
    return len(levels(self.parents))

  @property
  def _most_children(self) -> int:
    return max((max(level.counts) for level in levels(self.parents)), default=0)

  def bind(self, target: Model, transform: LogitsTransform
           ) -> Any:
    """Returns the drafter specialised to a target."""
    if not self.iid:
      _common.check_siblings(self._most_children, target)
    return _common.with_transform(self, transform)

  def draw(self, step, carry, logits, uniforms, state: DecodeState):
    """Samples this tree at the temperatures of the rows."""
    return grow(step, carry, logits, uniforms, self.parents, drawer(
        self.proposal, self.transform, state.temperature))


def fed_slots(parents: tuple[int, ...]) -> tuple[np.ndarray, int]:
  """Returns the index of each node in the block of tokens that `grow` reads.

  Args:
    parents: breadth-first tree of N nodes.

  Returns:
    Index of each node in the block, `[N]` int32, and the size of the block. The
    root and the leaves are not in the block; their index is 0.
  """
  fed = [node for level in levels(parents)[1:] for node in level.nodes]
  slots = np.zeros(len(parents), np.int32)
  slots[fed] = np.arange(len(fed))
  return slots, len(fed)


def grow(step, carry, logits, uniforms, parents: tuple[int, ...], draw):
  """Samples a tree of N nodes level by level.

  Args:
    step: function that reads the nodes of a level, see `_trees`.
    carry: initial carry of the step, such as a cache with all committed tokens.
    logits: logits `[B, V]` of the token after the root.
    uniforms: uniform samples in [0, 1), `[B, (N - 1) UNIFORMS_A_DRAW]`.
    parents: breadth-first tree of at least 2 nodes.
    draw: function `(logits [B, n, V], counts, uniforms [B, M, UNIFORMS_A_DRAW])
      -> (tokens [B, M], probs [B, M, V])` that samples the M children of n
      nodes, see `drawer`.

  Returns:
    Tokens `[B, N - 1]` and probs `[B, N - 1, V]` of the nodes below the root,
    and the carry after the last step. If the carry is a model's cache, its
    block contains the nodes in the order of `fed_slots`.
  """
  chex.assert_rank([logits, uniforms], 2)
  batch = logits.shape[0]
  uniforms = uniforms.reshape(batch, len(parents) - 1, sampling.UNIFORMS_A_DRAW)
  tokens, probs = jnp.zeros((batch, 1), jnp.int32), []
  logits = logits[:, None]
  for depth, level in enumerate(levels(parents)):
    if depth > 0:
      size = len(level.nodes)
      logits, carry = step(
          tokens[:, level.nodes],
          jnp.full((batch, size), depth - 1, jnp.int32),
          jnp.tile(level.ancestors, (batch, 1, 1)),
          jnp.tile(level.above, (batch, 1)), carry)
    drawn, law = draw(logits, level.counts, uniforms[:, level.below])
    tokens = jnp.concatenate([tokens, drawn], axis=1)
    probs.append(law)
  return tokens[:, 1:], jnp.concatenate(probs, axis=1), carry


def iid(logits, counts, uniforms, transform):
  """Samples the children of each node independently.

  This and the next three functions sample the children of n nodes of one row.
  They have the same arguments and results.

  Args:
    logits: logits `[n, V]` of the token after each node.
    counts: number of children of each node, n numbers; M in total.
    uniforms: uniform samples in [0, 1), `[M, UNIFORMS_A_DRAW]`.
    transform: transform of logits to probabilities.

  Returns:
    Tokens `[M]` of the children, and their distributions `[M, V]`. Siblings may
    have the same token.
  """
  chex.assert_rank(logits, 2)
  chex.assert_axis_dimension(logits, 0, len(counts))
  probs = transform(logits)[_parents(counts)]
  return _drawn(probs, uniforms), probs


def without_replacement(logits, counts, uniforms, transform):
  """Samples distinct children of a node, one after another; see `iid`.

  A child's distribution is the node's distribution without the tokens of
  earlier siblings, renormalised. Jeon et al. 2024 (RSD, arXiv:2402.14160) and
  Chen et al. 2024 (Sequoia, arXiv:2402.12374). RSD adds Gumbel noise to all
  logits and takes the top k. Here one inverse CDF per child is used, which is
  cheaper and has the same distribution.
  """
  chex.assert_rank(logits, 2)
  chex.assert_axis_dimension(logits, 0, len(counts))
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
  """Returns the most likely tokens as deterministic children; see `iid`."""
  chex.assert_rank(logits, 2)
  chex.assert_axis_dimension(logits, 0, len(counts))
  del uniforms
  best, likeliest = jax.lax.top_k(allowed(logits, transform), max(counts))
  nodes = _parents(counts)
  tokens = likeliest[nodes, _ranks(counts)]
  probs = jax.nn.one_hot(tokens, logits.shape[-1], dtype=best.dtype)
  # `top_k` also returns tokens for logits that are not finite. The
  # probabilities are then set to NaN, so that the decoding loop reports the
  # error.
  finite = jnp.isfinite(best[:, :1])[nodes]
  return tokens, jnp.where(finite, probs, jnp.nan)


def hybrid(logits, counts, uniforms, transform):
  """Drafts the most likely tokens and one sampled token; see `iid`.

  Hu et al. 2025 (arXiv:2502.18779, "greedy" drafts). Of K children, K - 1 are
  the set S of the most likely tokens. One is sampled from the distribution q'
  of the tokens outside of S, and comes first. With the target's distribution p
  the acceptance probability is p(S) + sum_{x not in S} min(p(x), q'(x)). No
  verification accepts more of such drafts.
  """
  chex.assert_rank(logits, 2)
  chex.assert_axis_dimension(logits, 0, len(counts))
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
  """Returns the index of each child's parent, `[M]`."""
  return np.repeat(np.arange(len(counts)), counts)


def _first_children(counts):
  """Returns the index of each node's first child, `[n]`."""
  return np.cumsum([0, *counts[:-1]])


def _ranks(counts):
  """Returns the number of earlier siblings of each child, `[M]`."""
  return np.arange(sum(counts)) - _first_children(counts)[_parents(counts)]


def allowed(logits: jax.Array, transform: LogitsTransform) -> jax.Array:
  """Returns logits with -inf at tokens that the transform bans."""
  if not transform.banned:
    return logits
  return logits.at[..., np.array(transform.banned)].set(-jnp.inf)


def _law(weights, otherwise):
  """Normalises `weights [n, V]`; rows without mass become `otherwise [n]`."""
  total = jnp.sum(weights, axis=-1, keepdims=True)
  empty = total <= smallest_mass(weights.dtype)
  one_hot = jax.nn.one_hot(otherwise, weights.shape[-1], dtype=weights.dtype)
  return jnp.where(empty, one_hot, weights / jnp.where(empty, 1, total))


# The keys are the values of `proposal` in drafters.
DRAWS = {"iid": iid, "without_replacement": without_replacement,
         "top_k": top_k, "hybrid": hybrid}


def check_proposal(proposal: str) -> None:
  """Raises `ValueError` unless `proposal` is a key of `DRAWS`."""
  if proposal not in DRAWS:
    raise ValueError(f"proposal is {proposal!r}; it must be one of "
                     f"{', '.join(DRAWS)}")


def drawer(proposal: str, transform: LogitsTransform, temperature: jax.Array):
  """Returns a function that samples the children of a level for a batch.

  Args:
    proposal: sampling method, a key of `DRAWS`.
    transform: transform of logits to probabilities.
    temperature: temperatures `[B]`, used if the transform has none.

  Returns:
    Function `(logits [B, n, V], counts, uniforms [B, M, 2]) -> (tokens [B, M],
    probs [B, M, V])` for the M children of n nodes, see `iid`.
  """
  def draw(logits, counts, uniforms):
    one = lambda logits, uniforms, temperature: DRAWS[proposal](
        logits, counts, uniforms, transform.at(temperature))
    return jax.vmap(one)(logits, uniforms, temperature)

  return draw
