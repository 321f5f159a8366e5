"""The literature's methods by name, each a drafter with its verifier.

Other pairs can be given to a `Decoder`. It refuses a pair if the verifier
requires a property that the drafter does not declare.

>>> import jax
>>> from specjax import testing
>>> model = testing.MarkovModel(7)
>>> table = model.init(jax.random.key(0))
>>> decoder = block_verification(model, gamma=3).decoder(model)
>>> params = {"target": table, "drafter": table}
>>> text = decoder.generate(params, [[1]], jax.random.key(1), max_new_tokens=8)
>>> int(text.stats.active[0])  # the drafter is the target: rounds of 4 tokens
2

Every strategy is lossless unless its docstring says LOSSY. The drafter's
docstring describes `params["drafter"]`: the parameters of a language model or
of heads, or a tuple of them.

The code is in `specjax.methods`, one folder for each family.
"""

from specjax.methods.blocks.strategies import ddtree
from specjax.methods.blocks.strategies import parallel
from specjax.methods.combined.strategies import cascade
from specjax.methods.combined.strategies import fallback
from specjax.methods.combined.strategies import merged
from specjax.methods.combined.strategies import triforce
from specjax.methods.draft_models.chain_strategies import autoregressive
from specjax.methods.draft_models.chain_strategies import block_verification
from specjax.methods.draft_models.chain_strategies import early_stopping
from specjax.methods.draft_models.chain_strategies import (
    greedy_block_verification,
)
from specjax.methods.draft_models.chain_strategies import online
from specjax.methods.draft_models.chain_strategies import speculative_sampling
from specjax.methods.draft_models.tree_strategies import eagle2_tree
from specjax.methods.draft_models.tree_strategies import hybrid_tree
from specjax.methods.draft_models.tree_strategies import merged_specinfer
from specjax.methods.draft_models.tree_strategies import rsd
from specjax.methods.draft_models.tree_strategies import sequoia
from specjax.methods.draft_models.tree_strategies import specinfer
from specjax.methods.draft_models.tree_strategies import spectr
from specjax.methods.draft_models.tree_strategies import top_k_tree
from specjax.methods.draft_models.tree_strategies import traversal
from specjax.methods.features.strategies import eagle
from specjax.methods.features.strategies import eagle_dynamic
from specjax.methods.features.strategies import eagle_sampled
from specjax.methods.features.strategies import mtp
from specjax.methods.heads.blockwise import blockwise
from specjax.methods.heads.hydra import hydra
from specjax.methods.heads.medusa import medusa
from specjax.methods.heads.medusa import sampled_medusa
from specjax.methods.heads.pass_lookahead import pass_lookahead
from specjax.methods.model_free.strategies import llma
from specjax.methods.model_free.strategies import prompt_lookup
from specjax.methods.model_free.strategies import rest
from specjax.methods.model_free.strategies import suffix_decoding
from specjax.methods.model_free.strategies import token_recycling
from specjax.methods.other_vocabularies.strategies import string_match
from specjax.methods.other_vocabularies.strategies import token_intersection
from specjax.methods.self_speculation.kangaroo import kangaroo
from specjax.methods.self_speculation.strategies import draft_and_verify
from specjax.methods.self_speculation.strategies import early_exit
from specjax.methods.self_speculation.strategies import swift
from specjax.methods.strategy import Strategy

__all__ = [
    "Strategy",
    "autoregressive",
    "block_verification",
    "blockwise",
    "cascade",
    "ddtree",
    "draft_and_verify",
    "eagle",
    "eagle2_tree",
    "eagle_dynamic",
    "eagle_sampled",
    "early_exit",
    "early_stopping",
    "fallback",
    "greedy_block_verification",
    "hybrid_tree",
    "hydra",
    "kangaroo",
    "llma",
    "medusa",
    "merged",
    "merged_specinfer",
    "mtp",
    "online",
    "parallel",
    "pass_lookahead",
    "prompt_lookup",
    "rest",
    "rsd",
    "sampled_medusa",
    "sequoia",
    "specinfer",
    "spectr",
    "speculative_sampling",
    "string_match",
    "suffix_decoding",
    "swift",
    "token_intersection",
    "token_recycling",
    "top_k_tree",
    "traversal",
    "triforce",
]
