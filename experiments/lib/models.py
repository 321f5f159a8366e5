"""The models that flags name: in the box, on disk, on the hub."""

from collections.abc import Callable
import dataclasses
import functools
import os
import pathlib
import sys
from typing import Any
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from lib import flags as shared
from lib import progress
import specjax as sj
from specjax import methods
from specjax import strategies
from specjax.data import corpora
from specjax.data import Tokenizer
from specjax.data import tokenizers
from specjax.interfaces import Verifier
from specjax.methods import published as published_drafters
from specjax.models import Pretrained
from specjax.models import Transformer
from specjax.strategies import Strategy
from specjax.utils import files

_ACROSS = ("against_transformers.py, generate.py, replay.py, "
           "rounds_study.py, self_drafting_study.py and "
           "verification_study.py draft across vocabularies")
_COUNTED = 2_000_000  # characters of text that tokens are counted in
DRAFTERS = (*sj.zoo.DRAFTERS, *sj.zoo.FOR_SMOLLM2)  # in the box
HEADS = (*sj.zoo.HEADS, *sj.zoo.HEADS_FOR_SMOLLM2)
ITSELF = "itself"  # a drafter: the target


def label(name: str) -> str:
  """What tables and figures call a model: the last part of its path."""
  return os.path.basename(os.path.abspath(name))


def load_models(target: str, drafters: list[str], choices: str = "", *,
                dtype: str | None = None, same_tokens: bool = False
                ) -> tuple[Pretrained, dict[str, Pretrained], Tokenizer]:
  """The models that the flags --target and --drafter name.

  Args:
    target: "bundled", or what `models.load_pretrained` takes.
    drafters: names of bundled drafters, or what `models.load_pretrained` takes.
    choices: what a drafter may be, for the error; default: as in `drafters`.
    dtype: of the weights; None is the library's choice.
    same_tokens: whether drafters must read and write the target's tokens;
      else `chain` drafts with whatever they have.

  Returns:
    `(target, {label: drafter}, tokenizer)`; what is named twice is loaded once.

  Raises:
    ValueError: there is no such model, the target has no tokenizer, a drafter
      has another one that it must not have, or two have the same label.
  """
  drafters = list(dict.fromkeys(drafters))
  _check_labels(drafters)
  choices = choices or ", ".join(DRAFTERS)
  place = (sj.zoo.model_path("target") if target == "bundled"
           else _place("target", target, "bundled"))
  paths = {name: sj.zoo.model_path(name) if name in DRAFTERS else
           place if name == ITSELF else _place("drafter", name, choices)
           for name in drafters}
  progress.say(f"loading {', '.join(dict.fromkeys((target, *drafters)))}")
  load = functools.cache(functools.partial(_load, dtype=dtype))
  model = load(place)
  tokenizer = tokenizer_of(model, target)
  members = {label(name): load(path) for name, path in paths.items()}
  for name, member in members.items() if same_tokens else ():
    check_tokens(model, member, name)
    _tell_of_tokens(member, name)
  return model, members, tokenizer


def _check_labels(names: list[str]) -> None:
  """Rejects drafters with the same label in tables."""
  labels = list(map(label, names))
  for one in labels:
    if labels.count(one) > 1:
      both = " and ".join(x for x in names if label(x) == one)
      raise ValueError(f"the drafters {both} have the same label {one!r} in "
                       "tables; leave one out, or rename a directory")


def load_model(name: str, dtype: str | None = None) -> Pretrained:
  """One model, in the box or not; it may have no tokenizer.

  Args:
    name: "bundled", a bundled drafter, or what `models.load_pretrained` takes.
    dtype: of the weights; None is the library's choice.

  Raises:
    ValueError: there is no such model.
  """
  boxed = {"bundled": "target", **{name: name for name in DRAFTERS}}
  progress.say(f"loading {name}")
  return _load(sj.zoo.model_path(boxed[name]) if name in boxed
               else _place("model", name, ", ".join(boxed)), dtype)


def _load(place: str | pathlib.Path, dtype: str | None):
  found = sj.models.load_pretrained(place, dtype=dtype and jnp.dtype(dtype))
  shared = sj.zoo.tokenizer_path()  # by all in the box
  if found.tokenizer is None and pathlib.Path(place).parent == shared.parent:
    found = dataclasses.replace(found, tokenizer=Tokenizer.load(shared))
  return found


def _place(what: str, name: str, choices: str):
  """The path or name that a flag gives; a slip is told what there is."""
  path = pathlib.Path(name)
  known = name and (path.exists() or name == "smollm2" or (
      name.count("/") == 1 and not name.startswith((".", "/"))))
  if not known:
    raise ValueError(f"no {what} {name!r}; choose among {choices}, or give "
                     f"{shared.PUBLISHED}")
  return path if path.exists() else name


def load_tokenizer(name: str) -> Tokenizer:
  """The tokenizer in a tokenizer.json, or that of a model."""
  path = pathlib.Path(name)
  if path.is_dir() or path.suffix == ".json":
    return Tokenizer.load(path)
  place = _place("tokenizer", name, "tokenizer.json files")
  return _present(sj.models.load_tokenizer(place), name)


