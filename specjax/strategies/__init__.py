"""The literature's methods, each as a drafter and a verifier.

A strategy is a pair of parts that belong together: how tokens are proposed and
how they are judged. The parts do all of the work and can be combined in other
ways; a `Decoder` refuses a pair whose verifier requires what the drafter does
not declare.

>>> import jax
>>> import specjax as sj
>>> from specjax import testing
>>> model = testing.MarkovModel(7)
>>> table = model.init(jax.random.key(0))
>>> drafter, verifier = block_verification(model, gamma=3)
>>> decoder = sj.Decoder(target=model, drafter=drafter, verifier=verifier)
>>> params = {"target": table, "drafter": table}
>>> text = decoder.generate(params, [[1]], jax.random.key(1), max_new_tokens=8)
>>> int(text.stats.active[0])  # the drafter is the target: rounds of 4 tokens
2

Every strategy is lossless unless its docstring says LOSSY. `params["drafter"]`
is what the drafter's docstring says: the parameters of a language model or of
heads, or a tuple of them.

A file holds a family of methods: `language_model_chains`,
`language_model_trees` and `other_vocabularies` draft with a small model,
`own_layers`, `heads`, `features` and `blocks` with the target or with what is
trained on it, `free` with no model, and `composed` with other drafters.
"""

from specjax.strategies.base import Strategy
from specjax.strategies.blocks import ddtree
from specjax.strategies.blocks import parallel
from specjax.strategies.composed import cascade
from specjax.strategies.composed import fallback
from specjax.strategies.composed import merged
from specjax.strategies.composed import triforce
from specjax.strategies.features import eagle
from specjax.strategies.features import eagle_dynamic
from specjax.strategies.features import eagle_sampled
from specjax.strategies.features import mtp
from specjax.strategies.free import llma
from specjax.strategies.free import prompt_lookup
from specjax.strategies.free import rest
from specjax.strategies.free import suffix_decoding
from specjax.strategies.free import token_recycling
from specjax.strategies.heads import blockwise
from specjax.strategies.heads import hydra
from specjax.strategies.heads import medusa
from specjax.strategies.heads import pass_lookahead
from specjax.strategies.heads import sampled_medusa
from specjax.strategies.language_model_chains import autoregressive
from specjax.strategies.language_model_chains import block_verification
from specjax.strategies.language_model_chains import early_stopping
from specjax.strategies.language_model_chains import greedy_block_verification
from specjax.strategies.language_model_chains import online
from specjax.strategies.language_model_chains import speculative_sampling
from specjax.strategies.language_model_trees import eagle2_tree
from specjax.strategies.language_model_trees import hybrid_tree
from specjax.strategies.language_model_trees import merged_specinfer
from specjax.strategies.language_model_trees import rsd
from specjax.strategies.language_model_trees import sequoia
from specjax.strategies.language_model_trees import specinfer
from specjax.strategies.language_model_trees import spectr
from specjax.strategies.language_model_trees import top_k_tree
from specjax.strategies.language_model_trees import traversal
from specjax.strategies.other_vocabularies import string_match
from specjax.strategies.other_vocabularies import token_intersection
from specjax.strategies.own_layers import draft_and_verify
from specjax.strategies.own_layers import early_exit
from specjax.strategies.own_layers import kangaroo
from specjax.strategies.own_layers import swift

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
