"""Loads drafters of every kind by name, with their default strategies."""

from collections.abc import Mapping
from typing import Any
from typing import NamedTuple

from lib import models
from lib.configurations import compositions
from lib.configurations import decoders
from lib.rollouts import batches
from specjax.data import Tokenizer
from specjax.models import Pretrained
from specjax.models import Transformer
from specjax.strategies import Strategy

HELP = f"{compositions.HELP}, heads, "


class Loaded(NamedTuple):
  """A drafter that is ready to decode.

  Attributes:
    strategy: drafter and verification rule.
    params: `params["drafter"]` of the decoder.
    model: target model. For heads, it also returns the hidden states that they
      read.
    heads: the `models.SelfDrafter` of heads and look-ahead embeddings, or None.
  """

  strategy: Strategy
  params: Any
  model: Transformer
  heads: models.SelfDrafter | None = None


def members(names: list[str]) -> list[str]:
  """Returns the language models among the drafters, by name."""
  return sum(map(compositions.members, (
      name for name in names if not models.drafts_for_itself(name))), [])


def load_target(names: list[str], target: str, dtype: str | None,
                batch: decoders.Batch | None
                ) -> tuple[Pretrained, Mapping[str, Pretrained], Tokenizer]:
  """Loads the target and the language models among the drafters.

  Args:
    names: names of the drafters.
    target: name of the target.
    dtype: precision of the weights. None: the library's default.
    batch: settings of the rollouts; the target is placed on their mesh.

  Returns:
    The target, `{label: draft model}` and the target's tokenizer.
  """
  found, loaded, tokenizer = models.load_models(
      target, members(names), ", ".join((*compositions.NAMES, *models.HEADS)),
      dtype=dtype)
  return batches.with_placed_params(batch, found), loaded, tokenizer


def load(names: list[str], target: Pretrained,
         loaded: Mapping[str, Pretrained], tokenizer: Tokenizer, *, gamma: int,
         nodes: int, tail: bool = False, datastore: str | None = None,
         dtype: str | None = None, batch: decoders.Batch | None = None,
         rule: Any = None) -> dict[str, Loaded]:
  """Returns the drafters by their labels, with parameters on the mesh.

  Args:
    names: values of --drafter.
    target: target model.
    loaded: draft models of `load_target`.
    tokenizer: the target's tokenizer.
    gamma: draft length.
    nodes: size of the draft trees of heads.
    tail: see `compositions.strategy`.
    datastore: see `compositions.strategy`.
    dtype: precision of heads. None: the library's default.
    batch: settings of the rollouts, or None.
    rule: verification rule of heads; it decides whether they draft a chain or
      a tree. None: the default of their method.

  Raises:
    ValueError: a label occurs twice, or heads were trained together with
      another target.
  """
  found = {}
  for name in names:
    label = models.label(name)
    if label in found:
      raise ValueError(f"--drafter contains {label!r} twice; leave one out, or "
                       "rename a directory")
    if not models.drafts_for_itself(name):
      strategy, params = compositions.strategy(
          name, gamma, target, loaded, tail, datastore)
      drafter = Loaded(strategy, params, target.model)
    else:
      own = models.load_self_drafter(name, target, tokenizer, dtype)
      if own.target is not target:
        raise ValueError(
            f"--drafter contains {name}, which was trained together with "
            "another target; leave it out, or use self_drafting_study.py")
      model, params, strategy = own.speculation(rule, gamma, nodes)
      drafter = Loaded(strategy, params["drafter"], model, own)
    found[label] = drafter._replace(params=batches.placed(
        batch, drafter.strategy.decoder(drafter.model),
        {"target": target.params, "drafter": drafter.params})["drafter"])
  return found
