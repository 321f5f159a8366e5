"""Base class of drafters that consist of other drafters."""

from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from specjax.interfaces import Drafter
from specjax.interfaces import Model
from specjax.methods import _following
from specjax.methods.networks import Params
from specjax.sampling import LogitsTransform
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.types import Verdict


class Combined(Drafter):
  """Base class of drafters that consist of other drafters.

  Subclasses are frozen dataclasses with `members`, a tuple of drafters.
  `params["drafter"]` is a tuple with the parameters of each member. It may be
  missing if no member has parameters. The state is a tuple of the members'
  states.
  """

  @property
  def provides(self) -> tuple[str, ...]:
    # Not autoregressive: another member may draft a token if the draft begins
    # at another position.
    return "rests", "follows", *self.shared("conditional")

  @property
  def num_uniforms(self) -> int | None:
    counts = [member.num_uniforms for member in self.members]
    return None if None in counts else sum(counts)

  @property
  def context_length(self) -> float:
    return min(member.context_length for member in self.members)

  @property
  def target_calls(self) -> int:
    return 1 + sum(member.target_calls - 1 for member in self.members)

  def shared(self, *names: str) -> tuple[str, ...]:
    """Returns the names of capabilities that every member provides."""
    return tuple(name for name in names if all(
        name in member.provides for member in self.members))

  def bound(self, target: Model, transform: LogitsTransform
            ) -> tuple[Drafter, ...]:
    """Returns the members, bound to a target and able to follow any sequence.

    Raises:
      ValueError: a member does not fit the target.
    """
    return tuple(_following.followed(member, target, transform)
                 for member in self.members)

  def init(self, params: Params, prompt: Prompt, prefill_output: ModelOutput
           ) -> tuple[Any, ...]:
    states = tuple(member.init(own, prompt, prefill_output) for member, own in
                   zip(self.members, self.params_of_members(params)))
    for member, state in zip(self.members, states):
      _following.check_follows(member, state)
    return states

  def params_of_members(self, params: Params) -> list[dict[str, Any]]:
    """Returns `{"target": ..., "drafter": ...}` for each member.

    Raises:
      ValueError: `params["drafter"]` does not have one entry for each member.
    """
    by_member = params.get("drafter")
    if by_member is None:
      by_member = (None,) * len(self.members)
    if (not isinstance(by_member, (tuple, list))
        or len(by_member) != len(self.members)):
      raise ValueError(
          f"params['drafter'] of a {type(self).__name__} must be a tuple of "
          f"the parameters of its {len(self.members)} drafters, None for a "
          "drafter without parameters")
    return [{**params, "drafter": member} for member in by_member]

  def asked(self, i: int, params: Params, uniforms: jax.Array,
            state: DecodeState) -> tuple[Draft, Any]:
    """Runs `propose` of member i; returns its draft and its state.

    Args:
      i: index of the member.
      params: parameters of all members.
      uniforms: uniforms `[B, num_uniforms]` of all members. Member i uses its
        own columns. If a member draws from keys, this is a PRNG key per row.
      state: decoding state.
    """
    member = self.members[i]
    if self.num_uniforms is None:
      uniforms = jax.vmap(jax.random.fold_in, (0, None))(uniforms, i)
      count = member.num_uniforms
      if count is not None:
        uniforms = jax.vmap(lambda key: jax.random.uniform(
            key, (count,), jnp.float32))(uniforms)
    else:
      ends = np.cumsum([0, *(member.num_uniforms for member in self.members)])
      uniforms = uniforms[:, ends[i]:ends[i + 1]]
    return member.propose(self.params_of_members(params)[i], uniforms,
                          state.replace(drafter=state.drafter[i]))

  def commit(self, params: Params, drafter: tuple[chex.ArrayTree, ...],
             draft: Draft, verdict: Verdict, target_output: ModelOutput,
             count: jax.Array, own: jax.Array) -> tuple[Any, ...]:
    return tuple(
        member.commit(own_params, state, draft, verdict, target_output, count,
                      is_own)
        for member, own_params, state, is_own in zip(
            self.members, self.params_of_members(params), drafter,
            self.owned(drafter, own)))

  def owned(self, states: tuple[chex.ArrayTree, ...], own: jax.Array
            ) -> Sequence[jax.Array]:
    """Returns `own [B]` of `Drafter.commit` for each member."""
    return [jnp.zeros_like(own)] * len(self.members)

  def param_specs(self, axis: str, size: int) -> tuple[Any, ...]:
    return tuple(member.param_specs(axis, size)
                 for member in self.members)
