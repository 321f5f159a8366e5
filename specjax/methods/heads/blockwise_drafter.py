"""Blockwise parallel decoding: the heads' likeliest tokens as a chain.

Stern et al. 2018 (arXiv:1811.03115).
"""

import dataclasses

from specjax.methods.heads import _forecasts
from specjax.methods.heads.blockwise_network import BlockwiseHeads
from specjax.methods.heads.medusa_network import MedusaHeads
from specjax.sampling import LogitsTransform
from specjax.utils import fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blockwise(_forecasts.HeadsDrafter):
  """Drafts one token of each head, the likeliest, with certainty.

  The pass that verifies a block returns the hidden state that predicts the
  next one: the paper's combined scheme (section 4), one pass a block. The
  paper's p_1 is the target, whose token is the extra one of a round. Any rule
  for chains is exact; `verifiers.TopK` and `verifiers.Distance` are the paper's
  lossy ones. `params["drafter"]` are the heads' parameters.

  Attributes:
    heads: of the target; `BlockwiseHeads`, or others of that form.
    gamma: drafted tokens of a round, at most K; None: K.
    transform: of the heads' logits; None takes the decoder's. Only the tokens
      that it bans matter here.
  """

  heads: BlockwiseHeads | MedusaHeads
  gamma: int | None = None
  transform: LogitsTransform | None = None

  proposal = "top_k"

  def __post_init__(self):
    if self.gamma is None:
      object.__setattr__(self, "gamma", self.heads.heads)
    fields.check_at_least("gamma", self.gamma, 0, ": 0 drafts nothing")

  @property
  def parents(self) -> tuple[int, ...]:
    return tuple(range(-1, self.gamma))
