"""Copies what followed the last tokens where they stood before.

`NGram` looks in the row's own text: prompt lookup, Saxena 2023
(https://github.com/apoorvumang/prompt-lookup-decoding), known as n-gram
speculation elsewhere. `Reference` looks in texts that are given with the row:
LLMA, Yang et al. 2023 (arXiv:2304.04487).

A look-up compares every slot of a text with the last `max_ngram` tokens: T *
max_ngram comparisons of whole numbers a round and row, in one loop, and no
state. What is copied is deterministic, so that q is one-hot and each rule for
chains accepts a token x with probability p(x), at any temperature.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from specjax.interfaces import Drafter
from specjax.interfaces import Model
from specjax.interfaces import Verifier
from specjax.methods import _common
from specjax.methods.model_free._matches import NOWHERE
from specjax.methods.strategy import Strategy
from specjax.methods.strategy import TOKEN
from specjax.sampling import LogitsTransform
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.types import Verdict
from specjax.utils import fields

_PREFERENCES = ("latest", "first")


_STEP = 128  # columns of reference texts, so that few shapes are compiled


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Lookup(Drafter):
  """What the drafters that copy have in common; fields as in `NGram`.

  Classes that derive from it have `_copied(state)`: tokens `[B, gamma]`, -1
  for none, and `[B]`, how many tokens agree with the row's end before them.
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
  # Deeper tokens follow the match where the draft began: with the drafted ones
  # before them another place may agree as well, or the first one that does.
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

  def bind(self, target: Model, transform: LogitsTransform) -> Any:
    """Returns the drafter specialised to a target."""
    del transform
    if self.vocab_size is not None:
      _common.check_target_size(self.vocab_size, target)
    return dataclasses.replace(self, vocab_size=target.vocab_size)

  def propose(self, params: Any, uniforms: jax.Array, state: DecodeState
              ) -> tuple[Draft, None]:
    """Drafts a chain per row, padding in rows without a match."""
    del params, uniforms
    tokens, _ = self._copied(state)
    return _common.deterministic(
        state, range(-1, self.gamma), tokens, self.vocab_size), None

  def commit(self, params: Any, drafter: None, draft: Draft, verdict: Verdict,
             target_output: ModelOutput, count: jax.Array) -> None:
    """Does nothing: there is no state."""
    del params, drafter, draft, verdict, target_output, count

  def param_specs(self, axis: str, size: int) -> PartitionSpec:
    """Returns one specification: there are no parameters."""
    del axis, size
    return PartitionSpec()


@dataclasses.dataclass(frozen=True, kw_only=True)
class NGram(_Lookup):
  """Prompt lookup: copies from the row's own prompt and output.

  The longest match counts, from `max_ngram` tokens down to `min_ngram`. A match
  may overlap the tokens that are looked for, and what is copied goes on where
  the text ends: of a match d tokens before the end, the d tokens after it are
  repeated. So a loop of any length is drafted as far as gamma. Others stop at
  the text's end, and therefore take the first match.

  It has no parameters: `params["drafter"]` may be anything, or missing.

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
  """LLMA: copies from texts that the row was given, such as documents it cites.

  `prefill(..., context={"reference": ...})` gives them, `[B, T]` int32, filled
  up with -1; a row's texts stand one after the other with -1 between them, as
  `reference_texts` makes it. No match and no copy goes across an id that is no
  token. A draft ends where its text ends: what is left of it is padding.

  It has no parameters: `params["drafter"]` may be anything, or missing.

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

  def init(self, params: Any, prompt: Prompt, prefill_output: ModelOutput
           ) -> None:
    """Checks that the context has reference texts."""
    super().init(params, prompt, prefill_output)
    _references(prompt.context)

  def _copied(self, state: DecodeState) -> tuple[jax.Array, jax.Array]:
    # V is no number of 16 bits where the vocabulary is large.
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
    own, own_size = copied_from_row(
        state, self.gamma, self.max_ngram, self.min_ngram, "latest")
    more = own_size > size
    return jnp.where(more[:, None], own, tokens), jnp.where(
        more, own_size, size)


