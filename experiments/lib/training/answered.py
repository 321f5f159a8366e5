"""Rows of tokens from conversations, optionally with the target's answers."""

from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import dataclasses
from typing import NamedTuple

import numpy as np

from lib.prompts import reading as prompts_lib
from specjax.data import conversations
from specjax.data import record_files
from specjax.data import Tokenizer


class Stream(NamedTuple):
  """Tokens of several conversations, one after the other.

  Attributes:
    tokens: `[T]` tokens.
    answered: `[T]` bool, True for tokens of the assistant's answers.
    starts: offsets of the first tokens of the conversations.
  """

  tokens: np.ndarray
  answered: np.ndarray
  starts: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
  """Rows of equal length, which are parts of a stream with padding at the end.

  `take` copies only the rows of one batch, so the stream can be mapped from a
  file.

  Attributes:
    tokens: `[T]` stream of tokens.
    trained: `[T]` bool, True for tokens that are trained.
    begins: `[R]` offsets of the first token of each row.
    ends: `[R]` offsets after the last token of each row, without padding.
    size: length of a row, including padding.
  """

  tokens: np.ndarray
  trained: np.ndarray
  begins: np.ndarray
  ends: np.ndarray
  size: int

  @classmethod
  def of(cls, stream: Stream, size: int) -> "Rows":
    """Returns one row for each conversation, with its first `size` tokens.

    Rows without a trained token after the first are left out.

    Args:
      stream: tokens of the conversations. Tokens of answers are trained.
      size: length of a row.

    Raises:
      ValueError: no row is trained.
    """
    tokens, trained, starts = stream
    ends = np.minimum(np.append(starts[1:], len(tokens)), starts + size)
    useful = [i for i, (begin, end) in enumerate(zip(starts, ends))
              if trained[begin + 1:end].any()]
    if not useful:
      raise ValueError(f"--row_tokens is {size}, and no row of so many tokens "
                       "contains an answer; set a larger --row_tokens")
    return cls(tokens, trained, starts[useful], ends[useful], size)

  def __len__(self) -> int:
    return len(self.begins)

  def take(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens and the mask of trained tokens of some rows.

    Padding consists of copies of the row's last token, which are not trained.

    Args:
      numbers: `[n]` numbers of rows.

    Returns:
      `[n, size]` int32 and `[n, size]` bool.
    """
    places = self.begins[numbers, None] + np.arange(self.size)
    ends = self.ends[numbers, None]
    inside = np.minimum(places, ends - 1)
    return (self.tokens[inside].astype(np.int32),
            self.trained[inside] & (places < ends))


def cut(stream: Stream, size: int) -> Stream:
  """Returns a stream with a start at every `size` tokens.

  An incomplete last row is left out.

  Raises:
    ValueError: the stream does not fill a row.
  """
  end = len(stream.tokens) // size * size
  if not end:
    raise ValueError(f"--row_tokens is {size}, and all conversations together "
                     f"have {len(stream.tokens)} tokens; give more "
                     "conversations, or a smaller --row_tokens")
  return Stream(
      stream.tokens[:end], stream.answered[:end], np.arange(0, end, size))


def join(chats: Sequence[tuple[Sequence[int], Sequence[bool]]]) -> Stream:
  """Returns conversations, one after the other.

  Args:
    chats: tokens of each conversation, and their mask (see `Stream`).
  """
  texts, answers = zip(*chats)
  return Stream(np.concatenate([np.asarray(x, np.int32) for x in texts]),
                np.concatenate([np.asarray(x, bool) for x in answers]),
                np.cumsum([0, *map(len, texts[:-1])]))


def read(source: str, tokenizer: Tokenizer
         ) -> list[tuple[list[int], list[bool]]]:
  """Returns the conversations of a source, as arguments of `join`.

  Args:
    source: source of the conversations (see `conversations.field_of`).
    tokenizer: tokenizer of the target.

  Raises:
    ValueError: the source has no conversations, or a record is invalid.
  """
  field = conversations.field_of(source)
  if field is None:
    raise ValueError(f"--data: {source} contains no conversations, whose "
                     "records have a field "
                     f"{' or '.join(map(repr, record_files.TURNS))}")
  chats = []
  for chat in conversations.read(source, field):
    with _naming(chat):
      chats.append(tokenizer.with_variables(chat.variables).chat_answers(
          chat.messages))
  return chats


def prompts(chats: Sequence[conversations.Conversation], tokenizer: Tokenizer,
            *, count: int, prompt_tokens: int, row_tokens: int, seed: int
            ) -> list[list[int]]:
  """Returns the token ids of randomly chosen messages, in the chat template.

  Args:
    chats: conversations to choose from, which end with a message of the user.
    tokenizer: tokenizer of the target.
    count: maximum number of messages.
    prompt_tokens: maximum length of a message in tokens. Longer messages keep
      their last tokens.
    row_tokens: maximum length of message, template and answer together.
    seed: seed for the choice of messages.

  Raises:
    ValueError: a message leaves no room for its answer.
  """
  found = []
  for i in np.random.default_rng(seed).permutation(len(chats))[:count]:
    *before, message = chats[i].messages
    message = prompts_lib.user(tokenizer, message["content"], prompt_tokens)
    with _naming(chats[i]):
      found.append(tokenizer.with_variables(chats[i].variables).chat(
          [*before, message]))
  longest = max(map(len, found))
  if longest >= row_tokens:
    raise ValueError(f"--row_tokens is {row_tokens}, and the longest message "
                     f"has {longest} tokens with its system message and chat "
                     "template; set a smaller --self_prompt_tokens, or a "
                     "larger --row_tokens")
  return found


@contextlib.contextmanager
def _naming(chat: conversations.Conversation) -> Iterator[None]:
  """Adds the place of a conversation to a `ValueError`."""
  try:
    yield
  except ValueError as e:
    raise ValueError(f"{chat.place}: {e}") from None
