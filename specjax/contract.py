"""What a rule or a drafter may leave out, and what holds where it does.

This is the one place that knows: the loop, `exact`, `analysis` and the studies
ask a `Rule` and never the researcher's own object.

A verification rule (`specjax.types.Verifier`) has `law`. Optional are

  lossless   bool, default True: the output follows the target's law.
  requires   names out of `CAPABILITIES` that the drafter must have; default
             ("chain",), for most rules are written for chains. A rule for any
             tree that makes no use of q says `requires = ()`.
  init       `(gamma) -> state`: the rule has a state, where gamma is N - 1.
             Then `law`, and `survival`, get it as third argument, and None
             stands for a fresh one. Other rules are called with two arguments.
  by_row     `(draft, target_probs) -> LawByRow`, the same law, of which the
             loop makes the one row that it draws from; its `.law()` will do for
             `law`. It gets the state as `law` does. What is certified is this
             form. A class that overrides `law` alone does without. Default:
             the rows of `law`.
  commit     `(state, draft, target_probs, verdict) -> state` after a round;
             without it the state stays as it is.
  survival   `(draft, target_probs) -> [N]`, P(tau >= i | the first i drafted
             tokens), for chains; default: P(depth of the stop >= i | draft).

A drafter (`specjax.types.Drafter`) has `num_nodes`, `init`, `propose` and
`commit`. What `propose` returns may have another structure than the state, such
as a reserved cache, which `commit` settles; but not of a drafter that a
controller or a `Fallback` may leave out of a round. Optional are

  chain, iid, conditional, autoregressive, certain, full
             bools, default False, see `CAPABILITIES`.
  num_coins  how many uniform numbers it needs for a row and round. Then
             `propose` gets them as `[B, num_coins]` float32 in [0, 1) in place
             of keys: the loop tosses the coins of many rounds at once, which
             is far cheaper than keys are. Coin i must not decide how many
             coins there are. Default: `propose` gets one key for each row.
  bind       `(target, transform) -> drafter`: the drafter specialised to a
             target, or a `ValueError` where the two do not fit. The transform
             takes the temperature of each row: `transform(logits,
             state.temperature[:, None])`. A drafter that follows its own
             paths by `transform.constraints` and `state.constraints`
             (`specjax.constraints.base`) drafts nothing that these forbid.
  context_length
             longest sequence that it can draft for; default: no limit.
  gamma      as a field, the tokens of a chain: a controller replaces it. The
             state must have the same form for every length.
  with_gamma `(gamma) -> drafter`: the same with chains of another length, where
             a field is not enough; None where there is no such length.
  catch_up   `(params, state, since) -> drafter`: its state after reading what
             rounds in which a controller let it rest have added to the
             `since [B]` tokens that it had read. In such a round `commit` gets
             a draft of the root alone. A drafter with a model needs it.
  follow     `() -> drafter`: the same drafter for a loop whose text does not go
             on as it drafted it: tokens are taken back, those of others are
             committed, rounds pass in which it is not asked, and `commit` gets
             drafts of others. Default: it works inside and beside others
             (`Cascade`, `Fallback`, `Merge`) only if it has no state.
  grows      bool, default True: zeros after the end of its state's arrays are
             what more slots (`prompt.capacity`) would have been, see
             `Decoder.grow`. Models, caches and constraints may say so, too.
  proposal   a word for how its tokens are drawn, for tables and readers.
  param_specs
             `(axis, size)`: the `PartitionSpec` of `params["drafter"]`, or of
             whole branches of it, on a mesh; see `param_specs` below.
  target_pass
             `(params, drafter, draft, depths, ancestors, cache) -> ModelOutput`
             for a drafter that has run a part of the target: what the target's
             own pass over the draft would return, logits and cache, from what
             `propose` left in its state. Default: the target reads the draft.

A cache (`specjax.types.Cache`) has `lengths`, `commit` and `rollback`. Optional
are

  reserve    `(size) -> cache`: the same, for whom feeds token after token. The
             next `size` tokens count as committed by `commit` and `rollback` as
             ever, and the cache need not write them yet.
  settle     `() -> cache`: the same with all of them written, of the form that
             it had before. Default of these two: the cache writes what it is
             told at once.
  until      `(lengths [B]) -> cache`: the same, before prompts of these lengths
             are read into it; what comes after them, until tokens are taken
             back, is padding. Default: it is overwritten in time.
  after      `(x) -> cache`: the same, when a `Transformer` has computed the
             hidden states x from it; see `KVCache.after`.
  with_rows  `(slots [R], fresh) -> cache`: the same with the R rows of another
             cache in the place of some, see `Decoder.insert`. Default: every
             leaf has the rows B first.
  take_rows  `(rows [R]) -> cache`: these rows alone, in order, copied. A cache
             with `with_rows` must have it for a `serving.Queue`.
  grow       `(form, longer) -> cache`: the same with more slots in every row.
             `form` is the shapes of an empty cache of that capacity, and
             `longer(array, form)` an array with zeros after its end. Default:
             these zeros, see `Decoder.grow`.
"""

