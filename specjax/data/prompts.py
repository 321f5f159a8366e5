"""Prompts from documents and from files."""

from collections.abc import Sequence
import os
import pathlib
import random
import re
import sys
from typing import Any

from specjax.data import conversations
from specjax.data import corpora
from specjax.utils.files import read_text

_ENDINGS = ".txt, .md, .jsonl or .jsonl.gz"
_BLANK_LINES = re.compile(r"\n(?:[^\S\n]*\n)+")
_OUTER_LINES = re.compile(r"\A(?:[^\S\n]*\n)+|(?:\n[^\S\n]*)+\Z")


def excerpts(documents: Sequence[corpora.Document], count: int,
             characters: int, seed: int = 0) -> list[str]:
  """Returns excerpts of documents, such as held-out modules, as prompts.

  Args:
    documents: source documents.
    count: number of prompts. It is reduced if the documents have too little
      text for `count` prompts without overlap.
    characters: length of each prompt. Prompts begin at the start of a line.
    seed: seed for the choice of documents and places.

  Raises:
    ValueError: no document is long enough.
  """
  return [text for _, text in named_excerpts(documents, count, characters,
                                             seed)]


def named_excerpts(documents: Sequence[corpora.Document], count: int,
                   characters: int, seed: int = 0) -> list[tuple[str, str]]:
  """Returns `excerpts` as pairs `(name of the document, text)`."""
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
  lines is one prompt, and a note on stderr says so. A JSONL file has one object
  per line. The `field` of each object is a string or a list of turns (see
  `users_turn`).

  Args:
    path: path of a `.txt`, `.md`, `.jsonl` or `.jsonl.gz` file.
    field: field of the JSON objects that contains the prompt.

  Raises:
    ValueError: the file is missing, empty or malformed.
  """
  path = pathlib.Path(path)
  if not path.is_file():
    raise ValueError(f"the prompts file {path} does not exist; give a "
                     f"{_ENDINGS} file")
  if path.name.endswith((".jsonl", ".jsonl.gz")):
    prompts = [_of_record(path, number, record, field)
               for number, record in corpora.json_lines(path)]
  elif path.suffix in (".txt", ".md"):
    prompts = _paragraphs(path)
  else:
    raise ValueError(f"{path} ends in {path.suffix or 'nothing'!r}; give a "
                     f"{_ENDINGS} file")
  prompts = [p for p in prompts if p.strip()]
  if not prompts:
    raise ValueError(f"{path} contains no prompt; give at least one")
  return prompts


def _paragraphs(path: pathlib.Path) -> list[str]:
  """Returns the parts of a text file between blank lines."""
  parts = _BLANK_LINES.split(_OUTER_LINES.sub("", read_text(path)))
  if len(parts) == 1 and "\n" in parts[0]:
    print(f"{path} has no blank line between prompts, so its "
          f"{parts[0].count(chr(10)) + 1} lines are read as one prompt; if "
          "each line is a prompt, put blank lines between them",
          file=sys.stderr)
  return parts


def users_turn(place: str, turns: Sequence[Any]) -> Any:
  """Returns the user's first turn of a conversation.

  A turn is a string, or an object with "from" and "value" or with "role" and
  "content". The user's role is "human" or "user". If no turn names a speaker,
  the first turn is the user's.

  Args:
    place: place of the conversation for error messages, such as "data.jsonl
      line 3".
    turns: turns of the conversation.

  Returns:
    The user's first turn, a string or an object, or None if no turn is the
    user's.

  Raises:
    ValueError: a turn has neither pair of keys, some turns name a speaker and
      others do not, or the speakers are unknown.
  """
  speakers = [conversations.speaker(place, i, turn)
              for i, turn in enumerate(turns, 1)]
  if None in speakers and any(speakers):
    raise ValueError(f"{place}: turn {1 + speakers.index(None)} has no "
                     "speaker, but other turns have one; add its 'role'")
  for turn, speaker in zip(turns, speakers):
    if speaker is None or conversations.ROLES.get(speaker) == "user":
      return turn
  unknown = [x for x in speakers if x not in conversations.ROLES]
  if unknown:
    raise ValueError(f"{place}: no turn is the user's, and the speaker "
                     f"{unknown[0]!r} is unknown; name the user 'user' or "
                     "'human'")
  return None


def turn_text(place: str, field: str, turn: Any) -> str:
  """Returns the text of a turn that `users_turn` returned.

  Raises:
    ValueError: the turn has no text.
  """
  if isinstance(turn, dict):
    key = "value" if "value" in turn else "content"
    field, turn = f"{field}.{key}", turn.get(key)
  return corpora.text_of(place, field, turn)


def _of_record(path, number, record, field):
  place = f"{path} line {number}"
  value = corpora.field_of(place, record, field)
  if isinstance(value, list):
    value = users_turn(place, value)
    if value is None:
      return ""
  return turn_text(place, field, value)
