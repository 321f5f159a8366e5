"""Typical acceptance against the paper's words, in plain Python."""

import jax
import numpy as np
import pytest

import specjax as sj
from specjax.verifiers import Typical

_TREES = ((-1, 0, 1, 2, 3), (-1, 0, 0, 1, 1, 2, 4), (-1, 0, 1, 0, 3, 4, 1))


def _by_the_book(parents, tokens, q, p, epsilon, delta):
  """The node of the longest accepted path, the likeliest among equals."""
  best = (0, 0.0, 0)  # depth, log-likelihood, minus the node
  for node in range(len(parents)):
    path = []
    while node > 0:
      path.append(node)
      node = parents[node]
    accepted, likelihood = True, 0.0
    for i in path:
      row = p[parents[i]]
      entropy = -sum(x * np.log(x) for x in row if x > 0)
      chance = row[tokens[i]]
      accepted &= chance > min(epsilon, delta * np.exp(-entropy))
      accepted &= q[i, tokens[i]] > 0
      likelihood += np.log(max(chance, 1e-300))
    if accepted and path:
      best = max(best, (len(path), likelihood, -path[0]))
  return -best[2]


@pytest.mark.parametrize("parents", _TREES)
def test_longest_plausible_path_wins(parents):
  # Broken: published thresholds no longer mean what Medusa's mean.
  rng, stops = np.random.default_rng(0), set()
  nodes, vocab = len(parents), 5
  evaluate = jax.jit(Typical(epsilon=0.2, delta=0.4).law)
  for _ in range(60):
    p, q = rng.dirichlet(np.full(vocab, 0.5), (2, nodes)).astype(np.float32)
    tokens = rng.integers(vocab, size=nodes)
    q[rng.integers(1, nodes)] = 0  # padding is never accepted
    draft = sj.Draft(tokens=tokens.astype(np.int32), probs=q,
                     parents=np.array(parents, np.int32))
    law = evaluate(draft, p)
    node = _by_the_book(parents, tokens, q, p, 0.2, 0.4)
    np.testing.assert_array_equal(law.stop, np.eye(nodes)[node])
    np.testing.assert_array_equal(law.next_token, np.eye(vocab)[p.argmax(-1)])
    stops.add(node)
  assert len(stops) > 3  # else little was tested
