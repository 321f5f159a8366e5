"""Published checkpoints compute here what they compute in transformers.

The recorded models, texts and logits are those of golden/make.py.
"""

import dataclasses
import functools
import json

from golden.recorded import CASES
from golden.recorded import config_of
from golden.recorded import expected_of
from golden.recorded import GOLDEN
from golden.recorded import loaded
from golden.recorded import params_equal
from golden.recorded import settings_of
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import specjax as sj
from specjax import testing
from specjax.models import export
from specjax.models import export_pretrained
from specjax.models import load_pretrained
from specjax.models import rotary
from specjax.models import safetensors_files
from specjax.models.architectures import ARCHITECTURES
from specjax.models.configuration_keys import Keys

# One of each.
_ARCHITECTURES = ["gemma", "gemma2", "gemma3", "gemma4", "gpt2", "gpt_neox",
                  "lfm2", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3",
                  "qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3_next_moe"]
_RECURRENT = ("lfm2", "qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3_next_moe")
_DENSE = ["granite", "granite_dense", "ministral3", "olmo3", "smollm3"]
_EXPERTS = ["glm4_moe", "gpt_oss", "granite_moe", "granite_shared", "mixtral",
            "olmoe", "qwen2_moe", "qwen3_moe"]
_DEPTH = 6  # of the trees; a window of the recorded models is 5


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


@pytest.mark.parametrize("name", sorted(
    {*CASES} - {*_ARCHITECTURES, *_DENSE, *_EXPERTS}))
def test_variants_are_those_of_transformers(name):
  # Broken: a kind of rotary positions, windows in some layers or a sequential
  # residual stream are another one.
  found, expected = loaded(name), expected_of(name)
  _near(jax.jit(found.model)(found.params, expected["tokens"][None]).logits[0],
        expected["logits"])


@pytest.mark.default_cases(3)
@pytest.mark.parametrize("name", _ARCHITECTURES + _DENSE + _EXPERTS)
def test_logits_are_those_of_transformers(name):
  # Broken: a published model loads, and is another one; or a pass over a tree
  # with a past computes something else than the texts of its paths.
  found, expected = loaded(name), expected_of(name)
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


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("shape,name", [
    pytest.param(shape, name, marks=() if quick else pytest.mark.slow)
    for name in (*_DENSE, *_EXPERTS) for shape, quick in (
        ("chain", name == "ministral3"), ("tree", name == "glm4_moe"))])
def test_greedy_texts_through_a_drafter(name, shape):
  # Broken: rows of several lengths, a draft's positions or the rows of a tree
  # get the rotation, the window or the experts of others.
  found, expected = loaded(name), expected_of(name)
  text, prompt = expected["tokens"], int(expected["prompt"])
  rng = np.random.default_rng(0)
  worse = jax.tree.map(  # it agrees often, but not always
      lambda x: x + 0.1 * np.std(x) * rng.normal(size=x.shape).astype(
          np.float32), found.params)
  shape, rule = {
      "chain": (sj.drafters.Chain(3), sj.verifiers.Token()),
      "tree": (sj.drafters.Tree((-1, 0, 0, 1, 2, 3)),
               sj.verifiers.Recursive())}[shape]
  decoder = sj.Decoder(
      target=found.model, verifier=rule, drafter=sj.drafters.NetworkDrafter(
          network=sj.drafters.LanguageModel(model=found.model), shape=shape),
      transform=sj.LogitsTransform(temperature=0))
  out = decoder.generate(
      {"target": found.params, "drafter": worse},
      [text[:start].tolist() for start in (prompt, prompt + 3, prompt + 7)],
      jax.random.key(0), max_new_tokens=len(text) - prompt)
  for row in out.tokens:
    np.testing.assert_array_equal(row[:len(text)], text)
  assert out.stats.accepted.sum() > 0 and out.stats.accepted.sum() < (
      3 * out.stats.active.sum())


