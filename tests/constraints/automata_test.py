"""Automata of regular expressions and of JSON schemas."""

import itertools
import json
import random
import re
import sys
import time

import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest
from scripts import ROOT

import specjax as sj
from specjax import constraints
from specjax import testing
from specjax.constraints import characters
from specjax.constraints import grammars
from specjax.constraints import regexes
from specjax.constraints import token_tables

sys.path.append(str(ROOT / "experiments"))

from lib.configurations import constrained  # noqa: E402

_WORDS = testing.ListTokenizer(
    (b"a", b"b", b"ab", b"ba", b"", b"\xc3", b"\xa9b", "\xe9".encode()))


@pytest.mark.parametrize("regex", [
    "(ab|b)*", "^(a|ba)$", r"\Ab+\z", "a?\xe9+b{1,2}", "[^a]*b|", "b+(aa)?",
    "^ab$|^b$", "(a|b$)+"])
def test_an_automaton_accepts_what_the_expression_matches(regex):
  # Broken: tokens across the borders of an expression's parts, tokens that are
  # half of a character, or special tokens.
  automaton = constraints.Automaton.from_regex(regex, _WORDS)
  accepted = 0
  for count in range(5):
    for tokens in itertools.product(range(_WORDS.vocab_size), repeat=count):
      try:
        text = b"".join(map(_WORDS.token_bytes, tokens)).decode()
        matches = 4 not in tokens and re.fullmatch(
            regex.replace(r"\z", r"\Z"), text) is not None
      except UnicodeDecodeError:
        matches = False
      assert automaton.accepts(tokens) == matches
      accepted += matches
  assert accepted > 1


@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("regex", [
    "^[A-Z]", "[0-9]$", "^cat$|^dog$", r"(x|\d{5}$)", "a^b|c", "$^", "(^a|b)c",
    "(?i)stra\xdfe", r"\w+\s\W", r"[\d_]{2,4}$", "", "a{2,3}?b", "(?s:.)x.",
    "^(?:a|b$|^c)+$", r"[^\w\d]", "(a*)*b", "(?:^a)?b", "(|a|b){2}c", "[^a]"])
def test_expressions_have_the_meaning_of_re(regex, search):
  # Broken: an anchor, a class or a repetition means something else than to the
  # validator, or a string is not spelled in one of its escapes.
  rng = random.Random(0)
  automaton = regexes.compiled(regex, search=search)
  fragment = characters.spelled(automaton, json=True)
  matches = re.search if search else re.fullmatch
  for text in ["", "cat", "dog", "hotdog", "STRASSE", "STRA\xdfE", "x12345"] + [
      "".join(rng.choice('abcxZ09_ \n"\\\xe9\xdf\u0663\U0001f600')
              for _ in range(rng.randrange(6))) for _ in range(600)]:
    if text.endswith("\n") and "$" in regex:
      continue  # $ is the end alone
    wanted = matches(regex, text) is not None
    assert automaton.accepts(text) == wanted, text
    for ascii_only in (False, True):
      spelled = json.dumps(text, ensure_ascii=ascii_only).encode()
      assert fragment.accepts(spelled) == wanted, spelled


_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["get", "put"]},
        "ids": {"type": "array", "items": {"type": "integer"}, "maxItems": 4},
        "deep": {"type": "boolean"}},
    "required": ["name", "kind", "ids", "deep"]}


@pytest.mark.slow
def test_every_output_of_a_schema_parses():
  # Broken: a tool call is corrupted by n-gram drafts, here of one that does not
  # follow the schema, or cut off by its limit.
  tokenizer = sj.data.Tokenizer.load(
      sj.zoo.tokenizer_path())
  automaton = constraints.Automaton.from_json_schema(_SCHEMA, tokenizer)
  model = testing.MarkovModel(tokenizer.vocab_size)
  table = jnp.asarray(np.random.default_rng(0).normal(
      size=(model.vocab_size, model.vocab_size)), jnp.float32)
  decoder = sj.Decoder(
      target=model, verifier=sj.verifiers.Block(), eos=tokenizer.eos,
      drafter=sj.drafters.NGram(gamma=3),
      transform=sj.LogitsTransform(constraints=(automaton,)))
  prompt = tokenizer.encode(
      '{"name": "a, "kind": "got", "ids": [1, "x"], "deep": tru, "ids": {}}')
  texts, stats = decoder.generate(
      {"target": table}, [prompt] * 32, jax.random.key(2),
      max_new_tokens=automaton.shortest + 24)
  assert stats.accepted.sum() > 0 and decoder.changes_law == ("Automaton",)
  ends = 0
  for text in texts:
    found = json.loads(tokenizer.decode(
        [token for token in text[len(prompt):] if token != tokenizer.eos]))
    assert found.keys() == _SCHEMA["properties"].keys()
    assert found["kind"] in ("get", "put") and len(found["ids"]) <= 4
    ends += text[-1] == tokenizer.eos
  assert 0 < ends


