"""Files and arguments that readers of data refuse."""

import functools
import gzip
import json

import numpy as np
import pytest
import tokenizers as library

from specjax.data import batches
from specjax.data import conversations
from specjax.data import corpora
from specjax.data import prompt_sets
from specjax.data import prompts
from specjax.data import tokenizers

_USER = {"role": "user", "content": "U"}
_TURNS = json.dumps([{"messages": [_USER, _USER]}] * 3, indent=0)
_ITEMS = '[\n{"question": "a"},\n\n {"question":\n "b"}\n]\n'
_DAMAGED = bytearray(gzip.compress(b'{"prompt": "def f():"}\n' * 99, mtime=0))
_DAMAGED[20:40] = b"\xff" * 20
# What the error of a prompt set says of the set.
_SETS = {"gsm8k": "GSM8K is .* 'question'", "humaneval": "HumanEval is .*"
         "'prompt'", "webquestions": "WebQA is .*'qText' or 'utterance'",
         "gpt_prompts": "GPT Prompt is .*'prompt'", "sharegpt": "ShareGPT is .*"
         "'conversations'", "wmt_deen": "WMT-DeEn is .*'translation.de'"}


def _documents(path):
  return corpora.read_documents(str(path))


def _chats(path):
  return list(conversations.read(
      str(path), conversations.field_of(str(path), None)))


def _lines(*records):
  return "\n" + "\n".join(map(json.dumps, records))


@pytest.mark.parametrize("read, name, content, words", [
    (_documents, "a.txt", None, "does not exist.*stdlib"),
    (_documents, "a.txt", b"  \n ", "no text"),
    (_documents, "a.txt", b"ok \xe9t\xe9", "UTF-8.*byte 3"),
    (_documents, "a.jsonl", b'{"text": "\xff"}', "UTF-8"),
    (_documents, "a.jsonl", '{"text": "a"}\n{"text": \n', "line 2 is not JSON"),
    (_documents, "a.jsonl", '["a"]\n', "line 1.* JSON object"),
    (_documents, "a.jsonl", '\n{"body": "a"}\n', "line 2.*'text'.*'body'"),
    (_documents, "a.jsonl", '{"text": 3}\n', "line 1: 'text'"),
    (_documents, "a.json", "{ no", "not JSON"),
    (_documents, "a.json", "3", "a JSON int"),
    (_documents, "a.json", '"a"\n"b"', "not JSON"),
    (_documents, "a.json", "text", "not JSON"),
    (_documents, "a.json", '{"body": "a"}', "no field 'text'; it has 'body'"),
    (tokenizers.Tokenizer.load, "a.json", None, "does not exist"),
    (tokenizers.Tokenizer.load, "a.json", '{"no": "a"}', "is not a tokenizer"),
    *((_chats, "a.json", text, r"a\.json line \d+ is not JSON") for text in (
        _TURNS[:-1], _TURNS[:-9], _TURNS + "]", _TURNS.replace("},", "}"))),
    *((_chats, name, write(*records), f"line {place}{words}")
      for name, write, places in (
          ("a.jsonl", _lines, ("2", "3")),
          ("a.json", lambda *x: json.dumps(x), ("1, item 1", "1, item 2")))
      for place, records, words in (
          (places[0], [{"messages": [{"role": "narrator", "content": "N"}]}],
           ": turn 1 has the unknown speaker 'narrator'; use one of human"),
          (places[0], [{"messages": [{"content": "N"}]}],
           ": turn 1 has no speaker"),
          (places[0], [{"messages": ["N"]}], ": turn 1 has no speaker"),
          (places[0], [{"messages": [{"role": "user", "content": None}]}],
           ": turn 1: 'content' is None"),
          (places[0], [{"messages": [{"from": "gpt", "value": "\ud83d"}]}],
           ".*half of"),
          (places[1], [{"messages": []}, {"text": "a"}],
           " has no field 'messages' or"),
          (places[1], [{"messages": []}, {"messages": "a"}],
           ": 'messages' is a JSON str"),
          (places[1], [{"messages": []}, [1]],
           " (has no field|is a JSON list)"))),
    *((functools.partial(prompt_sets.load, dataset), name, content,
       f"{words}.*{_SETS[dataset]}") for dataset, name, content, words in (
           ("gsm8k", "a.jsonl", None, "no file"),
           ("gsm8k", "a.txt", "1+1?", "'.txt'"),
           ("gsm8k", "a", "1+1?", "'nothing'"),
           ("gsm8k", "a.jsonl", _lines({"question": "1"}, {"a": 1, "b": 2}),
            "line 3 .*'a', 'b'"),
           ("gsm8k", "a.jsonl", _lines({"question": 3}),
            "line 2: 'question' is 3"),
           ("gsm8k", "a.jsonl", b'{"question": "\xff"}', "UTF-8"),
           ("gsm8k", "a.jsonl", '{"question": \n', "line 1 is not JSON"),
           ("gsm8k", "a.jsonl", "", "no prompt"),
           ("gsm8k", "a.json", _ITEMS.replace('"b"', "3"),
            "line 4, item 2: 'question' is 3"),
           ("gsm8k", "a.json", _ITEMS.replace('"b"', r'"\udc00"'),
            "line 4, item 2: 'question': .*half"),
           ("gsm8k", "a.json", _ITEMS.replace("},", "}"), "line 4 is not JSON"),
           ("gsm8k", "a.json", _ITEMS.replace("]", ",]"), "line 6 is not JSON"),
           ("gsm8k", "a.json", _ITEMS + "x", "line 7 is not JSON"),
           ("gsm8k", "a.json", "[", "line 1 is not JSON"),
           ("gsm8k", "a.json", "[1,\n\n2]", "line 1, item 1 is a JSON int"),
           ("gsm8k", "a.json", "[]", "contains no prompt"),
           ("humaneval", "a.jsonl.gz", gzip.compress(b"", mtime=0),
            "no prompt"),
           ("humaneval", "a.jsonl.gz", _DAMAGED, "is not gzipped"),
           ("webquestions", "a.json", '[{"qText": "who?"},\n{"qText"]',
            "line 2 is not JSON"),
           ("webquestions", "a.json", '[{"qText": "who?"}, "who?"]',
            "item 2 is a JSON str"),
           ("gpt_prompts", "a.csv", "act,text\nA,Hi\n", "row 1.*'act', 'text'"),
           ("gpt_prompts", "a.csv", "act,prompt\nA,Hi\nB\n", "row 2"),
           ("gpt_prompts", "a.csv", "act,prompt\nA,Hi\nB,Write, please\n",
            r"row 2 \(line 3\) has more cells than the .*quotation marks"),
           ("gpt_prompts", "a.csv", "act,prompt\nA,B\n , \n\nB,Go\nC\n",
            r"row 4 \(line 6\) has no"),
           ("gpt_prompts", "a.csv", 'act,prompt\nA,"Hi\n', "not CSV"),
           ("gpt_prompts", "a.csv", 'act,prompt\nA,B\nA,"B"x\n',
            "line 3 is not CSV"),
           ("gpt_prompts", "a.csv", b"act,prompt\nA,\xe9\n", "UTF-8"),
           ("wmt_deen", "a.jsonl", _lines({"translation": "ja"}), "line 2"),
           ("sharegpt", "a.json", '[{"text": ["hi"]}]', "item 1"))),
    *((read, "a.jsonl", _lines({"messages": turns}), f"line 2: {words}")
      for read in (functools.partial(prompt_sets.load, "sharegpt"),
                   lambda path: prompts.read_prompts(path, "messages"))
      for turns, words in (
          ([{"role": "system", "content": "S"}, {"text": "U"}],
           "turn 2 has the fields 'text'; it must have 'from'"),
          ([_USER, 3], "turn 2 has a JSON int"),
          ([{"content": "S"}, _USER], "turn 1 has no speaker"),
          ([{"role": "narrator", "content": "N"}],
           "turn 1 has the unknown speaker 'narrator'"),
          ([{"role": "user", "content": None}], "'messages.content' is None"),
          ([{"role": "user", "content": [{"type": "text", "text": "U"}]}],
           r"'messages.content' is \[\{'text': 'U'"),
          ([{"role": "user"}], "'messages.content' is None")))])
