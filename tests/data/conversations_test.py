"""Conversations of users' files as messages of a chat template."""

import gzip
import json
import sys
import types

import pytest

from specjax.data import conversations
from specjax.data import corpora
from specjax.data import record_files

_TURNS = [{"from": "system", "value": "S"}, {"from": "human", "value": "U"},
          {"from": "GPT", "value": "A", "weight": None}]
_MESSAGES = [{"role": "system", "content": "S"},
             {"role": "user", "content": "U"},
             {"role": "assistant", "content": "A"}]
_RECORDS = [{"id": 1, "conversations": _TURNS},
            {"id": 2, "conversations": _TURNS[1:]}, {"conversations": []}]


def _read(source, field=None):
  field = conversations.field_of(str(source), field)
  return None if field is None else [
      chat.messages for chat in conversations.read(str(source), field)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "b.json"])
def test_files_of_conversations(tmp_path, name, monkeypatch):
  # Broken: the published ShareGPT file, an array of 600 MB, is taken for a
  # text, an item that two pieces of it share is lost, or names move the split.
  monkeypatch.setattr(record_files, "_PIECE", 16)
  path = tmp_path / name
  text = (json.dumps(_RECORDS, indent=2 if name[0] == "a" else None)
          if path.suffix == ".json" else "\n\n".join(map(json.dumps, _RECORDS)))
  path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz"
                   else text.encode())
  assert _read(path) == _read(path, "text") == _read(
      path, "conversations") == [_MESSAGES, _MESSAGES[1:], []]
  chats = list(conversations.read(str(path), "conversations"))
  # The first message decides whether a conversation is held out.
  assert [chat.name for chat in chats] == ["U", "U", chats[2].place]


def test_datasets_of_conversations(monkeypatch):
  # Broken: hf:NAME needs another flag, or columns that nobody reads are read.
  class Rows(list):
    column_names = property(lambda self: list(self[0]))

    def select_columns(self, names):
      return Rows({name: row.get(name) for name in names} for row in self)

  loaded = lambda name, split: {("owner/chats", "train"): Rows(_RECORDS),
                                ("owner/texts", "test"): Rows(
                                    [{"text": "one"}]),
                                ("owner/merged", "train"): Rows([
                                    {"text": None, "conversations": None,
                                     "messages": _MESSAGES[1:]},
                                    {"text": None, "conversations": _TURNS,
                                     "messages": None}])}[name, split]
  monkeypatch.setitem(sys.modules, "datasets",
                      types.SimpleNamespace(load_dataset=loaded))
  assert _read("hf:owner/chats") == [_MESSAGES, _MESSAGES[1:], []]
  assert _read("hf:owner/texts:test") is None
  assert _read("hf:owner/merged") == [_MESSAGES[1:], _MESSAGES]
  one = corpora.digest("hf:owner/chats", "conversations")
  _RECORDS[0]["id"] = 3
  assert corpora.digest("hf:owner/chats", "conversations") == one
  assert corpora.digest("hf:owner/chats", "id") != one


@pytest.mark.parametrize("text", [
    '{"text": "a", "messages": [{"role": "user", "content": "U"}]}',
    '{"text": "a"}', '{"body": []}', "[]", "3", ""])
def test_sources_of_texts(tmp_path, text):
  # Broken: a corpus of texts is taken for conversations.
  for name in ("a.jsonl", "a.json", "a.txt"):
    if text[:1] == "{" or name != "a.jsonl":  # another line is refused
      (tmp_path / name).write_text(text)
      assert _read(tmp_path / name, "text") is None
  assert _read("stdlib") is None
  assert _read(tmp_path, "text") is None


def test_the_field_that_is_named(tmp_path):
  # Broken: a wrong --field is overruled without a word.
  path = tmp_path / "a.jsonl"
  path.write_text(json.dumps(
      {"turns": _TURNS, "messages": _TURNS[1:], "text": "a"}) + "\n")
  assert _read(path) == [_MESSAGES[1:]]  # without a default field
  assert _read(path, "text") is None
  assert _read(path, "turns") == [_MESSAGES]
  assert _read(path, "other") is None


def test_roles():
  # Broken: an answer is learned from as what a user says, or a call of a tool
  # is lost.
  call = {"tool_calls": [{"function": {"name": "f"}}]}
  turns = [{"role": "developer", "content": "S"},
           {"role": "user", "content": [{"type": "text", "text": "U"}]},
           {"role": "assistant", "content": None, **call},
           {"from": "observation", "value": "12"},
           {"from": "function_call", "value": "g()"},
           {"role": "tool", "content": "3", "tool_call_id": "x"},
           {"from": "bard", "value": ""}]
  found = conversations.messages("here", turns)
  assert [m["role"] for m in found] == [
      "system", "user", "assistant", "tool", "assistant", "tool", "assistant"]
  assert found[2] == {"role": "assistant", "content": None, **call}
  assert found[5] == {"role": "tool", "content": "3", "tool_call_id": "x"}
  assert list(map(conversations.is_answer, found)) == [
      False, False, True, False, True, False, False]


def _written(tmp_path, *records, name="w.jsonl"):
  path = tmp_path / name
  path.write_text("".join(json.dumps(record) + "\n" for record in records))
  return list(conversations.read(
      str(path), conversations.field_of(str(path))))


