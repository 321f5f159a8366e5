"""Loads the models of flags: bundled ones, files, or models on the hub."""

from collections.abc import Callable
import dataclasses
import functools
import os
import pathlib
import sys
from typing import Any
from typing import NamedTuple

from absl import flags
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
_COUNTED = 2_000_000  # largest number of characters for token frequencies
DRAFTERS = (*sj.zoo.DRAFTERS, *sj.zoo.FOR_SMOLLM2)  # bundled draft models
HEADS = (*sj.zoo.HEADS, *sj.zoo.HEADS_FOR_SMOLLM2)
VARIABLES = "chat_template_kwargs"  # flag of scripts that format conversations
ITSELF = "itself"  # name of a draft model that is a copy of the target


def label(name: str) -> str:
  """Returns the name of a model in tables: the last part of its path."""
  return os.path.basename(os.path.abspath(name))


def load_models(target: str, drafters: list[str], choices: str = "", *,
                dtype: str | None = None, same_tokens: bool = False
                ) -> tuple[Pretrained, dict[str, Pretrained], Tokenizer]:
  """Loads the models of the flags --target and --drafter.

  Args:
    target: "bundled", or an argument of `models.load_pretrained`.
    drafters: names of bundled drafters, or arguments of
      `models.load_pretrained`.
    choices: list of valid drafters for error messages. If empty, the bundled
      drafters.
    dtype: precision of the weights. None means the library's default.
    same_tokens: if True, drafters must have the target's vocabulary. If False,
      drafters may have another vocabulary (see `chain`).

  Returns:
    `(target, {label: drafter}, tokenizer)`. Each model is loaded once.

  Raises:
    ValueError: a model does not exist, the target has no tokenizer, two
      drafters have the same label, or the vocabularies differ although
      `same_tokens` is True.
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
  if VARIABLES in flags.FLAGS and flags.FLAGS[VARIABLES].value is not None:
    tokenizer = tokenizer.with_variables(
        _json_object(flags.FLAGS[VARIABLES].value))
  members = {label(name): load(path) for name, path in paths.items()}
  for name, member in members.items() if same_tokens else ():
    check_tokens(model, member, name)
    _tell_of_tokens(member, name)
  return model, members, tokenizer


def _json_object(text: str) -> dict[str, Any]:
  """Returns the value of --chat_template_kwargs."""
  found = files.parse_json(text, f"--{VARIABLES}")
  if not isinstance(found, dict):
    raise ValueError(f"--{VARIABLES} is {text!r}; it must be a JSON object")
  return found


def _check_labels(names: list[str]) -> None:
  """Rejects drafters with the same label in tables."""
  labels = list(map(label, names))
  for one in labels:
    if labels.count(one) > 1:
      both = " and ".join(x for x in names if label(x) == one)
      raise ValueError(f"--drafter contains {both}, which have the same label "
                       f"{one!r} in tables; leave one out, or rename a "
                       "directory")


def load_model(name: str, dtype: str | None = None) -> Pretrained:
  """Loads one model. The model need not have a tokenizer.

  Args:
    name: "bundled", a bundled drafter, or an argument of
      `models.load_pretrained`.
    dtype: precision of the weights. None means the library's default.

  Raises:
    ValueError: the model does not exist.
  """
  boxed = {"bundled": "target", **{name: name for name in DRAFTERS}}
  progress.say(f"loading {name}")
  return _load(sj.zoo.model_path(boxed[name]) if name in boxed
               else _place("model", name, ", ".join(boxed)), dtype)


def _load(place: str | pathlib.Path, dtype: str | None):
  found = sj.models.load_pretrained(place, dtype=dtype and jnp.dtype(dtype))
  shared = sj.zoo.tokenizer_path()  # all bundled models have this tokenizer
  if found.tokenizer is None and pathlib.Path(place).parent == shared.parent:
    found = dataclasses.replace(found, tokenizer=Tokenizer.load(shared))
  return found


def _place(what: str, name: str, choices: str):
  """Returns the path or the hub name of a model.

  Args:
    what: kind of the model for the error message, such as "drafter".
    name: value of the flag.
    choices: list of valid names for the error message.

  Raises:
    ValueError: `name` is neither a path nor a hub name.
  """
  path = pathlib.Path(name)
  known = name and (path.exists() or name == "smollm2" or (
      name.count("/") == 1 and not name.startswith((".", "/"))))
  if not known:
    raise ValueError(f"no {what} {name!r}; choose among {choices}, or give "
                     f"{shared.PUBLISHED}")
  return path if path.exists() else name


def load_tokenizer(name: str) -> Tokenizer:
  """Loads a tokenizer from a tokenizer.json file or from a model."""
  path = pathlib.Path(name)
  if path.is_dir() or path.suffix == ".json":
    return Tokenizer.load(path)
  place = _place("tokenizer", name, "tokenizer.json files")
  return _present(sj.models.load_tokenizer(place), name)


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


def _tell_of_tokens(drafter: Pretrained, name: str):
  """Prints a warning if the drafter's vocabulary cannot be checked.

  This is the case if the drafter has no tokenizer.
  """
  if drafter.tokenizer is None:
    print(f"{name} has no tokenizer; its {drafter.model.vocab_size:,} tokens "
          "are assumed to be the target's", file=sys.stderr)


def chain(target: Pretrained, drafter: Pretrained, name: str,
          vocabulary: str = "auto") -> tuple[Callable[[int], Strategy], Any]:
  """Returns the strategy for chains of a draft model, and its parameters.

  Args:
    target: target model.
    drafter: draft model.
    name: name of the drafter for messages.
    vocabulary: "intersection", "strings" or "auto". "intersection" drafts only
      tokens that both vocabularies contain. "strings" converts the drafter's
      text to target tokens. "auto" uses the drafter's distribution directly if
      the vocabularies are equal, and "intersection" otherwise.

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


