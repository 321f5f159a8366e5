"""Loads the models of flags: bundled ones, files, or models on the hub."""

from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
import os
import pathlib
import sys
from typing import Any

from absl import flags
import jax.numpy as jnp
import numpy as np

from lib import flags as shared
from lib import progress
import specjax as sj
from specjax.data import corpora
from specjax.data import Tokenizer
from specjax.data import tokenizers
from specjax.methods import published as published_drafters
from specjax.models import Pretrained
from specjax.training import runs
from specjax.utils import files

_ACROSS = "generate.py and the studies of chains draft across vocabularies"
_COUNTED = 2_000_000  # largest number of characters for token frequencies
DRAFTERS = (*sj.zoo.DRAFTERS, *sj.zoo.FOR_SMOLLM2)  # bundled draft models
HEADS = (*sj.zoo.HEADS, *sj.zoo.HEADS_FOR_SMOLLM2)
VARIABLES = "chat_template_kwargs"  # flag of scripts that format conversations


def label(name: str) -> str:
  """Returns the name of a model in tables: the last part of its path."""
  return os.path.basename(os.path.abspath(name))


def load_target(name: str, dtype: str | None = None
                ) -> tuple[Pretrained, Tokenizer]:
  """Loads the model of the flag --target, and its tokenizer.

  Args:
    name: "bundled", or an argument of `models.load_pretrained`.
    dtype: precision of the weights. None means the library's default.

  Raises:
    ValueError: the model does not exist, or has no tokenizer.
  """
  place = find("target", name, {"bundled": "target"})
  progress.say(f"loading {name}")
  model = read(place, dtype)
  tokenizer = tokenizer_of(model, name)
  if VARIABLES in flags.FLAGS and flags.FLAGS[VARIABLES].value is not None:
    tokenizer = tokenizer.with_variables(
        _json_object(flags.FLAGS[VARIABLES].value))
  return model, tokenizer


def _json_object(text: str) -> dict[str, Any]:
  """Returns the value of --chat_template_kwargs."""
  found = files.parse_json(text, f"--{VARIABLES}")
  if not isinstance(found, dict):
    raise ValueError(f"--{VARIABLES} is {text!r}; it must be a JSON object")
  return found


def load_model(name: str, dtype: str | None = None) -> Pretrained:
  """Loads one model. The model need not have a tokenizer.

  Args:
    name: "bundled", a bundled drafter, or an argument of
      `models.load_pretrained`.
    dtype: precision of the weights. None means the library's default.

  Raises:
    ValueError: the model does not exist.
  """
  place = find("model", name, {
      "bundled": "target", **{name: name for name in DRAFTERS}})
  progress.say(f"loading {name}")
  return read(place, dtype)


def read(place: str | pathlib.Path, dtype: str | None) -> Pretrained:
  """Reads a model from a result of `find`."""
  with _naming(str(place)):
    found = sj.models.load_pretrained(place, dtype=dtype and jnp.dtype(dtype))
  shared = sj.zoo.tokenizer_path()  # all bundled models have this tokenizer
  if found.tokenizer is None and pathlib.Path(place).parent == shared.parent:
    found = dataclasses.replace(found, tokenizer=Tokenizer.load(shared))
  return found


def find(what: str, name: str, bundled: Mapping[str, str] = {},
         choices: Sequence[str] = ()) -> str | pathlib.Path:
  """Returns the path or the hub name of a model.

  Args:
    what: kind of the model for the error message, such as "drafter".
    name: value of the flag.
    bundled: names in `zoo.model_path` by values of the flag.
    choices: valid names for the error message. Default: those of `bundled`.

  Raises:
    ValueError: `name` is neither bundled, nor a path, nor a hub name.
  """
  if name in bundled:
    return sj.zoo.model_path(bundled[name])
  path = pathlib.Path(name)
  known = name and (path.exists() or name == "smollm2" or (
      name.count("/") == 1 and not name.startswith((".", "/"))))
  if not known:
    raise ValueError(f"no {what} {name!r}; choose among "
                     f"{', '.join(choices or bundled)}, or give "
                     f"{shared.PUBLISHED}")
  missing = path.is_dir() and not any(
      (path / name).exists() for name in ("config.json", "heads.json"))
  if missing and what == "drafter" and not (path / runs.MANIFEST).exists():
    raise ValueError(
        f"{shared.naming(name)} has neither config.json nor heads.json; give "
        f"{shared.PUBLISHED}, or the --output_dir of train_drafter.py")
  if missing and (path / runs.MANIFEST).exists():
    raise ValueError(
        f"{shared.naming(name)} contains a training run that has not written "
        "heads or a model yet: train_drafter.py writes heads at every "
        "evaluation (--evaluate_every), and train_lm.py and distill.py write "
        "the model at the end; run the command of the training again to "
        "complete it")
  return path if path.exists() else name


def load_tokenizer(name: str) -> Tokenizer:
  """Loads a tokenizer from a tokenizer.json file or from a model."""
  path = pathlib.Path(name)
  if path.is_dir() or path.suffix == ".json":
    return Tokenizer.load(path)
  place = find("tokenizer", name, choices=["tokenizer.json files"])
  with _naming(name):
    return _present(sj.models.load_tokenizer(place), name)


@contextlib.contextmanager
def _naming(value: str):
  """Adds the flag with a value to each `ValueError` in the context."""
  try:
    yield
  except ValueError as e:
    flag = shared.naming(value)
    if flag == value:
      raise
    raise ValueError(f"{flag}: {e}") from None