from collections.abc import Callable
from collections.abc import Iterable
import dataclasses
import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from specjax import checks
from specjax.sampling import LogitsTransform
from specjax.types import Draft
from specjax.types import Drafter
from specjax.types import Law
from specjax.types import LawByRow
from specjax.types import ModelFn
from specjax.types import ModelOutput
from specjax.types import Verdict
from specjax.types import Verifier

CAPABILITIES = {
    "chain": "every draft is one chain: node i + 1 is below node i, what hangs "
             "beside it is padding, and every row of `probs` is the law of its "
             "token given those before it",
    "iid": "the children of a node are independent draws from one law",
    "conditional": "every row of `probs` is the law of its token given what "
                   "came before it, as `Draft` asks",
    "autoregressive": "q depends on the context alone, not on where the draft "
                      "began; whether a row is padding may depend on its "
                      "position, not on the tokens before it",
    "certain": "every row of `probs` is one-hot or padding, so that its token "
               "tells the whole law",
    "full": "no node is padding, so that nobody need look how much was "
            "drafted",
}


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


def _check_hashable(kind, part):
  try:
    hash(part)
  except TypeError as e:
    raise ValueError(
        f"the {kind} {type(part).__name__} cannot be hashed ({e}), and a "
        "program is found by the hash of its parts; make it a dataclass with "
        "frozen=True, and its lists tuples") from None


def capabilities(drafter: Drafter) -> frozenset[str]:
  """Which of `CAPABILITIES` a drafter declares.

  Raises:
    ValueError: one of them is declared as something else than True or False.
  """
  for name in CAPABILITIES:
    value = getattr(drafter, name, False)
    if not isinstance(value, bool):
      raise ValueError(f"{type(drafter).__name__}.{name} is {value!r}; it must "
                       "be True or False")
  return frozenset(name for name in CAPABILITIES
                   if getattr(drafter, name, False))


def num_coins(drafter: Drafter) -> int | None:
  """Uniform numbers that a drafter takes; None: it takes keys."""
  return getattr(drafter, "num_coins", None)


def with_gamma(drafter: Drafter) -> Callable[[int], Drafter] | None:
  """What makes the same drafter with chains of another length, or None."""
  if hasattr(drafter, "with_gamma"):
    return drafter.with_gamma
  if dataclasses.is_dataclass(drafter) and any(
      field.name == "gamma" for field in dataclasses.fields(drafter)):
    return lambda gamma: dataclasses.replace(drafter, gamma=gamma)
  return None


def context_length(drafter: Drafter) -> float:
  """Longest sequence that a drafter can draft for; infinity: any."""
  return getattr(drafter, "context_length", math.inf)


def bind(drafter: Drafter, target: ModelFn, transform: LogitsTransform
         ) -> Drafter:
  """The drafter specialised to a target, all it must have checked.

  Raises:
    ValueError: it is no drafter, or does not fit the target.
  """
  check_drafter(drafter)
  if not hasattr(drafter, "bind"):
    return drafter
  bound = drafter.bind(target, transform)
  check_drafter(bound)
  return bound