def reference_texts(rows: Sequence[Sequence[Sequence[int]]],
                    columns: int | None = None) -> np.ndarray:
  """`[B, T]` int32 for `context["reference"]`, -1 between texts and at the end.

  Args:
    rows: for each of B prompts its texts, token ids; a row may have none.
    columns: number T of columns, equal for rows that `Decoder.insert` adds
      later. Default: the least multiple of 128 that holds all, so that calls
      with similar texts share a program.

  Raises:
    ValueError: the texts of a row have no room in so many columns.
  """
  joined = [[token for text in row for token in (*text, -1)] for row in rows]
  longest = max(map(len, joined), default=0)
  if columns is None:
    columns = max(1, -(-longest // _STEP)) * _STEP
  fields.check_at_least("columns", columns, 1)
  if longest > columns:
    raise ValueError(
        f"columns is {columns} and the texts of a row have {longest} tokens, "
        "one after each text included; give more columns, or less text")
  found = np.full((len(rows), columns), -1, np.int32)
  for row, tokens in zip(found, joined):
    row[:len(tokens)] = tokens
  return found


def agreement(text: jax.Array, last: jax.Array) -> jax.Array:
  """In how many tokens the text up to and with each slot agrees with a row.

  Args:
    text: `[B, T]` int32.
    last: `[B, n]` int32, the row's last tokens, the latest first.

  Returns:
    `[B, T]` int32, at most n.
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
  """What `NGram` drafts.

  Args:
    state: decoding state.
    gamma: number of copied tokens.
    max_ngram: maximal length of the searched suffix.
    min_ngram: minimal length of the searched suffix.
    prefer: choice among equally long matches.

  Returns:
    Tokens `[B, gamma]` int32, all -1 in rows without a match, and `[B]` int32,
    in how many tokens the place agrees with the row's end: 0 or `min_ngram` to
    `max_ngram`.
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
  """`[B, count]`, the committed tokens from the last one backwards."""
  at = state.lengths[:, None] - 1 - jnp.arange(count)
  tokens = jnp.take_along_axis(
      state.tokens, jnp.maximum(at, 0), axis=1)
  return jnp.where(at >= 0, tokens, NOWHERE)


def _best(count: jax.Array, usable: jax.Array, min_ngram: int, prefer: str
          ) -> tuple[jax.Array, jax.Array]:
  """The slot `[B]` where most tokens agree, and how many: 0 where too few."""
  slots = count.shape[1]
  slot = jnp.arange(slots, dtype=jnp.int32)
  order = slot if prefer == "latest" else slots - 1 - slot
  count = jnp.where(usable & (count >= min_ngram), count, 0)
  # A maximum of unequal numbers: an argmax costs several times as much on CPU.
  best = jnp.max(count * slots + order, axis=1)
  place = best % slots
  return place if prefer == "latest" else slots - 1 - place, best // slots


def _references(context: Any) -> jax.Array:
  """`context["reference"]`, or a `ValueError` that says what is missing."""
  found = (context.get("reference") if isinstance(context, Mapping) else None)
  if found is None:
    raise ValueError(
        'Reference copies from context["reference"], which is missing; give '
        'prefill(..., context={"reference": drafters.reference_texts(...)})')
  if (jnp.ndim(found) != 2 or not found.shape[1]
      or not jnp.issubdtype(found.dtype, jnp.signedinteger)):
    raise ValueError(f'context["reference"] has shape {found.shape} and dtype '
                     f"{found.dtype}; it must be [B, T] token ids, int32, "
                     "filled up with -1")
  return found


def prompt_lookup(gamma: int, max_ngram: int = 3, min_ngram: int = 2,
                  verifier: Verifier = TOKEN) -> Strategy:
  """A copy of what followed the last tokens earlier in the row.

  Saxena 2023 (https://github.com/apoorvumang/prompt-lookup-decoding), called
  n-gram speculation elsewhere. There the first match is copied, up to the
  text's end; here the latest one, and over again where the text ends. It needs
  no parameters.

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
    min_ngram: minimal length of the searched suffix. A copy after one matching
      token seldom pays for its verification.
    verifier: rule for chains; all rules accept the same of deterministic
      chains.
  """
  return Strategy(NGram(
      gamma=gamma, max_ngram=max_ngram, min_ngram=min_ngram), verifier)


def llma(gamma: int, max_ngram: int = 3, own_text: bool = False,
         verifier: Verifier = TOKEN) -> Strategy:
  """A copy out of texts that come with the prompt, such as retrieved ones.

  Yang et al. 2023 (arXiv:2304.04487): `prefill` and `generate` take the texts
  as `context={"reference": reference_texts(...)}`.

  >>> from specjax.drafters import reference_texts
  >>> reference_texts([[[5, 6, 7], [5, 8]], []])[:, :7].tolist()
  [[5, 6, 7, -1, 5, 8, -1], [-1, -1, -1, -1, -1, -1, -1]]
  >>> llma(gamma=8).drafter.num_nodes
  9

  Args:
    gamma: number of copied tokens.
    max_ngram: maximal length of the searched suffix.
    own_text: True to search the row's own tokens too.
    verifier: rule for chains; all rules accept the same of deterministic
      chains.
  """
  return Strategy(Reference(
      gamma=gamma, max_ngram=max_ngram, own_text=own_text), verifier)
