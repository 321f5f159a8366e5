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

from collections.abc import Mapping
import dataclasses
import functools
import math
from typing import Any

import chex
from flax import struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from specjax.decoding import constraining as constraints_lib
from specjax.decoding import rounds
from specjax.interfaces import Cache
from specjax.interfaces import Model
from specjax.interfaces import Verifier
from specjax.methods import _common
from specjax.methods import stop_rules
from specjax.methods.strategy import BLOCK
from specjax.methods.strategy import Strategy
from specjax.models.shortened import check_exit
from specjax.models.sublayers import Sublayers
from specjax.models.transformer import Transformer
from specjax.sampling import inverse_cdf
from specjax.sampling import LogitsTransform
from specjax.sampling import UNIFORMS_A_DRAW
from specjax.trees import topology
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.types import Verdict
from specjax.utils import fields


@struct.dataclass
class Begun:
  """Result of the target's first E layers on a draft of N nodes.

  The verifying pass continues from it at layer E.

  Attributes:
    cache: cache of the target. It contains the keys and values of the N draft
      nodes for the first E layers only.
    hidden: residual stream `[B, N, D]` before layer E, for B rows and width D.
  """

  cache: Any
  hidden: jax.Array


@struct.dataclass
class ExitState:
  """State of a drafter that runs the target's first layers.

  Attributes:
    own: state of a network after these layers, such as the cache of Kangaroo's
      adapter; None without such a network.
    rule: state of the stop rule; () without a stop rule.
    begun: result of the first layers on the current draft, from which the
      verifying pass continues; None after `commit`.
  """

  own: Any = None
  rule: Any = ()
  begun: Any = None


