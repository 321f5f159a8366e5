"""Drafting with a second, smaller language model: chains and trees."""

from specjax.methods.draft_models import acceptance_objective
from specjax.methods.draft_models import language_model
from specjax.methods.draft_models import online
from specjax.methods.draft_models import paths
from specjax.methods.records import Family

FAMILY = Family(
    drafters=(language_model.LanguageModel, language_model.draft_model,
        online.Online, paths.Paths),
    strategies=(language_model.block_verification,
        language_model.eagle2_tree, language_model.early_stopping,
        language_model.greedy_block_verification, language_model.hybrid_tree,
        language_model.rsd, language_model.sequoia, language_model.specinfer,
        language_model.spectr, language_model.speculative_sampling,
        language_model.top_k_tree, language_model.traversal,
        online.online, paths.merged_specinfer),
    objectives=(acceptance_objective.Acceptance,))
