"""Medusa: heads on the target's hidden state draft a static tree.

Cai et al. 2024 (arXiv:2401.10774, sections 2.1.1 and 2.1.2).
"""

import dataclasses

from specjax.methods.heads import _forecasts
from specjax.methods.heads.blockwise_network import BlockwiseHeads
from specjax.methods.heads.medusa_network import MedusaHeads
from specjax.sampling import LogitsTransform


@dataclasses.dataclass(frozen=True, kw_only=True)
class Medusa(_forecasts.HeadsDrafter):
  """The children of a node at depth d follow head d + 1, whatever the node.

  With `trees.medusa_tree` and "top_k" it is the paper's draft: certain, so
  that `verifiers.TargetWalk` is exact and `verifiers.Typical` the paper's lossy
  rule. Drafts that are sampled report their q, and the rules that use it apply.
  `params["drafter"]` are the heads' parameters.

  Attributes:
    heads: of the target; `MedusaHeads`, or others of that form.
    parents: the tree, at most K deep, see `specjax.trees`; it is put in
      breadth-first order.
    proposal: how the children of a node are drawn, see `TreeLanguageModel`.
    transform: of the heads' logits; None takes the decoder's. Any is sound,
      for q is reported as it was sampled from.
  """

  heads: MedusaHeads | BlockwiseHeads
  parents: tuple[int, ...]
  proposal: str = "top_k"
  transform: LogitsTransform | None = None
