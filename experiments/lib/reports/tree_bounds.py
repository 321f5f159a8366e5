"""Upper bounds for all valid verifiers in one round, on real draft trees.

`analysis.accepted_bound` requires q, the drafter's distribution, after every
node of a tree. A draft contains q only after nodes that have children. So the
drafter draws trees with one additional child below every leaf, except the
deepest leaves. The verifiers see the tree without the additional nodes.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import specjax as sj
from specjax import analysis
from specjax.interfaces import Verifier
from specjax.trees import topology

_TRACED_BYTES = 2**28  # largest size of the traced distributions of one call
UNKNOWN = dict.fromkeys(
    name + end for name in ("bounded_tokens", "bound", "over_bound")
    for end in ("", "_low", "_high"))


@dataclasses.dataclass(frozen=True, eq=False)
class Judged:
  """Results of all R rounds over all prompts.

  Attributes:
    prompts: `[R]`, index of each round's prompt.
    terms: `analysis.BoundTerms` of all drafts.
    expected: `[R, rules]`, expected accepted tokens of each verifier, given the
      draft.
    height: height of the trees.
  """

  prompts: np.ndarray
  terms: Any
  expected: np.ndarray
  height: int


def extended(parents: Sequence[int]):
  """Returns a tree with an additional child below every leaf but the deepest.

  Args:
    parents: parents of a breadth-first tree (see `specjax.trees`).

  Returns:
    `(parents, nodes)`. `parents` are the parents of the larger tree in
    breadth-first order. `nodes` are the indices of the original nodes in the
    larger tree.
  """
  depths = sj.trees.depths(parents)
  leaves = [node for node, depth in enumerate(depths)
            if node not in parents and depth < max(depths)]
  paths = [()]
  for node, parent in enumerate(parents[1:], 1):
    paths.append((*paths[parent], parents[1:node].count(parent)))
  paths += [(*paths[leaf], 0) for leaf in leaves]
  order = sorted(paths, key=lambda path: (len(path), path))
  return (sj.trees.from_choices(order[1:]),
          np.array([order.index(path) for path in paths[:len(parents)]]))


def judge(decoder: sj.Decoder, parents: Sequence[int], nodes: np.ndarray,
          rules: Sequence[Verifier], params: Any,
          prompts: Sequence[Sequence[int]], new_tokens: int, seed: int):
  """Decodes prompts and evaluates verifiers on the drafts.

  Args:
    decoder: `Decoder` with the larger tree of `extended`. Its drafter must draw
      the first child of a node from q of the node's context.
    parents: parents of the tree that the verifiers see.
    nodes: indices of the nodes of this tree in the larger tree.
    rules: verifiers to evaluate.
    params: parameters of the decoder's models.
    prompts: sequences of token ids.
    new_tokens: number of new tokens per rollout.
    seed: seed of the rollouts.

  Returns:
    A `Judged`.
  """
  parents, larger = np.array(parents), np.array(decoder.drafter.shape.parents)
  # The deepest nodes have no child. Their entry is 0, and its row is not used.
  children = [int(np.argmax(larger == node)) for node in nodes]

  def one(draft, probs):
    p, q = probs[nodes], draft.probs[np.array(children)]
    seen = draft.replace(tokens=draft.tokens[nodes], probs=draft.probs[nodes],
                         parents=jnp.array(parents, jnp.int32))
    depths = topology.depths(seen.parents)
    expected = [jnp.sum(rule.law(seen, p).stop * depths) for rule in rules]
    return analysis.bound_terms(seen, p, q), jnp.stack(expected)

  judged = jax.jit(jax.vmap(lambda trace: one(trace.draft, trace.target_probs)))
  size = 4 * 2 * len(larger) * decoder.target.vocab_size
  rounds = max(1, min(8, _TRACED_BYTES // size))
  capacity = max(map(len, prompts)) + new_tokens + len(larger)
  parts, found = [], []
  for number, prompt in enumerate(prompts):
    state = decoder.prefill(
        params, [prompt], jax.random.key(seed), request_ids=[number],
        limits=len(prompt) + new_tokens, capacity=capacity)
    while not state.done.all():
      state, stats, trace = decoder.decode(params, state, rounds, traced=True)
      sj.decoding.raise_if_not_finite(stats)
      active = np.asarray(stats.active[:, 0])
      part = jax.device_get(judged(jax.tree.map(lambda x: x[:, 0], trace)))
      parts.append(jax.tree.map(lambda x, active=active: x[active], part))
      found.append(np.full(active.sum(), number))
  terms, expected = jax.tree.map(lambda *x: np.concatenate(x), *parts)
  return Judged(np.concatenate(found), terms, expected,
                max(sj.trees.depths(tuple(parents))))


def columns(judged: Any, clusters: Sequence[str]):
  """Returns the bound and the distance of every verifier from it.

  The table of the bound is fitted on one half of the clusters and evaluated on
  the other half, and vice versa.

  Args:
    judged: result of `judge`.
    clusters: `[prompts]`, cluster label of each prompt (see
      `analysis.estimate`).

  Returns:
    A dict for every verifier. "bounded_tokens" is its number of tokens per
    target call on these drafts. "bound" is an upper bound for all valid
    verifiers on these drafts in one round. "over_bound" is the ratio of
    "bounded_tokens" to "bound", minus 1. The best possible verifier is better
    by at most this much.
  """
  places = {label: i for i, label in enumerate(dict.fromkeys(clusters))}
  half = np.array([places[label] % 2 for label in clusters])[judged.prompts]
  most = np.zeros(len(half))
  for mine in (0, 1):
    take = lambda keep: jax.tree.map(lambda x: x[keep], judged.terms)
    table = analysis.fit_bound(take(half != mine), judged.height)
    most[half == mine] = analysis.accepted_bound(take(half == mine), table)
  total = lambda x: np.bincount(judged.prompts, x, len(clusters))
  rounds, bound = total(np.ones(len(half))), total(most)
  tokens = lambda accepted: analysis.block_efficiency(
      accepted, rounds, clusters, longest=judged.height)
  return [{
      **tokens(accepted).columns("bounded_tokens"),
      **tokens(bound).columns("bound"),
      **analysis.relative_gain(
          accepted, rounds, bound, rounds, clusters=clusters,
          longest=judged.height).columns("over_bound"),
  } for accepted in map(total, judged.expected.T)]
