"""Atomic writes, reading of text and JSON, and directories owned by one run.

All text and JSON files are read in the same way: a byte-order mark selects the
encoding and is dropped, lines end in LF, CR or both, and errors name the line.

A file written `atomically` is complete or absent. `claim` raises an error if a
directory belongs to a run with other data or settings. It compares manifests,
which contain fingerprints (`utils.fingerprints`). While a process has a
directory `locked`, other processes cannot lock it.
"""

import codecs
from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import gzip
import io
import json
import os
import pathlib
from typing import Any
from typing import BinaryIO
import uuid
import zlib

import filelock

from specjax.utils import processes

# Increase this number when `fingerprint` changes. Manifests of other formats
# are rejected, because their fingerprints cannot be compared.
_FORMAT = 2
_POINTER = b"version https://git-lfs"  # first bytes of a Git LFS pointer
# The name of an incomplete file is NAME.DIGITS.partial.
_DIGITS, _PARTIAL = 8, ".partial"
# Byte-order marks and encodings. UTF-32 is first, because its mark begins with
# the mark of UTF-16.
_MARKS = ((codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"),
          (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))


class OtherRunError(ValueError):
  """A directory belongs to a run with other data or settings.

  Attributes:
    directory: path of the directory.
  """

  def __init__(self, directory: pathlib.Path, what: str, difference: str):
    super().__init__(f"{directory} holds another {what}: {difference}: choose "
                     "another path, or delete it")
    self.directory = directory


@contextlib.contextmanager
def atomically(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
  """Opens a binary file that gets its name only when it is complete.

  If several processes of one program call this function, only the first process
  writes. The other processes get a file object that discards its content.

  >>> import tempfile
  >>> with tempfile.TemporaryDirectory() as directory:
  ...   with atomically(f"{directory}/x") as f:
  ...     _ = f.write(b"text")
  ...     before = os.path.exists(f"{directory}/x")
  ...   before, os.path.exists(f"{directory}/x")
  (False, True)

  Args:
    path: path of the file. An existing file is replaced. If an error occurs
      during writing, the existing file is unchanged.

  Yields:
    The open file, under a temporary name.
  """
  if not processes.is_first():
    yield _Discarded()
    return
  path = pathlib.Path(path)
  digits = uuid.uuid4().hex[:_DIGITS]
  temporary = path.with_name(f"{path.name}.{digits}{_PARTIAL}")
  try:
    with naming(path), open(temporary, "xb") as f:
      yield f
      f.flush()
      os.fsync(f.fileno())
    os.replace(temporary, path)
  except BaseException as e:
    if isinstance(e, OSError) and e.filename == os.fspath(temporary):
      e.filename = os.fspath(path)
    with contextlib.suppress(OSError):
      temporary.unlink(missing_ok=True)
    raise


class _Discarded(io.RawIOBase):
  """File that discards its content.

  /dev/null cannot be used, because writers of archives seek in it.
  """

  def writable(self) -> bool:
    return True

  def write(self, data: Any) -> int:
    return memoryview(data).nbytes


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
  """Adds a file name to every `OSError` without a name raised in the context.

  For example, writing to an open file on a full disk raises an error without a
  file name.

  Args:
    path: path to add.
  """
  try:
    yield
  except OSError as e:
    e.filename = e.filename or os.fspath(path)
    raise


@contextlib.contextmanager
def locked(directory: str | os.PathLike[str], what: str) -> Iterator[None]:
  """Locks a directory against other processes.

  The system releases the lock when the process ends, even if it is killed.
  Incomplete files of a killed process are deleted. If a program has several
  processes, the first process locks the directory for all of them.

  Args:
    directory: path of the directory, created if it does not exist.
    what: noun for the error, such as "run".

  Raises:
    ValueError: another process has locked the directory, or `directory` is not
      a directory.
  """
  directory = pathlib.Path(directory)
  try:
    directory.mkdir(parents=True, exist_ok=True)
  except (FileExistsError, NotADirectoryError):
    raise ValueError(f"{directory} is not a directory; name another one "
                     "for the output") from None
  if not processes.is_first():
    yield
    return
  lock = filelock.FileLock(directory / ".lock", timeout=0)
  try:
    lock.acquire()
  except filelock.Timeout:
    raise ValueError(f"another {what} is at work in {directory}; wait until "
                     "it ends, or choose another directory") from None
  try:
    for path in directory.glob(f"*.{'[0-9a-f]' * _DIGITS}{_PARTIAL}"):
      path.unlink()
    yield
  finally:
    lock.release()


def claim(path: str | os.PathLike[str], manifest: Mapping[str, Any], what: str
          ) -> None:
  """Writes the manifest of a directory, or compares it with the existing one.

  All processes of a program call this function. The first process writes or
  compares.

  >>> import tempfile
  >>> with tempfile.TemporaryDirectory() as directory:
  ...   claim(f"{directory}/run.json", {"seed": 1}, "run")
  ...   claim(f"{directory}/run.json", {"seed": 1}, "run")

  Args:
    path: path of the manifest. Its directory is created if it does not exist.
    manifest: JSON values by name.
    what: noun for the error, such as "record".

  Raises:
    OtherRunError: the existing manifest has other values.
    ValueError: the existing file is not JSON or has another format.
  """
  processes.by_the_first(lambda: _claim(pathlib.Path(path), manifest, what))


def _claim(path: pathlib.Path, manifest: Mapping[str, Any], what: str) -> None:
  if not path.exists():
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"format": _FORMAT, **manifest}, indent=2)
    return
  existing = read_manifest(path, what)
  names = [name for name, value in manifest.items()
           if existing.get(name) != value]
  if names:
    # Short values come first: a setting explains more than a hash.
    names.sort(key=lambda name: len(str(manifest[name])))
    rest = f" ({len(names) - 2} more differ)" if len(names) > 2 else ""
    raise OtherRunError(path.parent, what, "; ".join(
        _difference(x, existing, manifest[x]) for x in names[:2]) + rest)


