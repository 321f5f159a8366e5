"""Conversion between the tokens of a target and a draft model, on the host.

The tokens of a text depend on the text before it. So both directions also
tokenize some preceding text. Tokens at the boundary then equal those of the
complete text.
"""

from collections.abc import Sequence

import numpy as np

from specjax.data.vocabularies import NO_TOKEN
from specjax.data.vocabularies import ReadsText
from specjax.data.vocabularies import special_pairs
from specjax.data.vocabularies import Vocabulary
from specjax.data.vocabularies import whole_characters


class Retokenizer:
  """Pair of tokenizers, of the draft model and of the target.

  Two pairs are equal if the contents of their tokenizers are equal. So a pair
  can be part of a static argument of a compiled program.

  Attributes:
    draft_size: D, vocabulary size of the draft model.
    target_size: V, vocabulary size of the target.

  Example:
    >>> from specjax import testing
    >>> both = Retokenizer(testing.ListTokenizer((b"a", b"b", b"ab")),
    ...                    testing.ListTokenizer((b"b", b"a", b"ba")))
    >>> both.as_draft([1, 2])  # a, ba
    [2, 0]
    >>> both.as_draft([0], before=[1, 0])  # b after b, a: the a changes
    [1, 2]
    >>> both.as_target([1, 0, 1], before=[1])  # b, a, b after a
    [2, 0]
  """

  def __init__(self, drafter: ReadsText, target: ReadsText,
               draft_size: int | None = None, target_size: int | None = None
               ) -> None:
    """Reads both vocabularies.

    Args:
      drafter: tokenizer of the draft model.
      target: tokenizer of the target.
      draft_size: vocabulary size of the draft model. None means that of the
        tokenizer.
      target_size: vocabulary size of the target. None means that of the
        tokenizer.

    Raises:
      ValueError: one vocabulary cannot spell any token of the other.
    """
    self._drafter = Vocabulary(drafter, draft_size)
    self._target = Vocabulary(target, target_size)
    self.draft_size, self.target_size = self._drafter.size, self._target.size
    self._to_target = dict(special_pairs(self._drafter, self._target))
    self._to_draft = {t: d for d, t in self._to_target.items()}
    for one, other in ((self._drafter, self._target),
                       (self._target, self._drafter)):
      if not any(one.spelled(text) for text in other.ids):
        raise ValueError(
            f"no token of the drafter's {self.draft_size} can be spelled with "
            f"the target's {self.target_size} tokens, or none of the target's "
            "with the drafter's; choose a drafter for the same script, or "
            "decode without a drafter")
    self._digest = self._drafter.digest(), self._target.digest()

  def __eq__(self, other):
    return isinstance(other, Retokenizer) and self._digest == other._digest

  def __hash__(self):
    return hash(self._digest)

  def as_draft(self, tokens: Sequence[int], before: Sequence[int] = ()
               ) -> list[int]:
    """Returns draft ids for the text of `before` followed by `tokens`.

    Args:
      tokens: target ids. Special tokens without a counterpart are skipped. So
        are bytes that draft tokens cannot spell.
      before: preceding draft ids. Their text is tokenized again with the
        following text, so the result may contain other ids for it.
    """
    found, text = _last_text(self._drafter, before)
    parts = [text]
    for token in tokens:
      text = self._target.texts[token]
      if text:
        parts.append(text)
        continue
      found += self._joined(parts)
      parts = []
      if token in self._to_draft:
        found.append(self._to_draft[token])
    return found + self._joined(parts)

  def _joined(self, parts):
    """Returns draft ids of joined byte strings.

    Skips parts that draft tokens cannot spell.
    """
    spelled = self._drafter.spelled
    found = spelled(b"".join(parts))
    if found is None:
      found = spelled(b"".join(x for x in parts if spelled(x) is not None))
    return found or []

  def as_target(self, drafted: Sequence[int], before: Sequence[int]
                ) -> list[int]:
    """Returns target ids for the text of `drafted` after `before`.

    The result omits an incomplete character at the end. It ends before a
    special token without a counterpart. The target may prefer a longer last
    token that continues beyond `drafted`. The last token is drafted anyway,
    because a rejected token costs no more than a missing one.

    Args:
      drafted: draft ids.
      before: preceding target ids.
    """
    special = [i for i, d in enumerate(drafted) if not self._drafter.texts[d]]
    end = special[0] if special else len(drafted)
    text = self._drafter.bytes_of(drafted[:end])
    found = self._following(text, _last_text(self._target, before)[1])
    if special and drafted[end] in self._to_target and (found or not text):
      found = [*found, self._to_target[drafted[end]]]
    return found

  def _following(self, text, past):
    """Returns target ids of `text` after the text `past`, or [] if none exist.
    """
    half = len(whole_characters(past + text)[2])
    text = text[:max(len(text) - half, 0)]
    if not text:
      return []
    found, size = self._target.spelled(past + text) or [], 0
    for i in range(len(found) - 1, -1, -1):
      size += len(self._target.texts[found[i]])
      if size == len(text):
        return found[i:]
    # A token of the joined text crosses the boundary between `past` and `text`.
    # So `text` is encoded alone.
    return self._target.spelled(text) or []

  def prompts(self, width: int, tokens: np.ndarray, lengths: np.ndarray
              ) -> tuple[np.ndarray, np.ndarray]:
    """Converts prompts to draft ids, with the draft model's bos.

    Args:
      width: number W of columns of the result.
      tokens: target ids `[B, P]`. The target's bos at the start is dropped.
      lengths: numbers `[B]` of target ids.

    Returns:
      Draft ids `[B, W]` int32, and the number `[B]` int32 of draft ids in each
      row. If the number exceeds W, the further ids are cut off.
    """
    bos = [] if self._drafter.bos is None else [self._drafter.bos]
    rows = [row[:n] for row, n in zip(_lists(tokens), _lists(lengths))]
    rows = [row[1:] if row[0] == self._target.bos else row for row in rows]
    return _filled([bos + self.as_draft(row) for row in rows], width, 0)

  def reread(self, width: int, tail: np.ndarray, held: np.ndarray,
             new: np.ndarray, count: np.ndarray
             ) -> tuple[np.ndarray, np.ndarray]:
    """Converts new target tokens and retokenizes the last draft ids with them.

    In rows without new tokens, the last draft ids are unchanged.

    Args:
      width: number W of columns of the result.
      tail: last draft ids `[B, K]` before the new tokens.
      held: numbers `[B]` of ids in `tail`.
      new: new target ids `[B, n]`.
      count: numbers `[B]` of ids in `new`.

    Returns:
      Draft ids `[B, W]` int32 that replace the tail, and the number `[B]` int32
      of draft ids in each row. If it exceeds W, the further ids are cut off.
    """
    return _filled([
        self.as_draft(row[:n], before[:k]) if n else before[:k]
        for before, k, row, n in zip(*map(_lists, (tail, held, new, count)))
    ], width, 0)

  def chains(self, gamma: int, before: np.ndarray, held: np.ndarray,
             drafted: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Converts drafted tokens to target ids `[B, gamma]`, padded with -1.

    Args:
      gamma: largest number of tokens of a chain. Further tokens are cut off.
      before: preceding target ids `[B, K]`.
      held: numbers `[B]` of ids in `before`.
      drafted: draft ids `[B, G]`.
      wanted: mask `[B]` bool of the rows that draft.
    """
    return _filled([
        self.as_target(row, past[:k])[:gamma] if wants else []
        for past, k, row, wants in zip(
            *map(_lists, (before, held, drafted, wanted)))
    ], gamma, NO_TOKEN)[0]


def _last_text(vocabulary, ids):
  """Splits ids after the last special id.

  Returns the ids up to the split and the bytes of the ids after it.
  """
  ids = list(ids)
  start = len(ids)
  while start and vocabulary.texts[ids[start - 1]]:
    start -= 1
  return ids[:start], vocabulary.bytes_of(ids[start:])


def _lists(x):
  return np.asarray(x).tolist()


def _filled(rows, width, fill):
  """Returns padded rows `[B, W]`, and their lengths before padding `[B]`."""
  found = np.full((len(rows), width), fill, np.int32)
  for row, ids in zip(found, rows):
    row[:min(len(ids), width)] = ids[:width]
  return found, np.array([len(ids) for ids in rows], np.int32)
