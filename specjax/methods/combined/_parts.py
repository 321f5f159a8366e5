"""Base of drafters that consist of other drafters."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from specjax import interfaces
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
  """Base of drafters that consist of other drafters.

  Subclasses are frozen dataclasses with `parts`, a tuple of drafters.
  `params["drafter"]` is a tuple with the parameters of each part, and may be
  missing if no part has parameters. The state is a tuple of their states.
  """

  # The part that drafts a token depends on the position where the draft began.
  # So the token's distribution depends on it too.
  autoregressive = False

  @property
  def conditional(self) -> bool:
    return self.all_are("conditional")

  @property
  def num_uniforms(self) -> int | None:
    counts = [part.num_uniforms for part in self.parts]
    return None if None in counts else sum(counts)

  @property
  def context_length(self) -> float:
    return min(part.context_length for part in self.parts)

  def all_are(self, capability: str) -> bool:
    """Returns True if every part declares a capability."""
    return all(capability in interfaces.capabilities(part)
               for part in self.parts)

  def bound(self, target: Model, transform: LogitsTransform
            ) -> tuple[Drafter, ...]:
    """Returns the parts bound to a target, as drafters that follow a sequence.

    Raises:
      ValueError: a part does not fit the target.
    """
    return tuple(interfaces.bind(part, target, transform).follow()
                 for part in self.parts)

  def follow(self) -> Any:
    """Returns the drafter unchanged; its bound parts can follow a sequence."""
    return self

  def catch_up(self, params: Params, state: DecodeState, since: jax.Array
               ) -> tuple[Any, ...]:
    """Returns the state unchanged, because the parts catch up in `propose`."""
    del params, since
    return state.drafter

  def init(self, params: Params, prompt: Prompt, prefill_output: ModelOutput
           ) -> tuple[Any, ...]:
    """Returns the state of each part."""
    states = tuple(part.init(own, prompt, prefill_output) for part, own in
                   zip(self.parts, self.params_of_parts(params)))
    for part, state in zip(self.parts, states):
      _following.check_follows(part, state)
    return states

  def params_of_parts(self, params: Params) -> list[dict[str, Any]]:
    """Returns the parameters of each part."""
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
    """Returns the draft and the state of part i.

    Args:
      i: number of the part.
      params: parameters of all parts.
      uniforms: uniforms `[B, num_uniforms]` of all parts, of which part i uses
        its own columns; or a key per row if a part draws from keys.
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
             count: jax.Array) -> tuple[Any, ...]:
    """Commits each part, with the draft of the complete combination."""
    return tuple(
        part.commit(own, state, draft, verdict, target_output, count)
        for part, own, state in zip(
            self.parts, self.params_of_parts(params), drafter))

  def param_specs(self, axis: str, size: int) -> tuple[Any, ...]:
    """Returns the specifications of each part."""
    return tuple(part.param_specs(axis, size)
                 for part in self.parts)
