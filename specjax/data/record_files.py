"""Reader of records for prompts, prompt sets, conversations and documents.

A record is a JSON object, a row of a CSV file, or a part of a text file. A JSON
file contains an array of records, one record per line, or one object, which is
a record or has an array of records under "data". Its content decides between
these forms, not its name. Large arrays and files with one record per line are
read in pieces. A CSV file has a header.

Records of merged data sets have the fields of all sets, and most of them are
null or empty. So another field is read instead of a null, and a record whose
field is null is left out. A record without the field is refused, because the
name of the field may be wrong.
"""

from collections import Counter
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import csv
import functools
import io
import itertools
import json
import os
import pathlib
import re
import reprlib
import sys
from typing import Any
from typing import TypeVar

from specjax.data import text_files
from specjax.data import token_bytes
from specjax.utils.files import parse_json
from specjax.utils.files import read_text

JSON = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".ndjson", ".ndjson.gz")
ENDINGS = (".txt", ".md", *JSON, ".csv")
TURNS = ("messages", "conversations")  # fields of turns, by preference

_PIECE = 2**20  # characters of a JSON array read at a time
_SPACE = re.compile(r"[ \t\n\r]*")  # whitespace between the values of JSON
_BLANK_LINES = re.compile(r"\n(?:[^\S\n]*\n)+")
_OUTER_LINES = re.compile(r"\A(?:[^\S\n]*\n)+|(?:\n[^\S\n]*)+\Z")
_T = TypeVar("_T")


class LeftOut(Exception):
  """A record has no value. The message is the reason, such as "blank"."""


def extract(source: str | os.PathLike[str], noun: str,
            records: Iterable[tuple[str, str, Any]],
            convert: Callable[[str, Any], _T]
            ) -> Iterator[tuple[str, str, _T]]:
  """Yields `(name, place, value)` of every record that has a value.

  After the last record, a line on stderr reports the number of records without
  a value and the reasons. A program may read a large source several times, so
  equal lines are printed only once.

  Args:
    source: source of the records, for the report.
    noun: noun for a value in the report, such as "prompt".
    records: triples `(name, place, record)`. The place identifies the record in
      error messages, such as "data.jsonl line 3". The record may also be a
      `LeftOut`.
    convert: function that returns the value of `(place, record)` or raises
      `LeftOut`. Records without any entry and blank values are also left out.
  """
  count, first, reasons = 0, "", Counter()
  for name, place, record in records:
    try:
      if isinstance(record, LeftOut):
        raise record
      if is_empty(record):
        raise LeftOut("empty")
      value = convert(place, record)
      if isinstance(value, str) and not value.strip():
        raise LeftOut("blank")
    except LeftOut as e:
      first = first or place.removeprefix(f"{source} ")
      reasons[str(e)] += 1
    else:
      count += 1
      yield name, place, value
  if reasons:
    left_out = ", ".join(f"{n:,} {reason}" for reason, n in reasons.items())
    print_once(f"{source}: {count:,} {noun}{'s' * (count != 1)}; left out: "
               f"{left_out} (first: {first})")


@functools.cache
def print_once(line: str) -> None:
  """Prints a line on stderr unless it was printed before."""
  print(line, file=sys.stderr)


def is_empty(record: Any) -> bool:
  """Returns True if a record is null or contains nothing but nulls."""
  return record is None or isinstance(record, LeftOut) or (
      isinstance(record, dict) and all(
          value is None for value in record.values()))


