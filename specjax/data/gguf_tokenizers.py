"""Tokenizers from the metadata of GGUF files, with llama.cpp's ids.

A GGUF file has a vocabulary, and a name for the rules by which a text is cut
into words before they are encoded. The rules are those of llama.cpp's
`llama-vocab.cpp`, which is where the names come from. It does not normalise,
and neither does this: where a published `tokenizer.json` composes characters
(NFC: Qwen, GPT-NeoX), ids of decomposed text differ from it.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

import tokenizers
from tokenizers import AddedToken
from tokenizers import decoders
from tokenizers import models
from tokenizers import normalizers
from tokenizers import pre_tokenizers
from tokenizers import processors

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # token types
_UNUSED = 5
_ENDS = ("eos", "eot", "eom")
_SPACE = "\u2581"  # SentencePiece writes a space so

_GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+"
         r"|\s+(?!\S)")
_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = (_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
          r"| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _REST)
_LLAMA3, _QWEN2 = _WORDS % "{1,3}", _WORDS % ""
# Upper case may begin a word and not go on in it. llama.cpp approximates these
# two, for its engine lacks the classes; this is how the models have them.
_CASED = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*"
          r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
          r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
          r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
          r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _REST)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rules:
  """Rules of a pre-tokenizer, by its name.

  Attributes:
    patterns: patterns that split the text one after another, at their matches.
    whole_words: whether a word in the vocabulary is one token, regardless of
      merges.
    adds_bos: default of `add_bos_token`.
  """

  patterns: tuple[str, ...]
  whole_words: bool = False
  adds_bos: bool = False


_DEFAULT = _Rules(patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+",
                            "[0-9][0-9][0-9]"))
_BY_NAME = {
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo"),
                    _Rules(patterns=(_GPT2,))),
    **dict.fromkeys(("smollm", "starcoder"),
                    _Rules(patterns=(r"\p{N}", _GPT2))),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe"), _Rules(
        patterns=(_LLAMA3,), whole_words=True, adds_bos=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _Rules(patterns=(_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"),
                    _Rules(patterns=(_QWEN2,))),
    "tekken": _Rules(patterns=(_CASED % ("", "", ""),), whole_words=True,
                     adds_bos=True),
    "gpt-4o": _Rules(patterns=(
        _CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?", "{1,3}"),)),
}


def read(metadata: Mapping[str, Any]
         ) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
  """Returns the tokenizer in the metadata of a GGUF file.

  Args:
    metadata: values by key, arrays as lists.

  Returns:
    The tokenizer, and the other arguments of `specjax.data.Tokenizer`.

  Raises:
    ValueError: there is no tokenizer, its kind is unknown, or its metadata is
      inconsistent.
  """
  key = "tokenizer.ggml."
  data = {name.removeprefix(key): value for name, value in metadata.items()
          if name.startswith(key)}
  kind, tokens = data.get("model"), list(data.get("tokens", ()))
  if kind not in ("gpt2", "llama") or not tokens:
    raise ValueError(
        f"the GGUF file has a tokenizer of kind {kind!r} and {len(tokens)} "
        "tokens; kinds that are read are 'gpt2' (byte-level BPE) and 'llama' "
        "(SentencePiece BPE): give the model as safetensors with a "
        "tokenizer.json")
  _check(data, tokens)
  types = list(data.get("token_type", [_NORMAL] * len(tokens)))
  for name in _ENDS:  # of a text, a turn, a message: no text may have them
    if f"{name}_token_id" in data:
      types[data[f"{name}_token_id"]] = _CONTROL
  build, bos, eos = ((_byte_level, None, None) if kind == "gpt2"
                     else (_sentence_piece, 1, 2))
  backend, adds_bos = build(data, tokens, types)
  # Phi-3's own tokenizer drops space after its tokens, which GGUF cannot say.
  strips = (kind == "llama"
            and metadata.get("general.architecture") == "phi3")
  _add(backend, tokens, types, strips)
  bos, eos = data.get("bos_token_id", bos), data.get("eos_token_id", eos)
  adds_bos = bool(data.get("add_bos_token", adds_bos)) and bos is not None
  if adds_bos:  # so that other readers of what `save` writes add it as well
    text = tokens[bos]
    backend.post_processor = processors.TemplateProcessing(
        single=[text, "$A"], pair=[text, "$A", "$B"],
        special_tokens=[(text, int(bos))])
  return backend, {
      "bos": None if bos is None else int(bos),
      "eos": None if eos is None else int(eos), "adds_bos": adds_bos,
      "chat_template": metadata.get("tokenizer.chat_template")}


def _check(data, tokens) -> None:
  """Raises `ValueError` if the metadata is inconsistent."""
  twice = len(tokens) - len(set(tokens))
  if twice:
    raise ValueError(f"{twice} of the GGUF file's {len(tokens)} tokens are "
                     "there twice; convert the model again")
  for name in ("token_type", "scores"):
    count = len(data.get(name, tokens))
    if count != len(tokens):
      raise ValueError(f"the GGUF file has {len(tokens)} tokens and {count} "
                       f"values of {name}; convert the model again")
  for name in ("bos", *_ENDS):
    token = data.get(f"{name}_token_id", 0)
    if not 0 <= token < len(tokens):
      raise ValueError(f"the GGUF file has {len(tokens)} tokens and says that "
                       f"its {name} is token {token}; convert the model again")


def _byte_level(data, tokens, types) -> tuple[tokenizers.Tokenizer, bool]:
  """Byte-level BPE; the name of the pre-tokenizer says how words are cut."""
  del types
  name = data.get("pre")
  if name not in _BY_NAME:
    raise ValueError(f"the GGUF file's pre-tokenizer is {name!r}; known are "
                     f"{', '.join(_BY_NAME)}: give the model as safetensors "
                     "with a tokenizer.json")
  rules = _BY_NAME[name]
  if "merges" not in data:
    raise ValueError("the GGUF file has no tokenizer.ggml.merges, which "
                     "byte-level BPE needs; convert the model again")
  merges = [tuple(merge.split(" ", 1)) for merge in data["merges"]]
  vocabulary = {token: i for i, token in enumerate(tokens)}
  try:
    model = models.BPE(vocab=vocabulary, merges=merges,
                       ignore_merges=rules.whole_words)
  except Exception as e:  # the library raises bare Exception
    raise ValueError(f"the GGUF file's merges do not fit its tokens ({e}); "
                     "convert the model again") from None
  backend = tokenizers.Tokenizer(model)
  cuts = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
          for pattern in rules.patterns]
  backend.pre_tokenizer = pre_tokenizers.Sequence([
      *cuts, pre_tokenizers.ByteLevel(add_prefix_space=False,
                                      use_regex=False)])
  backend.decoder = decoders.ByteLevel()
  return backend, rules.adds_bos


def _sentence_piece(data, tokens, types) -> tuple[tokenizers.Tokenizer, bool]:
  """SentencePiece's BPE: of all pairs that are a piece, the best score first.

  The pairs are listed as merges in that order. Two pieces of one score would
  merge from the left in SentencePiece, which a list cannot say; published
  models have no two (their scores are minus their ranks).
  """
  if "scores" not in data:
    raise ValueError("the GGUF file has no tokenizer.ggml.scores, which "
                     "SentencePiece's BPE needs; convert the model again")
  # Control tokens, and bytes, are no pieces: text never merges into them.
  pieces = {token for token, kind in zip(tokens, types)
            if kind in (_NORMAL, _UNUSED)}
  order = sorted((i for i, token in enumerate(tokens) if token in pieces),
                 key=lambda i: -data["scores"][i])
  merges = [(token[:cut], token[cut:])
            for token in (tokens[i] for i in order)
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
  """Control and unknown tokens are special, user-defined ones only added."""
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
