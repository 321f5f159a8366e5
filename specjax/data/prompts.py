"""Prompts from documents and from files."""

from collections.abc import Iterable
from collections.abc import Sequence
import functools
import os
import pathlib
import random
from typing import Any

from specjax.data import conversations
from specjax.data import corpora
from specjax.data import record_files


def excerpts(documents: Sequence[corpora.Document], count: int,
             characters: int, seed: int = 0) -> list[tuple[str, str]]:
  """Returns excerpts of documents, such as held-out modules, as prompts.

  Returns pairs `(name of the document, text)`.

  Args:
    documents: source documents.
    count: number of prompts. It is reduced if the documents have too little
      text for `count` prompts without overlap.
    characters: length of each prompt. Prompts begin at the start of a line.
    seed: seed for the choice of documents and places.

  Raises:
    ValueError: no document is long enough.
  """
  documents = [d for d in documents if len(d.text) > 2 * characters]
  if not documents:
    raise ValueError(f"no document is longer than {2 * characters} "
                     "characters; reduce the length of the prompts, or give a "
                     "prompts file")
  count = min(count, sum(len(d.text) // characters for d in documents))
  rng = random.Random(seed)
  prompts = []
  while len(prompts) < count:
    # Every pass takes one excerpt from each document, so that long documents do
    # not dominate.
    for document in rng.sample(documents, len(documents)):
      place = rng.randrange(len(document.text) - characters)
      start = 1 + document.text.rfind("\n", 0, place)
      prompts.append(
          (document.name, document.text[start:start + characters]))
  return prompts[:count]


def read_prompts(path: str | os.PathLike[str], field: str = "prompt"
                 ) -> list[str]:
  """Returns the prompts of a file.

  Blank lines separate the prompts in a text file. A text file without blank
  lines is one prompt, and a note on stderr says so. The `field` of a record of
  another file is a string or a list of turns (see `conversations.prompt_of`). A
  line on stderr reports the records without a prompt.

  Args:
    path: path of a text file, a JSON file or a CSV file (see `record_files`).
    field: field of the records that contains the prompt.

  Raises:
    ValueError: the file is missing, empty or malformed.
  """
  path = pathlib.Path(path)
  record_files.check(path, record_files.ENDINGS, "give a file that ends in "
                     f"one of {', '.join(record_files.ENDINGS)}")
  return of_records(path, record_files.read(path, field, paragraphs=True),
                    (field,))


def of_records(source: str | os.PathLike[str],
               records: Iterable[tuple[str, str, Any]],
               fields: Sequence[str]) -> list[str]:
  """Returns the prompts of records.

  Args:
    source: file or dataset that contains the records.
    records: triples `(name, place, record)` (see `record_files.extract`).
    fields: fields that may contain the prompt, in order of preference.

  Raises:
    ValueError: a record is invalid, or no record has a prompt.
  """
  prompts = [text for _, _, (_, text) in record_files.extract(
      source, "prompt", records,
      functools.partial(conversations.prompt_of, fields=fields))]
  if not prompts:
    raise ValueError(f"{source} contains no prompt; give at least one")
  return prompts
