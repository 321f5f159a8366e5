"""Drafters that read texts, and drafters with other vocabularies."""

import dataclasses
import functools

from contributed import Contributed
from contributed import pair
from contributed import VOCAB
import jax
import jax.numpy as jnp
import newcomers
import numpy as np

import specjax as sj
from specjax import testing
from specjax.data import datastores
from specjax.drafters import draft_model
from specjax.drafters import Reference
from specjax.drafters import StringMatch
from specjax.drafters import TokenIntersection

# Another vocabulary than the target's: of its tokens a has two ids, abca is
# three draft tokens, d is none, and the drafter's bc and ca are no token. In
# its place a drafter writes ab as two.
TARGET_TOKENS = testing.ListTokenizer((b"a", b"abca", b"c", b"b", b"d"))
WRITTEN_TOKENS = testing.ListTokenizer((b"a", b"b", b"c", b"ab", b"d"))
DRAFT_TOKENS = testing.ListTokenizer((b"c", b"a", b"b", b"a", b"bc", b"ca"))


def other_vocabulary(drafter, rule, like, in_params, **kwargs):
  like = jnp.array(like)  # whose weights a draft token has
  params = pair().params["drafter"]
  own = {**params, "embedding": params["embedding"][like],
         "head": params["head"][:, like]}
  model = sj.models.Transformer(dataclasses.replace(
      pair().drafter.config, vocab_size=len(like)))
  return Contributed(
      drafter(model=model, gamma=3, **kwargs), rule,
      params={**pair().params, "drafter": in_params(own)})


def token_intersection():
  vocabulary = sj.data.map_vocabularies(DRAFT_TOKENS, TARGET_TOKENS)
  return other_vocabulary(
      TokenIntersection, sj.verifiers.GreedyBlock(), [2, 0, 3, 0, 1, 4],
      lambda own: {"model": own, "vocabulary": vocabulary}, target_size=VOCAB)


def string_match():
  return other_vocabulary(
      StringMatch, sj.verifiers.TargetWalk(), [2, 0, 1, 0, 3, 4],
      lambda own: own, lookback=3,
      tokenizers=sj.data.Retokenizer(DRAFT_TOKENS, WRITTEN_TOKENS))


def vocabulary_subset():
  model = sj.models.VocabularySubset(pair().drafter)
  own = model.parameters(pair().params["drafter"], [0, 2, 3])
  return Contributed(
      draft_model(model=model, gamma=3), sj.verifiers.GreedyBlock(),
      params={**pair().params, "drafter": own})


@functools.cache
def store():
  """A datastore of random documents, with every pair of tokens."""
  rng = np.random.default_rng(0)
  return jax.device_put(datastores.index(
      [rng.integers(VOCAB, size=n) for n in (1, 40, 7, 200)], VOCAB, depth=4))


def counted(cls, rule, **kwargs):
  drafter = cls(gamma=3, max_matches=8, vocab_size=VOCAB, **kwargs)
  return Contributed(drafter, rule, params={**pair().params,
                                            "drafter": store()})


def references():
  text = sj.drafters.reference_texts([[[3, 0, 2, 4], [1, 1, 2, 0, 2, 0]]])
  return Contributed(
      Reference(gamma=3, own_text=True, vocab_size=VOCAB), sj.verifiers.Token(),
      context=lambda rows: {"reference": np.tile(text, (rows, 1))})


def reference():
  text = [3, 0, 2, 4, 1, 1, 2, 0, -1]
  return Contributed(
      newcomers.Reference(gamma=3, vocab_size=VOCAB), sj.verifiers.Block(),
      context=lambda rows: {"reference": np.tile(text, (rows, 1))})


def stored_laws():
  """What a batch of `objectives.StoredLaws` has besides two rows of tokens."""
  rng = np.random.default_rng(0)
  shape = 2, 13
  return {"ids": rng.integers(-1, VOCAB, (*shape, 2)).astype(np.int32),
          "probs": np.full((*shape, 2), 0.4, np.float32),
          "drawn": rng.integers(-1, VOCAB, shape).astype(np.int32),
          "weights": (np.arange(13) > np.zeros(shape)).astype(np.float32)}
