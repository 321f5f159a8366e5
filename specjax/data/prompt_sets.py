"""Prompt sets from published files or from the running Python.

The first eight sets are the tasks of "Block Verification Accelerates
Speculative Decoding" (https://arxiv.org/abs/2403.10444, Table 1), with the
paper's titles. Their prompts are the questions and documents, without an
instruction or a chat template. The sets "copy", "rename", "summarise" and
"questions" ship with specjax. "copy" is "rename" followed by "summarise".
"questions" uses the documents of "summarise".
"""

import ast
import dataclasses
import functools
import os
import pathlib
import platform
import re

from specjax.data import copy_prompts
from specjax.data import corpora
from specjax.data import prompts as prompts_lib
from specjax.data import record_files
from specjax.utils.fingerprints import fingerprint

_JSON = record_files.JSON
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
      preference (see `conversations.prompt_of`).
    endings: endings of the file's name (see `record_files.read`). A text file
      has one prompt per line.
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
              fields=("conversations", "messages", "turns"),
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
    source = pathlib.Path(path)
    record_files.check(source, spec.endings, _expected(spec))
    records = record_files.read(source, spec.fields[0])
  try:
    return prompts_lib.of_records(source, records, spec.fields)
  except ValueError as e:
    raise ValueError(f"{e}; {_expected(spec)}") from None


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
    found = prompts_lib.excerpts(documents, count, characters, seed)
  except ValueError as e:
    raise ValueError(f"{name!r} needs {_SOURCES[name]}, and this Python "
                     f"has too few: {e}") from None
  held_out = name != "prose" or corpora.Document(_TOPICS, "").held_out
  return [text for _, text in found], {
      "documents": [document for document, _ in found],
      "prompts": _SOURCES[name], "python": platform.python_version(),
      "hash": fingerprint(documents), "held_out": held_out}


def _expected(spec):
  return (f"{spec.title} is a {', '.join(spec.endings)} file with text in "
          f"{' or '.join(map(repr, spec.fields))}")


def _huggingface_records(spec):
  if spec.hf_id is None:
    raise ValueError(f"{spec.title} has no known Hugging Face dataset; give a "
                     f"file: {spec.published}")
  # Rows are streamed, because a split may be a thousand times larger than the
  # prompts that a study reads.
  rows = corpora.load_dataset(
      f"{spec.title} without a file", spec.hf_id, spec.hf_config,
      split=spec.hf_split, revision=spec.hf_revision, streaming=True)
  return (("", f"{spec.hf_id} row {i}", row) for i, row in enumerate(rows, 1))


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
  return corpora.stdlib_documents(only_held_out=True)


def _docstrings(document):
  """Returns a document with the docstrings of a module's code, dedented."""
  kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
  nodes = ast.walk(ast.parse(document.text))
  texts = [ast.get_docstring(n) for n in nodes if isinstance(n, kinds)]
  return corpora.Document(document.name, "\n\n".join(filter(None, texts)))
