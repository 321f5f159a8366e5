"""Adapter for drafters of sequences to which other drafters also add tokens.

If a drafter is used alone, each round commits a prefix of its last draft and
one more token. In a combination of drafters this is not so. A cascade removes
tokens that its target rejects. In a merge, another drafter's tokens may be
committed. Some rounds do not call the drafter.

So `Following` records which tokens are in the drafter's cache. A comparison
with the committed tokens finds the part of the cache that is still valid.
Missing tokens are then read, a few per pass; usually none is missing.
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

PASS = 4  # committed tokens that one catch-up pass of the draft model reads


def agreed(tokens: jax.Array, fed: jax.Array, state: DecodeState) -> jax.Array:
  """Returns the length of the prefix that equals the committed tokens.

  Args:
    tokens: token ids `[B, T]` int32. T is at least the number of columns of
      `state.tokens`.
    fed: number of valid tokens, `[B]` int32.
    state: decoding state.

  Returns:
    `[B]` int32.
  """
  columns = state.tokens.shape[1]
  at = jnp.arange(columns, dtype=jnp.int32)
  same = tokens[:, :columns] == state.tokens
  same &= at < jnp.minimum(fed, state.lengths)[:, None]
  return jnp.min(jnp.where(same, columns, at), axis=1)


def caught_up(model: Model, params: chex.ArrayTree, state: DecodeState,
              cache: Cache, since: jax.Array) -> Any:
  """Returns the cache of all committed tokens except the root.

  Args:
    model: language model, a `Model`.
    params: parameters of the model.
    state: decoding state.
    cache: cache of the model with the first `since` committed tokens of every
      row.
    since: number `[B]` int32 of cached tokens.
  """
  # `catch_up` leaves the last two tokens out of the cache. Here only the last
  # one, the root, may be missing, so the length is one larger.
  longer = state.replace(lengths=state.lengths + 1)
  cache = _common.catch_up(model, params, longer, cache, since, size=PASS)
  return cache.rollback(state.lengths - 1)


def check_follows(drafter: Drafter, state: chex.ArrayTree) -> None:
  """Raises `ValueError` if a drafter has a state and cannot follow.

  Args:
    drafter: result of `Drafter.follow`.
    state: initial state of the drafter.

  Raises:
    ValueError: the drafter has a state and no `follow`.
  """
  if jax.tree.leaves(state) and not drafter.can_follow:
    raise ValueError(
        f"{type(drafter).__name__} has a state but no `follow()`, so it cannot "
        "be combined with another drafter, whose tokens it has not read; add "
        "the method (specjax.interfaces.Drafter), or use another drafter")


@struct.dataclass
class Followed:
  """State of a `Following`; the first axis of every leaf is the batch B.

  Attributes:
    tokens: tokens in the drafter's cache, `[B, C]` int32.
    fed: number of valid tokens, `[B]` int32.
    drafter: state of the drafter.
  """

  tokens: jax.Array
  fed: jax.Array
  drafter: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Following(Drafter):
  """Chain drafter whose cache is compared with the sequence in every round.

  Attributes:
    drafter: chain drafter with `catch_up`. Its `propose` must read the root and
      all drafted tokens except the last.
  """

  drafter: Drafter

  @property
  def chain(self) -> bool:
    return "chain" in interfaces.capabilities(self.drafter)

  @property
  def iid(self) -> bool:
    return "iid" in interfaces.capabilities(self.drafter)

  @property
  def conditional(self) -> bool:
    return "conditional" in interfaces.capabilities(self.drafter)

  @property
  def autoregressive(self) -> bool:
    return "autoregressive" in interfaces.capabilities(self.drafter)

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
    """Returns the drafter specialised to a target."""
    return dataclasses.replace(
        self, drafter=interfaces.bind(self.drafter, target, transform))

  def follow(self) -> "Following":
    """Returns the adapter unchanged."""
    return self

  def init(self, params: chex.ArrayTree, prompt: Prompt,
           prefill_output: ModelOutput) -> Followed:
    """Returns the drafter's state and the tokens of the prompt."""
    room = prompt.capacity - prompt.tokens.shape[1]
    return Followed(
        tokens=jnp.pad(prompt.tokens, ((0, 0), (0, room))),
        fed=prompt.lengths - 1,
        drafter=self.drafter.init(params, prompt, prefill_output))

  def propose(self, params: chex.ArrayTree, uniforms: jax.Array,
              state: DecodeState) -> tuple[Draft, Followed]:
    """Drafts chains with the drafter, after catching up."""
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
             verdict: Verdict, target_output: ModelOutput, count: jax.Array
             ) -> Followed:
    """Commits the drafter's state.

    The recorded tokens do not change here, because the next `propose` compares
    them with the committed tokens.
    """
    return drafter.replace(drafter=self.drafter.commit(
        params, drafter.drafter, draft, verdict, target_output, count))

  def param_specs(self, axis: str, size: int) -> Any:
    """Returns the specifications of the drafter."""
    return self.drafter.param_specs(axis, size)
