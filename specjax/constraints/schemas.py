"""JSON schemas, of which nothing is left out in silence.

`outlines-core` reads one leading keyword of every part of a schema, some of
those beside it, and drops the others without a word: the minimum of an integer,
or the pattern of a string that has a length too. What it would drop, or read
otherwise than JSON Schema means it, is refused here. What it cannot read but
other keywords can say, is said by those: a part without any keyword is a list
of all types, and a `$ref` is what it stands for.
"""

from collections.abc import Callable
from collections.abc import Mapping
import re
from typing import Any
import urllib.parse

# They describe a value and do not restrict it, or are looked up by $ref.
_NOTES = frozenset((
    "title", "description", "default", "examples", "deprecated", "readOnly",
    "writeOnly", "$schema", "$id", "$comment", "$defs", "definitions"))
# By the keyword that decides how a part is read, the first that it has of
# these: what counts beside it.
_BESIDE = {
    "properties": {"type", "required", "additionalProperties"},
    "allOf": set(), "anyOf": set(), "oneOf": set(),
    "prefixItems": {"type", "items", "minItems", "maxItems"},
    "enum": {"type"}, "const": {"type"}, "$ref": set()}
_OF_TYPE = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "array": {"items", "minItems", "maxItems"},
    "object": {"additionalProperties", "minProperties", "maxProperties"}}
_texts = lambda x: isinstance(x, list) and all(isinstance(y, str) for y in x)
# What the values of keywords have to be.
_FORMS = (
    ("an object", lambda x: isinstance(x, dict), ("properties",)),
    ("a text", lambda x: isinstance(x, str), ("$ref", "pattern", "format")),
    ("a list of texts", _texts, ("required",)),
    ("a text or a list of texts", lambda x: isinstance(x, str) or _texts(x),
     ("type",)),
    ("a list that is not empty", lambda x: isinstance(x, list) and x != [],
     ("allOf", "anyOf", "oneOf", "prefixItems", "enum")),
    ("a whole number of at least 0", lambda x: type(x) is int and x >= 0,
     ("minLength", "maxLength", "minItems", "maxItems", "minProperties",
      "maxProperties")))
# The library's own keyword: objects and lists of which nothing more is said
# hold no other objects and lists. Its default of 2 makes four times as many
# states, which take ten seconds to compile.
_FLAT = {"depth": 1}
_ANY = {"type": ["boolean", "null", "number", "string", "array", "object"],
        **_FLAT}
_DEEPEST = 3  # $ref within $ref; a text of recursive parts is as deep
_ESCAPED = re.compile(r'["\\\x00-\x1f]')  # in a JSON string
_UNESCAPED = r'[^"\\\x00-\x1f]'
_ASCII = {r"\d": "0-9", r"\w": "0-9A-Za-z_"}  # as in ECMAScript
_DATE = "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?Z"
_LABEL = "[a-z0-9]+(-[a-z0-9]+)*"
_FORMATS = {  # some of the texts of a format
    "date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "email": rf"[a-z0-9_+-]+(\.[a-z0-9_+-]+)*@({_LABEL}\.)+[a-z]{{2,9}}",
    "uri": (rf"https?://{_LABEL}(\.{_LABEL})*(:[0-9]{{1,4}})?"
            r"(/[A-Za-z0-9._~/-]*)?(\?[A-Za-z0-9._~=&-]*)?")}
_FIX = "leave it out, say it in another way, or give a regular expression"


class _TooDeepError(ValueError):
  """What a `$ref` stands for is not written out any more."""


def followed(schema: Any, escapes: Callable[[str], bool]) -> Any:
  """The same schema, in words that outlines-core follows to the letter.

  It may allow less: objects have the properties that are named, in their order,
  recursion ends after three levels, values of which nothing is said after two,
  and a format has its usual texts. `oneOf` is read as `anyOf`.

  Args:
    schema: what its JSON stands for.
    escapes: whether an expression matches a text that a JSON string would have
      to escape.

  Raises:
    ValueError: the library would leave a part of it out, or misread it.
  """
  return _Reader(schema, escapes).part(schema, 0)


