"""Arguments that the formulas and the estimators refuse."""

import functools

import numpy as np
import pytest
import refusals

from specjax import analysis

_with = functools.partial
_TIMES = dict(step=1.0, draft=0.1)
_best_gamma = _with(analysis.best_gamma, verify={}, **_TIMES)
_PILOT = analysis.ratio_estimate(range(9), np.ones(9))


@pytest.mark.parametrize("call, words", [
    *refusals.of_values(
        (_with(analysis.expected_tokens, gamma=3), "acceptance", 1.2),
        (_with(analysis.expected_accepted, gamma=3), "acceptance", np.nan),
        (_with(analysis.expected_tokens, 0.5), "gamma", 2.5, -1),
        (_with(analysis.speedup, 0.5, 3), "cost", -0.1),
        (_with(analysis.operations_factor, 0.5, 3), "cost", np.inf),
        (_with(analysis.optimal_gamma, 0.5, 0.1), "largest", -2),
        (_with(analysis.predicted_speedup, verify=1.0, gamma=4, **_TIMES),
         "block_efficiency", 5.5),
        (_with(analysis.clusters_needed, _PILOT), "half_width", 0)),
    (lambda: analysis.expected_tokens([0.5, -0.1], 3), "acceptance is -0.1"),
    (lambda: analysis.expected_tokens_by_position([0.5, 2]),
     "acceptance is 2.0"),
    (lambda: analysis.expected_tokens_over([0.5], 3, [0]), "weights sum to 0"),
    (lambda: analysis.expected_tokens_over([0.5, 1], 3, [2, -1]),
     "weights is -1.0"),
    (lambda: analysis.predicted_speedup(1.0, verify=0.0, gamma=0, **_TIMES),
     "verify .* is 0.0; .* more than 0"),
    (lambda: _best_gamma([1.0, 0.5], verify={3: 1.0}),
     "verify .* gamma 3, but survival ends at 1"),
    (lambda: _best_gamma([0.9, 0.5]), "survival starts with 0.9"),
    (lambda: _best_gamma([1, 1.5]), "survival is 1.5"),
    (lambda: _best_gamma([1, 0.5, 0.6]), "survival rises from 0.5 at 1 to 0.6"),
    (lambda: _best_gamma([1, np.nan]), "survival is nan"),
    (lambda: _best_gamma([[1]]), r"survival has shape \(1, 1\)"),
    (lambda: analysis.ratio_estimate([], []), "at least one round"),
    (lambda: analysis.ratio_estimate([1, 2], [1]),
     r"\(1,\), \(2,\); .* same prompts"),
    (lambda: analysis.ratio_estimate([1, 2], [1, 2], clusters="a"),
     r"\(1,\), \(2,\); .* same prompts"),
    (lambda: analysis.relative_gain([1, 2], [1, 1], [1], [1]),
     r"\(1,\), \(2,\); .* same prompts"),
    (lambda: analysis.estimate(np.divide, [[1]], [[1]]),
     r"\(1, 1\); .* same prompts"),
    (lambda: analysis.clusters_needed(
        analysis.ratio_estimate([1, 2], [1, 1]), 0.1),
     "2 clusters .* at least 5")])
def test_bad_input_is_refused(call, words):
  # Broken: a typing error becomes a number, or figures of different prompts
  # are divided by each other.
  with pytest.raises(ValueError, match=words) as e:
    call()
  assert "\n" not in str(e.value)
