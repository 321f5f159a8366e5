"""Expected lengths and speed-ups, and verifiers judged on recorded drafts."""

from specjax.analysis.bounds import accepted_bound
from specjax.analysis.bounds import bound_terms
from specjax.analysis.bounds import BoundTerms
from specjax.analysis.bounds import fit_bound
from specjax.analysis.estimates import ratio_estimate
from specjax.analysis.estimates import relative_gain
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
from specjax.analysis.recording import Record
from specjax.analysis.recording import record
from specjax.analysis.recording import Rollout
from specjax.analysis.replay import evaluate
from specjax.analysis.replay import online
from specjax.analysis.replay import Replayed

__all__ = [
    "BoundTerms",
    "Estimate",
    "Record",
    "Replayed",
    "Rollout",
    "accepted_bound",
    "best_gamma",
    "bound_terms",
    "clusters_needed",
    "estimate",
    "evaluate",
    "expected_accepted",
    "expected_tokens",
    "expected_tokens_by_position",
    "expected_tokens_over",
    "fit_bound",
    "online",
    "operations_factor",
    "optimal_gamma",
    "predicted_speedup",
    "ratio_estimate",
    "record",
    "relative_gain",
    "speedup",
]
