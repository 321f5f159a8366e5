"""Rows of tokens from conversations, optionally with the target's answers."""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import os
import pathlib
from typing import NamedTuple

import numpy as np

from lib import common
from lib import models
from lib.prompts import reading as prompts_lib
from specjax.data import conversations
from specjax.data import record_files
from specjax.data import Tokenizer
from specjax.decoding.placement import Placement
from specjax.models import Pretrained
from specjax.training import distillation


class Conversation(NamedTuple):
  """Tokens of a conversation.

  Attributes:
    tokens: tokens of all messages and answers.
    answered: mask, True for tokens of the assistant's answers.
  """

  tokens: Sequence[int]
  answered: Sequence[bool]


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
  def packed(cls, tokens: np.ndarray, trained: np.ndarray, size: int) -> "Rows":
    """Cuts a stream into rows without padding.

    An incomplete last row is left out.

    Args:
      tokens: `[T]` stream of tokens.
      trained: `[T]` bool, True for tokens that are trained.
      size: length of a row.

    Raises:
      ValueError: the stream does not fill a row, or no row is trained.
    """
    count = len(tokens) // size
    if not count:
      raise ValueError(f"--row_tokens is {size}, and all conversations "
                       f"together have {len(tokens)} tokens; give more "
                       "conversations, or a smaller --row_tokens")
    begins = np.arange(count) * size
    return cls(tokens[:count * size], trained[:count * size], begins,
               begins + size, size)._useful()

  @classmethod
  def of_conversations(cls, tokens: np.ndarray, trained: np.ndarray,
                       starts: np.ndarray, size: int) -> "Rows":
    """Returns one row for each conversation, with its first `size` tokens.

    Args:
      tokens: `[T]` tokens of the conversations, one after the other.
      trained: `[T]` bool, True for tokens that are trained.
      starts: offsets of the first tokens of the conversations.
      size: length of a row.

    Raises:
      ValueError: no row is trained.
    """
    ends = np.append(starts[1:], len(tokens))
    return cls(tokens, trained, starts, np.minimum(ends, starts + size), size
               )._useful()

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

  def _useful(self) -> "Rows":
    """Returns the rows with a trained token after the first."""
    useful = [i for i, (begin, end) in enumerate(zip(self.begins, self.ends))
              if self.trained[begin + 1:end].any()]
    if not useful:
      raise ValueError(f"--row_tokens is {self.size}, and no row of so many "
                       "tokens contains an answer; set a larger --row_tokens")
    return dataclasses.replace(
        self, begins=self.begins[useful], ends=self.ends[useful])


@dataclasses.dataclass(frozen=True, eq=False)
class Conversations:
  """Generator of the target's answers to messages, and of training rows.

  Attributes:
    target: target model that generates the answers.
    tokenizer: tokenizer of the target.
    temperature: sampling temperature of the answers.
    row_tokens: length of a row. It is also the maximum length of message,
      template and answer together.
    prompt_tokens: maximum length of a message in tokens. Longer messages keep
      their last tokens.
    seed: seed for the choice of messages.
    placement: placement of the decoder on a mesh, or None.
    files: keyword arguments of `distillation.write_answers`.
  """

  target: Pretrained
  tokenizer: Tokenizer
  temperature: float
  row_tokens: int
  prompt_tokens: int
  seed: int
  placement: Placement | None = None
  files: Mapping[str, int] = dataclasses.field(default_factory=dict)

  def prompts(self, chats: Sequence[conversations.Conversation], count: int
              ) -> list[list[int]]:
    """Returns the token ids of randomly chosen messages, in the chat template.

    Args:
      chats: conversations to choose from, which end with a message of the user.
      count: maximum number of messages.
    """
    order = np.random.default_rng(self.seed).permutation(len(chats))[:count]
    return [self._prompt(chats[i]) for i in order]

  def _prompt(self, chat: conversations.Conversation) -> list[int]:
    *before, message = chat.messages
    message = prompts_lib.user(
        self.tokenizer, message["content"], self.prompt_tokens)
    try:
      return self.tokenizer.with_variables(chat.variables).chat(
          [*before, message])
    except ValueError as e:
      raise ValueError(f"{chat.place}: {e}") from None

  def check_room(self, prompts: Sequence[Sequence[int]]) -> None:
    """Raises `ValueError` if a message leaves no room for its answer."""
    longest = max(map(len, prompts))
    if longest >= self.row_tokens:
      raise ValueError(
          f"--row_tokens is {self.row_tokens}, and the longest message has "
          f"{longest} tokens with its system message and chat template; set a "
          "smaller --self_prompt_tokens, or a larger --row_tokens")

  def answer(self, prompts: Sequence[Sequence[int]],
             directory: str | os.PathLike[str], seed: int
             ) -> list[Conversation]:
    """Returns conversations of the messages and generated answers.

    Args:
      prompts: token ids of the messages, from the method `prompts`.
      directory: directory where the answers are stored.
      seed: seed for sampling the answers.
    """
    decoder = dataclasses.replace(
        common.autoregressive(self.target.model, self.temperature),
        eos=models.ends(self.target, self.tokenizer))
    answers = distillation.write_answers(
        decoder, {"target": self.target.params}, prompts,
        max_new_tokens=self.row_tokens - max(map(len, prompts)), top=0,
        directory=pathlib.Path(directory), seed=seed,
        placement=self.placement, **self.files)
    texts = [text[:n] for part in answers
             for text, n in zip(part.tokens, part.lengths)]
    return [Conversation(text, np.arange(len(text)) >= len(prompt))
            for text, prompt in zip(texts, prompts, strict=True)]

  def read(self, path: str) -> list[Conversation]:
    """Returns the conversations of a source, without generation.

    Args:
      path: source of the conversations (see `conversations.field_of`).

    Raises:
      ValueError: the source has no conversations, or a record is invalid.
    """
    field = conversations.field_of(path)
    if field is None:
      raise ValueError(f"--data: {path} contains no conversations, whose "
                       "records have a field "
                       f"{' or '.join(map(repr, record_files.TURNS))}")
    chats = []
    for chat in conversations.read(path, field):
      try:
        chats.append(Conversation(*self.tokenizer.chat_answers(chat.messages)))
      except ValueError as e:
        raise ValueError(f"{chat.place}: {e}") from None
    return chats


def join(chats: Sequence[Conversation]) -> Stream:
  """Returns conversations, one after the other."""
  texts, answers = zip(*chats)
  return Stream(np.concatenate([np.asarray(x, np.int32) for x in texts]),
                np.concatenate([np.asarray(x, bool) for x in answers]),
                np.cumsum([0, *map(len, texts[:-1])]))
