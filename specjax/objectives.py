"""All training objectives by name.

  objective(trainable, frozen, batch, key) -> (loss [], metrics)

`trainable` and `frozen` are dictionaries of named parameter trees. The
attribute `needs` of an objective lists the trees that the objective reads:
"target", "drafter" (heads, for example) or both. Each may be trainable or
frozen. See `Objective`.

A `DrafterObjective` trains a drafter. Its method `score` evaluates the logits
of each head. The loss and the accuracies of `specjax.training.evaluation` are
computed from the results.
"""

from specjax.methods import FAMILIES
from specjax.training.distillation_objectives import AcceptedLength
from specjax.training.distillation_objectives import Distillation
from specjax.training.next_token import NextToken
from specjax.training.objective import DrafterObjective
from specjax.training.objective import Objective
from specjax.training.stored_distributions import StoredLaws

_OBJECTIVES = {x.__name__: x for family in FAMILIES for x in family.objectives}
globals().update(_OBJECTIVES)

__all__ = ["AcceptedLength", "Distillation", "DrafterObjective", "NextToken",
           "Objective", "StoredLaws", *_OBJECTIVES]
