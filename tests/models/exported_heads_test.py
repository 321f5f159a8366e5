"""Heads leave for servers, and published drafters enter a training."""

import dataclasses
import functools
import json

from golden.recorded import GOLDEN
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import scripts

import specjax as sj
from specjax import methods
from specjax import zoo
from specjax.methods import export_drafter
from specjax.methods import load_drafter
from specjax.methods.features import _training
from specjax.methods.published import layouts_for

CASES = sorted(path.parent.name for path in (GOLDEN / "drafters").glob(
    "*/expected.npz"))
_TARGET = sj.models.Transformer(sj.models.TransformerConfig(
    vocab_size=48, width=16, layers=12, heads=4, kv_heads=2, head_dim=8,
    mlp_width=24, context_length=64))
_OWN = jax.jit(_TARGET.init)(jax.random.key(0))
_IDS = tuple(range(3, 48, 4))


def _random(heads, seed=1):
  """Parameters of heads, all of them random."""
  shapes = jax.eval_shape(lambda: heads.init(jax.random.key(0), _OWN))
  rng = np.random.default_rng(seed)
  return jax.tree.map(
      lambda x: jnp.array(rng.normal(size=x.shape), jnp.float32), shapes)


def _exported(directory, heads, params, layout=None, **options):
  """The heads as they are read again, their parameters, and config.json."""
  export_drafter(directory, heads, params, _TARGET, _OWN, layout=layout,
                 **options)
  return (*load_drafter(directory, _TARGET, _OWN, dtype=jnp.float32),
          json.loads((directory / "config.json").read_text()))


@pytest.mark.parametrize("output", ["low_rank", "shared", "own"])
def test_outputs_of_medusa_heads_are_merged(output, tmp_path):
  # Broken: the default heads cannot be exported, or forecast other tokens.
  heads = methods.MedusaHeads.for_target(
      _TARGET, 3, output=output, rank=2, blocks=2)
  params, head = _random(heads), methods.lm_head(_OWN)
  hidden = jax.random.normal(jax.random.key(2), (5, 16))
  for layout in ("medusa", "vllm"):
    back, read, _ = _exported(tmp_path / layout, heads, params, layout)
    np.testing.assert_allclose(
        back(read, hidden, None), heads(params, hidden, head), rtol=1e-5,
        atol=1e-4)
    assert read["output"].shape == (3, 16, 48)


def test_a_narrow_head_is_stored_with_its_tokens(tmp_path):
  # Broken: a layer that drafts with a part of the target's head cannot be
  # exported, or the files do not say which tokens its rows are.
  heads = methods.Eagle3Heads.for_target(
      _TARGET, 2, own_head=False, narrow_head=True, ids=_IDS)
  params = _random(heads)
  for layout in ("speculators", "specforge"):
    back, read, config = _exported(tmp_path / layout, heads, params, layout)
    assert (back.ids, back.forecasts, back.taps) == (_IDS, 2, heads.taps)
    np.testing.assert_array_equal(read["head"], heads.columns(_OWN))
    held = safetensors.numpy.load_file(tmp_path / layout / "model.safetensors")
    assert tuple(np.flatnonzero(held["t2d"])) == _IDS
    assert tuple(held["d2t"] + np.arange(len(_IDS))) == _IDS
    assert config["draft_vocab_size"] == len(_IDS)


