"""EAGLE: networks on the target's features, and their strategies.

A draft starts from the target's features of the committed tokens. Later draft
steps read the output of a feature layer instead
(`models.features.FeatureConfig`). `Eagle1Heads` and `Eagle3Heads` differ only
in the defaults of that configuration. In P-EAGLE, later draft steps read a mask
that is the same in all steps. Therefore one pass predicts all draft tokens.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any
from typing import ClassVar
from typing import Self

import chex
import jax
import jax.numpy as jnp

from specjax.interfaces import Model
from specjax.interfaces import Verifier
from specjax.methods import _common
from specjax.methods.draft_shapes import Best
from specjax.methods.draft_shapes import Chain
from specjax.methods.draft_shapes import Sampled
from specjax.methods.draft_shapes import Shape
from specjax.methods.draft_shapes import Tree
from specjax.methods.drafting import NetworkDrafter
from specjax.methods.features import _drafter
from specjax.methods.features._drafter import FeatureState
from specjax.methods.features.assistant import Assistant
from specjax.methods.features.assistant import AssistantHeads
from specjax.methods.features.network import FeatureHeads
from specjax.methods.heads._forecasts import ProductNetwork
from specjax.methods.networks import Params
from specjax.methods.stop_rules import Forecast
from specjax.methods.strategy import Strategy
from specjax.methods.strategy import TRAVERSAL
from specjax.methods.strategy import with_default_rule
from specjax.models.transformer import Transformer
from specjax.trees import topology
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.types import Verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle1Heads(FeatureHeads):
  """Heads of EAGLE-1 and 2: no norm before attention or the LM head."""

  fusion_bias: bool = True

  kind: ClassVar[str] = "eagle1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Heads(FeatureHeads):
  """Heads of EAGLE-3, with attention on [e; g] and a separate LM head.

  e is the token embedding, and g is a projection of three hidden states of the
  target.
  """

  entry: bool = True
  fusion: str = "attention"
  fusion_norms: bool = True
  final_norm: str | None = "own"
  own_head: bool = True

  kind: ClassVar[str] = "eagle3"

  @classmethod
  def default_taps(cls, layers: int) -> tuple[int | str, ...]:
    """Returns the layers whose hidden states are read by default.

    For L = `layers`, they are 2, L // 2 and L - 3. If L is too small for three
    increasing numbers, they are 1, (L + 1) // 2 and L.
    """
    taps = (2, layers // 2, layers - 3)
    if not taps[0] < taps[1] < taps[2]:
      taps = (1, (layers + 1) // 2, layers)
    return tuple(dict.fromkeys(taps))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PEagleHeads(Eagle3Heads):
  """Heads of P-EAGLE (arXiv:2602.01469): EAGLE-3 with one or several layers.

  Draft steps after the first read a mask: the embedding of a mask token, and
  trained features, the parameter `mask_hidden [F]`. So the draft tokens are
  independent of each other.

  Attributes:
    mask_token: id of the mask token. `for_target` chooses the last token of the
      vocabulary by default, which most models do not use.
  """

  mask_token: int
  own_embedding: bool = True

  kind: ClassVar[str] = "peagle"
  one_layer: ClassVar[bool] = False

  def __post_init__(self):
    super().__post_init__()
    if not 0 <= self.mask_token < self.vocab_size:
      raise ValueError(f"mask_token is {self.mask_token}; it must be a token "
                       f"id in [0, {self.vocab_size})")
    if self.feed_normed:
      raise ValueError("feed_normed is True, but no draft step reads the "
                       "output of another one: set feed_normed=False")

  @classmethod
  def for_target(cls, target: Transformer, count: int, **options: Any) -> Self:
    last = {"mask_token": target.config.vocab_size - 1}
    return super().for_target(target, count, **last | options)

  def init(self, key: jax.Array, target_params: Params) -> dict[str, Any]:
    own, mask = jax.random.split(key)
    return super().init(own, target_params) | {
        "mask_hidden": jax.random.normal(
            mask, (len(self.taps) * self.target_width,), jnp.float32)}

  def later_input(self, params: Params, hidden: jax.Array, tokens: jax.Array
                  ) -> tuple[jax.Array, jax.Array]:
    mask = self.enter(params, params["mask_hidden"][None, None])
    return (jnp.broadcast_to(mask, hidden.shape),
            jnp.full_like(tokens, self.mask_token))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureLayer(_drafter.FeatureNetwork):
  """A reused layer on the target's features.

  In a round the layer runs one pass over each level of the draft except the
  last. After verification it runs one pass over the accepted tokens with the
  target's features.

  Attributes:
    heads: feature layer with one module.
  """

  heads: FeatureHeads

  def bind(self, target: Model) -> "FeatureLayer":
    if self.heads.modules > 1:
      raise ValueError(
          f"the heads have {self.heads.modules} modules; this network uses one "
          "module: use drafters.FeatureModules")
    return super().bind(target)

  def init(self, params: chex.ArrayTree, prompt: Prompt, output: ModelOutput
           ) -> FeatureState:
    return _drafter.read_prompt(self.heads, params, prompt, output)

  def _forecast(self, params: chex.ArrayTree, read: jax.Array,
                hidden: jax.Array) -> Forecast:
    """Returns the logits and the hidden states of the first of S nodes."""
    return self.logits(params, read)[:, 0], hidden[:, 0]

  def begin(self, params: chex.ArrayTree, state: DecodeState, shape: Shape
            ) -> tuple[Forecast, Any]:
    own = state.drafter
    cache = own.cache.reserve(shape.fed) if shape.fed else own.cache
    hidden = own.hidden[:, None]
    return self._forecast(params, own.read[:, None], hidden), (cache, hidden)

  def step(self, params: chex.ArrayTree, tokens: jax.Array, depths: jax.Array,
           ancestors: jax.Array, above: jax.Array, carry: Any
           ) -> tuple[jax.Array, Any]:
    cache, hidden = carry
    hidden = jnp.take_along_axis(hidden, above[..., None], axis=1)
    out = self.heads.step(
        params["drafter"], params["target"], hidden, tokens, visible=ancestors,
        cache=cache, positions=cache.lengths[:, None] + depths)
    return self.logits(params, out.read), (out.cache, out.hidden)

  def extend(self, params: chex.ArrayTree, token: jax.Array, carry: Any
             ) -> tuple[Forecast, Any]:
    cache, hidden = carry
    out = self.heads.step(
        params["drafter"], params["target"], hidden, token, cache=cache,
        visible=jnp.ones((len(token), 1, 1), bool))
    return self._forecast(params, out.read, out.hidden), (
        out.cache.rollback(cache.lengths + 1), out.hidden)

  def end(self, params: chex.ArrayTree, memory: FeatureState, carry: Any,
          draft: Draft, slots: jax.Array | None) -> tuple[Draft, FeatureState]:
    return _common.known_only(draft, memory.known), memory

  def commit(self, params: chex.ArrayTree, memory: FeatureState, draft: Draft,
             slots: jax.Array | None, shape: Shape, verdict: Verdict,
             output: ModelOutput, count: jax.Array) -> FeatureState:
    return _drafter.read_round(self.heads, params, memory, draft, verdict,
                               output, count, shape.depth)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PEagle(ProductNetwork, FeatureLayer):
  """The layers of P-EAGLE, which predict all draft tokens in one pass.

  In a round the layers run one pass over the masks and, after verification, one
  pass over the accepted tokens with the target's features.

  Attributes:
    heads: layers of P-EAGLE.
  """

  heads: PEagleHeads

  def begin(self, params: chex.ArrayTree, state: DecodeState, shape: Shape
            ) -> tuple[Forecast, Any]:
    memory, heads, count = state.drafter, self.heads, max(shape.depth - 1, 0)
    read, hidden = memory.read[:, None], memory.hidden[:, None]
    if count:
      blank = jnp.zeros((len(read), count, heads.width))
      masks, tokens = heads.later_input(
          params["drafter"], blank, blank[..., 0].astype(jnp.int32))
      out = heads.step(
          params["drafter"], params["target"], masks, tokens,
          visible=topology.causal(*tokens.shape)[1], cache=memory.cache)
      read = jnp.concatenate([read, out.read], axis=1)
      hidden = jnp.concatenate([hidden, out.hidden], axis=1)
    return self.extend(params, None, (
        (self.logits(params, read), hidden), jnp.zeros((), jnp.int32)))


def eagle(heads: FeatureHeads, parents: Sequence[int] | None = None,
          proposal: str = "without_replacement",
          verifier: Verifier | None = None) -> Strategy:
  """Samples a chain or a tree from a layer on the target's features.

  EAGLE (Li et al. 2024, arXiv:2401.15077), EAGLE-3 (arXiv:2503.01840) and
  P-EAGLE (arXiv:2602.01469, with `methods.PEagleHeads`). Decode with the target
  that `heads.attach` returns.

  >>> import jax
  >>> import specjax as sj
  >>> from specjax import methods
  >>> pair = sj.testing.tiny_pair(5)
  >>> own = methods.Eagle3Heads.for_target(pair.target, 4, taps=(0, 1))
  >>> given = pair.params["target"]
  >>> target, params = own.attach(
  ...     pair.target, given, own.init(jax.random.key(0), given))
  >>> decoder = eagle(own).decoder(target)
  >>> text = decoder.generate(
  ...     params, [[3, 1]], jax.random.key(1), max_new_tokens=6)
  >>> len(text.tokens[0]), decoder.verifier
  (8, Block())

  Args:
    heads: feature layer with one module.
    parents: draft tree of N nodes; None samples a chain.
    proposal: sampling method of children, see `drafters.Tree`. The
      EAGLE papers use "top_k".
    verifier: verification rule. None means `Block` for a sampled chain,
      `Traversal` for a sampled tree and `TargetWalk` for a deterministic tree.
  """
  shape = (Chain(heads.num_forecasts) if parents is None else
           Tree(tuple(parents), proposal))
  return with_default_rule(layer_drafter(heads, shape), verifier)


def eagle_dynamic(heads: FeatureHeads, depth: int = 6, top_k: int = 10,
                  num_nodes: int = 60) -> Strategy:
  """Drafts EAGLE-2's tree, whose shape depends on the layer's probabilities.

  EAGLE-2 (Li et al. 2024, arXiv:2406.16858). EAGLE-3 layers use the same tree.
  With P-EAGLE it is the most likely tree of `depth` levels, as in DDTree.

  >>> from specjax import testing
  >>> from specjax import methods
  >>> own = methods.Eagle1Heads.for_target(testing.tiny_pair(5).target, 4)
  >>> eagle_dynamic(own, depth=3, top_k=2, num_nodes=7).verifier
  TargetWalk()

  Args:
    heads: feature layer with one module.
    depth: number of levels below the root.
    top_k: number of nodes per level that get children, and number of children
      of each.
    num_nodes: number N of nodes of the draft, including the root.
  """
  return with_default_rule(
      layer_drafter(heads, Best(depth, top_k, num_nodes)))


def eagle_sampled(heads: FeatureHeads, depth: int, expanded: int, children: int,
                  verifier: Verifier = TRAVERSAL) -> Strategy:
  """Samples a tree whose likeliest nodes get children.

  This variant is not in the EAGLE papers, whose trees are deterministic. The
  product of the layer's probabilities on a node's path decides whether the node
  gets children. Sampled nodes are never removed, so rules for sampled trees are
  exact.

  >>> from specjax import testing
  >>> from specjax import methods
  >>> own = methods.Eagle1Heads.for_target(testing.tiny_pair(5).target, 4)
  >>> eagle_sampled(own, depth=3, expanded=2, children=2).drafter.num_nodes
  11

  Args:
    heads: feature layer with one module.
    depth: number of levels below the root.
    expanded: number of nodes per level that get children.
    children: number of children of each of these nodes, and of the root.
    verifier: verification rule for sampled trees.
  """
  return Strategy(
      layer_drafter(heads, Sampled(depth, expanded, children)), verifier)


def layer_drafter(heads: FeatureHeads | AssistantHeads, shape: Shape
                  ) -> NetworkDrafter:
  """Returns a drafter of a feature layer or an assistant."""
  network = (PEagle if isinstance(heads, PEagleHeads) else
             Assistant if isinstance(heads, AssistantHeads) else FeatureLayer)
  return NetworkDrafter(network=network(heads=heads), shape=shape)
