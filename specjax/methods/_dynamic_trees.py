"""Draft trees whose shape depends on the draft model's probabilities.

`expand` implements EAGLE-2 (Li et al. 2024, arXiv:2406.16858, section 4). The
value of a node is the product of the draft probabilities on its path. On every
level, the `top_k` nodes with the largest values get `top_k` children each, the
most likely next tokens. All nodes generated in this way are candidates. The
draft tree of N nodes consists of the root and the N - 1 candidates with the
largest values.

`grow` samples the children of a node from the draft distribution instead of
taking the most likely tokens. The draft tree contains all generated nodes.

Both functions run the draft model through a *step*, a function that computes
logits for the nodes of one level. `_trees` describes this function.
"""

import chex
from flax import struct
import jax
import jax.numpy as jnp

from specjax import sampling
from specjax.types import Draft
from specjax.utils import fields


@struct.dataclass
class _Frontier:
  """The K = `top_k` nodes of a tree level that get children, for B batch rows.

  Attributes:
    candidates: indices of the nodes among all generated nodes, `[B, K]` int32.
    tokens: token ids of the nodes, `[B, K]` int32.
    values: sum of the log probabilities on the path to each node, `[B, K]`.
    ancestors: attention mask `[B, K, T]` bool over the T nodes with children on
      all levels up to this one; the K nodes of this level are the last. True
      where one of the T nodes is the node itself or an ancestor of the node.
    above: index of each node's parent among the K nodes of the previous level,
      `[B, K]` int32.
  """

  candidates: jax.Array
  tokens: jax.Array
  values: jax.Array
  ancestors: jax.Array
  above: jax.Array


def most_nodes(depth: int, top_k: int) -> int:
  """Returns the number of nodes that `expand` generates, including the root.

  The root has `top_k` children. On each of the other `depth - 1` levels,
  `top_k` nodes have `top_k` children each.
  """
  return 1 + top_k + (depth - 1) * top_k**2


def check_sizes(depth: int, top_k: int, num_nodes: int) -> None:
  """Raises `ValueError` if `expand` cannot return a tree of `num_nodes` nodes.

  Args:
    depth: number of levels below the root.
    top_k: number of nodes per level that get children, and number of children
      of each such node.
    num_nodes: number of nodes of the tree, including the root.
  """
  for name, value, least in (("depth", depth, 1), ("top_k", top_k, 1),
                             ("num_nodes", num_nodes, 2)):
    fields.check_at_least(name, value, least)
  most = most_nodes(depth, top_k)
  if num_nodes > most:
    raise ValueError(f"num_nodes is {num_nodes}; depth {depth} and top_k "
                     f"{top_k} allow 2 to {most} nodes: change one of the "
                     "three")


def fed_nodes(depth: int, top_k: int) -> int:
  """Returns the number of nodes on which `expand` runs the draft model.

  These are `top_k` nodes on every level except the root and the last level.
  """
  return top_k * (depth - 1)


def expand(step, carry, logits, roots, *, transform, depth: int, top_k: int,
           num_nodes: int):
  """Builds an EAGLE-2 draft tree of likely tokens for each of B batch rows.

  Args:
    step: function that runs the draft model on the nodes of a level, see the
      docstring of `_trees`.
    carry: initial carry of the step, such as the draft model's cache.
    logits: draft model's logits `[B, V]` of the token after the root.
    roots: last committed tokens `[B]` int32.
    transform: function from logits to probabilities. The value of a node is the
      product of these probabilities on its path.
    depth: number of levels below the root. The step runs on all of these levels
      except the last.
    top_k: number of nodes per level that get children, and number of children
      of each such node.
    num_nodes: number N of nodes of the returned tree, including the root.

  Returns:
    `(draft, slots, carry)`: the batched `Draft`, the slots of its nodes, and
    the carry after the last step. `slots`, `[B, N]` int32, is the index of each
    node in the sequence of nodes that the draft model read. It is arbitrary for
    the root and for nodes that the model did not read.
  """
  chex.assert_rank([logits, roots], [2, 1])
  batch, vocab_size = logits.shape

  def children(logits, values):
    """Returns the `top_k` most likely children of each of F nodes.

    Returns:
      Tokens and values of the children, both `[B, F * top_k]`. The value of a
      child is the sum of the log probabilities on its path.
    """
    probs, tokens = jax.lax.top_k(transform(logits), top_k)
    values = values[..., None] + jnp.minimum(jnp.log(probs), 0)
    tokens = jnp.broadcast_to(tokens, values.shape)  # nodes may share logits
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
  keep = lambda root, tokens, values, parents: _kept(
      root, tokens, values, parents, num_nodes, vocab_size)
  draft, nodes = jax.vmap(keep)(roots, *columns)
  return draft, _slots(nodes, fed), carry


