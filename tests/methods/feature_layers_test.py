"""Layers on the target's features: what they compute, keep and refuse."""

import dataclasses
import functools

from feature_layers import disturbed
from feature_layers import EAGLE_3
from feature_layers import heads_of
from feature_layers import jit
from feature_layers import pair
from feature_layers import VOCAB
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax import methods
from specjax.methods import Eagle1Heads
from specjax.methods import Eagle3Heads
from specjax.methods import MTPHeads
from specjax.methods import ParallelLayers
from specjax.models import Transformer


def _norm(x, own):
  return x / np.sqrt(np.mean(x**2) + 1e-5) * own["scale"]


def _by_hand(heads, params, given, taps, token):
  """`(hidden, read)` of one position alone, which attends to itself."""
  g, parts = taps, np.split(taps, len(heads.taps))
  if heads.entry_norm == "each":
    g = np.concatenate([_norm(part, params[f"entry_norm_{i}"])
                        for i, part in enumerate(parts)])
  elif heads.entry_norm == "all":
    g = _norm(taps, params["entry_norm"])
  if heads.entry:
    g = g @ params["entry"]["kernel"]
  own, x = params["module_0"], g
  e = (params if heads.own_embedding else given)["embedding"][token]
  if heads.fusion_norms:
    e, g = _norm(e, own["embedding_norm"]), _norm(g, own["hidden_norm"])
  if heads.fusion == "project":
    x = np.concatenate([e, g]) @ own["fusion"]["kernel"]
    x = x + (own["fusion"]["bias"] if heads.fusion_bias else 0)
  read = np.concatenate([e, g]) if heads.fusion == "attention" else x
  if heads.fusion == "attention" and heads.norm_before_residual:
    x = g
  if heads.attention_norm:
    read = _norm(read, own["attention_norm_0"])
  value = read @ own["attention_0"]["qkv"]["kernel"][:, 0, -1]
  x = x + np.tile(value, heads.heads) @ own["attention_0"]["out"]["kernel"]
  gate, up = np.tensordot(
      _norm(x, own["mlp_norm_0"]), own["mlp_0"]["gate_up"]["kernel"], 1)
  x = x + gate / (1 + np.exp(-gate)) * up @ own["mlp_0"]["down"]["kernel"]
  read = x
  if heads.final_norm:
    read = _norm(x, own["final_norm"] if heads.final_norm == "own" else
                 given["final_norm"])
  return read if heads.feed_normed else x, read


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("kind,options", [
    (Eagle1Heads, {}), (Eagle3Heads, {**EAGLE_3, "qk_norm": None}),
    (Eagle3Heads, dict(taps=(0, 1), entry_norm="each", feed_normed=True,
                       norm_before_residual=True)),
    (Eagle3Heads, dict(taps=(0, 1), entry_norm="all")), (MTPHeads, {}),
    (ParallelLayers, {})])
