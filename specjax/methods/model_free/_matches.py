"""Search for earlier occurrences of the last tokens of a row, on the device.

A *match* is a position in a sequence before which there are the same m tokens
as at the end of a row. Its *following* tokens are the S next tokens, or -1
after the end of the sequence.

  own_matches       in the row's own tokens, for all m together
  find, spread      in a datastore: two binary searches for each m, and up to K
                    matches from the range between their results

`_continuations` counts the following tokens.
"""

from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp
import numpy as np

from specjax.data.datastores import Datastore

_NO_TOKEN = -1
NOWHERE = -2  # id at positions before a row's first token; differs from all ids


def own_matches(tokens: jax.Array, lengths: jax.Array, longest: int,
                count: int, size: int) -> tuple[jax.Array, jax.Array]:
  """Returns the matches in the rows' own tokens.

  Args:
    tokens: token ids `[B, C]` int32.
    lengths: number `[B]` int32 of valid tokens.
    longest: largest length of a match.
    count: number K of returned matches per row. The longest matches are
      returned first, and the latest first among equally long ones.
    size: number S of tokens after a match.

  Returns:
    following: `[B, K, S]` int32, tokens after each match.
    common: `[B, K]` int32, length of each match, at most `longest`; 0 for
      entries without a match.
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
  # `top_k` is fast only for floats. float32 is exact for integers up to 2^24,
  # so larger numbers remain integers.
  exact = (longest + 1) * slots <= 2**24
  _, place = jax.lax.top_k(rank.astype(jnp.float32) if exact else rank,
                           min(count, slots))
  place = jnp.pad(place, ((0, 0), (0, count - place.shape[1])),
                  constant_values=slots - 1)  # the last slot has no match
  ahead = place[..., None] + 1 + jnp.arange(size)
  following = jnp.take_along_axis(
      tokens[:, None], jnp.minimum(ahead, slots - 1), axis=2)
  following = jnp.where(ahead < lengths[:, None, None], following, _NO_TOKEN)
  return following, jnp.take_along_axis(common, place, axis=1)


def find(store: Datastore, tokens: jax.Array, lengths: jax.Array,
         sizes: Sequence[int]) -> tuple[jax.Array, jax.Array]:
  """Finds the rows' last tokens in a datastore by binary search.

  Args:
    store: datastore.
    tokens: token ids `[B, C]` int32.
    lengths: number `[B]` int32 of valid tokens.
    sizes: the M lengths of the patterns, each at least 1 and at most the
      store's depth.

  Returns:
    first: `[B, M]` int32, start of the range of `store.suffixes` that begin
      with the pattern.
    found: `[B, M]` int32, size of the range; 0 if the row is shorter than the
      pattern.
  """
  chex.assert_rank([tokens, lengths], [2, 1])
  sizes, longest = np.array(sizes), max(sizes)
  suffixes, corpus = jnp.asarray(store.suffixes), jnp.asarray(store.tokens)
  column = np.arange(longest)
  place = lengths[:, None, None] - sizes[:, None] + column
  flat = jnp.maximum(place, 0).reshape(len(tokens), -1)
  pattern = jnp.take_along_axis(tokens, flat, axis=1, mode="clip").reshape(
      place.shape)
  # An id outside of the store's vocabulary sorts after all stored tokens.
  pattern = jnp.where(pattern < store.vocab_size, pattern, store.vocab_size + 1)
  # Each column's weight exceeds the sum of all later weights. So the first
  # difference determines the sign of the weighted sum.
  weights = np.where(column < sizes[:, None], 2 ** (longest - 1 - column), 0)

  def order(at):
    """Returns the signs `[B, 2, M]` of suffix minus pattern.

    Args:
      at: indices `[B, 2, M]` in `store.suffixes`.
    """
    start = suffixes.at[at].get(mode="clip")
    text = corpus.at[start[..., None] + column].get(mode="clip")
    signs = jnp.sign(text.astype(jnp.int32) - pattern[:, None])
    return jnp.sum(signs * weights, axis=-1, dtype=jnp.int32)

  def halve(_, bounds):
    low, high = bounds
    middle = low + (high - low) // 2
    # The lower bound is the first suffix that is not before the pattern. The
    # upper bound is the first suffix after all suffixes with the pattern.
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
  """Returns up to K evenly spaced matches from the range of `find`.

  The matches in the range are sorted by their following tokens. So evenly
  spaced matches have nearly the same frequencies of following tokens.

  Args:
    store: datastore.
    first: `[...]` int32, start of the range.
    found: `[...]` int32, size of the range.
    after: `[...]` int32, length of the pattern.
    count: maximal number K of matches.
    size: number S of tokens after a match.

  Returns:
    following: `[..., K, S]` int32, in sorted order; -1 after a document's end.
    alive: `[..., K]` bool, True for real matches.
  """
  rank, found = jnp.arange(count, dtype=jnp.int32), found[..., None]
  # rank * found // count, without integer overflow.
  steps = rank * (found // count) + rank * (found % count) // count
  at = first[..., None] + jnp.where(found > count, steps, rank)
  start = jnp.asarray(store.suffixes).at[at].get(mode="clip")
  ahead = (start + after[..., None])[..., None] + jnp.arange(size)
  following = jnp.asarray(store.tokens).at[ahead].get(mode="clip")
  following = following.astype(jnp.int32)
  ended = jnp.cumsum(following >= store.vocab_size, axis=-1) > 0
  return jnp.where(ended, _NO_TOKEN, following), rank < found
