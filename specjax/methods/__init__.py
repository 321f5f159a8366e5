"""Drafting methods, one folder for each family.

A family contains networks, drafters, losses and strategies. `Method` is the
record of a method that is trained: its class of `Heads`, its objective, its
strategies and its options. Scripts read everything from the record, so a new
method is one file in the folder of its family and one name in `METHODS`.

Modules with a leading underscore contain helpers of several methods.
"""

import os
import pathlib
import re
from typing import Any

from specjax.methods import files
from specjax.methods.blocks.parallel_network import ParallelHeads
from specjax.methods.blocks.records import PARALLEL
from specjax.methods.features.network import Eagle1Heads
from specjax.methods.features.network import Eagle3Heads
from specjax.methods.features.network import FeatureHeads
from specjax.methods.features.network import FeatureOutput
from specjax.methods.features.network import MTPHeads
from specjax.methods.features.network import ParallelLayers
from specjax.methods.features.records import EAGLE_1
from specjax.methods.features.records import EAGLE_3
from specjax.methods.features.records import MTP
from specjax.methods.features.records import PARALLEL_LAYERS
from specjax.methods.files import save_heads
from specjax.methods.heads.blockwise import BLOCKWISE
from specjax.methods.heads.blockwise import BlockwiseHeads
from specjax.methods.heads.hydra import HYDRA
from specjax.methods.heads.hydra import HydraHeads
from specjax.methods.heads.medusa import MEDUSA
from specjax.methods.heads.medusa import MEDUSA_2
from specjax.methods.heads.medusa import MedusaHeads
from specjax.methods.heads.pass_embeddings import PaSSEmbeddings
from specjax.methods.heads.pass_embeddings import with_lookahead
from specjax.methods.heads.pass_lookahead import PASS
from specjax.methods.networks import check_fits
from specjax.methods.networks import Heads
from specjax.methods.networks import lm_head
from specjax.methods.published import drafter_layout
from specjax.methods.published import export_drafter
from specjax.methods.published import load_drafter
from specjax.methods.records import LearningRate
from specjax.methods.records import Method
from specjax.methods.records import Option
from specjax.methods.self_speculation.kangaroo import KANGAROO
from specjax.methods.self_speculation.kangaroo import KangarooAdapter
from specjax.models.transformer import Transformer

__all__ = [
    "BLOCKWISE",
    "BlockwiseHeads",
    "EAGLE_1",
    "EAGLE_3",
    "Eagle1Heads",
    "Eagle3Heads",
    "FeatureHeads",
    "FeatureOutput",
    "HYDRA",
    "Heads",
    "HydraHeads",
    "KANGAROO",
    "KangarooAdapter",
    "LearningRate",
    "PaSSEmbeddings",
    "MEDUSA",
    "MEDUSA_2",
    "METHODS",
    "MTP",
    "MTPHeads",
    "MedusaHeads",
    "Method",
    "Option",
    "PARALLEL",
    "PARALLEL_LAYERS",
    "PASS",
    "ParallelHeads",
    "ParallelLayers",
    "check_fits",
    "export_drafter",
    "lm_head",
    "load_drafter",
    "load_heads",
    "of",
    "save_heads",
    "with_lookahead",
]

METHODS = (PASS, BLOCKWISE, MEDUSA, MEDUSA_2, HYDRA, EAGLE_1, EAGLE_3, MTP,
           PARALLEL_LAYERS, PARALLEL, KANGAROO)


def of(heads: Heads) -> Method:
  """The first method that has heads of this kind; it knows how to draft."""
  return next(m for m in METHODS if m.heads.kind == heads.kind)


def load_heads(directory: str | os.PathLike[str], target: Transformer,
               dtype: Any = None, target_params: Any = None
               ) -> tuple[Heads, dict[str, Any]]:
  """Loads heads of any method here, or a published drafter.

  Args:
    directory: a directory of `save_heads`, or what
      `load_drafter` takes, in any layout that it reads.
    target: the model that is to draft with them.
    dtype: of the parameters; None is `default_dtype()`.
    target_params: the target's parameters. With them, copies of the target's
      matrices in a published drafter are not kept.

  Returns:
    `(heads, params)`.

  Raises:
    ValueError: see `files.load_heads` and `load_drafter`.
  """
  path = pathlib.Path(directory)
  ours = any((path / f"heads.{kind}").exists() for kind in (
      "json", "safetensors"))
  on_the_hub = not path.exists() and re.fullmatch(
      r"[\w-][\w.-]*/[\w.-]+", os.fspath(directory))
  if on_the_hub or not ours and (
      (path / "config.json").exists() or drafter_layout(path)):
    return load_drafter(directory, target, target_params, dtype=dtype)
  kinds = tuple(dict.fromkeys(method.heads for method in METHODS))
  return files.load_heads(directory, target, dtype, kinds)
