"""Transitions between the slots of a block: DFlash 2, LiLiCorr and Domino.

Their distributions q are compared with Markov chains that NumPy computes from
the hidden states of the slots. golden/drafters has the authors' networks.
"""

import dataclasses
import functools
import itertools

from first_drafts import first_draft
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import untrained

import specjax as sj
from specjax import exact
from specjax import methods
from specjax import objectives
from specjax import testing
from specjax.drafters import Chain
from specjax.drafters import NetworkDrafter
from specjax.drafters import Parallel

_V, _K, _N = 4, 4, 3  # tokens, slots and candidates
_PROMPT = [1, 3, 0]
_HEADS = methods.ParallelHeads(
    width=16, vocab_size=_V, layers=1, heads=2, kv_heads=1, head_dim=8,
    mlp_width=8, context_length=64, block_size=_K + 1, taps=(0, 2),
    from_anchor=False, markov_rank=4, candidates=_N, markov_width=6)
_CASES = {
    "selector": dataclasses.replace(
        _HEADS, markov="selector", conv_kernel=2, conv_group=4),
    "lilicorr": dataclasses.replace(
        _HEADS, markov="lilicorr", lattice_heads=2, lattice_mlp_width=8),
    "gru": dataclasses.replace(
        _HEADS, markov="gru", fusion="layers", causal=(True,))}


@functools.cache
def _pair():
  return testing.tiny_pair(_V, layers=2)


@functools.cache
def _setup(name):
  """`(heads, target with features, params)`, random."""
  return untrained.attached(_CASES[name], _pair())


def _softmax(x):
  x = np.exp(x - x.max(-1, keepdims=True))
  return x / x.sum(-1, keepdims=True)


def _sigmoid(x):
  return 1 / (1 + np.exp(-x))


def _gru(own, embedding, hidden, path):
  """Domino's correction after the tokens of a path, the anchor first."""
  state = np.zeros(6)
  for token in path:
    new = np.split(embedding[token] @ own["entry"]["kernel"], 3)
    old = np.split(state @ own["carry"]["kernel"], 3)
    reset, keep = (_sigmoid(a + b) for a, b in zip(new[:2], old[:2]))
    state = keep * state + (1 - keep) * np.tanh(new[2] + reset * old[2])
  x = np.concatenate([hidden, state]) @ own["joint"]["kernel"]
  return (x * _sigmoid(x)) @ own["w2"]


def _law(heads, params, read, base, path):
  """q after a path, the anchor first, from what the slots hold."""
  own, k = params["drafter"]["markov"], len(path) - 1
  hidden = read["hidden"][k]
  if heads.markov == "gru":
    # The first slot is free.
    bias = _gru(own, params["target"]["embedding"], hidden, path) if k else 0
    return _softmax(base[k] + bias)
  best = np.argsort(-base[k])[:_N]
  if heads.markov == "selector":
    scores = base[k, best] + own["w2"][best] @ (
        own["w1"][path[-1]] * (hidden @ own["hidden"]["kernel"]))
  else:
    row = [i for i, token in enumerate(np.argsort(-base[k - 1])[:_N])
           if token == path[-1]] if k else [0]
    scores = read["logits"][k, row[0]] if row else np.zeros(_N)
  q = np.zeros(_V)
  q[best] = _softmax(scores)
  return q


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("name", _CASES)
def test_drafts_follow_a_chain_that_is_known_exactly(name):
  # Broken: q is not the distribution of the drafted tokens: another slot,
  # predecessor or state, or a token that is no candidate has a share of it. Or
  # a rule that is given these q does not restore the target's distribution.
  heads, target, params = _setup(name)
  decoder = sj.Decoder(
      target=target, verifier=sj.verifiers.Block(), drafter=NetworkDrafter(
          network=Parallel(heads=heads), shape=Chain(_K)))
  prompts = [_PROMPT] * 64
  with jax.enable_x64(True):
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    draft = first_draft(decoder, params, prompts)
    state = decoder.prefill(params, prompts[:1], jax.random.key(1), limits=48)

    @jax.jit
    def slots(params, memory):
      own, of_target = params["drafter"], params["target"]
      anchor = jnp.array(_PROMPT[-1:])
      hidden = heads.block(own, of_target, anchor, memory.cache)
      base = heads.logits(of_target, hidden)
      read = heads.lattice(own, of_target, hidden, base, anchor, memory.last)
      return jax.tree.map(lambda x: x[0], (read, base))

    read, base = jax.tree.map(np.asarray, slots(params, state.drafter.memory))
  assert draft.probs.dtype == np.float64
  tables = [np.array([
      _law(heads, params, read, base, (_PROMPT[-1], *path))
      for path in itertools.product(range(_V), repeat=k)]) for k in range(_K)]
  for tokens, probs in zip(draft.tokens[:, 1:], draft.probs[:, 1:]):
    for k in range(_K):
      at = sum(x * _V**(k - 1 - i) for i, x in enumerate(tokens[:k]))
      np.testing.assert_allclose(probs[k], tables[k][at], atol=1e-12)
  assert len({tuple(tokens) for tokens in draft.tokens}) > 8

  # The probability of a path is the product of the rows on it.
  total = np.ones(1)
  for table in tables:
    if heads.is_lattice:
      assert ((table > 0).sum(-1) == _N).all()
    total = (total[:, None] * table).reshape(-1)
  np.testing.assert_allclose(total.sum(), 1, atol=1e-12)
  p = exact.random_pair("dense", _V, _K + 1, seed=0).p
  after = np.full((_V**_K, _V), 1 / _V)  # of the bonus token, never drafted
  found = exact.enumerate_chains(
      sj.verifiers.Block(), exact.Pair(list(p), [*tables, after]), gamma=_K)
  assert found.total_variation < 1e-12 and not found.defects