def follow(drafter: Drafter) -> Drafter:
  """The drafter for a text that does not go on as it drafted it.

  Raises:
    ValueError: what it returned is no drafter.
  """
  if not hasattr(drafter, "follow"):
    return drafter
  found = drafter.follow()
  check_drafter(found)
  return found


def cannot_grow(part: Any) -> str | None:
  """The name of a part, however deep, whose state cannot get more slots."""
  if isinstance(part, tuple | list):
    inner = part
  elif dataclasses.is_dataclass(part) and not isinstance(part, type):
    inner = [getattr(part, f.name) for f in dataclasses.fields(part)]
  else:
    inner = ()
  if not getattr(part, "grows", True):
    return getattr(part, "__name__", type(part).__name__)
  return next(filter(None, map(cannot_grow, inner)), None)


def param_specs(part: ModelFn | Drafter, axis: str, size: int) -> Any:
  """How a model or a drafter splits its parameters over a mesh axis.

  Raises:
    ValueError: it does not say, and the axis has several devices.
  """
  if hasattr(part, "param_specs"):
    return part.param_specs(axis, size)
  if size == 1:
    return PartitionSpec()
  raise ValueError(f"{type(part).__name__} does not say how its parameters are "
                   f"split, and mesh axis {axis!r} has {size} devices; give it "
                   "`param_specs(axis, size)`, or an axis of one device")


def logits_at(model: ModelFn, params: Any, output: ModelOutput, at: jax.Array
              ) -> jax.Array:
  """`[B, K, V]`, the logits at the positions `at [B, K]` of a pass.

  A model that can compute these alone says so by a method of this name.
  """
  if hasattr(model, "logits_at"):
    return model.logits_at(params, output, at)
  return jnp.take_along_axis(output.logits, at[..., None], axis=1)


def target_pass(drafter: Drafter, target: ModelFn, params: Any, proposed: Any,
                draft: Draft, depths: jax.Array, ancestors: jax.Array,
                cache: Any) -> ModelOutput:
  """The pass that verifies a draft.

  Args:
    drafter: which may have run a part of it.
    target: the model.
    params: `{"target": ..., "drafter": ...}`.
    proposed: the drafter's state, as `propose` returned it.
    draft: N nodes a row.
    depths: `[B, N]` int32.
    ancestors: `[B, N, N]` bool.
    cache: the target's, before the round.
  """
  if hasattr(drafter, "target_pass"):
    return drafter.target_pass(
        params, proposed, draft, depths, ancestors, cache)
  return target(params["target"], draft.tokens, depths, ancestors, cache)


def reserved(cache: Any, size: int) -> Any:
  """A cache that may put off writing its next `size` tokens."""
  return cache.reserve(size) if hasattr(cache, "reserve") else cache


def settled(cache: Any) -> Any:
  """The cache of which `reserved` was asked, with all its tokens."""
  return cache.settle() if hasattr(cache, "settle") else cache


def check_drafter(drafter: Drafter) -> None:
  """Checks that a drafter has what it must have.

  Raises:
    ValueError: something is missing or no whole number.
  """
  name = type(drafter).__name__
  if isinstance(drafter, type):
    raise ValueError(f"the drafter is the class {drafter.__name__}; give an "
                     f"object: {drafter.__name__}(...)")
  _check_hashable("drafter", drafter)
  for method in ("init", "propose", "commit"):
    if not callable(getattr(drafter, method, None)):
      raise ValueError(f"the drafter {name} has no method `{method}`; see "
                       "specjax.types.Drafter")
  for field, least, value in (
      ("num_nodes", 1, getattr(drafter, "num_nodes", None)),
      ("num_coins", 0, num_coins(drafter) or 0)):
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
      raise ValueError(f"{name}.{field} is {value!r}; it must be a whole "
                       f"number of at least {least}")
  capabilities(drafter)


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
  _check_hashable("verifier", one.verifier)
  name = drafter if isinstance(drafter, str) else type(drafter).__name__
  declared = capabilities(drafter) if declared is None else declared
  for need in one.requires:
    if need not in declared:
      raise ValueError(
          f"{one.name} is exact only with a drafter that is {need} "
          f"({CAPABILITIES[need]}), and {name} does not declare `{need} = "
          "True`; choose another pair, or declare it where it is true")
