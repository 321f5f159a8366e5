"""Search for earlier occurrences of the last tokens of a sequence.

The search runs on the device, for all rows of a batch. A *match* of length m is
an earlier occurrence of the last m tokens of the row's sequence. Its
*following* tokens are the S tokens after the match. -1 stands for tokens after
the end of the sequence.

  own_matches       searches the row's own tokens, for all m in one pass
  find              searches a datastore (a corpus with a suffix array): for
                    each m, two binary searches find the range of matches
  spread            selects up to K matches from the range that `find` returns

`_continuations` counts the following tokens.
"""

from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp
import numpy as np

from specjax.data.datastores import Datastore

_NO_TOKEN = -1
# Id that stands for positions before the first token of a row. It differs from
# all token ids and from the padding -1, so it never matches.
NOWHERE = -2


def own_matches(tokens: jax.Array, lengths: jax.Array, longest: int,
                count: int, size: int) -> tuple[jax.Array, jax.Array]:
  """Finds earlier occurrences of the last tokens of B rows in these rows.

  Each earlier position of a row is a match. Its length is the number of tokens
  up to this position that equal the last tokens of the row.

  Args:
    tokens: token ids `[B, C]` int32, with C columns.
    lengths: number `[B]` int32 of valid tokens per row.
    longest: maximum length of a match; longer matches count as this length.
    count: number K of returned matches per row. The longest matches come first;
      among equally long matches, the latest comes first.
    size: number S of returned tokens after each match.

  Returns:
    following: `[B, K, S]` int32, tokens after each match; -1 after the end of
      the row.
    common: `[B, K]` int32, length of each match; 0 if the entry is not a match.
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
  # `jax.lax.top_k` is fast only for floats. So the ranks are converted to
  # float32, unless they can exceed 2^24, the limit of exact integers.
  exact = (longest + 1) * slots <= 2**24
  _, place = jax.lax.top_k(rank.astype(jnp.float32) if exact else rank,
                           min(count, slots))
  # Missing entries get the last slot, at which no match ends.
  place = jnp.pad(place, ((0, 0), (0, count - place.shape[1])),
                  constant_values=slots - 1)
  ahead = place[..., None] + 1 + jnp.arange(size)
  following = jnp.take_along_axis(
      tokens[:, None], jnp.minimum(ahead, slots - 1), axis=2)
  following = jnp.where(ahead < lengths[:, None, None], following, _NO_TOKEN)
  return following, jnp.take_along_axis(common, place, axis=1)


def find(store: Datastore, tokens: jax.Array, lengths: jax.Array,
         sizes: Sequence[int]) -> tuple[jax.Array, jax.Array]:
  """Finds the last tokens of B rows in a datastore by binary search.

  The datastore has a suffix array: the start positions of all suffixes of a
  corpus, sorted by their first tokens. In this array, the suffixes that begin
  with a pattern form a contiguous range.

  Args:
    store: datastore.
    tokens: token ids `[B, C]` int32, with C columns.
    lengths: number `[B]` int32 of valid tokens per row.
    sizes: M pattern lengths. The pattern of length m is the last m tokens of a
      row; m is at least 1 and at most `store.depth`.

  Returns:
    first: `[B, M]` int32, start of the range in `store.suffixes` for each
      pattern.
    found: `[B, M]` int32, number of suffixes in the range; 0 if the row is
      shorter than the pattern.
  """
  chex.assert_rank([tokens, lengths], [2, 1])
  sizes, longest = np.array(sizes), max(sizes)
  suffixes, corpus = jnp.asarray(store.suffixes), jnp.asarray(store.tokens)
  column = np.arange(longest)
  place = lengths[:, None, None] - sizes[:, None] + column
  flat = jnp.maximum(place, 0).reshape(len(tokens), -1)
  pattern = jnp.take_along_axis(tokens, flat, axis=1, mode="clip").reshape(
      place.shape)
  # A pattern with an id outside of the store's vocabulary must not match. So
  # the id is replaced by an id that is larger than all stored ids.
  pattern = jnp.where(pattern < store.vocab_size, pattern, store.vocab_size + 1)
  # Suffix and pattern are compared lexicographically by the weighted sum of the
  # signs of their differences. Each column's weight exceeds the sum of all
  # later weights, so the first difference determines the sign of the sum.
  weights = np.where(column < sizes[:, None], 2 ** (longest - 1 - column), 0)

  def order(at):
    """Compares suffixes of the corpus with the patterns.

    Args:
      at: indices `[B, 2, M]` in `store.suffixes`, two for each pattern.

    Returns:
      `[B, 2, M]` int32, negative if the suffix sorts before the pattern, 0 if
      it begins with the pattern, positive if it sorts after the pattern.
    """
    start = suffixes.at[at].get(mode="clip")
    text = corpus.at[start[..., None] + column].get(mode="clip")
    signs = jnp.sign(text.astype(jnp.int32) - pattern[:, None])
    return jnp.sum(signs * weights, axis=-1, dtype=jnp.int32)

  def halve(_, bounds):
    low, high = bounds
    middle = low + (high - low) // 2
    # Two searches run together. Search 0 finds the first suffix that does not
    # sort before the pattern. Search 1 finds the first suffix that sorts after
    # the pattern.
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
  """Returns up to K evenly spaced matches from a range of a suffix array.

  The range contains all matches of a pattern, sorted by their following tokens.
  So an evenly spaced sample has nearly the same frequencies of following tokens
  as the range.

  Args:
    store: datastore with the suffix array.
    first: `[...]` int32, start of the range, from `find`.
    found: `[...]` int32, size of the range, from `find`.
    after: `[...]` int32, length of the pattern.
    count: maximum number K of matches.
    size: number S of returned tokens after each match.

  Returns:
    following: `[..., K, S]` int32, tokens after each match, in sorted order; -1
      after the end of a document.
    alive: `[..., K]` bool, False for entries that are not a match.
  """
  rank, found = jnp.arange(count, dtype=jnp.int32), found[..., None]
  # The result is rank * found // count. The product could overflow int32, so
  # `found` is divided first.
  steps = rank * (found // count) + rank * (found % count) // count
  at = first[..., None] + jnp.where(found > count, steps, rank)
  start = jnp.asarray(store.suffixes).at[at].get(mode="clip")
  ahead = (start + after[..., None])[..., None] + jnp.arange(size)
  following = jnp.asarray(store.tokens).at[ahead].get(mode="clip")
  following = following.astype(jnp.int32)
  ended = jnp.cumsum(following >= store.vocab_size, axis=-1) > 0
  return jnp.where(ended, _NO_TOKEN, following), rank < found
