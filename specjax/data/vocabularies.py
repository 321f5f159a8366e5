"""Comparison of two vocabularies, on the host.

Tokens are compared by their bytes, so different space markers and byte-level
alphabets have no effect. Special tokens have no bytes. They are paired by role
(bos with bos, eos with eos) or by equal names.

`VocabularyMap` contains tables of token ids. A compiled decoding loop uses the
tables to translate between the vocabularies (Timor et al. 2025,
arXiv:2502.05202).
"""

import codecs
from collections.abc import Mapping
import hashlib
from typing import Protocol

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax.data import token_bytes

NO_TOKEN = -1


class ReadsText(Protocol):
  """Interface of a tokenizer; `specjax.data.Tokenizer` implements it.

  Two more attributes are optional. `adds_bos` is True if `bos` begins every
  sequence (default: True). `backend` is a `tokenizers.Tokenizer` that contains
  the names of special tokens.
  """

  bos: int | None
  eos: int | None

  @property
  def vocab_size(self) -> int:
    ...

  def token_bytes(self, token: int) -> bytes:
    ...

  def encode(self, text: str, bos: bool = True) -> list[int]:
    ...


def longest_match(data: bytes, ids: Mapping[bytes, int], longest: int
                  ) -> list[int] | None:
  """Returns ids that spell `data` by greedy longest match, or None.

  Args:
    data: bytes to spell.
    ids: id of each token, by the bytes of the token.
    longest: number of bytes of the longest token.
  """
  found, start = [], 0
  while start < len(data):
    for size in range(min(longest, len(data) - start), 0, -1):
      token = ids.get(data[start:start + size])
      if token is not None:
        break
    else:
      return None
    found.append(token)
    start += size
  return found


def whole_characters(data: bytes) -> tuple[bytes, str | None, bytes]:
  """Splits bytes into incomplete characters at both ends and the text between.

  Returns the bytes of the first incomplete character, the text, and the bytes
  of the last incomplete character. If the bytes in the middle are not UTF-8,
  returns `(data, None, b"")`.
  """
  rest = data
  while rest and 0x80 <= rest[0] < 0xC0:  # UTF-8 continuation byte
    rest = rest[1:]
  decoder = codecs.getincrementaldecoder("utf-8")()
  try:
    text = decoder.decode(rest)
  except UnicodeDecodeError:
    return data, None, b""
  return data[:len(data) - len(rest)], text, decoder.getstate()[0]


class Vocabulary:
  """Tokens of a tokenizer by their bytes.

  Attributes:
    size: vocabulary size of the model. The tokenizer may use fewer ids.
    texts: bytes of the token of every id. b"" for special and unused ids.
    ids: token id, by the bytes of the token. Of several tokens with equal
      bytes, the first one that is not a byte token of SentencePiece.
    specials: id of each special token, by its name.
    bos: id of the token that begins every sequence, or None.
    eos: id of the token that ends a sequence, or None.
  """

  def __init__(self, tokenizer: ReadsText, size: int | None = None) -> None:
    """Reads all tokens.

    Args:
      tokenizer: tokenizer of the model.
      size: vocabulary size of the model. None means that of the tokenizer.
        Tokens with larger ids are skipped.
    """
    self._tokenizer = tokenizer
    self.size = tokenizer.vocab_size if size is None else size
    # Only tokenizers with a `backend` have names. Unused ids have none.
    backend = getattr(tokenizer, "backend", None)
    names = [backend.id_to_token(i) if backend else None
             for i in range(min(self.size, tokenizer.vocab_size))]
    self.texts = [b"" if backend and name is None else tokenizer.token_bytes(i)
                  for i, name in enumerate(names)]
    self.specials = {name: i for i, name in enumerate(names)
                     if name and not self.texts[i]}
    ids, byte_tokens = {}, {}
    for i, (text, name) in enumerate(zip(self.texts, names)):
      is_byte = len(text) == 1 and token_bytes.BYTE.fullmatch(name or "")
      if text:
        (byte_tokens if is_byte else ids).setdefault(text, i)
    self.ids = byte_tokens | ids
    self._longest = max(map(len, self.ids), default=0)
    self.texts += [b""] * (self.size - len(self.texts))
    within = lambda token: token if (token or 0) < self.size else None
    adds_bos = getattr(tokenizer, "adds_bos", True)
    self.bos = within(tokenizer.bos) if adds_bos else None
    self.eos = within(tokenizer.eos)

  def digest(self) -> str:
    """Returns a hash of the sizes, ids and contents of the tokenizer."""
    backend = getattr(self._tokenizer, "backend", None)
    contents = backend.to_str() if backend else repr(self._tokenizer)
    return hashlib.sha256(
        repr((self.size, self.bos, self.eos, contents)).encode()).hexdigest()

  def spelled(self, data: bytes) -> list[int] | None:
    """Returns token ids whose bytes are exactly `data`, or None.

    The tokenizer encodes the complete characters of `data`. Greedy longest
    match encodes incomplete characters at both ends. If the bytes of these ids
    differ from `data`, greedy longest match encodes all of `data`. They differ
    if the tokenizer adds a space before every text or normalises it. Greedy
    longest match also encodes bytes that are not UTF-8.
    """
    head, text, tail = whole_characters(data)
    match = lambda part: longest_match(part, self.ids, self._longest)
    halves = match(head), match(tail)
    if text is not None and None not in halves:
      found = [*halves[0], *self._written(text), *halves[1]]
      if self.bytes_of(found) == data:
        return found
    return match(data)

  def _written(self, text):
    """Returns the tokenizer's ids of a text, or [] if it cannot encode it."""
    try:
      return self._tokenizer.encode(text, bos=False) if text else []
    except ValueError:  # the tokenizer reads a character as a special token
      return []

  def bytes_of(self, ids: list[int]) -> bytes:
    """Returns the bytes of all ids; special and unknown ids have no bytes."""
    return b"".join(self.texts[i] for i in ids if i < self.size)


