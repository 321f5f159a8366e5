"""Drafting with a draft model that has another vocabulary than the target."""

from specjax.methods.other_vocabularies import string_match
from specjax.methods.other_vocabularies import token_intersection
from specjax.methods.records import Family

FAMILY = Family(
    drafters=(string_match.StringMatch, token_intersection.TokenIntersection),
    strategies=(string_match.string_match,
        token_intersection.token_intersection))
