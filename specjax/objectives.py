"""What is minimised: one pure function of parameters and a batch each.

  objective(trainable, frozen, batch, key) -> (loss [], metrics)

`trainable` and `frozen` are dictionaries of named trees. An objective `needs`
"target", and "drafter" for heads or look-ahead embeddings, on whichever side
they are. `Objective` says it in full.

Those that train a drafter, `DrafterObjective`, also `score` its forecasts, head
by head: it is their loss, and how `specjax.training.evaluation` measures
accuracy.
"""

from specjax.methods.blocks.parallel_objective import Parallel
from specjax.methods.features.eagle_objective import Eagle1
from specjax.methods.features.eagle_objective import Eagle3
from specjax.methods.features.mtp_objective import MTP
from specjax.methods.features.mtp_objective import MTPJoint
from specjax.methods.heads.blockwise_objective import Blockwise
from specjax.methods.heads.hydra_objective import Hydra
from specjax.methods.heads.lookahead_objective import Lookahead
from specjax.methods.heads.medusa_objective import Medusa
from specjax.methods.heads.medusa_objective import MedusaJoint
from specjax.methods.self_speculation.kangaroo_objective import Kangaroo
from specjax.methods.self_speculation.layer_skip_objective import LayerSkip
from specjax.methods.stop_rules.acceptance_objective import Acceptance
from specjax.training.distillation_objectives import AcceptedLength
from specjax.training.distillation_objectives import Distillation
from specjax.training.next_token import NextToken
from specjax.training.objective import DrafterObjective
from specjax.training.objective import Objective
from specjax.training.stored_distributions import StoredLaws

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
