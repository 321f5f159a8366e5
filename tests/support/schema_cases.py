"""Random JSON schemas, and values of the kind that people write for them."""

import copy
import json
import random

# Patterns and formats, and strings some of which follow them.
PATTERNS = {
    "^[A-Z]": ["Paris", "A", "Zoë", "paris", "", "1A"],
    "[0-9]$": ["a1", "7", "Zoë 12", "1a", "", "a"],
    "abcd": ["abcd", "xabcdx", "abc", "ab cd", "aabcd\n"],
    "^https://": ["https://a.b", "https://", "http://a.b", " https://"],
    "^cat$|^dog$": ["cat", "dog", "catdog", "hotdog", ""],
    r"(id-)?\d{5}$": ["id-12345", "12345", "x99912345", "1234", "12345 "],
    r"^\w+(\s\w+)*$": ["two words", "Zoë", "one", " x", "a  b", "a-b"],
    r'^[^"]*$': ["plain", "é\\", "a\tb", 'say "x"'],
    r"^\S{2,4}$": ["ab", "ab\"c", "a", "a b", "abcde", "😀😀"],
    "^(a|b)?$": ["", "a", "ab", "c"],
    "[^a-y]": ["z", "az", "A", "abc", "", "\u0000"],
    "^.{3}$": ["abc", "é\\\"", "ab", "abcd", "😀ab", "a\nb"]}
FORMATS = {
    "date": ["2024-12-31", "2024-02-29", "2023-02-29", "2000-02-29",
             "1900-02-29", "2024-04-31", "2024-1-1", "0001-01-01", "2024-13-01",
             "2024-12-00"],
    "time": ["12:30:00Z", "23:59:59+02:00", "00:00:00.123-11:30", "12:30:00",
             "24:00:00Z", "12:60:00Z", "12:30Z"],
    "date-time": ["2024-12-31T23:59:59Z", "2024-02-29T12:00:00.5+05:30",
                  "2023-02-29T12:00:00Z", "2024-12-31 12:00:00Z",
                  "2024-12-31T12:00:00", "2024-06-31T12:00:00Z"],
    "email": ["jane.doe@example.com", "o'neil+x@mail.example.co.uk", "a@b",
              "jane", "Jane@Example.COM", "nobody"],
    "uri": ["https://example.com/a?b=c#d", "mailto:a@b.c", "urn:isbn:045145",
            "http://[2001:db8::7]:80/", "ftp://u:p@h/%20", "//example.com",
            "http://a b", "example", "http://a/%zz"],
    "uuid": ["123e4567-e89b-12d3-a456-426614174000",
             "123E4567-E89B-12D3-A456-426614174000", "123e4567", ""]}
_WORDS = ["", "a", "ab", "Zoë", "a\nb", 'say "x"', "back\\slash", "😀", "a/b",
          "long text, longer", "\u0001", "null", "12"]
_NUMBERS = [0, 1, -1, 5, 10, 12, 99, 100, -7, 0.5, -0.25, 1.5, 3.75, 1000,
            2.5e-3, 9.99, 10.01, -100, 1234567]
_NAMES = ["name", "n", "na", "kind", "ünï", "a b", "x\"y"]


def make_schema(rng: random.Random, depth: int = 2):
  """A schema; every keyword that is followed occurs."""
  makers = [_string, _string, _number, _choice, _plain]
  if depth:
    makers += [_array, _object, _object, _either, _all]
  schema = rng.choice(makers)(rng, depth - 1)
  if rng.random() < 0.1 and isinstance(schema, dict):
    schema["description"] = "a note"
  return schema


def _plain(rng, depth):
  del depth
  return rng.choice([{"type": "boolean"}, {"type": "null"},
                     {"type": ["string", "null"]}, {"type": "integer"},
                     {"type": ["integer", "boolean"]}, {}])


def _string(rng, depth):
  del depth
  schema = {"type": "string"}
  kind = rng.randrange(4)
  if kind == 0:
    schema["pattern"] = rng.choice(list(PATTERNS))
  elif kind == 1:
    schema["format"] = rng.choice(list(FORMATS))
  if kind > 1 or rng.random() < 0.3:
    least = rng.randrange(4)
    schema |= rng.choice([{"minLength": least}, {"maxLength": least + 3},
                          {"minLength": least, "maxLength": least + 12}])
  return schema


def _number(rng, depth):
  del depth
  schema = {"type": rng.choice(["integer", "number", "number"])}
  low, high = sorted(rng.sample([-100, -7, -0.25, 0, 0.5, 1, 5, 9.99, 100], 2))
  if rng.random() < 0.6:
    schema[rng.choice(["minimum", "exclusiveMinimum"])] = low
  if rng.random() < 0.6:
    schema[rng.choice(["maximum", "exclusiveMaximum"])] = high
  return schema


def _choice(rng, depth):
  del depth
  values = rng.sample([*_WORDS, None, True, 1, 2.5, [1, "a"], {"k": [None]}],
                      rng.randrange(1, 6))
  if rng.random() < 0.3:
    return {"const": values[0]}
  schema = {"enum": values}
  if rng.random() < 0.2:
    schema["type"] = ["string", "number", "boolean", "array"]
  return schema


def _array(rng, depth):
  schema = {"type": "array"}
  if rng.random() < 0.8:
    schema["items"] = make_schema(rng, depth)
  if rng.random() < 0.3:
    schema["prefixItems"] = [make_schema(rng, depth)
                             for _ in range(rng.randrange(1, 3))]
  least = rng.randrange(3)
  if rng.random() < 0.4:
    schema["minItems"] = least
  if rng.random() < 0.5:
    schema["maxItems"] = least + rng.randrange(3)
  return schema