class _Reader:
  """Reads the parts of one schema; `depth` counts the `$ref` around them."""

  def __init__(self, root, escapes):
    self._root, self._escapes = root, escapes

  def part(self, part, depth):
    """A part of it, in the library's words."""
    if isinstance(part, Mapping):
      part = {key: x for key, x in part.items() if key not in _NOTES}
    if part is True or part == {}:
      return _ANY
    if not isinstance(part, Mapping):
      raise ValueError(f"the JSON schema has {part!r} in the place of a part; "
                       "give an object, or true")
    _check_forms(part)
    lead = next((key for key in _BESIDE if key in part), "type")
    if lead not in part:
      raise ValueError(f"the JSON schema has {_words(part)} without a 'type'; "
                       "say of which type the value is")
    beside = _BESIDE.get(lead) if lead != "type" else set().union(
        *(_OF_TYPE.get(kind, ()) for kind in _listed(part["type"])))
    lost = part.keys() - beside - {lead}
    if lost:
      raise ValueError(f"the JSON schema has {_words(lost)} beside {lead!r}, "
                       f"where it would not be followed: {_FIX}")
    read = {"properties": self._properties, "allOf": self._all_of,
            "anyOf": self._any_of, "oneOf": self._any_of,
            "prefixItems": self._prefix_items, "enum": self._values,
            "const": self._values, "$ref": self._ref, "type": self._type}
    return read[lead](part, depth)

  def _properties(self, part, depth):
    _check_type("properties", part, "object")
    named, required = part["properties"], set(part.get("required", ()))
    found, unnamed = {}, required - named.keys()
    if unnamed:
      raise ValueError(f"the JSON schema requires {_words(unnamed)}, which is "
                       "not among its properties; name it there")
    for name, value in named.items():
      _check_key(name)
      try:
        found[name] = self.part(value, depth)
      except _TooDeepError:
        if name in required:
          raise
    return {"properties": found, "required": sorted(required)}

  def _all_of(self, part, depth):
    first, *more = part["allOf"]
    if more:
      raise ValueError("the JSON schema has 'allOf', of whose parts only the "
                       f"first would be followed: {_FIX}")
    return self.part(first, depth)

  def _any_of(self, part, depth):
    [parts], found, last = part.values(), [], None
    for one in parts:
      try:
        found.append(self.part(one, depth))
      except _TooDeepError as e:
        last = e
    if not found:
      raise last
    return {"anyOf": found}

  def _prefix_items(self, part, depth):
    _check_type("prefixItems", part, "array")
    items = [self.part(one, depth) for one in part["prefixItems"]]
    if not part.get("minItems", 0) <= len(items) <= part.get(
        "maxItems", len(items)):
      raise ValueError(f"the JSON schema has {len(items)} 'prefixItems' and "
                       "another number of items; exactly as many are written")
    return {"prefixItems": items}

  def _values(self, part, depth):
    del depth
    values = part["enum"] if "enum" in part else [part["const"]]
    kinds = _listed(part["type"]) if "type" in part else None
    values = [x for x in values if kinds is None or not _kinds(x).isdisjoint(
        kinds)]
    if not values:
      raise ValueError("the JSON schema has no value of the type "
                       f"{_words(kinds or ())} to choose from")
    for value in values:
      _check_keys(value)
    return {"enum": values}

  def _ref(self, part, depth):
    path = part["$ref"]
    if depth >= _DEEPEST:
      raise _TooDeepError(f"the JSON schema has {path!r} more than {_DEEPEST} "
                          "deep where it cannot be left out; make it optional")
    found = self._root
    try:
      if not path.startswith("#"):
        raise KeyError
      for name in filter(None, urllib.parse.unquote(path[1:]).split("/")):
        name = name.replace("~1", "/").replace("~0", "~")
        found = found[int(name) if isinstance(found, list) else name]
    except (AttributeError, LookupError, TypeError, ValueError):
      raise ValueError(f"the JSON schema has no part {path!r}; a $ref is such "
                       "as '#/$defs/name'") from None
    return self.part(found, depth + 1)

  def _type(self, part, depth):
    part, kinds = {**part, **_FLAT}, _listed(part["type"])
    if "string" in kinds:
      self._check_string(part)
    if "items" in part:
      try:
        part["items"] = self.part(part["items"], depth)
      except _TooDeepError:
        if part.get("minItems", 0):
          raise
        part |= {"items": _ANY, "maxItems": 0}
    if "object" in kinds:
      part |= self._additional(part, depth)
    return part

  def _check_string(self, part):
    said = part.keys() & _OF_TYPE["string"]
    if len(said - {"minLength", "maxLength"}) + (
        not said.isdisjoint({"minLength", "maxLength"})) > 1:
      raise ValueError(f"the JSON schema has {_words(said)} of one string, of "
                       f"which one alone would be followed: {_FIX}")
    if "pattern" in said:
      part["pattern"] = self._pattern(part["pattern"])
    if "format" in said:
      name = part.pop("format")
      if name not in _FORMATS:
        raise ValueError(f"the JSON schema has the format {name!r}; those that "
                         f"are known are {', '.join(_FORMATS)}")
      part["pattern"] = f"^(?:{_FORMATS[name]})$"

  def _pattern(self, pattern):
    """Such that what it matches can stand between quotation marks."""
    def narrowed(found):  # a dot, a class in brackets, or what is escaped
      text = found.group()
      if text == ".":
        return _UNESCAPED
      plain = re.sub(r"\\.", lambda x: _ASCII.get(x.group(), x.group()), text)
      return f"[{plain}]" if text in _ASCII else plain

    inner = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\.", narrowed,
                   without_anchors(pattern), flags=re.DOTALL)
    if self._escapes(inner):
      raise ValueError(
          f"the pattern {pattern!r} of the JSON schema matches texts with a "
          "quotation mark, a backslash or a control character, which JSON "
          f"escapes; allow {_UNESCAPED} instead")
    return f"^(?:{inner})$"

  def _additional(self, part, depth):
    """What an object may have besides no properties that are named."""
    least, most = part.get("minProperties", 0), part.get("maxProperties", 0)
    if least > 1 or most > 0:
      raise ValueError("the JSON schema counts the properties of an object, of "
                       "which only 'minProperties' 1 and 'maxProperties' 0 "
                       f"would be followed: {_FIX}")
    more = part.get("additionalProperties", True)
    if more is not False and "maxProperties" not in part:
      try:
        return {"additionalProperties": self.part(more, depth)}
      except _TooDeepError:
        pass
    if least:
      raise ValueError("the JSON schema has an object of at least 1 property "
                       "that may have none; let it have some")
    return {"maxProperties": 0, "additionalProperties": True}


