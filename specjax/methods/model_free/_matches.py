"""Where texts have the last tokens of a row, searched on the device.

A *match* is a place where a text has the last m tokens of a row; its
*following* tokens are the S next ones, and -1 from where that text ends.

  own_matches       in the row's own text, for all m at once
  find, spread      in a datastore: two binary searches for each m, and up to K
                    matches out of the range that they find

`continuations` counts what follows.
"""

from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp
import numpy as np

from specjax.data.datastores import Datastore

_NO_TOKEN = -1


NOWHERE = -2  # stands before a row's first token, and in no text


def own_matches(tokens: jax.Array, lengths: jax.Array, longest: int,
                count: int, size: int) -> tuple[jax.Array, jax.Array]:
  """Where the rows' own texts had their last tokens before.

  Args:
    tokens: token ids `[B, C]` int32.
    lengths: number `[B]` int32 of valid tokens.
    longest: tokens of the longest match.
    count: K, matches that are kept of each row: the longest ones, and of
      equally long ones the latest.
    size: number S of tokens after a match.

  Returns:
    following: `[B, K, S]` int32, in that order.
    common: `[B, K]` int32, the length of each match, `longest` at most; 0:
      there is none.
  """
  chex.assert_rank([tokens, lengths], [2, 1])
  slots = tokens.shape[1]
  end = lengths[:, None] - 1
  padded = jnp.pad(tokens, ((0, 0), (longest, 0)), constant_values=_NO_TOKEN)

  def extend(carry):
    back, same, common = carry
    last = jnp.take_along_axis(tokens, jnp.maximum(end - back, 0), axis=1)
    moved = jax.lax.dynamic_slice_in_dim(padded, longest - back, slots, axis=1)
    same &= moved == jnp.where(end >= back, last, NOWHERE)
    return back + 1, same, common + same

  earlier = jnp.arange(slots, dtype=jnp.int32) < end
  _, _, common = jax.lax.while_loop(
      lambda carry: (carry[0] < longest) & jnp.any(carry[1]), extend,
      (jnp.zeros((), jnp.int32), earlier, jnp.zeros_like(tokens)))
  rank = common * slots + jnp.arange(slots, dtype=jnp.int32)
  # The fast search for the largest is for floats; these are whole.
  exact = (longest + 1) * slots <= 2**24
  _, place = jax.lax.top_k(rank.astype(jnp.float32) if exact else rank,
                           min(count, slots))
  place = jnp.pad(place, ((0, 0), (0, count - place.shape[1])),
                  constant_values=slots - 1)  # where no match can be
  ahead = place[..., None] + 1 + jnp.arange(size)
  following = jnp.take_along_axis(
      tokens[:, None], jnp.minimum(ahead, slots - 1), axis=2)
  following = jnp.where(ahead < lengths[:, None, None], following, _NO_TOKEN)
  return following, jnp.take_along_axis(common, place, axis=1)


def find(store: Datastore, tokens: jax.Array, lengths: jax.Array,
         sizes: Sequence[int]) -> tuple[jax.Array, jax.Array]:
  """Where a datastore has the rows' last tokens, by binary search.

  Args:
    store: datastore.
    tokens: token ids `[B, C]` int32.
    lengths: number `[B]` int32 of valid tokens.
    sizes: the M lengths of the patterns, each at least 1 and at most the
      store's depth.

  Returns:
    first, found: `[B, M]` int32, a range of `store.suffixes`: where it begins,
      and how many begin with the pattern. A row shorter than a pattern finds
      nothing.
  """
  chex.assert_rank([tokens, lengths], [2, 1])
  sizes, longest = np.array(sizes), max(sizes)
  suffixes, corpus = jnp.asarray(store.suffixes), jnp.asarray(store.tokens)
  column = np.arange(longest)
  place = lengths[:, None, None] - sizes[:, None] + column
  flat = jnp.maximum(place, 0).reshape(len(tokens), -1)
  pattern = jnp.take_along_axis(tokens, flat, axis=1, mode="clip").reshape(
      place.shape)
  # What the store's tokenizer has no token for is beyond all that it holds.
  pattern = jnp.where(pattern < store.vocab_size, pattern, store.vocab_size + 1)
  # The first difference weighs more than all that come after it.
  weights = np.where(column < sizes[:, None], 2 ** (longest - 1 - column), 0)

  def order(at):
    """The sign of suffix - pattern, for `[B, 2, M]` places."""
    start = suffixes.at[at].get(mode="clip")
    text = corpus.at[start[..., None] + column].get(mode="clip")
    signs = jnp.sign(text.astype(jnp.int32) - pattern[:, None])
    return jnp.sum(signs * weights, axis=-1, dtype=jnp.int32)

  def halve(_, bounds):
    low, high = bounds
    middle = low + (high - low) // 2
    # The lower bound is the first place not before the pattern; the upper
    # bound is the first place after it.
    before = order(middle) < jnp.array([[0], [1]])
    going = low < high
    return (jnp.where(going & before, middle + 1, low),
            jnp.where(going & ~before, middle, high))

  total = suffixes.shape[0]
  low = jnp.zeros((len(tokens), 2, len(sizes)), jnp.int32)
  low, _ = jax.lax.fori_loop(
      0, total.bit_length(), halve, (low, jnp.full_like(low, total)))
  found = jnp.where(lengths[:, None] >= sizes, low[:, 1] - low[:, 0], 0)
  return low[:, 0], found


def spread(store: Datastore, first: jax.Array, found: jax.Array,
           after: jax.Array, count: int, size: int
           ) -> tuple[jax.Array, jax.Array]:
  """Up to K of the matches that `find` found, evenly out of the range.

  The range is sorted by what follows, so that even steps count it well.

  Args:
    store: datastore.
    first: `[...]` int32.
    found: `[...]` int32.
    after: `[...]` int32, tokens of the pattern.
    count: number of heads K.
    size: number S of tokens after a match.

  Returns:
    following: `[..., K, S]` int32, sorted, -1 from a document's end on.
    alive: `[..., K]` bool, whether there are so many matches.
  """
  rank, found = jnp.arange(count, dtype=jnp.int32), found[..., None]
  # rank * found // count, without a product that is too large.
  steps = rank * (found // count) + rank * (found % count) // count
  at = first[..., None] + jnp.where(found > count, steps, rank)
  start = jnp.asarray(store.suffixes).at[at].get(mode="clip")
  ahead = (start + after[..., None])[..., None] + jnp.arange(size)
  following = jnp.asarray(store.tokens).at[ahead].get(mode="clip")
  following = following.astype(jnp.int32)
  ended = jnp.cumsum(following >= store.vocab_size, axis=-1) > 0
  return jnp.where(ended, _NO_TOKEN, following), rank < found
