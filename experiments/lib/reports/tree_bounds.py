"""Bounds on all valid rules in one round, on real draft trees.

`analysis.accepted_bound` needs q at every node of a tree, and a draft has q
only at nodes with children. So the trees are drawn with one child more below
every other node, except the deepest, and the rules see the tree without it.
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

_TRACED_BYTES = 2**28  # limit for the distributions of one call
UNKNOWN = dict.fromkeys(
    name + end for name in ("bounded_tokens", "bound", "over_bound")
    for end in ("", "_low", "_high"))


@dataclasses.dataclass(frozen=True, eq=False)
class Judged:
  """The rounds of all prompts, R of them.

  Attributes:
    prompts: `[R]`, number of the prompt.
    terms: `analysis.BoundTerms` of all drafts.
    expected: `[R, rules]`, E[tau | draft] of every rule.
    height: height of the trees.
  """

  prompts: np.ndarray
  terms: Any
  expected: np.ndarray
  height: int


def extended(parents: Sequence[int]):
  """Returns a tree with one child more below all leaves but the deepest.

  Args:
    parents: a breadth-first tree, see `specjax.trees`.

  Returns:
    `(parents, nodes)`: the larger tree, breadth-first, and the numbers of the
    given nodes in it.
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
  """Decodes prompts and judges rules on the drafts.

  Args:
    decoder: a `Decoder` of the larger tree of `extended`, whose drafter draws
      the first child of a node from q of its text.
    parents: the tree that the rules see.
    nodes: its nodes in the larger tree.
    rules: verifiers.
    params: parameters of the decoder's models.
    prompts: sequences of token ids.
    new_tokens: tokens of a rollout.
    seed: seed of the rollouts.
  """
  parents, larger = np.array(parents), np.array(decoder.drafter.parents)
  # A deepest node has no child: it reads row 0, which is not used.
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
      state, stats, trace = decoder.decode_traced(params, state, rounds)
      sj.decoding.raise_if_not_finite(stats)
      active = np.asarray(stats.active[:, 0])
      part = jax.device_get(judged(jax.tree.map(lambda x: x[:, 0], trace)))
      parts.append(jax.tree.map(lambda x, active=active: x[active], part))
      found.append(np.full(active.sum(), number))
  terms, expected = jax.tree.map(lambda *x: np.concatenate(x), *parts)
  return Judged(np.concatenate(found), terms, expected,
                max(sj.trees.depths(tuple(parents))))


def columns(judged: Any, clusters: Sequence[str]):
  """Returns the bound and every rule's distance from it.

  The table of the bound is fitted on one half of the clusters and evaluated on
  the other, both ways.

  Args:
    judged: a `Judged`.
    clusters: `[prompts]` labels, see `analysis.estimate`.

  Returns:
    A dict for every rule: "bounded_tokens", its tokens per pass on these
    drafts; "bound", tokens per pass that no valid rule exceeds on them in one
    round; and "over_bound", the first over the second, less 1. The rule is at
    most that far from the best possible.
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
  tokens = lambda accepted: analysis.ratio_estimate(
      rounds + accepted, rounds, clusters=clusters)
  return [{
      **tokens(accepted).columns("bounded_tokens"),
      **tokens(bound).columns("bound"),
      **analysis.relative_gain(accepted, rounds, bound, rounds,
                               clusters=clusters).columns("over_bound"),
  } for accepted in map(total, judged.expected.T)]
