"""Reads text files piece by piece.

Text and errors equal those of `files.read_text`, but the file may be larger
than the memory.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
import gzip
import io
import os
import pathlib
from typing import TextIO
import zlib

from specjax.utils import files


def lines(path: str | os.PathLike[str]) -> Iterator[str]:
  """Yields the lines of a file without line feeds.

  Raises:
    ValueError: see `files.read_text`.
  """
  for line in _pieces(path, iter):
    yield line.removesuffix("\n")


def pieces(path: str | os.PathLike[str], size: int) -> Iterator[str]:
  """Yields the text of a file in pieces of `size` characters.

  The last piece may be shorter.

  Raises:
    ValueError: see `files.read_text`.
  """
  yield from _pieces(path, lambda f: iter(lambda: f.read(size), ""))


def _pieces(path: str | os.PathLike[str],
            split: Callable[[TextIO], Iterable[str]]) -> Iterator[str]:
  path = pathlib.Path(path)
  files.check_downloaded(path)
  try:
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as f:
      encoding = files.encoding_of(f.peek(4))
      for piece in split(io.TextIOWrapper(f, encoding)):
        if "\0" in piece:
          raise UnicodeError("a zero byte")
        yield piece
  except (UnicodeError, EOFError, OSError, zlib.error):
    files.read_text(path)  # raises an error with the line and the reason
    raise
