"""How a target learns to draft for itself: one record a method.

A `Method` says which heads it trains, by which objective, and how the target
drafts with them. Scripts read everything from the record, so that another
method (another kind of head) is one record in the file of its family beside its
own files: its class of `models.heads.Heads`, its objective and its strategy.
The families are those of `specjax.strategies`: `heads`, `features`, `blocks`
and `own_layers`; `base` is what a record says.
"""

import os
from typing import Any

from specjax.models import heads as heads_lib
from specjax.models.heads import Heads
from specjax.models.transformer import Transformer
from specjax.training.methods.base import Method
from specjax.training.methods.base import Option
from specjax.training.methods.blocks import PARALLEL
from specjax.training.methods.features import EAGLE_1
from specjax.training.methods.features import EAGLE_3
from specjax.training.methods.features import MTP
from specjax.training.methods.features import PARALLEL_LAYERS
from specjax.training.methods.heads import BLOCKWISE
from specjax.training.methods.heads import HYDRA
from specjax.training.methods.heads import MEDUSA
from specjax.training.methods.heads import MEDUSA_2
from specjax.training.methods.heads import PASS
from specjax.training.methods.own_layers import KANGAROO

__all__ = [
    "BLOCKWISE",
    "EAGLE_1",
    "EAGLE_3",
    "HYDRA",
    "KANGAROO",
    "MEDUSA",
    "MEDUSA_2",
    "METHODS",
    "MTP",
    "Method",
    "Option",
    "PARALLEL",
    "PARALLEL_LAYERS",
    "PASS",
    "load_heads",
    "of",
]

METHODS = (PASS, BLOCKWISE, MEDUSA, MEDUSA_2, HYDRA, EAGLE_1, EAGLE_3, MTP,
           PARALLEL_LAYERS, PARALLEL, KANGAROO)


def of(heads: Heads) -> Method:
  """The first method that has heads of this kind; it knows how to draft."""
  return next(m for m in METHODS if m.heads.kind == heads.kind)


def load_heads(directory: str | os.PathLike[str], target: Transformer,
               dtype: Any = None) -> tuple[Heads, dict[str, Any]]:
  """`models.heads.load_heads`, of whatever kind a method here has."""
  kinds = tuple(dict.fromkeys(method.heads for method in METHODS))
  return heads_lib.load_heads(directory, target, dtype, kinds)
