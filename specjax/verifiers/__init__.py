"""Verification rules: `rule.law(draft, target_probs) -> Law`, for one sequence.

  rule            drafts                    exact  papers
  Token           chain                     yes    arXiv:2211.17192, 2302.01318
  Block           chain                     yes    arXiv:2403.10444, Algorithm 2
  Coupled         chain                     yes    arXiv:2408.07978
  GreedyBlock     chain, autoregressive     yes    arXiv:2403.10444, Algorithms
                                                   4 to 6
  Recursive       tree, conditional         yes    arXiv:2305.09781, 2402.14160
  Traversal       tree, conditional         yes    arXiv:2505.12398
  KSeq            tree, i.i.d. children     yes    arXiv:2310.15141
  TargetWalk      any tree, q is not used   yes    arXiv:2305.09781
  Typical         any tree, q is not used   no     arXiv:2401.10774
  TopK, Distance  chain                     no     arXiv:1811.03115

The second column states the required kind of draft. See
`specjax.interfaces.CAPABILITIES` for "conditional" and "autoregressive".
"""

from specjax.verifiers.block import Block
from specjax.verifiers.blockwise import Distance
from specjax.verifiers.blockwise import TopK
from specjax.verifiers.coupled import Coupled
from specjax.verifiers.greedy_block import GreedyBlock
from specjax.verifiers.greedy_block import GreedyBlockState
from specjax.verifiers.k_seq import KSeq
from specjax.verifiers.recursive import Recursive
from specjax.verifiers.target_walk import TargetWalk
from specjax.verifiers.token import Token
from specjax.verifiers.traversal import Traversal
from specjax.verifiers.typical import Typical

__all__ = [
    "Block",
    "Coupled",
    "Distance",
    "GreedyBlock",
    "GreedyBlockState",
    "KSeq",
    "Recursive",
    "TargetWalk",
    "Token",
    "TopK",
    "Traversal",
    "Typical",
]
