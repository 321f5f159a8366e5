"""Translation of distributions and tokens between two vocabularies.

See `token_intersection` for the formulas and `data.VocabularyMap` for the
tables.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp

from specjax.data.vocabularies import VocabularyMap
from specjax.sampling import LogitsTransform


def summed(q: jax.Array, vocabulary: VocabularyMap) -> jax.Array:
  """Returns the probabilities of target tokens, from those of draft tokens.

  A target token's probability is the sum over all draft tokens with its bytes:
  one twin, and rarely doubles. The twins are gathered and only the doubles are
  scattered, because a scatter of all D entries is slow.

  Args:
    q: probabilities `[..., D]` of the draft model's tokens.
    vocabulary: map between the vocabularies.

  Returns:
    Probabilities `[..., V]` of the target's tokens.
  """
  doubles = vocabulary.doubles
  moved = q.at[..., vocabulary.twins].get(mode="fill", fill_value=0)
  return moved.at[..., vocabulary.to_target[doubles]].add(q[..., doubles])


def common_law(logits: jax.Array, vocabulary: VocabularyMap,
               transform: LogitsTransform, temperature: jax.Array | float
               ) -> jax.Array:
  """Returns the distribution over target tokens that drafts are sampled from.

  The draft model's distribution is restricted to the tokens that both
  vocabularies contain, then cut by top-k, top-p and min-p. In the other order,
  the cut could leave no common token to draft. Both orders are exact.

  If no common token has a probability above 0, all common tokens of the model
  get equal probabilities. A row of zeros would end the draft, and greedy block
  verification is not exact for drafts of different lengths.

  Args:
    logits: logits `[..., D]` of the draft model.
    vocabulary: map between the vocabularies.
    transform: transform whose banned tokens are the target's.
    temperature: temperatures `[...]` for a transform without a temperature.

  Returns:
    Probabilities `[..., V]` of the target's tokens.
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
  """Returns target tokens spelled in the draft model's vocabulary.

  See `token_intersection` for the spelling E of a token.

  Args:
    tokens: `[n]` int32, target ids.
    count: `[]` int32, number of valid tokens.
    vocabulary: map between the vocabularies.
    width: number of columns of the result.

  Returns:
    `[width]` int32, the first draft ids, and `[]` int32, the number of all
    draft ids, which may exceed `width`.
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
