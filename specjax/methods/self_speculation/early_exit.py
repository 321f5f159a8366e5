"""LayerSkip: the target's first layers draft, and the other layers verify.

See Elhoushi et al. 2024 (arXiv:2404.16710, section 3.3). The target has L
layers. Its first E layers, followed by its final norm and LM head, draft one
token after another. Their keys and values are stored in the target's cache.
Their output (the residual stream) is stored for every draft token. So the
verifying pass starts at layer E. In a round of gamma tokens, the number of
evaluated layers, summed over tokens, is

  (gamma + 1) E for drafting and (gamma + 1) (L - E) for verification.

With a separate draft model of E layers it would be gamma E for drafting and
(gamma + 1) L for verification.

The keys and values of the first E layers depend only on the tokens, not on the
position where the draft began. So the drafter has the capability
"autoregressive" (`interfaces.CAPABILITIES`), unless it has a stop rule.
"""

import dataclasses
from typing import Any

import chex
from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding import rounds
from specjax.interfaces import Cache
from specjax.interfaces import Model
from specjax.interfaces import Verifier
from specjax.methods import stop_rules
from specjax.methods.draft_shapes import Chain
from specjax.methods.draft_shapes import Shape
from specjax.methods.draft_shapes import Tree
from specjax.methods.drafting import Network
from specjax.methods.drafting import NetworkDrafter
from specjax.methods.stop_rules import Forecast
from specjax.methods.strategy import BLOCK
from specjax.methods.strategy import Strategy
from specjax.models.shortened import check_exit
from specjax.models.sublayers import Sublayers
from specjax.models.transformer import Transformer
from specjax.trees import topology
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.types import Verdict
from specjax.utils import fields


@struct.dataclass
class Begun:
  """Result of the target's first E layers on the nodes of a draft.

  The verifying pass continues from it at layer E.

  Attributes:
    cache: cache of the target. Its block contains the keys and values of the
      nodes for the first E layers only.
    hidden: residual stream `[B, T, D]` before layer E, in the order in which
      the T nodes were read (`order`). In a chain T is N, and nodes that were
      not read are 0.
    adapter: cache of a network after these layers; None without such a network.
    count: number of nodes of a chain that were read, `[]` int32.
    shape: shape of the draft.
  """

  cache: Any
  hidden: jax.Array
  adapter: Any
  count: jax.Array
  shape: Shape = struct.field(pytree_node=False)


def order(shape: Shape) -> np.ndarray:
  """Returns the nodes `[N]` in the order in which the first layers read them.

  In a `Tree` the nodes with children are first, because the leaves are read
  together at the end. Other drafts are read in their own order.
  """
  nodes = np.arange(shape.num_nodes)
  if not isinstance(shape, Tree):
    return nodes
  return np.argsort(~np.isin(nodes, shape.parents), kind="stable")


