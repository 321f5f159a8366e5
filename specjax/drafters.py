"""All drafters by name, and the rules that stop a draft (`stop_rules`).

  draft models             LanguageModel, TreeLanguageModel, DynamicTree, Paths,
                           Online
  another vocabulary       TokenIntersection, StringMatch
  no model                 NGram, Reference, Suffix, Retrieval, Recycling, Empty
  the target's own layers  EarlyExit, EarlyExitTree, Kangaroo, Swift, Hierarchy
  heads, embeddings        Medusa, Blockwise, Hydra, PaSS
  the target's features    Eagle, EagleChain, DynamicEagle, SampledEagle, MTP,
                           MTPTree
  blocks of tokens         Parallel, ParallelTree
  other drafters           Cascade, Fallback, Merge

The code is in `specjax.methods`, one folder for each family.
"""

from specjax.methods import stop_rules
from specjax.methods.blocks.parallel_drafter import Parallel
from specjax.methods.blocks.parallel_drafter import ParallelTree
from specjax.methods.combined.cascade import Cascade
from specjax.methods.combined.fallback import Fallback
from specjax.methods.combined.merge import Merge
from specjax.methods.draft_models.dynamic_tree import DynamicTree
from specjax.methods.draft_models.dynamic_tree import DynamicTreeState
from specjax.methods.draft_models.language_model import LanguageModel
from specjax.methods.draft_models.online import Online
from specjax.methods.draft_models.paths import Paths
from specjax.methods.draft_models.tree_language_model import TreeLanguageModel
from specjax.methods.features.eagle_drafter import Eagle
from specjax.methods.features.eagle_drafter import EagleChain
from specjax.methods.features.eagle_trees import DynamicEagle
from specjax.methods.features.eagle_trees import SampledEagle
from specjax.methods.features.mtp_drafter import MTP
from specjax.methods.features.mtp_drafter import MTPTree
from specjax.methods.heads.blockwise import Blockwise
from specjax.methods.heads.hydra import Hydra
from specjax.methods.heads.medusa import Medusa
from specjax.methods.heads.pass_lookahead import PaSS
from specjax.methods.model_free.empty import Empty
from specjax.methods.model_free.ngram import NGram
from specjax.methods.model_free.ngram import Reference
from specjax.methods.model_free.ngram import reference_texts
from specjax.methods.model_free.recycling import Recycling
from specjax.methods.model_free.recycling import recycling_tree
from specjax.methods.model_free.retrieval import Retrieval
from specjax.methods.model_free.suffix import Suffix
from specjax.methods.other_vocabularies.string_match import StringMatch
from specjax.methods.other_vocabularies.token_intersection import (
           TokenIntersection,
)
from specjax.methods.self_speculation.early_exit import EarlyExit
from specjax.methods.self_speculation.early_exit_tree import EarlyExitTree
from specjax.methods.self_speculation.hierarchy import Hierarchy
from specjax.methods.self_speculation.kangaroo import Kangaroo
from specjax.methods.self_speculation.skipping import Swift

__all__ = ["MTP", "MTPTree", "Blockwise", "Cascade", "DynamicEagle",
           "DynamicTree", "DynamicTreeState", "Eagle", "EagleChain",
           "EarlyExit", "EarlyExitTree", "Empty", "Fallback", "Hierarchy",
           "Hydra", "Kangaroo", "LanguageModel", "PaSS", "Medusa", "Merge",
           "NGram", "Online", "Parallel", "ParallelTree", "Paths", "Recycling",
           "Reference", "Retrieval", "SampledEagle", "StringMatch", "Suffix",
           "Swift", "TokenIntersection", "TreeLanguageModel", "recycling_tree",
           "reference_texts", "stop_rules"]
