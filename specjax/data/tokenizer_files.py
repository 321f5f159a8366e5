"""Reader and writer of tokenizer directories.

A `tokenizer.json` of `tokenizers.train` is complete. All other tokenizers are
read by transformers, because the rules of their files depend on classes, keys
and versions that only this library knows.
"""

from collections.abc import Mapping
import json
import os
import pathlib
import sys
from typing import Any
from typing import TYPE_CHECKING

import tokenizers
from tokenizers import processors

from specjax.utils.files import atomically
from specjax.utils.files import parse_json
from specjax.utils.files import read_json
from specjax.utils.files import read_text
from specjax.utils.files import write_json

if TYPE_CHECKING:  # avoids an import cycle
  from specjax.data.tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
_FIX = "repair it, or fetch it again"
_MAIN, _CONFIG = "tokenizer.json", "tokenizer_config.json"
# Files that change the meaning of a tokenizer.json and that specjax never
# writes.
_BESIDE = ("special_tokens_map.json", "added_tokens.json",
           "chat_template.jinja", "chat_template.json")
# Vocabularies that transformers converts if there is no tokenizer.json.
_VOCABULARIES = ("tokenizer.model", "vocab.json", "vocab.txt")
# Parts of a tokenizer.json, and values with which the library reads them.
_PARTS = {"version": "1.0", "normalizer": None, "pre_tokenizer": None,
          "post_processor": None, "decoder": None,
          "model": {"type": "BPE", "vocab": {}, "merges": []},
          "added_tokens": []}


def exists(directory: str | os.PathLike[str]) -> bool:
  """Returns True if a directory contains a tokenizer."""
  return any((pathlib.Path(directory) / name).is_file()
             for name in (_MAIN, *_VOCABULARIES))


def read(path: str | os.PathLike[str]
         ) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
  """Reads a tokenizer.

  Args:
    path: directory, or path of its `tokenizer.json`.

  Returns:
    The tokenizer, and the keyword arguments of `specjax.data.Tokenizer`.

  Raises:
    ValueError: the tokenizer is missing or damaged, its files contradict each
      other, or the package `transformers` is missing.
  """
  path = pathlib.Path(path)
  file = path / _MAIN if path.is_dir() else path
  directory = file.parent
  if not file.is_file() and not (path.is_dir() and exists(path)):
    raise ValueError(f"the tokenizer {file} does not exist; give a "
                     "tokenizer.json, which save_pretrained of transformers "
                     "writes for other formats")
  if file.is_file():
    backend = _parsed(file)
    own = own_conventions(backend)
    config = directory / "config.json"
    is_published = file.name == _MAIN and (
        any((directory / name).exists() for name in (_CONFIG, *_BESIDE))
        or config.is_file() and "model_type" in read_json(config, _FIX))
    if own and not is_published:
      return backend, own
  if file.name != _MAIN:
    raise ValueError(f"{file} is the tokenizer of a published model; rename it "
                     f"to {_MAIN} in the directory of its other files")
  for name in (_CONFIG, *_BESIDE):
    if (directory / name).is_file():  # damaged files are refused by name
      if name.endswith(".json"):
        read_json(directory / name, _FIX)
      else:
        read_text(directory / name)
  return _published(directory)


def _parsed(file: pathlib.Path) -> tokenizers.Tokenizer:
  """Returns the tokenizer of a file without padding and truncation."""
  text = read_text(file)
  try:
    backend = tokenizers.Tokenizer.from_str(text)
  except Exception as e:  # the library raises bare Exception
    raise ValueError(f"{file} is not a tokenizer: {_reason(file, text, e)}"
                     ) from None
  backend.no_truncation()  # some files limit the length of their encodings
  backend.no_padding()
  return backend


