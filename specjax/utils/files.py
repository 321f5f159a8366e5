"""Whole files, and directories that belong to one run.

Text and JSON of users are read in one way: a byte-order mark belongs to the
encoding and is dropped, lines end in LF, CR or both, and errors name the line.

A file that is written `atomically` is either complete or absent. A directory
that a run has made its own by `claim` is refused to a run of other data or
settings, which differ in their `fingerprints.fingerprint`. While a process has
it `locked`, it is refused to every other one.
"""

import codecs
from collections.abc import Iterator
import contextlib
import gzip
import io
import json
import os
import pathlib
import re
from typing import Any
from typing import BinaryIO
import uuid
import zlib

from specjax.utils import processes

try:
  import fcntl
except ImportError:  # Windows has no such locks
  fcntl = None

# Raised whenever `fingerprint` changes, so that what was recorded under an
# older one is refused by name and not compared.
_FORMAT = 2
_POINTER = b"version https://git-lfs"  # first bytes of a Git LFS pointer
# What a file is called that is not complete: its name, digits, and this.
_DIGITS, _PARTIAL = 8, ".partial"
# UTF-32 first: its mark begins with that of UTF-16.
_MARKS = ((codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"),
          (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
# Escapes of JSON: a pair of surrogates, one alone, any other.
_PAIR = r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_ESCAPES = re.compile(rf"{_PAIR}|(\\u[dD][89a-fA-F][0-9a-fA-F]{{2}})|\\.",
                      re.DOTALL)


class OtherRunError(ValueError):
  """The path `directory` holds a run of other data or settings."""

  def __init__(self, directory: pathlib.Path, what: str, difference: str):
    super().__init__(f"{directory} holds another {what}: {difference}: choose "
                     "another path, or delete it")
    self.directory = directory


@contextlib.contextmanager
def atomically(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
  """Opens a file for writing bytes; it appears under its name when complete.

  Of several processes of one program the first writes; what the others write
  is forgotten.

  Args:
    path: of the file; one that exists is replaced, and stays if the writing
      fails.

  Yields:
    The file, under a name that no other process gives to one.
  """
  if not processes.is_first():
    yield _Forgotten()
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
  except BaseException:
    with contextlib.suppress(OSError):
      temporary.unlink(missing_ok=True)
    raise


class _Forgotten(io.RawIOBase):
  """A file of which nothing is kept; an archive asks /dev/null where it is."""

  def writable(self) -> bool:
    return True

  def write(self, data) -> int:
    return memoryview(data).nbytes


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
  """Adds this file's name to every `OSError` raised inside that has none.

  A full disk is found out when bytes are written, by a call that knows of no
  name.
  """
  try:
    yield
  except OSError as e:
    e.filename = e.filename or os.fspath(path)
    raise


@contextlib.contextmanager
def locked(directory: str | os.PathLike[str], what: str) -> Iterator[None]:
  """Keeps every other process out of a directory, and clears up in it.

  Of several processes of one program the first holds it for all.

  The system itself lets go of the lock when the process ends, however it ends:
  a killed one leaves nothing that keeps others out. The pieces of files that
  it may have left are deleted. Where the file system has no locks, nobody is
  kept out.

  Args:
    directory: created if needed.
    what: a word for the error, such as "run".

  Raises:
    ValueError: another process has it.
  """
  directory = pathlib.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  if not processes.is_first():
    yield
    return
  alone = fcntl is not None
  with open(directory / ".lock", "ab") as f:
    try:
      if fcntl:
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise ValueError(f"another {what} is at work in {directory}; wait until "
                       "it ends, or choose another directory") from None
    except OSError:  # a file system without locks
      alone = False
    if alone:
      for path in directory.glob(f"*.{'[0-9a-f]' * _DIGITS}{_PARTIAL}"):
        path.unlink()
    yield


def claim(path: str | os.PathLike[str], manifest: dict[str, Any], what: str
          ) -> None:
  """Writes what a directory holds, or checks that it holds the same.

  All processes of a program call it, and the first does it.

  Args:
    path: of the JSON file that says it; its directory is created if needed.
    manifest: values that JSON can hold.
    what: a word for the error, such as "record".

  Raises:
    OtherRunError: the file says something else.
    ValueError: it is of another version, or is not JSON.
  """
  processes.by_the_first(
      lambda: _claim(pathlib.Path(path), manifest, what))


def _claim(path, manifest, what):
  if not path.exists():
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"format": _FORMAT, **manifest}, indent=2)
    return
  found = read_manifest(path, what)
  others = [name for name, value in manifest.items()
            if found.get(name) != value]
  if others:
    # Shortest first: a setting says more than a hash that depends on it.
    others.sort(key=lambda name: len(str(manifest[name])))
    more = f" ({len(others) - 2} more differ)" * (len(others) > 2)
    raise OtherRunError(path.parent, what, "; ".join(
        _difference(x, found, manifest[x]) for x in others[:2]) + more)


def read_manifest(path: str | os.PathLike[str], what: str) -> dict[str, Any]:
  """What `claim` wrote.

  Args:
    path: of the JSON file.
    what: a word for the error, such as "record".

  Raises:
    ValueError: the file is not JSON, or of another version of specjax.
  """
  path = pathlib.Path(path)
  found = read_json(path, f"choose another path, or delete {path.parent}")
  if not found:
    raise ValueError(f"{path} describes no {what}; choose another path, or "
                     f"delete {path.parent}")
  if found.get("format") != _FORMAT:
    raise ValueError(
        f"{path.parent} holds a {what} of another version of specjax, whose "
        "fingerprints differ; choose another path, or delete it and start "
        "again")
  return found


def check_downloaded(path: str | os.PathLike[str]) -> None:
  """Raises `ValueError` if a file is a Git LFS pointer to the real one."""
  with open(path, "rb") as f:
    if f.read(len(_POINTER)) == _POINTER:
      raise ValueError(f"{path} is a Git LFS pointer and not the file itself; "
                       "download the file: git lfs pull")


def write_json(path: str | os.PathLike[str], value: dict[str, Any],
               indent: int | None = None) -> None:
  """Writes a JSON object and a newline, whole or not at all."""
  with atomically(path) as f:
    f.write((json.dumps(value, indent=indent) + "\n").encode())


def read_json(path: str | os.PathLike[str], fix: str) -> dict[str, Any]:
  """The JSON object in a file.

  Args:
    path: of the file.
    fix: what the user may do about a file that holds none.

  Raises:
    ValueError: the file is not UTF-8, not JSON, or holds no object, or half of
      a character.
  """
  check_downloaded(path)
  try:
    text = decoded(pathlib.Path(path).read_bytes())
  except ValueError as e:
    raise ValueError(f"{path} is not JSON: {e}; {fix}") from None
  try:
    found = parse_json(text, path)
  except ValueError as e:
    raise ValueError(f"{e}; {fix}") from None
  half = half_of_a_character(text)
  if half:
    raise ValueError(f"{path} line {half} has half of a character (a lone "
                     f"surrogate, such as \\ud83d); {fix}")
  if not isinstance(found, dict):
    raise ValueError(f"{path} holds a JSON {type(found).__name__} and no "
                     f"object; {fix}")
  return found


def encoding_of(start: bytes) -> str:
  """Returns the encoding of a text file by its first bytes."""
  return next((name for mark, name in _MARKS if start.startswith(mark)),
              "utf-8-sig")


def decoded(data: bytes) -> str:
  """Returns the text of a file's bytes: UTF-8, or as its byte-order mark says.

  Raises:
    ValueError: they are not; it names the line and the byte, but no path.
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
  """Returns the text of a file, which is unpacked first if it ends in `.gz`.

  Raises:
    ValueError: the file is not text, or not gzipped.
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


def half_of_a_character(text: str) -> int | None:
  """Returns the line of the first lone surrogate in a JSON text, or None."""
  for match in _ESCAPES.finditer(text):
    if match[1]:
      return 1 + text.count("\n", 0, match.start())
  return None


def _difference(name, found, value) -> str:
  """What two manifests hold, from where it begins to differ."""
  if name not in found:
    return (f"{name} is {str(value)[:60]} here and not told there, as by an "
            "older version of specjax or without this option")
  texts = [str(found[name]), str(value)]
  start = max(len(os.path.commonprefix(texts)) - 20, 0)
  there, here = ("..." * (start > 0) + text[start:start + 60]
                 for text in texts)
  return f"{name} is {there} there and {here} here"
