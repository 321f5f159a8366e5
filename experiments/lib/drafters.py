"""Loads drafters of every kind by name.

`load` is the only way from the flag --drafter to a drafter and its parameters.
`_Loader` has one function for each kind of drafter: draft models, heads, and
compositions (see `compositions`), which include drafters that are not part of
specjax (see `extensions`). It reads the settings in `Options`, which
rejects the flags that none of the drafters has read.
"""

from collections.abc import Sequence
import pathlib
import sys
from typing import Any
from typing import NamedTuple

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from lib import extensions
from lib import flags as shared
from lib import models
from lib import progress
from lib.configurations import compositions
from lib.configurations import copies
from lib.configurations import decoders
from lib.configurations import stops
from lib.rollouts import batches
import specjax as sj
from specjax import drafters as library
from specjax import interfaces
from specjax import methods
from specjax import strategies
from specjax import verifiers
from specjax.data import datastores
from specjax.data import Tokenizer
from specjax.models import Pretrained
from specjax.models import Transformer
from specjax.strategies import Strategy
from specjax.utils import entry_points
from specjax.utils import files

ITSELF = "itself"  # name of a draft model that is a copy of the target
NONE = "none"  # name of decoding without drafts
NAMES = (*models.DRAFTERS, *compositions.FREE, "a+b", "a|b", *models.HEADS,
         ITSELF, extensions.FORM)
HELP = ("Drafters to compare, comma-separated: "
        f"{compositions.HELP}, {', '.join(models.HEADS)} (bundled heads), the "
        "directory of heads of train_drafter.py, ")

_DEPTH = 8  # largest depth of the tree of a draft model (see `_tree`)


class Options:
  """Settings of drafters, with a record of those that were read.

  Each kind of drafter reads the settings that change it. A setting that no
  drafter has read has no effect, so `check` rejects the flag of the same name.

  >>> options = Options(gamma=3, tail=True)
  >>> options.gamma
  3

  Settings:
    gamma: draft length of chains. In a cascade, each stage drafts half as many
      tokens as the next stage.
    nodes: size of the draft trees of draft models and heads. Compositions have
      their own sizes.
    verifier: verification rule. It determines whether heads draft a chain or a
      tree. None means the default of the drafter.
    stop: stop rule (see `stops.named`), or None.
    tail: if True, the first drafter of a cascade also drafts tokens after those
      of the last one (see `drafters.Cascade`).
    datastore: file of build_datastore.py, or None.
    vocabulary: method for a draft model with another vocabulary than the
      target's: "intersection" drafts only tokens that both vocabularies
      contain, "strings" converts the drafter's text to target tokens, "auto" is
      "intersection" if the vocabularies differ.
    draft_vocabulary, vocabulary_data: see `models.narrowed`.
    quantize, quantize_target, quantize_group: see `copies.quantized`.
    draft_cache: see `copies.cache`.
  """

  _DEFAULTS = dict(
      gamma=6, nodes=16, verifier=None, stop=None, tail=False, datastore=None,
      vocabulary="auto", draft_vocabulary=None,
      vocabulary_data="stdlib-no-tests", quantize=None, quantize_target=None,
      quantize_group=None, draft_cache=None)

  def __init__(self, **settings: Any):
    if unknown := set(settings) - set(self._DEFAULTS):
      raise TypeError(f"{unknown} are not settings; give some of "
                      f"{', '.join(self._DEFAULTS)}")
    self._settings = self._DEFAULTS | settings
    self._unread = dict.fromkeys(settings)

  def __getattr__(self, name: str):
    if name not in self._DEFAULTS:
      raise AttributeError(name)
    return self.read(name)

  def read(self, name: str) -> Any:
    """Returns a setting and records that it was read."""
    self._unread.pop(name, None)
    return self._settings[name]

  def peek(self, name: str) -> Any:
    """Returns a setting without recording that it was read."""
    return self._settings[name]

  def check(self, names: Sequence[str]) -> None:
    """Raises `ValueError` if a flag of a setting was given and not read.

    Args:
      names: names of the loaded drafters.
    """
    cause = f"--drafter={','.join(names) or NONE}"
    if "verifier" not in self._unread and "verifier" in flags.FLAGS and (
        flags.FLAGS["verifier"].present):
      cause += f" and {shared.shown('verifier')}"
    shared.reject_unread(self._unread, cause)


class TrainedHeads(NamedTuple):
  """Heads or look-ahead embeddings.

  Attributes:
    heads: network, an instance of a class in `methods`.
    params: parameters of the heads, without those of the target.
    training: record of the training run with train_drafter.py, or None for
      published drafters without a record. Its entry "accuracy" has, for the
      target's LM head and each head, the shares of positions at which the
      correct token was among the j = 1, 2, ... most likely ones.
  """

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


