"""Prompt sets by name: published formats, Hugging Face, embedded sets."""

import gzip
import json
import re
import sys
import types

import pytest

from specjax.data import corpora
from specjax.data import prompt_sets


def _lines(*records):
  return "".join(json.dumps(record) + "\n" for record in records)


def _write(path, text):
  data = text if isinstance(text, bytes) else text.encode()
  path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
  return path


_LONG = "word " * 40_000  # longer than a field of Python's csv by default
_FILES = [
    ("lm1b", "a.txt", "One .\r\n\nTwo\u2028.\n", ["One .", "Two\u2028."]),
    ("lm1b", "news.en.heldout-00000-of-00050", "One .\n", ["One ."]),
    ("lm1b", "a.jsonl", _lines({"text": "One ."}), ["One ."]),
    ("gpt_prompts", "a.csv",
     'act,prompt\n"A","Say ""hi"",\nthen go."\nB,Go\nC," "\n',
     ['Say "hi",\nthen go.', "Go"]),
    ("gpt_prompts", "b.csv", ",human_prompt,chatgpt_response\n0,Hi,Yes\n",
     ["Hi"]),
    ("gpt_prompts", "long.csv", f'act,prompt\nA,"{_LONG}"\n , \n\nB,Go\n',
     [_LONG, "Go"]),
    ("webquestions", "a.json",
     json.dumps([{"qId": "1", "answers": [], "qText": "who?"}]), ["who?"]),
    ("webquestions", "b.json",
     json.dumps([{"url": "u", "targetValue": "t", "utterance": "who?"}],
                indent=1), ["who?"]),
    ("piqa", "a.jsonl", _lines({"goal": "sit", "sol1": "a", "sol2": "b"}),
     ["sit"]),
    ("sharegpt", "a.json", json.dumps([
        {"id": "1", "conversations": [{"from": "gpt", "value": "no"},
                                      {"from": "human", "value": "yes"},
                                      {"from": "human", "value": "late"}]},
        {"id": "2", "conversations": [{"from": "gpt", "value": "no"}]},
        {"id": "3", "conversations": []}]), ["yes"]),
    ("sharegpt", "a.jsonl", _lines({"turns": [{"content": "hi"}]}), ["hi"]),
    ("xsum", "a.jsonl", _lines({"document": "é\n.", "summary": "s", "id": "1"}),
     ["é\n."]),
    ("gsm8k", "a.jsonl", _lines({"question": "1+1?", "answer": "2"},
                                {"question": " \n", "answer": "3"}), ["1+1?"]),
    ("gsm8k", "lines.json", _lines({"question": "1+1?"}), ["1+1?"]),
    ("gsm8k", "items.json", '[\n{"question": "a"},\n\n {"question":\n "b"}\n]',
     ["a", "b"]),
    ("gsm8k", "one.json", json.dumps({"question": "1+1?"}, indent=1), ["1+1?"]),
    ("wmt_deen", "a.jsonl", _lines({"translation": {"de": "ja", "en": "yes"}}),
     ["ja"]),
    ("spec_bench", "a.jsonl", _lines({"question_id": 81, "turns": ["a", "b"]}),
     ["a"]),
    ("spec_bench", "b.jsonl", _lines({"turns": [
        {"role": "system", "content": "S"}, {"role": "user", "content": "U"}]}),
     ["U"]),
    ("humaneval", "a.jsonl.gz", _lines({"task_id": "0", "prompt": "def f():"}),
     ["def f():"]),
    ("mt_bench", "a.jsonl", _lines({"turns": ["a", "b"]}, {"turns": ["c"]}),
     ["a", "c"]),
    ("copy", "a.jsonl", _lines({"prompt": "again"}), ["again"]),
    ("rename", "a.jsonl", _lines({"prompt": "more"}), ["more"]),
    ("summarise", "a.jsonl", _lines({"prompt": "less"}), ["less"]),
    ("questions", "a.jsonl", _lines({"prompt": "why?"}), ["why?"])]


@pytest.mark.parametrize("name,file,text,expected", _FILES,
                         ids=lambda x: str(x)[:20])
def test_published_formats(tmp_path, name, file, text, expected):
  # Broken: a published file cannot be read, or another field, another turn or
  # a piece of a prompt is taken for the prompt.
  assert prompt_sets.load(name, _write(tmp_path / file, text)) == expected


def test_the_sets_that_ship():
  # Broken: one needs a file or the network, a prompt does not hold the name
  # that it asks to replace, or a question is about another text.
  prompts = prompt_sets.load("copy")
  assert len(set(prompts)) == 24
  assert prompts == (
      prompt_sets.load("rename") + prompt_sets.load("summarise"))
  for prompt in prompts[:12]:
    old, code = prompt.split("`")[1], prompt.split("```python\n")[1]
    assert re.search(rf"\b{old}\b", code)
  questions = prompt_sets.load("questions")
  assert len(set(questions)) == 12
  for prompt, question in zip(prompts[12:], questions):
    assert prompt.split("\n\n")[1] == question.split("\n\n")[1]
    assert question.endswith("?")