@pytest.mark.slow
@pytest.mark.parametrize("name", _ARCHITECTURES)
def test_greedy_text_is_that_of_transformers(name):
  # Broken: the loop and its cache read a published model wrongly.
  found, expected = loaded(name), expected_of(name)
  drafter, verifier = sj.strategies.autoregressive()
  decoder = sj.Decoder(target=found.model, drafter=drafter, verifier=verifier,
                       transform=sj.LogitsTransform(temperature=0))
  text, prompt = expected["tokens"], int(expected["prompt"])
  out = decoder.generate({"target": found.params}, [text[:prompt].tolist()],
                         jax.random.key(0), max_new_tokens=len(text) - prompt)
  np.testing.assert_array_equal(out.tokens[0], text)


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("name", (*_RECURRENT, "gemma4"))
@pytest.mark.parametrize("parents", [
    pytest.param((-1, 0, 0, 2, 2, 4), id="tree"),
    pytest.param(None, id="chain", marks=pytest.mark.slow)])
def test_drafts_on_layers_of_several_kinds_leave_the_text(name, parents):
  # Broken: rejected tokens, or padding of shorter prompts, stay in a state, or
  # a layer reads keys that a draft added to another one.
  found, expected = loaded(name), expected_of(name)
  text, prompt = expected["tokens"].tolist(), int(expected["prompt"])
  prompts = [text[:n] for n in (prompt, prompt + 1, prompt + 5)]
  wrong = [t if i % 5 else (t + 1) % 48 for i, t in enumerate(text)]
  if parents:
    verifier = sj.verifiers.TargetWalk()
    drafter = _TreeOfTwo(gamma=3, parents=parents)
  else:
    verifier, drafter = sj.verifiers.Token(), testing.OracleDrafter(gamma=3)
  decoder = sj.Decoder(target=found.model, drafter=drafter, verifier=verifier,
                       transform=sj.LogitsTransform(temperature=0))
  out = decoder.generate(
      {"target": found.params, "drafter": jnp.array([wrong] * 3)}, prompts,
      jax.random.key(0), max_new_tokens=len(text) - prompt)
  for row in out.tokens:
    np.testing.assert_array_equal(row[:len(text)], text)
  assert (np.asarray(out.stats.accepted) >= 4).all()


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("cache,tolerance", [
    (sj.caches.Streaming(sinks=0, window=64), 1e-4),
    (sj.caches.Paged(page=16), 1e-4),
    (sj.caches.QuantizedKV(bits=8), 0.1)])
def test_sinks_in_every_cache(cache, tolerance):
  # Broken: a cache leaves out the sinks, or counts them once for the slots and
  # once for the block.
  found, expected = loaded("gpt_oss"), expected_of("gpt_oss")
  model = dataclasses.replace(found.model, cache=cache)
  text = expected["tokens"]
  start = len(text) // 2

  @jax.jit
  def halves(params, first, second):
    cache = model.init_cache(params, 1, 64)
    out = model(params, first, *_chain(start), cache)
    cache = out.cache.rollback(jnp.array([start]))
    return model(params, second, *_chain(len(text) - start), cache).logits[0]

  logits = expected["logits"][start:]
  np.testing.assert_allclose(
      halves(found.params, text[None, :start], text[None, start:]), logits,
      rtol=0, atol=tolerance * np.abs(logits).max())


def test_mxfp4_of_two_shapes(tmp_path):
  # Broken: scales of another tensor are read.
  from safetensors.numpy import load_file
  from safetensors.numpy import save_file
  source = GOLDEN / "gpt_oss_mxfp4"
  tensors = load_file(source / "model.safetensors")
  name = "model.layers.0.mlp.experts.down_proj_scales"
  tensors[name] = tensors[name][:, :-1]
  save_file(tensors, tmp_path / "model.safetensors")
  (tmp_path / "config.json").write_text((source / "config.json").read_text())
  with pytest.raises(ValueError, match="down_proj_blocks.*MXFP4 needs 16"):
    load_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["gemma4", "gemma4_keys"])