def without_anchors(regex: str) -> str:
  """An expression that matches whole texts, without ^ before and $ after it."""
  for start in ("^", r"\A"):
    regex = regex.removeprefix(start)
  for end in ("$", r"\z"):
    before = regex.removesuffix(end)
    escapes = len(before) - len(before.rstrip("\\"))
    if escapes % 2 == 0:  # else what is escaped is a character of the text
      regex = before
  return regex


def _check_forms(part):
  """Checks that the value of every keyword is of its form."""
  for form, fits, keys in _FORMS:
    for key in keys:
      if key in part and not fits(part[key]):
        raise ValueError(f"the JSON schema has {key!r} {part[key]!r}; it must "
                         f"be {form}")


def _check_type(lead, part, kind):
  if kind not in _listed(part.get("type", kind)):
    raise ValueError(f"the JSON schema has {lead!r} of a value of type "
                     f"{_words(_listed(part['type']))}; it is of {kind!r}")


def _check_key(name):
  if _ESCAPED.search(name):
    raise ValueError(f"the JSON schema has a property {name!r}, a name that "
                     "JSON escapes; take another, or a regular expression")


def _check_keys(value):
  """Of objects within a constant: the library takes them as expressions."""
  if isinstance(value, list):
    for one in value:
      _check_keys(one)
  if isinstance(value, dict):
    for name, one in value.items():
      if re.search(r"[^\w \-]", name):
        raise ValueError(f"the JSON schema has a constant with the property "
                         f"{name!r}; name it by letters and digits, or give "
                         "a regular expression")
      _check_keys(one)


def _kinds(value):
  """The types that a value of JSON is of."""
  if isinstance(value, bool):
    return {"boolean"}
  if isinstance(value, (int, float)):
    whole = float(value).is_integer()
    return {"number", "integer"} if whole else {"number"}
  return {{str: "string", list: "array", dict: "object"}.get(
      type(value), "null")}


def _listed(kinds):
  return kinds if isinstance(kinds, list) else [kinds]


def _words(names):
  return ", ".join(repr(name) for name in sorted(map(str, names)))