def test_every_set_is_tested():
  # Broken: a set was added whose format no test reads, or under another key.
  assert {name for name, *_ in _FILES} == set(prompt_sets.PROMPT_SETS)
  for name, spec in prompt_sets.PROMPT_SETS.items():
    assert spec.name == name and spec.title
    assert sum(map(bool, (spec.hf_id, spec.published, spec.shipped))) == 1


def test_huggingface(monkeypatch):
  # Broken: another dataset, split or revision is read than the table says, or
  # a training split is downloaded for a few prompts.
  calls = []
  def load_dataset(path, name=None, *, split, revision, streaming):
    calls.append((path, name, split, revision, streaming))
    return iter(rows)
  fake = types.SimpleNamespace(load_dataset=load_dataset)
  monkeypatch.setitem(sys.modules, "datasets", fake)
  rows = [{"translation": {"de": "ja", "en": "yes"}}]
  assert prompt_sets.load("wmt_deen") == ["ja"]
  rows = [{"prompt": ["a", "b"], "category": "math"}]
  assert prompt_sets.load("mt_bench") == ["a"]
  rows = [{"goal": "sit"}]
  assert prompt_sets.load("piqa") == ["sit"]
  assert calls == [
      ("wmt/wmt14", "de-en", "test", None, True),
      ("HuggingFaceH4/mt_bench_prompts", None, "train", None, True),
      ("ybisk/piqa", None, "validation", "refs/convert/parquet", True)]
  with pytest.raises(ValueError, match="openai/gsm8k row 1.*'question'"):
    prompt_sets.load("gsm8k")
  with pytest.raises(ValueError, match="Spec-Bench.*question.jsonl"):
    prompt_sets.load("spec_bench")
  assert len(calls) == 4


def test_huggingface_is_optional(monkeypatch):
  # Broken: without the package a user gets a traceback and no fix.
  monkeypatch.setitem(sys.modules, "datasets", None)
  with pytest.raises(ValueError, match="XSum.*pip install .specjax.datasets"):
    prompt_sets.load("xsum")


@pytest.mark.parametrize("name", prompt_sets.EMBEDDED)
def test_embedded_sets(name):
  # Broken: a published figure cannot be repeated, for its prompts change from
  # call to call, or the description does not identify them.
  prompts, source = prompt_sets.embedded(name, 70, 100, seed=3)
  assert len(prompts) == 70 and {len(p) for p in prompts} == {100}
  assert prompt_sets.embedded(name, 70, 100, seed=3) == (prompts, source)
  assert prompt_sets.embedded(name, 70, 100, seed=4)[0] != prompts
  assert json.loads(json.dumps(source)) == source
  assert set(source) == {
      "documents", "prompts", "python", "hash", "held_out"}
  assert source["held_out"] == (name != "prose")


def test_embedded_sets_were_not_trained_on():
  # Broken: a figure is measured on text that the bundled models saw, without
  # saying so, or tests pass for code.
  documents = corpora.stdlib_documents()
  sides = {"code": [], "tests": [], "docstrings": []}
  for document in documents:
    if document.held_out:
      *folders, file = document.name.split("/")
      is_test = (file.startswith("test_")
                 or {"test", "tests", "idle_test"} & set(folders))
      sides["tests" if is_test else "code"].append(document.text)
      if not is_test:
        sides["docstrings"].append(prompt_sets._docstrings(document).text)
  for name, texts in sides.items():
    prompts, _ = prompt_sets.embedded(name, 200, 150)
    assert all(any(p in text for text in texts) for p in prompts)
  # "prose" is called trained on, for the file of the topics was.
  [topics] = [d for d in documents if d.name == "pydoc_data/topics.py"]
  assert not topics.held_out


def test_docstrings_of_a_module():
  # Broken: docstrings are missed or keep their indentation, or code is taken
  # for one.
  text = ('"""Top.\n\n  More.\n"""\nx = "no"\nclass A:\n  """Of\n    A."""\n'
          '  def f(self):\n    pass\n  async def g(self):\n    """Of g."""\n')
  document = prompt_sets._docstrings(corpora.Document("m.py", text))
  assert document == corpora.Document("m.py",
                                      "Top.\n\nMore.\n\nOf\nA.\n\nOf g.")


@pytest.mark.parametrize("name", ["tests", "prose"])
def test_a_python_without_the_source(monkeypatch, name):
  # Broken: a distribution without tests or topics gives a traceback, or
  # prompts from elsewhere.
  modules = [corpora.Document("a.py", "x = 1\n" * 100)]
  monkeypatch.setattr(prompt_sets, "_held_out_modules", lambda: modules)
  monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
  with pytest.raises(ValueError, match=f"{name}.*this Python") as caught:
    prompt_sets.embedded(name, 2, 10)
  assert "\n" not in str(caught.value)
  assert prompt_sets.embedded("code", 2, 12)[0] == ["x = 1\nx = 1\n"] * 2
