"""Turns of conversations in records of files and datasets.

A record contains a list of turns. A turn has "role" and "content", as in the
chat format of OpenAI, or "from" and "value", as in ShareGPT files. If it has
both pairs, "role" and "content" are used. If the content is not under the key
that belongs to the speaker's key, it is under the other one. A string is a turn
without a speaker.

A record may also have a question and its answer in two columns (`PAIRS`), as in
the files of Alpaca and of TRL. `Conversation` describes the other keys that are
used.
"""

from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
from typing import Any

from specjax.data import corpora
from specjax.data import record_files
from specjax.utils.files import parse_json

# Columns of a question, with the columns of its answer.
PAIRS = {"instruction": ("output",), "prompt": ("completion", "response"),
         "query": ("response",), "question": ("answer", "response")}
# Keys of a turn that decide whether it is trained: the keys of OpenAI, ms-swift
# and axolotl.
_WEIGHTS = ("weight", "loss", "train")
# Keys that change the training in other programs and that are not used here.
_UNUSED = {"train_detail", "mask", "rejected", "rejected_response", "chosen",
           "kto_tag", "images", "videos", "audios", "labels", "input_ids"}
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
    name: first message of the user. Its hash decides whether the record is held
      out, so conversations that begin with it are in one part of the corpus.
    place: place of the record for error messages, such as "data.jsonl line 3".
    messages: messages with "role", "content" and other keys that chat templates
      use. "weight" is 0 if an answer is not trained, because its turn has the
      value 0 or false under "weight" (OpenAI), "loss" (ms-swift) or "train"
      (axolotl). The "system" of a record is the first message, if the turns
      have no system message.
    variables: variables of the chat template: "tools", and the entries of
      "chat_template_kwargs", such as "enable_thinking".
  """

  name: str
  place: str
  messages: list[dict[str, Any]]
  variables: dict[str, Any]


def _turns(place: str, turns: Sequence[Any]
           ) -> list[tuple[str | None, str, Any, dict[str, Any]]]:
  """Returns the turns of a conversation.

  Returns for every turn: the name of the speaker in lower case, or None; the
  key of the content, or "" if the turn is a string; the content, or None; and
  other entries, such as tool calls.

  Raises:
    ValueError: a turn has neither pair of keys, a speaker is not a string, some
      turns name a speaker and others do not, or a key that decides whether a
      turn is trained is neither 0 nor 1.
  """
  found = []
  for number, turn in enumerate(turns, 1):
    if isinstance(turn, str):
      found.append((None, "", turn, {}))
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
        k: x for k, x in turn.items() if k not in (*_TURN, *_WEIGHTS)}
    weights = {k: values[k] for k in _WEIGHTS if k in values}
    for k, x in weights.items():
      if x not in (0, 1):
        raise ValueError(f"{place}: turn {number} has {x!r} for {k!r}; a turn "
                         "is trained (1) or not (0)")
    if not all(weights.values()):
      others["weight"] = 0
    found.append((name.lower() if name else None, key, values.get(key), others))
  if None in (speakers := [x[0] for x in found]) and any(speakers):
    raise ValueError(f"{place}: turn {1 + speakers.index(None)} has no "
                     "speaker, but other turns have one; add its 'role'")
  return found


def _role(place: str, number: int, speaker: str | None) -> str:
  """Returns the role of a turn's speaker in chat templates."""
  if speaker is None:
    raise ValueError(f"{place}: turn {number} has no speaker; add its 'role'")
  if speaker not in ROLES:
    raise ValueError(f"{place}: turn {number} has the unknown speaker "
                     f"{speaker!r}; use one of {', '.join(ROLES)}")
  return ROLES[speaker]


def prompt_of(place: str, record: Any, fields: Sequence[str]
              ) -> tuple[list[Any], str]:
  """Returns the prompt of a record: its text, or the user's first turn.

  See `beginning_of` for arguments and errors.

  Returns:
    The system turns before the prompt, and the prompt.
  """
  field, value = record_files.value_of(place, record, fields)
  system = []
  if isinstance(value, list):
    turns = _turns(place, value)
    for (speaker, key, content, _), raw in zip(turns, value):
      role = "user" if speaker is None else ROLES.get(speaker)
      if role == "user":
        field, value = f"{field}.{key}" if key else field, content
        break
      if role == "system":
        system.append(raw)
    else:
      for number, (speaker, *_) in enumerate(turns, 1):
        _role(place, number, speaker)
      # ShareGPT files split a long conversation into several records. So a
      # record may contain only turns of the model.
      raise record_files.LeftOut("without a user's turn")
  text = record_files.text_of(place, field, value)
  if not text.strip():
    raise record_files.LeftOut("blank")
  return system, text


def beginning_of(place: str, record: Any, fields: Sequence[str]
                 ) -> Conversation:
  """Returns the system message and the prompt of a record.

  If no turn names a speaker, the first turn is the user's. The other turns may
  have unknown speakers.

  Args:
    place: place of the record for error messages, such as "data.jsonl line 3".
    record: record of a file or a dataset.
    fields: fields that may contain the prompt, in order of preference.

  Raises:
    LeftOut: no field has a value, no turn is the user's, or the prompt is
      blank.
    ValueError: the fields are missing, the turns are invalid, or the prompt is
      not a text.
  """
  system, text = prompt_of(place, record, fields)
  return _conversation(place, record, [
      *messages(place, system), {"role": "user", "content": text}])


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
  for number, (speaker, key, content, others) in enumerate(
      _turns(place, turns), 1):
    role = _role(place, number, speaker)
    if not (isinstance(content, list)
            or content is None and others.get("tool_calls")):
      record_files.text_of(f"{place}: turn {number}", key, content)
    found.append({"role": role, "content": content, **others})
  return found


