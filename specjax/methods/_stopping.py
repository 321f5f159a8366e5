"""Stop rules inside drafters: chains, memory and updates."""

from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import chex
from flax import struct
import jax
import jax.numpy as jnp

from specjax.decoding import constraining as constraints_lib
from specjax.decoding import round_steps
from specjax.methods import stop_rules
from specjax.methods.stop_rules import Seen
from specjax.methods.stop_rules import StopRule
from specjax.sampling import inverse_cdf
from specjax.sampling import LogitsTransform
from specjax.sampling import UNIFORMS_A_DRAW
from specjax.trees import topology
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import Verdict


@struct.dataclass
class Learning:
  """State of a rule that learns over rounds.

  Attributes:
    memory: the rule's, leaves `[B, ...]`.
    room: `[B]` int32, the most tokens that the last chain could have, which a
      controller changes from round to round; 0 once it is judged.
    chain: `[B]` uint32, a hash of the tokens of that chain, by which it is
      known again when the round is over; 0 if there was none. Beside other
      drafters the verdict may be on another draft, of which the rule learns
      nothing.
  """

  memory: Any
  room: jax.Array
  chain: jax.Array


def first(rule: StopRule, rows: int) -> Any:
  """Returns the state of a rule before its first round."""
  memory = jax.tree.map(
      lambda x: jnp.broadcast_to(x, (rows, *jnp.shape(x))), rule.init())
  if not jax.tree.leaves(memory):
    return memory
  return Learning(memory=memory, room=jnp.zeros((rows,), jnp.int32),
                  chain=jnp.zeros((rows,), jnp.uint32))


def learns(rule: StopRule | None) -> bool:
  """Returns whether a rule has memory over rounds."""
  return rule is not None and bool(jax.tree.leaves(rule.init()))


def memory_of(state: Any) -> Any:
  """Returns the rule's own memory."""
  return state.memory if isinstance(state, Learning) else state


def noted(state: Any, draft: Draft, gamma: int) -> Any:
  """Returns the state of a rule after its chains are drafted.

  Args:
    state: state of the rule.
    draft: the chains, batched.
    gamma: maximal length of a chain.
  """
  if not isinstance(state, Learning):
    return state
  return state.replace(room=jnp.full_like(state.room, gamma),
                       chain=_hashed(draft))


def _hashed(draft):
  """Returns `[B]` uint32, a hash of the drafted tokens; 0 if there are none."""
  real = draft.drafted[:, 1:]
  place = 1 + 2 * jnp.arange(real.shape[1], dtype=jnp.uint32)
  tokens = (draft.tokens[:, 1:].astype(jnp.uint32) + 1) * jnp.uint32(2654435761)
  mixed = (tokens ^ (tokens >> 15)) * place * jnp.uint32(2246822519)
  return jnp.sum(jnp.where(real, mixed ^ (mixed >> 13), 0), axis=1,
                 dtype=jnp.uint32)


def begun(rule: StopRule, state: Any, rows: jax.Array) -> tuple[Any, Any]:
  """Returns `(going, memory)` of all rows at the start of a round.

  Args:
    rule: stop rule.
    state: state of the rule, see `first`.
    rows: rows `[B]` bool that draft.
  """
  if isinstance(state, Learning):
    return rows, jax.vmap(rule.start)(state.memory)
  memory = rule.start(state)
  return rows, jax.tree.map(
      lambda x: jnp.broadcast_to(x, (*rows.shape, *jnp.shape(x))), memory)


def ask(rule: StopRule, params: Any, seen: Seen, going: jax.Array, memory: Any
        ) -> tuple[jax.Array, Any]:
  """Returns the rows `[B]` whose chains continue, and the memory."""
  chex.assert_rank(going, 1)
  stop, memory = jax.vmap(rule.stops, (None, 0, 0))(params, seen, memory)
  return going & ~stop, memory


def learned(rule: StopRule, state: Any, draft: Draft, verdict: Verdict,
            count: jax.Array) -> Any:
  """Returns the state of a rule after a round.

  Args:
    rule: stop rule.
    state: result of `noted`.
    draft: draft of the round, perhaps another drafter's.
    verdict: verdicts of the round.
    count: number `[B]` int32 of committed tokens; rows with 0 learn nothing.
  """
  chex.assert_rank(count, 1)
  if not isinstance(state, Learning):
    return state
  refused = (state.chain == 0) & (state.room > 0)
  drafted = jnp.where(
      refused, 0, jnp.sum(draft.drafted, axis=1, dtype=jnp.int32))
  new = jax.vmap(rule.commit)(
      state.memory, drafted, jnp.where(refused, 0, verdict.num_accepted),
      state.room)
  own = (state.chain != 0) & (state.chain == _hashed(draft))
  told = (count > 0) & (own | refused)
  keep = lambda new, old: jax.vmap(jnp.where)(told, new, old)
  return Learning(memory=jax.tree.map(keep, new, state.memory),
                  room=jnp.zeros_like(state.room),
                  chain=jnp.zeros_like(state.chain))


