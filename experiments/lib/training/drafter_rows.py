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
from typing import NamedTuple

import jax
import numpy as np

from lib import common
from lib import meshes
from lib import models
from lib.prompts import reading as prompts_lib
from lib.training import answered
from lib.training import token_cache
from lib.training.answered import Rows
from lib.training.answered import Stream
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
    sides: training conversations and held-out conversations, which end with
      the message that the target answers. None if it answers none.
    chats: training rows and held-out rows with the target's answers. None until
      `Source.answered` generates them.
  """

  corpus: str
  files: token_files.TokenFiles | None = None
  sides: tuple[list[conversations.Conversation], ...] | None = None
  chats: tuple[Rows, HeldOutRows] | None = None

  @property
  def tokens(self) -> str:
    """Fingerprint of the training tokens, or of all rows with answers."""
    if self.chats is None:
      return self.files.fingerprints[0]
    return fingerprint(tuple(rows.tokens for rows in self.chats))


class Data(NamedTuple):
  """Training batches and held-out rows of a run.

  Attributes:
    batch: function `step -> batch`.
    held_out: rows for evaluation.
    num_rows: number of training rows in an epoch.
    tokens_per_row: mean number of predicted tokens of a training row, without
      padding.
  """

  batch: Batches
  held_out: HeldOutRows
  num_rows: int
  tokens_per_row: float


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Source:
  """Source of the rows of a run, from the flags of `train_drafter.py`.

  Attributes:
    data: source of documents or conversations. It is self[:SOURCE[,MORE]] if
      the target generates the text.
    field: field of a record that contains the text or turns, or None.
    batch_size: number of rows per step.
    accumulate: number of passes of the target per step.
    held_out_rows: number of rows for evaluation.
    self_rows: number of training rows that the target generates.
    self_prompt_tokens: number of tokens of the source at the start of a
      generated row.
    self_temperature: sampling temperature of generated rows.
    self_chat: True if the target answers the documents as messages. None means
      True if and only if the source has conversations.
    self_rows_per_file: number of rows or answers that are generated together.
      None means the default of `training.distillation`.
    directory: directory of generated rows.
    answers_only: True if the loss only includes tokens of answers. None means
      True if and only if the rows contain answers.
    last_turn: if True, only the last answer of a conversation is trained.
    pack: if True, conversations are joined and cut into rows. Otherwise each
      row is one conversation.
    keep_features: True if the target's hidden states are stored in memory.
    seed: seed for the shuffle, the choice of documents and the sampling.
  """

  data: str
  field: str | None
  batch_size: int
  accumulate: int
  held_out_rows: int
  self_rows: int
  self_prompt_tokens: int
  self_temperature: float
  self_chat: bool | None
  self_rows_per_file: int | None
  directory: pathlib.Path
  answers_only: bool | None
  last_turn: bool
  pack: bool
  keep_features: bool
  seed: int

  @property
  def pass_rows(self) -> int:
    """Number of rows per pass of the target."""
    return self.batch_size // self.accumulate

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
  def has_conversations(self) -> bool:
    """True if the rows contain conversations."""
    return self.chat or self.own is None and self.turns is not None

  @property
  def weighs(self) -> bool:
    """True if the loss only includes tokens of answers."""
    if self.answers_only is not None:
      return self.answers_only
    return self.has_conversations

  def check(self, tokenizer: Tokenizer, names: Sequence[str] = ()) -> None:
    """Raises `ValueError` if a setting would have no effect.

    Args:
      tokenizer: tokenizer of the target.
      names: names of those flags on the command line that only apply to
        generated rows.
    """
    if self.batch_size % self.accumulate:
      raise ValueError(f"--accumulate is {self.accumulate} and does not divide "
                       f"--batch_size={self.batch_size}; set a divisor")
    for name, value in (("self_chat", self.self_chat),
                        ("keep_features", self.keep_features),
                        *((name, True) for name in names)):
      if value and self.own is None:
        raise ValueError(f"--{name} requires --data=self:SOURCE, because it "
                         "applies to rows that the target generates")
    if self.complete is not None and not self.chat:
      raise ValueError(f"--data={self.data} adds the conversations of "
                       f"{self.complete}, which requires --self_chat")
    for name, value in ("answers_only", self.answers_only), ("pack", self.pack):
      if value and not self.has_conversations:
        raise ValueError(f"--{name} requires conversations, from --data or "
                         f"--self_chat; leave --{name} out")
    given = self.has_conversations and not self.chat
    if self.last_turn and not given:
      raise ValueError("--last_turn requires --data with conversations; leave "
                       "--last_turn out")
    prompts_lib.check_chat(tokenizer, self.chat, "--self_chat")
    if given:
      prompts_lib.check_chat(
          tokenizer, True, f"--data={self.data}, which holds conversations,")

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
      tokens = rows.tokens[rows.trained]
      return lambda size: np.bincount(tokens, minlength=size)
    return None if self.chat else (
        lambda size: text.files.counts(size, self.weighs))

  def text(self, tokenizer: Tokenizer) -> Text:
    """Reads the source, and tokenises it unless the target answers messages."""
    if self.own and self.self_rows < self.batch_size:
      raise ValueError(f"--self_rows is {self.self_rows}, less than "
                       f"--batch_size={self.batch_size}; set at least one "
                       "batch of rows")
    if self.chat:
      chats = self._messages()
      return Text(corpus=fingerprint(chats), sides=corpora.split(chats))
    turns = None if self.own else self.turns
    files = token_cache.read(
        self.own or self.data, turns or self.field or "text", tokenizer,
        chat=turns is not None, last_turn=self.last_turn)
    return Text(corpus=files.corpus, files=files)

  def _messages(self) -> list[conversations.Conversation]:
    """Returns conversations that end with the message that the target answers.

    The messages are the documents, or the first user turn of each conversation.
    """
    if self.turns is None:
      return [
          conversations.Conversation(
              name=d.name, place=d.name, variables={},
              messages=[{"role": "user", "content": d.text}])
          for d in corpora.iter_documents(self.own, self.field or "text")]
    beginning_of = functools.partial(
        conversations.beginning_of,
        fields=record_files.alternatives(self.turns))
    return [chat for *_, chat in record_files.extract(
        self.own, "message", conversations.records(self.own), beginning_of)]

  @property
  def _written(self) -> list[tuple[str, int, int]]:
    """Name, number and seed of the generated training and held-out rows."""
    return [(name, count, self.seed + i) for i, (name, count) in enumerate(
        zip(_SIDES, (self.self_rows, self.held_out_rows)))]

  @property
  def _files(self) -> dict[str, int]:
    """Keyword arguments for `training.distillation`."""
    return {} if self.self_rows_per_file is None else {
        "rows_per_file": self.self_rows_per_file}

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
    complete = (answered.read(self.complete, tokenizer) if self.complete
                else [])
    prompts = [answered.prompts(
        side, tokenizer, count=count, prompt_tokens=self.self_prompt_tokens,
        row_tokens=row_tokens, seed=self.seed)
               for side, (_, count, _) in zip(text.sides, self._written)]
    decoder = dataclasses.replace(
        common.autoregressive(target.model, self.self_temperature),
        eos=models.ends(target, tokenizer))
    sides = []
    for asked, (name, _, seed) in zip(prompts, self._written):
      answers = distillation.write_answers(
          decoder, {"target": target.params}, asked,
          max_new_tokens=row_tokens - max(map(len, asked)), top=0,
          directory=self.directory / name, seed=seed,
          placement=meshes.placement(mesh), **self._files)
      texts = [row[:n] for part in answers
               for row, n in zip(part.tokens, part.lengths)]
      sides.append([(row, np.arange(len(row)) >= len(prompt))
                    for row, prompt in zip(texts, asked, strict=True)])
    training, held_out = sides
    return dataclasses.replace(text, chats=self._conversations(
        answered.join([*training, *complete]), answered.join(held_out),
        row_tokens, target))

  def rows(self, target: Pretrained, objective: Objective, text: Text,
           row_tokens: int, mesh: jax.sharding.Mesh | None
           ) -> Callable[[], Data]:
    """Returns a function that returns the batches and the held-out rows.

    `rows` does all checks. If the target continues the beginnings of documents,
    calling the function generates the rows.

    Args:
      target: target model.
      objective: objective of the run. It must have `read` if `keep_features`.
      text: text of the run, with answers if `chat`.
      row_tokens: length of a row.
      mesh: mesh of devices, or None.
    """
    chats, files = text.chats, text.files
    if files and files.answered:  # complete conversations
      chats = self._conversations(
          *map(Stream, files.tokens, files.answered, files.starts), row_tokens,
          target)
    if chats is not None:
      data = self._data(*chats, objective, target)
      self._report(data.held_out.clusters, row_tokens)
      return lambda: data
    training, held_out = files.tokens
    if self.own is None:
      windows = batches.TokenWindows(
          training, self.batch_size, row_tokens - 1, self.seed)
      held_out = batches.held_out_rows(
          held_out, files.starts[1], self.held_out_rows, row_tokens)
      self._report(held_out.clusters, row_tokens)
      return lambda: Data(
          lambda step: {"tokens": windows.batch(step)}, held_out,
          len(training) // (row_tokens - 1), row_tokens - 1)
    size = self.self_prompt_tokens
    if size >= row_tokens:
      raise ValueError(f"--self_prompt_tokens is {size} and a row has "
                       f"{row_tokens} tokens; set a smaller value")
    prompts = [distillation.cut_prompts(tokens, count, size, self.seed)
               for tokens, (_, count, _) in zip(files.tokens, self._written)]
    # A generated row belongs to the document in which its prompt begins.
    clusters = np.searchsorted(files.starts[1], distillation.prompt_starts(
        len(held_out), self.held_out_rows, size, self.seed), "right")
    self._report(clusters, row_tokens)
    decoder = common.autoregressive(target.model, self.self_temperature)

    def sample() -> Data:
      training, held_out = (
          distillation.sample_rows(
              decoder, {"target": target.params}, some, length=row_tokens,
              directory=self.directory / name, seed=seed,
              placement=meshes.placement(mesh), **self._files)
          for some, (name, _, seed) in zip(prompts, self._written))
      stream = answered.join(zip(training, np.ones(training.shape, bool)))
      counted = np.ones(held_out.shape, bool)
      return self._data(
          Rows.of(stream, row_tokens),
          HeldOutRows(held_out, clusters, counted), objective, target)

    return sample

  def preview(self, tokenizer: Tokenizer, batch: Batches, count: int) -> None:
    """Prints the first training rows, with the trained text in « ».

    The printed row ends with its last trained token, so it has no padding.
    """
    for i in range(count):
      step, row = divmod(i, self.batch_size)
      rows = batch(step)
      tokens = rows["tokens"][row]
      trained = (rows["weights"][row] > 0 if "weights" in rows
                 else np.ones(len(tokens) - 1, bool))
      end = 2 + np.flatnonzero(trained)[-1]
      print(f"{i}: "
            + token_cache.marked(tokenizer, tokens[:end], [0, *trained]))

  def _report(self, clusters: np.ndarray, row_tokens: int) -> None:
    """Prints the number of held-out rows if there are too few.

    Args:
      clusters: number of the document or conversation of each row.
      row_tokens: length of a row.
    """
    count, documents = len(clusters), len(np.unique(clusters))
    if count < self.held_out_rows or documents < FEWEST:
      print(f"{count} held-out rows of {row_tokens} tokens "
            f"(--held_out_rows={self.held_out_rows}) are from {documents} "
            "documents or conversations; intervals are over these and need "
            f"{FEWEST}", file=sys.stderr)

  def _conversations(self, training: Stream, held_out: Stream, row_tokens: int,
                     target: Pretrained) -> tuple[Rows, HeldOutRows]:
    """Returns training rows and held-out rows of conversations.

    With `pack`, a held-out row is shorter than `row_tokens` if all held-out
    conversations together have fewer tokens.
    """
    if not self.weighs:
      training, held_out = (
          x._replace(answered=np.broadcast_to(True, len(x.tokens)))
          for x in (training, held_out))
    if self.pack:
      tokens, counted, starts = held_out
      rows = Rows.of(answered.cut(training, row_tokens), row_tokens)
      return rows, batches.held_out_rows(
          tokens, starts, self.held_out_rows, min(row_tokens, len(tokens)),
          counted)
    lengths = np.diff(training.starts, append=len(training.tokens))
    longest = target.model.context_length
    cut, rest = np.sum(lengths > row_tokens), np.sum(lengths > longest)
    if cut:
      advice = (f"--row_tokens={min(lengths.max(), longest)} keeps all"
                + f" except {rest:,}" * bool(rest) if row_tokens < longest else
                "the target's context length allows no longer rows")
      print(f"{cut:,} of {len(lengths):,} conversations lose their ends, "
            f"because they are longer than --row_tokens={row_tokens}; {advice}",
            file=sys.stderr)
    rows, others = (Rows.of(x, row_tokens) for x in (training, held_out))
    chosen = batches.spread(len(others), self.held_out_rows)
    tokens, counted = others.take(chosen)
    return rows, HeldOutRows(tokens, chosen, counted)

  def _data(self, rows: Rows, held_out: HeldOutRows,
            objective: Objective | None, target: Pretrained | None) -> Data:
    """Returns batches of rows, with features if `keep_features`."""
    order = distillation.RowBatches(
        np.arange(len(rows)), self.batch_size, self.seed)

    def arrays(numbers: np.ndarray) -> dict[str, np.ndarray]:
      tokens, trained = rows.take(numbers)
      return {"tokens": tokens, "weights": trained[:, 1:].astype(np.float32)}

    batch = lambda step: arrays(order.batch(step))
    if self.keep_features:
      read = jax.jit(objective.read)
      batch = kept_features.KeptFeatures(
          order, arrays, pass_rows=self.pass_rows, read=lambda tokens: read(
              {"target": target.params, "drafter": {}}, tokens)).batch
    return Data(batch, held_out, len(rows),
                float(np.mean(rows.ends - rows.begins - 1)))