def test_a_lattice_is_no_wider_than_its_candidates():
  # Broken: a tree drafts tokens with probability 0, or a best-first tree asks
  # for more children than there are.
  heads = _CASES["selector"]
  assert sj.strategies.ddtree(heads, 6).drafter.shape.top_k == _N
  wide = NetworkDrafter(network=Parallel(heads=heads), shape=sj.drafters.Tree(
      (-1,) + (0,) * (_N + 1)))
  with pytest.raises(ValueError, match=f"{_N + 1} children"):
    sj.Decoder(target=heads.tapped(_pair().target), drafter=wide,
               verifier=sj.verifiers.Traversal())


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("name", _CASES)
def test_the_loss_by_hand(name):
  # Broken: the share of the logits without the transition, a true token that is
  # no candidate makes the loss infinite or has no gradient, or LiLiCorr reads
  # another token's features.
  heads, _, params = _setup(name)
  objective = objectives.ParallelObjective(
      model=_pair().target, heads=heads, anchors=4, base_share=0.3)
  tokens = np.random.default_rng(0).integers(_V, size=(1, 14)).astype(np.int32)
  key = jax.random.key(3)
  anchors = objective.draw(key, *tokens.shape)
  found = jax.jit(objective.blocks)(params, tokens, anchors)
  (loss, _), grads = jax.jit(jax.value_and_grad(
      lambda own: objective({"drafter": own}, {"target": params["target"]},
                            {"tokens": tokens}, key), has_aux=True))(
                                params["drafter"])
  p, q, base, taught = (_softmax(np.asarray(x, np.float64)) for x in (
      found.target, found.logits, found.base, found.taught))
  total = weights = known = 0.0
  for at in np.ndindex(found.labels.shape):
    label, weight = int(found.labels[at]), np.exp(-at[-1] / 4)
    is_known = q[at][label] > 0
    if name == "selector" and not is_known:
      # The label takes the place of the least likely candidate.
      least = np.argsort(-base[at])[_N - 1]
      assert taught[at][label] > 0 and taught[at][least] == 0
      is_known = True
    known += is_known
    for share, law, right in (
        (0.7, q, taught[at][label] if is_known else 1),
        (0.3, base, base[at][label])):
      total += weight * share * (
          0.1 * -np.log(right) + 0.9 * np.abs(law[at] - p[at]).sum())
    weights += weight
  if name == "lilicorr":
    assert known < found.labels.size
  np.testing.assert_allclose(loss, total / weights, rtol=1e-4)
  for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
    assert np.isfinite(leaf).all() and np.abs(leaf).max() > 0, path


@pytest.mark.slow
def test_training_drafts_what_decoding_does():
  # Broken: LiLiCorr is trained on features of another token than it reads in
  # decoding, or the convolutions of DFlash 2 cross the edge of a block.
  for name in ("lilicorr", "selector"):
    heads, target, params = _setup(name)
    decoder = sj.Decoder(
        target=target, verifier=sj.verifiers.Block(), drafter=NetworkDrafter(
            network=Parallel(heads=heads), shape=Chain(_K)))
    rng = np.random.default_rng(1)
    prompts = [rng.integers(_V, size=n) for n in (2, 5, 8)]
    draft = first_draft(decoder, params, prompts)
    rows = np.zeros((3, 14), np.int32)
    for row, prompt, tokens in zip(rows, prompts, draft.tokens):
      row[:len(prompt)] = prompt
      row[len(prompt):len(prompt) + _K] = tokens[1:]
    anchors = jnp.array([[len(prompt) - 1, 9] for prompt in prompts])
    found = jax.jit(objectives.ParallelObjective(
        model=_pair().target, heads=heads).blocks)(params, rows, anchors)
    np.testing.assert_allclose(
        draft.probs[:, 1:], jax.nn.softmax(found.logits[:, 0]), atol=1e-5)


@pytest.mark.parametrize("fields, argument", [
    (dict(markov="lilicorr", lattice_heads=4), "lattice_heads is 4"),
    (dict(markov="lilicorr", lattice_heads=2, fusion="layers"), "fusion is"),
    (dict(markov="selector", candidates=_V + 1), "candidates is 5"),
    (dict(conv_kernel=2, conv_group=5), "conv_group is 5"),
    (dict(conv_kernel=2, conv_group=4, post_norm=True), "conv_kernel is 2"),
    (dict(markov="gru", confidence="markov"), "confidence is 'markov'"),
    (dict(fusion="each"), "fusion is 'each'")])
def test_fields_that_do_not_fit(fields, argument):
  with pytest.raises(ValueError, match=argument):
    dataclasses.replace(_HEADS, **fields)