def test_bad_files_are_refused(tmp_path, read, name, content, words):
  # Broken: a wrong file is trained on or decoded from, what it lacks is
  # guessed, or the error does not name the file and the place.
  path = tmp_path / name
  if content is not None:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
  with pytest.raises(ValueError, match=words) as e:
    read(path)
  assert str(path) in str(e.value) and "\n" not in str(e.value)


_ROWS = functools.partial(batches.held_out_rows, np.arange(20), np.array([0]))


@pytest.mark.parametrize("call, words", [
    (lambda: batches.TokenWindows(np.arange(40), 4, 8),
     "40 tokens.*needs 41"),
    (lambda: _ROWS(9, 4, np.zeros(20, bool)), "no row of 4 contains an answer"),
    (lambda: _ROWS(9, 21), "has 20 tokens, but a row has 21"),
    (lambda: corpora.split([corpora.Document("0", "text")]), "1 document"),
    (lambda: corpora.held_out(["a"] * 3), "3 document.* 1 different"),
    (lambda: tokenizers.train(["text"], 256), "256.*257"),
    (lambda: tokenizers.Tokenizer(library.Tokenizer(
        library.models.WordLevel({"7": 0}))).encode_stream(["7"]),
     "neither bos nor eos"),
    (lambda: tokenizers.Tokenizer(
        tokenizers.train(["law"], 257).backend, eos=257), "eos is 257.*257 to"),
    (lambda: tokenizers.train(["law"], 257).token_bytes(-1), "-1 is negative"),
    (lambda: prompt_sets.load("gsm"), "'gsm'.*lm1b.*gsm8k"),
    (lambda: prompt_sets.embedded("gsm8k", 1, 10), "'gsm8k'.*code.*prose")])
def test_bad_arguments_are_refused(call, words):
  # Broken: an index error in the middle of a run, or a KeyError that does not
  # list the names.
  with pytest.raises(ValueError, match=words) as e:
    call()
  assert "\n" not in str(e.value)