def _spelled(fragment, count, seed=0):
  """Texts that an automaton accepts, at random."""
  edges = fragment.edges.tolist()
  steps = np.full(fragment.size, fragment.size)  # to an end
  steps[fragment.final] = 0
  for _ in range(fragment.size):
    before = steps.copy()
    np.minimum.at(steps, fragment.edges[:, 0], steps[fragment.edges[:, 3]] + 1)
    if (steps == before).all():
      break
  moves = {}
  for source, low, high, target in edges:
    moves.setdefault(source, []).append((low, high, target))
  rng = random.Random(seed)
  for _ in range(count):
    state, text, most = 0, b"", rng.choice([3, 20, 50])
    while steps[state] or (rng.random() < 0.9 and len(text) < most):
      leads = [x for x in moves.get(state, ())
               if len(text) < most or steps[x[2]] < steps[state]]
      if not leads:
        break
      low, high, state = rng.choice(leads)
      text += bytes([rng.randrange(low, high + 1)])
    yield text.decode()


_NODE = {"properties": {"n": {"type": "integer"}, "next": {
    "anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
         "required": ["n", "next"]}
_TREE = {"required": ["kids"], "properties": {
    "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}}


@pytest.mark.parametrize("schema", [
    {"type": "object", "properties": {
        "a": {"enum": [1]}, "b": {"type": "integer"}},
     "required": ["b"], "additionalProperties": False},
    {"type": "string", "pattern": "^a.|b$"},
    {"type": "string", "pattern": r"\d{2}\.[.\w]+"},
    {"type": ["string", "null"], "minLength": 1, "maxLength": 2},
    {"$defs": {"node": _NODE}, "$ref": "#/$defs/node"},
    {"$defs": {"tree": _TREE}, **_TREE},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "null"}],
     "minItems": 2, "maxItems": 2},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1},
    {"enum": ["a", 1, None, True], "type": ["string", "boolean"]},
    {"const": {"k": [1, {"z": 'q."'}]}},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"type": "object", "additionalProperties": {"enum": [[{"x": 1.0}], "y"]}},
    {"type": "array", "items": {"title": "any"}, "maxItems": 1},
    {"type": "object", "minProperties": 1,
     "additionalProperties": {"type": "boolean"}},
    {"type": "object", "additionalProperties": False},
    {"allOf": [{"oneOf": [{"type": "null"}, {"type": "number"}]}],
     "discriminator": {"propertyName": "kind"}},
    *({"type": "string", "format": name} for name in (
        "date", "time", "date-time", "uuid", "email", "uri")),
    {"type": "string", "pattern": "^a", "format": "uri", "maxLength": 9},
    {"type": "object", "minProperties": 2, "properties": {
        "a": {}, "b": {}, "c": {}}, "additionalProperties": False},
    {"type": "object", "properties": {"ab": {"type": "null"}},
     "additionalProperties": {"type": "integer"}},
    {"type": "number", "minimum": -12.5, "exclusiveMaximum": 0.105},
    {"type": "integer", "exclusiveMinimum": 99, "maximum": 1205},
    {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 2}]},
], ids=str)
def test_every_text_follows_its_schema(schema):
  # Broken: the library drops a keyword, joins alternatives without brackets or
  # writes a quotation mark into a string.
  for text in _spelled(grammars.schema_fragment(schema), 60):
    jsonschema.validate(
        json.loads(text), schema,
        format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)


