"""How drafters ask a rule, and tell it what became of its chains."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax.drafters.stop_rules.base import Seen
from specjax.drafters.stop_rules.base import StopRule
from specjax.types import Draft
from specjax.types import Verdict


def begun(rule: StopRule, state: Any, rows: jax.Array) -> tuple[Any, Any]:
  """`(going, memory)` of all rows at the beginning of a round.

  Args:
    rule: a `StopRule`.
    state: what it remembers, leaves `[B, ...]`.
    rows: `[B]` bool, those that draft at all.
  """
  if jax.tree.leaves(state):
    return rows, jax.vmap(rule.start)(state)
  memory = rule.start(state)
  return rows, jax.tree.map(
      lambda x: jnp.broadcast_to(x, (*rows.shape, *jnp.shape(x))), memory)


def ask(rule: StopRule, params: Any, seen: Seen, going: jax.Array, memory: Any
        ) -> tuple[jax.Array, Any]:
  """The rows whose chains go on `[B]`, and the memory; batched."""
  stop, memory = jax.vmap(rule.stops, (None, 0, 0))(params, seen, memory)
  return going & ~stop, memory


def learned(rule: StopRule, state: Any, draft: Draft, verdict: Verdict,
            count: jax.Array, gamma: int) -> Any:
  """What a rule remembers after a round; batched.

  Args:
    rule: a `StopRule`.
    state: what it remembered before, leaves `[B, ...]`.
    draft: of the round.
    verdict: of the round.
    count: `[B]` int32, tokens committed; rows without any learn nothing.
    gamma: the most that a chain has.
  """
  if not jax.tree.leaves(state):
    return state
  drafted = jnp.sum(jnp.any(draft.probs > 0, axis=-1), axis=-1)
  learn = functools.partial(rule.commit, gamma=gamma)
  new = jax.vmap(learn)(
      state, drafted.astype(jnp.int32), verdict.num_accepted)
  keep = lambda new, old: jax.vmap(jnp.where)(count > 0, new, old)
  return jax.tree.map(keep, new, state)


def kept(rule: StopRule, params: Any, probs: jax.Array, hidden: jax.Array,
         root: jax.Array, tokens: jax.Array, state: Any = None) -> jax.Array:
  """How many of a row's tokens a rule lets it draft, `[]` int32.

  Args:
    rule: a `StopRule`.
    params: its parameters.
    probs: `[gamma, V]`, q_1..q_gamma along the chain.
    hidden: `[gamma, F]`, the hidden states that they were computed from.
    root: `[]` int32.
    tokens: `[gamma]` int32, x_1..x_gamma.
    state: what the rule remembers; None: nothing yet.
  """
  before = jnp.append(root, tokens[:-1]).astype(jnp.int32)
  seen = Seen(place=jnp.arange(tokens.shape[0], dtype=jnp.int32), probs=probs,
              hidden=hidden, token=tokens if rule.keeps else before)
  memory = rule.start(rule.init() if state is None else state)

  def step(carry, seen):
    going, memory, count = carry
    stop, memory = rule.stops(params, seen, memory)
    drawn = going if rule.keeps else going & ~stop
    return (going & ~stop, memory, count + drawn), None

  carry = jnp.ones((), bool), memory, jnp.zeros((), jnp.int32)
  (_, _, count), _ = jax.lax.scan(step, carry, seen)
  return count
