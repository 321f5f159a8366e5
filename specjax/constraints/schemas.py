"""Converts JSON schemas to lists of alternatives.

An alternative has no `anyOf`, `oneOf`, `allOf` or `$ref`, and a valid value
satisfies one alternative of the list. All parts of a schema that apply to the
same value are merged, such as `allOf`, `$ref` and the keywords beside them.
Unsupported keywords raise an error.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import json
from typing import Any
import urllib.parse

from specjax.constraints import exclusion
from specjax.constraints.alternatives import Alternative
from specjax.constraints.alternatives import Node
from specjax.constraints.alternatives import TYPES

# Keywords that do not restrict a value, and definitions for $ref.
_NOTES = frozenset((
    "title", "description", "default", "examples", "deprecated", "readOnly",
    "writeOnly", "$schema", "$id", "$comment", "$defs", "definitions",
    # OpenAPI keywords.
    "discriminator", "example", "externalDocs", "xml"))
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_OF_OBJECTS = ("properties", "required", "additionalProperties",
               "minProperties", "maxProperties")
_OF_ONE_TYPE = ("pattern", "format", "minLength", "maxLength", *_BOUNDS,
                "items", "prefixItems", "minItems", "maxItems", "uniqueItems")
_LEAST = ("minLength", "minItems", "minProperties")
_MOST = ("maxLength", "maxItems", "maxProperties")
_MOST_ALTERNATIVES = 4096
_FIX = "leave it out, say it in another way, or give a regular expression"

_is_texts = lambda x: isinstance(x, list) and all(isinstance(y, str) for y in x)
_is_schema = lambda x: isinstance(x, (bool, Mapping))
_is_number = lambda x: type(x) in (int, float) and abs(x) < float("inf")
# Required form of the value of each keyword.
_FORMS = (
    ("an object of schemas", lambda x: isinstance(x, Mapping) and all(
        map(_is_schema, x.values())), ("properties",)),
    ("a text", lambda x: isinstance(x, str), ("$ref", "pattern", "format")),
    ("a list of texts", _is_texts, ("required",)),
    (f"one or some of {', '.join(TYPES)}", lambda x: x in list(TYPES) or (
        _is_texts(x) and x != [] and set(x) <= TYPES.keys()), ("type",)),
    ("a list of schemas that is not empty", lambda x: isinstance(
        x, list) and x != [] and all(map(_is_schema, x)),
     ("allOf", "anyOf", "oneOf", "prefixItems")),
    ("a list that is not empty", lambda x: isinstance(x, list) and x != [],
     ("enum",)),
    ("an object, true or false", _is_schema, ("items", "additionalProperties")),
    ("true or false", lambda x: isinstance(x, bool), ("uniqueItems",)),
    ("a number", _is_number, _BOUNDS),
    ("a whole number of at least 0", lambda x: (
        _is_number(x) and x >= 0 and x == int(x)), (*_LEAST, *_MOST)))
_FORM_OF = {key: (form, fits) for form, fits, keys in _FORMS for key in keys}
_KNOWN = _FORM_OF.keys() | _NOTES | {"const"}

class Reader:
  """Reads the nodes of one schema.

  Attributes:
    root: entire schema.
    deepest: number of times that a recursive `$ref` is followed.
    stopped: set of `$ref`s that were followed `deepest` times.
  """

  def __init__(self, root: Any, deepest: int) -> None:
    self.root, self.deepest, self.stopped = root, deepest, set()

  def alternatives(self, node: Node) -> list[Alternative]:
    """Returns the alternatives of a node.

    A node is a tuple of pairs: a part of the schema and the `$ref`s that were
    followed to reach it. A value must satisfy all parts of the node. A value is
    valid if it satisfies all keywords of one alternative.
    """
    found = [Alternative()]
    for part, refs in node:
      found = _conjunctions(found, self._expanded(part, refs))
    return found

  def _expanded(self, part: bool | Mapping[str, Any], refs: tuple[str, ...]
                ) -> list[Alternative]:
    """Returns the alternatives of one part of the schema.

    `refs` are the `$ref`s that were followed to reach the part.
    """
    if isinstance(part, bool):
      return [Alternative()] if part else []
    _check_keywords(part)
    found = [_plain(part, refs)]
    for one in part.get("allOf", ()):
      found = _conjunctions(found, self._expanded(one, refs))
    if "$ref" in part:
      path = part["$ref"]
      target = self._followed(path)
      if refs.count(path) == self.deepest:
        self.stopped.add(path)
        return []
      found = _conjunctions(found, self._expanded(target, (*refs, path)))
    for key in ("anyOf", "oneOf"):
      if key in part:
        branches = [self._expanded(one, refs) for one in part[key]]
        if key == "oneOf":
          self._check_one(part[key], found)
        found = _conjunctions(found, sum(branches, []))
    return found

  def _followed(self, path: str) -> bool | Mapping[str, Any]:
    found = self.root
    try:
      if not path.startswith("#"):
        raise KeyError
      for name in filter(None, urllib.parse.unquote(path[1:]).split("/")):
        name = name.replace("~1", "/").replace("~0", "~")
        found = found[int(name) if isinstance(found, list) else name]
      if not _is_schema(found):
        raise KeyError
    except (AttributeError, LookupError, TypeError, ValueError):
      raise ValueError(f"the JSON schema has no part {path!r}; a $ref is such "
                       "as '#/$defs/name'") from None
    return found

  def _check_one(self, parts: Sequence[bool | Mapping[str, Any]],
                 around: list[Alternative]) -> None:
    """Checks that no two parts of `oneOf` can hold together.

    `around` are the alternatives of the keywords beside `oneOf`.
    """
    branches = [_conjunctions(around, self._expanded(one, ())) for one in parts]
    for i, one in enumerate(branches):
      for j, other in enumerate(branches):
        if i != j and not exclusion.excluded(self.alternatives, one, other):
          raise ValueError(
              f"the JSON schema has 'oneOf', and its parts {min(i, j) + 1} and "
              f"{max(i, j) + 1} may both hold for a value; use 'anyOf', or "
              "require a property with different constants")


def _check_keywords(part: Mapping[str, Any]) -> None:
  """Raises `ValueError` for unsupported keywords and values of a wrong form."""
  lost = part.keys() - _KNOWN
  if lost:
    raise ValueError(f"the JSON schema has {_words(lost)}, which is not "
                     f"supported: {_FIX}")
  for key, value in part.items():
    form, fits = _FORM_OF.get(key, ("", lambda x: True))
    if not fits(value):
      raise ValueError(f"the JSON schema has {key!r} {_short(value)}; it must "
                       f"be {form}")


def _plain(part: Mapping[str, Any], refs: tuple[str, ...]
           ) -> Alternative:
  """Returns the keywords of one part, without those that refer to subschemas.

  The result omits `allOf`, `anyOf`, `oneOf` and `$ref`. `refs` are the `$ref`s
  that were followed to reach the part.
  """
  node = lambda x: ((x, refs),)
  return Alternative(
      types=_types(part), values=_values(part), limits=_limits(part),
      patterns=tuple(part[key] for key in ("pattern",) if key in part),
      formats=tuple(part[key] for key in ("format",) if key in part),
      prefix=tuple(map(node, part.get("prefixItems", ()))),
      items=node(part["items"]) if "items" in part else (),
      properties={name: node(x)
                  for name, x in part.get("properties", {}).items()},
      required=tuple(part.get("required", ())),
      extra=(node(part["additionalProperties"])
             if "additionalProperties" in part else ()),
      has_extra="additionalProperties" in part,
      keywords=tuple(key for key in _OF_ONE_TYPE if key in part),
      is_object=not part.keys().isdisjoint(_OF_OBJECTS))


def _types(part: Mapping[str, Any]) -> frozenset[str] | None:
  """Returns the types that "type" allows, or None if it is missing."""
  kinds = part.get("type")
  if kinds is None:
    return None
  kinds = [kinds] if isinstance(kinds, str) else kinds
  return frozenset(sum((TYPES[x] for x in kinds), ()))


def _values(part: Mapping[str, Any]) -> tuple[str, ...] | None:
  """Returns the JSON values that "enum" and "const" allow, as JSON strings.

  Returns None if both keywords are missing.
  """
  values = tuple(map(_text, part["enum"])) if "enum" in part else None
  if "const" not in part:
    return values
  constant = (_text(part["const"]),)
  return constant if values is None else exclusion.common(values, constant)


def _limits(part: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the limits by keyword; limits of lengths are converted to `int`."""
  counts = {key: int(part[key]) for key in (*_LEAST, *_MOST) if key in part}
  return counts | {key: part[key] for key in (*_BOUNDS, "uniqueItems")
                   if key in part}


