"""Base class of verification rules, and checks of rules."""

from collections.abc import Iterable
import inspect
from typing import Any

import chex
import jax
import jax.numpy as jnp

from specjax.interfaces import checks
from specjax.interfaces.drafter import CAPABILITIES
from specjax.interfaces.drafter import capabilities
from specjax.interfaces.drafter import Drafter
from specjax.interfaces.drafter import kind_of
from specjax.trees import topology
from specjax.types import Draft
from specjax.types import Law
from specjax.types import Verdict
from specjax.utils import fields


class Verifier:
  """A verification rule, defined by the distribution of its outcome.

  A subclass implements `law`, for one sequence. Every other member has a
  default. A rule with a state also implements `init` and `commit`. Its `law`
  and `survival` take the state as third argument. A rule is hashable and draws
  no random numbers: the decoding loop samples from its `Law`.

  Attributes:
    lossless: True if the output follows the target's distribution.
    requires: names in `specjax.interfaces.CAPABILITIES` that the drafter must
      provide. `()` is for a rule that allows any tree and does not read q.

  Example: a rule that rejects every draft.

    >>> import jax.numpy as jnp
    >>> import specjax as sj
    >>> class RejectAll(sj.Verifier):
    ...   def law(self, draft, target_probs):
    ...     stop = jnp.zeros(len(draft.tokens)).at[0].set(1)
    ...     return sj.Law(stop=stop, next_token=target_probs)
    >>> sj.exact.certify(RejectAll(), gammas=(1,), vocab_sizes=(2,)).lossless
    True
  """

  lossless: bool = True
  requires: tuple[str, ...] = ("chain",)

  def __repr__(self) -> str:
    # Records and fingerprints identify a rule by its repr, so the repr must not
    # contain an address. Dataclasses have their own.
    values = ", ".join(f"{name}={x!r}" for name, x in vars(self).items())
    return f"{type(self).__name__}({values})"

  def law(self, draft: Draft, target_probs: jax.Array, *state: chex.ArrayTree
          ) -> Law:
    """Returns the distribution of the outcome for one draft.

    Args:
      draft: draft with N nodes.
      target_probs: `[N, V]`, distribution p of the token after every node.
      *state: state of the rule, passed only to a rule with `init`. None means
        the state before the first round.
    """
    raise NotImplementedError(f"{type(self).__name__} has no `law`")

  def init(self, gamma: int) -> Any:
    """Returns the state before the first round. The default is None: no state.

    Args:
      gamma: N - 1, the number of drafted nodes.
    """
    del gamma
    return None

  def commit(self, state: chex.ArrayTree, draft: Draft, target_probs: jax.Array,
             verdict: Verdict) -> Any:
    """Returns the state after a round. The default returns it unchanged."""
    del draft, target_probs, verdict
    return state

  def survival(self, draft: Draft, target_probs: jax.Array,
               *state: chex.ArrayTree) -> jax.Array:
    """Returns `[N]`: entry i is the probability that tau is at least i.

    The default is P(tau >= i | draft). A rule on chains may return
    P(tau >= i | the first i drafted tokens) instead, which has a lower
    variance.
    """
    law = self.law(draft, target_probs, *state)
    return _reach(law.stop, topology.depths(draft.parents))

  @property
  def has_state(self) -> bool:
    """True if the rule implements `init`."""
    return type(self).init is not Verifier.init

  @property
  def remembers(self) -> bool:
    """True if the rule implements `commit`, so that rounds change its state."""
    return type(self).commit is not Verifier.commit

  @property
  def has_survival(self) -> bool:
    """True if the rule implements `survival`."""
    return type(self).survival is not Verifier.survival

  def evaluate(self, draft: Draft, target_probs: jax.Array,
               state: chex.ArrayTree | None = None) -> Law:
    """Calls `law` and checks the shapes. Subclasses do not override it.

    Args:
      draft: draft with N nodes.
      target_probs: `[N, V]`, distribution p of the token after every node.
      state: state of the rule. None is the state before the first round, or no
        state.
    """
    law = self.law(draft, target_probs, *self._arguments(state))
    checks.check_law(type(self).__name__, law, *target_probs.shape)
    return law

  def figures(self, draft: Draft, target_probs: jax.Array,
              state: chex.ArrayTree, law: Law, depths: jax.Array
              ) -> tuple[jax.Array, jax.Array]:
    """Returns E[tau | draft] `[]` and `survival [N]`.

    Args:
      draft: draft with N nodes.
      target_probs: `[N, V]`, distribution p of the token after every node.
      state: state of the rule, or None.
      law: result of `evaluate`.
      depths: `[N]` int32, depth of every node.
    """
    expected = jnp.sum(law.stop * depths)
    if not self.has_survival:
      return expected, _reach(law.stop, depths)
    survival = self.survival(draft, target_probs, *self._arguments(state))
    checks.check_survival(type(self).__name__, survival, depths.shape[0])
    return expected, survival

  def next_state(self, state: chex.ArrayTree, draft: Draft,
                 target_probs: jax.Array, verdict: Verdict) -> Any:
    """Calls `commit` and checks the structure and shapes of the new state."""
    new = self.commit(state, draft, target_probs, verdict)
    checks.check_same(f"the state that {type(self).__name__}.commit returned",
                      new, state)
    return new

  def _arguments(self, state: chex.ArrayTree) -> tuple[Any, ...]:
    return (state,) if self.has_state else ()


