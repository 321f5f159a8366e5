"""Drafters that are made of others, or of the target."""

from contributed import Contributed
from contributed import pair
from contributed import part_of_target
from contributed import with_model
import contributed_texts as texts
import newcomers

import specjax as sj
from specjax.drafters import Cascade
from specjax.drafters import Chain
from specjax.drafters import draft_model
from specjax.drafters import Fallback
from specjax.drafters import Hierarchy
from specjax.drafters import Merge
from specjax.drafters import NGram
from specjax.drafters import Recycling


def skipping():
  left = sj.models.Sublayers.without(3, attention=[1], mlp=[2])
  return part_of_target(
      lambda model: draft_model(sj.models.Shortened(model, left), gamma=3),
      sj.verifiers.GreedyBlock())


def quantized():
  """The target's own copy, with keys and values of few bits."""
  model = sj.models.Transformer(pair().target.config,
                                cache=sj.caches.QuantizedKV(bits=4))
  own = sj.models.quantize(pair().params["target"], bits=4)
  return Contributed(
      draft_model(model=model, gamma=3), sj.verifiers.GreedyBlock(),
      params={**pair().params, "drafter": own})


def window():
  """Autoregressive: what is seen of a text does not depend on the round."""
  cache = sj.caches.Streaming(sinks=1, window=3, slack=6)
  return Contributed(
      draft_model(model=sj.models.Transformer(
          pair().target.config, cache=cache), gamma=3),
      sj.verifiers.GreedyBlock(),
      params={**pair().params, "drafter": pair().params["target"]})


def hierarchy():
  """TriForce: a tiny drafter, the target with few chunks, the target."""
  tiny = sj.models.Transformer(
      pair().drafter.config,
      cache=sj.caches.Streaming(sinks=1, window=4, slack=16))
  return Contributed(
      Hierarchy(view=sj.models.cache_views.Retrieved(
                    budget=4, chunk=2, recent=3),
                drafter=draft_model(model=tiny, gamma=1), gamma=3),
      sj.verifiers.Block(),
      params={**pair().params, "drafter": {
          "target": pair().params["target"],
          "drafter": pair().params["drafter"]}})


def cascade():
  """Of three stages."""
  middle = pair(0.3)
  return Contributed(
      Cascade(model=middle.drafter, drafter=NGram(gamma=2), gamma=3),
      sj.verifiers.GreedyBlock(),
      params={**pair().params,
              "drafter": {"target": middle.params["drafter"]}})


def fallback():
  """N-grams, which often have nothing, and a language model."""
  return Contributed(
      Fallback(first=NGram(gamma=2, min_ngram=2),
               second=with_model(Chain(3))),
      sj.verifiers.Block(),
      params={**pair().params, "drafter": (None, pair().params["drafter"])})


def fallback_to_other_tokens():
  """It misses what the n-grams drafted, and rounds without a draft."""
  other = texts.token_intersection()
  return Contributed(
      Fallback(first=NGram(gamma=2, min_ngram=2), second=other.drafter),
      sj.verifiers.Block(),
      params={**other.params, "drafter": (None, other.params["drafter"])},
      controller=sj.decoding.Controller(
          lengths=(0, 3), seconds=(1.0, 1.1), first=(1.0, 1.05)))


def merge():
  """Drawn and deterministic tokens, and a deterministic tree with state."""
  return Contributed(
      Merge(drafters=(with_model(Chain(2)), NGram(gamma=2),
                      Recycling(parents=(-1, 0, 0, 1)))),
      sj.verifiers.Traversal(),
      params={**pair().params, "drafter": (
          pair().params["drafter"], None, None)})


def stage():
  middle = pair(0.3)
  inner = sj.Decoder(
      target=middle.drafter, verifier=sj.verifiers.Block(),
      drafter=with_model(Chain(2)))
  own = {"target": middle.params["drafter"],
         "drafter": pair().params["drafter"]}
  return Contributed(
      newcomers.Stage(inner=inner, gamma=3), sj.verifiers.Block(),
      params={**pair().params, "drafter": own})
