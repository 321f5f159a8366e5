"""Numbers of drafts that a certificate has tried, by property of the draft.

A rule can be wrong only where some property holds, for example at temperature 0
or for a draft that ends in padding. The counts show for which properties a
certificate has evaluated drafts.
"""

import numpy as np

SMALL, LARGE, PRODUCTION = 4, 300, 128_259  # vocabulary sizes in the properties
_TINY = 1e-30


def counted(parents: np.ndarray, q: np.ndarray, p: np.ndarray, dtype: str
            ) -> dict[str, int]:
  """Returns the number of drafts with each property.

  Args:
    parents: `[n, N]` parents of n drafts of N nodes.
    q: `[n, N, V]` draft distributions. Row 0 is ignored.
    p: `[n, N, V]` target distributions.
    dtype: dtype of the inputs of the law.
  """
  return {name: int(np.sum(has))
          for name, has in _properties(parents, q, p, dtype).items()}


def _properties(parents, q, p, dtype) -> dict[str, np.ndarray]:
  """Returns a mask `[n]` of the drafts with each property."""
  count, nodes, vocab = q.shape
  gamma = nodes - 1
  # Numbers of entries and largest entries: few passes over large arrays.
  positive, largest = np.count_nonzero(p, axis=-1), p.max(-1)
  positive_q, largest_q = np.count_nonzero(q, axis=-1), q.max(-1)
  real = positive_q > 0
  real[:, 0] = False
  in_use = real.copy()  # nodes whose row of p can be used
  in_use[:, 0] = True
  drafted = real.sum(-1)
  padding = gamma - drafted
  is_chain = ((parents == np.arange(-1, gamma)) | ~in_use).all(-1)
  is_float32 = dtype == "float32"
  found = {
      "temperature 0 of both models, 2 or more tokens": (
          ((largest == 1) | ~in_use) & ((largest_q == 1) | ~real)).all(-1)
      & (drafted > 1),
      f"0 < p < {_TINY:g}": (
          (np.count_nonzero(p >= _TINY, axis=-1) < positive) & in_use).any(-1),
      "more than 4 nodes of padding": padding > 4,
      "padding in float32": (padding > 0) & is_float32,
      "chains of 2 tokens in float32": is_chain & (drafted == 2) & is_float32,
      "chains of 5 to 15 tokens in float32":
          is_chain & (drafted >= 5) & (drafted <= 15) & is_float32,
      "trees of more than 38 nodes": ~is_chain & (drafted >= 38),
  }
  if vocab <= SMALL:
    return found
  same = np.zeros((count, nodes), bool)
  draft, node = np.nonzero(real)
  above = parents[draft, node]
  near = ((largest[draft, above] == largest_q[draft, node])
          & (positive[draft, above] == positive_q[draft, node]))
  draft, node, above = draft[near], node[near], above[near]
  same[draft, node] = (p[draft, above] == q[draft, node]).all(-1)
  dense = ((positive_q == vocab) | ~real).all(-1) & (drafted > 0)
  found |= {
      f"1 token, V > {SMALL}": drafted == 1,
      f"q = p in a row, V > {SMALL}": same.any(-1),
      f"q = p in all rows, V > {SMALL}": (same | ~real).all(-1) & (drafted > 1),
  }
  if vocab <= LARGE:
    return found | {f"q > 0 at all tokens, {SMALL} < V <= {LARGE}": dense}
  ties = np.count_nonzero(p == largest[..., None], axis=-1)
  return found | {
      f"q > 0 at all tokens, V > {LARGE}": dense,
      f"equal largest p, V > {LARGE}": ((ties > 1) & in_use).any(-1),
      f"p = 0 at over half of the tokens, V > {LARGE}": (
          (positive > 1) & (2 * positive < vocab) & in_use).any(-1),
      f"padding, V > {LARGE}": padding > 0,
      "chains of 4 to 12 tokens, V >= 1,000":
          is_chain & (drafted >= 4) & (drafted <= 12) & (vocab >= 1000),
      f"V > {PRODUCTION:,}": np.full(count, vocab > PRODUCTION),
  }
