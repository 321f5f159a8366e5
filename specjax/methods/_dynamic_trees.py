"""Trees whose shape follows the confidence of the draft model.

`expand` is EAGLE-2 (Li et al. 2024, arXiv:2406.16858, section 4), for any draft
model with a step as in `_trees`. The value of a node is the product of the
draft probabilities on its path. Every level expands its `top_k` best nodes by
`top_k` children each. All children are candidates. The draft of N nodes
consists of the root and the N - 1 best candidates. `grow` samples the children
instead, and removes no node.
"""

import chex
from flax import struct
import jax
import jax.numpy as jnp

from specjax import sampling
from specjax.interfaces import Drafter
from specjax.types import Draft
from specjax.utils import fields


class ExpandedTree(Drafter):
  """Base of deterministic drafters whose tree is grown by `expand`.

  Subclasses are frozen dataclasses with three fields: `depth`, the number of
  levels below the root; `top_k`, the number of expanded nodes per level and of
  children of each; and `num_nodes`, the number N of nodes including the root.
  """

  deterministic = True
  conditional = True
  num_uniforms = 0
  proposal = "deterministic"

  def __post_init__(self):
    check_sizes(self.depth, self.top_k, self.num_nodes)

  @property
  def chain(self) -> bool:
    return self.top_k == 1

  @property
  def iid(self) -> bool:
    return self.chain


@struct.dataclass
class _Frontier:
  """The K = `top_k` expanded nodes of a level.

  Attributes:
    candidates: indices of the nodes among all candidates, `[B, K]` int32.
    tokens: token ids `[B, K]` int32.
    values: log of the product of confidences on the path, `[B, K]`.
    ancestors: mask `[B, K, T]` bool over the T expanded nodes so far, with this
      level last.
    above: index of each node's parent among the expanded nodes of the previous
      level, `[B, K]` int32.
  """

  candidates: jax.Array
  tokens: jax.Array
  values: jax.Array
  ancestors: jax.Array
  above: jax.Array


def most_nodes(depth: int, top_k: int) -> int:
  """Returns the number of candidates of `depth` levels, including the root."""
  return 1 + top_k + (depth - 1) * top_k**2


def check_sizes(depth: int, top_k: int, num_nodes: int) -> None:
  """Raises `ValueError` if `expand` cannot grow a tree of this size."""
  for name, value, least in (("depth", depth, 1), ("top_k", top_k, 1),
                             ("num_nodes", num_nodes, 2)):
    fields.check_at_least(name, value, least)
  most = most_nodes(depth, top_k)
  if num_nodes > most:
    raise ValueError(f"num_nodes is {num_nodes}; depth {depth} and top_k "
                     f"{top_k} allow 2 to {most} nodes: change one of the "
                     "three")


def check_top_k(top_k: int, vocab_size: int) -> None:
  """Raises `ValueError` if `top_k` exceeds the vocabulary."""
  if top_k > vocab_size:
    raise ValueError(f"top_k is {top_k}; it must be at most the vocabulary "
                     f"size, {vocab_size}")


def fed_nodes(depth: int, top_k: int) -> int:
  """Returns the number of nodes that the step of `expand` reads."""
  return top_k * (depth - 1)


def expand(step, carry, logits, roots, *, transform, depth: int, top_k: int,
           num_nodes: int):
  """Grows a deterministic tree for each row.

  Args:
    step: function that reads the nodes of a level, see `_trees`.
    carry: initial carry of the step.
    logits: logits `[B, V]` of the token after the root.
    roots: last committed tokens `[B]` int32.
    transform: transform of logits to confidences.
    depth: number of levels below the root, one step each except the last.
    top_k: number of expanded nodes per level, and of children of each.
    num_nodes: number of nodes N.

  Returns:
    The batched `Draft`; the index of each node in the block of nodes that the
    step read, `[B, N]` int32, arbitrary for the root and for nodes that it did
    not read; and the carry.
  """
  chex.assert_rank([logits, roots], [2, 1])
  batch, vocab_size = logits.shape

  def children(logits, values):
    """Returns tokens and values `[B, F * top_k]` of the children of F nodes."""
    probs, tokens = jax.lax.top_k(transform(logits), top_k)
    values = values[..., None] + jnp.minimum(jnp.log(probs), 0)
    return tokens.reshape(batch, -1), values.reshape(batch, -1)

  tokens, values = children(logits[:, None], jnp.zeros((batch, 1)))
  numbers = jnp.arange(1, top_k + 1, dtype=jnp.int32)  # node 0 is the root
  frontier = _Frontier(
      candidates=jnp.tile(numbers, (batch, 1)), tokens=tokens, values=values,
      ancestors=jnp.tile(jnp.eye(top_k, dtype=bool), (batch, 1, 1)),
      above=jnp.zeros_like(tokens))
  found = [(tokens, values, jnp.zeros_like(tokens))]
  fed = jnp.zeros((batch, 0), jnp.int32)
  for level in range(1, depth):
    logits, carry = step(
        frontier.tokens, jnp.full_like(frontier.tokens, level - 1),
        frontier.ancestors, frontier.above, carry)
    fed = jnp.concatenate([fed, frontier.candidates], axis=1)
    tokens, values = children(logits, frontier.values)
    found.append((tokens, values,
                  jnp.repeat(frontier.candidates, top_k, axis=1)))
    first = most_nodes(level, top_k)
    frontier = _best(frontier, tokens, values, first)
  columns = [jnp.concatenate(x, axis=1) for x in zip(*found)]
  keep = lambda root, tokens, values, parents, fed: _kept(
      root, tokens, values, parents, fed, num_nodes, vocab_size)
  draft, slots = jax.vmap(keep)(roots, *columns, fed)
  return draft, slots, carry