def _reason(file: pathlib.Path, text: str, error: Exception) -> str:
  """Returns the reason for which the library cannot read a file.

  The library's error does not name the part of the file, which is often of a
  type that only a newer version knows. So parts are replaced until the rest can
  be read.
  """
  spec, part = parse_json(text, file), None
  for name in _PARTS if isinstance(spec, dict) else ():
    part, spec[name] = spec.get(name), _PARTS[name]
    try:
      tokenizers.Tokenizer.from_str(json.dumps(spec))
    except Exception:  # pylint: disable=broad-exception-caught
      continue
    kind = part.get("type") if isinstance(part, dict) else part
    return (f"tokenizers {tokenizers.__version__} cannot read its {name} "
            f"{kind if isinstance(kind, str) else ''!r} ({error}); for files "
            "of newer versions: pip install -U tokenizers")
  return str(error)


def _published(directory: pathlib.Path
               ) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
  """Reads a directory with transformers; see `read`."""
  transformers = library(f"the tokenizer of {directory}")
  try:
    loaded = transformers.AutoTokenizer.from_pretrained(
        str(directory), local_files_only=True, trust_remote_code=False,
        mistral_format=False)
  except Exception as e:  # pylint: disable=broad-exception-caught
    reason = " ".join(str(e).split())[:300]
    raise ValueError(f"transformers {transformers.__version__} cannot read "
                     f"the tokenizer of {directory} ({type(e).__name__}: "
                     f"{reason}); {_FIX}") from None
  backend = getattr(loaded, "backend_tokenizer", None)
  if not isinstance(backend, tokenizers.Tokenizer):
    raise ValueError(
        f"the tokenizer of {directory} is a {type(loaded).__name__}, which is "
        "written in Python; specjax needs a tokenizer of the library "
        "'tokenizers': convert it to a tokenizer.json")
  backend.no_truncation()
  backend.no_padding()
  _check_ids(directory, backend)
  # Special tokens that the tokenizer adds before and after a text.
  found, plain = (backend.encode("a", add_special_tokens=marks).ids
                  for marks in (True, False))
  before = found[0] if found[:1] != plain[:1] else None
  after = found[-1] if found[-1:] != plain[-1:] else None
  _report(directory, loaded, backend, after)
  template = loaded.chat_template
  if isinstance(template, Mapping):  # several templates with names
    template = template.get("default")
  return backend, {
      "bos": loaded.bos_token_id if before is None else before,
      "eos": loaded.eos_token_id, "adds_bos": before is not None,
      # without the byte-order mark of a file
      "chat_template": template and template.removeprefix("\ufeff"),
      "names": loaded.special_tokens_map}


def library(purpose: str) -> Any:
  """Returns the package `transformers`.

  Args:
    purpose: subject of the error message, such as "the tokenizer of model/".

  Raises:
    ValueError: the package is missing.
  """
  # By default, it advises to install PyTorch, which tokenizers do not need.
  os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
  try:
    import transformers  # pylint: disable=g-import-not-at-top
  except ImportError:
    raise ValueError(f"{purpose} needs the package 'transformers': pip install "
                     "'specjax[published]'") from None
  return transformers


def _check_ids(directory: pathlib.Path, backend: tokenizers.Tokenizer) -> None:
  """Checks that tokens have the ids that the files give them.

  The library renumbers added tokens with ids beyond the end of the vocabulary.
  The model's embeddings, however, have the ids of the files.

  Raises:
    ValueError: a token has another id, or no file has the token of an end.
  """
  spec, config = _json(directory / _MAIN), _json(directory / _CONFIG)
  ids = spec.get("model", {}).get("vocab", {})
  if isinstance(ids, list):  # Unigram: pairs (token, score)
    ids = {text: i for i, (text, _) in enumerate(ids)}
  decoder = config.get("added_tokens_decoder") or {}
  ids = (ids | {item["content"]: item["id"] for item in spec.get(
      "added_tokens", ())} | _json(directory / "added_tokens.json")
         | {item["content"]: int(i) for i, item in decoder.items()})
  for text, token in ids.items():
    found = backend.token_to_id(text)
    if found != token:
      actual = "drops it" if found is None else f"uses {found}"
      raise ValueError(
          f"the files in {directory} give {text!r} the id {token}, but the "
          f"library 'tokenizers' {actual}; add tokens for the unused ids "
          "before it, such as '<unused1>', or correct the id")
  for name, value in (_json(directory / _BESIDE[0]) | config).items():
    text = value.get("content") if isinstance(value, dict) else value
    if (name in ("bos_token", "eos_token") and isinstance(text, str)
        and spec and text not in ids):
      raise ValueError(f"{name} is {text!r}, which is not a token of the files "
                       f"in {directory}; give files of one tokenizer")


