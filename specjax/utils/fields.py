"""Whether the fields of a part are what they must be, asked when it is made."""

from typing import Any

import numpy as np


def is_whole(value: Any) -> bool:
  """Whether it can be a size, which 3.0 and True cannot."""
  return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
  """Whether it is a real number, which "0.8" and True are not."""
  return isinstance(value, (int, float, np.integer, np.floating)) and (
      not isinstance(value, bool))


def check_at_least(name: str, value: Any, least: int, more: str = "") -> None:
  """Raises a `ValueError` where a number is too small, or not whole.

  Args:
    name: what an error calls it.
    value: the number.
    least: the least that it may be.
    more: what the error says besides.
  """
  if not is_whole(value) or value < least:
    raise ValueError(f"{name} is {value!r}; it must be a whole number of at "
                     f"least {least}{more}")


def check_fields(part: Any, *names: str, least: int = 1, more: str = ""
                 ) -> None:
  """`check_at_least` of some fields of a part, which errors call by name."""
  for name in names:
    check_at_least(name, getattr(part, name), least, more)


def check_hashable(kind: str, part: Any) -> None:
  """Raises a `ValueError` where no program could be found by a part.

  Args:
    kind: what the error calls it, such as "drafter".
    part: the drafter.
  """
  try:
    hash(part)
  except TypeError as e:
    raise ValueError(
        f"the {kind} {type(part).__name__} cannot be hashed ({e}), and a "
        "program is found by the hash of its parts; make it a dataclass with "
        "frozen=True, and its lists tuples") from None


def check_divisible(name: str, value: int, size: int, axis: str) -> None:
  """Checks that a mesh axis can split something into equal parts.

  Raises:
    ValueError: `value` is no multiple of `size`.
  """
  if value % size:
    raise ValueError(
        f"{name} is {value} and mesh axis {axis!r} has {size} devices; the "
        f"axis splits {name}, so its size must divide {value}: use a smaller "
        f"axis {axis!r} and give the other devices to the data axis")
