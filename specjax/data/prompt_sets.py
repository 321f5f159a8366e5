"""Prompt sets from published files or from the running Python.

The first eight sets are the tasks of "Block Verification Accelerates
Speculative Decoding" (https://arxiv.org/abs/2403.10444, Table 1), with the
paper's titles. Their prompts are the questions and documents, without an
instruction or a chat template. The sets "copy", "rename", "summarise" and
"questions" ship with specjax. "copy" is "rename" followed by "summarise".
"questions" uses the documents of "summarise".
"""

import ast
import contextlib
import csv
import dataclasses
import functools
import io
import os
import pathlib
import platform
import re
import reprlib

from specjax.data import copy_prompts
from specjax.data import corpora
from specjax.data import prompts as prompts_lib
from specjax.utils.files import parse_json
from specjax.utils.files import read_text
from specjax.utils.fingerprints import fingerprint

_JSON = (".jsonl", ".jsonl.gz", ".json")
# The main revision of a dataset may be a script, and `datasets` no longer runs
# scripts. Hugging Face generates this branch, which contains Parquet files.
_PARQUET = "refs/convert/parquet"
_TOPICS = "pydoc_data/topics.py"
_TEST = re.compile(r"(^|[/_])tests?([/_.]|$)")  # test/, idle_test/, test_x.py


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptSet:
  """Published prompt set and the location of its prompts.

  Attributes:
    name: key in `PROMPT_SETS`.
    title: name of the set in papers.
    fields: fields of a record that may contain the prompt, in order of
      preference. A dot selects a key of an object. If the field is a list of
      turns, the prompt is the user's first turn (see `prompts.users_turn`).
    endings: endings of the file's name. A JSON file is a list of records, or
      has one record per line. A CSV file has a header. Other files have one
      prompt per line.
    hf_id: name of the Hugging Face dataset, or None.
    hf_config: configuration of the dataset. None selects the default.
    hf_split: split of the dataset.
    hf_revision: revision of the dataset. None selects the main revision.
    published: location of the file, for sets without a Hugging Face dataset.
    shipped: prompts of a set that ships with specjax, otherwise empty.
  """

  name: str
  title: str
  fields: tuple[str, ...]
  endings: tuple[str, ...] = _JSON
  hf_id: str | None = None
  hf_config: str | None = None
  hf_split: str = "test"
  hf_revision: str | None = None
  published: str = ""
  shipped: tuple[str, ...] = ()


PROMPT_SETS = {s.name: s for s in (
    PromptSet(name="lm1b", title="LM1B", fields=("text",),
              # The held-out shards of the published files end in this number.
              endings=(".txt", "-of-00050", *_JSON), hf_id="dvruette/lm1b"),
    PromptSet(name="gpt_prompts", title="GPT Prompt",
              fields=("human_prompt", "prompt"), endings=(".csv", *_JSON),
              hf_id="MohamedRashad/ChatGPT-prompts", hf_split="train"),
    PromptSet(name="webquestions", title="WebQA",
              fields=("qText", "utterance", "question"),
              hf_id="stanfordnlp/web_questions"),
    PromptSet(name="piqa", title="PIQA", fields=("goal",), hf_id="ybisk/piqa",
              hf_split="validation", hf_revision=_PARQUET),
    PromptSet(name="sharegpt", title="ShareGPT",
              fields=("conversations.value", "conversations.content",
                      "messages.content", "messages.value", "turns.content",
                      "turns.value"),
              published="ShareGPT_V3_unfiltered_cleaned_split.json of "
                        "huggingface.co/datasets/anon8231489123/"
                        "ShareGPT_Vicuna_unfiltered"),
    PromptSet(name="xsum", title="XSum", fields=("document",),
              hf_id="EdinburghNLP/xsum", hf_revision=_PARQUET),
    PromptSet(name="gsm8k", title="GSM8K", fields=("question",),
              hf_id="openai/gsm8k", hf_config="main"),
    PromptSet(name="wmt_deen", title="WMT-DeEn", fields=("translation.de",),
              hf_id="wmt/wmt14", hf_config="de-en"),
    PromptSet(name="spec_bench", title="Spec-Bench", fields=("turns",),
              published="data/spec_bench/question.jsonl of "
                        "github.com/hemingkx/Spec-Bench"),
    PromptSet(name="humaneval", title="HumanEval", fields=("prompt",),
              hf_id="openai/openai_humaneval"),
    PromptSet(name="mt_bench", title="MT-bench", fields=("turns", "prompt"),
              hf_id="HuggingFaceH4/mt_bench_prompts", hf_split="train"),
    PromptSet(name="copy", title="copy", fields=("prompt",),
              shipped=copy_prompts.PROMPTS),
    PromptSet(name="rename", title="rename", fields=("prompt",),
              shipped=copy_prompts.RENAME),
    PromptSet(name="summarise", title="summarise", fields=("prompt",),
              shipped=copy_prompts.SUMMARISE),
    PromptSet(name="questions", title="questions", fields=("prompt",),
              shipped=copy_prompts.QUESTIONS),
)}

