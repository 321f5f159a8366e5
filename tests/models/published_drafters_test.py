"""Published drafters compute here what they compute where they come from.

The recorded drafters and activations are those of golden/make_drafters.py.
"""

import dataclasses
import functools
import json
import re
import shutil
import sys

from golden.recorded import GOLDEN
from golden.recorded import loaded as published
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from scripts import ROOT

import specjax as sj
from specjax.methods import export_drafter
from specjax.methods import load_drafter
from specjax.methods.features import _training
from specjax.methods.published import drafter_layout
from specjax.methods.published import LAYOUTS
from specjax.methods.published import layouts_for

sys.path.append(str(ROOT / "experiments"))

from lib import drafters  # noqa: E402
from lib import models  # noqa: E402

_DRAFTERS = GOLDEN / "drafters"
CASES = sorted(path.parent.name for path in _DRAFTERS.glob("*/expected.npz"))
_ROWS, _LAYERS = 9, 12
_TARGET = sj.models.Transformer(sj.models.TransformerConfig(
    vocab_size=48, width=16, layers=_LAYERS, heads=4, kv_heads=2, head_dim=8,
    mlp_width=24, context_length=64))
_OWN = jax.jit(_TARGET.init)(jax.random.key(0))
_FEATURES = [name for name in CASES if name.startswith(("eagle", "mtp"))]
_P_EAGLE = [name for name in CASES if name.startswith("peagle")]
_FEATURES.remove("mtp_chained")  # each of its modules drafts one token
_PARALLEL = [name for name in CASES if name.startswith(("d", "lilicorr"))]


def _expected(name):
  return dict(np.load(_DRAFTERS / name / "expected.npz"))


def _of_target(expected):
  """What a drafter reads of its target's parameters."""
  return {"embedding": expected["embedding"],
          "head": expected.get("head", expected["embedding"]).T}


@functools.cache
def _loaded(name, known=False):
  """A recorded drafter; `known`: with the target's parameters."""
  return load_drafter(
      _DRAFTERS / name, _TARGET, _of_target(_expected(name)) if known else None,
      dtype=jnp.float32)


def _close(found, wanted):
  np.testing.assert_allclose(found, wanted, rtol=1e-5,
                             atol=1e-5 * np.abs(wanted).max())


@functools.partial(jax.jit, static_argnums=0)
def _chain(heads, params, target, features, tokens):
  """States and logits of the rows, and of steps that read their own."""
  hidden, keys, found = heads.enter(params, features[None]), None, []
  start = 0
  while start < len(tokens):
    size = hidden.shape[1]
    seen = None if keys is None else jnp.ones((1, 1, start + 1), bool)
    out = heads.step(
        params, target, hidden, tokens[None, start:start + size],
        positions=start + jnp.arange(size)[None], keys=keys, visible=seen)
    found.append((out.hidden[0], heads.logits(params, target, out.read)[0]))
    hidden, keys, start = out.hidden[:, -1:], out.keys, start + size
  return [jnp.concatenate(rows) for rows in zip(*found)]


@pytest.mark.default_cases(5)
@pytest.mark.parametrize("name", _FEATURES)
def test_feature_layers_as_published(name):
  # Broken: an EAGLE or MTP checkpoint drafts other tokens here than there, at
  # its first step or where it reads its own states: norms, fusion, the order
  # of embedding and state, what is fed back, or the reduced head.
  expected = _expected(name)
  heads, params = _loaded(name, known=True)
  hidden, logits = _chain(heads, params, _of_target(expected),
                          expected["features"], expected["tokens"])
  _close(hidden, expected["hidden"])
  _close(logits, expected["logits"])


@functools.partial(jax.jit, static_argnums=0)
def _depths(heads, params, target, features, tokens):
  """States before the head and logits of all depths: `[K, rows, ...]`."""
  found = _training.forecasts(
      heads, {"drafter": params, "target": target}, features[None],
      jnp.pad(tokens, (1, 0))[None], heads.num_forecasts)
  return [jnp.stack(x) for x in zip(*(
      (out.read[0], heads.logits(params, target, out.read)[0])
      for out in found))]


@pytest.mark.parametrize("name", _P_EAGLE)
def test_p_eagle_as_published(name):
  # Broken: a P-EAGLE checkpoint drafts other tokens here than there, or is
  # trained on others: a layer, a norm, the mask, its place, or what a depth
  # attends to.
  expected = _expected(name)
  heads, params = _loaded(name, known=True)
  found = _depths(heads, params, _of_target(expected), expected["features"],
                  expected["tokens"])
  at = expected["depths"], expected["anchors"]
  assert {*expected["depths"]} == {0, 1, 2} and heads.layers == 2
  for x, wanted in zip(found, ("hidden", "logits")):
    _close(np.asarray(x)[at], expected[wanted])


