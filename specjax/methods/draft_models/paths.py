"""Drafter that merges paths from one or several draft models into a tree.

SpecInfer (Miao et al. 2023, arXiv:2305.09781).
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from specjax import interfaces
from specjax import verifiers
from specjax.decoding import constraining as constraints_lib
from specjax.decoding import rounds
from specjax.decoding.prefill import read_prompt
from specjax.interfaces import Drafter
from specjax.interfaces import Model
from specjax.methods import _common
from specjax.methods import _trees
from specjax.methods.draft_models.language_model import LanguageModel
from specjax.methods.networks import Params
from specjax.methods.strategy import Strategy
from specjax.sampling import LogitsTransform
from specjax.sampling import UNIFORMS_A_DRAW
from specjax.trees import shapes
from specjax.trees import topology
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.types import Verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paths(Drafter):
  """Samples K independent chains (paths) and packs them into a prefix tree.

  Path k is sampled from model k mod len(models). The tree has one node for each
  drafted token, see `topology.prefix_tree`. Its shape depends on the sampled
  tokens: if several paths begin with the same tokens, their continuations are
  below the same node. This keeps decoding lossless, because the probability of
  accepting a token does not depend on the tree below it.

  `params["drafter"]` is a tuple with the parameters of each model.

  Attributes:
    models: draft models over the target's vocabulary.
    num_paths: number K of paths, at least one for each model.
    length: number of tokens of a path.
    transform: transform of the draft logits; None uses the decoder's transform.
  """

  models: tuple[Model, ...]
  num_paths: int
  length: int
  transform: LogitsTransform | None = None

  def __post_init__(self):
    object.__setattr__(self, "models", tuple(self.models))
    if not 1 <= len(self.models) <= self.num_paths:
      raise ValueError(f"models has {len(self.models)} entries and num_paths "
                       f"is {self.num_paths}; give at least one model, and at "
                       "least one path for each model")
    if self.length < 1:
      raise ValueError(f"length is {self.length}; it must be at least 1")

  @property
  def _is_iid(self) -> bool:
    return len(self.models) == 1

  @property
  def provides(self) -> tuple[str, ...]:
    # With several models, q of a token also depends on the model of its path.
    return interfaces.provided(
        chain=self.num_paths == 1, iid=self._is_iid, conditional=True,
        autoregressive=self._is_iid)

  @property
  def num_nodes(self) -> int:
    return 1 + self.num_paths * self.length

  @property
  def num_uniforms(self) -> int:
    return UNIFORMS_A_DRAW * self.num_paths * self.length

  @property
  def context_length(self) -> int:
    return min(model.context_length for model in self.models)

  def bind(self, target: Model, transform: LogitsTransform
           ) -> "Paths":
    for model in self.models:
      _common.check_vocabulary(model, target)
    return _common.with_transform(self, transform)

  def init(self, params: Params, prompt: Prompt, prefill_output: ModelOutput
           ) -> Any:
    del prefill_output
    params = params["drafter"]
    if not isinstance(params, (tuple, list)) or len(params) != len(self.models):
      raise ValueError(f"params['drafter'] must be a tuple of the parameters "
                       f"of {len(self.models)} models")
    return tuple(read_prompt(model, own, prompt).cache
                 for model, own in zip(self.models, params))

  def propose(self, params: Params, uniforms: jax.Array, state: DecodeState
              ) -> tuple[Draft, Any]:
    """Drafts K paths per row.

    Node 1 + d * K + k is token d = 0, 1, ... of path k = 0..K-1.
    """
    draw = _trees.drawer("iid", self.transform, state)
    batch, tokens, probs, caches, order = state.lengths.shape[0], [], [], [], []
    used = 0
    for m, (model, own, cache) in enumerate(
        zip(self.models, params["drafter"], state.drafter)):
      paths = range(m, self.num_paths, len(self.models))
      bundle = shapes.full_tree((len(paths), *[1] * (self.length - 1)))
      # After `commit`, the cache of a single model lacks at most two tokens.
      # With several models, the accepted path may come from another model. Then
      # this cache lacks the path and the next token: up to `length` + 1 tokens.
      logits, _, cache = _common.read_last(
          model, own, state, cache, size=2 if self._is_iid else self.length + 1,
          more=len(paths) * (self.length - 1))
      count = UNIFORMS_A_DRAW * (len(bundle) - 1)
      step, carry, logits = constraints_lib.steered(
          self.transform.constraints, state.constraints,
          functools.partial(
              LanguageModel(model=model).step, {"drafter": own}), cache, logits)
      drawn, law, (cache, _) = _trees.grow(
          step, carry, logits, uniforms[:, used:used + count], bundle, draw)
      used += count
      shape = (batch, self.length, len(paths))
      tokens.append(drawn.reshape(shape))
      probs.append(law.reshape(*shape, -1))
      caches.append(cache if self._is_iid else cache.settle())
      order += paths
    order = np.argsort(order)
    tokens = jnp.concatenate(tokens, axis=2)[:, :, order]
    probs = jnp.concatenate(probs, axis=2)[:, :, order]

    parents = jax.vmap(topology.prefix_tree)(tokens.swapaxes(1, 2))
    draft = jax.vmap(Draft.tree)(
        rounds.roots(state), parents, tokens.reshape(batch, -1),
        probs.reshape(batch, self.num_nodes - 1, -1))
    return draft, tuple(caches)

  def commit(self, params: Params, drafter: chex.ArrayTree, draft: Draft,
             verdict: Verdict, target_output: ModelOutput, count: jax.Array,
             own: jax.Array) -> Any:
    """Returns the cache of each model for the next round.

    The cache of a single model keeps the accepted path. The caches of several
    models do not change; `propose` reads the last committed tokens again.
    """
    del params, draft, target_output
    if not self._is_iid:
      return drafter
    size = self.num_paths * (self.length - 1)
    slots = jnp.arange(-1, self.num_nodes - 1, dtype=jnp.int32)
    slots = jnp.tile(jnp.clip(slots, 0, max(size - 1, 0)), (count.shape[0], 1))
    return (_common.keep_path(drafter[0], slots, verdict.path, size, count),)

  def param_specs(self, axis: str, size: int) -> Any:
    return tuple(model.param_specs(axis, size)
                 for model in self.models)


def merged_specinfer(models: Sequence[Model], length: int,
                     num_paths: int | None = None) -> Strategy:
  """Drafts paths of several models, merged into one tree.

  Miao et al. 2023 (arXiv:2305.09781, merge-based speculation). The paper tunes
  the models one after another, each on the errors of the previous models.
  `experiments/boost_drafters.py` does the same.

  >>> from specjax import testing
  >>> pair = testing.MarkovModel(7), testing.MarkovModel(7)
  >>> merged_specinfer(pair, length=3).drafter.num_nodes
  7

  Args:
    models: draft models; `params["drafter"]` is the tuple of their parameters.
    length: number of tokens of a path.
    num_paths: number of paths; path k is sampled from model k mod len(models).
      None: one path per model.
  """
  models = tuple(models)
  paths = Paths(
      models=models, num_paths=num_paths or len(models), length=length)
  return Strategy(paths, verifiers.Recursive())
