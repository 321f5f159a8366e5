"""Adapter that keeps a drafter's cache correct in combinations of drafters.

If a drafter is used alone, each round commits a prefix of its last draft and
one more token. Removing the rejected tokens therefore updates the drafter's
cache. In a combination of drafters this is not sufficient. A cascade removes
tokens rejected by its target. A merge may commit the tokens of another drafter.
In some rounds the drafter is not called.

Therefore `Following` records the tokens in the drafter's cache. A comparison
with the committed tokens finds the part of the cache that is still valid. The
draft model then reads the missing tokens, `PASS` tokens per pass. Usually no
token is missing.
"""

import dataclasses
from typing import Any

import chex
from flax import struct
import jax
import jax.numpy as jnp

from specjax import interfaces
from specjax.caches import dense
from specjax.interfaces import Cache
from specjax.interfaces import Drafter
from specjax.interfaces import Model
from specjax.methods import _common
from specjax.sampling import LogitsTransform
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.types import Verdict

PASS = 4  # number of missing tokens that one pass of the draft model reads


def agreed(tokens: jax.Array, fed: jax.Array, state: DecodeState) -> jax.Array:
  """Returns the length of the common prefix of cached and committed tokens.

  Args:
    tokens: tokens in the drafter's cache, `[B, T]` int32 for B batch rows. T is
      at least the number of columns of `state.tokens`.
    fed: number of tokens in the cache, `[B]` int32. Later columns of `tokens`
      are ignored.
    state: decoding state with the committed tokens.

  Returns:
    Number of tokens of the prefix, `[B]` int32.
  """
  columns = state.tokens.shape[1]
  at = jnp.arange(columns, dtype=jnp.int32)
  same = tokens[:, :columns] == state.tokens
  same &= at < jnp.minimum(fed, state.lengths)[:, None]
  return jnp.min(jnp.where(same, columns, at), axis=1)


def caught_up(model: Model, params: chex.ArrayTree, state: DecodeState,
              cache: Cache, since: jax.Array) -> Any:
  """Runs a draft model on the committed tokens missing from its cache.

  Args:
    model: draft model.
    params: parameters of the model.
    state: decoding state of the B rows.
    cache: cache of the model with the first `since` committed tokens of every
      row.
    since: number `[B]` int32 of tokens in the cache.

  Returns:
    The cache with all committed tokens except the last one, which is the root
    of the next draft.
  """
  # `_common.catch_up` does not read the last two tokens of a sequence, but the
  # result here may lack only the last token, the root. A length that is larger
  # by 1 makes `catch_up` read one more token.
  longer = state.replace(lengths=state.lengths + 1)
  cache = _common.catch_up(model, params, longer, cache, since, size=PASS)
  return cache.rollback(state.lengths - 1)


def followed(drafter: Drafter, target: Model, transform: LogitsTransform
             ) -> Drafter:
  """Returns a drafter for a combination, bound to a target.

  Raises:
    ValueError: the drafter does not fit the target, or begins its pass.
  """
  bound = interfaces.bind(drafter, target, transform)
  if "shares_pass" in bound.provides:
    name = interfaces.kind_of(drafter)
    raise ValueError(
        f"{name} begins the verifying pass, and a combination verifies other "
        "drafts as well; give the network shares_pass=False")
  if "follows" not in bound.provides or isinstance(bound, Following):
    return bound
  return Following(drafter=bound)


def check_follows(drafter: Drafter, state: chex.ArrayTree) -> None:
  """Checks that a drafter can be combined with other drafters.

  Args:
    drafter: result of `followed`.
    state: initial state of the drafter; None if it has no state.

  Raises:
    ValueError: the drafter has a state and does not provide "follows".
  """
  if jax.tree.leaves(state) and "follows" not in drafter.provides:
    raise ValueError(
        f"{interfaces.kind_of(drafter)} has a state and does not provide "
        "`follows`, so it cannot be combined with another drafter, whose "
        "tokens it has not read; implement `catch_up` "
        "(specjax.interfaces.Drafter), or use another drafter")


@struct.dataclass
class Followed:
  """State of `Following`, an adapter of a drafter for use in combinations.

  The first axis of every leaf is the batch.

  Attributes:
    tokens: tokens in the drafter's cache, `[B, C]` int32 for B rows and a
      capacity of C tokens.
    fed: number of tokens in the cache, `[B]` int32. Later columns of `tokens`
      are unused.
    drafter: state of the adapted drafter, including its cache.
  """

  tokens: jax.Array
  fed: jax.Array
  drafter: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Following(Drafter):
  """Adapter of a drafter for use in combinations with other drafters.

  Other drafters also add tokens to the sequence. Therefore `propose` first
  compares the tokens in the drafter's cache with the committed sequence.

  Attributes:
    drafter: drafter that provides "follows". A draft model in it must run on
      the root and on all drafted tokens except the last.
  """

  drafter: Drafter

  @property
  def provides(self) -> tuple[str, ...]:
    return tuple({*self.drafter.provides, "rests", "follows"} & {
        "chain", "iid", "conditional", "autoregressive", "rests", "follows"})

  @property
  def num_nodes(self) -> int:
    return self.drafter.num_nodes

  @property
  def num_uniforms(self) -> int | None:
    return self.drafter.num_uniforms

  @property
  def context_length(self) -> float:
    return self.drafter.context_length

  def with_gamma(self, gamma: int) -> "Following | None":
    drafter = self.drafter.with_gamma(gamma)
    return drafter and dataclasses.replace(self, drafter=drafter)

  def bind(self, target: Model, transform: LogitsTransform) -> "Following":
    return dataclasses.replace(
        self, drafter=interfaces.bind(self.drafter, target, transform))

  def init(self, params: chex.ArrayTree, prompt: Prompt,
           prefill_output: ModelOutput) -> Followed:
    room = prompt.capacity - prompt.tokens.shape[1]
    return Followed(
        tokens=jnp.pad(prompt.tokens, ((0, 0), (0, room))),
        fed=prompt.lengths - 1,
        drafter=self.drafter.init(params, prompt, prefill_output))

  def propose(self, params: chex.ArrayTree, uniforms: jax.Array,
              state: DecodeState) -> tuple[Draft, Followed]:
    before = state.drafter
    since = agreed(before.tokens, before.fed, state)
    own = state.replace(drafter=before.drafter)
    own = own.replace(drafter=self.drafter.catch_up(params, own, since))
    draft, drafter = self.drafter.propose(params, uniforms, own)
    drafted = jnp.sum(draft.drafted, axis=1, dtype=jnp.int32)
    return draft, Followed(
        tokens=dense.put_rows(state.tokens, draft.tokens[:, 1:], state.lengths),
        fed=state.lengths + jnp.maximum(drafted - 1, 0), drafter=drafter)

  def commit(self, params: chex.ArrayTree, drafter: Followed, draft: Draft,
             verdict: Verdict, target_output: ModelOutput, count: jax.Array,
             own: jax.Array) -> Followed:
    """Returns the state after the adapted drafter's `commit`.

    This method does not remove rejected tokens from `drafter.tokens`, because
    the next `propose` compares `tokens` with the committed tokens.
    """
    return drafter.replace(drafter=self.drafter.commit(
        params, drafter.drafter, draft, verdict, target_output, count, own))

  def param_specs(self, axis: str, size: int) -> Any:
    return self.drafter.param_specs(axis, size)
