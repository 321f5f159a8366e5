"""Turns of conversations in records of files and datasets.

A record contains a list of turns. A turn has "role" and "content", as in the
chat format of OpenAI, or "from" and "value", as in ShareGPT files. If it has
both pairs, "role" and "content" are used. If the content is not under the key
that belongs to the speaker's key, it is under the other one. A string is a turn
without a speaker.
"""

from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import pathlib
from typing import Any
from typing import NamedTuple

from specjax.data import corpora
from specjax.data import record_files

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


class _Turn(NamedTuple):
  """Turn of a conversation.

  Attributes:
    speaker: name of the speaker in lower case, or None.
    key: key of the content in the file, or "" if the turn is a string.
    content: content of the turn, or None.
    others: other entries, such as tool calls.
  """

  speaker: str | None
  key: str
  content: Any
  others: dict[str, Any]


def _turns(place: str, turns: Sequence[Any]) -> list[_Turn]:
  """Returns the turns of a conversation.

  Raises:
    ValueError: a turn has neither pair of keys, a speaker is not a string, or
      some turns name a speaker and others do not.
  """
  found = []
  for number, turn in enumerate(turns, 1):
    if isinstance(turn, str):
      found.append(_Turn(None, "", turn, {}))
      continue
    values = ({k: x for k, x in turn.items() if x is not None}
              if isinstance(turn, dict) else {})
    if values.keys().isdisjoint(_TURN):
      what = (f"the fields {', '.join(map(repr, turn)) or 'none'}"
              if isinstance(turn, dict) else f"a JSON {type(turn).__name__}")
      raise ValueError(f"{place}: turn {number} has {what}; it must have 'from'"
                       " and 'value', or 'role' and 'content'")
    name = values.get("role") or values.get("from")
    if name is not None and not isinstance(name, str):
      raise ValueError(f"{place}: turn {number} has the speaker {name!r}; give "
                       "a string, such as 'user'")
    is_sharegpt = values.get("from") and not values.get("role")
    keys = ("value", "content") if is_sharegpt else ("content", "value")
    key = next(filter(values.__contains__, keys), keys[0])
    # Templates use other keys (tool calls, reasoning) only in the format with
    # "role" and "content". Nulls stay among them, because the fingerprint of a
    # tokenised corpus contains them and `Tokenizer.chat` ignores them.
    others = {} if is_sharegpt else {
        k: x for k, x in turn.items() if k not in _TURN}
    found.append(_Turn(name.lower() if name else None, key, values.get(key),
                       others))
  if None in (speakers := [x.speaker for x in found]) and any(speakers):
    raise ValueError(f"{place}: turn {1 + speakers.index(None)} has no "
                     "speaker, but other turns have one; add its 'role'")
  return found


def _role(place: str, number: int, turn: _Turn) -> str:
  """Returns the role of a turn's speaker in chat templates."""
  if turn.speaker is None:
    raise ValueError(f"{place}: turn {number} has no speaker; add its 'role'")
  if turn.speaker not in ROLES:
    raise ValueError(f"{place}: turn {number} has the unknown speaker "
                     f"{turn.speaker!r}; use one of {', '.join(ROLES)}")
  return ROLES[turn.speaker]


def prompt_of(place: str, record: Any, fields: Sequence[str]) -> str:
  """Returns the prompt of a record: its text, or the user's first turn.

  If no turn names a speaker, the first turn is the user's. The other turns may
  have unknown speakers.

  Args:
    place: place of the record for error messages, such as "data.jsonl line 3".
    record: record of a file or a dataset.
    fields: fields that may contain the prompt, in order of preference.

  Raises:
    LeftOut: no field has a value, or no turn is the user's.
    ValueError: the fields are missing, the turns are invalid, or the prompt is
      not a text.
  """
  field, value = record_files.value_of(place, record, fields)
  if not isinstance(value, list):
    return record_files.text_of(place, field, value)
  turns = _turns(place, value)
  for turn in turns:
    if turn.speaker is None or ROLES.get(turn.speaker) == "user":
      return record_files.text_of(
          place, f"{field}.{turn.key}" if turn.key else field, turn.content)
  for number, turn in enumerate(turns, 1):
    _role(place, number, turn)
  # ShareGPT files split a long conversation into several records. So a record
  # may contain only turns of the model.
  raise record_files.LeftOut("without a user's turn")


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
  for number, turn in enumerate(_turns(place, turns), 1):
    role, content = _role(place, number, turn), turn.content
    if not (isinstance(content, list)
            or content is None and turn.others.get("tool_calls")):
      record_files.text_of(f"{place}: turn {number}", turn.key, content)
    found.append({"role": role, "content": content, **turn.others})
  return found


def field_of(source: str, field: str | None = None) -> str | None:
  """Returns the name of the field that contains turns, or None.

  The result depends only on the source's first record that is not empty.

  Args:
    source: source of `corpora.iter_documents`, or a `.json` file with an array
      of records or one record per line.
    field: name of the field. If it is None or "text" (the default of `--field`)
      and the record has no such field, the first existing field of
      `record_files.TURNS` is used.
  """
  record = next((record for _, _, record in records(source)
                 if not record_files.is_empty(record)), None)
  if not isinstance(record, dict):
    return None
  fields = (record_files.TURNS
            if field in (None, "text") and record.get(field) is None
            else record_files.alternatives(field))
  return next((x for x in fields if isinstance(record.get(x), list)), None)


def read(source: str, field: str) -> Iterator[Conversation]:
  """Yields the conversations of a source.

  `record_files.extract` reports the records whose field is null.

  Args:
    source: source of conversations (see `field_of`).
    field: field that contains the turns (see `record_files.alternatives`).

  Raises:
    ValueError: the field is not a list of turns, or `messages` rejects a turn.
  """
  fields = record_files.alternatives(field)

  def messages_of(place, record):
    name, turns = record_files.value_of(place, record, fields)
    if not isinstance(turns, list):
      raise ValueError(f"{place}: {name!r} is a JSON {type(turns).__name__}; "
                       "it must be a list of turns")
    return messages(place, turns)

  for name, place, found in record_files.extract(
      source, "conversation", records(source, field), messages_of):
    yield Conversation(name=name, place=place, messages=found)


def is_answer(message: dict[str, Any]) -> bool:
  """Returns True if an assistant's message has a content or a tool call."""
  content = message.get("content")
  return message["role"] == "assistant" and bool(
      content.strip() if isinstance(content, str)
      else content or message.get("tool_calls"))


def records(source: str, field: str | None = None
            ) -> Iterator[tuple[str, str, Any]]:
  """Returns the records of a source (see `corpora.records`).

  The records of a source of texts are empty, and those of a `.json` file with a
  single object, because it may be a text.
  """
  path = pathlib.Path(source)
  is_json = path.suffix == ".json" and path.is_file() and (
      record_files.form(path) != "object")
  if source in corpora.STDLIB or not (is_json or corpora.has_records(source)):
    return iter(())
  return corpora.records(source, field)
