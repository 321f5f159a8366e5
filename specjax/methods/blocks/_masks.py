"""Attention masks for training drafters that predict several positions.

A *row* is a training sequence. Every query and key is an *element*, either a
true token of the row or a drafted position. The *anchor* of an element is the
position of the last true token that the element attends to. The *depth* of an
element is its distance from the anchor. In the other modules of this folder,
the anchor of a block is its slot 0, one position later.

All methods follow one rule: an element attends to the true tokens up to its
anchor, and to the drafted positions with the same anchor. The elements of each
method are, as (anchor, depth):

  training-time test   position t at step i is (t, i)
  P-EAGLE              the same, with all steps in one pass
  PARD                 position r of copy i of the row is (r - i, i)
  DFlash, DSpark       the slots of a block that begins at position `first` are
                       (first - 1, 1..size), and attend to each other in both
                       directions

`ParallelObjective` uses this mask. `Eagle3Objective` and `PEagleObjective` need
no mask because each step reads the keys of the complete row
(`FeatureHeads.step` with `keys`). Tests apply the rule to the steps of EAGLE-3,
the copies of PARD and the steps of P-EAGLE. The objectives of specjax train on
rows with one document each. Masks for several documents serve other objectives.

EAGLE-3 (arXiv:2503.01840), P-EAGLE (arXiv:2602.01469), PARD (arXiv:2504.18583),
DFlash (arXiv:2602.06036). All functions apply to one row. Use `jax.vmap` for a
batch.
"""

import chex
from flax import struct
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike


@struct.dataclass
class Elements:
  """N queries or keys of a row.

  Attributes:
    anchor: position of the last true token that the element attends to, `[N]`
      int32. -1 means that there is no such token.
    depth: distance from the anchor, `[N]` int32. 0 is the true token at the
      anchor, and d > 0 is the d-th drafted position after the anchor.
    document: index of the document, `[N]` int32. An element does not attend to
      other documents.
  """

  anchor: jax.Array
  depth: jax.Array
  document: jax.Array

  @property
  def position(self) -> jax.Array:
    """Position in the row `[N]` int32, for rotary embeddings."""
    return self.anchor + self.depth


def text(documents: ArrayLike) -> Elements:
  """Returns the elements of a row's true tokens.

  Args:
    documents: index of each token's document, `[T]` int32.
  """
  return steps(documents, 0)


def steps(documents: ArrayLike, depth: int) -> Elements:
  """Returns one element per token of a row, `depth` positions after the token.

  Args:
    documents: index of each token's document, `[T]` int32.
    depth: step i of the training-time test, or number i of a copy in PARD.
  """
  documents = jnp.asarray(documents, jnp.int32)
  return Elements(
      anchor=jnp.arange(documents.shape[0], dtype=jnp.int32),
      depth=jnp.full(documents.shape, depth, jnp.int32), document=documents)


def blocks(first: ArrayLike, size: int, documents: ArrayLike) -> Elements:
  """Returns the elements of the slots of n blocks, block by block.

  Args:
    first: position of slot 0 of each block, `[n]` int32. The positions must
      differ, because slots attend to all slots with the same anchor.
    size: number of slots of a block.
    documents: index of each token's document, `[T]` int32.

  Returns:
    n * size elements. Slot k of a block is at position first + k.
  """
  first = jnp.asarray(first, jnp.int32)
  slots = jnp.arange(1, size + 1, dtype=jnp.int32)
  return Elements(
      anchor=jnp.repeat(first - 1, size),
      depth=jnp.tile(slots, first.shape[0]),
      document=jnp.repeat(jnp.asarray(documents, jnp.int32)[first], size))


def joined(*parts: Elements) -> Elements:
  """Returns the concatenation of elements."""
  return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)


def visible(queries: Elements, keys: Elements, causal: bool = True
            ) -> jax.Array:
  """Returns the attention mask, `[Q, K]` bool.

  Args:
    queries: Q elements.
    keys: K elements.
    causal: True if a drafted position attends only to drafted positions up to
      its depth. False (DFlash) if it attends to all drafted positions with the
      same anchor.
  """
  chex.assert_rank([queries.anchor, keys.anchor], 1)
  column = lambda x: x[:, None]
  read = (keys.depth == 0) & (keys.anchor <= column(queries.anchor))
  own = (keys.depth > 0) & (keys.anchor == column(queries.anchor))
  if causal:
    own &= keys.depth <= column(queries.depth)
  return (keys.document == column(queries.document)) & (read | own)
