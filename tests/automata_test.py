"""Automata of regular expressions and of JSON schemas."""

import itertools
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripts import ROOT

import specjax as sj
from specjax import constraints
from specjax import testing

sys.path.append(str(ROOT / "experiments"))

from lib import constrained  # noqa: E402

_WORDS = testing.ListTokenizer(
    (b"a", b"b", b"ab", b"ba", b"", b"\xc3", b"\xa9b", "\xe9".encode()))


@pytest.mark.parametrize("regex", [
    "(ab|b)*", "a?\xe9+b{1,2}", "[^a]*b|", "b+(aa)?"])
def test_an_automaton_accepts_what_the_expression_matches(regex):
  # Broken: tokens across the borders of an expression's parts, tokens that are
  # half of a character, or special tokens.
  pytest.importorskip("outlines_core")
  automaton = constraints.Automaton.from_regex(regex, _WORDS)
  accepted = 0
  for count in range(5):
    for tokens in itertools.product(range(_WORDS.vocab_size), repeat=count):
      state = 0
      for token in tokens:
        state = -1 if state < 0 else automaton.next_state[
            state, automaton.token_class[token]]
      try:
        text = b"".join(map(_WORDS.token_bytes, tokens)).decode()
        matches = 4 not in tokens and re.fullmatch(regex, text) is not None
      except UnicodeDecodeError:
        matches = False
      assert (state >= 0 and automaton.final[state]) == matches
      accepted += matches
  assert accepted > 1


_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["get", "put"]},
        "ids": {"type": "array", "items": {"type": "integer"}, "maxItems": 4},
        "deep": {"type": "boolean"}},
    "required": ["name", "kind", "ids", "deep"]}


def test_every_output_of_a_schema_parses():
  # Broken: a tool call is corrupted by n-gram drafts, here of one that does not
  # follow the schema, or cut off by its limit.
  pytest.importorskip("outlines_core")
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


@pytest.mark.parametrize("call,words", [
    (lambda: constraints.Automaton.from_regex("(a", _WORDS), ["'(a'"]),
    (lambda: constraints.Automaton.from_regex("z", _WORDS), ["no text"]),
    (lambda: constraints.Automaton.from_json_schema("{", _WORDS), ["no JSON"]),
    (lambda: constraints.Automaton.from_json_schema({"type": "x"}, _WORDS),
     ["schema", '"x"']),
])
def test_a_wrong_expression_is_refused_in_one_line(call, words):
  # Broken: as above, by the library that compiles expressions.
  pytest.importorskip("outlines_core")
  with pytest.raises(ValueError) as error:
    call()
  assert all(word in str(error.value) for word in words)
  assert "\n" not in str(error.value)


def test_a_missing_library_is_named(monkeypatch):
  # Broken: an import error that does not say what to install.
  monkeypatch.setitem(sys.modules, "outlines_core", None)
  with pytest.raises(ValueError, match=r"pip install 'specjax\[grammar\]'"):
    constraints.Automaton.from_regex("a", _WORDS)


def test_flags_become_constraints(tmp_path):
  # Broken: a flag of generate.py is lost, or a penalty goes before a schema.
  none = dict(regex=None, schema=None, repetition=1.0, frequency=0.0,
              presence=0.0)
  assert constrained.constraints(_WORDS, 8, (4,), **none) == ()
  with pytest.raises(ValueError, match="leave one of the two out"):
    constrained.check_flags("a", "b")
  penalties = dict(repetition=1.2, frequency=0.5)
  assert constrained.constraints(_WORDS, 8, (4,), **{**none, **penalties}) == (
      constraints.Repetition(penalty=1.2),
      constraints.OutputPenalty(frequency=0.5))
  pytest.importorskip("outlines_core")
  (tmp_path / "schema.json").write_text(json.dumps({"enum": ["ab", "b"]}))
  quoted = testing.ListTokenizer((*_WORDS.tokens, b'"'))
  found = constrained.constraints(
      quoted, 9, (1,), **{**none, **penalties, "schema": str(
          tmp_path / "schema.json")})
  assert [type(one).__name__ for one in found] == [
      "Automaton", "Repetition", "OutputPenalty"]
  assert found[0].shortest == 3  # b ends a row here, so that "ab" is left
