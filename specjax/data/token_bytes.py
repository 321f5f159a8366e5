"""Bytes of tokens, from the tokenizer's decoder."""

from collections.abc import Callable
from collections.abc import Container
import json
import re
from typing import Any
import unicodedata

import tokenizers

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


_OPEN, _CLOSE = ("Ps", "Pi", "Sm"), ("Pe", "Pf", "Sm")  # Unicode categories


def is_mark(text: str) -> bool:
  """Returns True if a text looks like a control token, such as `<|im_end|>`.

  Other examples are `</s>` and `[SEP]`. Such a text begins with an opening
  sign, ends with a closing sign, and contains letters or digits.
  """
  return (len(text) > 2 and unicodedata.category(text[0]) in _OPEN
          and unicodedata.category(text[-1]) in _CLOSE
          and any(character.isalnum() for character in text))


def marks_in(text: str) -> list[str]:
  """Returns the substrings of at most 64 characters that satisfy `is_mark`."""
  kinds = [unicodedata.category(x) for x in text]
  pieces = (text[start:end + 1] for start, kind in enumerate(kinds)
            if kind in _OPEN
            for end in range(start + 2, min(start + 64, len(text)))
            if kinds[end] in _CLOSE)
  return list(dict.fromkeys(filter(is_mark, pieces)))


def table(backend: tokenizers.Tokenizer, size: int, special: Container[int]
          ) -> list[bytes]:
  """Returns the bytes of each token.

  Args:
    backend: the tokenizer.
    size: V, the vocabulary size.
    special: ids of special tokens.

  Returns:
    List of the bytes of V tokens. b"" for special and unused ids.

  Raises:
    ValueError: the decoder has an unsupported step.
  """
  state = json.loads(backend.decoder.__getstate__()) if backend.decoder else {}
  steps = state.get("decoders", [state])
  byte_level = any(step.get("type") == "ByteLevel" for step in steps)
  of = _byte_level() if byte_level else _chain(steps)
  added = backend.get_added_tokens_decoder()
  found = [b""] * size
  for text, token in backend.get_vocab().items():
    if token not in special:
      # Byte-level BPE writes tokens in its alphabet, except added tokens.
      found[token] = (text.encode() if byte_level and token in added
                      else of(text))
  return found


def _byte_level() -> Callable[[str], bytes]:
  byte = alphabet()

  def of(text: str) -> bytes:
    try:
      return bytes([byte[character] for character in text])
    except KeyError:  # the library decodes text outside the alphabet as UTF-8
      return text.encode()

  return of


def _chain(steps: list[dict[str, Any]]) -> Callable[[str], bytes]:
  """Returns a function that applies a decoder's steps to a token.

  The function returns the bytes that the token has in the middle of a text. At
  the beginning of a text, some decoders also strip a space.
  """
  kinds = {step.get("type") for step in steps}
  replaced = _replacements(steps)
  prefixes = [step["prefix"] for step in steps
              if step.get("type") == "WordPiece"]

  def of(text: str) -> bytes:
    byte = BYTE.fullmatch(text) if "ByteFallback" in kinds else None
    if byte:
      return bytes([int(byte[1], 16)])
    for prefix in prefixes:
      text = (text.removeprefix(prefix) if text.startswith(prefix)
              else " " + text)
    for old, new in replaced:
      text = text.replace(old, new)
    return text.encode()

  return of


def _replacements(steps: list[dict[str, Any]]) -> list[tuple[str, str]]:
  """Returns the replacements of a decoder as pairs `(old, new)`.

  Raises:
    ValueError: the decoder has an unsupported step.
  """
  unknown = {step.get("type") for step in steps} - {
      None, "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace",
      "WordPiece", "BPEDecoder"}
  replaced = []
  for step in steps:
    match step:
      case {"type": "Replace", "pattern": {"String": old}, "content": new}:
        replaced.append((old, new))
      case {"type": "Replace"}:
        unknown.add("Replace of a regular expression")
      case {"type": "Metaspace", "replacement": old}:
        replaced.append((old, " "))
      case {"type": "BPEDecoder", "suffix": old}:
        replaced.append((old, " "))
  if unknown:
    raise ValueError(f"the tokenizer's decoder has {', '.join(unknown)}, which "
                     "specjax does not support; use a tokenizer of byte-level "
                     "BPE, SentencePiece or WordPiece")
  return replaced
