"""One reader of records: every form of file, by every way in."""

import codecs
import gzip
import json

import pytest

from specjax.data import conversations
from specjax.data import corpora
from specjax.data import prompt_sets
from specjax.data import prompts
from specjax.data import record_files

_USER, _MODEL = {"role": "user", "content": "U"}, {"from": "gpt", "value": "A"}
_HUMAN = {"from": "human", "value": "U"}


def _lines(records):
  return "".join(json.dumps(record) + "\n" for record in records).encode()


def _array(records):
  return json.dumps(records, indent=1).encode()


# Every form of a file of records: (ending, bytes of records).
_FORMS = {
    "lines": ("a.jsonl", _lines),
    "gzip": ("a.jsonl.gz", lambda x: gzip.compress(_lines(x))),
    "array": ("a.json", _array),
    "lines named .json": ("b.json", lambda x: b"\n\n" + _lines(x)),
    "array named .jsonl": ("b.jsonl", lambda x: b"\n " + _array(x)),
    "mark and CRLF": ("c.jsonl", lambda x: codecs.BOM_UTF8 + _lines(x).replace(
        b"\n", b"\r\n")),
    "UTF-16": ("c.json", lambda x: _array(x).decode().encode("utf-16"))}


def _as_field(path, field):
  return prompts.read_prompts(path, field)


def _as_set(path, field):
  del field
  return prompt_sets.load("sharegpt", path)


def _as_conversations(path, field):
  field = conversations.field_of(str(path), field)
  asked = [next((m["content"] for m in chat.messages if m["role"] == "user"),
                "") for chat in conversations.read(str(path), field)]
  return [text for text in asked if text.strip()]


def _to_answer(path, field):
  """Reads the messages that a target answers (see `drafter_rows`)."""
  field = conversations.field_of(str(path), field)
  return [chat.name for *_, chat in record_files.extract(
      path, "message", conversations.records(str(path)),
      lambda place, record: conversations.beginning_of(
          place, record, record_files.alternatives(field)))]


_PROMPTS, _TRAINING = (_as_field, _as_set, _to_answer), (_as_conversations,)
_ALL = _PROMPTS + _TRAINING
_NO_SPEAKER = "turn 1 has no speaker"