@struct.dataclass
class _Shared(Cache):
  """Target's cache after a verifying pass that the first layers began.

  Attributes:
    cache: cache with the keys and values of the N nodes. It may have reserved a
      block for them, so `settle` follows every `commit` and `rollback`.
    places: index in this cache of each node, `[N]` int32; None if the order is
      that of the draft.
  """

  cache: Any
  places: Any = None

  @property
  def lengths(self):
    return self.cache.lengths

  def commit(self, path, count):
    path = path if self.places is None else self.places[path]
    return self.cache.commit(path, count).settle()

  def rollback(self, lengths):
    return self.cache.rollback(lengths).settle()


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlyExit(Network):
  """The first layers of the target, with its final norm and LM head.

  The layers read every node of a draft once, while drafting. Only drafts whose
  shape is known at run time (`Best`, `Sampled`) are read again once they are
  complete. With `shares_pass`, the verifying pass runs only the other layers.
  The network has no parameters of its own.

  Attributes:
    exit: number of target layers that draft, at least 1 and less than all.
    shares_pass: True if the verifying pass runs only the layers after the first
      `exit` layers. If False, it runs all layers of the target. The drafts are
      the same. Controllers and combinations of drafters require False.
    model: target model; `bind` sets it.
  """

  exit: int
  shares_pass: bool = True
  model: Transformer | None = None

  context_only = True
  always_drafts = True
  stateless = True

  def __post_init__(self):
    fields.check_at_least("exit", self.exit, 1)

  @property
  def vocab_size(self) -> int:
    return self.model.vocab_size

  def bind(self, target: Model) -> Any:
    check_exit(self.exit, target)
    return dataclasses.replace(self, model=target)

  def init(self, params: chex.ArrayTree, prompt: Prompt, output: ModelOutput
           ) -> Any:
    return None

  def begin(self, params: chex.ArrayTree, state: DecodeState, shape: Shape
            ) -> tuple[Forecast, Begun]:
    root = rounds.roots(state)[:, None]
    cache, adapter, size = state.target_cache, state.drafter, 0
    if isinstance(shape, Chain):
      # A chain is read in a loop, so its arrays have their final size.
      size = shape.num_nodes
      # A cascade has already reserved a block for the drafted tokens.
      cache = cache.reserve(size) if cache.held is None else cache
      adapter = adapter and adapter.reserve(size)
    begun = Begun(
        cache=cache, adapter=adapter, count=jnp.zeros((), jnp.int32),
        shape=shape, hidden=jnp.zeros(
            (len(root), size, self.model.config.width),
            params["target"]["embedding"].dtype))
    if size:
      return self.extend(params, root, begun)
    logits, begun = self.step(
        params, root, jnp.full_like(root, -1),
        jnp.zeros((len(root), 1, 0), bool), jnp.zeros_like(root), begun)
    return (logits[:, 0], begun.hidden[:, 0]), begun

  def extend(self, params: chex.ArrayTree, token: jax.Array, carry: Begun
             ) -> tuple[Forecast, Begun]:
    out, hidden, new = self._read(
        params, token, jnp.zeros_like(token),
        jnp.ones((len(token), 1, 1), bool), carry)
    grown = lambda new, old: new and new.rollback(old.lengths + 1)
    return (out.logits[:, 0], out.hidden[:, 0]), new.replace(
        cache=grown(new.cache, carry.cache),
        adapter=grown(new.adapter, carry.adapter),
        hidden=jax.lax.dynamic_update_slice_in_dim(
            carry.hidden, hidden, carry.count, axis=1), count=carry.count + 1)

  def step(self, params: chex.ArrayTree, tokens: jax.Array, depths: jax.Array,
           ancestors: jax.Array, above: jax.Array, carry: Begun
           ) -> tuple[jax.Array, Begun]:
    # The mask has no column for the root, which is the first node of the block,
    # and which all nodes see.
    ancestors = jnp.pad(
        ancestors, ((0, 0), (0, 0), (1, 0)), constant_values=True)
    out, hidden, new = self._read(params, tokens, depths + 1, ancestors, carry)
    return out.logits, new.replace(
        hidden=jnp.concatenate([carry.hidden, hidden], axis=1))

  def _read(self, params: chex.ArrayTree, tokens: jax.Array, depths: jax.Array,
            ancestors: jax.Array, begun: Begun
            ) -> tuple[ModelOutput, jax.Array, Begun]:
    """Runs the first layers on S nodes.

    Returns:
      The output whose logits are used for drafting, the residual stream
      `[B, S, D]`, and `begun` with the new caches.
    """
    out = self.model.run(
        params["target"], Sublayers.between(0, self.exit), tokens, depths,
        ancestors, begun.cache)
    predicted, adapter = self.predict(
        params, out, depths, ancestors, begun.adapter)
    return predicted, out.hidden, begun.replace(
        cache=out.cache, adapter=adapter)

  def predict(self, params: chex.ArrayTree, output: ModelOutput,
              depths: jax.Array, ancestors: jax.Array, adapter: Any
              ) -> tuple[ModelOutput, Any]:
    """Returns the output whose logits are used for drafting, and `adapter`.

    A subclass can run a further network on the output of the first layers.
    """
    del params, depths, ancestors
    return output, adapter

  def end(self, params: chex.ArrayTree, memory: Any, carry: Begun, draft: Draft,
          slots: jax.Array | None) -> tuple[Draft, Any]:
    # The first layers read a node only to draft its children. The others are
    # read here, because the verifying pass needs their output at all nodes.
    shape = carry.shape
    if isinstance(shape, Chain):
      token = jax.lax.dynamic_slice_in_dim(
          draft.tokens, carry.count, 1, axis=1)
      _, carry = self.extend(params, token, carry)
      before = lambda cache: cache and cache.rollback(
          cache.lengths - carry.count)
      carry = carry.replace(
          cache=before(carry.cache), adapter=before(carry.adapter))
    else:
      if shape.is_dynamic:
        carry = carry.replace(hidden=carry.hidden[:, :0])
      nodes = order(shape)
      rest = nodes[carry.hidden.shape[1]:]
      ancestors = jax.vmap(topology.ancestors)(draft.parents)
      _, hidden, new = self._read(
          params, draft.tokens[:, rest], topology.depths_of(ancestors)[:, rest],
          ancestors[:, rest][:, :, nodes], carry)
      carry = new.replace(
          hidden=jnp.concatenate([carry.hidden, hidden], axis=1))
    return draft, carry if self.shares_pass else carry.adapter

  def target_pass(self, target: Model, params: chex.ArrayTree, memory: Any,
                  draft: Draft, depths: jax.Array, ancestors: jax.Array,
                  cache: Cache) -> ModelOutput:
    if not isinstance(memory, Begun):
      return super().target_pass(
          target, params, memory, draft, depths, ancestors, cache)
    nodes = order(memory.shape)
    others = Sublayers.between(self.exit, self.model.config.layers)
    run = lambda depths, ancestors: self.model.run(
        params["target"], others, None, depths, ancestors, memory.cache,
        hidden=memory.hidden)
    if not isinstance(memory.shape, Tree):
      out = run(depths, ancestors)
      return out.replace(cache=_Shared(cache=out.cache))
    out, places = run(depths[:, nodes], ancestors[:, nodes][:, :, nodes]), (
        np.argsort(nodes))
    return ModelOutput(
        logits=out.logits[:, places], hidden=out.hidden[:, places],
        cache=_Shared(cache=out.cache, places=jnp.array(places, jnp.int32)))

  def commit(self, params: chex.ArrayTree, memory: Any, draft: Draft,
             slots: jax.Array | None, shape: Shape, verdict: Verdict,
             output: ModelOutput, count: jax.Array) -> Any:
    # The decoder removes rejected tokens from the target's cache.
    return None


def early_exit(exit: int, gamma: int, stop: stop_rules.StopRule | None = None,
               verifier: Verifier = BLOCK) -> Strategy:
  """Returns the strategy LayerSkip (Elhoushi et al. 2024).

  The target's first layers draft, and the verifying pass runs only the other
  layers (arXiv:2404.16710, section 3.3). The target must be trained so that its
  first layers can predict tokens, for example by `train_lm.py --exit_scale`.

  >>> drafter, _ = early_exit(exit=2, gamma=4)
  >>> drafter.network.exit, drafter.num_nodes
  (2, 5)

  Args:
    exit: number of target layers that draft.
    gamma: maximum draft length.
    stop: stop rule; None drafts gamma tokens in all chains.
    verifier: verification rule for chains. `GreedyBlock` cannot be combined
      with a stop rule.
  """
  return Strategy(NetworkDrafter(
      network=EarlyExit(exit=exit), shape=Chain(gamma, stop)), verifier)
