"""Bytes of tokens, and their text by the tokenizer's decoder."""

from collections.abc import Callable
from collections.abc import Container
import json
import re

import tokenizers
from tokenizers import decoders

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # SentencePiece's name of a byte


def alphabet() -> dict[str, int]:
  """Returns the byte of each character of byte-level BPE's alphabet.

  A printable Latin-1 character stands for its own byte. Characters from U+0100
  stand for the other bytes (Radford et al., 2019, GPT-2).
  """
  printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
  others = [byte for byte in range(256) if byte not in printable]
  return ({chr(byte): byte for byte in printable}
          | {chr(256 + i): byte for i, byte in enumerate(others)})


def check_text(text: str) -> None:
  """Checks that a text has no lone surrogates, so that it has a UTF-8 form.

  Python creates lone surrogates from command-line bytes that are not UTF-8.
  JSON creates them from an unpaired "\\ud83d".

  Raises:
    ValueError: the text has a lone surrogate. The message contains the position
      of the first one.
  """
  try:
    text.encode()
  except UnicodeEncodeError as e:
    raise ValueError(
        f"the text is not valid Unicode: character {e.start} is "
        f"{text[e.start]!r}, half of a surrogate pair; save the text as UTF-8, "
        "or remove the character") from None


def is_byte_level(backend: tokenizers.Tokenizer) -> bool:
  """Returns True if the tokens are texts in the alphabet of byte-level BPE."""
  return "ByteLevel" in _steps(backend)


def _steps(backend: tokenizers.Tokenizer) -> list[str]:
  """Returns the types of the decoder's steps."""
  state = json.loads(backend.decoder.__getstate__()) if backend.decoder else {}
  return [step.get("type") for step in state.get("decoders", [state])]


def table(backend: tokenizers.Tokenizer, size: int, special: Container[int]
          ) -> list[bytes]:
  """Returns the bytes that each token has in the middle of a text.

  Args:
    backend: the tokenizer.
    size: V, the vocabulary size.
    special: ids of special tokens.

  Returns:
    List of the bytes of V tokens. b"" for special and unused ids.

  Raises:
    ValueError: the decoder has an unsupported step.
  """
  steps = _steps(backend)
  if "CTC" in steps:
    raise ValueError("the tokenizer's decoder has CTC, with which the text of "
                     "a token depends on other tokens; use the tokenizer of a "
                     "language model")
  byte, added = alphabet(), backend.get_added_tokens_decoder()
  # Added tokens are stored as text. All other tokens of byte-level BPE are
  # written in its alphabet, and the library decodes text outside of the
  # alphabet as UTF-8.
  of_bytes = lambda text, token: (
      bytes(byte[x] for x in text)
      if token not in added and byte.keys() >= set(text) else text.encode())
  between = _between(backend.decoder, "ByteFallback" in steps)
  found = [b""] * size
  for text, token in backend.get_vocab().items():
    if token not in special:
      found[token] = (of_bytes(text, token) if "ByteLevel" in steps
                      else between(text))
  return found


def _between(decoder: decoders.Decoder | None, has_bytes: bool
             ) -> Callable[[str], bytes]:
  """Returns a function that returns the bytes of a token between two others.

  The library decodes the token between two letters, because decoders treat the
  beginning and the end of a text differently.
  """
  if decoder is None:  # the library joins tokens with spaces
    return lambda text: f" {text}".encode()
  before = decoder.decode(["a"])
  after = decoder.decode(["a", "a"])[len(before):]

  def of(text: str) -> bytes:
    byte = BYTE.fullmatch(text) if has_bytes else None
    if byte:
      return bytes([int(byte[1], 16)])
    written = decoder.decode(["a", text, "a"])
    return written[len(before):len(written) - len(after)].encode()

  return of
