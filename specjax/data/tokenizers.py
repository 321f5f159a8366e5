"""Byte-level BPE: no text is out of its vocabulary."""

from collections.abc import Iterable
import os
import pathlib

import numpy as np
from numpy.typing import ArrayLike
import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import pre_tokenizers
from tokenizers import trainers

from specjax.files import atomically

END_OF_TEXT = "<|endoftext|>"


class Tokenizer:
  """Text to token ids and back.

  One special token, `<|endoftext|>`, stands before every document and so
  serves as beginning and end of a sequence (`bos`, `eos`).

  Attributes:
    backend: the `tokenizers.Tokenizer` that does the work.
    bos: id of the token before every document.
    eos: id of the token that ends a sequence, the same one.
  """

  def __init__(self, backend: tokenizers.Tokenizer) -> None:
    self.backend = backend
    # A literal <|endoftext|> in a text is text, and not the end of it.
    backend.encode_special_tokens = True
    self.eos = backend.token_to_id(END_OF_TEXT)
    if self.eos is None:
      raise ValueError(f"the tokenizer has no token {END_OF_TEXT}; train it "
                       "with specjax.data.tokenizers.train")
    self.bos = self.eos

  @classmethod
  def load(cls, path: str | os.PathLike[str]) -> "Tokenizer":
    """Reads a `tokenizer.json`."""
    path = pathlib.Path(path)
    if not path.is_file():
      raise ValueError(f"no tokenizer at {path}; it should be a tokenizer.json")
    try:
      return cls(tokenizers.Tokenizer.from_file(str(path)))
    except Exception as e:  # the library raises bare Exception
      raise ValueError(f"{path} is not a tokenizer: {e}") from None

  def save(self, path: str | os.PathLike[str]) -> None:
    """Writes a `tokenizer.json`, whole or not at all."""
    with atomically(path) as f:
      f.write(self.backend.to_str(pretty=True).encode())

  @property
  def vocab_size(self) -> int:
    """V, the special token included."""
    return self.backend.get_vocab_size()

  def encode(self, text: str, bos: bool = True) -> list[int]:
    """Token ids of `text`, after the beginning-of-sequence token if `bos`."""
    ids = self.backend.encode(text, add_special_tokens=False).ids
    return [self.bos, *ids] if bos else ids

  def decode(self, ids: ArrayLike) -> str:
    """The text of `ids`; bytes that are not UTF-8 come out replaced."""
    ids = np.asarray(ids).tolist()
    return self.backend.decode(ids, skip_special_tokens=True)

  def encode_stream(self, texts: Iterable[str]) -> np.ndarray:
    """All texts as one array: each after one end-of-text token, uint16."""
    if self.vocab_size > 2**16:
      raise ValueError(f"vocabulary of {self.vocab_size} tokens; at most "
                       f"{2**16} fit the training array")
    pieces = []
    for encoding in self.backend.encode_batch(
        list(texts), add_special_tokens=False):
      pieces.append(np.asarray([self.bos, *encoding.ids], np.uint16))
    return np.concatenate(pieces)


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
  """Learns a byte-level BPE vocabulary of `vocab_size` tokens."""
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
  return Tokenizer(backend)
