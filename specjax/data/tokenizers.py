"""Tokenizers of published models, and training of new ones."""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import copy
import functools
import os
import pathlib
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import pre_tokenizers
from tokenizers import processors
from tokenizers import trainers

from specjax.data import answers
from specjax.data import chat
from specjax.data import gguf_tokenizers
from specjax.data import token_bytes
from specjax.data import token_streams
from specjax.data import tokenizer_files
from specjax.data.tokenizer_files import END_OF_TEXT
from specjax.utils.files import atomically


class Tokenizer:
  """Tokenizer that converts text to token ids and back.

  Special tokens, such as `<|im_end|>`, control a model. Text is untrusted, so
  the names of special tokens in it are encoded as plain text. The exception is
  `encode(special=True)`. Added tokens that are not special are always
  recognised in text, as the tokenizer's files specify.

  Attributes:
    backend: the `tokenizers.Tokenizer` for plain text. It does not recognise
      special tokens in text.
    bos: id of the token that begins a document, or None.
    eos: id of the token that ends a sequence, or None.
    adds_bos: True if the tokenizer's files put `bos` before every text. True
      for Llama and Gemma, False for GPT-2 and Qwen.
    chat_template: jinja template that converts messages to text, or None.
    names: texts of the special tokens that have a name, such as
      `{"pad_token": "<pad>"}`. They are variables of the chat template. By
      default, `bos` and `eos` have the names "bos_token" and "eos_token".
    variables: other variables of the chat template, see `with_variables`.
  """

  def __init__(self, backend: tokenizers.Tokenizer, *, bos: int | None = None,
               eos: int | None = None, adds_bos: bool = False,
               chat_template: str | None = None,
               names: Mapping[str, str] | None = None) -> None:
    for name, token in (("bos", bos), ("eos", eos)):
      if token is not None and backend.id_to_token(token) is None:
        raise ValueError(f"{name} is {token}, which is not an id of the "
                         f"tokenizer's {backend.get_vocab_size()} tokens; give "
                         "the id of a token")
    self.backend = backend
    self.bos = bos
    self.eos = eos
    self.adds_bos = adds_bos and bos is not None
    self.chat_template = chat_template
    self.names = dict(names) if names is not None else {
        name: backend.id_to_token(token) for name, token in (
            ("bos_token", bos), ("eos_token", eos)) if token is not None}
    self.variables = {}
    known = backend.get_added_tokens_decoder()
    backend.add_special_tokens([
        backend.id_to_token(token) for token in dict.fromkeys((bos, eos))
        if token is not None
        and not (token in known and known[token].special)])
    # All threads that use the backend share this setting. So it never changes,
    # and a second backend, `parser`, recognises special tokens.
    backend.encode_special_tokens = True

  @classmethod
  def load(cls, path: str | os.PathLike[str]) -> "Tokenizer":
    """Returns the tokenizer of a `tokenizer.json` or of its directory.

    The tokenizer of a published model is read by transformers, together with
    the other files of its directory (needs `pip install 'specjax[published]'`).
    Settings of the files that specjax does not apply are reported on stderr.

    Raises:
      ValueError: the tokenizer is missing or damaged, its files contradict each
        other, or transformers is missing.
    """
    backend, conventions = tokenizer_files.read(path)
    return cls(backend, **conventions)

  @classmethod
  def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
    """Returns the tokenizer in the metadata of a GGUF file.

    Args:
      metadata: metadata values by key, such as `tokenizer.ggml.tokens`. Arrays
        are lists.

    Raises:
      ValueError: the tokenizer is missing, or its kind is unknown.
    """
    backend, conventions = gguf_tokenizers.read(metadata)
    return cls(backend, **conventions)

  def save(self, path: str | os.PathLike[str]) -> None:
    """Writes a `tokenizer.json` atomically.

    For tokenizers that are not from `train`, also writes a
    `tokenizer_config.json` to the same directory.

    Args:
      path: path of the `tokenizer.json`, or its directory.

    Raises:
      ValueError: the directory has other tokenizer files.
    """
    path = pathlib.Path(path)
    path = path / "tokenizer.json" if path.is_dir() else path
    tokenizer_files.check_alone(path.parent)
    own = tokenizer_files.own_conventions(self.backend)
    if own == {"bos": self.bos, "eos": self.eos, "adds_bos": self.adds_bos,
               "chat_template": self.chat_template}:
      path.with_name("tokenizer_config.json").unlink(missing_ok=True)
      with atomically(path) as f:
        f.write(self.backend.to_str(pretty=True).encode())
    else:
      tokenizer_files.write(path, self)

  @functools.cached_property
  def parser(self) -> tokenizers.Tokenizer:
    """Copy of `backend` that recognises special tokens in text."""
    copy = tokenizers.Tokenizer.from_str(self.backend.to_str())
    copy.encode_special_tokens = False
    # With this post-processor, offsets include the spaces of tokens. The
    # replaced one may add special tokens, but `parser` is used without them.
    copy.post_processor = processors.ByteLevel(trim_offsets=False)
    return copy

  @functools.cached_property
  def vocab_size(self) -> int:
    """Vocabulary size V: the largest id, including special tokens, plus 1."""
    return max(self.backend.get_vocab().values()) + 1

  @functools.cached_property
  def special_tokens(self) -> dict[int, str]:
    """Texts of the special tokens, by id."""
    added = self.backend.get_added_tokens_decoder()
    return {token: added[token].content for token in sorted(added)
            if added[token].special}

  @functools.cached_property
  def control_tokens(self) -> dict[int, str]:
    """Texts of the special tokens except the unknown token, by id.

    Encoded plain text may contain the unknown token, but no control token.
    Byte-level models never use an unknown token. GPT-2's files name the
    end-of-text token as the unknown token, but it is a control token.
    """
    strange = "\U0010ffff"  # a character in no vocabulary
    before, words = self.backend.normalizer, self.backend.pre_tokenizer
    if before:  # BERT's normalizer would remove the character
      strange = before.normalize_str(strange) or strange
    pieces = ([piece for piece, _ in words.pre_tokenize_str(strange)]
              if words else [strange])
    try:
      unknown = {token.id for piece in pieces
                 for token in self.backend.model.tokenize(piece)}
    except Exception:  # raised by the library if there is no unknown token
      unknown = set()
    return {token: text for token, text in self.special_tokens.items()
            if token not in unknown}

  def encode(self, text: str, bos: bool = True, special: bool = False
             ) -> list[int]:
    """Returns the token ids of a text.

    Args:
      text: text to encode.
      bos: if True and `adds_bos` is True, prepends the beginning-of-sequence
        token. It is not prepended twice. If the text is empty, it is prepended
        even if `adds_bos` is False.
      special: if True, recognises special tokens in the text. Use it only for
        trusted text.

    Raises:
      ValueError: a character of the text is a special token, or is not valid
        UTF-8.
    """
    token_bytes.check_text(text)
    if special:
      ids = self.parser.encode(text, add_special_tokens=False).ids
    else:
      ids = [token for _, part in self.plain(text) for token in part.ids]
    if not bos or self.bos is None:
      return ids
    if not ids or self.adds_bos and ids[0] != self.bos:
      return [self.bos, *ids]
    return ids

  def decode(self, ids: ArrayLike) -> str:
    """Returns the text of `ids` without special tokens.

    The bytes of the tokens are decoded as UTF-8. Invalid bytes are replaced by
    U+FFFD.
    """
    ids = [token for token in np.asarray(ids, np.int64).tolist()
           if self.token_bytes(token)]
    return b"".join(self.token_bytes(token, first=i == 0)
                    for i, token in enumerate(ids)).decode("utf-8", "replace")

  def chat(self, messages: Sequence[Mapping[str, Any]],
           add_generation_prompt: bool = True) -> list[int]:
    """Returns the token ids of a conversation, formatted by the chat template.

    Only the template can write special tokens. Special tokens in contents are
    encoded as plain text (see `specjax.data.chat`).

    Args:
      messages: messages, each with a "role" and a "content" or "tool_calls". A
        key with the value None is ignored.
      add_generation_prompt: if True, appends the header of the model's answer.

    Raises:
      ValueError: the template is missing or fails, `jinja2` is missing, a
        content is not valid UTF-8, or contents and template together would form
        a special token.
    """
    return chat.render(self, messages, add_generation_prompt).ids

  def with_variables(self, variables: Mapping[str, Any]) -> "Tokenizer":
    """Returns a copy whose chat template has more variables.

    Args:
      variables: variables by name, such as `{"enable_thinking": False}` or
        `{"tools": [...]}` with JSON schemas of functions.
    """
    found = copy.copy(self)
    # All copies share one parser, because it takes long to create.
    found.parser = self.parser
    found.variables = {**self.variables, **variables}
    return found

  def chat_answers(self, messages: Sequence[Mapping[str, Any]]
                   ) -> tuple[list[int], list[bool]]:
    """Returns the token ids of a conversation, and a mask of the answers.

    Args:
      messages: messages (see `chat`). The mask excludes an answer whose
        "weight" is 0. This key is not passed to the template.

    Returns:
      The ids of `chat` up to the end of the last answer, and a list of bools.
      The bool is True for tokens that the model generates: the answers, and the
      tokens that end their turns.

    Raises:
      ValueError: see `chat`. Also raised if the tokens of answers cannot be
        separated from other tokens (see `specjax.data.answers`).
    """
    return answers.encode(self, messages)

  def encode_stream(self, texts: Iterable[str]) -> np.ndarray:
    """Returns the tokens of all documents as one uint32 array.

    Each document begins with `bos`, or with `eos` if the tokenizer has no
    `bos`.

    Raises:
      ValueError: the tokenizer has neither token, or `encode` raises.
    """
    return np.concatenate(list(token_streams.encode(self, texts)))

  def token_bytes(self, token: int, first: bool = False) -> bytes:
    """Returns the bytes of a token, empty for special and unused ids.

    Args:
      token: id of the token.
      first: if True, the token is the first one of a text. Some tokenizers drop
        a space at the beginning of a text.

    Raises:
      ValueError: the id is negative, or the decoder has an unsupported step.
    """
    if token < 0:
      raise ValueError(f"token id {token} is negative; ids begin at 0")
    found = self._bytes[token] if token < self.vocab_size else b""
    if first and found and not token_bytes.is_byte_level(self.backend):
      text = self.backend.decode([token])
      return found if "\ufffd" in text else text.encode()
    return found

  def same_tokens(self, other: "Tokenizer") -> bool:
    """Returns True if the bytes of all ids and the special tokens are equal."""
    return (self._bytes == other._bytes
            and self.special_tokens == other.special_tokens)

  @functools.cached_property
  def _bytes(self) -> list[bytes]:
    """Bytes of each of the V tokens."""
    return token_bytes.table(self.backend, self.vocab_size,
                             self.special_tokens)

  def plain(self, text: str, encoding: tokenizers.Encoding | None = None
            ) -> Iterator[tuple[int, tokenizers.Encoding]]:
    """Yields pairs `(offset, encoding)` of the pieces of a text.

    Most strings have only one piece. No encoding contains a control token. If
    the backend encodes plain text, such as `</s>`, as a control token, the text
    is cut inside it.

    Args:
      text: text to encode.
      encoding: encoding of the text by `backend`. None computes it.

    Raises:
      ValueError: a character of the text is a special token.
    """
    if encoding is None:
      encoding = self.backend.encode(text, add_special_tokens=False)
    control = self.control_tokens
    if control.keys().isdisjoint(encoding.ids):
      yield 0, encoding
      return
    cuts = [0]
    for token, (start, end) in zip(encoding.ids, encoding.offsets):
      if token in control:
        if end - start < 2:
          raise ValueError(f"the text contains {text[start:end]!r}, which the "
                           "tokenizer always encodes as the special token "
                           f"{control[token]!r}; leave it out")
        cuts.append(start + 1)
    for start, end in zip(cuts, [*cuts[1:], len(text)]):
      for place, part in self.plain(text[start:end]):
        yield start + place, part