def value_of(place: str, record: Any, fields: Sequence[str]
             ) -> tuple[str, Any]:
  """Returns the field of a record that contains its text or turns.

  Args:
    place: place of the record for error messages.
    record: record of a file or a dataset.
    fields: fields that may contain the text, in order of preference. A dot
      selects a key of an object.

  Returns:
    The first field with a text or a list of turns, and its value. If there is
    none, the first field with another value, such as an empty list.

  Raises:
    LeftOut: the values of all existing fields are null.
    ValueError: the record is not an object, or has none of the fields.
  """
  if not isinstance(record, dict):
    raise ValueError(f"{place} is a JSON {type(record).__name__}; it must be a "
                     "JSON object")
  values = {}
  for field in fields:
    value = record
    with contextlib.suppress(KeyError):
      for key in [field] if field in record else field.split("."):
        if value is not None:
          value = (value if isinstance(value, dict) else {})[key]
      values[field] = value
  if not values:
    raise ValueError(f"{place} has no field {' or '.join(map(repr, fields))}; "
                     f"it has {', '.join(map(repr, record)) or 'none'}: add "
                     "it, or name the field that contains the text")
  values = {field: x for field, x in values.items() if x is not None}
  if not values:
    raise LeftOut("null")
  is_prompt = lambda x: isinstance(x, (str, list)) and x != []
  return max(values.items(), key=lambda item: is_prompt(item[1]))


def alternatives(field: str) -> tuple[str, ...]:
  """Returns the field and, if it is one of `TURNS`, the others of them.

  Records of merged data sets contain their turns in different fields.
  """
  return tuple(dict.fromkeys((field, *TURNS))) if field in TURNS else (field,)


def text_of(place: str, field: str, value: Any) -> str:
  """Returns the text in a field of a user's file.

  Args:
    place: place of the record for error messages, such as "data.jsonl line 3".
    field: name of the field.
    value: value of the field.

  Raises:
    ValueError: the value is not a string or not valid UTF-8.
  """
  if not isinstance(value, str):
    raise ValueError(f"{place}: {field!r} is {reprlib.repr(value)}; it must be "
                     "a string: name the field that contains the text")
  try:
    token_bytes.check_text(value)
  except ValueError as e:
    raise ValueError(f"{place}: {field!r}: {e}") from None
  return value


def check(path: pathlib.Path, endings: tuple[str, ...], fix: str) -> None:
  """Raises `ValueError` unless a file exists and has one of the endings.

  Args:
    path: path of the file.
    endings: endings of the file's name.
    fix: advice at the end of the error message.
  """
  if not path.is_file():
    raise ValueError(f"no file at {path}; {fix}")
  if not path.name.lower().endswith(endings):
    raise ValueError(f"{path} ends in {path.suffix or 'nothing'!r}; {fix}")


def read(path: str | os.PathLike[str], text_field: str = "",
         paragraphs: bool = False) -> Iterator[tuple[str, str, Any]]:
  """Yields `(name, place, record)` of a file.

  The name is "FILE:NUMBER". The number is the line of a record in a file with
  one record per line. In other files, it is the number of the record.

  Args:
    path: path of a JSON file (see `JSON`), a `.csv` file or a text file.
    text_field: field of the records of a text file that contains the text.
    paragraphs: if True, blank lines separate the records of a text file. A text
      file without blank lines is one record, and a note on stderr says so. If
      False, every line is a record. Blank lines are not records.

  Raises:
    ValueError: the file is not text, or its format is wrong.
  """
  path = pathlib.Path(path)
  reader = _READERS.get(form(path))
  if reader:
    found = reader(path)
  elif paragraphs:
    found = ((i, f"prompt {i}", {text_field: part})
             for i, part in enumerate(_paragraphs(path), 1))
  else:
    found = ((i, f"line {i}", {text_field: line}) for i, line in _lines(path))
  for number, where, record in found:
    yield f"{path.name}:{number}", f"{path} {where}", record


