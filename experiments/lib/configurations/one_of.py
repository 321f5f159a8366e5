"""Verifier that contains several rules in one compiled program.

Compiling a decoder takes far longer than compiling another rule. So
configurations of a study that differ only in their rule share a program. An
index array selects the rule. All rows of a batch follow the same rule, and only
this rule is computed.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

import specjax as sj
from specjax import interfaces
from specjax.verifiers import residual


@struct.dataclass
class OneOfState:
  """Index of the active rule, and the states of all rules.

  Attributes:
    acting: `[]` int32, index of the active rule.
    memories: state of every rule. None for a rule without state.
  """

  acting: jax.Array
  memories: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class OneOf(interfaces.Verifier):
  """Verifier that follows one of `rules`, selected by `start`."""

  rules: tuple[interfaces.Verifier, ...]

  @property
  def lossless(self) -> bool:
    return all(rule.lossless for rule in self.rules)

  @property
  def requires(self) -> tuple[str, ...]:
    """Returns the union of the drafter properties that the rules need."""
    return tuple(dict.fromkeys(
        need for rule in self.rules for need in rule.requires))

  def init(self, gamma: int) -> OneOfState:
    """Returns a state in which the first rule is active."""
    return OneOfState(jnp.zeros((), jnp.int32), tuple(
        rule.init(gamma) for rule in self.rules))

  @functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
  def start(self, rule: interfaces.Verifier, gamma: int,
            batch: int) -> OneOfState:
    """Returns the state of a batch with `batch` rows that follow `rule`."""
    one = self.init(gamma).replace(
        acting=jnp.asarray(self.rules.index(rule), jnp.int32))
    return jax.tree.map(lambda x: jnp.tile(x, (batch,) + (1,) * x.ndim), one)

  def law(self, draft: sj.Draft, target_probs: jax.Array, state: OneOfState):
    """Returns the `Law` of the active rule.

    One switch returns `stop`, and another one the row of the sampled stop. A
    single switch would have to return the array `next_token` with all rows.
    """
    def stop(i, memories, draft, target_probs):
      return self.rules[i].evaluate(draft, target_probs, memories[i]).stop

    def next_row(i, memories, draft, target_probs, node):
      law = self.rules[i].evaluate(draft, target_probs, memories[i])
      return law.next_row(node)

    args = state, draft, target_probs
    return residual.LawByRow(
        self._choose(stop, *args),
        lambda node: self._choose(next_row, *args, node))

  def commit(self, state: OneOfState, draft: sj.Draft, target_probs: jax.Array,
             verdict: sj.types.Verdict):
    """Updates the state of the active rule only."""
    def remember(i, memories, *args):
      return (*memories[:i], self.rules[i].commit(memories[i], *args),
              *memories[i + 1:])

    return state.replace(memories=self._choose(
        remember, state, draft, target_probs, verdict))

  def _choose(self, function: Callable, state: OneOfState, *args: Any):
    """Returns `function(index, memories, *args)` for the active rule."""
    branches = [functools.partial(function, i) for i in range(len(self.rules))]

    @jax.custom_batching.custom_vmap
    def choose(acting, *args):
      return jax.lax.switch(acting, branches, *args)

    @choose.def_vmap
    def _(size, batched, acting, *args):
      # By default, `jax.vmap` of a switch computes all branches and selects one
      # per row. All rows have the same index here, so one switch over vmapped
      # branches suffices.
      args = jax.tree.map(
          lambda x, is_batched: x if is_batched else jnp.broadcast_to(
              x, (size, *jnp.shape(x))), args, tuple(batched[1:]))
      out = jax.lax.switch(acting[0] if batched[0] else acting,
                           [jax.vmap(branch) for branch in branches], *args)
      return out, jax.tree.map(lambda _: True, out)

    return choose(state.acting, state.memories, *args)
