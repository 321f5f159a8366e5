"""Cache of tokenised corpora in the user's cache directory."""

from collections.abc import Sequence
import itertools
import os
import pathlib
import sys
import tempfile

import numpy as np

from lib import common
from lib import compilation
from lib import progress
from specjax.data import token_files
from specjax.data import Tokenizer

DIRECTORY = "SPECJAX_TOKENS"  # environment variable with the cache directory
_LARGEST = 20 * 2**30  # largest total size of all corpora, in bytes


def read(source: str, field: str, tokenizer: Tokenizer, chat: bool = False,
         last_turn: bool = False) -> token_files.TokenFiles:
  """Returns the tokens of a corpus from the cache, or computes and stores them.

  The environment variable SPECJAX_TOKENS names the directory of the cache, by
  default ~/.cache/specjax/tokens. The path of the tokens is printed on stderr.
  If the total size of all corpora exceeds 20 GiB, the least recently used ones
  are deleted.

  Args:
    source: source of the corpus (see `token_files.read`).
    field: field of a record that contains the text or the turns.
    tokenizer: tokenizer of the target.
    chat: True if the records are conversations.
    last_turn: if True, only the last answer of a conversation is trained.
  """
  directory = _directory()
  tokens = token_files.read(
      source, field, tokenizer, directory, chat=chat, last_turn=last_turn,
      say=progress.say)
  # A run that has a deleted corpus mapped into memory can still read it.
  compilation.shrink((x for x in directory.glob("*-tokens*")
                      if x != tokens.path), _LARGEST - tokens.size)
  kind = f"conversations ({field!r})" if chat else "documents"
  copies = f" ({tokens.copies:,} copies)" * bool(tokens.copies)
  print(f"{tokens.documents[0]:,} {kind}, {len(tokens.tokens[0]):,} tokens to "
        f"train on; {tokens.documents[1]:,} held out{copies}; tokens are in "
        f"{tokens.path} ({tokens.size / 1e6:,.1f} MB)", file=sys.stderr)
  trained = (np.ones(len(tokens.tokens[0]), bool) if tokens.answered is None
             else tokens.answered[0])
  start = max(0, int(np.argmax(trained)) - 8)
  part = slice(start, start + 64)
  first = marked(tokenizer, tokens.tokens[0][part], trained[part])[:80]
  print(f"first trained text: {first}", file=sys.stderr)
  if tokens.note:
    print(tokens.note, file=sys.stderr)
  return tokens


def marked(tokenizer: Tokenizer, tokens: Sequence[int],
           trained: Sequence[bool]) -> str:
  """Returns the text of tokens in one line, with the trained parts in « »."""
  pieces = []
  for is_trained, part in itertools.groupby(
      zip(tokens, trained), key=lambda pair: bool(pair[1])):
    text = b"".join(
        tokenizer.token_bytes(int(token))
        or tokenizer.special_tokens.get(int(token), "").encode()
        for token, _ in part).decode(errors="replace")
    pieces.append(f"«{text}»" if is_trained else text)
  return repr("".join(pieces))[1:-1]


def _directory() -> pathlib.Path:
  """Returns the cache directory, or a temporary one if it is not writable."""
  try:
    directory = pathlib.Path(os.environ.get(DIRECTORY) or (
        compilation.cache_directory() / "tokens"))
    directory.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=directory).close()
  except OSError as e:
    print(f"tokens are not stored for the next run: {e}; set the environment "
          f"variable {DIRECTORY} to another directory", file=sys.stderr)
    return common.temporary_directory()
  return directory
