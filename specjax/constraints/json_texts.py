"""Builds an automaton over bytes for the valid JSON of a schema.

`Automaton.from_json_schema` documents the accepted form. A *node* is the set of
schema parts that apply to a value. `schemas` converts a node to *alternatives*.
A value is valid if it satisfies all keywords of one alternative.
"""

from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
import functools
import json
from typing import Any

from specjax.constraints import alternatives
from specjax.constraints import characters
from specjax.constraints import exclusion
from specjax.constraints import formats
from specjax.constraints import fragments
from specjax.constraints import regexes
from specjax.constraints import schemas

_LARGEST = 1e308  # integers below it may be written with ".0"
_FREE = 4  # nested levels of arrays and objects in a value without keywords


class Writer:
  """Builds automata for the values of one schema."""

  def __init__(self, reader: schemas.Reader, space: fragments.Fragment) -> None:
    self._reader, self._space = reader, space
    self._known = {}

  def value(self, node: alternatives.Node, free: int = 0
            ) -> fragments.Fragment | None:
    """Returns the automaton of a node's values, or None if no value is valid.

    Args:
      node: parts of the schema that apply to the value.
      free: number of enclosing arrays and objects that have no keywords.
    """
    key = (tuple((id(part), refs) for part, refs in node), free)
    if key not in self._known:
      parts, values = [], {}
      for one in self._reader.alternatives(node):
        if one.values is None:
          parts += self._typed(one, free)
        else:
          values |= dict.fromkeys(self._chosen(one))
      self._known[key] = fragments.joined([*parts, *self._constants(values)])
    return self._known[key]

  def _typed(self, one: alternatives.Alternative, free: int
             ) -> list[fragments.Fragment | None]:
    """Returns the automata of an alternative for each type; None: no value."""
    kinds, inner = one.reachable_types, free + one.is_free
    if one.keywords and one.types is None:
      raise ValueError(
          f"the JSON schema has {one.keywords[0]!r} without a 'type'; add the "
          "type of the value")
    if one.is_free and free == _FREE:
      kinds = kinds - {"array", "object"}
    found = []
    found.append(fragments.of_texts([
        *[b"null"] * ("null" in kinds),
        *[b"true", b"false"] * ("boolean" in kinds)]))
    if kinds & {"integer", "fraction"}:
      found.append(_number(tuple(sorted(one.limits.items())),
                           "fraction" not in kinds))
    if "string" in kinds:
      found.append(_string(
          one.patterns, one.formats, one.limits.get("minLength", 0),
          one.limits.get("maxLength")))
    if "array" in kinds:
      found.append(self._array(one, inner))
    if "object" in kinds:
      found.append(_Object(self, one, inner).fragment())
    return found

  def _chosen(self, one: alternatives.Alternative) -> list[str]:
    """Returns the constants of an alternative that its other keywords allow."""
    others = dataclasses.replace(one, values=None)
    return [x for x in one.values
            if not exclusion.refuted(
                self._reader.alternatives, json.loads(x), others)]

  def _constants(self, values: Iterable[str]
                 ) -> list[fragments.Fragment | None]:
    """Returns automata that accept constants, given as JSON strings.

    The first automaton accepts all numbers, strings, booleans and null. Every
    array or object has a separate automaton.
    """
    values = [json.loads(x) for x in values]
    scalars = [x for x in values if not isinstance(x, (list, dict))]
    found = [fragments.of_texts(
        text for x in scalars for text in _scalar_texts(x))]
    for value in values:
      if isinstance(value, (list, dict)):
        found.append(self._constant(value))
    return found

  def _constant(self, value: Any) -> fragments.Fragment | None:
    if not isinstance(value, (list, dict)):
      return fragments.of_texts(_scalar_texts(value))
    builder = fragments.Builder()
    pair = b"[]" if isinstance(value, list) else b"{}"
    state = self.spaced(builder, builder.text(0, pair[:1]))
    for i, x in enumerate(value):
      if i:
        state = self.comma(builder, state)
      if isinstance(value, dict):
        state = builder.put(state, fragments.of_texts(_scalar_texts(x)))
        state = self.colon(builder, state)
        x = value[x]
      state = self.spaced(builder, builder.put(state, self._constant(x)))
    builder.final = [builder.text(state, pair[1:])]
    return builder.build()

  def _array(self, one: alternatives.Alternative, free: int
             ) -> fragments.Fragment | None:
    least = one.limits.get("minItems", 0)
    most = one.limits.get("maxItems")
    if one.limits.get("uniqueItems") and (most is None or most > 1):
      raise ValueError("the JSON schema has 'uniqueItems', which an automaton "
                       "would not follow; leave it out")
    prefix = [self.value(node, free) for node in one.prefix]
    item = self.value(one.items, free)
    most = _most_items(prefix, item, most)
    if most is not None and least > most:
      return None
    count, limit = ((max(least, len(prefix), 1), "minItems") if most is None
                    else (most, "maxItems"))
    what = f"'{limit}' {count}"
    if item is not None:  # size of an item, its comma and the space around it
      fragments.check_size((item.size + 2 * self._space.size + 5) * (
          count - len(prefix)), what)
    items = (prefix + [item] * count)[:count]
    return self._list(items, len(prefix), least, item if most is None else None,
                      what)

  def _list(self, items: Sequence[fragments.Fragment], fixed: int, least: int,
            repeated: fragments.Fragment | None, what: str
            ) -> fragments.Fragment:
    """Returns the automaton of an array.

    Args:
      items: automata of the items. Items from index `fixed` on are equal.
      fixed: number of items at the beginning with different automata.
      least: smallest number of items.
      repeated: automaton of further items, without a limit of their number.
        None if no further items are allowed.
      what: description of the array for error messages.
    """
    builder = fragments.Builder()
    end = builder.new()
    builder.final = [end]
    state = self.spaced(builder, builder.text(0, b"["))
    if not least:
      builder.edge(state, 0x5D, 0x5D, end)
    copies = []
    for i, item in enumerate(items):
      if i >= fixed:
        copies.append(builder.size)
      before = builder.new()
      builder.link(state, before)
      state = self.spaced(builder, builder.put(before, item, what))
      if i + 1 >= least:
        builder.edge(state, 0x5D, 0x5D, end)
      if i + 1 < len(items):
        state = self.comma(builder, state)
    if repeated is not None:
      again = self.comma(builder, state)
      if len(items) > fixed:
        builder.link(again, before)
      else:
        last = self.spaced(builder, builder.put(again, repeated))
        builder.edge(last, 0x5D, 0x5D, end)
        builder.link(self.comma(builder, last), again)
    return builder.build([*copies, builder.size] if copies else ())

  def spaced(self, builder: fragments.Builder, state: int) -> int:
    """Adds the white space between two parts and returns the state after it."""
    return builder.put(state, self._space)

  def comma(self, builder: fragments.Builder, state: int) -> int:
    """Adds a comma and white space and returns the state after them."""
    return self.spaced(builder, builder.text(state, b","))

  def colon(self, builder: fragments.Builder, state: int) -> int:
    """Adds a colon and the white space around it; returns the state after it.
    """
    state = builder.text(self.spaced(builder, state), b":")
    return self.spaced(builder, state)


