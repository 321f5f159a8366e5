"""What drafters, models and caches may leave out, as the loop asks for it."""

from collections.abc import Callable
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from specjax.interfaces.declared import capabilities
from specjax.sampling import LogitsTransform
from specjax.types import Draft
from specjax.types import Drafter
from specjax.types import ModelFn
from specjax.types import ModelOutput
from specjax.utils import fields


def num_uniforms(drafter: Drafter) -> int | None:
  """Uniform numbers that a drafter takes; None: it takes keys."""
  return getattr(drafter, "num_uniforms", None)


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
    ValueError: it is no drafter, does not fit the target, or drafts more tokens
      in a row than the models can read.
  """
  check_drafter(drafter)
  bound = drafter
  if hasattr(drafter, "bind"):
    bound = drafter.bind(target, transform)
    check_drafter(bound)
  tokens = bound.num_nodes - 1 if "chain" in capabilities(bound) else (
      getattr(bound, "depth", 0))
  longest = min(getattr(target, "context_length", math.inf),
                context_length(bound))
  if tokens >= longest:
    raise ValueError(
        f"{type(drafter).__name__} drafts {tokens} tokens in a row and the "
        f"context length is {longest}; draft fewer, such as gamma=4")
  return bound


def check_model(name: str, model: Any) -> None:
  """Checks that what is to be a `ModelFn` is not something else.

  Args:
    name: of the argument or field.
    model: its value.

  Raises:
    ValueError: it is a record of a model and its parameters, a class, or no
      model at all.
  """
  kind = type(model).__name__
  if isinstance(model, type):
    raise ValueError(f"{name} is the class {model.__name__}; give an object: "
                     f"{model.__name__}(...)")
  if hasattr(model, "model") and hasattr(model, "params"):
    raise ValueError(
        f"{name} is a {kind}, a model with its parameters; give its `.model` "
        "here, and its `.params` with every call")
  if not callable(model) or not hasattr(model, "init_cache") or (
      not hasattr(model, "vocab_size")):
    raise ValueError(f"{name} is a {kind}; it must be a model with "
                     "`vocab_size` and `init_cache` that can be called, see "
                     "specjax.types.ModelFn")


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


def has_model(part: Any) -> bool:
  """Whether a drafter holds a model with a cache, however deep."""
  if hasattr(part, "init_cache"):
    return True
  if isinstance(part, tuple | list):
    return any(map(has_model, part))
  return dataclasses.is_dataclass(part) and any(
      has_model(getattr(part, f.name)) for f in dataclasses.fields(part))


def check_drafter(drafter: Drafter) -> None:
  """Checks that a drafter has what it must have.

  Raises:
    ValueError: something is missing or no whole number.
  """
  name = type(drafter).__name__
  if isinstance(drafter, type):
    raise ValueError(f"the drafter is the class {drafter.__name__}; give an "
                     f"object: {drafter.__name__}(...)")
  if hasattr(drafter, "params") and hasattr(drafter, "model"):
    raise ValueError(
        f"the drafter is a {name}, a model with its parameters; give "
        "sj.drafters.LanguageModel(model=its `.model`, gamma=4), and its "
        "`.params` with every call")
  if hasattr(drafter, "init_cache") and not hasattr(drafter, "propose"):
    raise ValueError(f"the drafter is the model {name}; give "
                     "sj.drafters.LanguageModel(model=..., gamma=4)")
  fields.check_hashable("drafter", drafter)
  if hasattr(drafter, "model") and drafter.model is not None:
    check_model(f"{name}.model", drafter.model)
  for method in ("init", "propose", "commit"):
    if not callable(getattr(drafter, method, None)):
      raise ValueError(f"the drafter {name} has no method `{method}`; see "
                       "specjax.types.Drafter")
  for field, least, value in (
      ("num_nodes", 1, getattr(drafter, "num_nodes", None)),
      ("num_uniforms", 0, num_uniforms(drafter) or 0)):
    fields.check_at_least(f"{name}.{field}", value, least)
  capabilities(drafter)


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


def reserved(cache: Any, size: int) -> Any:
  """A cache that may put off writing its next `size` tokens."""
  return cache.reserve(size) if hasattr(cache, "reserve") else cache


def settled(cache: Any) -> Any:
  """The cache of which `reserved` was asked, with all its tokens."""
  return cache.settle() if hasattr(cache, "settle") else cache