class Loaded(NamedTuple):
  """Loaded drafter with its parameters and its target.

  Attributes:
    name: name of the drafter in messages.
    strategy: drafter and verification rule.
    params: parameters of the decoder, `{"target": ..., "drafter": ...}`. Those
      of the target include PaSS look-ahead embeddings.
    model: target model of the decoder. For heads, it also returns the hidden
      states that the heads read.
    target: target model. Heads may have been trained together with another
      target than --target.
    tokenizer: tokenizer of `target`.
    heads: heads or look-ahead embeddings, or None for other drafters.
    member: draft model, or None for other drafters.
    compared: strategies by kind of draft, such as "chain" (see `load`).
      Strategies of one kind have the same drafter and different rules.
  """

  name: str
  strategy: Strategy
  params: Any
  model: Transformer
  target: Pretrained
  tokenizer: Tokenizer
  heads: TrainedHeads | None = None
  member: Pretrained | None = None
  compared: dict[str, tuple[Strategy, ...]] = {}

  @property
  def draft_model(self) -> Pretrained:
    """The draft model; raises `ValueError` for other drafters."""
    if self.member is None:
      raise ValueError(f"--drafter={self.name} has no draft model, which this "
                       "script requires; give one, such as --drafter=small or "
                       "a model directory")
    return self.member

  @property
  def is_chain(self) -> bool:
    return "chain" in interfaces.capabilities(self.strategy.drafter)


def load(target: str | Any, names: Sequence[str],
         options: Options | None = None, *, dtype: str | None = None,
         batch: decoders.Batch | None = None, same_tokens: bool = False,
         own_target: bool = False, compared: bool = False,
         optional: bool = False) -> tuple[
             Pretrained, dict[str, Loaded], Tokenizer]:
  """Loads the target and drafters of the flags --target and --drafter.

  Args:
    target: "bundled", an argument of `models.load_pretrained`, or a loaded
      target such as a `traces.Trace`.
    names: names of drafters. Each one is a bundled draft model or an argument
      of `models.load_pretrained`, a composition (see `compositions`), bundled
      heads, a directory of heads, or a drafter that is not part of specjax (see
      `extensions`).
    options: settings of the drafters. None means the default settings.
    dtype: precision of the weights. None means the library's default.
    batch: settings of the rollouts. The parameters are placed on their mesh.
      None means one device.
    same_tokens: if True, draft models must have the target's vocabulary.
    own_target: if True, heads may have been trained together with another
      target.
    compared: if True, `Loaded.compared` is computed, and the default rule of
      heads is block verification, so that they draft chains.
    optional: if True, the name "none" denotes decoding without drafts.

  Returns:
    `(target, {label: drafter}, tokenizer)`. Each model is loaded once.

  Raises:
    ValueError: a model does not exist or does not fit the target, two drafters
      have the same label, or a flag has no effect on these drafters.
  """
  options = options or Options()
  loader = _Loader(target, names, options, dtype, batch, same_tokens,
                   own_target, compared, optional)
  found = {models.label(name): loader.load(name) for name in names}
  options.check(names)
  return loader.target, found, loader.tokenizer


def own_params(params: dict[str, Any], target_params: Any) -> Any:
  """Returns the parameters that a drafter's decoder adds to the target's.

  PaSS adds its embeddings to the parameters of the target, so all parameters
  are returned.
  """
  return params["drafter"] if params["target"] is target_params else params


