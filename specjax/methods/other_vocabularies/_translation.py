"""Translation of distributions and tokens between two vocabularies.

One vocabulary is the draft model's, the other is the target's. Two tokens are
equal if they have the same bytes. `token_intersection` has the formulas, and
`data.VocabularyMap` has the tables.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp

from specjax.data.vocabularies import VocabularyMap
from specjax.sampling import LogitsTransform


def summed(q: jax.Array, vocabulary: VocabularyMap) -> jax.Array:
  """Translates probabilities of draft tokens to probabilities of target tokens.

  A target token gets the sum of the probabilities of all draft tokens with the
  same bytes. One of these draft tokens is called its twin, and the others are
  called doubles. Doubles are rare. The function gathers the twins and scatters
  only the doubles, because a scatter of all D entries is slow.

  Args:
    q: probabilities `[..., D]` of the D tokens of the draft model.
    vocabulary: map between the vocabularies.

  Returns:
    Probabilities `[..., V]` of the V tokens of the target. Their sum is less
    than 1 if the target lacks tokens of the draft model.
  """
  doubles = vocabulary.doubles
  moved = q.at[..., vocabulary.twins].get(mode="fill", fill_value=0)
  return moved.at[..., vocabulary.to_target[doubles]].add(q[..., doubles])


def common_law(logits: jax.Array, vocabulary: VocabularyMap,
               transform: LogitsTransform, temperature: jax.Array | float
               ) -> jax.Array:
  """Returns the draft distribution over the target's tokens.

  The draft model's distribution is first restricted to the tokens that both
  vocabularies contain (common tokens), and then truncated by top-k, top-p and
  min-p. In the other order, the truncation could remove all common tokens. Both
  orders are lossless.

  If all common tokens have probability 0, the draft distribution is uniform
  over the common tokens. An all-zero distribution would shorten the draft, and
  greedy block verification is not exact for drafts of different lengths.

  Args:
    logits: logits `[..., D]` of the D tokens of the draft model.
    vocabulary: map between the vocabularies.
    transform: transform from logits to probabilities. Its banned tokens are ids
      of the target.
    temperature: temperatures `[...]`, used if the transform has no temperature.

  Returns:
    Probabilities `[..., V]` of the V tokens of the target.
  """
  common = vocabulary.to_target < vocabulary.target_size
  allowed = common
  if transform.banned:
    allowed = common & ~jnp.isin(
        vocabulary.to_target, jnp.array(transform.banned))
  logits = jnp.where(allowed, logits, -jnp.inf)
  none = jnp.max(logits, axis=-1, keepdims=True) == -jnp.inf
  logits = jnp.where(none, jnp.where(common, 0.0, -jnp.inf), logits)
  plain = LogitsTransform(temperature=transform.temperature)
  law = summed(plain(logits, temperature), vocabulary)
  if not (transform.top_k or transform.top_p < 1 or transform.min_p):
    return law
  cut = dataclasses.replace(transform, temperature=1.0, banned=())
  return cut(jnp.log(law))


def spelled(tokens: jax.Array, count: jax.Array, vocabulary: VocabularyMap,
            width: int) -> tuple[jax.Array, jax.Array]:
  """Translates target tokens to draft tokens, one target token at a time.

  A target token is replaced by the draft token with the same bytes. If there is
  no such token, it is replaced by several draft tokens that together have its
  bytes.

  Args:
    tokens: `[n]` int32, target tokens.
    count: `[]` int32, number of valid tokens.
    vocabulary: map between the vocabularies.
    width: maximum number of returned draft tokens.

  Returns:
    Two arrays. First, `[width]` int32, the draft tokens, cut to `width` or
    padded with zeros. Second, `[]` int32, the number of all draft tokens, which
    may exceed `width`.
  """
  chex.assert_rank(tokens, 1)
  starts = vocabulary.offsets[tokens]
  sizes = vocabulary.offsets[tokens + 1] - starts
  sizes = jnp.where(jnp.arange(tokens.shape[0]) < count, sizes, 0)
  ends = jnp.cumsum(sizes)
  slot = jnp.arange(width, dtype=jnp.int32)
  token = jnp.searchsorted(ends, slot, side="right")
  token = jnp.minimum(token, tokens.shape[0] - 1)
  at = starts[token] + slot - (ends - sizes)[token]
  ids = vocabulary.pieces.at[at].get(mode="clip")
  return jnp.where(slot < ends[-1], ids, 0), ends[-1].astype(jnp.int32)