def test_modules_in_a_chain_as_published():
  # Broken: the second of two modules is the first, reads the target's state
  # where it was trained on the first's, or reads that before its norm.
  expected = _expected("mtp_chained")
  heads, params = _loaded("mtp_chained", known=True)
  assert (heads.reuse, heads.forecasts, heads.chained) == (False, 2, True)
  hidden = heads.enter(params, expected["features"][None])
  for m in range(heads.modules):
    out = heads.step(params, _of_target(expected), hidden,
                     expected["tokens"][None, m:m + _ROWS], module=m)
    hidden = out.hidden
    _close(hidden[0], expected["hidden"][m])
    _close(heads.logits(params, _of_target(expected), out.read)[0],
           expected["logits"][m])


@functools.partial(jax.jit, static_argnums=0)
def _trained_steps(heads, params, target, features, tokens):
  """Logits of every step of training-time test: `[steps, rows, Vd]`."""
  hidden, keys, found = heads.enter(params, features[None]), None, []
  for i in range(3):
    out = heads.step(
        params, target, hidden, jnp.pad(tokens[i:], (0, i))[None],
        positions=i + jnp.arange(len(tokens))[None], keys=keys)
    found.append(heads.logits(params, target, out.read)[0])
    hidden, keys = out.hidden, out.keys
  return jnp.stack(found)


@pytest.mark.parametrize("name", ["eagle3_specforge", "eagle3_specjax"])
def test_training_time_test_as_published(name):
  # Broken: EAGLE-3 is trained on other states than it is where it comes from:
  # a step sees other keys, other positions or other states.
  expected = _expected(name)
  heads, params = _loaded(name, known=True)
  _close(_trained_steps(heads, params, _of_target(expected),
                        expected["all_features"], expected["tokens"]),
         expected["all_logits"])


@functools.partial(jax.jit, static_argnums=0)
def _block(heads, params, target, features, anchor, before):
  rows = len(features)
  cache = heads.init_cache(params, 1, 32)
  context = heads.context(params, features[None])
  cache = heads.with_context(params, cache, context, jnp.arange(rows)[None])
  cache = cache.rollback(jnp.array([rows]))
  hidden = heads.block(params, target, anchor, cache)
  logits, sure = heads.logits(target, hidden), 0.0
  last = context[:, -1] if heads.markov == "lilicorr" else None
  coupled = heads.coupled(params, target, heads.lattice(
      params, target, hidden, logits, anchor, last), before[None])
  if heads.confidence != "none":
    sure = heads.confidences(params, hidden, before[None])
  return hidden, logits, coupled, sure


@pytest.mark.default_cases(6)
@pytest.mark.parametrize("name", _PARALLEL)
def test_block_drafters_as_published(name):
  # Broken: DFlash or a relative reads the wrong layers, slots or positions, or
  # its transition or confidence head computes something else.
  expected = _expected(name)
  heads, params = _loaded(name, known=True)
  skip = not heads.from_anchor
  drafted = expected.get("drafted", np.zeros(heads.num_forecasts, np.int64))
  before = np.append(expected["anchor"], drafted[:-1])
  hidden, base, logits, sure = _block(
      heads, params, _of_target(expected), expected["features"],
      expected["anchor"], before)
  _close(hidden[0], expected["hidden"][skip:])
  _close(base[0], expected.get("base", expected.get("logits"))[skip:])
  if "candidates" in expected:  # their order there has no meaning
    probs = np.zeros_like(base[0])
    np.put_along_axis(probs, expected["candidates"], expected["probs"], axis=-1)
    _close(jax.nn.softmax(logits[0]), probs)
  else:
    _close(logits[0], expected["logits"][skip:])
  if "confidence" in expected:
    _close(sure[0], expected["confidence"])
  assert heads.taps == (2, 6, 9)


_OF_ASSISTANT = published("gemma4")


def _assistant_steps(heads, params):
  """States and logits of the steps of a round."""
  model, target = _OF_ASSISTANT.model, _OF_ASSISTANT.params
  expected, found = _expected("assistant"), []
  *read, root = expected["tokens"].tolist()
  cache = model.init_cache(target, 1, 2 * len(read))
  out = model(target, jnp.array([read]), cache=cache)
  cache = out.cache.rollback(jnp.array([len(read)]))
  hidden = out.hidden[:, -1:]
  for token in (root, *expected["drafted"][:-1].tolist()):
    hidden, state = heads.step(
        params, target, hidden, jnp.array([[token]]), cache)
    found.append((hidden[0, 0], heads.logits(params, state)[0, 0]))
  return [np.stack(rows) for rows in zip(*found)]


def test_assistant_as_published():
  # Broken: an assistant of Gemma 4 drafts other tokens here than there: it
  # reads other keys or at another position, or has logits for other tokens.
  expected = _expected("assistant")
  heads, params = load_drafter(_DRAFTERS / "assistant", _OF_ASSISTANT.model,
                               dtype=jnp.float32)
  hidden, logits = _assistant_steps(heads, params)
  _close(hidden, expected["hidden"])
  has_logit = logits > -1e29
  assert (has_logit.sum(1) == heads.draft_size).all()
  _close(logits[has_logit], expected["logits"][has_logit])
  lowest = np.where(has_logit, logits, np.inf).min(1, keepdims=True) - 0.5
  np.testing.assert_array_equal(expected["logits"] > lowest, has_logit)
  # Without centroids, the other tokens have logits as well.
  _, every = _assistant_steps(dataclasses.replace(heads, centroids=0), params)
  _close(every[has_logit], logits[has_logit])
  other = dataclasses.replace(heads, windows=(4, 4, 0))
  assert np.abs(_assistant_steps(other, params)[0] - hidden).max() > 0.01


