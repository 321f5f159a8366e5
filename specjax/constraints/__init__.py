"""Logits that depend on the text so far, for target and drafter alike.

They are given in order, the hardest first:

  sj.LogitsTransform(constraints=(automaton, Repetition(penalty=1.2)))

`base` says what a constraint is. All of them change the law that the output
follows, and speculation changes nothing more: the text has the law of
autoregressive decoding under the same constraints. Drafters that draw from a
model's laws or from heads draft under them too; the drafts of others are
rejected where a constraint forbids them.
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