# (ways in, field, record, its prompts or a part of the refusal)
_TABLE = [
    # Merged data sets: the columns of the other sets are null or empty.
    (_ALL, "messages", {"messages": [_USER], "conversations": None}, ["U"]),
    (_ALL, "messages", {"messages": [_USER], "conversations": []}, ["U"]),
    (_ALL, "messages", {"messages": [_USER], "turns": 3}, ["U"]),
    (_ALL, "messages", {"messages": [_USER], "text": "T"}, ["U"]),
    (_ALL, "conversations", {"conversations": [_HUMAN], "messages": None},
     ["U"]),
    (_ALL, "conversations", {"conversations": [_HUMAN], "messages": []}, ["U"]),
    (_ALL, "messages", {"messages": [
        {"from": None, "value": None, **_USER, "weight": None}]}, ["U"]),
    (_ALL, "messages", {"messages": [
        {**_HUMAN, "role": None, "content": None}]}, ["U"]),
    # Both pairs of keys, and mixed pairs.
    (_ALL, "messages", {"messages": [{**_USER, "value": "no"}]}, ["U"]),
    (_ALL, "messages", {"messages": [{**_HUMAN, "content": "no"}]}, ["U"]),
    (_ALL, "messages", {"messages": [{"role": "user", "value": "U"}]}, ["U"]),
    (_ALL, "messages", {"messages": [
        {"from": "human", "value": None, "content": "U"}]}, ["U"]),
    (_ALL, "messages", {"messages": [
        {**_USER, "from": "gpt", "value": "no"}]}, ["U"]),
    # Speakers.
    (_ALL, "messages", {"messages": [_MODEL, _USER, _HUMAN]}, ["U"]),
    (_ALL, "messages", {"messages": [{"role": "Human", "content": "U"}]},
     ["U"]),
    (_ALL, "messages", {"messages": [{"content": "S"}, _USER]}, _NO_SPEAKER),
    (_ALL, "messages", {"messages": ["S", _USER]}, _NO_SPEAKER),
    (_ALL, "messages", {"messages": [{"role": "elf", "content": "U"}]},
     "turn 1 has the unknown speaker 'elf'"),
    (_ALL, "messages", {"messages": [{"role": 3, "content": "U"}]},
     "turn 1 has the speaker 3"),
    # Training needs the role of every turn. A prompt is only the user's turn.
    (_PROMPTS, "messages", {"messages": [
        {"role": "elf", "content": "N"}, _USER]}, ["U"]),
    (_TRAINING, "messages", {"messages": [
        {"role": "elf", "content": "N"}, _USER]}, "unknown speaker 'elf'"),
    (_PROMPTS, "messages", {"messages": ["U", "late"]}, ["U"]),
    (_TRAINING, "messages", {"messages": ["U", "late"]}, _NO_SPEAKER),
    (_PROMPTS, "messages", {"messages": [{"content": "U"}]}, ["U"]),
    (_TRAINING, "messages", {"messages": [{"content": "U"}]}, _NO_SPEAKER),
    # Records without a prompt.
    (_ALL, "messages", {"messages": []}, []),
    (_ALL, "messages", {"messages": [_MODEL]}, []),
    (_ALL, "messages", {"messages": [{**_USER, "content": " \n"}]}, []),
    (_ALL, "messages", {"messages": None, "id": 3}, []),
    (_ALL, "messages", {"messages": None}, []),
    (_ALL, "messages", {}, []),
    (_ALL, "messages", None, []),
    # Refusals.
    (_ALL, "messages", {"id": 3}, "has no field 'messages'|or 'messages'"),
    (_ALL, "messages", {"messages": 3}, "'messages' is"),
    (_ALL, "messages", ["messages"], "is a JSON list"),
    (_ALL, "messages", {"messages": [None]}, "turn 1 has a JSON NoneType"),
    (_ALL, "messages", {"messages": [{"text": "U"}]},
     "turn 1 has the fields 'text'"),
    (_ALL, "messages", {"messages": [{"role": None, "content": None}]},
     "turn 1 has the fields 'role', 'content'"),
    (_ALL, "messages", {"messages": [{"role": "user"}]}, "content' is None"),
    (_ALL, "messages", {"messages": [{**_USER, "content": None}]},
     "content' is None"),
    (_ALL, "messages", {"messages": [{**_HUMAN, "value": 3}]}, "value' is 3"),
    (_ALL, "messages", {"messages": [{**_USER, "content": "\ud83d"}]},
     "content': .*half of")]


@pytest.mark.parametrize("ways, field, record, expected", _TABLE)
def test_every_way_in(tmp_path, ways, field, record, expected):
  # Broken: a file has one prompt by one flag and another, or none, by another.
  other = {field: [{**_USER, "content": "other"}]}
  for name, encode in _FORMS.values():
    path = tmp_path / name
    path.write_bytes(encode([other, record, other]))
    for way in ways:
      if isinstance(expected, list):
        assert way(path, field) == ["other", *expected, "other"]
      else:
        with pytest.raises(ValueError, match=rf"{path} line \d.*({expected})"):
          way(path, field)


@pytest.mark.parametrize("form", _FORMS)
def test_a_merged_file(tmp_path, form):
  # Broken: the field of the first record decides for all, and the records of
  # the other data set are refused.
  name, encode = _FORMS[form]
  path = tmp_path / name
  path.write_bytes(encode([
      {"text": None, "conversations": None, "messages": [_USER]},
      {"text": None, "conversations": [{**_HUMAN, "value": "V"}],
       "messages": None}]))
  assert _as_set(path, None) == ["U", "V"]
  for field in (None, "text", "messages", "conversations"):
    assert _as_conversations(path, field) == ["U", "V"]


@pytest.mark.parametrize("name, text, expected", [
    ("one.json", '{\n "prompt":\n "P"}', ["P"]),
    ("a.csv", "prompt,n\nP,\n", ["P"]), ("a.csv", '"prompt"\n"a\n\nb"\n',
                                        ["a\n\nb"]),
    ("a.md", "a\nb\n \nc", ["a\nb", "c"])])
def test_other_forms(tmp_path, name, text, expected):
  # Broken: a form that a prompt set reads is refused in a file of one's own.
  path = tmp_path / name
  for mark in ("utf-8", "utf-8-sig", "utf-16"):
    for end in ("\n", "\r\n"):
      path.write_bytes(text.replace("\n", end).encode(mark))
      assert prompts.read_prompts(path) == expected


