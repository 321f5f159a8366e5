"""Files with the token ids of corpora, mapped into memory.

A corpus is tokenised once, in pieces. The name of the directory with its tokens
is a hash of the text and the tokenizer. Later runs with the same corpus and
tokenizer only hash the text files.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import shutil
import uuid

import numpy as np
import tokenizers as library
import tqdm

from specjax.data import conversations
from specjax.data import corpora
from specjax.data import token_streams
from specjax.data.tokenizers import Tokenizer
from specjax.utils import files
from specjax.utils.fingerprints import Digest
from specjax.utils.fingerprints import fingerprint

_ABOUT = "about.json"
_FORMAT = 2  # version of the files; increase it if their contents change
_SIDES = ("training", "held_out")
_DTYPE = np.dtype(np.uint32)
_PIECE = 2**20  # characters or tokens that are processed together
_TOGETHER = 1024  # conversations that are processed together


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenFiles:
  """Tokens of a corpus, divided into a training part and a held-out part.

  Attributes:
    tokens: tokens of the two parts, each `[T]` uint32. The arrays are mapped
      from files, so only accessed parts are in memory.
    answered: masks of the two parts, each `[T]` bool, True for tokens of an
      assistant's answer. None if the corpus has no conversations.
    starts: offsets of the first tokens of the documents or conversations in the
      two parts, each int64.
    documents: numbers of documents, or of conversations with an answer, in the
      two parts.
    num_bytes: numbers of UTF-8 bytes in the two parts; 0 for conversations.
    corpus: fingerprint of all documents.
    fingerprints: fingerprint of the tokens of both parts, and fingerprint of
      the training tokens.
    copies: number of documents that occurred before in the corpus.
    note: message about skipped conversations, or "".
    path: directory of the files.
  """

  tokens: tuple[np.ndarray, np.ndarray]
  answered: tuple[np.ndarray, np.ndarray] | None
  starts: tuple[np.ndarray, np.ndarray]
  documents: tuple[int, int]
  num_bytes: tuple[int, int]
  corpus: str
  fingerprints: tuple[str, str]
  copies: int
  note: str
  path: pathlib.Path

  @property
  def size(self) -> int:
    """Size of all files in bytes."""
    return sum(x.nbytes for x in (
        *self.tokens, *self.starts, *(self.answered or ())))

  def counts(self, vocab_size: int, answers_only: bool) -> np.ndarray:
    """Returns `[V]`, the number of occurrences of each token in training.

    Args:
      vocab_size: vocabulary size V.
      answers_only: if True, only tokens of answers are counted.
    """
    total = np.zeros(vocab_size, np.int64)
    for start in range(0, len(self.tokens[0]), _PIECE):
      piece = self.tokens[0][start:start + _PIECE]
      if answers_only:
        piece = piece[self.answered[0][start:start + _PIECE]]
      total += np.bincount(piece, minlength=vocab_size)
    return total


def read(source: str, field: str, tokenizer: Tokenizer,
         directory: str | os.PathLike[str], *, chat: bool = False,
         last_turn: bool = False,
         say: Callable[[str], None] = lambda stage: None) -> TokenFiles:
  """Returns the tokens of a corpus, and writes their files if they are missing.

  Args:
    source: source of documents (see `corpora.iter_documents`), or with `chat`,
      source of conversations (see `conversations.field_of`).
    field: field of a record that contains the text or the turns.
    tokenizer: tokenizer of the target. Every document begins with its `bos`, or
      with `eos` if it has no `bos`.
    directory: directory of the files of all corpora.
    chat: if True, records are conversations. The chat template formats them.
    last_turn: if True, only the last answer of a conversation is trained.
    say: function that is called with a message before tokenisation starts.

  Raises:
    ValueError: the source cannot be read, or has too little text.
  """
  name = fingerprint(
      _FORMAT, corpora.digest(source, None if chat else field), field,
      library.__version__, tokenizer.backend.to_str(), tokenizer.bos,
      tokenizer.eos, *((tokenizer.chat_template, tokenizer.names,
                        tokenizer.variables, last_turn) if chat else ()))
  path = pathlib.Path(directory) / f"{name}-tokens"
  found = _open(path)
  if found is None:
    say("tokenising the text")
    with _whole(path) as partial:
      _write(partial, source, field, tokenizer, chat, last_turn)
    found = _open(path)
  return found


@contextlib.contextmanager
def _whole(path: pathlib.Path) -> Iterator[pathlib.Path]:
  """Yields a temporary directory and renames it to `path` at the end.

  Several processes may write to the same path concurrently, because their files
  are equal.
  """
  partial = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.partial")
  try:
    partial.mkdir(parents=True)
    yield partial
    try:
      partial.rename(path)
    except OSError:
      # `path` exists. A valid one is from a concurrent process and stays.
      if _open(path) is None:
        shutil.rmtree(path, ignore_errors=True)
        partial.rename(path)
  finally:
    shutil.rmtree(partial, ignore_errors=True)


def _open(path: pathlib.Path) -> TokenFiles | None:
  """Maps the files of a directory into memory.

  Returns None if a file is missing or truncated.
  """
  try:
    about = files.read_json(path / _ABOUT, "delete it")
    arrays = {f"{side}.{kind}": _mapped(path / f"{side}.{kind}", dtype,
                                        about[sizes][i])
              for i, side in enumerate(_SIDES) for kind, dtype, sizes in (
                  ("tokens", _DTYPE, "tokens"), ("starts", np.int64, "starts"),
                  ("answered", bool, "tokens"))
              if about["chat"] or dtype is not bool}
  except (OSError, ValueError, KeyError):
    return None
  with contextlib.suppress(OSError):
    os.utime(path / _ABOUT)  # its time is the time of the last use
  both = lambda kind: tuple(arrays[f"{side}.{kind}"] for side in _SIDES)
  return TokenFiles(
      tokens=both("tokens"), answered=both("answered") if about["chat"]
      else None, starts=both("starts"), documents=tuple(about["documents"]),
      num_bytes=tuple(about["num_bytes"]), corpus=about["corpus"],
      fingerprints=tuple(about["fingerprints"]), copies=about["copies"],
      note=about["note"], path=path)


def _mapped(path, dtype, count):
  if not count:  # an empty file cannot be mapped
    return np.zeros(0, dtype)
  return np.memmap(path, dtype, "r", shape=(count,)).view(np.ndarray)


class _Writer:
  """Writer of the files of a corpus.

  Attributes:
    num_bytes: numbers of UTF-8 bytes written so far, for the training part and
      the held-out part.
    note: message about skipped conversations, or "".
  """

  def __init__(self, stack: contextlib.ExitStack, path: pathlib.Path):
    self._files = [
        [stack.enter_context(open(path / f"{side}.{kind}", "wb"))
         for kind in ("tokens", "answered", "starts")] for side in _SIDES]
    self._written = [0, 0]
    self.num_bytes = [0, 0]
    self.note = ""

  def add(self, side: int, ids: Sequence[int], starts: Sequence[int],
          answered: Sequence[bool] = ()) -> None:
    """Appends tokens to the training part (`side` 0) or held-out part (1).

    `starts` are the offsets in `ids` at which documents begin.
    """
    tokens, marks, offsets = self._files[side]
    tokens.write(np.asarray(ids, _DTYPE).tobytes())
    marks.write(np.asarray(answered, bool).tobytes())
    offsets.write((np.asarray(starts, np.int64) + self._written[side]).tobytes()
                  )
    self._written[side] += len(ids)


def _write(path, source, field, tokenizer, chat, last_turn):
  """Writes the files of a corpus.

  The source is read twice, because the division into a training part and a
  held-out part depends on the names of all documents.
  """
  silent = []  # places of conversations without an answer
  items = (functools.partial(_answered, source, field, last_turn, silent)
           if chat else functools.partial(corpora.iter_documents, source, field)
           )
  digest, documents, seen, size = Digest(), [0, 0], set(), 0

  def names():
    nonlocal size
    for i, item in enumerate(items()):
      content = repr((item.messages, item.variables)) if chat else item
      digest.add(f"[0][{i}]", content)
      seen.add(hash(content if chat else item.text))
      size += 1 if chat else len(item.text)
      yield item.name

  held_out = corpora.held_out(names())
  for side in held_out:
    documents[side] += 1
  with contextlib.ExitStack() as stack:
    writer = _Writer(stack, path)
    # A text counts in characters, because a corpus may be one document.
    bar = stack.enter_context(tqdm.tqdm(
        total=size, disable=None, desc="tokenising", dynamic_ncols=True,
        unit="conversation" if chat else "character", unit_scale=not chat))
    sides = zip(held_out, items())
    if chat:
      _write_chats(writer, tokenizer, sides, tuple(silent), bar)
    else:
      _write_texts(writer, tokenizer, sides, bar)
  both, first = Digest(), Digest()
  for i, side in enumerate(_SIDES):
    both.add_array(f"[0][{i}]", path / f"{side}.tokens", _DTYPE)
  first.add_array("[0]", path / "training.tokens", _DTYPE)
  # No other process uses the temporary directory. So the write need not be
  # atomic, unlike that of `files.write_json`.
  count = lambda kind, dtype: [
      (path / f"{side}.{kind}").stat().st_size // np.dtype(dtype).itemsize
      for side in _SIDES]
  (path / _ABOUT).write_text(json.dumps({
      "chat": chat, "documents": documents, "num_bytes": writer.num_bytes,
      "tokens": count("tokens", _DTYPE), "starts": count("starts", np.int64),
      "corpus": digest.value, "fingerprints": [both.value, first.value],
      "copies": len(held_out) - len(seen),
      "note": writer.note}))


def _write_texts(writer, tokenizer, documents, bar):
  waiting, sizes = ([], []), [0, 0]
  between = token_streams.separator(tokenizer)

  def write(side):
    writer.num_bytes[side] += sum(len(text.encode()) for text in waiting[side])
    for ids in token_streams.encode(tokenizer, waiting[side]):
      # Text is never encoded as the special token between documents.
      writer.add(side, ids, np.flatnonzero(ids == between))
      done = min(sizes[side], token_streams.TOGETHER)
      sizes[side] -= done
      bar.update(done)
    waiting[side].clear()
    bar.update(sizes[side])
    sizes[side] = 0

  for side, document in documents:
    waiting[side].append(document.text)
    sizes[side] += len(document.text)
    if sizes[side] >= _PIECE:
      write(side)
  for side in range(len(_SIDES)):
    write(side)


def _write_chats(writer, tokenizer, chats, silent, bar):
  """Writes conversations and sets the note about skipped ones."""
  refused, written = [], 0

  def encode(item):
    try:
      ids, answered = tokenizer.with_variables(item[1].variables).chat_answers(
          item[1].messages)
      return (ids, answered) if any(answered) else (
          "the chat template writes no answer")
    except ValueError as e:
      return str(e)

  # The library releases Python's lock while it encodes.
  with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    while some := list(itertools.islice(chats, _TOGETHER)):
      for (side, chat), found in zip(some, pool.map(encode, some)):
        bar.update()
        if isinstance(found, str):
          refused.append(f"{chat.place}: {found}")
        else:
          written += 1
          ids, answered = found
          writer.add(side, ids, [0], answered)
  if not written:
    raise ValueError(f"no conversation can be used; {refused[0]}")
  left_out = [*refused, *(f"{place}: it has no answer" for place in silent)]
  if left_out:
    writer.note = (f"{len(left_out):,} of {len(left_out) + written:,} "
                   f"conversations are left out; {left_out[0]}")


def _answered(source, field, last_turn, silent):
  """Yields conversations with an answer that is trained.

  Replaces the contents of `silent` by the places of the other conversations.
  """
  silent.clear()
  empty = True
  for chat in conversations.read(source, field):
    if last_turn:
      chat = conversations.last_answer_only(chat)
    if any(map(conversations.is_answer, chat.messages)):
      empty = False
      yield chat
    else:
      silent.append(chat.place)
  if empty:
    raise ValueError(f"{source} contains no conversation with an answer of an "
                     "assistant; give at least two")