def test_gemma_4_beside_its_encoders(name, tmp_path):
  # Broken: a published Gemma 4 is refused, for its encoders or for keys that
  # no layer computes, or the sizes of layers without a window are overlooked.
  from safetensors.numpy import load_file
  from safetensors.numpy import save_file
  text = settings_of(name)
  sizes = next(iter(text.pop("per_layer_config").values()))
  text |= dict(global_head_dim=sizes["head_dim"],
               num_global_key_value_heads=sizes.get("num_key_value_heads"))
  tensors = {key.replace("model.", "model.language_model.", 1): x for key, x in
             load_file(GOLDEN / name / "model.safetensors").items()}
  tensors |= {f"model.{tower}.x.weight": np.ones(3) for tower in (
      "audio_tower", "vision_tower", "embed_vision", "embed_audio")}
  if text["num_kv_shared_layers"]:
    tensors |= {f"model.language_model.layers.4.self_attn.{part}.weight":
                np.ones(3) for part in ("k_proj", "v_proj", "k_norm")}
  save_file(tensors, tmp_path / "model.safetensors")
  (tmp_path / "config.json").write_text(json.dumps({
      "architectures": ["Gemma4ForConditionalGeneration"],
      "model_type": "gemma4", "text_config": text, "audio_config": {},
      "eos_token_id": 1}))
  found, wanted = load_pretrained(tmp_path, dtype=jnp.float32), loaded(name)
  assert found.model == wanted.model
  params_equal(found.params, wanted.params, rtol=0, atol=0)


def test_numbers_of_layers_with_zeros():
  # Broken: Gemma 4 with ten layers or more is refused, because transformers
  # pads the numbers.
  settings = settings_of("gemma4")
  size = next(iter(settings["per_layer_config"].values()))
  settings |= dict(
      num_hidden_layers=12, num_kv_shared_layers=0, layer_types=[
          "full_attention" if i in (5, 11) else "sliding_attention"
          for i in range(12)], per_layer_config={"05": size, "11": size})
  assert config_of(settings).global_head_dim == size["head_dim"]


@pytest.mark.parametrize("name", sorted({*ARCHITECTURES} - {"mimo"}))
def test_defaults_are_those_of_transformers(name):
  # Broken: a key that a file leaves out has another value than in transformers.
  full = CONFIG_MAPPING[name]().to_dict()
  if name == "glm4_moe":
    full |= dict(head_dim=128)  # the default has an odd number of rotations
  if name == "granitemoehybrid":  # the default has layers of Mamba
    full |= dict(layer_types=["full_attention"] * full["num_hidden_layers"])
  required = {
      "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
      "intermediate_size", "n_embd", "n_layer", "n_head", "layer_types",
      *["head_dim"] * (name == "glm4_moe"),
      *["rope_parameters"] * (name in ("gpt_oss", "ministral3"))}
  architecture = ARCHITECTURES[name]
  read = lambda keys: architecture.config(
      Keys(keys, name, architecture.defaults), True)
  assert read(full) == read({key: full[key] for key in required & {*full}})


def test_parameters_that_are_never_rounded():
  # Broken: the bias of a router is rounded to bfloat16, and with it the choice
  # of experts; or a decay that acts at every token.
  for name, layer, part in (("glm4_moe", "mlp_1", "choice_bias"),
                            ("qwen3_5", "delta_0", "rate")):
    params = load_pretrained(GOLDEN / name, dtype=jnp.bfloat16).params
    assert params[layer][part].dtype == jnp.float32
    assert params["embedding"].dtype == jnp.bfloat16


def test_parts_that_need_equal_layers():
  # Broken: a pass over some layers of Gemma 4 reads keys or embeddings of
  # others, or a cache stores keys of another width.
  config = loaded("gemma4").model.config
  with pytest.raises(ValueError, match="shared or differ.*needs a KVCache"):
    sj.models.Transformer(config, cache=sj.caches.Paged(page=16))
  view = sj.models.cache_views.Retrieved(budget=8, chunk=4)
  plain = dataclasses.replace(config, windows=())
  for message, strategy in (
      ("must run all layers", sj.strategies.early_exit(1, 2)),
      ("layers that share keys", sj.strategies.triforce(
          view, sj.drafters.Empty(), gamma=2))):
    with pytest.raises(ValueError, match=message):
      strategy.decoder(sj.models.Transformer(plain))
  with pytest.raises(ValueError, match="set local_rope_theta"):
    dataclasses.replace(config, local_rope_theta=None)
  # A layer of EAGLE has keys of its own, of one width.
  layer = sj.methods.Eagle3Heads.for_target(loaded("gemma4").model, 2)
  assert layer.has_uniform_keys and layer.key_shape(0) == (1, 8)