def test_one_position_by_hand(kind, options):
  # Broken: a norm, a bias or the order of what is joined is another one than
  # the papers', or another state is fed back.
  heads = heads_of(kind, **options)
  own, given = disturbed(heads), pair().params["target"]
  taps = np.random.default_rng(1).normal(
      size=len(heads.taps) * heads.target_width).astype(np.float32)
  out = jit(lambda own, given, taps: heads.step(
      own, given, heads.enter(own, taps), jnp.array([[3]])))(
          own, given, taps[None, None])
  as_numpy = lambda tree: jax.tree.map(lambda x: np.asarray(x, np.float64),
                                       tree)
  hidden, read = _by_hand(heads, as_numpy(own), as_numpy(given), taps, 3)
  np.testing.assert_allclose(out.hidden[0, 0], hidden, rtol=1e-3, atol=1e-3)
  np.testing.assert_allclose(out.read[0, 0], read, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("softcap, windows", [(None, ()), (2.0, (2,))])
def test_own_keys_are_a_mask(softcap, windows):
  # Broken: a step of the training-time test sees other keys than it should.
  heads = heads_of(Eagle3Heads, taps=(0, 1), attention_softcap=softcap,
                   windows=windows)
  own, given = disturbed(heads), pair().params["target"]
  rng, size = np.random.default_rng(0), 6
  hidden = jnp.asarray(rng.normal(size=(2, size, 16)), jnp.float32)
  tokens = jnp.asarray(rng.integers(VOCAB, size=(4, 2, size)))
  causal, each = np.tril(np.ones((size, size), bool)), np.eye(size, dtype=bool)

  @functools.partial(jit, static_argnames="masked")
  def steps(own, masked):
    keys, out, x = None, [], hidden
    for i in range(4):
      visible = jnp.asarray(np.concatenate([causal] + [each] * i, axis=1))[None]
      found = heads.step(
          own, given, x, tokens[i], keys=keys,
          positions=jnp.tile(jnp.arange(size) + i, (2, 1)),
          visible=visible if masked else None)
      x, keys = found.hidden, found.keys
      out.append(found.read)
    return jnp.stack(out)

  masked = steps(own, True)
  np.testing.assert_allclose(steps(own, False), masked, atol=2e-5)
  assert np.abs(masked[1:] - masked[:-1]).max() > 0.1


def test_files_keep_a_layer(tmp_path):
  # Broken: a layer on disk is another one, or drafts for another target.
  for kind, options in ((Eagle3Heads, EAGLE_3), (ParallelLayers, {})):
    heads = heads_of(kind, **options)
    params = disturbed(heads)
    methods.save_heads(tmp_path, heads, params, pair().target)
    loaded, read = methods.load_heads(tmp_path, pair().target)
    assert loaded == heads
    jax.tree.map(np.testing.assert_array_equal, read, params)
  other = Transformer(dataclasses.replace(pair().target.config, layers=2))
  with pytest.raises(ValueError, match="2 layers"):
    methods.load_heads(tmp_path, other)


def test_an_own_head_begins_as_the_targets():
  # Broken: a column of a reduced vocabulary is that of another token.
  heads = heads_of(Eagle3Heads, ids=(1, 4), taps=(0, 1))
  given = pair().params["target"]
  params = heads.init(jax.random.key(0), given)
  np.testing.assert_array_equal(params["head"], given["head"][:, [1, 4]])
  whole = np.asarray(heads.whole(jnp.array([[3.0, 2.0]])))[0]
  np.testing.assert_array_equal(whole, np.array(
      [-1e30, 3, -1e30, -1e30, 2], np.float32))
  laws = jit(lambda whole: [
      sj.LogitsTransform(**options)(whole) for options in (
          dict(temperature=0.0), dict(temperature=1e-3), dict(top_p=0.9),
          dict(top_k=3), dict(min_p=0.1))])(whole)
  for law in map(np.asarray, laws):
    assert law[1] > 0.7 and not law[[0, 2, 3]].any()
    np.testing.assert_allclose(law.sum(), 1, rtol=1e-6)


def test_a_narrow_head_is_the_targets(tmp_path):
  # Broken: the columns of other tokens, or a head that is trained or stored.
  heads = heads_of(Eagle1Heads, ids=(1, 4), narrow_head=True)
  given = pair().params["target"]
  params = heads.init(jax.random.key(0), given)
  assert "head" not in params and heads.draft_size == 2
  _, attached = heads.attach(pair().target, given, params)
  np.testing.assert_array_equal(
      attached["drafter"]["head"], given["head"][:, [1, 4]])
  read = jnp.ones((1, 1, heads.width))
  for own in (params, attached["drafter"]):
    np.testing.assert_allclose(
        heads.logits(own, given, read)[0, 0],
        jnp.ones(heads.width) @ given["head"][:, [1, 4]], rtol=1e-5)
  methods.save_heads(tmp_path, heads, params, pair().target)
  loaded, read = methods.load_heads(tmp_path, pair().target)
  assert loaded == heads and "head" not in read


@pytest.mark.parametrize("layers,taps", [
    (32, (2, 16, 29)), (7, (2, 3, 4)), (4, (1, 2, 4)), (2, (1, 2)), (1, (1,))])
def test_taps_of_eagle_3(layers, taps):
  # Broken: heads are trained on other layers than the published ones.
  assert Eagle3Heads.default_taps(layers) == taps
