"""The pair that the contributions draft for, and what a contribution is."""

import contextvars
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


# Fields of a target of another kind than dense, which `of_kind` selects.
KINDS = {
    "experts": dict(experts=dict(
        count=4, chosen=2, width=16, shared_width=8)),
    "recurrent target": dict(layers=3, recurrent=RecurrentLayers(
        kinds=("delta", "conv", "attention"), taps=3, heads=2, key_heads=1,
        key_dim=4, value_dim=6))}
_KIND = contextvars.ContextVar("kind", default="dense")


def _of_each_kind(make):
  """Caches the results of `make` for each kind of target."""
  cached = functools.cache(lambda kind, *args: make(*args))
  return lambda *args: cached(_KIND.get(), *args)


def _drawn(**config):
  """A target and a drafter of the selected kind."""
  return testing.tiny_pair(
      VOCAB, seed=2, **config | KINDS.get(_KIND.get(), {}))


@_of_each_kind
def pair(noise: float = 0.5) -> testing.TinyPair:
  """A target and a drafter that agree often, but not always.

  Recurrent models are targets only, so their drafter has attention, and agrees
  by chance.
  """
  found = _drawn(noise=noise)
  if not found.drafter.config.recurrent:
    return found
  other = testing.tiny_pair(VOCAB, noise=noise, seed=2)
  return found._replace(drafter=other.drafter, params={
      **found.params, "drafter": other.params["drafter"]})


@_of_each_kind
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


@_of_each_kind
def deep():
  """A target with layers to leave out, and its parameters."""
  found = _drawn(scale=12.0, layers=3)
  return Deeper(found.target.config), found.params["target"]


def part_of_target(make, rule, own=lambda target: target):
  """A drafter that is made of the target: `make(model)`."""
  model, target = deep()
  return Contributed(make(model), rule, model,
                     {"target": target, "drafter": own(target)})


class Sharing(sj.models.Transformer):
  """Four layers of Gemma 4, of which two share keys; a class of its own."""


@_of_each_kind
def sharing():
  """A target with keys of two shapes, and its parameters."""
  found = _drawn(
      layers=4, windows=(0, 4, 4, 0), local_rope_theta=20.0,
      global_head_dim=12, shared_layers=2, wide_shared=True, value_norm=True,
      layer_inputs=3, layer_scales=True, post_norm=True, qk_norm="head")
  return Sharing(found.target.config), found.params["target"]


def of_kind(kind, make):
  """The drafter of `make` for targets of one of `KINDS`, without a controller.

  A controller does not read the target, but its costs are those of the dense
  one.
  """
  token = _KIND.set(kind)
  try:
    case = make()
    return dataclasses.replace(case, target=case.model, params=case.parameters,
                               controller=None)
  finally:
    _KIND.reset(token)