@pytest.mark.parametrize("message,keys", [
    ("backbone_hidden_size 8 and the target 16", dict(backbone_hidden_size=8)),
    ("tie_word_embeddings false", dict(tie_word_embeddings=False)),
    ("vocab_size 40 and the target 48", dict(text_config={"vocab_size": 40})),
    ("hidden_size_per_layer_input 6", dict(text_config={
        "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 48})),
    ("True for enable_moe_block", dict(text_config={"enable_moe_block": True})),
    ("3 for unknown", dict(unknown=3)),
    ("ids in masked_embedding.token_ordering", dict(tensors={
        "masked_embedding.token_ordering": np.zeros(48, np.int64)})),
    ("active 9", dict(centroid_intermediate_top_k=9))])
def test_assistants_that_are_refused(changed, message, keys):
  # Broken: an assistant of another target, or with parts of another kind,
  # drafts anyway.
  path = _DRAFTERS / "assistant" / "config.json"
  if "text_config" in keys:
    text = json.loads(path.read_text())["text_config"]
    keys = dict(text_config=text | keys["text_config"])
  with pytest.raises(ValueError, match=message):
    changed("assistant", target=_OF_ASSISTANT.model, **keys)


def test_targets_that_an_assistant_refuses():
  # Broken: an assistant reads the keys of other layers or of another shape.
  heads, _ = load_drafter(_DRAFTERS / "assistant", _OF_ASSISTANT.model)
  drafter = sj.strategies.mtp(heads, gamma=4).drafter
  config = _OF_ASSISTANT.model.config
  for message, model in (
      ("target with width 16", dict(width=12)),
      ("layers \\(1, 2\\) .* keys of their own are \\(3, 4\\)",
       dict(shared_layers=0)),
      ("own are \\(1, 2\\), which have .*\\(1, 12\\)\\]",
       dict(global_head_dim=12)),
      ("cache=KVCache and features=()", dict(features=(1,)))):
    with pytest.raises(ValueError, match=message):
      sj.Decoder(target=sj.models.Transformer(
          dataclasses.replace(config, **model)), drafter=drafter,
                 verifier=sj.verifiers.Token())
  with pytest.raises(ValueError, match="AssistantHeads, which read the targ"):
    sj.methods.of(heads).measure(_OF_ASSISTANT.model, heads)


def test_medusa_as_published():
  # Broken: a head's bias or its second block is lost, or heads are swapped;
  # a configuration that says 2 heads hides the 5 that the file has; names with
  # the prefix of a whole model are not found.
  for name, count, blocks in (("medusa", 5, 1), ("medusa_shared_blocks", 5, 2),
                              ("medusa_vllm", 3, 2)):
    expected = _expected(name)
    heads, params = _loaded(name)
    assert (heads.heads, heads.blocks, heads.bias) == (count, blocks, True)
    logits = heads(params, expected["hidden"], None)
    _close(np.moveaxis(logits, 1, 0), expected["logits"])
  config = json.loads((_DRAFTERS / "medusa" / "config.json").read_text())
  assert config["medusa_num_heads"] == 2


def test_hydra_as_published():
  # Broken: a head reads the embeddings in another order, or others of them.
  for name, blocks in (("hydra", 1), ("hydra_shared_blocks", 3)):
    expected = _expected(name)
    heads, params = _loaded(name)
    assert (heads.heads, heads.blocks) == (4, blocks)
    embedded = expected["embedding"][expected["tokens"]]
    read = [expected["hidden"]]
    for k in range(heads.heads):
      read.append(np.roll(embedded, -(k + 1), axis=0))
      _close(heads.head(params, np.concatenate(read, -1)),
             expected["logits"][k])


def test_uno_as_published(tmp_path):
  # Broken: an adapter of PEFT acts on other rows or matrices than there, or
  # with another factor.
  target, expected = published("qwen3"), _expected("uno")
  heads, params = load_drafter(
      _DRAFTERS / "uno", target.model, target.params, dtype=jnp.float32)
  own = target.params["embedding"]
  assert all((own == row).all(1).any() for row in params["embeddings"])
  # The authors' folder, beside the files of the target.
  shutil.copytree(_DRAFTERS / "uno", tmp_path / "adapter")
  assert load_drafter(tmp_path, target.model, target.params)[0] == heads
  noise, tokens = expected["noise"], expected["tokens"]
  params["embeddings"] = own[tokens[noise]]
  model, both = heads.attach(target.model, target.params, params)
  tokens[noise] = model.vocab_size + np.arange(noise.sum())
  _close(model(both["target"], tokens[None]).logits[0], expected["logits"])


@pytest.mark.parametrize("message,options", [
    ("give the target's parameters", {}),
    ("has the tensor base_model.*layers.1.*, an adapter of no matrix",
     dict(target=dataclasses.replace(_TARGET, config=dataclasses.replace(
         _TARGET.config, layers=1)))),
    ("down_proj.lora_A.weight.*24.*require.*20",
     dict(known=_OWN, target=dataclasses.replace(
         _TARGET, config=dataclasses.replace(_TARGET.config, mlp_width=20)))),
    ("'all' for bias", dict(known=_OWN, bias="all")),
    ("True for use_dora", dict(known=_OWN, use_dora=True)),
    ("require.*4, 32", dict(known=_OWN, r=4)),
    ("no tensor .*lora_B", dict(known=_OWN, drop=(
        "base_model.model.model.layers.0.mlp.down_proj.lora_B.weight",)))])
def test_adapters_that_are_refused(changed, message, options):
  # Broken: an adapter that computes something else is loaded in silence.
  with pytest.raises(ValueError, match=message):
    changed("uno", **options)


@pytest.mark.slow
@pytest.mark.parametrize("scaled", [dict(use_rslora=True), dict(lora_alpha=3)])
def test_factor_of_an_adapter(changed, scaled):
  # Broken: the factor of PEFT is another one.
  leaf = lambda keys: changed("uno", known=_OWN, **keys)[1]["adapters"][
      "attention_0"]["qkv"]["adapter_out"]
  np.testing.assert_allclose(
      leaf(scaled), leaf({}) * (2**0.5 if "use_rslora" in scaled else 0.5),
      rtol=1e-2)


@pytest.fixture(name="changed")
def _changed(tmp_path):
  """A recorded drafter with other keys or tensors, loaded for a target."""
  def changed(name, tensors=None, target=_TARGET, known=None, drop=(), **keys):
    directory = tmp_path / name
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(_DRAFTERS / name, directory)
    [path] = directory.glob("*config.json")
    config = json.loads(path.read_text()) | keys
    path.write_text(json.dumps({k: v for k, v in config.items()
                                if k not in drop}))
    [weights] = directory.glob("*.safetensors")
    held = safetensors.numpy.load_file(weights) | (tensors or {})
    safetensors.numpy.save_file(
        {k: v for k, v in held.items() if k not in drop}, weights)
    return load_drafter(directory, target, known)

  return changed


def test_numbers_of_layers(changed):
  # Broken: an EAGLE-3 or DFlash drafter reads the state one layer off, since
  # some projects count inputs of layers and others outputs.
  taps = {name: _loaded(name)[0].taps for name in (*_FEATURES, *_PARALLEL)}
  assert taps["eagle1"] == taps["mtp_qwen"] == taps["mtp_deepseek"] == (
      "final",)  # after the norm, where speculators read before it
  assert taps["mtp_speculators"] == (_LAYERS,)
  assert taps["eagle3"] == (2, _LAYERS // 2, _LAYERS - 3)
  for name, there in (("eagle3_specforge", [1, 5, 8]),
                      ("eagle3_speculators", [2, 6, 9]),
                      ("dflash", [1, 5, 8]), ("dspark", [1, 5, 8])):
    text = (_DRAFTERS / name / "config.json").read_text()
    assert re.search(r"layer_ids\":\s*\[\s*" + r",\s*".join(map(str, there)),
                     text)
    assert taps[name] == (2, 6, 9)
  # Unsaid: the middle of SpecForge's is one lower, as a number, and the same.
  assert changed("eagle3_specforge", drop=("eagle_config",))[0].taps == (
      2, 6, 9)
  assert changed("eagle3_specforge", eagle_config=dict(
      use_aux_hidden_state=True, eagle_aux_hidden_state_layer_ids=[]))[
          0].taps == (2, 6, 9)
  # DFlash would read the last layer's output normed; EAGLE-3 as it is.
  last = [1, 5, _LAYERS - 1]
  assert changed("eagle3_specforge", eagle_config=dict(
      eagle_aux_hidden_state_layer_ids=last))[0].taps == (2, 6, _LAYERS)
  with pytest.raises(ValueError, match="output of layer 11, the target's last"):
    changed("dflash", dflash_config=dict(mask_token_id=40,
                                         target_layer_ids=last))


def test_scales_of_the_target(changed):
  # Broken: a head of speculators reads the embeddings of Gemma with their
  # factor, or a head of z-lab reads them without.
  target = dataclasses.replace(_TARGET, config=dataclasses.replace(
      _TARGET.config, embedding_scale=4.0, logit_softcap=30.0))
  scales = lambda name: [getattr(changed(name, target=target)[0], field) for
                         field in ("embedding_scale", "logit_softcap")]
  assert scales("dflash") == [4, 30]
  assert scales("dflash_speculators") == [1, None]
  heads, params = changed("dflash", target=target)
  with pytest.raises(ValueError, match="embedding_scale"):
    export_drafter("unused", heads, params, target, _OWN,
                   layout="dflash of speculators")


def test_keys_of_one_meaning(changed):
  # Broken: one of two answers is taken in silence, or a key that is missing
  # is guessed.
  config = json.loads((_DRAFTERS / "dflash/config.json").read_text())
  inner = config["dflash_config"] | dict(causal_head=True)
  with pytest.raises(ValueError, match="is_causal.*causal_head"):
    changed("dflash", is_causal=False, dflash_config=inner)
  assert all(changed("dflash", dflash_config=inner)[0].causal)
  del inner["mask_token_id"]
  with pytest.raises(ValueError, match="no mask_token_id"):
    changed("dflash", dflash_config=inner)


def test_keys_in_two_places(changed):
  # Broken: what SpecForge writes for SGLang is refused, since its keys lie both
  # in dflash_config and beside it.
  inner = dict(projector_type="dspark", mask_token_id=40, markov_rank=4,
               target_layer_ids=[1, 5, 8], markov_head_type="vanilla")
  assert changed("dspark", dflash_config=inner)[0] == _loaded("dspark")[0]
  again = changed("dspark", dflash_config=inner, drop=("target_layer_ids",))
  assert again[0] == _loaded("dspark")[0]


def test_two_meanings_of_norm_output(changed):
  # Broken: SpecForge's heads are fed normed states, speculators' are not, or a
  # head that reads no norm gets one.
  assert _loaded("eagle3_speculators")[0].feed_normed
  assert not changed("eagle3_speculators", norm_output=False)[0].feed_normed
  heads = _loaded("eagle3_specforge")[0]
  assert not heads.feed_normed and heads.final_norm == "own"
  heads, params = changed("eagle3_specforge", norm_output=False)
  assert not heads.feed_normed and heads.final_norm is None
  assert "final_norm" not in params["module_0"]
  for said in (True, False):  # nobody's: either meaning would be a guess
    with pytest.raises(ValueError, match=f"has {said} for norm_output, a key"):
      changed("eagle3", norm_output=said)


def test_bias_of_the_fusion(changed):
  # Broken: EAGLE-1 gains or loses the bias of its fusion.
  assert _loaded("eagle1")[0].fusion_bias
  assert not _loaded("eagle1_plain")[0].fusion_bias
  heads, _ = changed("eagle1_plain", drop=("bias",))  # the tensors decide
  assert not heads.fusion_bias
  with pytest.raises(ValueError, match="False for bias, but a tensor fc"):
    changed("eagle1", bias=False)


def test_reduced_vocabularies(changed):
  # Broken: offsets are taken for ids, or ids for offsets, so that drafts are
  # of other tokens; or a whole vocabulary without a map is refused.
  ids = _loaded("eagle3")[0].ids
  file = _DRAFTERS / "eagle3" / "model.safetensors"
  held = safetensors.numpy.load_file(file)
  known = np.flatnonzero(held["t2d"])
  assert ids == tuple(known) and len(ids) == 20 < _TARGET.vocab_size
  assert ids == tuple(np.arange(20) + held["d2t"])
  assert _loaded("eagle3_specjax")[0].ids == ids  # its t2d holds -1 and rows
  assert _loaded("eagle3_specforge")[0].ids == ()
  assert changed("eagle3", {"d2t": known})[0].ids == ids  # t2d tells
  assert changed("eagle3", drop=("t2d",))[0].ids == ids
  every = {"d2t": np.zeros(48, np.int64), "t2d": np.ones(48, bool)}
  assert changed("eagle3_specforge", every)[0].ids == ()
  for name in ("eagle3_specforge", "eagle3_deepspec"):
    with pytest.raises(ValueError, match="d2t that changes"):
      changed(name, {"d2t": every["d2t"] + (np.arange(48) == 3)})
  for message, tensors, drop in (
      ("has ids from", {"d2t": known}, ("t2d",)),
      ("d2t and t2d with different", {"d2t": held["d2t"] + 1}, ()),
      ("has no tensor d2t", None, ("d2t",))):
    with pytest.raises(ValueError, match=message):
      changed("eagle3", tensors, drop=drop)


def test_embeddings_beside_a_drafter(changed):
  # Broken: a copy of the target's embedding takes its memory again, or another
  # embedding than the target's is thrown away.
  expected = _expected("eagle1")
  target = _of_target(expected)
  assert "embedding" not in _loaded("eagle1", known=True)[1]
  heads, params = _loaded("eagle1")  # nobody knows whether it is a copy
  assert heads.own_embedding
  np.testing.assert_array_equal(params["embedding"], expected["embedding"])
  other = target | {"embedding": target["embedding"] + 1}
  assert changed("eagle1", known=other)[0].own_embedding
  assert not _loaded("eagle1_plain")[0].own_embedding  # the file has none
  norm = {"verifier_norm.weight": np.ones(16, np.float32)}  # of older files
  assert changed("eagle3_speculators", norm)[0] == (
      _loaded("eagle3_speculators")[0])
  with pytest.raises(ValueError, match="embed_tokens.weight that differs from"):
    changed("dspark", known=other)


def test_a_module_that_is_used_again():
  # Broken: it is taken for the first of a chain, or its next step is fed what
  # was before its norm, as the paper may be read and no server does.
  for name in ("mtp_deepseek", "mtp_qwen", "mtp_speculators", "mtp_mimo"):
    heads, _ = _loaded(name)
    assert heads.reuse and heads.modules == 1 and heads.feed_normed


@pytest.mark.slow
def test_every_drafter_is_written_as_it_was_read(tmp_path):
  # Broken: an exported drafter is another one where it is read again, or is
  # taken for one in another layout.
  for name in {*CASES} - {"assistant", "uno"}:
    heads, params = _loaded(name)
    for layout in layouts_for(heads, _TARGET):
      directory = tmp_path / name / layout
      assert layout == export_drafter(
          directory, heads, params, _TARGET, _OWN, layout=layout)
      assert drafter_layout(directory) == layout
      again, read = load_drafter(directory, _TARGET, _OWN, dtype=jnp.float32)
      assert again == heads, (name, layout)
      jax.tree.map(np.testing.assert_array_equal, read, params)
    assert layouts_for(heads, _TARGET) == _WRITTEN.get(name, ()), name


# What each recorded drafter can be written as; the others have a state, a
# module or a norm that no layout of a server has.
_SPECULATORS = ("eagle3 of speculators", "eagle3 of specforge")
_BLOCKS = ("dflash of speculators", "dspark of speculators")
_WRITTEN = {
    "eagle3_windows": _SPECULATORS[:1], "dflash_windows_speculators": _BLOCKS,
    "dspark_windows_speculators": _BLOCKS[1:],
    "medusa": ("medusa", "medusa of vllm"),
    "medusa_shared_blocks": ("medusa", "medusa of vllm"),
    "medusa_vllm": ("medusa", "medusa of vllm"),
    "eagle1": ("eagle1",), "eagle1_plain": ("eagle1",),
    "eagle3": _SPECULATORS, "eagle3_deepspec": _SPECULATORS,
    "eagle3_specforge": _SPECULATORS, "eagle3_specjax": _SPECULATORS,
    "eagle3_speculators": _SPECULATORS[:1],
    "dflash": _BLOCKS, "dflash_speculators": _BLOCKS,
    "dflash_specforge": _BLOCKS,
    "dspark": _BLOCKS[1:], "dspark_gated": _BLOCKS[1:],
    "dspark_rnn": _BLOCKS[1:], "dspark_speculators": _BLOCKS[1:],
    "dflash2": ("dflash2 of speculators",),
    "dflash2_windows_speculators": ("dflash2 of speculators",),
    "mtp_speculators": ("mtp of speculators",),
    "peagle_speculators": ("peagle of speculators",),
    "peagle_specforge": ("peagle of speculators",)}


def test_all_layouts_are_known():
  # Broken: a layout is offered that nothing was compared with, or files are
  # taken for those of another.
  found = {drafter_layout(_DRAFTERS / name) for name in CASES}
  assert found == LAYOUTS.keys()
  assert drafter_layout(GOLDEN / "llama") is None  # a language model
  told, _ = load_drafter(_DRAFTERS / "eagle3", _TARGET,
                         layout="eagle3 of specforge")
  assert told == _loaded("eagle3")[0]


def test_block_drafters_of_few_tokens(changed):
  # Broken: a reduced DSpark drafts other tokens than its rows are of; a head of
  # other weights is taken for the target's.
  name = "dspark_speculators"
  heads, _ = _loaded(name)
  file = _DRAFTERS / name / "model.safetensors"
  held = safetensors.numpy.load_file(file)
  assert heads.ids == tuple(np.flatnonzero(held["t2d"]))
  assert len(heads.ids) == 20 < _TARGET.vocab_size
  with pytest.raises(ValueError, match="lm_head.weight that differs from"):
    changed(name, {"lm_head.weight": held["lm_head.weight"][::-1].copy()},
            known=_of_target(_expected(name)))


def _layer(name, **keys):
  """The keys of a recorded drafter's layers, some of them changed."""
  place = "transformer_layer_config"
  config = json.loads((_DRAFTERS / name / "config.json").read_text())
  return {place: config[place] | keys}


def test_windows_are_those_of_the_file(changed, tmp_path):
  # Broken: a layer has the window of another one, or a window that has no
  # effect costs time; or with it, a layer of a block is no longer causal.
  loaded = lambda name: (_loaded(name)[0].windows, _loaded(name)[0].causal,
                         _loaded(name)[0].window_end)
  assert _loaded("eagle3_windows")[0].windows == (5,)
  assert loaded("dspark_windows_speculators") == (
      (0, 5), (False, True), "anchor")
  assert loaded("dflash_windows_speculators") == ((5, 0), (), "anchor")
  assert loaded("dflash_windows") == ((7, 0), (True, False), "slot")
  for keys, causal in (
      (dict(is_causal=False), ()), (dict(is_causal=True), (True, True)),
      (dict(dflash_config=dict(mask_token_id=40, target_layer_ids=[1, 5, 8],
                               causal=False)), ()),
      (dict(dflash_config=dict(mask_token_id=40, target_layer_ids=[1, 5, 8],
                               causal_head=True)), (True, True))):  # JetSpec
    assert changed("dflash_windows", **keys)[0] == dataclasses.replace(
        _loaded("dflash_windows")[0], causal=causal)
  for name in ("eagle3_windows", "dspark_windows_speculators"):
    idle = _layer(name, sliding_window=_TARGET.context_length)
    heads, params = changed(name, **idle)
    assert heads == dataclasses.replace(_loaded(name)[0], windows=())
    export_drafter(tmp_path / "out" / name, heads, params, _TARGET, _OWN,
                   layout="speculators")
    assert load_drafter(tmp_path / "out" / name, _TARGET)[0] == heads


def _inner(name, end):
  """The keys of a recorded drafter's block, without those with this end."""
  config = json.loads((_DRAFTERS / name / "config.json").read_text())
  return {key: x for key, x in config["dflash_config"].items()
          if not key.endswith(end)}


_REFUSED = {
    "a missing tensor": (
        "eagle1", dict(drop=("layers.0.mlp.up_proj.weight",)),
        "has no tensor layers.0.mlp.up_proj.weight"),
    "an unknown tensor": (
        "eagle1", dict(tensors={"norm.weight": np.ones(16, np.float32)}),
        r"has the tensor norm.weight \(16,\), which .* does not have"),
    "an unknown key of a part": (
        "dflash", dict(dflash_config=dict(
            mask_token_id=40, target_layer_ids=[1, 5, 8], mystery=3)),
        "has 3 for mystery"),
    "other layers of EAGLE-3": (
        "eagle3_specforge", dict(eagle_config=dict(
            use_input_layernorm_in_first_layer=False)),
        "has False for use_input_layernorm_in_first_layer"),
    "a key inside of eagle_config": (
        "eagle3_specforge", dict(eagle_config=dict(use_mtp_layernorm=True)),
        "has True for use_mtp_layernorm"),
    "the other convention": (
        "dspark", dict(sample_from_anchor=False),
        "has False for sample_from_anchor, but drafters of this layout"),
    "the other algorithm": (
        "dflash", dict(dflash_config=dict(
            mask_token_id=40, target_layer_ids=[1, 5, 8],
            projector_type="dspark")), "has 'dspark' for projector_type, but"),
    "a smallest length of LiLiCorr": (
        "lilicorr", dict(lilicorr_vector_eps=1e-3,
                         dflash_config=_inner("lilicorr", "vector_eps")),
        "has 0.001 for lilicorr_vector_eps"),
    "a size that is not named": (
        "dflash2", dict(dflash_config=_inner("dflash2", "selector_rank")),
        "has None for selector_rank; it must be a whole number"),
    "two block sizes": (
        "dspark", dict(dflash_config=dict(block_size=7)),
        "has 5 for block_size and 7 in dflash_config"),
    "a recurrence that begins one slot later here": (
        "dspark_speculators", dict(markov_head_type="rnn",
                                   sample_from_anchor=False),
        "'rnn' and sample_from_anchor False"),
    "a target of another depth": (
        "dflash", dict(num_target_layers=36),
        "has num_target_layers 36 and the target 12"),
    "another tensor's shape": (
        "medusa", dict(tensors={"1.0.linear.bias": np.ones(3, np.float32)}),
        r"has the tensor 1.0.linear.bias \(3,\).* \(16,\)"),
    "two layers": (
        "eagle1", dict(tensors={
            "layers.1.mlp.up_proj.weight": np.ones((2, 2), np.float32)}),
        "has 2 layers"),
    "experts": (
        "mtp_deepseek", dict(tensors={
            "model.layers.12.mlp.gate.weight": np.ones((2, 2), np.float32)}),
        "12.mlp.gate.weight, of a mixture of experts"),
    "latent attention": (
        "mtp_deepseek", dict(tensors={
            "model.layers.12.self_attn.kv_a_proj_with_mqa.weight":
                np.ones((2, 2), np.float32)}), "of latent attention"),
    "an output gate": (
        "mtp_qwen", dict(attn_output_gate=True), "True for attn_output_gate"),
    "another vocabulary": (
        "hydra", dict(target=sj.models.Transformer(dataclasses.replace(
            _TARGET.config, vocab_size=50))),
        "has vocab_size 48 and the target 50"),
    "another kind of Hydra": (
        "hydra", dict(hydra_head_arch="prefix-mlp"),
        "has hydra_head_arch 'prefix-mlp'"),
    "a prefix of a tensor": (
        "eagle1", dict(drop=("layers.0.mlp.up_proj.weight",), tensors={
            "module.layers.0.mlp.up_proj.weight": np.ones((32, 16))}),
        "no tensor layers.0.mlp.up_proj.weight.* prefix 'module.'"),
    "quantised tensors": (
        "eagle1", dict(tensors={"fc.weight_scale": np.ones(16)}),
        "fc.weight_scale, so the weights are quantised"),
    "a quantised drafter": (
        "eagle1", dict(quantization_config={"quant_method": "fp8"}),
        "quantised by fp8"),
    "layers of an unknown type": (
        "eagle3_windows", _layer(
            "eagle3_windows", layer_types=["chunked_attention"]),
        r"has \['chunked_attention'\] for layer_types"),
    "windows in no layer": (
        "eagle3_windows", _layer("eagle3_windows", layer_types=None),
        "has True for use_sliding_window"),
    "windows of no size": (
        "eagle3_windows", _layer("eagle3_windows", sliding_window=None),
        "has None for sliding_window; it must be a whole number"),
    "windows that are not in use": (
        "dspark_windows_speculators", _layer(
            "dspark_windows_speculators", use_sliding_window=False),
        "has False for use_sliding_window"),
    "windows within a block": (
        "dflash_windows", dict(sliding_window=5),
        "has sliding_window 5 and block_size 6"),
    "an unknown causality": (
        "dflash_windows", dict(is_causal="yes"), "has 'yes' for is_causal"),
    "windows of modules": (
        "mtp_qwen", dict(use_sliding_window=True, sliding_window=5,
                         layer_types=["sliding_attention"] * _LAYERS),
        "has sliding_window 5; specjax reads modules"),
    "a mask of no token": (
        "peagle_specforge", dict(drop=("mask_token_id",)),
        "has no mask_token_id in its configuration; add the id"),
    "windows within a draft": (
        "peagle_speculators", _layer("peagle_speculators", sliding_window=2),
        "has sliding_window 2 and 3 draft tokens"),
    "nothing that is known": (
        "eagle1", dict(drop=("fc.weight",)), "contains no drafter in a layout"),
}


@pytest.mark.parametrize("name", CASES)
def test_unknown_keys_are_refused(changed, name):
  # Broken: a file says something of its drafter, or of the target that it lies
  # in, and it is loaded as if it did not.
  with pytest.raises(ValueError, match="has 3 for mystery, which specjax"):
    changed(name, mystery=3)


@pytest.mark.parametrize("name, options, message", _REFUSED.values(),
                         ids=_REFUSED)
def test_refused_in_one_line(changed, name, options, message):
  # Broken: a drafter that computes something else is loaded in silence.
  with pytest.raises(ValueError, match=message) as error:
    changed(name, **options)
  assert "\n" not in str(error.value)


def test_pickles_are_refused(tmp_path):
  # Broken: a file that can run code is read, or its owner is not told how to
  # convert it.
  (tmp_path / "medusa_lm_head.pt").write_bytes(b"pickle")
  (tmp_path / "config.json").write_text("{}")
  with pytest.raises(ValueError, match=(
      r"save_file\(.*torch.load\(.*medusa_lm_head.safetensors'\)$")):
    load_drafter(tmp_path, _TARGET)
  with pytest.raises(ValueError, match="layout is 'x'; it must be one of"):
    load_drafter(tmp_path, _TARGET, layout="x")
  with pytest.raises(ValueError, match="the target is a TransformerConfig; gi"):
    load_drafter(tmp_path, _TARGET.config)


def test_scripts_take_the_directory_of_a_drafter():
  # Broken: generate.py takes a published drafter for a language model, or a
  # language model for a drafter; or it cannot choose a tree for it.
  itself = lambda name, target=None: models.drafts_for_itself(
      str(name), target and str(target))
  assert itself(_DRAFTERS / "medusa") and itself(_DRAFTERS / "dflash")
  module = _DRAFTERS / "mtp_qwen"  # beside a model that drafts as well
  assert itself(module, module) and not itself(module, GOLDEN / "qwen3")
  assert itself(module, f"{module}/") and not itself(module, "bundled")
  assert not itself(GOLDEN / "llama") and not itself(GOLDEN / "missing")
  target = sj.models.Pretrained(_TARGET, _of_target(_expected("eagle3")), None,
                                None)
  _, found, _ = drafters.load(target, [str(_DRAFTERS / "eagle3")])
  own = found["eagle3"].heads
  assert own.heads == _loaded("eagle3")[0]
  assert own.recorded is None and len(own.tree(16)) == 16


def test_scripts_draft_with_an_assistant():
  # Broken: --drafter refuses an assistant, or --verifier does not choose the
  # form of its drafts.
  path, found = str(_DRAFTERS / "assistant"), []
  assert models.drafts_for_itself(path)
  for rule, size in ((None, 5), (sj.verifiers.TargetWalk(), 16)):
    _, loaded, _ = drafters.load(
        _OF_ASSISTANT, [path], drafters.Options(gamma=4, verifier=rule),
        compared=True)
    own = loaded["assistant"]
    assert own.is_chain == (rule is None) and len(own.compared) == 5
    assert own.strategy.drafter.num_nodes == size
    found.append(own.strategy.decoder(
        own.model, transform=sj.LogitsTransform(temperature=0)).generate(
            own.params, [[3, 1, 4]], jax.random.key(0), max_new_tokens=12
        ).tokens[0])
  np.testing.assert_array_equal(*found)
