"""Checks that alternatives of a JSON schema exclude each other.

A valid value satisfies exactly one part of a `oneOf`. So no JSON that the
automaton accepts for one part may be valid under another part. Parts may
exclude each other by a type, a value, a length, a bound, a pattern or a
property.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
import functools
import json
from typing import Any

from specjax.constraints import alternatives
from specjax.constraints import characters
from specjax.constraints import formats

Alternative = alternatives.Alternative
# Function from a node (the schema parts that apply to a value) to its
# alternatives: `schemas.Reader.alternatives`.
Read = Callable[[alternatives.Node], list[Alternative]]

_DEEPEST = 4  # number of nested levels that are compared


def excluded(read: Read, some: Iterable[Alternative],
             others: Iterable[Alternative], depth: int = 0) -> bool:
  """Returns True if no value accepted for `some` is valid under `others`.

  Args:
    read: function from a node to its alternatives.
    some: alternatives.
    others: other alternatives.
    depth: number of arrays and objects around the values.
  """
  return all(_excludes(read, a, b, depth) for a in some for b in others)


def _excludes(read: Read, a: Alternative, b: Alternative, depth: int) -> bool:
  if a.values is not None:
    return all(refuted(read, json.loads(x), b) for x in a.values)
  if b.values is not None:
    return all(refuted(read, json.loads(x), a) for x in b.values)
  common = a.reachable_types & (
      a.reachable_types if b.types is None else b.types)
  checks = {"string": _strings, "array": _arrays, "object": _objects,
            "integer": _numbers, "fraction": _numbers}
  return depth < _DEEPEST and all(
      kind in checks and checks[kind](read, a, b, depth) for kind in common)


def _nodes(read: Read, a: alternatives.Node, b: alternatives.Node, depth: int
           ) -> bool:
  # The automaton follows a recursive `$ref` only a few times, but more deeply
  # nested values are valid too. So the comparison drops the list of followed
  # `$ref`s.
  some, others = (read(tuple((part, ()) for part, _ in node))
                  for node in (a, b))
  return excluded(read, some, others, depth + 1)


def _strings(read: Read, a: Alternative, b: Alternative, depth: int) -> bool:
  del read, depth
  both = formats.string_automaton(
      tuple(dict.fromkeys((*a.patterns, *b.patterns))),
      tuple(dict.fromkeys((*a.formats, *b.formats))))
  mosts = [x.limits["maxLength"] for x in (a, b) if "maxLength" in x.limits]
  return not characters.counted(
      both, max(x.limits.get("minLength", 0) for x in (a, b)),
      min(mosts, default=None))


def _numbers(read: Read, a: Alternative, b: Alternative, depth: int) -> bool:
  del read, depth
  return any(
      low in x.limits and high in y.limits and (
          x.limits[low] > y.limits[high] or strict
          and x.limits[low] == y.limits[high])
      for x, y in ((a, b), (b, a)) for low, high, strict in (
          ("minimum", "maximum", False), ("exclusiveMinimum", "maximum", True),
          ("minimum", "exclusiveMaximum", True),
          ("exclusiveMinimum", "exclusiveMaximum", True)))


def _arrays(read: Read, a: Alternative, b: Alternative, depth: int) -> bool:
  least = max(x.limits.get("minItems", 0) for x in (a, b))
  if any(x.limits.get("maxItems", least) < least for x in (a, b)):
    return True
  return any(_nodes(read, a.item(i), b.item(i), depth)
             for i in range(min(least, 1 + max(len(a.prefix), len(b.prefix)))))


def _objects(read: Read, a: Alternative, b: Alternative, depth: int) -> bool:
  """Returns True if the properties of `a` and `b` exclude each other."""
  has_extra = a.has_extra or not a.properties
  if not has_extra and any(name not in a.properties and name not in a.required
                           for name in b.required):
    return True
  return any(_nodes(read, a.named(name), b.named(name), depth)
             for name in a.required)


def refuted(read: Read, value: Any, b: Alternative) -> bool:
  """Returns True if `value` is not valid under the alternative `b`."""
  if b.types is not None and not types_of(value) & b.types:
    return True
  if b.values is not None and not common(
      (json.dumps(value),), b.values):
    return True
  is_refuted = _REFUTED.get(type(value))
  return is_refuted is not None and is_refuted(read, value, b)


def _string_refuted(read: Read, value: str, b: Alternative) -> bool:
  del read
  return not (formats.string_automaton(b.patterns, b.formats).accepts(value)
              and _is_within(len(value), b.limits, "Length"))


def _array_refuted(read: Read, value: list, b: Alternative) -> bool:
  different = {json.dumps(x, sort_keys=True) for x in value}
  return (not _is_within(len(value), b.limits, "Items")
          or b.limits.get("uniqueItems", False) and len(different) < len(value)
          or any(_part_refuted(read, x, b.item(i))
                 for i, x in enumerate(value)))


def _object_refuted(read: Read, value: dict, b: Alternative) -> bool:
  return (not value.keys() >= set(b.required)
          or not _is_within(len(value), b.limits, "Properties")
          or any(_part_refuted(read, x, b.named(name))
                 for name, x in value.items()))


def _number_refuted(read: Read, value: float, b: Alternative) -> bool:
  del read
  return (value < b.limits.get("minimum", value)
          or value > b.limits.get("maximum", value)
          or value <= b.limits.get("exclusiveMinimum", value - 1)
          or value >= b.limits.get("exclusiveMaximum", value + 1))


def _part_refuted(read: Read, value: Any, node: alternatives.Node) -> bool:
  return all(refuted(read, value, one)
             for one in read(tuple((part, ()) for part, _ in node)))


_REFUTED = {str: _string_refuted, list: _array_refuted, dict: _object_refuted,
            int: _number_refuted, float: _number_refuted}


def _is_within(count: int, limits: Mapping[str, Any], noun: str) -> bool:
  return limits.get(f"min{noun}", 0) <= count <= limits.get(
      f"max{noun}", count)


def types_of(value: Any) -> set[str]:
  """Returns the type of a JSON value, as a set of one name in `EVERY_TYPE`."""
  if isinstance(value, bool):
    return {"boolean"}
  if isinstance(value, (int, float)):
    return {"integer" if float(value).is_integer() else "fraction"}
  return {{str: "string", list: "array", dict: "object"}.get(
      type(value), "null")}


def common(some: tuple[str, ...], others: tuple[str, ...]) -> tuple[str, ...]:
  """Returns the values of `some` that are in `others`.

  Objects are equal if they differ only in the order of their keys.

  Args:
    some: JSON strings.
    others: JSON strings.
  """
  return tuple(x for x in some if _unordered(x) in _all_unordered(others))


@functools.lru_cache(maxsize=64)
def _all_unordered(values: tuple[str, ...]) -> frozenset[str]:
  return frozenset(map(_unordered, values))


def _unordered(text: str) -> str:
  """Returns the JSON string with sorted keys."""
  if text[0] not in "[{":
    return text
  return json.dumps(json.loads(text), sort_keys=True)
