"""Draft trees of fixed shape, sampled level by level.

`grow` samples such a tree. It runs the draft model through a *step*, a function
that computes logits for S nodes of one level in B batch rows:

  step(tokens [B, S], depths [B, S], ancestors [B, S, T], above [B, S], carry)
    -> (logits [B, S, V] of the token after each node, carry)

A step whose logits do not depend on the nodes, such as that of Medusa's heads,
may return `[B, 1, V]`: all nodes of the level then share these logits.
`depths` is 0 for the children of the root. `ancestors` is an attention mask
over the T nodes that this and all earlier steps read. The S nodes of this level
are the last of the T nodes. `above` is the index of each node's parent among
the nodes of the previous step, and 0 for the children of the root.

If the draft network passes features from parents to children, as EAGLE does,
the carry contains the parents' features, and `above` selects them. If the draft
model is a language model, the carry is its cache, and the step ignores `above`
(`LanguageModel.step`).

The functions `iid`, `without_replacement`, `top_k` and `hybrid` choose the
children of a node.
"""

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from specjax import sampling
from specjax.sampling import LogitsTransform
from specjax.sampling import smallest_mass
from specjax.trees import shapes
from specjax.types import DecodeState


class Level(NamedTuple):
  """The S nodes with children on one level of a breadth-first tree.

  Attributes:
    nodes: indices `[S]` of the nodes in the tree.
    counts: number of children of each node, S numbers.
    first: index of the first child in the tree. The other children of these
      nodes have the next indices.
    ancestors: attention mask `[S, T]` bool over the T nodes with children on
      all levels up to this one; this level is last. The root is excluded,
      because it is a committed token.
    above: index `[S]` of each node's parent in `nodes` of the previous level.
  """

  nodes: np.ndarray
  counts: tuple[int, ...]
  first: int
  ancestors: np.ndarray
  above: np.ndarray

  @property
  def below(self) -> slice:
    """Slice that selects the level's children from the nodes below the root."""
    return slice(self.first - 1, self.first - 1 + sum(self.counts))


@functools.cache
def levels(parents: tuple[int, ...]) -> tuple[Level, ...]:
  """Returns all levels with children of a tree, beginning with the root.

  Args:
    parents: parent index of each node in breadth-first order; -1 for the root.
  """
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


def fed_slots(parents: tuple[int, ...]) -> tuple[np.ndarray, int]:
  """Returns the position of each tree node in the draft model's cache block.

  `grow` runs the draft model on all nodes except the root and the leaves, level
  by level. The keys and values of these nodes form a block in this order.

  Args:
    parents: parent index of each of the N nodes, breadth-first.

  Returns:
    Position of each node in the block, `[N]` int32, and the size of the block.
    The position of the root and the leaves is 0, although the block does not
    contain them.
  """
  fed = [node for level in levels(parents)[1:] for node in level.nodes]
  slots = np.zeros(len(parents), np.int32)
  slots[fed] = np.arange(len(fed))
  return slots, len(fed)


