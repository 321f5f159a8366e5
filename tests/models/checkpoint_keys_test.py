"""Keys of checkpoints under several names, and files that are other models."""

import dataclasses
import json
import shutil

from golden.recorded import config_of
from golden.recorded import GOLDEN
from golden.recorded import loaded
from golden.recorded import params_equal
from golden.recorded import settings_of
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tokenizers as library

import specjax as sj
from specjax.data import tokenizers
from specjax.methods import load_drafter
from specjax.models import load_pretrained
from specjax.models import model_files

_TARGET = sj.models.Transformer(sj.models.TransformerConfig(
    vocab_size=48, width=16, layers=12, heads=4, kv_heads=2, head_dim=8,
    mlp_width=24, context_length=64))


def _old(settings):
  """The keys about positions that transformers wrote before rope_parameters."""
  rope = dict(settings["rope_parameters"])
  found = {}
  if "full_attention" in rope:
    found["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    rope = dict(rope["full_attention"])
  neox = settings["model_type"] == "gpt_neox"
  found["rotary_emb_base" if neox else "rope_theta"] = rope.pop("rope_theta")
  fraction = rope.pop("partial_rotary_factor", None)
  if fraction:
    found["rotary_pct" if neox else "partial_rotary_factor"] = fraction
  rope["type"] = rope.pop("rope_type")
  return found | {"rope_scaling": rope}


_ROPE = ["llama", "llama_linear", "llama_llama3", "llama_yarn", "gemma3",
         "phi3", "phi3_long", "gpt_neox", "mistral", "qwen3"]


@pytest.mark.parametrize("name", _ROPE)
def test_positions_in_two_places(name):
  # Broken: a file whose exporter wrote the old and the new keys is refused, or
  # one of two values is taken without a word.
  settings = settings_of(name)
  old = _old(settings)
  assert config_of(settings | old) == config_of(settings)
  for key, value in old.items():
    if key == "rope_scaling":
      continue
    with pytest.raises(ValueError, match=(
        rf"has {value / 2} for {key} and {value} in rope_parameters\..*equal|"
        rf"has {value / 2} for {key} and {value} for rot")):
      config_of(settings | old | {key: value / 2})
  scaling = old["rope_scaling"]
  for key, value in scaling.items():
    if isinstance(value, float) and key != "attention_factor":
      other = settings | {"rope_scaling": scaling | {key: value + 1}}
      with pytest.raises(ValueError, match=(
          rf"has {value} for rope_parameters\S*\.{key} and {value + 1} in "
          rf"rope_scaling\.{key}")):
        config_of(other)
  with pytest.raises(ValueError, match="rope_type and 'spiral' in rope_scali"):
    config_of(settings | {"rope_scaling": {"rope_type": "spiral"}})


def test_two_lengths_of_phi3():
  # Broken: the factors for long texts begin elsewhere than one key says.
  settings = settings_of("phi3_long")
  with pytest.raises(ValueError, match="has 32 for original_max_position_emb.*"
                     "and 16 in rope_parameters.original_max_position"):
    config_of(settings | {"original_max_position_embeddings": 32})
  del settings["original_max_position_embeddings"]
  assert config_of(settings) == config_of(settings_of("phi3_long"))


@pytest.mark.parametrize("name, key, twin", [
    ("gpt2", "hidden_size", "n_embd"), ("gpt2", "num_hidden_layers", "n_layer"),
    ("gpt2", "max_position_embeddings", "n_positions"),
    ("mistral", "sliding_window_size", "sliding_window"),
    ("llama", "n_head", "num_attention_heads"),
    ("gemma3", "sliding_window_pattern", "_sliding_window_pattern")])
def test_two_names_of_a_key(name, key, twin):
  # Broken: a name that transformers reads as well is refused as unknown, or
  # its value is not compared.
  settings = settings_of(name)
  value = settings[twin]
  assert config_of(settings | {key: value}) == config_of(settings)
  with pytest.raises(ValueError, match=rf"(has|and) {value} (for|in) {twin}"):
    config_of(settings | {key: value + 1})


def _drafter(tmp_path, name, tensors=None, drop=(), **keys):
  """The heads of a recorded drafter with other keys."""
  directory = tmp_path / name
  shutil.rmtree(directory, ignore_errors=True)
  shutil.copytree(GOLDEN / "drafters" / name, directory)
  path = directory / "config.json"
  config = json.loads(path.read_text()) | keys
  path.write_text(json.dumps({k: v for k, v in config.items()
                              if k not in drop}))
  if tensors:
    weights = directory / "model.safetensors"
    safetensors.numpy.save_file(
        safetensors.numpy.load_file(weights) | tensors, weights)
  return load_drafter(directory, _TARGET)[0]


@pytest.mark.parametrize("name", ["eagle1", "eagle3_specforge", "dflash"])
def test_drafters_with_keys_in_two_places(tmp_path, name):
  # Broken: heads that transformers 5 has written again are refused.
  known = _drafter(tmp_path, name)
  theta = known.rope_theta
  both = dict(rope_theta=theta, rope_parameters=dict(
      rope_type="default", rope_theta=theta))
  assert _drafter(tmp_path, name, **both) == known
  with pytest.raises(ValueError, match="for rope_theta and .* in rope_paramet"):
    _drafter(tmp_path, name, **both | {"rope_theta": theta + 1})


def test_keys_of_a_layer_beside_it(tmp_path):
  # Broken: a size that lies beside transformer_layer_config as well is refused
  # as unknown, or is not compared.
  name = "eagle3_speculators"
  known = _drafter(tmp_path, name)
  assert _drafter(tmp_path, name, hidden_size=16, vocab_size=48) == known
  with pytest.raises(ValueError, match="has 17 for hidden_size and 16 in trans"
                     "former_layer_config.hidden_size"):
    _drafter(tmp_path, name, hidden_size=17)


_IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize("keys", [
    {"eagle_config": {_IDS: [1, 4, 7]}}, {_IDS: [2, 5, 8]},
    {"aux_hidden_state_layer_ids": [2, 5, 8]}, {"target_layer_ids": [1, 4, 7]},
    {"eagle_config": {"target_layer_ids": [1, 4, 7]}},
    {"eagle_config": {_IDS: [1, 4, 7]}, _IDS: [1, 4, 7]},
    {"eagle_config": {_IDS: [1, 4, 7]}, _IDS: [2, 5, 8]}])
@pytest.mark.parametrize("name", ["eagle3", "eagle3_specforge"])
def test_layers_of_a_head_where_projects_write_them(
    tmp_path, capsys, name, keys):
  # Broken: a head reads other states than it was trained on, since its file
  # names them where another project does.
  found = _drafter(tmp_path, name, **{"eagle_config": {}} | keys)
  assert found.taps == (2, 5, 8)
  assert not capsys.readouterr().err


def test_layers_that_are_assumed_are_told(tmp_path, capsys):
  # Broken: a head is slower than no drafter, and nothing says why; or a key
  # that may name its layers is to be removed.
  heads = _drafter(tmp_path, "eagle3")
  told = capsys.readouterr().err
  assert heads.taps == (2, 6, 9)
  assert "eagle3 does not name" in told and "2, 6 and 9 are assumed" in told
  assert _IDS in told
  _drafter(tmp_path, "eagle3_speculators", drop=(_IDS,))
  assert "2, 6 and 9 are assumed" in capsys.readouterr().err
  for keys in ({"draft_layer_ids": [1, 4, 7]}, {"fused_layers": [1, 4, 7]},
               {"dflash_config": {"target_layer_ids": [1, 4, 7]}},
               {"eagle_config": {"layers_to_capture": [1, 4, 7]}}):
    with pytest.raises(ValueError, match=f"write it as {_IDS}") as e:
      _drafter(tmp_path, "eagle3", **keys)
    assert "do not take it out" in str(e.value)
  with pytest.raises(ValueError, match=(
      rf"has \(1, 4, 7\) for eagle_config.{_IDS} and \(3, 5, 8\) for {_IDS}")):
    _drafter(tmp_path, "eagle3", **{
        "eagle_config": {_IDS: [1, 4, 7]}, _IDS: [3, 5, 8]})
  with pytest.raises(ValueError, match="does not name the 5 hidden states"):
    _drafter(tmp_path, "eagle3_deepspec", drop=("target_layer_ids",))


@pytest.mark.parametrize("name, layers", [
    ("eagle1", 1), ("eagle3", 1), ("eagle3_deepspec", 1), ("dflash", 2)])
def test_the_tensors_say_how_many_layers(tmp_path, name, layers):
  # Broken: a head of one layer is refused, since its configuration has the
  # target's number.
  keys = dict(num_hidden_layers=12)
  if "layer_types" in json.loads(
      (GOLDEN / "drafters" / name / "config.json").read_text()):
    keys["layer_types"] = ["full_attention"] * 12
  found = _drafter(tmp_path, name, **keys)
  assert found == _drafter(tmp_path, name) and found.layers == layers


@pytest.fixture(name="copy")
def _copy(tmp_path):
  def copy(name, change=None, **settings):
    target = tmp_path / name
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    (target / "config.json").write_text(json.dumps(
        settings_of(name) | settings))
    held = {key: np.asarray(x.read()) for key, x in
            model_files.open_directory(GOLDEN / name).items()}
    (target / "model.safetensors").write_bytes(
        safetensors.numpy.save(change(held) if change else held))
    return target

  return copy


def _without_head(held):
  return {name: x for name, x in held.items() if name != "lm_head.weight"}


def test_keys_around_those_of_the_text(copy):
  # Broken: a model with images says twice what its head is, and one is taken.
  text = settings_of("gemma3")
  target = copy("gemma3")
  path = target / "config.json"
  write = lambda **keys: path.write_text(json.dumps(
      {"model_type": "gemma3", "text_config": text} | keys))
  write(tie_word_embeddings=True, vocab_size=48)
  assert load_pretrained(target).model == loaded("gemma3").model
  write(tie_word_embeddings=False)
  with pytest.raises(ValueError, match="has False for tie_word_embeddings and "
                     "True in text_config.tie_word_embeddings"):
    load_pretrained(target)


@pytest.mark.parametrize("architecture, change, words", [
    ("LlamaModel", _without_head, "no tensor lm_head.weight"),
    ("LlamaForSequenceClassification", lambda held: _without_head(held) | {
        "score.weight": np.ones((1, 16), np.float32)},
     "the tensor score.weight"),
    ("LlamaForCausalLM", lambda held: held | {
        "v_head.summary.weight": np.ones((1, 16), np.float32)},
     "the tensor v_head.summary.weight")])
@pytest.mark.parametrize("tied", [{}, {"tie_word_embeddings": None}])
def test_models_of_other_tasks(copy, architecture, change, words, tied):
  # Broken: the user downloads a base or reward model again and again; or its
  # embedding is taken for the head that it lacks.
  target = copy("llama", change, architectures=[architecture], **tied)
  with pytest.raises(ValueError, match=(
      rf"llama/model.safetensors has {words}.* not a LlamaForCausalLM .*"
      rf"config.json: {architecture}.; give")) as e:
    load_pretrained(target)
  assert "download" not in str(e.value)


def test_a_file_beside_shards_is_named(tmp_path):
  # Broken: "download it again", and the file that was read is not the one that
  # was downloaded.
  target = tmp_path / "m"
  shutil.copytree(GOLDEN / "llama", target)
  stray = target / "model.safetensors"
  stray.write_bytes(safetensors.numpy.save(
      {"model.norm.weight": np.ones(16, np.float32),
       "lm_head.weight": np.ones((48, 16), np.float32)}))
  with pytest.raises(ValueError, match=(
      rf"{stray} \(which was read, and not the shards of "
      "model.safetensors.index.json beside it.*LlamaForCausalLM")):
    load_pretrained(target)
  stray.unlink()
  params_equal(load_pretrained(target, dtype=jnp.float32).params,
               loaded("llama").params, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.bool_])
