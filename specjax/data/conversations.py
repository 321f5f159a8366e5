"""Reader of conversations from files of records.

A record is a JSON object with a list of turns. A turn has "role" and "content",
as in the chat format of OpenAI, or "from" and "value", as in ShareGPT files.
"""

from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import itertools
import json
import pathlib
from typing import Any

from specjax.data import corpora
from specjax.data import text_files
from specjax.utils.files import read_text

FIELDS = ("messages", "conversations")  # in order of preference
_PIECE = 2**20  # characters of a JSON array read at a time
_TURN = ("from", "value", "role", "content")  # keys of a turn
# Role in chat templates, by the name of the speaker in a file.
ROLES = {
    "human": "user", "user": "user", "system": "system", "developer": "system",
    **dict.fromkeys(("assistant", "model", "gpt", "chatgpt", "bing", "bard",
                     "function_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "function_response", "observation"),
                    "tool")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversation:
  """Messages of one record.

  Attributes:
    name: name of the record. The hash of the name decides whether the record is
      held out.
    place: place of the record for error messages, such as "data.jsonl line 3".
    messages: messages with "role", "content" and other keys that chat templates
      use.
  """

  name: str
  place: str
  messages: list[dict[str, Any]]


def speaker(place: str, number: int, turn: Any) -> str | None:
  """Returns the speaker of a turn in lower case, or None if it names none.

  Args:
    place: place of the conversation, for error messages.
    number: number of the turn. The first turn is 1.
    turn: string, or object with "from" and "value" or with "role" and
      "content".

  Raises:
    ValueError: the turn has neither pair of keys, or its speaker is not a
      string.
  """
  if isinstance(turn, str):
    return None
  if not isinstance(turn, dict) or turn.keys().isdisjoint(_TURN):
    what = (f"the fields {', '.join(map(repr, turn)) or 'none'}"
            if isinstance(turn, dict) else f"a JSON {type(turn).__name__}")
    raise ValueError(f"{place}: turn {number} has {what}; it must have 'from' "
                     "and 'value', or 'role' and 'content'")
  name = turn.get("from") or turn.get("role")
  if name is not None and not isinstance(name, str):
    raise ValueError(f"{place}: turn {number} has the speaker {name!r}; give a "
                     "string, such as 'user'")
  return name.lower() if name else None


def messages(place: str, turns: Sequence[Any]) -> list[dict[str, Any]]:
  """Converts the turns of a conversation to messages for a chat template.

  Args:
    place: place of the conversation, for error messages.
    turns: turns of the conversation. `ROLES` converts the names of speakers to
      roles.

  Raises:
    ValueError: a turn has no speaker, an unknown speaker, or no content.
  """
  found = []
  for number, turn in enumerate(turns, 1):
    role = _role(place, number, turn)
    key = "value" if "value" in turn else "content"
    # Templates use other keys (tool calls, reasoning) only in the format with
    # "role" and "content".
    others = {k: v for k, v in turn.items()
              if k not in _TURN and "from" not in turn}
    content = turn.get(key)
    if isinstance(content, list) or content is None and turn.get("tool_calls"):
      content = {"content": content}
    else:
      content = {"content": corpora.text_of(
          f"{place}: turn {number}", key, content)}
    found.append({"role": role, **content, **others})
  return found


def _role(place: str, number: int, turn: Any) -> str:
  """Returns the role of a turn's speaker in chat templates.

  `speaker` describes the arguments.
  """
  name = speaker(place, number, turn)
  if name is None:
    raise ValueError(f"{place}: turn {number} has no speaker; add its 'role'")
  if name not in ROLES:
    raise ValueError(f"{place}: turn {number} has the unknown speaker "
                     f"{name!r}; use one of {', '.join(ROLES)}")
  return ROLES[name]


def field_of(source: str, field: str | None = None) -> str | None:
  """Returns the name of the field that contains turns, or None.

  The result depends only on the first record of the source.

  Args:
    source: source of `corpora.iter_documents`, or a `.json` file with an array
      of records.
    field: name of the field. If it is None or "text" (the default of `--field`)
      and the record has no such field, the first existing field of `FIELDS` is
      used.
  """
  record = next((record for _, _, record in _records(source)), None)
  if not isinstance(record, dict):
    return None
  if field in record or field not in (None, "text"):
    return field if isinstance(record.get(field), list) else None
  return next((x for x in FIELDS if isinstance(record.get(x), list)), None)


def read(source: str, field: str) -> Iterator[Conversation]:
  """Yields the conversations of a source.

  Args:
    source: source of conversations (see `field_of`).
    field: field that contains the turns.

  Raises:
    ValueError: the field is not a list of turns, or `messages` rejects a turn.
  """
  for name, place, record in _records(source, field):
    if not isinstance(record, dict) or field not in record:
      raise ValueError(f"{place} has no field {field!r}, but earlier records "
                       "have it; add it, or remove the record")
    if not isinstance(record[field], list):
      raise ValueError(f"{place}: {field!r} is a JSON "
                       f"{type(record[field]).__name__}; it must be a list of "
                       "turns")
    yield Conversation(name=name, place=place,
                       messages=messages(place, record[field]))


def is_answer(message: dict[str, Any]) -> bool:
  """Returns True if an assistant's message has a content or a tool call."""
  content = message.get("content")
  return message["role"] == "assistant" and bool(
      content.strip() if isinstance(content, str)
      else content or message.get("tool_calls"))


def _records(source, field=None):
  """Yields `(name, place, record)`, or nothing if the source has no records."""
  if source in corpora.STDLIB:
    return
  if corpora.has_records(source):
    yield from corpora.records(source, field)
    return
  path = corpora.existing(source)
  if path.suffix == ".json" and path.is_file():
    for number, record in enumerate(_items(path), 1):
      yield f"{path.name}:{number}", f"{path} item {number}", record


def _items(path: pathlib.Path) -> Iterator[Any]:
  """Yields the items of a JSON array, or nothing if the file is not an array.

  The file is read in pieces. `corpora.json_items` yields the same items but
  needs the complete text.
  """
  pieces = text_files.pieces(path, _PIECE)
  text = next(pieces, "")
  if not text.lstrip().startswith("["):
    return
  decode = json.JSONDecoder().raw_decode
  at = text.index("[") + 1
  while True:
    at = corpora.SPACE.match(text, at).end()
    try:
      item, end = decode(text, at)
      end = corpora.SPACE.match(text, end).end()
    except (RecursionError, ValueError):
      item, end = None, len(text)
    if end == len(text):  # the item may continue in the file's next piece
      more = "".join(itertools.islice(pieces, 1 + len(text) // _PIECE))
      if not more:
        break
      text, at = text[at:] + more, 0
      continue
    yield item
    if text[end] != ",":
      break
    at = end + 1
  if text[end:].strip() != "]" or next(pieces, ""):
    for _ in corpora.json_items(read_text(path), path):
      pass  # reports the line of the error
