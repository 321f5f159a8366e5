"""Merges the drafts of several drafters into one tree.

This is the merge of SpecInfer (Miao et al. 2023, arXiv:2305.09781), for any
drafters: language models, cascades, n-grams, trees of the most likely tokens.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import interfaces
from specjax.decoding import rounds
from specjax.interfaces import Drafter
from specjax.interfaces import Model
from specjax.interfaces import Verifier
from specjax.methods import stop_rules
from specjax.methods.combined import _combined
from specjax.methods.networks import Params
from specjax.methods.strategy import Strategy
from specjax.methods.strategy import TRAVERSAL
from specjax.sampling import LogitsTransform
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.verifiers import tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Merge(_combined.Combined):
  """Merges drafts below one root; equal prefixes share nodes.

  The prefix of a node consists of the tokens on its path. If several nodes have
  equal prefixes, all their children become children of the first such node. A
  verifier tries these children in the order of the drafters. The later nodes
  with this prefix remain as leaves. A verifier never accepts such a leaf, but
  its rejection changes the residual distribution. So dropping a sampled leaf
  would bias the output, see `topology.prefix_tree`.

  The drafters use independent uniforms. So a node's distribution in its
  drafter's draft is also its distribution given all nodes before it. Put
  sampled drafts before deterministic ones, because deterministic drafts have no
  disadvantage from being tried later (Hu et al. 2025, arXiv:2502.18779).

  `params["drafter"]` is a tuple of the drafters' parameters.

  Attributes:
    drafters: two or more drafters. A drafter with a state must provide
      "follows", see `interfaces.CAPABILITIES`. Stop rules must not store
      anything between rounds.
  """

  drafters: tuple[Drafter, ...]


  def __post_init__(self):
    object.__setattr__(self, "drafters", tuple(self.drafters))
    if len(self.drafters) < 2:
      raise ValueError(f"drafters has {len(self.drafters)} entries; give at "
                       "least two")
    for rule in interfaces.contained(self.drafters):
      if isinstance(rule, stop_rules.StopRule) and rule.learns:
        raise ValueError(
            f"stop is {type(rule).__name__}, a rule that is updated when its "
            "chains are verified, but a merge drafts a tree; use a rule "
            "without memory, such as Confidence")

  @property
  def members(self) -> tuple[Drafter, ...]:
    return self.drafters

  @property
  def num_nodes(self) -> int:
    return 1 + sum(part.num_nodes - 1 for part in self.drafters)

  def bind(self, target: Model, transform: LogitsTransform) -> "Merge":
    return dataclasses.replace(self, drafters=self.bound(target, transform))

  def propose(self, params: Params, uniforms: jax.Array, state: DecodeState
              ) -> tuple[Draft, tuple[Any, ...]]:
    drafts, states = zip(*(self.asked(i, params, uniforms, state)
                           for i in range(len(self.drafters))))
    before = np.cumsum([0, *(part.num_nodes - 1 for part in self.drafters)])
    join = lambda arrays: jnp.concatenate(
        [array[:, 1:] for array in arrays], axis=1)
    parents = jnp.concatenate([
        jnp.where(below > 0, below + start, 0) for below, start in zip(
            (draft.parents[:, 1:] for draft in drafts), before)], axis=1)
    root = jnp.full_like(parents[:, :1], -1)
    draft = jax.vmap(Draft.tree)(
        rounds.roots(state), jnp.concatenate([root, parents], axis=1),
        join([draft.tokens for draft in drafts]),
        join([draft.probs for draft in drafts]))
    return jax.vmap(_merged)(draft), states


def _merged(draft: Draft) -> Draft:
  """Moves the children of all nodes with equal prefixes to the first of them.
  """
  same = tree.same_text(draft)
  first = jnp.where(jnp.diagonal(same), jnp.argmax(same, axis=-1),
                    jnp.arange(same.shape[0])).astype(jnp.int32)
  parents = jnp.where(draft.parents < 0, -1, first[draft.parents])
  return draft.replace(parents=parents)


def merged(members: Sequence[Drafter], verifier: Verifier = TRAVERSAL
           ) -> Strategy:
  """Merges the drafts of several drafters; equal prefixes share nodes.

  This is the merge of SpecInfer (Miao et al. 2023, arXiv:2305.09781), for any
  drafters.

  >>> from specjax import drafters
  >>> from specjax.testing import MarkovModel
  >>> short = drafters.draft_model(model=MarkovModel(7), gamma=2)
  >>> long = drafters.draft_model(model=MarkovModel(7), gamma=5)
  >>> merged((long, short)).drafter.num_nodes
  8

  Args:
    members: drafters, in the order in which a verifier tries their drafts.
    verifier: rule for trees.
  """
  return Strategy(Merge(drafters=tuple(members)), verifier)