def _report(directory: pathlib.Path, loaded: Any,
            backend: tokenizers.Tokenizer, after: int | None) -> None:
  """Prints one line with the settings that specjax does not apply."""
  ignored = []
  if after is not None:
    ignored.append(f"the token {backend.id_to_token(after)!r} after every text "
                   "(add_eos_token), because a prompt must not end")
  if loaded.split_special_tokens:
    ignored.append("split_special_tokens, because a chat template writes "
                   "special tokens")
  if (loaded.clean_up_tokenization_spaces
      and not isinstance(backend.model, tokenizers.models.BPE)):
    ignored.append("clean_up_tokenization_spaces, because text is decoded from "
                   "the bytes of its tokens")
  if ignored:
    print(f"not applied from the tokenizer of {directory}: "
          f"{'; '.join(ignored)}", file=sys.stderr)


def _json(path: pathlib.Path) -> dict[str, Any]:
  return read_json(path, _FIX) if path.is_file() else {}


def own_conventions(backend: tokenizers.Tokenizer) -> dict[str, Any]:
  """Returns the arguments of `Tokenizer` for a tokenizer of `tokenizers.train`.

  Such a tokenizer has one special token, `<|endoftext|>`. This token begins
  every document and ends every sequence. The result is empty for other
  tokenizers.
  """
  special = [token for token, added
             in backend.get_added_tokens_decoder().items() if added.special]
  end = backend.token_to_id(END_OF_TEXT)
  if special != [end] or backend.post_processor is not None:
    return {}
  return {"bos": end, "eos": end, "adds_bos": True, "chat_template": None}


def bos_processor(backend: tokenizers.Tokenizer, bos: int
                  ) -> processors.TemplateProcessing:
  """Returns a post-processor that adds `bos` before every text."""
  text = backend.id_to_token(bos)
  name = text.replace(":", "_").replace("$", "_")  # syntax of templates
  return processors.TemplateProcessing(
      single=[name, "$A"], pair=[name, "$A", "$B"],
      special_tokens=[{"id": name, "ids": [bos], "tokens": [text]}])


def check_alone(directory: pathlib.Path) -> None:
  """Checks that a directory has no files of another tokenizer.

  Raises:
    ValueError: the directory has a file that `read` would combine with a saved
      tokenizer, although it belongs to another one.
  """
  for name in _BESIDE:
    if (directory / name).exists():
      raise ValueError(f"{directory} has a {name} of another tokenizer, which "
                       "would be read together with the saved one; remove it, "
                       "or choose another directory")


def write(path: pathlib.Path, tokenizer: "Tokenizer", **keys: Any) -> None:
  """Writes a `tokenizer.json` and a `tokenizer_config.json` for transformers.

  Args:
    path: path of the `tokenizer.json`.
    tokenizer: a `specjax.data.Tokenizer`.
    **keys: values of further keys in the `tokenizer_config.json`.
  """
  backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
  if tokenizer.adds_bos and backend.post_processor is None:
    # specjax adds bos before a text without a post-processor. transformers
    # requires a post-processor of the tokenizer to add bos.
    backend.post_processor = bos_processor(backend, tokenizer.bos)
  config = {"tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False, **tokenizer.names, **keys}
  if tokenizer.chat_template is not None:
    config["chat_template"] = tokenizer.chat_template
  write_json(path.with_name(_CONFIG), config, indent=2)
  with atomically(path) as f:
    f.write(backend.to_str(pretty=True).encode())
