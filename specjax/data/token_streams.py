"""Texts as one stream of token ids, encoded in parts."""

from collections.abc import Iterable
from collections.abc import Iterator
import itertools
import re
from typing import Any

import numpy as np

from specjax.data import token_bytes

_TOGETHER = 2**20  # characters that are encoded together
_LONG = 2**22  # characters of a text that is cut into pieces
_NEAR = 1000  # characters before and after a cut
_LINE = re.compile(r"(?<=\w\n)(?=\w)")  # the place before a line


def encode(tokenizer: Any, texts: Iterable[str]) -> Iterator[np.ndarray]:
  """Yields the array of `Tokenizer.encode_stream` in parts.

  The library takes some 40 bytes for a byte of text while it encodes, so it
  encodes about a million characters at a time, and a long text in pieces.

  Args:
    tokenizer: a `specjax.data.Tokenizer`.
    texts: an iterable of texts.

  Raises:
    ValueError: see `Tokenizer.encode_stream`.
  """
  between = tokenizer.eos if tokenizer.bos is None else tokenizer.bos
  if between is None:
    raise ValueError("the tokenizer has neither bos nor eos to part "
                     "documents; name one in its tokenizer_config.json")
  waiting, size = [], 0  # (what comes before a piece, the piece)

  def encoded():
    encodings = tokenizer.backend.encode_batch(
        [piece for _, piece in waiting], add_special_tokens=False)
    return np.concatenate([
        np.asarray([*before, *(
            token for _, part in tokenizer.plain(piece, encoding)
            for token in part.ids)], np.uint32)
        for (before, piece), encoding in zip(waiting, encodings)])

  for text in texts:
    token_bytes.check_text(text)
    before = [between]
    for piece in cut(tokenizer, text):
      waiting.append((before, piece))
      before, size = [], size + len(piece)
      if size >= _TOGETHER:
        yield encoded()
        waiting, size = [], 0
  if waiting:
    yield encoded()


def cut(tokenizer: Any, text: str) -> Iterator[str]:
  """Yields pieces of a long text, which together have the tokens of the text.

  The text is cut before a line if the tokens around that place are the same
  without the cut. With a tokenizer that marks the beginning of a text there is
  no such place, and the text is not cut.
  """
  encode = lambda a, b: tokenizer.backend.encode(
      text[a:b], add_special_tokens=False).ids
  start = 0
  while len(text) - start > _LONG:
    places = _LINE.finditer(text, start + _TOGETHER, start + _LONG)
    end = next((
        at for at in (match.end() for match in itertools.islice(places, 9))
        if encode(at - _NEAR, at + _NEAR)
        == encode(at - _NEAR, at) + encode(at, at + _NEAR)), None)
    if end is None:
      break
    yield text[start:end]
    start = end
  yield text[start:]
