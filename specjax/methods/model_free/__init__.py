"""Drafting without a draft model.

Drafts are copies or frequent continuations from the sequence itself, reference
documents or a datastore. `Recycling` drafts earlier predictions of the target.
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
