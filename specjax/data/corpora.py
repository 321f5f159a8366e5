"""Documents for training and evaluation.

The embedded corpus is the standard library of the running Python. The hash of a
document's name decides whether it is held out of training. So the split is the
same in every Python version.
"""

from collections.abc import Callable
from collections.abc import Iterable
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

from specjax.data import text_files
from specjax.data import token_bytes
from specjax.utils.files import parse_json
from specjax.utils.files import read_text

_JSONL = (".jsonl", ".jsonl.gz")
# Names of the embedded corpus. The value is True if the corpus includes the
# test suites of the standard library.
STDLIB = {"stdlib": True, "stdlib-no-tests": False}
_HELD_OUT_OF = 20  # one document in twenty is held out
_ONE_A_LINE = "a .jsonl file holds one JSON object a line"
SPACE = re.compile(r"[ \t\n\r]*")  # whitespace between the values of JSON
_CHUNK_CHARACTERS = 8192  # a text file is cut into documents of this size


@dataclasses.dataclass(frozen=True)
class Document:
  """Text with a name that decides whether the text is held out."""

  name: str
  text: str

  @property
  def held_out(self) -> bool:
    """Returns True if the document is held out of training."""
    return self.digest % _HELD_OUT_OF == 0

  @property
  def digest(self) -> int:
    """Returns a hash of the name, equal on all machines."""
    digest = hashlib.sha256(self.name.encode()).digest()
    return int.from_bytes(digest[:4], "big")


def stdlib_documents(include_tests: bool = True) -> list[Document]:
  """Returns the modules of the running Python's standard library, sorted by
  path.

  Installed packages and files that are not UTF-8 are skipped.

  Args:
    include_tests: if True, includes the library's test suites. Some
      distributions of Python do not contain them.
  """
  return list(_modules(include_tests))


def held_out_modules() -> list[Document]:
  """Returns the held-out modules of `stdlib_documents`; reads only their files.
  """
  return list(_modules(read=lambda name: Document(name, "").held_out))


def _modules(include_tests: bool = True,
             read: Callable[[str], bool] = lambda name: True
             ) -> Iterator[Document]:
  for name, path in _module_files(include_tests):
    if not read(name):
      continue
    try:
      text = path.read_text("utf-8")
    except UnicodeDecodeError:
      continue
    if text.strip():
      yield Document(name, text)


def _module_files(include_tests):
  """Returns `(name, path)` of the standard library's modules, sorted."""
  left_out = {"site-packages", "dist-packages"}
  if not include_tests:
    left_out |= {"test", "tests"}
  root = pathlib.Path(sysconfig.get_path("stdlib"))
  found = []
  for directory, inner, names in os.walk(root):
    # Do not search installed packages, because there may be many files.
    inner[:] = [name for name in inner if name not in left_out]
    place = pathlib.Path(directory).relative_to(root).parts
    found += [(*place, name) for name in names if name.endswith(".py")]
  return [("/".join(parts), root.joinpath(*parts)) for parts in sorted(found)]


def split(documents: Sequence[Document]
          ) -> tuple[list[Document], list[Document]]:
  """Returns training documents and held-out documents.

  Raises:
    ValueError: see `held_out`.
  """
  sides = held_out(d.name for d in documents)
  return ([d for d, out in zip(documents, sides) if not out],
          [d for d, out in zip(documents, sides) if out])


def held_out(names: Iterable[str]) -> bytearray:
  """Returns one number per document: 1 if it is held out, else 0.

  In a small corpus, the hash may select no document or all documents. Then one
  document moves to the other part, so that no part is empty.

  Args:
    names: names of all documents.

  Raises:
    ValueError: there are fewer than two documents.
  """
  sides = bytearray()
  least, most = None, None  # (digest, place)
  for i, name in enumerate(names):
    document = Document(name, "")
    sides.append(document.held_out)
    digest = document.digest
    if least is None or digest < least[0]:
      least = digest, i
    if most is None or digest >= most[0]:
      most = digest, i
  if len(sides) < 2:
    raise ValueError(f"the corpus has {len(sides)} document(s); training and "
                     "held-out text need at least one each: give more text")
  if not any(sides):
    sides[least[1]] = 1
  elif all(sides):
    sides[most[1]] = 0
  return sides


def read_documents(source: str, field: str = "text") -> list[Document]:
  """Returns the documents of `iter_documents` as a list."""
  return list(iter_documents(source, field))


def iter_documents(source: str, field: str = "text") -> Iterator[Document]:
  """Yields the documents of a source with non-empty text.

  Text and JSONL files are read in parts. Files of a directory are read one at a
  time.

  Args:
    source: "stdlib", "stdlib-no-tests", a `.txt` or other text file, a
      `.jsonl` or `.jsonl.gz` file, a directory of text files, or
      "hf:NAME[:SPLIT]" for a Hugging Face dataset (needs the package
      `datasets`).
    field: field that contains the text, for JSONL files and datasets.

  Raises:
    ValueError: the source is missing or empty, or its format is invalid.
  """
  empty = True
  for document in _documents(source, field):
    if document.text.strip():
      empty = False
      yield document
  if empty:
    raise ValueError(f"{source} contains no text; give at least one document")


