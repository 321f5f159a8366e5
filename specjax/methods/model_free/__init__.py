"""Drafting without a draft model.

The drafts are copied or counted from the sequence itself, from reference
documents or from a datastore, or are earlier predictions of the target.
"""

from specjax.methods.model_free import empty
from specjax.methods.model_free import ngram
from specjax.methods.model_free import recycling
from specjax.methods.model_free import retrieval
from specjax.methods.model_free import suffix
from specjax.methods.records import Family

FAMILY = Family(
    drafters=(empty.Empty, ngram.NGram, ngram.Reference, ngram.reference_texts,
        recycling.Recycling, recycling.recycling_tree, retrieval.Retrieval,
        suffix.Suffix),
    strategies=(empty.autoregressive, ngram.llma, ngram.prompt_lookup,
        recycling.token_recycling, retrieval.rest, suffix.suffix_decoding))
