"""What drafters of trees propose: packed paths, children, dynamic trees."""

import dataclasses
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax import constraints
from specjax import testing
from specjax.decoding import constraining
from specjax.drafters import Best
from specjax.drafters import LanguageModel
from specjax.drafters import Network
from specjax.drafters import NetworkDrafter
from specjax.drafters import Sampled
from specjax.drafters import Tree
from specjax.exact import random_pair
from specjax.methods import _trees
from specjax.trees import topology
from specjax.verifiers import Recursive
from specjax.verifiers import TargetWalk
from specjax.verifiers import Traversal

_PROPOSALS = ("iid", "without_replacement", "top_k", "hybrid")


def _total_variation(rule, count, length, models, drop=False):
  """Of the text of one round from that of p, over all drafts of `Paths`."""
  size = 3
  pairs = [random_pair("dense", size, length + 1, m) for m in range(models)]
  p, q = pairs[0].p, [pair.q for pair in pairs]
  number = lambda text: int(np.ravel_multi_index(
      text, (size,) * len(text))) if len(text) else 0
  drafts = np.array(list(itertools.product(range(size), repeat=count * length)),
                    np.int32).reshape(-1, count, length)
  with jax.enable_x64(True):
    parents = np.asarray(jax.vmap(topology.prefix_tree)(drafts))
  weights, q_rows, p_rows = [], [], []
  for paths in drafts:
    row = lambda k, d, paths=paths: q[k % models][d][number(paths[k, :d])]
    levels = list(itertools.product(range(length), range(count)))
    q_rows.append([row(k, d) for d, k in levels])
    weights.append(np.prod([row(k, d)[paths[k, d]] for d, k in levels]))
    p_rows.append([p[0][0]] + [p[d + 1][number(paths[k, :d + 1])]
                               for d, k in levels])
  q_rows = np.array(q_rows)
  tokens = drafts.swapaxes(1, 2).reshape(len(drafts), -1)
  if drop:
    copy = [[any(row[a] == row[i] and t[a - 1] == t[i - 1] for a in range(1, i))
             for i in range(1, len(row))] for row, t in zip(parents, tokens)]
    q_rows[np.array(copy)] = 0
  with jax.enable_x64(True):
    law = jax.jit(jax.vmap(lambda parents, tokens, q, p: rule.law(
        sj.Draft.tree(0, parents, tokens, q), p)))(
            parents, tokens, q_rows, np.array(p_rows))
  mass = (np.array(weights)[:, None, None] * np.asarray(law.stop)[..., None]
          * np.asarray(law.next_token))

  found = [np.zeros(size**d) for d in range(length + 2)]
  for paths, of_draft in zip(drafts, mass):
    for i, of_node in enumerate(of_draft):
      d, k = ((i - 1) // count + 1, (i - 1) % count) if i else (0, 0)
      start = number(paths[k, :d]) * size
      found[d + 1][start:start + size] += of_node
  exact = np.ones(1)
  for d in range(length + 1):
    found[d + 1] += (found[d][:, None] * p[d]).reshape(-1)
    exact = (exact[:, None] * p[d]).reshape(-1)
  return np.abs(found[-1] - exact).sum() / 2


@pytest.mark.parametrize("count,length,models", [(3, 2, 1), (3, 2, 2),
                                                 (2, 3, 2)])
@pytest.mark.parametrize("rule", [Recursive(), Traversal(), TargetWalk()])
def test_packed_paths_are_exact(rule, count, length, models):
  # Broken: paths of one or several models, packed, are no honest draft.
  assert _total_variation(rule, count, length, models) < 1e-12


@pytest.mark.parametrize("rule", [Recursive(), Traversal()])
def test_copies_cannot_be_dropped(rule):
  # Broken: the test above cannot see the bias of merged copies.
  assert _total_variation(rule, 3, 2, 1, drop=True) > 1e-3


_COUNTS = (3, 1, 4)


@pytest.mark.parametrize("transform", [
    sj.LogitsTransform(), sj.LogitsTransform(temperature=0.0),
    sj.LogitsTransform(top_p=0.5, banned=(0, 4))])
@pytest.mark.parametrize("proposal", _PROPOSALS)
def test_children(proposal, transform):
  # Broken: siblings repeat, a row is not the law of its token, or the most
  # useful guesses are missing where the law is exhausted.
  logits = 3 * jax.random.normal(jax.random.key(1), (3, 8))
  uniforms = jax.random.uniform(jax.random.key(2), (sum(_COUNTS), 2))
  draw = jax.jit(getattr(_trees, proposal), static_argnums=(1, 3))
  tokens, probs = map(np.asarray, draw(logits, _COUNTS, uniforms, transform))
  q = np.asarray(transform(logits))
  ranked = np.array(logits)
  ranked[:, list(transform.banned)] = -np.inf
  ranked = np.argsort(-ranked, axis=-1)
  assert tokens.shape == (8,) and probs.shape == (8, 8)
  np.testing.assert_allclose(probs.sum(-1), 1, atol=1e-6)
  assert (probs[np.arange(8), tokens] > 0).all()
  if transform.banned and proposal != "iid":
    assert not np.isin(tokens, transform.banned).any()
  for node, (end, count) in enumerate(zip(np.cumsum(_COUNTS), _COUNTS)):
    mine, rows = tokens[end - count:end], probs[end - count:end]
    if proposal == "iid":
      np.testing.assert_array_equal(rows, np.tile(q[node], (count, 1)))
      continue
    assert len(set(mine)) == count
    likeliest = ranked[node, :count]
    if proposal == "top_k" or transform.temperature == 0:
      assert (rows == np.eye(8)[mine]).all()
      assert sorted(mine) == sorted(likeliest)
    elif proposal == "without_replacement":
      for rank, row in enumerate(rows):
        left = q[node].copy()
        left[mine[:rank]] = 0
        if left.sum() > 0:
          np.testing.assert_allclose(row, left / left.sum(), atol=1e-6)
        else:
          unseen = [t for t in ranked[node] if t not in mine[:rank]]
          assert (row == np.eye(8)[unseen[0]]).all()
    else:
      np.testing.assert_array_equal(mine[1:], likeliest[:-1])
      assert (rows[1:] == np.eye(8)[mine[1:]]).all()
      left = q[node].copy()
      left[likeliest[:-1]] = 0
      want = left / left.sum() if left.sum() > 0 else np.eye(8)[likeliest[-1]]
      np.testing.assert_allclose(rows[0], want, atol=1e-6)


@pytest.mark.parametrize("proposal", _PROPOSALS)
def test_children_of_broken_numbers_are_no_laws(proposal):
  # Broken: certainty hides that the drafter's logits were NaN.
  logits = jnp.zeros((3, 8)).at[1, 5].set(jnp.nan)
  draw = jax.jit(getattr(_trees, proposal), static_argnums=(1, 3))
  _, probs = draw(
      logits, _COUNTS, jax.random.uniform(jax.random.key(0), (8, 2)),
      sj.LogitsTransform())
  finite = np.isfinite(probs).all(-1)
  assert finite[:3].all() and not finite[3] and finite[4:].all()


@dataclasses.dataclass(frozen=True)
class _Levels(Network):
  """Row k of the parameters has the logits of all nodes of level k."""

  is_shared: bool

  def step(self, params, tokens, depths, ancestors, above, carry):
    level = jnp.tile(params[carry], (len(tokens), 1, 1))
    return level if self.is_shared else jnp.tile(
        level, (1, tokens.shape[1], 1)), carry + 1


@pytest.mark.default_cases(3)
@pytest.mark.parametrize("shape", [
    *(Tree((-1, 0, 0, 1, 1, 1, 2, 3, 3, 4), name) for name in _PROPOSALS),
    Best(3, top_k=2, num_nodes=8), Sampled(3, expanded=2, children=2)], ids=str)
@pytest.mark.parametrize(
    "rules", [(), (constraints.NoRepeatNGram(size=1),)], ids=["free", "ruled"])
def test_nodes_of_a_level_may_share_their_logits(shape, rules):
  # Broken: nodes that share logits have the children of another node, or what
  # a constraint allows after another path.
  logits = 3 * jax.random.normal(jax.random.key(1), (3, 8))
  uniforms = jax.random.uniform(jax.random.key(2), (2, shape.num_uniforms))
  tokens, lengths = jnp.tile(jnp.arange(12), (2, 1)), jnp.array([2, 1])
  transform = sj.LogitsTransform(constraints=rules)
  state = types.SimpleNamespace(
      tokens=tokens, lengths=lengths, temperature=jnp.ones(2),
      constraints=constraining.start(
          rules, tokens, lengths, lengths + 9, jnp.full((2, 1), -1), 8))

  def drafted(network):
    first = jnp.tile(logits[0], (2, 1)),
    return jax.jit(lambda: shape.grow(
        network, logits, first, 1, uniforms, state, transform, (None, None))[0]
                   )()

  shared, repeated = drafted(_Levels(True)), drafted(_Levels(False))
  jax.tree.map(np.testing.assert_array_equal, shared, repeated)
  if rules and not shape.iid:  # whose siblings may be equal
    assert all(len({*path}) == len(path) for row in range(2)
               for path in _drafted_paths(shared, row))


def _eagle_tree(probs, root, depth, top_k, nodes):
  """{path: value} of the N - 1 best candidates, in plain Python.

  Rounding could order paths whose values are equal; the test has none.
  """
  found, frontier = {}, {(): 1.0}
  for _ in range(depth):
    level = {}
    for path, value in frontier.items():
      row = probs[path[-1] if path else root]
      for token in np.argsort(-row, kind="stable")[:top_k]:
        level[(*path, int(token))] = value * row[token]
    found |= level
    best = sorted(level, key=level.get, reverse=True)[:top_k]
    frontier = {path: level[path] for path in best}
  best = sorted(found, key=found.get, reverse=True)[:nodes - 1]
  return {path: found[path] for path in best}


def _dynamic_drafts(table):
  model = testing.MarkovModel(8)
  decoder = sj.Decoder(
      target=model, verifier=TargetWalk(),
      drafter=NetworkDrafter(
          network=LanguageModel(model=model),
          shape=Best(depth=4, top_k=3, num_nodes=14)))
  params = {"target": jnp.zeros((8, 8)), "drafter": table}
  state = decoder.prefill(params, [[t] for t in range(8)], jax.random.key(0))
  _, stats, traces = decoder.decode(params, state, rounds=1, traced=True)
  return stats, jax.tree.map(lambda x: np.asarray(x[0]), traces.draft)


def _drafted_paths(draft, row):
  paths = [()]
  for token, parent in zip(draft.tokens[row][1:], draft.parents[row][1:]):
    assert 0 <= parent < len(paths)
    paths.append((*paths[parent], int(token)))
  assert len(set(paths)) == len(paths)
  return set(paths[1:])


def test_dynamic_tree_is_eagle_2():
  # Broken: the tree is not that of the best candidates.
  table = 2 * jax.random.normal(jax.random.key(0), (8, 8))
  probs = np.asarray(jax.nn.softmax(table), np.float64)
  _, draft = _dynamic_drafts(table)
  for root in range(8):
    want = _eagle_tree(probs, root, depth=4, top_k=3, nodes=14)
    assert _drafted_paths(draft, root) == set(want)
    assert (draft.probs[root][1:] == np.eye(8)[draft.tokens[root][1:]]).all()


def test_dynamic_tree_is_connected_where_values_are_equal():
  # Broken: a node is drafted without its parent, where the model is certain
  # or rules tokens out.
  for certain in (30.0, 200.0, jnp.inf):
    table = jnp.where(jnp.roll(jnp.eye(8), 1, axis=1) > 0,
                      jnp.float32(0), jnp.float32(-certain))
    stats, draft = _dynamic_drafts(table)
    assert stats.draft_finite.all()
    for root in range(8):
      paths = _drafted_paths(draft, root)
      chain = tuple((root + d) % 8 for d in range(1, 5))
      assert {chain[:d] for d in range(1, 5)} <= paths


def test_dynamic_tree_of_broken_numbers_is_reported():
  # Broken: certainty hides that the drafter's logits were NaN.
  stats, _ = _dynamic_drafts(jnp.zeros((8, 8)).at[3].set(jnp.nan))
  assert not stats.draft_finite[0, 3]
