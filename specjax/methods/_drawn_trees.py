"""Growing a drawn tree whose shape follows the confidence of what draws it.

EAGLE-2 (Li et al. 2024, arXiv:2406.16858) ranks candidates and drops the worse
ones, which is sound for deterministic drafts alone: of sampled ones those that
stay are no draws from q. Here every node that was drawn stays, and a score
decides which of them get children. Recursive rejection and traversal
verification are exact for such trees, by induction over the order of drawing:
take the node that was drawn last. It has no children, its siblings are tried
before it, and its token is a fresh draw from its row of q, whatever was drawn
before. Averaged over that draw, the law of the text from its parent on is what
it was without the node, and so is the probability that the parent is left, so
that no other node notices it. So the tree is as exact as the one without it,
and that as the next smaller one, down to the root; where a
node hangs may depend on all that was drawn before it. K-SEQ tries the children
of a node together, and the same holds of such a group that is drawn last.
"""

import jax
import jax.numpy as jnp

from specjax import sampling
from specjax.types import Draft


def level_sizes(depth: int, expanded: int, children: int) -> tuple[int, ...]:
  """Nodes of a level that are expanded: the root, then those of each level."""
  found = [1]
  for _ in range(depth - 1):
    found.append(min(expanded, found[-1] * children))
  return tuple(found)


def num_nodes(depth: int, expanded: int, children: int) -> int:
  """N, the nodes of the tree, the root included."""
  return 1 + children * sum(level_sizes(depth, expanded, children))


def most_expanded(nodes: int, depth: int, children: int) -> int:
  """The most nodes of a level to expand in a tree of at most `nodes`.

  At least 1, though such a tree may have more.
  """
  fits = (expanded for expanded in range((nodes - 1) // children, 0, -1)
          if num_nodes(depth, expanded, children) <= nodes)
  return next(fits, 1)


def grow(step, carry, logits, uniforms, roots, draw, *, confidence, depth: int,
         expanded: int, children: int):
  """Draws a tree for every row.

  Args:
    step: reads the nodes of a level, see `growth`.
    carry: of the step.
    logits: `[B, V]` of the token after the root.
    uniforms: `[B, (N - 1) UNIFORMS_A_DRAW]`, uniform in [0, 1).
    roots: `[B]` int32.
    draw: see `growth.grow`.
    confidence: from logits to the probabilities whose product on its path is
      the score of a node.
    depth: levels below the root.
    expanded: nodes of a level that get children: those with the best scores.
    children: of each.

  Returns:
    The batched `Draft` and the carry after the last step.
  """
  batch = logits.shape[0]
  uniforms = uniforms.reshape(batch, -1, sampling.UNIFORMS_A_DRAW)
  take = jax.vmap(lambda row, at: row[at])
  parents, scores = jnp.zeros((batch, 1), jnp.int32), jnp.zeros((batch, 1))
  ancestors = jnp.zeros((batch, 1, 0), bool)
  found, logits, start = [], logits[:, None], 0  # of its nodes the first
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
