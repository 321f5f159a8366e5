"""Drafters: how tokens are proposed; one file each.

  a small model         LanguageModel, TreeLanguageModel, DynamicTree, Paths,
                        Online; with another vocabulary: TokenIntersection,
                        StringMatch
  no model              NGram, Reference, Suffix, Retrieval, Recycling, Empty
  the target's layers   EarlyExit, EarlyExitTree, Kangaroo, Swift, Hierarchy
  heads, embeddings     Medusa, Blockwise, Hydra, Lookahead
  the target's features Eagle, EagleChain, DynamicEagle, SampledEagle, MTP,
                        MTPTree, Parallel, ParallelTree
  other drafters        Cascade, Fallback, Merge

`common`, `expansion`, `growth`, `children`, `continuations`, `drawn_trees`,
`features`, `following`, `forecasts`, `matches`, `modules`, `parts`, `reading`,
`slot_trees` and `translation` hold what several of them share; `stop_rules` end
chains while they are drafted.
"""

from specjax.drafters import stop_rules
from specjax.drafters.blockwise import Blockwise
from specjax.drafters.cascade import Cascade
from specjax.drafters.dynamic_tree import DynamicTree
from specjax.drafters.dynamic_tree import DynamicTreeState
from specjax.drafters.eagle import Eagle
from specjax.drafters.eagle import EagleChain
from specjax.drafters.eagle_trees import DynamicEagle
from specjax.drafters.eagle_trees import SampledEagle
from specjax.drafters.early_exit import EarlyExit
from specjax.drafters.early_exit_tree import EarlyExitTree
from specjax.drafters.empty import Empty
from specjax.drafters.fallback import Fallback
from specjax.drafters.hierarchy import Hierarchy
from specjax.drafters.hydra import Hydra
from specjax.drafters.kangaroo import Kangaroo
from specjax.drafters.language_model import LanguageModel
from specjax.drafters.lookahead import Lookahead
from specjax.drafters.medusa import Medusa
from specjax.drafters.merge import Merge
from specjax.drafters.mtp import MTP
from specjax.drafters.mtp import MTPTree
from specjax.drafters.ngram import NGram
from specjax.drafters.ngram import Reference
from specjax.drafters.ngram import reference_texts
from specjax.drafters.online import Online
from specjax.drafters.parallel import Parallel
from specjax.drafters.parallel import ParallelTree
from specjax.drafters.paths import Paths
from specjax.drafters.recycling import Recycling
from specjax.drafters.recycling import recycling_tree
from specjax.drafters.retrieval import Retrieval
from specjax.drafters.skipping import Swift
from specjax.drafters.string_match import StringMatch
from specjax.drafters.suffix import Suffix
from specjax.drafters.token_intersection import TokenIntersection
from specjax.drafters.tree_language_model import TreeLanguageModel

__all__ = ["MTP", "MTPTree", "Blockwise", "Cascade", "DynamicEagle",
           "DynamicTree", "DynamicTreeState", "Eagle", "EagleChain",
           "EarlyExit", "EarlyExitTree", "Empty", "Fallback", "Hierarchy",
           "Hydra", "Kangaroo", "LanguageModel", "Lookahead", "Medusa", "Merge",
           "NGram", "Online", "Parallel", "ParallelTree", "Paths", "Recycling",
           "Reference", "Retrieval", "SampledEagle", "StringMatch", "Suffix",
           "Swift", "TokenIntersection", "TreeLanguageModel", "recycling_tree",
           "reference_texts", "stop_rules"]