def _best(frontier, tokens, values, first):
  """Returns the K children with the largest values, as the next `_Frontier`.

  Args:
    frontier: the K nodes of this level that have children, for B rows.
    tokens: token ids `[B, K * K]` of their children.
    values: log probabilities of the children's paths, `[B, K * K]`.
    first: index of the first child among all generated nodes.
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


def _kept(root, tokens, values, parents, num_nodes, vocab_size):
  """Returns the draft tree of one row: the root and the N - 1 best candidates.

  Args:
    root: last committed token.
    tokens: token ids of all M generated nodes except the root, `[M]`.
    values: log probabilities of the paths of these nodes, `[M]`.
    parents: indices of the parents of these nodes, `[M]`; 0 is the root.
    num_nodes: number N of nodes of the draft tree, including the root.
    vocab_size: number of tokens of the vocabulary.

  Returns:
    The `Draft` of N nodes, and the index of each node among all generated
    nodes, `[N]`.
  """
  # The selected nodes must form a tree, so `top_k` must select the parent of
  # every selected node. This holds because the value of a parent is at least
  # that of its children, and its index is lower. Among equal values,
  # `jax.lax.top_k` prefers the lower index.
  values, best = jax.lax.top_k(values, num_nodes - 1)
  order = jnp.argsort(best)
  values, best = values[order], best[order]
  tokens, parents = tokens[best], parents[best]
  nodes = jnp.concatenate([jnp.zeros_like(best[:1]), best + 1])
  place = jnp.argmax(parents[:, None] == nodes, axis=-1).astype(jnp.int32)
  parents = jnp.append(jnp.full_like(place[:1], -1), place)
  return deterministic(root, parents, tokens, values, vocab_size), nodes


def deterministic(root: jax.Array, parents: jax.Array, tokens: jax.Array,
                  values: jax.Array, vocab_size: int) -> Draft:
  """Returns the draft tree of one row, with one-hot distributions.

  Args:
    root: last committed token.
    parents: parent index `[N]` of each node; -1 for the root.
    tokens: token ids `[N - 1]` of the nodes below the root.
    values: log probabilities `[N - 1]` of their paths.
    vocab_size: number of tokens of the vocabulary.
  """
  probs = jax.nn.one_hot(tokens, vocab_size)
  # `one_hot` returns finite probabilities even if the network's logits are NaN.
  # This line copies NaN from `values` to `probs`, because the decoding loop
  # tests `probs` and reports the error.
  probs = jnp.where(jnp.isnan(values)[:, None], jnp.nan, probs)
  return Draft.tree(root, parents, tokens, probs)


def level_sizes(depth: int, expanded: int, children: int) -> tuple[int, ...]:
  """Returns the number of nodes with children on each level, from the root.

  Args:
    depth: number of levels below the root.
    expanded: maximum number of nodes per level that get children.
    children: number of children of each such node.
  """
  found = [1]
  for _ in range(depth - 1):
    found.append(min(expanded, found[-1] * children))
  return tuple(found)


def num_nodes(depth: int, expanded: int, children: int) -> int:
  """Returns the number of nodes of a tree from `grow`, including the root.

  Args:
    depth: number of levels below the root.
    expanded: maximum number of nodes per level that get children.
    children: number of children of each such node.
  """
  return 1 + children * sum(level_sizes(depth, expanded, children))


def most_expanded(nodes: int, depth: int, children: int) -> int:
  """Returns the largest `expanded` for which a tree has at most `nodes` nodes.

  If no value satisfies the limit, the result is 1, and the tree has more than
  `nodes` nodes.

  Args:
    nodes: maximum number of nodes, including the root.
    depth: number of levels below the root.
    children: number of children of each node that gets children.
  """
  fits = (expanded for expanded in range((nodes - 1) // children, 0, -1)
          if num_nodes(depth, expanded, children) <= nodes)
  return next(fits, 1)


def grow(step, carry, logits, uniforms, roots, draw, *, confidence, depth: int,
         expanded: int, children: int):
  """Samples a draft tree of variable shape for each of B batch rows.

  The tokens are sampled from the draft distributions. The draft model's
  probabilities also determine the shape of the tree. On every level, only the
  nodes with the largest scores get children.

  Args:
    step: function that runs the draft model on the nodes of a level, see the
      docstring of `_trees`.
    carry: initial carry of the step, such as the draft model's cache.
    logits: draft model's logits `[B, V]` of the token after the root.
    uniforms: uniform samples in [0, 1), `[B, (N - 1) UNIFORMS_A_DRAW]` for the
      N - 1 nodes below the root.
    roots: last committed tokens `[B]` int32.
    draw: function that samples the children of nodes, see `_trees.grow`.
    confidence: function from logits to probabilities. A node's score is the
      product of these probabilities on its path.
    depth: number of levels below the root.
    expanded: maximum number of nodes per level that get children.
    children: number of children of each such node.

  Returns:
    `(draft, slots, carry)`, as `expand`.
  """
  chex.assert_rank([logits, uniforms, roots], [2, 2, 1])
  batch = logits.shape[0]
  uniforms = uniforms.reshape(batch, -1, sampling.UNIFORMS_A_DRAW)
  take = jax.vmap(lambda row, at: row[at])
  parents, scores = jnp.zeros((batch, 1), jnp.int32), jnp.zeros((batch, 1))
  ancestors = jnp.zeros((batch, 1, 0), bool)
  fed = jnp.zeros((batch, 0), jnp.int32)
  # `start` is the index of the level's first node in the tree.
  found, logits, start = [], logits[:, None], 0
  for level, size in enumerate(level_sizes(depth, expanded, children)):
    if level:
      scores, chosen = jax.lax.top_k(scores, size)
      above = chosen // children
      ancestors = jnp.concatenate(
          [take(ancestors, above),
           jnp.tile(jnp.eye(size, dtype=bool), (batch, 1, 1))], axis=-1)
      parents = (start + chosen).astype(jnp.int32)
      fed = jnp.concatenate([fed, parents], axis=1)
      logits, carry = step(
          take(found[-1][1], chosen), jnp.full_like(chosen, level - 1),
          ancestors, above, carry)
    start = 1 + sum(x.shape[1] for _, x, _ in found)
    mine = slice(start - 1, start - 1 + size * children)
    tokens, law = draw(logits, (children,) * size, uniforms[:, mine], level)
    value = jnp.take_along_axis(
        confidence(logits), tokens.reshape(batch, logits.shape[1], -1), axis=-1)
    scores = jnp.repeat(scores, children, axis=1) + jnp.log(
        value.reshape(batch, -1))
    found.append((jnp.repeat(parents, children, axis=1), tokens, law))
  parents, tokens, probs = (jnp.concatenate(x, axis=1) for x in zip(*found))
  parents = jnp.pad(parents, ((0, 0), (1, 0)), constant_values=-1)
  return (jax.vmap(Draft.tree)(roots, parents, tokens, probs),
          _slots(jnp.arange(parents.shape[1]), fed), carry)


def _slots(nodes: jax.Array, fed: jax.Array) -> jax.Array:
  """Returns the position in `fed [B, F]` of each node; arbitrary if missing."""
  nodes = jnp.broadcast_to(nodes, (len(fed), nodes.shape[-1]))
  if not fed.size:
    return jnp.zeros_like(nodes, jnp.int32)
  return jnp.argmax(
      nodes[..., None] == fed[:, None], axis=-1).astype(jnp.int32)