def _most_items(prefix: Sequence[fragments.Fragment | None],
                item: fragments.Fragment | None, most: int | None
                ) -> int | None:
  """Returns the largest number of items, or None if there is no limit.

  Args:
    prefix: automata of the first items. None for an item without valid values.
    item: automaton of all further items, or None if no value is valid.
    most: "maxItems" of the schema, or None if the schema has no limit.
  """
  possible = [x is not None for x in (*prefix, item)]
  limits = [] if all(possible) else [possible.index(False)]
  return min([*limits, *([] if most is None else [most])], default=None)


class _Object:
  """Builds the automaton of an object: declared properties, then others.

  The automaton has a state for each place in the object. A place is a pair: the
  next declared property, and the number of properties before it. Larger numbers
  of properties share a state if the limits do not distinguish them.
  """

  def __init__(self, writer: Writer, one: alternatives.Alternative, free: int
               ) -> None:
    self._writer, self._least = writer, one.limits.get("minProperties", 0)
    self._most = one.limits.get("maxProperties")
    required = set(one.required)
    names = [*dict.fromkeys((*one.properties, *one.required))]
    values = {name: writer.value(one.named(name), free) for name in names}
    self._missing = any(values[name] is None for name in required)
    self._names = [name for name in names if values[name] is not None]
    self._values, self._required = values, required
    self._cap = max(1, self._least if self._most is None else self._most)
    self._extra = None
    if one.has_extra or not one.properties:
      self._extra = writer.value(one.extra, free)
    if self._extra is None:
      self._cap = max(1, min(self._cap, len(self._names)))
    else:
      self._check_extra()
      self._key = characters.spelled(characters.without(names), json=True)

  def _check_extra(self) -> None:
    if self._least > 1 and self._least > len(self._required):
      raise ValueError(
          f"the JSON schema has 'minProperties' {self._least} of properties "
          "without names, which may be written twice; name them in "
          "'properties', or set 'additionalProperties' to false")

  def fragment(self) -> fragments.Fragment | None:
    """Returns the automaton of the object, or None if no value is valid."""
    if self._missing:
      return None
    size = sum(self._values[name].size for name in self._names)
    counts = self._cap if self._least > 1 or self._most is not None else 1
    fragments.check_size(size * counts, "'properties'")
    self._builder = builder = fragments.Builder()
    self._end = builder.new()
    builder.final = [self._end]
    self._nodes = {}
    counts = range(self._cap + 1)
    self._choose = {(i, count): builder.new() for count in counts
                    for i in range(len(self._names) + 1)}
    self._keys, self._others = {}, {}
    for i, count in reversed(self._choose):
      self._place(i, count)
    start = self._writer.spaced(builder, builder.text(0, b"{"))
    builder.link(start, self._choose[0, 0])
    self._close(start, 0, 0)
    return builder.build()

  def _after(self, count: int) -> int | None:
    """Returns the number of properties plus 1, or None if above the maximum.

    The number is capped, because larger numbers share states.
    """
    if self._most is not None and count + 1 > self._most:
      return None
    return min(count + 1, self._cap)

  def _close(self, state: int, i: int, count: int) -> None:
    if count >= self._least and self._required.isdisjoint(self._names[i:]):
      self._builder.edge(state, 0x7D, 0x7D, self._end)

  def _value(self, state: int, value: fragments.Fragment, i: int, count: int
             ) -> None:
    """Adds the value of a property and the closing brace or comma after it.

    Args:
      state: state after the key.
      value: automaton of the value.
      i: index of the next declared property.
      count: number of properties so far.
    """
    builder, writer = self._builder, self._writer
    state = writer.spaced(
        builder, builder.put(writer.colon(builder, state), value))
    self._close(state, i, count)
    builder.link(writer.comma(builder, state), self._choose[i, count])

  def _place(self, i: int, count: int) -> None:
    """Adds the keys that may follow at a place.

    Args:
      i: index of the next declared property.
      count: number of properties so far.
    """
    after = self._after(count)
    if after is None:
      return
    builder, texts = self._builder, []
    for j in range(i, len(self._names)):
      name = self._names[j]
      if (j, after) not in self._keys:
        self._keys[j, after] = state = builder.new()
        self._value(state, self._values[name], j + 1, after)
      texts += [(text, self._keys[j, after]) for text in _scalar_texts(name)]
      if name in self._required:
        break
    else:
      if self._extra is not None:
        if after not in self._others:
          self._others[after] = start = builder.new()
          self._value(builder.put(start, self._key), self._extra,
                      len(self._names), after)
        builder.link(self._choose[i, count], self._others[after])
    if texts:
      builder.link(self._choose[i, count], self._node(frozenset(texts)))

  def _node(self, texts: frozenset[tuple[bytes, int]]) -> int:
    """Returns a state from which each byte string leads to its target state.

    `texts` contains pairs of a byte string and a target state.
    """
    if texts not in self._nodes:
      self._nodes[texts] = state = self._builder.new()
      by_first = {}
      for text, target in texts:
        by_first.setdefault(text[0], set()).add((text[1:], target))
      for byte, rest in by_first.items():
        target = next(iter(rest))[1] if all(not x for x, _ in rest) else (
            self._node(frozenset(rest)))
        self._builder.edge(state, byte, byte, target)
    return self._nodes[texts]


