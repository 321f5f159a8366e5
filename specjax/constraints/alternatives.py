"""Alternatives of a JSON schema: keywords that a value must satisfy together.

A schema with `anyOf` or `oneOf` has several alternatives. A value is valid if
it satisfies one of them.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

TYPES = {"null": ("null",), "boolean": ("boolean",), "string": ("string",),
         "array": ("array",), "object": ("object",), "integer": ("integer",),
         "number": ("integer", "fraction")}
EVERY_TYPE = frozenset(sum(TYPES.values(), ()))

# Pairs of a schema part and the `$ref`s that were followed to reach it. One
# value must satisfy all parts.
Node = tuple[tuple[Any, tuple[str, ...]], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alternative:
  """Keywords that a value must satisfy together.

  A `Node` contains all schema parts that apply to one value, such as an item of
  an array or a property of an object.

  Attributes:
    types: allowed types, a subset of `EVERY_TYPE`. None if `type` is missing. A
      number is an integer or a fraction.
    values: JSON strings of the allowed values. None without `enum` and `const`.
    limits: values of the keywords that limit lengths and numbers, by keyword.
    patterns: regular expressions that must match somewhere in the string.
    formats: formats of the string.
    prefix: nodes of the first items of an array.
    items: node of the other items.
    properties: nodes of the declared properties by name, in order.
    required: names of the required properties.
    extra: node of the properties that are not declared.
    has_extra: if True, the schema has `additionalProperties`.
    keywords: names of the keywords about strings, numbers or arrays.
    is_object: if True, the schema has keywords about objects.
  """

  types: frozenset[str] | None = None
  values: tuple[str, ...] | None = None
  limits: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  patterns: tuple[str, ...] = ()
  formats: tuple[str, ...] = ()
  prefix: tuple[Node, ...] = ()
  items: Node = ()
  properties: Mapping[str, Node] = dataclasses.field(default_factory=dict)
  required: tuple[str, ...] = ()
  extra: Node = ()
  has_extra: bool = False
  keywords: tuple[str, ...] = ()
  is_object: bool = False

  @property
  def reachable_types(self) -> frozenset[str]:
    """Types of the values that an automaton accepts for this alternative.

    An alternative with properties but no type describes an object.
    """
    if self.types is not None:
      return self.types
    return frozenset(["object"]) if self.is_object else EVERY_TYPE

  @property
  def is_free(self) -> bool:
    """True if there are no keywords."""
    return not (self.types or self.keywords or self.is_object
                or self.values is not None)

  def item(self, i: int) -> Node:
    """Returns the schema parts that apply to item i of an array."""
    return self.prefix[i] if i < len(self.prefix) else self.items

  def named(self, name: str) -> Node:
    """Returns the schema parts that apply to the property `name`."""
    return self.properties.get(name, self.extra)
