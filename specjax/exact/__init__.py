"""The exact output law of a verifier, by enumeration of the code that ships.

A verifier returns the law of its outcome, so nothing has to be sampled: the
law is evaluated on every draft of a small context-dependent model pair and
summed, sum_x q(x) * stop * next_token, which is the joint law of everything
that decoding emits. A rule is lossless on these models iff that equals the
target's; `Certificate` says what that means for others. Linear programs over
all couplings and over all valid verifiers give the largest values in one round
(`optima`) and over several rounds (`several_rounds`). `rounds` has the expected
number of rounds that a sequence takes, and `duals` has exact bounds.
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
from specjax.exact.schemes import all_trees

__all__ = [
    "Certificate",
    "Compiled",
    "Drafts",
    "Outcome",
    "Pair",
    "all_trees",
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