_SOURCES = {
    "code": "held-out modules of the standard library",
    "docstrings": "docstrings of held-out modules of the standard library",
    "tests": "held-out tests of the standard library",
    "prose": "help topics of the language reference",
}
EMBEDDED = tuple(_SOURCES)


def load(name: str, path: str | os.PathLike[str] | None = None) -> list[str]:
  """Returns the prompts of a set in `PROMPT_SETS`, without blank prompts.

  Args:
    name: key in `PROMPT_SETS`.
    path: file in the published format of the set. None selects the prompts that
      ship with specjax, or the Hugging Face dataset (needs the package
      `datasets`).

  Raises:
    ValueError: the set or file does not exist, or its format is wrong.
  """
  if name not in PROMPT_SETS:
    raise ValueError(f"the prompt set is {name!r}; it must be one of "
                     f"{', '.join(PROMPT_SETS)}")
  spec = PROMPT_SETS[name]
  if path is None and spec.shipped:
    return list(spec.shipped)
  if path is None:
    source, records = spec.hf_id, _huggingface_records(spec)
  else:
    source, records = path, _file_records(spec, pathlib.Path(path))
  prompts = [_prompt(spec, source, where, record) for where, record in records]
  prompts = [p for p in prompts if p.strip()]
  if not prompts:
    raise ValueError(f"{source} contains no prompt; {_expected(spec)}")
  return prompts


def embedded(name: str, count: int, characters: int, seed: int = 0
             ) -> tuple[list[str], dict]:
  """Returns excerpts from the running Python and a description of their source.

  "code" contains excerpts of held-out modules, "docstrings" of their
  docstrings, and "tests" of held-out tests. "prose" contains excerpts of help
  topics. The training data of the bundled models contains these topics.

  Args:
    name: one of `EMBEDDED`.
    count: number of prompts. It is reduced if there is too little text.
    characters: length of each prompt.
    seed: seed for the choice of documents and places.

  Returns:
    The prompts, and a JSON-compatible dict. "prompts" describes the source, and
    "python" is the version of Python. "hash" is a hash of the documents.
    "held_out" is True if training excludes the documents. "documents" contains
    the name of each prompt's document.

  Raises:
    ValueError: the set does not exist, or its documents are too short.
  """
  if name not in EMBEDDED:
    raise ValueError(f"the embedded prompt set is {name!r}; it must be one of "
                     f"{', '.join(EMBEDDED)}")
  documents = _documents(name)
  try:
    found = prompts_lib.named_excerpts(documents, count, characters, seed)
  except ValueError as e:
    raise ValueError(f"{name!r} needs {_SOURCES[name]}, and this Python "
                     f"has too few: {e}") from None
  held_out = name != "prose" or corpora.Document(_TOPICS, "").held_out
  return [text for _, text in found], {
      "documents": [document for document, _ in found],
      "prompts": _SOURCES[name], "python": platform.python_version(),
      "hash": fingerprint(documents), "held_out": held_out}


def _expected(spec):
  return (f"{spec.title} is a {', '.join(spec.endings)} file with "
          f"{' or '.join(map(repr, spec.fields))}")


def _huggingface_records(spec):
  if spec.hf_id is None:
    raise ValueError(f"{spec.title} has no known Hugging Face dataset; give a "
                     f"file: {spec.published}")
  try:
    import datasets  # pylint: disable=g-import-not-at-top
  except ImportError:
    raise ValueError(f"{spec.title} needs a file, or the package 'datasets': "
                     "pip install 'specjax[datasets]'") from None
  # Rows are streamed, because a split may be a thousand times larger than the
  # prompts that a study reads.
  rows = datasets.load_dataset(spec.hf_id, spec.hf_config, split=spec.hf_split,
                               revision=spec.hf_revision, streaming=True)
  return ((f"row {i}", row) for i, row in enumerate(rows, 1))


