"""Documents for training and evaluation.

The embedded corpus is the standard library of the running Python. The hash of a
document's name decides whether it is held out of training. So the split is the
same in every Python version.
"""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import dataclasses
import hashlib
import os
import pathlib
import sysconfig
from typing import Any

import numpy as np

from specjax.data import record_files
from specjax.data import text_files
from specjax.utils.files import read_text

# Names of the embedded corpus. The value is True if the corpus includes the
# test suites of the standard library.
STDLIB = {"stdlib": True, "stdlib-no-tests": False}
_HELD_OUT_OF = 20  # one document in twenty is held out
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


def stdlib_documents(include_tests: bool = True, only_held_out: bool = False
                     ) -> list[Document]:
  """Returns the modules of the running Python's standard library, sorted by
  path.

  Installed packages and files that are not UTF-8 are skipped.

  Args:
    include_tests: if True, includes the library's test suites. Some
      distributions of Python do not contain them.
    only_held_out: if True, reads and returns only the held-out modules.
  """
  documents = []
  for name, path in _module_files(include_tests):
    if Document(name, "").held_out or not only_held_out:
      with contextlib.suppress(UnicodeDecodeError):
        documents.append(Document(name, path.read_text("utf-8")))
  return [d for d in documents if d.text.strip()]


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

  Documents of the same name are in the same part. In a small corpus, the hash
  may select no document or all documents. Then the documents of one name move
  to the other part, so that no part is empty.

  Args:
    names: names of all documents.

  Raises:
    ValueError: there are fewer than two different names.
  """
  digests = np.fromiter((Document(name, "").digest for name in names),
                        np.uint32)
  if not len(digests) or digests.min() == digests.max():
    raise ValueError(f"the corpus has {len(digests)} document(s) and "
                     f"{len(set(digests.tolist()))} different one(s); training "
                     "and held-out text need at least one each: give more text")
  sides = digests % _HELD_OUT_OF == 0
  if not sides.any():
    sides = digests == digests.min()
  elif sides.all():
    sides = digests != digests.max()
  return bytearray(sides.tobytes())


def read_documents(source: str, field: str = "text") -> list[Document]:
  """Returns the documents of `iter_documents` as a list."""
  return list(iter_documents(source, field))


def iter_documents(source: str, field: str = "text") -> Iterator[Document]:
  """Yields the documents of a source with non-empty text.

  Text files and files of records are read in parts. The name of a record is its
  text, so copies of a record are in the same part of the corpus.

  Args:
    source: "stdlib", "stdlib-no-tests", a file or directory of records (see
      `has_records`), another text file, a directory of text files, or
      "hf:NAME[:SPLIT]" for a Hugging Face dataset (needs the package
      `datasets`).
    field: field that contains the text, for records.

  Raises:
    ValueError: the source is missing or empty, or its format is invalid.
  """
  is_text = source in STDLIB or not has_records(source)
  found = _texts(source, field) if is_text else records(source, field)
  text_of = lambda place, record: record_files.text_of(
      place, *record_files.value_of(place, record, (field,)))
  empty = True
  for name, _, text in record_files.extract(source, "document", found, text_of):
    empty = False
    yield Document(name if is_text else text, text)
  if empty:
    raise ValueError(f"{source} contains no text; give at least one document")


def _texts(source, field):
  """Returns `(name, place, record)` of texts, which are in `field`."""
  if source in STDLIB:
    return ((d.name, d.name, {field: d.text})
            for d in stdlib_documents(STDLIB[source]))
  path = existing(source)
  if path.is_dir():
    return ((name, f"{source} file {name}", {field: read_text(file)})
            for name, file in _files(path))
  pieces = enumerate(text_files.pieces(path, _CHUNK_CHARACTERS))
  return ((f"{path.name}:{i * _CHUNK_CHARACTERS}",
           f"{source} character {i * _CHUNK_CHARACTERS}", {field: text})
          for i, text in pieces)


def has_records(source: str) -> bool:
  """Returns True if a source is a dataset, or a file or directory of records.

  Text files in a directory of records are its documentation: they end in ".md"
  or have no ending. A directory with other text files, such as source code, is
  a directory of texts.

  Raises:
    ValueError: see `existing`.
  """
  if source.startswith("hf:"):
    return True
  path = existing(source)
  if not path.is_dir():
    return record_files.form(path) != "text"
  forms = {file: record_files.form(file) for _, file in _files(path)}
  return any(form != "text" for form in forms.values()) and all(
      file.suffix in (".md", "") for file, form in forms.items()
      if form == "text")


def records(source: str, field: str | None = None
            ) -> Iterator[tuple[str, str, Any]]:
  """Yields `(name, place, record)` of a source with `has_records`.

  `record_files.extract` describes name, place and record. A directory contains
  files of several records, or files with one object each. In the first case,
  its other files are left out.

  Args:
    source: dataset, file of `record_files.read`, or directory of such files.
    field: field to read from a dataset (see `record_files.alternatives`). None
      reads all fields.
  """
  if source.startswith("hf:"):
    name, rows = _huggingface_rows(source, field)
    for i, row in enumerate(rows):
      yield f"{name}:{i}", f"dataset {name} row {i}", row
    return
  path = existing(source)
  if not path.is_dir():
    yield from record_files.read(path)
    return
  forms = {name: record_files.form(file) for name, file in _files(path)}
  others = {"text", "object"} if set(forms.values()) - {"text", "object"} else {
      "text"}
  for name, file in _files(path):
    if forms[name] in others:
      yield name, f"{source} file {name}", record_files.LeftOut(
          "files without records")
    else:
      yield from record_files.read(file)


def existing(source: str) -> pathlib.Path:
  """Returns the path of a source that is a file or a directory.

  Raises:
    ValueError: the path does not exist.
  """
  path = pathlib.Path(source)
  if not path.exists():
    raise ValueError(f"the text {source} does not exist; give 'stdlib', "
                     "'hf:NAME', or the path of a file or directory")
  return path


def _files(directory):
  """Returns `(name, path)` of all files below a directory, sorted."""
  paths = sorted(p for p in directory.rglob("*") if p.is_file())
  return [(p.relative_to(directory).as_posix(), p) for p in paths]


def digest(source: str, field: str | None) -> str:
  """Returns a hash of the names and contents of a source's files.

  Two sources with equal hashes contain the same documents. The hash of a
  dataset covers its rows.

  Args:
    source: source of `iter_documents`.
    field: field to read from a dataset. None reads all fields.

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