def _object(rng, depth):
  names = rng.sample(_NAMES, rng.randrange(4))
  schema = {"type": "object", "properties": {
      name: make_schema(rng, depth) for name in names}}
  if not names and rng.random() < 0.5:
    del schema["properties"]
  schema["required"] = [name for name in names if rng.random() < 0.5]
  more = rng.random()
  if more < 0.3:
    schema["additionalProperties"] = False
  elif more < 0.5:
    schema["additionalProperties"] = make_schema(rng, depth)
  elif more < 0.6:
    schema["required"].append("other")
  if rng.random() < 0.15:
    schema["minProperties"] = 1
  if rng.random() < 0.15:
    schema["maxProperties"] = len(names)
  return schema


def _either(rng, depth):
  parts = [make_schema(rng, depth) for _ in range(rng.randrange(1, 4))]
  return {rng.choice(["anyOf", "anyOf", "oneOf"]): parts}


def _all(rng, depth):
  part = make_schema(rng, depth)
  other = rng.choice([{"type": ["string", "integer", "object"]},
                      {"maxLength": 4}, {"minItems": 1},
                      {"type": "object", "required": ["name"]},
                      {"$ref": "#/$defs/word"}, {"enum": ["a", "ab", 5, 1]}])
  return {"allOf": [part, other]}


def with_definitions(schema):
  """The schema with the part that `$ref` may name."""
  return {**schema, "$defs": {"word": {"type": "string", "maxLength": 6}}}


def sample(rng: random.Random, schema, root):
  """A value for a schema that may or may not be valid.

  Properties come in the order of the schema, others after them, and values of
  which nothing is said are flat.
  """
  if schema is True or not schema:
    return rng.choice([None, True, 3, 0.5, "a", [1], {"k": "v"}])
  if schema is False:
    return None
  if "$ref" in schema:
    return sample(rng, root["$defs"]["word"], root)
  for key in ("anyOf", "oneOf"):
    if key in schema:
      return sample(rng, rng.choice(schema[key]), root)
  if "allOf" in schema:
    first, second = schema["allOf"]
    value = sample(rng, rng.choice([first, first, second]), root)
    if isinstance(value, dict):  # with the properties of the first
      value = sample(rng, first, root)
    if isinstance(value, dict):
      more = {name: sample(rng, {}, root) for name in second.get("required", ())
              if name not in value}
      declared = {name: value[name] for name in first.get("properties", ())
                  if name in value}
      value = {**declared, **more, **value}
    return value
  if "const" in schema:
    return copy.deepcopy(schema["const"])
  if "enum" in schema:
    return copy.deepcopy(rng.choice(schema["enum"]))
  kind = rng.choice([schema.get("type", "")] if isinstance(
      schema.get("type", ""), str) else schema["type"])
  if kind == "array" or kind == "" and "items" in schema:
    return _sampled_items(rng, schema, root)
  if kind == "object":
    return _sampled_properties(rng, schema, root)
  return {"boolean": rng.choice([True, False]), "null": None,
          "integer": rng.choice([x for x in _NUMBERS if type(x) is int]),
          "number": rng.choice(_NUMBERS)}.get(
              kind, None) if kind not in ("string", "") else _word(rng, schema)


def _word(rng, schema):
  words = (PATTERNS.get(schema.get("pattern")) or
           FORMATS.get(schema.get("format")) or _WORDS)
  if rng.random() < 0.2:
    return "".join(rng.choice("aé\"\\ 😀Z1") for _ in range(rng.randrange(16)))
  return rng.choice(words)


def _sampled_items(rng, schema, root):
  prefix = schema.get("prefixItems", [])
  least = schema.get("minItems", 0)
  count = rng.randrange(least, schema.get("maxItems", least + 4) + 1)
  return [sample(rng, prefix[i] if i < len(prefix) else schema.get("items", {}),
                 root) for i in range(count)]


def _sampled_properties(rng, schema, root):
  value = {}
  for name, part in schema.get("properties", {}).items():
    if name in schema.get("required", ()) or rng.random() < 0.5:
      value[name] = sample(rng, part, root)
  more = schema.get("additionalProperties", True)
  for name in schema.get("required", ()):
    if name not in value:
      value[name] = sample(rng, more, root)
  if "additionalProperties" in schema or not schema.get("properties"):
    for name in rng.sample(["extra", "zz", "ü"], rng.randrange(3)):
      if more is not False:
        value[name] = sample(rng, more, root)
  return value


def damaged(rng: random.Random, value):
  """A value that differs in one place."""
  if isinstance(value, list) and value and rng.random() < 0.7:
    i = rng.randrange(len(value))
    return rng.choice([value[:i] + value[i + 1:], [*value, value[i]],
                       [*value[:i], damaged(rng, value[i]), *value[i + 1:]]])
  if isinstance(value, dict) and value and rng.random() < 0.8:
    name = rng.choice(list(value))
    if rng.random() < 0.5:
      return {key: x for key, x in value.items() if key != name}
    return {key: damaged(rng, x) if key == name else x
            for key, x in value.items()}
  if isinstance(value, str) and rng.random() < 0.7:
    i = rng.randrange(len(value) + 1)
    return value[:i] + rng.choice(["", "x", "é", "9", " "]) + value[i + 1:]
  return rng.choice([None, True, 0, -3, 17, 2.25, "", "zzz", [], {}, [[]],
                     {"zz": 1}])


def written(rng: random.Random, value) -> str:
  """The value as people write it."""
  return json.dumps(
      value, ensure_ascii=rng.random() < 0.5, separators=rng.choice(
          [(", ", ": "), (",", ":"), (",", ": ")]))
