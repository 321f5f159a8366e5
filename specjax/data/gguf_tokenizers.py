"""Tokenizers from the metadata of GGUF files, with llama.cpp's ids.

A GGUF file contains a vocabulary and the name of a pre-tokenizer. A
pre-tokenizer is a set of rules that split a text into words. Names and rules
follow `llama-vocab.cpp` of llama.cpp. Like llama.cpp, this module does not
normalise text. So the ids of decomposed characters differ from those of a
published `tokenizer.json` with NFC normalisation (Qwen, GPT-NeoX).
"""

from collections.abc import Mapping
import sys
from typing import Any
import unicodedata

import tokenizers
from tokenizers import AddedToken
from tokenizers import decoders
from tokenizers import models
from tokenizers import normalizers
from tokenizers import pre_tokenizers

from specjax.data import tokenizer_files

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # token types
_UNUSED = 5
_ENDS = ("eos", "eot", "eom")
# Names of special tokens in chat templates, by their names in GGUF files.
_NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token",
          "seperator": "sep_token", "padding": "pad_token",
          "cls": "cls_token", "mask": "mask_token"}
_OPEN, _CLOSE = ("Ps", "Pi", "Sm"), ("Pe", "Pf", "Sm")  # Unicode categories
_SPACE = "\u2581"  # SentencePiece's character for a space

_GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+"
         r"|\s+(?!\S)")
_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = (_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
          r"| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _REST)
# Template of patterns in which an upper-case letter after lower-case letters
# begins a new word. The models were trained with these patterns. llama.cpp only
# approximates them, because its engine lacks some character classes.
_CASED = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*"
          r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
          r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
          r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
          r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _REST)


# Regular expressions by the name of a pre-tokenizer. They are applied in order,
# and each one splits the text at its matches.
_PATTERNS = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "dbrx", "smaug-bpe"),
                    (_WORDS % "{1,3}",)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"),
                    (_WORDS % "",)),
    "tekken": (_CASED % ("", "", ""),),
    "gpt-4o": (_CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?", "{1,3}"),),
}
# Pre-tokenizers with which a word in the vocabulary is encoded as one token,
# even if merges would not form it. By default, they also add bos.
_WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "tekken")


def read(metadata: Mapping[str, Any]
         ) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
  """Returns the tokenizer in the metadata of a GGUF file.

  Args:
    metadata: metadata of the file, values by key. Arrays are lists.

  Returns:
    The tokenizer, and the keyword arguments of `specjax.data.Tokenizer`.

  Raises:
    ValueError: the tokenizer is missing, its kind is unknown, or its metadata
      is inconsistent.
  """
  key = "tokenizer.ggml."
  data = {name.removeprefix(key): value for name, value in metadata.items()
          if name.startswith(key)}
  kind, tokens = data.get("model"), list(data.get("tokens", ()))
  if kind not in ("gpt2", "llama") or not tokens:
    raise ValueError(
        f"the GGUF file has a tokenizer of kind {kind!r} and {len(tokens)} "
        "tokens; specjax reads the kinds 'gpt2' (byte-level BPE) and 'llama' "
        "(SentencePiece BPE): give the model as safetensors with a "
        "tokenizer.json")
  _check(data, tokens)
  # Tokens that end a sequence get the type of control tokens, whatever type the
  # file has for them. So plain text never contains them.
  types = list(data.get("token_type", [_NORMAL] * len(tokens)))
  for name in _ENDS:
    if f"{name}_token_id" in data:
      types[data[f"{name}_token_id"]] = _CONTROL
  build, bos, eos = ((_byte_level, None, None) if kind == "gpt2"
                     else (_sentence_piece, 1, 2))
  backend, adds_bos = build(data, tokens, types)
  # Phi-3's tokenizer drops whitespace after added tokens. GGUF has no key for
  # this property, so it is derived from the architecture.
  strips = (kind == "llama"
            and metadata.get("general.architecture") == "phi3")
  _add(backend, tokens, types, strips)
  bos, eos = data.get("bos_token_id", bos), data.get("eos_token_id", eos)
  adds_bos = bool(data.get("add_bos_token", adds_bos)) and bos is not None
  if adds_bos:  # so that other readers of saved files also add it
    backend.post_processor = tokenizer_files.bos_processor(backend, bos)
  template = metadata.get("tokenizer.chat_template")
  _mark_those_of_template(backend, tokens, template or "")
  named = {key: data.get(f"{key}_token_id") for key in _NAMES} | {
      "bos": bos, "eos": eos}
  return backend, {
      "bos": bos, "eos": eos, "adds_bos": adds_bos, "chat_template": template,
      "names": {_NAMES[key]: tokens[token] for key, token in named.items()
                if token is not None}}


def is_mark(text: str) -> bool:
  """Returns True if a text looks like a control token, such as `<|im_end|>`.

  Other examples are `</s>` and `[SEP]`. Such a text begins with an opening
  sign, ends with a closing sign, and contains letters or digits.
  """
  return (len(text) > 2 and unicodedata.category(text[0]) in _OPEN
          and unicodedata.category(text[-1]) in _CLOSE
          and any(character.isalnum() for character in text))