def _reach(stop: jax.Array, depths: jax.Array) -> jax.Array:
  """Returns `[N]`, P(depth of the stop >= i) for i = 0..N-1."""
  deep = depths >= jnp.arange(depths.shape[0])[:, None]
  return jnp.sum(stop * deep, axis=-1)


def check_verifier(verifier: Verifier) -> None:
  """Checks the static members of a rule.

  Raises:
    ValueError: the rule is not a `Verifier`; `law` takes other arguments;
      `requires` has a name that is not a capability; the rule has `commit` but
      not `init`.
  """
  if isinstance(verifier, type):
    raise ValueError(f"the verifier is the class {verifier.__name__}; give an "
                     f"object: {verifier.__name__}()")
  if isinstance(verifier, str):
    raise ValueError(f"the verifier is the string {verifier!r}; give an object "
                     "such as specjax.verifiers.Block()")
  name = type(verifier).__name__
  if not isinstance(verifier, Verifier):
    raise ValueError(f"the verifier is a {name}, which is not a subclass of "
                     f"specjax.Verifier; write `class {name}(sj.Verifier)` and "
                     "implement `law(draft, target_probs)`")
  if isinstance(verifier.requires, str):
    raise ValueError(f"{name}.requires is the string {verifier.requires!r}; "
                     f"give a tuple: ({verifier.requires!r},)")
  for need in verifier.requires:
    if need not in CAPABILITIES:
      raise ValueError(f"{name}.requires has {need!r}; it must be among "
                       f"{', '.join(CAPABILITIES)}")
  if not isinstance(verifier.lossless, bool):
    raise ValueError(f"{name}.lossless is {verifier.lossless!r}; it must be "
                     "True or False")
  if verifier.remembers and not verifier.has_state:
    raise ValueError(f"{name} has `commit` and no `init`; add `init(gamma)` "
                     "that returns the state before the first round")
  try:
    inspect.signature(verifier.law).bind(
        None, None, *verifier._arguments(None))  # pylint: disable=protected-access
  except TypeError as e:
    raise ValueError(
        f"{name}.law cannot be called as law(draft, target_probs"
        f"{', state' * verifier.has_state}): {e}" + (
            "; a rule has a state if it has `init(gamma)`"
            if "missing" in str(e) else "")) from None


def check_pair(verifier: Verifier, drafter: Drafter | str,
               declared: Iterable[str] | None = None) -> None:
  """Checks that a drafter provides every capability that a rule requires.

  Args:
    verifier: the rule.
    drafter: the drafter, or its class name if `declared` is not None.
    declared: capabilities of the drafter. None reads them from `drafter`.

  Raises:
    ValueError: the drafter does not provide a required capability, so the
      output might not follow the target's distribution.
  """
  check_verifier(verifier)
  fields.check_hashable("verifier", verifier)
  name = drafter if isinstance(drafter, str) else kind_of(drafter)
  declared = capabilities(drafter) if declared is None else declared
  for need in verifier.requires:
    if need not in declared:
      raise ValueError(
          f"{type(verifier).__name__} is exact only with a drafter that is "
          f"{need} ({CAPABILITIES[need]}), and {name} does not provide it; "
          "choose another pair, or add it to `provides` if it is true")