def _answer_field(record: dict[str, Any], question: str) -> str | None:
  """Returns the column with the answer to a question of `PAIRS`, or None."""
  return next((x for x in PAIRS.get(question, ())
               if record.get(question) and record.get(x) is not None), None)


def _pair(place: str, record: dict[str, Any], question: str
          ) -> list[dict[str, Any]]:
  """Returns the messages of a record with a question and its answer."""
  found = []
  for old in record.get("history") or ():  # pairs of earlier texts
    found += [{"role": role, "content": record_files.text_of(
        place, "history", text)} for role, text in zip(
            ("user", "assistant"), old, strict=True)]
  for field, role in ((question, "user"),
                      (_answer_field(record, question), "assistant")):
    value = record[field]
    if isinstance(value, list):  # messages before and after, in TRL's format
      found += messages(place, value)
      continue
    text = record_files.text_of(place, field, value)
    if role == "user" and isinstance(record.get("input"), str):
      text = "\n".join(filter(None, (text, record["input"])))
    found.append({"role": role, "content": text})
  return found


def field_of(source: str, field: str | None = None) -> str | None:
  """Returns the field that contains turns or a question, or None.

  The result depends only on the source's first record that is not empty.

  Args:
    source: source of `corpora.iter_documents`.
    field: name of the field. If it is None or "text" (the default of `--field`)
      and the record has no such field, the first existing one of
      `record_files.TURNS` and `PAIRS` is used. Conversations have preference
      over a text in a record that has both if `field` is None.
  """
  record = next((record for _, _, record in records(source)
                 if not record_files.is_empty(record)), None)
  if not isinstance(record, dict):
    return None
  is_free = field is None or field == "text" and record.get(field) is None
  fields = (record_files.TURNS if is_free
            else record_files.alternatives(field))
  found = next((x for x in fields if isinstance(record.get(x), list)), None)
  return found or next((x for x in (PAIRS if is_free else (field,))
                        if _answer_field(record, x)), None)


def read(source: str, field: str) -> Iterator[Conversation]:
  """Yields the conversations of a source.

  Two lines on stderr report records whose fields are null, and keys that other
  programs use and specjax does not.

  Args:
    source: source of conversations (see `field_of`).
    field: field that contains the turns, or a question of `PAIRS`. In a record
      that has no value there, the other fields are used.

  Raises:
    ValueError: the field is not a list of turns, or `messages` rejects a turn.
  """
  unused = Counter()
  fields = record_files.TURNS if field in PAIRS else (
      record_files.alternatives(field))

  def convert(place, record):
    keys = record if isinstance(record, dict) else {}
    question = next((x for x in (field, *PAIRS) if _answer_field(keys, x)),
                    None)
    has_turns = any(isinstance(keys.get(x), list) and keys[x] for x in fields)
    if question and (field in PAIRS or not has_turns):
      found = _pair(place, record, question)
    else:
      name, turns = record_files.value_of(place, record, fields)
      if not isinstance(turns, list):
        raise ValueError(f"{place}: {name!r} is a JSON {type(turns).__name__}; "
                         "it must be a list of turns")
      found = messages(place, turns)
    unused.update(_UNUSED.intersection(
        key for part in (record, *found) for key, x in part.items() if x))
    return _conversation(place, record, found)

  for *_, chat in record_files.extract(
      source, "conversation", records(source), convert):
    yield chat
  if unused:
    record_files.print_once(f"{source}: not used: " + ", ".join(
        f"{key!r} of {count:,} records" for key, count in unused.items()))


def _conversation(place: str, record: dict[str, Any],
                  found: list[dict[str, Any]]) -> Conversation:
  """Returns messages with the "system" and the variables of their record.

  Raises:
    ValueError: the value of one of these keys has another type.
  """
  system = record.get("system")
  if system and not any(m["role"] == "system" for m in found):
    found = [{"role": "system", "content": record_files.text_of(
        place, "system", system)}, *found]
  variables = {}
  for key, kind in (("tools", list), ("chat_template_kwargs", dict)):
    value = record.get(key)
    if isinstance(value, str) and value:  # some files contain JSON as a string
      value = parse_json(value, f"{place}: {key!r}")
    if value and not isinstance(value, kind):
      raise ValueError(f"{place}: {key!r} is a JSON {type(value).__name__}; it "
                       f"must be a {kind.__name__}")
    if value:
      variables |= {"tools": value} if kind is list else value
  name = next((m["content"] for m in found if m["role"] == "user"), place)
  return Conversation(name=name if isinstance(name, str) else repr(name),
                      place=place, messages=found, variables=variables)


def is_answer(message: dict[str, Any]) -> bool:
  """Returns True if an assistant's message is trained and not empty."""
  content = message.get("content")
  return message["role"] == "assistant" and message.get("weight") != 0 and bool(
      content.strip() if isinstance(content, str)
      else content or message.get("tool_calls"))


def last_answer_only(chat: Conversation) -> Conversation:
  """Returns a conversation of which only the last answer is trained."""
  answers = [i for i, m in enumerate(chat.messages)
             if m["role"] == "assistant"]
  return dataclasses.replace(chat, messages=[
      {**m, "weight": 0} if i in answers[:-1] else m
      for i, m in enumerate(chat.messages)])


def records(source: str) -> Iterator[tuple[str, str, Any]]:
  """Returns the records of a source, or nothing for a source of texts."""
  if source in corpora.STDLIB or not corpora.has_records(source):
    return iter(())
  return corpora.records(source)