def _mark_those_of_template(backend: tokenizers.Tokenizer, tokens: list[str],
                            template: str) -> None:
  """Marks control tokens that a chat template writes as special tokens.

  Some GGUF files store `<|im_start|>` as a normal token. Without this mark, the
  tokenizer would split the text of that token into several tokens.

  Raises:
    ValueError: the package `jinja2` is missing.
  """
  if not template:
    return
  try:
    import jinja2  # pylint: disable=g-import-not-at-top
  except ImportError:
    raise ValueError("the chat template of a GGUF file needs the package "
                     "'jinja2': pip install 'specjax[published]'") from None
  try:  # names in the code of the template are not written
    written = "\0".join(text for _, kind, text in jinja2.Environment().lex(
        template) if kind in ("data", "string"))
  except jinja2.TemplateSyntaxError:  # `Tokenizer.chat` reports it
    return
  known = backend.get_added_tokens_decoder()
  split = [text for i, text in enumerate(tokens)
           if is_mark(text) and text in written and i not in known
           and i not in backend.encode(text, add_special_tokens=False).ids]
  if split:
    backend.add_special_tokens(split)
    print(f"the chat template writes {', '.join(split)}, which the GGUF file "
          "does not mark as special; each is read as one special token all "
          "the same", file=sys.stderr)


def _check(data, tokens) -> None:
  """Raises `ValueError` if the metadata is inconsistent."""
  twice = len(tokens) - len(set(tokens))
  if twice:
    raise ValueError(f"{twice} of the GGUF file's {len(tokens)} tokens are "
                     "duplicates; convert the model again")
  for name in ("token_type", "scores"):
    count = len(data.get(name, tokens))
    if count != len(tokens):
      raise ValueError(f"the GGUF file has {len(tokens)} tokens, but {count} "
                       f"values of {name}; convert the model again")
  for name in dict.fromkeys((*_NAMES, *_ENDS)):
    token = data.get(f"{name}_token_id", 0)
    if not 0 <= token < len(tokens):
      raise ValueError(f"the GGUF file has {len(tokens)} tokens, but its "
                       f"{name} is token {token}; convert the model again")


def _byte_level(data, tokens, types) -> tuple[tokenizers.Tokenizer, bool]:
  """Returns byte-level BPE with the rules of the named pre-tokenizer."""
  del types
  name = data.get("pre")
  if name not in _PATTERNS:
    raise ValueError(f"the GGUF file's pre-tokenizer is {name!r}; specjax "
                     f"supports {', '.join(_PATTERNS)}: give the model as "
                     "safetensors with a tokenizer.json")
  if "merges" not in data:
    raise ValueError("the GGUF file has no tokenizer.ggml.merges, which "
                     "byte-level BPE needs; convert the model again")
  merges = [tuple(merge.split(" ", 1)) for merge in data["merges"]]
  vocabulary = {token: i for i, token in enumerate(tokens)}
  try:
    model = models.BPE(vocab=vocabulary, merges=merges,
                       ignore_merges=name in _WHOLE_WORDS)
  except Exception as e:  # the library raises bare Exception
    raise ValueError(f"the GGUF file's merges do not fit its tokens ({e}); "
                     "convert the model again") from None
  backend = tokenizers.Tokenizer(model)
  cuts = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
          for pattern in _PATTERNS[name]]
  backend.pre_tokenizer = pre_tokenizers.Sequence([
      *cuts, pre_tokenizers.ByteLevel(add_prefix_space=False,
                                      use_regex=False)])
  backend.decoder = decoders.ByteLevel()
  return backend, name in _WHOLE_WORDS


def _sentence_piece(data, tokens, types) -> tuple[tokenizers.Tokenizer, bool]:
  """Returns a BPE tokenizer equivalent to that of SentencePiece.

  SentencePiece merges the pair that forms the piece with the best score. So all
  pairs that form a piece become merges, best score first. SentencePiece merges
  pieces of equal score from left to right, which a list of merges cannot
  express. Published models have no equal scores (a score is minus the rank).
  """
  if "scores" not in data:
    raise ValueError("the GGUF file has no tokenizer.ggml.scores, which "
                     "SentencePiece's BPE needs; convert the model again")
  # Merges never form control tokens or byte tokens, so the merges omit these.
  order = sorted((i for i, kind in enumerate(types)
                  if kind in (_NORMAL, _UNUSED)),
                 key=lambda i: -data["scores"][i])
  best_first = [tokens[i] for i in order]
  pieces = set(best_first)
  merges = [(token[:cut], token[cut:]) for token in best_first
            for cut in range(1, len(token))
            if token[:cut] in pieces and token[cut:] in pieces]
  unknown = [token for token, kind in zip(tokens, types) if kind == _UNKNOWN]
  backend = tokenizers.Tokenizer(models.BPE(
      vocab={token: i for i, token in enumerate(tokens)}, merges=merges,
      unk_token=unknown[0] if unknown else None, fuse_unk=True,
      byte_fallback=True))
  replaced = normalizers.Replace(" ", _SPACE)
  decoded = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(),
             decoders.Fuse()]
  if data.get("add_space_prefix", True):
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_SPACE), replaced])
    decoded.append(decoders.Strip(" ", 1, 0))
  else:
    backend.normalizer = replaced
  backend.decoder = decoders.Sequence(decoded)
  return backend, True


def _add(backend, tokens, types, strips) -> None:
  """Adds control and unknown tokens as special tokens, user-defined as normal.

  If `strips` is True, the tokenizer drops whitespace after most added tokens.
  """
  special, added = [], []
  for token, kind in zip(tokens, types):
    if kind in (_CONTROL, _UNKNOWN):
      special.append(AddedToken(
          token, normalized=False, special=True, rstrip=strips and token not in
          ("<unk>", "<s>", "<|endoftext|>")))
    elif kind == _USER_DEFINED:
      added.append(AddedToken(token, normalized=False, special=False,
                              rstrip=strips))
  backend.add_special_tokens(special)
  backend.add_tokens(added)
