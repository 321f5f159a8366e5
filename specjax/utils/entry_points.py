"""Names that installed packages add to specjax by entry points.

A package declares them in its pyproject.toml, for example:

  [project.entry-points."specjax.verifiers"]
  first_token = "my_rules:FirstToken"

The groups are "specjax.verifiers" and "specjax.drafters", which the scripts in
`experiments/` read, and "specjax.methods" (see `methods.available`).
"""

import functools
from importlib import metadata
from typing import Any


@functools.cache
def _declared(group: str) -> dict[str, metadata.EntryPoint]:
  return {entry.name: entry for entry in metadata.entry_points(group=group)}


def names(group: str) -> tuple[str, ...]:
  """Returns the names of a group, without importing the packages.

  >>> names("specjax.nothing")
  ()

  Args:
    group: name of the group, such as "specjax.verifiers".
  """
  return tuple(_declared(group))


def described(group: str, name: str) -> str:
  """Returns the object and the package of an entry point, for messages."""
  entry = _declared(group)[name]
  package = entry.dist.name if entry.dist else entry.module
  return f"{entry.value} of the package {package}"


def load(group: str, name: str) -> Any:
  """Imports and returns the object of an entry point.

  Raises:
    KeyError: no installed package declares the name.
    Exception: an exception of the package.
  """
  return _declared(group)[name].load()
