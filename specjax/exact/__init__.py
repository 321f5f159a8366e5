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
from specjax.exact.draft_lengths import best_draft_lengths
from specjax.exact.draft_lengths import DraftLengths
from specjax.exact.drafts import Drafts
from specjax.exact.duals import chain_potential
from specjax.exact.duals import dual_bound
from specjax.exact.duals import tree_potential
from specjax.exact.enumeration import enumerate_chains
from specjax.exact.enumeration import expected_tokens
from specjax.exact.enumeration import Outcome
from specjax.exact.optima import emission_optimum
from specjax.exact.optima import full_information_optimum
from specjax.exact.optima import transport_optimum
from specjax.exact.optima import tree_optimum
from specjax.exact.optima import verifier_optimum
from specjax.exact.pairs import iid_pair
from specjax.exact.pairs import Pair
from specjax.exact.pairs import random_pair
from specjax.exact.patient import Patient
from specjax.exact.patient import patient_pair
from specjax.exact.rounds import expected_rounds
from specjax.exact.rounds import progress_given_text
from specjax.exact.rounds import remaining_rounds
from specjax.exact.rounds import rounds_distribution
from specjax.exact.rounds import RoundsDistribution
from specjax.exact.rounds import token_value
from specjax.exact.several_rounds import fewest_remaining_rounds
from specjax.exact.several_rounds import fewest_rounds
from specjax.exact.several_rounds import most_tokens
from specjax.exact.trees import all_trees
from specjax.exact.trees import enumerate_trees

__all__ = [
    "Certificate",
    "Compiled",
    "DraftLengths",
    "Drafts",
    "Outcome",
    "Pair",
    "Patient",
    "RoundsDistribution",
    "all_trees",
    "best_draft_lengths",
    "certify",
    "chain_potential",
    "dual_bound",
    "emission_optimum",
    "enumerate_chains",
    "enumerate_trees",
    "expected_rounds",
    "expected_tokens",
    "fewest_remaining_rounds",
    "fewest_rounds",
    "full_information_optimum",
    "iid_pair",
    "most_tokens",
    "patient_pair",
    "progress_given_text",
    "random_pair",
    "remaining_rounds",
    "rounds_distribution",
    "schemes",
    "token_value",
    "transport_optimum",
    "tree_optimum",
    "tree_potential",
    "verifier_optimum",
]