def _with_images(directory, kind="qwen3_5", **more):
  """Qwen3.5 as it is published, beside an image encoder and `more` tensors."""
  from safetensors.numpy import load_file
  from safetensors.numpy import save_file
  source = GOLDEN / kind
  tensors = load_file(source / "model.safetensors")
  moved = {name.replace("model.", "model.language_model.", 1): x
           for name, x in tensors.items()}
  save_file(moved | more | {"model.visual.blocks.0.norm1.weight": np.ones(3)},
            directory / "model.safetensors")
  text = json.loads((source / "config.json").read_text())
  (directory / "config.json").write_text(json.dumps({
      "architectures": ["Qwen3_5ForConditionalGeneration"],
      "model_type": kind, "image_token_id": 5, "vision_config": {},
      "tie_word_embeddings": text["tie_word_embeddings"], "text_config": text}))
  return directory


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("images", [False, True])
def test_the_module_of_a_hybrid_model_drafts_for_it(images, tmp_path):
  # Broken: the published head of Qwen3.5 loads, and is another one: its gate,
  # its norms, or the order of what it reads.
  directory = _with_images(tmp_path) if images else GOLDEN / "qwen3_5"
  found, expected = loaded("qwen3_5"), expected_of("qwen3_5")
  if images:
    found = load_pretrained(directory, dtype=jnp.float32)
    assert found.model == loaded("qwen3_5").model
    params_equal(found.params, loaded("qwen3_5").params, rtol=0, atol=0)
  heads, own = sj.methods.load_drafter(
      directory, found.model, found.params, dtype=jnp.float32)
  assert heads.attention_gate and heads.reuse and heads.recurrent is None
  target, params = heads.attach(found.model, found.params, own)
  text = jnp.asarray(expected["tokens"])[None]

  @jax.jit
  def drafted(params):
    hidden = target(params["target"], text).hidden[:, :-1]
    out = heads.step(params["drafter"], params["target"], heads.enter(
        params["drafter"], heads.taps_of(hidden)), text[:, 1:])
    return heads.logits(params["drafter"], params["target"], out.read)[0]

  _near(drafted(params), expected["drafted"])
  if images:
    return
  drafter, verifier = sj.strategies.mtp(heads, gamma=3)
  decoder = sj.Decoder(target=target, drafter=drafter, verifier=verifier,
                       transform=sj.LogitsTransform(temperature=0))
  tokens, prompt = expected["tokens"].tolist(), int(expected["prompt"])
  prompts = [tokens[:n] for n in (prompt, prompt + 2, prompt + 7)]
  out = decoder.generate(params, prompts, jax.random.key(0),
                         max_new_tokens=len(tokens) - prompt)
  for row in out.tokens:
    np.testing.assert_array_equal(row[:len(tokens)], tokens)
  testing.assert_state_exact(dataclasses.replace(
      decoder, transform=sj.LogitsTransform()), params, prompts, rounds=2)


def test_qwen_3_5_with_experts_beside_its_encoder(tmp_path):
  # Broken: a published Qwen3.5 with experts is refused for its encoder or its
  # module, or the module drafts without its experts.
  directory = _with_images(tmp_path, "qwen3_5_moe", **{
      "mtp.fc.weight": np.ones((16, 32)), "mtp.layers.0.mlp.experts.down_proj":
      np.ones((5, 16, 12))})
  found, wanted = load_pretrained(directory, dtype=jnp.float32), loaded(
      "qwen3_5_moe")
  assert found.model == wanted.model
  params_equal(found.params, wanted.params, rtol=0, atol=0)
  expected = expected_of("qwen3_5_moe")
  _near(jax.jit(found.model)(found.params, expected["tokens"][None]).logits[0],
        expected["logits"])
  with pytest.raises(ValueError, match="a mixture of experts"):
    sj.methods.load_drafter(directory, found.model)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _TreeOfTwo(testing.OracleDrafter):
  """The oracle's tokens in the last child of every level; the others err."""

  parents: tuple[int, ...]
  provides = ("conditional", "autoregressive", "deterministic")

  @property
  def num_nodes(self):
    return len(self.parents)

  def propose(self, params, uniforms, state):
    draft, drafter = super().propose(params, uniforms, state)
    at = np.array(sj.trees.depths(self.parents))
    right = np.array([i == max(j for j, d in enumerate(at) if d == at[i])
                      for i in range(len(at))])
    tokens = jnp.where(right, draft.tokens[:, at],
                       (draft.tokens[:, at] + 2) % self.vocab_size)
    return draft.replace(
        tokens=tokens, probs=jax.nn.one_hot(tokens, self.vocab_size),
        parents=jnp.broadcast_to(
            jnp.array(self.parents, jnp.int32), tokens.shape)), drafter


