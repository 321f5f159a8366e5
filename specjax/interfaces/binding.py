"""Checks of the components of a decoder, made at its construction."""

from collections.abc import Iterator
import dataclasses
from typing import Any
from typing import TYPE_CHECKING

from specjax.interfaces.drafter import capabilities
from specjax.interfaces.drafter import Drafter
from specjax.interfaces.drafter import kind_of
from specjax.interfaces.model import Model
from specjax.utils import fields

if TYPE_CHECKING:
  from specjax.sampling import LogitsTransform


def bind(drafter: Drafter, target: Model, transform: "LogitsTransform"
         ) -> Drafter:
  """Checks a drafter and specialises it to a target.

  Args:
    drafter: drafter of the decoder.
    target: target model.
    transform: transform of the decoder, see `Drafter.bind`.

  Raises:
    ValueError: `drafter` is not a `Drafter`, does not fit the target, or its
      drafts are as long as the context length of a model, or longer.
  """
  check_drafter(drafter)
  bound = drafter.bind(target, transform)
  check_drafter(bound)
  tokens = bound.num_nodes - 1 if "chain" in bound.provides else (
      getattr(bound, "depth", 0))
  longest = min(target.context_length, bound.context_length)
  if tokens >= longest:
    raise ValueError(
        f"{kind_of(drafter)} drafts {tokens} tokens in a row and the "
        f"context length is {longest}; draft fewer, such as gamma=4")
  return bound


def check_model(name: str, model: Any) -> None:
  """Checks that an argument is a `Model`.

  Args:
    name: name of the argument or field.
    model: value of the argument.

  Raises:
    ValueError: `model` is not a `Model`.
  """
  if isinstance(model, Model):
    return
  kind = type(model).__name__
  if isinstance(model, type):
    raise ValueError(f"{name} is the class {model.__name__}; pass an object: "
                     f"{model.__name__}(...)")
  if is_bundle(model) and model_of(model) is not None:
    raise ValueError(
        f"{name} is a {kind}, a model with its parameters; pass its `.model` "
        "here and its `.params` with every call")
  raise ValueError(f"{name} is a {kind}; it must be a specjax.interfaces.Model")


def check_drafter(drafter: Any) -> None:
  """Checks that an argument is a `Drafter` with valid sizes.

  Raises:
    ValueError: `drafter` is not a `Drafter`, or a size is invalid.
  """
  name = type(drafter).__name__
  if isinstance(drafter, type):
    raise ValueError(f"the drafter is the class {drafter.__name__}; pass an "
                     f"object: {drafter.__name__}(...)")
  if not isinstance(drafter, Drafter):
    advice = ("its `.model`" if is_bundle(drafter) else "it" if
              isinstance(drafter, Model) else None)
    raise ValueError(f"the drafter is a {name}; " + (
        "it must be a specjax.interfaces.Drafter" if advice is None else
        f"pass {advice} in sj.drafters.draft_model(model=..., gamma=4)"))
  fields.check_hashable("drafter", drafter)
  name, model = kind_of(drafter), model_of(drafter)
  if model is not None:
    check_model(f"{name}.model", model)
  fields.check_at_least(f"{name}.num_nodes", drafter.num_nodes, 1)
  fields.check_at_least(f"{name}.num_uniforms", drafter.num_uniforms or 0, 0)
  capabilities(drafter)


def model_of(part: Any) -> Any:
  """Returns the field `model` of a drafter or of its network, or None."""
  return getattr(getattr(part, "network", part), "model", None)


def is_bundle(part: Any) -> bool:
  """Returns True for an object with a field `params`, such as `zoo.Member`."""
  return hasattr(part, "params")


def contained(part: Any) -> Iterator[Any]:
  """Yields a component and all components in its fields."""
  yield part
  inner = ()
  if isinstance(part, tuple | list):
    inner = part
  elif dataclasses.is_dataclass(part) and not isinstance(part, type):
    inner = [getattr(part, field.name) for field in dataclasses.fields(part)]
  for one in inner:
    yield from contained(one)


def has_model(part: Any) -> bool:
  """Returns True if a drafter contains a model or heads with `init_cache`."""
  return any(hasattr(one, "init_cache") for one in contained(part))


def cannot_grow(part: Any) -> str | None:
  """Returns the name of a component with `grows = False`, or None.

  The capacity of the state of such a component cannot be increased.
  """
  return next((getattr(one, "__name__", type(one).__name__)
               for one in contained(part) if not getattr(one, "grows", True)),
              None)
