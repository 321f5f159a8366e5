"""Prompts to decode from."""

from collections.abc import Sequence
import os
import pathlib
import random

from specjax.data import corpora

_ENDINGS = ".txt, .md, .jsonl or .jsonl.gz"


def excerpts(documents: Sequence[corpora.Document], count: int,
             characters: int, seed: int = 0) -> list[str]:
  """Excerpts of documents, such as held-out modules of the running Python.

  Args:
    documents: a list of `corpora.Document`.
    count: how many prompts.
    characters: length of each; an excerpt begins at the start of a line.
    seed: of the choice of documents and places.

  Raises:
    ValueError: no document is long enough.
  """
  documents = [d for d in documents if len(d.text) > 2 * characters]
  if not documents:
    raise ValueError(f"no document is longer than {2 * characters} "
                     "characters; ask for shorter prompts, or give a file of "
                     "your own")
  rng = random.Random(seed)
  prompts = []
  while len(prompts) < count:
    # A new round of all documents, so that long ones do not crowd out others.
    for document in rng.sample(documents, len(documents)):
      place = rng.randrange(len(document.text) - characters)
      start = 1 + document.text.rfind("\n", 0, place)
      prompts.append(document.text[start:start + characters])
  return prompts[:count]


def read_prompts(path: str | os.PathLike[str], field: str = "prompt"
                 ) -> list[str]:
  """Prompts of a user's own file.

  A text file holds prompts separated by blank lines; a JSONL file one JSON
  object a line, whose `field` is a text or a list of turns, the first of which
  is taken.

  Args:
    path: of a `.txt`, `.md`, `.jsonl` or `.jsonl.gz` file.
    field: of the JSON objects.

  Raises:
    ValueError: the file is missing, empty, or not what its ending says.
  """
  path = pathlib.Path(path)
  if not path.is_file():
    raise ValueError(f"no prompts file at {path}; give a {_ENDINGS} file")
  if path.name.endswith((".jsonl", ".jsonl.gz")):
    prompts = [_first_turn(path, number, record, field)
               for number, record in corpora.json_lines(path)]
  elif path.suffix in (".txt", ".md"):
    prompts = corpora.read_text(path).split("\n\n")
  else:
    raise ValueError(f"{path} ends in {path.suffix or 'nothing'!r}; a prompts "
                     f"file is a {_ENDINGS} file")
  prompts = [p for p in prompts if p.strip()]
  if not prompts:
    raise ValueError(f"{path} holds no prompt; at least one is needed")
  return prompts


def _first_turn(path, number, record, field):
  value = corpora.field_of(path, number, record, field)
  if isinstance(value, list) and value:
    value = value[0]
  if not isinstance(value, str):
    raise ValueError(f"{path} line {number}: {field!r} is no text but a "
                     f"{type(value).__name__}; name the field that holds the "
                     "prompt")
  return value