def _conjunctions(some: list[Alternative],
                  others: list[Alternative]
                  ) -> list[Alternative]:
  """Returns the alternatives of a value that must satisfy both lists.

  Each result merges an alternative of `some` and one of `others`. Pairs that no
  value can satisfy are left out.
  """
  if len(some) * len(others) > _MOST_ALTERNATIVES:
    raise ValueError(f"the JSON schema has {len(some) * len(others)} "
                     "alternatives for a value, in 'allOf' or 'anyOf'; the "
                     f"most is {_MOST_ALTERNATIVES}")
  found = (_conjunction(a, b) for a in some for b in others)
  return [x for x in found if x is not None]


def _conjunction(a: Alternative, b: Alternative
                 ) -> Alternative | None:
  """Returns an alternative with the keywords of `a` and `b`.

  Returns None if `a` and `b` have no common type.
  """
  types = _both(frozenset.intersection, a.types, b.types)
  if types is not None and not types:
    return None
  values = _both(exclusion.common, a.values, b.values)
  names = dict.fromkeys((*a.properties, *b.properties))
  return Alternative(
      types=types, values=values, limits=_stricter(a.limits, b.limits),
      patterns=tuple(dict.fromkeys((*a.patterns, *b.patterns))),
      formats=tuple(dict.fromkeys((*a.formats, *b.formats))),
      prefix=tuple(a.item(i) + b.item(i)
                   for i in range(max(len(a.prefix), len(b.prefix)))),
      items=a.items + b.items,
      properties={name: a.named(name) + b.named(name) for name in names},
      required=tuple(dict.fromkeys((*a.required, *b.required))),
      extra=a.extra + b.extra, has_extra=a.has_extra or b.has_extra,
      keywords=a.keywords + b.keywords, is_object=a.is_object or b.is_object)


def _both(intersect: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
  """Returns the intersection of two sets; None is the set of all elements."""
  if a is None or b is None:
    return b if a is None else a
  return intersect(a, b)


def _stricter(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the limits of a value that must satisfy both `a` and `b`."""
  limits = {**a, **b}
  for key in a.keys() & b.keys():
    pick = max if key in (*_LEAST, "minimum", "exclusiveMinimum",
                          "uniqueItems") else min
    limits[key] = pick(a[key], b[key])
  return limits


def _text(value: Any) -> str:
  """Returns a value as JSON; equal values, such as 1 and 1.0, are equal text.
  """
  return json.dumps(_whole(value), allow_nan=False)


def _whole(value: Any) -> Any:
  if isinstance(value, float) and value.is_integer():
    return int(value)
  if isinstance(value, list):
    return [_whole(x) for x in value]
  if isinstance(value, dict):
    return {key: _whole(x) for key, x in value.items()}
  return value


def _short(value: Any) -> str:
  text = repr(value)
  return text if len(text) < 60 else text[:60] + "..."


def _words(names: Iterable[str]) -> str:
  return ", ".join(repr(name) for name in sorted(map(str, names)))
