"""Attention masks for training drafters that predict several positions.

Every query and key is an *element*: it has read the true text up to its
*anchor* and lies *depth* positions after it. One rule then holds for all:

  an element sees the true tokens up to its anchor, and of the drafted
  positions those with its own anchor.

  training-time test   row t at step i is (anchor t, depth i)
  P-EAGLE              the same, all depths in one pass
  PARD                 copy i at place r is (anchor r - i, depth i)
  DFlash, DSpark       a block is (anchor first - 1, depths 1..size), and its
                       slots see each other in both directions

The objective `Parallel` takes its mask from here. `Eagle3` has no mask to
build, for each step goes over the whole row (`FeatureHeads.step` with `keys`);
tests show what this rule makes of its steps, of PARD's copies and of P-EAGLE's
depths. Rows of several documents are for objectives of your own: those of
specjax train on rows of one text each.

EAGLE-3 (arXiv:2503.01840), P-EAGLE (arXiv:2602.01469), PARD (arXiv:2504.18583),
DFlash (arXiv:2602.06036). Everything here is of one row: `jax.vmap` for more.
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
    anchor: `[N]` int32, the last position of the text that is read; -1: none.
    depth: `[N]` int32. 0 is the true token at the anchor; d > 0 is the d-th
      drafted position after it.
    document: `[N]` int32, of a row that holds several; none sees another's.
  """

  anchor: jax.Array
  depth: jax.Array
  document: jax.Array

  @property
  def position(self) -> jax.Array:
    """Position in the row `[N]` int32, for rotary embeddings."""
    return self.anchor + self.depth


def text(documents: ArrayLike) -> Elements:
  """Returns the true tokens of a row with documents `[T]`."""
  return steps(documents, 0)


def steps(documents: ArrayLike, depth: int) -> Elements:
  """Returns an element `depth` positions after every token of a row.

  Args:
    documents: `[T]` int32.
    depth: i of the training-time test, or of a copy.
  """
  documents = jnp.asarray(documents, jnp.int32)
  return Elements(
      anchor=jnp.arange(documents.shape[0], dtype=jnp.int32),
      depth=jnp.full(documents.shape, depth, jnp.int32), document=documents)


def blocks(first: ArrayLike, size: int, documents: ArrayLike) -> Elements:
  """Returns the slots of blocks, block by block.

  Args:
    first: `[n]` int32, where each block begins: slot 0 is the token there. No
      two are equal, for slots see all that have their anchor.
    size: number of slots of a block.
    documents: `[T]` int32, of the row's tokens.

  Returns:
    n * size elements; slot k lies at position first + k.
  """
  first = jnp.asarray(first, jnp.int32)
  slots = jnp.arange(1, size + 1, dtype=jnp.int32)
  return Elements(
      anchor=jnp.repeat(first - 1, size),
      depth=jnp.tile(slots, first.shape[0]),
      document=jnp.repeat(jnp.asarray(documents, jnp.int32)[first], size))


def joined(*parts: Elements) -> Elements:
  """Concatenates elements."""
  return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)


def visible(queries: Elements, keys: Elements, causal: bool = True
            ) -> jax.Array:
  """Returns `[Q, K]` bool, the keys that each query attends to.

  Args:
    queries: Q elements.
    keys: K elements.
    causal: True if a drafted position attends to positions up to its own depth,
      False (DFlash) if it attends to all with its anchor.
  """
  chex.assert_rank([queries.anchor, keys.anchor], 1)
  column = lambda x: x[:, None]
  read = (keys.depth == 0) & (keys.anchor <= column(queries.anchor))
  own = (keys.depth > 0) & (keys.anchor == column(queries.anchor))
  if causal:
    own &= keys.depth <= column(queries.depth)
  return (keys.document == column(queries.document)) & (read | own)
