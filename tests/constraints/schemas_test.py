"""JSON schemas against another implementation, `jsonschema`."""

import itertools
import json
import random

import jsonschema
import pytest
import schema_cases

from specjax.constraints import grammars

_BLOCKS, _SCHEMAS, _VALUES, _TRIES = 6, 50, 20, 800


def _validator(schema):
  return jsonschema.Draft202012Validator(
      schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(_BLOCKS))
def test_what_is_valid_is_accepted_and_nothing_else(block):
  # Broken: a keyword allows more or less than it says, alone or beside others.
  counted = refused = 0
  for seed in itertools.count(1000 * block):
    if counted == _SCHEMAS:
      break
    rng = random.Random(seed)
    schema = schema_cases.with_definitions(schema_cases.make_schema(rng))
    validator = _validator(schema)
    try:
      fragment = grammars.schema_fragment(schema)
    except ValueError as e:
      refused += 1
      assert "contradict" not in str(e) or not any(
          validator.is_valid(schema_cases.sample(rng, schema, schema))
          for _ in range(50)), (schema, str(e))
      continue
    counts = [0, 0]
    for _ in range(_TRIES):
      value, changed = schema_cases.sample(rng, schema, schema), False
      if rng.random() < 0.5:
        value, changed = schema_cases.damaged(rng, value), True
      valid = validator.is_valid(value)
      # What was changed and is valid may be of a form that is not written.
      if valid and changed or counts[valid] == _VALUES:
        continue
      counts[valid] += 1
      text = schema_cases.written(rng, value)
      assert fragment.accepts(text.encode()) == valid, (text, schema)
    counted += min(counts) == _VALUES
  assert refused < counted / 3


@pytest.mark.parametrize("name", schema_cases.FORMATS)
def test_formats_are_those_of_their_standards(name):
  # Broken: a date that is copied cannot be written, and becomes another.
  accepts = grammars.schema_fragment(
      {"type": "string", "format": name}).accepts
  texts = schema_cases.FORMATS[name] + {
      "date": [f"{year}-{month:02}-{day:02}"
               for year in (1900, 2000, 2023, 2024)
               for month in range(14) for day in range(33)],
      "time": [f"{a:02}:{b:02}:{c:02}{z}" for a, b, c in (
          (23, 59, 59), (24, 0, 0), (0, 60, 0), (1, 2, 60)) for z in (
              "Z", "", "+24:00", "-12:30", ".5Z", ".Z", "+1:00")],
      "email": [f"{'a' * n}@{'b' * m}.c" for n, m in (
          (64, 63), (65, 1), (1, 64))] + ['"a b"@c', "a..b@c", "a@[127.0.0.1]",
                                          "a@-b.c", ".a@b", "a@b@c"],
      "uri": ["a:", "1a:b", "http://[::1]/", "http://[1::2::3]", "a:b[c]",
              "tel:+1-816-555-1212", "http://x:port/", "ldap://[2001:db8::7]/c"],
      "uuid": ["123e4567e89b12d3a456426614174000", "g" * 8 + "-0000" * 3 + "-"]
  }.get(name, [])
  valid = {text: _validator({"type": "string", "format": name}).is_valid(text)
           for text in texts}
  if name == "email":  # the validator only wants an @
    valid |= {text: False for text in (
        "a..b@c", "a@-b.c", ".a@b", "a@b@c", f"{'a' * 65}@b.c",
        f"a@{'b' * 64}.c")}
  assert {text: accepts(json.dumps(text).encode()) for text in valid} == valid
  assert len(set(valid.values())) == 2