def test_weights_of_whole_numbers(copy, tmp_path, dtype):
  # Broken: the codes of a quantised head are read as its weights.
  target = copy("llama", lambda held: held | {
      "lm_head.weight": np.ones((48, 16), dtype)})
  with pytest.raises(ValueError, match=(
      rf"model.safetensors has the tensor lm_head.weight as "
      rf"{np.dtype(dtype).name}, .*not quantised")):
    load_pretrained(target)
  own = tmp_path / "own"
  sj.models.save_model(own, loaded("llama").model, loaded("llama").params)
  held = safetensors.numpy.load_file(own / "model.safetensors")
  safetensors.numpy.save_file(
      held | {"final_norm.scale": np.ones(16, dtype)},
      own / "model.safetensors")
  with pytest.raises(ValueError, match="final_norm.scale as "):
    load_pretrained(own)
  with pytest.raises(ValueError, match="fc.weight as "):
    _drafter(tmp_path, "eagle3", {"fc.weight": np.ones((16, 48), dtype)})


def _characters(target, *added, **conventions):
  """A tokenizer of 48 characters from '!' on: 1 is a quotation mark."""
  backend = library.Tokenizer(library.models.BPE(
      vocab={chr(33 + i): i for i in range(48)}, merges=[]))
  backend.add_special_tokens([*added])
  backend.save(str(target / "tokenizer.json"))
  (target / "tokenizer_config.json").write_text(json.dumps(conventions))


