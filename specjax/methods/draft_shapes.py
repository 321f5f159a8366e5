"""Shapes of drafts: a chain, and three kinds of trees.

A shape knows no network. It asks a `drafting.Network` for the logits after
drafted tokens, and draws the next tokens from them.
"""

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from specjax import sampling
from specjax.decoding import constraining as constraints_lib
from specjax.decoding import rounds
from specjax.methods import _common
from specjax.methods import _dynamic_trees
from specjax.methods import _product_trees
from specjax.methods import _trees
from specjax.methods import stop_rules
from specjax.sampling import LogitsTransform
from specjax.trees import shapes
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.utils import fields


class Shape:
  """Base class of draft shapes, which are frozen dataclasses.

  Attributes:
    chain, iid, deterministic: capabilities, see `interfaces.CAPABILITIES`.
    num_nodes: number N of nodes, including the root.
    depth: number of levels below the root.
    fed: number of drafted nodes that the network reads in a round.
    siblings: largest number of children of a node that must be distinct.
    stop: stop rule of chains, or None.
    fixed_slots: `[N]`, position of each node among the nodes that the network
      reads, if it is the same in every round; None for chains, whose nodes are
      read in order.
    is_dynamic: True if the positions are known only after a draft.
  """

  chain = False
  iid = False
  deterministic = False
  stop: stop_rules.StopRule | None = None
  fixed_slots: np.ndarray | None = None
  is_dynamic = False

  num_nodes: int
  depth: int
  fed: int
  siblings: int

  @property
  def num_uniforms(self) -> int:
    return sampling.UNIFORMS_A_DRAW * (self.num_nodes - 1)

  def with_gamma(self, gamma: int) -> "Shape | None":
    """Returns a chain of `gamma` tokens; None unless the shape is a chain."""
    del gamma

  def under(self, transform: LogitsTransform) -> "Shape":
    """Returns the shape for a target with this transform."""
    del transform
    return self

  def grow(self, network: Any, params: chex.ArrayTree, first: Any, carry: Any,
           uniforms: jax.Array, state: DecodeState, transform: LogitsTransform,
           rule: tuple[Any, Any]) -> tuple[Draft, Any, jax.Array | None]:
    """Drafts tokens for B rows.

    Args:
      network: `drafting.Network` that predicts the tokens.
      params: `{"target": ..., "drafter": ...}`.
      first: forecast of the token after the root, see `Network.begin`.
      carry: carry of the network.
      uniforms: `[B, num_uniforms]` uniform samples in [0, 1).
      state: decoding state.
      transform: transform from logits to draft probabilities.
      rule: parameters and state of the stop rule.

    Returns:
      The drafts, the carry after the last draft step, and the slots `[B, N]`
      int32, or None for chains: the position of each node among the nodes that
      the network read. They are arbitrary for the other nodes.
    """
    del rule
    step, carry, logits = constraints_lib.steered(
        transform.constraints, state.constraints,
        functools.partial(network.step, params), carry, first[0])
    draft, slots, (carry, _) = self._levels(
        step, carry, logits, uniforms, state, transform)
    return draft, carry, slots

  def _levels(self, step, carry, logits, uniforms, state, transform):
    """Returns drafts, slots and carry of a tree, see `_trees.grow`."""
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Chain(Shape):
  """A chain of sampled tokens.

  Leviathan et al. 2022 (arXiv:2211.17192); Chen et al. 2023 (arXiv:2302.01318).
  With a stop rule the chain of each row may end early. Drafting ends when the
  chains of all rows have ended.

  Attributes:
    gamma: draft length; 0 drafts nothing.
    stop: rule of `methods.stop_rules`; None drafts gamma tokens in all chains.
      If the rule has parameters, `params["drafter"]` is `{"model": parameters
      of the network, "stop": parameters of the rule}`. A rule with `learned`
      instead reads the confidence head of a network that has one.
  """

  gamma: int
  stop: stop_rules.StopRule | None = None

  chain = True
  iid = True
  siblings = 1

  def __post_init__(self):
    fields.check_at_least("gamma", self.gamma, 0, ": 0 drafts nothing")

  @property
  def num_nodes(self) -> int:
    return self.gamma + 1

  @property
  def depth(self) -> int:
    return self.gamma

  @property
  def fed(self) -> int:
    return max(self.gamma - 1, 0)

  def with_gamma(self, gamma: int) -> "Chain":
    return dataclasses.replace(self, gamma=gamma)

  def grow(self, network, params, first, carry, uniforms, state, transform,
           rule):
    def law(forecast, memory, node):
      del node
      return transform(constraints_lib.constrained(
          transform.constraints, memory, forecast[0], drafted=True),
                       state.temperature)

    draft, carry = _common.draw_chain(
        law, functools.partial(network.extend, params), carry, first, uniforms,
        state, transform, first[0].shape[-1],
        self.stop and (self.stop, *rule), network.has_loop)
    return draft, carry, None