_ASK = {"role": "user", "content": "U"}
_ANSWER = {"role": "assistant", "content": "A"}


@pytest.mark.parametrize("record", [
    {"messages": [_ASK, _ANSWER]}, {"prompt": "U", "response": "A"},
    {"prompt": "U", "completion": "A"}, {"instruction": "U", "output": "A"},
    {"instruction": "U", "input": "", "output": "A", "text": "U A"},
    {"query": "U", "response": "A", "history": []},
    {"question": "U", "answer": "A"},
    {"text": "T", "messages": [_ASK, _ANSWER]},
    {"prompt": [_ASK], "completion": [_ANSWER]},
    {"prompt": "x", "response": "y", "messages": [_ASK, _ANSWER]},
    {"conversations": [{"from": "human", "value": "U"},
                       {"from": "gpt", "value": "A"}]}])
def test_columns_of_other_trainers(tmp_path, record):
  # Broken: records that others train as conversations are read as raw text.
  [chat] = _written(tmp_path, record)
  assert chat.messages == [_ASK, _ANSWER]
  assert (chat.name, chat.variables) == ("U", {})
  [chat] = _written(tmp_path, {"messages": None, **record, "system": "S"})
  assert chat.messages == [{"role": "system", "content": "S"}, _ASK, _ANSWER]


def test_keys_of_other_trainers(tmp_path, capsys):
  # Broken: a setting of a record is dropped without a word.
  turn = lambda **keys: [{"role": "user", "content": "U"},
                         {"role": "assistant", "content": "A", **keys}]
  for keys in ({"weight": 0}, {"loss": False}, {"train": False},
               {"loss": 0, "weight": 1}):
    [chat] = _written(tmp_path, {"messages": turn(**keys)})
    assert chat.messages[1] == {**_ANSWER, "weight": 0}
    assert not conversations.is_answer(chat.messages[1])
  [chat] = _written(tmp_path, {"conversations": [
      {"from": "human", "value": "U"},
      {"from": "gpt", "value": "A", "weight": 0}]})
  assert chat.messages[1]["weight"] == 0
  for keys in ({"weight": 1}, {"loss": True}, {"train": None}):
    [chat] = _written(tmp_path, {"messages": turn(**keys)})
    assert chat.messages[1] == _ANSWER
  with pytest.raises(ValueError, match="turn 2 has 0.5 for 'weight'"):
    _written(tmp_path, {"messages": turn(weight=0.5)})
  tools = [{"type": "function", "function": {"name": "f"}}]
  for value in (tools, json.dumps(tools)):
    [chat] = _written(tmp_path, {
        "messages": turn(), "tools": value,
        "chat_template_kwargs": {"enable_thinking": False}})
    assert chat.variables == {"tools": tools, "enable_thinking": False}
  with pytest.raises(ValueError, match="'tools' is a JSON dict; .* a list"):
    _written(tmp_path, {"messages": turn(), "tools": {"a": 1}})
  [chat] = _written(tmp_path, {
      "instruction": "U", "input": "I", "output": "A", "history": [["a", "b"]]})
  assert [m["content"] for m in chat.messages] == ["a", "b", "U\nI", "A"]
  capsys.readouterr()
  _written(tmp_path, {"messages": turn(train_detail=[]), "images": ["x"]},
           {"messages": turn(), "images": []}, name="unused.jsonl")
  assert "not used: 'images' of 1 records\n" in capsys.readouterr().err
  only = conversations.last_answer_only(chat)
  assert list(map(conversations.is_answer, only.messages)) == [
      False, False, False, True]


def test_conversations_that_begin_alike_are_on_one_side():
  # Broken: copies of a held-out conversation are trained.
  names = [f"question {i % 50}" for i in range(500)]
  sides = corpora.held_out(names)
  assert any(sides) and not all(sides)
  assert all(sides[i] == sides[i % 50] for i in range(500))
  # None of these is held out by its hash, and the moved one has a copy.
  names = [x for x in "abcdefgh" if not corpora.Document(x, "").held_out][:3]
  sides = corpora.held_out(names * 2)
  assert sum(sides) == 2 and sides[:3] == sides[3:]


def test_directories_of_records(tmp_path, capsys):
  # Broken: each shard is one document, with braces and keys.
  (tmp_path / "part").mkdir()
  for i, name in enumerate(("a.jsonl", "b.JSONL", "part/c.ndjson", "d.json")):
    record = json.dumps({"messages": [_ASK, {**_ANSWER, "content": str(i)}]})
    (tmp_path / name).write_text(record + "\n" + record + "\n")
  (tmp_path / "README.md").write_text("about")
  (tmp_path / "info.json").write_text('{\n "version": 1\n}')
  field = conversations.field_of(str(tmp_path))
  found = [chat.messages[1]["content"]
           for chat in conversations.read(str(tmp_path), field)]
  assert found == ["0", "0", "1", "1", "3", "3", "2", "2"]
  assert "left out: 2 files without records" in capsys.readouterr().err
  (tmp_path / "code.py").write_text("pass")  # a directory of source code
  assert conversations.field_of(str(tmp_path)) is None
  one = tmp_path / "one"
  one.mkdir()
  for name in "ab":
    (one / f"{name}.json").write_text(
        json.dumps({"messages": [_ASK, _ANSWER]}, indent=2))
  assert len(list(conversations.read(str(one), "messages"))) == 2
