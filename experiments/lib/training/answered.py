"""Conversations that a target writes or reads, as rows to train on."""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import os
import pathlib
from typing import Any
from typing import NamedTuple

import numpy as np

from lib import common
from lib import models
from lib.prompts import reading as prompts_lib
from specjax.data import conversations
from specjax.data import Tokenizer
from specjax.models import Pretrained
from specjax.training import distillation


class Conversation(NamedTuple):
  """Messages and answers.

  Attributes:
    tokens: of all.
    answered: which of them an assistant writes.
  """

  tokens: Sequence[int]
  answered: Sequence[bool]


class Rows(NamedTuple):
  """Rows to train on or to measure by.

  Attributes:
    tokens: `[R, row_tokens]` int32.
    answered: `[R, row_tokens]` bool, which of them are of an answer.
  """

  tokens: np.ndarray
  answered: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Conversations:
  """Messages, the answers of the target, and rows that are cut out of both.

  Attributes:
    target: that answers.
    tokenizer: the target's.
    temperature: of the answers.
    row_tokens: of a row. A message keeps its last `prompt_tokens`, and message,
      template and answer fill a row at most.
    prompt_tokens: of a message.
    seed: of the choice of the messages and of the answers.
    placement: of the decoder on a mesh.
    files: further arguments of `distillation.write_answers`.
  """

  target: Pretrained
  tokenizer: Tokenizer
  temperature: float
  row_tokens: int
  prompt_tokens: int
  seed: int
  placement: Any = None
  files: Mapping[str, int] = dataclasses.field(default_factory=dict)

  def prompts(self, texts: Sequence[str], count: int) -> list[list[int]]:
    """Token ids of `count` of the messages, or of all where there are fewer."""
    order = np.random.default_rng(self.seed).permutation(len(texts))[:count]
    return [self.tokenizer.chat([prompts_lib.user(
        self.tokenizer, texts[i], self.prompt_tokens)]) for i in order]

  def check_room(self, prompts: Sequence[Sequence[int]]) -> None:
    """Raises a `ValueError` where a message leaves its answer no room."""
    longest = max(map(len, prompts))
    if longest >= self.row_tokens:
      raise ValueError(
          f"the longest message has {longest} tokens with its template and a "
          f"row {self.row_tokens}; give a smaller --self_prompt_tokens, or "
          "longer --row_tokens")

  def answer(self, prompts: Sequence[Sequence[int]],
             directory: str | os.PathLike[str], seed: int
             ) -> list[Conversation]:
    """The conversations, which the target ends.

    Args:
      prompts: of `prompts`.
      directory: where the answers are kept, or were by a call before.
      seed: of the answers.
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

  def given(self, path: str) -> list[Conversation]:
    """Conversations that others wrote.

    Args:
      path: a source of conversations, see `conversations.field_of`.

    Raises:
      ValueError: it holds none, or a record is not what it should be.
    """
    field = conversations.field_of(path)
    if field is None:
      raise ValueError(f"{path} holds no conversations; a record has "
                       f"{' or '.join(map(repr, conversations.FIELDS))}")
    found = []
    for chat in conversations.read(path, field):
      try:
        found.append(Conversation(*self.tokenizer.chat_answers(chat.messages)))
      except ValueError as e:
        raise ValueError(f"{chat.place}: {e}") from None
    return found

  def rows(self, chats: Iterable[Conversation]) -> Rows:
    """Rows of one conversation after the other.

    They are joined and cut; what fills no row is left out.

    Raises:
      ValueError: together they fill no row.
    """
    texts, answers = zip(*chats)
    return cut(np.concatenate([np.asarray(x, np.int32) for x in texts]),
               np.concatenate([np.asarray(x, bool) for x in answers]),
               self.row_tokens)


def cut(tokens: np.ndarray, answered: np.ndarray, size: int) -> Rows:
  """Cuts a stream `[T]` into rows; the tokens that fill no row are left out.

  Args:
    tokens: the stream.
    answered: `[T]` bool, which of its tokens an assistant writes.
    size: tokens of a row.

  Raises:
    ValueError: they fill no row.
  """
  count = len(tokens) // size
  if not count:
    raise ValueError(f"the conversations have {len(tokens)} tokens together "
                     f"and a row {size}; give more of them, or shorter "
                     "--row_tokens")
  rows = lambda x: x[:count * size].reshape(count, size)
  return Rows(rows(tokens), rows(answered))
