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


class Parts(Drafter):
  """Base class of drafters that consist of other drafters.

  Subclasses are frozen dataclasses with `parts`, a tuple of drafters.
  `params["drafter"]` is a tuple with the parameters of each part. It may be
  missing if no part has parameters. The state is a tuple of the parts' states.
  """

  @property
  def provides(self) -> tuple[str, ...]:
    # Not autoregressive: another part may draft a token if the draft begins at
    # another position.
    return "rests", "follows", *self.shared("conditional")

  @property
  def num_uniforms(self) -> int | None:
    counts = [part.num_uniforms for part in self.parts]
    return None if None in counts else sum(counts)

  @property
  def context_length(self) -> float:
    return min(part.context_length for part in self.parts)

  def shared(self, *names: str) -> tuple[str, ...]:
    """Returns the names of capabilities that every part provides."""
    return tuple(name for name in names if all(
        name in part.provides for part in self.parts))

  def bound(self, target: Model, transform: LogitsTransform
            ) -> tuple[Drafter, ...]:
    """Returns the parts, bound to a target and able to follow any sequence.

    Raises:
      ValueError: a part does not fit the target.
    """
    return tuple(_following.followed(part, target, transform)
                 for part in self.parts)

  def init(self, params: Params, prompt: Prompt, prefill_output: ModelOutput
           ) -> tuple[Any, ...]:
    states = tuple(part.init(own, prompt, prefill_output) for part, own in
                   zip(self.parts, self.params_of_parts(params)))
    for part, state in zip(self.parts, states):
      _following.check_follows(part, state)
    return states

  def params_of_parts(self, params: Params) -> list[dict[str, Any]]:
    """Returns `{"target": ..., "drafter": ...}` for each part.

    Raises:
      ValueError: `params["drafter"]` does not have one entry for each part.
    """
    by_part = params.get("drafter")
    if by_part is None:
      by_part = (None,) * len(self.parts)
    if (not isinstance(by_part, (tuple, list))
        or len(by_part) != len(self.parts)):
      raise ValueError(
          f"params['drafter'] of a {type(self).__name__} must be a tuple of "
          f"the parameters of its {len(self.parts)} drafters, None for a "
          "drafter without parameters")
    return [{**params, "drafter": part} for part in by_part]

  def asked(self, i: int, params: Params, uniforms: jax.Array,
            state: DecodeState) -> tuple[Draft, Any]:
    """Runs `propose` of part i; returns its draft and its state.

    Args:
      i: index of the part.
      params: parameters of all parts.
      uniforms: uniforms `[B, num_uniforms]` of all parts. Part i uses its own
        columns. If a part draws from keys, this is a PRNG key per row.
      state: decoding state.
    """
    part = self.parts[i]
    if self.num_uniforms is None:
      uniforms = jax.vmap(jax.random.fold_in, (0, None))(uniforms, i)
      count = part.num_uniforms
      if count is not None:
        uniforms = jax.vmap(lambda key: jax.random.uniform(
            key, (count,), jnp.float32))(uniforms)
    else:
      ends = np.cumsum([0, *(part.num_uniforms for part in self.parts)])
      uniforms = uniforms[:, ends[i]:ends[i + 1]]
    return part.propose(self.params_of_parts(params)[i], uniforms,
                        state.replace(drafter=state.drafter[i]))

  def commit(self, params: Params, drafter: tuple[chex.ArrayTree, ...],
             draft: Draft, verdict: Verdict, target_output: ModelOutput,
             count: jax.Array,
             own: jax.Array) -> tuple[Any, ...]:
    return tuple(
        part.commit(part_params, state, draft, verdict, target_output, count,
                    is_own)
        for part, part_params, state, is_own in zip(
            self.parts, self.params_of_parts(params), drafter,
            self.owned(drafter, own)))

  def owned(self, states: tuple[chex.ArrayTree, ...], own: jax.Array
            ) -> Sequence[jax.Array]:
    """Returns `own [B]` of `Drafter.commit` for each part."""
    return [jnp.zeros_like(own)] * len(self.parts)

  def param_specs(self, axis: str, size: int) -> tuple[Any, ...]:
    return tuple(part.param_specs(axis, size)
                 for part in self.parts)
