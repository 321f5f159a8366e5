"""Checks of the fields of configurations, called by their constructors."""

from typing import Any

import numpy as np


def is_whole(value: Any) -> bool:
  """Returns True if a value is an integer. 3.0 and True are not integers.

  >>> is_whole(3), is_whole(3.0), is_whole(True)
  (True, False, False)
  """
  return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
  """Returns True if a value is a real number. "0.8" and True are not numbers.
  """
  return isinstance(value, (int, float, np.integer, np.floating)) and (
      not isinstance(value, bool))


def check_at_least(name: str, value: Any, least: int, more: str = "") -> None:
  """Raises `ValueError` unless a value is an integer of at least `least`.

  Args:
    name: name of the value in the error.
    value: value to check.
    least: smallest allowed value.
    more: end of the error message.
  """
  if not is_whole(value) or value < least:
    raise ValueError(f"{name} is {value!r}; it must be a whole number of at "
                     f"least {least}{more}")


def check_fields(part: Any, *names: str, least: int = 1, more: str = ""
                 ) -> None:
  """Raises `ValueError` unless fields are integers of at least `least`.

  Args:
    part: object with the fields.
    *names: names of the fields.
    least: smallest allowed value.
    more: end of the error message.
  """
  for name in names:
    check_at_least(name, getattr(part, name), least, more)


def check_hashable(kind: str, part: Any) -> None:
  """Raises `ValueError` if a component of a decoder cannot be hashed.

  Compiled programs are cached by the hash of their components.

  Args:
    kind: name of the component in the error, such as "drafter".
    part: component to check.
  """
  try:
    hash(part)
  except TypeError as e:
    raise ValueError(
        f"the {kind} {type(part).__name__} cannot be hashed ({e}), and "
        "compiled programs are cached by the hash; make it a dataclass with "
        "frozen=True, and its lists tuples") from None


def check_divisible(name: str, value: int, size: int, axis: str) -> None:
  """Raises `ValueError` unless a mesh axis splits a size into equal parts.

  Args:
    name: name of the size in the error.
    value: size to split.
    size: number of devices of the mesh axis.
    axis: name of the mesh axis.
  """
  if value % size:
    raise ValueError(
        f"{name} is {value} and mesh axis {axis!r} has {size} devices; the "
        f"axis splits {name}, so its size must divide {value}: use a smaller "
        f"axis {axis!r} and give the other devices to the data axis")
