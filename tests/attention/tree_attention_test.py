"""A tree in one pass, or level by level, is a pass over each of its paths."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax import testing
from specjax.decoding import rounds
from specjax.trees import topology

_NODES = 20
_LENGTHS = np.array([119, 0, 60], np.int32)  # row 0 passes the 128 slots


def _random_parents(rng, deep):
  low = lambda i: max(0, i - 2) if deep else 0
  return np.array([-1] + [rng.integers(low(i), i) for i in range(1, _NODES)],
                  np.int32)


def _alone(model, params, past, texts):
  """Logits and hidden after texts `(b, tokens)` as sequences of their own."""
  sequences = np.zeros((3 * _NODES, _LENGTHS.max() + _NODES + 1), np.int32)
  for row, (b, text) in zip(sequences, texts):
    text = [*past[b, :_LENGTHS[b]], *text]
    row[:len(text)] = text
  out = jax.jit(model)(params, sequences)
  at = (np.arange(len(texts)),
        [_LENGTHS[b] + len(text) - 1 for b, text in texts])
  return out.logits[at], out.hidden[at]


# The levels cross from one bucket of slots to the next; one window ends within
# the tree, the other in the committed past.
@pytest.mark.slow
@pytest.mark.parametrize("cuts,config", [
    ((0, _NODES), dict(learned_positions=True, norm="layer", gated=False)),
    ((0, 1, 5, 6, _NODES), dict(
        windows=(3, 70), local_rope_theta=100.0, attention_softcap=4.0,
        logit_softcap=9.0, qk_norm="head", query_scale=0.5))])
def test_every_node_sees_its_own_path(cuts, config):
  # Broken: positions, masks or slots of a tree; the target then verifies a
  # node with logits that belong to another context.
  pair = testing.tiny_pair(11, layers=2, **config)
  model, params = pair.target, pair.params["target"]
  rng = np.random.default_rng(0)
  past = rng.integers(11, size=(3, _LENGTHS.max())).astype(np.int32)
  nodes = rng.integers(11, size=(3, _NODES)).astype(np.int32)
  parents = np.stack([_random_parents(rng, deep) for deep in (0, 1, 0)])
  ancestors = np.asarray(jax.vmap(topology.ancestors)(parents))
  depths = jax.vmap(topology.depths)(parents)
  columns = past.shape[1]
  # The path to node 17 of each row is committed, or a part of it.
  path = np.zeros((3, _NODES), np.int32)
  for b in range(3):
    on_path = np.flatnonzero(ancestors[b, 17])
    path[b, :len(on_path)] = on_path
  count = np.array([ancestors[b, 17].sum() - (b == 2) for b in range(3)])

  @jax.jit
  def run(params):
    cache = model.init_cache(params, 3, columns + _NODES + 60)
    causal = jnp.tile(jnp.tril(jnp.ones((columns, columns), bool)), (3, 1, 1))
    cache = model(params, past, jnp.tile(jnp.arange(columns), (3, 1)), causal,
                  cache).cache.rollback(_LENGTHS)
    outs = []
    for start, end in zip(cuts, cuts[1:]):
      out = model(params, nodes[:, start:end], depths[:, start:end],
                  ancestors[:, start:end, :end], cache)
      cache = out.cache
      outs.append(out.replace(cache=None))
    behind = model(params, nodes[:, :1], jnp.zeros((3, 1), jnp.int32),
                   jnp.ones((3, 1, 1), bool), cache.commit(path, count))
    return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *outs), behind

  out, behind = run(params)
  texts = [(b, nodes[b, np.flatnonzero(ancestors[b, i])])
           for b in range(3) for i in range(_NODES)]
  logits, hidden = _alone(model, params, past, texts)
  for got, want in ((out.logits, logits), (out.hidden, hidden)):
    np.testing.assert_allclose(np.reshape(got, want.shape), want, rtol=1e-4,
                               atol=1e-4)
  # Slots of the path were not neighbours, and they are now.
  assert (np.diff(path[:, :2]) > 1).any()
  logits, _ = _alone(model, params, past, [
      (b, [*nodes[b, path[b, :count[b]]], nodes[b, 0]]) for b in range(3)])
  np.testing.assert_allclose(behind.logits[:, 0], logits, rtol=1e-4, atol=1e-4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _HiddenTruth(testing.OracleDrafter):
  """The right continuation, somewhere in a random tree of other tokens.

  Every row and round has parents of its own.
  """

  provides = ("iid", "conditional", "autoregressive", "deterministic")
  num_uniforms = None  # it takes keys

  def propose(self, params, keys, state):
    def tree(key, root, truth):
      keys = jax.random.split(key, 3)
      parents = jnp.floor(jnp.arange(self.num_nodes) * jax.random.uniform(
          keys[0], (self.num_nodes,))).astype(jnp.int32).at[0].set(-1)
      right = topology.ancestors(parents)[jax.random.randint(
          keys[1], (), 0, self.num_nodes)]
      tokens = truth[topology.depths(parents) - 1]
      other = jax.random.randint(keys[2], tokens.shape, 1, self.vocab_size)
      tokens = jnp.where(right, tokens, (tokens + other) % self.vocab_size)
      return sj.Draft.tree(root, parents, tokens[1:], jax.nn.one_hot(
          tokens[1:], self.vocab_size))

    positions = state.lengths[:, None] + jnp.arange(self.num_nodes)
    truth = jnp.take_along_axis(params["drafter"], positions, axis=1)
    return jax.vmap(tree)(keys, rounds.roots(state), truth), state.drafter


@pytest.mark.slow
def test_trees_of_the_moment_in_the_loop():
  # Broken: anywhere in the loop a row uses another tree than its own, or the
  # cache keeps the accepted path in the wrong order.
  pair = testing.tiny_pair(16, layers=2, seed=1)
  lengths, new = (1, 2, 3, 17, 33, 64, 100, 120), 40
  rng = np.random.default_rng(0)
  prompts = [rng.integers(16, size=n) for n in lengths]
  greedy = sj.LogitsTransform(temperature=0.0)
  plain = sj.Decoder(
      target=pair.target, drafter=sj.drafters.Empty(), transform=greedy,
      verifier=sj.verifiers.Token())
  truth = plain.generate(pair.params, prompts, jax.random.key(0),
                         max_new_tokens=new).tokens
  text = np.zeros((8, max(lengths) + new + 13), np.int32)
  for row, tokens in zip(text, truth):
    row[:len(tokens)] = tokens
  params = {"target": pair.params["target"], "drafter": jnp.asarray(text)}

  decoder = sj.Decoder(
      target=pair.target, drafter=_HiddenTruth(gamma=11), transform=greedy,
      verifier=sj.verifiers.Traversal(),
      observers=(sj.verifiers.Recursive(), sj.verifiers.TargetWalk()))
  state = decoder.prefill(params, prompts, jax.random.key(0),
                          limits=np.array(lengths) + new)
  state, stats, traces = decoder.decode(params, state, rounds=new, traced=True)
  for row, want in zip(state.tokens, truth):
    np.testing.assert_array_equal(row[:len(want)], want)
  path = np.asarray(traces.verdict.path)
  accepted = np.asarray(traces.verdict.num_accepted)
  gaps = [np.diff(p[:n + 1]).max() for p, n in zip(
      path.reshape(-1, 12), accepted.reshape(-1)) if n > 1]
  assert np.mean(np.array(gaps) > 1) > 0.5  # few paths lie together
  assert 0.5 < np.sum(stats.accepted) / np.sum(stats.active) < 4
  # Where nothing is left to chance every rule accepts the same.
  active = np.asarray(stats.active)
  for expected in np.moveaxis(np.asarray(stats.expected), -1, 0):
    np.testing.assert_allclose(expected[active], accepted[active], atol=1e-5)
