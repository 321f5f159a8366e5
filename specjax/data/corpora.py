"""Documents to train on and to measure with.

The embedded corpus is the standard library of the running Python: real code
and prose that every machine has. A document is held out by the hash of its
name, so that a module that was held out in one version of Python is held out
in every other one too.
"""

from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import reprlib
import sysconfig
from typing import Any

from specjax.data import token_bytes
from specjax.files import parse_json
from specjax.files import read_text

_HELD_OUT_OF = 20  # one document in twenty
_ONE_A_LINE = "a .jsonl file holds one JSON object a line"
_SPACE = re.compile(r"[ \t\n\r]*")  # between the values of JSON
_CHUNK_CHARACTERS = 8192  # a text file is cut into documents of this size


@dataclasses.dataclass(frozen=True)
class Document:
  """One text and the name that decides on which side of the split it lies."""

  name: str
  text: str

  @property
  def held_out(self) -> bool:
    """Whether it is left out of training."""
    return self.digest % _HELD_OUT_OF == 0

  @property
  def digest(self) -> int:
    """A hash of the name, the same everywhere."""
    digest = hashlib.sha256(self.name.encode()).digest()
    return int.from_bytes(digest[:4], "big")


def stdlib_documents(include_tests: bool = True) -> list[Document]:
  """The modules of the running Python's standard library, sorted by path.

  Installed packages are left out, and so are the few files that are not
  UTF-8.

  Args:
    include_tests: whether to read the library's own test suites, which some
      distributions of Python do not ship.
  """
  return _modules({"site-packages", "dist-packages"}
                  | (set() if include_tests else {"test", "tests"}))


def held_out_modules() -> list[Document]:
  """Those of `stdlib_documents` that are held out; no other is read."""
  return _modules({"site-packages", "dist-packages"}, held_out=True)


def _modules(left_out, held_out=False):
  """Modules in no directory of these names, sorted by path."""
  root = pathlib.Path(sysconfig.get_path("stdlib"))
  found = []
  for directory, inner, names in os.walk(root):
    # Installed packages are many, and are not looked through.
    inner[:] = [name for name in inner if name not in left_out]
    place = pathlib.Path(directory).relative_to(root).parts
    found += [(*place, name) for name in names if name.endswith(".py")]
  documents = []
  for parts in sorted(found):
    name = "/".join(parts)
    if held_out and not Document(name, "").held_out:
      continue
    try:
      text = root.joinpath(*parts).read_text("utf-8")
    except UnicodeDecodeError:
      continue
    if text.strip():
      documents.append(Document(name, text))
  return documents


def split(documents: Sequence[Document]
          ) -> tuple[list[Document], list[Document]]:
  """Documents to train on, and documents held out.

  A corpus so small that the hash leaves one side empty gives that side one
  document.

  Raises:
    ValueError: there are fewer than two documents.
  """
  if len(documents) < 2:
    raise ValueError(f"the corpus has {len(documents)} document; training and "
                     "held-out text need at least one each: give more text")
  ranked = sorted(documents, key=lambda d: (not d.held_out, d.digest))
  count = sum(d.held_out for d in documents)
  count = min(max(count, 1), len(documents) - 1)
  held_out = {id(d) for d in ranked[:count]}
  return ([d for d in documents if id(d) not in held_out],
          [d for d in documents if id(d) in held_out])


