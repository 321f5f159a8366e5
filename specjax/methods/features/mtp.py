"""Multi-token prediction: heads, drafters of chains and trees, and strategies.

A draft starts from the target's features of the committed tokens.
`models.features.FeatureConfig` configures the layers. `MTPHeads` and
`ParallelLayers` differ only in the defaults of that configuration.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any
from typing import ClassVar
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding import constraining as constraints_lib
from specjax.decoding import rounds
from specjax.interfaces import Model
from specjax.interfaces import Verifier
from specjax.methods import _common
from specjax.methods import _trees
from specjax.methods.draft_shapes import Chain
from specjax.methods.draft_shapes import Tree
from specjax.methods.features import _modules
from specjax.methods.features.eagle import layer_drafter
from specjax.methods.features.network import FeatureHeads
from specjax.methods.strategy import Strategy
from specjax.methods.strategy import with_default_rule
from specjax.sampling import inverse_cdf
from specjax.sampling import LogitsTransform
from specjax.sampling import UNIFORMS_A_DRAW
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.utils import fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTPHeads(FeatureHeads):
  """Chained modules of multi-token prediction (DeepSeek-V3).

  Each module reads the output of the previous module.
  """

  fusion_norms: bool = True
  attention_norm: bool = True
  final_norm: str | None = "own"
  reuse: bool = False

  kind: ClassVar[str] = "mtp"

  @classmethod
  def default_taps(cls, layers: int) -> tuple[int | str, ...]:
    """Returns the name of the last layer's output, before the final norm."""
    return (layers,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelLayers(FeatureHeads):
  """Layers parallel to the target's last layer, as heads (Gloeckle et al.).

  The layers do not read tokens, so the draft tokens are independent of each
  other. All layers use the target's final norm and LM head.
  """

  fusion: str = "none"
  attention_norm: bool = True
  final_norm: str | None = "target"
  reuse: bool = False
  chained: bool = False

  kind: ClassVar[str] = "parallel_layers"

  @classmethod
  def default_taps(cls, layers: int) -> tuple[int | str, ...]:
    """Returns the name of the input of the target's last layer."""
    return (layers - 1,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTP(_common.DrawnChain, _modules.ModulesDrafter):
  """Samples token k of a chain from module k.

  Heads with one reused module draft with `FeatureLayer` instead.

  Attributes:
    heads: heads with a module for every draft token.
    gamma: draft length, at most the number of modules. None means the number of
      modules.
    transform: transform of the draft logits; None uses the decoder's transform.
      Any transform is lossless, because the verifier receives the transformed
      distributions.
    readers: number R of modules that read the sequence, at least gamma. None
      means gamma. If a controller shortens chains, all R modules still run in
      every round. So no module lacks committed tokens when chains become longer
      again.
  """

  heads: FeatureHeads
  gamma: int | None = None
  transform: LogitsTransform | None = None
  readers: int | None = None

  def __post_init__(self):
    _check_not_reused(self.heads)
    if self.gamma is None:
      object.__setattr__(self, "gamma", self.heads.modules)
    fields.check_at_least("gamma", self.gamma, 1)
    if self.gamma > self.heads.modules:
      raise ValueError(
          f"gamma is {self.gamma}, but there are {self.heads.modules} modules; "
          "each token needs a module: reduce gamma or train more modules")
    if self.readers is None:
      object.__setattr__(self, "readers", self.gamma)
    if not self.gamma <= self.readers <= self.heads.modules:
      raise ValueError(
          f"readers is {self.readers}; it must be at least gamma, "
          f"{self.gamma}, and at most the {self.heads.modules} modules")

  @property
  def depth(self) -> int:
    return self.gamma

  def bind(self, target: Model, transform: LogitsTransform) -> "MTP":
    """Returns the drafter specialised to a target."""
    self.heads.check_target(target)
    return _common.with_transform(self, transform)

  def propose(self, params: chex.ArrayTree, uniforms: jax.Array,
              state: DecodeState) -> tuple[Draft, Any]:
    """Drafts a chain for each row."""
    heads, own = self.heads, state.drafter
    u = uniforms.reshape(len(own.held), self.gamma, UNIFORMS_A_DRAW)
    last = jnp.maximum(own.held - 1, 0)[:, None]
    constraints, memory = self.transform.constraints, state.constraints
    tokens, probs = [], []

    def draw(module, read):
      nonlocal memory
      logits = heads.whole(heads.logits(
          params["drafter"], params["target"], _modules.at(read, last)))[:, 0]
      law = self.transform(
          constraints_lib.constrained(constraints, memory, logits,
                                      drafted=True), state.temperature)
      token = jax.vmap(inverse_cdf)(law, u[:, module])
      memory = constraints_lib.advanced(constraints, memory, token)
      tokens.append(token)
      probs.append(law)
      return token

    new = self.read(params, own, draw)
    draft = jax.vmap(Draft.chain)(
        rounds.roots(state), jnp.stack(tokens, 1), jnp.stack(probs, 1))
    return _common.known_only(draft, own.held > 0), new


class _Paths(NamedTuple):
  """Inputs of the next module, for S nodes that have children on one level.

  Attributes:
    module: index of the module that ran on these nodes, from 0. It drafts their
      children.
    text: tokens `[B, S, W + R]` int32. First the token after each of the valid
      stored positions (`ModulesState.after`), then the path to the node.
    before: output `[B, S, W, D]` of this module at the W stored positions, for
      the path to each node.
  """

  module: int
  text: jax.Array
  before: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTPTree(_modules.ModulesDrafter, _trees.StaticTree):
  """Samples a tree whose nodes of depth k come from module k.

  At each position, a module also reads later tokens, some of which are draft
  tokens. These differ between the paths of the tree. So the module runs over
  the last positions again for each path: over 2 R S positions for a level with
  S nodes that have children, where R is the depth of the tree.

  Attributes:
    heads: heads with a module for every depth.
    parents: draft tree, see `specjax.trees`, stored breadth-first.
    proposal: sampling method of children, see `drafters.Tree`.
    transform: transform of the draft logits; None uses the decoder's transform.
      Any transform is lossless, because the verifier receives the transformed
      distributions.
  """

  heads: FeatureHeads
  parents: tuple[int, ...]
  proposal: str = "without_replacement"
  transform: LogitsTransform | None = None

  def __post_init__(self):
    super().__post_init__()
    _check_not_reused(self.heads)
    fields.check_at_least("the depth of `parents`", self.depth, 1)
    if self.depth > self.heads.modules:
      raise ValueError(
          f"parents is {self.depth} levels deep, but there are "
          f"{self.heads.modules} modules; each level needs a module: give a "
          "shallower tree or train more modules")

  @property
  def readers(self) -> int:
    return self.depth

  def bind(self, target: Model, transform: LogitsTransform) -> "MTPTree":
    """Returns the drafter specialised to a target."""
    self.heads.check_target(target)
    _common.check_children(self.heads, 1 if self.iid else self._most_children)
    return super().bind(target, transform)

  def propose(self, params: chex.ArrayTree, uniforms: jax.Array,
              state: DecodeState) -> tuple[Draft, Any]:
    """Drafts a chain or tree for each row."""
    own = state.drafter
    step, carry, logits = constraints_lib.steered(
        self.transform.constraints, state.constraints,
        *self._growing(params, own))
    tokens, probs, _ = self.draw(step, carry, logits, uniforms, state)
    draft = _common.tree_drafts(state, self.parents, tokens, probs)
    return _common.known_only(draft, own.held > 0), self.read(params, own)

  def _growing(self, params, own):
    """Returns the arguments `step`, `carry` and `logits` of `_trees.grow`."""
    heads, size = self.heads, self.window
    causal = np.tril(np.ones((size, size), bool))
    order = jnp.arange(size + self.readers, dtype=jnp.int32)
    last = jnp.maximum(own.held - 1, 0)

    def run(module, text, before):
      """Runs a module on S paths; returns logits `[B, S, V]` and its output."""
      batch, ways = text.shape[:2]
      flat = lambda x: x.reshape(batch, ways * size, *x.shape[3:])
      each = lambda x: jnp.broadcast_to(x[:, None], (batch, ways, *x.shape[1:]))
      hidden, read, _ = self.run(
          params, module, flat(each(own.hidden)), flat(before),
          flat(text[..., module:module + size]),
          jnp.tile(np.kron(np.eye(ways, dtype=bool), causal), (batch, 1, 1)),
          own.cache, flat(each(own.cache.lengths[:, None] + order[:size])))
      ways_of = lambda x: x.reshape(batch, ways, size, -1)
      read = jnp.take_along_axis(
          ways_of(read), last[:, None, None, None], axis=2)[:, :, 0]
      return heads.whole(heads.logits(
          params["drafter"], params["target"], read)), ways_of(hidden)

    def step(tokens, depths, ancestors, above, carry):
      del depths, ancestors  # `text` determines both
      module, text, before = carry
      text, before = (jax.vmap(lambda row, at: row[at])(x, above)
                      for x in (text, before))
      text = jnp.where(order == own.held[:, None, None] + module,
                       tokens[..., None], text)
      logits, before = run(module + 1, text, before)
      return logits, _Paths(module + 1, text, before)

    text = jnp.pad(own.after, ((0, 0), (0, self.readers)))[:, None]
    logits, before = run(0, text, own.hidden[:, None])
    return step, _Paths(0, text, before), logits[:, 0]


def _check_not_reused(heads):
  if heads.reuse:
    raise ValueError("reuse is True, so the heads have one module for all "
                     "tokens; this drafter needs a module per token: use "
                     "drafters.FeatureLayer")


def mtp(heads: FeatureHeads, gamma: int | None = None,
        verifier: Verifier | None = None,
        parents: Sequence[int] | None = None,
        proposal: str = "without_replacement") -> Strategy:
  """Samples a chain or a tree from modules of multi-token prediction.

  DeepSeek-V3 (arXiv:2412.19437, section 2.2) and Gloeckle et al. 2024
  (arXiv:2404.19737). Heads with one reused module (FastMTP, arXiv:2509.18362)
  use the drafters of EAGLE.

  >>> from specjax import testing
  >>> from specjax import methods
  >>> target = testing.tiny_pair(5).target
  >>> mtp(methods.MTPHeads.for_target(target, 3)).drafter.gamma
  3
  >>> again = methods.MTPHeads.for_target(target, 3, reuse=True)
  >>> mtp(again).drafter.num_nodes
  4
  >>> own = methods.MTPHeads.for_target(target, 3)
  >>> mtp(own, parents=(-1, 0, 0, 1)).verifier
  Traversal()

  Args:
    heads: modules of multi-token prediction.
    gamma: draft length of a chain, at most the number of modules unless the
      heads reuse one module. None means `heads.num_forecasts`.
    verifier: verification rule. None means `Block` for a sampled chain,
      `Traversal` for a sampled tree and `TargetWalk` for a deterministic tree.
    parents: draft tree of N nodes; None samples a chain.
    proposal: sampling method of children, see `drafters.Tree`.

  Raises:
    ValueError: both `gamma` and `parents` are given.
  """
  if parents is not None and gamma is not None:
    raise ValueError(f"gamma is {gamma}, and parents is given as well; the "
                     "depth of `parents` is the draft length: give one of the "
                     "two")
  if heads.reuse:
    shape = (Tree(tuple(parents), proposal) if parents is not None else
             Chain(heads.num_forecasts if gamma is None else gamma))
    drafter = layer_drafter(heads, shape)
  elif parents is not None:
    drafter = MTPTree(heads=heads, parents=tuple(parents), proposal=proposal)
  else:
    drafter = MTP(heads=heads, gamma=gamma)
  return with_default_rule(drafter, verifier)
