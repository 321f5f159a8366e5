"""Several verification rules in one program; the acting rule is data.

Compiling a decoder takes far longer than compiling one more rule. Variants of a
study that differ only in their rule therefore share a program. All rows of a
batch follow the same rule, and only this rule is computed.
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


@struct.dataclass
class OneOfState:
  """Which rule acts, and what each of them remembers.

  Attributes:
    acting: `[]` int32, its index.
    memories: of every rule, None of those that have no state.
  """

  acting: jax.Array
  memories: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class OneOf(interfaces.Verifier):
  """Acts as one of `rules`; `start` says as which."""

  rules: tuple[interfaces.Verifier, ...]

  @property
  def lossless(self) -> bool:
    return all(rule.lossless for rule in self.rules)

  @property
  def requires(self) -> tuple[str, ...]:
    """What any of them needs of the drafter."""
    return tuple(dict.fromkeys(
        need for rule in self.rules for need in rule.requires))

  def init(self, gamma: int) -> OneOfState:
    """The first rule acts."""
    return OneOfState(jnp.zeros((), jnp.int32), tuple(
        rule.init(gamma) for rule in self.rules))

  def start(self, rule: interfaces.Verifier, gamma: int,
            batch: int) -> OneOfState:
    """The state of `batch` rows that follow `rule`."""
    one = self.init(gamma).replace(
        acting=jnp.asarray(self.rules.index(rule), jnp.int32))
    return jax.tree.map(lambda x: jnp.tile(x, (batch,) + (1,) * x.ndim), one)

  def law(self, draft: sj.Draft, target_probs: jax.Array, state: OneOfState):
    """The acting rule's law."""
    def law(i, memories, draft, target_probs):
      return self.rules[i].evaluate(draft, target_probs, memories[i])

    return self._choose(law, state, draft, target_probs)

  def commit(self, state: OneOfState, draft: sj.Draft, target_probs: jax.Array,
             verdict: sj.types.Verdict):
    """The acting rule remembers; the others' memories stay as they are."""
    def remember(i, memories, *args):
      return (*memories[:i], self.rules[i].commit(memories[i], *args),
              *memories[i + 1:])

    return state.replace(memories=self._choose(
        remember, state, draft, target_probs, verdict))

  def _choose(self, function: Callable, state: OneOfState, *args: Any):
    """`function(acting, memories, *args)`, of the acting rule alone."""
    branches = [functools.partial(function, i) for i in range(len(self.rules))]

    @jax.custom_batching.custom_vmap
    def choose(acting, *args):
      return jax.lax.switch(acting, branches, *args)

    @choose.def_vmap
    def _(size, batched, acting, *args):
      # vmap alone would compute every branch and then select.
      args = jax.tree.map(
          lambda x, is_batched: x if is_batched else jnp.broadcast_to(
              x, (size, *jnp.shape(x))), args, tuple(batched[1:]))
      out = jax.lax.switch(acting[0] if batched[0] else acting,
                           [jax.vmap(branch) for branch in branches], *args)
      return out, jax.tree.map(lambda _: True, out)

    return choose(state.acting, state.memories, *args)
