"""Drafting with a block-parallel network: DFlash, DSpark and DDTree.

DFlash (arXiv:2602.06036), DSpark (arXiv:2607.05147), DDTree (arXiv:2604.12989).
In each round, a few draft layers run one pass over a block and predict K
tokens. With a transition, such as a Markov head, the tokens are sampled from
left to right. See `parallel_network` and `_coupling`.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

from flax import struct
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


@struct.dataclass
class ParallelMemory:
  """Memory of `Parallel` between rounds.

  Attributes:
    cache: keys and values of all committed tokens except the last.
    last: fused features H `[B, D]` of the last of these tokens, 0 if there is
      none. None unless the transition is that of LiLiCorr.
  """

  cache: Cache
  last: jax.Array | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parallel(Network):
  """A block-parallel network, which predicts K tokens in one pass.

  Without a transition all nodes of a depth have the same draft distribution
  (DFlash). With a transition the distribution of a node depends on its parent's
  token (DSpark, DFlash 2, LiLiCorr) or on all tokens of its path (Domino).

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
    return self.heads.children

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

  def init(self, params: Params, prompt: Prompt, output: ModelOutput
           ) -> ParallelMemory:
    batch, columns = prompt.tokens.shape
    empty = self.heads.init_cache(
        params["drafter"], batch, prompt.capacity, self.cache)
    places = jnp.arange(columns, dtype=jnp.int32)
    cache, context = self._extended(
        params["drafter"], empty, output.hidden,
        jnp.broadcast_to(places, (batch, columns)))
    length = prompt.lengths - 1
    last = None
    if self.heads.markov == "lilicorr":
      last = jnp.where((length > 0)[:, None], _at(context, length - 1), 0)
    return ParallelMemory(cache=cache.rollback(length), last=last)

  def _extended(self, params, cache, hidden, positions):
    """Returns the cache with S more tokens as its block, and their features H.

    Args:
      params: parameters of the heads.
      cache: cache of the draft layers.
      hidden: hidden states `[B, S, ...]` of the target at the tokens.
      positions: positions of the tokens, `[B, S]` int32.
    """
    heads = self.heads
    context = heads.context(params, heads.tap(self.target, hidden))
    return heads.with_context(params, cache, context, positions), context

  def begin(self, params: Params, state: DecodeState, shape: Shape
            ) -> tuple[stop_rules.Forecast, Any]:
    heads, own, roots = self.heads, params["drafter"], rounds.roots(state)
    memory = state.drafter
    hidden = heads.block(own, params["target"], roots, memory.cache)
    # Candidates of LiLiCorr attend to those of all slots, also unused ones.
    if heads.markov != "lilicorr":
      hidden = hidden[:, :shape.depth]
    read = heads.lattice(
        own, params["target"], hidden, heads.logits(params["target"], hidden),
        roots, memory.last)
    root = roots[:, None]
    markov = _coupling.first_state(heads, own.get("markov"), root.shape)
    return self.extend(
        params, root, (read, markov, jnp.zeros((), jnp.int32)))

  def extend(self, params: Params, token: jax.Array, carry: Any
             ) -> tuple[stop_rules.Forecast, Any]:
    read, _, level = carry
    evidence = self.heads.evidence(
        params["drafter"], _slot(read["hidden"], level), token)
    logits, carry = self.step(
        params, token, None, None, jnp.zeros_like(token), carry)
    return (logits[:, 0], evidence[:, 0]), carry

  def step(self, params: Params, tokens: jax.Array, depths: Any,
           ancestors: Any, above: jax.Array, carry: Any
           ) -> tuple[jax.Array, Any]:
    # The carry contains the arrays of all slots, the states of the transition
    # at the nodes of a level, and the level's number.
    read, markov, level = carry
    heads = self.heads
    slot = jax.tree.map(lambda x: _slot(x, level), read)
    if self.is_product:
      logits = slot["logits"]
    else:
      markov = jax.tree.map(
          lambda x: jnp.take_along_axis(x, above[..., None], axis=1), markov)
      slot = jax.tree.map(lambda x: jnp.broadcast_to(
          x, (*tokens.shape, *x.shape[2:])), slot)
      logits, markov = _coupling.step(
          heads, params["drafter"]["markov"], params["target"], markov, slot,
          tokens)
    return heads.whole(logits), (read, markov, level + 1)

  def commit(self, params: Params, memory: ParallelMemory, draft: Draft,
             slots: jax.Array | None, shape: Shape, verdict: Verdict,
             output: ModelOutput, count: jax.Array) -> ParallelMemory:
    path = verdict.path[:, :shape.depth + 1]
    hidden = jnp.take_along_axis(output.hidden, path[..., None], axis=1)
    places = jnp.arange(path.shape[1], dtype=jnp.int32)
    length, last = memory.cache.lengths, memory.last
    cache, context = self._extended(
        params["drafter"], memory.cache, hidden, length[:, None] + places)
    if last is not None:
      last = jnp.where((count > 0)[:, None], _at(context, count - 1), last)
    return ParallelMemory(cache=cache.rollback(length + count), last=last)

  def param_specs(self, axis: str, size: int) -> PartitionSpec:
    check_divisible("kv_heads of the block-parallel network",
                    self.heads.kv_heads, size, axis)
    return PartitionSpec()


def _at(x, index):
  """Returns `x[b, index[b]]` of `x [B, S, D]`, clipped to the S entries."""
  return jnp.take_along_axis(x, index[:, None, None], axis=1, mode="clip")[:, 0]


def _slot(x, level):
  """Returns the slot `[B, 1, ...]` of `x [B, K, ...]` for a level."""
  return jax.lax.dynamic_index_in_dim(x, level, axis=1)


def parallel(heads: ParallelHeads, gamma: int | None = None,
             parents: Sequence[int] | None = None, proposal: str = "iid",
             verifier: Verifier = BLOCK,
             stop: stop_rules.StopRule | None = None) -> Strategy:
  """Returns a strategy that samples a chain or a tree from a block.

  DSpark (arXiv:2607.05147) has a Markov head, which conditions each token on
  the previous one. DFlash (arXiv:2602.06036) has no such transition. Both
  papers use chains and token verification.

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
  below the root ends one path. Without a transition, these are the N - 1 most
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
  shape = Best(depth, min(top_k, heads.children), num_nodes)
  return Strategy(NetworkDrafter(network=Parallel(heads=heads), shape=shape),
                  verifiers.TargetWalk())