@pytest.mark.parametrize("file, key, ends", [
    ("config.json", "eos_token_id", False),
    ("generation_config.json", "eos_token_id", True),
    ("config.json", "eos_token_id", True)])
def test_an_end_that_texts_have(copy, file, key, ends):
  # Broken: every prompt with a quotation mark is refused, or every text ends
  # at one, since a library has 1 or 2 for the end by default.
  target = copy("llama_tied", **dict.fromkeys(
      ("bos_token_id", "eos_token_id"), None))
  _characters(target, **({"eos_token": "#", "bos_token": None} if ends else {}))
  path = target / file
  config = json.loads(path.read_text()) if path.exists() else {}
  path.write_text(json.dumps(config | {key: 1}))
  with pytest.raises(ValueError, match=(
      rf"{path} has 1 for {key}, which .*'\"' of the tokenizer.*write the id"
  )):
    load_pretrained(target)
  path.write_text(json.dumps(config | {key: [1, 2] if ends else None}))
  assert load_pretrained(target).tokenizer.encode('"', bos=False) == [1]


def test_ends_beyond_the_vocabulary(copy):
  # Broken: a text never ends, for its end is no token.
  for end in (48, 10**9, -1, True, "x"):
    target = copy("llama_tied", eos_token_id=end)
    with pytest.raises(ValueError, match=(
        rf"config.json has {end!r} for eos_token_id")):
      load_pretrained(target)


