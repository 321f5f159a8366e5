"""Accumulated gradients of every objective are those of the complete batch."""

import dataclasses

from contributed import deep
from contributed import pair
from contributed import VOCAB
import contributed_heads as heads
from contributions import OBJECTIVES
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specjax import objectives
from specjax.training import loop

_ROWS, _SIZE = 4, 12
_SGD = optax.sgd(1.0)  # the step of the parameters is the gradient


def _narrow_eagle(model):
  narrow = dataclasses.replace(heads.EAGLE_3, ids=(0, 2, 3))
  return objectives.Eagle3Objective(
      model=model, heads=narrow, normalizer="mask"), narrow.init, {}


_ALL = {
    **OBJECTIVES,
    "one sampled head": lambda model: (objectives.BlockwiseObjective(
        model=model, heads=heads.BLOCKWISE), heads.BLOCKWISE.init, {}),
    "D-PACE": lambda model: (objectives.ParallelObjective(
        model=model, heads=heads.PARALLEL, anchors=4,
        position_weights="dpace"), heads.PARALLEL.init, {}),
    "EAGLE-3 divided by the mask": _narrow_eagle,
    "a share of the tokens": lambda model: (objectives.Distillation(
        model=pair().drafter, target=model, keep=0.4),
        lambda key, target: jax.tree.map(
            lambda x: 0.9 * x, pair().params["drafter"]), {}),
}


def _mask(*spans):
  """Returns weights `[4, 12]`, positive in a span of each row."""
  weights = np.zeros((_ROWS, _SIZE), np.float32)
  for row, (start, end) in zip(weights, spans, strict=True):
    row[start:end] = 1 + np.arange(end - start) % 2
  return weights


_WEIGHTS = {
    "none": np.ones((_ROWS, _SIZE), np.float32),
    # An answer begins before the row, a row has no answer, and others differ.
    "answers": _mask((0, 3), (0, 0), (2, 11), (8, 12))}


def _made(name):
  """An objective, its parameters by kind, and what a batch has besides tokens.
  """
  model, target = deep() if name in (
      "KangarooObjective", "LayerSkipObjective") else (
      pair().target, pair().params["target"])
  objective, init, more = _ALL[name](model)
  trainable, frozen = {"target": target}, {}
  if init is not None:
    own = "stop" if "stop" in objective.needs else "drafter"
    frozen = dict.fromkeys(("drafter", "reference"), pair().params["drafter"])
    frozen["target"] = target
    trainable = {own: init(jax.random.key(0), target)}
    frozen.pop(own, None)
  return objective, trainable, frozen, more


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name in ("NextToken", "MedusaObjective")
                 else pytest.mark.slow) for name in _ALL])
def test_parts_have_the_gradient_of_the_batch(name):
  # Broken: a head divides by the weights of its part, a row draws other random
  # numbers in a part, or a metric is that of one part.
  objective, trainable, frozen, more = _made(name)
  rng = np.random.default_rng(1)
  tokens = rng.integers(VOCAB, size=(_ROWS, _SIZE + 1)).astype(np.int32)
  batch = {"tokens": tokens, "progress": np.float32(0.5), **{
      key: np.concatenate([x, x[::-1]]) for key, x in more.items()}}

  def step(weights, accumulate):
    if name == "StoredLaws":
      weights = np.pad(weights, ((0, 0), (1, 0)))
    state = loop.TrainState(
        step=jnp.zeros((), jnp.int32), opt_state=_SGD.init(trainable),
        params=jax.tree.map(jnp.copy, trainable))
    state, aux = loop.train_step(
        state, frozen, {**batch, "weights": weights}, jax.random.key(2),
        objective=objective, optimizer=_SGD, accumulate=accumulate,
        dtype=jnp.float32)
    return jax.tree.map(np.subtract, state.params, trainable), aux

  for weights in _WEIGHTS.values():
    (want, loss), (got, again) = (step(weights, n) for n in (1, 4))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(
        y, x, rtol=1e-5, atol=1e-6), loss, again)
    norm = lambda tree: np.sqrt(sum(
        np.sum(np.square(x)) for x in jax.tree.leaves(tree)))
    error = norm(jax.tree.map(np.subtract, got, want)) / norm(want)
    assert 0 < norm(want) and error < 1e-6


# Their random draws depend on the length of a row.
_DRAWN = {"PaSSObjective", "ParallelObjective", "D-PACE", "Eagle1Objective",
          "PEagleObjective", "Acceptance", "AcceptedLength"}


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("name", sorted({*_ALL} - {"StoredLaws"}))
def test_padding_has_no_effect(name):
  # Broken: a conversation that is padded to the length of a row has another
  # gradient, or one that depends on the padding.
  objective, trainable, frozen, _ = _made(name)
  tokens = np.random.default_rng(1).integers(
      VOCAB, size=(_ROWS, _SIZE + 1)).astype(np.int32)
  weights = _mask((2, 8), (0, 8), (5, 8), (3, 7))
  padded = [np.where(np.arange(_SIZE + 1) > 8, pad, tokens) for pad in (0, 1)]
  gradient = jax.jit(lambda tokens, weights: jax.value_and_grad(
      lambda trainable: objective(trainable, frozen, {
          "tokens": tokens, "weights": weights, "progress": jnp.float32(0.5)},
          jax.random.key(2))[0])(trainable))
  want, again = (gradient(x, weights) for x in padded)
  jax.tree.map(np.testing.assert_array_equal, want, again)
  assert max(np.abs(x).max() for x in jax.tree.leaves(want[1])) > 0
  if name not in _DRAWN:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(
        x, y, rtol=1e-4, atol=1e-6), want, gradient(
            tokens[:, :9], weights[:, :8]))


def test_blocks_are_drawn_where_the_mask_is():
  # Broken: with 20 % answer tokens, 19 % of the drawn blocks have a token that
  # is trained.
  model = pair().target
  weights = np.zeros((3, 60), np.float32)
  weights[0, 20:30], weights[1, 50:52] = 1, 1  # and a row without answers
  parallel = objectives.ParallelObjective(
      model=model, heads=heads.PARALLEL, anchors=4)
  count = heads.PARALLEL.num_forecasts
  anchors = np.asarray(parallel.draw(
      jax.random.key(0), 3, 61, jnp.asarray(weights)))
  for row, drawn in zip(weights[:2], anchors):
    assert len(set(drawn.tolist())) == 4
    useful = sum(row[a:a + count].any() for a in drawn)
    most = sum(row[a:a + count].any() for a in range(1, 61 - count))
    assert useful == min(4, most)
  np.testing.assert_array_equal(  # without a mask as before
      parallel.draw(jax.random.key(0), 3, 61),
      parallel.draw(jax.random.key(0), 3, 61, jnp.ones((3, 60))))
  lookahead = OBJECTIVES["PaSSObjective"](model)[0]
  cuts = np.asarray(lookahead._cuts(jax.random.key(0), jnp.asarray(weights)))
  count = lookahead.embeddings.count
  for row, drawn in zip(weights[:2], cuts):
    assert all(row[m + 1:m + 1 + count].any() for m in drawn)