class _Loader:
  """Loads the drafters of one target. The arguments are those of `load`."""

  def __init__(self, target: str | Any, names: Sequence[str], options: Options,
               dtype: str | None, batch: decoders.Batch | None,
               same_tokens: bool, own_target: bool, compared: bool,
               optional: bool):
    self._target_name = target if isinstance(target, str) else None
    self._options = options
    self._dtype, self._batch = dtype, batch
    self._same_tokens, self._own_target = same_tokens, own_target
    self._compared = compared
    _check_labels(names)
    _check_values(options)
    choices = (*NAMES, *entry_points.names("specjax.drafters"),
               *([NONE] if optional else ()))
    place = self._target_name and models.find(
        "target", target, {"bundled": "target"})
    # Wrong names are rejected before any weights are read.
    for part in "|".join(names).replace("+", "|").split("|"):
      if extensions.is_own("--drafter", part):
        extensions.check_drafter(part)
    self._places = {
        name: place if name == ITSELF else models.find(
            "drafter", name, {x: x for x in models.DRAFTERS}, choices)
        for name in self._draft_models(names, optional)}
    plain, self.tokenizer = (
        models.load_target(target, dtype) if self._target_name is not None
        else (target, target.tokenizer))
    self._read = {place: plain}
    self._members = {}
    self._base = batches.with_placed_params(batch, plain)
    self.target = self._quantized(self._base)

  def _draft_models(self, names: Sequence[str], optional: bool) -> list[str]:
    """Returns the names of all draft models, also of those in compositions."""
    return sum((
        [] if self._is_heads(name) or name == NONE and optional else
        compositions.members(name) if compositions.composes(name) else [name]
        for name in names), [])

  def _is_heads(self, name: str) -> bool:
    return models.drafts_for_itself(name, self._target_name)

  def load(self, name: str) -> Loaded:
    """Returns the drafter with a name of --drafter."""
    loaded = (
        self._heads if self._is_heads(name) else
        self._composition if compositions.composes(name) else
        self._draft_model if name in self._places else self._nothing)(name)
    if stops.can_stop(loaded.strategy.drafter):
      loaded = loaded._replace(strategy=stops.stopped(
          loaded.strategy, self._options.stop, name))
    return loaded if self._batch is None else loaded._replace(
        params=batches.placed(self._batch, loaded.strategy.decoder(
            loaded.model), loaded.params))

  def _loaded(self, name: str, strategy: Strategy, params: Any, **others: Any
              ) -> Loaded:
    """Returns a drafter that reads no hidden states of the target."""
    rule = self._options.verifier
    return Loaded(
        name, strategy._replace(verifier=rule) if rule else strategy,
        {"target": self.target.params, "drafter": params}, self.target.model,
        self.target, self.tokenizer, **others)

  def _nothing(self, name: str) -> Loaded:
    return Loaded(name, strategies.autoregressive(),
                  {"target": self.target.params}, self.target.model,
                  self.target, self.tokenizer)

  def _draft_model(self, name: str) -> Loaded:
    member = self._member(name)
    strategy, params = _chain(
        self.target, member, name, self._options.gamma,
        self._options.vocabulary, self._same_tokens)
    compared = {}
    if self._compared:
      compared = {"": (strategy,)}
      network = getattr(strategy.drafter, "network", None)
      if isinstance(network, library.LanguageModel):
        parents = _tree(self._options.nodes)
        compared = {
            "chain": (strategy,),
            "sampled tree": (strategies.traversal(network.model, parents),
                             strategies.sequoia(network.model, parents)),
            "top-k tree": (strategies.top_k_tree(network.model, parents),)}
    return self._loaded(name, strategy, params, member=member,
                        compared=compared)

  def _heads(self, name: str) -> Loaded:
    progress.say(f"loading {name}")
    directory = models.heads_directory(name)
    target, base, tokenizer = self.target, self._base, self.tokenizer
    if (directory / "model.safetensors").exists() and (
        directory / "heads.json").exists():
      if not self._own_target:
        raise ValueError(
            f"--drafter contains {name}, which was trained together with "
            "another target; leave it out, or use self_drafting_study.py")
      base = batches.with_placed_params(
          self._batch, models.read(directory, self._dtype))
      tokenizer = models.tokenizer_of(base, name)
      target = self._quantized(base)
    network, own = methods.load_heads(
        directory, base.model, self._dtype and jnp.dtype(self._dtype),
        base.params)
    heads = TrainedHeads(network, own, _training(directory))
    tree = lambda: heads.tree(self._options.nodes)
    method, rule = methods.of(network), self._options.verifier
    if rule is None and self._compared:
      rule = verifiers.Block()
    strategy = method.strategy(
        network, rule, self._options.peek("gamma"), tree)
    model, params = network.attach(target.model, target.params, own)
    loaded = Loaded(
        name, strategy, params, model, target, tokenizer, heads=heads,
        compared=method.compared(network, tree) if self._compared else {})
    if loaded.is_chain:
      self._options.read("gamma")
    return loaded

  def _composition(self, name: str) -> Loaded:
    *others, (strategy, params) = (
        self._cascade(part.split("+"), None if part in compositions.OWN_DEPTH
                      or extensions.is_own("--drafter", part)
                      else self._options.gamma) for part in name.split("|"))
    for first, own in reversed(others):
      strategy = strategies.fallback(first.drafter, strategy.drafter)
      params = own, params
    return self._loaded(name, strategy, params, compared={"": (strategy,)})

  def _cascade(self, stages: list[str], gamma: int | None, outer: bool = True
               ) -> tuple[Strategy, Any]:
    """Returns the strategy and the parameters of a cascade or one drafter.

    The first of `stages` is the innermost drafter. `outer` is False for the
    stages that draft for a later stage.
    """
    *inner, last = stages
    if extensions.is_own("--drafter", last):
      return extensions.drafter(
          last, self.target, lambda setting: gamma if setting == "gamma"
          and gamma is not None else self._options.read(setting))
    if last in compositions.FREE:
      return compositions.FREE[last](gamma), self._store(last)
    member = self._member(last)
    if not inner:
      return _chain(self.target, member, last, gamma)
    models.check_tokens(self.target, member, last)
    found, own = self._cascade(inner, -(-gamma // 2), outer=False)
    return Strategy(library.Cascade(
        model=member.model, drafter=found.drafter, gamma=gamma,
        tail=outer and self._options.tail), verifiers.Block()), {
            "target": member.params, "drafter": own}

  def _store(self, name: str):
    """Returns the loaded datastore of a drafter, or None if it uses none."""
    if name not in compositions.LOOK_UP:
      return None
    if self._options.datastore is not None:
      return jax.device_put(datastores.load(
          self._options.datastore, self.target.tokenizer))
    if name == "rest":
      raise ValueError("--drafter=rest requires --datastore; set it to a file "
                       "of experiments/build_datastore.py")
    return None

  def _member(self, name: str) -> Pretrained:
    """Returns a draft model with the settings of copies and vocabularies."""
    if name not in self._members:
      place = self._places[name]
      if place not in self._read:
        progress.say(f"loading {name}")
        self._read[place] = models.read(place, self._dtype)
      options = self._options
      member = copies.drafting(copies.quantized(
          self._read[place], options.quantize, options.quantize_group),
                               options.draft_cache)
      self._members[name] = models.narrowed(
          member, self.tokenizer, models.label(name), options.draft_vocabulary,
          options.vocabulary_data)
    return self._members[name]

  def _quantized(self, target: Pretrained) -> Pretrained:
    return copies.quantized(target, self._options.quantize_target,
                            self._options.quantize_group)


def _chain(target: Pretrained, member: Pretrained, name: str, gamma: int,
           vocabulary: str = "auto", same_tokens: bool = False
           ) -> tuple[Strategy, Any]:
  """Returns the strategy for chains of a draft model, and its parameters.

  Args:
    target: target model.
    member: draft model.
    name: name of the draft model for messages.
    gamma: draft length.
    vocabulary: see `Options`.
    same_tokens: if True, the vocabularies must be equal.

  Raises:
    ValueError: the vocabularies differ, and the draft model has no tokenizer or
      no token in common with the target.
  """
  if vocabulary == "auto":
    try:
      models.check_tokens(target, member, name)
      if member.tokenizer is None:
        print(f"{name} has no tokenizer; its {member.model.vocab_size:,} "
              "tokens are assumed to be the target's", file=sys.stderr)
      return strategies.block_verification(member.model, gamma), member.params
    except ValueError:
      if same_tokens or member.tokenizer is None:
        raise
  sizes = member.model.vocab_size, target.model.vocab_size
  both = models.tokenizer_of(member, name), target.tokenizer
  if vocabulary == "strings":
    return strategies.string_match(
        member.model, sj.data.Retokenizer(*both, *sizes), gamma), member.params
  tables = sj.data.map_vocabularies(*both, *sizes)
  print(f"{name} has {sizes[0]:,} tokens and drafts the {tables.shared:,} that "
        f"are among the target's {sizes[1]:,}", file=sys.stderr)
  return strategies.token_intersection(member.model, sizes[1], gamma), {
      "model": member.params, "vocabulary": tables}


def _tree(nodes: int) -> tuple[int, ...]:
  """Returns a tree for a draft model with unknown acceptance rates.

  It is optimal if the acceptance rate of the k-th most likely token is 2^-k at
  every depth.
  """
  return sj.trees.medusa_tree(np.tile(0.5 ** np.arange(1, 11), (_DEPTH, 1)),
                              nodes)


def _check_labels(names: Sequence[str]) -> None:
  """Rejects drafters with the same label in tables."""
  labels = [models.label(name) for name in names]
  for label in labels:
    if labels.count(label) > 1:
      both = " and ".join(x for x in names if models.label(x) == label)
      raise ValueError(f"--drafter contains {both}, which have the same label "
                       f"{label!r} in tables; leave one out, or rename a "
                       "directory")


def _check_values(options: Options) -> None:
  """Rejects malformed settings before any model is loaded."""
  if options.peek("stop") is not None:
    stops.named(options.peek("stop"))
  if options.peek("draft_cache") is not None:
    copies.cache("--draft_cache", options.peek("draft_cache"))


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