_GGUF = [name for name in CASES if name not in (
    "qwen2_windows", "gemma4", "gemma4_keys", "gpt_oss_mxfp4",
    *_RECURRENT, *_DENSE, *_EXPERTS)]


@pytest.mark.parametrize("name", _GGUF)
def test_gguf_is_the_same_model(name, tmp_path):
  # Broken: permuted queries, norms plus one, fused parts or the metadata of a
  # GGUF file are read wrongly.
  pytest.importorskip("gguf")
  from golden import gguf_writer
  path = tmp_path / "model.gguf"
  gguf_writer.write(GOLDEN / name, path)
  found = load_pretrained(path, dtype=jnp.float32, context_length=(
      64 if name == "phi3_long" else None))
  wanted = loaded(name)
  params_equal(found.params, wanted.params, rtol=0, atol=1e-6)
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


def test_norms_of_a_gguf_are_rounded_once(tmp_path):
  # Broken: Gemma's norms, which a GGUF file has plus one, lose the digits in
  # bfloat16 that the one takes.
  pytest.importorskip("gguf")
  from golden import gguf_writer
  path = tmp_path / "model.gguf"
  gguf_writer.write(GOLDEN / "gemma", path)
  found, wanted = (load_pretrained(place, dtype=jnp.bfloat16).params
                   for place in (path, GOLDEN / "gemma"))
  # In float32 the difference may be off by an ulp of one, and so be rounded
  # to the other neighbour.
  as_float = lambda tree: jax.tree.map(np.float32, tree)
  params_equal(as_float(found), as_float(wanted), rtol=2.0**-7, atol=0)


def test_quantised_gguf(tmp_path, monkeypatch):
  # Broken: dequantised pieces are put together wrongly, or a type is left as
  # bytes.
  gguf = pytest.importorskip("gguf")
  from golden import gguf_writer
  path, kind = tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q8_0
  gguf_writer.write(GOLDEN / "gpt2", path, kind)
  table = np.asarray(loaded("gpt2").params["embedding"])
  quantised = gguf.dequantize(gguf.quantize(table, kind), kind)
  monkeypatch.setattr(safetensors_files, "_AT_ONCE", 5 * table.shape[1])
  found = load_pretrained(path, dtype=jnp.bfloat16).params["embedding"]
  assert found.dtype == jnp.bfloat16
  np.testing.assert_array_equal(found, jnp.asarray(quantised, jnp.bfloat16))
  assert 0 < np.abs(quantised - table).max() < 0.05


@pytest.mark.parametrize("name", [
    name for name in CASES if settings_of(name).get("rope_parameters")
    and not name.startswith("gemma4")])