def grow(step, carry, logits, uniforms, parents: tuple[int, ...], draw):
  """Samples a draft tree of N nodes for each of B batch rows, level by level.

  Args:
    step: function that runs the draft model on the nodes of a level, see the
      docstring of this module.
    carry: initial carry of the step, such as a cache with all committed tokens.
    logits: draft model's logits `[B, V]` of the token after the root.
    uniforms: uniform samples in [0, 1), `[B, (N - 1) UNIFORMS_A_DRAW]`.
    parents: parent index of each of the N >= 2 nodes, breadth-first.
    draw: function `(logits [B, n, V], counts, uniforms [B, M, UNIFORMS_A_DRAW],
      depth) -> (tokens [B, M], probs [B, M, V])` that samples the M children of
      n nodes, see `drawer`.

  Returns:
    Tokens `[B, N - 1]` and draft distributions `[B, N - 1, V]` of the nodes
    below the root, and the carry after the last step. If the carry is a draft
    model's cache, it contains the nodes in the order given by `fed_slots`.
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
    drawn, law = draw(logits, level.counts, uniforms[:, level.below], depth)
    tokens = jnp.concatenate([tokens, drawn], axis=1)
    probs.append(law)
  return tokens[:, 1:], jnp.concatenate(probs, axis=1), carry


def iid(logits, counts, uniforms, transform):
  """Samples the children of n nodes independently.

  Siblings may be equal.

  Args:
    logits: draft model's logits `[n, V]` of the token after each node, or
      `[1, V]` if all nodes share them.
    counts: number of children of each node, n numbers with sum M.
    uniforms: `[M, UNIFORMS_A_DRAW]`, uniform samples in [0, 1), or keys of
      shared noise, see `sampling.draw`.
    transform: transform of logits to probabilities.

  Returns:
    Tokens `[M]` of the children, and the distributions `[M, V]` from which they
    were sampled.
  """
  probs = _of_nodes(transform(logits), counts)[_parents(counts)]
  return _drawn(probs, uniforms), probs


def without_replacement(logits, counts, uniforms, transform):
  """Samples distinct children of a node, one after another.

  Arguments and results are those of `iid`. A child's distribution is the draft
  distribution after its parent, with the tokens of earlier siblings removed and
  the rest renormalised. RSD (Jeon et al. 2024, arXiv:2402.14160) and Sequoia
  (Chen et al. 2024, arXiv:2402.12374) use the same distribution. RSD adds
  Gumbel noise to all logits and takes the top k. This function inverts the CDF
  once per child instead, because this needs fewer random numbers.
  """
  first, nodes = _first_children(counts), np.arange(len(counts))
  rest = _of_nodes(transform(logits), counts)
  scores = _of_nodes(allowed(logits, transform), counts)
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
  """Returns the most likely tokens as children, with one-hot `probs`.

  Arguments and results are those of `iid`. The function ignores `uniforms`.
  """
  del uniforms
  best, likeliest = (_of_nodes(x, counts) for x in jax.lax.top_k(
      allowed(logits, transform), max(counts)))
  nodes = _parents(counts)
  tokens = likeliest[nodes, _ranks(counts)]
  probs = jax.nn.one_hot(tokens, logits.shape[-1], dtype=best.dtype)
  # `jax.lax.top_k` also returns tokens if the logits are NaN. Finite one-hot
  # probabilities would hide this error. The probabilities are therefore set to
  # NaN, and the decoding loop reports the error.
  finite = jnp.isfinite(best[:, :1])[nodes]
  return tokens, jnp.where(finite, probs, jnp.nan)


def hybrid(logits, counts, uniforms, transform):
  """Returns the most likely tokens and one sampled token as children.

  These are the "greedy" drafts of Hu et al. 2025 (arXiv:2502.18779). Arguments
  and results are those of `iid`. If a node has K children, the first child is
  sampled, and the other K - 1 children are the set S of the most likely tokens.
  The first child is sampled from q', the draft distribution restricted to the
  tokens outside of S and renormalised. If p is the target's distribution, a
  child is accepted with probability at most
  p(S) + sum_{x not in S} min(p(x), q'(x)). An optimal verification rule attains
  this bound.
  """
  nodes, ranks = _parents(counts), _ranks(counts)
  _, likeliest = jax.lax.top_k(allowed(logits, transform), max(counts))
  likeliest = _of_nodes(likeliest, counts)
  fixed = ranks < np.array(counts)[nodes] - 1
  at = (nodes[fixed], likeliest[nodes[fixed], ranks[fixed]])
  outside = _of_nodes(transform(logits), counts).at[at].set(0)
  ends = likeliest[np.arange(len(counts)), np.array(counts) - 1]
  law = _law(outside, ends)
  drawn = _drawn(law, uniforms[_first_children(counts)])
  tokens = jnp.concatenate([drawn[:, None], likeliest], axis=1)[nodes, ranks]
  probs = jax.nn.one_hot(tokens, logits.shape[-1], dtype=law.dtype)
  return tokens, jnp.where(ranks[:, None] == 0, law[nodes], probs)


_drawn = jax.vmap(sampling.draw)


def _of_nodes(x, counts):
  """Returns `x [n, ...]`; repeats `x [1, ...]`, which the n nodes share."""
  chex.assert_rank(x, 2)
  return jnp.broadcast_to(x, (len(counts), x.shape[1]))


def _parents(counts):
  """Returns the index of each child's parent among the n nodes, `[M]`.

  Args:
    counts: number of children of each node, n numbers with sum M.
  """
  return np.repeat(np.arange(len(counts)), counts)


def _first_children(counts):
  """Returns the index of each node's first child among all M children, `[n]`.

  Args:
    counts: number of children of each node, n numbers with sum M.
  """
  return np.cumsum([0, *counts[:-1]])


def _ranks(counts):
  """Returns the number of earlier siblings of each of the M children, `[M]`.

  Args:
    counts: number of children of each node, n numbers with sum M.
  """
  return np.arange(sum(counts)) - _first_children(counts)[_parents(counts)]


def allowed(logits: jax.Array, transform: LogitsTransform) -> jax.Array:
  """Returns `logits [..., V]` with -inf at the tokens `transform.banned`."""
  if not transform.banned:
    return logits
  return logits.at[..., np.array(transform.banned)].set(-jnp.inf)


def _law(weights, otherwise):
  """Returns distributions `[n, V]` proportional to the rows of `weights`.

  Args:
    weights: nonnegative weights `[n, V]`.
    otherwise: token of each row, `[n]`. If the sum of a row is 0 up to
      rounding, the row's distribution is one-hot at this token.
  """
  total = jnp.sum(weights, axis=-1, keepdims=True)
  empty = total <= smallest_mass(weights.dtype)
  one_hot = jax.nn.one_hot(otherwise, weights.shape[-1], dtype=weights.dtype)
  return jnp.where(empty, one_hot, weights / jnp.where(empty, 1, total))


# Methods to choose the children of a node. The keys are the allowed values of a
# drafter's field `proposal`.
DRAWS = {"iid": iid, "without_replacement": without_replacement,
         "top_k": top_k, "hybrid": hybrid}


def check_proposal(proposal: str) -> None:
  """Raises `ValueError` unless `proposal` is a key of `DRAWS`."""
  if proposal not in DRAWS:
    raise ValueError(f"proposal is {proposal!r}; it must be one of "
                     f"{', '.join(DRAWS)}")


def drawer(proposal: str, transform: LogitsTransform, state: DecodeState):
  """Returns a function that samples children of draft nodes, for a batch.

  Args:
    proposal: sampling method, a key of `DRAWS`.
    transform: transform of logits to probabilities.
    state: decoding state of B rows. Its temperatures are used if the transform
      has none.

  Returns:
    Function `(logits [B, n, V], counts, uniforms [B, M, 2], depth) -> (tokens
    [B, M], probs [B, M, V])` that samples the M children of n nodes per row.
    The nodes may share logits `[B, 1, V]`. `counts` contains the number of
    children of each node, and `depth` is the depth of the nodes. `iid`
    describes the other arguments for one row. If the transform is `coupled`,
    all children have the noise of their position in place of the uniforms:
    siblings without replacement are the Gumbel top-k of q, and independent
    siblings are equal.
  """
  def draw(logits, counts, uniforms, depth):
    if transform.coupled:
      uniforms = jnp.broadcast_to(
          sampling.noise_keys(state.keys, state.lengths[:, None] + depth),
          uniforms.shape)
    one = lambda logits, uniforms, temperature: DRAWS[proposal](
        logits, counts, uniforms, transform.at(temperature))
    return jax.vmap(one)(logits, uniforms, state.temperature)

  return draw