# Logits `[B, V]` of the next token, and the hidden states `[B, F]` they are of.
Forecast = tuple[jax.Array, jax.Array]


def own_params(rule: stop_rules.StopRule | None, own: Any) -> tuple[Any, Any]:
  """Returns the parameters of the model and of the rule.

  Args:
    rule: a stop rule, or None.
    own: `params["drafter"]`; where the rule has parameters `{"model", "stop"}`.

  Raises:
    ValueError: the rule's are not there.
  """
  if rule is None or not rule.has_params:
    return own, None
  if not (isinstance(own, Mapping) and {"model", "stop"} <= set(own)):
    raise ValueError(
        f"the stop rule {type(rule).__name__} has parameters; give "
        "params['drafter'] = {'model': ..., 'stop': ...}")
  return own["model"], own["stop"]


def draw_until(rule: stop_rules.StopRule, params: Any,
               transform: LogitsTransform, uniforms: jax.Array,
               state: DecodeState, kept: Any, first: Forecast,
               read: Callable[[jax.Array, Any], tuple[Forecast, Any]],
               carry: Any) -> tuple[Draft, Any, Any]:
  """Samples a chain per row, in a loop that ends when all rows have stopped.

  Args:
    rule: stop rule.
    params: parameters of the rule.
    transform: transform of the logits.
    uniforms: `[B, gamma * UNIFORMS_A_DRAW]`, uniform in [0, 1).
    state: decoding state.
    kept: state of the rule, see `first`.
    first: logits and hidden state of the first token.
    read: function `(tokens [B, 1], carry) -> (forecast, carry)` for the next
      token.
    carry: initial carry of `read`.

  Returns:
    `(Draft, carry, kept)`, batched.
  """
  chex.assert_rank([uniforms, *first], 2)
  rows = state.lengths.shape[0]
  u = uniforms.reshape(rows, -1, UNIFORMS_A_DRAW)
  gamma, constraints = u.shape[1], transform.constraints

  def ask_rule(node, law, hidden, token, going, memory):
    seen = stop_rules.Seen(
        place=jnp.full_like(token, node - 1), probs=law, hidden=hidden,
        token=token)
    return ask(rule, params, seen, going, memory)

  def draw(node, forecast, tokens, probs, path, going, memory):
    logits, hidden = forecast
    logits = constraints_lib.constrained(
        constraints, path, logits, drafted=True)
    law = transform(logits, state.temperature)
    if not rule.keeps:
      going, memory = ask_rule(
          node, law, hidden, tokens[:, node - 1], going, memory)
    reported = jnp.where(going[:, None], law, 0)
    token = jax.vmap(inverse_cdf)(reported, u[:, node - 1])
    if rule.keeps:
      going, memory = ask_rule(node, law, hidden, token, going, memory)
    return (tokens.at[:, node].set(token), probs.at[:, node].set(reported),
            constraints_lib.advanced(constraints, path, token), going, memory)

  def extend(loop):
    node, carry, tokens, *drawn = loop
    last = jax.lax.dynamic_slice_in_dim(tokens, node - 1, 1, axis=1)
    forecast, carry = read(last, carry)
    return node + 1, carry, *draw(node, forecast, tokens, *drawn)

  tokens = jnp.pad(round_steps.roots(state)[:, None], ((0, 0), (0, gamma)))
  probs = jnp.zeros((rows, gamma + 1, first[0].shape[-1]))
  drawn = draw(1, first, tokens, probs, state.constraints,
               *begun(rule, kept, ~state.done))
  _, carry, tokens, probs, *_ = jax.lax.while_loop(
      lambda loop: (loop[0] <= gamma) & jnp.any(loop[-2]), extend,
      (jnp.full((), 2, jnp.int32), carry, *drawn))
  parents = jnp.tile(topology.chain(gamma), (rows, 1))
  draft = Draft(tokens=tokens, parents=parents, probs=probs)
  return draft, carry, noted(kept, draft, gamma)
