"""Drafting methods, one folder for each family.

A family, for example `heads` or `features` (EAGLE, MTP), contains draft
networks, drafters, training losses and strategies (pairs of a drafter and a
verifier). The `__init__.py` of a family lists the family's public classes in a
`Family`. The modules `specjax.drafters`, `specjax.strategies` and
`specjax.objectives` export the classes of all families. To add a method, add a
file to the folder of its family, and list the new classes in the `Family`.

`Method` is the record of a trained method. It contains the class of the trained
networks (`Heads`), the training objective, the strategies and the options.
Scripts use only this record. This module also exports all classes of heads,
such as `methods.MedusaHeads`.

Modules with a leading underscore contain helpers shared by several methods.
"""

from collections.abc import Iterator
import functools
import itertools
import os
import pathlib
import re
import sys
from typing import Any

import chex
import jax

from specjax.methods import blocks
from specjax.methods import combined
from specjax.methods import draft_models
from specjax.methods import features
from specjax.methods import files
from specjax.methods import heads as heads_family
from specjax.methods import model_free
from specjax.methods import other_vocabularies
from specjax.methods import self_speculation
from specjax.methods import stop_rules
from specjax.methods.features.assistant import AssistantHeads
from specjax.methods.features.eagle_objective import ASSISTANT
from specjax.methods.files import save_heads
from specjax.methods.heads.pass_embeddings import with_lookahead
from specjax.methods.networks import check_fits
from specjax.methods.networks import Heads
from specjax.methods.networks import lm_head
from specjax.methods.published import drafter_layout
from specjax.methods.published import export_drafter
from specjax.methods.published import load_drafter
from specjax.methods.records import LearningRate
from specjax.methods.records import Method
from specjax.methods.records import Option
from specjax.models.transformer import Transformer
from specjax.utils import entry_points

FAMILIES = tuple(family.FAMILY for family in (
    draft_models, model_free, heads_family, features, blocks, self_speculation,
    combined, other_vocabularies))
METHODS = tuple(method for family in FAMILIES for method in family.methods)
_HEADS = {method.heads.__name__: method.heads for method in METHODS}
globals().update(_HEADS)

__all__ = [
    "FAMILIES", "METHODS", "AssistantHeads", "Heads", "LearningRate", "Method",
    "Option", "available", "by_name", "check_fits", "export_drafter", "lm_head",
    "load_drafter", "load_heads", "of", "save_heads", "stop_rules",
    "with_lookahead", *_HEADS]


@functools.cache
def _installed() -> tuple[Method, ...]:
  """Returns the methods of installed packages.

  One broken package must not break the others, so a method that cannot be used
  is reported on stderr and left out.
  """
  group, found = "specjax.methods", []
  for name in entry_points.names(group):
    try:
      method = entry_points.load(group, name)
      if not isinstance(method, Method) or method.name != name:
        raise ValueError("it must be a specjax.methods.Method with this name")
      if any(m.name == name or m.heads.kind == method.heads.kind
             and m.heads is not method.heads for m in METHODS):
        raise ValueError("specjax has a method or heads of this name")
      found.append(method)
    except Exception as e:  # of the package
      reason = " ".join(str(e).split())
      print(f"the method {name!r} ({entry_points.described(group, name)}) is "
            f"left out: {type(e).__name__}: {reason}", file=sys.stderr)
  return tuple(found)


def available() -> tuple[Method, ...]:
  """Returns `METHODS` and the methods of installed packages.

  A package declares a `Method` under its name in the entry-point group
  "specjax.methods" (see `utils.entry_points`).
  """
  return tuple(_each())


def _each() -> Iterator[Method]:
  # Packages are imported only after METHODS, because a package may look up a
  # method of specjax while it is imported.
  yield from METHODS
  yield from _installed()


def by_name(name: str) -> Method:
  """Returns the trained method with this name, for example "medusa"."""
  return next(method for method in _each() if method.name == name)


def of(heads: Heads) -> Method:
  """Returns the first method with this class of heads.

  Assistants of Gemma 4 are not trained here, so the functions `objective` and
  `measure` of their method raise `ValueError`.

  Raises:
    ValueError: no method has heads of this class.
  """
  for method in itertools.chain((ASSISTANT,), _each()):
    if method.heads.kind == heads.kind:
      return method
  raise ValueError(f"no method has heads of the class {type(heads).__name__}; "
                   "use a class of specjax.methods")


def load_heads(directory: str | os.PathLike[str], target: Transformer,
               dtype: jax.typing.DTypeLike | None = None,
               target_params: chex.ArrayTree | None = None
               ) -> tuple[Heads, dict[str, Any]]:
  """Loads draft heads written by `save_heads`, or a published drafter.

  Args:
    directory: directory written by `save_heads`. For a published drafter: a
      local directory, or a repository of the Hugging Face Hub such as
      "organisation/name".
    target: target model.
    dtype: dtype of the loaded parameters. None means `default_dtype()`.
    target_params: parameters of the target, or None. They are used only for a
      published drafter. If its files contain copies of the target's matrices,
      they are compared with these parameters. Equal copies are not loaded.

  Returns:
    `(heads, params)`, the configuration of the heads and their parameters.

  Raises:
    ValueError: a file is missing or damaged, or the heads were made for another
      target.
  """
  path = pathlib.Path(directory)
  ours = any((path / f"heads.{kind}").exists() for kind in (
      "json", "safetensors"))
  on_the_hub = not path.exists() and re.fullmatch(
      r"[\w-][\w.-]*/[\w.-]+", os.fspath(directory))
  if on_the_hub or not ours and (
      (path / "config.json").exists() or drafter_layout(path)):
    return load_drafter(directory, target, target_params, dtype=dtype)
  kinds = tuple(dict.fromkeys(method.heads for method in available()))
  return files.load_heads(directory, target, dtype, kinds)