def _file_records(spec, path):
  """Returns pairs: the place of a record for error messages, and the record."""
  if not path.is_file():
    raise ValueError(f"no file at {path}; {_expected(spec)}")
  if not path.name.endswith(spec.endings):
    raise ValueError(f"{path} ends in {path.suffix or 'nothing'!r}; "
                     f"{_expected(spec)}")
  try:
    if path.name.endswith(_JSON):
      return _json_records(path)
    text = read_text(path)
    if path.suffix == ".csv":
      return _csv_records(path, text)
    lines = enumerate(text.split("\n"), 1)
    return [(f"line {i}", {spec.fields[0]: line}) for i, line in lines]
  except ValueError as e:
    raise ValueError(f"{e}; {_expected(spec)}") from None


def _csv_records(path, text):
  """Returns the rows that are not blank, as pairs of `_file_records`.

  A field may be as long as the file.
  """
  found, limit = [], csv.field_size_limit()
  rows = csv.DictReader(io.StringIO(text), strict=True)
  try:
    # By default, `csv` limits the length of a field to 131072. The limit is
    # global to the process and must fit into a C long.
    csv.field_size_limit(max(limit, min(len(text), 2**31 - 1)))
    line = 1 + bool(rows.fieldnames) * rows.line_num
    for i, row in enumerate(rows, 1):
      # The key None contains the cells beyond the columns of the header.
      if any(map(str.strip, row.pop(None, ()))):
        raise ValueError(
            f"{path} row {i} (line {line}) has more cells than the header; put "
            "cells that contain a comma into quotation marks")
      if any((x or "").strip() for x in row.values()):
        found.append((f"row {i} (line {line})", row))
      line = rows.line_num + 1
  except csv.Error as e:
    raise ValueError(f"{path} line {rows.reader.line_num} is not CSV ({e})"
                     ) from None
  finally:
    csv.field_size_limit(limit)
  return found


def _json_records(path):
  text = read_text(path)
  if path.suffix == ".json" and text.lstrip().startswith("{"):
    with contextlib.suppress(ValueError):  # more than one object
      return [("line 1", parse_json(text, path))]
  if not text.lstrip().startswith("["):
    return [(f"line {i}", record) for i, record in corpora.json_lines(path)]
  found = []
  for i, (line, item) in enumerate(corpora.json_items(text, path), 1):
    if not isinstance(item, dict):
      raise ValueError(f"{path} line {line}, item {i} is a JSON "
                       f"{type(item).__name__}, not an object")
    found.append((f"line {line}, item {i}", item))
  return found


def _prompt(spec, source, where, record):
  place = f"{source} {where}"
  what = f"it has fields {', '.join(map(repr, record)) or 'none'}"
  for field in spec.fields:
    try:
      prompt = _follow(place, record, field)
    except KeyError:
      continue
    if isinstance(prompt, str):
      return corpora.text_of(place, field, prompt)
    what = f"{field!r} is {reprlib.repr(prompt)}"
  raise ValueError(f"{place} is not {spec.title}: {what}; expected text in "
                   f"{' or '.join(map(repr, spec.fields))}")


def _follow(place, value, field):
  """Returns the value at a dotted path.

  A list of turns on the path is replaced by the user's first turn. If no turn
  is the user's, returns "".

  Raises:
    KeyError: the path has no value.
  """
  is_turn = False
  for key in field.split("."):
    if not isinstance(value, dict):
      raise KeyError(key)
    value = value[key]
    if isinstance(value, list) and not is_turn:
      # ShareGPT files split a long conversation into several records. So the
      # first turn of a record may be the model's.
      value, is_turn = prompts_lib.users_turn(place, value), True
      if value is None:
        return ""
  if is_turn and isinstance(value, dict) and "." not in field:
    return prompts_lib.turn_text(place, field, value)
  return value


def _documents(name):
  if name == "prose":
    try:
      # pylint: disable-next=g-import-not-at-top
      from pydoc_data.topics import topics
    except ImportError:
      return []
    return [corpora.Document(f"{_TOPICS}:{topic}", text)
            for topic, text in sorted(topics.items())]
  documents = [d for d in _held_out_modules()
               if bool(_TEST.search(d.name)) == (name == "tests")]
  if name == "docstrings":
    documents = [_docstrings(d) for d in documents]
  return documents


@functools.cache
def _held_out_modules():
  """Returns the held-out modules, cached for studies with several sets."""
  return corpora.held_out_modules()


def _docstrings(document):
  """Returns a document with the docstrings of a module's code, dedented."""
  kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
  nodes = ast.walk(ast.parse(document.text))
  texts = [ast.get_docstring(n) for n in nodes if isinstance(n, kinds)]
  return corpora.Document(document.name, "\n\n".join(filter(None, texts)))