def _best(frontier, tokens, values, first):
  """Returns the expanded nodes of the next level, the K best children.

  Args:
    frontier: expanded nodes of this level.
    tokens: tokens `[B, K * K]` of the children of these nodes.
    values: values of the children, see `_Frontier`.
    first: index of the first child among all candidates.
  """
  top_k = frontier.tokens.shape[1]
  values, chosen = jax.lax.top_k(values, top_k)
  above = (chosen // top_k).astype(jnp.int32)
  own = jnp.tile(jnp.eye(top_k, dtype=bool), (values.shape[0], 1, 1))
  inherited = jnp.take_along_axis(
      frontier.ancestors, above[..., None], axis=1)
  return _Frontier(
      candidates=first + chosen, values=values, above=above,
      tokens=jnp.take_along_axis(tokens, chosen, axis=1),
      ancestors=jnp.concatenate([inherited, own], axis=-1))


def _kept(root, tokens, values, parents, fed, num_nodes, vocab_size):
  """Returns the best candidates of a row as a draft.

  Returns:
    The `Draft` of N nodes, and the slot `[N]` int32 of each node in the block
    of read nodes `fed`; see `expand`.
  """
  # Among equal values, `top_k` prefers lower indices. A parent has a lower
  # index than its children and at least their value. So the parent of a
  # selected node is selected.
  values, best = jax.lax.top_k(values, num_nodes - 1)
  order = jnp.argsort(best)
  values, best = values[order], best[order]
  tokens, parents = tokens[best], parents[best]
  nodes = jnp.concatenate([jnp.zeros_like(best[:1]), best + 1])
  place = jnp.argmax(parents[:, None] == nodes, axis=-1).astype(jnp.int32)
  slots = jnp.argmax(nodes[:, None] == fed, axis=-1) if fed.size else nodes
  probs = jax.nn.one_hot(tokens, vocab_size)
  # `probs` is one-hot, also if the logits are NaN. NaN is copied to it, so that
  # the decoding loop reports the error.
  probs = jnp.where(jnp.isnan(values)[:, None], jnp.nan, probs)
  draft = Draft.tree(root, jnp.append(jnp.full_like(place[:1], -1), place),
                     tokens, probs)
  return draft, slots.astype(jnp.int32)


def level_sizes(depth: int, expanded: int, children: int) -> tuple[int, ...]:
  """Returns the number of expanded nodes of each level, from the root."""
  found = [1]
  for _ in range(depth - 1):
    found.append(min(expanded, found[-1] * children))
  return tuple(found)


def num_nodes(depth: int, expanded: int, children: int) -> int:
  """Returns the number N of nodes, including the root."""
  return 1 + children * sum(level_sizes(depth, expanded, children))


def most_expanded(nodes: int, depth: int, children: int) -> int:
  """Returns the largest `expanded` for which a tree has at most `nodes` nodes.

  The result is at least 1, although such a tree may have more nodes.
  """
  fits = (expanded for expanded in range((nodes - 1) // children, 0, -1)
          if num_nodes(depth, expanded, children) <= nodes)
  return next(fits, 1)


def grow(step, carry, logits, uniforms, roots, draw, *, confidence, depth: int,
         expanded: int, children: int):
  """Samples a tree for each row.

  Args:
    step: function that reads the nodes of a level, see `_trees`.
    carry: initial carry of the step.
    logits: logits `[B, V]` of the token after the root.
    uniforms: uniform samples in [0, 1), `[B, (N - 1) UNIFORMS_A_DRAW]`.
    roots: last committed tokens `[B]` int32.
    draw: function that samples children, see `_trees.grow`.
    confidence: transform of logits to confidences. A node's score is the
      product of the confidences on its path.
    depth: number of levels below the root.
    expanded: number of nodes per level, of the best scores, that get children.
    children: number of children of each expanded node.

  Returns:
    The batched `Draft` and the carry after the last step.
  """
  chex.assert_rank([logits, uniforms, roots], [2, 2, 1])
  batch = logits.shape[0]
  uniforms = uniforms.reshape(batch, -1, sampling.UNIFORMS_A_DRAW)
  take = jax.vmap(lambda row, at: row[at])
  parents, scores = jnp.zeros((batch, 1), jnp.int32), jnp.zeros((batch, 1))
  ancestors = jnp.zeros((batch, 1, 0), bool)
  # `start` is the number of the first node of the level.
  found, logits, start = [], logits[:, None], 0
  for level, size in enumerate(level_sizes(depth, expanded, children)):
    if level:
      scores, chosen = jax.lax.top_k(scores, size)
      above = chosen // children
      ancestors = jnp.concatenate(
          [take(ancestors, above),
           jnp.tile(jnp.eye(size, dtype=bool), (batch, 1, 1))], axis=-1)
      parents = start + chosen
      logits, carry = step(
          take(found[-1][1], chosen), jnp.full_like(chosen, level - 1),
          ancestors, above, carry)
    start = 1 + sum(x.shape[1] for _, x, _ in found)
    mine = slice(start - 1, start - 1 + size * children)
    tokens, law = draw(logits, (children,) * size, uniforms[:, mine])
    each = jnp.repeat(confidence(logits), children, axis=1)
    value = jnp.take_along_axis(each, tokens[..., None], axis=-1)[..., 0]
    scores = jnp.repeat(scores, children, axis=1) + jnp.log(value)
    found.append((jnp.repeat(parents, children, axis=1), tokens, law))
  parents, tokens, probs = (jnp.concatenate(x, axis=1) for x in zip(*found))
  parents = jnp.pad(parents, ((0, 0), (1, 0)), constant_values=-1)
  return jax.vmap(Draft.tree)(roots, parents, tokens, probs), carry
