"""Chains that a stop rule ends while they are drawn, whatever predicts them."""

from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from specjax.decoding import constraining as constraints_lib
from specjax.decoding import round_steps
from specjax.methods import stop_rules
from specjax.sampling import inverse_cdf
from specjax.sampling import LogitsTransform
from specjax.sampling import UNIFORMS_A_DRAW
from specjax.trees import topology
from specjax.types import DecodeState
from specjax.types import Draft

# Logits `[B, V]` of the next token, and the hidden states `[B, F]` they are of.
Forecast = tuple[jax.Array, jax.Array]


def own_params(rule: stop_rules.StopRule | None, own: Any) -> tuple[Any, Any]:
  """The parameters of what predicts the tokens, and those of the rule.

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
  """Draws a chain for every row, in a loop that ends when all rows have.

  Args:
    rule: that ends them.
    params: the rule's.
    transform: of the logits.
    uniforms: `[B, gamma * UNIFORMS_A_DRAW]`, uniform in [0, 1).
    state: the `DecodeState`.
    kept: for the rule, see `stop_rules.first`.
    first: of the first token.
    read: `(tokens [B, 1], carry) -> (forecast, carry)`, the token after those.
    carry: what `read` begins with.

  Returns:
    `(Draft, carry, kept)`, batched.
  """
  rows = state.lengths.shape[0]
  u = uniforms.reshape(rows, -1, UNIFORMS_A_DRAW)
  gamma, constraints = u.shape[1], transform.constraints

  def ask(node, law, hidden, token, going, memory):
    seen = stop_rules.Seen(
        place=jnp.full_like(token, node - 1), probs=law, hidden=hidden,
        token=token)
    return stop_rules.ask(rule, params, seen, going, memory)

  def draw(node, forecast, tokens, probs, path, going, memory):
    logits, hidden = forecast
    logits = constraints_lib.constrained(
        constraints, path, logits, drafted=True)
    law = transform(logits, state.temperature)
    if not rule.keeps:
      going, memory = ask(node, law, hidden, tokens[:, node - 1], going, memory)
    reported = jnp.where(going[:, None], law, 0)
    token = jax.vmap(inverse_cdf)(reported, u[:, node - 1])
    if rule.keeps:
      going, memory = ask(node, law, hidden, token, going, memory)
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
               *stop_rules.begun(rule, kept, ~state.done))
  _, carry, tokens, probs, *_ = jax.lax.while_loop(
      lambda loop: (loop[0] <= gamma) & jnp.any(loop[-2]), extend,
      (jnp.full((), 2, jnp.int32), carry, *drawn))
  parents = jnp.tile(topology.chain(gamma), (rows, 1))
  draft = Draft(tokens=tokens, parents=parents, probs=probs)
  return draft, carry, stop_rules.noted(kept, draft, gamma)
