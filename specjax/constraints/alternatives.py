"""Alternatives of a JSON schema: keywords that hold together for a value.

A schema with `anyOf` or `oneOf` has several alternatives, and a value is valid
if one of them holds.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

TYPES = {"null": ("null",), "boolean": ("boolean",), "string": ("string",),
         "array": ("array",), "object": ("object",), "integer": ("integer",),
         "number": ("integer", "fraction")}
EVERY_TYPE = frozenset(sum(TYPES.values(), ()))

# All parts of a schema that apply to the same value, which must all hold. Each
# part has the `$ref`s that were followed to reach it.
Node = tuple[tuple[Any, tuple[str, ...]], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alternative:
  """Keywords that hold together for a value.

  A node is the set of schema parts that apply to a value, here to an item of an
  array or a property of an object (`Node`).

  Attributes:
    types: subset of `EVERY_TYPE`, or None without `type`. A number is an
      integer or a fraction.
    values: JSON of the allowed values, or None.
    limits: keywords of lengths and bounds.
    patterns: regular expressions that must match somewhere in the string.
    formats: formats of the string.
    prefix: nodes of the first items.
    items: node of the other items.
    properties: nodes by name, in order.
    required: names of the required properties.
    extra: node of other properties.
    has_extra: if True, `additionalProperties` is given.
    keywords: keywords about one type, except those about objects.
    is_object: if True, there are keywords about objects.
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
