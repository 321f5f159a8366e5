"""Encodes documents as one stream of token ids, part by part."""

from collections.abc import Iterable
from collections.abc import Iterator
import itertools
import re
from typing import TYPE_CHECKING

import numpy as np

from specjax.data import token_bytes

if TYPE_CHECKING:  # avoids an import cycle
  from specjax.data.tokenizers import Tokenizer

TOGETHER = 2**20  # number of characters that are encoded in one call
_LONG = 2**22  # largest number of characters of a piece of a document
_NEAR = 1000  # characters on each side of a cut whose tokens are compared
_LINE = re.compile(r"(?<=\w\n)(?=\w)")  # begin of a line


def encode(tokenizer: "Tokenizer", texts: Iterable[str]
           ) -> Iterator[np.ndarray]:
  """Yields the array of `Tokenizer.encode_stream` in parts.

  Encoding needs about 40 bytes of memory per byte of text. To limit the memory,
  each call of the library encodes about a million characters, and long
  documents are cut into pieces.

  Args:
    tokenizer: a `specjax.data.Tokenizer`.
    texts: documents.

  Raises:
    ValueError: see `Tokenizer.encode_stream`.
  """
  between = separator(tokenizer)
  waiting, size = [], 0  # pairs (separator ids before a piece, the piece)
  for text in texts:
    token_bytes.check_text(text)
    before = [between]
    for piece in cut(tokenizer, text):
      waiting.append((before, piece))
      before, size = [], size + len(piece)
      if size >= TOGETHER:
        yield _joined(tokenizer, waiting)
        waiting, size = [], 0
  if waiting:
    yield _joined(tokenizer, waiting)


def separator(tokenizer: "Tokenizer") -> int:
  """Returns the token before each document: `bos`, or `eos` without `bos`.

  Raises:
    ValueError: the tokenizer has neither token.
  """
  between = tokenizer.eos if tokenizer.bos is None else tokenizer.bos
  if between is None:
    raise ValueError("the tokenizer has neither bos nor eos to separate "
                     "documents; set one in its tokenizer_config.json")
  return between


def _joined(tokenizer: "Tokenizer", pieces: list[tuple[list[int], str]]
            ) -> np.ndarray:
  """Returns the concatenated ids of pairs `(ids before a piece, piece)`."""
  encodings = tokenizer.backend.encode_batch(
      [piece for _, piece in pieces], add_special_tokens=False)
  return np.concatenate([
      np.asarray([*before, *(
          token for _, part in tokenizer.plain(piece, encoding)
          for token in part.ids)], np.uint32)
      for (before, piece), encoding in zip(pieces, encodings)])


def cut(tokenizer: "Tokenizer", text: str) -> Iterator[str]:
  """Cuts a long text into pieces without changing its tokens.

  The concatenated tokens of the pieces equal the tokens of the text. A cut is
  at the beginning of a line where it does not change the tokens around it. If
  there is no such line, the text is not cut. In particular, it is not cut if
  the tokenizer marks the beginning of a text.
  """
  encode = lambda a, b: tokenizer.backend.encode(
      text[a:b], add_special_tokens=False).ids
  start = 0
  while len(text) - start > _LONG:
    places = _LINE.finditer(text, start + TOGETHER, start + _LONG)
    end = next((
        at for at in (match.end() for match in itertools.islice(places, 9))
        if encode(at - _NEAR, at + _NEAR)
        == encode(at - _NEAR, at) + encode(at, at + _NEAR)), None)
    if end is None:
      break
    yield text[start:end]
    start = end
  yield text[start:]