@struct.dataclass
class _Settling(Cache):
  """Wrapper of a cache that calls `settle` in `commit` and `rollback`.

  The wrapped cache has reserved a block for drafted tokens, and `settle` writes
  the accepted ones to the cache.
  """

  cache: Any

  @property
  def lengths(self):
    return self.cache.lengths

  def commit(self, path, count):
    return self.cache.commit(path, count).settle()

  def rollback(self, lengths):
    return self.cache.rollback(lengths).settle()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exit(_common.DrawnChain):
  """Base class of drafters that run the first layers of the target.

  The first layers read every drafted token once, while drafting. With
  `shares_pass`, the verifying pass runs only the other layers.

  Attributes:
    exit: number of target layers that draft, at least 1 and less than all.
    gamma: draft length, at least 1.
    transform: transform from logits to draft probabilities; None uses the
      target's transform.
    stop: rule that ends a chain early, see `methods.stop_rules`. None drafts
      gamma tokens in all chains. If the rule has parameters, they are
      `params["drafter"]["stop"]`.
    shares_pass: True if the verifying pass runs only the layers after the first
      `exit` layers. If False, it runs all layers of the target. The drafts are
      the same. Controllers and combinations of drafters require False.
    model: target model; `bind` sets it.
  """

  exit: int
  gamma: int
  transform: LogitsTransform | None = None
  stop: stop_rules.StopRule | None = None
  shares_pass: bool = True
  model: Transformer | None = None

  def __post_init__(self):
    fields.check_fields(self, "exit", "gamma")

  # Number of tokens that can be removed from the drafter's cache. There is no
  # limit, because the drafter has no cache of its own.
  slack = math.inf

  @property
  def autoregressive(self) -> bool:
    # If a stop rule ends a chain early, the other nodes are padding. So the
    # padding depends on the drafted tokens. The capability "autoregressive"
    # does not allow this.
    return self.stop is None

  def bind(self, target: Model, transform: LogitsTransform) -> Any:
    """Returns the drafter with the fields `model` and `transform` set.

    Raises:
      ValueError: the target does not have more than `exit` layers.
    """
    check_exit(self.exit, target)
    return _common.with_transform(self, transform, model=target)

  def init(self, params: chex.ArrayTree, prompt: Prompt,
           prefill_output: ModelOutput) -> ExitState:
    """Returns the initial state, which contains the state of the stop rule."""
    del params, prefill_output
    return ExitState(rule=() if self.stop is None else stop_rules.init_state(
        self.stop, len(prompt.lengths)))

  def first_layers(self, params: chex.ArrayTree, tokens: jax.Array, cache: Cache
                   ) -> ModelOutput:
    """Runs the target's first layers on one token per row, `tokens [B, 1]`."""
    return self.model.run(
        params["target"], Sublayers.between(0, self.exit), tokens,
        jnp.zeros_like(tokens), _alone(tokens), cache)

  def predict(self, params: chex.ArrayTree, output: ModelOutput,
              own: chex.ArrayTree) -> tuple[ModelOutput, Any]:
    """Returns the output whose logits are used for drafting, and the state.

    A subclass can run a further network on the output of the first layers.

    Args:
      params: `{"target": ..., "drafter": ...}`.
      output: output of `first_layers`.
      own: state of the further network, or None.
    """
    del params
    return output, own

  def propose(self, params: chex.ArrayTree, uniforms: jax.Array,
              state: DecodeState) -> tuple[Draft, ExitState]:
    """Returns a sampled chain for each row, and the new state."""
    rows, before = state.lengths.shape[0], state.drafter
    u = uniforms.reshape(rows, self.gamma, UNIFORMS_A_DRAW)
    stop_params = self._stop_params(params)

    def extend(carry):
      node, begun, own, tokens, probs, path, going, memory = carry
      out, own, begun = self._read(params, node, tokens, begun, own)
      node = node + 1
      logits = constraints_lib.constrained(
          self.transform.constraints, path, out.logits[:, 0], drafted=True)
      law = self.transform(logits, state.temperature)
      ask = functools.partial(
          self._asked, stop_params, node - 1, law, out.hidden[:, 0])
      if self.stop is not None and not self.stop.keeps:
        going, memory = ask(tokens[:, node - 1], going, memory)
      reported = jnp.where(going[:, None], law, 0)
      token = jax.vmap(inverse_cdf)(reported, u[:, node - 1])
      if self.stop is not None and self.stop.keeps:
        going, memory = ask(token, going, memory)
      return (node, begun, own, tokens.at[:, node].set(token),
              probs.at[:, node].set(reported), constraints_lib.advanced(
                  self.transform.constraints, path, token), going, memory)

    going, memory = jnp.ones((rows,), bool), ()
    if self.stop is not None:
      going, memory = stop_rules.start_round(
          self.stop, before.rule, ~state.done)
    root = rounds.roots(state)[:, None]
    tokens = jnp.pad(root, ((0, 0), (0, self.gamma)))
    probs = jnp.zeros((rows, self.num_nodes, self.model.vocab_size))
    node, begun, own, tokens, probs, *_ = jax.lax.while_loop(
        lambda carry: (carry[0] < self.gamma) & jnp.any(carry[-2]), extend,
        (jnp.zeros((), jnp.int32), self._begin(params, state), self._reserved(
            before.own), tokens, probs, state.constraints, going, memory))
    # The loop runs the first layers on a token only to draft the token after
    # it. So they have not read the last drafted token. They read it here,
    # because the verifying pass needs their output at all tokens.
    _, own, begun = self._read(params, node, tokens, begun, own)
    begun = begun.replace(
        cache=begun.cache.rollback(state.target_cache.lengths))
    own = self._rewound(own, before.own)
    parents = jnp.tile(topology.chain(self.gamma), (rows, 1))
    draft = Draft(tokens=tokens, parents=parents, probs=probs)
    return draft, ExitState(
        own=own, rule=stop_rules.record_chains(before.rule, draft, self.gamma),
        begun=begun if self.shares_pass else None)

  def _read(self, params: chex.ArrayTree, node: jax.Array, tokens: jax.Array,
            begun: Begun, own: chex.ArrayTree
            ) -> tuple[ModelOutput, Any, Begun]:
    """Runs the first layers on the token of one node of the chains.

    Args:
      params: `{"target": ..., "drafter": ...}`.
      node: index of the node, `[]` int32.
      tokens: tokens `[B, N]` of the chains.
      begun: result of the first layers on the earlier nodes.
      own: state of the network after the first layers, or None.

    Returns:
      The output whose logits are used for drafting, the new state `own`, and
      the new `begun`, which contains the node.
    """
    last = jax.lax.dynamic_slice_in_dim(tokens, node, 1, axis=1)
    out = self.first_layers(params, last, begun.cache)
    begun = Begun(
        cache=out.cache.rollback(begun.cache.lengths + 1),
        hidden=jax.lax.dynamic_update_slice_in_dim(
            begun.hidden, out.hidden, node, axis=1))
    return *self.predict(params, out, own), begun

  def _stop_params(self, params: chex.ArrayTree) -> Any:
    """Returns the parameters of the stop rule, or None if it has none.

    Raises:
      ValueError: the rule has parameters, but `params` does not contain them.
    """
    if self.stop is None or not self.stop.has_params:
      return None
    drafter = params.get("drafter")
    if not (isinstance(drafter, Mapping) and "stop" in drafter):
      raise ValueError(f"stop is {type(self.stop).__name__}, a rule with "
                       "parameters; give params['drafter'] = {'stop': ...}")
    return drafter["stop"]

  def _asked(self, params: chex.ArrayTree, place: jax.Array, law: jax.Array,
             hidden: jax.Array, token: jax.Array, going: jax.Array,
             memory: chex.ArrayTree) -> tuple[jax.Array, Any]:
    seen = stop_rules.Seen(
        place=jnp.full_like(token, place), probs=law, hidden=hidden,
        token=token)
    return stop_rules.ask(self.stop, params, seen, going, memory)

  def _begin(self, params: chex.ArrayTree, state: DecodeState) -> Begun:
    """Returns a `Begun` without nodes, with space for all nodes of a draft."""
    cache = state.target_cache
    # A cascade has already reserved a block for the drafted tokens.
    if cache.held is None:
      cache = cache.reserve(self.num_nodes)
    c = self.model.config
    return Begun(cache=cache, hidden=jnp.zeros(
        (state.lengths.shape[0], self.num_nodes, c.width),
        params["target"]["embedding"].dtype))

  def _reserved(self, own: chex.ArrayTree) -> Any:
    """Reserves space for drafted tokens in the state of a further network.

    This class has no network after the first layers, so nothing is reserved.
    """
    return own

  def _rewound(self, own: chex.ArrayTree, before: chex.ArrayTree) -> Any:
    """Removes drafted tokens from the state of a further network.

    This class has no network after the first layers, so nothing is removed.
    """
    del before
    return own

  def target_pass(self, target: Model, params: chex.ArrayTree,
                  drafter: ExitState, draft: Draft, depths: jax.Array,
                  ancestors: jax.Array, cache: Cache) -> ModelOutput:
    """Returns the target's output on the draft.

    If `propose` already ran the first layers on the draft (`shares_pass`), only
    the other layers run.
    """
    if drafter.begun is None:
      return self.model(
          params["target"], draft.tokens, depths, ancestors, cache)
    out = self.model.run(
        params["target"],
        Sublayers.between(self.exit, self.model.config.layers), None, depths,
        ancestors, drafter.begun.cache, hidden=drafter.begun.hidden)
    if cache.held is None:
      out = out.replace(cache=_Settling(cache=out.cache))
    return out

  def commit(self, params: chex.ArrayTree, drafter: ExitState, draft: Draft,
             verdict: Verdict, target_output: ModelOutput, count: jax.Array,
             own: jax.Array) -> ExitState:
    """Returns the state after a round, with an updated stop rule state.

    The decoder removes rejected tokens from the target's cache, which the
    drafter shares.
    """
    del params, draft, target_output
    rule = drafter.rule if self.stop is None else stop_rules.update(
        self.stop, drafter.rule, verdict, count, own)
    return ExitState(own=drafter.own, rule=rule)

  def param_specs(self, axis: str, size: int) -> PartitionSpec:
    """Returns an empty `PartitionSpec`, which replicates all parameters."""
    del axis, size
    return PartitionSpec()


