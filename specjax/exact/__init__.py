"""Proof that a verifier is lossless: its exact output distribution.

A verifier returns the `Law` of its outcome. For each node of a draft, the law
contains the probability `stop` that verification stops there, and the
distribution `next_token` of the following token. The output distribution is
therefore computed without sampling.

The law is evaluated on every draft x of a pair of small models. q(x) is the
probability of x under the draft model. The sum over all drafts,
sum_x q(x) * stop * next_token, is the joint distribution of all emitted tokens.
A rule is lossless on these models iff this sum equals the target's
distribution. `Certificate` describes the consequences for other models.

`audit_sampler` tests a sampler of any framework, of which no law is known.
`analysis.certify_budget` tests how a batch divides verified tokens among rows.
"""

from specjax.exact import schemes
from specjax.exact.certificate import Certificate
from specjax.exact.certificate import certify
from specjax.exact.compiled import Compiled
from specjax.exact.drafts import Drafts
from specjax.exact.drafts import ended_by
from specjax.exact.enumeration import enumerate_chains
from specjax.exact.enumeration import enumerate_trees
from specjax.exact.enumeration import expected_tokens
from specjax.exact.enumeration import Outcome
from specjax.exact.pairs import full_information_optimum
from specjax.exact.pairs import iid_pair
from specjax.exact.pairs import Pair
from specjax.exact.pairs import random_pair
from specjax.exact.samplers import audit_sampler
from specjax.exact.schemes import all_trees

__all__ = [
    "Certificate",
    "Compiled",
    "Drafts",
    "Outcome",
    "Pair",
    "all_trees",
    "audit_sampler",
    "certify",
    "ended_by",
    "enumerate_chains",
    "enumerate_trees",
    "expected_tokens",
    "full_information_optimum",
    "iid_pair",
    "random_pair",
    "schemes",
]