@pytest.mark.parametrize("ids", [(), _IDS], ids=["all tokens", "some tokens"])
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_learned_mask_is_a_row_after_the_vocabulary(kind, ids, tmp_path):
  # Broken: block-parallel heads cannot be exported, read another mask, or lack
  # what readers do not take from the target: an LM head of fewer tokens than
  # the embedding has rows.
  form = dict(from_anchor=False) if kind == "dflash" else dict(
      markov="plain", markov_rank=3, confidence="markov")
  heads = methods.ParallelHeads.for_target(_TARGET, 3, ids=ids, **form)
  params = _random(heads)
  back, read, config = _exported(tmp_path / "out", heads, params)
  assert back == heads
  jax.tree.map(np.testing.assert_array_equal, read, params)
  assert config["speculators_model_type"] == kind
  assert config["mask_token_id"] == 48
  assert config["transformer_layer_config"]["vocab_size"] == 49
  held = safetensors.numpy.load_file(tmp_path / "out/model.safetensors")
  np.testing.assert_array_equal(held["embed_tokens.weight"], np.concatenate(
      [_OWN["embedding"], params["mask"][None]]))
  if kind == "dspark":
    assert held["markov_head.markov_w1.weight"].shape == (49, 3)
  used = np.array(ids or range(48))
  np.testing.assert_array_equal(
      held["lm_head.weight"].T, methods.lm_head(_OWN)[:, used])
  assert ("d2t" in held) == bool(ids)  # vLLM refuses it for all tokens
  other = {**_OWN, "embedding": _OWN["embedding"] + 1}
  with pytest.raises(ValueError, match="embed_tokens.weight that differs from"):
    load_drafter(tmp_path / "out", _TARGET, other)


def _flat(config, place=""):
  """`{key: value}` of a configuration, with the keys of nested parts."""
  found = {}
  for key, value in config.items():
    inner = f"{place}{key}"
    found |= _flat(value, f"{inner}.") if isinstance(value, dict) else {
        inner: value}
  return found


@functools.partial(jax.jit, static_argnums=0)
def _activations(heads, params, features, tokens):
  """What heads compute of features: the input of the LM head, and logits."""
  if heads.kind == "parallel":
    cache = heads.with_context(
        params, heads.init_cache(params, 1, 32),
        heads.context(params, features[None]), jnp.arange(len(features))[None])
    hidden = heads.block(params, _OWN, tokens[:1], cache.rollback(
        jnp.array([len(features)])))
    return hidden, heads.logits(_OWN, hidden)
  found = _training.forecasts(
      heads, {"drafter": params, "target": _OWN}, features[None], tokens[None],
      3)
  return [(out.read, heads.logits(params, _OWN, out.read)) for out in found]


# Keys that describe the code and the training of speculators, or that
# transformers writes in another form or with its defaults.
_THEIRS = {
    "architectures", "auto_map.", "dtype", "embed_requires_grad",
    "speculators_version", "target_hidden_size", "tie_word_embeddings",
    "transformers_version"} | {f"transformer_layer_config.{key}" for key in (
        "attention_dropout", "bos_token_id", "dtype", "eos_token_id",
        "initializer_range", "pad_token_id", "pretraining_tp",
        "rope_parameters.rope_theta", "rope_parameters.rope_type",
        "use_cache")} | {
            f"speculators_config.{key}" for key in (
                "proposal_methods", "verifier.architectures")}


@pytest.mark.parametrize("name", [
    "eagle3_windows", "peagle_speculators", "dflash_windows_speculators",
    "dspark_windows_speculators"])
def test_files_are_those_of_speculators(name, tmp_path):
  # Broken: speculators or vLLM looks for a tensor or a key of another name,
  # shape or meaning than specjax writes, or heads change on the way.
  # golden/export_drafters.py compares with the activations of speculators.
  directory = GOLDEN / "drafters" / name
  theirs = safetensors.numpy.load_file(directory / "model.safetensors")
  heads, params = load_drafter(directory, _TARGET, dtype=jnp.float32)
  if heads.kind != "parallel":  # as specjax trains EAGLE-3 and P-EAGLE
    heads = dataclasses.replace(heads, own_embedding=False)
    params = {key: x for key, x in params.items() if key != "embedding"}
  back, read, config = _exported(tmp_path / "out", heads, params,
                                 "speculators")
  assert back == heads
  ours = safetensors.numpy.load_file(tmp_path / "out/model.safetensors")
  # Of DFlash, speculators takes the embedding from the target.
  assert {key: x.shape for key, x in ours.items()} == {
      key: x.shape for key, x in theirs.items()}
  wanted = _flat(json.loads((directory / "config.json").read_text()))
  found = _flat(config)
  for key in wanted.keys() - _THEIRS:  # what is not written is False
    assert found.get(key, False) == wanted[key], key
  layer = "transformer_layer_config."
  assert found[f"{layer}rope_theta"] == wanted[
      f"{layer}rope_parameters.rope_theta"]
  features = jax.random.normal(jax.random.key(1), (9, 48))
  tokens = jax.random.randint(jax.random.key(2), (12,), 0, 48)
  jax.tree.map(np.testing.assert_array_equal, *(
      _activations(heads, params, features, tokens)
      for params in (params, read)))


