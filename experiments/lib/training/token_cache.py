"""The tokens of corpora, kept for later runs in the user's cache directory."""

import os
import pathlib
import shutil
import sys
import tempfile

from lib import common
from lib import compilation
from lib import progress
from specjax.data import token_files
from specjax.data import Tokenizer

DIRECTORY = "SPECJAX_TOKENS"  # an environment variable
_LARGEST = 20 * 2**30  # bytes of all corpora after one is added


def read(source: str, field: str, tokenizer: Tokenizer, chat: bool = False
         ) -> token_files.TokenFiles:
  """Returns the tokens of a corpus; see `token_files.read`.

  They are stored in ~/.cache/specjax/tokens or in the directory that the
  environment variable SPECJAX_TOKENS names. The place is printed on stderr. The
  least recently used corpora are deleted when all take more than 20 GiB.
  """
  directory = _directory()
  found = token_files.read(
      source, field, tokenizer, directory, chat=chat, say=progress.say)
  _shrink(directory, found.path)
  kind = "conversations" if chat else "documents"
  print(f"{found.documents[0]:,} {kind}, {len(found.tokens[0]):,} tokens to "
        f"train on; {found.documents[1]:,} {kind} held out; tokens are in "
        f"{found.path} ({found.size / 1e6:,.1f} MB)", file=sys.stderr)
  if found.note:
    print(found.note, file=sys.stderr)
  return found


def _directory() -> pathlib.Path:
  """The directory of all corpora, or one that is deleted with the run."""
  try:
    directory = pathlib.Path(os.environ.get(DIRECTORY) or (
        compilation.cache_directory() / "tokens"))
    directory.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=directory).close()
  except OSError as e:
    print(f"tokens are not kept for the next run: {e}; name another directory "
          f"by the environment variable {DIRECTORY}", file=sys.stderr)
    return common.temporary_directory()
  return directory


def _shrink(directory, used, largest=_LARGEST):
  """Deletes the least recently used corpora, except `used`.

  A run that has a deleted corpus mapped keeps it: the system frees the space
  when the run ends.
  """
  entries = []
  for path in directory.glob("*-tokens*"):
    try:
      stats = [x.stat() for x in path.iterdir()]
    except OSError:  # another process deletes it
      continue
    entries.append((max((x.st_mtime for x in stats), default=0),
                    sum(x.st_size for x in stats), path))
  total = sum(size for _, size, _ in entries)
  for _, size, path in sorted(entries):
    if total <= largest:
      break
    if path != used:
      shutil.rmtree(path, ignore_errors=True)
      total -= size