def tokenizer_of(model: Pretrained, name: str) -> Tokenizer:
  """The tokenizer of a model that reads text."""
  return _present(model.tokenizer, name)


def _present(tokenizer: Tokenizer | None, name: str):
  if tokenizer is None:
    raise ValueError(f"{name} has no tokenizer; put the tokenizer.json that it "
                     "was trained with into its directory")
  return tokenizer


def ends(model: Pretrained, tokenizer: Tokenizer
         ) -> tuple[int, ...] | None:
  """The token ids that end a text: the model's own and its tokenizer's."""
  own = model.generation.eos if model.generation else ()
  ids = dict.fromkeys((*own, tokenizer.eos))
  return tuple(token for token in ids if token is not None) or None


def check_tokens(target: Pretrained, drafter: Pretrained, name: str) -> None:
  """Refuses a drafter whose token ids do not mean what the target's do.

  One without a tokenizer is taken to have the target's.
  """
  sizes = drafter.model.vocab_size, target.model.vocab_size
  unfit = f"{name} does not fit the target: "
  other = f"the drafter predicts {sizes[0]} tokens and the target {sizes[1]}"
  if drafter.tokenizer is None:
    if sizes[0] != sizes[1]:
      raise ValueError(f"{unfit}{other}, and it has no tokenizer; put the "
                       "tokenizer.json that it was trained with into its "
                       f"directory, or give another drafter ({_ACROSS})")
    return
  try:
    tokenizers.check_same_tokens(drafter.tokenizer, target.tokenizer)
    if sizes[0] != sizes[1]:
      raise ValueError(f"{other}; give another drafter")
  except ValueError as e:
    raise ValueError(f"{unfit}{e} ({_ACROSS})") from None


def _tell_of_tokens(drafter: Pretrained, name: str):
  """What cannot be checked must not pass in silence."""
  if drafter.tokenizer is None:
    print(f"{name} has no tokenizer; its {drafter.model.vocab_size:,} tokens "
          "are taken to be the target's", file=sys.stderr)


def chain(target: Pretrained, drafter: Pretrained, name: str,
          vocabulary: str = "auto") -> tuple[Callable[[int], Strategy], Any]:
  """How one language model drafts chains for another, and its parameters.

  Args:
    target: the one that is drafted for.
    drafter: the one that drafts.
    name: the drafter's, for the reader.
    vocabulary: "auto" takes the drafter's law where its token ids mean what the
      target's do, and else as "intersection", what it says of the tokens that
      both have; "strings" takes the text that it writes.

  Returns:
    `(gamma -> Strategy, params["drafter"])`.

  Raises:
    ValueError: the vocabularies differ, and the drafter has no tokenizer or no
      token in common with the target.
  """
  if vocabulary == "auto":
    try:
      check_tokens(target, drafter, name)
      _tell_of_tokens(drafter, name)
      return functools.partial(
          strategies.block_verification, drafter.model), drafter.params
    except ValueError:
      if drafter.tokenizer is None:
        raise
  sizes = drafter.model.vocab_size, target.model.vocab_size
  both = tokenizer_of(drafter, name), target.tokenizer
  if vocabulary == "strings":
    return functools.partial(
        strategies.string_match, drafter.model,
        sj.data.Retokenizer(*both, *sizes)), drafter.params
  tables = sj.data.map_vocabularies(*both, *sizes)
  print(f"{name} has {sizes[0]:,} tokens and drafts the {tables.shared:,} that "
        f"are among the target's {sizes[1]:,}", file=sys.stderr)
  return functools.partial(
      strategies.token_intersection, drafter.model, sizes[1]), {
          "model": drafter.params, "vocabulary": tables}


def narrowed(drafter: Pretrained, tokenizer: Tokenizer, name: str,
             size: int | None, source: str = "stdlib-no-tests") -> Pretrained:
  """The drafter with a head of its most frequent tokens (FR-Spec).

  Args:
    drafter: a language model.
    tokenizer: the target's, for a drafter without one of its own.
    name: the drafter's, for the reader.
    size: tokens that it can still draft; the ends of a text are among them.
      None: all.
    source: of `corpora.read_documents`, the texts in which they are counted:
      those that scripts do not measure with, and a single one.

  Raises:
    ValueError: the drafter has not so many tokens, or more ends of a text.
  """
  if size is None:
    return drafter
  vocab_size = drafter.model.vocab_size
  tokenizer = drafter.tokenizer or tokenizer
  if size > vocab_size:
    raise ValueError(f"--draft_vocabulary is {size} and {name} has "
                     f"{vocab_size} tokens; give fewer than these")
  always = [end for end in ends(drafter, tokenizer) or () if end < vocab_size]
  if size < len(always):
    raise ValueError(f"--draft_vocabulary is {size} and {name} has "
                     f"{len(always)} tokens that end a text, which are always "
                     "among them; give more than these")
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
  """Returns `[V]`, how often each token occurs in a sample of documents."""
  counts = np.zeros(vocab_size, np.int64)
  characters = 0
  # In the order of their hashes, the first documents are a random sample.
  for document in sorted(documents, key=lambda document: document.digest):
    text = document.text[:_COUNTED - characters]
    ids = np.asarray(tokenizer.encode(text, bos=False), np.int64)
    counts += np.bincount(ids[ids < vocab_size], minlength=vocab_size)
    characters += len(text)
    if characters == _COUNTED:
      break
  return counts


