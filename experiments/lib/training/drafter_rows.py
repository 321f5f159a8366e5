"""Rows of tokens for training and evaluating heads.

Rows are cut from documents or conversations, or the target generates them. The
target continues the beginnings of documents, or answers messages.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import functools
import pathlib
import sys
from typing import Any

import jax
import numpy as np

from lib import common
from lib import meshes
from lib.prompts import reading as prompts_lib
from lib.training import answered
from lib.training import token_cache
from lib.training.answered import Rows
from specjax.analysis.intervals import FEWEST
from specjax.data import batches
from specjax.data import conversations
from specjax.data import corpora
from specjax.data import record_files
from specjax.data import token_files
from specjax.data import Tokenizer
from specjax.data.batches import HeldOutRows
from specjax.methods import Heads
from specjax.models import Pretrained
from specjax.models import Transformer
from specjax.objectives import Objective
from specjax.training import distillation
from specjax.training import kept_features
from specjax.utils.fingerprints import fingerprint

Batches = Callable[[int], dict[str, Any]]
ROW_TOKENS_DEFAULT = 512  # rows of the full context often exceed the memory
_MOST_BYTES = 2**31  # largest size of the float32 logits of one pass
_SIDES = "training", "held_out"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Text:
  """Training and held-out documents or conversations of a run.

  Attributes:
    corpus: fingerprint of all documents.
    files: tokens of the documents. None if the documents are messages that the
      target answers.
    sides: training messages and held-out messages that the target answers, or
      None.
    chats: training rows and held-out rows with the target's answers. None until
      `Source.answered` generates them.
  """

  corpus: str
  files: token_files.TokenFiles | None = None
  sides: tuple[list[str], list[str]] | None = None
  chats: tuple[Rows, HeldOutRows] | None = None

  @property
  def streams(self) -> tuple[np.ndarray, np.ndarray]:
    """Training tokens and held-out tokens, each an array `[T]`."""
    return self.files.tokens

  @property
  def is_chat(self) -> bool:
    """True if the documents are complete conversations."""
    return self.files is not None and self.files.answered is not None

  @property
  def tokens(self) -> str:
    """Fingerprint of the training tokens, or of all rows with answers."""
    if self.chats is None:
      return self.files.fingerprints[0]
    return fingerprint(tuple(rows.tokens for rows in self.chats))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Source:
  """Source of the rows of a run, from the flags of `train_drafter.py`.

  Attributes:
    data: source of documents or conversations. It is self[:SOURCE[,MORE]] if
      the target generates the text.
    field: field of a record that contains the text or turns, or None.
    batch_size: number of rows per step.
    pass_rows: number of rows per pass of the target. With --accumulate, a step
      has several passes.
    held_out_rows: number of rows for evaluation.
    self_rows: number of training rows that the target generates.
    prompt_tokens: number of tokens of the source at the start of a generated
      row.
    temperature: sampling temperature of generated rows.
    self_chat: True if the target answers the documents as messages. None means
      True if and only if the source has conversations.
    rows_per_file: number of rows or answers that are generated together. None
      means the default of `training.distillation`.
    directory: directory of generated rows.
    answers_only: True if the loss only includes tokens of answers. None means
      True if and only if the rows contain answers.
    last_turn: if True, only the last answer of a conversation is trained.
    keeps_features: True if the target's hidden states are stored in memory.
    seed: seed for the shuffle, the choice of documents and the sampling.
  """

  data: str
  field: str | None
  batch_size: int
  pass_rows: int
  held_out_rows: int
  self_rows: int
  prompt_tokens: int
  temperature: float
  self_chat: bool | None
  rows_per_file: int | None
  directory: pathlib.Path
  answers_only: bool | None
  last_turn: bool
  keeps_features: bool
  seed: int

  @property
  def own(self) -> str | None:
    """Source of the documents for generation, or None without generation."""
    name, _, source = self.data.partition(":")
    return (source.partition(",")[0] or "stdlib") if name == "self" else None

  @property
  def complete(self) -> str | None:
    """Source of additional complete conversations, or None."""
    return self.data.partition(",")[2] or None if self.own else None

  @functools.cached_property
  def turns(self) -> str | None:
    """Field of the source that contains the turns of conversations, or None."""
    return conversations.field_of(self.own or self.data, self.field)

  @property
  def chat(self) -> bool:
    """True if the target answers messages."""
    if self.own is None or self.self_chat is not None:
      return bool(self.self_chat)
    return self.turns is not None

  @property
  def weighs(self) -> bool:
    """True if the loss only includes tokens of answers."""
    if self.answers_only is not None:
      return self.answers_only
    return self.chat or self.own is None and self.turns is not None

  def check(self, tokenizer: Tokenizer, names: Sequence[str] = ()) -> None:
    """Raises `ValueError` if a setting would have no effect.

    Args:
      tokenizer: tokenizer of the target.
      names: names of those flags on the command line that only apply to
        generated rows.
    """
    if self.own is None:
      self._check_text(names)
    if self.complete is not None and not self.chat:
      raise ValueError(f"--data={self.data} adds the conversations of "
                       f"{self.complete}, which requires --self_chat")
    given = self.own is None and self.turns is not None
    if self.answers_only and not self.chat and not given:
      raise ValueError("--answers_only requires conversations, from --data or "
                       "--self_chat; leave --answers_only out")
    if self.last_turn and not given:
      raise ValueError("--last_turn requires --data with conversations; leave "
                       "--last_turn out")
    prompts_lib.check_chat(tokenizer, self.chat, "--self_chat")
    if given:
      prompts_lib.check_chat(
          tokenizer, True, f"--data={self.data}, which holds conversations,")

  def _check_text(self, names: Sequence[str]) -> None:
    """Raises `ValueError` if a setting requires generated rows."""
    for name, value in (("self_chat", self.self_chat),
                        ("keep_features", self.keeps_features),
                        *((name, True) for name in names)):
      if value:
        raise ValueError(f"--{name} requires --data=self:SOURCE, because it "
                         "applies to rows that the target generates")

  def row_length(self, row_tokens: int | None, target: Transformer,
                 heads: Heads) -> int:
    """Returns the length of a row in tokens.

    Args:
      row_tokens: value of --row_tokens. None selects the default.
      target: target model.
      heads: heads to train. A row must have at least 2 tokens more than the
        heads predict.

    Raises:
      ValueError: the rows are too long for the target, too short for the heads
        or need too much memory.
    """
    longest = target.context_length
    value = row_tokens or min(longest, ROW_TOKENS_DEFAULT)
    if value > longest:
      raise ValueError(f"--row_tokens is {value}; the target's context length "
                       f"is {longest}: give at most that many")
    least = heads.num_forecasts + 2
    if value < least:
      raise ValueError(f"--row_tokens is {value}; {heads.num_forecasts} heads "
                       f"need at least {least}: give longer rows")
    size = 4 * self.pass_rows * value * target.vocab_size
    if size > _MOST_BYTES:
      raise ValueError(
          f"--row_tokens={value}: the logits of {self.pass_rows} rows of "
          f"{value} tokens take {size / 2**30:.1f} GiB with a vocabulary of "
          f"{target.vocab_size}; set a larger --accumulate (now "
          f"{self.batch_size // self.pass_rows}), or a smaller --batch_size or "
          "--row_tokens")
    return value

  def counted(self, text: Text) -> Callable[[int], np.ndarray] | None:
    """Returns a function that maps V to the counts `[V]` of training tokens.

    Returns None if the target has not answered the messages yet.
    """
    if text.chats is not None:
      rows = text.chats[0]
      tokens = rows.tokens[rows.answered if self.weighs else ...].ravel()
      return lambda size: np.bincount(tokens, minlength=size)
    return None if self.chat else (
        lambda size: text.files.counts(size, self.weighs))

  def num_rows(self, text: Text, row_tokens: int) -> int:
    """Returns the number of rows in an epoch, without rows that are skipped."""
    if text.is_chat or text.chats is not None:
      rows = text.chats[0] if text.chats is not None else (
          self._complete_rows(text.files, row_tokens)[0])
      return len(self._useful(rows))
    if self.own is not None:
      return self.self_rows
    return len(text.streams[0]) // (row_tokens - 1)

  def _useful(self, rows: Rows) -> np.ndarray:
    """Returns the numbers of the rows with a token that is trained."""
    if not self.weighs:
      return np.arange(len(rows.tokens))
    return np.flatnonzero(rows.answered[:, 1:].any(axis=1))

  def text(self, tokenizer: Tokenizer) -> Text:
    """Reads the source, and tokenises it unless the target answers messages."""
    if self.own and self.self_rows < self.batch_size:
      raise ValueError(f"--self_rows is {self.self_rows}, less than "
                       f"--batch_size={self.batch_size}; set at least one "
                       "batch of rows")
    if self.chat:
      documents = self._messages()
      return Text(corpus=fingerprint(documents), sides=tuple(
          [d.text for d in side] for side in corpora.split(documents)))
    turns = None if self.own else self.turns
    files = token_cache.read(
        self.own or self.data, turns or self.field or "text", tokenizer,
        chat=turns is not None, last_turn=self.last_turn)
    return Text(corpus=files.corpus, files=files)

  def _messages(self) -> list[corpora.Document]:
    """Returns the messages that the target answers.

    These are the documents, or the first user turn of each conversation.
    """
    if self.turns is None:
      return corpora.read_documents(self.own, self.field or "text")
    prompt_of = functools.partial(
        conversations.prompt_of, fields=record_files.alternatives(self.turns))
    return [corpora.Document(name, text)
            for name, _, text in record_files.extract(
                self.own, "message", conversations.records(self.own),
                prompt_of)]

  @property
  def _written(self) -> list[tuple[str, int, int]]:
    """Name, number and seed of the generated training and held-out rows."""
    return [(name, count, self.seed + i) for i, (name, count) in enumerate(
        zip(_SIDES, (self.self_rows, self.held_out_rows)))]

  @property
  def _files(self) -> dict[str, int]:
    """Keyword arguments for `training.distillation` from `rows_per_file`."""
    return {} if self.rows_per_file is None else {
        "rows_per_file": self.rows_per_file}

  def answered(self, target: Pretrained, tokenizer: Tokenizer, text: Text,
               row_tokens: int, mesh: jax.sharding.Mesh | None) -> Text:
    """Returns `text` with the target's answers to its messages.

    Args:
      target: target model that generates the answers.
      tokenizer: tokenizer of the target.
      text: text with the messages.
      row_tokens: length of a row.
      mesh: mesh of devices, or None.
    """
    chats = answered.Conversations(
        target=target, tokenizer=tokenizer, row_tokens=row_tokens,
        temperature=self.temperature, seed=self.seed,
        prompt_tokens=self.prompt_tokens, placement=meshes.placement(mesh),
        files=self._files)
    complete = [] if self.complete is None else chats.read(self.complete)
    prompts = [chats.prompts(side, count)
               for side, (_, count, _) in zip(text.sides, self._written)]
    for side in prompts:
      chats.check_room(side)
    training, held_out = (
        chats.answer(some, self.directory / name, seed)
        for some, (name, _, seed) in zip(prompts, self._written))
    return dataclasses.replace(text, chats=(
        chats.rows([*training, *complete]), chats.held_out_rows(held_out)))

  def rows(self, target: Pretrained, objective: Objective, text: Text,
           row_tokens: int, mesh: jax.sharding.Mesh | None
           ) -> Callable[[], tuple[Batches, HeldOutRows]]:
    """Returns a function `() -> (step -> batch, held-out rows)`.

    `rows` does all checks. If the target continues the beginnings of documents,
    calling the function generates the rows.

    Args:
      target: target model.
      objective: objective of the run. It must have `read` if `keeps_features`.
      text: text of the run, with answers if `chat`.
      row_tokens: length of a row.
      mesh: mesh of devices, or None.
    """
    chats = text.chats
    if text.is_chat:
      chats = self._complete_rows(text.files, row_tokens)
    if chats is not None:
      training, held_out = chats
      batch = self._batches(training, objective, target)
      self._report(held_out)
      return lambda: (batch, held_out)
    if self.own is None:
      training, held_out = text.streams
      windows = batches.TokenWindows(
          training, self.batch_size, row_tokens - 1, self.seed)
      held_out = batches.held_out_rows(
          held_out, text.files.starts[1], self.held_out_rows, row_tokens)
      self._report(held_out)
      return lambda: (lambda step: {"tokens": windows.batch(step)}, held_out)
    prompts = self._beginnings(text.streams, row_tokens)
    # A generated row belongs to the document in which its prompt begins.
    clusters = np.searchsorted(
        text.files.starts[1], distillation.prompt_starts(
            len(text.streams[1]), self.held_out_rows, self.prompt_tokens,
            self.seed), "right")
    decoder = common.autoregressive(target.model, self.temperature)

    def sample() -> tuple[Batches, HeldOutRows]:
      training, held_out = (
          distillation.sample_rows(
              decoder, {"target": target.params}, some, length=row_tokens,
              directory=self.directory / name, seed=seed,
              placement=meshes.placement(mesh), **self._files)
          for some, (name, _, seed) in zip(prompts, self._written))
      rows = Rows(training, np.ones(training.shape, bool))
      batch = self._batches(rows, objective, target)
      return batch, HeldOutRows(held_out, clusters)

    return sample

  def preview(self, tokenizer: Tokenizer, batch: Batches, count: int) -> None:
    """Prints the first training rows, with the trained text in « »."""
    for i in range(count):
      step, row = divmod(i, self.batch_size)
      rows = batch(step)
      tokens = rows["tokens"][row]
      trained = (rows["weights"][row] > 0 if "weights" in rows
                 else np.ones(len(tokens) - 1, bool))
      print(f"{i}: {token_cache.marked(tokenizer, tokens, [0, *trained])}")

  def _report(self, held_out: HeldOutRows) -> None:
    """Prints the number of held-out rows if there are too few."""
    count, size = held_out.tokens.shape
    documents = len(np.unique(held_out.clusters))
    if count < self.held_out_rows or documents < FEWEST:
      print(f"{count} held-out rows of {size} tokens do not overlap "
            f"(--held_out_rows={self.held_out_rows}); intervals are over their "
            f"{documents} clusters of documents and need {FEWEST}",
            file=sys.stderr)

  def _complete_rows(self, files: token_files.TokenFiles, row_tokens: int
                     ) -> tuple[Rows, HeldOutRows]:
    """Returns training rows and held-out rows of complete conversations.

    If the held-out conversations have fewer tokens than a row, the held-out row
    is shorter.
    """
    training = answered.cut(files.tokens[0], files.answered[0], row_tokens)
    return training, batches.held_out_rows(
        files.tokens[1], files.starts[1], self.held_out_rows,
        min(row_tokens, len(files.tokens[1])), files.answered[1])

  def _beginnings(self, streams: Sequence[np.ndarray], row_tokens: int
                  ) -> list[np.ndarray]:
    """Returns the prompts of the generated training rows and held-out rows.

    The prompts are cut from the documents.
    """
    if self.prompt_tokens >= row_tokens:
      raise ValueError(f"--self_prompt_tokens is {self.prompt_tokens} and a "
                       f"row has {row_tokens} tokens; set a smaller value")
    return [
        distillation.cut_prompts(tokens, count, self.prompt_tokens, self.seed)
        for tokens, (_, count, _) in zip(streams, self._written)]

  def _batches(self, rows: Rows, objective: Objective | None,
               target: Pretrained | None) -> Batches:
    """Returns a function `step -> batch`, with features if `keeps_features`.

    If the loss only includes tokens of answers, rows without answers are left
    out.
    """
    useful = self._useful(rows)
    order = distillation.RowBatches(useful, self.batch_size, self.seed)
    if self.keeps_features:
      read = jax.jit(objective.read)
      batch = kept_features.KeptFeatures(
          rows.tokens[useful], self.batch_size, pass_rows=self.pass_rows,
          seed=self.seed, read=lambda rows: read(
              {"target": target.params, "drafter": {}}, rows)).batch
    else:
      batch = lambda step: {
          "tokens": rows.tokens[order.batch(step)].astype(np.int32)}
    if not self.weighs:
      return batch
    return lambda step: {**batch(step), "weights": rows.answered[
        order.batch(step), 1:].astype(np.float32)}
