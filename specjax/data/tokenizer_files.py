"""Reader of a tokenizer directory.

`tokenizer.json` contains the vocabulary and the rules. Other files of the
directory contain the begin and end tokens and the chat template. This module
interprets these files as transformers does.
"""

from collections.abc import Iterator
import os
import pathlib
from typing import Any

import tokenizers

from specjax.data import token_bytes
from specjax.utils.files import read_json
from specjax.utils.files import read_text

END_OF_TEXT = "<|endoftext|>"
_FIX = "repair it, or fetch it again"
_IDS = 2**32  # token ids are below this number
_ENDS = "bos_token", "eos_token"
_SPECIAL = "special_tokens_map.json"
_TEMPLATE, _TEMPLATE_JSON = "chat_template.jinja", "chat_template.json"
_BESIDE = _SPECIAL, _TEMPLATE, _TEMPLATE_JSON  # files read but never written


def read(path: str | os.PathLike[str]
         ) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
  """Reads a `tokenizer.json` and the other files of its directory.

  Args:
    path: path of the file or its directory.

  Returns:
    The tokenizer, and the keyword arguments of `specjax.data.Tokenizer`.

  Raises:
    ValueError: the tokenizer is missing, a file is damaged, or a file names an
      unknown token.
  """
  path = pathlib.Path(path)
  file = path / "tokenizer.json" if path.is_dir() else path
  if not file.is_file():
    raise ValueError(f"the tokenizer {file} does not exist; give a "
                     "tokenizer.json, which save_pretrained of transformers "
                     "writes for other formats")
  try:
    backend = tokenizers.Tokenizer.from_str(read_text(file))
  except Exception as e:  # the library raises bare Exception
    raise ValueError(f"{file} is not a tokenizer: {e}") from None
  backend.no_truncation()  # some files limit the length of their encodings
  backend.no_padding()
  config = _json(file.with_name("tokenizer_config.json"))
  named = _json(file.with_name(_SPECIAL)) | config
  template = _chat_template(file.parent, config)
  if not named and (own := own_conventions(backend)):
    return backend, own | {"chat_template": template}
  _mark_special(backend, named)
  before, after = _template_tokens(backend)
  tokens = _begin_and_end(backend, file, named, before, after)
  return backend, {
      "bos": tokens.get("bos_token"), "eos": tokens.get("eos_token"),
      "adds_bos": before is not None or named.get("add_bos_token") is True,
      "chat_template": template}


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


def _json(path) -> dict[str, Any]:
  return read_json(path, _FIX) if path.is_file() else {}


def _texts(value) -> Iterator[str]:
  """Yields the token strings in a value of a JSON file.

  The value is a string, a list or a dict. The dict has the token as "content",
  or contains such values.
  """
  if isinstance(value, str):
    yield value
  elif isinstance(value, dict):
    yield from (_texts(value["content"]) if "content" in value
                else _texts(list(value.values())))
  elif isinstance(value, list):
    for item in value:
      yield from _texts(item)


def _mark_special(backend, named) -> None:
  """Marks tokens as special if the other files list them as special."""
  special = {added.content
             for added in backend.get_added_tokens_decoder().values()
             if added.special}
  backend.add_special_tokens([
      text for name, value in named.items()
      if name.endswith("_token") or name.endswith("_special_tokens")
      for text in _texts(value)
      if text not in special and backend.token_to_id(text) is not None])


def _template_tokens(backend) -> tuple[int | None, int | None]:
  """Returns the special tokens that the tokenizer adds before and after a text.

  Each of them is None if the tokenizer does not add it.
  """
  encoding = backend.encode("a")
  marks = encoding.special_tokens_mask
  if not any(marks):
    return None, None
  return (encoding.ids[0] if marks[0] else None,
          encoding.ids[-1] if marks[-1] and len(marks) > 1 else None)