@pytest.mark.parametrize("schema,accepted,refused", [
    ({"$defs": {"node": _NODE}, "$ref": "#/$defs/node"},
     ['{"n": 1, "next": {"n": 2, "next": {"n": 3, "next": {"n": 4, '
      '"next": {"n": 5, "next": null}}}}}'], ['{"n": 1}']),
    ({}, ['{"a": [1, {"b": [null]}]}'], ["[1,]", "[[[[[1]]]]]"]),
    ({"properties": {"a": {}, "b": {}}, "required": ["z"]},
     ['{"b": 1, "z": 2}', '{ "z":"\\u00e9" }'],
     ['{"z": 1, "a": 2}', '{"a": 1}', '{"z": 1, "y": 2}']),
    ({"properties": {"a": {"const": 1}}, "additionalProperties": True},
     ['{"a": 1, "b": "x", "ab": 2}', '{"b": 1}'], ['{"b": 1, "a": 1}']),
    ({"type": "array", "prefixItems": [{"type": "null"}]},
     ["[]", "[null]", "[null, 1, 2]"], ["[1]", "[null,]"]),
    ({"type": "object", "properties": {"a": False, "b": {}}}, ['{"b": 0}'],
     ['{"a": 0}']),
    ({"type": "number", "maximum": 1, "exclusiveMinimum": 0},
     ["0.5", "1", "1.0", "0.00001"], ["0", "-1", "1.01", "0.0"]),
    ({"type": "number", "minimum": 0, "maximum": 1.7976931348623157e308},
     ["0.25", "12.75", "1000000000000000.0"], ["-0.5", "-1"]),
    # A double rounds these onto their bounds.
    ({"type": "number", "exclusiveMaximum": 1e17}, ["99999999999999999", "0.5"],
     ["99999999999999999.9"]),
    ({"type": "number", "exclusiveMinimum": 1e16}, ["10000000000000001"],
     ["10000000000000000.1"]),
    ({"allOf": [{"enum": [{"a": 1, "b": 2}, 3]}, {"const": {"b": 2, "a": 1}}]},
     ['{"a": 1, "b": 2}'], ["3"]),
    ({"const": 1e22}, ["1e+22", "10000000000000000000000"], ["1e22"]),
    ({"type": "string", "maxLength": 2},
     [r'"\ud83d\ude00x"', '"\U0001f600\xe9"'],
     [r'"\ud83d\ude00xy"', r'"\ud83d"']),
], ids=str)
def test_the_texts_of_the_documented_form_are_written(
    schema, accepted, refused):
  # Broken: what people write cannot be written, such as a list of four nodes.
  accepts = grammars.schema_fragment(schema).accepts
  assert [x for x in accepted if not accepts(x.encode())] == []
  assert [x for x in refused if accepts(x.encode())] == []


@pytest.mark.parametrize("schema,words", [
    ({"type": "integer", "multipleOf": 2}, ["'multipleOf'"]),
    ({"not": {}}, ["'not'"]), ({"$ref": "#/$defs/a", "if": {}}, ["'if'"]),
    ({"type": "array", "contains": {}}, ["'contains'"]),
    ({"type": "string", "format": "colour"}, ["'colour'", "uuid"]),
    ({"type": "string", "maxLength": 2.5}, ["'maxLength' 2.5", "whole"]),
    ({"type": "array", "uniqueItems": True}, ["'uniqueItems'"]),
    ({"type": "object", "minProperties": 2}, ["'minProperties' 2"]),
    ({"properties": {"a": {}}, "required": ["z"],
      "additionalProperties": False}, ["contradict"]),
    ({"properties": 3}, ["'properties' 3", "an object"]),
    ({"anyOf": []}, ["'anyOf' []"]), ({"type": "x"}, ["'type' 'x'"]),
    ({"enum": [1], "type": "null"}, ["contradict"]),
    ({"minLength": 2}, ["'minLength' without a 'type'"]),
    ({"$ref": "other.json"}, ["'other.json'"]), ({"$ref": "#/x"}, ["'#/x'"]),
    ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, ["'#'", "end"]),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]},
     ["'oneOf'", "1 and 2"]),
    ({"oneOf": [{"const": {"a": 1, "b": 2}}, {"const": {"b": 2, "a": 1}}]},
     ["'oneOf'", "1 and 2"]),
    ({"type": "string", "pattern": r"\bcat"}, [r"\b", r"'\bcat'", "pattern"]),
    ({"type": "string", "pattern": "a^b"}, ["no string", "'a^b'", "'pattern'"]),
    ({"type": "string", "pattern": "(a"}, ["'(a'", "'pattern'"]),
    ({"type": "string", "maxLength": 10**9}, ["1000000000 characters"]),
    ({"type": "string", "maxLength": 60_000}, ["'maxLength' 60000", "states"]),
    ({"type": "string", "format": "uri", "maxLength": 2083},
     ["'format' 'uri'", "'maxLength' 2083"]),
    ({"type": "array", "maxItems": 9000, "items": {"type": "string"}},
     ["'maxItems' 9000", "states"]),
    ({"type": "string", "pattern": "a.{99}$"}, ["'a.{99}$'", "states"]),
], ids=str)
def test_what_would_not_be_followed_is_refused(schema, words):
  # Broken: an output does not follow the schema, and nobody said so.
  with pytest.raises(ValueError) as error:
    grammars.schema_fragment(schema)
  assert all(word in str(error.value) for word in words), str(error.value)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize("call,words", [
    (lambda: constraints.Automaton.from_regex("(a", _WORDS), ["'(a'"]),
    (lambda: constraints.Automaton.from_regex("z", _WORDS), ["no text"]),
    (lambda: constraints.Automaton.from_regex("a^b", _WORDS),
     ["no text matches", "'a^b'"]),
    (lambda: constraints.Automaton.from_regex(r"(a)\1", _WORDS),
     ["a back-reference is", r"'(a)\1'"]),
    (lambda: constraints.Automaton.from_json_schema("{", _WORDS), ["not JSON"]),
    (lambda: constraints.Automaton.from_json_schema([], _WORDS), ["object"]),
    (lambda: constraints.Automaton.from_json_schema(
        {}, _WORDS, whitespace="a?"), ["'a?'", "spaces"]),
])
def test_a_wrong_expression_is_refused_in_one_line(call, words):
  # Broken: as above, of expressions.
  with pytest.raises(ValueError) as error:
    call()
  assert all(word in str(error.value) for word in words)
  assert "\n" not in str(error.value)