@dataclasses.dataclass(frozen=True)
class Tree(Shape):
  """A sampled tree that is the same in every round.

  SpecInfer (Miao et al. 2023, arXiv:2305.09781), Sequoia (Chen et al. 2024,
  arXiv:2402.12374), RSD (Jeon et al. 2024, arXiv:2402.14160) and the drafts of
  Hu et al. 2025 (arXiv:2502.18779) differ only in `parents` and `proposal`.

  Attributes:
    parents: draft tree in any order, see `specjax.trees`; stored breadth-first.
    proposal: sampling method of the K children of a node. "iid": independent
      samples, all equal at temperature 0; "without_replacement": distinct
      samples, each from the renormalised remaining probabilities; "top_k": the
      K most likely tokens; "hybrid": a sample outside the K - 1 most likely
      tokens, followed by these K - 1 tokens. At temperature 0 the last three
      methods draft the same children. Only their order differs: "hybrid" puts
      the least likely child first. The order matters if the subtrees of
      siblings differ.
  """

  parents: tuple[int, ...]
  proposal: str = "without_replacement"

  def __post_init__(self):
    object.__setattr__(self, "parents", shapes.breadth_first(self.parents))
    _trees.check_proposal(self.proposal)

  @property
  def chain(self) -> bool:
    return self._most_children <= 1

  @property
  def iid(self) -> bool:
    return self.chain or self.proposal == "iid"

  @property
  def num_nodes(self) -> int:
    return len(self.parents)

  @property
  def depth(self) -> int:
    return len(_trees.levels(self.parents))

  @property
  def _most_children(self) -> int:
    return max((max(level.counts) for level in _trees.levels(self.parents)),
               default=0)

  @property
  def deterministic(self) -> bool:
    return self.proposal == "top_k"

  @property
  def fed(self) -> int:
    return _trees.fed_slots(self.parents)[1]

  @property
  def fixed_slots(self) -> np.ndarray:
    return _trees.fed_slots(self.parents)[0]

  @property
  def siblings(self) -> int:
    return 1 if self.iid else self._most_children

  def with_gamma(self, gamma: int) -> "Tree | None":
    return dataclasses.replace(
        self, parents=tuple(range(-1, gamma))) if self.chain else None

  def _levels(self, step, carry, logits, uniforms, state, transform):
    tokens, probs, carry = _trees.grow(
        step, carry, logits, uniforms, self.parents,
        _trees.drawer(self.proposal, transform, state))
    slots = jnp.tile(self.fixed_slots, (len(tokens), 1))
    return _common.tree_drafts(state, self.parents, tokens, probs), slots, carry


