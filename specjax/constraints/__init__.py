"""Constraints: changes of logits that depend on the previous tokens.

Constraints apply to the target and to the drafter. Give the strictest
constraint first. At a position where a later constraint would forbid all
remaining tokens, that constraint is ignored:

  sj.LogitsTransform(constraints=(automaton, Repetition(penalty=1.2)))

`Constraint` is the interface. The output has the distribution of autoregressive
decoding under the same constraints. Drafters that sample from a model or from
heads apply the constraints too. Other drafters may propose forbidden tokens.
Verification rejects these tokens.
"""

from specjax.constraints.automaton import Automaton
from specjax.constraints.penalties import NoRepeatNGram
from specjax.constraints.penalties import OutputPenalty
from specjax.constraints.penalties import Repetition
from specjax.constraints.tokens import Banned
from specjax.constraints.tokens import Forced
from specjax.decoding.constraining import Constraint
from specjax.decoding.constraining import Row

__all__ = [
    "Automaton",
    "Banned",
    "Constraint",
    "Forced",
    "NoRepeatNGram",
    "OutputPenalty",
    "Repetition",
    "Row",
]
