"""Drafting with several drafters: cascades, fallbacks and merged trees."""

from specjax.methods.combined import cascade
from specjax.methods.combined import fallback
from specjax.methods.combined import merge
from specjax.methods.records import Family

FAMILY = Family(
    drafters=(cascade.Cascade, fallback.Fallback, merge.Merge),
    strategies=(cascade.cascade, fallback.fallback, merge.merged))