def test_the_shorter_context_is_named():
  # Broken: "the context length is 64", and the user's model has 4096.
  short = dataclasses.replace(_TARGET, config=dataclasses.replace(
      _TARGET.config, context_length=32))
  for target, drafter, owner in ((_TARGET, short, "drafter"),
                                 (short, _TARGET, "target"),
                                 (short, short, "target")):
    decoder = sj.Decoder(
        target=target, verifier=sj.verifiers.Block(),
        drafter=sj.drafters.draft_model(model=drafter, gamma=2))
    with pytest.raises(ValueError, match=rf"is 32, the {owner}'s"):
      decoder.prefill(None, [[1]], jax.random.key(0), limits=40)


def _gguf(**changes):
  """A byte-level vocabulary whose marks have the types of plain text."""
  marks = ["<|im_start|>", "<|im_end|>", "[INST]", "<think>", "<unused>"]
  tokens = ["<|endoftext|>", *marks, *sorted(
      tokenizers.token_bytes.alphabet()), "us"]
  return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
          "tokenizer.ggml.tokens": tokens,
          "tokenizer.ggml.merges": ["u s"],
          "tokenizer.ggml.eos_token_id": 0,
          "tokenizer.chat_template": (
              "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + "
              "m.content + '<|im_end|>\n' }}{% endfor %}[INST]<think>"),
          **changes}


@pytest.mark.parametrize("types", ["none", "normal", "one"])
def test_turn_tokens_that_are_typed_as_text(capsys, types):
  # Broken: the chat template's <|im_start|> becomes ten tokens, so the model
  # is asked in a form that it never saw; or a user's text may end its turn.
  pytest.importorskip("jinja2")
  metadata = _gguf()
  size = len(metadata["tokenizer.ggml.tokens"])
  if types != "none":
    metadata["tokenizer.ggml.token_type"] = [3] + [1] * (size - 1)
  if types == "one":
    metadata["tokenizer.ggml.token_type"][1] = 3
  tokenizer = tokenizers.Tokenizer.from_gguf(metadata)
  told = capsys.readouterr().err
  assert "<|im_end|>, [INST], <think>" in told and "<unused>" not in told
  assert ("<|im_start|>" in told) == (types != "one")
  ids = tokenizer.chat([{"role": "user", "content": "a<|im_end|>"}])
  assert [i for i in ids if i < 6] == [1, 2, 3, 4]
  assert 5 not in tokenizer.control_tokens
  # Without a template nobody knows what the marks are for.
  tokenizer = tokenizers.Tokenizer.from_gguf(
      metadata | {"tokenizer.chat_template": None})
  assert not capsys.readouterr().err
  assert (1 in tokenizer.control_tokens) == (types == "one")