def read_documents(source: str, field: str = "text") -> list[Document]:
  """Documents of any source that `--data` accepts.

  Args:
    source: "stdlib", "stdlib-no-tests", a `.txt` or other text file, a
      `.jsonl` or `.jsonl.gz` file, a directory of text files, or
      "hf:NAME[:SPLIT]" for a Hugging Face dataset (needs the package
      `datasets`).
    field: the field that holds the text in JSONL and in datasets.

  Raises:
    ValueError: the source is missing, empty, or not what its ending says.
  """
  if source == "stdlib":
    return stdlib_documents()
  if source == "stdlib-no-tests":
    return stdlib_documents(include_tests=False)
  if source.startswith("hf:"):
    documents = _huggingface_documents(source, field)
  else:
    path = pathlib.Path(source)
    if not path.exists():
      raise ValueError(f"no such file or directory: {source}; give 'stdlib', "
                       "'hf:NAME', or the path of a text or JSONL file")
    if path.is_dir():
      files = sorted(p for p in path.rglob("*") if p.is_file())
      documents = [Document(p.relative_to(path).as_posix(),
                            read_text(p)) for p in files]
    elif path.name.endswith((".jsonl", ".jsonl.gz")):
      documents = list(_jsonl_documents(path, field))
    else:
      text = read_text(path)
      starts = range(0, len(text), _CHUNK_CHARACTERS)
      documents = [Document(f"{path.name}:{i}", text[i:i + _CHUNK_CHARACTERS])
                   for i in starts]
  documents = [d for d in documents if d.text.strip()]
  if not documents:
    raise ValueError(f"{source} holds no text; at least one document is "
                     "needed")
  return documents


def json_lines(path: str | os.PathLike[str]
               ) -> Iterator[tuple[int, dict[str, Any]]]:
  """Yields `(line number, object)` of a JSONL file, gzipped or not.

  Raises:
    ValueError: the file is not UTF-8, or a line is no JSON object.
  """
  for number, line in enumerate(read_text(path).split("\n"), 1):
    if not line.strip():
      continue
    try:
      record = parse_json(line, path, number)
    except ValueError as e:
      raise ValueError(f"{e}; {_ONE_A_LINE}") from None
    if not isinstance(record, dict):
      raise ValueError(f"{path} line {number} is a JSON "
                       f"{type(record).__name__}; {_ONE_A_LINE}")
    yield number, record


def json_items(text: str, path: str | os.PathLike[str]
               ) -> Iterator[tuple[int, Any]]:
  """Yields `(line number, value)` of every item of a JSON array.

  Args:
    text: JSON that begins with "[", perhaps after spaces.
    path: the file, for errors.

  Raises:
    ValueError: see `files.parse_json`.
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


def text_of(place: str, field: str, value: Any) -> str:
  """The text in a field of a user's file.

  Args:
    place: the record's place for errors, such as "data.jsonl line 3".
    field: the name of the field.
    value: the value of the field.

  Raises:
    ValueError: the value is not a text, or has half of a character.
  """
  if not isinstance(value, str):
    raise ValueError(f"{place}: {field!r} is {reprlib.repr(value)}; it must be "
                     "a text: name the field that holds one")
  try:
    token_bytes.check_text(value)
  except ValueError as e:
    raise ValueError(f"{place}: {field!r}: {e}") from None
  return value


def field_of(path: str | os.PathLike[str], number: int,
             record: dict[str, Any], field: str) -> Any:
  """The field of a JSONL record, or a `ValueError` that names what is there."""
  if field not in record:
    raise ValueError(f"{path} line {number} has no field {field!r}; it has "
                     f"{', '.join(map(repr, record)) or 'none'}: name the "
                     "field that holds the text")
  return record[field]


def _jsonl_documents(path, field):
  for number, record in json_lines(path):
    yield Document(f"{path.name}:{number}", text_of(
        f"{path} line {number}", field, field_of(path, number, record, field)))


def _huggingface_documents(source, field):
  name, _, split = source.removeprefix("hf:").partition(":")
  try:
    import datasets  # pylint: disable=g-import-not-at-top
  except ImportError:
    raise ValueError(f"{source} needs the package 'datasets': pip install "
                     "'specjax[datasets]'") from None
  rows = datasets.load_dataset(name, split=split or "train")
  if field not in rows.column_names:
    raise ValueError(f"dataset {name} has no field {field!r}; it has "
                     f"{', '.join(rows.column_names)}")
  return [Document(f"{name}:{i}", text_of(f"dataset {name} row {i}", field,
                                          text))
          for i, text in enumerate(rows[field])]
