"""Text and JSON in files of users, read and refused in one way.

A byte-order mark belongs to the encoding and is dropped. Lines end in LF, CR
or both. Every refusal names the path and the line.
"""

import codecs
from collections.abc import Iterator
import gzip
import json
import os
import pathlib
import re
from typing import Any
import zlib

# UTF-32 first: its mark begins with that of UTF-16.
_MARKS = ((codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"),
          (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
_SPACE = re.compile(r"[ \t\n\r]*")  # between the values of JSON
# Escapes of JSON: a pair of surrogates, one alone, any other.
_PAIR = r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_ESCAPES = re.compile(rf"{_PAIR}|(\\u[dD][89a-fA-F][0-9a-fA-F]{{2}})|\\.",
                      re.DOTALL)


def decoded(data: bytes) -> str:
  """The text of a file's bytes, which are UTF-8 unless a mark says otherwise.

  Raises:
    ValueError: they are not; it names the line and the byte, but no path.
  """
  encoding = next((name for mark, name in _MARKS if data.startswith(mark)),
                  "utf-8-sig")
  try:
    text = data.decode(encoding)
  except UnicodeDecodeError as e:
    line = 1 + data.count(b"\n", 0, e.start)
    raise ValueError(f"line {line} is not UTF-8 text (byte {e.start})"
                     ) from None
  return text.replace("\r\n", "\n").replace("\r", "\n")


def read_text(path: str | os.PathLike[str]) -> str:
  """Returns the text of a file, which is unpacked first if it ends in `.gz`.

  Raises:
    ValueError: the file is not text, or not gzipped.
  """
  path = pathlib.Path(path)
  data = path.read_bytes()
  if path.suffix == ".gz":
    try:
      data = gzip.decompress(data) if data else data
    except (OSError, EOFError, zlib.error) as e:
      raise ValueError(f"{path} is not gzipped text: {e}") from None
  try:
    return decoded(data)
  except ValueError as e:
    raise ValueError(f"{path} {e}; convert it, or give another file") from None


def parse_json(text: str, path: str | os.PathLike[str], line: int = 1) -> Any:
  """Returns the value of a JSON text.

  Args:
    text: the JSON.
    path: the file, for errors.
    line: the line of the file on which the text begins.

  Raises:
    ValueError: it is not JSON, or nested too deep or with too long a number
      for Python's `json`.
  """
  try:
    return json.loads(text)
  except json.JSONDecodeError as e:
    raise ValueError(f"{path} line {line + e.lineno - 1} is not JSON "
                     f"({e.msg})") from None
  except RecursionError:
    raise ValueError(f"{path} line {line} has JSON that is nested deeper than "
                     "Python reads (about 900 levels); take it out") from None
  except ValueError:  # of int()
    raise ValueError(f"{path} line {line} has a number with more digits than "
                     "Python reads (4300); take it out") from None


def json_items(text: str, path: str | os.PathLike[str]
               ) -> Iterator[tuple[int, Any]]:
  """Yields `(line number, value)` of every item of a JSON array.

  Args:
    text: JSON that begins with "[", perhaps after spaces.
    path: the file, for errors.

  Raises:
    ValueError: see `parse_json`.
  """
  decode = json.JSONDecoder().raw_decode
  at, line, end = text.index("[") + 1, 1, 0
  while True:
    at = _SPACE.match(text, at).end()
    line, end = line + text.count("\n", end, at), at
    try:
      item, at = decode(text, at)
    except json.JSONDecodeError:
      break
    except (RecursionError, ValueError):
      parse_json(text[at:], path, line)
      raise
    yield line, item
    at = _SPACE.match(text, at).end()
    if text[at:at + 1] == "]" and not text[at + 1:].strip():
      return
    if text[at:at + 1] != ",":
      break
    at += 1
  parse_json(text, path)  # an empty array, or an error that it names


def half_of_a_character(text: str) -> int | None:
  """Returns the line of the first lone surrogate in a JSON text, or None."""
  for match in _ESCAPES.finditer(text):
    if match[1]:
      return 1 + text.count("\n", 0, match.start())
  return None
