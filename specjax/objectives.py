"""All training objectives by name.

  objective(trainable, frozen, batch, key) -> (loss [], metrics)

`trainable` and `frozen` are dictionaries of named parameter trees. An objective
`needs` "target", and "drafter" for heads or look-ahead embeddings; each may be
trainable or frozen. See `Objective`.

A `DrafterObjective` trains a drafter. It also has `score`, the forecasts of
each head, from which its loss and the accuracies of
`specjax.training.evaluation` are computed.
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
