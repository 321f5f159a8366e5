"""The pair that the contributions draft for, and what a contribution is."""

import dataclasses
import functools
from typing import Any

import untrained

import specjax as sj
from specjax import testing
from specjax.drafters import LanguageModel
from specjax.drafters import NetworkDrafter
from specjax.drafters import Paths
from specjax.drafters import Tree
from specjax.models.configuration import RecurrentLayers

VOCAB = 5
WIDTH, HEADS = 16, 3
UNEVEN = (-1, 0, 1, 2, 1, 0, 5, 0)  # depth-first; the first child is deepest
CHAIN = (-1, 0, 1, 2)


@functools.cache
def pair(noise: float = 0.5) -> testing.TinyPair:
  """A target and a drafter that agree often, but not always."""
  return testing.tiny_pair(VOCAB, noise=noise, seed=2)


@functools.cache
def disturbed(heads):
  """Parameters of untrained heads, each with laws of its own."""
  return untrained.disturbed(heads, pair().params["target"], 0.4)


@dataclasses.dataclass(frozen=True)
class Contributed:
  """A drafter with a rule that is exact for it, and what it drafts for.

  Attributes:
    drafter: the drafter.
    rule: a rule that is exact for it, the strongest as a rule.
    target: the model; None: that of `pair`.
    params: of the decoder; None: those of `pair`.
    context: from a number of rows to what the drafter reads of each.
    controller: of the decoder.
  """

  drafter: Any
  rule: Any
  target: Any = None
  params: Any = None
  context: Any = lambda rows: None
  controller: Any = None

  @property
  def model(self):
    return self.target or pair().target

  @property
  def parameters(self):
    return self.params or pair().params


def with_model(shape):
  return NetworkDrafter(
      network=LanguageModel(model=pair().drafter), shape=shape)


def paths(models):
  worse = pair(1.0).params["drafter"]
  own = (pair().params["drafter"], worse)[:models]
  return dict(
      drafter=Paths(models=(pair().drafter,) * models, num_paths=3, length=2),
      params={**pair().params, "drafter": own})


def with_cache(cache):
  model = sj.models.Transformer(pair().target.config, cache=cache)
  return Contributed(NetworkDrafter(
      network=LanguageModel(model=model),
      shape=Tree(parents=UNEVEN)),
                     sj.verifiers.Traversal(), model)


class Deeper(sj.models.Transformer):
  """Three layers; a class of its own, for its greedy texts are others."""


@functools.cache
def deep():
  """A target with layers to leave out, and its parameters."""
  found = testing.tiny_pair(VOCAB, seed=2, scale=12.0, layers=3)
  return Deeper(found.target.config), found.params["target"]


class Mixture(sj.models.Transformer):
  """A layer with experts; a class of its own, for its greedy texts are others.
  """


@functools.cache
def mixture() -> testing.TinyPair:
  """A target and a drafter with experts, which differ in some of them."""
  found = testing.tiny_pair(VOCAB, seed=2, experts=dict(
      count=4, chosen=2, width=16, shared_width=8))
  return found._replace(**{name: Mixture(found.target.config)
                           for name in ("target", "drafter")})


def on_mixture(drafter, rule):
  """A drafter of the mixture's own model, or of no model."""
  return Contributed(drafter, rule, mixture().target, mixture().params)


def part_of_target(make, rule, own=lambda target: target):
  """A drafter that is made of the target: `make(model)`."""
  model, target = deep()
  return Contributed(make(model), rule, model,
                     {"target": target, "drafter": own(target)})


class Sharing(sj.models.Transformer):
  """Four layers of Gemma 4, of which two share keys; a class of its own."""


@functools.cache
def sharing():
  """A target with keys of two shapes, and its parameters."""
  found = testing.tiny_pair(
      VOCAB, seed=2, layers=4, windows=(0, 4, 4, 0), local_rope_theta=20.0,
      global_head_dim=12, shared_layers=2, wide_shared=True, value_norm=True,
      layer_inputs=3, layer_scales=True, post_norm=True, qk_norm="head")
  return Sharing(found.target.config), found.params["target"]


@functools.cache
def _hybrid():
  """Parameters of a target with recurrent layers, and their configuration."""
  states = RecurrentLayers(
      kinds=("delta", "conv", "attention"), taps=3, heads=2, key_heads=1,
      key_dim=4, value_dim=6)
  model = testing.tiny_pair(VOCAB, seed=2, layers=3, recurrent=states)
  return model.params["target"], states


def on_states(case: Contributed) -> Contributed:
  """The same drafter for a target with recurrent layers."""
  params, states = _hybrid()
  config = dataclasses.replace(case.model.config, layers=3, recurrent=states)
  return dataclasses.replace(
      case, target=sj.models.Transformer(config),
      params={**case.parameters, "target": params})
