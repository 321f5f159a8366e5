"""Trees that are drawn from counts of what followed elsewhere.

The children of a node are drawn without replacement from the law of the tokens
that come next in its matches (see `continuations`), so that recursive rejection
and traversal verification make use of it. A node without so many different next
tokens has fewer children: what would be the others is padding, and so is all
below it. How many there are is known before one of them is drawn.
"""

import jax
import jax.numpy as jnp
import numpy as np

from specjax.methods import _children
from specjax.methods import _growth
from specjax.sampling import LogitsTransform

_NO_TOKEN = -1


def draw(following: jax.Array, alive: jax.Array, steps: jax.Array,
         uniforms: jax.Array, parents: tuple[int, ...],
         transform: LogitsTransform, temperature: jax.Array, vocab_size: int
         ) -> tuple[jax.Array, jax.Array]:
  """Draws a tree of N nodes for every row.

  Args:
    following: `[B, K, S]` int32, what follows the matches, -1 after an end.
    alive: `[B, K]` bool, which matches count.
    steps: `[B]` int32, the longest path.
    uniforms: `[B, (N - 1) UNIFORMS_A_DRAW]`, uniform in [0, 1).
    parents: of the tree, breadth-first, at most S deep.
    transform: of the counts' law, whose logits are their logarithms.
    temperature: `[B]`.
    vocab_size: V.

  Returns:
    Tokens `[B, N - 1]` and probs `[B, N - 1, V]` of the nodes below the root;
    padding is token 0 with a row of 0.
  """
  drawn = _children.drawer("without_replacement", transform, temperature)

  def counted(alive, depth):
    """Logits `[B, n, V]` of what follows `alive [B, n, K]`."""
    column = jnp.take(following, depth, axis=2)[:, None]
    counts = alive & (column >= 0) & (depth < steps)[:, None, None]
    batch, size, _ = alive.shape
    total = jnp.zeros((batch, size, vocab_size)).at[
        jnp.arange(batch)[:, None, None], jnp.arange(size)[:, None],
        jnp.maximum(column, 0)].add(counts.astype(jnp.float32))
    return jnp.where(total > 0, jnp.log(jnp.maximum(total, 1)), -jnp.inf)

  def step(tokens, depths, ancestors, above, alive):
    del ancestors
    depth = depths[0, 0]  # one level is read at a time
    alive = jax.vmap(lambda row, at: row[at])(alive, above)
    alive &= jnp.take(following, depth, axis=2)[:, None] == tokens[..., None]
    return counted(alive, depth + 1), alive

  def some(logits, counts, uniforms):
    """The children that there are; the others have no token."""
    distinct = jnp.sum(jnp.isfinite(_children.allowed(logits, transform)), -1)
    tokens, probs = drawn(
        jnp.where(distinct[..., None] > 0, logits, 0), counts, uniforms)
    node = np.repeat(np.arange(len(counts)), counts)
    rank = np.concatenate([np.arange(count) for count in counts])
    real = rank < distinct[:, node]
    return (jnp.where(real, tokens, _NO_TOKEN),
            jnp.where(real[..., None], probs, 0))

  alive = alive[:, None]
  tokens, probs, _ = _growth.grow(
      step, alive, counted(alive, jnp.zeros((), jnp.int32))[:, 0], uniforms,
      parents, some)
  return jnp.maximum(tokens, 0), probs
