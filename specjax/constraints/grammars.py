"""Compiles regular expressions and JSON schemas to automata over bytes."""

from collections.abc import Mapping
import json
from typing import Any

from specjax.constraints import characters
from specjax.constraints import fragments
from specjax.constraints import json_texts
from specjax.constraints import regexes
from specjax.constraints import schemas

_SPACE = "[ ]?"
# Number of times that a recursive $ref is followed. The second limit is used if
# the automaton with the first limit is too large.
_DEEPEST = (6, 3)
_SPACES = frozenset(b" \t\n\r")


def regex_fragment(regex: str) -> fragments.Fragment:
  """Returns the automaton of the full matches of a regular expression.

  Raises:
    ValueError: the expression is invalid, matches nothing or is too large.
  """
  found = characters.spelled(regexes.compiled(regex, search=False), json=False)
  if found is None:
    raise ValueError("no text matches the regular expression "
                     f"{regexes.shown(regex)}; are its ^ and $ at its ends?")
  return found


def schema_fragment(schema: str | Mapping[str, Any],
                    whitespace: str | None = None) -> fragments.Fragment:
  """Returns the automaton of the JSON documents that are valid under a schema.

  Args:
    schema: schema as a JSON string or as a Python object.
    whitespace: regular expression for the white space between two parts. None
      allows at most one space.

  Raises:
    ValueError: the schema is not JSON, a part of it is not supported, or no
      value is valid.
  """
  try:
    root = json.loads(schema if isinstance(schema, str) else json.dumps(schema))
  except (TypeError, ValueError, RecursionError) as e:
    raise ValueError(f"the schema is not JSON: {e}") from None
  if not isinstance(root, (bool, Mapping)):
    raise ValueError(f"the JSON schema is {root!r}; it must be an object")
  try:
    found, reader = _written(root, _space(whitespace))
  except RecursionError:
    raise ValueError("the JSON schema is nested too deeply; name its parts in "
                     "'$defs'") from None
  if found is None:
    why = (f"$ref {min(reader.stopped)!r} is within itself without an end"
           if reader.stopped else "its keywords contradict each other")
    raise ValueError(f"no value follows the JSON schema: {why}")
  return found


def _written(root: bool | Mapping[str, Any], space: fragments.Fragment
             ) -> tuple[fragments.Fragment | None, schemas.Reader]:
  """Returns the automaton of a schema and the reader of the schema.

  The automaton is None if no value is valid. The attribute `stopped` of the
  reader contains the recursive `$ref`s.
  """
  for deepest in _DEEPEST:
    reader = schemas.Reader(root, deepest)
    try:
      return json_texts.Writer(reader, space).value(((root, ()),)), reader
    except fragments.TooLargeError:
      if not reader.stopped or deepest == _DEEPEST[-1]:
        raise


def _space(whitespace: str | None) -> fragments.Fragment:
  found = regex_fragment(_SPACE if whitespace is None else whitespace)
  for _, low, high, _ in found.edges.tolist():
    if not _SPACES.issuperset(range(low, high + 1)):
      raise ValueError(f"whitespace is {whitespace!r}; it must match spaces, "
                       "tabs and line ends alone")
  return found