def check_same_tokens(drafter: Tokenizer, target: Tokenizer) -> None:
  """Checks that the tokenizers of drafter and target have equal tokens.

  Raises:
    ValueError: the sizes differ, or a token differs. The error names the first
      token that differs.
  """
  fix = "give a drafter that was trained with the target's tokenizer"
  if drafter.vocab_size != target.vocab_size:
    raise ValueError(
        f"the drafter's tokenizer has {drafter.vocab_size} tokens, but the "
        f"target's has {target.vocab_size}; {fix}")
  if drafter.same_tokens(target):
    return
  meaning = lambda tokenizer, token: (
      f"special {tokenizer.special_tokens[token]!r}"
      if token in tokenizer.special_tokens
      else repr(tokenizer.token_bytes(token)))
  for token in range(target.vocab_size):
    there, here = meaning(drafter, token), meaning(target, token)
    if there != here:
      raise ValueError(f"token {token} is {there} for the drafter's tokenizer "
                       f"and {here} for the target's; {fix}")


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
  """Trains a tokenizer with a byte-level BPE vocabulary.

  Its only special token, `<|endoftext|>`, begins every document and ends every
  sequence. `vocab_size` is the largest number of tokens.
  """
  if vocab_size < 257:
    raise ValueError(f"vocab_size is {vocab_size}; a byte-level vocabulary "
                     "needs at least 257: 256 bytes and one special token")
  backend = tokenizers.Tokenizer(models.BPE())
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = decoders.ByteLevel()
  backend.train_from_iterator(texts, trainers.BpeTrainer(
      vocab_size=vocab_size, special_tokens=[END_OF_TEXT],
      initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
      show_progress=False))
  return Tokenizer(backend, **tokenizer_files.own_conventions(backend))
