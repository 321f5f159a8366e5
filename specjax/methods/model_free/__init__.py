"""Drafting without a model: from the sequence itself, or from a datastore."""

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
