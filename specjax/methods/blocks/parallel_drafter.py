"""Drafters of DFlash, DSpark and DDTree, with a block-parallel network.

DFlash (arXiv:2602.06036), DSpark (arXiv:2607.05147), DDTree (arXiv:2604.12989).
In each round, a few draft layers run one pass over a block and predict K
tokens. With a Markov head the tokens are sampled from left to right, with one
product of rank r per token. See `parallel_network`.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import chex
from flax import struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from specjax import verifiers
from specjax.caches.dense import KVCache
from specjax.decoding import constraining as constraints_lib
from specjax.decoding import rounds
from specjax.interfaces import Cache
from specjax.interfaces import Drafter
from specjax.interfaces import Model
from specjax.interfaces import Verifier
from specjax.methods import _common
from specjax.methods import _dynamic_trees
from specjax.methods import _trees
from specjax.methods import stop_rules
from specjax.methods.blocks import _coupling
from specjax.methods.blocks import _slot_trees
from specjax.methods.blocks.parallel_network import ParallelHeads
from specjax.methods.strategy import BLOCK
from specjax.methods.strategy import Strategy
from specjax.models.transformer import Transformer
from specjax.sampling import LogitsTransform
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.types import Verdict
from specjax.utils import fields
from specjax.utils.fields import check_divisible


@struct.dataclass
class ParallelState:
  """State of a block-parallel drafter.

  Attributes:
    cache: keys and values of the draft layers for all committed tokens except
      the last. The layers compute them from the target's features, and the
      target has not read the last token yet.
    rule: state of the stop rule. () without a stop rule.
  """

  cache: Any
  rule: Any = ()


class BlockDrafter(Drafter):
  """Base class of drafters with a block-parallel network.

  Subclasses are frozen dataclasses with `heads`, `cache`, `transform`, `target`
  (set by `bind`), `depth` and `num_nodes`. `params["drafter"]` contains the
  parameters of the heads. The keys and values of a draft block are not stored.
  `commit` computes the keys and values of accepted tokens from the target's
  features in the target call.
  """

  conditional = True
  autoregressive = False  # q depends on the start position of the block
  rests = True  # `commit` adds all committed tokens

  def bind(self, target: Model, transform: LogitsTransform) -> Any:
    """Returns a copy with the target and the transform set.

    Raises:
      ValueError: the heads do not fit the target, or the draft is deeper than
        the number of predicted tokens.
    """
    self.heads.check_fits(target)
    if self.depth > self.heads.num_forecasts:
      raise ValueError(
          f"the draft is {self.depth} tokens deep, but a block predicts "
          f"{self.heads.num_forecasts}: reduce the depth, or train heads with "
          "a larger block_size")
    return _common.with_transform(self, transform, target=target)

  def init(self, params: chex.ArrayTree, prompt: Prompt,
           prefill_output: ModelOutput) -> ParallelState:
    """Returns the state after prefill.

    The cache contains all tokens of the prompts except the last.
    """
    batch, columns = prompt.tokens.shape
    empty = self.heads.init_cache(
        params["drafter"], batch, prompt.capacity, self.cache)
    places = jnp.arange(columns, dtype=jnp.int32)
    cache = self._extended(
        params["drafter"], empty, prefill_output.hidden,
        jnp.broadcast_to(places, (batch, columns)))
    return ParallelState(cache=cache.rollback(prompt.lengths - 1))

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

  def forecast(self, params: chex.ArrayTree, state: DecodeState):
    """Runs the network on one block per row.

    Returns:
      Hidden states `[B, depth, D]` and logits `[B, depth, Vd]` of the first
      `depth` predictions.
    """
    hidden = self.heads.block(params["drafter"], params["target"],
                              rounds.roots(state), state.drafter.cache)
    hidden = hidden[:, :self.depth]
    return hidden, self.heads.logits(params["target"], hidden)

  def steps(self, params: chex.ArrayTree, state: DecodeState, hidden: jax.Array,
            logits: jax.Array):
    """Returns the arguments `step`, `carry` and `logits` of `_trees.grow`.

    The carry contains the states of the Markov head at the nodes of a level.
    The logits `[B, V]` predict the token after the root.

    Args:
      params: parameters of the target and the drafter.
      state: decoding state.
      hidden: hidden states of the blocks, from `forecast`.
      logits: logits of the blocks, from `forecast`.
    """
    heads, own, roots = self.heads, params["drafter"], rounds.roots(state)

    def step(tokens, depths, ancestors, above, carry):
      del ancestors
      at = depths[..., None] + 1  # slot that predicts the token after a node
      base = jnp.take_along_axis(logits, at, axis=1)
      if heads.markov == "none":
        return heads.whole(base), carry
      carry = jax.tree.map(
          lambda x: jnp.take_along_axis(x, above[..., None], axis=1), carry)
      bias, carry = _coupling.step(
          heads.markov, own["markov"], carry,
          jnp.take_along_axis(hidden, at, axis=1), tokens)
      return heads.whole(base + bias), carry

    root = roots[:, None]
    carry = () if heads.markov == "none" else _coupling.first_state(
        heads.markov, own["markov"], root.shape)
    first, carry = step(root, jnp.full_like(root, -1), None,
                        jnp.zeros_like(root), carry)
    return constraints_lib.steered(
        self.transform.constraints, state.constraints, step, carry,
        first[:, 0])

  def commit(self, params: chex.ArrayTree, drafter: ParallelState, draft: Draft,
             verdict: Verdict, target_output: ModelOutput, count: jax.Array,
             own: jax.Array) -> ParallelState:
    """Returns the state with the keys and values of the new committed tokens.

    The last committed token is excluded.
    """
    del draft
    path = verdict.path[:, :self.depth + 1]
    hidden = jnp.take_along_axis(
        target_output.hidden, path[..., None], axis=1)
    before = drafter.cache.lengths
    places = jnp.arange(path.shape[1], dtype=jnp.int32)
    cache = self._extended(params["drafter"], drafter.cache, hidden,
                           before[:, None] + places)
    return drafter.replace(cache=cache.rollback(before + count))

  def param_specs(self, axis: str, size: int) -> PartitionSpec:
    """Returns an empty `PartitionSpec`, which replicates the network."""
    check_divisible("kv_heads of the block-parallel network",
                    self.heads.kv_heads, size, axis)
    return PartitionSpec()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parallel(BlockDrafter, _trees.StaticTree):
  """Drafter that samples a static tree or a chain from one block.

  Without a Markov head all nodes of a depth have the same draft distribution
  (DFlash). With a Markov head the distribution of a node depends on its
  parent's token (DSpark).

  One pass computes the logits of all tokens. Therefore the drafter first
  samples a complete chain, and then a stop rule drops tokens at its end. The
  decision to drop a token uses only earlier tokens. A rule with parameters uses
  the parameters of the confidence head. Every rule gets the input of the
  confidence head as hidden state.

  Attributes:
    heads: block-parallel network of the target, which predicts K tokens.
    parents: parent index of each node of the draft tree, see `specjax.trees`.
      The depth is at most K. `range(-1, K)` is a chain of K tokens. The nodes
      are stored in breadth-first order.
    proposal: sampling method of children, see `drafters.Tree`.
    transform: transform of the draft logits. None means the target's transform.
      Any transform is lossless, because the verifier gets the transformed
      distributions.
    stop: stop rule for chains. None means that no chain ends early.
    cache: class of the draft layers' cache.
    target: target model, set by `bind`.
  """

  heads: ParallelHeads
  parents: tuple[int, ...]
  proposal: str = "iid"
  transform: LogitsTransform | None = None
  stop: stop_rules.StopRule | None = None
  cache: type[Cache] = KVCache
  target: Transformer | None = None

  def __post_init__(self):
    _trees.StaticTree.__post_init__(self)
    if self.stop is None:
      return
    name = type(self.stop).__name__
    if not self.chain:
      raise ValueError(f"stop is {name}, a rule for chains, and parents is "
                       f"{self.parents}, a tree; leave one of the two out")
    if self.stop.has_params and not getattr(self.stop, "learned", False):
      raise ValueError(f"stop is {name}, which has trained parameters; a block "
                       "supports two rules with parameters, the confidence "
                       "head's: use stop_rules.Scheduler or "
                       "stop_rules.Threshold")
    if self.stop.has_params and self.heads.confidence == "none":
      raise ValueError(f"stop is {name}, which needs a confidence head, and "
                       "confidence of the heads is 'none'; train heads with "
                       "one, or use a rule without parameters")

  @property
  def deterministic(self) -> bool:
    return self.proposal == "top_k"

  def with_gamma(self, gamma: int) -> "Parallel | None":
    """Returns a drafter of chains of `gamma` tokens.

    The result is None if this drafter's drafts are trees.
    """
    if not self.chain:
      return None
    return dataclasses.replace(self, parents=tuple(range(-1, gamma)))

  def bind(self, target: Model, transform: LogitsTransform) -> "Parallel":
    """Returns a copy with the target and the transform set."""
    _common.check_children(self.heads, 1 if self.iid else self._most_children)
    return _trees.StaticTree.bind(
        BlockDrafter.bind(self, target, transform), target, transform)

  def init(self, params: chex.ArrayTree, prompt: Prompt,
           prefill_output: ModelOutput) -> ParallelState:
    """Returns the state after prefill, with the stop rule's state."""
    state = super().init(params, prompt, prefill_output)
    if self.stop is None:
      return state
    return state.replace(
        rule=stop_rules.init_state(self.stop, len(prompt.lengths)))

  def propose(self, params: chex.ArrayTree, uniforms: jax.Array,
              state: DecodeState) -> tuple[Draft, ParallelState]:
    """Returns a draft tree for each row."""
    if self.num_nodes == 1:
      return (rounds.root_only(state, self.heads.vocab_size),
              state.drafter)
    hidden, logits = self.forecast(params, state)
    step, carry, first = self.steps(params, state, hidden, logits)
    tokens, probs, _ = self.draw(step, carry, first, uniforms, state)
    if self.stop is not None:
      probs = self._ended(params, state, hidden, tokens, probs)
    draft = _common.tree_drafts(state, self.parents, tokens, probs)
    return draft, state.drafter.replace(
        rule=stop_rules.record_chains(state.drafter.rule, draft, self.depth))

  def _ended(self, params, state, hidden, tokens, probs):
    """Returns the chains' `probs [B, K, V]`, set to 0 for dropped tokens."""
    own, roots = params["drafter"], rounds.roots(state)
    before = jnp.concatenate([roots[:, None], tokens[:, :-1]], axis=1)
    evidence = self.heads.evidence(own, hidden, before)
    confidence = own["confidence"] if self.stop.has_params else None
    kept = jax.vmap(functools.partial(
        stop_rules.count_tokens, self.stop, confidence))(
            probs, evidence, roots, tokens,
            stop_rules.memory_of(state.drafter.rule))
    place = jnp.arange(tokens.shape[1])
    return jnp.where((place < kept[:, None])[..., None], probs, 0)

  def commit(self, params: chex.ArrayTree, drafter: ParallelState, draft: Draft,
             verdict: Verdict, target_output: ModelOutput, count: jax.Array,
             own: jax.Array) -> ParallelState:
    """Returns the state after a round, with the stop rule's state updated."""
    new = super().commit(
        params, drafter, draft, verdict, target_output, count, own)
    if self.stop is None:
      return new
    return new.replace(rule=stop_rules.update(
        self.stop, drafter.rule, verdict, count, own))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelTree(BlockDrafter):
  """Drafter of deterministic trees, the most likely paths of a block.

  Without a Markov head, the draft is DDTree's tree: its nodes end the N - 1
  most likely paths of any length under the K distributions (`_slot_trees`).
  With a Markov head or with constraints, the distribution of a node depends on
  its path. In this case the `top_k` most likely nodes of each level get
  children, as in EAGLE-2 (`_dynamic_trees.expand`). `TargetWalk` is exact,
  because the tree is a deterministic function of the context.

  Attributes:
    heads: block-parallel network of the target, which predicts K tokens.
    num_nodes: number of nodes N, including the root.
    depth: maximum number of tokens of a path, at most K. None means K.
    top_k: number of nodes per level that get children, and number of children
      of each such node. Without a Markov head and constraints, it is unused.
    transform: transform of logits to the probabilities of paths. It differs
      from the target's transform, because at temperature 0 that transform sets
      all probabilities except one to 0.
    cache: class of the draft layers' cache.
    target: target model, set by `bind`.
  """

  heads: ParallelHeads
  num_nodes: int = 64
  depth: int | None = None
  top_k: int = 10
  transform: LogitsTransform = LogitsTransform()
  cache: type[Cache] = KVCache
  target: Transformer | None = None

  deterministic = True
  num_uniforms = 0
  proposal = "deterministic"

  def __post_init__(self):
    if self.depth is None:
      object.__setattr__(self, "depth", self.heads.num_forecasts)
    fields.check_at_least("top_k", self.top_k, 1)
    if self._expands:
      _dynamic_trees.check_sizes(self.depth, self.top_k, self.num_nodes)
      _dynamic_trees.check_top_k(self.top_k, self.heads.draft_size)
    else:
      _slot_trees.check_sizes(
          self.depth, self.heads.draft_size, self.num_nodes)

  @property
  def _expands(self) -> bool:
    return self.heads.markov != "none" or bool(self.transform.constraints)

  def propose(self, params: chex.ArrayTree, uniforms: jax.Array,
              state: DecodeState) -> tuple[Draft, ParallelState]:
    """Returns a draft tree for each row."""
    del uniforms
    hidden, logits = self.forecast(params, state)
    if not self._expands:
      draft = jax.vmap(self._best)(
          rounds.roots(state), self.heads.whole(logits))
      return draft, state.drafter
    step, carry, first = self.steps(params, state, hidden, logits)
    draft, _, _ = _dynamic_trees.expand(
        step, carry, first, rounds.roots(state), transform=self.transform,
        depth=self.depth, top_k=self.top_k, num_nodes=self.num_nodes)
    return draft, state.drafter

  def _best(self, root, logits):
    tokens, parents, values = _slot_trees.best_tree(
        jnp.log(self.transform(logits)), self.num_nodes)
    probs = jax.nn.one_hot(tokens, logits.shape[-1])
    # `one_hot` returns finite probabilities even if the network's output is
    # NaN. This line copies NaN from `values` to `probs`, so that the decoding
    # loop reports the error.
    probs = jnp.where(jnp.isnan(values)[:, None], jnp.nan, probs)
    return Draft.tree(root, parents, tokens, probs)


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
  >>> parallel(own).drafter.parents, parallel(own).verifier
  ((-1, 0, 1, 2), Block())

  Args:
    heads: block-parallel network of the target, which predicts K tokens.
    gamma: draft length of a chain, at most K. None means K.
    parents: parent index of each node of a draft tree. None means a chain of
      `gamma` tokens.
    proposal: sampling method of children, see `drafters.Tree`.
    verifier: verification rule for these drafts.
    stop: stop rule for chains. None means that no chain ends early.
  """
  if parents is None:
    most = heads.num_forecasts
    parents = range(-1, most if gamma is None else min(gamma, most))
  return Strategy(Parallel(
      heads=heads, parents=tuple(parents), proposal=proposal, stop=stop),
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
  drafter = ParallelTree(
      heads=heads, num_nodes=num_nodes, top_k=min(10, heads.draft_size))
  return Strategy(drafter, verifiers.TargetWalk())
