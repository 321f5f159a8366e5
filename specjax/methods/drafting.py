"""One drafter for every network and every shape of drafts.

A `Network` predicts the tokens after drafted tokens. A shape (`draft_shapes`)
decides which tokens are drafted. A `NetworkDrafter` combines them, and decides
capabilities, constraints, stop rules and random numbers once for all pairs.
"""

import dataclasses
import math
from typing import Any

import chex
from flax import struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from specjax import interfaces
from specjax.decoding import rounds
from specjax.interfaces import Cache
from specjax.interfaces import Drafter
from specjax.interfaces import Model
from specjax.methods import _common
from specjax.methods import draft_shapes
from specjax.methods import stop_rules
from specjax.methods.stop_rules import Forecast
from specjax.sampling import LogitsTransform
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.types import Verdict


class Network:
  """Base class of networks that predict the tokens of a draft.

  A network is a frozen dataclass. It knows no draft shape. Its *memory* is a
  pytree of arrays with the batch B as first axis, such as a cache. In a draft,
  the *carry* holds what the network has read so far. All methods receive
  `params`, `{"target": ..., "drafter": ...}`.

  Attributes:
    vocab_size: number V of tokens of the vocabulary.
    draft_size: number of tokens that can be drafted.
    context_length: length in tokens of the longest sequence.
    slack: number of tokens that can be removed from the cache, see
      `Cache.slack`.
    context_only: True if a prediction depends on the tokens alone, and not on
      the position where the draft began.
    reads_rounds: True if `commit` reads the tokens of every round. If False,
      `begin` reads them, and `catch_up` after rounds without drafts.
    stateless: True if the memory is None between rounds.
    shares_pass: True if the drafter provides "shares_pass".
    always_drafts: True if no draft is padding.
    reads_cache: True if the drafter provides "reads_cache".
    has_loop: True if `extend` is the same function for all tokens of a chain.
    is_product: True if no prediction depends on the drafted tokens. `step` then
      returns logits `[B, 1, V]`, which all nodes of a level share.
    has_confidence: True if `params["drafter"]["confidence"]` predicts
      acceptance. Stop rules with `learned` read it.
    target_calls: target calls in a round, see `Drafter.target_calls`.
    deepest: largest depth of a draft.
  """

  vocab_size: int
  context_length: float = math.inf
  slack: float = math.inf
  context_only = False
  reads_rounds = False
  stateless = False
  shares_pass = False
  reads_cache = False
  always_drafts = False
  has_loop = True
  is_product = False
  has_confidence = False
  target_calls = 1
  deepest: float = math.inf

  @property
  def draft_size(self) -> int:
    return self.vocab_size

  def bind(self, target: Model) -> "Network":
    """Returns the network specialised to a target.

    Raises:
      ValueError: the network does not fit the target.
    """
    _common.check_vocabulary(self, target)
    return self

  def init(self, params: chex.ArrayTree, prompt: Prompt, output: ModelOutput
           ) -> Any:
    """Returns the memory after the prompts. `output` is the target's."""
    raise NotImplementedError

  def begin(self, params: chex.ArrayTree, state: DecodeState,
            shape: draft_shapes.Shape) -> tuple[Forecast, Any]:
    """Returns the forecast of the token after the root, and the carry.

    Args:
      params: see the class.
      state: decoding state, with the memory as `state.drafter`.
      shape: shape of the draft. The network will read `shape.fed` tokens.
    """
    raise NotImplementedError

  def step(self, params: chex.ArrayTree, tokens: jax.Array, depths: jax.Array,
           ancestors: jax.Array, above: jax.Array, carry: Any
           ) -> tuple[jax.Array, Any]:
    """Reads one level of a tree. `methods._trees` explains the arguments."""
    raise NotImplementedError

  def extend(self, params: chex.ArrayTree, token: jax.Array, carry: Any
             ) -> tuple[Forecast, Any]:
    """Reads the next token `[B, 1]` of a chain; returns the next forecast."""
    raise NotImplementedError

  def end(self, params: chex.ArrayTree, memory: Any, carry: Any, draft: Draft,
          slots: jax.Array | None) -> tuple[Draft, Any]:
    """Returns the draft and the memory after all draft steps.

    Args:
      params: see the class.
      memory: memory before the draft.
      carry: carry after the last step.
      draft: drafts of all rows.
      slots: see `draft_shapes.Shape.grow`.
    """
    del params, carry, slots
    return draft, memory

  def commit(self, params: chex.ArrayTree, memory: Any, draft: Draft,
             slots: jax.Array | None, shape: draft_shapes.Shape,
             verdict: Verdict, output: ModelOutput, count: jax.Array) -> Any:
    """Returns the memory after a round, see `Drafter.commit`."""
    raise NotImplementedError

  def target_pass(self, target: Model, params: chex.ArrayTree, memory: Any,
                  draft: Draft, depths: jax.Array, ancestors: jax.Array,
                  cache: Cache) -> ModelOutput:
    """Runs the target over the draft, see `Drafter.target_pass`."""
    del memory
    return target(params["target"], draft.tokens, depths, ancestors, cache)

  def catch_up(self, params: chex.ArrayTree, state: DecodeState,
               since: jax.Array) -> Any:
    """Returns the memory after reading tokens of draft-free rounds.

    The default is for networks that have nothing to read, because they are
    stateless or have `reads_rounds`. See `Drafter.catch_up`.
    """
    del params, since
    return state.drafter

  def param_specs(self, axis: str, size: int) -> Any:
    """Returns the `PartitionSpec` of the parameters; the default is replicated.
    """
    del axis, size
    return PartitionSpec()


