"""What is minimised: one pure function of parameters and a batch each.

  objective(trainable, frozen, batch, key) -> (loss [], metrics)

`trainable` and `frozen` are dictionaries of named trees, of which an objective
needs "target", and "drafter" for heads or look-ahead embeddings, on whichever
side they are. `batch` is a dictionary: `tokens [B, S + 1]` int32, of which the
first S are read, and `progress []` float32, the share of the run that is
over, where a weight follows it. Losses are in nats, means over what is
predicted.

Those that train a drafter also `score` its forecasts, head by head: it is
their loss, and how `specjax.training.evaluation` measures accuracy.
"""

from specjax.training.objectives.blockwise import Blockwise
from specjax.training.objectives.lookahead import Lookahead
from specjax.training.objectives.medusa import Medusa
from specjax.training.objectives.medusa import MedusaJoint
from specjax.training.objectives.next_token import NextToken

__all__ = [
    "Blockwise",
    "Lookahead",
    "Medusa",
    "MedusaJoint",
    "NextToken",
]
