"""The block-parallel network: what it reads, and when it may be read."""

import dataclasses
import functools

from first_drafts import first_draft
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import untrained

import specjax as sj
from specjax import methods
from specjax import objectives
from specjax import testing
from specjax.drafters import Best
from specjax.drafters import Chain
from specjax.drafters import NetworkDrafter
from specjax.drafters import Parallel
from specjax.methods import stop_rules
from specjax.methods.blocks import _coupling
from specjax.methods.blocks import parallel_objective as losses

_V, _D, _K = 7, 16, 3
_IDS = (0, 2, 3, 5, 6)  # of heads that know a few tokens
_LENGTH = 14  # tokens of a row
_HEADS = methods.ParallelHeads(
    width=_D, vocab_size=_V, layers=2, heads=2, kv_heads=1, head_dim=8,
    mlp_width=8, context_length=64, block_size=_K, taps=(0, 2))
_CASES = {
    "product": dataclasses.replace(
        _HEADS, from_anchor=False, block_size=_K + 1, mask_token=2,
        windows=(_K + 1, 0), causal=(True, False), window_end="slot"),
    "plain": dataclasses.replace(
        _HEADS, markov="plain", markov_rank=4, confidence="markov"),
    "gated": dataclasses.replace(
        _HEADS, markov="gated", markov_rank=4, confidence="hidden"),
    "rnn": dataclasses.replace(
        _HEADS, markov="rnn", markov_rank=4, windows=(0, 1))}


@functools.cache
def _pair():
  return testing.tiny_pair(_V, layers=2)


@functools.cache
def _setup(name):
  """`(heads, target with features, params)`, random: no law is like another."""
  return untrained.attached(_CASES[name], _pair())


def _row(seed=0):
  return np.random.default_rng(seed).integers(
      _V, size=(1, _LENGTH)).astype(np.int32)


def _decoder(heads, shape, rule, target=None):
  return sj.Decoder(
      target=target or heads.tapped(_pair().target), verifier=rule,
      drafter=NetworkDrafter(network=Parallel(heads=heads), shape=shape))


def _block(heads, params, state):
  """The hidden states of the next block, jitted."""
  @jax.jit
  def block(params, state):
    roots = jnp.take_along_axis(state.tokens, state.lengths[:, None] - 1, 1)
    return heads.block(params["drafter"], params["target"], roots[:, 0],
                       state.drafter.memory.cache)

  return block(params, state)


def _conditional(heads, params, hidden, before):
  """The logits of blocks with known tokens."""
  own, target = params["drafter"], params["target"]
  read = heads.lattice(
      own, target, hidden, heads.logits(target, hidden), before[..., 0])
  return heads.coupled(own, target, read, before)


def _objective(name, **options):
  return objectives.ParallelObjective(
      model=_pair().target, heads=_CASES[name], **options)


@functools.cache
def _blocks(name):
  return jax.jit(_objective(name).blocks)


# Training and decoding.

@pytest.mark.slow
@pytest.mark.parametrize("name", ["product", "rnn"])
def test_training_computes_what_decoding_does(name):
  # Broken: a block in training has other keys, positions or masks than the
  # same block while decoding, after a prompt and after every round.
  heads, target, params = _setup(name)
  decoder = _decoder(heads, Chain(_K), sj.verifiers.Block(), target)
  prompts = [_row(i)[0, :n] for i, n in enumerate((2, 3, 9))] * 4
  testing.assert_state_exact(decoder, params, prompts, limits=60)
  state = decoder.prefill(params, prompts, jax.random.key(1), limits=60)
  hidden = _block(heads, params, state)
  texts = np.asarray(state.tokens)[:, :_LENGTH]
  draft = first_draft(decoder, params, prompts, limits=60)
  anchors = jnp.array([[len(prompt) - 1] for prompt in prompts])
  found = _blocks(name)(params, texts, anchors).hidden[:, 0]
  np.testing.assert_allclose(hidden, found, atol=1e-5)
  logits = _conditional(heads, params, found, draft.tokens[:, :-1])
  np.testing.assert_allclose(
      draft.probs[:, 1:], jax.nn.softmax(logits), atol=1e-5)


