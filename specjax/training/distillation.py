"""Data that a target writes itself, for distillation.

Rows are sampled by the decoding loop, with whatever drafter and verifier: the
law is the target's. They are kept in a directory, a file at a time, each whole
or not there, so that sampling goes on where it was killed. `write_answers`
keeps the laws with the text.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import os
import pathlib
from typing import Any
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike
import tqdm

from specjax.decoding.decoder import Decoder
from specjax.decoding.placement import Placement
from specjax.utils import processes
from specjax.utils.files import atomically
from specjax.utils.files import claim
from specjax.utils.fingerprints import fingerprint

_MANIFEST = "rows.json"
_MOST_LOGITS = 2**27  # of the pass that reads laws, [rows, C, V]: 512 MB


def cut_prompts(tokens: np.ndarray, count: int, length: int, seed: int = 0
                ) -> np.ndarray:
  """`[count, length]` int32: pieces of a stream `[T]` from random places on.

  Raises:
    ValueError: the stream is shorter than one piece.
  """
  if len(tokens) < length:
    raise ValueError(f"the text has {len(tokens)} tokens and a prompt {length};"
                     " give more text, or shorter prompts")
  rng = np.random.default_rng(seed)
  starts = rng.integers(len(tokens) - length + 1, size=count)
  return np.asarray(tokens)[starts[:, None] + np.arange(length)].astype(
      np.int32)


def sample_rows(decoder: Decoder, params: Mapping[str, Any],
                prompts: ArrayLike, *, length: int,
                directory: str | os.PathLike[str], seed: int = 0,
                rows_per_file: int = 32, placement: Placement | None = None
                ) -> np.ndarray:
  """Continues every prompt to `length` tokens, or reads what a call before did.

  A row is a function of (seed, its number, its prompt) and not of the rows
  beside it. The end of a text does not end a row: another text follows, as in
  the stream that language models are trained on.

  Args:
    decoder: a `Decoder` without `eos`.
    params: of the decoder.
    prompts: `[R, P]` int32.
    length: tokens of a row, the prompt included; at most the decoder's context.
    directory: of the files.
    seed: of the sampling.
    rows_per_file: rows that are sampled together.
    placement: of the decoder on a mesh, which must divide `rows_per_file`.

  Returns:
    `[R, length]` int32.

  Raises:
    ValueError: lengths do not fit, or the directory holds other rows.
    processes.Stopped: the processes were told to stop, between two files.
  """
  prompts = np.asarray(prompts, np.int32)
  if decoder.eos is not None:
    raise ValueError(f"the decoder ends rows at token {decoder.eos}; give one "
                     "with eos=None, for rows are of equal length")
  if not prompts.shape[1] < length <= decoder.context_length:
    raise ValueError(
        f"rows have {length} tokens; that must be more than the prompts' "
        f"{prompts.shape[1]} and at most the context of "
        f"{decoder.context_length}")
  directory = pathlib.Path(directory)
  claim(directory / _MANIFEST, {
      "decoder": repr(decoder), "weights": fingerprint(params),
      "prompts": fingerprint(prompts), "length": length, "seed": seed,
      "rows_per_file": rows_per_file}, "set of rows")
  key = jax.random.key(seed, impl="threefry2x32")
  if placement:
    params = placement.put(decoder, params)

  def sample(start, some):
    more = rows_per_file - len(some) if placement else 0
    generation = decoder.generate(
        params, np.pad(some, ((0, more), (0, 0)), "edge"), key,
        max_new_tokens=length - some.shape[1],
        request_ids=start + np.arange(len(some) + more), placement=placement)
    return np.stack(generation.tokens[:len(some)]).astype(np.int32)

  return np.concatenate(list(_file_by_file(
      directory, "rows-{:05d}.npy", prompts, rows_per_file, sample,
      read=functools.partial(_read_rows, length), save=np.save,
      doing="sampling")))


def _file_by_file(directory, name, prompts, rows_per_file, make, *, read,
                  save, doing):
  """Yields what is written of some prompts after the others, a file each.

  Args:
    directory: of the files.
    name: of a file, as a format of its number.
    prompts: of all files.
    rows_per_file: prompts of a file; the last one may have fewer.
    make: from the number of a file's first prompt and its prompts to what the
      file is to hold.
    read: from a path and the number of prompts to what the file there holds, or
      None if it is missing or damaged.
    save: writes to an open file what it is to hold.
    doing: a word for the progress bar.

  Raises:
    processes.Stopped: the processes were told to stop, between two files.
  """
  for start in tqdm.tqdm(range(0, len(prompts), rows_per_file), unit="file",
                         desc=doing, dynamic_ncols=True,
                         disable=not processes.is_first()):
    path = directory / name.format(start // rows_per_file)
    some = prompts[start:start + rows_per_file]
    found = processes.by_the_first(functools.partial(read, path, len(some)))
    if found is None:
      if processes.told_to_stop():
        raise processes.Stopped(
            f"stopped by SIGTERM; the files in {directory} are whole: started "
            "again, the sampling goes on from there")
      # Kernels need not give every process the same bits.
      found = processes.by_the_first(functools.partial(
          _save, path, save, make(start, some)))
    yield found


def _save(path, save, found):
  """Saves what a file is to hold; returns what is on disk."""
  with atomically(path) as f:
    save(f, found)
  return found


def _read_rows(length, path, count):
  """The rows of a file, or None if it is missing or damaged."""
  try:
    rows = np.load(path)
  except (FileNotFoundError, EOFError, ValueError):
    return None
  return rows if rows.shape == (count, length) else None


@dataclasses.dataclass(frozen=True, eq=False)
class Answers:
  """Texts that a target wrote, and the laws that it wrote them by.

  Attributes:
    tokens: `[R, C]` int32, prompt and answer; the rest is padding.
    starts: `[R]` int32, tokens of the prompts.
    lengths: `[R]` int32, tokens of prompts and answers.
    ids: `[R, C - 1, K]` int32: at t, the K likeliest of token t + 1.
    probs: `[R, C - 1, K]` float16, their probabilities at temperature 1.
  """

  tokens: np.ndarray
  starts: np.ndarray
  lengths: np.ndarray
  ids: np.ndarray
  probs: np.ndarray


def write_answers(decoder: Decoder, params: Mapping[str, Any],
                  prompts: Sequence[Sequence[int]], *, max_new_tokens: int,
                  top: int, directory: str | os.PathLike[str], seed: int = 0,
                  rows_per_file: int = 64, placement: Placement | None = None
                  ) -> list[Answers]:
  """Answers every prompt, or reads what a call before wrote.

  An answer ends at the decoder's `eos`. It is a function of (seed, its number,
  its prompt) and not of the answers beside it.

  Args:
    decoder: a `Decoder`.
    params: of the decoder.
    prompts: token ids of each prompt.
    max_new_tokens: of an answer.
    top: K, of the laws that are kept; 0 keeps none, which saves a pass.
    directory: of the files.
    seed: of the sampling.
    rows_per_file: answers that are written together.
    placement: of the decoder on a mesh, which must divide `rows_per_file`.

  Returns:
    `Answers` of at most `rows_per_file` rows each, of `rows_per_file` prompts
    after the other.

  Raises:
    ValueError: a prompt is too long, or the directory holds other answers.
    processes.Stopped: the processes were told to stop, between two files.
  """
  limit = max(map(len, prompts)) + max_new_tokens
  if limit > decoder.context_length:
    raise ValueError(f"the longest prompt and its answer have {limit} tokens; "
                     f"the context length is {decoder.context_length}: cut "
                     "the prompts, or ask for shorter answers")
  directory = pathlib.Path(directory)
  claim(directory / _MANIFEST, {
      "decoder": repr(decoder), "weights": fingerprint(params),
      "prompts": fingerprint([list(map(int, p)) for p in prompts]),
      "max_new_tokens": max_new_tokens, "top": top, "seed": seed,
      "rows_per_file": rows_per_file}, "set of answers")
  key = jax.random.key(seed, impl="threefry2x32")
  if placement:
    params = placement.put(decoder, params)

  def answer(start, some):
    # Batches are alike in shape, so that the loop is compiled once.
    rows = some + [some[0]] * (rows_per_file - len(some))
    generation = decoder.generate(
        params, rows, key, max_new_tokens=max_new_tokens,
        request_ids=start + np.arange(rows_per_file), placement=placement)
    return _with_laws(decoder.target, params["target"],
                      generation.tokens[:len(some)], some, limit, top)

  return list(_file_by_file(
      directory, "answers-{:05d}.npz", [list(p) for p in prompts],
      rows_per_file, answer, read=_read_answers, save=_save_answers,
      doing="answering"))


def _with_laws(model, params, rows, prompts, columns, top):
  """`Answers` of rows that were written, with `columns` tokens each."""
  lengths = np.array([len(row) for row in rows], np.int32)
  size = max(1, min(len(rows), _MOST_LOGITS // (columns * model.vocab_size)))
  padded = -(-len(rows) // size) * size
  tokens = np.zeros((padded, columns), np.int32)
  for row, text in zip(tokens, rows):
    row[:len(text)] = text
  answers = functools.partial(
      Answers, tokens=tokens[:len(rows)], lengths=lengths,
      starts=np.array([len(p) for p in prompts], np.int32))
  if not top:
    none = np.zeros((len(rows), columns - 1, 0))
    return answers(ids=none.astype(np.int32), probs=none.astype(np.float16))
  laws = [_top_laws(model, top, params, tokens[i:i + size, :-1])
          for i in range(0, padded, size)]
  ids, probs = (
      np.concatenate([np.asarray(x) for x in part])[:len(rows)]
      for part in zip(*processes.gathered(laws)))
  return answers(ids=ids, probs=probs)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _top_laws(model, top, params, tokens):
  probs = jax.nn.softmax(model(params, tokens).logits)
  values, ids = jax.lax.top_k(probs, top)
  return ids, values.astype(jnp.float16)


def _save_answers(f, answers):
  np.savez(f, **dataclasses.asdict(answers))


def _read_answers(path, count):
  """The answers of a file, or None if it is missing or damaged."""
  try:
    with np.load(path) as f:
      answers = Answers(**{
          field.name: f[field.name] for field in dataclasses.fields(Answers)})
  except (FileNotFoundError, EOFError, KeyError, ValueError,
          zipfile.BadZipFile):
    return None
  return answers if len(answers.tokens) == count else None


@dataclasses.dataclass(frozen=True, eq=False)
class RowBatches:
  """Shuffled batches of rows; batch k depends on (rows, seed, k) alone.

  Every epoch visits the rows in a new order, those that fill no batch left
  out.

  Attributes:
    rows: `[R, ...]`, as a rule `[R, S + 1]` int32.
    batch_size: B.
    seed: of the shuffle.
  """

  rows: np.ndarray
  batch_size: int
  seed: int = 0

  def __post_init__(self):
    if len(self.rows) < self.batch_size:
      raise ValueError(f"there are {len(self.rows)} rows and a batch has "
                       f"{self.batch_size}; sample more, or a smaller batch")

  def batch(self, step: int) -> np.ndarray:
    """`[B, ...]`, the batch of training step `step`."""
    epoch, index = divmod(step, len(self.rows) // self.batch_size)
    order = np.random.default_rng([self.seed, epoch]).permutation(
        len(self.rows))
    return self.rows[order[index * self.batch_size:][:self.batch_size]]
