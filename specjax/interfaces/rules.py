"""A verification rule with all that it may leave out filled in."""

from collections.abc import Iterable
import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp

from specjax.interfaces import checks
from specjax.interfaces.drafter import CAPABILITIES
from specjax.interfaces.drafter import capabilities
from specjax.interfaces.drafter import Drafter
from specjax.types import Draft
from specjax.types import Law
from specjax.types import LawByRow
from specjax.types import Verdict
from specjax.types import Verifier
from specjax.utils import fields


@dataclasses.dataclass(frozen=True)
class Rule:
  """A verification rule with all that it may leave out filled in.

  Attributes:
    verifier: the researcher's object. A `Rule` hashes as it does.
  """

  verifier: Verifier

  @property
  def name(self) -> str:
    return type(self.verifier).__name__

  @property
  def lossless(self) -> bool:
    return getattr(self.verifier, "lossless", True)

  @property
  def requires(self) -> tuple[str, ...]:
    return tuple(getattr(self.verifier, "requires", ("chain",)))

  @property
  def has_state(self) -> bool:
    return hasattr(self.verifier, "init")

  @property
  def remembers(self) -> bool:
    """Whether a round changes the rule's state."""
    return hasattr(self.verifier, "commit")

  def initial_state(self, gamma: int) -> Any:
    """The state before the first round; None for a rule that has none."""
    return self.verifier.init(gamma) if self.has_state else None

  def law(self, draft: Draft, target_probs: jax.Array, state: Any = None
          ) -> Law:
    """The law of the outcome for one sequence, its shapes checked.

    Args:
      draft: N nodes.
      target_probs: `[N, V]`, the target's law after every node.
      state: the rule's; None is a fresh one, or none.
    """
    law = self.verifier.law(draft, target_probs, *self._memory(state))
    checks.check_law(self.name, law, *target_probs.shape)
    return law

  @property
  def makes_rows(self) -> bool:
    """Whether the rule has `by_row`, and no later `law` that it is not of."""
    owners = [self.verifier, *type(self.verifier).__mro__]
    for owner in owners:
      names = getattr(owner, "__dict__", {})
      if "by_row" in names or "law" in names:
        return "by_row" in names
    return False

  def by_row(self, draft: Draft, target_probs: jax.Array, state: Any = None
             ) -> LawByRow:
    """`law` as its rows are asked for, their shapes checked."""
    if not self.makes_rows:
      law = self.law(draft, target_probs, state)
      return LawByRow(stop=law.stop, next_row=law.next_row)
    law = self.verifier.by_row(draft, target_probs, *self._memory(state))
    return checks.check_law_by_row(self.name, law, *target_probs.shape)

  def survival(self, draft: Draft, target_probs: jax.Array, state: Any,
               law: Law | LawByRow, depths: jax.Array) -> jax.Array:
    """`[N]`, P(tau >= i), by the rule's own formula where it has one.

    Args:
      draft: N nodes.
      target_probs: `[N, V]`.
      state: the rule's, or None.
      law: what `law` or `by_row` returned.
      depths: `[N]` of the nodes.
    """
    if not hasattr(self.verifier, "survival"):
      deep = depths >= jnp.arange(depths.shape[0])[:, None]
      return jnp.sum(law.stop * deep, axis=-1)
    found = self.verifier.survival(draft, target_probs, *self._memory(state))
    checks.check_survival(self.name, found, depths.shape[0])
    return found

  def figures(self, draft: Draft, target_probs: jax.Array, state: Any,
              law: Law | LawByRow, depths: jax.Array
              ) -> tuple[jax.Array, jax.Array]:
    """E[tau | draft] `[]` and `survival [N]`; arguments as there."""
    expected = jnp.sum(law.stop * depths)
    return expected, self.survival(draft, target_probs, state, law, depths)

  def commit(self, state: Any, draft: Draft, target_probs: jax.Array,
             verdict: Verdict) -> Any:
    """The state after a round."""
    if not self.remembers:
      return state
    new = self.verifier.commit(state, draft, target_probs, verdict)
    checks.check_same(f"the state that {self.name}.commit returned", new, state)
    return new

  def _memory(self, state):
    return (state,) if self.has_state else ()


def rule(verifier: Verifier | Rule) -> Rule:
  """The `Rule` of a verifier.

  Raises:
    ValueError: it has no `law`, requires what no drafter can declare, or has
      `commit` and no `init`.
  """
  if isinstance(verifier, Rule):
    return verifier
  name = type(verifier).__name__
  if isinstance(verifier, type):
    raise ValueError(f"the verifier is the class {verifier.__name__}; give an "
                     f"object: {verifier.__name__}()")
  if not callable(getattr(verifier, "law", None)):
    raise ValueError(f"the verifier {name} has no method `law(draft, "
                     "target_probs)`; see specjax.types.Verifier")
  found = Rule(verifier)
  if isinstance(getattr(verifier, "requires", ()), str):
    raise ValueError(f"{name}.requires is the text {verifier.requires!r}; give "
                     f"a tuple: ({verifier.requires!r},)")
  arguments = (None,) * (2 + found.has_state)
  try:
    inspect.signature(verifier.law).bind(*arguments)
  except TypeError as e:
    raise ValueError(
        f"{name}.law cannot be called as law(draft, target_probs"
        f"{', state' * found.has_state}): {e}; a rule has a state if it has "
        "`init(gamma)`") from None
  for need in found.requires:
    if need not in CAPABILITIES:
      raise ValueError(f"{name}.requires holds {need!r}; it must be among "
                       f"{', '.join(CAPABILITIES)}")
  if not isinstance(found.lossless, bool):
    raise ValueError(f"{name}.lossless is {found.lossless!r}; it must be True "
                     "or False")
  if found.remembers and not found.has_state:
    raise ValueError(f"{name} has `commit` and no `init`; a rule that "
                     "remembers needs `init(gamma)`, its first state")
  return found


def check_pair(verifier: Verifier | Rule, drafter: Drafter,
               declared: Iterable[str] | None = None) -> None:
  """Checks that a drafter declares all that a rule requires.

  Args:
    verifier: the rule.
    drafter: the drafter, or its name where `declared` is given.
    declared: the capabilities of a drafter that was recorded.

  Raises:
    ValueError: a capability is missing; the rule would not be exact.
  """
  one = rule(verifier)
  fields.check_hashable("verifier", one.verifier)
  name = drafter if isinstance(drafter, str) else type(drafter).__name__
  declared = capabilities(drafter) if declared is None else declared
  for need in one.requires:
    if need not in declared:
      raise ValueError(
          f"{one.name} is exact only with a drafter that is {need} "
          f"({CAPABILITIES[need]}), and {name} does not declare `{need} = "
          "True`; choose another pair, or declare it where it is true")
