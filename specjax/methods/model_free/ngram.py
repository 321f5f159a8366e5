"""Drafts that copy the tokens after an earlier occurrence of the last tokens.

`NGram` searches the sequence itself (prompt lookup, Saxena 2023). `Reference`
searches documents that are given with the prompt (LLMA, Yang et al. 2023,
arXiv:2304.04487).

A search in T tokens makes T * max_ngram integer comparisons per sequence and
round. The draft distributions are one-hot, so every verification rule for
chains accepts a copied token with its probability under the target, at any
temperature.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from specjax.interfaces import Verifier
from specjax.methods import _common
from specjax.methods.model_free._matches import NOWHERE
from specjax.methods.networks import Params
from specjax.methods.strategy import Strategy
from specjax.methods.strategy import TOKEN
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.utils import fields

_PREFERENCES = ("latest", "first")
# Arrays of reference documents are padded to a multiple of this number of
# columns. So arrays of similar lengths have the same shape and share a compiled
# program.
_STEP = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Lookup(_common.ModelFree):
  """Base class of drafters that copy tokens; `NGram` describes the fields.

  Subclasses implement `_copied(state)`. It returns the copied tokens
  `[B, gamma]` of B rows, -1 for padding. Its second result is the length `[B]`
  of the match before the copied tokens.
  """

  gamma: int
  max_ngram: int = 3
  min_ngram: int = 1
  prefer: str = "latest"
  vocab_size: int | None = None

  # Not autoregressive: all tokens of a draft follow one match of the tokens
  # before the draft. If the draft began later, another match could be chosen.
  provides = ("chain", "iid", "conditional", "deterministic")
  num_uniforms = 0

  def __post_init__(self):
    fields.check_fields(self, "gamma", "min_ngram")
    if not fields.is_whole(self.max_ngram) or self.max_ngram < self.min_ngram:
      raise ValueError(f"max_ngram is {self.max_ngram}; it must be a whole "
                       f"number of at least min_ngram, {self.min_ngram}")
    if self.prefer not in _PREFERENCES:
      raise ValueError(f"prefer is {self.prefer!r}; it must be one of "
                       f"{', '.join(_PREFERENCES)}")

  def propose(self, params: Params, uniforms: jax.Array, state: DecodeState
              ) -> tuple[Draft, None]:
    """Returns a draft chain per row; it is padding if there is no match."""
    del params, uniforms
    tokens, _ = self._copied(state)
    return _common.deterministic(
        state, range(-1, self.gamma), tokens, self.vocab_size), None


@dataclasses.dataclass(frozen=True, kw_only=True)
class NGram(_Lookup):
  """Prompt lookup: a drafter that copies tokens of the prompt and the output.

  It searches for an earlier occurrence of the last n tokens of the sequence,
  for n from `max_ngram` down to `min_ngram`, until there is a match. A match
  may overlap the last n tokens. The draft is a copy of the tokens after the
  match. If the match ends d tokens before the end of the sequence, only d
  tokens follow it. These d tokens are repeated until the draft has gamma
  tokens. So a sequence with period d is continued periodically. Other
  implementations copy only up to the end of the sequence. Therefore they prefer
  the first match, which has more tokens after it. `params["drafter"]` is not
  read.

  Attributes:
    gamma: draft length, at least 1.
    max_ngram: maximum length n of a match.
    min_ngram: minimum length n of a match, 1 by default (2 in
      `strategies.prompt_lookup`). Without a match, nothing is drafted.
    prefer: choice among equally long matches, "latest" or "first".
    vocab_size: vocabulary size of the target. If it is None, `bind` sets it.
  """

  def _copied(self, state: DecodeState) -> tuple[jax.Array, jax.Array]:
    return copied_from_row(state, self.gamma, self.max_ngram, self.min_ngram,
                           self.prefer)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference(_Lookup):
  """LLMA: a drafter that copies from documents given with the prompt.

  The documents, such as retrieved passages, are passed as `prefill(...,
  context={"reference": documents})`. This is an array `[B, T]` int32 with one
  row of token ids for each of B prompts and -1 after each document, see
  `reference_texts`. The drafter searches the documents for the last tokens of
  the sequence and copies the tokens after the match. Neither a match nor a copy
  continues into the next document; the draft is then shorter than gamma.
  `params["drafter"]` is not read.

  Attributes:
    gamma: maximum draft length, at least 1.
    max_ngram: maximum length of a match.
    min_ngram: minimum length of a match. Without a match, nothing is drafted.
    prefer: choice among equally long matches, "latest" or "first".
    vocab_size: vocabulary size of the target. If it is None, `bind` sets it.
    own_text: True to search the sequence itself as well, as `NGram` does; the
      longer of the two matches is used.
  """

  prefer: str = "first"
  own_text: bool = False

  def init(self, params: Params, prompt: Prompt, prefill_output: ModelOutput
           ) -> None:
    """Raises `ValueError` if no documents were passed to `prefill`."""
    super().init(params, prompt, prefill_output)
    _references(prompt.context)

  def _copied(self, state: DecodeState) -> tuple[jax.Array, jax.Array]:
    # The ids of documents may have a dtype of 16 bits, which cannot represent a
    # large vocabulary size. So the ids are converted to int32 before they are
    # compared with the vocabulary size.
    text = _references(state.context).astype(jnp.int32)
    text = jnp.where((text >= 0) & (text < self.vocab_size), text, -1)
    after = jnp.pad(text[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    at, size = _best(agreement(text, _last(state, self.max_ngram)), after >= 0,
                     self.min_ngram, self.prefer)
    ahead = at[:, None] + jnp.arange(self.gamma)
    tokens = jnp.take_along_axis(after, ahead, axis=1, mode="clip")
    going = jnp.cumprod(tokens >= 0, axis=1) > 0
    tokens = jnp.where(going & (size > 0)[:, None], tokens, -1)
    if not self.own_text:
      return tokens, size
    row_tokens, row_size = copied_from_row(
        state, self.gamma, self.max_ngram, self.min_ngram, "latest")
    longer = row_size > size
    return (jnp.where(longer[:, None], row_tokens, tokens),
            jnp.where(longer, row_size, size))


def reference_texts(rows: Sequence[Sequence[Sequence[int]]],
                    columns: int | None = None) -> np.ndarray:
  """Returns the documents of B prompts as one array, for `Reference`.

  The result is `[B, T]` int32, with -1 after each document and as padding. It
  is passed as `prefill(..., context={"reference": result})`.

  Args:
    rows: for each prompt, a list of documents, each a list of token ids. The
      list may be empty.
    columns: number T of columns. Rows that `Decoder.insert` adds to a batch
      later need the same number. None means the smallest sufficient multiple of
      128, so that arrays of similar lengths share a compiled program.

  Raises:
    ValueError: `columns` is too small for the documents of a row.
  """
  joined = [[token for text in row for token in (*text, -1)] for row in rows]
  longest = max(map(len, joined), default=0)
  if columns is None:
    columns = max(1, -(-longest // _STEP)) * _STEP
  fields.check_at_least("columns", columns, 1)
  if longest > columns:
    raise ValueError(
        f"columns is {columns}, but the documents of a row need {longest}, "
        "with a separator after each; give more columns, or shorter documents")
  texts = np.full((len(rows), columns), -1, np.int32)
  for row, tokens in zip(texts, joined):
    row[:len(tokens)] = tokens
  return texts


def agreement(text: jax.Array, last: jax.Array) -> jax.Array:
  """Returns the length of the match that ends at each searched position.

  This is the number of tokens, up to and including the position, that equal the
  last tokens of the row's sequence.

  Args:
    text: searched token ids, `[B, T]` int32: T tokens for each of B rows.
    last: last n tokens of each row's sequence, `[B, n]` int32, the latest
      first.

  Returns:
    `[B, T]` int32, each at most n.
  """
  chex.assert_rank([text, last], 2)
  same, count = jnp.ones(text.shape, bool), jnp.zeros(text.shape, jnp.int32)
  for back in range(last.shape[1]):
    moved = jnp.pad(text, ((0, 0), (back, 0)), constant_values=-1)
    same &= moved[:, :text.shape[1]] == last[:, back:back + 1]
    count += same
  return count


def copied_from_row(state: DecodeState, gamma: int, max_ngram: int,
                    min_ngram: int, prefer: str
                    ) -> tuple[jax.Array, jax.Array]:
  """Returns the tokens after an earlier occurrence of the last tokens.

  This is the draft of `NGram` (prompt lookup).

  Args:
    state: decoding state of B rows; their own tokens are searched.
    gamma: draft length.
    max_ngram: maximum length of a match.
    min_ngram: minimum length of a match.
    prefer: choice among equally long matches, "latest" or "first".

  Returns:
    Tokens `[B, gamma]` int32, -1 in rows without a match; and the length `[B]`
    int32 of the match, 0 in rows without a match.
  """
  end = state.lengths[:, None] - 1
  earlier = jnp.arange(state.tokens.shape[1]) < end
  at, size = _best(agreement(state.tokens, _last(state, max_ngram)), earlier,
                   min_ngram, prefer)
  distance = jnp.maximum(end - at[:, None], 1)
  ahead = at[:, None] + 1 + jnp.arange(gamma) % distance
  tokens = jnp.take_along_axis(state.tokens, ahead, axis=1, mode="clip")
  return jnp.where((size > 0)[:, None], tokens, -1), size


def _last(state: DecodeState, count: jax.Array) -> jax.Array:
  """Returns the last `count` committed tokens of B rows, the latest first.

  The result is `[B, count]` int32. Entries before the first token of a row are
  `NOWHERE`, an id that equals no token.
  """
  at = state.lengths[:, None] - 1 - jnp.arange(count)
  tokens = jnp.take_along_axis(
      state.tokens, jnp.maximum(at, 0), axis=1)
  return jnp.where(at >= 0, tokens, NOWHERE)


def _best(count: jax.Array, usable: jax.Array, min_ngram: int, prefer: str
          ) -> tuple[jax.Array, jax.Array]:
  """Returns the position at which the longest match of each row ends.

  Args:
    count: `[B, T]` int32, length of the match that ends at each position.
    usable: `[B, T]` bool, False at positions that must not be chosen.
    min_ngram: minimum length of a match.
    prefer: choice among equally long matches, "latest" or "first".

  Returns:
    Position `[B]`, and length `[B]` of the match; 0 if there is no match.
  """
  slots = count.shape[1]
  slot = jnp.arange(slots, dtype=jnp.int32)
  order = slot if prefer == "latest" else slots - 1 - slot
  count = jnp.where(usable & (count >= min_ngram), count, 0)
  # Length and position of a match are packed into one integer, so one maximum
  # returns both. On a CPU a maximum is much faster than an argmax.
  best = jnp.max(count * slots + order, axis=1)
  place = best % slots
  return place if prefer == "latest" else slots - 1 - place, best // slots


def _references(context: Any) -> jax.Array:
  """Returns the documents in `context["reference"]`, `[B, T]` token ids.

  Raises:
    ValueError: the documents are missing, or have another shape or dtype.
  """
  texts = (context.get("reference") if isinstance(context, Mapping) else None)
  if texts is None:
    raise ValueError(
        'context["reference"], the documents of drafters.Reference, is '
        'missing; give '
        'prefill(..., context={"reference": drafters.reference_texts(...)})')
  if (jnp.ndim(texts) != 2 or not texts.shape[1]
      or not jnp.issubdtype(texts.dtype, jnp.signedinteger)):
    raise ValueError(f'context["reference"] has shape {texts.shape} and dtype '
                     f"{texts.dtype}; it must be int32 token ids [B, T], with "
                     "-1 after each document and at the end")
  return texts


def prompt_lookup(gamma: int, max_ngram: int = 3, min_ngram: int = 2,
                  verifier: Verifier = TOKEN) -> Strategy:
  """Returns the strategy of prompt lookup, also called n-gram speculation.

  See Saxena 2023 (https://github.com/apoorvumang/prompt-lookup-decoding). The
  draft copies the tokens that follow an earlier occurrence of the last tokens
  of the sequence. The latest of the longest matches is used, see
  `drafters.NGram`.

  >>> import jax
  >>> import specjax as sj
  >>> target = sj.testing.MarkovModel(4)
  >>> table = 50 * jax.numpy.roll(jax.numpy.eye(4), 1, axis=1)  # 0, 1, 2, 3, 0
  >>> decoder = prompt_lookup(gamma=7).decoder(target)
  >>> text = decoder.generate({"target": table}, [[0, 1, 2, 3, 0, 1]],
  ...                         jax.random.key(0), max_new_tokens=16)
  >>> text.tokens[0].tolist()[-5:], int(text.stats.active[0])  # rounds
  ([1, 2, 3, 0, 1], 2)

  Args:
    gamma: draft length.
    max_ngram: maximum length of a match.
    min_ngram: minimum length of a match. With 1, few copied tokens are
      accepted, and drafts rarely make decoding faster.
    verifier: verification rule for chains. The choice has no effect on the
      number of accepted tokens, because the drafts are deterministic.
  """
  return Strategy(NGram(
      gamma=gamma, max_ngram=max_ngram, min_ngram=min_ngram), verifier)


def llma(gamma: int, max_ngram: int = 3, own_text: bool = False,
         verifier: Verifier = TOKEN) -> Strategy:
  """Returns the strategy LLMA, which copies from documents given with a prompt.

  See Yang et al. 2023 (arXiv:2304.04487). The documents, such as retrieved
  passages, are passed to `prefill` or `generate` as `context={"reference":
  reference_texts(...)}`. The draft copies the tokens that follow an occurrence
  of the sequence's last tokens in a document.

  >>> from specjax.drafters import reference_texts
  >>> reference_texts([[[5, 6, 7], [5, 8]], []])[:, :7].tolist()
  [[5, 6, 7, -1, 5, 8, -1], [-1, -1, -1, -1, -1, -1, -1]]
  >>> llma(gamma=8).drafter.num_nodes
  9

  Args:
    gamma: maximum draft length.
    max_ngram: maximum length of a match.
    own_text: True to search the sequence itself as well as the documents.
    verifier: verification rule for chains. The choice has no effect on the
      number of accepted tokens, because the drafts are deterministic.
  """
  return Strategy(Reference(
      gamma=gamma, max_ngram=max_ngram, own_text=own_text), verifier)
