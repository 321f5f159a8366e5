"""Drafting with a second, smaller language model: chains and trees."""

from specjax.methods.draft_models import acceptance_objective
from specjax.methods.draft_models import dynamic_tree
from specjax.methods.draft_models import language_model
from specjax.methods.draft_models import online
from specjax.methods.draft_models import paths
from specjax.methods.draft_models import tree_language_model
from specjax.methods.records import Family

FAMILY = Family(
    drafters=(dynamic_tree.DynamicTree, language_model.LanguageModel,
        online.Online, paths.Paths, tree_language_model.TreeLanguageModel),
    strategies=(dynamic_tree.eagle2_tree, language_model.block_verification,
        language_model.early_stopping, language_model.greedy_block_verification,
        language_model.speculative_sampling, online.online,
        paths.merged_specinfer, tree_language_model.hybrid_tree,
        tree_language_model.rsd, tree_language_model.sequoia,
        tree_language_model.specinfer, tree_language_model.spectr,
        tree_language_model.top_k_tree, tree_language_model.traversal),
    objectives=(acceptance_objective.Acceptance,))
