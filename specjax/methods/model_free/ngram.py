"""Drafts copied from an earlier occurrence of the last tokens.

`NGram` searches the row's own tokens (prompt lookup, Saxena 2023), `Reference`
searches documents of the row (LLMA, Yang et al. 2023, arXiv:2304.04487).

A search in T tokens makes T * max_ngram integer comparisons per row and round.
Copies are deterministic, so each rule for chains accepts a token with its
probability under the target, at any temperature.
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
# Number of which the columns of reference documents are a multiple. So there
# are few shapes, and few programs are compiled.
_STEP = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Lookup(_common.ModelFree):
  """Base of drafters that copy tokens, with the fields of `NGram`.

  Subclasses implement `_copied(state)`, which returns tokens `[B, gamma]`, -1
  for padding, and the length `[B]` of the match before them.
  """

  gamma: int
  max_ngram: int = 3
  min_ngram: int = 1
  prefer: str = "latest"
  vocab_size: int | None = None

  chain = True
  iid = True
  conditional = True
  deterministic = True
  # All tokens of a draft are copied from the match of the tokens before it. A
  # draft that begins at a later position could have another match.
  autoregressive = False
  num_uniforms = 0
  proposal = "deterministic"

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
    """Drafts a chain per row, padding in rows without a match."""
    del params, uniforms
    tokens, _ = self._copied(state)
    return _common.deterministic(
        state, range(-1, self.gamma), tokens, self.vocab_size), None


@dataclasses.dataclass(frozen=True, kw_only=True)
class NGram(_Lookup):
  """Prompt lookup: copies from the row's own prompt and output.

  The last n tokens of a row are searched at earlier places, for n from
  `max_ngram` down to `min_ngram`, until there is a match. A match may overlap
  these n tokens. After a match that ends d tokens before the end of the row,
  the d tokens after it are copied, repeatedly up to gamma. So a sequence with
  period d is continued. Other implementations copy only up to the end of the
  sequence, and therefore prefer the first match. `params["drafter"]` is not
  read.

  Attributes:
    gamma: number of copied tokens, at least 1.
    max_ngram: maximal length of the searched suffix.
    min_ngram: minimal length of the searched suffix, 1 by default
      (`strategies.prompt_lookup`: 2); without a match nothing is drafted.
    prefer: choice among equally long matches, "latest" or "first".
    vocab_size: V; `bind` sets it.
  """

  def _copied(self, state: DecodeState) -> tuple[jax.Array, jax.Array]:
    return copied_from_row(state, self.gamma, self.max_ngram, self.min_ngram,
                           self.prefer)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference(_Lookup):
  """LLMA: copies from documents of the row, such as retrieved passages.

  The documents are `prefill(..., context={"reference": ...})`, `[B, T]` int32,
  with -1 after each document, see `reference_texts`. Neither a match nor a copy
  crosses a -1; the remaining draft is padding. `params["drafter"]` is not read.

  Attributes:
    gamma: number of copied tokens, at least 1.
    max_ngram: maximal length of the searched suffix.
    min_ngram: minimal length of the searched suffix; without a match nothing is
      drafted.
    prefer: choice among equally long matches, "latest" or "first".
    vocab_size: V; `bind` sets it.
    own_text: True to search the row's own tokens too, as `NGram` does; the
      longer match is used.
  """

  prefer: str = "first"
  own_text: bool = False

  def init(self, params: Params, prompt: Prompt, prefill_output: ModelOutput
           ) -> None:
    """Checks that the context has documents."""
    super().init(params, prompt, prefill_output)
    _references(prompt.context)

  def _copied(self, state: DecodeState) -> tuple[jax.Array, jax.Array]:
    # Documents may have 16-bit ids, and the vocabulary size may exceed their
    # range. So ids are converted before they are compared with it.
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
  """Returns `context["reference"]`, `[B, T]` int32, with -1 after a document.

  Args:
    rows: token ids of the documents of each of B prompts; a row may have none.
    columns: number T of columns, equal for rows that `Decoder.insert` adds
      later. Default: the least sufficient multiple of 128, so that calls of
      similar lengths share a program.

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
  """Returns the length of the match that ends at each slot, `[B, T]` int32.

  Args:
    text: `[B, T]` int32.
    last: `[B, n]` int32, the row's last n tokens, the latest first. n is the
      largest length of a match.
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
  """Returns the draft of `NGram` and the length of its match.

  Args:
    state: decoding state.
    gamma: number of copied tokens.
    max_ngram: maximal length of the searched suffix.
    min_ngram: minimal length of the searched suffix.
    prefer: choice among equally long matches.

  Returns:
    Tokens `[B, gamma]` int32, -1 in rows without a match, and the length `[B]`
    int32 of the match: 0, or `min_ngram` to `max_ngram`.
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
  """Returns the last committed tokens `[B, count]`, the latest first."""
  at = state.lengths[:, None] - 1 - jnp.arange(count)
  tokens = jnp.take_along_axis(
      state.tokens, jnp.maximum(at, 0), axis=1)
  return jnp.where(at >= 0, tokens, NOWHERE)


def _best(count: jax.Array, usable: jax.Array, min_ngram: int, prefer: str
          ) -> tuple[jax.Array, jax.Array]:
  """Returns the end `[B]` of the longest match, and its length; 0: none."""
  slots = count.shape[1]
  slot = jnp.arange(slots, dtype=jnp.int32)
  order = slot if prefer == "latest" else slots - 1 - slot
  count = jnp.where(usable & (count >= min_ngram), count, 0)
  # Length and index of a match are packed into one integer, so one maximum
  # returns both. On a CPU a maximum is much cheaper than an argmax.
  best = jnp.max(count * slots + order, axis=1)
  place = best % slots
  return place if prefer == "latest" else slots - 1 - place, best // slots


def _references(context: Any) -> jax.Array:
  """Returns `context["reference"]`, or raises a `ValueError`."""
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
  """Copies the tokens after an earlier occurrence of the row's last tokens.

  Saxena 2023 (https://github.com/apoorvumang/prompt-lookup-decoding), also
  called n-gram speculation. The latest match is used and its tokens are
  repeated, see `drafters.NGram`.

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
    gamma: number of copied tokens.
    max_ngram: maximal length of the searched suffix.
    min_ngram: minimal length of the searched suffix. With 1, few copied tokens
      are accepted, and drafts rarely make decoding faster.
    verifier: rule for chains; all rules treat deterministic chains equally.
  """
  return Strategy(NGram(
      gamma=gamma, max_ngram=max_ngram, min_ngram=min_ngram), verifier)


def llma(gamma: int, max_ngram: int = 3, own_text: bool = False,
         verifier: Verifier = TOKEN) -> Strategy:
  """Copies from documents of the prompt, such as retrieved passages.

  Yang et al. 2023 (arXiv:2304.04487). `prefill` and `generate` take the
  documents as `context={"reference": reference_texts(...)}`.

  >>> from specjax.drafters import reference_texts
  >>> reference_texts([[[5, 6, 7], [5, 8]], []])[:, :7].tolist()
  [[5, 6, 7, -1, 5, 8, -1], [-1, -1, -1, -1, -1, -1, -1]]
  >>> llma(gamma=8).drafter.num_nodes
  9

  Args:
    gamma: number of copied tokens.
    max_ngram: maximal length of the searched suffix.
    own_text: True to search the row's own tokens too.
    verifier: rule for chains; all rules treat deterministic chains equally.
  """
  return Strategy(Reference(
      gamma=gamma, max_ngram=max_ngram, own_text=own_text), verifier)