def heads_directory(name: str) -> pathlib.Path:
  """Returns the directory of bundled heads or of those that a path names."""
  return (sj.zoo.heads_path(name) if name in HEADS
          else pathlib.Path(name))


def _unmeasured(heads: Any):
  """Shares for a tree of heads that nobody has measured.

  Every token is right half as often as the likelier one before it, and every
  head as often as the others; rows are of the LM head and of the heads.
  """
  row = np.cumsum(0.5 ** np.arange(1, 11)).tolist()
  return [row] * (1 + heads.num_forecasts)


def drafts_for_itself(name: str, target: str | None = None) -> bool:
  """Whether a name is that of what a target drafts for itself with.

  Args:
    name: of a drafter.
    target: of the target. Its own directory may hold its drafter, too.
  """
  return (name in HEADS
          or bool(name) and (heads_directory(name) / "heads.json").exists()
          or _published(name, target) is not None)


def _published(name: str, target: str | None = None):
  """The layout of a published drafter; None: it is something else."""
  if not name or not pathlib.Path(name).is_dir():
    return None
  layout = published_drafters.drafter_layout(name)
  if layout is None or not published_drafters.LAYOUTS[layout].in_target:
    return layout
  # Another model may have one beside it, and draft by itself.
  own = bool(target) and pathlib.Path(target).is_dir() and (
      pathlib.Path(name).samefile(target))
  return layout if own else None


class SelfDrafter(NamedTuple):
  """Heads or look-ahead embeddings, and the target that they were made for.

  Attributes:
    target: a `Pretrained`.
    tokenizer: the target's.
    heads: see `methods`.
    params: of the heads.
    training: what train_drafter.py says of its run.
  """

  target: Pretrained
  tokenizer: Tokenizer
  heads: Any
  params: Any
  training: dict[str, Any]

  def speculation(self, rule: Verifier | None, gamma: int, nodes: int
                  ) -> tuple[Transformer, dict[str, Any], Strategy]:
    """The target as it is then read, all parameters, and the strategy.

    Args:
      rule: the verifier; None: that of the method.
      gamma: drafted tokens of a chain.
      nodes: of the tree of heads that draft one.
    """
    accuracy = np.diff(self.training["accuracy"][1:], axis=1, prepend=0)
    strategy = methods.of(self.heads).strategy(
        self.heads, rule, gamma, lambda: sj.trees.medusa_tree(accuracy, nodes))
    model, params = self.heads.attach(
        self.target.model, self.target.params, self.params)
    return model, params, strategy


def load_self_drafter(name: str, target: Pretrained,
                      tokenizer: Tokenizer, dtype: str | None = None
                      ) -> SelfDrafter:
  """Reads heads or look-ahead embeddings, and the target that they draft for.

  Args:
    name: one of `HEADS`, a directory of train_drafter.py, or one of a
      published drafter.
    target: the one to draft for, unless the directory holds a target that was
      trained together with the heads.
    tokenizer: the target's tokenizer.
    dtype: of the weights; None is the library's choice.
  """
  if name not in HEADS and not pathlib.Path(name).is_dir():
    raise ValueError(f"no heads {name!r}; choose among "
                     f"{', '.join(HEADS)}, or give a directory of "
                     "train_drafter.py")
  progress.say(f"loading {name}")
  directory = heads_directory(name)
  if (directory / "model.safetensors").exists() and (
      directory / "heads.json").exists():
    target = _load(directory, dtype)
    tokenizer = tokenizer_of(target, name)
  heads, params = methods.load_heads(
      directory, target.model, dtype and jnp.dtype(dtype), target.params)
  return SelfDrafter(target, tokenizer, heads, params, _training(
      directory, heads))


def _training(directory: pathlib.Path, heads: Any) -> dict[str, Any]:
  """Returns the record of a training run, with measured or assumed accuracy."""
  path = directory / "training.json"
  again = "run train_drafter.py again, with the same flags"
  if not path.exists():
    if (directory / "heads.json").exists():
      raise ValueError(f"{path}, the record of the heads' accuracy, is "
                       f"missing; {again}")
    return {"accuracy": _unmeasured(heads)}
  training = files.read_json(path, again)
  accuracy = training.get("accuracy")
  if not (isinstance(accuracy, list) and len(accuracy) > 1
          and all(isinstance(row, list) for row in accuracy)):
    raise ValueError(f"{path} lacks the heads' accuracy; {again}")
  return training