def _documents(source, field):
  if source in STDLIB:
    yield from _modules(include_tests=STDLIB[source])
  elif has_records(source):
    for name, place, record in records(source, field):
      yield Document(name, text_of(
          place, field, field_of(place, record, field)))
  else:
    path = existing(source)
    if path.is_dir():
      for name, file in _files(path):
        yield Document(name, read_text(file))
    else:
      pieces = text_files.pieces(path, _CHUNK_CHARACTERS)
      for i, text in enumerate(pieces):
        yield Document(f"{path.name}:{i * _CHUNK_CHARACTERS}", text)


def has_records(source: str) -> bool:
  """Returns True if a source is a dataset or a JSONL file.

  Raises:
    ValueError: see `existing`.
  """
  if source.startswith("hf:"):
    return True
  path = existing(source)
  return path.name.endswith(_JSONL) and not path.is_dir()


def records(source: str, field: str | None = None
            ) -> Iterator[tuple[str, str, dict[str, Any]]]:
  """Yields `(name, place, record)` of a dataset or JSONL file.

  The name decides whether the record is held out. The place identifies the
  record in error messages, such as "data.jsonl line 3".

  Args:
    source: dataset or JSONL file.
    field: field to read from a dataset. None reads all fields.
  """
  if source.startswith("hf:"):
    name, rows = _huggingface_rows(source, field)
    for i, row in enumerate(rows):
      yield f"{name}:{i}", f"dataset {name} row {i}", row
  else:
    path = existing(source)
    for number, record in json_lines(path):
      yield f"{path.name}:{number}", f"{path} line {number}", record


def existing(source: str) -> pathlib.Path:
  """Returns the path of a source that is a file or a directory.

  Raises:
    ValueError: the path does not exist.
  """
  path = pathlib.Path(source)
  if not path.exists():
    raise ValueError(f"no such file or directory: {source}; give 'stdlib', "
                     "'hf:NAME', or the path of a text or JSONL file")
  return path


def _files(directory):
  """Returns `(name, path)` of all files below a directory, sorted."""
  paths = sorted(p for p in directory.rglob("*") if p.is_file())
  return [(p.relative_to(directory).as_posix(), p) for p in paths]


def digest(source: str, field: str) -> str:
  """Returns a hash of the names and contents of a source's files.

  Two sources with equal hashes contain the same documents. The hash of a
  dataset covers its rows.

  Args:
    source: source of `iter_documents`.
    field: field to read from a dataset.

  Raises:
    ValueError: the source is missing.
  """
  total = hashlib.blake2b(digest_size=16)
  if source.startswith("hf:"):
    for row in _huggingface_rows(source, field)[1]:
      total.update(repr(row).encode())
    return total.hexdigest()
  if source in STDLIB:
    paths = _module_files(STDLIB[source])
  else:
    path = existing(source)
    paths = _files(path) if path.is_dir() else [(path.name, path)]
  for name, path in paths:
    with open(path, "rb") as f:
      content = hashlib.file_digest(
          f, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    total.update(f"{len(name)} {name} {content}".encode())
  return total.hexdigest()


def json_lines(path: str | os.PathLike[str]
               ) -> Iterator[tuple[int, dict[str, Any]]]:
  """Yields `(line number, object)` of a JSONL file, gzipped or not.

  Raises:
    ValueError: the file is not UTF-8, or a line is not a JSON object.
  """
  for number, line in enumerate(text_files.lines(path), 1):
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
    text: JSON array as a string, with optional white space before "[".
    path: path of the file, for error messages.

  Raises:
    ValueError: see `files.parse_json`.
  """
  decode = json.JSONDecoder().raw_decode
  at, line, end = text.index("[") + 1, 1, 0
  while True:
    at = SPACE.match(text, at).end()
    line, end = line + text.count("\n", end, at), at
    try:
      item, at = decode(text, at)
    except json.JSONDecodeError:
      break
    except (RecursionError, ValueError):
      parse_json(text[at:], path, line)
      raise
    yield line, item
    at = SPACE.match(text, at).end()
    if text[at:at + 1] == "]" and not text[at + 1:].strip():
      return
    if text[at:at + 1] != ",":
      break
    at += 1
  parse_json(text, path)  # accepts an empty array and raises otherwise


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


def field_of(place: str, record: dict[str, Any], field: str) -> Any:
  """Returns the value of a field of a record.

  Raises:
    ValueError: the field is missing. The message lists the existing fields.
  """
  if field not in record:
    raise ValueError(f"{place} has no field {field!r}; it has "
                     f"{', '.join(map(repr, record)) or 'none'}: name the "
                     "field that contains the text")
  return record[field]


def _huggingface_rows(source: str, field: str | None = None
                     ) -> tuple[str, Any]:
  """Returns the name and the rows of a Hugging Face dataset.

  Args:
    source: "hf:NAME[:SPLIT]".
    field: field to read from the rows. None reads all fields.

  Raises:
    ValueError: the package `datasets` or the field is missing.
  """
  name, _, split_name = source.removeprefix("hf:").partition(":")
  try:
    import datasets  # pylint: disable=g-import-not-at-top
  except ImportError:
    raise ValueError(f"{source} needs the package 'datasets': pip install "
                     "'specjax[datasets]'") from None
  rows = datasets.load_dataset(name, split=split_name or "train")
  if field is not None and field not in rows.column_names:
    raise ValueError(f"dataset {name} has no field {field!r}; it has "
                     f"{', '.join(rows.column_names)}")
  return name, rows if field is None else rows.select_columns([field])