def test_files_of_speculators_describe_their_target(tmp_path):
  # Broken: vLLM does not find the target of a drafter that it serves, or loads
  # the weights in another precision.
  heads = methods.Eagle3Heads.for_target(_TARGET, 4)
  _, _, config = _exported(
      tmp_path / "out", heads, _random(heads), dtype="bfloat16",
      verifier="me/target")
  assert config["speculators_config"] == {
      "algorithm": "eagle3", "default_proposal_method": "greedy",
      "proposal_methods": [
          {"proposal_type": "greedy", "speculative_tokens": 4}],
      "verifier": {"name_or_path": "me/target",
                   "architectures": ["LlamaForCausalLM"]}}
  assert config["transformer_layer_config"]["torch_dtype"] == "bfloat16"


def test_heads_that_no_layout_holds(tmp_path):
  # Broken: heads are exported as if they were others, or their user does not
  # learn which layout there is.
  norms = methods.Eagle1Heads.for_target(_TARGET, 2, fusion_norms=True)
  chained = methods.MTPHeads.for_target(_TARGET, 2)
  medusa = methods.MedusaHeads.for_target(_TARGET, 2)
  for heads, layout, message in (
      (methods.PaSSEmbeddings.for_target(_TARGET, 2), None,
       "PaSSEmbeddings cannot be exported, because no server has a layout"),
      (norms, None, "layout 'eagle1': .* parameter module_0.embedding_norm"),
      (chained, None, "layout 'mtp of speculators'"),
      (medusa, "speculators", "use one of medusa, medusa of vllm"),
      (medusa, "x", "layout is 'x'; it must be one of medusa, medusa of vllm")):
    assert bool(layouts_for(heads, _TARGET)) == (heads is medusa)
    with pytest.raises(ValueError, match=message) as error:
      export_drafter(tmp_path / "out", heads, _random(heads), _TARGET, _OWN,
                     layout=layout)
    assert "\n" not in str(error.value)
  assert not (tmp_path / "out").exists()
  params = _random(medusa)
  export_drafter(tmp_path / "out", medusa, params, _TARGET, _OWN)
  before = {path.name for path in (tmp_path / "out").iterdir()}
  with pytest.raises(ValueError, match="contains another model, whose files"):
    export_drafter(tmp_path / "out", medusa, params, _TARGET, _OWN,
                   layout="vllm")
  assert {path.name for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.default_cases(11)
@pytest.mark.parametrize("name", [  # assistants are not trained
    name for name in CASES if name != "assistant"])
def test_published_drafters_can_be_trained(name):
  # Broken: a layout that load_drafter reads cannot be a training's start, or
  # its heads are not those of a method.
  expected = dict(np.load(GOLDEN / "drafters" / name / "expected.npz"))
  own = {name: expected.get(name) for name in ("embedding", "head")}
  frozen = dict(_OWN)
  if own["embedding"] is not None:
    frozen["embedding"] = own["embedding"]
    frozen["head"] = expected.get("head", own["embedding"]).T
  heads, params = methods.load_heads(
      GOLDEN / "drafters" / name, _TARGET, jnp.float32, frozen)
  method = methods.of(heads)
  first = name.partition("_")[0]
  assert method.name == {"parallel": "parallel", "lookahead": "pass"}.get(
      heads.kind, first)
  objective = method.objective(_TARGET, heads, **{
      option.name: option.default for option in method.options})
  loss, _ = jax.eval_shape(
      objective, {"drafter": params}, {"target": frozen},
      {"tokens": jnp.zeros((2, 25), jnp.int32), "progress": jnp.float32(0)},
      jax.random.key(0))
  assert loss.shape == ()


@pytest.mark.parametrize("name", ["medusa", "eagle3", "parallel"])
def test_heads_in_the_box_leave_and_enter(name, tmp_path):
  # Broken: an exported drafter is another one than the bundled one, or
  # generate.py drafts another tree with it.
  target = zoo.load(jnp.float32).target
  heads, params = methods.load_heads(
      zoo.heads_path(name), target.model, jnp.float32)
  for layout in layouts_for(heads, target.model):
    directory = tmp_path / layout
    export_drafter(directory, heads, params, target.model, target.params,
                   layout=layout)
    back, read = methods.load_heads(
        directory, target.model, jnp.float32, target.params)
    if name != "medusa":
      assert dataclasses.replace(back, tie_embeddings=True) == heads
      jax.tree.map(np.testing.assert_array_equal, read, params)
      continue
    hidden = jax.random.normal(jax.random.key(0), (3, heads.width))
    np.testing.assert_allclose(
        back(read, hidden, None),
        heads(params, hidden, methods.lm_head(target.params)), atol=1e-4)


def test_the_layer_for_smollm2_has_no_layout(tmp_path):
  # Broken: smol_eagle is written without its norms, and drafts other tokens.
  target = sj.models.Transformer(sj.models.TransformerConfig(
      vocab_size=49152, width=576, layers=30, heads=9, kv_heads=3, head_dim=64,
      mlp_width=1536, context_length=8192))
  record = json.loads((zoo.heads_path("smol_eagle") / "heads.json").read_text())
  heads = methods.Eagle1Heads(**record["heads"])
  with pytest.raises(ValueError, match="layout 'eagle1': .*embedding_norm"):
    export_drafter(tmp_path / "out", heads, None, target, None)


@pytest.mark.slow
def test_scripts_export_and_import_heads(tmp_path):
  # Broken: the command for exporting fails, says nothing of what it costs, or
  # generate.py chooses another tree with what it wrote; or heads are trained by
  # a method of others.
  exported, beside, again, refused, model = scripts.run_all(
      "export.py", ["--model=medusa", "--output_dir=out"],
      ["--model=pass", "--output_dir=pass"],
      ["--model=out", "--layout=vllm", "--output_dir=vllm"],
      ["--model=eagle3", "--layout=medusa", "--output_dir=none"],
      ["--model=tiny", "--layout=medusa", "--output_dir=none"], cwd=tmp_path)
  from lib import drafters  # pylint: disable=g-import-not-at-top
  assert exported["code"] == 0, exported
  assert "3.2 times the size of the heads" in exported["stdout"]
  assert json.loads(exported["stdout"].splitlines()[-1])["layout"] == "medusa"
  assert "in the layout 'medusa of vllm', float32" in again["stdout"]
  assert "because no server has a layout" in beside["code"]
  assert "use one of eagle3 of speculators" in refused["code"]
  assert "--layout=medusa requires heads, and --model=tiny" in model["code"]
  assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "vllm"]
  _, found, _ = drafters.load("bundled", [
      "medusa", str(tmp_path / "out"), str(tmp_path / "vllm")])
  own, *others = (one.strategy.drafter.shape for one in found.values())
  assert others == [own, own]
  [wrong, missing] = scripts.run_all(
      "train_drafter.py",
      ["--method=eagle3", "--heads_from=out", "--output_dir=x"],
      ["--method=eagle3", "--heads_from=there", "--output_dir=x"], cwd=tmp_path)
  assert wrong["code"].endswith(
      "--method=medusa or --method=medusa2, or give other heads")
  assert "there contains no heads" in missing["code"]
