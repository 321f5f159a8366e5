"""How drafters ask a rule, and tell it what became of its chains."""

from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from specjax.methods.stop_rules.base import Seen
from specjax.methods.stop_rules.base import StopRule
from specjax.types import Draft
from specjax.types import Verdict


@struct.dataclass
class Learning:
  """What a drafter keeps for a rule that remembers something over rounds.

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
  """What a drafter keeps for a rule before its first round, of so many rows."""
  memory = jax.tree.map(
      lambda x: jnp.broadcast_to(x, (rows, *jnp.shape(x))), rule.init())
  if not jax.tree.leaves(memory):
    return memory
  return Learning(memory=memory, room=jnp.zeros((rows,), jnp.int32),
                  chain=jnp.zeros((rows,), jnp.uint32))


def learns(rule: StopRule | None) -> bool:
  """Whether a rule remembers something over rounds."""
  return rule is not None and bool(jax.tree.leaves(rule.init()))


def memory_of(state: Any) -> Any:
  """What the rule itself remembers of what is kept for it."""
  return state.memory if isinstance(state, Learning) else state


def noted(state: Any, draft: Draft, gamma: int) -> Any:
  """What is kept for a rule, once its chains are drafted.

  Args:
    state: what was kept.
    draft: the chains, batched.
    gamma: the most tokens that each of them could have.
  """
  if not isinstance(state, Learning):
    return state
  return state.replace(room=jnp.full_like(state.room, gamma),
                       chain=_hashed(draft))


def _hashed(draft):
  """`[B]` uint32, of the tokens below the root; 0 if there are none."""
  real = draft.drafted[:, 1:]
  place = 1 + 2 * jnp.arange(real.shape[1], dtype=jnp.uint32)
  tokens = (draft.tokens[:, 1:].astype(jnp.uint32) + 1) * jnp.uint32(2654435761)
  mixed = (tokens ^ (tokens >> 15)) * place * jnp.uint32(2246822519)
  return jnp.sum(jnp.where(real, mixed ^ (mixed >> 13), 0), axis=1,
                 dtype=jnp.uint32)


def begun(rule: StopRule, state: Any, rows: jax.Array) -> tuple[Any, Any]:
  """`(going, memory)` of all rows at the beginning of a round.

  Args:
    rule: a `StopRule`.
    state: what is kept for it, see `first`.
    rows: `[B]` bool, those that draft at all.
  """
  if isinstance(state, Learning):
    return rows, jax.vmap(rule.start)(state.memory)
  memory = rule.start(state)
  return rows, jax.tree.map(
      lambda x: jnp.broadcast_to(x, (*rows.shape, *jnp.shape(x))), memory)


def ask(rule: StopRule, params: Any, seen: Seen, going: jax.Array, memory: Any
        ) -> tuple[jax.Array, Any]:
  """The rows whose chains go on `[B]`, and the memory; batched."""
  stop, memory = jax.vmap(rule.stops, (None, 0, 0))(params, seen, memory)
  return going & ~stop, memory


def learned(rule: StopRule, state: Any, draft: Draft, verdict: Verdict,
            count: jax.Array) -> Any:
  """What is kept for a rule after a round; batched.

  Args:
    rule: a `StopRule`.
    state: what `noted` returned.
    draft: of the round, perhaps another drafter's.
    verdict: of the round.
    count: `[B]` int32, tokens committed; rows without any learn nothing.
  """
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