_RECORDS = [
    {"prompt": "a"}, {"prompt": " "}, {"prompt": [_MODEL]}, {}, None,
    {"prompt": None, "id": 1}, {"prompt": "b"}, {"prompt": ""}]


@pytest.mark.parametrize("form", _FORMS)
def test_the_report(tmp_path, capsys, form):
  # Broken: prompts are left out in silence, or a report comes with every file.
  name, encode = _FORMS[form]
  path = tmp_path / name
  for read in (prompts.read_prompts,
               lambda path: prompt_sets.load("humaneval", path)):
    for records in (_RECORDS, _RECORDS[::6]):
      path.write_bytes(encode(records))
      record_files.print_once.cache_clear()
      assert read(path) == ["a", "b"]
      err = capsys.readouterr().err
      if len(records) == 2:
        assert not err
        continue
      assert err.startswith(
          f"{path}: 2 prompts; left out: 2 blank, 1 without a user's turn, "
          "2 empty, 1 null (first: line ") and err.count("\n") == 1


def test_the_report_of_training_data(tmp_path, capsys):
  # Broken: a record that is trained on in no run is not told, or it is told in
  # every pass over a source that is read twice.
  path = tmp_path / "a.jsonl"
  path.write_bytes(_lines([{"text": "a"}, {"text": None, "id": 3},
                           {"text": " "}, {"text": "b"}]))
  read = lambda source: [d.text for d in corpora.iter_documents(str(source))]
  for _ in range(2):
    assert read(path) == ["a", "b"]
  assert capsys.readouterr().err == (
      f"{path}: 2 documents; left out: 1 null, 1 blank (first: line 2)\n")
  for name, text in (("empty.txt", " \n"), ("text.txt", "text")):
    (tmp_path / "folder").mkdir(exist_ok=True)
    (tmp_path / "folder" / name).write_text(text)
  assert read(tmp_path / "folder") == ["text"]
  assert capsys.readouterr().err.endswith(
      "1 document; left out: 1 blank (first: file empty.txt)\n")
  path.write_bytes(_lines([{"messages": [_USER]}, {"messages": None}]))
  assert len(list(conversations.read(str(path), "messages"))) == 1
  assert capsys.readouterr().err == (
      f"{path}: 1 conversation; left out: 1 empty (first: line 2)\n")


def test_files_of_blank_prompts(tmp_path, capsys):
  # Broken: an error says "no prompt" of a file that has lines, and not why.
  path = tmp_path / "a.jsonl"
  path.write_bytes(_lines([{"prompt": ""}] * 3))
  with pytest.raises(ValueError, match="a.jsonl contains no prompt"):
    prompts.read_prompts(path)
  assert "0 prompts; left out: 3 blank" in capsys.readouterr().err


@pytest.mark.parametrize("size", [4, 7, 2**20])
def test_pieces_of_an_array(tmp_path, monkeypatch, size):
  # Broken: an item is lost or cut at the border of two pieces, or the line of
  # an item or an error is that of its piece.
  monkeypatch.setattr(record_files, "_PIECE", size)
  path = tmp_path / "a.json"
  text = ' \n[\n{"a": "é,]"},\n\n {"a":\n 12}\n , {} ]\n \n'
  path.write_text(text, encoding="utf-8")
  found = list(record_files.read(path))
  assert [(name, place.removeprefix(f"{path} ")) for name, place, _ in found
         ] == [("a.json:1", "line 3, item 1"), ("a.json:2", "line 5, item 2"),
               ("a.json:3", "line 7, item 3")]
  assert [record for *_, record in found] == [{"a": "é,]"}, {"a": 12}, {}]
  for broken, line in ((text + "x", 9), (text.replace("{} ]", "]"), 7),
                       (text.replace("{} ]", "{}"), 9),
                       (text.replace("},", "}"), 5), (" \n[", 2)):
    path.write_text(broken, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"a\.json line {line} is not JSON"):
      list(record_files.read(path))


def test_forms_of_texts_with_the_ending_of_json(tmp_path):
  # Broken: a drafter is trained on braces and keys.
  path = tmp_path / "a.json"
  read = lambda: [d.text for d in corpora.iter_documents(str(path))]
  path.write_text('{\n "text": "a"}')
  assert read() == ["a"]
  path.write_text('{"data": [{"text": "a"}, {"text": "b"}]}\n')
  assert read() == ["a", "b"]