@dataclasses.dataclass(frozen=True)
class Best(Shape):
  """The tree of EAGLE-2 or DDTree, with the best nodes that the network finds.

  Li et al. 2024 (arXiv:2406.16858, section 4). The value of a node is the
  product of the network's probabilities on its path. On every level, the
  `top_k` nodes with the largest values get `top_k` children each. The draft
  consists of the root and the N - 1 generated nodes with the largest values. It
  is a tree, because a child's value is at most its parent's, and among equal
  values the parent is preferred. The tree is a deterministic function of the
  context, so the draft distributions are one-hot.

  If the network's predictions do not depend on the drafted tokens
  (`Network.is_product`) and there are no constraints, the tree is that of
  DDTree (arXiv:2604.12989): the N - 1 nodes with the largest values of all
  nodes up to the depth, whatever `top_k` is.

  Attributes:
    depth: number of levels below the root; each level costs one pass of the
      network.
    top_k: number of nodes per level that get children, and number of children
      of each.
    num_nodes: number N of nodes of the draft, including the root.
    confidence: transform from logits to the probabilities that determine the
      values. It is separate from the decoder's transform, because at
      temperature 0 all probabilities but one would be 0.
  """

  depth: int = 6
  top_k: int = 10
  num_nodes: int = 60
  confidence: LogitsTransform = LogitsTransform()

  deterministic = True
  is_dynamic = True
  num_uniforms = 0

  def __post_init__(self):
    _dynamic_trees.check_sizes(self.depth, self.top_k, self.num_nodes)

  @property
  def chain(self) -> bool:
    return self.top_k == 1

  # Nodes are selected by comparing the values of all generated nodes. So q of a
  # node depends on other paths, unless there is only one.
  iid = chain

  @property
  def fed(self) -> int:
    return _dynamic_trees.fed_nodes(self.depth, self.top_k)

  @property
  def siblings(self) -> int:
    return self.top_k

  def under(self, transform: LogitsTransform) -> "Best":
    return dataclasses.replace(
        self, confidence=self.confidence.under(transform))

  def grow(self, network, params, first, carry, uniforms, state, transform,
           rule):
    # With `top_k` = 1 the draft has to be a chain.
    if self.chain or transform.constraints or not network.is_product:
      return super().grow(network, params, first, carry, uniforms, state,
                          transform, rule)
    roots, logits = rounds.roots(state), [first[0]]
    for _ in range(self.depth - 1):
      forecast, carry = network.extend(params, roots[:, None], carry)
      logits.append(forecast[0])
    tokens, parents, values = jax.vmap(lambda logits: _product_trees.best_tree(
        jnp.log(self.confidence(logits)), self.num_nodes))(
            jnp.stack(logits, axis=1))
    draft = jax.vmap(functools.partial(
        _dynamic_trees.deterministic, vocab_size=first[0].shape[-1]))(
            roots, parents, tokens, values)
    return draft, carry, jnp.zeros_like(draft.tokens)

  def _levels(self, step, carry, logits, uniforms, state, transform):
    del uniforms, transform
    return _dynamic_trees.expand(
        step, carry, logits, rounds.roots(state), transform=self.confidence,
        depth=self.depth, top_k=self.top_k, num_nodes=self.num_nodes)


@dataclasses.dataclass(frozen=True)
class Sampled(Shape):
  """A sampled tree whose likeliest nodes get children.

  This shape is not in the EAGLE papers, whose dynamic trees are deterministic.
  A score selects the nodes of a level that get children, but sampled nodes are
  never removed. So the draft distribution q that is stored for a token is the
  distribution from which it was sampled. Rules for sampled trees are therefore
  exact.

  Attributes:
    depth: number of levels below the root.
    expanded: number of nodes per level, those with the largest scores, that get
      children.
    children: number of children of each of these nodes, and of the root.
    proposal: sampling method of children, see `Tree`.
    confidence: transform from logits to the probabilities that determine the
      scores. A node's score is the product of these on its path.
  """

  depth: int
  expanded: int
  children: int
  proposal: str = "without_replacement"
  confidence: LogitsTransform = LogitsTransform()

  is_dynamic = True

  def __post_init__(self):
    fields.check_fields(self, "depth", "expanded", "children")
    _trees.check_proposal(self.proposal)

  @property
  def chain(self) -> bool:
    return self.children == 1

  @property
  def iid(self) -> bool:
    return self.chain or self.proposal == "iid"

  @property
  def num_nodes(self) -> int:
    return _dynamic_trees.num_nodes(self.depth, self.expanded, self.children)

  @property
  def fed(self) -> int:
    return sum(_dynamic_trees.level_sizes(
        self.depth, self.expanded, self.children)[1:])

  @property
  def siblings(self) -> int:
    return 1 if self.iid else self.children

  def _levels(self, step, carry, logits, uniforms, state, transform):
    return _dynamic_trees.grow(
        step, carry, logits, uniforms, rounds.roots(state),
        _trees.drawer(self.proposal, transform, state),
        confidence=self.confidence, depth=self.depth, expanded=self.expanded,
        children=self.children)
