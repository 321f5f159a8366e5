"""Expected tokens, rounds and speed-ups of decoding, and their upper bounds.

Results are exact on small pairs of models, estimated from recorded drafts, or
predicted from measured times.
"""

from specjax.analysis.bounds import accepted_bound
from specjax.analysis.bounds import bound_terms
from specjax.analysis.bounds import BoundTerms
from specjax.analysis.bounds import fit_bound
from specjax.analysis.budgets import best_first
from specjax.analysis.budgets import BudgetCertificate
from specjax.analysis.budgets import certify_budget
from specjax.analysis.draft_lengths import best_draft_lengths
from specjax.analysis.draft_lengths import DraftLengths
from specjax.analysis.duals import chain_potential
from specjax.analysis.duals import dual_bound
from specjax.analysis.duals import tree_potential
from specjax.analysis.estimates import block_efficiency
from specjax.analysis.estimates import ratio_estimate
from specjax.analysis.estimates import relative_gain
from specjax.analysis.experts import distinct_experts
from specjax.analysis.experts import expected_experts
from specjax.analysis.experts import pass_bytes
from specjax.analysis.experts import router_frequencies
from specjax.analysis.intervals import clusters_needed
from specjax.analysis.intervals import Estimate
from specjax.analysis.intervals import estimate
from specjax.analysis.lengths import best_gamma
from specjax.analysis.lengths import expected_accepted
from specjax.analysis.lengths import expected_tokens
from specjax.analysis.lengths import expected_tokens_by_position
from specjax.analysis.lengths import expected_tokens_over
from specjax.analysis.lengths import operations_factor
from specjax.analysis.lengths import optimal_gamma
from specjax.analysis.lengths import predicted_speedup
from specjax.analysis.lengths import speedup
from specjax.analysis.optima import emission_optimum
from specjax.analysis.optima import transport_optimum
from specjax.analysis.optima import tree_optimum
from specjax.analysis.optima import verifier_optimum
from specjax.analysis.patient import Patient
from specjax.analysis.patient import patient_pair
from specjax.analysis.recording import Record
from specjax.analysis.recording import record
from specjax.analysis.recording import Rollout
from specjax.analysis.replay import evaluate
from specjax.analysis.replay import evaluate_budget
from specjax.analysis.replay import online
from specjax.analysis.replay import Replayed
from specjax.analysis.rounds import expected_rounds
from specjax.analysis.rounds import progress_given_text
from specjax.analysis.rounds import remaining_rounds
from specjax.analysis.rounds import rounds_distribution
from specjax.analysis.rounds import RoundsDistribution
from specjax.analysis.rounds import token_value
from specjax.analysis.several_rounds import best_quantile
from specjax.analysis.several_rounds import best_rule_over_rounds
from specjax.analysis.several_rounds import BestRule
from specjax.analysis.several_rounds import fewest_remaining_rounds
from specjax.analysis.several_rounds import fewest_rounds
from specjax.analysis.several_rounds import most_tokens
from specjax.verifiers.coupled import coupled_acceptance

__all__ = [
    "BestRule",
    "BoundTerms",
    "BudgetCertificate",
    "DraftLengths",
    "Estimate",
    "Patient",
    "Record",
    "Replayed",
    "Rollout",
    "RoundsDistribution",
    "accepted_bound",
    "best_draft_lengths",
    "best_first",
    "best_gamma",
    "best_quantile",
    "best_rule_over_rounds",
    "block_efficiency",
    "bound_terms",
    "certify_budget",
    "chain_potential",
    "clusters_needed",
    "coupled_acceptance",
    "distinct_experts",
    "dual_bound",
    "emission_optimum",
    "estimate",
    "evaluate",
    "evaluate_budget",
    "expected_accepted",
    "expected_experts",
    "expected_rounds",
    "expected_tokens",
    "expected_tokens_by_position",
    "expected_tokens_over",
    "fewest_remaining_rounds",
    "fewest_rounds",
    "fit_bound",
    "most_tokens",
    "online",
    "operations_factor",
    "optimal_gamma",
    "pass_bytes",
    "patient_pair",
    "predicted_speedup",
    "progress_given_text",
    "ratio_estimate",
    "record",
    "relative_gain",
    "remaining_rounds",
    "rounds_distribution",
    "router_frequencies",
    "speedup",
    "token_value",
    "transport_optimum",
    "tree_optimum",
    "tree_potential",
    "verifier_optimum",
]