def load_dataset(subject: str, *args: Any, **kwargs: Any) -> Any:
  """Returns `datasets.load_dataset` of the other arguments.

  Args:
    subject: subject of the error message.
    *args: arguments of `datasets.load_dataset`.
    **kwargs: keyword arguments of `datasets.load_dataset`.

  Raises:
    ValueError: the package `datasets` is missing.
  """
  try:
    import datasets  # pylint: disable=g-import-not-at-top
  except ImportError:
    raise ValueError(f"{subject} needs the package 'datasets': pip install "
                     "'specjax[datasets]'") from None
  return datasets.load_dataset(*args, **kwargs)


def _huggingface_rows(source: str, field: str | None = None
                     ) -> tuple[str, Any]:
  """Returns the name and the rows of a Hugging Face dataset.

  Args:
    source: "hf:NAME[:SPLIT]".
    field: field to read (see `record_files.alternatives`). None reads all.

  Raises:
    ValueError: the package `datasets` or the field is missing.
  """
  name, _, split_name = source.removeprefix("hf:").partition(":")
  rows = load_dataset(source, name, split=split_name or "train")
  if field is None:
    return name, rows
  fields = [x for x in record_files.alternatives(field)
            if x in rows.column_names]
  if not fields:
    raise ValueError(f"dataset {name} has no field {field!r}; it has "
                     f"{', '.join(rows.column_names)}")
  return name, rows.select_columns(fields)