def _scalar_texts(value: str | float | None) -> list[bytes]:
  """Returns the accepted spellings of a constant in JSON.

  In a string, all or none of the non-ASCII characters are escaped. An integer
  has a spelling without a point and one with ".0".
  """
  found = {json.dumps(value), json.dumps(value, ensure_ascii=False)}
  if type(value) is int and abs(value) < _LARGEST and float(value) == value:
    found.add(json.dumps(float(value)))
  return [text.encode() for text in sorted(found)]


@functools.lru_cache(maxsize=64)
def _number(limits: tuple[tuple[str, float], ...], integer: bool
            ) -> fragments.Fragment | None:
  return characters.spelled(
      formats.number_automaton(dict(limits), integer), json=False)


@functools.lru_cache(maxsize=64)
def _string(patterns: tuple[str, ...], names: tuple[str, ...], least: int,
            most: int | None) -> fragments.Fragment | None:
  try:
    return characters.spelled(formats.string_automaton(patterns, names),
                              json=True, least=least, most=most)
  except fragments.TooLargeError as e:
    parts = [*(f"'format' {name!r}" for name in names),
             *(f"'pattern' {regexes.shown(x)}" for x in patterns),
             *([f"'minLength' {least}"] if least else []),
             *([f"'maxLength' {most}"] if most is not None else [])]
    raise fragments.TooLargeError(f"{e} ({', '.join(parts)})") from None