def form(path: pathlib.Path) -> str:
  """Returns the form of a file: "array", "lines", "object", "csv" or "text".

  A file without an ending of `JSON` or ".csv" is text unless it begins with a
  JSON object or an array of objects.
  """
  name = path.name.lower()
  if name.endswith(".csv"):
    return "csv"
  is_json, is_one = name.endswith(JSON), name.endswith((".json", ".json.gz"))
  start = next(text_files.pieces(path, _PIECE), "").lstrip()
  if start.startswith("["):
    is_array = is_json or _object_in(start[1:].lstrip()) is not None
    return "array" if is_array else "text"
  rest = _object_in(start)
  if rest is None and not is_json:
    return "text"
  has_lines = is_json and not is_one or rest is not None and rest.strip()
  return "lines" if has_lines else "object"


def _object_in(text):
  """Returns the text after a JSON object with entries, or None without one."""
  try:
    found, end = json.JSONDecoder().raw_decode(text)
  except (RecursionError, ValueError):
    return None
  return text[end:] if isinstance(found, dict) and found else None


def _lines(path):
  """Yields `(line number, line)` of the lines that are not blank."""
  return ((i, line) for i, line in enumerate(text_files.lines(path), 1)
          if line.strip())


def _json_lines(path):
  for number, line in _lines(path):
    try:
      record = parse_json(line, path, number)
    except ValueError as e:
      raise ValueError(f"{e}; every line must be a JSON object") from None
    yield number, f"line {number}", record


def _object(path):
  text = read_text(path)
  if not text.strip():
    return
  found = parse_json(text, path)
  items = found.get("data") if isinstance(found, dict) else None
  if isinstance(items, list):
    for i, item in enumerate(items, 1):
      yield i, f"'data' item {i}", item
  else:
    yield 1, "line 1", found


def _items(path):
  """Yields the items of a JSON array, which is read in pieces."""
  decode = json.JSONDecoder().raw_decode
  pieces = text_files.pieces(path, _PIECE)
  text = next(pieces)
  at = text.index("[")  # the "[" or "," before the next item
  number, line = 1, 1 + text.count("\n", 0, at)
  while True:
    start = _SPACE.match(text, at + 1).end()
    place = line + text.count("\n", at, start)
    try:
      item, end = decode(text, start)
      end = _SPACE.match(text, end).end()
    except json.JSONDecodeError:
      item, end = None, len(text)
    except (RecursionError, ValueError):
      parse_json(text[start:], path, place)
      raise
    if end == len(text):  # the item may continue in the file's next piece
      more = "".join(itertools.islice(pieces, 1 + (end - at) // _PIECE))
      if more:
        text, at = text[at:] + more, 0
        continue
    if text[end:end + 1] not in (",", "]"):
      break
    yield number, f"line {place}, item {number}", item
    if text[end] == "]":
      break
    number, line, at = number + 1, line + text.count("\n", at, end), end
  # Accepts the end of the array or an empty array, and raises otherwise.
  parse_json("[0" * (text[at] == ",") + text[at:] + "".join(pieces), path, line)


def _rows(path):
  """Returns the rows of a CSV file.

  A row contains only the cells that exist, and nothing if they are all blank. A
  field may be as long as the file.
  """
  text = read_text(path)
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
      cells = {k: x for k, x in row.items() if x is not None}
      found.append((i, f"row {i} (line {line})",
                    cells if any(map(str.strip, cells.values())) else {}))
      line = rows.line_num + 1
  except csv.Error as e:
    raise ValueError(f"{path} line {rows.reader.line_num} is not CSV ({e})"
                     ) from None
  finally:
    csv.field_size_limit(limit)
  return found


_READERS = {"array": _items, "lines": _json_lines, "object": _object,
            "csv": _rows}


def _paragraphs(path):
  """Returns the parts of a text file between blank lines."""
  parts = _BLANK_LINES.split(_OUTER_LINES.sub("", read_text(path)))
  if len(parts) == 1 and "\n" in parts[0]:
    print(f"{path} has no blank line between prompts, so its "
          f"{parts[0].count(chr(10)) + 1} lines are read as one prompt; if "
          "each line is a prompt, put blank lines between them",
          file=sys.stderr)
  return filter(str.strip, parts)
