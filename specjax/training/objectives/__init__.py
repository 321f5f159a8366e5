"""What is minimised: one pure function of parameters and a batch each.

  objective(trainable, frozen, batch, key) -> (loss [], metrics)

`trainable` and `frozen` are dictionaries of named trees. An objective `needs`
"target", and "drafter" for heads or look-ahead embeddings, on whichever side
they are. `Objective` says it in full.

Those that train a drafter, `DrafterObjective`, also `score` its forecasts, head
by head: it is their loss, and how `specjax.training.evaluation` measures
accuracy.
"""

from specjax.training.objectives.acceptance import Acceptance
from specjax.training.objectives.base import DrafterObjective
from specjax.training.objectives.base import Objective
from specjax.training.objectives.blockwise import Blockwise
from specjax.training.objectives.distillation import AcceptedLength
from specjax.training.objectives.distillation import Distillation
from specjax.training.objectives.eagle import Eagle1
from specjax.training.objectives.eagle import Eagle3
from specjax.training.objectives.hydra import Hydra
from specjax.training.objectives.kangaroo import Kangaroo
from specjax.training.objectives.layer_skip import LayerSkip
from specjax.training.objectives.lookahead import Lookahead
from specjax.training.objectives.medusa import Medusa
from specjax.training.objectives.medusa import MedusaJoint
from specjax.training.objectives.mtp import MTP
from specjax.training.objectives.mtp import MTPJoint
from specjax.training.objectives.next_token import NextToken
from specjax.training.objectives.parallel import Parallel
from specjax.training.objectives.stored_laws import StoredLaws

__all__ = [
    "MTP",
    "Acceptance",
    "AcceptedLength",
    "Blockwise",
    "Distillation",
    "DrafterObjective",
    "Eagle1",
    "Eagle3",
    "Hydra",
    "Kangaroo",
    "LayerSkip",
    "Lookahead",
    "MTPJoint",
    "Medusa",
    "MedusaJoint",
    "NextToken",
    "Objective",
    "Parallel",
    "StoredLaws",
]