def test_a_block_sees_the_text_before_it_and_itself():
  # Broken: a block sees its own future, another block, or its anchor twice.
  anchors, size, length = np.array([4, 1, 7]), 2, 9
  seen = np.asarray(losses.visible(jnp.array(anchors), size, length))
  assert seen.shape == (6, length + 6)
  for query in range(6):
    block = query // size
    for key in range(length + 6):
      want = (key < anchors[block] if key < length
              else (key - length) // size == block)
      assert seen[query, key] == want


def test_what_comes_later_changes_no_block():
  # Broken: the same, by any way through the target, its features or a layer.
  name = "plain"
  _, _, params = _setup(name)
  tokens, anchors = _row(), jnp.array([[5, 9, 1, 3]])
  found = _blocks(name)(params, tokens, anchors)
  other = tokens.copy()
  other[:, 6:] = (tokens[:, 6:] + 1) % _V
  changed = _blocks(name)(params, other, anchors)
  np.testing.assert_allclose(changed.hidden[:, 0], found.hidden[:, 0],
                             atol=1e-6)
  assert np.abs(changed.hidden[:, 1] - found.hidden[:, 1]).max() > 1e-2
  moved = _blocks(name)(params, tokens, jnp.array([[5, 10, 2, 4]]))
  np.testing.assert_allclose(moved.hidden[:, 0], found.hidden[:, 0], atol=1e-6)


# Losses.

def test_labels_and_teachers_are_those_of_the_slots():
  # Broken: a slot learns its neighbour's token, or another place's law.
  for name in ("product", "plain"):
    _, _, params = _setup(name)
    tokens, anchors = _row(), jnp.array([[1, 6, 7, _LENGTH - 1 - _K]])
    found = _blocks(name)(params, tokens, anchors)
    logits = jax.jit(_pair().target)(params["target"], tokens).logits
    for j, anchor in enumerate(np.asarray(anchors)[0]):
      after = slice(anchor + 1, anchor + 1 + _K)
      np.testing.assert_array_equal(found.labels[0, j], tokens[0, after])
      np.testing.assert_array_equal(
          found.before[0, j], tokens[0, anchor:anchor + _K])
      np.testing.assert_allclose(
          found.target[0, j], logits[0, anchor:anchor + _K], atol=1e-4)


def _loss_by_hand(objective, found, confidence):
  law = lambda x: np.asarray(jax.nn.softmax(x), np.float64)
  q, p = law(found.logits), law(found.target)
  total = weights = 0.0
  for at in np.ndindex(found.labels.shape[:2]):
    right = q[at][np.arange(_K), np.asarray(found.labels[at])]
    for k in range(_K):
      if objective.position_weights == "dpace":
        weight = sum(np.prod(0.5 * right[:j + 1] + 0.5) for j in range(k, _K))
      else:
        weight = np.exp(-k / objective.position_decay)
      distance = np.abs(q[at][k] - p[at][k]).sum()
      loss = (objective.ce_share * -np.log(right[k])
              + (1 - objective.ce_share) * distance)
      if confidence is not None:
        c = 1 / (1 + np.exp(-np.float64(confidence[at][k])))
        label = 1 - distance / 2
        loss -= objective.confidence_weight * (
            label * np.log(c) + (1 - label) * np.log(1 - c))
      total += weight * loss
      weights += weight
  dpace = objective.position_weights == "dpace"
  return total / (found.labels.size if dpace else weights)


@pytest.mark.parametrize("name, options", [
    ("product", dict(ce_share=1.0, position_weights="dpace")),
    ("plain", dict(position_decay=2.0, confidence_weight=0.7))])
def test_the_loss_by_hand(name, options):
  # Broken: a weight, the share of a term, or the confidence head's label.
  heads, _, params = _setup(name)
  objective = _objective(name, anchors=4, **options)
  batch, key = {"tokens": _row()}, jax.random.key(3)
  (loss, metrics), grads = jax.jit(jax.value_and_grad(
      lambda own: objective({"drafter": own}, {"target": params["target"]},
                            batch, key), has_aux=True))(params["drafter"])
  anchors = objective.draw(key, *batch["tokens"].shape)
  found = _blocks(name)(params, batch["tokens"], anchors)
  confidence = None
  if heads.confidence != "none":
    confidence = np.asarray(heads.confidences(
        params["drafter"], found.hidden, found.before))
  np.testing.assert_allclose(
      loss, _loss_by_hand(objective, found, confidence), rtol=1e-4)
  q, p = jax.nn.softmax(found.logits), jax.nn.softmax(found.target)
  alpha = np.minimum(q, p).sum(-1)
  np.testing.assert_allclose(metrics["acceptance"], alpha.mean(), rtol=1e-4)
  np.testing.assert_allclose(
      metrics["accepted"], np.cumprod(alpha, -1).sum(-1).mean(), rtol=1e-4)
  for leaf in jax.tree.leaves(grads):
    assert np.isfinite(leaf).all() and np.abs(leaf).max() > 0


def test_heads_of_few_tokens():
  # Broken: a token has another's logit, one that cannot be drafted has a share
  # of q, its cross-entropy makes the loss infinite, or the slots after it weigh
  # as if it had been drafted.
  heads, _, params = _setup("plain")
  few = dataclasses.replace(heads, ids=_IDS)
  markov = params["drafter"]["markov"]
  own = {**params["drafter"],
         "markov": {**markov, "w2": markov["w2"][:, np.array(_IDS)]}}
  fresh = jax.eval_shape(few.init, jax.random.key(0), params["target"])
  assert jax.tree.map(jnp.shape, own) == jax.tree.map(jnp.shape, fresh)

  objective = dataclasses.replace(
      _objective("plain", anchors=4, confidence_weight=0.0,
                 position_weights="dpace"), heads=few)
  tokens, key = _row(), jax.random.key(3)
  anchors = objective.draw(key, *tokens.shape)
  every = _blocks("plain")(params, tokens, anchors).logits
  found = jax.jit(objective.blocks)({**params, "drafter": own}, tokens, anchors)
  kept = np.isin(np.arange(_V), _IDS)
  np.testing.assert_allclose(
      found.logits[..., kept], every[..., kept], rtol=1e-5, atol=1e-5)
  q, p = jax.nn.softmax(found.logits), jax.nn.softmax(found.target)
  assert (q[..., ~kept] == 0).all()

  known = kept[np.asarray(found.labels)]
  assert known.any() and not known.all()
  right = np.take_along_axis(q, np.asarray(found.labels)[..., None], -1)[..., 0]
  nats = np.where(known, -np.log(np.where(known, right, 1)), 0)
  share, reach = objective.ce_share, np.cumprod((right + 1) / 2, axis=-1)
  weights = np.cumsum(reach[..., ::-1], axis=-1)[..., ::-1]
  want = np.mean(weights * (share * nats + (1 - share) * np.abs(q - p).sum(-1)))
  loss, metrics = jax.jit(lambda own: objective(
      {"drafter": own}, {"target": params["target"]}, {"tokens": tokens}, key)
                          )(own)
  np.testing.assert_allclose(loss, want, rtol=1e-4)
  # A mean over what can be drafted: the others have no cross-entropy.
  np.testing.assert_allclose(
      [metrics[f"head_{k}/train_loss"] for k in range(1, _K + 1)],
      nats.sum((0, 1)) / known.sum((0, 1)), rtol=1e-4)


def test_weights_are_constants_of_the_gradient():
  # Broken: D-PACE makes a slot less sure in order to weigh less.
  objective = _objective("product", position_weights="dpace")
  grad = jax.grad(lambda nats: objective.weights(
      nats, jnp.ones_like(nats)).sum())(jnp.ones((2, _K)))
  assert (grad == 0).all()


def test_anchors_differ_and_their_blocks_lie_in_the_row():
  # Broken: two equal blocks see each other, or a block leaves the row.
  objective = _objective("product", anchors=100)
  drawn = np.asarray(objective.draw(jax.random.key(0), 3, _LENGTH))
  want = np.arange(1, _LENGTH - _K)
  np.testing.assert_array_equal(np.sort(drawn), np.tile(want, (3, 1)))


def test_forecasts_are_scored_where_they_are_made(monkeypatch):
  # Broken: accuracy by slot is that of other tokens.
  objective = _objective("plain", anchors=4)
  _, _, params = _setup("plain")
  monkeypatch.setattr(objectives.ParallelObjective, "blocks",
                      lambda self, *arguments: _blocks("plain")(*arguments))
  key = jax.random.key(5)
  seen = objective.score(
      params, _row(), key, lambda k, logits, positions: (positions + k, logits))
  anchors = objective.draw(key, 1, _LENGTH)
  found = _blocks("plain")(params, _row(), anchors)
  for k in range(_K):
    np.testing.assert_array_equal(seen[0][k], anchors + k)
    np.testing.assert_array_equal(seen[1][k], found.logits[:, :, k])


# The Markov and the confidence head.

def _sigmoid(x):
  return 1 / (1 + np.exp(-x))


def _bias_by_hand(kind, own, state, h, before):
  x = own["w1"][before]
  if kind == "gated":
    gate = _sigmoid(np.concatenate([h, x]) @ own["gate"]["kernel"]
                    + own["gate"]["bias"])
    x = gate * x
  elif kind == "rnn":
    z = np.concatenate([state, x, h]) @ own["joint"]["kernel"]
    gate, new, out = np.split(z + own["joint"]["bias"], 3)
    state = _sigmoid(gate) * state + (1 - _sigmoid(gate)) * np.tanh(new)
    x = np.tanh(out)
  return x @ own["w2"], state


@pytest.mark.parametrize("kind", ["plain", "gated", "rnn"])
def test_markov_heads_by_hand(kind):
  # Broken: a gate, the order of what is joined, or the recurrent state.
  heads, _, params = _setup(kind)
  own = jax.tree.map(lambda x: np.asarray(x, np.float64),
                     params["drafter"]["markov"])
  rng = np.random.default_rng(1)
  hidden = rng.normal(size=(2, _K, _D)).astype(np.float32)
  before = rng.integers(_V, size=(2, _K))
  got = _conditional(heads, params, hidden, before) - heads.logits(
      params["target"], hidden)
  for row in range(2):
    state = np.zeros(4)
    for k in range(_K):
      want, state = _bias_by_hand(
          kind, own, state, hidden[row, k], before[row, k])
      np.testing.assert_allclose(got[row, k], want, atol=1e-5)


def test_an_untrained_markov_head_changes_nothing():
  # Broken: training begins with noise on every law.
  for kind in ("plain", "gated", "rnn", "gru", "selector"):
    heads = dataclasses.replace(_HEADS, markov=kind, candidates=_V)
    target = _pair().params["target"]
    params = {"target": target, "drafter": {
        "markov": _coupling.init(jax.random.key(0), heads)}}
    hidden = jnp.ones((1, _K, _D))
    np.testing.assert_array_equal(_conditional(
        heads, params, hidden, jnp.ones((1, _K), jnp.int32)),
                                  heads.logits(target, hidden))


def test_a_chain_ends_where_the_confidence_head_says():
  # Broken: the end depends on another slot, or on the token that is dropped.
  heads, target, params = _setup("plain")
  decoder = _decoder(
      heads, Chain(_K, stop_rules.Threshold(threshold=0.5)),
      sj.verifiers.Token(), target)
  prompts = [_row(i)[0, :3 + i] for i in range(8)]
  state = decoder.prefill(params, prompts, jax.random.key(1), limits=40)
  hidden = _block(heads, params, state)
  _, _, trace = decoder.decode(params, state, rounds=1, traced=True)
  draft = jax.tree.map(lambda x: np.asarray(x[0]), trace.draft)
  own, before = params["drafter"], draft.tokens[:, :-1]
  sure = _sigmoid(np.asarray(
      heads.confidences(own, hidden, before), np.float64))
  kept = np.cumprod(sure >= 0.5, axis=-1)
  assert kept.any() and not kept.all()
  q = jax.nn.softmax(_conditional(heads, params, hidden, before))
  np.testing.assert_allclose(draft.probs[:, 1:], q * kept[..., None], atol=1e-5)


@pytest.mark.slow
def test_a_deterministic_tree_follows_the_markov_head():
  # Broken: a node's children are those of another token, slot or state.
  heads, target, params = _setup("rnn")
  decoder = _decoder(heads, Best(2, top_k=_V, num_nodes=9),
                     sj.verifiers.TargetWalk(), target)
  prompts = [_row()[0, :5]]
  draft = first_draft(decoder, params, prompts, limits=40)
  state = decoder.prefill(params, prompts, jax.random.key(1), limits=40)
  hidden = _block(heads, params, state)[:, :2]
  root = jnp.full((_V,), prompts[0][-1])
  before = jnp.stack([root, jnp.arange(_V)], axis=1)  # of every first token
  laws = np.asarray(jax.nn.softmax(_conditional(
      heads, params, jnp.tile(hidden, (_V, 1, 1)), before)))
  reach = {(x,): laws[0, 0, x] for x in range(_V)}
  reach |= {(x, y): laws[0, 0, x] * laws[x, 1, y]
            for x in range(_V) for y in range(_V)}
  paths = [()]
  for parent, token in zip(draft.parents[0, 1:], draft.tokens[0, 1:]):
    paths.append((*paths[parent], token))
  assert set(paths[1:]) == set(sorted(reach, key=reach.get)[-8:])
  assert any(len(path) == 2 for path in paths)