def special_pairs(drafter: Vocabulary, target: Vocabulary
                  ) -> list[tuple[int, int]]:
  """Returns pairs `(draft id, target id)` of equivalent special tokens.

  The order is: pairs with equal names, bos with bos, eos with eos. Later pairs
  override earlier ones.
  """
  pairs = [(i, target.specials[name]) for name, i in drafter.specials.items()
           if name in target.specials]
  for role in ("bos", "eos"):
    pair = getattr(drafter, role), getattr(target, role)
    if None not in pair:
      pairs.append(pair)
  return pairs


@struct.dataclass
class VocabularyMap:
  """Tables of the common tokens of two vocabularies and of spellings.

  D and V are the vocabulary sizes of draft model and target. Tokens are common
  if their bytes are equal, or if they are equivalent special tokens. A draft id
  corresponds to at most one target id. Several draft ids may correspond to the
  same target id. The spelling of a target token is a list of draft ids with the
  same bytes.

  Attributes:
    to_target: `[D]` int32, target id of every draft id. V if not common.
    twins: `[V]` int32, one draft id for every target id. D if not common.
    doubles: `[E]` int32, common draft ids that `twins` does not contain.
    offsets: `[V + 1]` int32, start of the spelling of every target id in
      `pieces`. The spelling of a common token is its entry in `twins`. The
      spelling is empty for special tokens without a counterpart and for bytes
      that draft tokens cannot spell.
    pieces: `[T]` int32, draft ids of all spellings.
    first: `[2]` int32, bos of the target and of the draft model. -1 if absent.
    longest: number of draft ids in the longest spelling.
  """

  to_target: jax.Array
  twins: jax.Array
  doubles: jax.Array
  offsets: jax.Array
  pieces: jax.Array
  first: jax.Array
  longest: int = struct.field(pytree_node=False)

  @property
  def draft_size(self) -> int:
    """Returns D, the vocabulary size of the draft model."""
    return self.to_target.shape[0]

  @property
  def target_size(self) -> int:
    """Returns V, the vocabulary size of the target."""
    return self.twins.shape[0]

  @property
  def shared(self) -> int:
    """Returns the number of common target ids."""
    return int((np.asarray(self.twins) < self.draft_size).sum())


def map_vocabularies(drafter: ReadsText, target: ReadsText,
                     draft_size: int | None = None,
                     target_size: int | None = None) -> VocabularyMap:
  """Returns the map between the vocabularies of two tokenizers.

  Args:
    drafter: tokenizer of the draft model.
    target: tokenizer of the target.
    draft_size: D, `vocab_size` of the draft model. It may exceed that of the
      tokenizer, because of unused ids. None means that of the tokenizer.
    target_size: V, `vocab_size` of the target. None means that of the
      tokenizer.

  Raises:
    ValueError: the vocabularies have no common token.

  Example:
    >>> from specjax import testing
    >>> drafter = testing.ListTokenizer((b"a", b"b", b"ab", b"a"))
    >>> target = testing.ListTokenizer((b"b", b"a", b"ba", b"c"))
    >>> found = map_vocabularies(drafter, target)
    >>> found.to_target.tolist(), found.twins.tolist(), found.doubles.tolist()
    ([1, 0, 4, 1], [1, 0, 4, 4], [3])
    >>> found.offsets.tolist(), found.pieces.tolist()  # ba is b, a
    ([0, 1, 2, 4, 4], [1, 0, 1, 0])
  """
  drafter = Vocabulary(drafter, draft_size)
  target = Vocabulary(target, target_size)
  to_target = np.array([target.ids.get(text, target.size)
                        for text in drafter.texts], np.int32)
  spellings = [[drafter.ids[text]] if text in drafter.ids
               else drafter.spelled(text) or [] for text in target.texts]
  for draft_id, target_id in special_pairs(drafter, target):
    to_target[draft_id], spellings[target_id] = target_id, [draft_id]

  twins = np.full(target.size, drafter.size, np.int32)
  for i, spelling in enumerate(spellings):
    if len(spelling) == 1 and to_target[spelling[0]] == i:
      twins[i] = spelling[0]
  has_twin = np.append(twins < drafter.size, False)
  to_target = np.where(has_twin[to_target], to_target, target.size)
  if not has_twin.any():
    raise ValueError(
        f"the drafter's {drafter.size} tokens and the target's {target.size} "
        "have none in common; choose a drafter for the same script, or decode "
        "without a drafter")
  common = np.flatnonzero(to_target < target.size)
  doubles = common[twins[to_target[common]] != common]
  counts = [len(spelling) for spelling in spellings]
  ids = lambda x: jnp.asarray(np.asarray(x, np.int32))
  return VocabularyMap(
      to_target=ids(to_target), twins=ids(twins), doubles=ids(doubles),
      offsets=ids(np.cumsum([0, *counts])),
      pieces=ids(np.concatenate([np.zeros(0), *spellings])),
      first=ids([NO_TOKEN if vocabulary.bos is None else vocabulary.bos
                 for vocabulary in (target, drafter)]),
      longest=max(counts))
