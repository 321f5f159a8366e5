"""Rows of tokens from conversations, optionally with the target's answers."""

from collections.abc import Iterable
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
from specjax.data import batches
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


class Rows(NamedTuple):
  """Rows of tokens for training or evaluation.

  Attributes:
    tokens: `[R, row_tokens]` int32.
    answered: `[R, row_tokens]` bool, True for tokens of answers.
  """

  tokens: np.ndarray
  answered: np.ndarray


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

  def prompts(self, messages: Sequence[str], count: int) -> list[list[int]]:
    """Returns the token ids of randomly chosen messages, in the chat template.

    Args:
      messages: messages to choose from.
      count: maximum number of messages.
    """
    order = np.random.default_rng(self.seed).permutation(len(messages))[:count]
    return [self.tokenizer.chat([prompts_lib.user(
        self.tokenizer, messages[i], self.prompt_tokens)]) for i in order]

  def check_room(self, prompts: Sequence[Sequence[int]]) -> None:
    """Raises `ValueError` if a message leaves no room for its answer."""
    longest = max(map(len, prompts))
    if longest >= self.row_tokens:
      raise ValueError(
          f"--row_tokens is {self.row_tokens}, and the longest message has "
          f"{longest} tokens with its chat template; set a smaller "
          "--self_prompt_tokens, or a larger --row_tokens")

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

  def rows(self, chats: Iterable[Conversation]) -> Rows:
    """Joins conversations and cuts them into rows.

    Args:
      chats: conversations to join.

    Raises:
      ValueError: the conversations together do not fill a row.
    """
    texts, answers = zip(*chats)
    return cut(np.concatenate([np.asarray(x, np.int32) for x in texts]),
               np.concatenate([np.asarray(x, bool) for x in answers]),
               self.row_tokens)

  def held_out_rows(self, chats: Sequence[Conversation]
                    ) -> batches.HeldOutRows:
    """Joins conversations and cuts them into rows that do not overlap."""
    lengths = [len(chat.tokens) for chat in chats]
    return batches.held_out_rows(
        np.concatenate([np.asarray(chat.tokens, np.int32) for chat in chats]),
        np.cumsum([0, *lengths[:-1]]), len(chats), self.row_tokens)


def cut(tokens: np.ndarray, answered: np.ndarray, size: int) -> Rows:
  """Cuts a stream of tokens into rows and drops an incomplete last row.

  Args:
    tokens: `[T]`, stream of tokens.
    answered: `[T]` bool, True for tokens of the assistant's answers.
    size: length of a row.

  Raises:
    ValueError: the stream does not fill a row.
  """
  count = len(tokens) // size
  if not count:
    raise ValueError(f"--row_tokens is {size}, and all conversations together "
                     f"have {len(tokens)} tokens; give more conversations, or "
                     "a smaller --row_tokens")
  rows = lambda x: x[:count * size].reshape(count, size)
  return Rows(rows(tokens), rows(answered))