def tokenizer_of(model: Pretrained, name: str) -> Tokenizer:
  """Returns the tokenizer of a model; raises `ValueError` if it has none."""
  return _present(model.tokenizer, name)


def _present(tokenizer: Tokenizer | None, name: str):
  if tokenizer is None:
    raise ValueError(f"{name} has no tokenizer; copy the tokenizer.json of its "
                     "training into its directory")
  return tokenizer


def ends(model: Pretrained, tokenizer: Tokenizer
         ) -> tuple[int, ...] | None:
  """Returns the end-of-text ids of a model and its tokenizer, or None."""
  own = model.generation.eos if model.generation else ()
  ids = dict.fromkeys((*own, tokenizer.eos))
  return tuple(token for token in ids if token is not None) or None


def check_tokens(target: Pretrained, drafter: Pretrained, name: str) -> None:
  """Raises `ValueError` unless target and drafter have the same vocabulary.

  A drafter without a tokenizer is assumed to have the target's tokenizer.
  """
  sizes = drafter.model.vocab_size, target.model.vocab_size
  unfit = f"{name} does not fit the target: "
  other = f"the drafter predicts {sizes[0]} tokens and the target {sizes[1]}"
  if drafter.tokenizer is None:
    if sizes[0] != sizes[1]:
      raise ValueError(f"{unfit}{other}, and the drafter has no tokenizer; "
                       "copy the tokenizer.json of its training into its "
                       f"directory, or give another drafter ({_ACROSS})")
    return
  try:
    tokenizers.check_same_tokens(drafter.tokenizer, target.tokenizer)
    if sizes[0] != sizes[1]:
      raise ValueError(f"{other}; give another drafter")
  except ValueError as e:
    raise ValueError(f"{unfit}{e} ({_ACROSS})") from None


def narrowed(drafter: Pretrained, tokenizer: Tokenizer, name: str,
             size: int | None, source: str = "stdlib-no-tests") -> Pretrained:
  """Reduces a drafter's output head to the most frequent tokens (FR-Spec).

  Args:
    drafter: draft model.
    tokenizer: tokenizer of the target, used if the drafter has none.
    name: name of the drafter for messages.
    size: number of remaining tokens, including end-of-text tokens. None returns
      the drafter unchanged.
    source: text for counting tokens, an argument of `corpora.read_documents`.
      If it has several documents, only the training documents are used.

  Raises:
    ValueError: `size` exceeds the vocabulary, or is less than the number of
      end-of-text tokens.
  """
  if size is None:
    return drafter
  vocab_size = drafter.model.vocab_size
  tokenizer = drafter.tokenizer or tokenizer
  if size > vocab_size:
    raise ValueError(f"--draft_vocabulary is {size} and {name} has "
                     f"{vocab_size} tokens; give a smaller number")
  always = [end for end in ends(drafter, tokenizer) or () if end < vocab_size]
  if size < len(always):
    raise ValueError(f"--draft_vocabulary is {size} and {name} has "
                     f"{len(always)} end-of-text tokens, which are always "
                     "included; give a larger number")
  documents = corpora.read_documents(source)
  if len(documents) > 1:
    documents, _ = corpora.split(documents)
  counts = _token_counts(documents, tokenizer, vocab_size)
  ids = sj.models.frequent_tokens(counts, size, always)
  print(f"{name} drafts {size:,} of its {vocab_size:,} tokens, which are "
        f"{counts[ids].sum() / max(counts.sum(), 1):.1%} of {source}",
        file=sys.stderr)
  model = sj.models.VocabularySubset(drafter.model)
  return dataclasses.replace(
      drafter, model=model, params=model.parameters(drafter.params, ids))


def _token_counts(documents: list, tokenizer: Tokenizer, vocab_size: int
                  ) -> np.ndarray:
  """Returns `[V]`, the number of occurrences of tokens in sampled documents."""
  counts = np.zeros(vocab_size, np.int64)
  characters = 0
  # The order by hash is like a random order. So the first documents are a
  # random sample.
  for document in sorted(documents, key=lambda document: document.digest):
    text = document.text[:_COUNTED - characters]
    ids = np.asarray(tokenizer.encode(text, bos=False), np.int64)
    counts += np.bincount(ids[ids < vocab_size], minlength=vocab_size)
    characters += len(text)
    if characters == _COUNTED:
      break
  return counts


def heads_directory(name: str) -> pathlib.Path:
  """Returns the directory of heads. `name` is a bundled name or a path."""
  return (sj.zoo.heads_path(name) if name in HEADS
          else pathlib.Path(name))


def drafts_for_itself(name: str, target: str | None = None) -> bool:
  """Returns True if a name denotes a self-drafter (heads or embeddings).

  Args:
    name: name of a drafter.
    target: name of the target, or None. The directory of a target may also
      contain a drafter.
  """
  return (name in HEADS
          or bool(name) and (heads_directory(name) / "heads.json").exists()
          or _published(name, target) is not None)


def _published(name: str, target: str | None = None):
  """Returns the layout of a published drafter, or None for other names."""
  if not name or not pathlib.Path(name).is_dir():
    return None
  layout = published_drafters.drafter_layout(name)
  if layout is None or not published_drafters.LAYOUTS[layout].in_target:
    return layout
  # With this layout, the directory of a model also contains a drafter for this
  # model. If the model is not the target, the name denotes the model itself as
  # a draft model.
  own = bool(target) and pathlib.Path(target).is_dir() and (
      pathlib.Path(name).samefile(target))
  return layout if own else None
