"""Drafting with a second, smaller language model: chains and trees."""

from specjax.methods.draft_models import acceptance_objective
from specjax.methods.draft_models import draft_model
from specjax.methods.draft_models import draft_model_tree
from specjax.methods.draft_models import dynamic_tree
from specjax.methods.draft_models import online
from specjax.methods.draft_models import paths
from specjax.methods.records import Family

FAMILY = Family(
    drafters=(draft_model.DraftModel, draft_model_tree.DraftModelTree,
        dynamic_tree.DynamicTree, online.Online, paths.Paths),
    strategies=(dynamic_tree.eagle2_tree, draft_model.block_verification,
        draft_model.early_stopping, draft_model.greedy_block_verification,
        draft_model.speculative_sampling, online.online,
        paths.merged_specinfer, draft_model_tree.hybrid_tree,
        draft_model_tree.rsd, draft_model_tree.sequoia,
        draft_model_tree.specinfer, draft_model_tree.spectr,
        draft_model_tree.top_k_tree, draft_model_tree.traversal),
    objectives=(acceptance_objective.Acceptance,))
