"""Rows `(call, words)` of the tests of refusals."""

import functools
import re


def of_values(*rows):
  """Calls with one bad argument, which the message names with its value.

  Args:
    *rows: `(make, argument, *bad values)`.
  """
  return [(functools.partial(make, **{name: value}),
           re.escape(f"{name} is {value!r}"))
          for make, name, *values in rows for value in values]