@struct.dataclass
class NetworkState:
  """State of a `NetworkDrafter`.

  Attributes:
    memory: memory of the network.
    slots: `[B, N]` int32, slots of the nodes of the last draft, see
      `draft_shapes.Shape.grow`; None if the shape is not dynamic.
    rule: state of the stop rule; None without a rule.
  """

  memory: Any
  slots: jax.Array | None = None
  rule: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkDrafter(Drafter):
  """Drafts a shape with a network.

  >>> from specjax import drafters, testing
  >>> network = drafters.LanguageModel(model=testing.MarkovModel(7))
  >>> chain = drafters.NetworkDrafter(
  ...     network=network, shape=drafters.Chain(gamma=4))
  >>> tree = drafters.NetworkDrafter(
  ...     network=network, shape=drafters.Best(depth=3, top_k=2, num_nodes=6))
  >>> chain.num_nodes, tree.num_nodes, "deterministic" in tree.provides
  (5, 6, True)

  Attributes:
    network: the network, such as a language model or a layer of EAGLE.
    shape: `Chain`, `Tree`, `Best` or `Sampled`.
    transform: transform of the draft logits; None uses the decoder's transform.
      Any transform is lossless, because the verifier receives the transformed
      distributions. The shape `Best` does not use it.
  """

  network: Network
  shape: draft_shapes.Shape
  transform: LogitsTransform | None = None

  @property
  def provides(self) -> tuple[str, ...]:
    shape, network, stop = self.shape, self.network, self.shape.stop
    is_chain = isinstance(shape, draft_shapes.Chain)
    reads_later = network.stateless or (
        type(network).catch_up is not Network.catch_up and is_chain)
    return interfaces.provided(
        chain=shape.chain, iid=shape.iid, conditional=True,
        deterministic=shape.deterministic,
        # Unless children are i.i.d., q of a child also depends on its earlier
        # siblings. With a stop rule, rows of `probs` after the end of a chain
        # are 0, and the end depends on where the draft began. A draft of depth
        # 1 begins where it ends.
        autoregressive=shape.iid and stop is None and (
            network.context_only or shape.depth <= 1),
        # If a constraint forbids all tokens, a node is padding.
        full=network.always_drafts and stop is None and is_chain and not (
            self.transform and self.transform.constraints),
        rests=network.reads_rounds or reads_later,
        follows=reads_later, reads_cache=network.reads_cache,
        shares_pass=network.shares_pass)

  @property
  def num_nodes(self) -> int:
    return self.shape.num_nodes

  @property
  def target_calls(self) -> int:
    return self.network.target_calls

  @property
  def depth(self) -> int:
    return self.shape.depth

  @property
  def num_uniforms(self) -> int:
    return self.shape.num_uniforms

  @property
  def stop(self) -> stop_rules.StopRule | None:
    return self.shape.stop

  @property
  def context_length(self) -> float:
    return self.network.context_length

  @property
  def slack(self) -> float:
    return self.network.slack

  def with_gamma(self, gamma: int) -> "NetworkDrafter | None":
    shape = self.shape.with_gamma(gamma)
    return shape and dataclasses.replace(self, shape=shape)

  def bind(self, target: Model, transform: LogitsTransform) -> "NetworkDrafter":
    network = self.network.bind(target)
    _common.check_children(network, self.shape.siblings)
    _common.check_depth(self.shape.depth, network.deepest)
    rounds.check_slack(network, self.shape.depth + 2)
    return dataclasses.replace(
        self, network=network, shape=self.shape.under(transform),
        transform=(self.transform or transform).under(transform))

  @property
  def _separate_rule(self) -> bool:
    """True if the parameters of the stop rule are no part of the network's."""
    return self.stop is not None and self.stop.has_params and not (
        self.stop.learned and self.network.has_confidence)

  def _split(self, params: chex.ArrayTree) -> tuple[Any, Any]:
    """Returns the parameters without those of the stop rule, and these."""
    # A stateless network, such as an early exit, may have no parameters.
    own = params.get("drafter") if self.network.stateless else params["drafter"]
    if self._separate_rule:
      own, rule = stop_rules.split_params(self.stop, own)
      return {**params, "drafter": own}, rule
    is_read = self.stop is not None and self.stop.has_params
    return params, own["confidence"] if is_read else None

  def init(self, params: chex.ArrayTree, prompt: Prompt,
           prefill_output: ModelOutput) -> NetworkState:
    missing = max(0, self.shape.fed - self.num_nodes)
    prompt = prompt.replace(capacity=prompt.capacity + missing)
    return self.first_state(self.network.init(
        self._split(params)[0], prompt, prefill_output), len(prompt.lengths))

  def first_state(self, memory: Any, rows: int) -> NetworkState:
    """Returns the state before the first round of `rows` rows."""
    return NetworkState(
        memory=memory,
        slots=jnp.zeros((rows, self.num_nodes), jnp.int32)
        if self.shape.is_dynamic else None,
        rule=self.stop and stop_rules.init_state(self.stop, rows))

  def propose(self, params: chex.ArrayTree, uniforms: jax.Array,
              state: DecodeState) -> tuple[Draft, NetworkState]:
    before = state.drafter
    if self.num_nodes == 1:
      return rounds.root_only(state, self.network.vocab_size), before
    params, rule_params = self._split(params)
    own = state.replace(drafter=before.memory)
    first, carry = self.network.begin(params, own, self.shape)
    draft, carry, slots = self.shape.grow(
        self.network, params, first, carry, uniforms, own, self.transform,
        (rule_params, before.rule))
    rule = self.stop and stop_rules.record_chains(
        before.rule, draft, self.shape.depth)
    draft, memory = self.network.end(
        params, before.memory, carry, draft, slots)
    return draft, NetworkState(
        memory=memory, slots=slots if self.shape.is_dynamic else None,
        rule=rule)

  def commit(self, params: chex.ArrayTree, drafter: NetworkState, draft: Draft,
             verdict: Verdict, target_output: ModelOutput, count: jax.Array,
             own: jax.Array) -> NetworkState:
    slots = drafter.slots
    if self.shape.fixed_slots is not None:
      slots = jnp.tile(self.shape.fixed_slots, (len(count), 1))
    memory = self.network.commit(
        self._split(params)[0], drafter.memory, draft, slots, self.shape,
        verdict, target_output, count)
    return drafter.replace(
        memory=memory, rule=self.stop and stop_rules.update(
            self.stop, drafter.rule, verdict, count, own))

  def target_pass(self, target: Model, params: chex.ArrayTree,
                  drafter: NetworkState, draft: Draft, depths: jax.Array,
                  ancestors: jax.Array, cache: Cache) -> ModelOutput:
    return self.network.target_pass(
        target, params, drafter.memory, draft, depths, ancestors, cache)

  def catch_up(self, params: chex.ArrayTree, state: DecodeState,
               since: jax.Array) -> NetworkState:
    own = state.replace(drafter=state.drafter.memory)
    return state.drafter.replace(memory=self.network.catch_up(
        self._split(params)[0], own, since))

  def param_specs(self, axis: str, size: int) -> Any:
    specs = self.network.param_specs(axis, size)
    return {"model": specs, "stop": PartitionSpec()
            } if self._separate_rule else specs
