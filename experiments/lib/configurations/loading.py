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

HELP = ("Drafters to compare, comma-separated: "
        f"{compositions.HELP}, {', '.join(models.HEADS)} (bundled heads), the "
        "directory of heads of train_drafter.py, ")


class Loaded(NamedTuple):
  """Loaded drafter with its parameters and the target model.

  Attributes:
    strategy: drafter and verification rule.
    params: parameters of the decoder, `{"target": ..., "drafter": ...}`. Those
      of the target include PaSS look-ahead embeddings.
    model: target model. For heads, it also returns the hidden states that the
      heads read.
    heads: `models.SelfDrafter` of heads or look-ahead embeddings, or None for
      other drafters.
  """

  strategy: Strategy
  params: Any
  model: Transformer
  heads: models.SelfDrafter | None = None


def own_params(params: dict[str, Any], target_params: Any) -> Any:
  """Returns the parameters that a drafter's decoder adds to the target's.

  PaSS adds its embeddings to the parameters of the target, so all parameters
  are returned.
  """
  return params["drafter"] if params["target"] is target_params else params


def members(names: list[str]) -> list[str]:
  """Returns the names of the language models among the drafters."""
  return sum(map(compositions.members, (
      name for name in names if not models.drafts_for_itself(name))), [])


def load_target(names: list[str], target: str, dtype: str | None,
                batch: decoders.Batch | None
                ) -> tuple[Pretrained, Mapping[str, Pretrained], Tokenizer]:
  """Loads the target and the language models among the drafters.

  Args:
    names: names of the drafters.
    target: name of the target.
    dtype: precision of the weights. None means the library's default.
    batch: settings of the rollouts. The target is placed on their mesh. None
      means one device.

  Returns:
    The target, the draft models by label, and the target's tokenizer.
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
  """Returns the drafters by label, with parameters placed on the mesh.

  Args:
    names: values of --drafter.
    target: target model.
    loaded: draft models from `load_target`.
    tokenizer: tokenizer of the target.
    gamma: draft length.
    nodes: size of the draft trees of heads.
    tail: see `compositions.strategy`.
    datastore: see `compositions.strategy`.
    dtype: precision of heads. None means the library's default.
    batch: settings of the rollouts, with the mesh. None means one device.
    rule: verification rule of heads. It determines whether the heads draft a
      chain or a tree. None means the default of their method.

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
      drafter = Loaded(strategy, {"target": target.params, "drafter": params},
                       target.model)
    else:
      own = models.load_self_drafter(name, target, tokenizer, dtype)
      if own.target is not target:
        raise ValueError(
            f"--drafter contains {name}, which was trained together with "
            "another target; leave it out, or use self_drafting_study.py")
      model, params, strategy = own.speculation(rule, gamma, nodes)
      drafter = Loaded(strategy, params, model, own)
    found[label] = drafter._replace(params=batches.placed(
        batch, drafter.strategy.decoder(drafter.model), drafter.params))
  return found
