"""Drafting with a block-parallel network: DFlash, DSpark and DDTree.

DFlash (arXiv:2602.06036), DSpark (arXiv:2607.05147), DDTree (arXiv:2604.12989).
In each round, a few draft layers run one pass over a block and predict K
tokens. With a Markov head the tokens are sampled from left to right, with one
product of rank r per token. See `parallel_network`.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from specjax import verifiers
from specjax.caches.dense import KVCache
from specjax.decoding import rounds
from specjax.interfaces import Cache
from specjax.interfaces import Model
from specjax.interfaces import Verifier
from specjax.methods import _dynamic_trees
from specjax.methods import stop_rules
from specjax.methods.blocks import _coupling
from specjax.methods.blocks.parallel_network import ParallelHeads
from specjax.methods.draft_shapes import Best
from specjax.methods.draft_shapes import Chain
from specjax.methods.draft_shapes import Shape
from specjax.methods.draft_shapes import Tree
from specjax.methods.drafting import Network
from specjax.methods.drafting import NetworkDrafter
from specjax.methods.networks import Params
from specjax.methods.strategy import BLOCK
from specjax.methods.strategy import Strategy
from specjax.models.transformer import Transformer
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.types import Verdict
from specjax.utils.fields import check_divisible


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parallel(Network):
  """A block-parallel network, which predicts K tokens in one pass.

  Without a Markov head all nodes of a depth have the same draft distribution
  (DFlash). With a Markov head the distribution of a node depends on its
  parent's token (DSpark).

  `params["drafter"]` contains the parameters of the heads. The cache has the
  keys and values of all committed tokens except the last, which the target has
  not read yet. They are computed from the target's features. Those of a draft
  block are not stored. Stop rules get the input of the confidence head as
  hidden state.

  Attributes:
    heads: block-parallel network of the target, which predicts K tokens.
    cache: class of the draft layers' cache.
    target: target model, set by `bind`.
  """

  heads: ParallelHeads
  cache: type[Cache] = KVCache
  target: Transformer | None = None

  reads_rounds = True

  @property
  def vocab_size(self) -> int:
    return self.heads.vocab_size

  @property
  def draft_size(self) -> int:
    return self.heads.draft_size

  @property
  def deepest(self) -> int:
    return self.heads.num_forecasts

  @property
  def is_product(self) -> bool:
    return self.heads.markov == "none"

  @property
  def has_confidence(self) -> bool:
    return self.heads.confidence != "none"

  def bind(self, target: Model) -> "Parallel":
    self.heads.check_fits(target)
    return dataclasses.replace(self, target=target)

  def init(self, params: Params, prompt: Prompt, output: ModelOutput) -> Cache:
    batch, columns = prompt.tokens.shape
    empty = self.heads.init_cache(
        params["drafter"], batch, prompt.capacity, self.cache)
    places = jnp.arange(columns, dtype=jnp.int32)
    cache = self._extended(params["drafter"], empty, output.hidden,
                           jnp.broadcast_to(places, (batch, columns)))
    return cache.rollback(prompt.lengths - 1)

  def _extended(self, params, cache, hidden, positions):
    """Returns the cache with the keys and values of S tokens as its block.

    Args:
      params: parameters of the heads.
      cache: cache of the draft layers.
      hidden: hidden states `[B, S, ...]` of the target at the tokens.
      positions: positions of the tokens, `[B, S]` int32.
    """
    heads = self.heads
    context = heads.context(params, heads.tap(self.target, hidden))
    return heads.with_context(params, cache, context, positions)

  def begin(self, params: Params, state: DecodeState, shape: Shape
            ) -> tuple[stop_rules.Forecast, Any]:
    heads, own, roots = self.heads, params["drafter"], rounds.roots(state)
    hidden = heads.block(own, params["target"], roots, state.drafter)
    hidden = hidden[:, :shape.depth]
    logits = heads.logits(params["target"], hidden)
    root = roots[:, None]
    markov = () if self.is_product else _coupling.first_state(
        heads.markov, own["markov"], root.shape)
    return self.extend(
        params, root, (hidden, logits, markov, jnp.zeros((), jnp.int32)))

  def extend(self, params: Params, token: jax.Array, carry: Any
             ) -> tuple[stop_rules.Forecast, Any]:
    hidden, _, _, level = carry
    evidence = self.heads.evidence(
        params["drafter"], _slot(hidden, level), token)
    logits, carry = self.step(
        params, token, None, None, jnp.zeros_like(token), carry)
    return (logits[:, 0], evidence[:, 0]), carry

  def step(self, params: Params, tokens: jax.Array, depths: Any,
           ancestors: Any, above: jax.Array, carry: Any
           ) -> tuple[jax.Array, Any]:
    # The carry contains the hidden states and the logits of all slots, the
    # states of the Markov head at the nodes of a level, and the level's number.
    hidden, slots, markov, level = carry
    heads, logits = self.heads, _slot(slots, level)
    if not self.is_product:
      markov = jax.tree.map(
          lambda x: jnp.take_along_axis(x, above[..., None], axis=1), markov)
      own = jnp.broadcast_to(
          _slot(hidden, level), (*tokens.shape, hidden.shape[-1]))
      bias, markov = _coupling.step(
          heads.markov, params["drafter"]["markov"], markov, own, tokens)
      logits = logits + bias
    return heads.whole(logits), (hidden, slots, markov, level + 1)

  def commit(self, params: Params, memory: Cache, draft: Draft,
             slots: jax.Array | None, shape: Shape, verdict: Verdict,
             output: ModelOutput, count: jax.Array) -> Cache:
    path = verdict.path[:, :shape.depth + 1]
    hidden = jnp.take_along_axis(output.hidden, path[..., None], axis=1)
    places = jnp.arange(path.shape[1], dtype=jnp.int32)
    cache = self._extended(params["drafter"], memory, hidden,
                           memory.lengths[:, None] + places)
    return cache.rollback(memory.lengths + count)

  def param_specs(self, axis: str, size: int) -> PartitionSpec:
    check_divisible("kv_heads of the block-parallel network",
                    self.heads.kv_heads, size, axis)
    return PartitionSpec()


def _slot(x, level):
  """Returns the slot `[B, 1, ...]` of `x [B, K, ...]` for a level."""
  return jax.lax.dynamic_index_in_dim(x, level, axis=1)


def parallel(heads: ParallelHeads, gamma: int | None = None,
             parents: Sequence[int] | None = None, proposal: str = "iid",
             verifier: Verifier = BLOCK,
             stop: stop_rules.StopRule | None = None) -> Strategy:
  """Returns a strategy that samples a chain or a tree from a block.

  DSpark (arXiv:2607.05147) has a Markov head, which conditions each token on
  the previous one. DFlash (arXiv:2602.06036) has no Markov head. Both papers
  use chains and token verification.

  >>> from specjax import methods
  >>> own = methods.ParallelHeads(
  ...     width=8, vocab_size=7, layers=1, heads=1, kv_heads=1, head_dim=8,
  ...     mlp_width=8, context_length=64, block_size=3, taps=(1,))
  >>> parallel(own).drafter.shape.gamma, parallel(own).verifier
  (3, Block())

  Args:
    heads: block-parallel network of the target, which predicts K tokens.
    gamma: draft length of a chain, at most K. None means K.
    parents: parent index of each node of a draft tree. None means a chain of
      `gamma` tokens.
    proposal: sampling method of children, see `drafters.Tree`.
    verifier: verification rule for these drafts.
    stop: stop rule for sampled chains, see `drafters.Chain`. None means that no
      chain ends early.

  Raises:
    ValueError: `stop` is given for a tree or a deterministic chain.
  """
  gamma = min(heads.num_forecasts if gamma is None else gamma,
              heads.num_forecasts)
  if parents is None and proposal == "iid":
    shape = Chain(gamma, stop)
  elif stop is None:
    shape = Tree(range(-1, gamma) if parents is None else tuple(parents),
                 proposal)
  else:
    raise ValueError(
        f"stop is {type(stop).__name__}, a rule for sampled chains, with "
        f"parents {parents} and proposal {proposal!r}: leave parents and "
        "proposal out, or stop")
  return Strategy(NetworkDrafter(network=Parallel(heads=heads), shape=shape),
                  verifier)


def ddtree(heads: ParallelHeads, num_nodes: int = 64) -> Strategy:
  """Returns a strategy that drafts the most likely paths of a block.

  DDTree (arXiv:2604.12989). The verifier is `TargetWalk`. Every node
  below the root ends one path. Without a Markov head, these are the N - 1 most
  likely paths of any length under the block's distributions.

  >>> from specjax import methods
  >>> own = methods.ParallelHeads(
  ...     width=8, vocab_size=7, layers=1, heads=1, kv_heads=1, head_dim=8,
  ...     mlp_width=8, context_length=64, block_size=3, taps=(1,))
  >>> ddtree(own, num_nodes=12).verifier
  TargetWalk()

  Args:
    heads: block-parallel network of the target.
    num_nodes: number of nodes N, including the root.
  """
  depth, top_k = heads.num_forecasts, 10
  while num_nodes > _dynamic_trees.most_nodes(depth, top_k):
    top_k += 1
  shape = Best(depth, min(top_k, heads.draft_size), num_nodes)
  return Strategy(NetworkDrafter(network=Parallel(heads=heads), shape=shape),
                  verifiers.TargetWalk())
