"""LayerSkip with draft trees: the first layers draft, the others verify.

The target's first layers sample the nodes of a tree of fixed shape level by
level. The verifying pass runs only the other layers, as in `early_exit`. The
first layers read the nodes with children first, and all leaves together at the
end. So the keys and values of the nodes are stored in another order than the
nodes of the draft. The verifying pass uses the order of the keys and values.
Its output is then permuted to the order of the draft.
"""

import dataclasses
import math
from typing import Any

import chex
from flax import struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from specjax.decoding import constraining as constraints_lib
from specjax.decoding import rounds
from specjax.interfaces import Cache
from specjax.interfaces import Model
from specjax.methods import _common
from specjax.methods import _trees
from specjax.methods.self_speculation.early_exit import Begun
from specjax.models.shortened import check_exit
from specjax.models.sublayers import Sublayers
from specjax.models.transformer import Transformer
from specjax.sampling import LogitsTransform
from specjax.trees import shapes
from specjax.trees import topology
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.types import Verdict
from specjax.utils import fields


@struct.dataclass
class _Reordered(Cache):
  """Wrapper of a cache that stores the nodes of a draft in another order.

  Attributes:
    cache: cache with the keys and values of the N nodes of the draft.
    places: index in this cache of each node, in the order of the draft, `[N]`
      int32.
  """

  cache: Any
  places: jax.Array

  @property
  def lengths(self):
    return self.cache.lengths

  def commit(self, path, count):
    return self.cache.commit(self.places[path], count)

  def rollback(self, lengths):
    return self.cache.rollback(lengths)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlyExitTree(_trees.StaticTree):
  """LayerSkip with a tree: the target's first layers sample a draft tree.

  Attributes:
    exit: number of target layers that draft, at least 1 and less than all.
    parents: parent index of each node of the tree, in any order, see
      `specjax.trees`; stored in breadth-first order.
    proposal: sampling method of the children of a node, for example "iid" or
      "without_replacement", see `drafters.Tree`.
    transform: transform from logits to draft probabilities; None uses the
      target's transform.
    shares_pass: True if the verifying pass runs only the layers after the first
      `exit` layers. If False, it runs all layers of the target.
    model: target model; `bind` sets it.
  """

  exit: int
  parents: tuple[int, ...]
  proposal: str = "without_replacement"
  transform: LogitsTransform | None = None
  shares_pass: bool = True
  model: Transformer | None = None

  def __post_init__(self):
    super().__post_init__()
    fields.check_at_least("exit", self.exit, 1)
    if self.num_nodes < 2:
      raise ValueError("parents has 1 node; it must have at least 2")

  @property
  def autoregressive(self) -> bool:
    # If siblings are sampled without replacement, the distribution of a node
    # also depends on its earlier siblings. The capability "autoregressive"
    # requires that it depends only on the path to the node.
    return self.iid

  def bind(self, target: Model, transform: LogitsTransform
           ) -> "EarlyExitTree":
    """Returns the drafter with the fields `model` and `transform` set.

    Raises:
      ValueError: the target does not have more than `exit` layers.
    """
    check_exit(self.exit, target)
    return dataclasses.replace(super().bind(target, transform), model=target)

  # Number of tokens that can be removed from the drafter's cache. There is no
  # limit, because the drafter has no cache of its own.
  slack = math.inf

  # The drafter reads the target's cache, which contains the committed tokens.
  rests = follows = True

  def init(self, params: chex.ArrayTree, prompt: Prompt,
           prefill_output: ModelOutput) -> Any:
    """Returns None, because the drafter has no state; it reads the target's
    cache.
    """
    del params, prompt, prefill_output
    return None

  @property
  def _order(self) -> np.ndarray:
    """Indices `[N]` of the N nodes, in the order in which they are read.

    The root is first, then the nodes with children, level by level, then all
    leaves.
    """
    slots, _ = _trees.fed_slots(self.parents)
    counts = np.bincount(np.array(self.parents[1:]), minlength=self.num_nodes)
    nodes = np.arange(1, self.num_nodes)
    inner, leaves = nodes[counts[1:] > 0], nodes[counts[1:] == 0]
    return np.concatenate([[0], inner[np.argsort(slots[inner])], leaves])

  def propose(self, params: chex.ArrayTree, uniforms: jax.Array,
              state: DecodeState) -> tuple[Draft, Any]:
    """Returns a sampled tree for each row, and the result of the first layers.

    The result is a `Begun`, or None if `shares_pass` is False.
    """
    target, rows = params["target"], state.lengths.shape[0]

    def read(tokens, depths, ancestors, cache):
      return self.model.run(
          target, Sublayers.between(0, self.exit), tokens, depths,
          jnp.tile(ancestors, (rows, 1, 1)) if ancestors.ndim == 2 else
          ancestors, cache)

    def step(tokens, depths, ancestors, above, carry):
      del above
      cache, states = carry
      # The mask has no column for the root. In the cache, the root's keys and
      # values precede those of the other nodes, and all nodes attend to the
      # root. So a column of True is added at the start.
      ancestors = jnp.pad(
          ancestors, ((0, 0), (0, 0), (1, 0)), constant_values=True)
      out = read(tokens, depths + 1, ancestors, cache)
      return out.logits, (out.cache, (*states, out.hidden))

    roots = rounds.roots(state)
    first = read(roots[:, None], jnp.zeros((rows, 1), jnp.int32),
                 jnp.ones((1, 1), bool), state.target_cache)
    step, carry, logits = constraints_lib.steered(
        self.transform.constraints, state.constraints, step,
        (first.cache, (first.hidden,)), first.logits[:, 0])
    tokens, probs, ((cache, states), _) = self.draw(
        step, carry, logits, uniforms, state)
    draft = _common.tree_drafts(state, self.parents, tokens, probs)
    if not self.shares_pass:
      return draft, None
    order = self._order
    leaves = order[sum(x.shape[1] for x in states):]
    depths = np.array(shapes.depths(self.parents), np.int32)[leaves]
    reach = topology.ancestors(jnp.array(self.parents, jnp.int32))
    rest = read(draft.tokens[:, leaves], jnp.tile(depths, (rows, 1)),
                reach[leaves][:, order], cache)
    return draft, Begun(cache=rest.cache, hidden=jnp.concatenate(
        [*states, rest.hidden], axis=1))

  def target_pass(self, target: Model, params: chex.ArrayTree,
                  drafter: chex.ArrayTree, draft: Draft, depths: jax.Array,
                  ancestors: jax.Array, cache: Cache) -> ModelOutput:
    """Returns the target's output on the draft.

    If `propose` already ran the first layers on the draft (`shares_pass`), only
    the other layers run.
    """
    if drafter is None:
      return self.model(
          params["target"], draft.tokens, depths, ancestors, cache)
    order = self._order
    places = np.argsort(order)
    out = self.model.run(
        params["target"],
        Sublayers.between(self.exit, self.model.config.layers), None,
        depths[:, order], ancestors[:, order][:, :, order], drafter.cache,
        hidden=drafter.hidden)
    return ModelOutput(
        logits=out.logits[:, places], hidden=out.hidden[:, places],
        cache=_Reordered(
            cache=out.cache, places=jnp.array(places, jnp.int32)))

  def commit(self, params: chex.ArrayTree, drafter: chex.ArrayTree,
             draft: Draft, verdict: Verdict, target_output: ModelOutput,
             count: jax.Array,
             own: jax.Array) -> Any:
    """Returns None, because the drafter has no state between rounds."""
    del params, drafter, draft, verdict, target_output, count
    return None

  def param_specs(self, axis: str, size: int) -> PartitionSpec:
    """Returns an empty `PartitionSpec`, because there are no parameters."""
    del axis, size
    return PartitionSpec()
