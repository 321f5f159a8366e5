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
  """Returns `[..., V]`, the probabilities of `q [..., D]` as target tokens.

  A gather of the twins and a scatter of the few doubles: a scatter of all D
  would be slow where D is large.
  """
  doubles = vocabulary.doubles
  moved = q.at[..., vocabulary.twins].get(mode="fill", fill_value=0)
  return moved.at[..., vocabulary.to_target[doubles]].add(q[..., doubles])


def common_law(logits: jax.Array, vocabulary: VocabularyMap,
               transform: LogitsTransform, temperature: jax.Array | float
               ) -> jax.Array:
  """Returns q' `[..., V]` of the drafter's `logits [..., D]`, always
  normalised.

  Restriction commutes with the temperature. It comes before top-k, top-p and
  min-p, for which tokens with the same text are one: after them, a nucleus
  without common tokens would leave nothing to draft, and greedy drafting would
  stop wherever the likeliest token is not common. Either order is sound.

  Where the model gives no common token a chance, each of its ids of one gets
  the same: rows that are no law would make drafts of different lengths, for
  which greedy block verification is not exact.

  Args:
    logits: logits of the draft model.
    vocabulary: the map.
    transform: transform whose banned tokens are the target's.
    temperature: `[...]`, used where the transform has none.
  """
  kept = vocabulary.to_target < vocabulary.target_size
  if transform.banned:
    kept &= ~jnp.isin(vocabulary.to_target, jnp.array(transform.banned))
  logits = jnp.where(kept, logits, -jnp.inf)
  none = jnp.max(logits, axis=-1, keepdims=True) == -jnp.inf
  logits = jnp.where(
      none, jnp.where(vocabulary.to_target < vocabulary.target_size, 0.0,
                      -jnp.inf), logits)
  plain = LogitsTransform(temperature=transform.temperature)
  law = summed(plain(logits, temperature), vocabulary)
  if not (transform.top_k or transform.top_p < 1 or transform.min_p):
    return law
  cut = dataclasses.replace(transform, temperature=1.0, banned=())
  return cut(jnp.log(law))


def spelled(tokens: jax.Array, count: jax.Array, vocabulary: VocabularyMap,
            width: int) -> tuple[jax.Array, jax.Array]:
  """Returns E of target tokens and its length.

  Args:
    tokens: `[n]` int32, target ids.
    count: `[]` int32, how many of them count.
    vocabulary: the map.
    width: columns of the result.

  Returns:
    `[width]` int32, the first draft ids, and `[]` int32, how many there are,
    which may be more than `width`.
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
