"""Tokenizers of published models: text to token ids and back."""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import functools
import os
import pathlib
import sys
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
from specjax.utils.files import write_json


class Tokenizer:
  """Text to token ids and back.

  Special tokens, such as `<|im_end|>`, control a model. Text is untrusted, so
  special tokens in it are encoded as plain text, except with
  `encode(special=True)`. Added tokens that are not special are always read from
  text, as specified by the tokenizer's files.

  Attributes:
    backend: the `tokenizers.Tokenizer` for plain text; it reads no special
      tokens.
    bos: id of the token before a document, or None.
    eos: id of the token that ends a sequence, or None.
    adds_bos: whether the files put `bos` before every text. True for Llama and
      Gemma, False for GPT-2 and Qwen.
    chat_template: jinja template that converts messages to text, or None.
  """

  def __init__(self, backend: tokenizers.Tokenizer, *, bos: int | None = None,
               eos: int | None = None, adds_bos: bool = False,
               chat_template: str | None = None) -> None:
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
    _mark_those_of_template(backend, chat_template)
    known = backend.get_added_tokens_decoder()
    backend.add_special_tokens([
        backend.id_to_token(token) for token in dict.fromkeys((bos, eos))
        if token is not None
        and not (token in known and known[token].special)])
    # This setting is shared by all threads that use the backend. So it is set
    # once. Another backend, `parser`, reads special tokens.
    backend.encode_special_tokens = True

  @classmethod
  def load(cls, path: str | os.PathLike[str]) -> "Tokenizer":
    """Returns the tokenizer of a `tokenizer.json` or of its directory.

    Other files of the directory are also read: `tokenizer_config.json`,
    `special_tokens_map.json`, `chat_template.jinja`, `config.json`.

    Raises:
      ValueError: the file is missing or damaged, or other files contradict it.
    """
    backend, conventions = tokenizer_files.read(path)
    return cls(backend, **conventions)

  @classmethod
  def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
    """Returns the tokenizer in the metadata of a GGUF file.

    Args:
      metadata: values by key (`tokenizer.ggml.tokens`, ...), arrays as lists.

    Raises:
      ValueError: the tokenizer is missing, or its kind is unknown.
    """
    backend, conventions = gguf_tokenizers.read(metadata)
    return cls(backend, **conventions)

  def save(self, path: str | os.PathLike[str]) -> None:
    """Writes a `tokenizer.json` atomically.

    For tokenizers that are not from `train`, a `tokenizer_config.json` is
    written to the same directory.

    Args:
      path: path of the `tokenizer.json` or its directory.

    Raises:
      ValueError: the directory has other tokenizer files.
    """
    path = pathlib.Path(path)
    path = path / "tokenizer.json" if path.is_dir() else path
    tokenizer_files.check_alone(path.parent)
    conventions = {"bos": self.bos, "eos": self.eos,
                   "adds_bos": self.adds_bos,
                   "chat_template": self.chat_template}
    own = tokenizer_files.own_conventions(self.backend)
    config_path = path.with_name("tokenizer_config.json")
    if conventions != own or config_path.exists():
      name = lambda token: (None if token is None
                            else self.backend.id_to_token(token))
      config = {"bos_token": name(self.bos), "eos_token": name(self.eos),
                "add_bos_token": self.adds_bos}
      if self.chat_template is not None:
        config["chat_template"] = self.chat_template
      write_json(config_path, config, indent=2)
    with atomically(path) as f:
      f.write(self.backend.to_str(pretty=True).encode())

  @functools.cached_property
  def parser(self) -> tokenizers.Tokenizer:
    """Copy of `backend` that reads special tokens from text."""
    copy = tokenizers.Tokenizer.from_str(self.backend.to_str())
    copy.encode_special_tokens = False
    # With this post-processor, offsets include the spaces of tokens. It
    # replaces one that adds special tokens, but `parser` is used without them.
    copy.post_processor = processors.ByteLevel(trim_offsets=False)
    return copy

  @functools.cached_property
  def vocab_size(self) -> int:
    """Vocabulary size V: the largest id, including special tokens, plus 1."""
    return max(self.backend.get_vocab().values()) + 1

  @functools.cached_property
  def special_tokens(self) -> dict[int, str]:
    """Special tokens by id."""
    added = self.backend.get_added_tokens_decoder()
    return {token: added[token].content for token in sorted(added)
            if added[token].special}

  @functools.cached_property
  def control_tokens(self) -> dict[int, str]:
    """Special tokens by id, without the token for unknown characters.

    Plain text may encode to the unknown token, but to no control token.
    Byte-level models never use an unknown token. So GPT-2's end of text, which
    its files also name as the unknown token, is a control token.
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
      bos: True to prepend the beginning-of-sequence token if `adds_bos`. For an
        empty text it is prepended also without `adds_bos`.
      special: True to read special tokens from the text. Use it only for
        trusted text. A text that begins with `bos` gets no second one.

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
    """Returns the text of `ids`; invalid UTF-8 is replaced."""
    ids = np.asarray(ids).tolist()
    return self.backend.decode(ids, skip_special_tokens=True)

  def chat(self, messages: Sequence[Mapping[str, Any]],
           add_generation_prompt: bool = True) -> list[int]:
    """Returns the token ids of a conversation, by the model's chat template.

    Only the template can write special tokens. Special tokens in contents are
    encoded as plain text (see `specjax.data.chat`).

    Args:
      messages: messages, each with a "role" and a "content" or "tool_calls". A
        value of None counts as a missing key.
      add_generation_prompt: whether to append the header of the model's answer.

    Raises:
      ValueError: the template is missing or fails, `jinja2` is missing, a
        content is not valid UTF-8, or contents and template together would form
        a special token.
    """
    return chat.render(self, messages, add_generation_prompt).ids

  def chat_answers(self, messages: Sequence[Mapping[str, Any]]
                   ) -> tuple[list[int], list[bool]]:
    """Returns the token ids of a conversation, and a mask of the answers.

    Args:
      messages: messages, see `chat`.

    Returns:
      The ids of `chat` up to the end of the last answer, and a list of bools:
      True for tokens that the model generates, which are the answers and the
      tokens that end their turns.

    Raises:
      ValueError: see `chat`; or the tokens of answers cannot be separated
        from the others, see `specjax.data.answers`.
    """
    return answers.encode(self, messages)

  def encode_stream(self, texts: Iterable[str]) -> np.ndarray:
    """Returns one uint32 array of all documents, each after `bos`, or `eos`.

    `eos` is used if the tokenizer has no `bos`.

    Raises:
      ValueError: the tokenizer has neither token, or see `encode`.
    """
    return np.concatenate(list(token_streams.encode(self, texts)))

  def token_bytes(self, token: int) -> bytes:
    """Returns the bytes of a token, empty for special and unused ids.

    Args:
      token: id of the token.

    Raises:
      ValueError: the id is negative, or the kind of the decoder is unknown.
    """
    if token < 0:
      raise ValueError(f"token id {token} is negative; ids begin at 0")
    return self._bytes[token] if token < self.vocab_size else b""

  def same_tokens(self, other: "Tokenizer") -> bool:
    """Returns True if all ids have equal bytes and special tokens."""
    return (self._bytes == other._bytes
            and self.special_tokens == other.special_tokens)

  @functools.cached_property
  def _bytes(self) -> list[bytes]:
    """Bytes of each of the V tokens."""
    return token_bytes.table(self.backend, self.vocab_size,
                             self.special_tokens)

  def plain(self, text: str, encoding: tokenizers.Encoding | None = None
            ) -> Iterator[tuple[int, tokenizers.Encoding]]:
    """Yields `(offset, encoding)` of the pieces of a text, often only one.

    No encoding has a control token. If plain text such as `</s>` would be
    encoded as one, the text is cut inside it.

    Args:
      text: text to encode.
      encoding: encoding of the text by `backend`; None: computed here.

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


def _mark_those_of_template(backend, template):
  """Marks the control tokens that a chat template writes as special.

  Some GGUF files store `<|im_start|>` as a normal token. Then the tokenizer
  would split it into several tokens.
  """
  split = []
  for text in token_bytes.marks_in(template or ""):
    token = backend.token_to_id(text)
    if (token is not None and token not in backend.get_added_tokens_decoder()
        and token not in backend.encode(text, add_special_tokens=False).ids):
      split.append(text)
  if split:
    backend.add_special_tokens(split)
    print(f"the chat template writes {', '.join(split)}, which the files of "
          "the tokenizer do not mark as special; each is read as one special "
          "token all the same", file=sys.stderr)


def check_same_tokens(drafter: Tokenizer, target: Tokenizer) -> None:
  """Checks that the tokenizers of drafter and target have equal tokens.

  Raises:
    ValueError: the sizes differ, or a token; the error names the first one.
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
  """Trains a byte-level BPE vocabulary of `vocab_size` tokens.

  Its only special token, `<|endoftext|>`, begins every document and ends every
  sequence.
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
