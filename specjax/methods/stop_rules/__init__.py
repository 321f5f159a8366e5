"""Rules that end a chain while it is drafted, from what was drafted so far.

A drafter that knows that its next token will be rejected had better stop. What
it does not draft is padding, so that every draft has one compiled shape; a
chain whose rows have all stopped leaves out the passes that are left.

  for k = 1..gamma:  q_k  ->  [asked here]  ->  x_k ~ q_k  ->  [or here]

Whether node k exists may depend on q_k and on the tokens before x_k, and never
on x_k. So a rule is asked either before x_k is drawn, and then it does not see
x_k, or after, and then x_k stays. "Draw x_k, look at it, drop it" cannot be
said here, and is biased: `exact.certify(rule, stop=...)` rejects it. With such
a rule a drafter is not `autoregressive` any more, for whether a row is padding
depends on the tokens before it; greedy block verification is refused.

Each rule is a frozen dataclass of static numbers. Its parameters, if it has
any, are `params["drafter"]["stop"]`.
"""

from specjax.methods.stop_rules.asking import ask
from specjax.methods.stop_rules.asking import begun
from specjax.methods.stop_rules.asking import first
from specjax.methods.stop_rules.asking import learned
from specjax.methods.stop_rules.asking import Learning
from specjax.methods.stop_rules.asking import learns
from specjax.methods.stop_rules.asking import memory_of
from specjax.methods.stop_rules.asking import noted
from specjax.methods.stop_rules.base import kept
from specjax.methods.stop_rules.base import Seen
from specjax.methods.stop_rules.base import StopRule
from specjax.methods.stop_rules.predictions import AcceptanceHead
from specjax.methods.stop_rules.predictions import Scheduler
from specjax.methods.stop_rules.predictions import Threshold
from specjax.methods.stop_rules.thresholds import Adapted
from specjax.methods.stop_rules.thresholds import Adaptive
from specjax.methods.stop_rules.thresholds import Confidence
from specjax.methods.stop_rules.thresholds import Entropy

__all__ = [
    "AcceptanceHead",
    "Adapted",
    "Adaptive",
    "Confidence",
    "Entropy",
    "Learning",
    "Scheduler",
    "Seen",
    "StopRule",
    "Threshold",
    "ask",
    "begun",
    "first",
    "kept",
    "learned",
    "learns",
    "memory_of",
    "noted",
]