class SelfDrafter(NamedTuple):
  """Heads or look-ahead embeddings, and the target that they belong to.

  Attributes:
    target: target model.
    tokenizer: tokenizer of the target.
    heads: heads or embeddings, an instance of a class in `methods`.
    params: parameters of the heads.
    training: record of the training run with train_drafter.py, or None for
      published drafters without a record. Its entry "accuracy" has, for the
      target's LM head and each head, the shares of positions at which the
      correct token was among the j = 1, 2, ... most likely ones.
  """

  target: Pretrained
  tokenizer: Tokenizer
  heads: Any
  params: Any
  training: dict[str, Any] | None

  @property
  def recorded(self) -> list[float] | None:
    """The accuracy `[K]` of the heads in training, or None without a record."""
    return self.training and [row[0] for row in self.training["accuracy"][1:]]

  def tree(self, nodes: int) -> tuple[int, ...]:
    """Returns the best draft tree for the accuracy measured in training.

    Without a record, the correct token is assumed to be the j-th most likely
    one with probability 0.5**j, for j = 1 to 10. If the heads have no tree of
    `nodes` nodes, it is their largest tree.
    """
    accuracy = np.tile(0.5 ** np.arange(1, 11), (self.heads.num_forecasts, 1))
    if self.training:
      accuracy = np.diff(self.training["accuracy"][1:], axis=1, prepend=0)
    heads, ranks = accuracy.shape
    most = sum(ranks**depth for depth in range(heads + 1))
    return sj.trees.medusa_tree(accuracy, min(nodes, most))

  def speculation(self, rule: Verifier | None, gamma: int, nodes: int
                  ) -> tuple[Transformer, dict[str, Any], Strategy]:
    """Returns the target with its heads, all parameters, and the strategy.

    Args:
      rule: verifier. None means the default of the method.
      gamma: draft length of a chain.
      nodes: size of the draft tree, for heads that draft trees.
    """
    strategy = methods.of(self.heads).strategy(
        self.heads, rule, gamma, lambda: self.tree(nodes))
    model, params = self.heads.attach(
        self.target.model, self.target.params, self.params)
    return model, params, strategy


def load_self_drafter(name: str, target: Pretrained,
                      tokenizer: Tokenizer, dtype: str | None = None
                      ) -> SelfDrafter:
  """Loads heads or look-ahead embeddings, and their target.

  Args:
    name: one of `HEADS`, an output directory of train_drafter.py, or the
      directory of a published drafter.
    target: target model. It is ignored if the directory contains a target that
      was trained together with the heads.
    tokenizer: tokenizer of the target.
    dtype: precision of the weights. None means the library's default.
  """
  if name not in HEADS and not pathlib.Path(name).is_dir():
    raise ValueError(f"no heads {name!r}; choose among "
                     f"{', '.join(HEADS)}, or give an --output_dir of "
                     "train_drafter.py")
  progress.say(f"loading {name}")
  directory = heads_directory(name)
  if (directory / "model.safetensors").exists() and (
      directory / "heads.json").exists():
    target = _load(directory, dtype)
    tokenizer = tokenizer_of(target, name)
  heads, params = methods.load_heads(
      directory, target.model, dtype and jnp.dtype(dtype), target.params)
  return SelfDrafter(target, tokenizer, heads, params, _training(directory))


def _training(directory: pathlib.Path) -> dict[str, Any] | None:
  """Returns the record of a training run, or None for published drafters."""
  path = directory / "training.json"
  again = "run train_drafter.py again, with the same flags"
  if not path.exists():
    if (directory / "heads.json").exists():
      raise ValueError(f"{path}, the record of the heads' accuracy, is "
                       f"missing; {again}")
    return None
  training = files.read_json(path, again)
  accuracy = training.get("accuracy")
  if not (isinstance(accuracy, list) and len(accuracy) > 1
          and all(isinstance(row, list) for row in accuracy)):
    raise ValueError(f"{path} lacks the heads' accuracy; {again}")
  return training