def _begin_and_end(backend, file, named, before, after
                   ) -> dict[str, int | None]:
  """Returns the ids of "bos_token" and "eos_token"; unknown ones are left out.

  Args:
    backend: tokenizer.
    file: path of the `tokenizer.json`.
    named: values of the directory's other files, by key.
    before: token that the tokenizer puts before a text, or None.
    after: token that the tokenizer puts after a text, or None.
  """
  written = {name: token for name, token in zip(_ENDS, (before, after))
             if token is not None}
  tokens = _last_resort(backend, file.with_name("config.json"),
                        named | written) | written
  for name in _ENDS:
    if name in named:
      tokens[name] = _id(backend, file, name, named[name])
  if before is not None:  # `bos` is by definition the token before a text
    tokens["bos_token"] = before
  return tokens


def _last_resort(backend, path, known) -> dict[str, int]:
  """Returns begin and end ids from the model's configuration.

  If the configuration contains no ids, both are the id of `END_OF_TEXT`.

  Args:
    backend: tokenizer.
    path: path of the model's configuration.
    known: keys of begin and end tokens that other files contain.
  """
  config = _json(path)
  found = {}
  for name in _ENDS:
    value = config.get(name + "_id")
    value = value[0] if isinstance(value, list) and value else value
    if (isinstance(value, int) and 0 <= value < _IDS  # some files have -1
        and backend.id_to_token(value) is not None):
      if name not in known:
        check_not_ordinary(backend, value, f"{name}_id", path)
      found[name] = value
  end = backend.token_to_id(END_OF_TEXT)
  if not found and end is not None:
    found = {"bos_token": end, "eos_token": end}
  return found


def check_not_ordinary(backend: tokenizers.Tokenizer, token: int, key: str,
                       path: str | os.PathLike[str]) -> None:
  """Checks that a begin or end token is not an ordinary token.

  A configuration may contain default ids of a library. These ids may be
  ordinary tokens of this tokenizer.

  Args:
    backend: the tokenizer.
    token: id of the begin or end token.
    key: key of the id in the configuration.
    path: path of the configuration, for error messages.

  Raises:
    ValueError: the token is not marked as special, and plain text contains it.
  """
  text = backend.decode([token], skip_special_tokens=False)
  if (token not in backend.get_added_tokens_decoder()
      and not token_bytes.is_mark(backend.id_to_token(token) or "")
      and token in backend.encode(text, add_special_tokens=False).ids):
    raise ValueError(
        f"{path} has {token} for {key}, which is the ordinary token {text!r} "
        "in tokenizer.json; write the id of the token that "
        f"{'begins' if key.startswith('bos') else 'ends'} a sequence, or null")


def _id(backend, file, name, value) -> int | None:
  texts = list(_texts(value))
  if not texts:
    return None
  token = backend.token_to_id(texts[0])
  if token is None:
    raise ValueError(f"{name} is {texts[0]!r}, which is not a token of {file}; "
                     "give files of one tokenizer")
  return token


def _chat_template(directory, config) -> str | None:
  """Returns the chat template, or None.

  The first existing one of these is used: the file chat_template.jinja, the
  entry in tokenizer_config.json, the entry in chat_template.json.
  """
  path = directory / _TEMPLATE
  if path.is_file():
    return read_text(path)
  template = config.get("chat_template") or _json(
      directory / _TEMPLATE_JSON).get("chat_template")
  if isinstance(template, list):  # several templates with names
    template = _default_template(directory, template)
  if not isinstance(template, str | None):
    raise ValueError(f"the chat_template in {directory} is a "
                     f"{type(template).__name__}; it must be a string, or a "
                     f"list of dicts with 'name' and 'template': {_FIX}")
  return template


def _default_template(directory, templates) -> str | None:
  """Returns the template named "default", or the first one if there is none."""
  by_name = {item.get("name"): item.get("template")
             for item in templates if isinstance(item, dict)}
  if len(by_name) < len(templates) or not all(
      isinstance(text, str) for item in by_name.items() for text in item):
    raise ValueError(f"the chat_template in {directory} is a list, in which "
                     "every item must have its own 'name' and a 'template'; "
                     f"{_FIX}")
  return by_name.get("default", next(iter(by_name.values()), None))
