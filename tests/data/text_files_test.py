"""Text and JSON as people's editors and exporters write them."""

import codecs
import gzip
import json
import sys

import pytest
from scripts import ROOT

from specjax.data import corpora
from specjax.data import prompt_sets
from specjax.data import prompts
from specjax.utils import files

sys.path.append(str(ROOT / "experiments"))

from lib.prompts import conversation  # noqa: E402

_LINE = '{"prompt": "one", "question": "one", "text": "one"}\n'
_ROWS = 'act,prompt\n"a","one"\n'
# Every reader of texts: (name of a file, its content, what is read).
_READERS = {
    "prompts": ("a.txt", "one\n\ntwo\n", prompts.read_prompts,
                ["one", "two"]),
    "JSONL prompts": ("a.jsonl", _LINE, prompts.read_prompts, ["one"]),
    "gzipped prompts": ("a.jsonl.gz", _LINE, prompts.read_prompts, ["one"]),
    "a set of lines": ("b.txt", "one\ntwo\n", lambda path: prompt_sets.load(
        "lm1b", path), ["one", "two"]),
    "a JSON set": ("a.json", f"[{_LINE}]", lambda path: prompt_sets.load(
        "gsm8k", path), ["one"]),
    "a JSONL set": ("b.jsonl", _LINE, lambda path: prompt_sets.load(
        "gsm8k", path), ["one"]),
    "a CSV set": ("a.csv", _ROWS, lambda path: prompt_sets.load(
        "gpt_prompts", path), ["one"]),
    "a corpus": ("c.txt", "one\n", lambda path: [
        x.text for x in corpora.read_documents(str(path))], ["one\n"]),
    "a JSONL corpus": ("c.jsonl", _LINE, lambda path: [
        x.text for x in corpora.read_documents(str(path))], ["one"]),
    "a schema": ("schema.json", '{"type": "one"}',
                 lambda path: [files.read_json(path, "fix")["type"]], ["one"]),
}


def _write(path, data):
  path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
  return path


@pytest.mark.parametrize("reader", _READERS)
def test_marks_and_line_ends(tmp_path, reader):
  # Broken: a byte-order mark stays in the first text, or a field's name, or a
  # file with the line ends of another system is another file.
  name, text, read, expected = _READERS[reader]
  crlf = text.replace("\n", "\r\n")
  for data in (text.encode("utf-8-sig"), crlf.encode(),
               codecs.BOM_UTF16_LE + crlf.encode("utf-16-le"),
               codecs.BOM_UTF16_BE + text.encode("utf-16-be")):
    assert read(_write(tmp_path / name, data)) == expected


@pytest.mark.parametrize("reader", _READERS)
def test_bytes_that_are_no_text(tmp_path, reader):
  # Broken: an error does not name the file and the line.
  name, text, read, _ = _READERS[reader]
  line = 3 + text.count("\n")
  for end in (b"\xff", b"\0"):
    path = _write(tmp_path / name, f"\n\n{text}".encode() + end)
    with pytest.raises(ValueError, match=rf"{path}.*line {line} .*UTF-8") as e:
      read(path)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("value, words", [
    ("[" * 200_000 + "]" * 200_000, "nested deeper"),
    ("9" * 5000, "more digits")], ids=["deep", "huge"])
@pytest.mark.parametrize("reader", [
    name for name, (file, *_) in _READERS.items() if "json" in file])
def test_deep_and_huge_json(tmp_path, reader, value, words):
  # Broken: RecursionError, of what nobody reads beside the prompt.
  name, text, read, _ = _READERS[reader]
  text = text.replace("}", f', "other": {value}' + "}")
  path = _write(tmp_path / name, text.encode())
  with pytest.raises(ValueError, match=rf"{path} line 1 .*{words}") as e:
    read(path)
  assert "\n" not in str(e.value)


@pytest.mark.parametrize("reader", [
    name for name, (file, *_) in _READERS.items() if "json" in file
    and name != "a schema"])
def test_half_of_a_character(tmp_path, reader):
  # Broken: the tokenizer refuses a text, and the user searches a file of a
  # million lines for it.
  name, text, read, expected = _READERS[reader]
  path = _write(tmp_path / name, text.replace('"one"', r'"\ud83d"').encode())
  with pytest.raises(ValueError, match=rf"{path} line 1.*half of"):
    read(path)
  whole = text.replace('"one"', r'"\\ud83d\ud83d\ude00"').encode()
  assert read(_write(path, whole)) == [
      "\\ud83d\U0001f600" for _ in expected]


@pytest.mark.parametrize("text, expected", [
    ("a\nb\n \t\nc\n", ["a\nb", "c"]), ("\n \na\n\n\n\n  b\n\n", ["a", "  b"]),
    ("a\r\n \r\nb", ["a", "b"]), ("\ufeff\na", ["a"])])
def test_blank_lines_between_prompts(tmp_path, capsys, text, expected):
  # Broken: a blank line with a space in it makes one prompt of two.
  path = _write(tmp_path / "a.md", text.encode())
  assert prompts.read_prompts(path) == expected
  assert not capsys.readouterr().err


def test_one_prompt_of_many_lines_is_told(tmp_path, capsys):
  # Broken: whoever writes a prompt a line measures one long prompt.
  path = _write(tmp_path / "a.txt", b"first\nsecond\nthird\n")
  assert prompts.read_prompts(path) == ["first\nsecond\nthird"]
  assert f"{path} has no blank line" in (err := capsys.readouterr().err)
  assert "3 lines are read as one prompt" in err
  _write(path, b"only\n")
  assert prompts.read_prompts(path) == ["only"]
  assert not capsys.readouterr().err


def test_a_mark_before_a_chat(monkeypatch):
  # Broken: the first message of a chat that is piped in has a mark.
  class Piped:
    lines = iter(["\ufeffhi\n", "again\n", ""])
    isatty = staticmethod(lambda: False)
    readline = staticmethod(lambda: next(Piped.lines))

  monkeypatch.setattr(sys, "stdin", Piped)
  assert list(conversation.lines()) == ["hi", "again"]


_SYSTEM, _ASKED = ("system", "S"), ("user", "U")


@pytest.mark.parametrize("keys", [("from", "value"), ("role", "content")])
@pytest.mark.parametrize("place", ["conversations", "messages", "turns"])
@pytest.mark.parametrize("turns, expected", [
    ([_SYSTEM, _ASKED, ("assistant", "A")], "U"),
    ([("assistant", "A"), _ASKED, ("user", "late")], "U"),
    ([("gpt", "A"), ("Human", "U")], "U"), ([_SYSTEM, ("gpt", "A")], ""),
])
def test_the_users_turn(tmp_path, keys, place, turns, expected):
  # Broken: the system's message, or the model's answer, is the prompt.
  record = {place: [dict(zip(keys, turn)) for turn in turns]}
  path = tmp_path / "a.jsonl"
  text = "".join(json.dumps(x) + "\n" for x in (record, {
      "conversations": [{"from": "human", "value": "other"}]}))
  path.write_text(text)
  assert prompt_sets.load("sharegpt", path) == [expected, "other"][
      not expected:]
  path.write_text(json.dumps(record))
  if expected:  # of a user's own file as well
    assert prompts.read_prompts(path, place) == [expected]