_LISTS = {"type": "string", "maxLength": 3}
for _ in range(3):
  _LISTS = {"type": "array", "maxItems": 3, "items": _LISTS}


@pytest.mark.parametrize("schema", [
    _LISTS, _SCHEMA, {}, {"enum": [f"name {i}" for i in range(90)]},
    {"type": "array", "items": _LISTS, "minItems": 2},
    {"type": "string", "pattern": r"^\w+$", "maxLength": 9}], ids=str)
def test_the_tables_are_what_the_bytes_of_tokens_do(schema):
  # Broken: states in other copies of a part share a row that differs between
  # them, long tokens are lost, or a list is read as columns.
  rng = random.Random(0)
  pieces = ['"', "[", "]", ",", " ", "a", "n", "1", "\\u00", "e9", "\xe9", "}",
            "{", ":", "true", "name ", "\\"]
  tokens = [bytes([i]) for i in range(256)] + [b"", b"a" * 40] + [
      "".join(rng.choice(pieces) for _ in range(rng.randrange(2, 12))).encode()
      for _ in range(700)]
  fragment = grammars.schema_fragment(schema)
  tables = token_tables.of_fragment(fragment, tokens)
  table = np.full((fragment.size + 1, 256), fragment.size)
  for source, low, high, target in fragment.edges.tolist():
    table[source, low:high + 1] = target
  states = np.arange(fragment.size)
  found = np.stack([tables.targets(state, tables.row_moves(tables.row[state]))
                    for state in states], axis=1)
  for token, text in enumerate(tokens):
    after = states if text else np.full_like(states, fragment.size)
    for byte in text:
      after = table[after, byte]
    np.testing.assert_array_equal(
        found[token], np.where(after < fragment.size, after, -1))


def test_long_repetitions_take_seconds():
  # Broken: an automaton of n states takes n sorts of its states, or a product
  # of all pairs of them at every character: half a minute.
  start = time.process_time()
  for pattern, size in (("^.{1,4000}$", 4002), ("^([ab]{1,2000};){2,}$", 4004)):
    found = regexes.compiled(pattern, search=True)
    assert len(found.table) == size
    assert characters.counted(found, 0, None)
  assert time.process_time() - start < 10


def test_large_schemas_have_small_tables():
  # Broken: each character of a long string, each name of a long list or each
  # item of nested lists costs a row of all tokens, and so minutes.
  rng = random.Random(0)
  tokens = [bytes([i]) for i in range(256)] + ["".join(rng.choice(
      "abcdefghijklmnopqrstuvwxyz\",[] 0") for _ in range(rng.randrange(2, 9))
  ).encode() for _ in range(3000)]
  nested = {"type": "integer"}
  for _ in range(3):
    nested = {"type": "array", "maxItems": 20, "items": nested}
  names = ["".join(rng.choice("abcdefgh") for _ in range(12))
           for _ in range(2000)]
  for schema, states, rows in (
      ({"type": "string", "maxLength": 512}, 11_000, 300),
      (nested, 60_000, 400), ({"enum": names}, 15_000, 15_000)):
    tables = token_tables.of_fragment(grammars.schema_fragment(schema), tokens)
    assert len(tables.row) < states and len(tables.starts) - 1 < rows
    assert tables.moves.size + tables.listed.size < 250_000


def test_flags_become_constraints(tmp_path):
  # Broken: a flag of generate.py is lost, or a penalty goes before a schema.
  none = dict(regex=None, schema=None, frequency=0.0, presence=0.0)
  assert constrained.constraints(_WORDS, 8, (4,), **none) == ()
  with pytest.raises(ValueError, match="leave one of the two out"):
    constrained.check_flags("a", "b")
  penalties = dict(frequency=0.5)
  assert constrained.constraints(_WORDS, 8, (4,), **{**none, **penalties}) == (
      constraints.OutputPenalty(frequency=0.5),)
  (tmp_path / "schema.json").write_text(json.dumps({"enum": ["ab", "b"]}))
  quoted = testing.ListTokenizer((*_WORDS.tokens, b'"'))
  found = constrained.constraints(
      quoted, 9, (1,), **{**none, **penalties, "schema": str(
          tmp_path / "schema.json")})
  assert [type(one).__name__ for one in found] == [
      "Automaton", "OutputPenalty"]
  assert found[0].shortest == 3  # b ends a row here, so that "ab" is left
