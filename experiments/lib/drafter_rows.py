"""The rows that heads learn from, and those that they are measured by.

They are cut out of texts as these are, or the target writes them: continuations
of beginnings of the texts, or conversations, with answers to the texts.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np

from lib import answered
from lib import common
from lib import meshes
from lib import prompts as prompts_lib
from lib.answered import Rows
from specjax.data import batches
from specjax.data import corpora
from specjax.data import Tokenizer
from specjax.files import fingerprint
from specjax.models import Pretrained
from specjax.training import distillation
from specjax.training import kept_features
from specjax.training.objectives import Objective

Batches = Callable[[int], dict[str, Any]]
_SIDES = "training", "held_out"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Text:
  """The texts of a run, those to learn from and those held out.

  Attributes:
    sides: the two lists of texts.
    streams: their tokens, two arrays `[T]`.
    corpus: a fingerprint of all documents.
  """

  sides: tuple[list[str], list[str]]
  streams: tuple[np.ndarray, np.ndarray]
  corpus: str


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Source:
  """Where the rows of a run come from, by the flags of `train_drafter.py`.

  Attributes:
    data: a source of texts, or self[:SOURCE] for what the target writes.
    field: of its records that holds a text, or None.
    batch_size: rows of a step.
    pass_rows: rows of one pass of the target: a step may be cut into parts.
    held_out_rows: rows that the heads are measured by.
    self_rows: rows that the target writes to learn from.
    prompt_tokens: of such a row, which are the source's.
    temperature: at which the target writes.
    chat: whether it answers the texts, which are messages.
    conversations: JSONL of others to learn from besides, or None.
    rows_per_file: how many rows or answers it writes together, or None for the
      number that `training.distillation` takes by itself.
    directory: where what it writes is kept.
    answers_only: whether the tokens of answers alone are learned from.
    keeps_features: whether what the target says of a row is kept.
    seed: of the shuffle, the choice of texts and what the target writes.
  """

  data: str
  field: str | None
  batch_size: int
  pass_rows: int
  held_out_rows: int
  self_rows: int
  prompt_tokens: int
  temperature: float
  chat: bool
  conversations: str | None
  rows_per_file: int | None
  directory: pathlib.Path
  answers_only: bool
  keeps_features: bool
  seed: int

  @property
  def own(self) -> str | None:
    """The source that the target goes on from, or None for ordinary data."""
    name, _, source = self.data.partition(":")
    return (source or "stdlib") if name == "self" else None

  def check(self, tokenizer: Tokenizer, given: Sequence[str] = ()) -> None:
    """Refuses settings that nothing would read.

    Args:
      tokenizer: the target's.
      given: names of flags that were given and are for rows that the target
        writes, whatever their values.
    """
    for name, value in (("self_chat", self.chat),
                        ("keep_features", self.keeps_features),
                        *((name, True) for name in given)):
      if value and self.own is None:
        raise ValueError(f"--{name} is for rows that the target writes; "
                         "give --data=self:SOURCE as well")
    if self.conversations is not None and not self.chat:
      raise ValueError(f"--conversations is {self.conversations} and is read "
                       "beside those of --self_chat; give that as well")
    if self.answers_only and not self.chat:
      raise ValueError("--answers_only is for the conversations of "
                       "--self_chat; give that as well")
    prompts_lib.check_chat(tokenizer, self.chat)

  def text(self, tokenizer: Tokenizer) -> Text:
    """Reads the texts, in the tokens of the target's tokenizer."""
    if self.own and self.self_rows < self.batch_size:
      raise ValueError(f"--self_rows is {self.self_rows} and a batch has "
                       f"{self.batch_size}; sample at least one batch")
    documents = corpora.read_documents(self.own or self.data, self.field)
    sides = tuple([d.text for d in side] for side in corpora.split(documents))
    return Text(sides=sides, corpus=fingerprint(documents),
                streams=tuple(map(tokenizer.encode_stream, sides)))

  @property
  def _written(self):
    """`(name, rows to write, seed)` of both sides."""
    return [(name, count, self.seed + i) for i, (name, count) in enumerate(
        zip(_SIDES, (self.self_rows, self.held_out_rows)))]

  @property
  def _files(self):
    """What `training.distillation` is told of the size of its files."""
    return {} if self.rows_per_file is None else {
        "rows_per_file": self.rows_per_file}

  def answered(self, target: Pretrained, tokenizer: Tokenizer, text: Text,
               row_tokens: int, mesh: jax.sharding.Mesh | None
               ) -> tuple[Rows, Rows]:
    """`(rows to train on, held-out rows)` of conversations with the target.

    Args:
      target: that answers.
      tokenizer: the target's.
      text: whose texts are the messages.
      row_tokens: of a row.
      mesh: of devices, or None.
    """
    chats = answered.Conversations(
        target=target, tokenizer=tokenizer, row_tokens=row_tokens,
        temperature=self.temperature, seed=self.seed,
        prompt_tokens=self.prompt_tokens, placement=meshes.placement(mesh),
        files=self._files)
    given = [] if self.conversations is None else chats.given(
        self.conversations)
    prompts = [chats.prompts(side, count)
               for side, (_, count, _) in zip(text.sides, self._written)]
    for side in prompts:
      chats.check_room(side)
    training, held_out = (
        chats.answer(some, self.directory / name, seed)
        for some, (name, _, seed) in zip(prompts, self._written))
    return chats.rows([*training, *given]), chats.rows(held_out)

  def rows(self, target: Pretrained, objective: Objective, text: Text,
           chats: tuple[Rows, Rows] | None, row_tokens: int,
           mesh: jax.sharding.Mesh | None
           ) -> Callable[[], tuple[Batches, np.ndarray]]:
    """`() -> (step -> batch, held-out rows)`; all that can fail is done.

    What is left are the rows that the target writes itself, after beginnings of
    both sides' text.

    Args:
      target: that writes them.
      objective: of the run, which `read`s what is kept of the features.
      text: of the run.
      chats: of `answered`, or None.
      row_tokens: of a row.
      mesh: of devices, or None.
    """
    if self.own is None:
      training, held_out = text.streams
      windows = batches.TokenWindows(
          training, self.batch_size, row_tokens - 1, self.seed)
      held_out = batches.spread_rows(held_out, self.held_out_rows, row_tokens)
      return lambda: (lambda step: {"tokens": windows.batch(step)}, held_out)
    if chats is not None:
      training, held_out = chats
      batch = self._batches(training.tokens, objective, target)
      if self.answers_only:
        batch = self._weighed(batch, training.answered)
      return lambda: (batch, held_out.tokens)
    prompts = self._beginnings(text.streams, row_tokens)
    decoder = common.autoregressive(target.model, self.temperature)

    def sample():
      training, held_out = (
          distillation.sample_rows(
              decoder, {"target": target.params}, some, length=row_tokens,
              directory=self.directory / name, seed=seed,
              placement=meshes.placement(mesh), **self._files)
          for some, (name, _, seed) in zip(prompts, self._written))
      return self._batches(training, objective, target), held_out

    return sample

  def _beginnings(self, streams: Sequence[np.ndarray], row_tokens: int):
    """The beginnings of both sides' rows."""
    if self.prompt_tokens >= row_tokens:
      raise ValueError(f"--self_prompt_tokens is {self.prompt_tokens} and a "
                       f"row has {row_tokens} tokens; give shorter prompts")
    return [
        distillation.cut_prompts(tokens, count, self.prompt_tokens, self.seed)
        for tokens, (_, count, _) in zip(streams, self._written)]

  def _weighed(self, batch, answered_tokens):
    """The batches of `batch`, in which the tokens of answers alone count."""
    order = distillation.RowBatches(
        answered_tokens[:, 1:], self.batch_size, self.seed)
    return lambda step: {
        **batch(step), "weights": order.batch(step).astype(np.float32)}

  def _batches(self, rows, objective, target):
    """`step -> batch` of rows that come again, see `keeps_features`."""
    if not self.keeps_features:
      order = distillation.RowBatches(rows, self.batch_size, self.seed)
      return lambda step: {"tokens": order.batch(step)}
    read = jax.jit(objective.read)
    return kept_features.KeptFeatures(
        rows, self.batch_size, pass_rows=self.pass_rows, seed=self.seed,
        read=lambda rows: read({"target": target.params, "drafter": {}}, rows)
    ).batch