class EarlyExit(Exit):
  """LayerSkip: drafts a chain with the first layers of the target.

  The keys and values of the drafted tokens are stored in the target's cache.
  """

  # The drafter reads the target's cache, which contains the committed tokens.
  rests = follows = True


def _alone(tokens: jax.Array) -> jax.Array:
  return jnp.ones((*tokens.shape, 1), bool)


def early_exit(exit: int, gamma: int, stop: stop_rules.StopRule | None = None,
               verifier: Verifier = BLOCK) -> Strategy:
  """Returns the strategy LayerSkip (Elhoushi et al. 2024).

  The target's first layers draft, and the verifying pass runs only the other
  layers (arXiv:2404.16710, section 3.3). The target must be trained so that its
  first layers can predict tokens, for example by `train_lm.py --exit_scale`.

  >>> drafter, _ = early_exit(exit=2, gamma=4)
  >>> drafter.exit, drafter.num_nodes, drafter.autoregressive
  (2, 5, True)

  Args:
    exit: number of target layers that draft.
    gamma: maximum draft length.
    stop: stop rule; None drafts gamma tokens in all chains.
    verifier: verification rule for chains. `GreedyBlock` cannot be combined
      with a stop rule.
  """
  return Strategy(EarlyExit(exit=exit, gamma=gamma, stop=stop),
                  verifier)