def read_manifest(path: str | os.PathLike[str], what: str) -> dict[str, Any]:
  """Returns a manifest written by `claim`.

  Args:
    path: path of the manifest.
    what: noun for the error, such as "record".

  Raises:
    ValueError: the file is not JSON or has another format.
  """
  path = pathlib.Path(path)
  # The other files are worth more than this one, so do not advise to delete
  # them.
  fix = (f"restore it, or choose another path: the other files of the {what} "
         f"in {path.parent} are not damaged")
  manifest = read_json(path, fix)
  if not manifest:
    raise ValueError(f"{path} describes no {what}; {fix}")
  if manifest.get("format") != _FORMAT:
    raise ValueError(
        f"{path.parent} holds a {what} of another version of specjax, whose "
        "fingerprints differ; choose another path, or delete it and start "
        "again")
  return manifest


def check_downloaded(path: str | os.PathLike[str]) -> None:
  """Raises `ValueError` if a file is a Git LFS pointer."""
  with open(path, "rb") as f:
    if f.read(len(_POINTER)) == _POINTER:
      raise ValueError(f"{path} is a Git LFS pointer and not the file itself; "
                       "download the file: git lfs pull")


def write_json(path: str | os.PathLike[str], value: Mapping[str, Any],
               indent: int | None = None) -> None:
  """Writes a JSON object and a newline atomically."""
  with atomically(path) as f:
    f.write((json.dumps(value, indent=indent) + "\n").encode())


def read_json(path: str | os.PathLike[str], fix: str) -> dict[str, Any]:
  """Returns the JSON object in a file.

  Args:
    path: path of the file.
    fix: advice at the end of the error message.

  Raises:
    ValueError: the file is not UTF-8 or not a JSON object.
  """
  check_downloaded(path)
  try:
    text = decoded(pathlib.Path(path).read_bytes())
  except ValueError as e:
    raise ValueError(f"{path} is not JSON: {e}; {fix}") from None
  try:
    value = parse_json(text, path)
  except ValueError as e:
    raise ValueError(f"{e}; {fix}") from None
  if not isinstance(value, dict):
    raise ValueError(f"{path} holds a JSON {type(value).__name__} and no "
                     f"object; {fix}")
  return value


def encoding_of(start: bytes) -> str:
  """Returns the encoding of a text file with these first bytes.

  The encoding is UTF-8 unless there is a byte-order mark of another encoding.
  """
  return next((name for mark, name in _MARKS if start.startswith(mark)),
              "utf-8-sig")


def decoded(data: bytes) -> str:
  r"""Returns the text of a file's bytes, with LF at the ends of lines.

  `encoding_of` determines the encoding.

  >>> decoded(b"one\r\ntwo")
  'one\ntwo'

  Raises:
    ValueError: the bytes are not text. The error names line and byte.
  """
  try:
    text = data.decode(encoding_of(data))
  except UnicodeDecodeError as e:
    line = 1 + data.count(b"\n", 0, e.start)
    raise ValueError(f"line {line} is not UTF-8 text (byte {e.start})"
                     ) from None
  if "\0" in text:
    line = 1 + text.count("\n", 0, text.index("\0"))
    raise ValueError(f"line {line} is not UTF-8 text (it has a zero byte, as "
                     "binary files do, and UTF-16 without a byte-order mark)")
  return text.replace("\r\n", "\n").replace("\r", "\n")


def read_text(path: str | os.PathLike[str]) -> str:
  """Returns the text of a file. A `.gz` file is decompressed.

  Raises:
    ValueError: the file is not text, or not gzip data.
  """
  path = pathlib.Path(path)
  check_downloaded(path)
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
    text: text in JSON.
    path: path of the file, for errors.
    line: line number of the text's first line in the file.

  Raises:
    ValueError: the text is not JSON, or exceeds the limits of Python's `json`.
  """
  try:
    return json.loads(text)
  except json.JSONDecodeError as e:
    raise ValueError(f"{path} line {line + e.lineno - 1} is not JSON "
                     f"({e.msg})") from None
  except RecursionError:
    raise ValueError(f"{path} line {line} has JSON that is nested deeper than "
                     "Python reads; take it out") from None
  except ValueError:  # int() refuses long numbers
    raise ValueError(f"{path} line {line} has a number with more digits than "
                     "Python reads (4300); take it out") from None


def _difference(name: str, existing: Mapping[str, Any], value: Any) -> str:
  """Returns a description of two values of a manifest.

  The values are shown from 20 characters before their first difference.
  """
  if name not in existing:
    return (f"{name} is {str(value)[:60]} here and not told there, as by an "
            "older version of specjax or without this option")
  texts = [str(existing[name]), str(value)]
  start = max(len(os.path.commonprefix(texts)) - 20, 0)
  there, here = ("..." * (start > 0) + text[start:start + 60]
                 for text in texts)
  return f"{name} is {there} there and {here} here"
