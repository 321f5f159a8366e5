"""Target that predicts known sequences, for drafters without a model.

At temperature 0, a target accepts draft tokens up to the first one that differs
from its own output. So the target is not needed if its output is known. A trace
is a `Model` that predicts the next token of a known sequence with probability
1. Decoding with a trace gives the exact acceptance of a drafter on the target
that generated the sequences.
"""

import dataclasses
import pathlib
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from lib.prompts import reading
import specjax as sj
from specjax import interfaces
from specjax.utils import files
from specjax.utils import fingerprints

_ROOM = 256  # positions for drafts after the end of a sequence


@struct.dataclass
class TraceCache(interfaces.Cache):
  """Cache of a `TraceModel`.

  Attributes:
    lengths: `[B]` int32, number of committed tokens.
    sequence: `[B]` int32, index of the sequence of each row.
  """

  lengths: jax.Array
  sequence: jax.Array

  def commit(self, path: jax.Array, count: jax.Array) -> "TraceCache":
    """Commits the first `count [B]` nodes of `path [B, N]`."""
    del path
    return self.replace(lengths=self.lengths + count)

  def rollback(self, lengths: jax.Array) -> "TraceCache":
    """Sets the numbers of committed tokens to `lengths [B]`."""
    return self.replace(lengths=jnp.asarray(lengths, jnp.int32))


@dataclasses.dataclass(frozen=True)
class TraceModel(interfaces.Model):
  """Model that predicts the tokens of known sequences.

  The parameters are the sequences, `[M, T]` int32. The first token of sequence
  m is its identifier `tokens + m`, and the last token is `end`. Drafts contain
  neither of them.

  Attributes:
    tokens: vocabulary size of the sequences, without identifiers and `end`.
    sequences: number M of sequences.
    context_length: largest number of tokens of a row.
  """

  tokens: int
  sequences: int
  context_length: int

  @property
  def end(self) -> int:
    """Token after every sequence."""
    return self.tokens + self.sequences

  @property
  def vocab_size(self) -> int:
    return self.end + 1

  def init_cache(self, params: jax.Array, batch: int, capacity: int
                 ) -> TraceCache:
    """Returns the cache of `batch` empty rows."""
    del params, capacity
    zeros = jnp.zeros((batch,), jnp.int32)
    return TraceCache(lengths=zeros, sequence=zeros)

  def __call__(self, params: jax.Array, tokens: jax.Array,
               depths: jax.Array | None = None,
               ancestors: jax.Array | None = None,
               cache: TraceCache | None = None) -> sj.types.ModelOutput:
    """Returns logits `[B, S, V]`: 0 for the known next token, else -1e9.

    The prediction depends only on the position. After a draft token that
    differs from the sequence, the prediction is meaningless. Verification
    rejects such a token, so it never uses this prediction.
    """
    del ancestors
    if depths is None:
      depths = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    named = jnp.maximum(tokens[:, 0] - self.tokens, 0)
    begins = cache.lengths == 0
    cache = cache.replace(sequence=jnp.where(begins, named, cache.sequence))
    at = cache.lengths[:, None] + depths + 1
    following = params[cache.sequence[:, None], at]
    logits = jnp.where(
        jax.nn.one_hot(following, self.vocab_size, dtype=bool), 0.0, -1e9)
    return sj.types.ModelOutput(logits=logits, hidden=logits, cache=cache)


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
  """Known sequences, with the attributes of a loaded target.

  Attributes:
    model: `TraceModel` of the sequences.
    params: parameters of the model, `[M, T]` int32.
    prompts: prompts, each after the identifier of its sequence.
    longest: largest number of tokens of a completion, including the end.
    tokenizer: always None.
  """

  model: TraceModel
  params: jax.Array
  prompts: reading.Prompts
  longest: int
  tokenizer: Any = None


def read(path: str) -> Trace:
  """Reads a JSONL file of prompts and completions as token ids.

  Raises:
    ValueError: the file has no sequence, or a line is not an object with the
      lists "prompt" and "completion" of token ids.
  """
  if not pathlib.Path(path).is_file():
    raise ValueError(f"--trace is {path}, which is not a file")
  known = [_row(files.parse_json(line, path, number), path, number)
           for number, line in enumerate(files.read_text(path).splitlines(), 1)
           if line.strip()]
  if not known:
    raise ValueError(f"--trace is {path}, which has no sequence; write one "
                     'object per line, {"prompt": [...], "completion": [...]}')
  tokens = 1 + max(max(prompt + completion) for prompt, completion in known)
  size = 2 + max(len(prompt + completion) for prompt, completion in known)
  params = np.zeros((len(known), size + _ROOM), np.int32)
  model = TraceModel(tokens, len(known), params.shape[1] - 1)
  prompts = []
  for m, (prompt, completion) in enumerate(known):
    prompts.append([tokens + m, *prompt])
    row = [*prompts[-1], *completion, model.end]
    params[m, :len(row)] = row
  return Trace(
      model=model, params=jnp.asarray(params),
      longest=1 + max(len(completion) for _, completion in known),
      prompts=reading.Prompts({pathlib.Path(path).stem: prompts}, [], {
          "trace": fingerprints.fingerprint(known)}, {}))


def _row(value: Any, path: str, number: int) -> tuple[list[int], list[int]]:
  """Returns the prompt and the completion in a line of the file."""
  found = [value.get(name) if isinstance(value, dict) else None
           for name in ("prompt", "completion")]
  for ids in found:
    if not isinstance(ids, list) or not ids or not all(
        type(x) is int and 0 <= x < 2**24 for x in ids):
      raise ValueError(
          f"--trace is {path}, whose line {number} is not an object with the "
          'lists "prompt" and "completion" of at least one token id each')
  return found[0], found[1]
