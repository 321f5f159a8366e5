"""What is minimised: one pure function of parameters and a batch each.

  objective(trainable, frozen, batch, key) -> (loss [], metrics)

`trainable` and `frozen` are dictionaries of named trees. An objective `needs`
"target", and "drafter" for heads or look-ahead embeddings, on whichever side
they are. `Objective` says it in full.

Those that train a drafter, `DrafterObjective`, also `score` its forecasts, head
by head: it is their loss, and how `specjax.training.evaluation` measures
accuracy.
"""

from specjax.methods.blocks.parallel_objective import ParallelObjective
from specjax.methods.features.eagle_objective import Eagle1Objective
from specjax.methods.features.eagle_objective import Eagle3Objective
from specjax.methods.features.mtp_objective import MTPJointObjective
from specjax.methods.features.mtp_objective import MTPObjective
from specjax.methods.heads.blockwise import BlockwiseObjective
from specjax.methods.heads.hydra import HydraObjective
from specjax.methods.heads.medusa import MedusaJointObjective
from specjax.methods.heads.medusa import MedusaObjective
from specjax.methods.heads.pass_embeddings import PaSSObjective
from specjax.methods.self_speculation.kangaroo import KangarooObjective
from specjax.methods.self_speculation.layer_skip_objective import (
    LayerSkipObjective,
)
from specjax.methods.stop_rules.acceptance_objective import Acceptance
from specjax.training.distillation_objectives import AcceptedLength
from specjax.training.distillation_objectives import Distillation
from specjax.training.next_token import NextToken
from specjax.training.objective import DrafterObjective
from specjax.training.objective import Objective
from specjax.training.stored_distributions import StoredLaws

__all__ = [
    "MTPObjective",
    "Acceptance",
    "AcceptedLength",
    "BlockwiseObjective",
    "Distillation",
    "DrafterObjective",
    "Eagle1Objective",
    "Eagle3Objective",
    "HydraObjective",
    "KangarooObjective",
    "LayerSkipObjective",
    "PaSSObjective",
    "MTPJointObjective",
    "MedusaObjective",
    "MedusaJointObjective",
    "NextToken",
    "Objective",
    "ParallelObjective",
    "StoredLaws",
]