def test_older_configurations(name):
  # Broken: rope_theta and rope_scaling, as all files had them before
  # transformers 5, are overlooked.
  settings = settings_of(name)
  new = config_of(settings)
  rope = settings.pop("rope_parameters")
  if settings["model_type"] == "olmo3":  # equal bases
    rope = rope["full_attention"]
  elif "full_attention" in rope:
    settings["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    rope = rope["full_attention"]
  neox = settings["model_type"] == "gpt_neox"
  settings["rotary_emb_base" if neox else "rope_theta"] = rope.pop("rope_theta")
  fraction = rope.pop("partial_rotary_factor", None)
  if fraction:
    settings["rotary_pct" if neox else "partial_rotary_factor"] = fraction
  rope["type"] = rope.pop("rope_type")
  settings["rope_scaling"] = rope if rope["type"] != "default" else None
  assert config_of(settings) == new


@pytest.mark.parametrize("name,context,windows,kind", [
    ("Llama 3.2", 131_072, set(), "llama3"), ("SmolLM2", 8192, set(), None),
    ("Mistral 0.1", 32_768, {4096}, None), ("Qwen 2.5", 32_768, set(), None),
    ("Qwen 2.5 with YaRN", 32_768, set(), "yarn"),
    ("Qwen 3", 40_960, set(), None), ("Gemma", 8192, set(), None),
    ("Gemma 2", 8192, {0, 4096}, None), ("Gemma 3", 32_768, {0, 512}, None),
    ("Gemma 3 with images", 131_072, {0, 1024}, "linear"),
    ("GPT-2", 1024, set(), None), ("Pythia", 2048, set(), None),
    ("Phi-3 mini", 4096, {2047}, None),
    ("Phi-4 mini", 4096, set(), "longrope"),
    ("LFM2", 128_000, set(), None), ("Qwen 3.5", 262_144, set(), None),
    ("Qwen3-Next", 262_144, set(), None),
    ("GPT-OSS", 131_072, {0, 128}, "yarn"),
    ("OLMo-2", 4096, set(), None)])
def test_keys_that_published_configurations_have(name, context, windows, kind):
  # Broken: a harmless key of a real model is refused, or one that counts is
  # passed over. The entries of the file have the keys of published files, but
  # for what was made up after them: "Phi-4 mini" (its factors stand for the
  # published ones), "Qwen 2.5 with YaRN" (with the scaling that its makers
  # advise) and "Gemma 3 with images" (its text alone, without what is default).
  path = GOLDEN / "configurations.json"
  config = config_of(json.loads(path.read_text())[name])
  assert config.context_length == context
  assert set(config.windows) == windows
  assert (config.rope_scaling and config.rope_scaling.kind) == kind
  untied = ("Mistral 0.1", "Pythia", "Phi-3 mini", "OLMo-2", "Qwen3-Next",
            "GPT-OSS")
  assert config.tie_embeddings == (name not in untied)


def test_keys_that_change_nothing():
  # Broken: models whose files hold what generation, training or an older
  # library wrote there are refused.
  settings = settings_of("mistral")
  harmless = dict(
      predict_special_tokens=True, output_past=True, max_sequence_length=2048,
      custom_pipelines={"x": {}}, attention_probs_dropout_prob=0.1,
      length_penalty=1.0, num_beams=4, typical_p=1.0, is_causal=True,
      sliding_window_size=5, partial_rotary_factor=1.0)
  assert config_of(settings | harmless) == config_of(settings)


@pytest.mark.parametrize("name,changed", [
    ("lfm2", dict(conv_bias=True)), ("lfm2", dict(use_pos_enc=False)),
    ("lfm2", dict(block_dim=31)), ("lfm2", dict(block_use_swiglu=False)),
    ("lfm2", dict(layer_types=["conv", "full_attention", "linear_attention"])),
    ("qwen3_5", dict(layer_types=["linear_attention"] * 4)),
    ("qwen3_5", dict(attn_output_gate=False)),
    ("qwen3_5", dict(mamba_ssm_dtype="bfloat16")),
    ("qwen3_5", dict(mlp_only_layers=[1])),
    ("qwen3_5", dict(mtp_use_dedicated_embeddings=True)),
    ("gemma4", dict(enable_moe_block=True)),
    ("gemma4", dict(attention_bias=True)),
    ("gemma4", dict(use_bidirectional_attention="all")),
    ("gemma4", dict(vocab_size_per_layer_input=40)),
    ("gemma4", dict(layer_types=["full_attention"] * 4 + ["sliding_attention"]
                    )),
    ("gemma4", dict(per_layer_config={"0": {"head_dim": 4}})),
    ("gemma4", dict(per_layer_config={"full": {"head_dim": 4}})),
    ("gemma4", dict(altup_num_inputs=4)),
    ("gemma4", dict(num_kv_shared_layers=4)),
    ("gpt_oss", dict(rope_parameters=None)),
    ("ministral3", dict(rope_parameters=None)),
    ("gpt_oss", dict(swiglu_alpha=1.0)),
    ("gpt_oss", dict(experts_per_token=1)),
    ("qwen2_moe", dict(use_sliding_window=True)),
    ("qwen3_5_moe", dict(decoder_sparse_step=2)),
    ("qwen3_5_moe", dict(mlp_only_layers=[1])),
    ("qwen3_5_moe", dict(norm_topk_prob=False)),
    ("qwen3_next_moe", dict(shared_expert_intermediate_size=0))])
def test_settings_of_layers_that_are_refused(name, changed):
  # Broken: a model with another layer loads, and writes something else.
  wrong = [*changed, *["shared_layers"] * ("num_kv_shared_layers" in changed)]
  with pytest.raises(ValueError, match="|".join(wrong)):
    config_of(settings_of(name) | changed)


def _without(settings, *names):
  return {name: value for name, value in settings.items() if name not in names}


def test_what_a_configuration_leaves_out():
  # Broken: where a file leaves out a window, a head, an activation or a
  # context, the model gets another one than transformers gives it.
  for name in ("qwen2_windows", "gemma2"):
    settings = settings_of(name)
    assert config_of(_without(settings, "layer_types")) == config_of(settings)
  published = json.loads((GOLDEN / "configurations.json").read_text())
  windows = config_of(published["Gemma 3"]).windows
  assert [i for i, size in enumerate(windows) if not size] == [5, 11, 17, 23]
  assert config_of(published["Gemma"]).activation == "gelu_tanh"
  phi = published["Phi-4 mini"]
  assert config_of(_without(phi, "original_max_position_embeddings")
                 ) == config_of(phi)
  silent = _without(settings_of("llama"), "tie_word_embeddings")
  assert config_of(silent, has_head=False).tie_embeddings
  assert not config_of(silent, has_head=True).tie_embeddings


@pytest.mark.parametrize("name", CASES)
def test_export_is_loading_backwards(name, tmp_path):
  # Broken: transformers and others get another model than we have.
  found = loaded(name)
  kind = export_pretrained(tmp_path, found.model, found.params)
  # Without experts, qwen3_5_text and qwen3_next are the same model.
  other = {"qwen3_5_text": "qwen3_next", "granitemoehybrid": "granite"}
  assert other.get(kind, kind) == other.get(
      found_type := settings_of(name)["model_type"], found_type)
  again = load_pretrained(tmp_path, dtype=jnp.float32)
  assert again.model == found.model
  params_equal(again.params, found.params, rtol=0, atol=0)


def test_odd_widths_are_exported_as_what_transformers_takes():
  # Broken: transformers refuses a Llama whose heads do not divide its width.
  config = sj.models.TransformerConfig(
      vocab_size=8, width=10, layers=1, heads=3, kv_heads=3, head_dim=4,
      mlp_width=8, context_length=16)
  assert export.express(config)[0] == "mistral"
  assert export.express(dataclasses.replace(config, width=12))[0] == "llama"


def test_what_cannot_be_exported(tmp_path):
  # Broken: a model is written as an architecture that computes another one.
  config = dataclasses.replace(loaded("gemma2").model.config, qk_norm="all")
  with pytest.raises(ValueError, match="no published architecture"):
    export_pretrained(tmp_path, sj.models.Transformer(config), {})
  model, params = loaded("gpt2").model, dict(loaded("gpt2").params)
  params["positions"] = params["positions"].at[0, 0].set(1e5)
  with pytest.raises(ValueError, match="float16"):
    export_pretrained(tmp_path, model, params, dtype=np.float16)
  for write in (export_pretrained, sj.models.save_model):
    with pytest.raises(ValueError, match="dtype is int8.*integer"):
      write(tmp_path, model, params, dtype="int8")
  with pytest.raises(ValueError, match="dtype is int8"):
    load_pretrained(GOLDEN / "gpt2", dtype="int8")
  quantised = sj.models.quantize(loaded("gpt2").params)
  heads = sj.methods.MedusaHeads.for_target(model, 1)
  for write in (export_pretrained, sj.models.save_model, lambda path, *found:
                sj.methods.save_heads(path, heads, found[1], model)):
    with pytest.raises(ValueError, match="is a QuantizedMatrix, but only"):
      write(tmp_path, model, quantised)
  assert not [*tmp_path.iterdir()]
  (tmp_path / "chat_template.jinja").write_text("another model's")
  with pytest.raises(ValueError, match="chat_template.jinja.* remove it"):
    export_pretrained(tmp_path, model, loaded("gpt2").params,
                      tokenizer=sj.data.tokenizers.train(["law"], 257))
  assert len([*tmp_path.iterdir()]) == 1
