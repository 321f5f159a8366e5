"""Drafting from the distributions of a block: DFlash, DSpark, DDTree.

DFlash (arXiv:2602.06036), DSpark (arXiv:2607.05147), DDTree (arXiv:2604.12989).
In a round a few draft layers run one pass over a block, which predicts K
tokens. With a Markov head the tokens are drawn from left to right, with one
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
from specjax.methods.features import _drafter
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
      the last. They are computed from the target's features, and the target has
      not read the last token yet.
    rule: state of the stop rule; () without one.
  """

  cache: Any
  rule: Any = ()


class BlockDrafter(Drafter):
  """Base of drafters with a block-parallel network.

  Subclasses are frozen dataclasses with `heads`, `cache`, `transform`, `target`
  (set by `bind`), `depth` and `num_nodes`. `params["drafter"]` contains the
  parameters of the heads. Keys and values of a draft block are dropped after
  the round. `commit` computes the keys and values of accepted tokens from the
  target's features in the verifying pass.
  """

  conditional = True
  autoregressive = False  # q depends on the position where the block began

  def bind(self, target: Model, transform: LogitsTransform) -> Any:
    """Returns the drafter specialised to a target."""
    self.heads.check_fits(target)
    if self.depth > self.heads.num_forecasts:
      raise ValueError(
          f"the draft is {self.depth} tokens deep, but a block predicts "
          f"{self.heads.num_forecasts}: reduce the depth, or train heads with "
          "a larger block_size")
    return _common.with_transform(self, transform, target=target)

  def init(self, params: chex.ArrayTree, prompt: Prompt,
           prefill_output: ModelOutput) -> ParallelState:
    """Returns the state with all tokens of the prompts except the last."""
    batch, columns = prompt.tokens.shape
    empty = self.heads.init_cache(
        params["drafter"], batch, prompt.capacity, self.cache)
    places = jnp.arange(columns, dtype=jnp.int32)
    cache = self._extended(
        params["drafter"], empty, prefill_output.hidden,
        jnp.broadcast_to(places, (batch, columns)))
    return ParallelState(cache=cache.rollback(prompt.lengths - 1))

  def _extended(self, params, cache, hidden, positions):
    """Returns the cache with the keys and values of tokens as its block.

    They are computed from the hidden states `[B, S, ...]` of the target.
    """
    heads = self.heads
    context = heads.context(params, heads.tap(self.target, hidden))
    return heads.with_context(params, cache, context, positions)

  def forecast(self, params: chex.ArrayTree, state: DecodeState):
    """Returns hidden states `[B, K, D]` and logits `[B, K, Vd]` of blocks."""
    hidden = self.heads.block(params["drafter"], params["target"],
                              rounds.roots(state), state.drafter.cache)
    hidden = hidden[:, :self.depth]
    return hidden, self.heads.logits(params["target"], hidden)

  def steps(self, params: chex.ArrayTree, state: DecodeState, hidden: jax.Array,
            logits: jax.Array):
    """Returns the `step`, `carry` and `logits` of `_trees.grow` for a block.

    The carry contains the states of the Markov head at the nodes of a level.
    The logits `[B, V]` predict the token after the root.
    """
    heads, own, roots = self.heads, params["drafter"], rounds.roots(state)

    def step(tokens, depths, ancestors, above, carry):
      del ancestors
      at = depths[..., None] + 1  # the slot of the token after a node
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
             verdict: Verdict, target_output: ModelOutput, count: jax.Array
             ) -> ParallelState:
    """Adds the keys and values of committed tokens except the last."""
    del draft
    path = verdict.path[:, :self.depth + 1]
    hidden = jnp.take_along_axis(
        target_output.hidden, path[..., None], axis=1)
    before = drafter.cache.lengths
    places = jnp.arange(path.shape[1], dtype=jnp.int32)
    cache = self._extended(params["drafter"], drafter.cache, hidden,
                           before[:, None] + places)
    return drafter.replace(cache=cache.rollback(before + count))

  def catch_up(self, params: chex.ArrayTree, state: DecodeState,
               since: jax.Array) -> Any:
    """Returns the state unchanged because `commit` reads all tokens."""
    del params, since
    return state.drafter

  def param_specs(self, axis: str, size: int) -> PartitionSpec:
    """Replicates the network."""
    check_divisible("kv_heads of the block-parallel network",
                    self.heads.kv_heads, size, axis)
    return PartitionSpec()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parallel(BlockDrafter, _trees.StaticTree):
  """Samples a static tree or a chain from the distributions of a block.

  Without a Markov head all nodes of a depth have the same draft distribution
  (DFlash). With a Markov head the distribution of a node depends on its
  parent's token (DSpark).

  A stop rule shortens a chain after it is drawn, because all its distributions
  come from one pass. The decision to drop a token uses only earlier tokens.
  Rules with parameters use the parameters of the confidence head, and its input
  as `hidden`.

  Attributes:
    heads: block-parallel network of the target, which predicts K tokens.
    parents: draft tree, at most K deep, see `specjax.trees`, stored
      breadth-first; `range(-1, K)` is a chain of K tokens.
    proposal: sampling method of children, see `drafters.DraftModelTree`.
    transform: transform of the draft logits; None: the decoder's. Any transform
      is lossless, because the verifier gets the distributions after it.
    stop: stop rule for chains; None: all chains have K tokens.
    cache: class of the draft layers' cache.
    target: target model; `bind` sets it.
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
    """Returns a chain of `gamma` tokens; None if the drafts are trees."""
    if not self.chain:
      return None
    return dataclasses.replace(self, parents=tuple(range(-1, gamma)))

  def bind(self, target: Model, transform: LogitsTransform) -> "Parallel":
    """Returns the drafter specialised to a target."""
    _drafter.check_children(self.heads, 1 if self.iid else self._most_children)
    return _trees.StaticTree.bind(
        BlockDrafter.bind(self, target, transform), target, transform)

  def init(self, params: chex.ArrayTree, prompt: Prompt,
           prefill_output: ModelOutput) -> ParallelState:
    """Returns the state after the prompts, with the stop rule's state."""
    state = super().init(params, prompt, prefill_output)
    if self.stop is None:
      return state
    return state.replace(
        rule=stop_rules.init_state(self.stop, len(prompt.lengths)))

  def propose(self, params: chex.ArrayTree, uniforms: jax.Array,
              state: DecodeState) -> tuple[Draft, ParallelState]:
    """Drafts a tree for each row."""
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
    """Returns `probs [B, K, V]` of chains, with 0 after the rule's stop."""
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
             verdict: Verdict, target_output: ModelOutput, count: jax.Array
             ) -> ParallelState:
    """Adds the committed tokens and updates the stop rule's state."""
    new = super().commit(params, drafter, draft, verdict, target_output, count)
    if self.stop is None:
      return new
    return new.replace(rule=stop_rules.update(
        self.stop, drafter.rule, draft, verdict, count))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelTree(BlockDrafter):
  """Drafts the most likely paths of a block deterministically.

  Without a Markov head, the draft is DDTree's tree, the N - 1 most likely paths
  under the K distributions (`_slot_trees`). With a Markov head or under
  constraints, a distribution depends on the path. Then each level expands its
  `top_k` most likely nodes, as in EAGLE-2 (`_dynamic_trees.expand`). The tree
  is a deterministic function of the context, so `TargetWalk` is exact.

  Attributes:
    heads: block-parallel network of the target, which predicts K tokens.
    num_nodes: number of nodes N, including the root.
    depth: number of tokens of the longest path, at most K; None: K.
    top_k: number of expanded nodes per level, and of children of each.
    transform: transform of logits to the probabilities of paths. It is separate
      from the decoder's, because at temperature 0 all but one probability would
      be 0.
    cache: class of the draft layers' cache.
    target: target model; `bind` sets it.
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
    """Drafts a tree for each row."""
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
    # `probs` is one-hot, also if the network's output is NaN. NaN is copied to
    # it, so that the decoding loop reports the error.
    probs = jnp.where(jnp.isnan(values)[:, None], jnp.nan, probs)
    return Draft.tree(root, parents, tokens, probs)


def parallel(heads: ParallelHeads, gamma: int | None = None,
             parents: Sequence[int] | None = None, proposal: str = "iid",
             verifier: Verifier = BLOCK,
             stop: stop_rules.StopRule | None = None) -> Strategy:
  """Samples a chain or a tree from the distributions of a block.

  DSpark (arXiv:2607.05147) has a Markov head, which conditions each token on
  the previous one; DFlash (arXiv:2602.06036) does not. Both papers use chains
  and token verification.

  >>> from specjax import methods
  >>> own = methods.ParallelHeads(
  ...     width=8, vocab_size=7, layers=1, heads=1, kv_heads=1, head_dim=8,
  ...     mlp_width=8, context_length=64, block_size=3, taps=(1,))
  >>> parallel(own).drafter.parents, parallel(own).verifier
  ((-1, 0, 1, 2), Block())

  Args:
    heads: block-parallel network of the target, which predicts K tokens.
    gamma: drafted tokens of a chain, at most K; None: K.
    parents: draft tree of N nodes; None: a chain.
    proposal: sampling method of children, see `drafters.DraftModelTree`.
    verifier: verification rule for these drafts.
    stop: stop rule of a chain; None: all chains have gamma tokens.
  """
  if parents is None:
    most = heads.num_forecasts
    parents = range(-1, most if gamma is None else min(gamma, most))
  return Strategy(Parallel(
      heads=heads, parents=tuple(parents), proposal=proposal, stop=stop),
      verifier)


def ddtree(heads: ParallelHeads, num_nodes: int = 64) -> Strategy:
  """Drafts the most likely paths of a block, verified by `TargetWalk`.

  DDTree (arXiv:2604.12989). Without a Markov head, the draft consists of the
  N - 1 most likely paths under the block's distributions.

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
